"""The hints API without a server: queries, freshness, ETags, errors, tokens, metrics."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from scheduler_hints import forecasts, snapshot
from scheduler_hints.api import create_app
from scheduler_hints.dispatch import LISTS, Dispatcher
from scheduler_hints.errors import ForecastUnavailableError
from scheduler_hints.queries import PARAMETERS
from scheduler_hints.reloader import ShardStore
from scheduler_hints.schema import ErrorBody, Quantiles
from scheduler_hints.tokens import TokenStore, create_token
from tests.hints_support import (
    Reply,
    again,
    ask,
    bottleneck,
    forecast_of,
    job,
    publish,
    risk,
    window,
)


class Clock:
    """CLOCK_BOOTTIME that the test can push ahead."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return snapshot.boottime_s() + self.ahead_s


def make(root: Path, *clusters: str, clock: Callable[[], float] | None = None, **options: Any) -> Dispatcher:
    store = ShardStore(root, clusters or ("alpha",), clock=clock or snapshot.boottime_s)
    app = create_app(root, (), store=store, **options)
    store.refresh()
    return app


def error(reply: Reply, status: int, code: str) -> dict[str, Any]:
    """The detail of an error, after checking its shape."""
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/json"
    found = msgspec.json.decode(reply.body, type=ErrorBody).error
    assert set(reply.json()["error"]) == {"code", "message", "detail"}
    assert found.code == code, found
    assert found.message
    return reply.json()["error"]


def ids(app: Dispatcher, path: str, query: str = "") -> list[str]:
    reply = ask(app, path, query)
    assert reply.status == 200, reply.body
    return [item.get("id") or item.get("job_id") or item["node"] for item in reply.json()["items"]]


# --- lists and filters ------------------------------------------------------------------------------------------------


def test_a_list_carries_hints_and_how_far_to_believe_them(tmp_path: Path) -> None:
    publish(tmp_path)
    reply = ask(make(tmp_path), "/v1/bottlenecks")
    answer = reply.json()
    assert answer["items"] == [msgspec.to_builtins(bottleneck())]
    assert answer["stale_shards"] == []
    assert answer["actionable_horizon_s"] == 60.0
    assert answer["model_versions"] == {"bottleneck": "m1"}
    assert answer["versions"] == {"alpha": answer["version"]}
    assert 2.5 <= answer["data_age_s"] < 5
    assert 55 < answer["expires_in_s"] <= 60
    assert float(reply.headers["x-expires-in"]) == answer["expires_in_s"]
    assert int(reply.headers["content-length"]) == len(reply.body)


@pytest.mark.parametrize(
    "query, expected",
    [
        ("", ["a", "b", "c", "d"]),
        ("class=nvlink_saturation", ["b"]),
        ("scope=node", ["c"]),
        ("node=n1", ["a", "d"]),
        ("job=77", ["c"]),
        ("horizon_s=30", ["b", "d"]),
        ("horizon_s=90", ["a", "b", "d"]),
        ("min_probability=0.75", ["b", "d"]),
        ("horizon_s=30&min_probability=0.2", ["a", "b", "d"]),
        ("horizon_s=30&min_probability=0.3", ["b", "d"]),
        ("cluster=alpha&node=n1&class=thermal_throttle", ["a", "d"]),
        ("node=nowhere", []),
        ("node=%6e1", ["a", "d"]),
    ],
)
def test_bottleneck_filters(tmp_path: Path, query: str, expected: list[str]) -> None:
    publish(
        tmp_path,
        bottlenecks=[
            bottleneck("a"),
            bottleneck(
                "b", bottleneck_class="nvlink_saturation", node="n2", horizon_s=30, probability=0.9,
                probabilities={"30": 0.9, "60": 0.9, "90": 0.9, "120": 0.9},
            ),
            bottleneck(
                "c", scope="node", node="n3", horizon_s=120, job_ids=["77"],
                probabilities={"30": 0.0, "60": 0.1, "90": 0.2, "120": 0.7},
            ),
            bottleneck("d", is_active=True, horizon_s=120, probability=0.1, probabilities={}),
        ],
    )  # fmt: skip
    assert ids(make(tmp_path), "/v1/bottlenecks", query) == expected


@pytest.mark.parametrize(
    "query, expected",
    [
        ("", ["short", "long", "endless"]),
        ("gpus=16", ["long", "endless"]),
        ("nodes=3", ["endless"]),
        ("duration_s=3600.5", ["long", "endless"]),
        ("min_confidence=0.95", ["short"]),
        ("scope=pod", ["endless"]),
        ("fits_job=5000", ["short"]),
        ("gpus=16&duration_s=7200&min_confidence=0.9", ["long"]),
    ],
)
def test_window_filters(tmp_path: Path, query: str, expected: list[str]) -> None:
    publish(
        tmp_path,
        backfill_windows=[
            window("short", gpus=8, nodes=["n1"], confidence=0.99),
            window("long", duration_s=7200.0, fits_jobs=[]),
            window("endless", duration_s=None, end=None, nodes=["n3", "n4", "n5"], gpus=24, confidence=0.8,
                   scope="pod", fits_jobs=["6"]),
        ],
    )  # fmt: skip
    assert ids(make(tmp_path), "/v1/backfill-windows", query) == expected


@pytest.mark.parametrize(
    "query, expected",
    [
        ("", ["calm", "soon", "later"]),
        ("horizon=1h", ["soon", "later", "calm"]),
        ("horizon=7d", ["later", "soon", "calm"]),
        ("min_probability=0.5", ["soon", "later"]),
        ("horizon=1h&min_probability=0.3", ["soon"]),
    ],
)
def test_node_risk_filters_and_order(tmp_path: Path, query: str, expected: list[str]) -> None:
    publish(
        tmp_path,
        node_risks=[
            risk("calm", p_1h=0.0),
            risk("soon", p_1h=0.4, p_24h=0.5, p_7d=0.6),
            risk("later", p_1h=0.1, p_7d=0.9),
        ],
    )
    assert ids(make(tmp_path), "/v1/node-risks", query) == expected


