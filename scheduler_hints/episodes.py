"""From scores to hints: which bottlenecks are worth publishing, at which scope, under which lasting id.

Here belong hysteresis, merging of correlated GPUs into their node or rack, reasons in words and suggested actions; not
the probabilities (`models/`) and not the publishing (`scheduler_hints/nowcast.py`).
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from features.windows import FeatureBlock
from scheduler_hints.schema import HORIZONS_S, Action, Bottleneck, BottleneckClass, Scope

KEEP_RATIO = 0.6  # a hint stays until its probability falls under this share of what it took to publish it
NODE_SHARE = 0.5  # this share of a node's GPUs makes it the node's trouble
NODE_KEEP_SHARE = 0.25  # and it stays the node's until fewer than this are left
RACK_NODES = 2
# A rack is a common cause only of what its GPUs share: the air. Links and memory belong to the node and the job.
RACK_CLASSES = frozenset({"thermal_throttle"})


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of one class at one tick.

    Attributes:
        bottleneck_class: The class.
        block: Features of the GPUs that were looked at.
        probabilities: Shape (rows, len(HORIZONS_S)).
        is_active: The condition is set already, shape (rows,).
        model_version: Of the forecaster.
    """

    bottleneck_class: BottleneckClass
    block: FeatureBlock
    probabilities: NDArray[np.float64]
    is_active: NDArray[np.bool_]
    model_version: str


class Place(Protocol):
    """Where a GPU is and whose it is."""

    def uuid(self, gpu: int) -> str: ...
    def node(self, gpu: int) -> str: ...
    def jobs(self, gpu: int) -> Sequence[str]: ...
    def node_gpus(self, node: str) -> int: ...
    def rack(self, node: str) -> str | None: ...
    def pod(self, node: str) -> str | None: ...


class Episodes:
    """What is being foreseen at present, from tick to tick.

    Args:
        cluster: Name of the cluster.
        publish_probability: A bottleneck is published from this probability on.
    """

    def __init__(self, cluster: str, publish_probability: float = 0.5) -> None:
        self.cluster = cluster
        self.publish_probability = publish_probability
        self._gpus: dict[str, set[str]] = {}
        self._ids: dict[tuple[str, str, str], str] = {}

    def resume(self, published: Iterable[Bottleneck]) -> None:
        """Take up the ids of hints that a former run of this process published, so that they outlive a restart."""
        for hint in published:
            key = hint.gpu_uuid if hint.scope == "gpu" else hint.node if hint.scope == "node" else hint.rack
            if key is not None:
                self._ids[hint.bottleneck_class, hint.scope, key] = hint.id
                if hint.scope == "gpu":
                    self._gpus.setdefault(hint.bottleneck_class, set()).add(key)

    def update(self, now: datetime, scores: Iterable[Scored], place: Place) -> list[Bottleneck]:
        """The hints to publish at this tick, most probable first.

        Args:
            now: The moment.
            scores: One per class; a GPU that is in none of them is not foreseen to be in trouble any more.
            place: Look-up of places and jobs.
        """
        hints: list[Bottleneck] = []
        ids: dict[tuple[str, str, str], str] = {}
        for scored in scores:
            rows = self._chosen(scored, place)
            for scope, key, members in self._merged(scored.bottleneck_class, rows, scored, place):
                name = (scored.bottleneck_class, scope, key)
                ids[name] = self._ids.get(name) or self._new_id(name, now)
                hints.append(self._hint(ids[name], scope, members, scored, now, place))
        self._ids = ids
        return sorted(hints, key=lambda hint: (-hint.probability, hint.horizon_s, hint.id))

    def _chosen(self, scored: Scored, place: Place) -> list[int]:
        last = np.where(scored.is_active, 1.0, scored.probabilities[:, -1])
        before = self._gpus.get(scored.bottleneck_class, set())
        rows = np.flatnonzero(last >= KEEP_RATIO * self.publish_probability)
        chosen = [
            int(row)
            for row in rows
            if last[row] >= self.publish_probability or place.uuid(int(scored.block.gpus[row])) in before
        ]
        self._gpus[scored.bottleneck_class] = {place.uuid(int(scored.block.gpus[row])) for row in chosen}
        return chosen

    def _merged(
        self, name: str, rows: Sequence[int], scored: Scored, place: Place
    ) -> list[tuple[Scope, str, list[int]]]:
        by_node: dict[str, list[int]] = defaultdict(list)
        for row in rows:
            by_node[place.node(int(scored.block.gpus[row]))].append(row)
        out: list[tuple[Scope, str, list[int]]] = []
        whole: dict[str, list[int]] = {}
        for node, members in by_node.items():
            share = NODE_KEEP_SHARE if (name, "node", node) in self._ids else NODE_SHARE
            if len(members) >= max(2, share * place.node_gpus(node)):
                whole[node] = members
            else:
                out += [("gpu", place.uuid(int(scored.block.gpus[row])), [row]) for row in members]
        racks = Counter(place.rack(node) for node in whole) if name in RACK_CLASSES else Counter()
        by_rack: dict[str, list[int]] = defaultdict(list)
        for node, members in whole.items():
            rack = place.rack(node)
            if rack is not None and racks[rack] >= RACK_NODES:
                by_rack[rack] += members
            else:
                out.append(("node", node, members))
        return out + [("rack", rack, members) for rack, members in by_rack.items()]

    def _new_id(self, name: tuple[str, str, str], now: datetime) -> str:
        text = "|".join((self.cluster, *name, now.isoformat()))
        return "bn-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _hint(
        self, hint_id: str, scope: Scope, members: list[int], scored: Scored, now: datetime, place: Place
    ) -> Bottleneck:
        gpus = [int(scored.block.gpus[row]) for row in members]
        node = place.node(gpus[0])
        is_active = bool(scored.is_active[members].any())
        p = scored.probabilities[members].max(axis=0)
        if is_active:
            p = np.ones(len(HORIZONS_S))
        reached = np.flatnonzero(p >= min(self.publish_probability, p[-1]))
        first = int(reached[0])
        worst = members[int(np.argmax(np.where(scored.is_active[members], 1.0, scored.probabilities[members, -1])))]
        jobs = sorted({job for gpu in gpus for job in place.jobs(gpu)})
        reasons = [reason(scored.block, worst, is_active=bool(scored.is_active[worst]))]
        if scope != "gpu":
            nodes = sorted({place.node(gpu) for gpu in gpus})
            where = ", ".join(nodes[:8]) + (" …" if len(nodes) > 8 else "")
            of = f" of {place.node_gpus(node)}" if scope == "node" else ""
            reasons.insert(0, f"{len(gpus)}{of} GPUs together on {where}")
        return Bottleneck(
            id=hint_id,
            cluster=self.cluster,
            bottleneck_class=scored.bottleneck_class,
            scope=scope,
            node=node if scope in ("gpu", "node") else None,
            gpu_uuid=place.uuid(gpus[0]) if scope == "gpu" else None,
            rack=place.rack(node),
            pod=place.pod(node),
            horizon_s=HORIZONS_S[first],
            probability=round(float(p[first]), 4),
            probabilities={str(h): round(float(value), 4) for h, value in zip(HORIZONS_S, p, strict=True)},
            expected_onset=None if is_active else now + timedelta(seconds=expected_onset_s(p)),
            is_active=is_active,
            job_ids=jobs,
            action=action(scored.bottleneck_class, scope, is_active=is_active, has_job=bool(jobs)),
            reasons=reasons,
            model_version=scored.model_version,
        )


