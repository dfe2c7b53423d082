"""The known ways in which exporters of GPUs, fabrics and schedulers are wrong, one test each, from text to clean rows.

Every case goes the way that ingest goes: the page is parsed, laid into wide frames, and cleaned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features import metrics
from features.cleaning import (
    clean_gpu_samples,
    clean_health_samples,
    clean_link_samples,
    clean_port_samples,
    counter_deltas,
)
from features.slots import slot_history
from features.xid_events import xid_events_of
from pipelines.sources.exposition import parse_page
from pipelines.sources.wide import Frames, Index, Samples, to_frames

T0 = datetime(2026, 11, 1, 12, tzinfo=UTC)
T0_MS = round(T0.timestamp() * 1000)
GPU = 'gpu="0",UUID="GPU-1",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="n1"'
OTHER = GPU.replace('"0"', '"1"').replace("GPU-1", "GPU-2")


@dataclass
class Read:
    """What became of a page."""

    raw: Frames
    gpu: pl.DataFrame
    health: pl.DataFrame
    link: pl.DataFrame
    port: pl.DataFrame
    findings: dict[tuple[str, str], int] = field(default_factory=dict)

    def row(self, **where: object) -> dict[str, object]:
        """The only GPU row with these values."""
        rows = self.gpu.filter(**where) if where else self.gpu
        assert rows.height == 1, rows
        return rows.row(0, named=True)


def read(text: str, *, node: str = "", history: pl.DataFrame | None = None) -> Read:
    """Parse, widen and clean a page; lines without a time of their own are of T0."""
    index = Index()
    page = parse_page(text.strip() + "\n", index, node)
    rows = sorted(
        zip(page.names, page.entities, [T0_MS if ts is None else ts for ts in page.ts_ms], page.values, strict=True),
        key=lambda row: row[:3],
    )
    series: dict[tuple[int, int], int] = {}
    for name, entity, _, _ in rows:
        series[name, entity] = series.get((name, entity), 0) + 1
    samples = Samples(
        np.array([name for name, _ in series], np.int64), np.array([entity for _, entity in series], np.int64),
        np.array(list(series.values()), np.int64), np.array([row[2] for row in rows], np.int64),
        np.array([row[3] for row in rows], np.float64),
    )  # fmt: skip
    raw = to_frames(samples, index, "a")
    parts = [
        clean_gpu_samples(raw.gpu, history=history), clean_health_samples(raw.health), clean_link_samples(raw.link),
        clean_port_samples(raw.port),
    ]  # fmt: skip
    findings = {(c, r): n for _, quality in parts for c, r, n, _ in quality.iter_rows()}
    return Read(raw, *(frame for frame, _ in parts), findings)


def over_time(labels: str, step_s: float = 15, **courses: Iterable[float] | float) -> str:
    """Lines of metrics over time, each with its time; a number stays the same."""
    count = max(len(list(c)) for c in courses.values() if not isinstance(c, (int, float)))
    lines = []
    for name, course in courses.items():
        values = [course] * count if isinstance(course, (int, float)) else list(course)
        lines += [f"{name}{{{labels}}} {v} {T0_MS + round(step_s * 1000 * i)}" for i, v in enumerate(values)]
    return "\n".join(lines) + "\n"


def test_01_numbers_that_mean_not_there() -> None:
    got = read(f"""
DCGM_FI_DEV_MEMORY_TEMP{{{GPU}}} 9223372036854775794
DCGM_FI_DEV_GPU_TEMP{{{GPU}}} 2147483632
DCGM_FI_DEV_POWER_USAGE{{{GPU}}} 140737488355328.000000
DCGM_FI_DEV_FB_USED{{{GPU}}} 2147483633
DCGM_FI_DEV_GPU_UTIL{{{GPU}}} 2147483634
DCGM_FI_DEV_XID_ERRORS{{{GPU}}} 9223372036854776000
DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{{{GPU}}} 9223372036854776000
DCGM_FI_DEV_ECC_SBE_VOL_TOTAL{{{GPU}}} 9223372036854775793
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{GPU}}} 140737488355331
DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{{GPU}}} 2147483635
DCGM_FI_DEV_POWER_VIOLATION{{{GPU}}} 9223372036854775792
DCGM_FI_PROF_SM_ACTIVE{{{GPU}}} 0.250000
""")
    flags = read(f"""
