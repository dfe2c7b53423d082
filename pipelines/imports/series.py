"""From samples of exporters' series to frames: what readers of expositions and of Prometheus answers share."""

from __future__ import annotations

import numpy as np

from features.vocabulary import COLUMNS
from pipelines.imports import Piece, Task
from pipelines.sources.wide import UP, Index, Samples, drop_absurd_times, to_frames

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
        task.report.drop("the time is before 2000 or ahead of now", lost, example=example)
    samples = _with_numbers(samples, index, task)
    frames = to_frames(samples, index, task.cluster)
    found = {table: getattr(frames, name, None) for name, table in _TABLES.items()}
    return {table: frame for table, frame in found.items() if frame is not None and not frame.is_empty()}


def _with_numbers(samples: Samples, index: Index, task: Task) -> Samples:
    """Samples without NaN in flags and whole numbers, where it would be lost on the way; it is counted.

    In quantities with a fraction it stays: cleaning counts it.
    """
    bad = np.isnan(samples.values)
    if not bad.any():
        return samples
    owner = np.repeat(np.arange(len(samples.counts)), samples.counts)
    for number in np.unique(samples.name[owner[bad]]):
        variant = index.names.variants[number]
        columns = ["is_up"] if variant.label == UP else [row.column for row in variant.rows]
        whole = [name for name in columns if name in COLUMNS and not COLUMNS[name].dtype.is_float()]
        here = bad & (samples.name[owner] == number)
        if not whole:
            bad &= ~here
        for column in whole:
            first = index.entities[samples.entity[owner[here]][0]]
            task.report.null(column, "not_a_number", int(here.sum()), example=f"{variant.label} of {first.node}")
    kept = ~bad
    counts = np.bincount(owner[kept], minlength=len(samples.counts))
    return Samples(samples.name, samples.entity, counts, samples.ts_ms[kept], samples.values[kept])
