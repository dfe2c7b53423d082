"""Months of a simulated fleet's faults and the signs before them, without its telemetry.

The faults are those of `faults.py`, node by node, with their warnings; beside them errors that lead nowhere, as often
as a real fleet's forewarnings were false. For judging forecasts of faults over times that telemetry would take
days to simulate. What a warning does to a GPU's counters is up to `course.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import polars as pl

from simulator.faults import Hazards
from simulator.hardware import GPUS_PER_NODE
from simulator.streams import Stream, generator

# Lablup, 63 nodes of 8 B200: 0.84 false forewarnings a day in all.
FALSE_PER_NODE_DAY = 0.84 / 63


def fault_record(
    nodes: int, days: float, seed: int, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)
) -> tuple[pl.DataFrame, pl.DataFrame, list[str]]:
    """Faults, signs and names of the nodes of a fleet.

    Args:
        nodes: Nodes of `GPUS_PER_NODE` GPUs.
        days: Length of the record.
        seed: Of everything.
        start: UTC.

    Returns:
        Faults in columns of `core_faults` (`end_time` null when it lies beyond the record), signs with `ts`, `node`,
        `gpu_uuid`, `sign`, `amount`, `xid`, and the nodes' names.
    """
    hazards = Hazards(nodes, seed, 1.0)
    begin, end = start.timestamp(), start.timestamp() + days * 86_400
    faults, signs = [], []
    for node in range(nodes):
        after, number = begin, 0
        while (fault := hazards.next(node, number, after)) is not None and fault.at < end:
            faults.append(
                {
                    "cluster": "sim", "node": f"n{node}", "gpu_uuid": _uuid(fault.gpu), "kind": fault.kind,
                    "xid": fault.xid, "start_time": _time(fault.at),
                    "end_time": _time(fault.repaired_at) if fault.repaired_at < end else None,
                }
            )  # fmt: skip
            for at, what, count in fault.warnings:
                signs += _signs(node, _uuid(fault.gpu), at, what, count)
            after, number = fault.repaired_at, number + 1
        rng = generator(seed, Stream.NODE_FAULT, node, 0xFFFFFE)
        for at in np.sort(rng.uniform(begin, end, rng.poisson(FALSE_PER_NODE_DAY * days))):
            gpu = node * GPUS_PER_NODE + int(rng.integers(GPUS_PER_NODE))
            what = "ecc" if rng.random() < 0.7 else "nvlink"
            count = int(rng.integers(1, 3)) if what == "ecc" else int(rng.integers(5, 400))
            signs += _signs(node, _uuid(gpu), float(at), what, count)
    types = {"ts": pl.Datetime("us", "UTC"), "amount": pl.Float64, "xid": pl.Int32}
    table = pl.DataFrame(faults, schema_overrides={"xid": pl.Int32, "end_time": pl.Datetime("us", "UTC")})
    return table, pl.DataFrame(signs, schema_overrides=types).sort("ts"), [f"n{i}" for i in range(nodes)]


def _signs(node: int, gpu: str, at: float, what: str, count: int) -> list[dict]:
    """What `course.py` makes of a warning: an ECC error remaps a row and says so (XID 63)."""
    row = {"ts": _time(np.ceil(at / 60) * 60), "node": f"n{node}", "gpu_uuid": gpu}
    if what == "nvlink":
        return [{**row, "sign": "nvlink", "amount": float(count), "xid": None}] if count >= 10 else []
    return [
        {**row, "sign": "ecc", "amount": float(count), "xid": None},
        {**row, "sign": "remap", "amount": float(count), "xid": None},
        {**row, "sign": "xid", "amount": 1.0, "xid": 63},
    ]


def _uuid(gpu: int) -> str:
    return f"GPU-{gpu}" if gpu >= 0 else ""


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(float(seconds), UTC)
