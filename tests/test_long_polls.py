"""Polls that wait: answered by the next change, by the end of their time, or when what is kept expires."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler_hints.api import create_app
from tests.hints_support import again, ask, bottleneck, hints_server, publish


@pytest.fixture
def served(tmp_path: Path) -> Any:
    publisher = publish(tmp_path, ttl_s=300)
    with hints_server(tmp_path, "alpha") as (url, _), httpx.Client(base_url=url, timeout=20) as client:
        yield publisher, client


def test_a_change_answers_at_once(served: Any) -> None:
    publisher, client = served
    etag = client.get("/v1/bottlenecks").headers["etag"]
    timer = threading.Timer(0.4, lambda: again(publisher, "bottlenecks", [bottleneck("b9")], ttl_s=300))
    timer.start()
    began = time.monotonic()
    reply = client.get("/v1/bottlenecks?wait=15", headers={"if-none-match": etag})
    took = time.monotonic() - began
    timer.join()
    assert (reply.status_code, reply.json()["items"][0]["id"]) == (200, "b9")
    assert 0.3 < took < 5
    assert client.get("/v1/bottlenecks?wait=15").status_code == 200, "without a tag there is nothing to wait for"


def test_the_end_of_the_time_is_a_304_and_others_are_served_meanwhile(served: Any) -> None:
    _, client = served
    etag = client.get("/v1/bottlenecks").headers["etag"]
    replies: list[httpx.Response] = []

    def poll() -> None:
        replies.append(client.get("/v1/bottlenecks?wait=1", headers={"if-none-match": etag}))

    polls = [threading.Thread(target=poll) for _ in range(8)]
    began = time.monotonic()
    for one in polls:
        one.start()
    for _ in range(5):
        assert client.get("/v1/status").status_code == 200
    assert time.monotonic() - began < 0.9
    for one in polls:
        one.join()
    assert [reply.status_code for reply in replies] == [304] * 8
    assert time.monotonic() - began >= 1


def test_what_is_kept_is_not_held_beyond_its_life(tmp_path: Path) -> None:
    publish(tmp_path, ttl_s=1.5, bottlenecks=[bottleneck()])
    with hints_server(tmp_path, "alpha") as (url, _), httpx.Client(base_url=url, timeout=20) as client:
        etag = client.get("/v1/bottlenecks").headers["etag"]
        began = time.monotonic()
        reply = client.get("/v1/bottlenecks?wait=15", headers={"if-none-match": etag})
        assert reply.status_code == 503, "it expired while the poll waited"
        assert time.monotonic() - began < 5


def test_a_client_that_has_gone_is_not_waited_for(tmp_path: Path) -> None:
    publish(tmp_path, ttl_s=300)
    app = create_app(tmp_path, ["alpha"])
    app.startup()
    etag = ask(app, "/v1/bottlenecks").headers["etag"]
    began = time.monotonic()
    # This client hangs up as soon as it has asked.
    assert ask(app, "/v1/bottlenecks", "wait=15", headers={"if-none-match": etag}).status == 304
    assert (app.polls.waiting, time.monotonic() - began < 5) == (0, True)
    app.shutdown()


@pytest.mark.parametrize("value", ["-1", "61", "soon", ""])
def test_a_wrong_wait_is_named(tmp_path: Path, value: str) -> None:
    publish(tmp_path)
    app = create_app(tmp_path, ["alpha"])
    app.startup()
    for headers in ({}, {"if-none-match": "*"}):
        reply = ask(app, "/v1/bottlenecks", f"wait={value}", headers=headers)
        assert (reply.status, "wait=" in reply.json()["error"]["message"]) == (400, True)
    app.shutdown()
