"""Labels of classes beyond a GPU's own heat, links and memory: power, host memory, ports, ranks, queues."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.history import SampleHistory
from features.labels import GPU_CLASSES, label_bottlenecks, label_ranks, label_shortages, states
from features.occupancy import queue_occupancy, usable_gpus
from features.thresholds import GIB, ThresholdBook
from tests.gpu_samples import BOOK, H100, at, frame, gang


def labels(arrays, **kwargs):
    return label_bottlenecks(frame(arrays, drop=kwargs.pop("drop", ())), None, kwargs.pop("book", BOOK), **kwargs)


def shown(found: pl.DataFrame) -> list:
    return found.select("bottleneck_class", "scope", "scope_id", "onset_time", "clear_time", "is_censored").rows()


def powered(capped: bool = True) -> dict:
    arrays = gang()
    arrays["is_power_brake"] = np.zeros(arrays["gpu_temp_c"].shape, dtype=bool)
    arrays["is_power_capped"] = np.full(arrays["gpu_temp_c"].shape, capped)
    rng = np.random.default_rng(2)
    arrays["sm_clock_hz"] = 1.7e9 * (1 + rng.normal(0, 0.03, arrays["gpu_temp_c"].shape))  # a cap sways clocks
    return arrays


# --- power ------------------------------------------------------------------------------------------------


def test_a_job_at_its_power_cap_all_day_is_healthy():
    assert labels(powered()).height == 0


def test_the_power_brake_sets_and_clears():
    arrays = powered(capped=False)
    arrays["is_power_brake"][40:60, 2] = True
    assert shown(labels(arrays)) == [("power_throttle", "gpu", "GPU-0002", at(600), at(900), False)]


def test_capped_clocks_well_under_the_jobs_own_median_set():
    arrays = powered()
    arrays["sm_clock_hz"][40:60, 3] *= 0.6
    assert shown(labels(arrays)) == [("power_throttle", "gpu", "GPU-0003", at(600), at(900), False)]
    arrays["is_power_capped"][40:60, 3] = False  # low clocks for want of work are no throttle
    assert labels(arrays).height == 0


def test_power_without_its_columns_is_unknown_and_not_clear():
    arrays = powered()
    history = SampleHistory(frame(arrays, drop=("is_power_brake", "is_power_capped")), BOOK)
    assert (states(history, "power_throttle", BOOK) == -1).all()
    without_clock = SampleHistory(frame(arrays, drop=("sm_clock_hz", "is_power_brake")), BOOK)
    assert (states(without_clock, "power_throttle", BOOK) == -1).all()
    with pytest.raises(ValueError, match=r"'shortage'.*power_throttle"):
        states(history, "shortage", BOOK)


def test_limits_of_the_configuration_hold_for_labels():
    arrays = powered()
    arrays["sm_clock_hz"][40:60, 3] *= 0.75
    assert labels(arrays).height == 1
    for pattern in ("*", "h100"):
        book = ThresholdBook(default_model=H100, overrides={pattern: {"clock_low_ratio": 0.6}})
        assert labels(arrays, book=book).height == 0


# --- host memory ------------------------------------------------------------------------------------------


def hosts(free_ratio: np.ndarray, kills: np.ndarray | None = None, interval_s: float = 15.0) -> pl.DataFrame:
    n = len(free_ratio)
    total = 2048 * GIB
    columns = {
        "ts": [at(i * interval_s) for i in range(n)], "cluster": ["c"] * n, "node": ["n0"] * n,
        "host_mem_available_bytes": free_ratio * total, "host_mem_total_bytes": np.full(n, total),
    }  # fmt: skip
    if kills is not None:
        columns["oom_kills_total"] = kills
    return pl.DataFrame(columns).with_columns(pl.col("ts").cast(pl.Datetime("us", "UTC")))


def test_host_memory_that_falls_to_nothing_sets_and_a_low_level_alone_does_not():
    free = np.full(120, 0.6)
    free[40:60] = 0.01
    found = labels(gang(), node_samples=hosts(free))
    assert shown(found) == [("host_memory", "node", "n0", at(600), at(900), False)]
    assert found.select("node", "gpu_uuid", "job_id").row(0) == ("n0", None, None)
    assert labels(gang(), node_samples=hosts(np.full(120, 0.015))).height == 0  # so since anyone looked
    assert labels(gang(), node_samples=hosts(free).drop("host_mem_available_bytes")).height == 0


def test_a_kernel_that_kills_for_memory_sets_and_a_reboot_does_not():
    kills = np.zeros(120)
    kills[40:] = np.minimum(np.arange(80) + 1, 4)  # four kills, one a sample
    found = labels(gang(), node_samples=hosts(np.full(120, 0.5), kills))
    assert shown(found) == [("host_memory", "node", "n0", at(600), at(660), False)]
    assert labels(gang(), node_samples=hosts(np.full(120, 0.5), np.where(np.arange(120) < 60, 9.0, 0.0))).height == 0


# --- fabric -----------------------------------------------------------------------------------------------


def ports(seed: int = 3, **changes: tuple[slice, float]) -> pl.DataFrame:
    """A port of n0 and one of n1 in a healthy fabric: two thirds full, some marks."""
    rng = np.random.default_rng(seed)
    n = 120
    base = {
        "tx_bytes_per_s": 33e9, "rx_bytes_per_s": 33e9, "speed_bytes_per_s": 50e9, "ecn_marked_per_s": 400.0,
        "cnp_per_s": 300.0, "retransmits_per_s": 0.0, "transmit_wait_per_s": 2e5,
    }  # fmt: skip
    parts = []
    for node in ("n0", "n1"):
        columns = {name: value * (1 + rng.normal(0, 0.05, n)) for name, value in base.items()}
        columns["speed_bytes_per_s"] = np.full(n, 50e9)
        for name, (where, value) in changes.items():
            if node == "n0":
                columns[name][where] = value
        keys = {"cluster": "c", "node": node, "device": "mlx5_0", "port": "1"}
        times = pl.Series("ts", [at(i * 15.0) for i in range(n)]).cast(pl.Datetime("us", "UTC"))
        parts.append(pl.DataFrame({"ts": times, **columns}).with_columns(**{k: pl.lit(v) for k, v in keys.items()}))
    return pl.concat(parts)


BURST = slice(40, 60)


@pytest.mark.parametrize(
    "sign",
    [{"ecn_marked_per_s": 9e4}, {"cnp_per_s": 5e4}, {"retransmits_per_s": 80.0}, {"transmit_wait_per_s": 4e7},
     {"tx_bytes_per_s": 48e9}],
)  # fmt: skip
def test_each_sign_of_congestion_counts_where_steps_are_slow(sign):
    arrays = gang()
    congested = ports(**{name: (BURST, value) for name, value in sign.items()})
    assert labels(arrays, ports=congested).height == 0  # steps are as ever: a fabric that is well used
    arrays["step_time_s"][BURST] *= 1.4
    found = labels(arrays, ports=congested)
    assert shown(found) == [("fabric_congestion", "port", "n0/mlx5_0/1", at(600), at(900), False)]
    assert found.select("node", "gpu_uuid", "job_id").row(0) == ("n0", None, "7")


def test_without_steps_the_signs_alone_decide_and_without_signs_nothing_is_known():
    congested = ports(ecn_marked_per_s=(BURST, 9e4))
    assert labels(gang(), ports=congested, drop=("step_time_s",)).height == 1
    arrays = gang()
    arrays["step_time_s"][BURST] *= 1.4
    assert labels(arrays, ports=ports()).height == 0
    assert labels(arrays, ports=congested.select("ts", "cluster", "node", "device", "port")).height == 0


def test_a_port_that_always_marks_is_used_to_it():
    arrays = gang()
    arrays["step_time_s"][BURST] *= 1.4
    assert labels(arrays, ports=ports(ecn_marked_per_s=(slice(0, 120), 9e4))).height == 0


# --- stragglers -------------------------------------------------------------------------------------------


def reports(slow: slice | None, ranks: int = 4, steps: int = 120, own: bool = True) -> pl.DataFrame:
    rng = np.random.default_rng(4)
    seconds = 2.0 * (1 + rng.normal(0, 0.01, (steps, ranks)))
    if slow is not None:
        seconds[slow, 1 if own else slice(None)] *= 1.5
    rows = [
        {"ts": at(10.0 * i), "cluster": "c", "job_id": "9", "rank": r, "step": i, "step_time_s": seconds[i, r]}
        for i in range(steps)
        for r in range(ranks)
    ]
    return pl.DataFrame(rows).with_columns(pl.col("ts").cast(pl.Datetime("us", "UTC")))


def test_a_slow_rank_sets_at_its_third_slow_step():
    found = label_ranks(reports(slice(40, 60)))
    assert shown(found) == [("straggler", "rank", "9/1", at(420), at(600), False)]
    assert found["job_id"].to_list() == ["9"]
    assert label_ranks(reports(slice(40, 42))).height == 0  # two steps are none
    assert label_ranks(reports(slice(40, 60), own=False)).height == 0  # the whole gang is slow: nobody lags
    assert label_ranks(reports(slice(40, 60), ranks=2)).height == 0  # of two nobody knows which
    assert label_ranks(reports(None).drop("rank")).height == 0
    assert label_ranks(reports(slice(40, 60)).with_columns(pl.lit(None, pl.Int32).alias("rank"))).height == 0


def test_a_step_that_is_told_again_is_no_further_step():
    once = reports(slice(40, 42))
    again = once.filter(pl.col("step") == 41).with_columns(pl.col("ts") + timedelta(seconds=5))
    assert label_ranks(pl.concat([once, again])).height == 0


def test_gpus_that_report_steps_of_their_own():
    arrays = gang()
    arrays["step_time_s"][40:60, 5] *= 1.5
    found = labels(arrays)
    assert shown(found) == [("straggler", "gpu", "GPU-0005", at(630), at(900), False)]
    arrays = gang()
    arrays["step_time_s"][40:60] *= 1.5  # one step time for all: nothing is said of anyone
    assert labels(arrays).height == 0


# --- shortage ---------------------------------------------------------------------------------------------

NOW = datetime(2026, 3, 2, tzinfo=UTC)


def jobs(*rows: tuple) -> pl.DataFrame:
    """Rows of job id, queue, gpus, submitted, started and ended, in minutes from NOW."""
    moment = lambda m: None if m is None else NOW + timedelta(minutes=m)  # noqa: E731
    return pl.DataFrame(
        [
            {"job_id": r[0], "queue": r[1], "gpus": r[2], "submit_time": moment(r[3]), "eligible_time": moment(r[3]),
             "start_time": moment(r[4]), "end_time": moment(r[5]), "reason": r[6] if len(r) > 6 else None}
            for r in rows
        ],
        schema_overrides=dict.fromkeys(("submit_time", "eligible_time", "start_time", "end_time"),
                                       pl.Datetime("us", "UTC")) | {"reason": pl.String},
    )  # fmt: skip


def occupancy(*rows: tuple) -> pl.DataFrame:
    return queue_occupancy(jobs(*rows), 16, NOW, NOW + timedelta(minutes=60))


def test_a_queue_is_short_while_more_is_asked_for_than_is_idle():
    found = label_shortages(
        occupancy(("a", "big", 12, -5, 0, 40), ("b", "big", 8, 10, 40, 90), ("c", "dev", 2, 20, 20, 30))
    )
    assert shown(found) == [
        ("shortage", "queue", "big", NOW + timedelta(minutes=10), NOW + timedelta(minutes=40), False)
    ]
    assert found.select("node", "gpu_uuid", "job_id").row(0) == (None, None, None)
    assert label_shortages(occupancy(("a", "big", 12, -5, 0, 40), ("b", "big", 4, 10, 40, 90))).height == 0
    held = ("b", "big", 8, 10, None, None, "JobHeldUser")
    assert label_shortages(occupancy(("a", "big", 12, -5, 0, 40), held)).height == 0


def test_gpus_out_of_service_are_not_idle_and_no_inventory_is_no_count():
    nodes = pl.DataFrame({"node": ["n0", "n1"], "gpus": [8, 8], "state": ["IDLE", "IDLE+DRAIN"]})
    assert usable_gpus(nodes) == 8
    assert usable_gpus(nodes.drop("gpus")) is None
    wrong = occupancy(("a", "big", 20, 10, None, None)).with_columns(pl.lit(-1).alias("idle_gpu_num"))
    assert label_shortages(wrong).height == 0


# --- what may not be concluded ----------------------------------------------------------------------------


def test_an_exclusion_may_be_of_one_class_or_of_all_nodes():
    arrays = powered(capped=False)
    arrays["is_power_brake"][40:60, 2] = True
    span = {"start": [at(500)], "end": [at(1000)]}
    schema = {"node": pl.String, "bottleneck_class": pl.String}
    other = pl.DataFrame({"node": ["n0"], "bottleneck_class": ["thermal_throttle"], **span})
    assert labels(arrays, excluded=other).height == 1
    everywhere = pl.DataFrame({"node": [None], "bottleneck_class": ["power_throttle"], **span}, schema_overrides=schema)
    assert labels(arrays, excluded=everywhere).height == 0
    ports_of = ports(ecn_marked_per_s=(BURST, 9e4))
    node = pl.DataFrame({"node": ["n0"], "bottleneck_class": [None], **span}, schema_overrides=schema)
    assert labels(gang(), ports=ports_of, drop=("step_time_s",), excluded=node).height == 0
    moments = {"start": [NOW + timedelta(minutes=5)], "end": [NOW + timedelta(minutes=50)]}
    silence = pl.DataFrame({"node": [None], "bottleneck_class": ["shortage"], **moments}, schema_overrides=schema)
    asked = occupancy(("a", "big", 12, -5, 0, 40), ("b", "big", 8, 10, 40, 90))
    assert label_shortages(asked, excluded=silence).height == 0


def test_every_gpu_class_is_quiet_on_a_healthy_gang():
    history = SampleHistory(frame(powered()), BOOK)
    for name in GPU_CLASSES:
        assert (states(history, name, BOOK) == 0).all(), name
