"""Ground truth of bottlenecks: when a condition became set and clear on which GPU, as the physics has it.

One row per GPU and onset. An injected row is there from its injection, its `onset` null until it happens. What caused
it is shaped in `events.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from simulator.hardware import GPUS_PER_NODE
from simulator.jobs import Job
from simulator.physics import Physics

if TYPE_CHECKING:
    from simulator.events import Event

CLASSES = ("thermal_throttle", "nvlink_saturation", "memory_exhaustion")
CLEAR_S = 10.0  # a condition that comes back sooner never went


def iso(seconds: float | None) -> datetime | None:
    """UTC time of seconds since the epoch."""
    return None if seconds is None else datetime.fromtimestamp(round(seconds, 3), UTC)


class TruthBook:
    """Rows of what came true, and of look-alikes that never will.

    Attributes:
        rows: id, event, class, mode, node, gpu_index, gpu_uuid, job_id, ramp_start, planned_onset, onset, clear,
            is_step, is_injected; times are UTC.
        lookalikes: The same for harmless ramps.
        changes: Rises with every change of a row.
    """

    def __init__(self, physics: Physics) -> None:
        self.physics = physics
        self.rows: list[dict[str, Any]] = []
        self.lookalikes: list[dict[str, Any]] = []
        self.changes = 0
        self._known: set[str] = set()
        n = physics.topology.gpus
        self._last_set = {class_: np.full(n, -1e18) for class_ in CLASSES}
        self._open: dict[str, dict[int, dict[str, Any]]] = {class_: {} for class_ in CLASSES}

    def has_open(self) -> bool:
        """Some condition is set now."""
        return any(self._open.values())

    def record(self, event: Event) -> None:
        """Write the planned rows; rows of onsets enter `truth` when they happen (injected ones at once)."""
        topology = self.physics.topology
        for gpu in event.gpus.tolist():
            job = event.job or self.physics.jobs[gpu]
            event.truth[gpu] = {
                "id": f"{event.id}-{topology.node_names[gpu // GPUS_PER_NODE]}-{gpu % GPUS_PER_NODE}",
                "event": event.id,
                "class": event.class_,
                "mode": event.mode,
                "node": topology.node_names[gpu // GPUS_PER_NODE],
                "gpu_index": gpu % GPUS_PER_NODE,
                "gpu_uuid": topology.uuids[gpu],
                "job_id": job.job_id if job else None,
                "ramp_start": iso(event.ramp_at),
                "planned_onset": iso(event.onset_at),
                "onset": None,
                "clear": None,
                "is_step": event.is_step,
                "is_injected": event.is_injected,
            }
        if event.is_lookalike:
            self.lookalikes += event.truth.values()
        elif event.is_injected and event.mode != "hot_aisle":
            for row in event.truth.values():
                self._publish(row)

    def observe(self, active: list[Event], begin: float, end: float, temp_before: np.ndarray) -> None:
        """Note conditions that became set or clear within (begin, end] while these events acted."""
        physics = self.physics
        thermal = physics.is_thermal()
        self._edges("thermal_throttle", thermal, active, begin, end, temp_before)
        if any(event.class_ == "nvlink_saturation" for event in active) or self._open["nvlink_saturation"]:
            self._edges("nvlink_saturation", physics.is_saturated(), active, begin, end, None)
        memory = np.zeros_like(thermal)
        for event in active:
            if event.mode == "leak" and not event.is_lookalike and event.onset_at <= end and begin < event.end_at:
                memory[event.gpus] = True
        if memory.any() or self._open["memory_exhaustion"]:
            self._edges("memory_exhaustion", memory, active, begin, end, None)

    def _edges(
        self,
        class_: str,
        now: np.ndarray,
        active: list[Event],
        begin: float,
        end: float,
        temp_before: np.ndarray | None,
    ) -> None:
        last, open_rows = self._last_set[class_], self._open[class_]
        for gpu in np.flatnonzero(now).tolist():
            if gpu not in open_rows:
                self._onset(class_, gpu, active, begin, end, temp_before)
        last[now] = end
        for gpu, row in list(open_rows.items()):
            if not now[gpu] and (end - last[gpu] >= CLEAR_S or self.physics.jobs[gpu] is None):
                row["clear"] = iso(float(last[gpu]))
                del open_rows[gpu]
                self.changes += 1

    def _onset(
        self, class_: str, gpu: int, active: list[Event], begin: float, end: float, temp_before: np.ndarray | None
    ) -> None:
        causes = [event for event in active if event.class_ == class_ and gpu in event.gpus]
        event = next((e for e in causes if not e.is_lookalike), causes[0] if causes else None)
        at = end
        if event is not None and event.mode in ("leak", "voltage_regulator", "lane_loss"):
            at = min(max(event.onset_at, begin), end)
        elif temp_before is not None:
            limit, t0, t1 = self.physics.model.temp_limit_c, float(temp_before[gpu]), float(self.physics.temp[gpu])
            if t0 < limit <= t1:
                at = begin + (end - begin) * (limit - t0) / (t1 - t0)
        row = event.truth.get(gpu) if event is not None else None
        job = self.physics.jobs[gpu]
        if row is None or row["onset"] is not None:
            topology = self.physics.topology
            times = sum(r["event"] == (event.id if event else "none") for r in self.rows)
            row = dict(row) if row is not None else {
                "event": event.id if event else "none", "class": class_, "mode": event.mode if event else "none",
                "node": topology.node_names[gpu // GPUS_PER_NODE], "gpu_index": gpu % GPUS_PER_NODE,
                "gpu_uuid": topology.uuids[gpu], "ramp_start": None, "planned_onset": None, "is_step": False,
                "is_injected": False,
            }  # fmt: skip
            row["id"] = f"{row['event']}-{row['node']}-{row['gpu_index']}-{times}"
            row["clear"] = None
        if event is not None and event.is_lookalike:  # it stopped so near that what else moves did the rest
            self.lookalikes = [other for other in self.lookalikes if other["event"] != event.id]
        row["job_id"] = job.job_id if job else None
        row["onset"] = iso(at)
        self._publish(row)
        self._open[class_][gpu] = row

    def _publish(self, row: dict[str, Any]) -> None:
        if row["id"] not in self._known:
            self._known.add(row["id"])
            self.rows.append(row)
        self.changes += 1

    def end_job(self, job: Job, when: float) -> None:
        """The job ended, and with it what it caused itself."""
        for class_ in ("nvlink_saturation", "memory_exhaustion"):
            for gpu in job.gpus_held:
                row = self._open[class_].pop(gpu, None)
                if row is not None:
                    row["clear"] = iso(when)
                    self.changes += 1

    def note_exhausted(self, event: Event, when: float) -> None:
        """The job of a leak ran out of memory: its onset has happened, even between two looks."""
        for gpu in event.gpus.tolist():
            row = event.truth[gpu]
            if row["onset"] is None:
                row["onset"] = iso(min(event.onset_at, when))
                self._publish(row)
            row["clear"] = iso(when)
            self._open["memory_exhaustion"].pop(gpu, None)
        self.changes += 1
