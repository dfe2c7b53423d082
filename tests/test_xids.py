"""XID codes: the catalogue, and events out of gauges that keep their last code."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.vocabulary import COLUMNS, TIME, conform
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