def test_jobs_by_state_and_by_id(tmp_path: Path) -> None:
    publish(tmp_path, jobs=[job("1"), job("2", state="RUNNING"), job("3_[1-4]"), job("a/b c")])
    app = make(tmp_path)
    assert ids(app, "/v1/jobs", "state=pending") == ["1", "3_[1-4]", "a/b c"]
    assert ids(app, "/v1/jobs", "state=RUNNING&cluster=alpha") == ["2"]
    for name in ("1", "3_[1-4]", "a/b c"):
        found = ask(app, f"/v1/jobs/alpha/{name}").json()
        assert found["item"]["job_id"] == name
        assert found["expires_in_s"] > 50
    detail = error(ask(app, "/v1/jobs/alpha/9"), 404, "unknown_job")
    assert detail["detail"] == {"cluster": "alpha", "job_id": "9"}
    error(ask(app, "/v1/jobs/alpha/"), 404, "not_found")
    error(ask(app, "/v1/jobs/alpha"), 404, "not_found")
    error(ask(app, "/v1/jobs/alpha/1", "x=1"), 400, "unknown_parameter")


# --- freshness --------------------------------------------------------------------------------------------------------


def test_an_expired_hint_is_never_served_even_from_the_cache(tmp_path: Path) -> None:
    publish(tmp_path, ttl_s=30)
    clock = Clock()
    app = make(tmp_path, clock=clock)
    paths = [*LISTS, "/v1/jobs/alpha/4711"]
    etags = {path: ask(app, path).headers["etag"] for path in paths}
    clock.ahead_s = 29.0
    for path in paths:
        assert ask(app, path).json()["expires_in_s"] <= 1.0
        assert ask(app, path, headers={"if-none-match": etags[path]}).status == 304
    clock.ahead_s = 30.1
    for path in paths:
        for headers in ({}, {"if-none-match": etags[path]}, {"if-none-match": "*"}):
            reply = ask(app, path, headers=headers)
            detail = error(reply, 503, "stale")["detail"]
            assert detail["stale_shards"] == ["alpha"]
            assert "expired" in detail["reasons"]["alpha"]
            assert int(reply.headers["retry-after"]) > 0


def test_one_stale_cluster_is_named_and_does_not_hide_the_others(tmp_path: Path) -> None:
    publish(tmp_path, "alpha", ttl_s=60)
    publish(tmp_path, "beta", ttl_s=20)
    clock = Clock()
    app = make(tmp_path, "alpha", "beta", "gamma", clock=clock)
    both = ask(app, "/v1/bottlenecks").json()
    assert [item["cluster"] for item in both["items"]] == ["alpha", "beta"]
    assert both["stale_shards"] == ["gamma"]
    assert both["expires_in_s"] <= 20
    assert set(both["versions"]) == {"alpha", "beta"}
    assert set(both["model_versions"]) == {"alpha/bottleneck", "beta/bottleneck"}
    clock.ahead_s = 21
    one = ask(app, "/v1/bottlenecks").json()
    assert [item["cluster"] for item in one["items"]] == ["alpha"]
    assert one["stale_shards"] == ["beta", "gamma"]
    assert one["expires_in_s"] > 30
    error(ask(app, "/v1/bottlenecks", "cluster=beta"), 503, "stale")
    error(ask(app, "/v1/jobs/beta/4711"), 503, "stale")


def test_a_shard_comes_back_when_its_writer_does(tmp_path: Path) -> None:
    publisher = publish(tmp_path, ttl_s=30)
    clock = Clock()
    app = make(tmp_path, clock=clock)
    clock.ahead_s = 31
    error(ask(app, "/v1/bottlenecks"), 503, "stale")
    again(publisher, "bottlenecks", [bottleneck("new")], ttl_s=60)
    assert app.store.refresh()
    assert ids(app, "/v1/bottlenecks") == ["new"]


def test_a_wall_clock_step_neither_revives_nor_kills(tmp_path: Path) -> None:
    publish(tmp_path, ttl_s=30)
    for step in (timedelta(days=-30), timedelta(days=30)):
        clock = Clock()

        def stepped(step: timedelta = step) -> datetime:
            return datetime.now(UTC) + step

        store = ShardStore(tmp_path, ("alpha",), clock=clock, wall=stepped)
        app = create_app(tmp_path, (), store=store)
        store.refresh()
        assert 28 < ask(app, "/v1/bottlenecks").json()["expires_in_s"] <= 30
        clock.ahead_s = 31
        error(ask(app, "/v1/bottlenecks"), 503, "stale")


def _rewrite(path: Path, **changes: Any) -> None:
    """Change fields of a snapshot file."""
    path.write_bytes(json.dumps(json.loads(path.read_bytes()) | changes).encode())


def test_a_writer_on_another_machine_is_judged_once_and_then_on_the_own_clock(tmp_path: Path) -> None:
    publish(tmp_path, ttl_s=30)
    path = tmp_path / "alpha" / "bottlenecks.json"
    made = datetime.now(UTC) - timedelta(seconds=10)
    _rewrite(path, boot_id="another", generated_boottime_s=5e9, generated_at=made.isoformat())
    clock = Clock()
    app = make(tmp_path, clock=clock)
    assert 18 < ask(app, "/v1/bottlenecks").json()["expires_in_s"] <= 20
    clock.ahead_s = 20.5
    error(ask(app, "/v1/bottlenecks"), 503, "stale")


def test_a_writer_whose_clock_is_far_ahead_is_not_believed(tmp_path: Path) -> None:
    publish(tmp_path)
    path = tmp_path / "alpha" / "bottlenecks.json"
    _rewrite(path, boot_id="another", generated_at=(datetime.now(UTC) + timedelta(hours=1)).isoformat())
    detail = error(ask(make(tmp_path), "/v1/bottlenecks"), 503, "stale")
    assert "synchronise the clocks" in detail["message"]


