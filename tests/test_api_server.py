"""The hints API as a process: real sockets, real signals, writers that die."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from scheduler_hints.schema import ErrorBody
from scheduler_hints.snapshot import boottime_s
from scheduler_hints.tokens import create_token, revoke_token
from tests.hints_support import ROOT, again, bottleneck, hints_server, job, publish, running_server, wait_for

WRITER = """
import sys, time
from pathlib import Path
from scheduler_hints.snapshot import boottime_s
from tests.hints_support import publish, again, bottleneck
publisher = publish(Path(sys.argv[1]), "doomed", bottlenecks=[], ttl_s=0.8)
while True:
    deadline_s = boottime_s() + 0.8
    again(publisher, "bottlenecks", [bottleneck(f"{deadline_s:.6f}", cluster="doomed")], ttl_s=0.8)
    print(flush=True)
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    publish(root, "alpha", jobs=[job("1"), job("a/b c%2F")], bottlenecks=[bottleneck()], ttl_s=600)
    with hints_server(root, "alpha", "busy", "doomed") as running:
        yield running


@pytest.fixture
def client(server: tuple[str, Any]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[0], timeout=10, trust_env=False) as client:
        yield client


def _address(client: httpx.Client) -> tuple[str, int]:
    assert client.base_url.port is not None
    return client.base_url.host, client.base_url.port


def _raw(address: tuple[str, int], data: bytes) -> bytes:
    """Everything the server says to these bytes until it closes or falls silent for 0.3 s."""
    with socket.create_connection(address, timeout=10) as connection:
        connection.sendall(data)
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
                connection.settimeout(0.3)
        except TimeoutError:
            pass
        return found


def test_it_speaks_http(client: httpx.Client) -> None:
    reply = client.get("/v1/bottlenecks", params={"cluster": "alpha", "class": "thermal_throttle"})
    assert reply.status_code == 200
    assert reply.json()["items"][0]["id"] == "b1"
    unchanged = client.get(str(reply.request.url), headers={"if-none-match": reply.headers["etag"]})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    assert float(unchanged.headers["x-expires-in"]) > 0
    assert client.get("/v1/jobs/alpha/a%2Fb%20c%252F").json()["item"]["job_id"] == "a/b c%2F"
    head = client.head(str(reply.request.url))
    assert (head.content, head.headers["etag"]) == (b"", reply.headers["etag"])
    assert int(head.headers["content-length"]) > 400
    for path, status in (("/healthz", 200), ("/readyz", 200), ("/v1/status", 200), ("/metrics", 200), ("/x", 404)):
        assert client.get(path).status_code == status
    refused = client.post("/v1/bottlenecks")
    assert refused.status_code == 405
    assert msgspec.json.decode(refused.content, type=ErrorBody).error.code == "method_not_allowed"
    nothing = client.post("/v1/runtime-forecasts", json={"cluster": "alpha", "jobs": [{}]})
    assert msgspec.json.decode(nothing.content, type=ErrorBody).error.code == "no_forecaster"


