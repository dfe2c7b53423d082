"""What a Kubernetes scheduler is answered: which of its candidate nodes to pass, and how much it should like each.

Here belong the wire types of the scheduler extender (`k8s.io/kube-scheduler/extender/v1`, whose fields have no JSON
tags: Go writes them as `NodeNames` and reads them in any case) and the judgement of nodes; the routes stand in
`extender_routes.py`. Pure. A node that nothing is known of is passed and liked as well as any.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec

from scheduler_hints.errors import BadRequestError
from scheduler_hints.offers import may_act
from scheduler_hints.plan_needs import NODE_WORDS
from scheduler_hints.schema import Bottleneck, NodeRisk, Window

MAX_SCORE = 10  # `MaxExtenderPriority` of kube-scheduler
_FIT_SCORE = 3  # of it, for a node whose window holds the pod; where the length of the pod is known
RUNTIME_ANNOTATION = "weatherglass/expected-runtime-s"
# What a node does to whatever is put there. Device memory runs out by a job's own doing.
_WORDS = NODE_WORDS | {"host_memory": "host memory running out"}
_FAULT = "a hardware fault"
_NOTHING = (0.0, "", _FAULT)


@dataclass(frozen=True, slots=True)
class ExtenderConfig:
    """When a node is refused.

    Attributes:
        filter_probability: A node with trouble or a fault of at least this probability is refused; 1: only where the
            trouble is there already.
        filter_max_ratio: At most this share of the candidates is refused, the likeliest first; never all of them.
        guard_s: What a window must be longer than the pod, s.
    """

    filter_probability: float = 0.8
    filter_max_ratio: float = 0.25
    guard_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is foreseen of one node: probability of trouble within minutes, of a fault within 1 h and 24 h, and why.

    `kind` is what is likeliest, in words that stay while numbers change.
    """

    trouble: float = 0.0
    fault_1h: float = 0.0
    fault_24h: float = 0.0
    reason: str = ""
    kind: str = _FAULT

    @property
    def worst(self) -> float:
        """What speaks against putting something there now."""
        return max(self.trouble, self.fault_1h)

    @property
    def safety(self) -> float:
        """Probability that a pod finds neither trouble now nor a fault within a day, as if both came independently."""
        return (1 - self.trouble) * (1 - self.fault_24h)


@dataclass(frozen=True, slots=True)
class ExtenderArgs:
    """What kube-scheduler sends with every verb.

    Attributes:
        names: Candidate nodes.
        nodes: The candidates whole, by name, where the extender is not `nodeCacheCapable`; else None.
        node_list: Fields of the list that they came in, without `items`.
        runtime_s: How long the pod will run, where it says so, s.
    """

    names: list[str]
    nodes: dict[str, msgspec.Raw] | None
    node_list: Mapping[str, msgspec.Raw]
    runtime_s: float | None


class _Meta(msgspec.Struct):
    name: str = ""
    annotations: dict[str, str] | None = None


class _Spec(msgspec.Struct):
    activeDeadlineSeconds: float | None = None  # noqa: N815 - as Kubernetes writes it


class _Object(msgspec.Struct):
    metadata: _Meta = msgspec.field(default_factory=_Meta)
    spec: _Spec = msgspec.field(default_factory=_Spec)


class _Named(msgspec.Struct):
    metadata: _Meta


class HostPriority(msgspec.Struct, rename={"host": "Host", "score": "Score"}):
    """How much a node is liked, 0 to 10."""

    host: str
    score: int


class FilterResult(
    msgspec.Struct,
    rename={
        "nodes": "Nodes", "node_names": "NodeNames", "failed_nodes": "FailedNodes",
        "failed_and_unresolvable_nodes": "FailedAndUnresolvableNodes", "error": "Error",
    },
):  # fmt: skip
    """`ExtenderFilterResult`. `error` is always empty: an error would fail the pod."""

    nodes: dict[str, Any] | None
    node_names: list[str] | None
    failed_nodes: dict[str, str] = {}
    failed_and_unresolvable_nodes: dict[str, str] = {}
    error: str = ""


_args = msgspec.json.Decoder(dict[str, msgspec.Raw])
_names = msgspec.json.Decoder(list[str] | None)
_list = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)
_items = msgspec.json.Decoder(list[msgspec.Raw] | None)
_named = msgspec.json.Decoder(_Named)
_pod = msgspec.json.Decoder(_Object | None)


def decode_args(body: bytes) -> ExtenderArgs:
    """Decode `ExtenderArgs`.

    Raises:
        BadRequestError: It is not JSON, or names no candidates in either way.
    """
    try:
        fields = {name.lower(): raw for name, raw in _args.decode(body).items()}
        names = _names.decode(fields["nodenames"]) if "nodenames" in fields else None
        whole = _list.decode(fields["nodes"]) if "nodes" in fields else None
        runtime_s = _runtime_s(fields.get("pod"))
        if names is not None:
            return ExtenderArgs(names, None, {}, runtime_s)
        if whole is not None:
            given = {name: raw for name, raw in whole.items() if name.lower() != "items"}
            items = next((_items.decode(raw) for name, raw in whole.items() if name.lower() == "items"), None) or []
            nodes = {_named.decode(raw).metadata.name: raw for raw in items}
            return ExtenderArgs(list(nodes), nodes, given, runtime_s)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError("bad_body", f"the body is no ExtenderArgs of kube-scheduler: {error}") from None
    words = "the body is no ExtenderArgs of kube-scheduler: it has neither NodeNames nor Nodes"
    raise BadRequestError("bad_body", words, {"fields": sorted(fields), "valid": ["Pod", "Nodes", "NodeNames"]})


