"""Small clusters as frames: nodes, jobs and forecasts for tests of windows and plans. No assertions here."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl

from features.vocabulary import QUANTILE_COLUMNS, conform, schema

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def node_frame(states: Sequence[str], *, per_rack: int = 2, per_pod: int = 4, gpus: int = 8) -> pl.DataFrame:
    """Nodes n1…nN, rack by rack and pod by pod."""
    rows = [
        {
            "observed_at": NOW,
            "cluster": "alpha",
            "node": f"n{i + 1}",
            "rack": f"r{i // per_rack + 1}",
            "pod": f"p{i // per_pod + 1}",
            "gpu_model": "H100",
            "gpus": gpus,
            "state": state,
            "reason": None,
        }
        for i, state in enumerate(states)
    ]
    return conform(pl.DataFrame(rows), "core_nodes")


def running(job_id: str, nodes: Sequence[str], *, elapsed_s: float = 0, **more: Any) -> dict[str, Any]:
    row = {
        "job_id": job_id,
        "state": "RUNNING",
        "start_time": after(-elapsed_s),
        "submit_time": after(-elapsed_s - 60),
        "node_list": ",".join(nodes),
        "nodes": len(nodes),
        "gpus": 8 * len(nodes),
        "user": f"u{job_id}",
    }
    return row | more


def pending(job_id: str, nodes: int, **more: Any) -> dict[str, Any]:
    row = {
        "job_id": job_id,
        "state": "PENDING",
        "submit_time": after(-600),
        "eligible_time": after(-600),
        "nodes": nodes,
        "gpus": 8 * nodes,
        "user": f"u{job_id}",
        "reason": "Resources",
    }
    return row | more


def job_frame(*rows: dict[str, Any]) -> pl.DataFrame:
    if not rows:
        return pl.DataFrame(schema=schema("core_jobs"))
    columns = schema("core_jobs")
    filled = [{"cluster": "alpha", **dict.fromkeys(set(columns) - row.keys() - {"cluster"}), **row} for row in rows]
    return pl.DataFrame(filled, schema=columns)


def forecast(
    job_id: str, kind: str, quantiles_s: Sequence[float], *, age_s: float = 0, valid_s: float | None = 600
) -> dict[str, Any]:
    return {
        "generated_at": after(-age_s),
        "valid_until": None if valid_s is None else after(valid_s),
        "cluster": "alpha",
        "job_id": job_id,
        "forecast": kind,
        **dict(zip(QUANTILE_COLUMNS, quantiles_s, strict=True)),
    }


def forecast_frame(*rows: dict[str, Any]) -> pl.DataFrame:
    if not rows:
        return pl.DataFrame(schema=schema("out_job_forecasts"))
    return conform(pl.DataFrame(list(rows), infer_schema_length=None), "out_job_forecasts")
