"""How much longer the user's like jobs ran that lasted as long as this one has: what is known of a running job.

Here belong features of a job at a moment of its run that are not there at its submit; not those that are
(`features/jobs.py`), and not what is forecast from them (`models/time_left.py`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from features.job_history import JobHistory, JobTable
from features.job_likeness import Likeness, survivors_left
from features.jobs import FEATURES, KERNEL_LEVELS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LOOKED_AT = 256  # of the user's newest ended jobs
_LAST_RUNS = [FEATURES.index(name) for name in ("user_last1", "key_last1")]


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
    requests = [np.log(table.limit_s), np.log(table.width), np.log1p(np.maximum(table.memory_mib, 0.0))]
    gaps = np.concatenate([np.stack(requests, axis=1), X[:, _LAST_RUNS].astype(np.float64)], axis=1)
    labels = np.stack([table.group("family"), table.group("queue")], axis=1)
    index = history.index("user", "run")
    first, last = index.before(table.group("user"), moments)
    asked = Likeness(gaps, labels, table.submit)
    return survivors_left(
        asked, history.likeness, index.rows, first, last, history.table.runtime_s, elapsed_s, KERNEL_LEVELS, LOOKED_AT
    )
