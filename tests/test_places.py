"""What hints go by of places: how much work is there, what answers, how warm the air is."""

import polars as pl
import pytest

from features.telemetry import RingWindow
from scheduler_hints.inventory import Inventory
from scheduler_hints.places import Places
from tests.gpu_samples import BOOK, at, frame, gang


def places(job="7", inlets=(24.0, 33.0, 24.5, 23.5), pods=("p1", "p1", "p2", "p2"), now=5, **known):
    """Four nodes of eight GPUs, in a rack each, at second 5; the last node has been silent for long."""
    arrays = gang(seconds=1, gpus=32, job=job)
    rows = frame(arrays)
    late = frame(gang(seconds=1, gpus=32, job=job)).filter(pl.col("node") == "n3").with_columns(ts=pl.lit(at(-300)))
    window = RingWindow(BOOK, stale_s=45)
    nodes = pl.DataFrame({"node": [f"n{i}" for i in range(4)], "inlet_temp_c": pl.Series(inlets, dtype=pl.Float32)})
    window.observe(pl.concat([late.cast(rows.schema), rows.filter(pl.col("node") != "n3")]), nodes)
    racks = {f"n{i}": f"r{i}" for i in range(4)}
    inventory = Inventory(rack=racks, pod=dict(zip(racks, pods, strict=True)), gpus=dict.fromkeys(racks, 8), **known)
    return Places(window, inventory, at(now).timestamp())


def test_work_and_answers_are_counted_where_samples_are_fresh():
    place = places()
    assert [place.gpus_at_work("node", f"n{i}") for i in range(4)] == [8, 8, 8, 0]
    assert (place.gpus_at_work("job", "7"), place.gpus_at_work("cluster", "c")) == (24, 24)
    assert (place.gpus_at_work("pod", "p1"), place.gpus_at_work("pod", "p2"), place.gpus_at_work("rack", "r9")) == (
        16,
        8,
        0,
    )
    assert [place.nodes_up("pod", name) for name in ("p1", "p2")] == [2, 1]
    assert (place.nodes_up("job", "7"), place.nodes_up("cluster", "c")) == (3, 3)
    parts = {"cluster": "c", "pod": "p1", "rack": "r0", "job": "7"}
    assert [place.parts(kind, key) for kind, key in parts.items()] == [2, 2, 1, 3]
    assert place.sampled_s("GPU-0000") == at(0).timestamp()
    assert place.sampled_s("GPU-0031") is None
    assert place.sampled_s("nobody") is None


def test_without_any_job_every_gpu_counts_and_jobs_of_nodes_count_as_work():
    assert places(job=None).gpus_at_work("cluster", "c") == 24
    place = places(job=None, jobs={"n1": ["a", "b"]})
    assert [place.gpus_at_work("node", f"n{i}") for i in range(3)] == [0, 8, 0]
    gpu = next(gpu for gpu in range(32) if place.uuid(gpu) == "GPU-0008")
    assert place.jobs(gpu) == place.node_jobs("n1") == ["a", "b"]


def test_air_is_compared_with_the_rest_of_the_cluster():
    place = places()
    assert place.air_excess_k("rack", "r1") == pytest.approx(33.0 - 24.25)
    assert place.air_excess_k("rack", "r0") == pytest.approx(24.0 - 28.75)
    assert place.air_excess_k("pod", "p1") == pytest.approx(28.5 - 24.5)
    assert place.air_excess_k("rack", "r3") is None  # silent
    assert places(pods=("p1",) * 4).air_excess_k("pod", "p1") is None  # nothing to compare with
    assert places(inlets=(None,) * 4).air_excess_k("rack", "r1") is None


def test_pods_that_are_not_known_leave_racks_as_parts_of_the_cluster():
    assert places(pods=(None,) * 4).parts("cluster", "c") == 3
    assert places(pods=("p1", None, None, "p1")).parts("cluster", "c") == 3


def test_counts_of_racks_and_jobs_equal_those_made_gpu_by_gpu():
    rows = frame(gang(seconds=1, gpus=48, job="7")).with_columns(
        job_id=pl.Series([None if i % 5 == 0 else str(i // 6 % 3) for i in range(48)], dtype=pl.String)
    )
    window = RingWindow(BOOK, stale_s=45)
    window.observe(rows)
    racks = {"n0": "a", "n1": "b", "n2": "a", "n3": "", "n4": None}
    place = Places(window, Inventory(rack=racks), at(1).timestamp())
    seen = list(rows.select("node", "job_id").iter_rows())
    for name in ("a", "b", ""):
        mine = [(node, job) for node, job in seen if name and racks.get(node) == name]
        assert place.gpus_at_work("rack", name) == len([job for _, job in mine if job is not None])
        assert place.nodes_up("rack", name) == len({node for node, _ in mine})
    for name in ("0", "1", "2", "9"):
        on = [node for node, job in seen if job == name]
        assert (place.gpus_at_work("job", name), place.nodes_up("job", name)) == (len(on), len(set(on)))
    assert place.nodes_up("cluster", "c") == 6
