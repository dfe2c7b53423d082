"""The nowcast: hints before the onset, ids that last, nothing from stale data, and a loop that nothing stops."""

import json
import threading
import time
from datetime import timedelta
from itertools import groupby
from types import SimpleNamespace

import msgspec
import numpy as np
import polars as pl
import pytest

from features.cleaning_live import Courses
from features.conditions import CLASSES, INDEX
from features.telemetry import RingWindow
from features.thresholds import ThresholdBook
from features.vocabulary import JOB_COLUMNS, conform, schema
from models.bottleneck import HazardForecaster
from models.registry import Registry
from models.trend import TREND_VERSION
from scheduler_hints.journal import Journal, journal_files, read_journal
from scheduler_hints.nowcast import Nowcast
from scheduler_hints.nowcast_config import NowcastConfig
from scheduler_hints.nowcast_loop import run
from scheduler_hints.nowcast_status import STATUS
from scheduler_hints.reasons import expected_onset_s
from scheduler_hints.schema import Bottleneck
from scheduler_hints.snapshot import Publisher, read_snapshot, snapshot_path
from tests.gpu_samples import H100, at, frame, gang, set_temp

CONFIG = NowcastConfig(tick_s=15, exporter_interval_s=15)


def inventory(nodes=4, states=None, racks=None):
    names = [f"n{i}" for i in range(nodes)]
    return conform(pl.DataFrame(
        {
            "observed_at": [at(0)] * nodes, "cluster": ["c"] * nodes, "node": names,
            "rack": racks or ["r1"] * nodes, "pod": ["p1"] * nodes, "gpu_model": [H100] * nodes,
            "gpus": [8] * nodes, "state": states or ["IDLE"] * nodes,
        }
    ), "core_nodes")  # fmt: skip


def no_jobs():
    return pl.DataFrame(schema={name: schema("core_jobs")[name] for name in JOB_COLUMNS})


def hot(gpus, onset_s=1200.0, seconds=1800, total=8, per_s=0.1, top=95.0):
    """A gang in which some GPUs warm up steadily, to reach 87 °C at `onset_s`."""
    arrays = gang(seconds=seconds, gpus=total)
    ramp = np.clip(87 + (arrays["ts"] - onset_s) * per_s, 72, top)
    for gpu in gpus:
        set_temp(arrays, gpu, np.round(ramp))
    return arrays


class World:
    """A nowcast on a folder, fed from made-up samples on a clock of its own."""

    def __init__(self, root, arrays, *, nodes=None, jobs=None, config=CONFIG, registry=None, node_of=8):
        self.root, self.samples = root, frame(arrays, node_of=node_of)
        self.nowcast = Nowcast("c", Publisher(root, "c"), config, registry=registry)
        self.nodes, self.jobs = inventory() if nodes is None else nodes, no_jobs() if jobs is None else jobs
        self.fed = -1.0

    def tick(self, second, feed=True, ask=True):
        if ask:
            self.nowcast.observe_jobs(self.jobs, self.nodes, (), at(second))
        if feed:
            new = self.samples.filter((pl.col("ts") > at(self.fed)) & (pl.col("ts") <= at(second)))
            self.nowcast.observe(new, None, at(second))
            self.fed = second
        return self.nowcast.tick(at(second + 1))

    def hints(self):
        items = read_snapshot(snapshot_path(self.root, "c", "bottlenecks")).items
        return [msgspec.json.decode(item, type=Bottleneck) for item in items]


