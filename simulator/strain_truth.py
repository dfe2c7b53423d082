"""Ground truth of strains and of queues that run short: when each condition became set and clear.

Rows have the form of `truth.TruthBook.rows`, with `scope` and `scope_id` as labels have them. What strains do stands in
`strains.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.hardware import GPUS_PER_NODE
from simulator.physics import Physics
from simulator.truth import CLEAR_S, iso
from simulator.work import STEP_SLOW_RATIO

if TYPE_CHECKING:
    from simulator.strains import Strain

SLOW_RATIO = 1.3


class StrainBook:
    """Rows of what came true of strains, and of look-alikes that never will.

    Attributes:
        rows: Ground truth, in the form of `TruthBook.rows` with `scope` and `scope_id`.
        lookalikes: The same for harmless ramps.
        changes: Rises with every change of a row.
    """

    def __init__(self, physics: Physics) -> None:
        self.physics = physics
        self.rows: list[dict[str, Any]] = []
        self.lookalikes: list[dict[str, Any]] = []
        self.changes = 0
        self._last_set: dict[str, float] = {}
        self._open: dict[str, dict[str, Any]] = {}

    def has_open(self) -> bool:
        """Some condition is set now."""
        return bool(self._open)

    def observe(self, active: Iterable[Strain], end: float, pending: Mapping[str, int], idle_gpus: int) -> None:
        """Note what became set or clear by `end`.

        Args:
            active: Strains that act.
            end: The moment.
            pending: GPUs that each queue's eligible jobs wait for.
            idle_gpus: GPUs that no job holds, on nodes in service.
        """
        now: dict[str, dict[str, Any]] = {}
        for strain in active:
            for key in self._true(strain, end):
                now[key] = strain.rows[key]
        for queue, gpus in pending.items():
            if gpus > idle_gpus:
                now[f"queue {queue}"] = {}
        for key, row in now.items():
            self._last_set[key] = end
            if key not in self._open:
                row = row or self.queue_row(key.removeprefix("queue "), end)
                if row["onset"] is not None:
                    row = dict(row) | {"id": f"{row['id']}-{self.changes}", "clear": None}
                row["onset"] = iso(end)
                self._open[key] = row
                if row not in self.rows:
                    self.rows.append(row)
                self.changes += 1
        for key, row in list(self._open.items()):
            if key not in now and end - self._last_set[key] >= CLEAR_S:
                row["clear"] = iso(self._last_set[key])
                del self._open[key]
                self.changes += 1

    def _true(self, strain: Strain, when: float) -> list[str]:
        """Things of a strain whose condition is set."""
        physics = self.physics
        level = strain.level(when)
        if strain.is_lookalike or level <= 0 or strain.job.state != "RUNNING":
            return []
        if strain.class_ == "fabric_congestion":
            slow = physics.step[strain.gpus[0]] > STEP_SLOW_RATIO * physics.step0[strain.gpus[0]] > 0
            return list(strain.rows) if slow else []
        if strain.class_ == "straggler":
            own = physics.own_step_s()
            slow = own[strain.gpus[0]] > SLOW_RATIO * float(np.median(own[physics.members[strain.job.id]]))
            return list(strain.rows) if slow else []
        return list(strain.rows) if level >= 1 else []

    def record(self, strain: Strain) -> None:
        """Write the planned rows of a strain; they enter `rows` when they happen."""
        physics = self.physics
        names, uuids = physics.topology.node_names, physics.topology.uuids
        node = names[int(strain.nodes[0])]
        things: list[tuple[str, str, int | None]]
        if strain.class_ == "power_throttle":
            things = [("gpu", uuids[g], int(g)) for g in strain.gpus]
        elif strain.class_ == "straggler":
            g = int(strain.gpus[0])
            rank = int(np.searchsorted(physics.members[strain.job.id], g))
            things = [("rank", f"{strain.job.job_id}/{rank}", g)]
        elif strain.class_ == "fabric_congestion":
            things = [("port", f"{node}/mlx5_0/1", None)]
        else:
            things = [("node", node, None)]
        for scope, scope_id, gpu in things:
            strain.rows[f"{strain.class_} {scope_id}"] = {
                "id": f"{strain.id}-{scope_id}", "event": strain.id, "class": strain.class_, "mode": strain.mode,
                "scope": scope, "scope_id": scope_id, "node": node,
                "gpu_index": None if gpu is None else gpu % GPUS_PER_NODE,
                "gpu_uuid": None if gpu is None else uuids[gpu], "job_id": strain.job.job_id,
                "ramp_start": iso(strain.ramp_at), "planned_onset": iso(strain.onset_at), "onset": None, "clear": None,
                "is_step": strain.is_step, "is_injected": strain.is_injected,
            }  # fmt: skip
        if strain.is_lookalike:
            self.lookalikes += strain.rows.values()

    def publish(self, strain: Strain) -> None:
        """Enter the rows of an injected strain at once, `onset` null until it happens."""
        self.rows += strain.rows.values()
        self.changes += 1

    def queue_row(self, queue: str, at: float, *, is_injected: bool = False) -> dict[str, Any]:
        """A row of a queue that is to run short; when it does, one of the same form enters `rows`."""
        none = dict.fromkeys(("node", "gpu_index", "gpu_uuid", "job_id", "ramp_start", "planned_onset", "onset",
                              "clear"))  # fmt: skip
        return {
            "id": f"shortage-{queue}-{math.floor(at)}", "event": "queue", "class": "shortage", "mode": "queue",
            "scope": "queue", "scope_id": queue, **none, "is_step": False, "is_injected": is_injected,
        }  # fmt: skip