DCGM_FI_DEV_ROW_REMAP_FAILURE{{{GPU}}} 2147483634
DCGM_FI_DEV_ROW_REMAP_FAILURE{{{OTHER}}} 0
DCGM_FI_DEV_RETIRED_SBE{{{GPU}}} 2147483634
DCGM_FI_DEV_RETIRED_DBE{{{GPU}}} 1
DCGM_FI_DEV_CLOCKS_EVENT_REASONS{{{GPU}}} 9223372036854775794
DCGM_FI_DEV_CLOCKS_EVENT_REASONS{{{OTHER}}} -1
DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL{{{GPU}}} 9223372036854775794
DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL{{{GPU}}} 5
""")
    assert flags.findings == {
        ("is_remap_failed", "sentinel"): 1, ("retired_pages_total", "sentinel"): 1,
        ("is_thermal_slowdown", "sentinel"): 2, ("is_power_brake", "sentinel"): 2, ("is_power_capped", "sentinel"): 2,
        ("nvlink_error_total", "sentinel"): 1,
    }  # fmt: skip
    assert flags.health.sort("gpu_uuid").select("is_remap_failed", "retired_pages_total", "unknown_flags").rows() == [
        (None, None, None), (False, None, None)
    ]  # fmt: skip
    assert flags.gpu["nvlink_error_total"].null_count() == 2
    row = got.row()
    for name in ("mem_temp_c", "gpu_temp_c", "gpu_power_w", "fb_used_bytes", "gpu_util_ratio", "xid_last",
                 "nvlink_tx_bytes_per_s"):  # fmt: skip
        assert row[name] is None, name
        assert got.findings[name, "sentinel"] == 1
    assert row["sm_active_ratio"] == 0.25
    for name in ("ecc_corrected_total", "energy_total_j", "pcie_replay_total", "power_violation_s_total"):
        assert got.health[name].to_list() == [None], name
        assert got.findings[name, "sentinel"] == 1
    # A UUID that is not there: the GPU is known by its place.
    assert read('DCGM_FI_DEV_GPU_TEMP{gpu="3",UUID="<<<NULL>>>",Hostname="n1"} 50').row()["gpu_uuid"] == "n1:3"
    # Cumulative byte counters may pass 2^47; only the four numbers themselves are none.
    large = read(f"DCGM_FI_DEV_ECC_SBE_AGG_TOTAL{{{GPU}}} 140737488355332")
    assert large.health["ecc_corrected_aggregate_total"].to_list() == [140737488355332.0]


@pytest.mark.parametrize("garbage", [345, 82505, 200000, 644245923, 4278190080, -40])
def test_02_garbage_that_is_no_sentinel(garbage: int) -> None:
    got = read(f"""
DCGM_FI_DEV_GPU_TEMP{{{GPU}}} {garbage}
DCGM_FI_DEV_POWER_USAGE{{{GPU}}} 1100
DCGM_FI_DEV_ENFORCED_POWER_LIMIT{{{GPU}}} 700
DCGM_FI_DEV_GPU_UTIL{{{GPU}}} 130
DCGM_FI_PROF_DRAM_ACTIVE{{{GPU}}} 1.004
DCGM_FI_PROF_SM_ACTIVE{{{GPU}}} 1.5
""")
    row = got.row()
    assert (row["gpu_temp_c"], row["gpu_power_w"], row["gpu_util_ratio"], row["sm_active_ratio"]) == (None,) * 4
    assert (row["power_limit_w"], row["dram_active_ratio"]) == (700, 1)
    assert got.findings == {
        ("gpu_temp_c", "out_of_range"): 1, ("gpu_power_w", "above_limit"): 1, ("gpu_util_ratio", "out_of_range"): 1,
        ("sm_active_ratio", "out_of_range"): 1,
    }  # fmt: skip
    # Beside it stands a value that can be.
    power = f"DCGM_FI_DEV_POWER_USAGE{{{GPU}}} {garbage}\nDCGM_FI_DEV_POWER_USAGE_INSTANT{{{GPU}}} 300"
    assert read(power).row()["gpu_power_w"] == (garbage if 0 <= garbage < 3000 else 300)


def test_03_nvlink_bandwidth_is_a_rate_whatever_its_type_says() -> None:
    text = "# TYPE DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL counter\n" + over_time(
        GPU, DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL=[0, 16721, 24531, 24493, 12129, -31]
    )
    got = read(text, history=read("").raw.gpu)
    half = [value * 1_024_000 / 2 for value in (16721, 24531, 24493, 12129)]
    for name in ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s"):
        assert got.gpu[name].to_list() == [None, *(pytest.approx(value) for value in half), None]
        assert got.findings[name, "first_of_rate"] == 1
        assert got.findings[name, "out_of_range"] == 1  # the counter behind it went down


def test_04_profiling_bytes_are_rates_too() -> None:
    text = "# TYPE DCGM_FI_PROF_PCIE_TX_BYTES counter\n" + over_time(
        GPU, DCGM_FI_PROF_PCIE_TX_BYTES=[3e9, 2e9, 2.5e9], DCGM_FI_PROF_NVLINK_RX_BYTES=[3e11, 1e11, 2e11]
    )
    got = read(text)
    assert got.gpu["pcie_tx_bytes_per_s"].to_list() == pytest.approx([3e9, 2e9, 2.5e9])
    assert got.gpu["nvlink_rx_bytes_per_s"].to_list() == pytest.approx([3e11, 1e11, 2e11])
    assert got.findings == {}


def test_05_traffic_that_is_always_zero_under_load() -> None:
    zero = {f"DCGM_FI_PROF_{kind}_{way}_BYTES": 0.0 for kind in ("NVLINK", "PCIE") for way in ("TX", "RX")}
    busy = {"DCGM_FI_PROF_SM_ACTIVE": [0.8, 0.7, 0.9, 0.8, 0.85]}
    got = read(over_time(GPU, **busy, **zero) + over_time(OTHER, DCGM_FI_PROF_SM_ACTIVE=[0.0] * 5, **zero))
    mine, idle = got.gpu.filter(gpu_uuid="GPU-1"), got.gpu.filter(gpu_uuid="GPU-2")
    for name in ("nvlink_tx", "nvlink_rx", "pcie_tx", "pcie_rx"):
        assert mine[f"{name}_bytes_per_s"].null_count() == 5
        assert idle[f"{name}_bytes_per_s"].to_list() == [0] * 5
        assert got.findings[f"{name}_bytes_per_s", "zero_under_load"] == 5


def test_06_profiling_stuck_at_zero_while_the_gpu_works() -> None:
    stuck = {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.0, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.0}
    got = read(over_time(GPU, DCGM_FI_DEV_GPU_UTIL=[99, 98, 99, 97, 99], **stuck))
    assert got.gpu["engine_active_ratio"].null_count() == 5
    assert got.gpu["tensor_active_ratio"].null_count() == 5
    assert got.gpu["gpu_util_ratio"].to_list() == pytest.approx([0.99, 0.98, 0.99, 0.97, 0.99])
    assert got.findings["engine_active_ratio", "stuck"] == 5


def test_07_profiling_that_a_model_has_not_is_null() -> None:
    got = read(f"""