def test_a_hint_comes_before_the_onset_keeps_its_id_and_turns_into_a_fact(tmp_path):
    world = World(tmp_path, hot([3]))
    seen = {}
    for second in range(600, 1320, 15):
        world.tick(second)
        for hint in world.hints():
            seen.setdefault((hint.gpu_uuid, hint.id), []).append((second, hint))
    assert [uuid for uuid, _ in seen] == ["GPU-0003"]  # one GPU, one id from forecast to fact
    (course,) = seen.values()
    first_s, first = course[0]
    assert 30 <= 1200 - first_s <= 130  # while there is time to act
    assert first.bottleneck_class == "thermal_throttle"
    assert (first.scope, first.node, first.rack, first.pod) == ("gpu", "n0", "r1", "p1")
    assert not first.is_active
    assert first.horizon_s in (30, 60, 90, 120)
    assert first.probability == first.probabilities[str(first.horizon_s)] >= 0.5
    assert list(first.probabilities) == ["60", "90", "120"]  # 46 s are needed to act: 30 s are not offered
    assert list(first.too_short) == ["30"]
    assert list(first.probabilities.values()) == sorted(first.probabilities.values())
    assert at(first_s) < first.expected_onset <= at(first_s + 121)
    assert first.job_ids == ["7"]
    assert first.action == "reserve"
    assert "below the slowdown limit" in first.reasons[0]
    assert first.model_version == TREND_VERSION
    last_s, last = course[-1]
    assert last.is_active
    assert last.expected_onset is None
    assert last.probabilities == {"60": 1.0, "90": 1.0, "120": 1.0}
    assert last.action == "drain_after_job"
    assert last_s - first_s == 15 * (len(course) - 1)  # without a gap


def test_healthy_gpus_at_full_speed_get_no_hint(tmp_path):
    world = World(tmp_path, gang(gpus=32))
    for second in range(0, 1500, 15):
        world.tick(second)
        assert world.hints() == []


def test_an_odd_gpu_name_is_kept_whole_and_jobs_come_from_the_scheduler(tmp_path):
    arrays = hot([3])
    arrays["job_id"][:] = None
    jobs = pl.DataFrame(
        [{"cluster": "c", "job_id": "99", "state": "RUNNING", "node_list": "n0", "user": "u", "submit_time": at(0),
          "start_time": at(0), "nodes": 1, "gpus": 8, "observed_at": at(0)}],
        schema={name: schema("core_jobs")[name] for name in JOB_COLUMNS},
    )  # fmt: skip
    world = World(tmp_path, arrays, jobs=jobs)
    for second in range(600, 1200, 15):
        world.tick(second)
    assert [hint.job_ids for hint in world.hints()] == [["99"]]


def test_stale_samples_are_not_scored_and_their_hints_are_not_kept_alive(tmp_path):
    world = World(tmp_path, hot([3]))
    for second in range(600, 1200, 15):
        status = world.tick(second)
    assert len(world.hints()) == 1
    assert status["stale_gpus"] == 0
    path = snapshot_path(tmp_path, "c", "bottlenecks")
    before = read_snapshot(path)
    assert before.ttl_s == pytest.approx(30)
    assert before.data_age_s == pytest.approx(1, abs=0.1)
    # The source falls silent. The next ticks still speak, of ageing data and for a shorter time, then no more.
    lives = []
    for second in range(1200, 1330, 15):
        status = world.tick(second, feed=False)
        snapshot = read_snapshot(path)
        if snapshot.version == before.version:
            break
        before = snapshot
        lives.append((snapshot.data_age_s, snapshot.ttl_s))
    ages = [age for age, _ in lives]
    assert ages == sorted(ages)
    assert max(age + ttl for age, ttl in lives) <= 30 + 15 + 5 + 1.5  # data never live longer than this
    assert status["fresh_gpus"] == 0
    assert status["stale_gpus"] == 8
    assert status["problems"]["telemetry"] == "no fresh sample"
    # One GPU of many falls silent: it alone is left out.
    other = World(tmp_path / "b", hot([3], total=16))
    for second in range(600, 1185, 15):
        other.tick(second)
    other.samples = other.samples.filter((pl.col("gpu_uuid") != "GPU-0003") | (pl.col("ts") < at(1000)))
    other.tick(1185)
    assert len(other.hints()) == 1
    silent = World(tmp_path / "d", hot([3], total=16))
    silent.samples = silent.samples.filter((pl.col("gpu_uuid") != "GPU-0003") | (pl.col("ts") < at(1140)))
    for second in range(600, 1200, 15):
        status = silent.tick(second)
    assert silent.hints() == []
    assert status["stale_gpus"] == 1


