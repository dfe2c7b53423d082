"""Signs that GPUs are about to fail, derived from their minutes: `core_gpu_signs`.

Here belong reading and the span of a run; what is a sign stands in `features/hardware_signs.py`, what it weighs is
learned in `models/recurrence.py`.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import polars as pl

from features.hardware_signs import SIGN_SCHEMA, sign_events
from features.slots import slot_of, without_removed
from features.vocabulary import conform
from features.xids import fatal_faults
from pipelines.derive import Derived
from pipelines.settings import IngestSettings
from pipelines.silences import MINUTES, read_silences
from pipelines.spans import derived_span, split
from pipelines.store import Reader, Store, Writer

TABLE = "core_gpu_signs"
SILENT_MINUTES = 2  # of one GPU while others of its node report: a sign; after five it is a fault
_MINUTE = timedelta(minutes=1)
_CONTEXT = timedelta(minutes=15)
_STEP = timedelta(minutes=5)
_PIECE = timedelta(hours=1)
_COUNTERS = ("xid_last", "ecc_uncorrected_total", "remapped_rows_total", "nvlink_error_total")


def derive_signs(store: Store, cluster: str, settings: IngestSettings) -> Derived:
    """Bring `core_gpu_signs` up to the settled samples and the minutes made of them."""
    due = derived_span(store, cluster, settings, TABLE, MINUTES, _STEP)
    if due is None:
        return Derived()
    begin, end = due
    report = Derived(0, begin)
    fatal = set(fatal_faults(settings.xids_fatal_too, settings.xids_not_fatal))
    for first, last in split(begin, end, _PIECE):

        def work(writer: Writer, first: datetime = first, last: datetime = last) -> int:
            rows = made_signs(writer, cluster, first, last).filter(~pl.col("xid").is_in(fatal).fill_null(False))
            writer.set_mark(cluster, TABLE, last)
            return writer.upsert(TABLE, conform(rows.with_columns(pl.lit(cluster).alias("cluster")), TABLE))

        report.rows += store.transact(work, purpose="deriving signs of hardware")
        report.until = last
    return report


def made_signs(writer: Writer, cluster: str, begin: datetime, end: datetime) -> pl.DataFrame:
    """Signs that became known in [begin, end), in the columns of `SIGN_SCHEMA`."""
    span = [cluster, begin - _CONTEXT, end]
    over = "(PARTITION BY node, gpu_uuid ORDER BY ts)"
    changed = " OR ".join(f"{name} IS DISTINCT FROM lag({name}) OVER {over}" for name in _COUNTERS)
    rows = writer.query(
        f'SELECT ts, "cluster", node, gpu_uuid, is_thermal_slowdown, {", ".join(_COUNTERS)} FROM {MINUTES} '
        f'WHERE "cluster" = ? AND ts >= ? AND ts < ? QUALIFY {changed} OR is_thermal_slowdown '
        f"OR row_number() OVER {over} = 1 ORDER BY node, gpu_uuid, ts",
        span,
    )
    health = writer.query(
        'SELECT ts, "cluster", node, gpu_uuid, xid_counts, xid_events FROM core_gpu_health WHERE "cluster" = ? '
        f"AND ts >= ? AND ts < ? QUALIFY xid_counts IS DISTINCT FROM lag(xid_counts) OVER {over} "
        f"OR xid_counts IS DISTINCT FROM lead(xid_counts) OVER {over} OR xid_events IS DISTINCT FROM "
        f"lag(xid_events) OVER {over} OR row_number() OVER {over} = 1 ORDER BY node, gpu_uuid, ts",
        span,
    )
    slots = writer.query('SELECT * FROM core_slots WHERE "cluster" = ? AND start_time < ?', [cluster, end])
    events = sign_events(slot_of(rows, slots, ["driver_version"]), health, span=_MINUTE)
    silent = read_silences(writer, cluster, begin - _CONTEXT, end, minutes=SILENT_MINUTES)
    silent = silent.filter(pl.col("kind") == "gpu_lost").select(
        "node", "gpu_uuid", (pl.col("start_time") + SILENT_MINUTES * _MINUTE).alias("ts"),
        pl.lit("silent").alias("sign"), pl.lit(1.0).alias("amount"), pl.lit(None, dtype=pl.Int32).alias("xid"),
    )  # fmt: skip
    both = pl.concat([events, silent.cast(pl.Schema(SIGN_SCHEMA))])
    return both.filter((pl.col("ts") >= begin) & (pl.col("ts") < end)).unique(
        ["node", "gpu_uuid", "sign", "xid", "ts"], maintain_order=True
    )


def read_signs_of(reader: Reader | Store, cluster: str, begin: datetime, end: datetime) -> pl.DataFrame:
    """Signs of a span by the hour: the first moment of each GPU, sign, code and hour, with the sum of `amount`.

    Boards that were taken out since are left out: what they did is no sign of the node any more.
    """
    found = reader.query(
        "SELECT min(ts) AS ts, \"cluster\", node, gpu_uuid, sign, if(sign = 'hot', 1, sum(amount)) AS amount, xid "
        f'FROM {TABLE} WHERE "cluster" = ? AND ts >= ? AND ts < ? '
        "GROUP BY \"cluster\", node, gpu_uuid, sign, xid, date_trunc('hour', ts) "
        "ORDER BY ts, node, gpu_uuid, sign, xid",
        [cluster, begin, end],
    )
    slots = reader.query('SELECT * FROM core_slots WHERE "cluster" = ? AND start_time < ?', [cluster, end])
    return without_removed(found, slots)