DCGM_FI_DEV_GPU_UTIL{{{GPU}}} 95
DCGM_FI_DEV_GPU_UTIL{{{OTHER}}} 95
DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{OTHER}}} 0.9
""")
    assert got.row(gpu_uuid="GPU-1")["engine_active_ratio"] is None
    assert got.row(gpu_uuid="GPU-2")["engine_active_ratio"] == pytest.approx(0.9)
    assert got.findings == {}


def test_08_values_that_froze() -> None:
    frozen = {"DCGM_FI_DEV_GPU_TEMP": 41, "DCGM_FI_DEV_SM_CLOCK": 1980, "DCGM_FI_DEV_GPU_UTIL": 98}
    frozen |= {"DCGM_FI_DEV_FB_USED": 70000, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 126272101025}
    alive = {**frozen, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": [1000 * i for i in range(80)]}
    got = read(
        over_time(GPU, **frozen, DCGM_FI_DEV_POWER_USAGE=[63.214] * 80)
        + over_time(OTHER, **alive, DCGM_FI_DEV_POWER_USAGE=[600 + i % 7 for i in range(80)])
    )  # twenty minutes
    mine, other = got.gpu.filter(gpu_uuid="GPU-1"), got.gpu.filter(gpu_uuid="GPU-2")
    for name in ("gpu_power_w", "gpu_temp_c", "sm_clock_hz", "gpu_util_ratio", "fb_used_bytes"):
        assert mine[name].null_count() == 80, name
        assert other[name].null_count() == 0, name
    assert got.findings == {("ts", "frozen"): 80, ("energy_total_j", "frozen"): 80}
    assert got.health.filter(gpu_uuid="GPU-2")["energy_total_j"].null_count() == 0


def test_09_the_last_xid_stays_for_days() -> None:
    codes = over_time(GPU, DCGM_FI_DEV_XID_ERRORS=[0, 31, 31, 31]) + over_time(
        GPU, DCGM_FI_DEV_XID_ERRORS=[0, 0, 79, 79], step_s=20
    ).replace("GPU-1", "GPU-2")
    events = xid_events_of(read(codes).gpu)
    assert events.select("gpu_uuid", "ts", "xid").rows() == [
        ("GPU-1", T0 + timedelta(seconds=15), 31), ("GPU-2", T0 + timedelta(seconds=40), 79),
    ]  # fmt: skip
    # After a restart of the exporter the gauge is 0 or gone: nothing happened.
    assert xid_events_of(read(over_time(GPU, DCGM_FI_DEV_XID_ERRORS=[31, 0, 0])).gpu).is_empty()
    # Another collector counts by itself: the same code twice is seen.
    frame = read(over_time(GPU, DCGM_FI_DEV_XID_ERRORS=[0, 31, 31, 31])).gpu
    assert xid_events_of(frame.with_columns(xid_events=pl.Series([0.0, 1.0, 1.0, 2.0]))).height == 2


def test_10_the_count_of_xids_is_of_a_window_and_falls_by_itself() -> None:
    window = GPU + ',window_size_in_ms="300000"'
    text = over_time(window + ',xid="42"', step_s=60, DCGM_EXP_XID_ERRORS_COUNT=[0, 1, 1, 2, 1, 0])
    got = read(text + over_time(GPU, step_s=60, DCGM_FI_DEV_XID_ERRORS=[0, 42, 42, 42, 42, 42]))
    assert got.health["xid_events"].to_list() == [0, 1, 1, 2, 1, 0]
    joined = got.gpu.join(got.health.select("ts", "gpu_uuid", "xid_events"), on=["ts", "gpu_uuid"])
    for events in (xid_events_of(joined), xid_events_of(got.gpu, got.health), xid_events_of(got.health)):
        assert [(ts - T0).total_seconds() for ts in events["ts"]] == [60, 180]  # no event when it falls
    # What is counted is an event of its own code, whatever the gauge has stood at for days.
    two = over_time(window + ',xid="31"', step_s=60, DCGM_EXP_XID_ERRORS_COUNT=[3, 3, 3, 3])
    two += over_time(window + ',xid="79"', step_s=60, DCGM_EXP_XID_ERRORS_COUNT=[0, 0, 1, 1])
    got = read(two + over_time(GPU, step_s=60, DCGM_FI_DEV_XID_ERRORS=[13, 13, 13, 13]))
    assert got.health["xid_counts"].to_list() == ["31=3", "31=3", "31=3 79=1", "31=3 79=1"]
    events = xid_events_of(got.gpu, got.health)
    assert [((ts - T0).total_seconds(), code) for ts, code in zip(events["ts"], events["xid"], strict=True)] == [
        (120, 79)
    ]
    # Without an event there is one series without a code.
    assert read(f"DCGM_EXP_XID_ERRORS_COUNT{{{window}}} 0").health["xid_events"].to_list() == [0]


def test_11_mig_repeats_the_board_on_every_instance() -> None:
    a30 = 'gpu="0",UUID="GPU-265c9814",device="nvidia0",modelName="NVIDIA A30",Hostname="n1"'
    one, two = (f'{a30},GPU_I_PROFILE="{p}",GPU_I_ID="{i}"' for p, i in (("1g.6gb", 3), ("2g.12gb", 1)))
    got = read(f"""
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{one}}} 126272101025
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{two}}} 126272101025
DCGM_FI_DEV_POWER_USAGE{{{one}}} 120.5
DCGM_FI_DEV_POWER_USAGE{{{two}}} 120.5
DCGM_FI_DEV_GPU_TEMP{{{one}}} 55
DCGM_FI_DEV_GPU_TEMP{{{two}}} 55
DCGM_FI_DEV_GPU_UTIL{{{one}}} 0
DCGM_FI_DEV_FB_USED{{{one}}} 1000
DCGM_FI_DEV_FB_USED{{{two}}} 5000
DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{one}}} 0.8
DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{two}}} 0.5
""")
    row = got.row()
    assert got.raw.gpu.height == 2
    assert (row["gpu_power_w"], row["gpu_temp_c"]) == (120.5, 55)  # never their sum
    assert row["gpu_util_ratio"] is None
    assert row["fb_used_bytes"] == 6000 * 2**20
    assert row["engine_active_ratio"] == pytest.approx((0.8 * 1 + 0.5 * 2) / 4)
    assert got.health["energy_total_j"].to_list() == [pytest.approx(126272101.025)]
    assert got.findings["gpu_util_ratio", "zero_on_mig"] == 1


def test_12_labels_that_come_and_go_are_one_gpu() -> None:
    with_pod = GPU + ',container="train",namespace="ml",pod="train-0",hpc_job="4711"'
    got = read(f"""