def test_status_says_how_it_goes(tmp_path):
    world = World(tmp_path, hot([3]))
    for second in range(600, 1200, 15):
        world.tick(second)
    status = json.loads((tmp_path / "c" / STATUS).read_bytes())
    assert status["gpus"] == 8
    assert status["bottlenecks"] == 1
    assert status["model_version"] == TREND_VERSION
    assert status["sample_age_p95_s"] == pytest.approx(1, abs=0.1)
    assert status["actionable_horizon_s"] == pytest.approx(1 + 15 + 30, abs=0.2)
    assert {"observe", "score", "episodes", "publish", "windows", "tick"} <= set(status["timings_s"])
    assert status["problems"] == {}
    assert read_snapshot(snapshot_path(tmp_path, "c", "bottlenecks")).actionable_horizon_s == pytest.approx(46, abs=0.2)


@pytest.mark.parametrize("state", ["DRAINED", "drain*", "DOWN", "MAINT", "IDLE+DRAIN"])
def test_nodes_out_of_service_get_no_hint(tmp_path, state):
    world = World(tmp_path, hot([3]), nodes=inventory(states=[state, "IDLE", "IDLE", "IDLE"]))
    for second in range(600, 1200, 15):
        status = world.tick(second)
    assert world.hints() == []
    assert status["excluded_nodes"] == 1


def test_trouble_of_half_a_node_is_the_nodes_and_of_two_nodes_the_racks(tmp_path):
    world = World(tmp_path, hot([0, 1, 2, 3]))
    for second in range(600, 1200, 15):
        world.tick(second)
    (hint,) = world.hints()
    assert (hint.scope, hint.node, hint.gpu_uuid) == ("node", "n0", None)
    assert hint.reasons[0] == "4 of 8 GPUs together on n0"
    both = World(tmp_path / "b", hot([0, 1, 2, 3, 8, 9, 10, 11, 20], total=32))
    for second in range(600, 1200, 15):
        both.tick(second)
    (rack,) = both.hints()  # the GPU of the third node is within it
    assert (rack.scope, rack.node, rack.rack, rack.members) == ("rack", None, "r1", 9)
    assert rack.nodes == ["n0", "n1", "n2"]
    assert rack.action == "throttle"
    arrays = hot([0, 1, 2, 3, 8, 9, 10, 11], total=32)
    arrays["job_id"][:, 8:] = "8"  # nothing in common
    apart = World(tmp_path / "d", arrays, nodes=inventory(racks=["r1", "r2"] * 2))
    for second in range(600, 1200, 15):
        apart.tick(second)
    assert sorted((hint.scope, hint.node) for hint in apart.hints()) == [("node", "n0"), ("node", "n1")]


def test_ids_outlive_a_restart(tmp_path):
    arrays = hot([3])
    world = World(tmp_path, arrays)
    for second in range(600, 1200, 15):
        world.tick(second)
    (before,) = world.hints()
    again = World(tmp_path, arrays)
    past = again.samples.filter((pl.col("ts") <= at(1185)) & (pl.col("ts") > at(500)))
    assert again.nowcast.warm(past) == past.height
    again.fed = 1185
    again.tick(1200)
    (after,) = again.hints()
    assert after.id == before.id
    assert read_snapshot(snapshot_path(tmp_path, "c", "bottlenecks")).version > 0


class Fixed:
    """A forecaster that says what it is told."""

    version = "fixed"

    def __init__(self, p):
        self.p = p

    def version_of(self, bottleneck_class):
        return self.version

    def forecast(self, block):
        return np.full((len(block.matrix), 4), self.p)