def test_what_is_not_http_is_refused_and_costs_nobody_else(client: httpx.Client) -> None:
    address = _address(client)
    assert _raw(address, b"\x16\x03\x01 a TLS greeting\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert _raw(address, b"SSH-2.0-client\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert _raw(address, b"GET / HTTP/1.1\r\nHost: x\r\nno colon here\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert _raw(address, b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 431 ")
    assert _raw(address, b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")[:13] == b"HTTP/1.1 431 "
    both = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    both = b"POST /v1/runtime-forecasts HTTP/1.1\r\nHost: x\r\n" + both
    assert _raw(address, both)[:11] == b"HTTP/1.1 40"
    assert client.get("/healthz").status_code == 200


def test_clients_that_hang_up_half_way_leave_no_trace(client: httpx.Client, server: tuple[str, Any]) -> None:
    address = _address(client)
    for data in (
        b"GET /v1/bott",
        b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/runtime-forecasts HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{",
    ):
        for _ in range(20):
            with socket.create_connection(address) as connection:
                connection.sendall(data)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # reset
    process = psutil.Process(server[1].pid)
    wait_for(lambda: sum(one.status == "ESTABLISHED" for one in process.net_connections()) <= 1)
    assert client.get("/healthz").status_code == 200


def test_a_second_server_on_the_same_port_is_refused(client: httpx.Client, root: Path) -> None:
    _, port = _address(client)
    command = [sys.executable, "-m", "scheduler_hints.server", "--published", str(root), "--cluster", "alpha"]
    second = subprocess.run([*command, "--port", str(port)], capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert second.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in second.stderr
    assert "Traceback" not in second.stderr


def test_an_open_address_without_tokens_is_refused(root: Path) -> None:
    command = [sys.executable, "-m", "scheduler_hints.server", "--published", str(root), "--cluster", "alpha"]
    refused = subprocess.run([*command, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert refused.returncode == 1
    assert "will not listen on 0.0.0.0" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_nothing_expired_is_served_when_the_writer_is_killed(client: httpx.Client, root: Path) -> None:
    """Each hint's id is the moment it expires; no answer may hold one that had passed when the question was sent."""
    with subprocess.Popen([sys.executable, "-c", WRITER, str(root)], cwd=ROOT, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        wait_for(lambda: client.get("/v1/bottlenecks?cluster=doomed").status_code == 200)
        fresh = stale = 0
        killed_s = 0.0
        etag = ""
        until = time.monotonic() + 10
        while stale < 20:
            assert time.monotonic() < until
            if fresh == 100:
                writer.kill()
                killed_s = boottime_s()
                fresh += 1
            asked_s = boottime_s()
            reply = client.get("/v1/bottlenecks?cluster=doomed", headers={"if-none-match": etag})
            if reply.status_code == 200:
                fresh += 1
                etag = reply.headers["etag"]
                answer = reply.json()
                deadline_s = float(answer["items"][0]["id"]) if answer["items"] else asked_s + 0.8
                assert asked_s < deadline_s + 0.01
                assert asked_s + answer["expires_in_s"] <= deadline_s + 0.02
            elif reply.status_code == 304:
                fresh += 1
                assert asked_s < deadline_s + 0.01
            else:
                assert reply.status_code == 503
                assert reply.headers["retry-after"]
                stale += 1 if killed_s else 0
        assert fresh > 100
        assert boottime_s() < killed_s + 5
    assert client.get("/v1/bottlenecks?cluster=alpha").status_code == 200


def test_no_answer_is_torn_while_500_snapshots_replace_each_other(server: tuple[str, Any], root: Path) -> None:
    """Readers hammer the process; number, marks and version of an answer belong to one publication."""
    publisher = publish(root, "busy", bottlenecks=[])
    published: dict[int, int] = {}
    failures: list[BaseException] = []
    answers: list[int] = []
    done = threading.Event()

    def read() -> None:
        try:
            last = 0
            with httpx.Client(base_url=server[0], timeout=10, trust_env=False) as client:
                while not done.is_set():
                    reply = client.get("/v1/bottlenecks?cluster=busy")
                    if reply.status_code == 503 and not last:
                        continue
                    assert reply.status_code == 200
                    answer = reply.json()
                    assert answer["version"] >= last
                    last = answer["version"]
                    mark = published.get(last)
                    if mark is not None:
                        assert [item["id"] for item in answer["items"]] == [f"{mark}-{k}" for k in range(mark % 30)]
                        answers.append(mark)
        except BaseException as problem:
            failures.append(problem)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for mark in range(500):
        items = [bottleneck(f"{mark}-{k}", cluster="busy") for k in range(mark % 30)]
        published[again(publisher, "bottlenecks", items).version] = mark
        time.sleep(0.002)
    wait_for(lambda: 499 in answers or failures)
    done.set()
    for reader in readers:
        reader.join()
    assert not failures
    assert len(set(answers)) > 3


def test_a_new_snapshot_is_visible_within_a_second(client: httpx.Client, root: Path) -> None:
    publisher = publish(root, "busy", bottlenecks=[])
    took = []
    for number in range(3):
        began = time.monotonic()
        version = again(publisher, "bottlenecks", [bottleneck(str(number), cluster="busy")]).version
        wait_for(lambda v=version: client.get("/v1/bottlenecks?cluster=busy").json().get("version") == v)
        took.append(time.monotonic() - began)
    assert min(took) < 1.0


def test_sigterm_ends_it_cleanly_even_with_idle_and_busy_connections(root: Path) -> None:
    with hints_server(root, "alpha") as (url, process), httpx.Client(base_url=url, trust_env=False) as client:
        client.get("/healthz")  # stays open, idle
        done = threading.Event()

        def poll() -> None:
            with httpx.Client(base_url=url, trust_env=False) as poller:
                while not done.is_set():
                    try:
                        poller.get("/healthz")
                    except httpx.HTTPError:
                        return

        poller = threading.Thread(target=poll)
        poller.start()
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(15) == 0
        assert time.monotonic() - began < 10
        done.set()
        poller.join()
    assert "Traceback" not in process.errors
    assert "rror" not in process.errors


def test_a_kill_leaves_no_process_behind_and_the_port_is_free_at_once(root: Path) -> None:
    with hints_server(root, "alpha") as (url, process):
        port = int(url.rsplit(":", 1)[1])
        children = psutil.Process(process.pid).children(recursive=True)
        assert children == []
        assert httpx.get(f"{url}/healthz", trust_env=False).status_code == 200
        process.kill()
        process.wait(10)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/healthz", trust_env=False)
    arguments = ("-m", "scheduler_hints.server", "--published", str(root), "--cluster", "alpha", "--port", str(port))
    with running_server(*arguments) as (url, _):
        assert httpx.get(f"{url}/readyz", trust_env=False).status_code == 200


SLOW = """
import scheduler_hints.server as server, scheduler_hints.routes as routes, sys
from pathlib import Path
from scheduler_hints.api import create_app
server.SEND_TIMEOUT_S = 1.0
routes.BODY_TIMEOUT_S = 0.5
server.serve(lambda: create_app(Path(sys.argv[1]), ["alpha"]), "127.0.0.1", 0, head_timeout_s=0.5,
             on_listening=lambda port: print(f"listening on 127.0.0.1:{port}", flush=True))
"""


STUCK = """
import scheduler_hints.server as server, sys, time
from pathlib import Path
from scheduler_hints.api import create_app
server.GRACE_S = 0.5
app = lambda: create_app(Path(sys.argv[1]), ["alpha"], forecast_runtimes=lambda cluster, jobs: time.sleep(60))
server.serve(app, "127.0.0.1", 0, on_listening=lambda port: print(f"listening on 127.0.0.1:{port}", flush=True))
print("served", flush=True)
"""


def test_a_request_that_does_not_end_holds_the_stop_for_the_grace_alone(tmp_path: Path) -> None:
    with running_server("-c", STUCK, str(tmp_path)) as (url, process):
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=10) as connection:
            body = b'{"cluster": "alpha", "jobs": [{}]}'
            head = f"POST /v1/runtime-forecasts HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            time.sleep(0.5)  # the forecast has begun
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        assert 0.4 < time.monotonic() - began < 4
    assert "Traceback" not in process.errors


def test_slow_clients_are_dropped_one_by_one(tmp_path: Path) -> None:
    jobs = [job(str(n), reason="x" * 2000) for n in range(8000)]  # more than the kernel buffers for a client
    publish(tmp_path, jobs=jobs, bottlenecks=[bottleneck()], ttl_s=600)
    with running_server("-c", SLOW, str(tmp_path)) as (url, process):
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        began = time.monotonic()
        with (
            socket.create_connection(address, timeout=10) as head,
            socket.create_connection(address, timeout=10) as body,
            socket.create_connection(address, timeout=10) as reader,
        ):
            head.sendall(b"GET /v1/bottlenecks HTTP/1.1\r\nHost:")
            body.sendall(
                b"POST /v1/runtime-forecasts HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
            reader.sendall(b"GET /v1/jobs HTTP/1.1\r\nHost: x\r\n\r\n")
            assert head.recv(1000) == b""
            assert body.recv(1000).startswith(b"HTTP/1.1 408 ")
            assert reader.recv(12) == b"HTTP/1.1 200"
            assert httpx.get(f"{url}/v1/bottlenecks", trust_env=False).status_code == 200
            inside = psutil.Process(process.pid)
            wait_for(lambda: not any(one.status == "ESTABLISHED" for one in inside.net_connections()), 15)
        assert time.monotonic() - began < 15


def test_tokens_change_under_a_running_server(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    secret = create_token(file, "first", "read", ["alpha"])
    with (
        hints_server(root, "alpha", "beta", more=("--tokens-file", str(file))) as (url, _),
        httpx.Client(base_url=url, trust_env=False) as client,
    ):
        headers = {"authorization": f"Bearer {secret}"}
        assert client.get("/v1/bottlenecks").status_code == 401
        assert client.get("/v1/bottlenecks", headers=headers).status_code == 200
        assert client.get("/v1/bottlenecks?cluster=beta", headers=headers).status_code == 403
        other = {"authorization": f"Bearer {create_token(file, 'second', 'read')}"}
        wait_for(lambda: client.get("/v1/bottlenecks", headers=other).status_code == 200)
        revoke_token(file, "first")
        wait_for(lambda: client.get("/v1/bottlenecks", headers=headers).status_code == 401)


@pytest.mark.services("openssl")
def test_it_serves_https(root: Path, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert),
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    with hints_server(root, "alpha", more=("--tls-cert", str(cert), "--tls-key", str(key))) as (url, _):
        secure = url.replace("http:", "https:")
        context = ssl.create_default_context(cafile=str(cert))
        assert httpx.get(f"{secure}/readyz", verify=context, trust_env=False).status_code == 200