DCGM_FI_DEV_GPU_TEMP{{{GPU}}} 60
DCGM_FI_DEV_GPU_TEMP{{{with_pod}}} 60
DCGM_FI_DEV_POWER_USAGE{{{with_pod}}} 500
DCGM_FI_DEV_POWER_USAGE{{{GPU},container="",namespace="",pod=""}} 500
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{GPU}}} 1000
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{with_pod}}} 1000
""")
    row = got.row()
    assert (row["gpu_uuid"], row["job_id"], row["gpu_temp_c"], row["gpu_power_w"]) == ("GPU-1", "4711", 60, 500)
    assert got.health.height == 1
    # Time slicing: one copy of every series for each job. The GPU is nobody's alone.
    shared = read("".join(f'DCGM_FI_DEV_GPU_TEMP{{{GPU},hpc_job="{job}"}} 60\n' for job in (1, 2)))
    assert shared.row()["job_id"] is None
    assert shared.findings == {("ts", "duplicate"): 1, ("job_id", "several_jobs"): 1}


def test_13_the_pod_label_may_be_the_exporters_own() -> None:
    renamed = GPU + ',pod="dcgm-exporter-x2b9k",exported_pod="train-0",exported_namespace="ml",exported_hpc_job="4711"'
    got = read(f"""