def test_hysteresis_and_expiry(tmp_path):
    world = World(tmp_path, hot([3], onset_s=1700, per_s=0.02))
    for second in range(600, 1350, 15):
        world.tick(second)
    counts = []
    for k, p in enumerate((0.2, 0.49, 0.51, 0.31, 0.45, 0.29, 0.45, 0.29, 0.29, 0.6, 0.6, 0.2, 0.9)):
        world.nowcast.champion.forecaster = Fixed(p)
        world.tick(1350 + 15 * k)
        counts.append(len([hint for hint in world.hints() if hint.bottleneck_class == "thermal_throttle"]))
    assert world.nowcast.window.screened("thermal_throttle", at(1531).timestamp()).tolist() == [3]
    assert counts == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1]


def test_expected_onset_by_hand():
    assert expected_onset_s(np.array([1.0, 1.0, 1.0, 1.0])) == 15
    assert expected_onset_s(np.array([0.0, 0.0, 0.0, 0.6])) == 105
    assert expected_onset_s(np.array([0.2, 0.4, 0.6, 0.8])) == 60


def test_a_model_that_fails_leaves_the_trend_in_charge(tmp_path):
    class Broken:
        version = "broken"

        def version_of(self, bottleneck_class):
            return self.version

        def forecast(self, block):
            raise RuntimeError("no")

    world = World(tmp_path, hot([3]))
    world.nowcast.champion.forecaster = Broken()
    for second in range(600, 1200, 15):
        status = world.tick(second)
    assert [hint.model_version for hint in world.hints()] == [TREND_VERSION]
    assert "broken: no" in status["problems"]["model"]


def test_a_class_that_a_model_has_not_learned_is_forecast_in_the_name_of_the_trend(tmp_path):
    world = World(tmp_path, hot([3]))
    world.nowcast.champion.forecaster = HazardForecaster({"nvlink_saturation": None}, {}, version="v1")
    for second in range(600, 1200, 15):
        status = world.tick(second)
    assert [hint.model_version for hint in world.hints()] == [TREND_VERSION]
    named = read_snapshot(snapshot_path(tmp_path, "c", "bottlenecks")).model_versions
    assert named == status["model_versions"]
    assert named["nvlink_saturation"] == "v1"
    assert named["thermal_throttle"] == TREND_VERSION


def test_a_new_champion_is_taken_over_and_a_damaged_one_is_not(tmp_path):
    registry = Registry(tmp_path / "registry" / "c")
    world = World(tmp_path / "published", hot([3]), registry=registry)
    assert world.tick(600)["model_version"] == TREND_VERSION
    files = HazardForecaster({}, {}).to_files()  # no class learned yet: the trend for all of them
    first = registry.save("bottleneck", files, {"trained_at": at(0)})
    registry.promote("bottleneck", first, "test")
    assert world.tick(615)["model_version"] == first
    second = registry.save("bottleneck", files, {"trained_at": at(60)})
    registry.promote("bottleneck", second, "test")
    (registry.root / "bottleneck" / second / "hazard.json").write_bytes(b"{}")
    status = world.tick(630)
    assert status["model_version"] == first
    assert "hazard.json" in status["problems"]["registry"]
    registry.rollback("bottleneck", "test")
    status = world.tick(645)
    assert status["model_version"] == first
    assert "registry" not in status["problems"]


def test_a_full_disk_is_said_and_survived(tmp_path, monkeypatch):
    world = World(tmp_path, hot([3]))
    world.tick(600)
    version = read_snapshot(snapshot_path(tmp_path, "c", "bottlenecks")).version
    full = OSError(28, "No space left on device", "bottlenecks.json")
    with monkeypatch.context() as patch:
        patch.setattr("scheduler_hints.snapshot.write_atomically", lambda *_, **__: (_ for _ in ()).throw(full))
        status = world.tick(615)
    assert "No space left on device" in status["problems"]["bottlenecks"]
    assert read_snapshot(snapshot_path(tmp_path, "c", "bottlenecks")).version == version
    status = world.tick(630)
    assert status["problems"] == {}
    assert read_snapshot(snapshot_path(tmp_path, "c", "bottlenecks")).version == version + 1
    with monkeypatch.context() as patch:
        patch.setattr("scheduler_hints.nowcast.write_atomically", lambda *_, **__: (_ for _ in ()).throw(full))
        assert "No space" in world.tick(645)["problems"]["status"]
    assert world.tick(660)["problems"] == {}
    assert json.loads((tmp_path / "c" / STATUS).read_bytes())["problems"] == {}


