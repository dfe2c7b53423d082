"""Signs that hardware is about to fail, as events of GPUs: errors that grew, codes that came, heat, a lost series.

A sign is stamped with the moment at which it was known, never earlier: what an hour's row tells is known at the end of
that hour. Here belongs how rows become events; what they weigh is learned in `models/recurrence.py`.
"""

from __future__ import annotations

from datetime import timedelta

import polars as pl

from features.cleaning_counters import counter_deltas
from features.vocabulary import TIME
from features.xid_events import xid_events_of
from features.xids import HARDWARE, XIDS

SIGNS = ("ecc", "remap", "nvlink", "xid", "hot", "silent")
SIGN_SCHEMA = {
    "node": pl.String, "gpu_uuid": pl.String, "ts": TIME, "sign": pl.String, "amount": pl.Float64, "xid": pl.Int32,
}  # fmt: skip
# Sign, counter, and the growth in one row's span that is a sign. Links err now and then in everyday life: "CRC errors
# matter at 100 a second" (NVIDIA), replays at one; a count does not tell which, so ten.
COUNTERS = (
    ("ecc", "ecc_uncorrected_total", 1.0),
    ("remap", "remapped_rows_total", 1.0),
    ("nvlink", "nvlink_error_total", 10.0),
)
# Codes that speak of the board and do not end its work: those that do are faults, and no signs of one to come.
SIGN_CODES = frozenset(code for code in HARDWARE if not XIDS[code].is_fatal)


def sign_events(rows: pl.DataFrame, health: pl.DataFrame | None = None, *, span: timedelta) -> pl.DataFrame:
    """Signs in rows of GPUs.

    Args:
        rows: `ts` (UTC), `node`, `gpu_uuid` and what there is of `cluster`, `ecc_uncorrected_total`,
            `remapped_rows_total`, `nvlink_error_total`, `xid_last`, `is_thermal_slowdown`, `driver_version`; one row a
            GPU and span, stamped with its beginning. A column that is absent tells nothing.
        health: Rows of `core_gpu_health`, for codes that are counted; None: only the last code is known.
        span: Length of a row's time.

    Returns:
        Columns of `SIGN_SCHEMA`, by time, node and GPU: one event a GPU, sign (and code) and row. `amount` is what a
        counter grew by, and 1 otherwise; `xid` is null for what is no code.
    """
    parts: list[pl.DataFrame] = []
    known = pl.col("ts") + span
    if not rows.is_empty():
        breaks = [name for name in ("driver_version",) if name in rows.columns]
        for sign, name, least in COUNTERS:
            if name not in rows.columns or rows[name].null_count() == rows.height:
                continue
            grown = pl.col(f"{name}_increase")
            deltas = counter_deltas(rows, [name], keys=("node", "gpu_uuid"), break_on=breaks)
            parts.append(
                deltas.filter(grown >= least).select(
                    "node", "gpu_uuid", known.alias("ts"), pl.lit(sign).alias("sign"), grown.alias("amount")
                )
            )
        if "is_thermal_slowdown" in rows.columns:
            parts.append(
                rows.filter(pl.col("is_thermal_slowdown").fill_null(False)).select(
                    "node", "gpu_uuid", known.alias("ts"), pl.lit("hot").alias("sign"), pl.lit(1.0).alias("amount")
                )
            )
    parts.append(code_events(rows, health, span=span))
    found = pl.concat([part for part in parts if not part.is_empty()] or [pl.DataFrame(schema=SIGN_SCHEMA)],
                      how="diagonal_relaxed")  # fmt: skip
    for name, dtype in SIGN_SCHEMA.items():
        if name not in found.columns:
            found = found.with_columns(pl.lit(None, dtype=dtype).alias(name))
    return found.select(pl.col(name).cast(dtype) for name, dtype in SIGN_SCHEMA.items()).sort(
        "ts", "node", "gpu_uuid", "sign", "xid"
    )


def code_events(rows: pl.DataFrame, health: pl.DataFrame | None, *, span: timedelta) -> pl.DataFrame:
    """Events of `SIGN_CODES`: changes of the last code, and rises of what is counted of each.

    Args:
        rows: As of `sign_events`.
        health: As of `sign_events`; `ts` is the beginning of the minute.
        span: Length of a row's time.
    """
    gauge = pl.DataFrame(schema={"cluster": pl.String, "node": pl.String, "gpu_uuid": pl.String, "ts": TIME,
                                 "xid_last": pl.Int32})  # fmt: skip
    if "xid_last" in rows.columns and rows["xid_last"].null_count() < rows.height:
        gauge = rows.drop_nulls("xid_last").select(_cluster(rows), "node", "gpu_uuid", pl.col("ts") + span, "xid_last")
    counts = None
    if health is not None and not health.is_empty() and "xid_counts" in health.columns:
        counts = health.select(
            _cluster(health), "node", "gpu_uuid", pl.col("ts") + timedelta(minutes=1),
            *(name for name in ("xid_counts", "xid_events") if name in health.columns),
        )  # fmt: skip
    events = xid_events_of(gauge.sort("gpu_uuid", "ts"), counts)
    return events.filter(pl.col("xid").is_in(list(SIGN_CODES))).select(
        "node", "gpu_uuid", "ts", pl.lit("xid").alias("sign"), pl.lit(1.0).alias("amount"), "xid"
    )


def _cluster(frame: pl.DataFrame) -> pl.Expr:
    return pl.col("cluster") if "cluster" in frame.columns else pl.lit("").alias("cluster")