DCGM_FI_DEV_GPU_TEMP{{{renamed}}} 60
DCGM_FI_DEV_SM_CLOCK{{{GPU},pod="dcgm-exporter-x2b9k"}} 1980
""")
    row = got.row()
    assert (row["job_id"], row["node"], row["gpu_temp_c"], row["sm_clock_hz"]) == ("4711", "n1", 60, 1.98e9)


def test_14_the_hostname_may_be_the_exporters_pod() -> None:
    labels = 'gpu="0",UUID="GPU-1",Hostname="nvidia-dcgm-exporter-cwbcm"'
    assert read(f'DCGM_FI_DEV_GPU_TEMP{{{labels},instance="n7.example.org:9400"}} 60').row()["node"] == "n7"
    assert read(f'DCGM_FI_DEV_GPU_TEMP{{{labels},node="n8"}} 60').row()["node"] == "n8"
    assert read(f"DCGM_FI_DEV_GPU_TEMP{{{labels}}} 60", node="n9").row()["node"] == "n9"
    assert read(f"DCGM_FI_DEV_GPU_TEMP{{{labels}}} 60").gpu.is_empty()  # better none than a wrong one
    assert read('DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1",hostname="n3"} 60').row()["node"] == "n3"  # newer spelling


def test_15_versions_in_labels_are_no_part_of_the_key() -> None:
    lines = over_time(GPU, DCGM_FI_DEV_PCIE_REPLAY_COUNTER=[5, 6, 7, 9], DCGM_FI_DEV_GPU_TEMP=50).splitlines()
    text = "\n".join(
        line.replace('Hostname="n1"', f'Hostname="n1",DCGM_FI_DRIVER_VERSION="{550 + 20 * (i % 4 >= 2)}.144.03"')
        for i, line in enumerate(lines)
    )
    got = read(text)
    assert got.gpu.height == 4
    assert got.gpu["gpu_uuid"].unique().to_list() == ["GPU-1"]
    grown = counter_deltas(got.health, ["pcie_replay_total"])
    assert grown["pcie_replay_total_increase"].to_list() == [None, 1, 1, 2]
    # Who knows the driver may say that the growth across its change is not known.
    known = got.health.with_columns(driver_version=pl.Series(["550", "550", "570", "570"]))
    broken = counter_deltas(known, ["pcie_replay_total"], break_on=["driver_version"])
    assert broken["pcie_replay_total_increase"].to_list() == [None, 1, None, 2]


def test_16_indices_move_and_boards_are_swapped() -> None:
    def page(minute: int, *uuids: str) -> str:
        at = T0_MS + 60_000 * minute
        bus = ("00000000:8D:00.0", "00000000:9D:00.0")
        return "".join(
            f'DCGM_FI_DEV_GPU_TEMP{{gpu="{i}",UUID="{u}",pci_bus_id="{bus[i]}",Hostname="n1"}} {50 + i} {at}\n'
            for i, u in enumerate(uuids)
        )

    got = read(page(0, "GPU-1", "GPU-2") + page(10, "GPU-2", "GPU-1") + page(20, "GPU-2", "GPU-3"))
    rows = got.gpu.select("ts", "gpu_uuid", "gpu_index", "gpu_temp_c").sort("ts", "gpu_uuid").rows()
    assert [row[1:] for row in rows] == [
        ("GPU-1", 0, 50), ("GPU-2", 1, 51), ("GPU-1", 1, 51), ("GPU-2", 0, 50), ("GPU-2", 0, 50), ("GPU-3", 1, 51),
    ]  # fmt: skip
    history = slot_history(got.gpu).select("slot", "gpu_uuid", "start_time", "end_time")
    ten, twenty = (T0 + timedelta(minutes=m) for m in (10, 20))
    assert history.rows() == [
        ("0", "GPU-1", T0, ten), ("0", "GPU-2", ten, None), ("1", "GPU-2", T0, ten), ("1", "GPU-1", ten, twenty),
        ("1", "GPU-3", twenty, None),
    ]  # fmt: skip


def test_17_violation_counters_are_nanoseconds_whatever_the_help_says() -> None:
    got = read(f"""
