"""From scores to hints: which bottlenecks are worth publishing, at which scope, under which lasting id.

Here belongs what becomes of hints from tick to tick; not the probabilities (`models/`), the hysteresis of single units
(`watches.py`), what they have in common (`causes.py`), what to do (`advice.py`) or the publishing (`nowcast.py`).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import numpy as np

from scheduler_hints.advice import advise, severity
from scheduler_hints.causes import Explanation, Group, Key
from scheduler_hints.reasons import expected_onset_s, reason
from scheduler_hints.schema import HORIZONS_S, Bottleneck, BottleneckClass, Scope
from scheduler_hints.scored import Alarm, Place, Scored
from scheduler_hints.watches import STALE_KEEP_S, SURE, IsKnown, Threshold, Watches

__all__ = ["Episodes", "Place", "Scored", "expected_onset_s"]

RESUMED_S = 60.0  # for this long after a restart hints are taken up by their scope
MAX_NODES = 512  # names of nodes in one hint; `members` counts all units


@dataclass(slots=True, eq=False)
class _Live:
    """A hint that stands. `units` are its members at the last tick, `set_since_s` since when its condition is set."""

    id: str
    since_s: float
    scope: str
    cause: Key
    units: set[str] = field(default_factory=set)
    set_since_s: float | None = None


class Episodes:
    """What is being foreseen at present, from tick to tick.

    Args:
        cluster: Name of the cluster.
        publish_probability: A bottleneck is published from this probability on.
        thresholds: Classes with a threshold of their own.
        stale_keep_s: How long a hint outlives the last fresh sample of its units, s.

    Attributes:
        worst: Id of each hint of the last `update` whose units are GPUs to the GPU on which it is likeliest.
    """

    def __init__(
        self,
        cluster: str,
        publish_probability: float = 0.5,
        *,
        thresholds: Mapping[str, Threshold] | None = None,
        stale_keep_s: float = STALE_KEEP_S,
    ) -> None:
        self.cluster = cluster
        self._common = Threshold(publish_probability, max(SURE, publish_probability))
        self._own = dict(thresholds or {})
        self.stale_keep_s = stale_keep_s
        self._watches: dict[BottleneckClass, Watches] = {}
        self._live: dict[str, list[_Live]] = defaultdict(list)
        self._resumed: dict[tuple[str, str, str], _Live] = {}
        self._resumed_until_s: float | None = None
        self.worst: dict[str, str] = {}

    def threshold(self, bottleneck_class: str) -> Threshold:
        """What it takes to publish a class."""
        return self._own.get(bottleneck_class, self._common)

    def resume(self, published: Iterable[Bottleneck]) -> None:
        """Take up the hints that a former run of this process published, so that their ids outlive a restart."""
        for hint in published:
            key = _key(hint, self.cluster)
            if key is not None:
                since_s = hint.since.timestamp() if hint.since is not None else math.inf
                live = _Live(hint.id, since_s, hint.scope, (hint.scope, key))
                self._resumed[hint.bottleneck_class, hint.scope, key] = live

    def update(self, now: datetime, scores: Iterable[Scored], place: Place) -> list[Bottleneck]:
        """The hints to publish at this tick, most probable first.

        Args:
            now: The moment.
            scores: One per class; a unit that is in none of them is looked up in `place`: with a fresh sample it is
                clear, without one it is not known.
            place: Look-up of places and jobs.
        """
        now_s = now.timestamp()
        if self._resumed and self._resumed_until_s is None:
            self._resumed_until_s = now_s + RESUMED_S
        elif self._resumed_until_s is not None and now_s >= self._resumed_until_s:
            self._resumed.clear()
        by_class = {scored.bottleneck_class: scored for scored in scores}
        hints: list[Bottleneck] = []
        self.worst = {}
        for name in [*by_class, *(name for name in self._watches if name not in by_class)]:
            watches = self._watches.setdefault(name, Watches(self.threshold(name)))
            alarms = watches.update(now_s, by_class.get(name), place, self._known(name, place), self.stale_keep_s)
            explanation = Explanation(
                name, alarms, place, {live.cause for live in self._live[name]}, self.cluster
            )  # fmt: skip
            self._live[name] = [] if not alarms else self._followed(name, now_s, explanation)
            for live, group in zip(self._live[name], explanation.groups, strict=True):
                hints.append(self._hint(live, group, explanation, now, place))
        return sorted(hints, key=lambda hint: (-hint.probability, hint.horizon_s, hint.id))

    def _known(self, name: str, place: Place) -> IsKnown | None:
        """Tells whether a unit was part of a hint before a restart; None when there was none."""
        if not self._resumed:
            return None
        resumed = self._resumed

        def is_known(key: str, node: str | None) -> bool:
            places: list[tuple[str, str | None]] = [
                ("gpu", key),
                ("link", key),
                ("queue", key),
                ("cluster", self.cluster),
            ]
            if node is not None:
                places += [("node", node), ("rack", place.rack(node)), ("pod", place.pod(node))]
                places += [("job", job) for job in place.node_jobs(node)]
            return any((name, scope, value) in resumed for scope, value in places)

        return is_known

    # --- ids ------------------------------------------------------------------------------------------------

    def _followed(self, name: str, now_s: float, explanation: Explanation) -> list[_Live]:
        """The lasting hint of each group: the oldest of those most of whose units went to it, else a new one."""
        groups = explanation.groups
        where = {alarm.key: number for number, group in enumerate(groups) for alarm in group.alarms}
        claims: dict[int, list[_Live]] = defaultdict(list)
        for live in self._live[name]:
            went = Counter(where[unit] for unit in live.units if unit in where)
            if went:
                claims[min(went, key=lambda number: (-went[number], number))].append(live)
        out = []
        for number, group in enumerate(groups):
            scope, key = _scope(group)
            before = min(claims[number], key=lambda live: (live.since_s, live.id), default=None)
            before = before or self._resumed.pop((name, scope, key), None)
            since_s = before.since_s if before is not None else math.inf
            if since_s == math.inf:  # new, or published by a version that did not tell
                since_s = min(alarm.since_s for alarm in group.alarms)
            hint_id = before.id if before is not None else self._new_id(name, scope, key, now_s)
            is_set = any(alarm.is_active for alarm in group.alarms)
            set_since_s = before.set_since_s if before is not None and before.set_since_s is not None else now_s
            units = {alarm.key for alarm in group.alarms}
            cause = (group.kind, group.key)
            out.append(_Live(hint_id, since_s, scope, cause, units, set_since_s if is_set else None))
        return out

    def _new_id(self, name: str, scope: str, key: str, now_s: float) -> str:
        text = "|".join((self.cluster, name, scope, key, repr(now_s)))
        return "bn-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    # --- one hint -------------------------------------------------------------------------------------------

    def _hint(
        self, live: _Live, group: Group, explanation: Explanation, now: datetime, place: Place
    ) -> Bottleneck:  # fmt: skip
        alarms, name, now_s = group.alarms, explanation.bottleneck_class, now.timestamp()
        worst = max(alarms, key=lambda alarm: alarm.highest)
        if worst.unit == "gpu":
            self.worst[live.id] = worst.key
        is_active = any(alarm.is_active for alarm in alarms)
        p = np.ones(len(HORIZONS_S))
        if not is_active:
            p = worst.scored.probabilities[worst.row]
            if len(alarms) > 1:
                p = np.max([alarm.scored.probabilities[alarm.row] for alarm in alarms], axis=0)
        first = int(np.flatnonzero(p >= min(self.threshold(name).publish, p[-1]))[0])
        onset = now + timedelta(seconds=max(expected_onset_s(p) - (now_s - worst.looked_s), 0.0))
        nodes = sorted({alarm.node for alarm in alarms if alarm.node is not None})
        racks, pods = ({of(node) for node in nodes} for of in (place.rack, place.pod))
        jobs = sorted({job for alarm in alarms for job in alarm.jobs})
        causes = explanation.causes(group)
        scope, key = _scope(group)
        kind = causes[0].kind if causes else group.kind
        advice = advise(name, scope, kind, is_active=is_active, has_job=bool(jobs))
        gpus = len(alarms) if explanation.unit == "gpu" else sum(place.node_gpus(node) for node in nodes)
        reasons = [_why(worst)]
        if len(alarms) > 1:
            reasons.insert(0, _together(scope, alarms, nodes, place))
        return Bottleneck(
            id=live.id,
            cluster=self.cluster,
            bottleneck_class=name,
            scope=scope,
            node=nodes[0] if len(nodes) == 1 and scope in ("gpu", "link", "node", "job") else None,
            gpu_uuid=key if scope == "gpu" else None,
            rack=racks.pop() if len(racks) == 1 else None,
            pod=pods.pop() if len(pods) == 1 else None,
            horizon_s=HORIZONS_S[first],
            probability=round(float(p[first]), 4),
            probabilities={str(h): round(float(value), 4) for h, value in zip(HORIZONS_S, p, strict=True)},
            expected_onset=None if is_active else onset,
            is_active=is_active,
            job_ids=jobs,
            action=advice.action,
            reasons=reasons,
            model_version=worst.scored.model_version,
            since=datetime.fromtimestamp(live.since_s, UTC),
            severity=severity(
                name,
                scope,
                probability=float(p[-1]),
                is_active=is_active,
                active_for_s=now_s - live.set_since_s if live.set_since_s is not None else 0.0,
                nodes=len(nodes),
                gpus=gpus,
                gang_ratio=len(alarms) / explanation.size("job", key) if scope == "job" else 0.0,
            ),
            members=len(alarms),
            nodes=nodes[:MAX_NODES],
            unit=key if scope in ("link", "queue") else None,
            causes=causes,
            advice=advice.words,
        )


def _scope(group: Group) -> tuple[Scope, str]:
    """Where a hint stands: its cause, but for a job that is touched on one node only."""
    if group.kind != "job":
        return group.kind, group.key
    nodes = {alarm.node for alarm in group.alarms}
    if len(nodes) == 1 and (node := next(iter(nodes))) is not None:
        return "node", node
    return "job", group.key


def _key(hint: Bottleneck, cluster: str) -> str | None:
    """Name of what a published hint is about."""
    named = {
        "gpu": hint.gpu_uuid, "node": hint.node, "rack": hint.rack, "pod": hint.pod, "cluster": cluster,
        "link": hint.unit, "queue": hint.unit, "job": hint.causes[0].id if hint.causes else None,
    }  # fmt: skip
    return named.get(hint.scope)


def _why(alarm: Alarm) -> str:
    if alarm.scored.reasons:
        return alarm.scored.reasons[alarm.row]
    if alarm.scored.block is None:
        return "set now" if alarm.is_active else f"probability {alarm.highest:.0%}"
    return reason(alarm.scored.block, alarm.row, is_active=alarm.is_active)


def _together(scope: str, alarms: list[Alarm], nodes: list[str], place: Place) -> str:
    where = ", ".join(nodes[:8]) + (" …" if len(nodes) > 8 else "")
    units = {"gpu": "GPUs", "link": "ports", "node": "nodes", "queue": "queues"}[alarms[0].unit]
    of = f" of {place.node_gpus(nodes[0])}" if scope == "node" and alarms[0].unit == "gpu" else ""
    return f"{len(alarms):,}{of} {units} together on {where}" if where else f"{len(alarms):,} {units} together"
