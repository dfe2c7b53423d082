"""Where each GPU of the rings is, whose it is, and what else is there: the look-up that hints go by.

Here belongs one moment's view of rings and inventory together; what is read from a scheduler stands in `inventory.py`,
what hints make of it in `causes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from features.conditions import INDEX
from features.telemetry import RingWindow
from scheduler_hints.inventory import Inventory


class Places:
    """Where a GPU of the rings is and whose it is, at one moment.

    Args:
        window: The rings.
        inventory: Facts of nodes and jobs.
        now_s: The moment, seconds since 1970.
    """

    def __init__(self, window: RingWindow, inventory: Inventory, now_s: float) -> None:
        self._window = window
        self._inventory = inventory
        self._now_s = now_s
        self._counts: dict[str, Mapping[str, int]] = {}
        self._up: dict[str, Mapping[str, int]] = {}
        self._parts: dict[str, int] = {}
        self._inlets: dict[str, tuple[NDArray, dict[str, list[int]]]] = {}

    def uuid(self, gpu: int) -> str:
        """UUID of a GPU."""
        return self._window.uuids[gpu]

    def node(self, gpu: int) -> str:
        """Node of a GPU."""
        return self._window.nodes[gpu]

    def jobs(self, gpu: int) -> Sequence[str]:
        """Job of a GPU by its samples, else the jobs of its node by the scheduler."""
        job = self._window.job_id(gpu)
        return [job] if job is not None else self.node_jobs(self.node(gpu))

    def node_jobs(self, node: str) -> Sequence[str]:
        """Jobs of a node by the scheduler."""
        return self._inventory.jobs.get(node, [])

    def node_gpus(self, node: str) -> int:
        """GPUs of a node by the inventory, else as many as have been seen."""
        return self._inventory.gpus.get(node) or self._window.node_size(node)

    def rack(self, node: str) -> str | None:
        """Rack of a node."""
        return self._inventory.rack.get(node) or None

    def pod(self, node: str) -> str | None:
        """Pod of a node."""
        return self._inventory.pod.get(node) or None

    def is_excluded(self, node: str) -> bool:
        """The node is out of service."""
        return node in self._inventory.excluded

    def sampled_s(self, uuid: str) -> float | None:
        """Moment of the newest sample of a GPU; None where it is stale or the GPU is gone."""
        gpu = self._window.roster.index_of(uuid)
        if gpu is None:
            return None
        moment = float(self._window.last_ts[gpu])
        return moment if abs(self._now_s - moment) <= self._window.stale_s else None

    def gpus_at_work(self, kind: str, key: str) -> int:
        """GPUs with a job and a fresh sample; where no job is known at all, every GPU with a fresh sample."""
        if not self._counts:
            self._count()
        return self._counts.get(kind, {}).get(key, 0) if kind != "cluster" else self._counts["cluster"][""]

    def nodes_up(self, kind: str, key: str) -> int:
        """Nodes with a fresh sample."""
        if not self._counts:
            self._count()
        return self._up.get(kind, {}).get(key, 0) if kind != "cluster" else self._up["cluster"][""]

    def _count(self) -> None:
        window, n = self._window, self._window.count
        fresh, node, job = window.is_fresh(self._now_s), window.node[:n], window.job[:n]
        names = window.node_names
        has_jobs = np.array([name in self._inventory.jobs for name in names], dtype=bool)
        at_work = fresh & ((job >= 0) | has_jobs[node]) if n else fresh
        if not at_work.any():
            at_work = fresh
        by_node = np.bincount(node[at_work], minlength=len(names))
        is_up = (np.bincount(node[fresh], minlength=len(names)) > 0).astype(np.int64)
        with_job = at_work & (job >= 0)
        by_job = np.bincount(job[with_job], minlength=len(window.job_ids))
        # One number for each job on a node: sorting pairs takes ten times as long.
        on_node = np.unique(job[with_job].astype(np.int64) * len(names) + node[with_job])
        nodes_of_job = np.bincount(on_node // max(len(names), 1), minlength=len(window.job_ids))
        ids = window.job_ids
        self._counts = {
            "node": dict(zip(names, by_node.tolist(), strict=True)),
            "job": {ids[i]: int(by_job[i]) for i in np.flatnonzero(by_job).tolist()},
            "cluster": {"": int(by_node.sum())},
        }
        self._up = {
            "node": dict(zip(names, is_up.tolist(), strict=True)),
            "job": {ids[i]: int(nodes_of_job[i]) for i in np.flatnonzero(nodes_of_job).tolist()},
            "cluster": {"": int(is_up.sum())},
        }
        for kind, of in (("rack", self._inventory.rack), ("pod", self._inventory.pod)):
            self._counts[kind], self._up[kind] = _summed(names, of, by_node, is_up)

    def parts(self, kind: str, key: str) -> int:
        """Nodes with a fresh sample of a rack or job, racks of a pod, pods of the cluster; what is known of these."""
        if kind in ("rack", "job", "node"):
            return self.nodes_up(kind, key)
        if not self._parts:
            pods: dict[str, set[str]] = {}
            for name in self._up_nodes():
                pods.setdefault(self.pod(name) or "", set()).add(self.rack(name) or name)
            self._parts = {name: len(racks) for name, racks in pods.items()}
        if kind == "pod":
            return self._parts.get(key, 0)
        return max(len(self._parts) - ("" in self._parts) + self._parts.get("", 0), 1)

    def _up_nodes(self) -> list[str]:
        if not self._counts:
            self._count()
        return [name for name, is_up in self._up["node"].items() if is_up]

    def air_excess_k(self, kind: str, key: str) -> float | None:
        """How much warmer the inlet air of a rack or pod is than elsewhere in the cluster, K; None: not known."""
        if kind not in self._inlets:
            self._inlets[kind] = self._nodes_of(self.rack if kind == "rack" else self.pod)
        inlet, of = self._inlets[kind]
        mine = of.get(key, [])
        if not mine or len(mine) == len(inlet):
            return None  # nothing is known there, or nothing else to compare it with
        return float(np.median(inlet[mine]) - np.median(np.delete(inlet, mine)))

    def _nodes_of(self, of: Callable[[str], str | None]) -> tuple[NDArray, dict[str, list[int]]]:
        """Inlet temperature of each node that gives one, °C, and which of them belong to each place."""
        window, n = self._window, self._window.count
        inlet = window.latest[INDEX["inlet_temp_c"], :n]
        known = np.flatnonzero(window.is_fresh(self._now_s) & ~np.isnan(inlet))
        first = known[np.unique(window.node[:n][known], return_index=True)[1]]  # one GPU of each node
        found: dict[str, list[int]] = {}
        for i, gpu in enumerate(first.tolist()):
            place = of(window.nodes[gpu])
            if place is not None:
                found.setdefault(place, []).append(i)
        return inlet[first], found


def _summed(names: Sequence[str], of: Mapping[str, str | None], *counts: NDArray) -> list[dict[str, int]]:
    """Counts by node added up by place; a node that gives none counts nowhere."""
    codes: dict[str | None, int] = {}
    code = np.array([codes.setdefault(of.get(name) or None, len(codes)) for name in names], dtype=np.int64)
    sums = (np.bincount(code, weights=count, minlength=len(codes)).astype(np.int64).tolist() for count in counts)
    return [{place: n for place, n in zip(codes, some, strict=True) if place is not None} for some in sums]
