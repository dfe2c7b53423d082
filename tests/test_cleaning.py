"""Every impossible value becomes null and is counted; nothing possible is touched."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from features.cleaning import QUALITY_SCHEMA, REASONS, clean_gpu_samples, clean_node_samples
from features.cleaning_findings import count
from features.vocabulary import COLUMNS, GPU_QUANTITIES, schema

T0 = datetime(2026, 11, 1, 12, tzinfo=UTC)


def raw(*rows: dict[str, object]) -> pl.DataFrame:
    keys = {"ts": T0, "cluster": "a", "node": "n1", "gpu_uuid": "GPU-1", "gpu_index": 0}
    names = {name for row in rows for name in row} | set(keys)
    types = {name: dtype for name, dtype in schema("raw_gpu_samples").items() if name in names}
    return pl.DataFrame([{**keys, **row} for row in rows], schema=types)


def one(**values: object) -> tuple[dict[str, object], dict[tuple[str, str], int]]:
    frame, quality = clean_gpu_samples(raw(values))
    return frame.row(0, named=True), {(c, r): n for c, r, n, _ in quality.iter_rows()}


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("gpu_power_w", 140737488355328.0, "sentinel"),
        ("gpu_power_w", 140737488355331.0, "sentinel"),
        ("mem_temp_c", 9223372036854776000.0, "sentinel"),
        ("mem_temp_c", 2147483632.0, "sentinel"),
        ("gpu_temp_c", 2147483634.0, "sentinel"),
        ("gpu_util_ratio", 2147483632 * 0.01, "sentinel"),
        ("fb_used_bytes", 9223372036854776000.0 * 2**20, "sentinel"),
        ("fb_used_bytes", 2147483633.0 * 2**20, "sentinel"),
        ("sm_clock_hz", 2147483634.0 * 1e6, "sentinel"),
        ("xid_last", 2147483632, "sentinel"),
        ("ecc_uncorrected_total", 9223372036854776000.0, "sentinel"),
        ("nvlink_error_total", 2147483635.0, "sentinel"),
        ("nvlink_tx_bytes_per_s", 140737488355328.0, "sentinel"),
        ("gpu_power_w", 65535.0, "sentinel"),  # all ones of 16 bits: AMD's "not available"
        ("ecc_uncorrected_total", 4294967295.0, "sentinel"),
        ("nvlink_error_total", 4294967295.0, "saturated"),  # a 32-bit counter at its end
        ("gpu_temp_c", 345.0, "out_of_range"),
        ("gpu_temp_c", 644245923.0, "out_of_range"),
        ("gpu_temp_c", 4278190080.0, "out_of_range"),
        ("gpu_temp_c", -40.0, "out_of_range"),
        ("gpu_util_ratio", 1.5, "out_of_range"),
        ("sm_active_ratio", -0.1, "out_of_range"),
        ("gpu_power_w", -1.0, "out_of_range"),
        ("nvlink_rx_bytes_per_s", -5.0e9, "out_of_range"),  # an NVML counter that went down
        ("gpu_temp_c", float("nan"), "not_a_number"),
        ("pcie_tx_bytes_per_s", float("inf"), "not_a_number"),
        ("pcie_tx_bytes_per_s", float("-inf"), "not_a_number"),
        ("mem_temp_c", 0.0, "zero_is_missing"),
        ("gpu_power_w", 0.0, "zero_is_missing"),
    ],
)  # fmt: skip
def test_impossible_becomes_null_and_is_counted(column: str, value: float, reason: str) -> None:
    row, quality = one(**{column: value, "tensor_active_ratio": 0.25})
    assert row[column] is None
    assert row["tensor_active_ratio"] == 0.25
    assert quality == {(column, reason): 1}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("fb_used_bytes", 2147483648.0),  # 2 GiB look like a sentinel and are none
        ("nvlink_tx_bytes_per_s", 2147483648.0),
        ("gpu_temp_margin_c", -8.0),
        ("gpu_temp_margin_c", 0.0),
        ("gpu_temp_c", 0.0),
        ("nvlink_error_total", 65535.0),
        ("gpu_util_ratio", 0.0),
        ("fb_used_bytes", 0.0),
        ("xid_last", 79),
        ("is_thermal_slowdown", True),
        ("step_time_s", 0.4),
    ],
)  # fmt: skip
def test_possible_stays(column: str, value: float) -> None:
    row, quality = one(**{column: value})
    assert row[column] == pytest.approx(value)
    assert quality == {}


def test_ratio_a_little_above_one_is_one() -> None:
    row, quality = one(sm_active_ratio=1.004)
    assert row["sm_active_ratio"] == 1
    assert quality == {}


def test_power_far_above_its_limit_and_memory_above_total() -> None:
    row, quality = one(gpu_power_w=1200.0, power_limit_w=700.0, fb_used_bytes=9e10, fb_total_bytes=8e10)
    assert row["gpu_power_w"] is None
    assert row["power_limit_w"] == 700
    assert row["fb_used_bytes"] is None
    assert quality == {("gpu_power_w", "above_limit"): 1, ("fb_used_bytes", "above_total"): 1}
    row, quality = one(gpu_power_w=760.0, power_limit_w=700.0)
    assert row["gpu_power_w"] == 760
    assert quality == {}


def test_duplicates_merge_by_the_largest_value() -> None:
    frame, quality = clean_gpu_samples(
        raw(
            {"gpu_temp_c": 60.0, "job_id": None, "is_power_brake": False},
            {"gpu_temp_c": None, "gpu_power_w": 500.0, "job_id": "7", "is_power_brake": True},
            {"gpu_temp_c": 61.0},
            {"ts": T0 + timedelta(seconds=5), "gpu_temp_c": 50.0},
        )
    )
    assert len(frame) == 2
    first = frame.row(0, named=True)
    assert (first["gpu_temp_c"], first["gpu_power_w"], first["job_id"], first["is_power_brake"]) == (61, 500, "7", True)
    assert quality.rows() == [("ts", "duplicate", 2, "a/n1/GPU-1")]


def test_a_shared_gpu_has_no_job_of_its_own() -> None:
    frame, quality = clean_gpu_samples(raw({"job_id": "7"}, {"job_id": "8"}, {"job_id": ""}))
    assert frame["job_id"].to_list() == [None]
    assert {(c, r): n for c, r, n, _ in quality.iter_rows()} == {("ts", "duplicate"): 2, ("job_id", "several_jobs"): 1}


def mig(instance: str | None, profile: str | None, **values: object) -> dict[str, object]:
    return {"mig_instance": instance, "mig_profile": profile, **values}


def test_mig_instances_become_one_gpu() -> None:
    frame, quality = clean_gpu_samples(
        raw(
            mig("1", "3g.40gb", gpu_power_w=400.0, gpu_temp_c=60.0, engine_active_ratio=0.7, fb_used_bytes=1e10,
                gpu_util_ratio=0.0, is_power_capped=False, xid_last=0, job_id="7"),
            mig("2", "2g.20gb", gpu_power_w=400.5, gpu_temp_c=60.0, engine_active_ratio=0.7, fb_used_bytes=2e10,
                gpu_util_ratio=0.0, is_power_capped=True, xid_last=31),
            {"gpu_uuid": "GPU-2", "gpu_util_ratio": 0.0, "engine_active_ratio": 0.1},
        )
    )  # fmt: skip
    assert frame["gpu_uuid"].to_list() == ["GPU-1", "GPU-2"]
    row = frame.row(0, named=True)
    assert row["gpu_power_w"] == 400.5
    assert row["gpu_temp_c"] == 60
    assert row["engine_active_ratio"] == pytest.approx(0.7 * 5 / 7)  # two slices are nobody's
    assert row["fb_used_bytes"] == pytest.approx(3e10)
    assert row["gpu_util_ratio"] is None
    assert row["is_power_capped"] is True
    assert (row["xid_last"], row["job_id"]) == (31, "7")
    assert frame["gpu_util_ratio"][1] == 0  # a GPU that is not divided may well be idle
    assert quality.rows() == [("gpu_util_ratio", "zero_on_mig", 1, "a/n1/GPU-1")]


def test_mig_memory_of_the_whole_gpu_wins_and_activity_of_the_parts() -> None:
    frame, quality = clean_gpu_samples(
        raw(
            mig(None, None, fb_used_bytes=5e10, fb_total_bytes=8e10, engine_active_ratio=0.0, tensor_active_ratio=0.2),
            mig("1", "1g.10gb", fb_used_bytes=1e10, engine_active_ratio=1.0),
            mig("2", "1g.10gb", fb_used_bytes=1e10, engine_active_ratio=0.4),
        )
    )
    row = frame.row(0, named=True)
    assert (row["fb_used_bytes"], row["fb_total_bytes"]) == pytest.approx((5e10, 8e10))
    assert row["engine_active_ratio"] == pytest.approx(1.4 / 7)
    assert row["tensor_active_ratio"] == pytest.approx(0.2)
    assert quality.is_empty()


@pytest.mark.parametrize(
    ("profile", "share"),
    [("1g.10gb", 1 / 7), ("7g.80gb", 1.0), ("1g.6gb", 0.25), ("1c.3g.40gb", 1 / 7), ("1g.10gb+me", 1 / 7)],
)
def test_share_of_a_mig_profile(profile: str, share: float) -> None:
    row, quality = one(mig_instance="9", mig_profile=profile, sm_active_ratio=1.0)
    assert row["sm_active_ratio"] == pytest.approx(share)
    assert quality == {}


def test_partitions_of_amd_are_equal_parts() -> None:
    frame, quality = clean_gpu_samples(
        raw(
            mig("0", "dpx", gpu_power_w=600.0, gpu_util_ratio=0.9, dram_active_ratio=0.5, fb_used_bytes=1e10),
            mig("1", "dpx", gpu_power_w=0.0, gpu_util_ratio=0.0, dram_active_ratio=0.1, fb_used_bytes=0.0),
        )
    )
    row = frame.row(0, named=True)
    assert row["gpu_util_ratio"] == pytest.approx(0.45)  # an idle partition is measured
    assert row["dram_active_ratio"] == pytest.approx(0.3)
    assert row["fb_used_bytes"] == pytest.approx(1e10)
    assert row["gpu_power_w"] == 600  # the second partition says 0: not measured there
    assert quality.rows() == [("gpu_power_w", "zero_is_missing", 1, "a/n1/GPU-1/1")]


def test_activity_without_a_profile_is_unknown() -> None:
    row, quality = one(mig_instance="9", mig_profile=None, sm_active_ratio=1.0)
    assert row["sm_active_ratio"] is None
    assert quality == {("sm_active_ratio", "no_profile"): 1}


def test_label_flapping_of_an_instance_is_a_duplicate_and_does_not_add_up() -> None:
    flapping = mig("1", "1g.10gb", fb_used_bytes=1e10, engine_active_ratio=0.7)
    frame, quality = clean_gpu_samples(raw(flapping, {**flapping, "job_id": "7"}))
    row = frame.row(0, named=True)
    assert (row["fb_used_bytes"], row["job_id"]) == (1e10, "7")
    assert row["engine_active_ratio"] == pytest.approx(0.1)
    assert quality.rows() == [("ts", "duplicate", 1, "a/n1/GPU-1/1")]


def test_a_bad_value_never_wins_a_duplicate() -> None:
    frame, _ = clean_gpu_samples(raw({"gpu_temp_c": 345.0}, {"gpu_temp_c": 60.0}))
    assert frame["gpu_temp_c"].to_list() == [60]


def test_rows_without_key_or_with_impossible_time_are_dropped_and_counted() -> None:
    frame, quality = clean_gpu_samples(
        raw(
            {"gpu_uuid": None},
            {"node": ""},
            {"ts": None},
            {"ts": datetime(1970, 1, 1, tzinfo=UTC)},
            {"ts": T0 + timedelta(hours=1)},
            {"ts": T0 + timedelta(seconds=60), "gpu_temp_c": 40.0},
        ),
        now=T0,
    )
    assert frame["gpu_temp_c"].to_list() == [40]
    assert {(c, r): n for c, r, n, _ in quality.iter_rows()} == {
        ("gpu_uuid", "no_key"): 2,
        ("ts", "bad_time"): 3,
        ("ts", "clock_skew"): 1,  # a minute ahead is kept, but said
    }


def test_example_names_where_and_count_counts_all() -> None:
    _, quality = clean_gpu_samples(
        raw(*({"gpu_uuid": f"GPU-{i}", "gpu_temp_c": 500.0 if i >= 2 else 50.0} for i in range(5)))
    )
    assert quality.rows() == [("gpu_temp_c", "out_of_range", 3, "a/n1/GPU-2")]


def test_empty_and_shapes() -> None:
    frame, quality = clean_gpu_samples(raw().clear())
    assert frame.schema == pl.Schema(schema("core_gpu_samples"))
    assert quality.schema == pl.Schema(QUALITY_SCHEMA)
    assert frame.is_empty()
    assert quality.is_empty()
    with pytest.raises(ValueError, match="gpu_temp_f"):
        clean_gpu_samples(raw({}).with_columns(gpu_temp_f=pl.lit(1.0)))
    with pytest.raises(ValueError, match="node"):
        clean_gpu_samples(raw({}).drop("node"))


def course(count: int, step_s: float = 15.0, start_s: float = 0.0, **values: object) -> list[dict[str, object]]:
    """Rows of one GPU; a list is a course, anything else stays as it is."""
    return [
        {
            "ts": T0 + timedelta(seconds=start_s + i * step_s),
            **{name: value[i] if isinstance(value, list) else value for name, value in values.items()},
        }
        for i in range(count)
    ]


BUSY = {"sm_active_ratio": 0.8, "gpu_temp_c": 60.0, "sm_clock_hz": 1.9e9, "fb_used_bytes": 4e10}


def judged(rows: list[dict[str, object]], **more: object) -> tuple[pl.DataFrame, dict[tuple[str, str], int]]:
    frame, quality = clean_gpu_samples(raw(*rows), **more)
    return frame, {(c, r): n for c, r, n, _ in quality.iter_rows()}


def test_values_that_froze_for_five_minutes_of_work_are_null() -> None:
    rows = course(20, **BUSY, gpu_power_w=63.214, xid_last=31, step_time_s=0.5)
    frame, quality = judged(rows)
    assert quality == {("ts", "frozen"): 20}
    assert frame["gpu_power_w"].null_count() == 20
    assert frame["sm_active_ratio"].null_count() == 20
    assert frame["xid_last"].null_count() == 20
    assert frame["step_time_s"].null_count() == 0  # the job's own word
    assert frame.height == 20  # that something answered is known


@pytest.mark.parametrize(
    "rows",
    [
        course(17, **BUSY, gpu_power_w=63.214),  # two scrapes short of five minutes, and one of them might be missed
        course(40, **{**BUSY, "sm_active_ratio": 0.0}, gpu_power_w=63.214),  # idle boards draw steadily
        course(40, **BUSY, gpu_power_w=[63.214 + i // 2 for i in range(40)]),  # exporter every 30 s, scrape every 15 s
        course(40, **BUSY, gpu_power_w=[63.214 + i // 17 for i in range(40)]),
        course(40, **BUSY, gpu_power_w=700.0, gpu_util_ratio=[0.5 + i % 2 * 0.1 for i in range(40)]),
        course(40, sm_active_ratio=0.8, gpu_power_w=63.214),  # power alone is no witness
    ],
    ids=["short", "idle", "repeated", "steps", "moves", "alone"],
)
def test_what_only_looks_frozen_stays(rows: list[dict[str, object]]) -> None:
    frame, quality = judged(rows)
    assert quality == {}
    assert frame["gpu_power_w"].null_count() == 0


def test_a_freeze_is_seen_across_the_edge_of_a_window() -> None:
    rows = course(24, **BUSY, gpu_power_w=[100.0 + i if i < 2 else 63.214 for i in range(24)])
    frame, quality = judged(rows[20:], history=raw(*rows[:20]))
    assert quality == {("ts", "frozen"): 4}
    assert frame["gpu_power_w"].to_list() == [None] * 4
    assert judged(rows[20:])[1] == {}


@pytest.mark.parametrize(
    ("step_s", "missed"), [(15, ()), (15, (0,)), (15, (7,)), (15, (19,)), (30, ()), (60, ())], ids=str
)
def test_five_frozen_minutes_whose_scrapes_tremble_or_of_which_one_is_missing(step_s: int, missed: tuple) -> None:
    rows = course(300 // step_s, step_s, **BUSY, gpu_power_w=63.214)
    for sign in (1, -1):  # each late or early by 30 ms, the first and the last so that less is covered
        last = len(rows) - 1
        early = {0: sign, last: -sign}
        moved = [
            row | {"ts": row["ts"] + timedelta(milliseconds=30 * early.get(i, (-1) ** i))} for i, row in enumerate(rows)
        ]
        kept = [row for i, row in enumerate(moved) if i not in missed]
        assert judged(kept)[1][("ts", "frozen")] == len(kept)


def test_a_run_is_followed_back_beyond_the_history_for_those_that_rest_alone() -> None:
    rows = course(32, **BUSY, gpu_power_w=[100.0 + i if i < 10 else 63.214 for i in range(32)])
    lively = [row | {"gpu_uuid": "GPU-9", "gpu_power_w": 100.0 + i} for i, row in enumerate(rows)]
    asked: list[pl.DataFrame] = []
    revised: list[pl.DataFrame] = []

    def earlier(gpus: pl.DataFrame) -> pl.DataFrame:
        asked.append(gpus)
        return raw(*rows[:20])

    frame, quality = judged(
        rows[24:] + lively[24:], history=raw(*rows[20:24], *lively[20:24]), earlier=earlier, revised=revised
    )
    assert quality == {("ts", "frozen"): 8}
    assert frame.filter(gpu_uuid="GPU-1")["gpu_power_w"].null_count() == 8
    assert frame.filter(gpu_uuid="GPU-9")["gpu_power_w"].null_count() == 0
    assert [gpus.rows() for gpus in asked] == [[("a", "n1", "GPU-1")]]
    times = pl.concat(revised)["ts"].sort().to_list()
    assert times == [row["ts"] for row in rows[10:24]]
    assert judged(lively[24:], history=raw(*lively[20:24]), earlier=earlier)[1] == {}
    assert len(asked) == 1


def test_other_boards_neither_join_nor_break_a_run() -> None:
    rows = [{**row, "gpu_uuid": f"GPU-{k}"} for row in course(12, **BUSY, gpu_power_w=63.214) for k in range(3)]
    assert judged(rows)[1] == {}  # three times three minutes are not nine


def test_profiling_counters_stuck_at_zero_under_load() -> None:
    stuck = {"engine_active_ratio": 0.0, "sm_active_ratio": 0.0, "tensor_active_ratio": 0.0, "dram_active_ratio": 0.1}
    power = [300.0 + i for i in range(6)]
    frame, quality = judged(course(6, **stuck, gpu_util_ratio=0.99, gpu_power_w=power))
    assert frame["engine_active_ratio"].null_count() == 6
    assert frame["sm_active_ratio"].null_count() == 6
    assert frame["dram_active_ratio"].null_count() == 0
    assert frame["gpu_util_ratio"].to_list() == pytest.approx([0.99] * 6)
    assert quality == {(f"{name}_active_ratio", "stuck"): 6 for name in ("engine", "sm", "tensor")}
    # Power is a witness too; an idle GPU and a short mismatch are not judged.
    assert judged(course(6, **stuck, gpu_power_w=power, power_limit_w=500.0))[1] != {}
    assert judged(course(6, **stuck, gpu_util_ratio=0.0, gpu_power_w=power, power_limit_w=2000.0))[1] == {}
    assert judged(course(2, **stuck, gpu_util_ratio=0.99))[1] == {}


@pytest.mark.parametrize("kind", ["nvlink", "pcie"])
def test_traffic_counters_that_never_leave_zero_under_load(kind: str) -> None:
    tx, rx = f"{kind}_tx_bytes_per_s", f"{kind}_rx_bytes_per_s"
    power = [300.0 + i for i in range(8)]
    dead = {tx: 0.0, rx: 0.0, "gpu_power_w": power}
    frame, quality = judged(course(8, **BUSY, **dead))
    assert frame[tx].null_count() == frame[rx].null_count() == 8
    assert quality == {(tx, "zero_under_load"): 8, (rx, "zero_under_load"): 8}
    assert judged(course(8, **{**BUSY, "sm_active_ratio": 0.05}, **dead))[1] == {}
    pause = {**dead, tx: [0.0] * 7 + [1e9]}
    frame, quality = judged(course(8, **BUSY, **pause))
    assert frame[tx].to_list() == [0.0] * 7 + [1e9]  # it counts, so its zeros are true
    assert quality == {}


def test_a_job_on_one_gpu_has_nobody_to_talk_to() -> None:
    dead = {"nvlink_tx_bytes_per_s": 0.0, "nvlink_rx_bytes_per_s": 0.0, "gpu_power_w": [300.0 + i for i in range(8)]}
    alone = course(8, **BUSY, **dead, job_id="7")
    frame, quality = judged(alone)
    assert frame["nvlink_tx_bytes_per_s"].to_list() == [0.0] * 8
    assert quality == {}
    gang = alone + [{**row, "gpu_uuid": "GPU-2"} for row in alone]
    assert judged(gang)[1][("nvlink_tx_bytes_per_s", "zero_under_load")] == 16


def test_the_zero_that_begins_a_derived_rate() -> None:
    rate = {"nvlink_tx_bytes_per_s": [0.0, 5e9, 0.0, 6e9], "nvlink_rx_bytes_per_s": [0.0, 5e9, 0.0, 6e9]}
    rows = course(4, **rate)
    frame, quality = judged(rows, history=raw().clear())
    assert frame["nvlink_tx_bytes_per_s"].to_list() == [None, 5e9, 0.0, 6e9]
    assert quality[("nvlink_tx_bytes_per_s", "first_of_rate")] == 1
    assert judged(rows)[1] == {}  # nothing is known of before
    again = course(2, start_s=-600, nvlink_tx_bytes_per_s=4e9, nvlink_rx_bytes_per_s=4e9)
    frame, quality = judged(again + rows)  # ten minutes of silence: the exporter was restarted
    assert frame["nvlink_rx_bytes_per_s"].to_list() == [4e9, 4e9, None, 5e9, 0.0, 6e9]


def test_a_gpu_is_new_only_where_the_history_would_have_shown_it() -> None:
    rate = {"nvlink_tx_bytes_per_s": [0.0, 5e9], "nvlink_rx_bytes_per_s": [0.0, 5e9]}
    other = [{**row, "gpu_uuid": "GPU-2"} for row in course(4, start_s=-60, gpu_temp_c=60.0)]
    frame, _ = judged(course(2, **rate), history=raw(*other))
    assert frame["nvlink_tx_bytes_per_s"].to_list() == [None, 5e9]
    frame, _ = judged(course(2, 120.0, **rate), history=raw(*other))  # sampled more seldom than the history is long
    assert frame["nvlink_tx_bytes_per_s"].to_list() == [0.0, 5e9]


def nodes(ahead: dict[str, float], minutes: int = 5) -> pl.DataFrame:
    """A sample every 15 s of each node, its clock ahead by so many seconds."""
    return raw(
        *(
            {"node": node, "gpu_uuid": f"GPU-{node}", "ts": T0 + timedelta(seconds=15 * i + shift), "gpu_temp_c": 60.0}
            for node, shift in ahead.items()
            for i in range(minutes * 4)
        )
    )


def test_a_clock_that_is_off_is_counted_and_its_samples_stay() -> None:
    now = T0 + timedelta(minutes=30)
    well = {"n1": 0.0, "n2": 3.0, "n3": -4.0}
    assert clean_gpu_samples(nodes(well), now)[1].filter(reason="clock_skew").is_empty()
    well = dict.fromkeys(well, 0.0)
    frame, quality = clean_gpu_samples(nodes({**well, "n9": -95.0}), now)
    assert quality.filter(reason="clock_skew").rows() == [("ts", "clock_skew", 20, "a/n9 (95 s behind)")]
    assert frame.height == 80
    assert clean_gpu_samples(nodes({**well, "n9": 240.0}), now)[1].filter(reason="clock_skew").rows() == [
        ("ts", "clock_skew", 20, "a/n9 (240 s ahead)")
    ]
    # Samples of the future need no others to be seen.
    alone = clean_gpu_samples(nodes({"n1": 45.0}), T0 + timedelta(seconds=19 * 15))[1]
    assert alone.rows() == [("ts", "clock_skew", 20, "a/n1 (45 s ahead)")]


def test_a_node_that_came_or_went_has_a_good_clock() -> None:
    now = T0 + timedelta(minutes=30)
    steady = nodes({"n1": 0.0, "n2": 0.0, "n3": 0.0})
    came = nodes({"n9": 180.0}, minutes=2)
    went = nodes({"n8": 0.0}, minutes=2)
    assert clean_gpu_samples(pl.concat([steady, came, went]), now)[1].filter(reason="clock_skew").is_empty()


def test_nodes_that_came_when_others_had_gone_are_not_compared_with_them() -> None:
    now = T0 + timedelta(minutes=30)
    gone = nodes(dict.fromkeys(("h1", "h2", "h3", "h4"), 0.0))
    for count_of_new in (3, 4, 5):  # fewer, as many, more
        new = nodes({f"n{i}": 490.0 for i in range(count_of_new)}, minutes=2)
        assert clean_gpu_samples(pl.concat([gone, new]), now)[1].filter(reason="clock_skew").is_empty()
    # Nor when some minutes are common to both: a clock that is off moves both ends by the same.
    relay = nodes({"n1": 240.0, "n2": 240.0}, minutes=3)
    assert clean_gpu_samples(pl.concat([gone, relay]), now)[1].filter(reason="clock_skew").is_empty()


def test_every_reason_is_described_and_given_by_something() -> None:
    root = Path(__file__).parent.parent
    code = "".join(
        path.read_text()
        for path in (*(root / "features").glob("cleaning_*.py"), root / "pipelines" / "ingest.py")
        if path.name != "cleaning_findings.py"
    )
    documented = (root / "docs" / "sources.md").read_text()
    for reason, words in REASONS.items():
        assert f'"{reason}"' in code, reason
        assert words.endswith(".")
        assert f"| `{reason}` | {words} |" in documented, f"docs/sources.md lacks {reason}"
    with pytest.raises(KeyError, match="no reason 'odd'"):
        count(raw({}), "ts", "odd")


def test_judging_twice_changes_nothing() -> None:
    rows = course(30, **BUSY, gpu_power_w=63.214) + course(
        8,
        start_s=450,
        **BUSY,
        gpu_power_w=[300.0 + i for i in range(8)],
        pcie_tx_bytes_per_s=0.0,
        pcie_rx_bytes_per_s=0.0,
    )
    once = clean_gpu_samples(raw(*rows))[0]
    again, quality = clean_gpu_samples(once)
    assert again.equals(once)
    assert quality.is_empty()


def test_node_samples() -> None:
    types = schema("core_node_samples")
    rows = [
        {"ts": T0, "cluster": "a", "node": "n1", "inlet_temp_c": 25.0, "node_power_w": 6000.0, "is_up": True},
        {"ts": T0, "cluster": "a", "node": "n2", "inlet_temp_c": float("nan"), "node_power_w": -1.0, "is_up": False},
    ]
    frame, quality = clean_node_samples(pl.DataFrame(rows, schema=types))
    assert frame["inlet_temp_c"].to_list() == [25, None]
    assert frame["node_power_w"].to_list() == [6000, None]
    assert frame["is_up"].to_list() == [True, False]
    assert [row[:3] for row in quality.rows()] == [
        ("inlet_temp_c", "not_a_number", 1),
        ("node_power_w", "out_of_range", 1),
    ]


NUMBERS = st.one_of(
    st.floats(width=32), st.sampled_from([2147483632.0, 2.0**63, 2.0**47, -1.0, 0.0, 1.0, float("nan"), float("inf")])
)
FLOATS = [name for name in GPU_QUANTITIES if COLUMNS[name].dtype == pl.Float32]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(FLOATS, NUMBERS)), min_size=1, max_size=5))
def test_whatever_comes_in_what_goes_out_is_possible(rows: list[dict[str, object]]) -> None:
    frame, quality = clean_gpu_samples(raw(*({"gpu_uuid": f"GPU-{i}", **row} for i, row in enumerate(rows))))
    assert len(frame) == len(rows)
    nulls_in = sum(value is None for row in rows for value in row.values())
    given_values = sum(len(row) for row in rows) - nulls_in
    left = sum(frame[name].is_not_null().sum() for name in FLOATS)
    assert given_values - left == quality["count"].sum()
    for name in FLOATS:
        values = frame[name].drop_nulls()
        column = COLUMNS[name]
        assert not values.is_nan().any()
        assert column.low is None or (values >= column.low).all()
        assert column.high is None or (values.cast(pl.Float64) <= column.high).all()
    again, nothing = clean_gpu_samples(frame)
    assert again.equals(frame)
    assert nothing.is_empty()


COURSES = st.fixed_dictionaries(
    {
        name: st.lists(st.sampled_from(values), min_size=24, max_size=24)
        for name, values in {
            "gpu_util_ratio": [None, 0.0, 0.9],
            "engine_active_ratio": [None, 0.0, 0.5],
            "sm_active_ratio": [0.0, 0.8],
            "gpu_power_w": [300.0, 300.0, 301.0],
            "gpu_temp_c": [60.0],
            "nvlink_tx_bytes_per_s": [None, 0.0, 1e9],
            "nvlink_rx_bytes_per_s": [0.0],
            "pcie_tx_bytes_per_s": [0.0, None],
            "mig_instance": [None, None, None, "1"],
            "job_id": [None, "7"],
        }.items()
    }
)


@settings(max_examples=60, deadline=None)
@given(COURSES, st.sampled_from([15.0, 60.0]), st.integers(0, 12))
def test_a_course_only_loses_values_and_all_that_it_loses_is_counted(
    course_of: dict[str, list], step_s: float, cut: int
) -> None:
    names = [name for name in course_of if name not in ("mig_instance", "job_id")]
    frame = raw(*course(24, step_s, **course_of))
    cleaned, quality = clean_gpu_samples(frame[cut:], history=frame[:cut])
    given_in, out = frame[cut:].select(names), cleaned.select(names)
    lost = 0
    for name in names:
        parts = course_of["mig_instance"][cut:]
        for before, after, part in zip(given_in[name], out[name], parts, strict=True):
            assert after is None or part or after == before
            lost += before is not None and after is None
    counted = {(c, r): n for c, r, n, _ in quality.iter_rows()}
    assert lost >= sum(n for (_, reason), n in counted.items() if reason not in ("frozen", "no_profile"))
    assert bool(lost) == bool(counted)
    again, nothing = clean_gpu_samples(cleaned)
    assert again.height == cleaned.height
    assert nothing.is_empty()
