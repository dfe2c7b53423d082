"""What explains alarms that come together: one hot aisle instead of 400 GPUs, a gang instead of its 64 nodes.

A cause is charged for being rare and for every unit it should have touched and did not; alarms that no common cause
explains more cheaply stay apart. Charges are negative logarithms (nats): the rarity below, plus what it takes to say
which k of the n units of the cause are alarms, log((n + 1) · C(n, k)), which is little when nearly all are and grows
with those that are not; or, where that is less, which of its racks, nodes and units one after the other. No hysteresis
and no ids here; words of causes stand in `cause_words.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from scheduler_hints.cause_words import evidence
from scheduler_hints.schema import BottleneckClass, Cause, Scope
from scheduler_hints.scored import Alarm, Place

Kind = Scope  # of causes: what they are named after
# How rare a cause is at work at one moment, −log of an assumed share. A kind that is absent explains no such alarms.
RARITY: dict[str, dict[Kind, float]] = {
    "thermal_throttle": {"gpu": 9.2, "node": 11.5, "rack": 11.9, "pod": 14.0, "cluster": 16.0, "job": 13.5},
    "power_throttle": {"gpu": 10.0, "node": 10.5, "rack": 11.5, "pod": 13.0, "cluster": 15.0, "job": 13.5},
    "nvlink_saturation": {"gpu": 9.2, "node": 11.5, "job": 8.5},
    "memory_exhaustion": {"gpu": 9.0, "node": 13.0, "job": 9.0},
    "straggler": {"gpu": 9.0, "node": 10.5, "rack": 13.0, "job": 11.0},
    "fabric_congestion": {"link": 9.2, "node": 10.5, "rack": 11.5, "pod": 12.5, "cluster": 14.5, "job": 9.5},
    "host_memory": {"node": 9.2, "job": 9.5},
    "shortage": {"queue": 5.0},
}
OTHER: dict[Kind, float] = {"gpu": 9.0, "link": 9.0, "queue": 9.0, "node": 11.0, "rack": 12.0, "pod": 13.5,
                            "cluster": 15.5, "job": 11.0}  # fmt: skip
TREE: tuple[Kind, ...] = ("node", "rack", "pod", "cluster")  # each lies within the next
BELOW: dict[str, tuple[Kind, ...]] = {"cluster": ("pod", "rack", "node"), "pod": ("rack", "node"), "rack": ("node",),
                                      "job": ("node",)}  # fmt: skip
# Air, power and switches touch at least this share of what hangs on them.
LEAST_RATIO: dict[Kind, float] = {"rack": 0.2, "pod": 0.4, "cluster": 0.5}
STICKY = 6.0  # a cause that stands is believed until another is this much cheaper
AIR = 3.0  # what warm air, or air that is no warmer than elsewhere, says for or against a rack or pod
WARM_K, COOL_K = 4.0, 1.5
AIR_CLASSES = frozenset({"thermal_throttle"})
RUNNERS_UP = 7.0  # causes dearer than the first by more than this are not told
MAX_CAUSES = 4

Key = tuple[Kind, str]


@dataclass(slots=True)
class Group:
    """Alarms with one cause in common. `kind` and `key` name the cause, `charge` is what the explanation costs."""

    kind: Kind
    key: str
    alarms: list[Alarm]
    charge: float


@lru_cache(maxsize=65_536)
def which(n: int, k: int) -> float:
    """Nats to say which k of n units are alarms, when any share of them is as likely as any other."""
    return math.log(n + 1) + math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


class Explanation:
    """Alarms of one class at one moment, grouped by what explains them at least charge.

    Args:
        bottleneck_class: The class.
        alarms: All its alarms, of one kind of unit.
        place: Look-up of places and jobs.
        standing: Causes of hints that stand.
        cluster: Name of the cluster.
    """

    def __init__(
        self,
        bottleneck_class: BottleneckClass,
        alarms: Sequence[Alarm],
        place: Place,
        standing: Iterable[Key] = (),
        cluster: str = "",
    ) -> None:
        self.bottleneck_class = bottleneck_class
        self.cluster = cluster
        self.rarity: Mapping[Kind, float] = RARITY.get(bottleneck_class, OTHER)
        self.place = place
        self.standing = frozenset(standing)
        self.unit: Kind = alarms[0].unit if alarms else "gpu"
        self.alone = self.rarity.get(self.unit, OTHER[self.unit]) + which(1, 1)
        self.keys: dict[str, dict[Kind, str]] = {}
        self.members: dict[Key, list[Alarm]] = defaultdict(list)
        self._whole: dict[Key, float] = {}
        for alarm in alarms:
            mine = self.keys[alarm.key] = self._keys(alarm)
            for item in mine.items():
                self.members[item].append(alarm)
        self.groups = self._grouped(alarms)

    def _keys(self, alarm: Alarm) -> dict[Kind, str]:
        """Causes that could lie behind an alarm; a place that is not known is none."""
        found: dict[Kind, str | None] = {alarm.unit: alarm.key}
        if alarm.node is not None:
            place, node = self.place, alarm.node
            found |= {"node": node, "rack": place.rack(node), "pod": place.pod(node), "cluster": self.cluster}
        if len(alarm.jobs) == 1:  # of several jobs on a node none can be blamed
            found["job"] = alarm.jobs[0]
        return {
            kind: key for kind, key in found.items() if key is not None and (kind in self.rarity or kind == alarm.unit)
        }

    def size(self, kind: Kind, key: str) -> int:
        """Units that a cause could have touched: GPUs with work, nodes that answer."""
        if kind in ("gpu", "link", "queue") or self.unit == kind:
            return 1
        here = len(self.members.get((kind, key), ()))
        if self.unit == "gpu":
            return max(self.place.gpus_at_work(kind, key), here)
        return max(self.place.nodes_up(kind, key), here)

    def charge(self, kind: Kind, key: str, alarms: Sequence[Alarm]) -> float:
        """Nats that a cause costs as the explanation of some of its units."""
        if kind == self.unit:
            return self.alone
        size = self.size(kind, key)
        if len(alarms) < LEAST_RATIO.get(kind, 0.0) * size:
            return math.inf
        charge = self.rarity[kind] + self._code(kind, key, alarms, size) - self._air(kind, key)
        return charge - (STICKY if (kind, key) in self.standing else 0.0)

    def _code(self, kind: Kind, key: str, alarms: Sequence[Alarm], size: int) -> float:
        """Nats to say which units of a place are alarms: all at once, or part by part where they come in clusters."""
        flat = which(size, len(alarms))
        within: dict[Key, list[Alarm]] = defaultdict(list)
        for alarm in alarms:
            mine = self.keys[alarm.key]
            part = next((below for below in BELOW.get(kind, ()) if below in mine), None)
            if part is None or part == self.unit:
                return flat
            within[part, mine[part]].append(alarm)
        if not within or len(alarms) < 2:
            return flat
        parts = max(self.place.parts(kind, key), len(within))
        nested = which(parts, len(within))
        for (part, name), some in within.items():
            nested += self._code(part, name, some, max(min(self.size(part, name), size), len(some)))
        return min(flat, nested)

    def whole(self, kind: Kind, key: str) -> float:
        """Charge of a cause for all alarms there."""
        known = self._whole.get((kind, key))
        if known is None:
            known = self._whole[kind, key] = self.charge(kind, key, self.members[kind, key])
        return known

    def air_k(self, kind: Kind, key: str) -> float | None:
        """How much warmer the air of a rack or pod is than elsewhere, K; None where it is not known or no matter."""
        if self.bottleneck_class not in AIR_CLASSES or kind not in ("rack", "pod"):
            return None
        return self.place.air_excess_k(kind, key)

    def _air(self, kind: Kind, key: str) -> float:
        excess = self.air_k(kind, key)
        if excess is None:
            return 0.0
        return AIR if excess >= WARM_K else -AIR if excess < COOL_K else 0.0

    # --- grouping -------------------------------------------------------------------------------------------

    def _grouped(self, alarms: Sequence[Alarm]) -> list[Group]:
        apart = [Group(self.unit, alarm.key, [alarm], self.alone) for alarm in alarms]
        groups = self._nested(apart)
        if "job" not in self.rarity:
            return groups
        jobs = sorted(
            ((len(members), key) for (kind, key), members in self.members.items() if kind == "job"),
            key=lambda found: (-found[0], found[1]),
        )
        owner = {alarm.key: group for group in groups for alarm in group.alarms}
        taken: list[Group] = []
        for count, job in jobs:
            if count < 2:
                break
            members = self.members["job", job]
            charge = self.whole("job", job)
            touched = {id(owner[alarm.key]): owner[alarm.key] for alarm in members}
            if sum(group.charge for group in touched.values()) <= charge:
                continue
            mine = {alarm.key for alarm in members}
            left = {name: [a for a in group.alarms if a.key not in mine] for name, group in touched.items()}
            rest = sum(self._left(touched[name], some) for name, some in left.items())
            if sum(group.charge for group in touched.values()) - rest > charge:
                taken.append(Group("job", job, members, charge))
                for name, some in left.items():
                    touched[name].alarms, touched[name].charge = some, self._left(touched[name], some)
        if not taken:
            return groups
        blamed = {alarm.key for group in taken for alarm in group.alarms}
        return taken + self._nested([group for group in apart if group.key not in blamed])

    def _left(self, group: Group, alarms: Sequence[Alarm]) -> float:
        """Charge of what is left of a group."""
        if not alarms:
            return 0.0
        if group.kind == self.unit:
            return self.alone
        return min(self.charge(group.kind, group.key, alarms), len(alarms) * self.alone)

    def _nested(self, groups: list[Group]) -> list[Group]:
        """Merge from nodes upwards wherever the wider cause is cheaper than those within it: the best of all ways."""
        for kind in TREE:
            if kind not in self.rarity or kind == self.unit:
                continue
            within: dict[str, list[Group]] = defaultdict(list)
            out: list[Group] = []
            for group in groups:
                key = self.keys[group.alarms[0].key].get(kind)
                (within[key] if key is not None else out).append(group)
            for key, parts in within.items():
                alarms = [alarm for part in parts for alarm in part.alarms]
                if len(alarms) < 2:
                    out += parts
                    continue
                charge = self.charge(kind, key, alarms)
                if charge < sum(part.charge for part in parts):
                    out.append(Group(kind, key, alarms, charge))
                else:
                    out += parts
            groups = out
        return groups

    # --- ranking --------------------------------------------------------------------------------------------

    def causes(self, group: Group) -> list[Cause]:
        """What could lie behind a group, the likeliest first, with evidence in words."""
        count = len(group.alarms)
        touched: dict[Key, int] = defaultdict(int)
        for alarm in group.alarms:
            for item in self.keys[alarm.key].items():
                if item[0] != self.unit or count == 1:
                    touched[item] += 1
        # A wider cause is not worse for alarms that belong to other groups: those cost it nothing here.
        ranked = [
            (self.whole(kind, key) + (count - here) * self.alone, kind, key)
            for (kind, key), here in touched.items()
            if here >= 0.5 * count and len(self.members[kind, key]) > 1 and (kind, key) != (group.kind, group.key)
        ]
        own = (group.kind, group.key)
        ranked = [(group.charge, *own), *sorted(found for found in ranked if found[0] < math.inf)]
        everywhere = len(self.keys)
        out = []
        for total, kind, key in ranked[:MAX_CAUSES]:
            if total - group.charge > RUNNERS_UP:
                break
            hit, size = len(self.members[kind, key]), self.size(kind, key)
            out.append(
                Cause(
                    kind=kind,
                    id=key,
                    share_explained=round(touched[kind, key] / count, 4),
                    share_affected=round(hit / size, 4),
                    evidence=evidence(
                        self.bottleneck_class, self.unit, kind, key, hit, size, everywhere - hit, self.air_k(kind, key)
                    ),
                )
            )
        return out
