"""The Kubernetes agent: writes what is foreseen to nodes, as annotations and, where the operator wants it, as taints.

Here belong its decisions; how nodes are read and written stands in `kubernetes_nodes.py`, what is foreseen of a node in
`extender.py`. It cordons nothing, evicts nothing and touches no pod. A taint does not end by itself as a Slurm lease
does: so whatever is not foreseen any more, or not known any more, is taken off at the next round.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from scheduler_hints.client import HintsClient, HintsError
from scheduler_hints.extender import Verdict, verdict_of, verdicts
from scheduler_hints.kubernetes_nodes import ConflictError, KubernetesError, Node, NodeApi
from scheduler_hints.schema import Bottleneck, NodeRisk
from scheduler_hints.slurm_audit import Ledger

log = logging.getLogger(__name__)

Mode = Literal["advise", "annotate", "taint"]
PREFIX = "weatherglass/"
TAINT = PREFIX + "trouble"
ANNOTATIONS = (PREFIX + "trouble", PREFIX + "fault-24h", PREFIX + "reason")
MAX_WRITES = 100  # in a round; the rest waits for the next
KEPT_RATIO = 0.5  # a taint stays until the probability has fallen to this share of what set it


@dataclass(frozen=True, slots=True)
class Marks:
    """What is written to nodes, and to how many.

    Attributes:
        annotate_probability: Of trouble now or a fault within 24 h, from which on a node is annotated.
        taint_probability: Of trouble now or a fault within 1 h, from which on a node is tainted.
        taint_effect: `PreferNoSchedule` or `NoSchedule`.
        max_nodes_ratio: Share of all nodes that may be tainted; one node always may, unless it is 0.
    """

    annotate_probability: float = 0.1
    taint_probability: float = 0.8
    taint_effect: str = "PreferNoSchedule"
    max_nodes_ratio: float = 0.05


def fetch_from(client: HintsClient, cluster: str) -> Callable[[], dict[str, Verdict] | None]:
    """A function that asks the hints API what is foreseen of each node; None: nothing that may be acted on."""

    def fetch() -> dict[str, Verdict] | None:
        try:
            answers = [client.bottlenecks(cluster=cluster), client.node_risks(cluster=cluster)]
        except HintsError as error:
            log.error("the hints API refuses to answer: %s", error)
            return None
        fresh = [answer if answer.is_fresh and cluster not in answer.stale_shards else None for answer in answers]
        if fresh[0] is None and fresh[1] is None:
            return None
        try:
            hints = msgspec.convert(fresh[0].items if fresh[0] else [], list[Bottleneck])
            risks = msgspec.convert(fresh[1].items if fresh[1] else [], list[NodeRisk])
        except msgspec.ValidationError as error:
            log.error("the hints API answers with what are no hints: %s", error)
            return None
        return verdicts(hints, risks)

    return fetch


class KubernetesAgent:
    """Keeps the marks of one cluster's nodes as they should be.

    Args:
        cluster: Name of the cluster.
        fetch: Gives what is foreseen of each node, or None.
        api: Reads and writes nodes.
        mode: `advise` writes nothing, `annotate` annotations, `taint` both.
        ledger: Record of what was done or would have been.
        marks: What is written.
    """

    def __init__(
        self,
        cluster: str,
        fetch: Callable[[], dict[str, Verdict] | None],
        api: NodeApi,
        ledger: Ledger,
        *,
        mode: Mode = "advise",
        marks: Marks | None = None,
    ) -> None:
        self.cluster, self.mode = cluster, mode
        self._fetch, self._api, self._ledger = fetch, api, ledger
        self._marks = marks or Marks()
        self.problem = ""
        self.tainted: list[str] = []
        self.annotated = 0

    def step(self) -> None:
        """One round."""
        self._ledger.flush()
        foreseen = self._fetch()
        if foreseen is None:
            self._ledger.say("hints", "no-hints", "no hints that may be acted on: every mark is taken off")
        elif self._ledger.forget("hints"):
            self._ledger.put("hints-back", is_applied=False, reason="hints may be acted on again")
        try:
            nodes = self._api.nodes()
        except KubernetesError as error:
            self._fail(error)
            return
        self._write(nodes, foreseen or {})

    def release(self) -> int:
        """Take every mark of ours off, whatever the mode; returns from how many nodes.

        Raises:
            KubernetesError: Nodes cannot be read, or one of them cannot be written.
        """
        count = 0
        for node in self._api.nodes():
            if _own(node) or _is_tainted(node):
                self._api.patch(node, dict.fromkeys(_own(node)), _others(node))
                self._ledger.put("release", is_applied=True, reason="asked for", nodes=frozenset({node.name}))
                count += 1
        return count

    def in_words(self) -> str:
        """How it stands, in a line."""
        if self.problem:
            return self.problem
        would = "would be " if self.mode == "advise" else ""
        taints = f", {len(self.tainted)} {would}tainted" if self.mode != "annotate" else ""
        return f"{self.annotated} nodes {would}annotated{taints} (mode {self.mode})"

    # --- one round ------------------------------------------------------------------------------------------

    def _write(self, nodes: list[Node], foreseen: Mapping[str, Verdict]) -> None:
        known = {node.name: verdict_of(foreseen, node.name) for node in nodes}
        bad = self._bad(nodes, known) if self.mode != "annotate" else set()
        self.tainted = sorted(bad)
        wanted = {node.name: self._annotations(known[node.name]) for node in nodes}
        self.annotated = sum(map(bool, wanted.values()))
        changed = [
            node
            for node in nodes
            if _own(node) != wanted[node.name] or _taint(node) != (self._taint() if node.name in bad else None)
        ]
        # What is to be taken off comes first: nodes must not wait for work because others are written.
        changed.sort(key=lambda node: (bool(wanted[node.name]), node.name))
        self.problem = ""
        self._ledger.keep({"hints", *(node.name for node in changed)})
        for node in changed[:MAX_WRITES]:
            verdict = known[node.name]
            taint = self._taint() if node.name in bad else None
            action = "taint" if taint is not None else "annotate" if wanted[node.name] else "release"
            reason = verdict.reason or verdict.kind if verdict else "nothing is foreseen of it"
            nodes_of = frozenset({node.name})
            if self.mode == "advise":
                self._ledger.say(node.name, action, verdict.kind if verdict else reason, nodes=nodes_of)
                continue
            if self._ledger.is_behind and action != "release":
                self.problem = "the record of actions cannot be written: nothing is marked meanwhile"
                continue
            gone = {name: None for name in _own(node) if name not in wanted[node.name]}
            try:
                self._api.patch(node, gone | wanted[node.name], _others(node) + ([taint] if taint else []))
            except ConflictError:
                continue  # somebody else wrote to it just now: the next round sees what
            except KubernetesError as error:
                self._fail(error)
                return
            self._ledger.put(action, is_applied=True, reason=reason, nodes=nodes_of)

    def _bad(self, nodes: list[Node], known: Mapping[str, Verdict | None]) -> set[str]:
        """Nodes to taint: the likeliest, few, and one of a rack at a time; those that stand keep their place."""
        marks = self._marks
        most = max(int(marks.max_nodes_ratio * len(nodes)), 1) if marks.max_nodes_ratio > 0 else 0
        candidates = []
        for node in nodes:
            verdict, stands = known[node.name], _is_tainted(node)
            if verdict is None or (node.is_cordoned and not stands):
                continue
            if verdict.worst >= marks.taint_probability * (KEPT_RATIO if stands else 1.0):
                candidates.append((not stands, -verdict.worst, node.name, node.rack))
        chosen: set[str] = set()
        racks: set[str] = set()
        for _, _, name, rack in sorted(candidates, key=lambda one: one[:3]):
            if len(chosen) < most and (rack is None or rack not in racks):
                chosen.add(name)
                racks |= {rack} - {None}  # ty: ignore[unsupported-operator]
        return chosen

    def _annotations(self, verdict: Verdict | None) -> dict[str, str]:
        """Annotations of a node, told in tenths so that they seldom change."""
        least = self._marks.annotate_probability
        if verdict is None or max(verdict.trouble, verdict.fault_24h) < least:
            return {}
        values = (f"{verdict.trouble:.1f}", f"{verdict.fault_24h:.1f}", verdict.kind)
        return dict(zip(ANNOTATIONS, values, strict=True))

    def _taint(self) -> dict[str, str]:
        return {"key": TAINT, "value": "foreseen", "effect": self._marks.taint_effect}

    def _fail(self, error: KubernetesError) -> None:
        self.problem = str(error)
        self._ledger.say("api", "error", str(error))


def _own(node: Node) -> dict[str, str]:
    return {name: value for name, value in node.annotations.items() if name in ANNOTATIONS}


def _taint(node: Node) -> dict[str, str] | None:
    mine = [taint for taint in node.taints if taint.get("key") == TAINT]
    return {name: str(mine[0].get(name, "")) for name in ("key", "value", "effect")} if mine else None


def _is_tainted(node: Node) -> bool:
    return _taint(node) is not None


def _others(node: Node) -> list[dict]:
    return [taint for taint in node.taints if taint.get("key") != TAINT]


def run(agent: KubernetesAgent, period_s: float, stop: threading.Event) -> None:
    """Rounds until told to stop. Marks stay then: another agent, or `release`, takes them off."""
    while not stop.is_set():
        agent.step()
        stop.wait(period_s)
