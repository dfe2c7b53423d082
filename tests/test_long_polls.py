"""Polls that wait: answered by the next change, by the end of their time, or when what is kept expires."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler_hints.api import create_app
from scheduler_hints.client import HintsClient, HintsUsageError
from scheduler_hints.long_polls import MAX_WAITING
from scheduler_hints.server import CONNECTIONS
from tests.hints_support import again, ask, bottleneck, hints_server, publish, running_server, wait_for


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


def test_what_is_kept_is_not_held_beyond_its_life(served: Any) -> None:
    publisher, client = served
    again(publisher, "bottlenecks", [bottleneck("brief")], ttl_s=4)
    first = wait_for(lambda: "brief" in (reply := client.get("/v1/bottlenecks")).text and reply)
    began = time.monotonic()
    reply = client.get("/v1/bottlenecks?wait=15", headers={"if-none-match": first.headers["etag"]})
    assert reply.status_code == 503, "it expired while the poll waited"
    assert time.monotonic() - began < 10


def test_the_client_may_wait_longer_than_it_has_patience_for_an_answer(served: Any) -> None:
    publisher, http = served
    with HintsClient(str(http.base_url), timeout_s=0.5) as client:
        first = client.bottlenecks(wait=1.2)
        began = time.monotonic()
        second = client.bottlenecks(wait=1.2)
        assert (second.problem, second.is_fresh, second.items) == (None, True, first.items)
        assert time.monotonic() - began >= 1.1
        timer = threading.Timer(0.3, lambda: again(publisher, "bottlenecks", [bottleneck("b9")], ttl_s=300))
        timer.start()
        assert client.bottlenecks(wait=10).items[0]["id"] == "b9"
        timer.join()
        began = time.monotonic()
        assert client.bottlenecks().items[0]["id"] == "b9", "what is kept serves calls that do not wait"
        assert time.monotonic() - began < 0.5
        with pytest.raises(HintsUsageError, match="wait='61'"):
            client.bottlenecks(wait=61)


def test_hundreds_wait_under_a_small_limit_of_files_and_the_server_stops_at_once(tmp_path: Path) -> None:
    assert MAX_WAITING * 2 <= CONNECTIONS, "others find room"
    publish(tmp_path, ttl_s=300)
    code = (
        "import resource, runpy, sys\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        f"sys.argv = ['server', '--published', {str(tmp_path)!r}, '--cluster', 'alpha', '--port', '0']\n"
        "runpy.run_module('scheduler_hints.server', run_name='__main__')\n"
    )
    with running_server("-c", code) as (url, process):
        etag = httpx.get(f"{url}/v1/bottlenecks").headers["etag"]
        port = int(url.rsplit(":", 1)[1])
        head = f"GET /v1/bottlenecks?wait=60 HTTP/1.1\r\nhost: x\r\nif-none-match: {etag}\r\n\r\n".encode()
        with ExitStack() as stack:
            for _ in range(400):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                connection.sendall(head)
            assert httpx.get(f"{url}/v1/status", timeout=5).status_code == 200
            process.terminate()
            assert process.wait(4) == 0, "polls that wait do not hold up the end"
            assert connection.recv(64).startswith(b"HTTP/1.1 304")


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