def _runtime_s(raw: msgspec.Raw | None) -> float | None:
    """How long a pod says it will run: its annotation, else its deadline. What cannot be read says nothing."""
    if raw is None:
        return None
    try:
        pod = _pod.decode(raw)
    except msgspec.DecodeError:
        return None
    if pod is None:
        return None
    said = (pod.metadata.annotations or {}).get(RUNTIME_ANNOTATION)
    try:
        value = float(said) if said is not None else pod.spec.activeDeadlineSeconds
    except ValueError:
        value = pod.spec.activeDeadlineSeconds
    return value if value is not None and 0 < value < 1e9 else None


def verdicts(hints: Iterable[Bottleneck], risks: Iterable[NodeRisk]) -> dict[str, Verdict]:
    """What is foreseen of each node that anything is foreseen of.

    Hints that are silenced, held out, or leave no time to act count for nothing.
    """
    trouble: dict[str, tuple[float, str, str]] = {}
    for hint in hints:
        if hint.bottleneck_class not in _WORDS or hint.action == "none" or not may_act(hint):
            continue
        p = 1.0 if hint.is_active else hint.probability
        when = "now" if hint.is_active else f"within {hint.horizon_s} s with probability {p:.2f}"
        kind = _WORDS[hint.bottleneck_class]
        for node in {*hint.nodes, hint.node} - {None}:
            assert node is not None
            if p > trouble.get(node, _NOTHING)[0]:
                trouble[node] = (p, f"{kind} {when} (hint {hint.id})", kind)
    out = {node: Verdict(trouble=p, reason=words, kind=kind) for node, (p, words, kind) in trouble.items()}
    for risk in risks:
        p, words, kind = trouble.get(risk.node, _NOTHING)
        if risk.p_1h > p:
            words, kind = f"{_FAULT} within 1 h with probability {risk.p_1h:.2f} (node risk)", _FAULT
        out[risk.node] = Verdict(p, risk.p_1h, risk.p_24h, words, kind)
    return out


def ends_of_windows(windows: Iterable[Window], now: datetime) -> dict[str, datetime | None]:
    """Until when each node is free from now on; None: nothing bounds it."""
    return {node: window.end for window in windows if window.start <= now for node in window.nodes}


def filtered(args: ExtenderArgs, foreseen: Mapping[str, Verdict], config: ExtenderConfig) -> FilterResult:
    """Pass the candidates but those in trouble."""
    bad = [
        (verdict.worst, name)
        for name in args.names
        if (verdict := verdict_of(foreseen, name)) is not None and verdict.worst >= config.filter_probability
    ]
    most = min(int(config.filter_max_ratio * len(args.names)), len(args.names) - 1)
    refused = {name for _, name in heapq.nlargest(max(most, 0), bad)}
    failed = {name: f"Weatherglass: {(verdict_of(foreseen, name) or Verdict()).reason}" for name in sorted(refused)}
    passed = [name for name in args.names if name not in refused] if refused else args.names
    if args.nodes is None:
        return FilterResult(None, passed, failed)
    return FilterResult({**args.node_list, "items": [args.nodes[name] for name in passed]}, None, failed)


def prioritized(
    args: ExtenderArgs,
    foreseen: Mapping[str, Verdict],
    free_until: Mapping[str, datetime | None],
    now: datetime,
    config: ExtenderConfig,
) -> list[HostPriority]:
    """Like each candidate by how safe it is, and where the pod's length is known by whether its window holds it.

    Equal scores say nothing to kube-scheduler, so that candidates of which nothing is known stay as they are.
    """
    if args.runtime_s is None:
        safe = [HostPriority(name, MAX_SCORE) for name in args.names]
        for priority in safe:
            verdict = verdict_of(foreseen, priority.host)
            if verdict is not None:
                priority.score = round(MAX_SCORE * verdict.safety)
        return safe
    until = now + timedelta(seconds=args.runtime_s + config.guard_s)
    out = []
    for name in args.names:
        verdict = verdict_of(foreseen, name)
        safety = verdict.safety if verdict is not None else 1.0
        end = free_until.get(name, now)
        score = (MAX_SCORE - _FIT_SCORE) * safety + (_FIT_SCORE if end is None or end >= until else 0)
        out.append(HostPriority(name, round(score)))
    return out


def verdict_of(foreseen: Mapping[str, Verdict], name: str) -> Verdict | None:
    """What is foreseen of a node, under its name or, where telemetry has short names, its first part."""
    found = foreseen.get(name)
    return found if found is not None or "." not in name else foreseen.get(name.partition(".")[0])


def all_passed(args: ExtenderArgs) -> FilterResult:
    """The answer of one who knows nothing: every candidate."""
    return filtered(args, {}, ExtenderConfig())


def no_preference(names: Sequence[str]) -> list[HostPriority]:
    """The answer of one who knows nothing: all alike."""
    return [HostPriority(name, 0) for name in names]
