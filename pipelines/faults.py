"""Hardware faults, derived from what was recorded: XID codes, nodes that stopped answering, jobs that a node lost.

Several signs of one failure come within minutes of each other; they are one fault, and the most telling sign names it.
What follows from faults (risk) is forecast in `models/`.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import polars as pl

from features.vocabulary import schema
from pipelines.derive import Derived
from pipelines.settings import IngestSettings
from pipelines.spans import derived_from, settled_until, split
from pipelines.store import Store, Writer

TABLE = "core_faults"
# Codes after which a GPU needs a reset, a reboot or a replacement (NVIDIA's catalogue); those of applications
# (13, 31, 43, 45, …), of contained errors (94) and of recorded remaps (63) are no hardware faults.
FATAL_XIDS = {
    46: "gpu_timeout", 48: "gpu_double_bit_ecc", 62: "gpu_firmware_halt", 64: "gpu_row_remap_failed", 74: "nvlink",
    79: "gpu_fallen_off_bus", 95: "gpu_uncontained_memory", 109: "gpu_context_timeout", 110: "gpu_security",
    119: "gpu_firmware_timeout", 120: "gpu_firmware_error", 136: "nvlink", 140: "gpu_unrecovered_ecc",
    143: "gpu_initialisation", 155: "nvlink", 156: "gpu_resource_retired", 158: "gpu_fatal_timeout",
    **dict.fromkeys(range(144, 151), "nvlink"),
}  # fmt: skip
_SAME_FAULT = timedelta(minutes=30)
_CONTEXT = timedelta(minutes=30)
_STEP = timedelta(minutes=5)
_PIECE = timedelta(hours=6)
_RANK = {"xid": 0, "node_down": 1, "job_node_fail": 2}


def derive_faults(store: Store, cluster: str, settings: IngestSettings) -> Derived:
    """Bring `core_faults` up to the settled samples."""
    end = settled_until(store, cluster, settings)
    begin = None if end is None else derived_from(store, cluster, TABLE, _STEP, end)
    report = Derived(0, begin)
    if end is None or begin is None:
        return report
    for first, last in split(begin, end, _PIECE):

        def work(writer: Writer, first: datetime = first, last: datetime = last) -> int:
            signs = read_signs(writer, cluster, first - _CONTEXT, last)
            known = writer.query(
                f'SELECT * FROM {TABLE} WHERE "cluster" = ? AND start_time >= ? AND start_time < ?',
                [cluster, first - timedelta(days=30), last],
            )
            rows = merge_signs(signs.filter(pl.col("start_time") >= first), known)
            ended = close_faults(known, signs, read_recovered(writer, cluster, first, last))
            rows = pl.concat([rows, ended]) if not ended.is_empty() else rows
            writer.set_mark(cluster, TABLE, last)
            return writer.upsert(TABLE, rows)

        report.rows += store.transact(work, purpose="deriving faults")
        report.until = last
    return report


def read_signs(writer: Writer, cluster: str, begin: datetime, end: datetime) -> pl.DataFrame:
    """Signs of faults in [begin, end): columns of `core_faults` and `rank`, the most telling lowest."""
    xids = writer.query(
        "SELECT node, gpu_uuid, xid_last AS xid, ts AS start_time FROM ("
        "SELECT node, gpu_uuid, ts, xid_last, lag(xid_last) OVER (PARTITION BY gpu_uuid ORDER BY ts) AS before "
        'FROM core_gpu_samples WHERE "cluster" = ? AND ts >= ? AND ts < ? AND xid_last IS NOT NULL) '
        "WHERE xid_last <> before AND xid_last = ANY(?)",
        [cluster, begin, end, list(FATAL_XIDS)],
    )
    downs = writer.query(
        "SELECT node, ts AS start_time FROM (SELECT node, ts, is_up, lag(is_up) OVER (PARTITION BY node ORDER BY ts) "
        'AS before FROM core_node_samples WHERE "cluster" = ? AND ts >= ? AND ts < ? AND is_up IS NOT NULL) '
        "WHERE NOT is_up AND before",
        [cluster, begin, end],
    )
    lost = writer.query(
        'SELECT node_list, end_time AS start_time FROM core_jobs WHERE "cluster" = ? AND end_time >= ? '
        "AND end_time < ? AND state = 'NODE_FAIL' AND node_list IS NOT NULL AND node_list NOT LIKE '%,%'",
        [cluster, begin, end],
    ).rename({"node_list": "node"})  # of a job on several nodes the record does not say which one failed
    parts = [
        xids.with_columns(
            pl.col("xid").replace_strict(FATAL_XIDS, return_dtype=pl.String).alias("kind"), rank=pl.lit(0)
        ),
        downs.with_columns(kind=pl.lit("node_down"), rank=pl.lit(_RANK["node_down"])),
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
    for sign in signs.sort("start_time", "rank").iter_rows(named=True):
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


def read_recovered(writer: Writer, cluster: str, begin: datetime, end: datetime) -> pl.DataFrame:
    """First moment in [begin, end) at which each node was well: up, and every GPU without a fatal XID."""
    return writer.query(
        "SELECT node, min(ts) AS well_at FROM (SELECT node, ts, bool_and(xid_last IS NULL OR NOT xid_last = ANY(?)) "
        'AS well FROM core_gpu_samples WHERE "cluster" = ? AND ts >= ? AND ts < ? GROUP BY node, ts) WHERE well '
        "GROUP BY node",
        [list(FATAL_XIDS), cluster, begin, end],
    )


def close_faults(known: pl.DataFrame, signs: pl.DataFrame, recovered: pl.DataFrame) -> pl.DataFrame:
    """Known open faults whose node reports well again, after its last sign, with their end."""
    if known.is_empty() or recovered.is_empty():
        return known.clear()
    last_sign = signs.group_by("node").agg(pl.col("start_time").max().alias("last_sign"))
    found = (
        known.filter(pl.col("end_time").is_null())
        .join(recovered, on="node")
        .join(last_sign, on="node", how="left")
        .filter(
            (pl.col("well_at") > pl.col("start_time"))
            & (pl.col("last_sign").is_null() | (pl.col("well_at") > pl.col("last_sign")))
        )
        .with_columns(pl.col("well_at").alias("end_time"))
    )
    return found.select(known.columns)