# HELP DCGM_FI_DEV_POWER_VIOLATION Throttling duration due to power constraints (in us).
# TYPE DCGM_FI_DEV_POWER_VIOLATION counter
DCGM_FI_DEV_POWER_VIOLATION{{{GPU}}} 2500000000
DCGM_FI_DEV_THERMAL_VIOLATION{{{GPU}}} 1
""")
    row = got.health.row(0, named=True)
    assert row["power_violation_s_total"] == pytest.approx(2.5)
    assert row["thermal_violation_s_total"] == pytest.approx(1e-9)


def test_18_counters_begin_again_when_the_driver_is_loaded() -> None:
    got = read(over_time(GPU, step_s=60, DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION=[126272097025, 126272101025, 4100, 8200]))
    assert got.health["energy_total_j"].to_list() == pytest.approx([126272097.025, 126272101.025, 4.1, 8.2])
    grown = counter_deltas(got.health, ["energy_total_j"])["energy_total_j_increase"].to_list()
    assert grown == [None, pytest.approx(4.0), pytest.approx(4.1), pytest.approx(4.1)]
    assert got.findings == {}


def test_19_memory_is_used_and_free_and_reserved() -> None:
    got = read(f"""
DCGM_FI_DEV_FB_USED{{{GPU}}} 70000
DCGM_FI_DEV_FB_FREE{{{GPU}}} 11000
DCGM_FI_DEV_FB_RESERVED{{{GPU}}} 559
""")
    assert got.row()["fb_total_bytes"] == 81559 * 2**20
    assert got.row()["fb_used_bytes"] == 70000 * 2**20
    for name, total in (("TOTAL", 81559), ("RESERVED", 81000)):
        part = f"DCGM_FI_DEV_FB_{name}{{{GPU}}} 2147483634\n"
        part += f"DCGM_FI_DEV_FB_RESERVED{{{GPU}}} 559\n" if name == "TOTAL" else ""
        some = read(f"DCGM_FI_DEV_FB_USED{{{GPU}}} 70000\nDCGM_FI_DEV_FB_FREE{{{GPU}}} 11000\n{part}")
        assert some.row()["fb_total_bytes"] == total * 2**20, name
    beyond = read(f"DCGM_FI_DEV_FB_USED{{{GPU}}} 90000\nDCGM_FI_DEV_FB_TOTAL{{{GPU}}} 81559")
    assert beyond.row()["fb_used_bytes"] is None
    assert beyond.findings == {("fb_used_bytes", "above_total"): 1}


def test_20_memory_copy_utilisation_is_no_fill_of_memory() -> None:
    got = read(f"DCGM_FI_DEV_MEM_COPY_UTIL{{{GPU}}} 37\nDCGM_FI_DEV_GPU_TEMP{{{GPU}}} 60")
    assert got.health["mem_copy_util_ratio"].to_list() == [pytest.approx(0.37)]
    assert got.row()["fb_used_bytes"] is None
    assert got.row()["dram_active_ratio"] is None


def test_21_memory_at_zero_degrees_has_no_sensor() -> None:
    got = read(f"DCGM_FI_DEV_MEMORY_TEMP{{{GPU}}} 0\nDCGM_FI_DEV_GPU_TEMP{{{GPU}}} 33")
    assert (got.row()["mem_temp_c"], got.row()["gpu_temp_c"]) == (None, 33)
    assert got.findings == {("mem_temp_c", "zero_is_missing"): 1}


def test_22_a_gpu_that_fell_off_the_bus_has_no_rows_and_is_a_fault(tmp_path) -> None:
    from pipelines.faults import read_silences
    from tests.store_child import open_store

    temps = over_time(GPU, step_s=60, DCGM_FI_DEV_GPU_TEMP=[60] * 20)
    got = read(temps + over_time(OTHER, step_s=60, DCGM_FI_DEV_GPU_TEMP=[60] * 8))
    assert got.gpu.filter(gpu_uuid="GPU-2").height == 8  # nothing is filled in
    with open_store(tmp_path) as store:
        store.transact(lambda writer: writer.append("core_gpu_minutes", got.gpu))
        found = store.transact(lambda writer: read_silences(writer, "a", T0, T0 + timedelta(minutes=20)))
    assert found.select("node", "gpu_uuid", "start_time", "kind").rows() == [
        ("n1", "GPU-2", T0 + timedelta(minutes=8), "gpu_lost")
    ]


def test_23_ecc_that_cannot_be_collected_is_null_beside_link_counters() -> None:
    text = over_time(GPU, DCGM_FI_DEV_NVLINK_COUNT_TX_BYTES=[1e12, 2.5e12, 4e12], DCGM_FI_DEV_GPU_TEMP=60)
    got = read(text)
    assert got.gpu["ecc_uncorrected_total"].null_count() == 3
    assert got.gpu["nvlink_tx_bytes_per_s"].to_list() == [None, pytest.approx(1e11), pytest.approx(1e11)]


def test_24_nvidia_smi_leaves_out_what_is_not_supported_and_strips_uuids() -> None:
    uuid = "df6e7a7c-7314-46f8-abc4-b88b36dcf3aa"
    got = read(
        f"""
