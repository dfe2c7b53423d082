"""The live loop under load: wider ticks before it falls behind, horizons that come too soon, ports, metrics, shards."""

import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import polars as pl
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dashboards.bottlenecks_page import read_list
from dashboards.filters import Filters
from dashboards.foresight import probability
from dashboards.hints_reading import HintsReader
from dashboards.reading import Cache
from features.conditions import CLASSES
from features.port_course import PortRates
from scheduler_hints.filters import select
from scheduler_hints.metrics import Metrics
from scheduler_hints.nowcast import Nowcast
from scheduler_hints.nowcast_config import NowcastConfig
from scheduler_hints.nowcast_loop import run
from scheduler_hints.nowcast_status import STATUS
from scheduler_hints.offers import offered, offered_horizons
from scheduler_hints.pace import Pace
from scheduler_hints.schema import HORIZONS_S, Bottleneck
from scheduler_hints.shards import Row
from scheduler_hints.snapshot import Publisher, read_snapshot, snapshot_path
from tests.gpu_samples import at, frame, gang
from tests.hints_support import bottleneck
from tests.test_nowcast import CONFIG, World, hot


class Clock:
    """Seconds that pass only when someone works or waits."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def work(self, seconds):
        self.now_s += seconds


# --- the pace ---------------------------------------------------------------------------------------------------------


def test_a_growing_load_widens_the_tick_before_it_fills_it():
    pace = Pace(15)
    steps = []
    for busy in np.arange(1, 40, 0.5):
        pace.note(busy)
        assert busy < pace.tick_s  # at no time is there more work than time
        if not steps or steps[-1] != pace.tick_s:
            steps.append(pace.tick_s)
    assert steps == [15, 20, 30, 45, 60]
    assert pace.widened_total == 4
    assert "every 60 s instead of 15 s" in pace.problem()
    pace.note(70)
    assert "more than there is" in pace.problem()
    assert pace.tick_s == 60


def test_a_sudden_load_widens_it_at_once_as_far_as_it_takes():
    pace = Pace(15)
    pace.note(25)
    assert pace.tick_s == 45  # 25 s would be more than 70 % of 30
    assert pace.widened_total == 1


def test_it_narrows_a_step_at_a_time_after_calm_ticks_and_does_not_swing():
    pace = Pace(15)
    pace.note(11)
    assert pace.tick_s == 20
    for _ in range(50):  # too much for 15 s with room, too little to widen 20 s
        pace.note(8)
    assert pace.tick_s == 20
    for _ in range(7):
        pace.note(7.4)
    pace.note(9)  # one tick that would not have had room: the count begins anew
    for _ in range(7):
        pace.note(7.4)
    assert pace.tick_s == 20
    pace.note(7.4)
    assert pace.tick_s == 15
    assert pace.problem() is None
    wide = Pace(15)
    wide.note(25)
    seen = []
    for _ in range(40):
        wide.note(1)
        seen.append(wide.tick_s)
    assert list(dict.fromkeys(seen)) == [45, 30, 20, 15]


class Slow:
    """A forecaster whose work takes as long as it is told, on a clock that only it and waiting move."""

    version = "slow"

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def version_of(self, bottleneck_class):
        return self.version

    def forecast(self, block):
        self.clock.work(self.seconds() / len(CLASSES))
        return np.full((len(block.matrix), len(HORIZONS_S)), 0.9)


def test_load_is_shed_by_wider_ticks_and_taken_up_again(tmp_path):
    clock, stop, statuses, lives, begun = Clock(), threading.Event(), [], [], []
    nowcast = Nowcast("c", Publisher(tmp_path, "c"), CONFIG, clock=clock)

    def load():
        n = len(statuses)
        return min(1 + 0.8 * n, 17) if n < 30 else 2.0

    nowcast.champion.forecaster = Slow(clock, load)

    def latest():
        rows = frame(gang(seconds=15)).with_columns(pl.lit(wall()).alias("ts"))
        return SimpleNamespace(gpu=rows, node=None)

    def wall():
        return at(clock.now_s)

    def on_tick(status):
        statuses.append(status)
        lives.append(read_snapshot(snapshot_path(tmp_path, "c", "bottlenecks")))
        if len(statuses) == 60:
            stop.set()

    original = nowcast.tick

    def tick(moment):
        begun.append(clock.now_s)
        return original(moment)

    nowcast.tick = tick
    # Answers are dated by the true clock: let none of them count as from the future.
    original_observe = nowcast.observe
    nowcast.observe = lambda gpu, node, received_at, port=None: original_observe(gpu, node, wall())
    source = SimpleNamespace(name="made-up", latest=latest)
    run(nowcast, source, None, 15, stop, clock=clock, wall_clock=wall, wait=clock.work, on_tick=on_tick)
    ticks = [status["tick_s"] for status in statuses]
    assert list(dict.fromkeys(ticks)) == [15, 20, 30]
    assert ticks[-1] == 15  # and back again
    assert ticks[29] == 30
    assert statuses[-1]["missed_ticks_total"] == 0  # it never fell behind
    gaps = np.diff(begun)
    assert gaps.max() <= 30
    for status, life, gap in zip(statuses, lives, gaps, strict=False):
        assert status["busy_ratio"] < 0.75
        assert life.ttl_s >= min(2 * status["tick_s"], 2 * gap) - 1e-6  # hints outlive the wait for the next
        assert status["actionable_horizon_s"] >= status["tick_s"] + 30 - 1e-6  # what is said is never too short
    loaded = statuses[29]
    assert "every 30 s instead of 15 s" in loaded["problems"]["load"]
    assert "load" not in statuses[-1]["problems"]
    assert loaded["offered_horizons_s"] == [60, 90, 120]
    assert statuses[-1]["widened_total"] == 2


def test_the_tick_that_turns_slow_says_so_itself(tmp_path):
    clock = Clock()
    world = World(tmp_path, hot([3]))
    world.nowcast.clock = clock
    for second in range(600, 1185, 15):
        world.tick(second)
    world.nowcast.champion.forecaster = Slow(clock, lambda: 12.0)
    status = world.tick(1185)
    assert status["tick_s"] == 20
    assert read_snapshot(snapshot_path(tmp_path, "c", "bottlenecks")).ttl_s == pytest.approx(40)
    assert status["actionable_horizon_s"] == pytest.approx(1 + 20 + 30, abs=0.2)


def test_a_hang_is_counted_as_missed_ticks(tmp_path):
    clock, stop, statuses = Clock(), threading.Event(), []
    nowcast = Nowcast("c", Publisher(tmp_path, "c"), CONFIG, clock=clock)
    nowcast.champion.forecaster = Slow(clock, lambda: 100.0 if len(statuses) == 2 else 0.0)

    def on_tick(status):
        statuses.append(status)
        if len(statuses) == 5:
            stop.set()

    source = SimpleNamespace(name="x", latest=lambda: SimpleNamespace(gpu=frame(gang(seconds=15)), node=None))
    run(nowcast, source, None, 15, stop, clock=clock, wait=clock.work, on_tick=on_tick)
    assert statuses[1]["missed_ticks_total"] == 0
    assert statuses[4]["missed_ticks_total"] == 1  # 100 s against the tick of 60 s that it made at once


# --- what is offered --------------------------------------------------------------------------------------------------

P = {"30": 0.6, "60": 0.7, "90": 0.8, "120": 0.9}


@pytest.mark.parametrize(
    ("actionable_s", "horizon_s", "kept"),
    [(None, 30, [30, 60, 90, 120]), (30, 30, [30, 60, 90, 120]), (30.1, 60, [60, 90, 120]), (60, 60, [60, 90, 120]),
     (61, 90, [90, 120]), (120, 120, [120])],
)  # fmt: skip
def test_horizons_that_are_too_short_are_not_offered(actionable_s, horizon_s, kept):
    (hint,) = offered([bottleneck(horizon_s=30, probability=0.6, probabilities=P)], actionable_s, 0.5)
    assert hint.horizon_s == horizon_s
    assert hint.probability == P[str(horizon_s)]
    assert list(hint.probabilities) == [str(h) for h in kept] == [str(h) for h in offered_horizons(actionable_s)]
    assert {**hint.too_short, **hint.probabilities} == P  # for people nothing is lost
    assert hint.is_actionable


def test_pages_still_show_what_is_not_offered():
    (hint,) = offered([bottleneck(horizon_s=30, probability=0.6, probabilities=P)], 60, 0.5)
    item = msgspec.to_builtins(hint)
    assert [probability(item, h) for h in HORIZONS_S] == list(P.values())
    calls = []

    def hints(path, params):
        calls.append((path, params))
        raise ConnectionError("not here")

    context = SimpleNamespace(clock=lambda: at(0), cache=Cache(), hints=HintsReader(hints))
    for kind in ("bottlenecks", "node-risks"):
        assert read_list(context, kind, Filters({})).freshness == "down"
    assert calls == [("/v1/bottlenecks", {"audience": "people"}), ("/v1/node-risks", {})]


def test_a_later_horizon_stays_and_one_under_hysteresis_keeps_the_longest():
    late = {"30": 0.1, "60": 0.2, "90": 0.6, "120": 0.7}
    (hint,) = offered([bottleneck(horizon_s=90, probability=0.6, probabilities=late)], 60, 0.5)
    assert (hint.horizon_s, hint.probability) == (90, 0.6)
    fading = {"30": 0.1, "60": 0.2, "90": 0.3, "120": 0.4}
    (hint,) = offered([bottleneck(horizon_s=120, probability=0.4, probabilities=fading)], 100, 0.5)
    assert (hint.horizon_s, hint.probability) == (120, 0.4)


def test_a_class_with_a_probability_of_its_own_is_offered_by_that():
    rising = {"30": 0.55, "60": 0.6, "90": 0.8, "120": 0.9}
    (hint,) = offered(
        [bottleneck(horizon_s=30, probability=0.55, probabilities=rising)], 60, 0.5, {"thermal_throttle": 0.75}
    )
    assert (hint.bottleneck_class, hint.horizon_s, hint.probability) == ("thermal_throttle", 90, 0.8)


def test_where_every_horizon_is_too_short_only_people_see_what_is_not_there_yet():
    coming = bottleneck("coming", horizon_s=30, probability=0.6, probabilities=P)
    active = bottleneck("active", is_active=True, horizon_s=30, probability=1.0, probabilities=dict.fromkeys(P, 1.0))
    hints = offered([coming, active], 130, 0.5)
    assert [hint.is_actionable for hint in hints] == [False, True]
    rows = [Row(hint, b"", 0.0) for hint in hints]

    def ids(**values):
        return [row.item.id for row in select("bottlenecks", values, rows)]

    assert ids() == ids(cluster="alpha") == ids(audience="scheduler") == ["active"]
    assert ids(audience="people") == ["coming", "active"]
    assert ids(audience="people", min_probability=0.95) == ["active"]


def test_a_scheduler_that_asks_for_too_short_a_horizon_gets_only_facts():
    (hint,) = offered([bottleneck(horizon_s=30, probability=0.6, probabilities=P)], 60, 0.5)
    rows = [Row(hint, b"", 0.0)]
    assert select("bottlenecks", {"horizon_s": 30}, rows) == []
    assert select("bottlenecks", {"horizon_s": 30, "min_probability": 0.5}, rows) == []
    assert len(select("bottlenecks", {"horizon_s": 60}, rows)) == 1


def test_what_is_published_has_no_horizon_shorter_than_the_actionable_one(tmp_path):
    world = World(tmp_path, hot([3]), config=NowcastConfig(tick_s=15, exporter_interval_s=15, consumer_period_s=45))
    said = []
    for second in range(600, 1290, 15):
        status = world.tick(second)
        said += [(status["actionable_horizon_s"], hint) for hint in world.hints()]
    assert said
    for horizon_s, hint in said:
        assert horizon_s == pytest.approx(61, abs=0.2)
        assert hint.horizon_s >= 90
        assert set(hint.probabilities) == {"90", "120"}
        assert set(hint.too_short) == {"30", "60"}


# --- ports, node samples, steps: what reaches the windows -------------------------------------------------------------


def ports(second, nodes=("n0", "n1"), load=0.5, marks=10.0):
    moved = 50e9 * load * second
    return pl.DataFrame(
        {
            "ts": [at(second)] * len(nodes), "cluster": "c", "node": list(nodes), "device": "mlx5_0", "port": "1",
            "tx_bytes_total": moved, "rx_bytes_total": moved / 2, "ecn_marked_total": marks * second,
            "speed_bytes_per_s": 50e9,
        }
    )  # fmt: skip


def test_counters_of_ports_become_rates_between_readings():
    course = PortRates()
    assert course.take(ports(0))["tx_bytes_per_s"].to_list() == [None, None]
    rates = course.take(ports(15))
    assert rates["tx_bytes_per_s"].to_list() == pytest.approx([25e9, 25e9])
    assert rates["ecn_marked_per_s"].to_list() == pytest.approx([10, 10])
    assert course.take(ports(15)).height == 0  # told twice
    assert course.take(ports(5)).height == 0  # late
    later = course.take(ports(30, nodes=("n1", "n2")))
    assert dict(later.select("node", "tx_bytes_per_s").rows()) == {"n1": pytest.approx(25e9), "n2": None}
    both = course.take(ports(45))  # n0 was silent at 30
    assert both["tx_bytes_per_s"].to_list() == pytest.approx([25e9, 25e9])
    ahead = course.take(ports(1000), at(60))
    assert ahead.height == 0


def test_ports_reach_the_windows_of_the_gpus_beside_them(tmp_path):
    nowcast = Nowcast("c", Publisher(tmp_path, "c"), CONFIG)
    samples = frame(gang(seconds=60, gpus=16))
    nowcast.warm(samples.filter(pl.col("ts") < at(30)), port=pl.concat([ports(0), ports(15)]))
    for second in (30, 45):
        gpu = samples.filter(pl.col("ts") == at(second))
        nowcast.observe(gpu, None, at(second), port=ports(second, nodes=("n0",), load=0.5 + second / 100))
    block = nowcast.window.features(np.array([0, 8]), "nvlink_saturation", at(46).timestamp())
    load = block.column("port_load_ratio")
    assert load[0] == pytest.approx((0.95 * 45 - 0.8 * 30) / 15, rel=1e-4)
    assert load[1] == pytest.approx(0.5, rel=1e-4)  # as it was half a minute ago
    assert block.column("port_marks_per_s") == pytest.approx([10, 10], rel=1e-4)


# --- a big cluster that is asked, metrics -----------------------------------------------------------------------------


def test_a_cluster_that_has_outgrown_being_asked_is_told_so_with_figures(tmp_path, monkeypatch):
    monkeypatch.setattr("scheduler_hints.nowcast_loop.ASKED_AT_MOST", 7)

    def problems(**how):
        stop, statuses = threading.Event(), []

        def on_tick(status):
            statuses.append(status)
            if status["gpus"] or nowcast.window.count:  # on a busy machine the answer may come after some ticks
                stop.set()

        def latest():
            return SimpleNamespace(gpu=frame(gang(seconds=15)), node=None)

        nowcast = Nowcast("c", Publisher(tmp_path, "c"), CONFIG)
        run(nowcast, SimpleNamespace(name="x", latest=latest, **how), None, 0.1, stop, on_tick=on_tick)
        return statuses[-1]["problems"]

    said = problems(is_asked=True)["telemetry-kind"]
    assert said.startswith("8 GPUs are asked for at every tick, which took 0.")
    assert 'telemetry = "remote-write"' in said
    assert "telemetry-kind" not in problems()


def test_timings_by_stage_and_the_rest_are_metrics(tmp_path):
    world = World(tmp_path, hot([3]))
    for second in range(600, 660, 15):
        world.tick(second)
    word = (tmp_path / "c" / STATUS).read_bytes()
    store = SimpleNamespace(
        state=_state({"c": msgspec.Raw(word), "odd": msgspec.Raw(b'{"timings_s": 3}')}), clock=lambda: 0.0,
        read_errors=0, checked_s=0.0,
    )  # fmt: skip
    text = Metrics(store).render(["c", "odd", "silent"]).decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    stages = {sample.labels["stage"]: sample.value for sample in found["weatherglass_nowcast_stage_seconds"].samples}
    assert {"observe", "jobs", "score", "episodes", "publish", "windows", "tick"} <= set(stages)
    assert all(0 <= seconds < 10 for seconds in stages.values())

    def one(name):
        (sample,) = found[f"weatherglass_nowcast_{name}"].samples
        assert sample.labels == {"cluster": "c"}
        return sample.value

    status = json.loads(word)
    assert one("tick_seconds") == one("wished_tick_seconds") == 15
    assert one("ticks") == 4
    assert one("missed_ticks") == one("widened") == 0
    assert one("actionable_horizon_seconds") == pytest.approx(46, abs=0.2)
    assert one("busy_ratio") == status["busy_ratio"]
    gpus = {sample.labels["state"]: sample.value for sample in found["weatherglass_nowcast_gpus"].samples}
    assert gpus == {"fresh": 8, "stale": 0}


def _state(nowcast):
    from scheduler_hints.shards import State

    return State(nowcast=nowcast)


def test_every_metric_of_the_nowcast_has_its_meaning_in_the_guide(tmp_path):
    from scheduler_hints.nowcast_gauges import nowcast_gauges

    guide = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    for family in nowcast_gauges({}, []):
        assert f"`{family.name}" in guide, family.name


# --- shards -----------------------------------------------------------------------------------------------------------


def test_several_shards_are_merged_and_one_that_is_late_or_gone_is_named(tmp_path):
    from scheduler_hints.answers import encode_list
    from scheduler_hints.shards import State, load_shard
    from scheduler_hints.snapshot import boottime_s

    shards = {}
    for cluster, ttl_s in (("alpha", 30), ("beta", 30), ("late", 5)):
        item = bottleneck(f"b-{cluster}", cluster=cluster)
        Publisher(tmp_path, cluster).publish(
            "bottlenecks", [item], ttl_s=ttl_s, data_age_s=1, model_versions={"thermal_throttle": "m"},
            actionable_horizon_s=46 if cluster == "alpha" else 61,
        )  # fmt: skip
        path = snapshot_path(tmp_path, cluster, "bottlenecks")
        now = datetime.now(UTC)
        shards[cluster, "bottlenecks"] = load_shard(path.read_bytes(), cluster, "bottlenecks", path, boottime_s(), now)
    state, later_s = State(shards=shards), boottime_s() + 10
    clusters = ["alpha", "beta", "late", "gone"]
    _, body = encode_list(state, "bottlenecks", clusters, {}, later_s).at(later_s)
    answer = json.loads(body)
    assert [item["id"] for item in answer["items"]] == ["b-alpha", "b-beta"]
    assert answer["stale_shards"] == ["late", "gone"]
    assert set(answer["versions"]) == {"alpha", "beta"}
    assert answer["actionable_horizon_s"] == 61  # that of the slowest: nothing shorter is promised for all
    assert answer["expires_in_s"] <= 20
    assert "expired" in state.why_stale("late", "bottlenecks", later_s)
    assert "nothing has been published" in state.why_stale("gone", "bottlenecks", later_s)


def test_hints_of_before_these_fields_can_be_read():
    old = {
        name: value for name, value in msgspec.to_builtins(bottleneck()).items()
        if name not in ("too_short", "is_actionable")
    }  # fmt: skip
    read = msgspec.convert(old, Bottleneck)
    assert (read.too_short, read.is_actionable) == ({}, True)
