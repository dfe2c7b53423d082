"""Label rules: what is an onset, what is healthy, and what is not known."""

import numpy as np
import polars as pl
import pytest

from features.labels import label_bottlenecks
from features.thresholds import GIB, ThresholdBook, ThresholdError, thresholds_for
from features.vocabulary import schema
from tests.gpu_samples import ACHIEVABLE, BOOK, TOTAL_GIB, at, frame, gang, set_temp


def labels(arrays, **kwargs):
    drop = kwargs.pop("drop", ())
    return label_bottlenecks(frame(arrays, drop=drop), kwargs.pop("jobs", None), kwargs.pop("book", BOOK), **kwargs)


def test_a_healthy_job_at_full_speed_sets_nothing():
    found = labels(gang())
    assert found.height == 0
    assert dict(found.schema) == schema("feat_labels")


@pytest.mark.parametrize("interval_s", [5.0, 15.0, 30.0])
def test_thermal_onset_and_clear_by_margin(interval_s):
    arrays = gang(interval_s=interval_s)
    temp = np.where((arrays["ts"] >= 600) & (arrays["ts"] < 900), 88.0, 75.0)
    set_temp(arrays, 3, temp)
    found = labels(arrays)
    assert found.select("gpu_uuid", "bottleneck_class", "onset_time", "clear_time", "is_censored").rows() == [
        ("GPU-0003", "thermal_throttle", at(600), at(900), False)
    ]


def test_slowdown_bits_outweigh_a_fixed_temperature_and_margins():
    arrays = gang()
    arrays["is_thermal_slowdown"][40:60, 2] = True  # memory throttles first on some boards: the core is still cool
    found = labels(arrays)
    assert found["gpu_uuid"].to_list() == ["GPU-0002"]
    # The table's 89 °C is a stand-in: a GPU that says it does not slow down is believed.
    arrays = gang()
    arrays["gpu_temp_c"][40:60, 2] = 92.0
    assert labels(arrays, drop=("gpu_temp_margin_c",)).height == 0
    assert labels(arrays, drop=("gpu_temp_margin_c", "is_thermal_slowdown")).height == 1


def test_a_blip_is_no_onset_and_a_flap_is_one():
    arrays = gang(interval_s=5.0)
    temp = np.full(len(arrays["ts"]), 75.0)
    temp[100] = temp[140] = 88.0  # single samples
    set_temp(arrays, 0, temp)
    assert labels(arrays).height == 0
    temp[200:220] = np.tile([88.0, 75.0], 10)  # back within 10 s every time: it never went
    set_temp(arrays, 0, temp)
    found = labels(arrays)
    assert found["onset_time"].to_list() == [at(1000)]
    assert found["clear_time"].to_list() == [at(1095)]


def test_hold_wants_two_fresh_samples_and_ten_seconds():
    arrays = gang(interval_s=5.0)
    temp = np.full(len(arrays["ts"]), 75.0)
    temp[100:102] = 88.0  # 5 s
    set_temp(arrays, 0, temp)
    assert labels(arrays).height == 0
    temp[100:103] = 88.0  # 10 s
    set_temp(arrays, 0, temp)
    assert labels(arrays).height == 1


def test_nvlink_needs_slow_steps_where_steps_are_known():
    arrays = gang()
    arrays["nvlink_tx_bytes_per_s"][60:90] = 0.95 * ACHIEVABLE
    assert labels(arrays).height == 0  # full links at the job's own pace are full speed
    arrays["step_time_s"][60:90] *= 1.3
    found = labels(arrays)
    assert found.height == 8
    assert set(found["onset_time"]) == {at(900)}
    assert set(found["clear_time"]) == {at(1350)}
    arrays = gang()
    arrays["nvlink_rx_bytes_per_s"][60:90] = 0.95 * ACHIEVABLE
    assert labels(arrays, drop=("step_time_s",)).height == 8  # no steps known: the links alone decide