def test_a_snapshot_from_before_a_reboot_has_expired(tmp_path: Path) -> None:
    publish(tmp_path, ttl_s=30)
    path = tmp_path / "alpha" / "bottlenecks.json"
    before = datetime.now(UTC) - timedelta(minutes=5)
    _rewrite(path, boot_id="before", generated_boottime_s=snapshot.boottime_s(), generated_at=before.isoformat())
    error(ask(make(tmp_path), "/v1/bottlenecks"), 503, "stale")


def test_a_forecast_that_is_published_again_does_not_live_anew(tmp_path: Path) -> None:
    old = datetime.now(UTC) - timedelta(seconds=50)
    dead = datetime.now(UTC) - timedelta(seconds=70)
    publish(tmp_path, jobs=[job("new"), job("old", generated_at=old), job("dead", generated_at=dead)], ttl_s=60)
    clock = Clock()
    app = make(tmp_path, clock=clock)
    first = ask(app, "/v1/jobs").json()
    assert [item["job_id"] for item in first["items"]] == ["new", "old"]
    assert first["expires_in_s"] <= 10
    assert ask(app, "/v1/jobs/alpha/old").json()["expires_in_s"] <= 10
    error(ask(app, "/v1/jobs/alpha/dead"), 503, "stale")
    clock.ahead_s = 11
    assert ids(app, "/v1/jobs") == ["new"]
    error(ask(app, "/v1/jobs/alpha/old"), 503, "stale")


# --- damaged files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda data: b"", "not a snapshot"),
        (lambda data: b"\x00\xff garbage", "not a snapshot"),
        (lambda data: data[: len(data) // 2], "not a snapshot"),
        (lambda data: data.replace(b'"schema_version":1', b'"schema_version":2'), "schema_version 2"),
        (lambda data: data.replace(b'"cluster":"alpha","version"', b'"cluster":"beta","version"'), "of 'beta', not"),
        (lambda data: data.replace(b'"kind":"bottlenecks"', b'"kind":"jobs"'), "holds jobs of 'alpha'"),
        (lambda data: b"[]", "not a snapshot"),
        (lambda data: b'"' + b"9" * 100_000, "not a snapshot"),
        (lambda data: b"[" * 100_000, "not a snapshot"),
    ],
)
def test_a_damaged_file_makes_its_shard_stale_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes], words: str
) -> None:
    publisher = publish(tmp_path)
    app = make(tmp_path)
    path = tmp_path / "alpha" / "bottlenecks.json"
    bad = damage(path.read_bytes())
    for _ in range(3):
        path.write_bytes(bad)
        app.store.refresh()
        app.store.refresh()
    detail = error(ask(app, "/v1/bottlenecks"), 503, "stale")
    assert words in detail["detail"]["reasons"]["alpha"]
    assert ask(app, "/v1/jobs").status == 200
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    status = ask(app, "/v1/status").json()["clusters"]["alpha"]["kinds"]["bottlenecks"]
    assert status["is_fresh"] is False
    assert words in status["reason"]
    again(publisher, "bottlenecks", [bottleneck("well")])
    app.store.refresh()
    assert ids(app, "/v1/bottlenecks") == ["well"]


def test_items_of_the_wrong_shape_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publish(tmp_path, bottlenecks=[bottleneck("good"), bottleneck("bad"), bottleneck("nan", probability=float("nan"))])
    path = tmp_path / "alpha" / "bottlenecks.json"
    whole = json.loads(path.read_bytes())
    whole["items"][1]["scope"] = "galaxy"
    path.write_bytes(json.dumps(whole).encode())
    app = make(tmp_path)
    assert ids(app, "/v1/bottlenecks") == ["good"]
    assert ask(app, "/v1/status").json()["clusters"]["alpha"]["kinds"]["bottlenecks"]["invalid_items"] == 2
    assert caplog.text.count("2 items left out") == 1


def test_a_file_that_cannot_be_read_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "alpha" / "bottlenecks.json"
    path.mkdir(parents=True)  # a folder where the file should be: reading fails whoever asks
    app = make(tmp_path)
    for _ in range(3):
        app.store.refresh()
    generation = app.store.state.generation
    app.store.refresh()
    assert app.store.state.generation == generation
    assert "cannot be read" in error(ask(app, "/v1/bottlenecks"), 503, "stale")["message"]
    assert len(caplog.records) == 1
    path.rmdir()
    publish(tmp_path)
    app.store.refresh()
    assert ids(app, "/v1/bottlenecks") == ["b1"]


def test_a_removed_file_withdraws_its_hints(tmp_path: Path) -> None:
    publish(tmp_path)
    app = make(tmp_path)
    (tmp_path / "alpha" / "bottlenecks.json").unlink()
    assert app.store.refresh()
    assert "nothing has been published" in error(ask(app, "/v1/bottlenecks"), 503, "stale")["message"]
    assert not app.store.refresh()


