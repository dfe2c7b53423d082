"""The Kubernetes scheduler extender: the wire format of kube-scheduler, what is refused and liked, and failing open."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from scheduler_hints.api import create_app
from scheduler_hints.extender import ExtenderConfig, decode_args, filtered, prioritized, verdicts
from scheduler_hints.tokens import TokenStore, create_token
from tests.hints_support import ask, bottleneck, publish, risk, window

JSON = {"content-type": "application/json"}
# As Go writes ExtenderArgs of k8s.io/kube-scheduler/extender/v1, which has no JSON tags: field names as they are.
ARGS = (
    b'{"Pod":{"metadata":{"name":"train-0","namespace":"ml","uid":"0b7a","creationTimestamp":null},"spec":{"containers":'
    b'[{"name":"main","image":"train","resources":{"limits":{"nvidia.com/gpu":"8"},"requests":{"nvidia.com/gpu":"8"}}}]},'
    b'"status":{}},"Nodes":null,"NodeNames":["n1","n2","n3","n4"]}'
)
NODES = (
    b'{"Pod":{"metadata":{"name":"train-0"}},"Nodes":{"metadata":{"resourceVersion":"7"},"items":['
    b'{"metadata":{"name":"n1","labels":{"zone":"a"}},"spec":{"unschedulable":false},"status":{}},'
    b'{"metadata":{"name":"n2"},"spec":{},"status":{"capacity":{"nvidia.com/gpu":"8"}}}]},"NodeNames":null}'
)


def likely(p: float, node: str = "n1", **changes: Any) -> Any:
    at = {"horizon_s": 60, "probability": p, "probabilities": {"60": p}}
    return bottleneck(f"b-{node}", node=node, **(at | changes))


def post(app: Any, verb: str, body: bytes = ARGS, cluster: str = "", **headers: str) -> Any:
    path = f"/k8s/{cluster}/{verb}" if cluster else f"/k8s/{verb}"
    return ask(app, path, method="POST", headers=JSON | headers, body=body)


@pytest.fixture
def app(tmp_path: Path) -> Any:
    publish(
        tmp_path,
        bottlenecks=[likely(0.93), likely(0.4, "n2")],
        node_risks=[risk("n1"), risk("n3", p_24h=0.5), risk("n2", p_24h=0.0), risk("n4", p_24h=0.0)],
        backfill_windows=[window(nodes=["n4"], start=datetime.now(UTC), end=datetime.now(UTC) + timedelta(hours=2))],
    )
    app = create_app(tmp_path, ["alpha"])
    app.startup()
    yield app
    app.shutdown()


def test_answers_are_those_of_the_go_types(app: Any) -> None:
    reply = post(app, "filter")
    assert (reply.status, reply.headers["x-weatherglass"]) == (200, "fresh")
    words = "Weatherglass: thermal throttling within 60 s with probability 0.93 (hint b-n1)"
    assert reply.body == (
        b'{"Nodes":null,"NodeNames":["n2","n3","n4"],"FailedNodes":{"n1":"' + words.encode() + b'"},'
        b'"FailedAndUnresolvableNodes":{},"Error":""}'
    )
    assert post(app, "prioritize").body == (
        b'[{"Host":"n1","Score":1},{"Host":"n2","Score":6},{"Host":"n3","Score":5},{"Host":"n4","Score":10}]'
    )
    assert post(app, "filter", cluster="alpha").body == reply.body


def test_whole_nodes_come_back_as_they_were(app: Any) -> None:
    found = json.loads(post(app, "filter", NODES.replace(b'"name":"n2"', b'"name":"n5"')).body)
    assert found["NodeNames"] is None
    sent = json.loads(NODES.replace(b'"name":"n2"', b'"name":"n5"'))["Nodes"]
    assert found["Nodes"] == sent, "a quarter of two nodes is none: nothing is refused"
    four = json.loads(NODES)
    four["Nodes"]["items"] += [{"metadata": {"name": name}} for name in ("n3", "n4")]
    found = json.loads(post(app, "filter", json.dumps(four).encode()).body)
    assert found["Nodes"] == four["Nodes"] | {"items": four["Nodes"]["items"][1:]}
    assert list(found["FailedNodes"]) == ["n1"]


def test_a_pod_that_says_how_long_it_runs_is_put_where_a_window_holds_it(app: Any) -> None:
    def score(hours: float, key: str = "activeDeadlineSeconds") -> dict[str, int]:
        pod = {"metadata": {"name": "p"}, "spec": {"activeDeadlineSeconds": hours * 3600}}
        if key != "activeDeadlineSeconds":
            pod = {"metadata": {"name": "p", "annotations": {key: str(hours * 3600)}}}
        body = json.dumps({"Pod": pod, "NodeNames": ["n2", "n4"]}).encode()
        return {one["Host"]: one["Score"] for one in json.loads(post(app, "prioritize", body).body)}

    assert score(1) == {"n2": 4, "n4": 10}
    assert score(1, "weatherglass/expected-runtime-s") == {"n2": 4, "n4": 10}
    assert score(3) == {"n2": 4, "n4": 7}


def test_field_names_are_read_in_any_case() -> None:
    assert decode_args(b'{"pod":{},"nodenames":["a"]}').names == ["a"]
    assert decode_args(b'{"nodeNames":["a","b"],"nodes":null}').names == ["a", "b"]


@pytest.mark.parametrize("verb", ["filter", "prioritize"])
def test_whatever_is_wrong_with_us_passes_every_node(tmp_path: Path, verb: str) -> None:
    names = ["n1", "n2", "n3", "n4"]

    def passed(app: Any, word: str, cluster: str = "", **headers: str) -> None:
        reply = post(app, verb, cluster=cluster, **headers)
        assert (reply.status, reply.headers["x-weatherglass"]) == (200, word)
        found = json.loads(reply.body)
        if verb == "filter":
            assert (found["NodeNames"], found["FailedNodes"], found["Error"]) == (names, {}, "")
        else:
            assert found == [{"Host": name, "Score": 0} for name in names]

    empty = create_app(tmp_path, ["alpha"])
    empty.startup()
    passed(empty, "stale")
    passed(empty, "unknown_cluster", "beta")
    empty.shutdown()
    publish(tmp_path, ttl_s=0.2, bottlenecks=[likely(0.99)], node_risks=[])
    late = create_app(tmp_path, ["alpha", "beta"])
    late.startup()
    passed(late, "bad_value")  # which of the two clusters is not said
    clock = late.store.clock
    late.store.clock = lambda: clock() + 1.0
    passed(late, "stale", "alpha")
    late.shutdown()
    publish(tmp_path, bottlenecks=[likely(0.99)], node_risks=[])
    secret = create_token(tmp_path / "tokens.json", "kube", "read", ["alpha"])
    guarded = create_app(tmp_path, ["alpha"], tokens=TokenStore(tmp_path / "tokens.json"))
    guarded.startup()
    passed(guarded, "no_token")
    passed(guarded, "bad_token", authorization="Bearer wg_0_0")
    passed(guarded, "bad_token", authorization="Basic %%%")
    basic = base64.b64encode(f"kube:{secret}".encode()).decode()  # what Go makes of a password in a URL
    assert post(guarded, verb, authorization=f"Basic {basic}").headers["x-weatherglass"] == "fresh"
    guarded.shutdown()


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"{", b'{"NodeNames":5}', b'{"Nodes":{"items":[{}]}}', b"\xff"])
def test_a_body_without_candidates_is_a_400_that_says_so(app: Any, body: bytes) -> None:
    for verb in ("filter", "prioritize"):
        reply = post(app, verb, body)
        assert reply.status == 400, reply.body
        assert "ExtenderArgs" in json.loads(reply.body)["error"]["message"]


def test_a_body_of_a_stranger_is_bounded(tmp_path: Path) -> None:
    create_token(tmp_path / "tokens.json", "kube", "read", ["alpha"])
    app = create_app(tmp_path, ["alpha"], tokens=TokenStore(tmp_path / "tokens.json"))
    assert post(app, "filter", b" " * (3 * 2**20)).status == 413


def test_few_are_refused_and_never_all() -> None:
    hints = [likely(0.80 + 0.01 * i, f"n{i}") for i in range(10)]
    foreseen = verdicts(hints, [])
    args = decode_args(json.dumps({"NodeNames": [f"n{i}" for i in range(20)]}).encode())
    result = filtered(args, foreseen, ExtenderConfig())
    assert list(result.failed_nodes) == ["n5", "n6", "n7", "n8", "n9"], "a quarter, the likeliest"
    assert result.node_names == [name for name in args.names if name not in result.failed_nodes]
    one = decode_args(b'{"NodeNames":["n9"]}')
    assert filtered(one, foreseen, ExtenderConfig(filter_max_ratio=1.0)).node_names == ["n9"]
    assert filtered(decode_args(b'{"NodeNames":[]}'), foreseen, ExtenderConfig()).node_names == []


def test_only_hints_that_may_be_acted_on_count() -> None:
    idle = {
        "silenced": likely(0.9, silenced_by="si-1"), "held out": likely(0.9, is_held_out=True),
        "too late": likely(0.9, is_actionable=False),
        "its own doing": likely(0.9, bottleneck_class="memory_exhaustion"),
        "no action": likely(0.9, action="none"),
    }  # fmt: skip
    for why, hint in idle.items():
        assert verdicts([hint], []) == {}, why
    active = verdicts([likely(0.2, is_active=True)], [])["n1"]
    assert (active.worst, active.safety) == (1.0, 0.0)
    wide = verdicts([likely(0.9, None, scope="rack", nodes=["n1", "n2"])], [risk("n3", p_1h=0.85)])
    assert {name for name, one in wide.items() if one.worst > 0.8} == {"n1", "n2", "n3"}
    assert "hardware fault within 1 h" in wide["n3"].reason


def test_telemetry_may_know_a_node_by_its_short_name() -> None:
    args = decode_args(b'{"NodeNames":["n1.example.org","n2.example.org"]}')
    scores = prioritized(args, verdicts([likely(0.9)], []), {}, datetime.now(UTC), ExtenderConfig())
    assert [one.score for one in scores] == [1, 10]
