"""Made-up GPU samples for tests: a healthy gang, and courses that lead to a limit or do not."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl

from features.thresholds import GIB, ThresholdBook

START = datetime(2026, 3, 2, tzinfo=UTC)
H100 = "NVIDIA H100 80GB HBM3"
BOOK = ThresholdBook(default_model=H100)
TOTAL_GIB = 80.0
ACHIEVABLE = 450e9 * 0.83


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=float(seconds))


def gang(seconds: int = 1800, interval_s: float = 15.0, gpus: int = 8, seed: int = 1, job: str | None = "7") -> dict:
    """Arrays (samples, gpus) of a healthy job at full speed: hot, links busy, memory nearly full, but steady."""
    rng = np.random.default_rng(seed)
    ts = np.arange(0, seconds, interval_s)
    shape = (len(ts), gpus)
    temp = 70 + rng.normal(0, 0.8, shape)
    return {
        "ts": ts,
        "gpu_temp_c": temp,
        "gpu_temp_margin_c": 87 - temp,
        "is_thermal_slowdown": np.zeros(shape, dtype=bool),
        "gpu_power_w": 640 + rng.normal(0, 8, shape),
        "sm_clock_hz": np.full(shape, 1.9e9),
        "sm_active_ratio": np.clip(0.9 + rng.normal(0, 0.03, shape), 0, 1),
        "nvlink_tx_bytes_per_s": (0.62 + rng.normal(0, 0.02, shape)) * ACHIEVABLE,
        "nvlink_rx_bytes_per_s": (0.61 + rng.normal(0, 0.02, shape)) * ACHIEVABLE,
        "fb_used_bytes": (TOTAL_GIB - 1.5 + rng.normal(0, 0.02, shape)) * GIB,
        "fb_reserved_bytes": np.full(shape, 0.5 * GIB),
        "fb_total_bytes": np.full(shape, TOTAL_GIB * GIB),
        "step_time_s": 1.0 + rng.normal(0, 0.01, shape),
        "job_id": np.full(shape, job, dtype=object),
    }


def frame(arrays: dict, *, node_of: int = 8, first_gpu: int = 0, drop: tuple[str, ...] = ()) -> pl.DataFrame:
    """As `core_gpu_samples` rows; GPU k is on node n(k // node_of)."""
    samples, gpus = arrays["gpu_temp_c"].shape
    ids = np.tile(np.arange(first_gpu, first_gpu + gpus), samples)
    columns = {
        "ts": pl.Series([at(s) for s in np.repeat(arrays["ts"], gpus)], dtype=pl.Datetime("us", "UTC")),
        "cluster": ["c"] * len(ids),
        "node": [f"n{i // node_of}" for i in ids],
        "gpu_uuid": [f"GPU-{i:04d}" for i in ids],
        "gpu_index": pl.Series((ids % node_of).tolist(), dtype=pl.Int32),
        "job_id": pl.Series(arrays["job_id"].ravel().tolist(), dtype=pl.String),
    }
    for name, values in arrays.items():
        if name not in ("ts", "job_id") and name not in drop:
            flat = np.asarray(values).ravel()
            columns[name] = pl.Series(flat).fill_nan(None) if flat.dtype.kind == "f" else pl.Series(flat)
    return pl.DataFrame(columns)


def set_temp(arrays: dict, gpu: int, temp_c: np.ndarray) -> None:
    arrays["gpu_temp_c"][:, gpu] = temp_c
    arrays["gpu_temp_margin_c"][:, gpu] = 87 - temp_c
    arrays["is_thermal_slowdown"][:, gpu] = temp_c >= 87