def test_windows_and_plans_are_published_and_die_with_the_schedulers_word(tmp_path):
    world = World(tmp_path, gang(gpus=32))
    world.tick(600)
    path = snapshot_path(tmp_path, "c", "backfill-windows")
    snapshot = read_snapshot(path)
    assert len(snapshot.items) == 1
    assert snapshot.ttl_s == pytest.approx(45)
    assert read_snapshot(snapshot_path(tmp_path, "c", "reservation-plans")).items == []
    lives = []
    for second in range(615, 900, 15):
        status = world.tick(second, ask=False)
        if read_snapshot(path).version == snapshot.version:
            break
        snapshot = read_snapshot(path)
        lives.append(snapshot.data_age_s + snapshot.ttl_s)
    assert max(lives) <= 45 + 15 + 5 + 1.5
    assert "jobs" in status["problems"]


def test_windows_that_cannot_be_made_do_not_hold_up_bottlenecks(tmp_path):
    world = World(tmp_path, hot([3]), jobs=no_jobs().drop("submit_time"))
    for second in range(600, 1200, 15):
        status = world.tick(second)
    assert len(world.hints()) == 1
    assert "submit_time" in status["problems"]["windows"]


def test_journal_keeps_each_change_once(tmp_path):
    world = World(tmp_path, hot([3]))
    for second in range(600, 1290, 15):
        world.tick(second)
    lines = [snapshot for path in journal_files(tmp_path, "c") for snapshot in read_journal(path)]
    mine = [snapshot for snapshot in lines if snapshot.kind == "bottlenecks"]
    versions = [snapshot.version for snapshot in mine]
    assert versions == sorted(set(versions))
    outlines = [[(i["id"], i["is_active"]) for i in map(msgspec.json.decode, snapshot.items)] for snapshot in mine]
    assert outlines[0] == []
    assert any(entry and not entry[0][1] for entry in outlines)
    assert outlines[-1][0][1]
    assert len(mine) < 12  # 46 ticks
    path = journal_files(tmp_path, "c")[0]
    with path.open("ab") as file:
        file.write(b'{"schema_version":1,"ki')  # a crash in the middle of a line
    assert len(list(read_journal(path))) == len([s for s in lines if s.generated_at.hour == lines[0].generated_at.hour])
    assert Journal(tmp_path, "c").append(mine[-1])


def test_a_line_that_a_full_disk_cut_off_takes_no_other_with_it(tmp_path):
    World(tmp_path, hot([3])).tick(600)
    (path,) = journal_files(tmp_path, "c")
    whole = path.read_bytes()
    snapshots = list(read_journal(path))
    journal = Journal(tmp_path, "c")
    path.write_bytes(b"\n" + whole + b'\xff\n\n{"schema_version":1,"ki')
    assert journal.append(snapshots[0])
    assert [s.kind for s in read_journal(path)] == [s.kind for s in [*snapshots, snapshots[0]]]
    assert journal.append(snapshots[1])
    assert b"\n\n" not in path.read_bytes()[len(whole) + 5 :]  # nothing is added where the line before has its end


