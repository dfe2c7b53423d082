"""Strains of the simulator against the label rules, their switches and base rates; a healthy job sets nothing."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.labels import LABEL_CLASSES, label_bottlenecks, label_ranks, label_shortages
from features.occupancy import queue_occupancy
from features.thresholds import ThresholdBook
from simulator.cluster import SimulatedCluster
from simulator.hardware import SimulatorError
from simulator.rates import Rates
from simulator.strains import CLASSES, MODES, Strains

START = datetime(2026, 11, 4, tzinfo=UTC)
BOOK = ThresholdBook(default_model="NVIDIA H100 80GB HBM3")
QUICK = {"link_s": 0.3, "compute_s": 1.0, "exposed_ratio": 0.2, "power_ratio": 0.95}
SLACK = timedelta(seconds=30)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


class Watched:
    """A cluster whose frames are kept from `since_s` on."""

    def __init__(self, world: SimulatedCluster) -> None:
        self.world = world
        self.frames: dict[str, list[pl.DataFrame]] = {name: [] for name in ("gpu", "node", "port", "rank")}

    def run(self, ticks: int) -> None:
        for _ in range(ticks):
            self.world.step()
            for name, frames in self.frames.items():
                frames.append(getattr(self.world, f"{name}_frame")())

    def labels(self) -> pl.DataFrame:
        gpu, node, port, rank = (pl.concat(frames) for frames in self.frames.values())
        gpu = gpu.drop("mig_instance", "mig_profile", "unknown_flags", "own_step_time_s")  # ranks say it
        found = label_bottlenecks(gpu, self.world.jobs_frame(), BOOK, node_samples=node, ports=port)
        return pl.concat([found, label_ranks(rank)])


def placed(tick_s: float = 5, **profile: float) -> SimulatedCluster:
    world = SimulatedCluster(6, 4, START, tick_s, fault_scale=0, own_jobs=False)
    for i, nodes in enumerate(("n1,n2", "n3", "n4", "n5,n6")):
        world.place_job(str(i), "ada", nodes, profile=QUICK | profile)
    return world


@pytest.fixture(scope="module")
def troubled() -> Watched:
    """Half an hour with every class and mode, ten minutes after their jobs began."""
    watched = Watched(placed())
    watched.run(120)
    inject = watched.world.inject
    for class_, node, is_step in (
        ("power_throttle", "n3", False), ("straggler", "n4", False),
        ("fabric_congestion", "n1", False), ("host_memory", "n3", False), ("host_memory", "n2", True),
    ):  # fmt: skip
        inject(class_, node, 1, 90, is_step)
    watched.run(240)
    watched.world.inject("straggler", "n3", 2, 30, is_step=True)
    watched.world.inject("power_throttle", "n4", 0, 30, is_step=True)  # all of a gang: none of it lags behind the rest
    watched.world.inject("fabric_congestion", "n6", 0, 30, is_step=True)
    watched.run(150)
    return watched


def test_labels_are_the_ground_truth(troubled):
    truth = pl.DataFrame(troubled.world.truth, infer_schema_length=None).drop_nulls("onset")
    key = ["class", "scope", "scope_id"]
    assert truth.select(pl.col("mode").unique().sort())["mode"].to_list() == sorted(
        m for two in MODES.values() for m in two
    )
    assert sorted(truth["class"].unique()) == sorted(CLASSES)
    found = troubled.labels().filter(~pl.col("is_censored")).rename({"bottleneck_class": "class"})
    both = truth.join(found, on=key, how="full", suffix="_label", coalesce=True)
    lost = both.filter(pl.col("onset").is_null() | pl.col("onset_time").is_null())
    assert lost.is_empty(), lost.select(*key, "mode", "onset", "onset_time").rows()
    late = both.filter((pl.col("onset_time") - pl.col("onset")).abs() > SLACK)
    assert late.is_empty(), late.select(*key, "onset", "onset_time").rows()
    # The job's own step time follows slow steps that last: congestion of minutes clears before it is over.
    ended = both.drop_nulls(["clear", "clear_time"]).filter(pl.col("class") != "fabric_congestion")
    assert ended.height > 5
    assert ((ended["clear_time"] - ended["clear"]).abs() <= SLACK).all()
    same = both.filter(pl.col("job_id_label").is_not_null())
    assert (same["job_id"] == same["job_id_label"]).all()


def test_onsets_come_when_they_were_planned(troubled):
    rows = [row for row in troubled.world.truth if row["onset"] is not None]
    assert all(abs(row["onset"] - row["planned_onset"]) <= timedelta(seconds=15) for row in rows)


def test_what_slows_one_gpu_slows_its_job(troubled):
    gpu = pl.concat(troubled.frames["gpu"]).filter(pl.col("job_id") == "0")
    at_rest, slow = (
        gpu.filter(pl.col("ts").is_between(at(a), at(b)))["step_time_s"].mean() for a, b in ((300, 600), (720, 780))
    )
    assert slow / at_rest > 1.15


def test_a_healthy_job_at_full_speed_sets_nothing_for_hours():
    """Checkpoints, evaluations, GPUs at their power cap and ports two thirds full; 60 s samples keep it short."""
    world = SimulatedCluster(2, 4, START, 60, fault_scale=0, own_jobs=False)
    world.place_job("1", "ada", "n1,n2", profile=QUICK | {"power_ratio": 1.05, "memory_ratio": 0.96})
    watched = Watched(world)
    watched.run(8 * 60)
    assert watched.labels().height == 0
    gpu = pl.concat(watched.frames["gpu"])
    assert gpu["is_power_capped"].mean() > 0.3  # type: ignore[operator]
    assert world.truth == []


def test_every_class_has_a_switch_and_a_share_of_steps():
    physics = placed().physics
    rates = Rates.of_every_class().of_strains
    assert set(rates) == set(CLASSES)
    assert all(rates.values())
    assert not any(Rates().of_strains.values())  # they are switched on by who asks for them
    for one in CLASSES:
        strains = Strains(physics, 1, {one: 0.5}, 0.4)
        drawn = [what for hour in range(30) for what in strains.draw(3600.0 * hour, 1.0)]
        assert {class_ for _, class_, *_ in drawn} == {one}
        onsets = [is_step for *_, is_step, is_lookalike, _ in drawn if not is_lookalike]
        assert len(onsets) == pytest.approx(0.5 * 48 * 30, rel=0.2)
        assert np.mean(onsets) == pytest.approx(0.4, abs=0.07)
        assert len(drawn) == 2 * len(onsets)  # as many look-alikes
    with pytest.raises(SimulatorError, match=r"'shortage'.*power_throttle"):
        Strains(physics, 1, {"shortage": 1.0}, 0.4)


def test_a_strain_that_makes_no_sense_is_refused_in_words():
    world = placed()
    with pytest.raises(SimulatorError, match="too young"):
        world.inject("straggler", "n1", 0)
    world.advance(at(300))
    with pytest.raises(SimulatorError, match="one node alone"):
        world.inject("fabric_congestion", "n3", 0)


def test_lookalikes_stop_short_of_their_limit():
    watched = Watched(placed())
    watched.run(120)
    rng = np.random.default_rng(3)
    for number, (class_, gpu) in enumerate((("power_throttle", 16), ("straggler", 25), ("host_memory", 9))):
        watched.world.strains.begin(f"l{number}", class_, gpu, watched.world.time, rng, is_lookalike=True)
    watched.run(120)
    assert watched.labels().height == 0
    assert watched.world.truth == []
    assert {row["class"] for row in watched.world.lookalikes} == {"power_throttle", "straggler", "host_memory"}


def test_shortages_of_the_scheduler_are_those_of_the_rule():
    world = SimulatedCluster(4, 5, START, 60, fault_scale=0, load=1.4, rates=Rates(has_shortage=True))
    world.advance_jobs(at(30 * 3600))
    begin = world.now
    world.advance(begin + timedelta(hours=3))
    truth = {(row["scope_id"], row["onset"]) for row in world.truth if row["class"] == "shortage"}
    jobs = world.jobs_frame()
    found = label_shortages(queue_occupancy(jobs, 32, begin - timedelta(hours=1), world.now))
    found = found.filter(~pl.col("is_censored") & (pl.col("onset_time") > begin + timedelta(minutes=1)))
    assert found.height >= 1
    for queue, onset in found.select("scope_id", "onset_time").rows():
        assert any(queue == name and abs(when - onset) <= timedelta(seconds=90) for name, when in truth), (queue, onset)
    assert set(LABEL_CLASSES) >= {"shortage", *CLASSES}