def expected_onset_s(p: NDArray[np.float64]) -> float:
    """Seconds to the onset, given that it comes within the last horizon, from P by horizon."""
    edges = np.array((0, *HORIZONS_S), dtype=np.float64)
    mass = np.diff(np.concatenate(([0.0], p)))
    total = mass.sum()
    if total <= 0:
        return float(edges[-1])
    return round(float((mass * (edges[:-1] + edges[1:]) / 2).sum() / total), 1)


def action(name: str, scope: str, *, is_active: bool, has_job: bool) -> Action:
    """What a scheduler could do about it."""
    if not has_job:
        return "none"
    if name == "memory_exhaustion":
        return "retry_elsewhere"
    if name == "thermal_throttle" and scope == "rack":
        return "throttle"
    if name == "thermal_throttle" and is_active:
        return "drain_after_job"
    return "reserve"


def reason(block: FeatureBlock, row: int, *, is_active: bool) -> str:
    """Why, in words and figures."""
    value = {
        name: float(block.column(name)[row])
        for name in ("last", "slope_short", "gpu_temp_c_last", "nvlink_fill_ratio_last", "step_ratio_last",
                     "over_plateau_gib_last", "inlet_temp_c_last")
    }  # fmt: skip
    known = {name: not np.isnan(number) for name, number in value.items()}
    per_min = value["slope_short"] * 60
    if block.bottleneck_class == "thermal_throttle":
        text = "at the slowdown limit" if is_active else f"{value['last']:.1f} °C below the slowdown limit"
        text += f" at {value['gpu_temp_c_last']:.0f} °C" if known["gpu_temp_c_last"] else ""
        text += f", {-per_min:+.1f} °C/min" if known["slope_short"] else ""
        return text + (f", inlet air {value['inlet_temp_c_last']:.0f} °C" if known["inlet_temp_c_last"] else "")
    if block.bottleneck_class == "nvlink_saturation":
        text = f"NVLink at {value['nvlink_fill_ratio_last']:.0%} of the achievable rate"
        text += f", {-per_min:+.0%}/min" if known["slope_short"] else ""
        return text + (
            f", steps take {value['step_ratio_last']:.2f} × the job's own" if known["step_ratio_last"] else ""
        )
    free = value["last"] + 1  # the limit is 1 GiB of free memory
    text = f"{max(free, 0):.1f} GiB of device memory free"
    text += (
        f", {value['over_plateau_gib_last']:.1f} GiB over the job's plateau" if known["over_plateau_gib_last"] else ""
    )
    return text + (f", {-per_min:+.2f} GiB/min" if known["slope_short"] else "")