def test_samples_of_the_future_are_counted_and_the_gpus_that_are_gone_forgotten(tmp_path):
    world = World(tmp_path, hot([3]))
    world.tick(600)
    ahead = world.samples.filter(pl.col("ts") == at(615)).with_columns(pl.col("ts") + timedelta(days=1))
    assert world.nowcast.observe(ahead, None, at(615)) == 0
    status = world.tick(615, feed=False)
    assert status["samples_ahead_total"] == 8
    assert "8 samples from the future dropped" in status["problems"]["telemetry-clock"]
    status = world.tick(630)
    assert "telemetry-clock" not in status["problems"]
    assert status["fresh_gpus"] == 8
    other = world.samples.filter(pl.col("ts") == at(1_500)).with_columns(
        pl.lit(at(5_000)).alias("ts"), pl.col("gpu_uuid") + "-b"
    )
    world.nowcast.tick(at(5_000))
    assert world.nowcast.window.count == 8  # nothing has been read meanwhile: nobody is gone for that
    world.nowcast.observe(other, None, at(5_000))
    world.nowcast.tick(at(5_001))
    assert world.nowcast.window.uuids == [f"GPU-{i:04d}-b" for i in range(8)]


def test_a_model_that_fails_for_one_class_is_said_though_it_works_for_the_next(tmp_path):
    class Halting(Fixed):
        def forecast(self, block):
            if block.bottleneck_class == CLASSES[0]:
                raise pl.exceptions.PanicException("index out of bounds")
            return super().forecast(block)

    world = World(tmp_path, hot([3]))
    world.nowcast.champion.forecaster = Halting(0.1)
    assert world.tick(600)["problems"]["model"] == "fixed: index out of bounds"
    world.nowcast.champion.forecaster = Fixed(0.1)
    assert "model" not in world.tick(615)["problems"]


# --- the loop ---------------------------------------------------------------------------------------------


def still(second, froze_s=0, thaws_s=10_000):
    """A GPU close to its limit whose exporter serves the same values from `froze_s` on, and a busy one beside it."""
    moves = [0.0 if froze_s <= second < thaws_s else second / 100, second / 100]
    return pl.DataFrame({
        "ts": [at(second)] * 2, "cluster": ["c"] * 2, "node": ["n0"] * 2, "gpu_uuid": ["GPU-old", "GPU-new"],
        "gpu_temp_c": [86.0, 60.0], "gpu_power_w": [650 + move for move in moves], "sm_active_ratio": [0.9, 0.9],
        "sm_clock_hz": [1.5e9] * 2,
    }).with_columns(pl.col("ts").cast(pl.Datetime("us", "UTC")), pl.col(pl.Float64).cast(pl.Float32))  # fmt: skip


def test_values_that_froze_are_not_believed_and_said_until_they_move(tmp_path):
    nowcast = Nowcast("c", Publisher(tmp_path, "c"), CONFIG)
    nowcast.observe_jobs(no_jobs(), inventory(), (), at(0))

    def tick(nowcast, second):
        nowcast.observe(still(second, thaws_s=900), None, at(second))
        status = nowcast.tick(at(second + 1))
        temps = dict(zip(nowcast.window.uuids, nowcast.window.latest[INDEX["gpu_temp_c"]], strict=False))
        return status, temps["GPU-old"]

    for second in range(0, 255, 15):
        status, temp = tick(nowcast, second)
        assert temp == 86
        assert status["refuted_gpus"] == {"frozen": 0, "stuck": 0, "zero_under_load": 0}
    status, temp = tick(nowcast, 255)  # eighteen samples cover four and a half minutes
    assert np.isnan(temp)
    assert status["refuted_gpus"]["frozen"] == 1
    assert "1 GPU has had" in status["problems"]["telemetry-values"]
    assert "GPU-old on n0" in status["problems"]["telemetry-values"]
    rings = nowcast.window.samples().filter(gpu_uuid="GPU-old")
    assert rings["gpu_temp_c"].null_count() == 18  # those before are not believed any more
    assert nowcast.window.samples().filter(gpu_uuid="GPU-new")["gpu_temp_c"].null_count() == 0
    # A restart reads the last ten minutes again, and knows at once.
    again = Nowcast("c", Publisher(tmp_path, "c"), CONFIG)
    again.warm(pl.concat([still(second) for second in range(0, 300, 15)]))
    status, temp = tick(again, 300)
    assert np.isnan(temp)
    assert status["refuted_gpus"]["frozen"] == 1
    for second in range(315, 900, 15):
        assert np.isnan(tick(again, second)[1])
    status, temp = tick(again, 900)
    assert temp == 86
    assert status["refuted_gpus"]["frozen"] == 0
    assert "telemetry-values" not in status["problems"]


