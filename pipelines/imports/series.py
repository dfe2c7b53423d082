"""From samples of exporters' series to frames: what readers of expositions and of Prometheus answers share."""

from __future__ import annotations

import numpy as np

from pipelines.imports import Piece, Task
from pipelines.sources.wide import Index, Samples, drop_absurd_times, to_frames

# Seconds of OpenMetrics and milliseconds of Prometheus are told apart by size: the one until 5138, the other from 1973.
_SECONDS_BELOW = 100_000_000_000
_TABLES = {
    "gpu": "raw_gpu_samples", "node": "core_node_samples", "health": "core_gpu_health", "link": "core_link_samples",
    "port": "raw_port_samples", "queue": "core_queue_samples",
}  # fmt: skip


def in_milliseconds(ts: np.ndarray) -> np.ndarray:
    """Times of lines whose unit the format leaves open, ms since the epoch."""
    return np.where(np.abs(ts) < _SECONDS_BELOW, ts * 1000, ts)


def frames_of(samples: Samples, index: Index, task: Task) -> Piece:
    """Frames of the samples whose times can be true; the others are counted as dropped."""
    before = len(samples.ts_ms)
    samples, warnings = drop_absurd_times(samples, index, task.now)
    lost = before - len(samples.ts_ms)
    if lost:
        example = warnings[0].partition(", as ")[2].partition(": is that")[0] if warnings else ""
        task.report.drop("time before 2000 or ahead of now", lost, example=example)
    frames = to_frames(samples, index, task.cluster)
    found = {table: getattr(frames, name, None) for name, table in _TABLES.items()}
    return {table: frame for table, frame in found.items() if frame is not None and not frame.is_empty()}
