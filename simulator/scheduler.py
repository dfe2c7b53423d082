"""The cluster's own scheduler: first come first served by priority, with EASY backfill, GPUs of one node packed tight.

It knows free GPUs, requested limits and nothing of the future. It starts jobs and says why others wait; ends and
faults are told to it. Times are seconds since the epoch.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from simulator.hardware import GPUS_PER_NODE
from simulator.jobs import Job

FOREVER = float("inf")
BACKFILL_DEPTH = 100
FULL_MASK = (1 << GPUS_PER_NODE) - 1


class Scheduler:
    """Free GPUs, running jobs in order of their latest end, pending jobs in order of priority."""

    def __init__(self, nodes: int, pod_of: np.ndarray, user_gpus_max: int) -> None:
        self.nodes = nodes
        self.free = [FULL_MASK] * nodes
        self.usable = [True] * nodes
        self.pod_of = pod_of.tolist()
        self.user_gpus_max = user_gpus_max
        self.user_gpus: dict[str, int] = {}
        self.pending: list[tuple[tuple[int, float, int], Job]] = []
        self.running: list[tuple[float, int, Job]] = []
        self.pending_gpus = 0
        self.is_dirty = False

    # --- what happens to it ------------------------------------------------------------------------------
    def submit(self, job: Job) -> None:
        """Queue a job that is eligible."""
        insort(self.pending, ((-job.priority, job.eligible or job.submit, job.id), job), key=lambda item: item[0])
        self.pending_gpus += job.gpus
        self.is_dirty = True

    def withdraw(self, job: Job) -> None:
        """Take a pending job out of the queue."""
        key = (-job.priority, job.eligible or job.submit, job.id)
        at = bisect_left(self.pending, key, key=lambda item: item[0])
        if at < len(self.pending) and self.pending[at][1] is job:
            del self.pending[at]
            self.pending_gpus -= job.gpus
            self.is_dirty = True

    def release(self, job: Job) -> None:
        """Give back the GPUs of a running job."""
        at = bisect_left(self.running, (job.limit_end, job.id), key=lambda item: item[:2])
        if at < len(self.running) and self.running[at][2] is job:
            del self.running[at]
        for gpu in job.gpus_held:
            self.free[gpu // GPUS_PER_NODE] |= 1 << gpu % GPUS_PER_NODE
        self.user_gpus[job.user] = self.user_gpus.get(job.user, 0) - job.gpus
        self.is_dirty = True

    def set_usable(self, node: int, is_usable: bool) -> None:
        """Take a node out of service or back into it; jobs on it are the caller's business."""
        self.usable[node] = is_usable
        self.is_dirty = True

    # --- placing -----------------------------------------------------------------------------------------
    def place(self, job: Job, nodes: list[int], at: float) -> None:
        """Start a job on nodes that have room for it."""
        gpus: list[int] = []
        for node in nodes:
            mask, found = self.free[node], 0
            for k in range(GPUS_PER_NODE):
                if found == job.per_node:
                    break
                if mask >> k & 1:
                    gpus.append(node * GPUS_PER_NODE + k)
                    self.free[node] &= ~(1 << k)
                    found += 1
        job.start, job.state, job.reason, job.planned_start = at, "RUNNING", "None", None
        job.nodes_held, job.gpus_held = tuple(nodes), tuple(gpus)
        insort(self.running, (job.limit_end, job.id, job), key=lambda item: item[:2])
        self.user_gpus[job.user] = self.user_gpus.get(job.user, 0) + job.gpus

    def _find(self, job: Job, counts: list[int], barred: set[int] | None) -> list[int] | None:
        """Nodes for a job now, or None: tightest fit within a node, fewest pods across nodes."""
        need = job.per_node
        if job.nodes == 1:
            best, best_count = -1, GPUS_PER_NODE + 1
            for node, count in enumerate(counts):
                if need <= count < best_count and not (barred and node in barred):
                    best, best_count = node, count
                    if count == need:
                        break
            return None if best < 0 else [best]
        fit = [n for n, count in enumerate(counts) if count >= need and not (barred and n in barred)]
        if len(fit) < job.nodes:
            return None
        pods: dict[int, list[int]] = {}
        for node in fit:
            pods.setdefault(self.pod_of[node], []).append(node)
        whole = [group for group in pods.values() if len(group) >= job.nodes]
        if whole:
            return min(whole, key=len)[: job.nodes]
        ordered = sorted(pods.values(), key=len, reverse=True)
        return [node for group in ordered for node in group][: job.nodes]

    def _shadow(self, job: Job, counts: list[int]) -> tuple[float, set[int]]:
        """When the blocked head can start if running jobs end at their limits, and the nodes it will then take."""
        counts = list(counts)
        need, ready = job.per_node, sum(count >= job.per_node for count in counts)
        for end, _, running in self.running:
            for node in running.nodes_held:
                if not self.usable[node]:
                    continue
                before = counts[node]
                counts[node] += running.per_node
                ready += before < need <= counts[node]
            if ready >= job.nodes:
                fit = [node for node, count in enumerate(counts) if count >= need]
                return end, set(fit[: job.nodes])
        return FOREVER, set()

    def counts(self) -> list[int]:
        """Free GPUs of each usable node."""
        return [mask.bit_count() if ok else 0 for mask, ok in zip(self.free, self.usable, strict=True)]

    def run(self, now: float) -> list[Job]:
        """One scheduling pass: start what can start, and set the reasons of the rest.

        Returns:
            Jobs started, in order.
        """
        self.is_dirty = False
        if not self.pending:
            return []
        counts = self.counts()
        total = sum(counts)
        started: list[Job] = []
        kept: list[tuple[tuple[int, float, int], Job]] = []
        shadow, reserved, is_blocked, tried = FOREVER, set(), False, 0
        for position, item in enumerate(self.pending):
            job = item[1]
            if is_blocked and (total == 0 or tried >= BACKFILL_DEPTH):
                kept += self.pending[position:]
                break
            if self.user_gpus.get(job.user, 0) + job.gpus > self.user_gpus_max and self.user_gpus.get(job.user, 0):
                job.reason = "QOSMaxGRESPerUser"
                kept.append(item)
                continue
            nodes = None
            if job.gpus <= total:
                late = is_blocked and (job.limit_s is None or now + job.limit_s > shadow)
                nodes = self._find(job, counts, reserved if late else None)
            if nodes is not None:
                self.place(job, nodes, now)
                for node in nodes:
                    counts[node] -= job.per_node
                total -= job.gpus
                self.pending_gpus -= job.gpus
                started.append(job)
                continue
            kept.append(item)
            if is_blocked:
                tried += 1
                job.reason = "Priority"
            else:
                is_blocked = True
                shadow, reserved = self._shadow(job, counts)
                job.reason = "Resources" if shadow < FOREVER else "ReqNodeNotAvail, May be reserved for other job"
                job.planned_start = shadow if shadow < FOREVER else None
        self.pending = kept
        return started

    def plan(self, now: float, depth: int = 50) -> None:
        """Set `planned_start` of the first pending jobs: each takes GPUs in turn, running jobs end at their limits."""
        for _, job in self.pending:
            job.planned_start = None
        if not self.pending:
            return
        ready = np.full((self.nodes, GPUS_PER_NODE), now)
        for end, _, job in self.running:
            for gpu in job.gpus_held:
                ready[gpu // GPUS_PER_NODE, gpu % GPUS_PER_NODE] = max(end, now + 1)
        ready[~np.array(self.usable)] = FOREVER
        for _, job in self.pending[:depth]:
            ready.sort(axis=1)
            column = ready[:, job.per_node - 1]
            nodes = np.argsort(column, kind="stable")[: job.nodes]
            if len(nodes) < job.nodes:
                continue
            start = float(column[nodes].max())
            if start == FOREVER:
                continue
            job.planned_start = max(start, now + 1)
            ready[nodes, : job.per_node] = start + (job.limit_s or FOREVER)
