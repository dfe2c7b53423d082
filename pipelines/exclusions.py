"""Spans from which nothing may be concluded: nodes out of service, silences, and nodes on which a hint was acted.

Here belongs what the store knows of them; how they censor labels stands in `features/label_spans.py`.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import polars as pl

from features.occupancy import OUT_OF_SERVICE
from features.vocabulary import TIME
from pipelines.store import Reader, Store, Writer

ACTED = timedelta(minutes=15)  # an action may have kept its onset from coming this long
_SCHEMA = {"node": pl.String, "bottleneck_class": pl.String, "start": TIME, "end": TIME}


def read_exclusions(
    store: Store | Reader | Writer, cluster: str, begin: datetime, end: datetime, *, drained_since: datetime
) -> pl.DataFrame:
    """Exclusions that touch [begin, end).

    Maintenance is known by its times. Of a drained node the inventory knows only that it is so now: it counts as
    drained from `drained_since` on. An action that was carried out hides the node for `ACTED`. A silence hides its
    node and class; one of a scope alone hides nothing, for labels have other scopes than hints.

    Args:
        store: The store, or a reader or writer of it.
        cluster: Name of the cluster.
        begin: UTC, included.
        end: UTC, excluded.
        drained_since: From when nodes that are out of service now are left out, UTC.

    Returns:
        `node`, `bottleneck_class` (null: all), `start`, `end` (UTC; null: lasting).
    """
    parts = [pl.DataFrame(schema=_SCHEMA)]
    nodes = store.query('SELECT node, upper(state) AS state FROM core_nodes WHERE "cluster" = ?', [cluster])
    words = [pl.col("state").fill_null("").str.contains(word, literal=True) for word in OUT_OF_SERVICE]
    out = nodes.filter(pl.any_horizontal(words))
    parts.append(_spans(out.select("node", pl.lit(drained_since).alias("start"), pl.lit(None).alias("end"))))
    kept = store.query(
        'SELECT node_list, start_time AS "start", end_time AS "end" FROM core_reservations WHERE "cluster" = ? '
        "AND kind = 'maintenance' AND start_time < ? AND (end_time IS NULL OR end_time > ?)",
        [cluster, end, begin],
    )
    each = kept.with_columns(pl.col("node_list").str.split(",").alias("node")).explode("node", empty_as_null=True)
    parts.append(_spans(each.filter(pl.col("node") != "")))
    acted = store.query(
        'SELECT node, ts AS "start" FROM out_actions WHERE "cluster" = ? AND is_applied AND node IS NOT NULL '
        "AND node <> '' AND action <> 'annotate' AND ts < ? AND ts > ?",  # an annotation moves nothing
        [cluster, end, begin - ACTED],
    )
    parts.append(_spans(acted.with_columns((pl.col("start") + ACTED).alias("end"))))
    silent = store.query(
        'SELECT node, bottleneck_class, start_time AS "start", end_time AS "end" FROM core_silences '
        'WHERE "cluster" = ? AND start_time < ? AND end_time > ? '
        "AND (node IS NOT NULL OR bottleneck_class IS NOT NULL)",
        [cluster, end, begin],
    )
    parts.append(silent.select(pl.col(name).cast(dtype) for name, dtype in _SCHEMA.items()))
    return pl.concat(parts)


def _spans(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select(
        pl.col("node").cast(pl.String), pl.lit(None, dtype=pl.String).alias("bottleneck_class"),
        pl.col("start").cast(TIME), pl.col("end").cast(TIME),
    )  # fmt: skip
