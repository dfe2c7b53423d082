"""Hints from scores: one hint for one cause, ids that last, no flapping, who has to know."""

from datetime import timedelta
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_hints.episodes import Episodes
from scheduler_hints.nowcast import Nowcast
from scheduler_hints.nowcast_config import NowcastConfig
from scheduler_hints.scored import Scored
from scheduler_hints.snapshot import Publisher
from scheduler_hints.watches import Threshold
from tests.episodes_support import LINKS, MEMORY, THERMAL, Clock, Town, scored
from tests.gpu_samples import at


def test_episodes_are_deterministic_and_sorted():
    town = Town(4, job_of=lambda gpu: None)
    p = {0: 0.6, 9: 0.9, 18: 0.2}
    clock = Clock(Episodes("c", 0.5), town, name=MEMORY)
    clock.tick(p)
    hints = clock.tick(p)
    assert [(hint.gpu_uuid, hint.horizon_s, hint.probability, hint.action) for hint in hints] == [
        ("GPU-00000", 120, 0.6, "none"), ("GPU-00009", 60, 0.54, "none"),
    ]  # fmt: skip
    again = clock.tick(p)
    assert [hint.id for hint in again] == [hint.id for hint in hints]
    assert again[1].expected_onset - at(clock.second) < timedelta(seconds=90)
    other = Clock(Episodes("c", 0.5), town, name=MEMORY)
    other.tick(p)
    assert [hint.id for hint in other.tick(p)] == [hint.id for hint in hints]


# --- one cause, one hint ------------------------------------------------------------------------------------


