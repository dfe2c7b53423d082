"""Readings of board controllers (IPMI, Redfish), one a row: node, time, sensor, value, unit.

The node's power and the temperature of the air at its inlet become node samples; other sensors are passed over. The
power of a chassis or of its supplies is no node's own: several nodes share it.
"""

from __future__ import annotations

import polars as pl

from features.vocabulary import TIME
from pipelines.imports import Piece, Task
from pipelines.imports.report import report_places
from pipelines.imports.tables import ROW, typed, without

# Spellings of the columns; the first that is there is used.
_TIME_NAMES = ("ts", "timestamp_utc", "timestamp", "time")
_COLUMNS = ("node", "sensor", "value")
# Sensors by lower-case name, the best first. Water at the inlet is no air.
_POWER = ("pwr consumption", "system level", "sys power", "system power", "total power", "total_power", "dcmi power")
_INLET = ("inlet temp", "inlet_temp", "inlet ambient", "ambient temp", "ambient", "front panel temp", "intake temp")
# Units by name, as IPMI tools, Redfish (UCUM) and the kernel's hwmon write them → watts. Case tells milli from mega.
_WATTS = {
    "w": 1.0, "watt": 1.0, "watts": 1.0, "kw": 1e3, "kilowatt": 1e3, "kilowatts": 1e3, "megawatt": 1e6,
    "megawatts": 1e6, "milliwatt": 1e-3, "milliwatts": 1e-3, "mw": 1e-3, "MW": 1e6, "uw": 1e-6, "µw": 1e-6,
    "\u03bcw": 1e-6, "microwatt": 1e-6, "microwatts": 1e-6, "btu/h": 0.29307107, "btu/hr": 0.29307107,
}  # fmt: skip
# → degrees Celsius: a factor, and what is added before it.
_DEGREES = {
    **dict.fromkeys(("c", "°c", "cel", "celsius", "degc", "deg c", "degree c", "degrees c"), (1.0, 0.0)),
    **dict.fromkeys(("degree celsius", "degrees celsius", "degrees_c"), (1.0, 0.0)),
    **dict.fromkeys(("mc", "m°c", "mcel", "millidegrees c", "millicelsius"), (1e-3, 0.0)),
    **dict.fromkeys(("f", "°f", "fahrenheit", "degf", "[degf]", "deg f", "degree f", "degrees f"), (1 / 1.8, -32.0)),
    "degrees fahrenheit": (1 / 1.8, -32.0),
    **dict.fromkeys(("k", "kelvin", "deg k", "degree k", "degrees k"), (1.0, -273.15)),
}
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
    name = pl.col("sensor").str.to_lowercase().str.strip_chars()
    unit = pl.col("unit").str.strip_chars() if "unit" in rows.columns else pl.lit(None, dtype=pl.String)
    # The case of a unit counts only where it is the one of _WATTS that is written large.
    unit = pl.when(unit == "MW").then(unit).otherwise(unit.str.to_lowercase())
    watts, factor, added = _converted(unit, _WATTS), *(_converted(unit, _part(i)) for i in range(2))
    rows = rows.with_columns(_rank(name, _POWER).alias("_power"), _rank(name, _INLET).alias("_inlet"))
    is_told = pl.when(pl.col("_power").is_not_null()).then(watts).otherwise(factor).is_not_null()
    named = pl.col("_power").is_not_null() | pl.col("_inlet").is_not_null()
    for sensor, count in rows.filter(~named)["sensor"].value_counts().sort("count", "sensor").iter_rows():
        report.skip(f"sensor {sensor}", count)
    strange = rows.filter(named & ~is_told)
    for sensor, other, count in strange.group_by("sensor", "unit").len().sort("sensor", "unit").iter_rows():
        first = strange.filter(pl.col("sensor") == sensor, pl.col("unit") == other)[ROW][0]
        report.drop(f"sensor {sensor} in a unit that is not known: {other}", count, first)
    rows = rows.filter(named & is_told)
    read = pl.when(pl.col("_power").is_not_null()).then(pl.col("value") * watts)
    rows = rows.with_columns(read.otherwise((pl.col("value") + added) * factor).alias("value"))
    rows = _nulled(rows, ~pl.col("value").is_finite(), "not_a_number", task)
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


def _rank(name: pl.Expr, names: tuple[str, ...]) -> pl.Expr:
    return name.replace_strict(list(names), list(range(len(names))), default=None, return_dtype=pl.Int32)


def _part(i: int) -> dict[str, float]:
    return {unit: parts[i] for unit, parts in _DEGREES.items()}


def _converted(unit: pl.Expr, factors: dict[str, float]) -> pl.Expr:
    """The number that belongs to a unit; that of the first one where none is told, null for an unknown one."""
    found = unit.replace_strict(list(factors), list(factors.values()), default=None, return_dtype=pl.Float64)
    return pl.when(unit.is_null()).then(next(iter(factors.values()))).otherwise(found)


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
            named = wrong.select(pl.format("{} of {}", "sensor", "node")).to_series()
            report_places(task.report, column, reason, wrong[ROW], named)
    return rows.with_columns(pl.when(~bad).then(pl.col("value")).alias("value"))
