"""XID events out of what exporters give: the last code as a gauge that stays, and counts of each code.

Only the change of such series tells that something happened. What codes mean stands in `xids.py`, how counts are
written in `xid_counts.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import polars as pl

from features.vocabulary import TIME
from features.xid_counts import read
from features.xids import CONSEQUENCES, FATAL_FAULTS

EVENT_SCHEMA = {
    "cluster": pl.String, "node": pl.String, "gpu_uuid": pl.String, "ts": TIME, "xid": pl.Int32,
    "is_consequence": pl.Boolean, "first_xid": pl.Int32, "first_ts": TIME,
}  # fmt: skip
# Codes of one failure come within seconds, but are seen at the exporter's own pace, every 30 s as a rule.
SAME_FAILURE = timedelta(seconds=60)
# The gauge and the count tell of one event, each at its own pace; counts are kept once a minute.
_SAME_EVENT = timedelta(seconds=120)
# A count since the exporter began that is missing for this long began anew; it may be absent from a sample or two.
_FORGOTTEN = timedelta(minutes=10)
_GPU = ("cluster", "node", "gpu_uuid")
_TOLD = ("xid_last", "xid_counts")


class _Event(NamedTuple):
    gpu: tuple[str, ...]
    ts: datetime
    code: int
    is_counted: bool


def xid_events_of(
    samples: pl.DataFrame,
    counts: pl.DataFrame | None = None,
    *,
    fatal: Collection[int] = FATAL_FAULTS,
    same_failure: timedelta = SAME_FAILURE,
) -> pl.DataFrame:
    """Events of every GPU.

    An event is a rise of a code's count, whatever the gauge says, or a change of the last code to another one that is
    not 0; both within two minutes are one. A code that was there at the first sample is old. 0 or nothing after a code
    (the exporter was restarted) is no recovery, and the same code after nothing no event. A count without a code
    (`xid_events` where `xid_counts` is null) that rises is one of the last code.

    Args:
        samples: `cluster`, `node`, `gpu_uuid`, `ts` and `xid_last`; or `xid_counts`, when there is no gauge.
        counts: Key, `ts`, `xid_counts`, and `xid_events` where there is one: rows of `core_gpu_health`, also those
            without counts, since they tell that the GPU was seen before. None: they stand in the samples.
        fatal: Codes after which a GPU is unfit for work.
        same_failure: What follows the first code of a failure within this time may be its consequence.

    Returns:
        `EVENT_SCHEMA`, sorted by GPU and time. `is_consequence`: the code came closely after another one of the GPU,
        and is no fatal one after one that is not. `first_xid` and `first_ts` name the code that began the failure, the
        event's own when it did itself. Samples and counts in which nothing changed may be left out, but for the last
        row before a change.

    Raises:
        ValueError: A column is missing.
    """
    missing = [name for name in (*_GPU, "ts") if name not in samples.columns]
    if missing or not any(name in samples.columns for name in _TOLD):
        needed = ", ".join(missing or _TOLD[:1])
        raise ValueError(f"XID events need {needed}; the samples have: {', '.join(samples.columns)}")
    rows = samples.sort(*_GPU, "ts")
    gauge = rows.filter(pl.col("xid_last").is_not_null()) if "xid_last" in rows.columns else None
    counted = rows if counts is None else counts.sort(*_GPU, "ts")
    found = list(_changes(gauge)) if gauge is not None else []
    if any(name in counted.columns for name in ("xid_counts", "xid_events")):
        found += _rises(_changed(_with_gauge(counted, gauge)))
    # Of codes that came at once the fatal one goes first: the others may be its consequences.
    found.sort(key=lambda event: (event.gpu, event.ts, event.code not in fatal, event.code in CONSEQUENCES, event.code))
    return pl.DataFrame(_attributed(_once(found), fatal, same_failure), schema=EVENT_SCHEMA, orient="row")


def _changes(gauge: pl.DataFrame) -> Iterator[_Event]:
    before = pl.col("xid_last").shift().over(_GPU)
    happens = (pl.col("xid_last") != before) & (pl.col("xid_last") != 0)
    for *gpu, ts, code in gauge.filter(happens.fill_null(False)).select(*_GPU, "ts", "xid_last").iter_rows():
        yield _Event(tuple(gpu), ts, code, False)


def _with_gauge(counted: pl.DataFrame, gauge: pl.DataFrame | None) -> pl.DataFrame:
    """Counts with the last code of that time."""
    types = {"xid_counts": pl.String, "xid_events": pl.Float64}
    rows = counted.select(
        *_GPU, "ts",
        *(pl.col(n) if n in counted.columns else pl.lit(None, dtype=t).alias(n) for n, t in types.items()),
    )  # fmt: skip
    if gauge is None or gauge.is_empty():
        return rows.with_columns(pl.lit(None, dtype=pl.Int32).alias("xid_last"))
    codes = gauge.select(*_GPU, "ts", "xid_last").sort("ts")
    return rows.sort("ts").join_asof(codes, on="ts", by=list(_GPU), check_sortedness=False).sort(*_GPU, "ts")


def _changed(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows that differ from the one before or after: of a day of minutes a few."""
    names = ("xid_counts", "xid_events", "xid_last")
    like = [pl.all_horizontal(pl.col(n).eq_missing(pl.col(n).shift(by).over(_GPU)) for n in names) for by in (1, -1)]
    ends = pl.int_range(pl.len()).over(_GPU)
    return rows.filter(~(like[0] & like[1]) | (ends == 0) | (ends == pl.len().over(_GPU) - 1))


