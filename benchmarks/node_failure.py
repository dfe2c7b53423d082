"""Node-failure forecasts on a recorded fleet: 400 GPU servers over 209 days, walked forward over the second half.

The forecaster is fitted anew each week on what was known then; nodes in fault are not at risk. Figures stand beside
climatology, repeat offenders and the gamma–Poisson rate. Needs the recorded traces (WEATHERGLASS_TRACES, else
`../shared/traces` beside the repository). `python -m benchmarks.node_failure` prints the rows.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from models.fault_backtest import faults_of
from models.fault_history import DAY_S, FaultHistory
from models.node_failure import BASELINES, HORIZONS_S, NodeFailureForecaster, baseline

NODES = 400
STEP_S = {"p_1h": 3_600.0, "p_24h": 21_600.0, "p_7d": 21_600.0}
REFIT_S = 7 * DAY_S


def read_faults(folder: Path) -> pl.DataFrame:
    """Faults with their ends, paired within each server."""
    return faults_of(pl.read_parquet(folder / "faults" / "infinitehbd-2024.parquet"))


def walk_forward(
    history: FaultHistory, horizon: str, begin_s: float, end_s: float
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Probabilities of the model (empty name) and each baseline, and whether a fault followed."""
    column, horizon_s = list(HORIZONS_S).index(horizon), HORIZONS_S[horizon]
    given: dict[str, list[np.ndarray]] = {name: [] for name in ("", *BASELINES)}
    outcome = []
    for first in np.arange(begin_s, end_s - horizon_s, REFIT_S):
        model = NodeFailureForecaster.fit(history, first)
        moments = np.arange(first, min(first + REFIT_S, end_s - horizon_s), STEP_S[horizon])
        node, at = np.tile(np.arange(len(history.nodes)), len(moments)), np.repeat(moments, len(history.nodes))
        up = ~history.is_down(node, at)
        node, at = node[up], at[up]
        given[""].append(model.forecast(history, node, at)[:, column])
        for name in BASELINES:
            given[name].append(baseline(name, history, node, at)[:, column])
        outcome.append(history.next_start_s(node, at) <= horizon_s)
    return {name: np.concatenate(parts) for name, parts in given.items()}, np.concatenate(outcome).astype(np.float64)


def main() -> list[dict[str, Any]]:
    """Rows of the benchmark."""
    from sklearn.metrics import average_precision_score

    here = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"
    faults = read_faults(Path(os.environ.get("WEATHERGLASS_TRACES") or here))
    named = faults["node"].unique().to_list()
    history = FaultHistory(faults, named + [f"quiet-{i}" for i in range(NODES - len(named))])
    end_s = max(float(history.start.max()), float(history.end[np.isfinite(history.end)].max()))
    begin_s = history.since + 0.5 * (end_s - history.since)
    rows: list[dict[str, Any]] = []
    for horizon in HORIZONS_S:
        given, came = walk_forward(history, horizon, begin_s, end_s)
        areas = {name: float(average_precision_score(came, p)) for name, p in given.items()}
        best = max(BASELINES, key=lambda name: areas[name])
        rows.append(_row(f"{horizon}: rows", len(came)))
        rows.append(_row(f"{horizon}: base rate", came.mean()))
        for name, p in given.items():
            who, is_model = name or "model", not name
            loss = -np.mean(came * np.log(p) + (1 - came) * np.log1p(-p))
            goal = f"> {best} {areas[best]:.4f}" if is_model else ""
            rows.append(
                _row(f"{horizon}: {who}: AUPRC", areas[name], goal, areas[name] > areas[best] if is_model else None)
            )
            rows.append(_row(f"{horizon}: {who}: log loss", loss))
            rows.append(_row(f"{horizon}: {who}: mean P", p.mean()))
            for label, low in (("top 10 %", 0.9), ("top 1 %", 0.99)):
                top = p >= np.quantile(p, low)
                rows.append(_row(f"{horizon}: {who}: {label}: mean P", p[top].mean()))
                rows.append(_row(f"{horizon}: {who}: {label}: share that faulted", came[top].mean()))
    return rows


def _row(name: str, value: float, goal: str = "", is_met: bool | None = None) -> dict[str, Any]:
    return {"name": name, "value": float(value), "unit": "", "goal": goal, "met": is_met}


if __name__ == "__main__":
    for row in main():
        print(f"{row['name']:<55} {row['value']:>12.5f}  {row['goal']}")
