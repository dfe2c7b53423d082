"""What a scheduler has just placed leaves windows at once, for 90 s, whoever asks; bad bodies are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scheduler_hints.api import create_app
from scheduler_hints.client import HintsClient
from scheduler_hints.placements import LIFE_S, placements_path
from scheduler_hints.tokens import TokenStore, create_token
from tests.hints_support import ask, hints_server, job, publish, window

JSON = {"content-type": "application/json"}


def place(app: Any, *placements: tuple[str, list[str]], cluster: str = "alpha", token: str = "") -> Any:
    body = {"cluster": cluster, "placements": [{"job_id": name, "nodes": nodes} for name, nodes in placements]}
    headers = JSON | ({"authorization": f"Bearer {token}"} if token else {})
    return ask(app, "/v1/placements", method="POST", body=json.dumps(body).encode(), headers=headers)


def windows(app: Any, query: str = "") -> list[tuple[str, list[str], int, list[str]]]:
    items = ask(app, "/v1/backfill-windows", query).json()["items"]
    return [(item["id"], item["nodes"], item["gpus"], item["fits_jobs"]) for item in items]


@pytest.fixture
def app(tmp_path: Path) -> Any:
    publish(
        tmp_path,
        ttl_s=300,
        backfill_windows=[window("w1", nodes=["n1", "n2"], gpus=16, fits_jobs=["1", "2", "9"]),
                          window("w2", nodes=["n3"], gpus=8, fits_jobs=["1"])],
        jobs=[job("1", nodes=1, gpus=8), job("2", nodes=2, gpus=16)],
    )  # fmt: skip
    app = create_app(tmp_path, ["alpha"])
    app.startup()
    yield app
    app.shutdown()


def test_nodes_in_flight_leave_windows_at_once_and_come_back(app: Any) -> None:
    before = windows(app)
    etag = ask(app, "/v1/backfill-windows").headers["etag"]
    kept = place(app, ("7", ["n1"]))
    assert (kept.status, kept.json()["kept"], kept.json()["counts_for_s"]) == (200, 1, LIFE_S)
    assert windows(app) == [("w1", ["n2"], 8, ["1"]), ("w2", ["n3"], 8, ["1"])]
    again = ask(app, "/v1/backfill-windows", headers={"if-none-match": etag})
    assert again.status == 200, "another answer has another tag"
    assert again.json()["expires_in_s"] <= LIFE_S
    place(app, ("7", ["n3"]))  # it moved
    assert windows(app) == [before[0]]
    place(app, ("8", ["n1", "n2"]))
    assert windows(app) == []
    clock = app.store.clock
    app.store.clock = lambda: clock() + LIFE_S + 1
    assert windows(app) == before


def test_every_process_sees_it_and_a_restart_too(app: Any, tmp_path: Path) -> None:
    place(app, ("7", ["n3"]))
    other = create_app(tmp_path, ["alpha"])
    other.startup()
    assert [one[0] for one in windows(other)] == ["w1"]
    other.shutdown()


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", b'[{"job_id": 5}]'])
def test_a_damaged_file_is_nothing_in_flight(app: Any, tmp_path: Path, damage: bytes) -> None:
    place(app, ("7", ["n3"]))
    placements_path(tmp_path, "alpha").write_bytes(damage)
    app.store.refresh()
    assert len(windows(app)) == 2
    place(app, ("8", ["n3"]))
    assert [one[0] for one in windows(app)] == ["w1"]


def test_filters_look_at_what_is_left(app: Any) -> None:
    assert [one[0] for one in windows(app, "gpus=16")] == ["w1"]
    place(app, ("7", ["n1"]))
    assert windows(app, "gpus=16") == []
    assert [one[0] for one in windows(app, "fits_job=1")] == ["w1", "w2"]
    assert windows(app, "fits_job=2") == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "the body is not JSON"),
        (b'{"cluster": "alpha", "placements": []}', "placements"),
        (b'{"cluster": "alpha", "placements": [{"job_id": "1", "nodes": []}]}', "nodes"),
        (b'{"cluster": "alpha", "placements": [{"job_id": "1", "nodes": ["n1"], "gpu": 1}]}', "gpu"),
        (b'{"cluster": "gamma", "placements": [{"job_id": "1", "nodes": ["n1"]}]}', "no cluster 'gamma'"),
    ],
)
def test_a_wrong_body_is_named(app: Any, body: bytes, words: str) -> None:
    reply = ask(app, "/v1/placements", method="POST", body=body, headers=JSON)
    assert 400 <= reply.status < 500
    assert words in reply.json()["error"]["message"]
    assert ask(app, "/v1/placements", method="POST", body=body).status == 415


def test_it_takes_the_role_place_and_the_cluster(tmp_path: Path) -> None:
    publish(tmp_path)
    path = tmp_path / "tokens.json"
    read = create_token(path, "reader", "read")
    other = create_token(path, "other", "place", ["beta"])
    mine = create_token(path, "slurm", "place", ["alpha"])
    app = create_app(tmp_path, ["alpha", "beta"], tokens=TokenStore(path))
    placed = ("7", ["n1"])
    assert [place(app, placed, token=token).status for token in ("", read, other, mine)] == [401, 403, 403, 200]


def test_the_client_says_it(tmp_path: Path) -> None:
    publish(tmp_path, backfill_windows=[window("w2", nodes=["n3"], gpus=8)], ttl_s=300)
    with hints_server(tmp_path, "alpha") as (url, _), HintsClient(url) as client:
        assert len(client.backfill_windows().items) == 1
        assert client.send_placements("alpha", [{"job_id": "7", "nodes": ["n3"]}]).facts["kept"] == 1
        assert client.backfill_windows().items == []
