"""When a bottleneck really happened: onsets and their ends by a written rule, from recorded samples.

Here belong the classes, their scopes and the rows of labels; each rule stands in a module of its own, spans and what is
unknown of them in `features/label_spans.py`, distances to limits in `features/conditions.py`. Labels may look at all of
a job, forecasts never see them before they happened. Training, backtests and the scoring of hints all use these.

| class | scope | set when |
|---|---|---|
| `thermal_throttle` | GPU | a thermal slowdown reason is active, or the margin to slowdown is ≤ 0 °C (only where the exporter gives neither: core temperature ≥ the model's slowdown temperature) |
| `power_throttle` | GPU | the power brake is on; or power-capped with a clock under 80 % of what the job is used to there |
| `nvlink_saturation` | GPU | sent or received over NVLink ≥ 90 % of what the model achieves, or under 70 % of gang peers at the same time while those talk no more than usual; and, where steps are known, step time > 1.15 × the job's own. Without steps the second half also needs the GPU to stand under 70 % of its own usual share of its peers, for ranks of a pipeline differ by nature |
| `memory_exhaustion` | GPU | total − reserved − used < 1 GiB after growth beyond the job's own plateau by 2 % of the device; or the job failed while its memory was growing so |
| `host_memory` | node | available host memory under 2 % of the whole after a fall by as much below the node's own median; or the kernel killed for memory |
| `fabric_congestion` | port | load ≥ 90 % of its speed, or marks, notifications, retransmissions or waits above a floor and 3 × the port's own median; and, where steps are known, step time > 1.15 × the job's own |
| `straggler` | rank, or GPU | step time > 1.3 × the gang's median for 3 steps running; nothing where members report no steps of their own |
| `shortage` | queue | pending GPUs rise above idle ones |

Links that rest during a checkpoint clear only when the job's steps are fast again.
"""  # noqa: E501 - a table cell is one line

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.classes import GPU_CLASSES
from features.history import SampleHistory
from features.label_fabric import fabric_states, port_series
from features.label_hosts import host_states
from features.label_memory import failed_while_growing
from features.label_nvlink import slower_than_peers, through_pauses
from features.label_ranks import rank_series
from features.label_spans import CLEAR, SET, UNKNOWN, Runs, Series, excluded_rows, runs
from features.occupancy import shortage_states
from features.thresholds import ThresholdBook
from features.vocabulary import conform, schema

TABLE = "feat_labels"
LABEL_CLASSES = (*GPU_CLASSES, "host_memory", "fabric_congestion", "shortage")
SCOPES = (
    "gpu",
    "node",
    "port",
    "rank",
    "queue",
)  # of labels; `scope_id`: UUID, node, node/device/port, job/rank, queue


def states(
    history: SampleHistory,
    bottleneck_class: str,
    book: ThresholdBook,
    excluded: pl.DataFrame | None = None,
) -> NDArray[np.int8]:
    """Whether the condition of a class of GPUs was set at every sample: `SET`, `CLEAR` or `UNKNOWN`.

    Args:
        history: The samples.
        bottleneck_class: One of `GPU_CLASSES`.
        book: Limits of the nodes.
        excluded: Spans in which a node was drained, silenced or acted on, as of `label_spans.excluded_rows`.

    Returns:
        Shape (samples,).

    Raises:
        ValueError: The class is none of GPUs.
    """
    if bottleneck_class not in GPU_CLASSES:
        raise ValueError(f"no class {bottleneck_class!r} of GPUs; classes: {', '.join(GPU_CLASSES)}")
    distance = history.distance(bottleneck_class)
    with np.errstate(invalid="ignore"):
        state = np.where(np.isnan(distance), UNKNOWN, (distance <= 0).astype(np.int8))
    if bottleneck_class == "nvlink_saturation":
        state = through_pauses(history, book, state)
        state[slower_than_peers(history, book) & (state == CLEAR)] = SET
    state[excluded_rows(excluded, bottleneck_class, history.node_names, history.node, history.ts)] = UNKNOWN
    return state


def label_bottlenecks(
    samples: pl.DataFrame | SampleHistory,
    jobs: pl.DataFrame | None,
    thresholds: ThresholdBook,
    *,
    excluded: pl.DataFrame | None = None,
    node_samples: pl.DataFrame | None = None,
    ports: pl.DataFrame | None = None,
) -> pl.DataFrame:
    """Onsets in recorded samples; of ranks and queues tell `label_ranks` and `label_shortages`.

    A class whose columns are absent or null has no rows: its state is unknown, never clear. Spans that were set when
    first seen, or that vanish from sight before they have held, are kept as censored rows.

    Args:
        samples: Rows of `core_gpu_samples`, any subset of its quantities; or their history.
        jobs: Rows of `core_jobs`, to tell jobs that failed; None: not known.
        thresholds: Limits of the nodes.
        excluded: Spans in which nothing may be concluded, as of `label_spans.excluded_rows`.
        node_samples: Rows of `core_node_samples`, for host memory.
        ports: Rows of `core_port_samples`, for the fabric.

    Returns:
        Rows of `feat_labels`, by onset time.
    """
    history = samples if isinstance(samples, SampleHistory) else SampleHistory(samples, thresholds)
    parts = [pl.DataFrame(schema=schema(TABLE))]
    for name in GPU_CLASSES:
        state = states(history, name, thresholds, excluded)
        found = runs(history, state)
        parts.append(_gpu_rows(history, name, found))
        if name == "memory_exhaustion" and jobs is not None:
            last, onset_s = failed_while_growing(history, state, found, jobs)
            frame = _frame(history, name, last, onset_s, np.full(len(last), np.nan))
            parts.append(frame.with_columns(pl.lit(False).alias("is_censored")))
    if node_samples is not None:
        parts.append(series_rows(*host_states(node_samples, thresholds), "host_memory", "node", excluded))
    if ports is not None:
        state, series = fabric_states(*port_series(ports), thresholds, history)
        parts.append(series_rows(series, state, "fabric_congestion", "port", excluded))
    return _joined(parts)


