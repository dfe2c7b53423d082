"""Hardware faults, derived from what was recorded: XID codes, nodes that stopped answering, jobs that a node lost.

Several signs of one failure come within minutes of each other; they are one fault, and the most telling sign names it.
Who fell silent, and who is well again: `silences.py`. What follows from faults (risk) is forecast in `models/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

import polars as pl

from features.vocabulary import schema
from features.xid_events import xid_events_of
from features.xids import FATAL_FAULTS, fatal_faults
from pipelines.derive import Derived
from pipelines.settings import IngestSettings
from pipelines.silences import MINUTES, read_silences, read_wellness
from pipelines.spans import derived_span, split
from pipelines.store import Store, Writer

TABLE = "core_faults"
_SAME_FAULT = timedelta(minutes=30)
_CONTEXT = timedelta(minutes=30)
_STEP = timedelta(minutes=5)
_PIECE = timedelta(hours=6)
_OPEN_DAYS = timedelta(days=90)
_RANK = {"xid": 0, "gpu_lost": 1, "node_down": 2, "job_node_fail": 3}


def derive_faults(store: Store, cluster: str, settings: IngestSettings) -> Derived:
    """Bring `core_faults` up to the settled samples and the minutes made of them."""
    due = derived_span(store, cluster, settings, TABLE, MINUTES, _STEP)
    if due is None:
        return Derived()
    begin, end = due
    report = Derived(0, begin)
    fatal = fatal_faults(settings.xids_fatal_too, settings.xids_not_fatal)
    for first, last in split(begin, end, _PIECE):

        def work(writer: Writer, first: datetime = first, last: datetime = last) -> int:
            signs = read_signs(writer, cluster, first - _CONTEXT, last, fatal)
            known = writer.query(
                f'SELECT * FROM {TABLE} WHERE "cluster" = ? AND start_time >= ? AND start_time < ?',
                [cluster, first - _OPEN_DAYS, last],
            )
            new = merge_signs(signs, known)  # signs of the context are known, or were not ripe yet
            opened = pl.concat([known.filter(pl.col("end_time").is_null()), new])
            ended = close_faults(opened, signs, read_wellness(writer, cluster, opened, first, last, fatal))
            key = ["node", "gpu_uuid", "kind", "start_time"]
            writer.set_mark(cluster, TABLE, last)
            return writer.upsert(TABLE, pl.concat([new.join(ended, on=key, how="anti"), ended]))

        report.rows += store.transact(work, purpose="deriving faults")
        report.until = last
    return report


def read_signs(
    writer: Writer, cluster: str, begin: datetime, end: datetime, fatal: Mapping[int, str] = FATAL_FAULTS
) -> pl.DataFrame:
    """Signs of faults in [begin, end): columns of `core_faults` and `rank`, the most telling lowest.

    Args:
        writer: The open transaction.
        cluster: Name of the cluster.
        begin: UTC, included.
        end: UTC, excluded.
        fatal: XID codes that are faults, with their kind.
    """
    downs = writer.query(
        "SELECT node, ts AS start_time FROM (SELECT node, ts, is_up, lag(is_up) OVER (PARTITION BY node ORDER BY ts) "
        'AS before FROM core_node_samples WHERE "cluster" = ? AND ts >= ? AND ts < ? AND is_up IS NOT NULL) '
        "WHERE NOT is_up AND before",
        [cluster, begin, end],
    )
    lost = writer.query(
        'SELECT node_list, end_time AS start_time FROM core_jobs WHERE "cluster" = ? AND end_time >= ? '
        "AND end_time < ? AND (state = 'NODE_FAIL' OR state = 'BOOT_FAIL' AND job_id NOT SIMILAR TO '.*[-/].*') "
        "AND node_list IS NOT NULL AND node_list NOT LIKE '%,%'",
        [cluster, begin, end],
    ).rename({"node_list": "node"})  # of a job on several nodes the record does not say which one failed
    silent = read_silences(writer, cluster, begin, end)
    parts = [
        read_xids(writer, cluster, begin, end, fatal),
        downs.with_columns(kind=pl.lit("node_down"), rank=pl.lit(_RANK["node_down"])),
        silent.with_columns(pl.col("kind").replace_strict(_RANK, return_dtype=pl.Int32).alias("rank")),
        lost.with_columns(kind=pl.lit("job_node_fail"), rank=pl.lit(_RANK["job_node_fail"])),
    ]
    signs = pl.concat(parts, how="diagonal_relaxed")
    return signs.select(
        pl.lit(cluster).alias("cluster"),
        "node",
        pl.col("gpu_uuid").fill_null("").alias("gpu_uuid"),  # a fault of the node, not of one GPU
        "kind",
        pl.col("xid").cast(pl.Int32),
        "start_time",
        pl.lit(None, dtype=pl.Datetime("us", "UTC")).alias("end_time"),
        pl.col("rank").cast(pl.Int32),
    )


def read_xids(
    writer: Writer, cluster: str, begin: datetime, end: datetime, fatal: Mapping[int, str] = FATAL_FAULTS
) -> pl.DataFrame:
    """Fatal XID events in [begin, end): `node`, `gpu_uuid`, `xid`, `start_time`, `kind`, `rank`.

    Changes of the last code, and rises of what the exporter counts of a code, with or without the last one.
    """
    changes = writer.query(
        "SELECT node, gpu_uuid, ts, xid_last FROM ("
        "SELECT node, gpu_uuid, ts, xid_last, lag(xid_last) OVER (PARTITION BY node, gpu_uuid ORDER BY ts) AS before "
        'FROM core_gpu_samples WHERE "cluster" = ? AND ts >= ? AND ts < ? AND xid_last IS NOT NULL) '
        "WHERE xid_last IS DISTINCT FROM before",
        [cluster, begin, end],
    )
    # The row before a change tells that the GPU was seen before, and since when a count was missing.
    gpu = "(PARTITION BY node, gpu_uuid ORDER BY ts)"
    counts = writer.query(
        "SELECT node, gpu_uuid, ts, xid_counts, xid_events FROM (SELECT node, gpu_uuid, ts, xid_counts, xid_events, "
        f"row_number() OVER {gpu} AS number, lag(xid_counts) OVER {gpu} AS c1, lead(xid_counts) OVER {gpu} AS c2, "
        f"lag(xid_events) OVER {gpu} AS n1, lead(xid_events) OVER {gpu} AS n2 "
        'FROM core_gpu_health WHERE "cluster" = ? AND ts >= ? AND ts < ?) WHERE xid_counts IS DISTINCT FROM c1 '
        "OR xid_counts IS DISTINCT FROM c2 OR xid_events IS DISTINCT FROM n1 OR xid_events IS DISTINCT FROM n2 "
        "OR number = 1",
        [cluster, begin, end],
    ).with_columns(pl.col("ts") + timedelta(minutes=1))  # a minute's last value, kept at its beginning
    of = pl.lit(cluster).alias("cluster")
    return (
        xid_events_of(changes.with_columns(of), counts.with_columns(of), fatal=fatal)
        .filter(pl.col("xid").is_in(list(fatal)) & ~pl.col("is_consequence"))
        .select(
            "node",
            "gpu_uuid",
            "xid",
            pl.col("ts").alias("start_time"),
            pl.col("xid").replace_strict(dict(fatal), return_dtype=pl.String).alias("kind"),
            pl.lit(_RANK["xid"]).alias("rank"),
        )
    )


def merge_signs(signs: pl.DataFrame, known: pl.DataFrame) -> pl.DataFrame:
    """New faults among the signs: those of one node within half an hour are one, beginning with the first.

    Args:
        signs: As given by `read_signs`.
        known: Faults that are in the store already; signs that follow one of them are not new.

    Returns:
        Rows of `core_faults`.
    """
    last_of = dict(known.group_by("node").agg(pl.col("start_time").max()).iter_rows())
    faults: list[dict] = []
    for sign in signs.sort("start_time", "rank", "node", "gpu_uuid").iter_rows(named=True):
        previous = last_of.get(sign["node"])
        if previous is not None and sign["start_time"] - previous < _SAME_FAULT:
            fault = next((f for f in reversed(faults) if f["node"] == sign["node"]), None)
            if fault is not None and sign["rank"] < fault["rank"]:
                for name in ("gpu_uuid", "kind", "xid", "rank"):
                    fault[name] = sign[name]
            continue
        last_of[sign["node"]] = sign["start_time"]
        faults.append(dict(sign))
    return pl.DataFrame(faults, schema=schema(TABLE) | {"rank": pl.Int32}).drop("rank")


def close_faults(opened: pl.DataFrame, signs: pl.DataFrame, wellness: pl.DataFrame) -> pl.DataFrame:
    """Open faults that are over after the last sign of their node, with the first such minute as their end.

    Args:
        opened: Rows of `core_faults` without an end.
        signs: As given by `read_signs`.
        wellness: As given by `read_wellness`.

    Returns:
        Those that ended, in the columns of `opened`.
    """
    key = ["node", "gpu_uuid", "kind", "start_time"]
    last_sign = signs.group_by("node").agg(pl.col("start_time").max().alias("last_sign"))
    candidates = opened.join(last_sign, on="node", how="left").with_columns(
        pl.max_horizontal("start_time", "last_sign").alias("since")
    )
    ends = (
        candidates.join(wellness, on=key)
        .filter(pl.col("ts") > pl.col("since"))
        .group_by(key)
        .agg(pl.col("ts").min().alias("ended"))
    )
    found = candidates.join(ends, on=key)
    return found.with_columns(pl.col("ended").alias("end_time")).select(opened.columns)
