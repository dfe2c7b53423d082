"""Cleaning of samples: what cannot be true becomes null and is counted; it never becomes zero and never stops anything.

Pure functions from `raw_` frames to `core_` frames plus a count of what was wrong. Entry points only: single values are
judged in `cleaning_bounds.py`, rows in `cleaning_rows.py`, MIG instances in `cleaning_mig.py`, courses over time in
`cleaning_series.py`, counters of ports in `cleaning_ports.py`; reasons stand in `cleaning_findings.py`.
"""

from __future__ import annotations

from datetime import datetime

import polars as pl

from features.cleaning_bounds import bounded, consistent, told_flags
from features.cleaning_counters import counter_deltas, health_minutes
from features.cleaning_energy import without_frozen_energy
from features.cleaning_findings import QUALITY_SCHEMA, REASONS, quality
from features.cleaning_gaps import count_gaps
from features.cleaning_mig import merge_instances
from features.cleaning_ports import PORT, port_rates
from features.cleaning_rows import keyed, unique
from features.cleaning_series import Earlier, judged
from features.vocabulary import (
    GPU_HEALTH,
    GPU_KEYS,
    GPU_QUANTITIES,
    LINK_QUANTITIES,
    NODE_QUANTITIES,
    PORT_RATES,
    PORT_STATES,
    conform,
)

__all__ = [
    "QUALITY_SCHEMA", "REASONS", "believable_gpu_samples", "clean_gpu_samples", "clean_health_samples",
    "clean_link_samples", "clean_node_samples", "clean_port_samples", "counter_deltas", "health_minutes",
]  # fmt: skip

_GPU = ("cluster", "node", "gpu_uuid")


def clean_gpu_samples(
    frame: pl.DataFrame,
    now: datetime | None = None,
    *,
    history: pl.DataFrame | None = None,
    earlier: Earlier | None = None,
    revised: list[pl.DataFrame] | None = None,
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Samples that may be believed.

    Args:
        frame: Any subset of the columns of `raw_gpu_samples`, keys among them; one row per GPU and time, or more.
        now: When given, rows more than 5 minutes later than this are dropped, and nodes whose clocks are off and
            samples that are missing are counted; None: the rows are of a past of which nothing more is known.
        history: Rows of `raw_gpu_samples` of some minutes before the frame. They only help to judge it: values that
            froze or counters that stuck before it began, boards that are new. None: the frame is judged by itself.
        earlier: Gives rows of `raw_gpu_samples` of five minutes before those for some GPUs, a frame of `cluster`,
            `node` and `gpu_uuid`; asked only for GPUs whose values rest from the first row on.
        revised: Takes the keys of rows before the frame that are found frozen now.

    Returns:
        A frame in the columns of `core_gpu_samples`, one row a key, sorted by GPU and time; and what was wrong:
        `column_name`, `reason` (one of `REASONS`), `count`, `example` (cluster/node/GPU where it was seen). Rows are
        dropped only for a missing key, an impossible time or as duplicates; duplicates are merged by the largest
        value, MIG instances as `cleaning_mig` says.

    Raises:
        ValueError: A key column is missing or a column is not of the table.
    """
    findings: list[pl.DataFrame] = []
    samples = _believable(frame, now, findings)
    past = None if history is None else _believable(history, None, [])
    before = None if earlier is None else lambda gpus: _believable(earlier(gpus), None, [])
    return judged(samples, past, findings, earlier=before, revised=revised, gaps=now is not None), quality(findings)


def believable_gpu_samples(frame: pl.DataFrame, now: datetime | None = None) -> pl.DataFrame:
    """Samples each of which may be believed by itself, for who judges their course otherwise (`cleaning_live.py`).

    Args:
        frame: As for `clean_gpu_samples`.
        now: As there.

    Returns:
        A frame in the columns of `core_gpu_samples`, one row a key.

    Raises:
        ValueError: A key column is missing or a column is not of the table.
    """
    return _believable(frame, now, []).select(*GPU_KEYS, *GPU_QUANTITIES)


def _believable(frame: pl.DataFrame, now: datetime | None, findings: list[pl.DataFrame]) -> pl.DataFrame:
    """One row a GPU and time, each value judged by itself."""
    samples = conform(frame, "raw_gpu_samples")
    samples = keyed(samples, _GPU, now, findings)
    samples = bounded(told_flags(samples, findings), GPU_QUANTITIES, findings)
    samples = consistent(samples, findings)
    samples = merge_instances(samples, findings)
    return unique(samples, (*_GPU, "ts"), findings)


def clean_node_samples(frame: pl.DataFrame, now: datetime | None = None) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The same for node samples: `core_node_samples` columns in and out."""
    samples = conform(frame, "core_node_samples")
    findings: list[pl.DataFrame] = []
    samples = keyed(samples, ("cluster", "node"), now, findings)
    samples = bounded(samples, NODE_QUANTITIES, findings)
    samples = unique(samples, ("cluster", "node", "ts"), findings).sort("node", "ts")
    if now is not None:
        count_gaps(samples, ("cluster", "node"), findings)
    return samples, quality(findings)


def clean_health_samples(
    frame: pl.DataFrame,
    now: datetime | None = None,
    *,
    history: pl.DataFrame | None = None,
    earlier: Earlier | None = None,
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The same for counters and states of GPUs: `core_gpu_health` columns in and out.

    Counters keep their values over resets (`counter_deltas` gives their growth). `health_minutes` brings the rows down
    to one a minute. The rows that `earlier` gives are cleaned ones.
    """
    findings: list[pl.DataFrame] = []
    samples = _believable_health(frame, now, findings)
    past = None if history is None else _believable_health(history, None, [])
    return without_frozen_energy(samples, findings, history=past, earlier=earlier), quality(findings)


def _believable_health(frame: pl.DataFrame, now: datetime | None, findings: list[pl.DataFrame]) -> pl.DataFrame:
    samples = conform(frame, "core_gpu_health")
    samples = keyed(samples, _GPU, now, findings)
    samples = bounded(told_flags(samples, findings), GPU_HEALTH, findings)
    return unique(samples, (*_GPU, "ts"), findings)


def clean_link_samples(frame: pl.DataFrame, now: datetime | None = None) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The same for single NVLinks: `core_link_samples` columns in and out."""
    samples = conform(frame, "core_link_samples")
    findings: list[pl.DataFrame] = []
    samples = keyed(samples, (*_GPU, "link"), now, findings)
    samples = bounded(told_flags(samples, findings), LINK_QUANTITIES, findings)
    samples = unique(samples, (*_GPU, "link", "ts"), findings)
    return samples.sort("gpu_uuid", "link", "ts"), quality(findings)


def clean_port_samples(frame: pl.DataFrame, now: datetime | None = None) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rates of network ports from their counters.

    Args:
        frame: Any subset of the columns of `raw_port_samples`, keys among them. The sample before the first one wanted
            should be in it: rates are over the interval that ends at a sample.
        now: As for `clean_gpu_samples`.

    Returns:
        A frame in the columns of `core_port_samples`, one row a key, sorted by port and time; and what was wrong, as
        `clean_gpu_samples` gives it.

    Raises:
        ValueError: A key column is missing or a column is not of the table.
    """
    samples = conform(frame, "raw_port_samples")
    findings: list[pl.DataFrame] = []
    samples = keyed(samples, PORT, now, findings)
    samples = bounded(told_flags(samples, findings), (*PORT_RATES, *PORT_STATES), findings)
    samples = unique(samples, (*PORT, "ts"), findings)
    return port_rates(samples, findings, gaps=now is not None).sort("node", "device", "port", "ts"), quality(findings)
