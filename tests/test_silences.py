"""Operators' silences and the hold-out: made over HTTP, kept, not served to schedulers, shown, and censoring labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from features.label_spans import excluded_rows
from pipelines.exclusions import read_exclusions
from pipelines.kept_silences import keep_silences
from pipelines.settings import parse_settings
from pipelines.sources import SourceError
from pipelines.store import Store
from scheduler_hints.api import create_app
from scheduler_hints.errors import ApiError, UnavailableError
from scheduler_hints.nowcast_config import NowcastConfig
from scheduler_hints.offers import held_out, is_drawn, may_act
from scheduler_hints.silences import (
    COPY,
    Silence,
    SilenceBook,
    add_silence,
    decode_silence,
    end_silence,
    read_silences,
    silenced,
    silences_path,
)
from scheduler_hints.tokens import TokenStore, create_token
from tests.hints_support import ask, bottleneck, publish
from tests.test_nowcast import CONFIG, World, at, hot

JSON = {"content-type": "application/json"}
NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)


def asked(**changes: Any) -> dict[str, Any]:
    return {"cluster": "alpha", "node": "n1", "end": (NOW + HOUR).isoformat(), "reason": "fans"} | changes


def post(app: Any, body: dict[str, Any], token: str = "") -> Any:
    headers = JSON | ({"authorization": f"Bearer {token}"} if token else {})
    return ask(app, "/v1/silences", method="POST", body=json.dumps(body).encode(), headers=headers)


def silence(**changes: Any) -> Silence:
    fields: dict[str, Any] = {
        "id": "si-1", "cluster": "alpha", "node": "n1", "bottleneck_class": None, "scope": None, "start": NOW - HOUR,
        "end": NOW + HOUR, "reason": "fans", "who": "ada", "created_at": NOW,
    }  # fmt: skip
    return Silence(**(fields | changes))


def test_a_silence_is_made_listed_and_taken_back_and_survives_the_process(tmp_path: Path) -> None:
    made = post(create_app(tmp_path, ["alpha"]), asked(who="ada", bottleneck_class="thermal_throttle"))
    assert made.status == 200, made.body
    kept = made.json()
    assert (kept["who"], kept["node"], kept["scope"], kept["ended_at"]) == ("ada", "n1", None, None)
    again = create_app(tmp_path, ["alpha"])
    assert ask(again, "/v1/silences", "active=true").json()["items"] == [kept]
    path = f"/v1/silences/alpha/{kept['id']}"
    ended = ask(again, path, method="DELETE").json()
    assert ended["ended_at"] is not None
    assert ask(again, "/v1/silences", "active=true").json()["items"] == []
    assert ask(again, "/v1/silences", "cluster=alpha").json()["items"] == [ended]
    assert ask(again, path, method="DELETE").json() == ended  # it was over already
    assert ask(again, "/v1/silences/alpha/si-none", method="DELETE").status == 404
    assert ask(again, "/v1/silences/beta/si-none", method="DELETE").status == 404


def test_a_silence_may_be_for_so_long() -> None:
    made = decode_silence(json.dumps(asked(end=None, duration_s=90)).encode(), NOW)
    assert (made.start, made.end) == (NOW, NOW + timedelta(seconds=90))


def test_a_silence_is_kept_in_utc_and_the_path_tells_its_methods(tmp_path: Path) -> None:
    start, end = "2020-01-01T02:00:00+05:30", "2020-01-02T00:00:00-05:00"
    made = decode_silence(json.dumps(asked(start=start, end=end)).encode(), datetime(2020, 1, 1, tzinfo=UTC))
    assert (made.start, made.end) == (datetime.fromisoformat(start), datetime.fromisoformat(end))
    assert (made.start.tzinfo, made.end.tzinfo) == (UTC, UTC)
    refused = ask(create_app(tmp_path, ["alpha"]), "/v1/silences", method="PUT")
    assert refused.status == 405
    assert "allowed: GET, HEAD, POST" in refused.json()["error"]["message"]


def test_only_an_admin_silences_and_is_named(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    secret = {role: create_token(tokens, f"the-{role}", role) for role in ("read", "place", "admin")}
    limited = create_token(tokens, "beta-admin", "admin", ["beta"])
    app = create_app(tmp_path, ["alpha", "beta"], tokens=TokenStore(tokens))
    assert [post(app, asked(), secret[role]).status for role in ("read", "place", "admin")] == [403, 403, 200]
    assert post(app, asked(), limited).status == 403
    assert post(app, asked(who="someone else"), secret["admin"]).status == 400
    (kept,) = read_silences(tmp_path, "alpha")
    assert kept.who == "the-admin"
    bearer = {role: {"authorization": f"Bearer {text}"} for role, text in secret.items()}
    assert ask(app, "/v1/silences", headers=bearer["read"]).json()["items"][0]["id"] == kept.id
    path = f"/v1/silences/alpha/{kept.id}"
    assert ask(app, path, method="DELETE", headers=bearer["place"]).status == 403
    assert ask(app, path, method="DELETE", headers=bearer["admin"]).status == 200


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"node": None}, 400, "at least one of node, bottleneck_class and scope"),
        ({"bottleneck_class": "heat"}, 400, "thermal_throttle"),
        ({"scope": "moon"}, 422, "scope"),
        ({"end": (NOW - HOUR).isoformat()}, 400, "end"),
        ({"end": (NOW + timedelta(days=400)).isoformat()}, 400, "366 days"),
        ({"end": "2099-01-01T00:00:00"}, 422, "end"),
        ({"start": "9999-12-31T00:00:00Z", "end": None, "duration_s": 864_000}, 400, "start='9999-12-31"),
        ({"start": "9999-06-01T00:00:00Z", "end": "9999-07-01T00:00:00Z"}, 400, "years 2 to 9997"),
        ({"end": "9999-12-31T23:59:59-14:00"}, 400, "end='9999-12-31"),
        ({"start": "0001-01-01T00:00:00+14:00"}, 400, "start='0001-01-01"),
        ({"node": "n1\x00"}, 422, "node"),
        ({"reason": "fans\x1b[31m"}, 422, "reason"),
        ({"start": (NOW - timedelta(days=99)).isoformat()}, 400, "start"),
        ({"end": None}, 400, "one of end and duration_s"),
        ({"duration_s": 60}, 400, "one of end and duration_s"),
        ({"end": None, "duration_s": 0}, 422, "duration_s"),
        ({"reason": ""}, 422, "reason"),
        ({"nodes": ["n1"]}, 422, "did you mean `node`"),
        ({"cluster": "beta"}, 400, "no cluster 'beta'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], status: int, words: str) -> None:
    reply = post(create_app(tmp_path, ["alpha"]), asked(**changes))
    assert reply.status == status, reply.body
    assert words in reply.json()["error"]["message"]
    assert read_silences(tmp_path, "alpha") == []


def test_a_damaged_file_does_not_offer_what_was_silenced(tmp_path: Path) -> None:
    made = add_silence(tmp_path, decode_silence(json.dumps(asked()).encode(), NOW), "ada", NOW)
    path = silences_path(tmp_path, "alpha")
    for damage in (b"", b"[{", b"\xff\xfe", path.read_bytes()[:-9]):
        path.write_bytes(damage)
        started_again = SilenceBook(tmp_path, "alpha")
        assert started_again.active(NOW + HOUR / 2) == [made], damage
        assert "is damaged" in (started_again.problem or "")
    path.unlink()
    without = SilenceBook(tmp_path, "alpha")
    assert (without.active(NOW + HOUR / 2), "is gone" in (without.problem or "")) == ([made], True)
    more = add_silence(tmp_path, decode_silence(json.dumps(asked(node="n2")).encode(), NOW), "ada", NOW)
    assert read_silences(tmp_path, "alpha") == [made, more]
    assert msgspec.json.decode(path.read_bytes(), type=list[Silence]) == [made, more], "the file is whole again"


def test_a_disk_that_refuses_or_a_damaged_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "alpha").write_text("a file, where a folder should be")
    assert post(create_app(tmp_path, ["alpha"]), asked()).status == 503
    (tmp_path / "alpha").unlink()
    (tmp_path / "alpha").mkdir()
    silences_path(tmp_path, "alpha").write_text("{")
    app = create_app(tmp_path, ["alpha"])
    assert [post(app, asked()).status, ask(app, "/v1/silences").status] == [503, 503]
    assert silences_path(tmp_path, "alpha").read_text() == "{", "nothing is thrown away"
    book = SilenceBook(tmp_path, "alpha")
    assert book.active(NOW) == []
    assert "cannot be read" in (book.problem or "")


def test_as_many_as_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_hints.silences.MAX_SILENCES", 2)
    request = decode_silence(json.dumps(asked()).encode(), NOW)
    for _ in range(2):
        add_silence(tmp_path, request, "ada", NOW)
    with pytest.raises(UnavailableError, match="2 silences of alpha are kept"):
        add_silence(tmp_path, request, "ada", NOW)
    later = NOW + timedelta(days=91)  # those of long ago make room
    add_silence(
        tmp_path, decode_silence(json.dumps(asked(end=(later + HOUR).isoformat())).encode(), later), "ada", later
    )
    assert len(read_silences(tmp_path, "alpha")) == 1


def test_what_a_silence_covers() -> None:
    hint = bottleneck()
    assert silence().covers(hint)
    assert not silence(node="n2").covers(hint)
    assert silence(node=None, bottleneck_class="thermal_throttle").covers(hint)
    assert not silence(bottleneck_class="nvlink_saturation").covers(hint)
    assert not silence(scope="rack").covers(hint)
    wide = msgspec.structs.replace(hint, scope="rack", node=None, gpu_uuid=None, nodes=["n1", "n2"])
    assert not silence().covers(wide)  # it is about another node too
    assert silence(node=None, scope="rack").covers(wide)
    assert [s.is_active(NOW) for s in (silence(), silence(ended_at=NOW), silence(start=NOW + HOUR / 2))] == [
        True, False, False,
    ]  # fmt: skip
    marked = silenced([hint, wide], [silence(), silence(id="si-2")])
    assert [one.silenced_by for one in marked] == ["si-1", None]
    assert silenced(marked, []) == [hint, wide]


def test_the_nowcast_marks_it_and_schedulers_are_not_served_it(tmp_path: Path) -> None:
    world = World(tmp_path, hot([3]), config=NowcastConfig(**vars_of(CONFIG) | {"holdout_ratio": 0.0}))
    for second in range(600, 1215, 15):
        world.tick(second)
    (hint,) = world.hints()
    assert (hint.silenced_by, hint.is_held_out) == (None, False)
    path = silences_path(tmp_path, "c")
    kept = silence(cluster="c", node="n0", start=at(0), end=at(9_000))
    path.write_bytes(msgspec.json.encode([kept]))
    world.tick(1215)
    assert [one.silenced_by for one in world.hints()] == ["si-1"]
    publish(tmp_path / "now", "c", bottlenecks=world.hints())
    app = create_app(tmp_path / "now", ["c"])
    app.store.refresh()
    assert ask(app, "/v1/bottlenecks").json()["items"] == []
    (shown,) = ask(app, "/v1/bottlenecks", "audience=people").json()["items"]
    assert shown["silenced_by"] == "si-1"
    path.write_bytes(msgspec.json.encode([msgspec.structs.replace(kept, ended_at=at(1225))]))
    world.tick(1230)
    assert [one.silenced_by for one in world.hints()] == [None]


def vars_of(config: NowcastConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in NowcastConfig.__dataclass_fields__}


def test_the_hold_out_is_drawn_by_id_and_nothing_is_planned_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [f"bn-{i:016x}" for i in range(20_000)]
    drawn = {ratio: {id_ for id_ in ids if is_drawn(id_, ratio)} for ratio in (0.0, 0.05, 0.2, 1.0)}
    assert [len(drawn[ratio]) for ratio in (0.0, 1.0)] == [0, 20_000]
    assert len(drawn[0.05]) == pytest.approx(1_000, abs=120)
    assert drawn[0.05] < drawn[0.2]
    assert [hint.is_held_out for hint in held_out([bottleneck()], 1.0)] == [True]
    assert [may_act(bottleneck(**more)) for more in ({}, {"is_held_out": True}, {"silenced_by": "si-1"})] == [
        True, False, False,
    ]  # fmt: skip
    planned: list[list[Any]] = []

    def plans(bottlenecks: Any, *_: Any, **__: Any) -> list[Any]:
        planned.append(list(bottlenecks))
        return []

    monkeypatch.setattr("scheduler_hints.plans.reservation_plans", plans)
    for name, ratio in (("none", 0.0), ("all", 1.0)):
        config = NowcastConfig(**vars_of(CONFIG) | {"holdout_ratio": ratio})
        world = World(tmp_path / name, hot([3]), config=config)
        for second in range(600, 1215, 15):
            world.tick(second)
        assert [hint.is_held_out for hint in world.hints()] == [ratio == 1.0]
        assert len(planned[-1]) == (ratio == 0.0)


def test_the_share_is_a_setting() -> None:
    assert parse_settings({}, {}).hints.holdout_ratio == NowcastConfig().holdout_ratio == 0.05


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as opened:
        yield opened


def test_labels_under_a_silence_are_censored(tmp_path: Path, store: Store) -> None:
    published = tmp_path / "published"
    request = decode_silence(json.dumps(asked(bottleneck_class="thermal_throttle")).encode(), NOW)
    made = add_silence(published, request, "ada", NOW)
    add_silence(published, decode_silence(json.dumps(asked(node=None, scope="rack")).encode(), NOW), "ada", NOW)
    assert keep_silences(store, published, "alpha") == 2
    assert keep_silences(store, published, "alpha") == 0
    end_silence(published, "alpha", made.id, NOW + HOUR / 2)
    assert keep_silences(store, published, "alpha") == 1
    spans = read_exclusions(store, "alpha", NOW - HOUR, NOW + 2 * HOUR, drained_since=NOW)
    # One of a scope alone censors nothing: labels have other scopes than hints.
    assert spans.select("node", "bottleneck_class").rows() == [("n1", "thermal_throttle")]
    assert spans["end"][0] == NOW + HOUR / 2
    ts = np.array([(NOW + shift).timestamp() for shift in (-HOUR, HOUR / 4, HOUR)])
    inside = [
        excluded_rows(spans, class_, ["n1"], np.zeros(3, dtype=np.int64), ts).tolist()
        for class_ in ("thermal_throttle", "nvlink_saturation")
    ]
    assert inside == [[False, True, False], [False, False, False]]
    silences_path(published, "alpha").write_text("{")
    silences_path(published, "alpha").with_name(COPY).write_text("{")
    with pytest.raises(SourceError, match="silences cannot be read"):
        keep_silences(store, published, "alpha")


def test_the_reader_and_the_writer_never_see_half_a_file(tmp_path: Path) -> None:
    publish(tmp_path, bottlenecks=[bottleneck()])
    request = decode_silence(json.dumps(asked()).encode(), NOW)
    book = SilenceBook(tmp_path, "alpha")
    for count in range(1, 4):
        add_silence(tmp_path, request, "ada", NOW)
        assert len(book.active(NOW)) == count
    with pytest.raises(ApiError):
        decode_silence(b"\xff", NOW)