def test_a_look_that_fails_does_not_end_the_looking(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = make(tmp_path)
    calls: list[int] = []

    def fails() -> None:
        calls.append(1)
        raise RuntimeError("a hook of the test")

    app.store.also(fails)
    app.store.start(0.01)
    try:
        publish(tmp_path)
        until = time.monotonic() + 5
        while ask(app, "/v1/bottlenecks").status != 200 or len(calls) < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        app.shutdown()
    assert "a hook of the test" in caplog.text


def test_no_answer_is_torn_while_500_snapshots_replace_each_other(tmp_path: Path) -> None:
    """The number of items, all their marks and the version of an answer belong to one publication."""
    publisher = publish(tmp_path, bottlenecks=[bottleneck("0", node="0")])
    app = make(tmp_path)
    done = threading.Event()
    failures: list[BaseException] = []

    def look() -> None:
        try:
            while not done.is_set():
                app.store.refresh()
        except BaseException as problem:
            failures.append(problem)

    looker = threading.Thread(target=look)
    looker.start()
    published: dict[int, int] = {}

    def write() -> None:
        try:
            for mark in range(500):
                items = [bottleneck(f"{mark}-{k}", node=str(mark)) for k in range(mark % 40)]
                published[again(publisher, "bottlenecks", items).version] = mark
        except BaseException as problem:
            failures.append(problem)

    writer = threading.Thread(target=write)
    writer.start()
    seen: set[int] = set()
    last = 0
    while writer.is_alive():
        answer = ask(app, "/v1/bottlenecks").json()
        if answer["version"] > last:
            last = answer["version"]
        assert answer["version"] == last  # never backwards
        if last in published:
            mark = published[last]
            seen.add(mark)
            assert [item["id"] for item in answer["items"]] == [f"{mark}-{k}" for k in range(mark % 40)]
    writer.join()
    done.set()
    looker.join()
    assert not failures
    assert len(seen) > 20


# --- ETags ------------------------------------------------------------------------------------------------------------


def test_an_unchanged_poll_is_a_304_that_says_how_long_it_holds(tmp_path: Path) -> None:
    publisher = publish(tmp_path)
    clock = Clock()
    app = make(tmp_path, clock=clock)
    first = ask(app, "/v1/bottlenecks")
    etag = first.headers["etag"]
    clock.ahead_s = 5
    for value in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        reply = ask(app, "/v1/bottlenecks", headers={"if-none-match": value})
        assert (reply.status, reply.body) == (304, b"")
        assert reply.headers["etag"] == etag
        assert 50 < float(reply.headers["x-expires-in"]) <= 55
    for value in ('"other"', etag.strip('"'), "", "garbage,,"):
        assert ask(app, "/v1/bottlenecks", headers={"if-none-match": value}).status == 200
    again(publisher, "bottlenecks", [bottleneck()])
    app.store.refresh()
    reply = ask(app, "/v1/bottlenecks", headers={"if-none-match": etag})
    assert reply.status == 200
    assert reply.headers["etag"] != etag


def test_etags_tell_queries_shards_and_jobs_apart_but_not_the_order_of_parameters(tmp_path: Path) -> None:
    publish(tmp_path, jobs=[job("1"), job("2")], bottlenecks=[bottleneck()])
    publish(tmp_path, "beta", bottlenecks=[])
    app = make(tmp_path, "alpha", "beta")

    def etag(path: str, query: str = "") -> str:
        return ask(app, path, query).headers["etag"]

    different = [
        etag("/v1/bottlenecks"), etag("/v1/bottlenecks", "cluster=alpha"), etag("/v1/bottlenecks", "cluster=beta"),
        etag("/v1/bottlenecks", "node=n1"), etag("/v1/bottlenecks", "node=n2"), etag("/v1/jobs"),
        etag("/v1/jobs/alpha/1"), etag("/v1/jobs/alpha/2"),
    ]  # fmt: skip
    assert len(set(different)) == len(different)
    assert etag("/v1/bottlenecks", "node=n1&scope=gpu") == etag("/v1/bottlenecks", "scope=gpu&node=n1")


def test_a_version_that_comes_again_with_other_content_is_not_a_304(tmp_path: Path) -> None:
    publish(tmp_path)
    app = make(tmp_path)
    etag = ask(app, "/v1/bottlenecks").headers["etag"]
    path = tmp_path / "alpha" / "bottlenecks.json"
    path.write_bytes(path.read_bytes().replace(b'"probability":0.7', b'"probability":0.8'))
    app.store.refresh()
    assert ask(app, "/v1/bottlenecks", headers={"if-none-match": etag}).status == 200


def test_head_is_get_without_the_body(tmp_path: Path) -> None:
    publish(tmp_path)
    app = make(tmp_path)
    for path in ("/v1/bottlenecks", "/v1/jobs/alpha/4711", "/v1/status", "/healthz"):
        get, head = ask(app, path), ask(app, path, method="HEAD")
        assert (head.status, head.body) == (200, b"")
        assert head.headers.keys() == get.headers.keys()


# --- wrong requests ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(LISTS))
def test_an_unknown_parameter_is_refused_with_the_valid_ones(tmp_path: Path, path: str) -> None:
    publish(tmp_path)
    found = error(ask(make(tmp_path), path, "clustr=alpha"), 400, "unknown_parameter")
    assert found["detail"]["nearest"] == "cluster"
    assert found["detail"]["valid"] == [parameter.name for parameter in PARAMETERS[LISTS[path]]]
    assert "did you mean 'cluster'" in found["message"]


@pytest.mark.parametrize(
    "path, query, valid",
    [
        ("bottlenecks", "class=thermal", "thermal_throttle"),
        ("bottlenecks", "scope=GPU", "gpu"),
        ("bottlenecks", "horizon_s=45", "30, 60, 90, 120"),
        ("bottlenecks", "horizon_s=060", "30, 60, 90, 120"),
        ("bottlenecks", "min_probability=1.1", "from 0 to 1"),
        ("bottlenecks", "min_probability=nan", "from 0 to 1"),
        ("bottlenecks", "min_probability=0x1", "from 0 to 1"),
        ("bottlenecks", "cluster=", "leave the parameter out"),
        ("bottlenecks", "cluster=gamma", "alpha"),
        ("bottlenecks", "node=%00", "printable"),
        ("bottlenecks", "node=" + "n" * 300, "256"),
        ("backfill-windows", "gpus=0", "from 1"),
        ("backfill-windows", "gpus=1.5", "an integer"),
        ("backfill-windows", "gpus=-1", "an integer"),
        ("backfill-windows", "gpus=%D9%A1", "an integer"),
        ("backfill-windows", "gpus=99999999999999999999", "an integer"),
        ("backfill-windows", "duration_s=1e300", "from 0"),
        ("backfill-windows", "min_confidence=high", "a number"),
        ("node-risks", "horizon=2h", "1h, 24h, 7d"),
        ("jobs", "state=SLEEPING", "PENDING"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_the_valid_ones(
    tmp_path: Path, path: str, query: str, valid: str
) -> None:
    publish(tmp_path)
    found = error(ask(make(tmp_path), f"/v1/{path}", query), 400, "bad_value")
    name = query.split("=")[0]
    assert found["detail"]["parameter"] == name
    assert name in found["message"]
    assert valid in found["message"]


def test_repeated_undecodable_and_endless_queries_are_refused(tmp_path: Path) -> None:
    publish(tmp_path)
    app = make(tmp_path)
    error(ask(app, "/v1/bottlenecks", "node=n1&node=n1"), 400, "duplicate_parameter")
    error(ask(app, "/v1/bottlenecks", "node=%ff"), 400, "bad_encoding")
    error(ask(app, "/v1/bottlenecks", "node=n1&" * 400), 414, "query_too_long")
    for path in ("/v1/status", "/metrics", "/openapi.json"):
        error(ask(app, path, "verbose=1"), 400, "unknown_parameter")


def test_unknown_paths_and_methods_have_the_one_shape(tmp_path: Path) -> None:
    publish(tmp_path)
    app = make(tmp_path)
    for path in ("/", "/v1", "/v1/bottleneck", "/v1/bottlenecks/", "/v1/" + "x" * 5000, "/v2/jobs"):
        error(ask(app, path), 404, "not_found")
    for path, method in (("/v1/jobs", "POST"), ("/v1/jobs/alpha/1", "DELETE"), ("/healthz", "PUT")):
        reply = ask(app, path, method=method)
        error(reply, 405, "method_not_allowed")
        assert reply.headers["allow"] == "GET, HEAD"
    reply = ask(app, "/v1/runtime-forecasts")
    error(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    error(ask(app, "/v1/jobs/gamma/1"), 404, "unknown_cluster")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Dispatcher:
    root = tmp_path_factory.mktemp("published")
    publish(root, ttl_s=600)
    return make(root)


@settings(max_examples=150, deadline=None)
@given(
    path=st.sampled_from([*LISTS, "/v1/jobs/alpha/1", "/v1/status", "/x"]) | st.text(max_size=20).map("/{}".format),
    query=st.binary(max_size=40) | st.text("abcdefghijklmnopqrstuvwxyz_=&%0123456789.", max_size=40).map(str.encode),
    method=st.sampled_from(["GET", "HEAD", "POST", "PATCH"]),
)
def test_no_request_is_an_internal_error(served: Dispatcher, path: str, query: bytes, method: str) -> None:
    reply = ask(served, path, query, method=method)
    assert reply.status < 500
    if reply.status >= 400 and method != "HEAD":
        msgspec.json.decode(reply.body, type=ErrorBody)


def test_a_bug_is_a_500_with_an_id_that_stands_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publish(tmp_path)

    def broken() -> str | None:
        raise ZeroDivisionError("secret of the implementation")

    app = make(tmp_path, readiness=broken)
    found = error(ask(app, "/readyz"), 500, "internal_error")
    assert "secret" not in found["message"]
    assert found["detail"] in caplog.text
    assert "secret of the implementation" in caplog.text
    assert ask(app, "/healthz").status == 200


def test_a_bug_in_a_hot_read_is_a_500_too(tmp_path: Path) -> None:
    publish(tmp_path)
    calls = 0

    def clock() -> float:
        nonlocal calls
        calls += 1
        if calls > 100:
            raise ZeroDivisionError
        return snapshot.boottime_s()

    app = make(tmp_path, clock=clock)
    calls = 100
    error(ask(app, "/v1/bottlenecks"), 500, "internal_error")


# --- runtime forecasts ------------------------------------------------------------------------------------------------


def _forecaster(cluster: str, jobs: list[dict[str, Any]]) -> forecasts.Forecast:
    if cluster == "beta":
        raise ForecastUnavailableError("no runtime model of beta yet: it is trained tonight")
    assert all(isinstance(one["submit_time"], datetime) for one in jobs)
    return forecast_of(jobs, [Quantiles(*[float(one["gpus"] or 0)] * 8) for one in jobs])


JSON = {"content-type": "application/json"}


def forecast(app: Dispatcher, content: Any, headers: dict[str, str] | None = None) -> Reply:
    body = content if isinstance(content, (bytes, list)) else json.dumps(content).encode()
    return ask(app, "/v1/runtime-forecasts", method="POST", headers=JSON if headers is None else headers, body=body)


def test_runtime_forecasts_come_in_the_order_asked(tmp_path: Path) -> None:
    app = make(tmp_path, forecast_runtimes=_forecaster)
    asked = [{"job_id": str(n), "gpus": n, "user": "ada", "time_limit_s": 60} for n in range(1000)]
    reply = forecast(app, {"cluster": "alpha", "jobs": asked})
    assert reply.status == 200, reply.body
    items = reply.json()["items"]
    assert [(item["job_id"], item["runtime"]["q50_s"]) for item in items] == [(str(n), float(n)) for n in range(1000)]
    one = forecast(app, {"cluster": "alpha", "jobs": [{"submit_time": "2026-03-14T03:12:00Z"}]})
    zeros = msgspec.to_builtins(Quantiles(*[0.0] * 8))
    assert one.json()["items"] == [{"job_id": None, "runtime": zeros, "mode_s": 590.0}]


@pytest.mark.parametrize(
    ("said", "rests_on", "note"),
    [
        ({}, "model", None),
        ({"model_version": "baseline:median_key"}, "recent_runtimes", None),
        (
            {"model_version": "baseline:no_history", "ended_jobs": 0, "data_age_s": None},
            "time_limits",
            "no job of alpha that the store knows has ended in the last 120 days: these are time limits (one hour "
            "where a job has none) with a guessed spread; do not plan by them",
        ),
        (
            {"ended_jobs": 0},
            "model",
            "no job of alpha that the store knows has ended in the last 120 days: the model speaks without any "
            "history; look whether ingest runs",
        ),
    ],
)
def test_runtime_forecasts_say_what_they_rest_on(
    tmp_path: Path, said: dict[str, Any], rests_on: str, note: str | None
) -> None:
    app = make(tmp_path, forecast_runtimes=lambda cluster, jobs: forecast_of(jobs, **said))
    answer = forecast(app, {"cluster": "alpha", "jobs": [{}]}).json()
    facts = {"model_version": "runtime-1", "ended_jobs": 500, "data_age_s": 12.5} | said
    assert {name: answer[name] for name in facts} == facts
    assert (answer["rests_on"], answer["note"], answer["expires_in_s"]) == (rests_on, note, 600.0)
    assert datetime.fromisoformat(answer["generated_at"]).tzinfo is not None


@pytest.mark.parametrize(
    "content, status, code, words",
    [
        (b"", 400, "bad_json", "not JSON"),
        (b"{", 400, "bad_json", "not JSON"),
        (b'{"cluster": "\xff"}', 400, "bad_json", "not JSON"),
        ([], 422, "invalid_body", "Expected `object`"),
        ({}, 422, "invalid_body", "cluster"),
        ({"cluster": "alpha", "jobs": []}, 422, "invalid_body", "length >= 1"),
        ({"cluster": "alpha", "jobs": [{}] * 1001}, 422, "invalid_body", "length <= 1000"),
        (
            {"cluster": "alpha", "jobs": [{"usr": "a"}]},
            422,
            "invalid_body",
            "field `usr` - at `$.jobs[0]`; did you mean `user`?",
        ),
        ({"cluster": "alpha", "jobs": [{"walltime": 1}]}, 422, "invalid_body", "valid: job_id, user, account, queue, "),
        ({"clustr": "alpha", "jobs": [{}]}, 422, "invalid_body", "did you mean `cluster`?; valid: cluster, jobs"),
        ({"cluster": "alpha", "jobs": [{"gpus": -1}]}, 422, "invalid_body", "$.jobs[0].gpus"),
        *(
            ({"cluster": "alpha", "jobs": [{name: 0}]}, 422, "invalid_body", f">= 1 - at `$.jobs[0].{name}`")
            for name in ("nodes", "cpus", "memory_mib", "time_limit_s")
        ),
        ({"cluster": "alpha", "jobs": [{"submit_time": "2026-03-14T03:12:00"}]}, 422, "invalid_body", "timezone"),
        (
            {"cluster": "alpha", "jobs": [{}, {"submit_time": "9999-12-31T23:59:59-14:00"}]},
            400,
            "bad_value",
            "jobs[1].submit_time='9999-12-31T23:59:59-14:00' is out of range; valid: years 2000 to 2199",
        ),
        ({"cluster": "alpha", "jobs": [{"submit_time": "0001-01-01T00:00:00+14:00"}]}, 400, "bad_value", "years 2000"),
        ({"cluster": "gamma", "jobs": [{}]}, 400, "bad_value", "no cluster 'gamma'; clusters: alpha, beta"),
        ({"cluster": "beta", "jobs": [{}]}, 503, "no_forecast", "trained tonight"),
    ],
)
def test_a_wrong_body_is_refused_with_what_is_wrong(
    tmp_path: Path, content: Any, status: int, code: str, words: str
) -> None:
    app = make(tmp_path, "alpha", "beta", forecast_runtimes=_forecaster)
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    found = error(forecast(app, body), status, code)
    assert words in found["message"]


def test_bodies_are_bounded_in_size_whether_declared_or_not(tmp_path: Path) -> None:
    app = make(tmp_path, forecast_runtimes=_forecaster)
    error(forecast(app, b"{}", JSON | {"content-length": "99999999"}), 413, "body_too_large")
    error(forecast(app, [b" " * 2**20] * 3), 413, "body_too_large")
    error(forecast(app, b"{}", {"content-type": "text/plain"}), 415, "unsupported_media_type")


def test_without_a_forecaster_it_says_so(tmp_path: Path) -> None:
    error(forecast(make(tmp_path), {"cluster": "alpha", "jobs": [{}]}), 503, "no_forecaster")


def test_a_forecaster_that_fails_or_answers_too_few_is_a_500(tmp_path: Path) -> None:
    for broken in (lambda cluster, jobs: 1 / 0, lambda cluster, jobs: forecast_of(jobs[:1])):
        app = make(tmp_path, forecast_runtimes=broken)
        error(forecast(app, {"cluster": "alpha", "jobs": [{}, {}]}), 500, "internal_error")


def test_a_forecaster_that_does_not_come_back_costs_its_caller_a_503(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecasts, "FORECAST_TIMEOUT_S", 0.05)
    release = threading.Event()

    def slow(cluster: str, jobs: list[dict[str, Any]]) -> forecasts.Forecast:
        release.wait(20)
        return forecast_of(jobs)

    app = make(tmp_path, forecast_runtimes=slow)
    publish(tmp_path)
    app.store.refresh()
    try:
        for _ in range(forecasts.MAX_FORECASTS):
            error(forecast(app, {"cluster": "alpha", "jobs": [{}]}), 503, "timeout")
        error(forecast(app, {"cluster": "alpha", "jobs": [{}]}), 503, "busy")
        assert ask(app, "/v1/bottlenecks").status == 200
    finally:
        release.set()
    until = time.monotonic() + 5
    monkeypatch.setattr(forecasts, "FORECAST_TIMEOUT_S", 5)
    while forecast(app, {"cluster": "alpha", "jobs": [{}]}).status == 503:
        assert time.monotonic() < until


# --- health, status, metrics ------------------------------------------------------------------------------------------


def test_ready_once_something_is_fresh_and_says_why_not_before(tmp_path: Path) -> None:
    clock = Clock()
    app = make(tmp_path, clock=clock)
    found = error(ask(app, "/readyz"), 503, "not_ready")
    assert found["message"].startswith("no shard is fresh (6 missing): ")
    assert "is the nowcast running?" in found["message"]
    assert ask(app, "/healthz").json() == {"status": "ok"}
    publish(tmp_path, bottlenecks=[], ttl_s=30)
    app.store.refresh()
    assert ask(app, "/readyz").json() == {"status": "ready", "fresh_shards": 1, "stale_shards": {"missing": 5}}
    clock.ahead_s = 31
    assert "1 expired" in error(ask(app, "/readyz"), 503, "not_ready")["message"]


def test_what_only_a_scheduler_gives_is_not_awaited_where_there_is_none(tmp_path: Path) -> None:
    publish(tmp_path, "alpha", bottlenecks=[], node_risks=[], jobs=[])
    publish(tmp_path, "beta", bottlenecks=[])
    clock = Clock()
    store = ShardStore(tmp_path, ["alpha", "beta"], without_scheduler=["alpha"], clock=clock)
    app = create_app(tmp_path, ["alpha", "beta"], store=store)
    store.refresh()
    # Five of beta's six kinds are missing; of alpha's, none that could be there.
    assert ask(app, "/readyz").json() == {"status": "ready", "fresh_shards": 4, "stale_shards": {"missing": 5}}
    fresh = _metrics(app)["weatherglass_hints_fresh"]
    of_alpha = {one.labels["kind"]: one.value for one in fresh if one.labels["cluster"] == "alpha"}
    assert of_alpha == {"bottlenecks": 1.0, "node-risks": 1.0, "jobs": 1.0}
    assert len([one for one in fresh if one.labels["cluster"] == "beta"]) == 6
    kinds = ask(app, "/v1/status").json()["clusters"]["alpha"]["kinds"]
    for kind in ("backfill-windows", "reservation-plans", "demand"):
        assert kinds[kind]["reason"] == "no scheduler is configured"
        said = error(ask(app, f"/v1/{kind}", "cluster=alpha"), 503, "stale")["message"]
        assert said == f"no fresh {kind}; alpha: no scheduler is configured. Go on as without hints"
        assert "ask again" in error(ask(app, f"/v1/{kind}"), 503, "stale")["message"]  # beta may have some later
    clock.ahead_s = 100  # what can be there is awaited still
    assert {one.value for one in _metrics(app)["weatherglass_hints_fresh"]} == {0.0}


def test_a_further_condition_can_hold_readiness_back(tmp_path: Path) -> None:
    publish(tmp_path)
    app = make(tmp_path, readiness=lambda: "the store is being moved")
    assert "being moved" in error(ask(app, "/readyz"), 503, "not_ready")["message"]


def test_status_tells_freshness_versions_lag_and_the_nowcasts_own_word(tmp_path: Path) -> None:
    publish(tmp_path, ttl_s=30)
    own = tmp_path / "alpha" / "nowcast-status.json"
    own.write_text('{"ticks": 12, "behind_s": 0.5}')
    clock = Clock()
    app = make(tmp_path, "alpha", "beta", clock=clock)
    status = ask(app, "/v1/status").json()
    assert status["is_fresh"] is True
    alpha, beta = status["clusters"]["alpha"], status["clusters"]["beta"]
    assert alpha["nowcast"] == {"ticks": 12, "behind_s": 0.5}
    kind = alpha["kinds"]["bottlenecks"]
    assert kind["is_fresh"] is True
    assert kind["items"] == 1
    assert kind["model_versions"] == {"bottleneck": "m1"}
    assert kind["data_age_s"] == pytest.approx(kind["age_s"] + 2.5, abs=0.01)
    assert beta["is_fresh"] is False
    assert beta["nowcast"] is None
    assert beta["kinds"]["jobs"]["reason"] == "nothing has been published yet"
    clock.ahead_s = 31
    own.write_text("{half")
    app.store.refresh()
    status = ask(app, "/v1/status").json()
    assert status["is_fresh"] is False
    assert status["clusters"]["alpha"]["nowcast"] is None
    assert status["clusters"]["alpha"]["kinds"]["bottlenecks"]["expires_in_s"] == 0


def test_status_says_what_keeps_the_nowcast_from_publishing(tmp_path: Path) -> None:
    publish(tmp_path, ttl_s=30)
    own = tmp_path / "alpha" / "nowcast-status.json"
    word = {"tick_s": 15.0, "problems": {"telemetry": "no fresh sample", "telemetry-source": "prod: refused"}}
    clock = Clock()
    app = make(tmp_path, clock=clock)

    def reasons(silent_s: float) -> dict[str, str | None]:
        own.write_text(json.dumps({**word, "last_tick": (datetime.now(UTC) - timedelta(seconds=silent_s)).isoformat()}))
        app.store.refresh()
        kinds = ask(app, "/v1/status").json()["clusters"]["alpha"]["kinds"]
        return {kind: status["reason"] for kind, status in kinds.items()}

    assert reasons(0)["bottlenecks"] is None
    clock.ahead_s = 33
    found = reasons(0)["bottlenecks"]
    assert re.fullmatch(
        r"expired \d s ago: nothing newer has been published; the nowcast says: prod: refused; no fresh sample",
        str(found),
    )
    assert str(reasons(0)["jobs"]).endswith("nothing newer has been published")  # the nowcast does not publish these
    silent = str(reasons(500)["bottlenecks"])
    assert "has not ticked for 500 s" in silent
    assert "refused" not in silent


def _metrics(app: Dispatcher, headers: dict[str, str] | None = None) -> dict[str, list[Any]]:
    reply = ask(app, "/metrics", headers=headers)
    assert reply.status == 200
    families = text_string_to_metric_families(reply.body.decode())
    found: dict[str, list[Any]] = {}
    for family in families:
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_metrics_show_health_freshness_and_active_hints_without_a_job_label(tmp_path: Path) -> None:
    publish(
        tmp_path,
        ttl_s=30,
        bottlenecks=[
            bottleneck("soon", node='n"1\\\n'),
            bottleneck("now", is_active=True),
            bottleneck("soon", node='n"1\\\n', job_ids=["5"], probability=0.6),  # the same series
        ],
        node_risks=[risk("n1")],
        backfill_windows=[window("w1"), window("w2", gpus=32)],
        jobs=[job()],
    )
    clock = Clock()
    app = make(tmp_path, clock=clock)
    ask(app, "/v1/bottlenecks")
    ask(app, "/v1/bottlenecks", "x=1")
    found = _metrics(app)
    soon = found["weatherglass_bottleneck_probability"]
    assert [(one.labels["node"], one.labels["horizon_s"], one.value) for one in soon] == [('n"1\\\n', "60", 0.7)]
    assert [one.labels["gpu_uuid"] for one in found["weatherglass_bottleneck_active"]] == ["GPU-now"]
    assert {one.labels["horizon"]: one.value for one in found["weatherglass_node_fault_probability"]} == {
        "1h": 0.01, "24h": 0.05, "7d": 0.2,
    }  # fmt: skip
    assert [one.value for one in found["weatherglass_backfill_windows"]] == [2]
    assert [one.value for one in found["weatherglass_backfill_window_gpus"]] == [32]
    counts = {
        (one.labels["route"], one.labels["status"]): one.value for one in found["weatherglass_api_requests_total"]
    }
    assert counts == {("/v1/bottlenecks", "200"): 1, ("/v1/bottlenecks", "400"): 1}
    fresh = {one.labels["kind"]: one.value for one in found["weatherglass_hints_fresh"]}
    assert fresh == {
        "bottlenecks": 1, "backfill-windows": 1, "node-risks": 1, "jobs": 1, "reservation-plans": 0, "demand": 0,
    }  # fmt: skip
    assert found["process_resident_memory_bytes"]
    for name, samples in found.items():
        for one in samples:
            assert not {"job", "job_id", "user"} & set(one.labels), name
    clock.ahead_s = 31
    later = _metrics(app)
    assert not any("bottleneck" in name or "window" in name or "node_fault" in name for name in later)
    assert {one.value for one in later["weatherglass_hints_fresh"]} == {0}


def test_at_most_5000_hints_become_gauges_and_the_rest_is_counted(tmp_path: Path) -> None:
    publish(
        tmp_path,
        bottlenecks=[bottleneck(f"b{n}", probability=0.6) for n in range(900)] + [bottleneck("sure", probability=1.0)],
        node_risks=[risk(f"n{n}", p_24h=n / 3000) for n in range(3000)],
    )
    app = make(tmp_path)
    for scrape in (1, 2):
        found = _metrics(app)
        hints = [one for name in found if "probability" in name for one in found[name]]
        assert len(hints) == 5000
        assert len(found["weatherglass_bottleneck_probability"]) == 901
        assert "n2999" in {one.labels["node"] for one in found["weatherglass_node_fault_probability"]}
        assert "n0" not in {one.labels["node"] for one in found["weatherglass_node_fault_probability"]}
        left_out = 901 + 9000 - 5000
        assert found["weatherglass_hint_gauges_truncated_total"][0].value == scrape * left_out


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_tokens_are_asked_for_and_keep_clusters_apart_on_every_route(tmp_path: Path) -> None:
    root, file = tmp_path / "published", tmp_path / "tokens.json"
    publish(root, "alpha")
    publish(root, "beta")
    both = {"authorization": f"Bearer {create_token(file, 'both', 'read')}"}
    one = {"authorization": f"Bearer {create_token(file, 'one', 'place', ['beta', 'elsewhere'])}"}
    none = {"authorization": f"Bearer {create_token(file, 'none', 'admin', ['elsewhere'])}"}
    app = make(root, "alpha", "beta", tokens=TokenStore(file), forecast_runtimes=lambda c, jobs: forecast_of(jobs))
    guarded = [*LISTS, "/v1/jobs/beta/4711", "/v1/status", "/metrics"]
    for path in guarded:
        reply = ask(app, path)
        error(reply, 401, "no_token")
        assert reply.headers["www-authenticate"].startswith("Bearer")
        error(ask(app, path, headers={"authorization": "Bearer wg_x_y"}), 401, "bad_token")
        error(ask(app, path, headers=none), 403, "no_cluster")
        assert ask(app, path, headers=both).status == 200
        reply = ask(app, path, headers=one)
        assert reply.status == 200
        assert b"alpha" not in reply.body
        assert b"beta" in reply.body
    for path in LISTS:
        error(ask(app, path, "cluster=alpha", headers=one), 403, "wrong_cluster")
        error(ask(app, path, "cluster=no-such", headers=one), 403, "wrong_cluster")
        assert ask(app, path, "cluster=beta", headers=one).status == 200
    error(ask(app, "/v1/jobs/alpha/4711", headers=one), 403, "wrong_cluster")
    asked = {"cluster": "alpha", "jobs": [{}]}
    error(forecast(app, asked, JSON | one), 403, "wrong_cluster")
    error(forecast(app, asked), 401, "no_token")
    assert forecast(app, asked | {"cluster": "beta"}, JSON | one).status == 200
    for path in ("/healthz", "/readyz", "/openapi.json"):
        assert ask(app, path).status == 200
    assert b"alpha" not in ask(app, "/readyz").body


def test_an_etag_of_another_token_gives_nothing_away(tmp_path: Path) -> None:
    root, file = tmp_path / "published", tmp_path / "tokens.json"
    publish(root, "alpha")
    publish(root, "beta")
    both = {"authorization": f"Bearer {create_token(file, 'both', 'read')}"}
    one = {"authorization": f"Bearer {create_token(file, 'one', 'read', ['beta'])}"}
    app = make(root, "alpha", "beta", tokens=TokenStore(file))
    etag = ask(app, "/v1/bottlenecks", headers=both).headers["etag"]
    reply = ask(app, "/v1/bottlenecks", headers=one | {"if-none-match": etag})
    assert reply.status == 200
    assert b"alpha" not in reply.body
    (root / "alpha" / "bottlenecks.json").unlink()  # now both see the same hints, but only one misses alpha's
    app.store.refresh()
    answers = [ask(app, "/v1/bottlenecks", headers=headers) for headers in (both, one)]
    assert [answer.json()["stale_shards"] for answer in answers] == [["alpha"], []]
    assert answers[0].headers["etag"] != answers[1].headers["etag"]
