"""Node and GPU faults of simulated fleets, walked forward over their newer half, beside the baselines; several seeds.

Rates as published (4.2 faults per 1,000 node-days, 2 % lemons), warnings before 30 % of the faults of links and 60 % of
those of memory, and false warnings as on a real fleet (`simulator/fault_record.py`). Choices were made on other seeds.
`python -m benchmarks.hardware_risk [--seeds 11,12,13] [--nodes 256] [--days 240]` prints the rows.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.fault_history import DAY_S, FaultHistory
from models.lemons import LEMON_SCORE, lemons
from models.node_failure import BASELINES, HORIZONS_S, NodeFailureForecaster, baseline
from simulator.fault_record import fault_record
from simulator.faults import Hazards
from simulator.hardware import GPUS_PER_NODE

Floats = NDArray[np.float64]

REFIT_S, GRID_S = 14 * DAY_S, 0.25 * DAY_S
_Given = dict[str, list[Floats]]


def walk(seed: int, nodes: int, days: float) -> dict[str, tuple[_Given, list[NDArray[np.bool_]]]]:
    """By unit (`node`, `gpu`): forecasts of each, and what came; also of the model without signs (`no signs`)."""
    faults, signs, names = fault_record(nodes, days, seed)
    boards = {name: [f"GPU-{i * GPUS_PER_NODE + k}" for k in range(GPUS_PER_NODE)] for i, name in enumerate(names)}
    since = faults["start_time"].min().timestamp()
    history = FaultHistory(faults, names, since, signs=signs, gpus=boards)
    blind = FaultHistory(faults, names, since, gpus=boards)
    end = since + days * DAY_S
    out: dict[str, tuple[_Given, list]] = {unit: ({}, []) for unit in ("node", "gpu")}
    ahead = _gpu_starts(history)
    for first in np.arange(since + 0.5 * days * DAY_S, end - 7 * DAY_S, REFIT_S):
        model, plain = NodeFailureForecaster.fit(history, first), NodeFailureForecaster.fit(blind, first)
        moments = np.arange(first, min(first + REFIT_S, end - 7 * DAY_S), GRID_S)
        node, at = np.tile(np.arange(len(history.nodes)), len(moments)), np.repeat(moments, len(history.nodes))
        up = ~history.is_down(node, at)
        node, at = node[up], at[up]
        given, came = out["node"]
        usual = {name: baseline(name, history, node, at) for name in BASELINES}
        told = {"model": model.forecast(history, node, at), "no signs": plain.forecast(blind, node, at), **usual}
        for name, p in told.items():
            given.setdefault(name, []).append(p)
        came.append(history.next_start_s(node, at)[:, None] <= np.array(list(HORIZONS_S.values())))
        given, came = out["gpu"]
        # Every GPU at two moments a day, as rows are eightfold.
        some = np.isin(at, moments[::2])
        gpu = (np.searchsorted(history.gpu_node, node[some])[:, None] + np.arange(GPUS_PER_NODE)).ravel()
        when, share = np.repeat(at[some], GPUS_PER_NODE), model.hazard.gpu_share / GPUS_PER_NODE
        told = {"model": model.forecast_gpus(history, gpu, when), "no signs": plain.forecast_gpus(blind, gpu, when)}
        told |= {name: np.repeat(1 - (1 - p[some]) ** share, GPUS_PER_NODE, axis=0) for name, p in usual.items()}
        for name, p in told.items():
            given.setdefault(name, []).append(p)
        nearest = np.array([_next(ahead[g], t) for g, t in zip(gpu.tolist(), when.tolist(), strict=True)])
        came.append(nearest[:, None] <= np.array(list(HORIZONS_S.values())))
    return out


def _gpu_starts(history: FaultHistory) -> list[Floats]:
    return [np.sort(history.start[history.gpu == gpu]) for gpu in range(len(history.gpus))]


def _next(starts: Floats, at_s: float) -> float:
    i = int(np.searchsorted(starts, at_s, side="right")) if len(starts) else 0
    return float(starts[i] - at_s) if i < len(starts) else np.inf


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Rows of the benchmark."""
    from sklearn.metrics import average_precision_score

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="11,12,13")
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--days", type=float, default=240.0)
    chosen = parser.parse_args([] if arguments is None else arguments)
    rows: list[dict[str, Any]] = []
    for seed in (int(text) for text in chosen.seeds.split(",")):
        for unit, (given, outcomes) in walk(seed, chosen.nodes, chosen.days).items():
            came = np.concatenate(outcomes).astype(np.float64)
            joined = {name: np.concatenate(parts) for name, parts in given.items()}
            for i, horizon in enumerate(HORIZONS_S):
                y = came[:, i]
                if not y.any():
                    continue
                losses = {name: _log_loss(p[:, i], y) for name, p in joined.items()}
                head = f"seed {seed}: {unit} {horizon[2:]}"
                for name, p in joined.items():
                    is_judged = name == "model"
                    goal = f"≤ climatology {losses['climatology']:.6f}" if is_judged else ""
                    rows.append(_row(f"{head}: {name}: log loss", losses[name], goal,
                                     losses[name] <= losses["climatology"] if is_judged else None))  # fmt: skip
                    rows.append(_row(f"{head}: {name}: AUPRC", average_precision_score(y, p[:, i])))
                p = joined["model"][:, i]
                rows.append(_row(f"{head}: said, happened: {p.mean():.5f}, {y.mean():.5f}; ratio", p.mean() / y.mean()))
                for label, low, high in (("95–99.5 %", 0.95, 0.995), ("top 0.5 %", 0.995, 1.0)):
                    edge = np.quantile(p, [low, high])
                    part = (p >= edge[0]) & ((p < edge[1]) if high < 1 else True)
                    rows.append(_row(f"{head}: {label}: said {p[part].mean():.4f}, happened", y[part].mean()))
        rows += _lemon_rows(seed, chosen.nodes, chosen.days)
    return rows


def _lemon_rows(seed: int, nodes: int, days: float) -> list[dict[str, Any]]:
    """Lemons that the score tells at the end of each 28 days, against those that the simulator made."""
    faults, signs, names = fault_record(nodes, days, seed)
    history = FaultHistory(faults, names, signs=signs)
    truth = Hazards(nodes, seed, 1.0).is_lemon
    order = [int(name[1:]) for name in history.nodes]
    said = np.zeros(len(order), bool)
    for at_s in np.arange(history.since + 28 * DAY_S, history.since + days * DAY_S, 28 * DAY_S):
        said |= np.array([lemon.score >= LEMON_SCORE for lemon in lemons(history, signs, None, at_s)])
    hits = int((said & truth[order]).sum())
    return [
        _row(f"seed {seed}: lemons: {int(truth.sum())} made, {int(said.sum())} told, right among those told",
             hits / max(int(said.sum()), 1)),
        _row(f"seed {seed}: lemons: found of those made", hits / max(int(truth.sum()), 1)),
    ]  # fmt: skip


def _log_loss(p: Floats, y: Floats) -> float:
    q = np.clip(p, 1e-9, 1 - 1e-9)
    return float(-np.mean(y * np.log(q) + (1 - y) * np.log1p(-q)))


def _row(name: str, value: float, goal: str = "", is_met: bool | None = None) -> dict[str, Any]:
    return {"name": name, "value": float(value), "unit": "", "goal": goal, "met": is_met}


if __name__ == "__main__":
    import sys

    for row in main(sys.argv[1:]):
        print(f"{row['name']:<75} {row['value']:>12.6f}  {row['goal']}")
