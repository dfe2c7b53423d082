"""XID events out of what exporters give: the last code as a gauge that stays, and a count that falls by itself.

Only the change of such series tells that something happened. What codes mean stands in `xids.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl

from features.vocabulary import TIME
from features.xids import CONSEQUENCES, FATAL_FAULTS

EVENT_SCHEMA = {
    "cluster": pl.String, "node": pl.String, "gpu_uuid": pl.String, "ts": TIME, "xid": pl.Int32,
    "is_consequence": pl.Boolean, "first_xid": pl.Int32, "first_ts": TIME,
}  # fmt: skip
# Codes of one failure come within seconds, but are seen at the exporter's own pace, every 30 s as a rule.
SAME_FAILURE = timedelta(seconds=60)
_GPU = ("cluster", "node", "gpu_uuid")


def xid_events_of(
    samples: pl.DataFrame, *, fatal: Collection[int] = FATAL_FAULTS, same_failure: timedelta = SAME_FAILURE
) -> pl.DataFrame:
    """Events of every GPU.

    An event is a change of the last code to another one that is not 0, or a rise of `xid_events` (the count of a
    rolling window) while the code stays. A code that was there at the first sample is old; 0 or nothing after a code
    (the exporter was restarted) is no recovery, and the same code after nothing no event.

    Args:
        samples: `cluster`, `node`, `gpu_uuid`, `ts`, `xid_last`, and `xid_events` where an exporter gives it. Samples
            in which nothing changed may be left out.
        fatal: Codes after which a GPU is unfit for work.
        same_failure: What follows the first code of a failure within this time may be its consequence.

    Returns:
        `EVENT_SCHEMA`, sorted by GPU and time. `is_consequence`: the code came closely after another one of the GPU,
        and is no fatal one after one that is not. `first_xid` and `first_ts` name the code that began the failure, the
        event's own when it did itself.

    Raises:
        ValueError: A column is missing.
    """
    missing = [name for name in (*_GPU, "ts", "xid_last") if name not in samples.columns]
    if missing:
        raise ValueError(f"XID events need {', '.join(missing)}; the samples have: {', '.join(samples.columns)}")
    rows = samples.filter(pl.col("xid_last").is_not_null()).sort(*_GPU, "ts")
    before = pl.col("xid_last").shift().over(_GPU)
    happens = (pl.col("xid_last") != before) & (pl.col("xid_last") != 0)
    if "xid_events" in rows.columns:
        counted = pl.col("xid_events").forward_fill().over(_GPU)
        rose = counted > counted.shift().over(_GPU)
        happens |= rose & (pl.col("xid_last") == before) & (pl.col("xid_last") != 0)
    found = rows.filter(happens.fill_null(False)).select(*_GPU, "ts", pl.col("xid_last").cast(pl.Int32).alias("xid"))
    return pl.DataFrame(_attributed(found, fatal, same_failure), schema=EVENT_SCHEMA)


def _attributed(events: pl.DataFrame, fatal: Collection[int], same_failure: timedelta) -> list[dict[str, Any]]:
    """Events with the code that began their failure. They are few: one by one is quick enough."""
    attributed = []
    gpu: tuple[str, ...] | None = None
    first_xid, first_ts = 0, datetime(1970, 1, 1, tzinfo=UTC)
    for event in events.iter_rows(named=True):
        last_gpu, gpu = gpu, tuple(event[name] for name in _GPU)
        code, ts = event["xid"], event["ts"]
        follows = (
            gpu == last_gpu
            and ts - first_ts <= same_failure
            and code != first_xid
            and (code in CONSEQUENCES or first_xid in fatal or code not in fatal)
        )
        if not follows:
            first_xid, first_ts = code, ts
        attributed.append({**event, "is_consequence": follows, "first_xid": first_xid, "first_ts": first_ts})
    return attributed
