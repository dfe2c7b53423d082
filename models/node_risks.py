"""Risks of nodes and GPUs at a moment, with reasons in words: the champion's where there is one, else a rule's.

Here belongs putting forecasts into rows of `out_node_risks` and `out_gpu_risks`, and ranking spares; not the forecaster
(`models/node_failure.py`), not the signals of bad hardware (`models/lemons.py`), and no reading or writing of tables.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.xids import ACTIONS, XIDS, Xid
from models.fault_history import DAY_S, HOUR_S, FaultHistory
from models.lemons import Lemon, lemons
from models.node_baseline import spoken_baseline
from models.node_failure import HORIZONS_S, NodeFailureForecaster, baseline
from models.recurrence import GPU_PRIOR
from models.registry import Registry, RegistryError

_log = logging.getLogger(__name__)

TASK = "node_failure"
# A node in one of these states is no spare: it was taken out by somebody, or answers to nobody.
_NO_SPARE = ("DRAIN", "DOWN", "MAINT", "FAIL", "FUTURE", "REBOOT", "POWERED_DOWN", "POWERING_DOWN", "NOT_RESPONDING")


@dataclass(frozen=True, slots=True)
class Risks:
    """What is forecast at a moment.

    Attributes:
        nodes: `node`, `p_1h`, `p_24h`, `p_7d`, `reasons` (separated by semicolons), `lemon_score`, `spare_rank` (null
            for a node that is no spare) and `model_version`, one row per node.
        gpus: `node`, `gpu_uuid`, `p_1h`, `p_24h`, `p_7d`, `reasons` and `model_version`, of GPUs with signs or faults
            of their own, by node.
    """

    nodes: pl.DataFrame
    gpus: pl.DataFrame


def forecast_nodes(
    registry: Registry | None,
    nodes: pl.DataFrame,
    faults: pl.DataFrame,
    signs: pl.DataFrame | None,
    now: datetime,
    *,
    states: pl.DataFrame | None = None,
    table: Mapping[int, Xid] = XIDS,
) -> Risks:
    """Forecast every node of the inventory, and its GPUs that stand out.

    Args:
        registry: The cluster's registry; None: a baseline answers, as without a champion.
        nodes: Rows of `core_nodes`.
        faults: Rows of `core_faults`; later ones than `now` change nothing.
        signs: Rows of `core_gpu_signs`, of 28 days at least; None: none known.
        now: The moment, UTC.
        states: `node`, `gpu_uuid`, `is_remap_pending`, `is_remap_failed` as they are now; None: not known.
        table: What XID codes mean and ask for.
    """
    names = nodes["node"].unique().sort().to_list()
    known = faults.filter(pl.col("start_time") <= now) if faults.height else faults
    seen = signs.filter(pl.col("ts") <= now) if signs is not None else None
    boards: dict[str, list[str]] = {}
    for node, gpu in states.select("node", "gpu_uuid").iter_rows() if states is not None else ():
        boards.setdefault(node, []).append(gpu)
    history = FaultHistory(known, names, signs=seen, gpus=boards, sizes=sizes_of(nodes))
    at_s = now.timestamp()
    if not known.height:
        history.since = at_s
    codes = np.searchsorted(np.array(history.nodes, dtype=object), np.array(names, dtype=object)).astype(np.int64)
    at = np.full(len(codes), at_s)
    forecaster = _champion(registry)
    if forecaster is None:
        rule = spoken_baseline(history, at_s)
        p, version = baseline(rule, history, codes, at), f"baseline:{rule}"
    else:
        p, version = forecaster.forecast(history, codes, at), forecaster.version
    asked = {code: ACTIONS[xid.action].lower() for code, xid in table.items()}
    judged = lemons(history, seen, states, at_s, asked)
    frame = pl.DataFrame(
        {"node": names} | {name: p[:, i] for i, name in enumerate(HORIZONS_S)}, schema_overrides={"node": pl.String}
    ).with_columns(
        pl.Series("reasons", [
            "; ".join([*_state_reasons(history, int(code), at_s), *judged[code].words]) for code in codes
        ], dtype=pl.String),
        pl.Series("lemon_score", [judged[code].score for code in codes], dtype=pl.Float64),
        pl.lit(version).alias("model_version"),
    )  # fmt: skip
    down = {name for name, is_down in zip(names, history.is_down(codes, at), strict=True) if is_down}
    rate = np.zeros(len(history.nodes))
    rate[codes] = -np.log1p(-p[:, list(HORIZONS_S).index("p_24h")]) / DAY_S
    return Risks(_ranked(frame, nodes, down), _gpus(history, forecaster, judged, names, at_s, version, rate))


def sizes_of(nodes: pl.DataFrame) -> dict[str, int]:
    """GPUs of each node, where the inventory says it."""
    if "gpus" not in nodes.columns:
        return {}
    return {name: int(gpus) for name, gpus in nodes.select("node", "gpus").drop_nulls().iter_rows() if gpus > 0}


def _ranked(frame: pl.DataFrame, nodes: pl.DataFrame, down: set[str]) -> pl.DataFrame:
    """With `spare_rank`: the least likely to fault within 24 hours first, among equals the fewest signals, by name."""
    out = set(down)
    if "state" in nodes.columns:
        state = pl.col("state").str.to_uppercase()
        no_spare = pl.any_horizontal(state.str.contains(word, literal=True) for word in _NO_SPARE)
        out |= set(nodes.filter(no_spare.fill_null(False))["node"].to_list())
    spares = frame.filter(~pl.col("node").is_in(sorted(out))).sort("p_24h", "lemon_score", "p_7d", "node")
    ranks = spares.select("node", pl.int_range(1, pl.len() + 1, dtype=pl.Int32).alias("spare_rank"))
    return frame.join(ranks, on="node", how="left", maintain_order="left")


def _gpus(
    history: FaultHistory, forecaster: NodeFailureForecaster | None, judged: list[Lemon], names: list[str],
    at_s: float, version: str, rate: NDArray[np.float64],
) -> pl.DataFrame:  # fmt: skip
    """Rows of GPUs that stand out; a rule gives each an equal part of its node's `rate`, faults per second by node."""
    own = set(names)
    rows = [
        (code, node, uuid, judged[node].gpu_words[uuid])
        for code, (node, uuid) in enumerate(history.gpus)
        if history.nodes[node] in own and uuid in judged[node].gpu_words
    ]
    gpu = np.array([row[0] for row in rows], dtype=np.int64)
    at = np.full(len(gpu), at_s)
    if forecaster is None:
        part = rate[history.gpu_node[gpu]] * GPU_PRIOR / history.gpus_per_node[history.gpu_node[gpu]]
        p = -np.expm1(-part[:, None] * np.array(list(HORIZONS_S.values())))
    else:
        p = forecaster.forecast_gpus(history, gpu, at)
    return pl.DataFrame(
        {"node": [history.nodes[row[1]] for row in rows], "gpu_uuid": [row[2] for row in rows]}
        | {name: p[:, i] for i, name in enumerate(HORIZONS_S)}
        | {"reasons": ["; ".join(row[3]) for row in rows], "model_version": [version] * len(rows)},
        schema={"node": pl.String, "gpu_uuid": pl.String, **dict.fromkeys(HORIZONS_S, pl.Float64),
                "reasons": pl.String, "model_version": pl.String},
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
        _log.error("%s: a baseline serves, no champion can be used: %s", TASK, error)
        return None
    loaded.model.version = loaded.version
    return loaded.model


def _state_reasons(history: FaultHistory, node: int, at_s: float) -> list[str]:
    """Whether a node is in fault, or since when it is back, and how often it faulted in all."""
    code, at = np.array([node]), np.array([at_s])
    total = int(history.count(code, at)[0])
    if not total:
        return []
    last = int(history.before(code, at)[0]) - 1
    kind = f" ({history.kind[last]})" if history.kind[last] else ""
    if history.end[last] > at_s:
        out = [f"in fault since {datetime.fromtimestamp(history.start[last], UTC):%Y-%m-%d %H:%M} UTC{kind}"]
    else:
        out = [f"back in service for {_span(at_s - history.end[last])} after a fault{kind}"]
    return [*out, f"{total} faults on record"] if total >= 3 else out


def _span(seconds: float) -> str:
    if seconds < 2 * HOUR_S:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / HOUR_S:.0f} h" if seconds < 48 * HOUR_S else f"{seconds / 24 / HOUR_S:.0f} days"
