"""Checks of what is in the store: types, keys, ranges (they hold back what is made from it), and how old the newest is.

Only the newest part is looked at: what was checked once does not change. What went wrong in a run itself is said by the
run's own assets (`pipelines/assets/outcome.py`).
"""

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

import dagster as dg
import polars as pl

from features.vocabulary import COLUMNS, TABLES
from pipelines.catalogue import quoted, sql_type
from pipelines.progress import span
from pipelines.resources import Weatherglass
from pipelines.spans import TELEMETRY_MARK
from pipelines.store import Store
from pipelines.words import counted

_LOOK_BACK = timedelta(hours=1)
_CHECKED = ("core_gpu_samples", "core_node_samples", "core_jobs")
MIN_LAG_S = 900.0


def violations(store: Store, table: str, since: datetime) -> dict[str, Any]:
    """What is wrong with the rows of a table since a moment: empty when nothing is.

    Args:
        store: The store.
        table: Registry table.
        since: Earlier rows are not looked at.

    Returns:
        `types`: columns whose stored type differs; `keys`: keys that occur twice; `ranges`: column → rows outside of
        the registry's bounds.
    """
    about = TABLES[table]
    found: dict[str, Any] = {}
    stored = store.query(
        "SELECT column_name, data_type FROM duckdb_columns() WHERE table_name = ? AND database_name = 'wg'", [table]
    )
    types = dict(stored.iter_rows())
    wrong = [name for name in about.columns if types.get(name) != sql_type(name)]
    if wrong:
        return {"types": wrong}
    key = ", ".join(quoted(name) for name in about.key)
    where = f"{quoted(about.time)} >= ?"
    doubled = store.query(
        f"SELECT count(*) AS n FROM (SELECT 1 FROM {table} WHERE {where} GROUP BY {key} HAVING count(*) > 1)", [since]
    )["n"][0]
    if doubled:
        found["keys"] = doubled
    tests = {name: _outside(name) for name in about.columns}
    columns = ", ".join(f"count(*) FILTER ({test}) AS {quoted(name)}" for name, test in tests.items() if test)
    if columns:
        counts = store.query(f"SELECT {columns} FROM {table} WHERE {where}", [since]).row(0, named=True)
        outside = {name: count for name, count in counts.items() if count}
        if outside:
            found["ranges"] = outside
    return found


def in_words(found: Mapping[str, Any]) -> Iterator[str]:
    """What `violations` found, a clause each."""
    if found.get("types"):
        yield f"the stored type is not the registry's in {', '.join(found['types'])}"
    if found.get("keys"):
        yield f"{counted(found['keys'], 'key')} more than once"
    for column, count in found.get("ranges", {}).items():
        about = COLUMNS[column]
        bounds = (
            f"{'-∞' if about.low is None else f'{about.low:g}'} to {'∞' if about.high is None else f'{about.high:g}'}"
        )
        unit = f" {about.unit}" if about.unit else ""
        yield f"{column}: {counted(count, 'value')} outside of {bounds}{unit}"


def _outside(name: str) -> str:
    """SQL that is true for a value outside of its column's bounds; empty when there are none."""
    column = COLUMNS[name]
    slack = column.resolution / 2  # rounding to the stored step may pass a bound by half of it
    tests = [f"{quoted(name)} < {column.low - slack!r}"] if column.low is not None else []
    tests += [f"{quoted(name)} > {column.high + slack!r}"] if column.high is not None else []
    return " OR ".join(tests)


def _valid(table: str) -> dg.AssetChecksDefinition:
    @dg.asset_check(
        asset=table,
        name="valid",
        blocking=True,
        description="Types are the registry's, keys occur once, values are within the registry's bounds.",
    )
    def valid(weatherglass: Weatherglass) -> dg.AssetCheckResult:
        since = weatherglass.now() - _LOOK_BACK
        store = weatherglass.store()
        found = violations(store, table, since)
        said = "; ".join(in_words(found))
        return dg.AssetCheckResult(
            passed=not found, metadata={"violations": dg.MetadataValue.json(found)}, description=said or "valid"
        )

    return valid


@dg.asset_check(asset="core_gpu_samples", name="recent", description="The newest sample of every cluster is recent.")
def recent(weatherglass: Weatherglass) -> dg.AssetCheckResult:
    """A freshness policy sees runs; this sees samples: a run that found none is green there and red here."""
    now, settings = weatherglass.now(), weatherglass.settings
    most_s = max(MIN_LAG_S, 3 * settings.ingest.window_s)
    store = weatherglass.store()
    ages = {cluster: newest_age_s(store, cluster, now) for cluster in weatherglass.clusters}
    late = {cluster: age for cluster, age in ages.items() if age is None or age > most_s}
    said = ", ".join(
        f"{name}: {'no samples' if age is None else f'the newest is {span(age)} old'}" for name, age in late.items()
    )
    return dg.AssetCheckResult(
        passed=not late,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={"age_s": dg.MetadataValue.json(ages), "most_s": most_s},
        description=said or "recent",
    )


def newest_age_s(store: Store, cluster: str, now: datetime) -> float | None:
    """Age of a cluster's newest core sample, seconds; None when there is none near its mark."""
    mark = store.mark(cluster, TELEMETRY_MARK)
    if mark is None:
        return None
    found: pl.DataFrame = store.query(
        'SELECT max(ts) AS ts FROM core_gpu_samples WHERE "cluster" = ? AND ts >= ?', [cluster, mark - _LOOK_BACK]
    )
    newest = found["ts"][0]
    return None if newest is None else (now - newest).total_seconds()


CHECKS: list[dg.AssetChecksDefinition] = [*(_valid(table) for table in _CHECKED), recent]