def _rises(rows: pl.DataFrame) -> Iterator[_Event]:
    """Rises of counts, row by row: what changed is little."""
    gpu: tuple[str, ...] = ()
    course = _Course()
    for *key, ts, text, total, last in rows.iter_rows():
        if tuple(key) != gpu:
            gpu, course = tuple(key), _Course()
        for code in course.rises(ts, text, total, last):
            yield _Event(gpu, ts, code, True)


class _Course:
    """What is remembered of the counts of one GPU."""

    def __init__(self) -> None:
        self.is_seen = False
        self.window: dict[int, int] | None = None
        self.ever: dict[int, tuple[int, datetime, datetime]] = {}  # count, when it was seen, when it was missing
        self.total: float | None = None  # count without codes

    def rises(self, ts: datetime, text: str | None, total: float | None, last: int | None) -> list[int]:
        """Codes that came since the row before."""
        counts = {} if text is None else read(text)
        found = self._ever(ts, {code: n for (code, ever), n in counts.items() if ever})
        window = {code: n for (code, ever), n in counts.items() if not ever}
        if text is not None and (window or not counts):
            before = self.window
            if before is None:  # new to us: old when the GPU is as well
                before = {} if self.is_seen else window
            found += [code for code, n in window.items() if n > before.get(code, 0)]
            self.window = window
        if text is None and total is not None:
            if self.total is not None and total > self.total and last:
                found.append(last)
            self.total = total
        self.is_seen = True
        return found

    def _ever(self, ts: datetime, counts: dict[int, int]) -> list[int]:
        found = []
        for code, n in counts.items():
            # The series of a code begins with its first event, and anew when the exporter does.
            before, seen, missed = self.ever.get(code, (0 if self.is_seen else n, ts, ts))
            if n > before or (n > 0 and (n < before or missed - seen >= _FORGOTTEN)):
                found.append(code)
            self.ever[code] = n, ts, ts
        for code in self.ever.keys() - counts.keys():
            self.ever[code] = (*self.ever[code][:2], ts)
        return found


def _once(events: list[_Event]) -> list[_Event]:
    """Events of which both the gauge and the count told stand there once, at the earlier time."""
    kept: list[_Event] = []
    open_: dict[tuple[tuple[str, ...], int], _Event] = {}
    for event in events:
        key = event.gpu, event.code
        other = open_.get(key)
        if other is not None and other.is_counted != event.is_counted and event.ts - other.ts <= _SAME_EVENT:
            del open_[key]
            continue
        open_[key] = event
        kept.append(event)
    return kept


def _attributed(events: list[_Event], fatal: Collection[int], same_failure: timedelta) -> list[tuple[Any, ...]]:
    """Events with the code that began their failure. They are few: one by one is quick enough."""
    attributed = []
    gpu: tuple[str, ...] | None = None
    first_xid, first_ts = 0, datetime(1970, 1, 1, tzinfo=UTC)
    for event in events:
        last_gpu, gpu = gpu, event.gpu
        code, ts = event.code, event.ts
        follows = (
            gpu == last_gpu
            and ts - first_ts <= same_failure
            and code != first_xid
            and (code in CONSEQUENCES or first_xid in fatal or code not in fatal)
        )
        if not follows:
            first_xid, first_ts = code, ts
        attributed.append((*gpu, ts, code, follows, first_xid, first_ts))
    return attributed
