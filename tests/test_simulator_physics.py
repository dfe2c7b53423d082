"""Physics of the simulated GPUs: balances, lags, consequences, and that the size of a tick hardly matters."""

import math
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from simulator import frames
from simulator.cluster import SimulatedCluster
from simulator.hardware import GPU_MODELS, SimulatorError
from simulator.physics import AIR_LAG_S, RECIRCULATION_K_PER_KW

START = datetime(2026, 11, 4, 12, tzinfo=UTC)
STEADY = {"pause_s": 0, "eval_s": 0, "burst_s": 0, "warmup_s": 1, "link_s": 0.4, "compute_s": 1.0, "exposed_ratio": 0.2,
          "power_ratio": 0.9, "memory_ratio": 0.8}  # fmt: skip


def cluster(nodes: int = 2, tick_s: float = 5, **more) -> SimulatedCluster:
    return SimulatedCluster(nodes, 3, START, tick_s, fault_scale=0, own_jobs=False, **more)


def busy(nodes: int = 2, tick_s: float = 5, **profile) -> SimulatedCluster:
    """Every node under one job of its own that works without a pause."""
    world = cluster(nodes, tick_s)
    for i in range(nodes):
        world.place_job(str(i), "ada", [f"n{i + 1}"], profile={**STEADY, **profile})
    return world


def advance(world: SimulatedCluster, seconds: float) -> None:
    world.advance(world.now + timedelta(seconds=seconds))


def test_temperature_settles_where_heat_in_equals_heat_out() -> None:
    world = busy()
    advance(world, 3600)
    physics = world.physics
    settled = physics.inlet[physics.node_of] + physics.air_rise + physics.resistance * physics.power
    assert np.abs(physics.temp - settled).max() < 1.5  # power wobbles by 2 %
    node_kw = physics.node_power(physics.power) / 1e3
    air = physics.supply(world.time)[physics.rack_of] + RECIRCULATION_K_PER_KW * node_kw
    assert np.abs(physics.inlet - air).max() < 0.5
    assert 50 < physics.temp.mean() < 80
    assert physics.temp.max() < world.topology.model.temp_limit_c - 5


def test_energy_counter_is_the_integral_of_power() -> None:
    world = busy(1)
    advance(world, 60)
    before, watt_s = world.physics.energy_mj.copy(), np.zeros(8)
    for _ in range(120):
        world.step()
        watt_s += world.physics.power * world.tick_s
    assert world.physics.energy_mj - before == pytest.approx(watt_s * 1e3, rel=1e-9)


def test_die_follows_power_with_its_own_lag() -> None:
    world = cluster(1, 1)
    advance(world, 600)
    start = world.physics.temp.copy()
    world.place_job("1", "ada", "n1", profile=STEADY)
    physics = world.physics
    lag = float(physics.lag_s[0])
    advance(world, round(lag))
    target = physics.inlet[0] + physics.air_rise[0] + physics.resistance[0] * physics.power[0]
    done = (physics.temp[0] - start[0]) / (target - start[0])
    assert done == pytest.approx(1 - math.exp(-1), abs=0.05)


def test_air_follows_the_room_in_minutes() -> None:
    world = cluster(4)
    advance(world, 1800)
    before = world.physics.inlet.copy()
    world.physics.supply_extra[:] = 10.0
    advance(world, AIR_LAG_S)
    rise = world.physics.inlet - before
    assert rise == pytest.approx(10 * (1 - math.exp(-1)), abs=0.6)


def test_throttling_follows_temperature_and_has_consequences() -> None:
    world = busy(1)
    advance(world, 300)
    normal = world.gpu_frame().row(2, named=True)
    row = world.inject("thermal_throttle", "n1", 2, 90)
    limit = world.topology.model.temp_limit_c
    hottest, was_slow, slowest_step = 0.0, False, 0.0
    for _ in range(30):
        world.step()
        now = world.gpu_frame().row(2, named=True)
        is_slow = now["is_thermal_slowdown"]
        if is_slow and not was_slow:
            assert world.physics.temp[2] >= limit or row["onset"] is not None
            assert now["gpu_temp_margin_c"] <= 0
        assert is_slow or now["sm_clock_hz"] >= 0.95 * normal["sm_clock_hz"]
        was_slow |= is_slow
        hottest = max(hottest, now["gpu_temp_c"])
        slowest_step = max(slowest_step, now["step_time_s"])
    assert row["onset"] is not None
    assert abs((row["onset"] - row["planned_onset"]).total_seconds()) < 20
    assert limit <= hottest < limit + 6
    others = world.gpu_frame()
    assert others["step_time_s"].min() > 1.05 * normal["step_time_s"]  # the whole gang waits for its slowest rank
    assert others["sm_clock_hz"][2] < 0.95 * normal["sm_clock_hz"]
    assert others["sm_clock_hz"][3] >= 0.95 * normal["sm_clock_hz"]
    advance(world, 2400)
    assert row["clear"] > row["onset"]
    after = world.gpu_frame()
    assert not after["is_thermal_slowdown"].any()
    assert after["step_time_s"].mean() == pytest.approx(normal["step_time_s"], rel=0.05)
    assert slowest_step > normal["step_time_s"]


