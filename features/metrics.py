"""The vocabulary: every metric that is known, which registry column it feeds, and how a user changes that.

Rows stand in `features/exporters/`, labels are read in `features/identity.py`. Sources hand over wide frames whose
columns are exporter names; `to_columns` turns them into registry columns. No I/O, no cleaning: values that were
received stay as they were (times the scale), so that `features/cleaning.py` can count what is wrong with them.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import polars as pl

from features.exporters import amd, applications, dcgm, fabric, kubernetes, nvidia_smi, sensors, slurm, volcano
from features.exporters.metric import (
    BOARD,
    ENTITIES,
    FB_SHARE,
    FED,
    HW_HOT,
    HW_POWER_BRAKE,
    HW_SLOW,
    HW_SLOWDOWN,
    HW_THERMAL,
    JOB_HERE,
    JOB_NUMBER,
    KINDS,
    LANE,
    LANES,
    MIB,
    SW_POWER_CAP,
    SW_THERMAL,
    Entity,
    Kind,
    Metric,
)  # fmt: skip
from features.identity import Identity, identify, node_name, short_host
from features.metric_values import (
    FP64_SENTINELS,
    INT32_SENTINELS,
    INT64_SENTINEL_FROM,
    UINT_MAX,
    Source,
    is_flag,
    is_sentinel,
    quantity,
    unknown,
    with_memory,
    with_power_brake,
)  # fmt: skip
from features.vocabulary import (
    COLUMNS,
    GPU_HEALTH,
    GPU_QUANTITIES,
    LINK_QUANTITIES,
    NODE_QUANTITIES,
    PORT_RATES,
    PORT_STATES,
    PROGRESS_QUANTITIES,
)  # fmt: skip

__all__ = [
    "BY_NAME", "DEFAULT", "FP64_SENTINELS", "GPU_NAMES", "HW_POWER_BRAKE", "HW_SLOWDOWN", "HW_THERMAL",
    "INT32_SENTINELS", "INT64_SENTINEL_FROM", "METRICS", "MIB", "NODE_NAMES", "SW_POWER_CAP", "SW_THERMAL", "UINT_MAX",
    "Entity", "Identity", "Kind", "Metric", "MetricError", "MetricTable", "Variant", "identify", "is_sentinel",
    "node_name", "short_host", "to_columns",
]  # fmt: skip

_HELPERS = ("_fb_free_bytes", FB_SHARE, BOARD, HW_SLOW, HW_HOT)
_DERIVED = ("xid_events", "xid_counts", "unknown_flags")  # made of others: `features/xid_counts.py`, `metric_values.py`
ENTITY_COLUMNS: dict[Entity, tuple[str, ...]] = {
    "gpu": (*GPU_QUANTITIES, *_HELPERS),
    "health": tuple(name for name in GPU_HEALTH if name not in _DERIVED),
    "xid": ("xid_events", "_xid_total", "_xid_time"),
    "job": (JOB_NUMBER, JOB_HERE),
    "link": tuple(name for name in LINK_QUANTITIES if name not in _DERIVED),
    "port": (*PORT_RATES, *PORT_STATES),
    "node": NODE_QUANTITIES,
    "progress": PROGRESS_QUANTITIES,
}
QUEUE_VALUE = "value"  # of `core_queue_samples`, by the readers of queues: names that they know, no mappings of a user
METRICS: tuple[Metric, ...] = (
    *dcgm.ROWS, *nvidia_smi.ROWS, *amd.ROWS, *sensors.ROWS, *fabric.ROWS, *kubernetes.ROWS, *slurm.ROWS, *volcano.ROWS,
    *applications.ROWS,
)  # fmt: skip


class MetricError(ValueError):
    """A mapping of the configuration is wrong. The message gives the metric, the field, its value and the choices."""


class Variant(NamedTuple):
    """Series of one name that speak of the same kind of thing: they become one column of a wide frame.

    Attributes:
        label: Name of that column: the metric's name, with its label pattern where a name has several variants.
        entity: What the series speak of.
        rows: What they feed.
    """

    label: str
    entity: Entity
    rows: tuple[Metric, ...]


class MetricTable:
    """All metrics that are known, arranged for looking up. Immutable.

    Args:
        rows: Any order; of rows of one name the first whose labels match a series wins.

    Attributes:
        metrics: The rows.
        variants: Those that feed frames, by name as exposed (`#` replaced), with the link's number where it has one.
        by_name: Rows that feed frames by name as exposed.
        names: Names as exposed that feed frames, for each entity.
        by_label: Variants by entity and label.
    """

    def __init__(self, rows: Iterable[Metric]) -> None:
        self.metrics = tuple(rows)
        grouped: dict[str, dict[tuple[Any, ...], list[Metric]]] = {}
        for row in self.metrics:
            if row.is_fed:
                grouped.setdefault(row.name, {}).setdefault((row.entity, row.where), []).append(row)
        self.variants: dict[str, tuple[int | None, tuple[Variant, ...]]] = {}
        self.by_label: dict[Entity, dict[str, Variant]] = {entity: {} for entity in FED}
        for name, kinds in grouped.items():
            found: list[Variant] = []
            for (entity, where), same in kinds.items():
                label = name
                if any(other.entity == entity for other in found):
                    label = f"{name}{{{','.join('='.join(pair) for pair in where)}}}"
                found.append(Variant(label, entity, tuple(same)))
                self.by_label[entity][label] = found[-1]
            lanes: Sequence[int | None] = range(LANES) if LANE in name else (None,)
            for lane in lanes:
                self.variants[name.replace(LANE, str(lane))] = lane, tuple(found)
        self.by_name = {name: tuple(row for v in found for row in v.rows) for name, (_, found) in self.variants.items()}
        self.names: dict[Entity, tuple[str, ...]] = {
            entity: tuple(n for n, (_, found) in self.variants.items() if any(v.entity == entity for v in found))
            for entity in FED
        }

    def pattern(self, *entities: Entity) -> str:
        """Regular expression, as Prometheus takes it, of the names that feed these entities (none given: all fed)."""
        rows = [row for row in self.metrics if row.is_fed and row.entity in (entities or FED)]
        return "|".join(dict.fromkeys(row.name.replace(LANE, "[0-9]+") for row in rows))

    def overridden(self, changes: Mapping[str, Mapping[str, Any]]) -> MetricTable:
        """A table with a user's own mappings.

        Args:
            changes: For each metric name fields of `Metric`. With `column` they are a row that takes the place of all
                rows of that name (an empty column: the metric is not read); without it they change the rows there are.

        Raises:
            MetricError: A name, field or value makes no sense.
        """
        rows = [row for row in self.metrics if row.name not in changes]
        for name, fields in changes.items():
            rows += _changed(name, fields, [row for row in self.metrics if row.name == name])
        return MetricTable(rows)


def _changed(name: str, fields: Mapping[str, Any], known: list[Metric]) -> list[Metric]:
    given = {key: value for key, value in fields.items() if value is not None}
    if "where" in given:
        given["where"] = tuple(dict(given["where"]).items())
    if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*#?[a-zA-Z0-9_:]*", name):
        raise MetricError(f"{name!r}: not the name of a metric; `#` may stand once, for the number of an NVLink")
    if "column" in given:
        column = given["column"]
        homes = [entity for entity, columns in ENTITY_COLUMNS.items() if column in columns]
        if column and not homes:
            every = sorted({c for columns in ENTITY_COLUMNS.values() for c in columns if not c.startswith("_")})
            near = difflib.get_close_matches(column, every, n=3, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else f"valid: {', '.join(every)}"
            raise MetricError(f"{name}: column = {column!r}: no such column; {hint}")
        if len(homes) > 1 and homes[-1] == "progress":  # step times are of a GPU unless it is asked for
            homes.pop()
        if len(homes) > 1 and "entity" not in given:
            raise MetricError(f"{name}: column = {column!r}: set entity to one of {', '.join(homes)}")
        entity = given.pop("entity", homes[0] if homes else "gpu")
        rows = [replace(Metric(name, given.pop("column"), exporter="configuration"), entity=entity, **given)]
    elif known:
        rows = [replace(row, **given) for row in known]
    else:
        raise MetricError(f"{name}: column is missing: the metric is not known, so say which column it feeds")
    for row in rows:
        _check(row)
    return rows


def _check(row: Metric) -> None:
    if row.entity not in ENTITIES:
        raise MetricError(f"{row.name}: entity = {row.entity!r}: valid: {', '.join(ENTITIES)}")
    fed = (QUEUE_VALUE,) if row.entity == "queue" else ENTITY_COLUMNS.get(row.entity, ())
    if row.column and row.column not in fed:
        valid = ", ".join(entity for entity, columns in ENTITY_COLUMNS.items() if row.column in columns)
        raise MetricError(f"{row.name}: entity = {row.entity!r}: {row.column} is a column of {valid}")
    if row.kind not in KINDS:
        raise MetricError(f"{row.name}: kind = {row.kind!r}: valid: {', '.join(KINDS)}")
    if not math.isfinite(row.scale) or row.scale == 0:
        raise MetricError(f"{row.name}: scale = {row.scale!r}: a number that is not 0")
    if row.column and (row.mask or row.equals is not None) and not is_flag(row.column):
        raise MetricError(f"{row.name}: mask or equals make a flag, and {row.column} is none")
    if row.mask < 0:
        raise MetricError(f"{row.name}: mask = {row.mask}: bits, 0 or more")
    for label, pattern in row.where:
        try:
            re.compile(pattern)
        except re.error as error:
            raise MetricError(f"{row.name}: where.{label} = {pattern!r}: no regular expression: {error}") from None


DEFAULT = MetricTable(METRICS)
BY_NAME: dict[str, tuple[Metric, ...]] = DEFAULT.by_name
GPU_NAMES: tuple[str, ...] = DEFAULT.names["gpu"]
NODE_NAMES: tuple[str, ...] = DEFAULT.names["node"]


def to_columns(frame: pl.DataFrame, entity: Entity, table: MetricTable = DEFAULT) -> pl.DataFrame:
    """Registry columns from exporter columns.

    Args:
        frame: Key columns as they are to stay, and one Float64 column for each exporter metric (named by the label of
            its variant), null where a GPU or node did not expose it.
        entity: What the rows are.
        table: The vocabulary.

    Returns:
        The key columns and every registry column that some metric fed, in the registry's units. Sentinels and
        impossible values are still there, scaled, in sums too; flags take null instead and are named in `unknown_flags`
        where there is such a value. A 64-bit sentinel of `xid_last` becomes the 32-bit one. Of codes (`xid`) the
        helpers stay.
    """
    labels = table.by_label[entity]
    by_column: dict[str, list[Source]] = {}
    for label in frame.columns:
        for metric in labels[label].rows if label in labels else ():
            by_column.setdefault(metric.column, []).append((label, metric))
    for sources in by_column.values():
        sources.sort(key=lambda source: source[1].rank)
    keys = [name for name in frame.columns if name not in labels]
    wide = frame.select(*keys, *(quantity(column, found).alias(column) for column, found in by_column.items()))
    if entity == "gpu":
        wide = with_power_brake(with_memory(wide))
    if entity not in ("xid", "job"):
        wide = wide.drop([name for name in wide.columns if name.startswith("_")])
    wide = wide.with_columns(_typed(name) for name in wide.columns if name not in keys and name in COLUMNS)
    lost = unknown(wide, frame, by_column)
    return wide if lost is None else wide.with_columns(lost)


def _typed(name: str) -> pl.Expr:
    dtype, value = COLUMNS[name].dtype, pl.col(name)
    if dtype == pl.Int32:
        value = (
            pl.when(value.abs() < INT32_SENTINELS[0])
            .then(value.round())
            .otherwise(pl.when(value.is_not_null() & value.is_not_nan()).then(INT32_SENTINELS[0]))
        )
    return value.cast(dtype).alias(name)