def test_courses_stay_with_their_gpus_when_others_are_forgotten():
    ring = RingWindow(ThresholdBook(), courses=Courses())
    gone = still(0).with_columns(gpu_uuid=pl.Series(["GPU-a", "GPU-b"]))
    ring.observe(gone)
    for second in range(0, 4_500, 15):
        ring.observe(still(second))
    assert ring.forget(4_500.0 + at(0).timestamp(), after_s=3_600) == 2
    assert ring.uuids == ["GPU-old", "GPU-new"]
    assert ring.refuted(at(4_490).timestamp())["frozen"].tolist() == [0]
    # The board moves: what was measured elsewhere says nothing there.
    ring.observe(still(4_500).with_columns(node=pl.lit("n9")))
    assert ring.refuted(at(4_501).timestamp())["frozen"].tolist() == []


def test_inlets_that_cannot_be_are_not_taken():
    ring = RingWindow(ThresholdBook())
    inlet = pl.DataFrame({"node": ["n0", "n1"], "inlet_temp_c": pl.Series([24.0, 9.2e18], dtype=pl.Float32)})
    ring.observe(still(0).with_columns(node=pl.Series(["n0", "n1"])), inlet)
    assert ring.samples().sort("node")["inlet_temp_c"].to_list() == [24, None]


class Source:
    """Newest samples of a made-up gang, by the wall clock of the test."""

    name = "made-up"

    def __init__(self, answer):
        self.asked = 0
        self.answer = answer

    def latest(self):
        self.asked += 1
        return self.answer(self.asked)

    def live(self):
        return SimpleNamespace(jobs=no_jobs(), nodes=inventory())


def newest(_=None):
    rows = frame(gang(seconds=15)).with_columns(pl.lit(now()).alias("ts"))
    return SimpleNamespace(gpu=rows, node=pl.DataFrame(schema=schema("core_node_samples")))


def now():
    from datetime import UTC, datetime

    return datetime.now(UTC)


def run_for(nowcast, source, ticks, tick_s=0.05, **kwargs):
    stop = threading.Event()
    statuses, moments = [], []

    def on_tick(status):
        statuses.append(status)
        moments.append(time.monotonic())
        if len(statuses) >= ticks:
            stop.set()

    thread = threading.Thread(
        target=run,
        args=(nowcast, source, kwargs.pop("jobs", None), tick_s, stop),
        kwargs={"on_tick": on_tick, **kwargs},
    )
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return statuses, moments


def test_the_loop_outlives_a_source_that_fails_and_says_so(tmp_path):
    def answer(n):
        if n in (2, 3):
            raise ConnectionError("refused")
        if n == 4:
            return SimpleNamespace(gpu=pl.DataFrame({"wrong": [1]}), node=None)
        return newest()

    source = Source(answer)
    nowcast = Nowcast("c", Publisher(tmp_path, "c"), CONFIG)
    statuses, _ = run_for(nowcast, source, 14, tick_s=0.2, jobs=source)
    problems = [words for words, _ in groupby(status["problems"].get("telemetry-source", "") for status in statuses)]
    problems = [words for words in problems if words != "made-up: no answer yet"]  # on a busy machine
    said = list(dict.fromkeys(problems))
    assert len(said) == 3
    assert "refused" in said[1]
    assert "lack ts" in said[2]
    assert problems[0] == problems[-1] == ""
    assert statuses[-1]["gpus"] == 8
    assert read_snapshot(snapshot_path(tmp_path, "c", "backfill-windows")).items