def test_a_gpu_that_lost_lanes_stands_under_its_peers():
    arrays = gang()
    for name in ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s"):
        arrays[name][60:100, 5] *= 0.5
    assert labels(arrays).height == 0
    arrays["step_time_s"][60:100] *= 1.4
    assert labels(arrays)["gpu_uuid"].to_list() == ["GPU-0005"]
    # A rank of a pipeline that always talks less is no fault of a link.
    arrays = gang()
    arrays["nvlink_tx_bytes_per_s"][:, 5] *= 0.5
    arrays["nvlink_rx_bytes_per_s"][:, 5] *= 0.5
    assert labels(arrays, drop=("step_time_s",)).height == 0


def test_memory_level_alone_is_no_label_but_growth_beyond_the_plateau_is():
    arrays = gang()
    arrays["fb_used_bytes"][:] = (TOTAL_GIB - 0.9) * GIB  # a full cache all day: under 1 GiB free, steady
    assert labels(arrays).height == 0
    arrays = gang()
    used = np.where(arrays["ts"] < 600, 60.0, np.minimum(60 + (arrays["ts"] - 600) / 60 * 2, 79.3))
    arrays["fb_used_bytes"][:, 1] = used * GIB
    found = labels(arrays)
    assert found.select("gpu_uuid", "bottleneck_class").rows() == [("GPU-0001", "memory_exhaustion")]
    free = TOTAL_GIB - 0.5 - used
    assert found["onset_time"].to_list() == [at(arrays["ts"][np.argmax(free <= 1)])]


def test_a_job_that_loads_up_to_the_brim_is_healthy():
    arrays = gang()
    ramp = np.minimum(arrays["ts"] / 120, 1.0) * (TOTAL_GIB - 0.9)
    arrays["fb_used_bytes"][:] = ramp[:, None] * GIB
    assert labels(arrays).height == 0


def test_the_last_allocation_kills_the_job_between_two_samples():
    arrays = gang()
    used = np.where(arrays["ts"] < 600, 60.0, 60 + (arrays["ts"] - 600) / 15 * 3)
    dies_at = 680.0
    arrays["fb_used_bytes"][:, 1] = np.where(arrays["ts"] < dies_at, used, 0.1) * GIB
    arrays["job_id"][arrays["ts"] >= dies_at] = None
    jobs = pl.DataFrame({"job_id": ["7"], "state": ["FAILED"], "end_time": [at(dies_at)]})
    assert labels(arrays).height == 0
    found = labels(arrays, jobs=jobs)
    assert found.select("gpu_uuid", "onset_time", "is_censored").rows() == [("GPU-0001", at(dies_at), False)]
    assert labels(arrays, jobs=jobs.with_columns(pl.lit("COMPLETED").alias("state"))).height == 0


def test_what_was_not_seen_to_begin_is_censored():
    arrays = gang()
    set_temp(arrays, 0, np.where(arrays["ts"] < 300, 88.0, 75.0))  # set when first seen
    set_temp(arrays, 1, np.where(arrays["ts"] >= 1785, 88.0, 75.0))  # not yet held when the record ends
    hot = np.where((arrays["ts"] >= 600) & (arrays["ts"] < 900), 88.0, 75.0)
    hot[35:40] = np.nan  # silence right before the first set sample that is seen
    set_temp(arrays, 2, hot)
    arrays["is_thermal_slowdown"] = arrays["is_thermal_slowdown"].astype(float)
    arrays["is_thermal_slowdown"][35:40, 2] = np.nan
    found = labels(arrays)
    assert found.select("gpu_uuid", "is_censored").sort("gpu_uuid").rows() == [
        ("GPU-0000", True), ("GPU-0001", True), ("GPU-0002", True),
    ]  # fmt: skip


def test_a_long_silence_hides_the_onset():
    arrays = gang()
    set_temp(arrays, 0, np.where(arrays["ts"] >= 900, 88.0, 75.0))
    rows = frame(arrays).filter(~((pl.col("ts") >= at(780)) & (pl.col("ts") < at(960))))
    found = label_bottlenecks(rows, None, BOOK)
    assert found.select("onset_time", "is_censored").rows() == [(at(960), True)]