def test_a_hot_aisle_is_one_hint_from_its_first_nodes_on():
    town = Town(64, job_of=lambda gpu: str(gpu // 16))
    clock = Clock(Episodes("c"), town)
    seen = {}
    for count in (1, 3, 8, 14, 20, 30):  # GPUs of rack r2 in an order that goes round its four nodes
        hot = [64 + 8 * (i % 4) + i // 4 for i in range(count)]
        for hint in clock.tick(dict.fromkeys(hot, 0.9)):
            seen.setdefault(hint.id, []).append(hint)
    (last,) = [hints[-1] for hints in seen.values() if hints[-1].members == 30]
    assert (last.scope, last.rack, last.pod, last.node, last.gpu_uuid) == ("rack", "r2", "p0", None, None)
    assert last.nodes == ["n10", "n11", "n8", "n9"]
    assert last.job_ids == ["4", "5"]
    assert (last.action, last.severity) == ("throttle", "page")
    assert last.causes[0].kind == "rack"
    assert last.causes[0].share_explained == 1
    assert last.causes[0].share_affected == pytest.approx(30 / 32, abs=1e-4)
    assert "30 of 32 GPUs at work there, none elsewhere" in last.causes[0].evidence
    assert len(seen) <= 3  # those that came before it looked like one
    assert last.since == at(15)  # as old as the first of them


def test_a_hot_hall_of_400_gpus_is_one_hint():
    town = Town(128)
    hints = Clock(Episodes("c"), town).tick(dict.fromkeys(range(0, 512), 0.9) | dict.fromkeys(range(512, 912), 0.95))
    assert len(hints) == 1
    assert hints[0].members == 912
    pod = Clock(Episodes("c"), town).tick({gpu: 0.9 for gpu in range(256, 512) if gpu % 8 != 3})
    assert [(hint.scope, hint.pod, hint.members) for hint in pod] == [("pod", "p1", 224)]


def test_links_of_a_gang_are_one_hint_of_the_job_and_not_64_of_nodes():
    town = Town(96, job_of=lambda gpu: "512" if gpu < 512 else "9")
    clock = Clock(Episodes("c"), town, name=LINKS)
    (hint,) = clock.tick(dict.fromkeys(range(512), 0.9))
    assert (hint.scope, hint.job_ids, hint.members, len(hint.nodes)) == ("job", ["512"], 512, 64)
    assert hint.causes[0].kind == "job"
    assert hint.action == "none"
    assert "own traffic" in hint.advice
    # A leak on every rank is the job's own as well.
    (leak,) = Clock(Episodes("c"), town, name=MEMORY).tick(dict.fromkeys(range(0, 512, 2), 0.9))
    assert (leak.scope, leak.job_ids, leak.action) == ("job", ["512"], "retry_elsewhere")


def test_a_fan_a_gpu_and_strangers_stay_apart():
    town = Town(64, job_of=lambda gpu: str(gpu // 8))
    hints = Clock(Episodes("c"), town).tick(dict.fromkeys(range(80, 87), 0.9) | {200: 0.9, 400: 0.85})
    assert sorted((hint.scope, hint.node, hint.members) for hint in hints) == [
        ("gpu", "n25", 1), ("gpu", "n50", 1), ("node", "n10", 7),
    ]  # fmt: skip
    node = next(hint for hint in hints if hint.scope == "node")
    assert node.causes[0].kind == "node"
    assert node.reasons[0] == "7 of 8 GPUs together on n10"
    assert {hint.severity for hint in hints} == {"info"}


def test_a_job_within_one_node_is_a_hint_of_the_node_that_blames_the_job():
    town = Town(8, job_of=lambda gpu: "a" if gpu in (0, 1) else "b")
    (hint,) = Clock(Episodes("c"), town, name=LINKS).tick({0: 0.9, 1: 0.9})
    assert (hint.scope, hint.node, hint.job_ids, hint.causes[0].kind) == ("node", "n0", ["a"], "job")


def test_air_decides_between_a_rack_and_the_job_on_it():
    def cause(air):
        town = Town(64, job_of=lambda gpu: "J" if 64 <= gpu < 96 else "x", air=air)
        (hint,) = Clock(Episodes("c"), town).tick(dict.fromkeys(range(64, 96), 0.9))
        return hint

    warm, cool = cause({"r2": 9.0}), cause({"r2": 0.2})
    assert (warm.scope, warm.causes[0].kind) == ("rack", "rack")
    assert "9 °C warmer than elsewhere" in warm.causes[0].evidence
    assert (cool.scope, cool.causes[0].kind) == ("job", "job")
    assert [cause.kind for cause in cool.causes][:2] == ["job", "rack"]  # the runner-up is told


def test_places_that_are_not_known_leave_the_scope_lower():
    hot = dict.fromkeys(range(64, 96), 0.9)
    many = Town(64, job_of=lambda gpu: str(gpu // 8), has_racks=False, has_pods=False)
    hints = Clock(Episodes("c"), many).tick(hot)
    assert sorted((hint.scope, hint.node, hint.rack) for hint in hints) == [
        ("node", f"n{i}", None) for i in (10, 11, 8, 9)
    ]
    unplaced = Town(64, job_of=lambda gpu: None, has_racks=False, has_pods=False)
    assert {hint.scope for hint in Clock(Episodes("c"), unplaced).tick(hot)} == {"node"}


def test_units_that_are_no_gpus():
    town = Town(64, job_of=lambda gpu: str(gpu // 64))
    episodes = Episodes("c")
    p = np.full((8, 4), 0.9)
    names = [f"n{i}/mlx5_0:1" for i in range(8)]
    ports = Scored("fabric_congestion", None, p, np.zeros(8, bool), "m", unit="link", names=names,
                   nodes=[f"n{i}" for i in range(8)], reasons=["marks"] * 8)  # fmt: skip
    hosts = Scored("host_memory", None, p[:1], np.ones(1, bool), "m", unit="node", names=["n20"])
    queue = Scored("shortage", None, p[:1], np.zeros(1, bool), "m", unit="queue", names=["batch"], jobs=[["1", "2"]])
    found = {hint.bottleneck_class: hint for hint in episodes.update(at(15), [ports, hosts, queue], town)}
    fabric = found["fabric_congestion"]  # the job's own eight nodes: its traffic
    assert (fabric.scope, fabric.job_ids, fabric.members, fabric.reasons[1]) == ("job", ["0"], 8, "marks")
    assert (found["host_memory"].scope, found["host_memory"].node) == ("node", "n20")
    assert (found["shortage"].scope, found["shortage"].unit, found["shortage"].job_ids) == (
        "queue",
        "batch",
        ["1", "2"],
    )
    assert found["shortage"].causes[0].evidence == "more asked for than is free in queue batch"
    low = np.full((1, 4), 0.1)
    for second in (30, 45):
        left = episodes.update(at(second), [Scored("shortage", None, low, np.zeros(1, bool), "m", unit="queue",
                                                   names=["batch"])], town)  # fmt: skip
    assert "shortage" not in {hint.bottleneck_class for hint in left}


# --- ids and time -------------------------------------------------------------------------------------------


def test_a_gpu_hint_that_grows_to_its_node_keeps_id_and_since():
    clock = Clock(Episodes("c"), Town(16, job_of=lambda gpu: str(gpu // 8)))
    (first,) = clock.tick({8: 0.9})
    (second,) = clock.tick({8: 0.9, 40: 0.1})
    (node,) = clock.tick(dict.fromkeys(range(8, 13), 0.9))
    (rack,) = clock.tick(dict.fromkeys(range(8, 30), 0.9))
    clock.tick({9: 0.9})
    (back,) = clock.tick({9: 0.9})
    assert {first.id} == {second.id, node.id, rack.id, back.id}
    assert {first.since} == {second.since, node.since, rack.since, back.since} == {at(15)}
    assert [first.scope, node.scope, rack.scope, back.scope] == ["gpu", "node", "rack", "gpu"]


def test_merged_hints_go_on_as_the_oldest_and_a_split_leaves_the_id_with_most_of_it():
    town = Town(64, job_of=lambda gpu: str(gpu // 8))
    clock = Clock(Episodes("c"), town)
    (old,) = clock.tick({70: 0.9})
    both = clock.tick({70: 0.9, 80: 0.9})
    assert len({hint.id for hint in both}) == 2
    (rack,) = clock.tick(dict.fromkeys(range(64, 96), 0.9))
    assert (rack.id, rack.scope) == (old.id, "rack")
    # All of the rack but two GPUs clears: they are strangers now, and the rack's id goes with one of them.
    for _ in range(3):
        left = clock.tick({70: 0.9, 95: 0.9})
    assert {hint.id for hint in left} >= {old.id}
    assert len(left) <= 2


def test_an_alarm_ends_only_after_a_clear_look_of_ten_seconds_and_two_samples():
    town = Town(4, job_of=lambda gpu: str(gpu))
    clock = Clock(Episodes("c"), town, tick_s=1)
    clock.tick({3: 0.9})
    lives = [len(clock.tick({3: 0.05} if second % 2 else {})) for second in range(14)]
    assert lives == [1] * 10 + [0] * 4
    slow = Clock(Episodes("c"), town, tick_s=30)
    slow.tick({3: 0.9})
    assert [len(slow.tick({})) for _ in range(3)] == [1, 0, 0]
    # The same sample seen again is no second look.
    still = Clock(Episodes("c"), town)
    still.tick({3: 0.9})
    still.tick({})
    town.sampled_s = lambda uuid: at(30).timestamp()
    assert [len(still.tick({})) for _ in range(5)] == [1] * 5


def test_the_same_sample_twice_does_not_raise_a_hint():
    town, episodes = Town(4), Episodes("c")
    for second in (5, 10, 15):
        assert episodes.update(at(second), [scored(THERMAL, {3: 0.6}, second=0)], town) == []
    assert len(episodes.update(at(20), [scored(THERMAL, {3: 0.6}, second=20)], town)) == 1


def test_a_stale_tick_does_not_end_a_hint_and_silence_does():
    town = Town(4)
    clock = Clock(Episodes("c", stale_keep_s=30), town)
    (hint,) = clock.tick({3: 0.9})
    town.silent.add("GPU-00003")
    (kept,) = clock.tick({})
    assert kept.id == hint.id
    assert kept.expected_onset >= at(clock.second)
    assert clock.tick({}) == []
    town.silent.clear()
    (new,) = clock.tick({3: 0.9})
    town.excluded.add("n0")  # drained: nothing more is said of it
    assert clock.tick({3: 0.9}) == []
    assert new.id != hint.id


def test_ids_of_wide_hints_outlive_a_restart_and_need_no_second_look():
    town = Town(64, job_of=lambda gpu: "512" if gpu >= 256 else str(gpu // 8))
    hot = dict.fromkeys(range(64, 96), 0.9)
    before = Clock(Episodes("c"), town).tick(hot)
    links = Clock(Episodes("c"), town, name=LINKS).tick(dict.fromkeys(range(256, 512), 0.9))
    kept = [msgspec.json.decode(msgspec.json.encode(hint), type=type(hint)) for hint in (*before, *links)]
    episodes = Episodes("c")
    episodes.resume(kept)
    town.now_s = at(60).timestamp()
    low = dict.fromkeys(range(64, 96), 0.35)
    after = episodes.update(at(60), [scored(THERMAL, low, second=60), scored(LINKS, dict.fromkeys(range(256, 512), 0.4),
                                                                             second=60)], town)  # fmt: skip
    assert {(hint.id, hint.since) for hint in after} == {(hint.id, hint.since) for hint in kept}
    fresh = Episodes("c")
    assert fresh.update(at(60), [scored(THERMAL, low, second=60)], town) == []


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    level=st.floats(0.42, 0.75),
    noise=st.floats(0.02, 0.14),
    members=st.sampled_from([(3,), (8, 9, 10, 11), tuple(range(64, 96)), (3, 9, 200)]),
)
def test_noise_around_the_threshold_makes_no_hint_flap(seed, level, noise, members):
    rng = np.random.default_rng(seed)
    clock = Clock(Episodes("c"), Town(32, job_of=lambda gpu: str(gpu // 16)))
    ids = []
    for _ in range(40):
        chances = {gpu: float(np.clip(level + noise * rng.uniform(-1, 1), 0, 1)) for gpu in members}
        ids.append({hint.id for hint in clock.tick(chances)})
    assert len(set().union(*ids)) <= 2 * len(members)
    for name in set().union(*ids):
        there = [name in tick for tick in ids]
        assert sum(not a and b for a, b in pairwise([False, *there])) <= 1, "came back"
        assert sum(a and not b for a, b in pairwise(there)) <= 1, "went twice"


def test_a_class_may_have_a_threshold_of_its_own():
    town = Town(4)
    episodes = Episodes("c", 0.5, thresholds={THERMAL: Threshold(publish=0.2, sure=0.2)})
    assert len(episodes.update(at(0), [scored(THERMAL, {3: 0.25}), scored(MEMORY, {3: 0.25})], town)) == 1


# --- who has to know ----------------------------------------------------------------------------------------


def test_only_what_needs_a_person_now_pages():
    town = Town(64, job_of=lambda gpu: str(gpu // 128))

    def severities(name, gpus, p, active=(), ticks=1, **more):
        clock = Clock(Episodes("c"), Town(64, job_of=lambda gpu: str(gpu // 128), **more), name=name)
        for _ in range(ticks):
            hints = clock.tick(dict.fromkeys(gpus, p), active)
        return {(hint.scope, hint.severity) for hint in hints}

    rack = range(64, 96)
    assert town.gpus_at_work("job", "0") == 128
    assert severities(THERMAL, rack, 0.85) == {("rack", "info")}
    assert severities(THERMAL, rack, 0.95) == {("rack", "page")}
    assert severities(THERMAL, rack, 0.0, rack) == {("rack", "page")}
    assert severities(THERMAL, range(64, 72), 0.0, range(64, 72)) == {("node", "info")}
    assert severities(THERMAL, range(64, 72), 0.0, range(64, 72), ticks=25) == {("node", "ticket")}
    gang = range(128)
    assert severities(LINKS, gang, 0.99) == {("job", "info")}
    assert severities(LINKS, gang, 0.0, gang) == {("job", "ticket")}
    assert severities(LINKS, gang, 0.0, gang, ticks=42) == {("job", "page")}  # more than ten minutes
    assert severities(LINKS, range(32), 0.0, range(32), ticks=42) == {("job", "ticket")}


def test_the_setting_of_a_class_reaches_its_hints(tmp_path):
    config = NowcastConfig(publish_by_class={LINKS: 0.9})
    episodes = Nowcast("c", Publisher(tmp_path, "c"), config).episodes
    assert (episodes.threshold(LINKS).publish, episodes.threshold(LINKS).sure) == (0.9, 0.9)
    assert (episodes.threshold(THERMAL).publish, episodes.threshold(THERMAL).sure) == (0.5, 0.8)


def test_a_pause_of_a_set_condition_ends_no_hint():
    clock = Clock(Episodes("c"), Town(4))
    (hint,) = clock.tick({}, active=[3])
    lives = [[other.id for other in clock.tick({})] for _ in range(3)]
    assert [other.id for other in clock.tick({}, active=[3])] == [hint.id]
    assert lives == [[hint.id]] * 3
    assert [len(clock.tick({})) for _ in range(5)] == [1, 1, 1, 1, 0]