def test_the_loop_outlives_panics_which_are_no_exceptions(tmp_path):
    panic = pl.exceptions.PanicException
    assert not issubclass(panic, Exception)

    def answer(n):
        if n == 2:
            raise panic("in the source")
        if n == 3:
            raise SystemExit("in the thread of the source")
        return newest()

    cleaned, told = [], []

    def clean(rows):
        cleaned.append(rows)
        if len(cleaned) == 2:
            raise panic("in cleaning")
        return rows

    def forecasts():
        raise panic("in forecasts")

    nowcast = Nowcast("c", Publisher(tmp_path, "c"), CONFIG)
    original = nowcast.tick

    def tick(moment):
        told.append(moment)
        if len(told) == 5:
            raise panic("in the tick")
        return original(moment)

    nowcast.tick = tick
    source = Source(answer)
    statuses, _ = run_for(
        nowcast, source, 6, tick_s=0.2, jobs=source, clean=clean, job_forecasts=forecasts, jobs_period_s=0
    )
    problems = [status["problems"].get("telemetry-source", "") for status in statuses]
    assert "in the source" in problems[1]
    assert "in the thread" in problems[2]
    assert "in cleaning" in problems[3]
    assert problems[0] == problems[-1] == ""
    assert "in forecasts" in statuses[-1]["problems"]["job-source"]
    assert len(told) == 7


def test_what_a_source_could_not_read_is_said_until_it_can(tmp_path, caplog):
    def answer(n):
        found = newest()
        found.warnings = [f"node{i}: refused" for i in range(5 if n < 3 else 1 if n == 3 else 0)]
        return found

    nowcast = Nowcast("c", Publisher(tmp_path, "c"), CONFIG)
    statuses, _ = run_for(nowcast, Source(answer), 12, tick_s=0.2)
    said = [status["problems"].get("telemetry-targets") for status in statuses]
    first = "5 warnings: node0: refused; node1: refused; node2: refused; and 2 more"
    # An answer that comes after its tick is heard at the next: each thing said may be said more than once.
    assert [words for words, _ in groupby(said)] == [first, "1 warning: node0: refused", None]
    assert [record.getMessage() for record in caplog.records if "refused" in record.message] == [
        f"source made-up: {first}"
    ]


def test_a_source_that_hangs_delays_no_tick_and_is_asked_once(tmp_path):
    release = threading.Event()

    def answer(n):
        if n > 1:
            release.wait(20)
        return newest()

    source = Source(answer)
    nowcast = Nowcast("c", Publisher(tmp_path, "c"), CONFIG)
    statuses, moments = run_for(nowcast, source, 8, tick_s=0.1)
    release.set()
    assert source.asked == 2
    assert np.diff(moments).max() < 0.6
    assert statuses[-1]["problems"]["telemetry-source"] == "made-up: no answer yet"


def test_ticks_do_not_overlap_and_missed_ones_are_skipped(tmp_path):
    nowcast = Nowcast("c", Publisher(tmp_path, "c"), CONFIG)
    busy = threading.Lock()
    original, calls = nowcast.tick, []

    def slow(moment):
        assert busy.acquire(blocking=False)
        calls.append(time.monotonic())
        time.sleep(0.25 if len(calls) == 2 else 0)
        busy.release()
        return original(moment)

    nowcast.tick = slow
    _, _ = run_for(nowcast, Source(newest), 5, tick_s=0.1)
    gaps = np.diff(calls)
    assert gaps[1] >= 0.25
    # Ticks stay on the grid of the first one: nothing is caught up in a burst.
    assert (gaps[2:] > 0.02).all()


def test_a_tick_that_fails_does_not_end_the_loop(tmp_path):
    nowcast = Nowcast("c", Publisher(tmp_path, "c"), CONFIG)
    original, calls = nowcast.tick, []

    def failing(moment):
        calls.append(moment)
        if len(calls) == 2:
            raise ValueError("once")
        return original(moment)

    nowcast.tick = failing
    statuses, _ = run_for(nowcast, Source(newest), 3)
    assert len(statuses) == 3
    assert len(calls) == 4
