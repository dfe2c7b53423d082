"""Who fell silent, and who is well again: what the minutes of GPUs tell of faults without saying their names.

Here belongs what is read from absence: GPUs and nodes that stopped reporting, and whether those that a fault took are
back. What is done with it stands in `faults.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

import polars as pl

from features.xids import FATAL_FAULTS
from pipelines.store import Writer

MINUTES = "core_gpu_minutes"
_SILENT_MINUTES = 5  # a shorter silence is a restart of an exporter, or a scrape that was missed
_MINUTE = timedelta(minutes=1)
_SILENCE = _SILENT_MINUTES * _MINUTE
_BEFORE = (15 * _MINUTE, 3 * _MINUTE)  # of a fault: the last code of a GPU then was there without the fault
_OUT_OF_SERVICE = ("MAINT", "DRAIN", "FUTURE", "POWERED_DOWN", "POWER_DOWN", "REBOOT")
_FAULT = ("node", "gpu_uuid", "kind", "start_time")
_TIME = pl.Datetime("us", "UTC")


def read_silences(
    writer: Writer, cluster: str, begin: datetime, end: datetime, *, minutes: int = _SILENT_MINUTES
) -> pl.DataFrame:
    """GPUs and nodes that stopped reporting while others went on: `node`, `gpu_uuid`, `start_time`, `kind`.

    Minutes in which nobody reported (an outage of the source) do not count, nor do nodes out of service, nor GPUs that
    were given back where exporters show none that nobody holds (dynamic resource allocation).

    Args:
        writer: The open transaction.
        cluster: Name of the cluster.
        begin: UTC, included.
        end: UTC, excluded.
        minutes: More than this many minutes without a word are a silence.
    """
    span = [cluster, begin, end]
    silent = writer.query(
        f'WITH seen AS (SELECT ts, node, gpu_uuid, last(job_id) AS job_id FROM {MINUTES} WHERE "cluster" = ? '
        "AND ts >= ? AND ts < ? GROUP BY ts, node, gpu_uuid), "
        "minutes AS (SELECT ts, row_number() OVER (ORDER BY ts) AS i FROM (SELECT DISTINCT ts FROM seen)), "
        "placed AS (SELECT ts, node, gpu_uuid, job_id, i, "
        "lead(i) OVER (PARTITION BY node, gpu_uuid ORDER BY i) AS following FROM seen JOIN minutes USING (ts)), "
        "sizes AS (SELECT ts, node, count(*) AS gpus FROM seen GROUP BY ts, node) "
        "SELECT node, gpu_uuid, ts, job_id, gpus FROM placed JOIN sizes USING (ts, node) "
        "WHERE coalesce(following, (SELECT max(i) + 1 FROM minutes)) - i > ?",
        [*span, minutes],
    )
    idle = writer.query('SELECT node, upper(state) AS state FROM core_nodes WHERE "cluster" = ?', [cluster])
    out = idle.filter(pl.any_horizontal(pl.col("state").str.contains(word, literal=True) for word in _OUT_OF_SERVICE))
    silent = silent.filter(~pl.col("node").is_in(out["node"].implode()))
    silent = _with_given_back(writer, silent, span)
    start = (pl.col("ts") + _MINUTE).alias("start_time")
    # All GPUs of a node at the same minute: the node. Some of them: these.
    is_node = pl.len().over("node", "ts") >= pl.col("gpus")
    nodes = (
        silent.filter(is_node)
        .group_by("node", "ts")
        .agg((pl.col("is_given_back") & pl.col("is_up")).all().alias("is_well"))
        .filter(~pl.col("is_well"))
        .select("node", pl.lit("").alias("gpu_uuid"), start, kind=pl.lit("node_down"))
    )
    gpus = silent.filter(~is_node & ~pl.col("is_given_back")).select("node", "gpu_uuid", start, kind=pl.lit("gpu_lost"))
    return pl.concat([nodes, gpus])


def _with_given_back(writer: Writer, silent: pl.DataFrame, span: list) -> pl.DataFrame:
    """The silences with `is_given_back` and `is_up`: whether the node answered otherwise when they had lasted a while.

    Given back: with the end of the job that held it, all of whose GPUs on that node went, where exporters show no GPU
    that nobody holds. Where GPUs without a job are shown, one that vanishes is gone.
    """
    if silent.is_empty():
        return silent.with_columns(pl.lit(False).alias("is_given_back"), pl.lit(False).alias("is_up"))
    free = writer.query(
        f'SELECT 1 FROM {MINUTES} WHERE "cluster" = ? AND ts >= ? AND ts < ? AND job_id IS NULL '
        "GROUP BY node, gpu_uuid HAVING count(*) >= ? LIMIT 1",
        [*span, _SILENT_MINUTES],
    )
    ups = writer.query(
        'SELECT node, max(ts) AS up_at FROM core_node_samples WHERE "cluster" = ? AND ts >= ? AND ts < ? AND is_up '
        "GROUP BY node",
        span,
    )
    jobs = writer.query(
        f'SELECT node, job_id, max(ts) AS held_until FROM {MINUTES} WHERE "cluster" = ? AND ts >= ? AND ts < ? '
        "AND job_id = ANY(?) GROUP BY node, job_id",
        [*span, silent["job_id"].drop_nulls().unique().to_list()],
    )
    known = silent.join(jobs, on=["node", "job_id"], how="left").join(ups, on="node", how="left")
    ended = (pl.col("held_until") <= pl.col("ts") + _MINUTE).fill_null(False)
    return known.with_columns(
        (ended & pl.lit(free.is_empty())).alias("is_given_back"),
        (pl.col("up_at") > pl.col("ts") + _SILENCE).fill_null(False).alias("is_up"),
    )


def read_wellness(
    writer: Writer,
    cluster: str,
    faults: pl.DataFrame,
    begin: datetime,
    end: datetime,
    fatal: Mapping[int, str] = FATAL_FAULTS,
) -> pl.DataFrame:
    """Minutes in [begin, end) at which faults are over: `node`, `gpu_uuid`, `kind`, `start_time` of the fault, `ts`.

    Over: no GPU that the node reports has a fatal XID in the window that it counts, or as its last one, unless that has
    stood there since before the node's first fault, for days perhaps, and says nothing of it; and a node that was
    down reports every GPU that the inventory says it has; the GPUs of any other fault, its own and those that fell
    silent with it, report again or have another board in their place.

    Args:
        writer: The open transaction.
        cluster: Name of the cluster.
        faults: Rows of `core_faults` that have no end.
        begin: UTC, included.
        end: UTC, excluded.
        fatal: XID codes that are faults, with their kind.
    """
    nodes, span = faults["node"].unique().to_list(), [cluster, begin, end]
    counted = rf"(^| )({'|'.join(map(str, fatal)) or 'none'})=[0-9]+( |$)"
    stood = _stood_before(writer, cluster, faults, fatal)
    minutes = writer.query(
        'WITH counted AS (SELECT DISTINCT node, ts FROM core_gpu_health WHERE "cluster" = ? AND ts >= ? AND ts < ? '
        "AND node = ANY(?) AND regexp_matches(xid_counts, ?)), "
        "minutes AS (SELECT node, ts, list(DISTINCT gpu_uuid) AS here, "
        "bool_or(xid_last = ANY(?) AND NOT list_contains(?, node || ' ' || gpu_uuid || ' ' || xid_last)) AS is_ill "
        f'FROM {MINUTES} WHERE "cluster" = ? AND ts >= ? AND ts < ? AND node = ANY(?) GROUP BY node, ts), '
        'fitted AS (SELECT node, max(gpus) AS fitted FROM core_nodes WHERE "cluster" = ? GROUP BY node) '
        "SELECT node, ts, here, len(here) >= coalesce(fitted, 1) AS is_whole, "
        "len(here) >= fitted AS has_all FROM minutes LEFT JOIN fitted USING (node) "
        "WHERE NOT coalesce(is_ill, false) AND (node, ts) NOT IN (SELECT (node, ts) FROM counted) ORDER BY ts",
        [*span, nodes, counted, list(fatal), stood, *span, nodes, cluster],
    )
    found = [
        minutes.filter(pl.col("is_whole")).select("node", "ts").join(faults.filter(gpu_uuid=""), on="node")
        if not minutes.is_empty()
        else faults.clear().with_columns(pl.lit(None, dtype=_TIME).alias("ts"))
    ]
    of_gpus = faults.filter((pl.col("gpu_uuid") != "") & pl.col("node").is_in(minutes["node"].unique().implode()))
    if not of_gpus.is_empty():
        slots = writer.query('SELECT * FROM core_slots WHERE "cluster" = ? AND node = ANY(?)', [cluster, nodes])
        for fault in of_gpus.iter_rows(named=True):
            back = pl.col("has_all").fill_null(False)
            gone = _gone_with(writer, cluster, fault)
            back |= pl.all_horizontal(_is_back(gpu, fault, slots) for gpu in gone)
            well = minutes.filter((pl.col("node") == fault["node"]) & back)
            found.append(well.select("ts", *(pl.lit(fault[name]).alias(name) for name in _FAULT)))
    return pl.concat([part.select(*_FAULT, "ts").cast({"start_time": _TIME, "ts": _TIME}) for part in found])


def _stood_before(writer: Writer, cluster: str, faults: pl.DataFrame, fatal: Mapping[int, str]) -> list[str]:
    """Fatal last codes that GPUs had before the first fault of their node: node, GPU and code of each."""
    found: set[str] = set()
    for node, start in faults.group_by("node").agg(pl.col("start_time").min()).iter_rows():
        codes = writer.query(
            f'SELECT DISTINCT gpu_uuid, xid_last FROM {MINUTES} WHERE "cluster" = ? AND node = ? AND ts >= ? '
            "AND ts < ? AND xid_last = ANY(?)",
            [cluster, node, *(start - before for before in _BEFORE), list(fatal)],
        )
        found |= {f"{node} {gpu} {code}" for gpu, code in codes.iter_rows()}
    return sorted(found)


def _gone_with(writer: Writer, cluster: str, fault: dict) -> list[str]:
    """The GPU of a fault, and those of its node that reported right before and not any more right after."""
    start = fault["start_time"]
    gone = writer.query(
        f'SELECT gpu_uuid FROM {MINUTES} WHERE "cluster" = ? AND node = ? AND ts >= ? AND ts < ? GROUP BY gpu_uuid '
        "HAVING max(ts) <= ?",
        [cluster, fault["node"], start - _SILENCE, start + _SILENCE + 2 * _MINUTE, start + _MINUTE],
    )
    return sorted({fault["gpu_uuid"], *gone["gpu_uuid"]})


def _is_back(gpu: str, fault: dict, slots: pl.DataFrame) -> pl.Expr:
    """Minutes at which a GPU reports, or a board that was not in the node before sits in its slot."""
    here = pl.col("here").list.contains(gpu)
    on_node = slots.filter(pl.col("node") == fault["node"])
    before = on_node.filter(pl.col("start_time") <= fault["start_time"])
    its = before.filter(pl.col("gpu_uuid") == gpu).sort("start_time").tail(1)
    others = on_node.join(before, on="gpu_uuid", how="anti").filter(pl.col("slot").is_in(its["slot"].implode()))
    replaced_at = others["start_time"].min()
    return here if replaced_at is None else here | (pl.col("ts") >= pl.lit(replaced_at))
