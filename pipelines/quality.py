"""What `weatherglass quality` prints: which values were not believed, why, how many of all, where, and when.

Reading `core_data_quality` and bringing it into lines; the findings themselves are made by `features/cleaning.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl

from features.vocabulary import COLUMNS, TABLES
from pipelines.compose import clusters_of, open_store
from pipelines.settings import Settings
from pipelines.store import Store
from pipelines.words import counted, reason_in_words

DEFAULT_SINCE = timedelta(days=1)
_THINNED = ("core_gpu_health",)  # kept once a minute, judged as often as it comes
_RAW = {"core_gpu_samples": "raw_gpu_samples"}  # duplicates are gone from the cleaned rows
_WITHOUT_ROWS = ("no_samples", "partial", "no_key", "bad_time")  # of these the rows that stayed are no share


def read_quality(store: Store, cluster: str, begin: datetime, end: datetime) -> pl.DataFrame:
    """Findings of all windows that begin in [begin, end), summed.

    Args:
        store: The store.
        cluster: Name of the cluster.
        begin: UTC, included.
        end: UTC, excluded.

    Returns:
        `source`, `table_name`, `column_name`, `reason`, `count`, `share` (of the rows of that table; null where there
        is no such share), `example` (of the newest window), `first_seen`, `last_seen`; the most frequent first.
    """
    found = store.query(
        "SELECT source, table_name, column_name, reason, sum(count)::BIGINT AS count, "
        "last(example ORDER BY window_start) AS example, min(window_start) AS first_seen, max(window_end) AS last_seen "
        'FROM core_data_quality WHERE "cluster" = ? AND window_start >= ? AND window_start < ? '
        "GROUP BY source, table_name, column_name, reason",
        [cluster, begin, end],
    )
    rows = {}
    for table in found["table_name"].unique():
        about = None if table in _THINNED else TABLES.get(_RAW.get(table, table))
        if about is not None:
            within = f"{about.time} >= ? AND {about.time} < ?"
            sql = f'SELECT count(*) AS n FROM {about.name} WHERE "cluster" = ? AND {within}'
            rows[table] = store.query(sql, [cluster, begin, end])["n"][0]
    of = pl.col("table_name").replace_strict(rows, default=None, return_dtype=pl.Int64)
    has_share = ~pl.col("reason").is_in(_WITHOUT_ROWS) & (of >= pl.col("count"))
    share = pl.when(has_share).then(pl.col("count") / of)
    return found.select(
        "source", "table_name", "column_name", "reason", "count", share.alias("share"), "example", "first_seen",
        "last_seen",
    ).sort(["count", "table_name", "column_name", "reason"], descending=[True, False, False, False])  # fmt: skip


def print_quality(settings: Settings, cluster: str | None, since: timedelta | None) -> None:
    """Print the findings of the last day, or of another length of time, as a plain table.

    Args:
        settings: Of the store and the clusters.
        cluster: Name; None: every cluster.
        since: How far back; None: a day.

    Raises:
        SettingsError: No cluster of that name.
        StoreError: The store cannot be read.
    """
    now = datetime.now(UTC)
    begin = now - (since or DEFAULT_SINCE)
    names = clusters_of(settings, cluster)
    with open_store(settings, read_only=True) as store:
        for name in names:
            for line in in_lines(name, read_quality(store, name, begin, now), begin):
                print(line)


def in_lines(cluster: str, found: pl.DataFrame, begin: datetime) -> list[str]:
    """The findings of one cluster as lines, the first of which names it.

    Args:
        cluster: Name of the cluster.
        found: As given by `read_quality`.
        begin: Where the findings begin.
    """
    if found.is_empty():
        return [f"{cluster}: nothing was found wrong since {begin:%Y-%m-%d %H:%M} UTC"]
    lines = [f"{cluster}: {counted(found.height, 'finding')} since {begin:%Y-%m-%d %H:%M} UTC"]
    head = ("count", "share", "column", "first seen (UTC)", "last seen (UTC)", "example")
    rows = [
        (
            f"{row['count']:,}",
            "" if row["share"] is None else _percent(row["share"]),
            _where(row["table_name"], row["column_name"]),
            f"{row['first_seen']:%Y-%m-%d %H:%M}",
            f"{row['last_seen']:%Y-%m-%d %H:%M}",
            row["example"] or "",
        )
        for row in found.iter_rows(named=True)
    ]
    widths = [max(len(cells[i]) for cells in (head, *rows)) for i in range(len(head))]
    for cells, reason in zip((head, *rows), ("reason", *found["reason"]), strict=True):
        padded = zip(cells, widths, (str.rjust,) * 2 + (str.ljust,) * 4, strict=True)
        told = [pad(cell, width) for cell, width, pad in padded]
        lines.append("  " + "  ".join(told).rstrip())
        lines.append(f"      {reason if cells is head else reason_in_words(reason)}")
    return lines


def _percent(share: float) -> str:
    return "<0.01 %" if 0 < share < 0.0001 else f"{share:.2%}".replace("%", " %")


def _where(table: str, column: str) -> str:
    """`gpu_power_w of core_gpu_samples`; the row as a whole bears the name of its time."""
    if column in ("", "ts"):
        return f"rows of {table}"
    return f"{column} of {table}" if column in COLUMNS else f"{column or 'rows'} of {table}"