def label_ranks(progress: pl.DataFrame, *, excluded: pl.DataFrame | None = None) -> pl.DataFrame:
    """Onsets of `straggler` of ranks that report step times of their own.

    Args:
        progress: Rows of `core_job_progress`.
        excluded: As of `label_bottlenecks`; only spans of all nodes concern a rank whose node is not known.

    Returns:
        Rows of `feat_labels`, by onset time.
    """
    return _joined([series_rows(*rank_series(progress), "straggler", "rank", excluded)])


def label_shortages(occupancy: pl.DataFrame, *, excluded: pl.DataFrame | None = None) -> pl.DataFrame:
    """Onsets of `shortage` of queues.

    Args:
        occupancy: Rows with `ts`, `queue`, `pending_gpu_num`, `idle_gpu_num`, and `cluster` where it is known.
        excluded: As of `label_bottlenecks`; only spans of all nodes concern a queue.

    Returns:
        Rows of `feat_labels`, by onset time.
    """
    return _joined([series_rows(*shortage_states(occupancy), "shortage", "queue", excluded)])


def series_rows(
    series: Series, state: NDArray[np.int8], bottleneck_class: str, scope: str, excluded: pl.DataFrame | None = None
) -> pl.DataFrame:
    """Rows of `feat_labels` of one class of things that are no GPUs.

    Args:
        series: The samples.
        state: State at each.
        bottleneck_class: The class.
        scope: One of `SCOPES`.
        excluded: As of `label_bottlenecks`.
    """
    codes = {name: code for code, name in enumerate(dict.fromkeys(series.nodes))}
    node = np.array([codes[name] for name in series.nodes], dtype=np.int64)[series.gpu]
    state = state.copy()
    state[excluded_rows(excluded, bottleneck_class, list(codes), node, series.ts)] = UNKNOWN
    found = runs(series, state)
    keep = found.has_held | ~found.is_known
    rows, end = found.first[keep], found.end[keep]
    ids = [series.names[code] for code in series.gpu[rows]]
    frame = pl.DataFrame(
        {
            "cluster": [series.cluster] * len(rows), "scope": [scope] * len(rows), "scope_id": ids,
            "node": [series.nodes[code] for code in series.gpu[rows]],
            "gpu_uuid": ids if scope == "gpu" else [None] * len(rows),
            "job_id": [series.jobs[row] for row in rows],
            "bottleneck_class": [bottleneck_class] * len(rows), "onset_time": _times(series.ts[rows]),
            "clear_time": _times(np.where(end >= 0, series.ts[end], np.nan)) if len(series.ts) else _times(np.zeros(0)),
            "is_censored": ~(found.is_known & found.has_held)[keep],
        },
        schema_overrides=dict.fromkeys(("cluster", "scope", "scope_id", "node", "gpu_uuid", "job_id",
                                        "bottleneck_class"), pl.String),
    )  # fmt: skip
    return conform(frame, TABLE)


def _gpu_rows(history: SampleHistory, name: str, found: Runs) -> pl.DataFrame:
    keep = found.has_held | ~found.is_known
    rows, end = found.first[keep], found.end[keep]
    frame = _frame(history, name, rows, history.ts[rows], np.where(end >= 0, history.ts[end], np.nan))
    return frame.with_columns(pl.Series("is_censored", ~(found.is_known & found.has_held)[keep]))


def _joined(parts: list[pl.DataFrame]) -> pl.DataFrame:
    labels = pl.concat([conform(part, TABLE) for part in parts])
    key = ["scope", "scope_id", "bottleneck_class", "onset_time"]
    return labels.unique(key, keep="first").sort("onset_time", "scope_id")


def _times(seconds: NDArray[np.float64]) -> pl.Series:
    micros = pl.Series(seconds, dtype=pl.Float64).fill_nan(None) * 1e6
    return micros.round().cast(pl.Int64).cast(pl.Datetime("us", "UTC"))


def _frame(
    history: SampleHistory,
    name: str,
    rows: NDArray[np.int64],
    onset_s: NDArray[np.float64],
    clear_s: NDArray[np.float64],
) -> pl.DataFrame:
    job_names = np.array([*history.job_ids, None], dtype=object)
    uuids = pl.Series([history.uuids[i] for i in history.gpu[rows]], dtype=pl.String)
    return pl.DataFrame(
        {
            "cluster": pl.Series([history.cluster] * len(rows), dtype=pl.String),
            "scope": pl.Series(["gpu"] * len(rows), dtype=pl.String),
            "scope_id": uuids,
            "node": pl.Series([history.node_names[i] for i in history.node[rows]], dtype=pl.String),
            "gpu_uuid": uuids,
            "job_id": pl.Series(job_names[history.job[rows]].tolist(), dtype=pl.String),
            "bottleneck_class": pl.Series([name] * len(rows), dtype=pl.String),
            "onset_time": _times(onset_s),
            "clear_time": _times(clear_s),
        }
    )
