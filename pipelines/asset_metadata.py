"""What is said of every asset in the same way: column schemas with units, owners, kinds, figures of a run.

No assets here: those stand in `pipelines/assets/`.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import dagster as dg

from features.vocabulary import COLUMNS, TABLES
from pipelines.words import reason_in_words, without_name

OWNERS = ["team:telemetry"]
_NAMES = {
    "String": "text", "Boolean": "flag", "Float32": "float32", "Float64": "float64", "Int32": "int32", "Int64": "int64",
}  # fmt: skip


def column_schema(table: str) -> dg.TableSchema:
    """Columns of a registry table with type, unit and meaning."""
    return dg.TableSchema(columns=[_column(name) for name in TABLES[table].columns])


def _column(name: str) -> dg.TableColumn:
    column = COLUMNS[name]
    unit = f" [{column.unit}]" if column.unit else ""
    kind = _NAMES.get(str(column.dtype), "timestamp UTC")
    return dg.TableColumn(name=name, type=kind, description=f"{column.description}{unit}")


def table_spec(
    table: str,
    group: str,
    *,
    deps: Iterable[str] = (),
    fresh_s: float | None = None,
    kinds: Iterable[str] = ("ducklake",),
) -> dg.AssetSpec:
    """The asset that a registry table is.

    Args:
        table: Registry table.
        group: raw, core, feat or out.
        deps: Assets it is made from.
        fresh_s: It should be made at least this often, seconds; None: no promise.
        kinds: What it is kept in, for the graph.
    """
    policy = None
    if fresh_s is not None:
        policy = dg.FreshnessPolicy.time_window(
            fail_window=timedelta(seconds=max(120.0, fresh_s)), warn_window=timedelta(seconds=max(60.0, fresh_s / 2))
        )
    about = TABLES[table]
    return dg.AssetSpec(
        table,
        deps=list(deps),
        description=f"{about.description}. Keyed by {', '.join(about.key)}; kept {about.retention}.",
        group_name=group,
        owners=OWNERS,
        tags={"layer": group},
        kinds=set(kinds),
        metadata={"dagster/column_schema": column_schema(table)},
        freshness_policy=policy,
    )


def figures(reports: Iterable[Any], names: Iterable[str]) -> dict[str, Any]:
    """Figures of a run: of each cluster by name, and numbers in total.

    Args:
        reports: One report a cluster, each with `cluster`.
        names: Attributes to show.
    """
    reports = list(reports)
    found: dict[str, Any] = {}
    for name in names:
        values = {report.cluster: getattr(report, name) for report in reports}
        numbers = [value for value in values.values() if isinstance(value, int | float)]
        if numbers and len(numbers) == len([v for v in values.values() if v is not None]):
            found[name] = max(numbers) if name.endswith("_s") else sum(numbers)
        if len(reports) > 1 or not numbers:
            shown = {
                cluster: _in_words(name, cluster, value)
                for cluster, value in values.items()
                if value not in (None, [], {})
            }
            if shown:
                found[f"{name}_by_cluster" if name in found else name] = dg.MetadataValue.json(shown)
    return found


def rows(count: int) -> dict[str, Any]:
    """The row count under Dagster's own name, for its plots."""
    return {"dagster/row_count": count}


def _in_words(name: str, cluster: str, value: Any) -> Any:
    """A figure of one cluster as people read it: findings with their reasons in words, messages without its name."""
    value = _plain(value)
    if name == "findings" and isinstance(value, Mapping):
        return {reason_in_words(reason): count for reason, count in value.items()}
    if isinstance(value, list):
        return [without_name(cluster, item) if isinstance(item, str) else item for item in value]
    return without_name(cluster, value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | bool) or value is None else str(value)
