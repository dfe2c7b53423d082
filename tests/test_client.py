"""The client: keeps good answers until they expire, never passes an outage on, and is loud about misuse."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from scheduler_hints.api import create_app
from scheduler_hints.client import Answer, HintsAuthError, HintsClient, HintsUsageError
from scheduler_hints.snapshot import boottime_s
from scheduler_hints.tokens import create_token, revoke_token
from tests.hints_support import again, ask, bottleneck, forecast_of, hints_server, job, publish, wait_for, window


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    publish(
        root, ttl_s=600, jobs=[job("1"), job("a/b ?#%é")], backfill_windows=[window()],
        bottlenecks=[bottleneck("hot"), bottleneck("full", bottleneck_class="memory_exhaustion")],
    )  # fmt: skip
    return root


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    with hints_server(root, "alpha", "changing") as (url, _):
        yield url


class Clock:
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return boottime_s() + self.ahead_s


def test_it_reads_every_kind(url: str) -> None:
    with HintsClient(url) as client:
        hints = client.bottlenecks(cluster="alpha", class_="memory_exhaustion", node=None)
        assert [item["id"] for item in hints.items] == ["full"]
        assert hints.is_fresh
        assert hints.problem is None
        assert hints.version == hints.facts["versions"]["alpha"]
        assert hints.stale_shards == []
        assert 590 < client.expires_in_s(hints) <= 600
        assert [item["id"] for item in client.backfill_windows(gpus=16, min_confidence=0.5).items] == ["w1"]
        assert len(client.jobs(state="PENDING").items) == 2
        assert client.status().facts["clusters"]["alpha"]["is_fresh"] is True
        for job_id in ("1", "a/b ?#%é"):
            assert client.job("alpha", job_id).items[0]["job_id"] == job_id
        unknown = client.job("alpha", "9")
        assert (unknown.is_fresh, unknown.items) == (True, [])


def test_nothing_fresh_is_an_answer_and_no_exception(url: str) -> None:
    with HintsClient(url) as client:
        for answer in (client.node_risks(), client.reservation_plans(cluster="alpha"), client.job("changing", "1")):
            assert (answer.is_fresh, answer.items) == (False, [])
            assert client.expires_in_s(answer) == 0
            assert "503" in str(answer.problem)
        none = client.runtime_forecasts("alpha", [{"user": "ada"}])
        assert not none.is_fresh


@pytest.mark.parametrize(
    "call, code",
    [
        (lambda client: client.bottlenecks(clas="x"), "unknown_parameter"),
        (lambda client: client.bottlenecks(horizon_s=45), "bad_value"),
        (lambda client: client.job("nowhere", "1"), "unknown_cluster"),
        (lambda client: client.runtime_forecasts("alpha", []), "invalid_body"),
        (lambda client: client.runtime_forecasts("alpha", [{"usr": "ada"}]), "invalid_body"),
    ],
)
def test_misuse_is_loud(url: str, call: Callable[[HintsClient], Answer], code: str) -> None:
    with HintsClient(url) as client, pytest.raises(HintsUsageError) as caught:
        call(client)
    assert caught.value.code == code
    assert 400 <= caught.value.status < 500


def test_an_unknown_kind_is_refused_without_asking() -> None:
    with HintsClient("http://127.0.0.1:9") as client, pytest.raises(ValueError, match="kinds: bottlenecks"):
        client.get("bottleneck")


def test_an_unchanged_poll_costs_a_304_and_a_change_is_seen(root: Path, url: str) -> None:
    publisher = publish(root, "changing", bottlenecks=[bottleneck("1", cluster="changing")], ttl_s=600)
    with HintsClient(url) as client:
        statuses: list[int] = []
        client._http.event_hooks["response"] = [lambda response: statuses.append(response.status_code)]
        wait_for(lambda: client.bottlenecks(cluster="changing").is_fresh)
        first = client.bottlenecks(cluster="changing")
        second = client.bottlenecks(cluster="changing")
        assert statuses[-1] == 304
        assert second.items == first.items
        assert second.deadline_s == pytest.approx(first.deadline_s, abs=0.3)
        again(publisher, "bottlenecks", [bottleneck("2", cluster="changing")], ttl_s=600)
        wait_for(lambda: [item["id"] for item in client.bottlenecks(cluster="changing").items] == ["2"])


def test_the_last_good_answer_outlives_the_api_but_not_itself(tmp_path: Path) -> None:
    publish(tmp_path, ttl_s=60)
    clock = Clock()
    with hints_server(tmp_path, "alpha") as (url, process), HintsClient(url, clock=clock) as client:
        good = client.bottlenecks()
        assert good.is_fresh
        process.kill()
        process.wait(10)
        kept = client.bottlenecks()
        assert kept.is_fresh
        assert kept.items == good.items
        assert kept.deadline_s == good.deadline_s
        assert str(kept.problem).startswith("http://127.0.0.1:")
        assert "/v1/bottlenecks" in str(kept.problem)
        assert not client.jobs().is_fresh  # never asked before: nothing was kept
        clock.ahead_s = 61
        gone = client.bottlenecks()
        assert (gone.is_fresh, gone.items) == (False, [])
        assert not client.status().is_fresh


def test_tokens_are_sent_and_a_revoked_one_is_loud(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    secret = create_token(file, "slurm", "read", ["alpha"])
    create_token(file, "other", "read")
    with hints_server(root, "alpha", "changing", more=("--tokens-file", str(file))) as (url, _):
        with HintsClient(url, secret) as client:
            assert client.bottlenecks().is_fresh
            with pytest.raises(HintsAuthError) as caught:
                client.bottlenecks(cluster="changing")
            assert (caught.value.status, caught.value.code) == (403, "wrong_cluster")
            revoke_token(file, "slurm")

            def is_refused() -> bool:
                try:
                    client.bottlenecks()
                except HintsAuthError as error:
                    return error.status == 401
                return False

            wait_for(is_refused)
        with HintsClient(url) as client, pytest.raises(HintsAuthError):
            client.bottlenecks()


# --- a server that misbehaves -----------------------------------------------------------------------------------------


class _Misbehaving(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    plan: Callable[[Any], None]

    def do_GET(self) -> None:
        type(self).plan(self)

    def do_POST(self) -> None:
        type(self).plan(self)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def misbehaving() -> Iterator[Callable[[Callable[[Any], None]], str]]:
    handler = type("Handler", (_Misbehaving,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # ty: ignore[invalid-assignment]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()

    def start(plan: Callable[[Any], None]) -> str:
        handler.plan = staticmethod(plan)  # type: ignore[attr-defined]  # ty: ignore[unresolved-attribute]
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    server.shutdown()
    thread.join()
    server.server_close()


def test_runtime_forecasts_say_what_they_rest_on_and_for_how_long(
    misbehaving: Callable[[Callable[[Any], None]], str], tmp_path: Path
) -> None:
    said = {"model_version": "baseline:no_history", "ended_jobs": 0, "data_age_s": None}
    app = create_app(tmp_path, ["alpha"], forecast_runtimes=lambda cluster, jobs: forecast_of(jobs, **said))

    def through(handler: Any) -> None:
        body = handler.rfile.read(int(handler.headers["content-length"]))
        reply = ask(app, handler.path, method="POST", body=body)
        handler.reply(reply.status, reply.body)

    with HintsClient(misbehaving(through), timeout_s=20) as client:
        found = client.runtime_forecasts("alpha", [{"user": "ada"}, {"job_id": "2"}])
        assert [(item["job_id"], item["mode_s"]) for item in found.items] == [(None, 590.0), ("2", 590.0)]
        assert found.items[0]["runtime"]["q50_s"] == 600
        assert {name: found.facts[name] for name in said} == said
        assert found.facts["rests_on"] == "time_limits"
        assert "do not plan by them" in found.facts["note"]
        assert 570 < client.expires_in_s(found) <= 600


GOOD = b'{"items": [{"id": "kept"}], "version": 1, "expires_in_s": 30}'


@pytest.mark.parametrize(
    "plan",
    [
        lambda handler: handler.reply(500, b"<html>"),
        lambda handler: handler.reply(502, b""),
        lambda handler: handler.reply(429, b"{}"),
        lambda handler: handler.reply(200, b"<html>a proxy's page</html>"),
        lambda handler: handler.reply(200, b'{"items": [], "expires_in_s": "soon"}'),
        lambda handler: handler.reply(200, b'{"items": [], "expires_in_s": 0}'),
        lambda handler: handler.reply(200, b"[]"),
        lambda handler: handler.reply(304, b"", X_Expires_In="0"),
        lambda handler: handler.reply(304, b"", X_Expires_In="soon"),
        lambda handler: handler.reply(304, b""),
        lambda handler: handler.reply(404, b"<html>no such page</html>"),
        lambda handler: handler.reply(302, b"", Location="http://127.0.0.1:9/"),
        lambda handler: handler.connection.shutdown(2),
        lambda handler: handler.wfile.write(b"SSH-2.0\r\n\r\n"),
        lambda handler: (handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\nhalf"),
                         handler.connection.shutdown(2)),
    ],
)  # fmt: skip
def test_whatever_a_server_says_is_an_outage_and_not_an_exception(misbehaving: Any, plan: Any) -> None:
    """With a good answer kept it is that answer; without one it is none."""
    url = misbehaving(lambda handler: handler.reply(200, GOOD, ETag='"1"'))
    with HintsClient(url, timeout_s=2) as client:
        assert client.bottlenecks().items == [{"id": "kept"}]
        misbehaving(plan)
        kept, none = client.bottlenecks(), client.jobs()
        assert (kept.is_fresh, kept.items) == (True, [{"id": "kept"}])
        assert kept.problem
        assert (none.is_fresh, none.items) == (False, [])
        assert none.problem


def test_a_connection_closed_while_idle_is_not_an_outage(misbehaving: Any) -> None:
    asked: list[int] = []

    def plan(handler: Any) -> None:
        asked.append(1)
        if len(asked) == 2:
            handler.connection.shutdown(2)  # as a server does whose keep-alive has just run out
            handler.close_connection = True
            return
        handler.reply(200, GOOD)

    with HintsClient(misbehaving(plan)) as client:
        assert client.bottlenecks().problem is None
        assert client.bottlenecks().problem is None
    assert len(asked) == 3


def test_a_server_that_drips_is_given_up_in_time(misbehaving: Any) -> None:
    done = threading.Event()

    def drip(handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            if done.wait(0.05):
                return

    with HintsClient(misbehaving(drip), timeout_s=0.3) as client:
        began = time.monotonic()
        assert not client.bottlenecks().is_fresh
        assert time.monotonic() - began < 2
    done.set()


def test_a_server_that_does_not_answer_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with HintsClient(f"http://127.0.0.1:{port}", timeout_s=0.2) as client:
            began = time.monotonic()
            assert not client.bottlenecks().is_fresh
            assert time.monotonic() - began < 2


def test_the_life_of_an_answer_is_counted_from_before_the_question(misbehaving: Any) -> None:
    def slow(handler: Any) -> None:
        time.sleep(0.4)
        handler.reply(200, b'{"items": [], "expires_in_s": 1.0}', ETag='"1"')

    with HintsClient(misbehaving(slow)) as client:
        answer = client.bottlenecks()
        assert answer.is_fresh
        assert client.expires_in_s(answer) <= 0.6


def test_what_is_kept_is_bounded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_hints.client.MAX_CACHED", 8)
    with HintsClient(url) as client:
        for number in range(30):
            assert client.bottlenecks(node=f"n{number}").is_fresh
        assert 0 < len(client._kept) <= 8
