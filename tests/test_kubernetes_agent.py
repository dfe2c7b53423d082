"""The Kubernetes agent: what it writes to nodes, how few, what it takes off again, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scheduler_hints.client import HintsClient
from scheduler_hints.extender import Verdict
from scheduler_hints.kubernetes_agent import KubernetesAgent, Marks, fetch_from
from scheduler_hints.kubernetes_nodes import KubernetesError, KubernetesNodes
from scheduler_hints.slurm_audit import Ledger
from tests.hints_support import ROOT, bottleneck, hints_server, publish, risk
from tests.kubernetes_api import ApiServer, api_server

NAMES = [f"n{rack}{i}" for rack in range(4) for i in range(10)]
HOT = Verdict(0.93, 0.01, 0.05, "thermal throttling within 60 s with probability 0.93 (hint b1)", "thermal throttling")
TAINT = {"key": "weatherglass/trouble", "value": "foreseen", "effect": "PreferNoSchedule"}


class World:
    """An agent beside a stand-in API server; `foreseen` is what the hints say."""

    def __init__(self, api: ApiServer, config: Path, mode: Any = "taint", **marks: Any) -> None:
        self.api = api
        self.foreseen: dict[str, Verdict] | None = {}
        self.rows: list[dict[str, Any]] = []
        self.audit: Any = self.rows.append
        ledger = Ledger("alpha", lambda row: self.audit(row), lambda: datetime.now(UTC), "kubernetes-agent")
        nodes = KubernetesNodes(str(config))
        self.agent = KubernetesAgent("alpha", lambda: self.foreseen, nodes, ledger, mode=mode, marks=Marks(**marks))

    def step(self, foreseen: dict[str, Verdict] | None) -> None:
        self.foreseen = foreseen
        self.agent.step()

    def tainted(self) -> list[str]:
        return [name for name in self.api.nodes if any(one["key"] == TAINT["key"] for one in self.api.taints(name))]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[ApiServer, Path]]:
    with api_server(NAMES, tmp_path) as found:
        yield found


def test_a_node_in_trouble_is_annotated_and_tainted_and_freed_again(served: Any) -> None:
    world = World(*served)
    capped = Verdict(0.3, 0.0, 0.0, "power throttling within 90 s with probability 0.30 (hint b2)", "power throttling")
    world.step({"n00": HOT, "n10": capped})
    assert world.api.annotations("n00") == {
        "weatherglass/trouble": "0.9", "weatherglass/fault-24h": "0.1", "weatherglass/reason": "thermal throttling",
    }  # fmt: skip
    assert (world.api.taints("n00"), world.tainted()) == ([TAINT], ["n00"])
    assert world.api.annotations("n10")["weatherglass/reason"] == "power throttling"
    assert world.agent.in_words() == "2 nodes annotated, 1 tainted (mode taint)"
    done = len(world.api.patches)
    world.step({"n00": Verdict(0.91, 0.01, 0.05, HOT.reason.replace("0.93", "0.91"), HOT.kind), "n10": capped})
    assert len(world.api.patches) == done, "nothing that a node shows has changed"
    world.step({})
    assert (world.api.annotations("n00"), world.tainted()) == ({}, [])
    assert [(row["action"], row["node"], row["is_applied"], row["actor"]) for row in world.rows] == [
        ("taint", "n00", True, "kubernetes-agent"), ("annotate", "n10", True, "kubernetes-agent"),
        ("release", "n00", True, "kubernetes-agent"), ("release", "n10", True, "kubernetes-agent"),
    ]  # fmt: skip


def test_marks_are_taken_off_when_hints_are_not_fresh(served: Any) -> None:
    world = World(*served)
    world.step({"n00": HOT})
    world.step(None)
    assert (world.tainted(), world.api.annotations("n00")) == ([], {})
    world.step({"n00": HOT})
    assert [row["action"] for row in world.rows] == ["taint", "no-hints", "release", "hints-back", "taint"]


def test_few_are_tainted_one_of_a_rack_and_those_that_stand_keep_their_place(served: Any) -> None:
    world = World(*served, max_nodes_ratio=0.05)
    all_hot = {name: Verdict(0.8 + 0.001 * i, 0, 0, HOT.reason) for i, name in enumerate(NAMES)}
    world.step(all_hot)
    assert world.tainted() == ["n29", "n39"], "two of forty, the likeliest, of two racks"
    world.step(all_hot | {"n39": Verdict(0.5, 0, 0, HOT.reason), "n00": Verdict(0.99, 0, 0, HOT.reason)})
    assert world.tainted() == ["n29", "n39"], "they do not change at every look"
    world.step(all_hot | {"n39": Verdict(0.3, 0, 0, HOT.reason), "n00": Verdict(0.99, 0, 0, HOT.reason)})
    assert world.tainted() == ["n00", "n29"]
    none = World(*served, max_nodes_ratio=0.0)
    none.step(all_hot)
    assert none.tainted() == []


def test_what_others_wrote_is_never_touched(served: Any) -> None:
    world = World(*served)
    theirs = [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]
    world.api.change("n00", {"metadata": {"annotations": {"team": "a"}}, "spec": {"taints": theirs}})
    world.api.change("n10", {"spec": {"unschedulable": True}})
    world.step({"n00": HOT, "n10": HOT})
    assert world.api.taints("n00") == [*theirs, TAINT]
    assert world.tainted() == ["n00"], "a cordoned node is its owner's"
    more = [*theirs, TAINT, {"key": "theirs", "effect": "NoSchedule"}]
    world.api.before_patch = lambda name: world.api.change("n00", {"spec": {"taints": more}})
    world.step({})
    assert world.api.taints("n00") == more, "it changed under our hands: nothing is written"
    world.api.before_patch = lambda name: None
    world.step({})
    assert world.api.taints("n00") == [more[0], more[2]]
    assert world.api.annotations("n00") == {"team": "a"}


def test_advice_writes_nothing_and_is_recorded_once(served: Any) -> None:
    world = World(*served, mode="advise")
    for i in range(5):
        world.step({"n00": Verdict(0.9 + i / 100, 0, 0, HOT.reason.replace("0.93", f"{0.9 + i / 100}"))})
    assert world.api.patches == []
    assert [(row["action"], row["node"], row["is_applied"]) for row in world.rows] == [("taint", "n00", False)]
    assert world.agent.in_words() == "1 nodes would be annotated, 1 would be tainted (mode advise)"
    annotating = World(*served, mode="annotate")
    annotating.step({"n00": HOT})
    assert (annotating.tainted(), annotating.api.annotations("n00")["weatherglass/trouble"]) == ([], "0.9")


def test_an_api_server_that_fails_is_said_and_asked_again(served: Any) -> None:
    world = World(*served)
    world.api.fails = 500
    world.step({"n00": HOT})
    assert world.agent.in_words() == f"{world.api.url} answers 500 Internal Server Error"
    world.api.fails = 0
    world.step({"n00": HOT})
    assert world.tainted() == ["n00"]
    world.api.nodes.pop("n39")
    world.api.before_patch = lambda name: world.api.nodes.pop("n00", None)
    world.step({})  # it vanished meanwhile
    assert world.agent.problem == ""


def test_without_a_record_nothing_is_marked_but_marks_are_taken_off(served: Any) -> None:
    world = World(*served)
    world.step({"n00": HOT})

    def refuse(row: dict[str, Any]) -> None:
        raise OSError("disk full")

    world.audit = refuse
    world.step({})
    assert world.tainted() == []
    world.step({"n10": HOT})
    assert (world.tainted(), "cannot be written" in world.agent.in_words()) == ([], True)
    world.audit = world.rows.append
    world.step({"n10": HOT})
    world.step({"n10": HOT})
    assert world.tainted() == ["n10"]


def test_no_access_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KubernetesError, match=r"kubeconfig .*/none"):
        KubernetesNodes(str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(KubernetesError, match=r"no kubernetes\.kubeconfig is set"):
        KubernetesNodes("")


def test_many_nodes_come_in_pages(tmp_path: Path) -> None:
    with api_server([f"n{i:04}" for i in range(1201)], tmp_path) as (_, config):
        assert len(KubernetesNodes(str(config)).nodes()) == 1201


def test_from_the_hints_api_to_the_node_and_back_by_the_command(served: Any, tmp_path: Path) -> None:
    api, config = served
    hot = bottleneck("b1", node="n00", probability=0.95, probabilities={"60": 0.95})
    publish(tmp_path / "s" / "published", bottlenecks=[hot], node_risks=[risk("n00")], ttl_s=300)
    with hints_server(tmp_path / "s" / "published", "alpha") as (url, _):
        with HintsClient(url) as client:
            foreseen = fetch_from(client, "alpha")()
        assert foreseen is not None
        assert foreseen["n00"].trouble == 0.95
        settings = tmp_path / "w.toml"
        port = url.rsplit(":", 1)[1]
        settings.write_text(
            f'state_dir = "{tmp_path}/s"\n[api]\nport = {port}\n[clusters.alpha]\ntelemetry = "trace"\n'
            f'telemetry_path = "/dev/null"\njobs = "none"\n[kubernetes]\nkubeconfig = "{config}"\n'
        )

        def call(*arguments: str) -> str:
            command = [sys.executable, "-m", "weatherglass", "--config", str(settings), "kubernetes-agent", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
            assert done.returncode == 0, done.stderr
            return done.stdout.strip()

        assert call("--once") == "alpha: 1 nodes would be annotated, 1 would be tainted (mode advise)"
        assert api.patches == []
        assert call("--once", "--mode", "taint") == "alpha: 1 nodes annotated, 1 tainted (mode taint)"
        assert api.taints("n00") == [TAINT]
        assert call("release") == "marks of 1 nodes were taken off"
        assert call("release") == "no node has a mark"
    lines = (tmp_path / "s" / "actions" / "alpha.jsonl").read_bytes().splitlines()
    rows = [msgspec.json.decode(line) for line in lines]
    assert [(row["action"], row["is_applied"]) for row in rows] == [
        ("taint", False),
        ("taint", True),
        ("release", True),
    ]
