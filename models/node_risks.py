"""Risks of all nodes at a moment, with reasons in words: the champion's where there is one, else climatology's.

Here belongs putting forecasts into rows of `out_node_risks`; not the forecaster (`models/node_failure.py`), and no
reading or writing of tables.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import UTC, datetime

import numpy as np
import polars as pl

from features import xids
from features.cleaning_counters import counter_deltas
from models.fault_history import DAY_S, HOUR_S, FaultHistory
from models.node_failure import CLIMATOLOGY_VERSION, HORIZONS_S, NodeFailureForecaster, baseline
from models.registry import Registry, RegistryError

_log = logging.getLogger(__name__)

TASK = "node_failure"
_COUNTERS = {
    "ecc_uncorrected_total": "uncorrected ECC errors",
    "remapped_rows_total": "remapped memory rows",
    "nvlink_error_total": "NVLink errors",
}
NVLINK_MIN = 100.0  # fewer in a week are everyday life


def forecast_nodes(
    registry: Registry | None,
    nodes: pl.DataFrame,
    faults: pl.DataFrame,
    signs: pl.DataFrame | None,
    now: datetime,
) -> pl.DataFrame:
    """Forecast every node of the inventory.

    Args:
        registry: The cluster's registry; None: climatology answers.
        nodes: Rows of `core_nodes`.
        faults: Rows of `core_faults`; later ones than `now` change nothing.
        signs: Rows of `core_gpu_hours` of the last week, for reasons, and `driver_version` where known, with which
            counters begin anew; None: none known.
        now: The moment, UTC.

    Returns:
        `node`, `p_1h`, `p_24h`, `p_7d`, `reasons` (separated by semicolons) and `model_version`, one row per node.
    """
    names = nodes["node"].unique().sort().to_list()
    known = faults.filter(pl.col("start_time") <= now) if faults.height else faults
    history = FaultHistory(known, names)
    if not known.height:
        history.since = now.timestamp()
    forecaster = _champion(registry)
    codes = np.array([history.nodes.index(name) for name in names], dtype=np.int64) if names else np.zeros(0, np.int64)
    at = np.full(len(codes), now.timestamp())
    if forecaster is None:
        p, version = baseline("climatology", history, codes, at), CLIMATOLOGY_VERSION
    else:
        p, version = forecaster.forecast(history, codes, at), forecaster.version
    seen = _signs(signs)
    frame = {"node": names} | {name: p[:, i] for i, name in enumerate(HORIZONS_S)}
    return pl.DataFrame(frame, schema_overrides={"node": pl.String}).with_columns(
        pl.Series("reasons", [
            "; ".join([*fault_reasons(history, int(code), now.timestamp()), *seen.get(name, [])])
            for code, name in zip(codes, names, strict=True)
        ], dtype=pl.String),
        pl.lit(version).alias("model_version"),
    )  # fmt: skip


def _champion(registry: Registry | None) -> NodeFailureForecaster | None:
    if registry is None:
        return None
    try:
        if registry.champion(TASK) is None:
            return None
        loaded = registry.load(TASK, fallback=True, read=NodeFailureForecaster.from_files)
        if loaded.fallback_reason:
            _log.error("%s: %s serves in place of the champion: %s", TASK, loaded.version, loaded.fallback_reason)
    except RegistryError as error:
        _log.error("%s: climatology serves, no champion can be used: %s", TASK, error)
        return None
    loaded.model.version = loaded.version
    return loaded.model


def fault_reasons(history: FaultHistory, node: int, at_s: float) -> list[str]:
    """What a node's record says, most telling first."""
    code, at = np.array([node]), np.array([at_s])
    past = int(history.before(code, at)[0])
    total = int(history.count(code, at)[0])
    if not total:
        return []
    last = past - 1
    kind = f" ({history.kind[last]})" if history.kind[last] else ""
    out = []
    if history.end[last] > at_s:
        out.append(f"in fault since {datetime.fromtimestamp(history.start[last], UTC):%Y-%m-%d %H:%M} UTC{kind}")
    else:
        out.append(f"back in service for {_span(at_s - history.end[last])} after a fault{kind}")
    month = int(history.count(code, at, 30 * DAY_S)[0])
    if month >= 2:
        out.append(f"{month} faults in 30 days")
    elif total >= 3:
        out.append(f"{total} faults on record")
    return out


def _span(seconds: float) -> str:
    if seconds < 2 * HOUR_S:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / HOUR_S:.0f} h" if seconds < 2 * DAY_S else f"{seconds / DAY_S:.0f} days"


def _signs(signs: pl.DataFrame | None) -> dict[str, list[str]]:
    """What the last week's counters and codes say of each node."""
    if signs is None or not signs.height:
        return {}
    out: dict[str, list[str]] = {}
    ordered = signs.sort("ts")
    breaks = [name for name in ("driver_version",) if name in ordered.columns]
    for name, words in _COUNTERS.items():
        if name not in ordered.columns:
            continue
        least = NVLINK_MIN if name == "nvlink_error_total" else 1.0
        grown = pl.col(f"{name}_increase")
        sums = (
            counter_deltas(ordered, [name], keys=("node", "gpu_uuid"), break_on=breaks)
            .group_by("node")
            .agg(grown.sum())
        )
        for node, total in sums.filter(grown >= least).sort("node").iter_rows():
            out.setdefault(node, []).append(f"{total:.0f} new {words} in a week")
    if "xid_last" in ordered.columns:
        codes = ordered.filter(pl.col("xid_last").is_in(list(xids.HARDWARE)))
        for node, found in codes.group_by("node").agg(pl.col("xid_last").unique().sort()).sort("node").iter_rows():
            out.setdefault(node, []).append(f"XID {_join(found)} in a week")
    if "is_thermal_slowdown" in ordered.columns:
        hot = ordered.group_by("node").agg(pl.col("is_thermal_slowdown").cast(pl.Int64).sum().alias("n"))
        for node, n in hot.filter(pl.col("n") >= 3).sort("node").iter_rows():
            out.setdefault(node, []).append(f"thermal slowdown in {n} GPU-hours of a week")
    return out


def _join(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in values)