def test_slow_steps_make_a_job_late() -> None:
    world = SimulatedCluster(1, 3, START, 5, fault_scale=0, load=0)
    world.place_job("1", "ada", "n1", runtime_s=600, profile=STEADY)
    job = next(iter(world.jobs.values()))
    job.key = 0  # jobs of the simulated users need their steps, not their time
    advance(world, 60)
    world.inject("nvlink_saturation", "n1", 0, 0, is_step=True, mode="collective")
    advance(world, 1200)
    assert job.state == "COMPLETED"
    assert job.end is not None
    assert job.start is not None
    assert job.end - job.start > 640


def test_nvlink_saturation_is_a_ramp_to_the_achievable_rate() -> None:
    world = busy(2)
    advance(world, 300)
    achievable = world.topology.model.nvlink_achievable_bytes_per_s
    before = world.gpu_frame()
    row = world.inject("nvlink_saturation", "n1", 0, 120)
    seen = []
    for _ in range(30):
        world.step()
        now = world.gpu_frame().filter(node="n1")
        seen.append(((now["nvlink_tx_bytes_per_s"].mean() or 0) / achievable, now["step_time_s"].mean()))
    assert (before["nvlink_tx_bytes_per_s"].max() or 0) < 0.6 * achievable
    rates = [rate for rate, _ in seen]
    assert rates[8] < rates[16] < rates[24]  # seen coming
    assert 0.9 <= max(rates) <= 1.0
    assert row["onset"] is not None
    steps = world.gpu_frame().filter(node="n1")["step_time_s"]
    assert (steps.min() or 0) > 1.15 * (before.filter(node="n1")["step_time_s"].mean() or 0)
    assert world.gpu_frame().filter(node="n2")["nvlink_tx_bytes_per_s"].max() < 0.6 * achievable


def test_lane_loss_sets_one_gpu_apart_from_its_gang() -> None:
    world = busy(1, link_s=0.66)
    advance(world, 300)
    row = world.inject("nvlink_saturation", "n1", 5, 10, mode="lane_loss")
    advance(world, 60)
    rates = world.gpu_frame()["nvlink_tx_bytes_per_s"].to_list()
    assert rates[5] < 0.7 * np.median(rates)
    assert row["onset"] is not None
    assert row["is_step"]


def test_leak_leaves_under_a_gibibyte_at_its_onset_and_ends_the_job() -> None:
    world = busy(1, tick_s=1)
    advance(world, 300)
    plateau = world.gpu_frame()["fb_used_bytes"][4]
    row = world.inject("memory_exhaustion", "n1", 4, 60)
    free_at = {}
    while world.running():
        world.step()
        if world.running():
            now = world.gpu_frame().row(4, named=True)
            free_at[world.now] = now["fb_total_bytes"] - now["fb_reserved_bytes"] - now["fb_used_bytes"]
    onset = row["onset"]
    assert onset == row["planned_onset"]
    assert all(free > 2**30 for at, free in free_at.items() if at < onset)
    assert all(free < 2**30 for at, free in free_at.items() if at > onset + timedelta(seconds=1))
    halfway = free_at[min(free_at, key=lambda at: abs(at - (onset - timedelta(seconds=30))))]
    assert halfway < world.gpu_frame()["fb_total_bytes"][4] - plateau  # the growth could be seen
    assert world.ended[-1].state == "OUT_OF_MEMORY"
    assert row["clear"] is not None
    world.step()
    assert world.gpu_frame()["fb_used_bytes"][4] < 2**30


@pytest.mark.parametrize("coarse", [5, 15, 60])
def test_ticks_of_any_size_give_the_same_course(coarse: float) -> None:
    worlds = []
    for tick_s in (1, coarse):
        world = cluster(2, tick_s)
        world.place_job("1", "ada", "n1")
        world.place_job("2", "ada", "n2", gpus_per_node=4, profile={"compute_s": 7.0, "pause_every_s": 300})
        world.advance(START + timedelta(seconds=300))
        world.inject("thermal_throttle", "n1", 1, 60)
        worlds.append(world)
    fine, rough = worlds
    for minute in range(6, 16):
        sums = np.zeros(16)
        while fine.now < START + timedelta(minutes=minute):
            fine.step()
            sums += frames.newest(fine).gpu["nvlink_tx_bytes_per_s"]
            last = sums.copy()
        rough.advance(START + timedelta(minutes=minute))
        apart = np.abs(fine.physics.temp - rough.physics.temp)
        assert np.delete(apart, 1).max() < 0.5
        assert apart[1] < 3  # the throttled one swings around its limit
        assert fine.physics.inlet == pytest.approx(rough.physics.inlet, abs=0.1)
        assert fine.physics.steps == pytest.approx(rough.physics.steps, rel=0.01, abs=0.5)
        assert fine.physics.energy_mj == pytest.approx(rough.physics.energy_mj, rel=1e-3)
        if coarse == 60:  # a mean over the tick is the mean of the finer means
            assert frames.newest(rough).gpu["nvlink_tx_bytes_per_s"] == pytest.approx(last / 60, rel=0.03, abs=1e8)
    onsets = [[row["onset"] for row in world.truth] for world in worlds]
    assert abs((onsets[0][0] - onsets[1][0]).total_seconds()) <= 5


