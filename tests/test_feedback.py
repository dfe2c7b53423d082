"""What is said of a hint is kept beside what was done, under the name of who said it, and reaches the store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.kept_actions import keep_actions
from pipelines.store import Store
from scheduler_hints.api import create_app
from scheduler_hints.tokens import TokenStore, create_token
from tests.hints_support import ask

JSON = {"content-type": "application/json"}


def say(app: Any, token: str = "", **changes: Any) -> Any:
    body = {"cluster": "alpha", "hint_id": "bn-1", "verdict": "wrong"} | changes
    headers = JSON | ({"authorization": f"Bearer {token}"} if token else {})
    return ask(app, "/v1/feedback", method="POST", body=json.dumps(body).encode(), headers=headers)


def test_it_reaches_the_store(tmp_path: Path) -> None:
    app = create_app(tmp_path / "published", ["alpha"])
    assert say(app, who="ada", note="the fan was fine", node="n1").json()["who"] == "ada"
    assert say(app, verdict="useful").status == 200
    with Store.open(f"sqlite:{tmp_path}/c.sqlite", str(tmp_path / "data")) as store:
        assert keep_actions(store, tmp_path, "alpha") == 2
        rows = store.query(
            "SELECT actor, action, hint_id, node, is_applied, reason, detail FROM out_actions ORDER BY actor"
        )
    assert rows.rows() == [
        ("ada", "feedback", "bn-1", "n1", False, "the fan was fine", '{"verdict":"wrong"}'),
        ("anyone", "feedback", "bn-1", "", False, "", '{"verdict":"useful"}'),
    ]


def test_the_name_is_that_of_the_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    read, place = create_token(path, "reader", "read"), create_token(path, "slurm", "place", ["alpha"])
    app = create_app(tmp_path / "published", ["alpha", "beta"], tokens=TokenStore(path))
    assert [say(app, token).status for token in ("", read)] == [401, 403]
    assert say(app, place).json()["who"] == "slurm"
    assert say(app, place, who="ada").status == 400
    assert say(app, place, cluster="beta").status == 403


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"verdict": "perhaps"}, "verdict"), ({"hint_id": ""}, "hint_id"), ({"note": "a\x00b"}, "note"), ({"x": 1}, "x")],
)
def test_a_wrong_body_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    reply = say(create_app(tmp_path / "published", ["alpha"]), **changes)
    assert reply.status == 422
    assert words in reply.json()["error"]["message"]


def test_a_disk_that_refuses_is_said(tmp_path: Path) -> None:
    (tmp_path / "actions").write_text("in the way")
    reply = say(create_app(tmp_path / "published", ["alpha"]))
    assert (reply.status, "feedback cannot be kept" in reply.json()["error"]["message"]) == (503, True)
