"""How much longer the user's like jobs ran that lasted as long as this one has: what is known of a running job.

Here belong features of a job at a moment of its run that are not there at its submit; not those that are
(`features/jobs.py`), and not what is forecast from them (`models/time_left.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from features.compiled import compiled
from features.job_history import JobHistory, JobTable
from features.job_likeness import GAP_WEIGHTS, LABEL_WEIGHTS
from features.jobs import FEATURES, KERNEL_LEVELS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LOOKED_AT = 256  # of the user's newest ended jobs
_LAST_RUNS = [FEATURES.index(name) for name in ("user_last1", "key_last1")]
_MOST, _PLACE, _TIME = 3.0, 0.2 / 16, 0.3  # as in features/job_likeness.py: two jobs are alike by the same measure


def survivors(table: JobTable, history: JobHistory, moments: Ints, elapsed_s: Floats, X: NDArray[np.float32]) -> Floats:
    """Time that was left, after as long a run, of the user's like jobs that had ended by the moment.

    Args:
        table: The jobs asked about.
        history: Jobs of the cluster; what ended at the moment or later changes nothing.
        moments: Moment of each job, µs, shape (n,).
        elapsed_s: How long each has run by then, shape (n,).
        X: Their features at these moments, shape (n, len(FEATURES)).

    Returns:
        ln(seconds), at least 0, at `KERNEL_LEVELS` of those alike, weighted by likeness; NaN where none of the user's
        `LOOKED_AT` newest ended jobs ran longer. Shape (n, len(KERNEL_LEVELS)).
    """
    asked = [np.log(table.limit_s), np.log(table.width), np.log1p(np.maximum(table.memory_mib, 0.0))]
    gaps = np.concatenate([np.stack(asked, axis=1), X[:, _LAST_RUNS].astype(np.float64)], axis=1)
    labels = np.stack([table.group("family"), table.group("queue")], axis=1)
    index = history.index("user", "run")
    first, last = index.before(table.group("user"), moments)
    past, out = history.likeness, np.full((table.count, len(KERNEL_LEVELS)), np.nan)
    _weigh(
        gaps, labels, table.submit, elapsed_s, past.gaps, past.labels, past.submit, index.rows, first, last,
        history.table.runtime_s, np.asarray(KERNEL_LEVELS), GAP_WEIGHTS, LABEL_WEIGHTS, out,
    )  # fmt: skip
    return out


@compiled
def _weigh(
    gaps: Floats, labels: NDArray[np.uint64], submit: Ints, elapsed_s: Floats, past_gaps: Floats,
    past_labels: NDArray[np.uint64], past_submit: Ints, newest: Ints, first: Ints, last: Ints, runtime_s: Floats,
    levels: Floats, gap_weights: Floats, label_weights: Floats, out: Floats,
) -> None:  # fmt: skip
    weights, values = np.empty(LOOKED_AT), np.empty(LOOKED_AT)
    for i in range(len(first)):
        found, nearest = 0, np.inf
        for k in range(min(LOOKED_AT, last[i] - first[i])):
            row = newest[last[i] - 1 - k]
            left = runtime_s[row] - elapsed_s[i]
            if not left > 1e-6:
                continue
            distance = _PLACE * k + _TIME * np.log1p(max(submit[i] - past_submit[row], 0) / 1e6)
            for c in range(len(gap_weights)):
                gap = abs(past_gaps[row, c] - gaps[i, c])
                if np.isnan(gap):
                    both = np.isnan(past_gaps[row, c]) and np.isnan(gaps[i, c])
                    gap = 0.0 if both else _MOST
                distance += gap_weights[c] * min(gap, _MOST)
            for c in range(len(label_weights)):
                if past_labels[row, c] != labels[i, c]:
                    distance += label_weights[c]
            weights[found], values[found] = distance, np.log(max(left, 1.0))
            nearest = min(nearest, distance)
            found += 1
        total = 0.0
        for k in range(found):
            weights[k] = np.exp(nearest - weights[k])
            total += weights[k]
        mass, level = 0.0, 0
        for k in np.argsort(values[:found]):
            mass += weights[k]
            while level < len(levels) and mass >= levels[level] * total - 1e-12:
                out[i, level] = values[k]
                level += 1