@pytest.mark.parametrize("model", GPU_MODELS)
def test_a_full_speed_node_of_every_model_stays_within_its_means(model: str) -> None:
    world = cluster(1, 5, gpu_model=model)
    world.place_job("1", "ada", "n1", profile={**STEADY, "power_ratio": 1.06, "link_s": 0.7, "memory_ratio": 0.96})
    made = world.topology.model
    for _ in range(60):
        advance(world, 15)
        gpus = world.gpu_frame()
        assert (gpus["gpu_power_w"].max() or 0) <= made.power_limit_w * 1.03
        assert not gpus["is_thermal_slowdown"].any()
        assert (gpus["gpu_temp_margin_c"].min() or 0) > 3
        assert (gpus["nvlink_tx_bytes_per_s"].max() or 0) <= made.nvlink_achievable_bytes_per_s
        free = gpus["fb_total_bytes"] - gpus["fb_reserved_bytes"] - gpus["fb_used_bytes"]
        assert (free.min() or 0) > 2**30
    assert gpus["is_power_capped"].any()  # as healthy GPUs are
    assert (gpus["gpu_power_w"].min() or 0) > 0.7 * made.power_limit_w


def test_checkpoints_and_evaluations_are_dips_not_ends() -> None:
    world = cluster(1, 5)
    profile = {**STEADY, "pause_s": 30, "pause_every_s": 300, "eval_s": 60, "eval_every_s": 700}
    world.place_job("1", "ada", "n1", profile=profile)
    engine, tx = [], []
    for _ in range(360):
        world.step()
        row = world.gpu_frame().row(0, named=True)
        engine.append(row["engine_active_ratio"])
        tx.append(row["pcie_tx_bytes_per_s"])
    low = np.array(engine[12:]) < 0.2
    assert 0.06 < low.mean() < 0.14  # 30 s of 300
    assert np.array(tx[12:])[low].mean() > np.array(tx[12:])[~low].mean()  # the checkpoint goes out over PCIe
    starts = np.flatnonzero(np.diff(low.astype(int)) == 1)
    assert np.diff(starts).mean() == pytest.approx(60, abs=2)


def test_what_cannot_be_injected_is_refused_with_reasons() -> None:
    world = cluster(2)
    world.place_job("1", "ada", "n1", gpus_per_node=1)
    for arguments, words in (
        (("thermal", "n1", 0), "classes: thermal_throttle"),
        (("thermal_throttle", "n9", 0), "no node 'n9'"),
        (("thermal_throttle", "n1", 8), "0 to 7"),
        (("thermal_throttle", "n2", 0), "possible now: n1/0"),
        (("nvlink_saturation", "n1", 0), "no collectives"),
        (("thermal_throttle", "n1", 0, -1), "onset_in_s"),
    ):
        with pytest.raises(SimulatorError, match=words):
            world.inject(*arguments)
    world.inject("thermal_throttle", "n1", 0)
    with pytest.raises(SimulatorError, match="already under way"):
        world.inject("thermal_throttle", "n1", 0)
    with pytest.raises(SimulatorError, match="modes: cooling"):
        world.inject("thermal_throttle", "n1", 0, mode="lane_loss")


def test_hot_aisle_heats_every_working_gpu_of_the_rack() -> None:
    world = SimulatedCluster(8, 3, START, 5, fault_scale=0, own_jobs=False)
    for i in range(8):
        world.place_job(str(i), "ada", f"n{i + 1}", profile={**STEADY, "power_ratio": 1.0})
    advance(world, 300)
    world.inject("thermal_throttle", "n1", 0, 240, mode="hot_aisle")
    advance(world, 900)
    rows = [row for row in world.truth if row["onset"]]
    assert {row["node"] for row in rows} <= {"n1", "n2", "n3", "n4"}
    assert len(rows) > 8
    assert world.node_frame()["inlet_temp_c"][:4].min() > world.node_frame()["inlet_temp_c"][4:].max() + 8
