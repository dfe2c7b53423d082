"""Which board sat in which slot, and when: reorders, swaps, moves, drivers."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.slots import slot_history, slot_of, without_removed
from features.vocabulary import TIME, schema

T0 = datetime(2026, 11, 1, 12, tzinfo=UTC)


def at(minutes: float) -> datetime:
    return T0 + timedelta(minutes=minutes)


def seen(*rows: tuple, **columns: list) -> pl.DataFrame:
    """(minute, node, slot, uuid) each."""
    return pl.DataFrame(
        {
            "ts": pl.Series([at(row[0]) for row in rows], dtype=TIME),
            "cluster": ["a"] * len(rows),
            "node": [row[1] for row in rows],
            "slot": [row[2] for row in rows],
            "gpu_uuid": [row[3] for row in rows],
            **columns,
        },
        schema_overrides={"slot": pl.String, "gpu_uuid": pl.String, "node": pl.String},
    )


def spans(history: pl.DataFrame) -> list[tuple]:
    assert history.schema == pl.Schema(schema("core_slots"))

    def minutes(time: datetime | None) -> float | None:
        return None if time is None else (time - T0).total_seconds() / 60

    rows = history.select("node", "slot", "gpu_uuid", "start_time", "end_time").rows()
    return [(*row[:3], minutes(row[3]), minutes(row[4])) for row in rows]


def test_a_board_that_stays_is_one_interval_though_it_falls_silent() -> None:
    rows = seen((0, "n1", "8d", "A"), (1, "n1", "8d", "A"), (9000, "n1", "8d", "A"))
    assert spans(slot_history(rows)) == [("n1", "8d", "A", 0, None)]


def test_a_swapped_board() -> None:
    rows = seen((0, "n1", "8d", "A"), (5, "n1", "8d", "A"), (60, "n1", "8d", "B"), (61, "n1", "8d", "B"))
    assert spans(slot_history(rows)) == [("n1", "8d", "A", 0, 60), ("n1", "8d", "B", 60, None)]


def test_a_board_that_moved_to_another_node_and_back() -> None:
    rows = seen((0, "n1", "8d", "A"), (60, "n2", "1b", "A"), (90, "n1", "8d", "A"))
    assert spans(slot_history(rows)) == [
        ("n1", "8d", "A", 0, 60), ("n1", "8d", "A", 90, None), ("n2", "1b", "A", 60, 90),
    ]  # fmt: skip


def test_indices_that_change_at_boot_do_not_move_boards_with_a_bus_id() -> None:
    rows = seen(
        (0, "n1", "8d", "A"), (0, "n1", "9d", "B"), (60, "n1", "8d", "A"), (60, "n1", "9d", "B"),
        gpu_index=[0, 1, 1, 0],
    )  # fmt: skip
    history = slot_history(rows)
    assert spans(history) == [("n1", "8d", "A", 0, None), ("n1", "9d", "B", 0, None)]
    assert history["gpu_index"].to_list() == [1, 0]  # as it is now
    # Where only indices are known, they are the slots, and both boards have moved.
    assert spans(slot_history(rows.drop("slot"))) == [
        ("n1", "0", "A", 0, 60), ("n1", "0", "B", 60, None), ("n1", "1", "B", 0, 60), ("n1", "1", "A", 60, None),
    ]  # fmt: skip


def test_another_driver_is_another_interval_and_an_unknown_one_is_not() -> None:
    rows = seen(*((i, "n1", "8d", "A") for i in range(5)), driver_version=["550", None, "550", "570", None])
    history = slot_history(rows)
    assert spans(history) == [("n1", "8d", "A", 0, 3), ("n1", "8d", "A", 3, None)]
    assert history["driver_version"].to_list() == ["550", "570"]


def test_what_has_no_identity_is_passed_over() -> None:
    rows = seen(
        (0, "n1", "8d", "n1:0"), (1, "n1", None, "A"), (2, "n1", "", "A"), (3, "n1", "8d", ""), (4, "n1", "8d", None)
    )
    assert slot_history(rows).is_empty()
    assert slot_history(rows.clear()).is_empty()
    with pytest.raises(ValueError, match="gpu_uuid"):
        slot_history(rows.drop("gpu_uuid"))


def test_piece_by_piece_is_the_same_as_at_once_and_nothing_new_is_nothing() -> None:
    rows = seen(
        (0, "n1", "8d", "A"), (0, "n1", "9d", "B"), (10, "n1", "8d", "B"), (20, "n2", "8d", "A"), (30, "n1", "8d", "C"),
    )  # fmt: skip
    whole = slot_history(rows)
    known = pl.DataFrame(schema=schema("core_slots"))
    key = ["cluster", "node", "slot", "gpu_uuid", "start_time"]
    for minute in (0, 10, 20, 30):
        changed = slot_history(rows.filter(pl.col("ts") == at(minute)), known)
        known = pl.concat([known.join(changed, on=key, how="anti"), changed])
    assert known.sort(whole.columns).equals(whole.sort(whole.columns))
    again = rows.filter(pl.col("ts") == at(30)).with_columns(ts=pl.lit(at(40), dtype=TIME))
    assert slot_history(again, known).is_empty()
    assert slot_history(rows, known).is_empty()  # an overlap that is read again
    recent = known.filter(pl.col("end_time").is_null() | (pl.col("end_time") > at(10)))
    assert slot_history(rows.filter(pl.col("ts") >= at(10)), recent).is_empty()
    learned = slot_history(again.with_columns(serial_number=pl.lit("1650")), known)
    assert learned.select("gpu_uuid", "start_time", "serial_number").rows() == [("C", at(30), "1650")]


def test_slot_at_a_time() -> None:
    history = slot_history(seen((0, "n1", "8d", "A"), (60, "n2", "1b", "A"), (60, "n1", "8d", "B")))
    asked = pl.DataFrame(
        {
            "ts": pl.Series([at(70), at(10), at(70), at(70), at(-1)], dtype=TIME),
            "cluster": ["a"] * 5,
            "node": ["n2", "n1", "n1", "n1", "n1"],
            "gpu_uuid": ["A", "A", "B", "A", "A"],
            "xid": [1, 2, 3, 4, 5],
        }
    )
    found = slot_of(asked, history)
    assert found["slot"].to_list() == ["1b", "8d", "8d", None, None]
    assert found["xid"].to_list() == [1, 2, 3, 4, 5]
    drivers = slot_history(seen((0, "n1", "8d", "A"), (60, "n1", "8d", "A"), driver_version=["570", "580"]))
    told = slot_of(asked.filter(node="n1", gpu_uuid="A"), drivers, ["driver_version"])
    assert told["driver_version"].to_list() == ["570", "580", None]
    # A has left n1, and is on n2; of Z nothing is known.
    more = pl.concat([asked, asked.head(1).with_columns(gpu_uuid=pl.lit("Z"))])
    assert without_removed(more, history).select("node", "gpu_uuid").rows() == [("n2", "A"), ("n1", "B"), ("n2", "Z")]
    assert without_removed(more, drivers).equals(more)
    assert without_removed(more, drivers.clear()).equals(more)


SIGHTINGS = st.tuples(
    st.integers(0, 30), st.sampled_from(["n1", "n2"]), st.sampled_from(["0", "1"]), st.sampled_from("ABC")
)


@settings(max_examples=60, deadline=None)
@given(st.lists(SIGHTINGS, max_size=15, unique_by=(lambda s: (s[0], s[3]), lambda s: (s[0], s[1], s[2]))))
def test_intervals_of_a_slot_and_of_a_board_never_overlap(rows: list[tuple]) -> None:
    history = slot_history(seen(*rows))
    far = at(1e6)
    for keys in (("node", "slot"), ("gpu_uuid",)):
        for _, part in history.sort("start_time").group_by(*keys):
            ends = part["end_time"].fill_null(far).to_list()
            starts = part["start_time"].to_list()
            assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
            assert all(start < end for start, end in zip(starts, ends, strict=True))
    for minute, node, slot, uuid in rows:
        mine = history.filter(
            (pl.col("node") == node) & (pl.col("slot") == slot) & (pl.col("gpu_uuid") == uuid)
            & (pl.col("start_time") <= at(minute)) & (pl.col("end_time").is_null() | (pl.col("end_time") > at(minute)))
        )  # fmt: skip
        assert mine.height == 1