def test_drained_nodes_are_censored():
    arrays = gang()
    set_temp(arrays, 0, np.where((arrays["ts"] >= 600) & (arrays["ts"] < 900), 88.0, 75.0))
    during = pl.DataFrame({"node": ["n0"], "start": [at(500)], "end": [at(1200)]})
    assert labels(arrays, excluded=during).height == 0
    until = pl.DataFrame({"node": ["n0"], "start": [at(500)], "end": [at(700)]})
    assert labels(arrays, excluded=until)["is_censored"].to_list() == [True]
    elsewhere = during.with_columns(pl.lit("n9").alias("node"))
    assert labels(arrays, excluded=elsewhere)["is_censored"].to_list() == [False]


def test_an_absent_column_is_no_zero_and_its_class_has_no_label():
    arrays = gang()
    set_temp(arrays, 0, np.where(arrays["ts"] >= 900, 95.0, 75.0))
    thermal = ("gpu_temp_c", "gpu_temp_margin_c", "is_thermal_slowdown")
    memory = ("fb_used_bytes", "fb_total_bytes", "fb_reserved_bytes")
    assert labels(arrays, drop=thermal).height == 0
    assert labels(arrays, drop=memory)["bottleneck_class"].to_list() == ["thermal_throttle"]
    # Of an unknown model neither slowdown temperature nor links are known.
    arrays["nvlink_tx_bytes_per_s"][60:90] = 0.99 * ACHIEVABLE
    arrays["step_time_s"][60:90] *= 1.5
    bare = labels(arrays, drop=("gpu_temp_margin_c", "is_thermal_slowdown"), book=ThresholdBook())
    assert bare.height == 0


def test_rows_may_come_in_any_order_and_twice():
    arrays = gang()
    set_temp(arrays, 3, np.where(arrays["ts"] >= 600, 88.0, 75.0))
    rows = frame(arrays)
    want = label_bottlenecks(rows, None, BOOK)
    mixed = pl.concat([rows, rows.sample(500, seed=3)]).sample(fraction=1, shuffle=True, seed=2)
    assert label_bottlenecks(mixed, None, BOOK).equals(want)
    assert label_bottlenecks(rows.clear(), None, BOOK).height == 0


@pytest.mark.traces
def test_a_recorded_healthy_node_sets_nothing(traces):
    """An MI300X serving a language model for 46 minutes: no throttling was recorded."""
    rows = pl.read_parquet(traces / "telemetry" / "amd-mi300x-2025.parquet")
    rows = rows.with_columns(pl.lit("1").alias("job_id"))
    assert label_bottlenecks(rows, None, ThresholdBook(default_model="AMD Instinct MI300X")).height == 0


def test_limits_by_model_and_overrides():
    assert thresholds_for("NVIDIA H100 80GB HBM3").nvlink_one_way_bytes_per_s == pytest.approx(450e9 * 0.83)
    assert thresholds_for("NVIDIA A100-SXM4-80GB").slowdown_temp_c == 89
    assert thresholds_for("NVIDIA H100 PCIe").nvlink_one_way_bytes_per_s == pytest.approx(300e9 * 0.83)
    assert np.isnan(thresholds_for("AMD Instinct MI300X").nvlink_one_way_bytes_per_s)
    assert np.isnan(thresholds_for(None).slowdown_temp_c)
    book = ThresholdBook({"a": "NVIDIA H100 80GB HBM3", "b": "other"}, overrides={"H100": {"slowdown_temp_c": 85.0}})
    assert book.of_node("a").slowdown_temp_c == 85
    assert book.arrays(["a", "b", "c"])["slowdown_temp_c"].tolist()[0] == 85
    assert np.isnan(book.arrays(["a", "b", "c"])["slowdown_temp_c"][1:]).all()
    with pytest.raises(ThresholdError, match="slowdown_temp_c"):
        ThresholdBook(overrides={"H100": {"slowdown_temp": 85.0}})
    with pytest.raises(ThresholdError, match="give a part of a model"):
        ThresholdBook(overrides={"": {"slowdown_temp_c": 90}})
    with pytest.raises(ThresholdError, match="above 0"):
        ThresholdBook(overrides={"H100": {"slowdown_temp_c": -1.0}})