nvidia_smi_power_draw_watts{{uuid="{uuid}"}} 69.85
nvidia_smi_temperature_gpu_tlimit{{uuid="{uuid}"}} 46
nvidia_smi_utilization_gpu_ratio{{uuid="{uuid}"}} 0.99
nvidia_smi_clocks_current_sm_clock_hz{{uuid="{uuid}"}} 1.98e9
nvidia_smi_clocks_event_reasons_counters_sw_power_cap_seconds{{uuid="{uuid}"}} 2.5
DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="GPU-{uuid}"}} 41
""",
        node="n1",
    )
    row = got.row()
    assert row["gpu_uuid"] == f"GPU-{uuid}"  # one GPU, by whichever exporter
    assert (row["gpu_power_w"], row["gpu_temp_margin_c"], row["gpu_temp_c"]) == (pytest.approx(69.85), 46, 41)
    assert (row["gpu_util_ratio"], row["sm_clock_hz"]) == (pytest.approx(0.99), pytest.approx(1.98e9))
    assert row["mem_temp_c"] is None  # [N/A] at nvidia-smi: no series, and no 0
    assert got.health["power_violation_s_total"].to_list() == [2.5]
    # Its index is told apart, and another one after a boot; so are its XIDs, by code, from the first one on.
    where = f'uuid="{uuid}"'
    info = 'nvidia_smi_gpu_info{{{},name="NVIDIA H100",index="{}"}} 1 {}\n'.format
    text = over_time(where, step_s=60, nvidia_smi_temperature_gpu=[50, 51, 52], nvidia_smi_pcie_link_gen_current=5)
    text += "".join(info(where, index, T0_MS + 60_000 * i) for i, index in enumerate((3, 3, 4)))
    text += f'nvidia_smi_xid_errors_total{{{where},xid="79"}} 1 {T0_MS + 120_000}\n'
    text += f'nvidia_smi_xid_last_timestamp_seconds{{{where},xid="79"}} {T0_MS // 1000 + 117} {T0_MS + 120_000}\n'
    got = read(text, node="n1")
    assert got.gpu.select("gpu_uuid", "gpu_index", "xid_last").rows() == [
        (f"GPU-{uuid}", 3, None), (f"GPU-{uuid}", 3, None), (f"GPU-{uuid}", 4, 79),
    ]  # fmt: skip
    assert xid_events_of(got.gpu, got.health).select("ts", "xid").rows() == [(T0 + timedelta(minutes=2), 79)]
    assert got.findings == {}


def test_25_amd_without_an_identity_and_with_all_ones() -> None:
    labels = (
        'card_series="Aqua Vanjaram [Instinct MI300X VF]",gpu_compute_partition_type="spx",gpu_id="0",'
        'gpu_partition_id="4294967295",gpu_uuid="00000000-0000-0000-0000-000000000000",hostname="vm022",job_id="",pod=""'
    )
    got = read(f"""
