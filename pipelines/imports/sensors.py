"""Readings of board controllers (IPMI, Redfish), one a row: node, time, sensor, value, unit.

The node's power and the temperature of the air at its inlet become node samples; other sensors are passed over. The
power of a chassis or of its supplies is no node's own: several nodes share it.
"""

from __future__ import annotations

import polars as pl

from features.vocabulary import TIME
from pipelines.imports import Piece, Task
from pipelines.imports.tables import ROW, typed, without

# Spellings of the columns; the first that is there is used.
_TIME_NAMES = ("ts", "timestamp_utc", "timestamp", "time")
_COLUMNS = ("node", "sensor", "value")
# Sensors by lower-case name, the best first. Water at the inlet is no air.
_POWER = ("pwr consumption", "system level", "sys power", "system power", "total power", "total_power", "dcmi power")
_INLET = ("inlet temp", "inlet_temp", "inlet ambient", "ambient temp", "ambient", "front panel temp", "intake temp")
_WATTS, _CELSIUS, _FAHRENHEIT = ("watts", "watt", "w"), ("degrees c", "c", "celsius", "°c"), ("degrees f", "f")
_DEAD = ("na", "ns", "disabled", "no reading")


def is_sensors(columns: list[str]) -> bool:
    """Columns of a file of sensor readings."""
    return set(_COLUMNS) <= set(columns) and any(name in columns for name in _TIME_NAMES)


def sensor_samples(frame: pl.DataFrame, task: Task) -> Piece:
    """Node samples of some readings.

    Args:
        frame: As given by `tables.read_rows`; `unit` and `status` may be absent.
        task: The import.
    """
    time = next(name for name in _TIME_NAMES if name in frame.columns)
    types = {"node": pl.String, "sensor": pl.String, "unit": pl.String, "status": pl.String, "value": pl.Float64}
    rows = typed(frame.rename({time: "ts"}), {"ts": TIME, **types}, task, ("ts", "node"))
    report = task.report
    rows = without(rows, pl.col("ts").is_null(), "no time that can be read", report, _shown)
    rows = without(rows, pl.col("node").is_null() | pl.col("sensor").is_null(), "no node or no sensor", report, _shown)
    name = pl.col("sensor").str.to_lowercase()
    unit = pl.col("unit").str.to_lowercase() if "unit" in rows.columns else pl.lit(None, dtype=pl.String)
    power = _rank(name, _POWER, unit.is_null() | unit.is_in(_WATTS))
    inlet = _rank(name, _INLET, unit.is_null() | unit.is_in([*_CELSIUS, *_FAHRENHEIT]))
    value = pl.when(inlet.is_not_null() & unit.is_in(_FAHRENHEIT)).then((pl.col("value") - 32) / 1.8)
    rows = rows.with_columns(
        power.alias("_power"), inlet.alias("_inlet"), value.otherwise(pl.col("value")).alias("value")
    )
    used = pl.col("_power").is_not_null() | pl.col("_inlet").is_not_null()
    for sensor, count in rows.filter(~used)["sensor"].value_counts().sort("count", "sensor").iter_rows():
        report.skip(f"sensor {sensor}", count)
    rows = rows.filter(used)
    if "status" in rows.columns:
        rows = _nulled(rows, pl.col("status").str.to_lowercase().is_in(_DEAD), "status says no reading", task)
    # A controller that answers is powered itself: 0 W says that nothing was measured.
    rows = _nulled(rows, pl.col("_power").is_not_null() & (pl.col("value") == 0), "zero_is_missing", task)
    samples = rows.group_by("node", "ts", maintain_order=True).agg(
        _best("_inlet").alias("inlet_temp_c"), _best("_power").alias("node_power_w")
    )
    return {"core_node_samples": samples.with_columns(pl.lit(task.cluster).alias("cluster"))}


def _shown(row: dict) -> str:
    return f"{row['node']} {row['sensor']} {row['value']}"


def _rank(name: pl.Expr, names: tuple[str, ...], has_unit: pl.Expr) -> pl.Expr:
    rank = name.replace_strict(list(names), list(range(len(names))), default=None, return_dtype=pl.Int32)
    return pl.when(has_unit).then(rank)


def _best(rank: str) -> pl.Expr:
    """The value of the best sensor that has one."""
    return pl.col("value").filter(pl.col(rank).is_not_null() & pl.col("value").is_not_null()).sort_by(
        pl.col(rank).filter(pl.col(rank).is_not_null() & pl.col("value").is_not_null())
    ).first()  # fmt: skip


def _nulled(rows: pl.DataFrame, test: pl.Expr, reason: str, task: Task) -> pl.DataFrame:
    bad = rows.select((test & pl.col("value").is_not_null()).fill_null(False)).to_series()
    for column, rank in (("node_power_w", "_power"), ("inlet_temp_c", "_inlet")):
        wrong = rows.filter(bad & pl.col(rank).is_not_null())
        if len(wrong):
            task.report.null(column, reason, len(wrong), wrong[ROW][0], f"{wrong['sensor'][0]} of {wrong['node'][0]}")
    return rows.with_columns(pl.when(~bad).then(pl.col("value")).alias("value"))
