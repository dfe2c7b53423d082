"""XID codes: the catalogue, and events out of gauges that keep their last code."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.cleaning import clean_health_samples, health_minutes
from features.vocabulary import COLUMNS, TIME, conform
from features.xid_counts import folded, read, write
from features.xid_events import EVENT_SCHEMA, xid_events_of
from features.xids import ACTIONS, FATAL_FAULTS, XIDS, describe, fatal_faults
from pipelines.faults import merge_signs, read_signs, read_xids
from tests.store_child import open_store

T0 = datetime(2026, 11, 1, 12, tzinfo=UTC)


def samples(*codes: int | None, step_s: float = 15, gpu: str = "GPU-1", **columns: list) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "cluster": ["a"] * len(codes),
            "node": ["n1"] * len(codes),
            "gpu_uuid": [gpu] * len(codes),
            "ts": pl.Series([T0 + timedelta(seconds=step_s * i) for i in range(len(codes))], dtype=TIME),
            "xid_last": pl.Series(codes, dtype=pl.Int32),
            **columns,
        }
    )


def events(frame: pl.DataFrame, **options: object) -> list[tuple[float, int]]:
    found = xid_events_of(frame, **options)
    assert found.schema == pl.Schema(EVENT_SCHEMA)
    return [((row["ts"] - T0).total_seconds(), row["xid"]) for row in found.iter_rows(named=True)]


def test_the_catalogue_is_whole() -> None:
    for code, xid in XIDS.items():
        assert xid.code == code
        assert xid.meaning
        assert xid.action in ACTIONS
        assert xid.is_fatal == bool(xid.fault)
        assert COLUMNS["xid"].low <= code <= COLUMNS["xid"].high


@pytest.mark.parametrize(
    ("code", "is_fatal", "action"),
    [
        (31, False, "workflow"), (43, False, "ignore"), (45, False, "follow_other"), (48, True, "workflow"),
        (63, False, "ignore"), (64, True, "reset_gpu"), (74, True, "workflow"), (79, True, "restart_machine"),
        (92, False, "contact_support"), (94, False, "restart_application"), (95, True, "reset_gpu"),
        (54, True, "check_cables"), (119, True, "reset_gpu"), (151, True, "restart_vm"), (154, False, "follow_other"),
        (12345, False, "contact_support"),
    ],
)  # fmt: skip
def test_codes(code: int, is_fatal: bool, action: str) -> None:
    assert (describe(code).is_fatal, describe(code).action) == (is_fatal, action)


def test_known_disagreements_are_written_down_and_a_site_may_decide() -> None:
    for code in (32, 38, 44, 63, 65, 68, 69, 94, 109, 160, 162):
        assert describe(code).disputed, code
    faults = fatal_faults(also=[63, 9999], never=[109])
    assert faults[63] == "gpu_xid_63"
    assert faults[9999] == "gpu_xid_9999"
    assert 109 not in faults
    assert faults[79] == FATAL_FAULTS[79] == "gpu_fallen_off_bus"


def test_a_code_that_stays_is_one_event() -> None:
    assert events(samples(0, 0, 31, 31, 31, 31)) == [(30, 31)]


def test_the_first_sample_is_old() -> None:
    assert events(samples(31, 31, 31)) == []
    assert events(samples(31, 79)) == [(15, 79)]


def test_a_restart_of_the_exporter_is_no_recovery_and_no_event() -> None:
    assert events(samples(0, 31, None, None, 31)) == [(15, 31)]
    assert events(samples(0, 31, 0, 0)) == [(15, 31)]
    assert events(samples(0, 31, 0, 31)) == [(15, 31), (45, 31)]  # it came again after the restart


def test_the_same_code_twice_is_seen_only_where_something_counts() -> None:
    codes = (0, 31, 31, 31, 31)
    assert events(samples(*codes)) == [(15, 31)]
    assert events(samples(*codes, xid_events=[0.0, 1.0, 1.0, 2.0, 2.0])) == [(15, 31), (45, 31)]
    # The window lets go of old events by itself, and a gap tells nothing.
    assert events(samples(*codes, xid_events=[0.0, 2.0, 1.0, 0.0, 0.0])) == [(15, 31)]
    assert events(samples(*codes, xid_events=[0.0, 1.0, None, 1.0, 1.0])) == [(15, 31)]


def counted(*texts: str | None, step_s: float = 60, gpu: str = "GPU-1") -> pl.DataFrame:
    return samples(*[None] * len(texts), step_s=step_s, gpu=gpu).select(
        "cluster", "node", "gpu_uuid", "ts", pl.Series("xid_counts", texts, dtype=pl.String)
    )


def test_a_rise_of_a_codes_count_is_an_event_of_that_code_whatever_the_gauge_says() -> None:
    stuck = samples(31, 31, 31, 31, step_s=60)
    other = counted("31=3", "31=3", "31=3 79=1", "31=3")
    assert [(ts, code) for ts, code in events(stuck, counts=other)] == [(120, 79)]
    assert events(stuck, counts=counted("", "", "62=1", "62=1")) == [(120, 62)]
    assert events(samples(79, 79, 79, step_s=60), counts=counted("", "13=1", "")) == [(60, 13)]
    # Without the gauge, with one that says nothing, and with one that never hears of the code.
    assert events(counted("", "79=1", "79=1", "")) == [(60, 79)]
    assert events(samples(None, None, step_s=60), counts=counted("", "79=1")) == [(60, 79)]
    assert events(samples(0, 0, step_s=60), counts=counted("", "62=1")) == [(60, 62)]
    # Each rise is one; falls, and a count that is not told, are none.
    assert events(counted("", "31=1", "31=2", None, "31=2", "31=1", "31=2")) == [(60, 31), (120, 31), (360, 31)]


def test_gauge_and_count_of_one_event_are_one() -> None:
    assert events(samples(0, 79, 79, step_s=60), counts=counted("", "79=1", "79=1")) == [(60, 79)]
    assert events(samples(0, 0, 79, 79, step_s=30), counts=counted("", "", "79=1")) == [(60, 79)]
    assert events(samples(0, 79, 79, 79, step_s=60), counts=counted("", "", "79=1", "79=2")) == [(60, 79), (180, 79)]
    # Of codes that came in one minute the fatal one began it.
    found = xid_events_of(samples(0, 0, step_s=60), counted("", "45=1 48=1 94=1"))
    assert found.select("xid", "first_xid", "is_consequence").rows() == [
        (48, 48, False), (94, 48, True), (45, 48, True)
    ]  # fmt: skip


def test_counts_since_the_exporter_began_do_not_fall_by_themselves() -> None:
    # The series of a code begins with its first event; what was there when the GPU was first seen is old.
    assert events(counted(None, "79=1+", "79=1+", "79=2+")) == [(60, 79), (180, 79)]
    assert events(counted("79=3+", "79=3+", "79=4+")) == [(120, 79)]
    # One that falls began anew, and so did one that was missing for long; one that was missed a few times did not.
    assert events(counted("79=3+", "79=1+")) == [(60, 79)]
    assert events(counted("79=1+", *[None] * 12, "79=1+")) == [(780, 79)]
    assert events(counted("79=1+", None, None, "79=1+")) == []
    # Another exporter that counts a window beside it takes nothing from it.
    assert events(counted("79=1+", "", "79=1+", "13=1", "79=1+")) == [(180, 13)]
    away = pl.concat([counted("79=1+"), counted("79=1+").with_columns(pl.col("ts") + timedelta(hours=2))])
    assert events(away) == []  # nobody was read meanwhile


@pytest.mark.parametrize("several", [["31=3", "79=1"], ["", "31=3 79=1"], ["31=3 79=1", "31=2 79=1", "31=1"]])
def test_counts_of_one_moment_or_minute_are_one_by_the_largest(several: list[str]) -> None:
    frame = conform(counted(*several, step_s=0), "core_gpu_health")
    assert clean_health_samples(frame)[0]["xid_counts"].to_list() == ["31=3 79=1"]
    minute = health_minutes(conform(counted(*several, step_s=5), "core_gpu_health"))
    assert minute["xid_counts"].to_list() == ["31=3 79=1"]
    assert health_minutes(conform(counted(None, None), "core_gpu_health"))["xid_counts"].to_list() == [None, None]


@pytest.mark.parametrize(
    ("codes", "window", "expected"),
    [
        ([31, 79], [3.0, 1.0], (4, "31=3 79=1")),
        ([31, 79], [3.0, 0.0], (3, "31=3")),
        ([None], [0.0], (0, "")),
        ([None], [2.0], (2, None)),  # of which code it does not say
        ([31, 79], [3.0, 9223372036854775794.0], (9223372036854775794.0, None)),
        ([31, 79], [3.0, -1.0], (-1, None)),
    ],
)
def test_counts_of_codes_are_folded(codes: list, window: list, expected: tuple[float, str | None]) -> None:
    frame = pl.DataFrame(
        {"cluster": "a", "node": "n1", "gpu_uuid": "g", "ts": T0, "xid": codes, "xid_events": window},
        schema_overrides={"xid": pl.Int32},
    )
    assert folded(frame).select("xid_events", "xid_counts").rows() == [expected]


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.tuples(st.integers(0, 999_999), st.booleans()), st.integers(1, 1_000_000)), st.text())
def test_counts_are_read_as_they_are_written(counts: dict[tuple[int, bool], int], noise: str) -> None:
    assert read(write(counts)) == counts
    read(noise)


def first_of(frame: pl.DataFrame) -> list[tuple[int, bool, int]]:
    return xid_events_of(frame).select("xid", "is_consequence", "first_xid").rows()


def test_what_follows_within_seconds_belongs_to_the_first() -> None:
    assert first_of(samples(0, 48, 45, 94, step_s=5)) == [(48, False, 48), (45, True, 48), (94, True, 48)]
    assert first_of(samples(0, 31, 45, step_s=5)) == [(31, False, 31), (45, True, 31)]
    assert first_of(samples(0, 79, 119, step_s=5)) == [(79, False, 79), (119, True, 79)]
    # A fatal code is never hidden behind one that is not, and what comes later is another failure.
    assert first_of(samples(0, 31, 79, 45, step_s=5)) == [(31, False, 31), (79, False, 79), (45, True, 79)]
    assert first_of(samples(0, 48, 94, step_s=90)) == [(48, False, 48), (94, False, 94)]
    both = pl.concat([samples(0, 48, 48), samples(0, 0, 45, gpu="GPU-2")])
    assert first_of(both) == [(48, False, 48), (45, False, 45)]  # another GPU


def test_samples_without_change_may_be_left_out() -> None:
    frame = samples(0, 0, 31, 31, 0, 31, 79, 79, 79, 13)
    changed = frame.filter((pl.col("xid_last") != pl.col("xid_last").shift()).fill_null(True))
    assert xid_events_of(changed).equals(xid_events_of(frame))


def test_wrong_frames() -> None:
    assert xid_events_of(samples()).is_empty()
    with pytest.raises(ValueError, match="xid_last"):
        xid_events_of(samples(0).drop("xid_last"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([None, 0, 13, 31, 45, 48, 79, 94]), max_size=20))
def test_events_are_the_changes_to_something(codes: list[int | None]) -> None:
    known = [code for code in codes if code is not None]
    expected = [b for a, b in itertools.pairwise(known) if b not in (a, 0)]
    found = xid_events_of(samples(*codes))
    assert found["xid"].to_list() == expected
    assert (found["first_ts"] <= found["ts"]).all()
    fatal = found.filter(pl.col("xid").is_in(list(FATAL_FAULTS)) & pl.col("is_consequence"))
    assert fatal["first_xid"].is_in(list(FATAL_FAULTS)).all()


def test_faults_are_named_by_the_first_fatal_code() -> None:
    found = xid_events_of(samples(0, 48, 45, 95, step_s=5)).filter(pl.col("xid").is_in(list(FATAL_FAULTS)))
    signs = found.select(
        "cluster", "node", "gpu_uuid", pl.col("xid").replace_strict(FATAL_FAULTS, return_dtype=pl.String).alias("kind"),
        "xid", pl.col("ts").alias("start_time"), pl.lit(None, dtype=TIME).alias("end_time"),
        pl.lit(0, dtype=pl.Int32).alias("rank"),
    )  # fmt: skip
    faults = merge_signs(signs, signs.clear().drop("rank"))
    assert faults.select("kind", "xid").rows() == [("gpu_double_bit_ecc", 48)]


def test_faults_from_the_store_count_repeats_of_a_code(tmp_path) -> None:
    codes = samples(0, 79, 79, 79, step_s=3600)
    counts = samples(None, None, None, None, step_s=3600, xid_events=[0.0, 1.0, 1.0, 2.0]).drop("xid_last")
    with open_store(tmp_path) as store:

        def work(writer) -> None:
            writer.append("core_gpu_samples", conform(codes, "core_gpu_samples"))
            writer.append("core_gpu_health", conform(counts, "core_gpu_health"))

        store.transact(work)
        found = store.transact(lambda writer: read_xids(writer, "a", T0, T0 + timedelta(days=1)))
        signs = store.transact(lambda writer: read_signs(writer, "a", T0, T0 + timedelta(days=1)))
        mine = fatal_faults(never=[79])
        other = store.transact(lambda writer: read_xids(writer, "a", T0, T0 + timedelta(days=1), mine))
    assert other.is_empty()
    assert found.select("xid", "kind").unique().rows() == [(79, "gpu_fallen_off_bus")]
    hours = [(ts - T0).total_seconds() // 3600 for ts in found["start_time"]]
    assert {1, 3} == set(hours)  # the change, and the repeat that only the count shows
    faults = merge_signs(signs, signs.clear().drop("rank"))
    assert [(ts - T0).total_seconds() // 3600 for ts in faults["start_time"]] == [1, 3]