amd_gpu_gfx_activity{{{labels}}} 13
amd_gpu_package_power{{{labels}}} 65535
amd_gpu_junction_temperature{{{labels}}} 4294967295
amd_gpu_memory_temperature{{{labels}}} 18446744073709551615
amd_pcie_replay_count{{{labels}}} 4294967295
""")
    row = got.row()
    assert (row["gpu_uuid"], row["node"], row["gpu_index"], row["job_id"]) == ("vm022:0", "vm022", 0, None)
    assert row["gpu_util_ratio"] == pytest.approx(0.13)
    for name in ("gpu_power_w", "gpu_temp_c", "mem_temp_c"):
        assert row[name] is None
        assert got.findings[name, "sentinel"] == 1
    assert got.health["pcie_replay_total"].to_list() == [None]
    serial = labels.replace('gpu_id="0"', 'gpu_id="0",serial_number="692251001124"')
    assert read(f"amd_gpu_gfx_activity{{{serial}}} 13").row()["gpu_uuid"] == "692251001124"
    # The second partition of two is missing: no one knows what the GPU does; power is that of the whole board.
    part = 'gpu_id="0",gpu_partition_id="{}",gpu_compute_partition_type="dpx",gpu_uuid="A",hostname="n1"'
    both = read("".join(
        f"gpu_gfx_activity{{{part.format(i)}}} {activity}\ngpu_package_power{{{part.format(i)}}} {power}\n"
        for i, activity, power in ((0, 90, 640), (1, 0, 0))
    ))  # fmt: skip
    assert (both.row()["gpu_power_w"], both.row()["gpu_util_ratio"]) == (640, pytest.approx(0.45))
    one = read(f"gpu_gfx_activity{{{part.format(0)}}} 90\ngpu_package_power{{{part.format(0)}}} 640\n")
    assert (one.row()["gpu_power_w"], one.row()["gpu_util_ratio"]) == (640, None)
    # The energy of some boards does not advance.
    still = read(over_time(part.format(0), step_s=60, gpu_energy_consumed=[5e9] * 8))
    assert still.health["energy_total_j"].null_count() == 8
    assert still.findings == {("energy_total_j", "frozen"): 8}


def test_26_infiniband_counts_words_here_and_octets_there_and_stops_at_its_end() -> None:
    labels = 'device="mlx5_0",port="1",instance="n1:9100"'
    got = read(over_time(
        labels, step_s=10, node_infiniband_port_data_received_bytes_total=[0, 4e11, 8e11],
        node_infiniband_port_transmit_wait_total=4294967295, node_infiniband_rate_bytes_per_second=5e10,
        node_infiniband_state_id=4,
    ))  # fmt: skip
    assert got.port["rx_bytes_per_s"].to_list() == [None, pytest.approx(4e10), pytest.approx(4e10)]
    assert got.port["transmit_wait_per_s"].null_count() == 3  # overflowed, not "no waits"
    assert got.findings == {("transmit_wait_total", "saturated"): 3}
    assert got.port["is_link_up"].to_list() == [True] * 3
    words = 'component="ca",local_name="n1 mlx5_0",local_port="1",local_guid="0x1"'
    raw = read(over_time(words, step_s=10, infiniband_portrcvdata_total=[0, 1e11]))
    assert raw.port["rx_bytes_per_s"].to_list() == [None, pytest.approx(4e10)]
    assert raw.port.select("node", "device", "port").row(0) == ("n1", "mlx5_0", "1")
    # Four times too much, as of an exporter that multiplies twice: no port carries that.
    twice = read(over_time(labels, step_s=10, node_infiniband_port_data_received_bytes_total=[0, 16e11],
                           node_infiniband_rate_bytes_per_second=5e10))  # fmt: skip
    assert twice.port["rx_bytes_per_s"].to_list() == [None, None]
    assert twice.findings == {("rx_bytes_per_s", "above_speed"): 1}


def test_27_gpus_of_an_exporter_that_cannot_parse_their_type_are_not_believed() -> None:
    got = read("slurm_gpus_alloc 0\nslurm_gpus_total 0\nslurm_gpus_idle 0\nslurm_account_jobs_pending 1", node="n1")
    assert got.gpu.is_empty()
    assert got.raw.node.is_empty()
    told = [m for m in metrics.METRICS if m.name in ("slurm_gpus_alloc", "slurm_gpus_total")]
    assert told
    assert all("do not believe" in m.meaning and not m.column for m in told)


def test_28_odd_gauges_of_slurm_itself_feed_nothing_and_harm_nobody() -> None:
    got = read(f"""
# TYPE slurm_jobs_pending gauge
slurm_jobs_pending 27
slurm_partition_cpus_alloc{{partition="big"}} 464
slurm_user_jobs_memory_alloc{{username="ann"}} 4294963200
slurm_nodes_powering_up 12
slurm_account_jobs_running{{account="a "quoted" name"}} 3
slurm_account_jobs_running{{account="C:\\temp"}} 3
DCGM_FI_DEV_GPU_TEMP{{{GPU}}} 60
""")
    assert got.row()["gpu_temp_c"] == 60
    assert got.raw.node.is_empty()
    doubted = {m.name: m.meaning for m in metrics.METRICS if m.exporter == "Slurm itself"}
    assert "do not believe" in doubted["slurm_nodes_powering_up"]
    assert "modulo 4 GiB" in doubted["slurm_user_jobs_memory_alloc"]
    assert "65,536" in doubted["slurm_node_cpus_alloc"]


def test_times_keep_their_fraction_of_a_second() -> None:
    got = read(f"DCGM_FI_DEV_GPU_TEMP{{{GPU}}} 60 {T0_MS + 123}\nDCGM_FI_DEV_GPU_TEMP{{{GPU}}} 61 {T0_MS + 623}")
    assert [ts.microsecond for ts in got.gpu["ts"]] == [123000, 623000]
    assert got.gpu["gpu_temp_c"].to_list() == [60, 61]
