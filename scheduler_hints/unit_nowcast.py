"""The nowcast of nodes, ports and queues: their newest samples in, scores out, every tick.

Here belongs the state between ticks that `scheduler_hints/nowcast.py`, which calls in here, holds of GPUs; what is made
of scores stands in `scheduler_hints/episodes.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, cast

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.conditions import INDEX
from features.occupancy import EVERY, queue_occupancy, usable_gpus
from features.queue_memory import QueueMemory
from features.telemetry import RingWindow
from features.thresholds import ThresholdBook
from features.unit_conditions import KINDS, UNIT_CLASSES
from features.unit_ring import UnitRing
from features.windows import FeatureBlock
from scheduler_hints.reasons import unit_reason
from scheduler_hints.schema import HORIZONS_S, BottleneckClass
from scheduler_hints.scored import Scored, Unit

MOST_JOBS = 50  # waiting jobs that a hint of a queue names
_UNITS: dict[str, Unit] = {"node": "node", "port": "link", "queue": "queue"}
_WORTH_WORDS = 0.1  # what is less probable needs no reasons


class UnitNowcast:
    """State of the nodes, ports and queues of one cluster between ticks.

    Args:
        book: Limits of the nodes.
        stale_s: Age at which samples of nodes and ports stop counting.
        queue_stale_s: The same of what the scheduler said.
    """

    def __init__(self, book: ThresholdBook, stale_s: float, queue_stale_s: float) -> None:
        stale = {"shortage": queue_stale_s}
        self.rings = {name: UnitRing(name, book, stale_s=stale.get(name, stale_s)) for name in UNIT_CLASSES}
        self.waiting: dict[str, list[str]] = {}

    # --- taking in ------------------------------------------------------------------------------------------

    def observe(
        self, node: pl.DataFrame | None, port: pl.DataFrame | None, gpus: RingWindow, now_s: float | None
    ) -> None:
        """Take in newest samples of nodes and ports, after those of GPUs.

        Args:
            node: Rows of `core_node_samples` columns.
            port: Rows of `core_port_samples`.
            gpus: The newest of the GPUs, for the steps of the jobs behind each port.
            now_s: The moment of the reading, None for history.
        """
        if node is not None and node.height and {"ts", "node"} <= set(node.columns):
            told = [name for name in KINDS["host_memory"].inputs if name in node.columns]
            rows = node.filter(pl.any_horizontal(pl.col(name).is_not_null() for name in told)) if told else node.clear()
            self.rings["host_memory"].observe(rows, now_s=now_s)
        if port is None or not port.height:
            return
        steps = node_steps(gpus, now_s)
        with_steps = port.join(steps, on="node", how="left", maintain_order="left") if steps.height else port
        self.rings["fabric_congestion"].observe(with_steps, now_s=now_s)

    def observe_jobs(self, jobs: pl.DataFrame, nodes: pl.DataFrame, at: datetime) -> None:
        """Take in what the queues ask for and have; nothing where no inventory counts GPUs.

        Args:
            jobs: Pending and running jobs, rows of `JOB_COLUMNS`.
            nodes: Rows of `core_nodes` columns.
            at: When the scheduler said so.
        """
        needed = {"queue", "gpus", "submit_time", "eligible_time", "start_time", "end_time"}
        total = usable_gpus(nodes)
        if not total or not needed <= set(jobs.columns):
            return
        ring = self.rings["shortage"]
        rows = queue_occupancy(jobs, total, at, at + EVERY)
        known = set(rows["queue"].to_list())
        idle = rows["idle_gpu_num"][0] if rows.height else total  # a queue without jobs has none waiting
        gone = [name for name in ring.names if name not in known]
        if gone:
            nothing = {"pending_gpu_num": 0, "running_gpu_num": 0, "idle_gpu_num": idle}
            empty = pl.DataFrame({"ts": [at] * len(gone), "queue": gone, **nothing})
            rows = pl.concat([rows, empty.cast(dict(rows.schema))])
        ring.observe(rows, now_s=at.timestamp())
        waiting = jobs.filter((pl.col("gpus") > 0) & pl.col("start_time").is_null() & pl.col("end_time").is_null())
        self.waiting = defaultdict(list)
        if "job_id" in jobs.columns:
            for queue, job in waiting.sort("submit_time").select(pl.col("queue").fill_null(""), "job_id").iter_rows():
                self.waiting[queue].append(job)

    def set_book(self, book: ThresholdBook) -> None:
        """Take new limits."""
        for ring in self.rings.values():
            ring.set_book(book)

    def forget(self, now_s: float) -> None:
        """Give up what has been silent; queues are remembered for a day."""
        for name, ring in self.rings.items():
            ring.forget(now_s, *((86_400.0,) if name == "shortage" else ()))

    # --- scoring --------------------------------------------------------------------------------------------

    def score(
        self,
        now_s: float,
        forecast: Callable[[FeatureBlock], tuple[NDArray[np.float64], str]],
        excluded: set[str],
    ) -> list[Scored]:
        """Scores of every class.

        Args:
            now_s: The moment.
            forecast: Gives probabilities of a block, and who gave them.
            excluded: Nodes of which nothing is told.
        """
        out = []
        for name, ring in self.rings.items():
            units = ring.screened(now_s)
            if excluded:
                units = units[[ring.nodes[unit] not in excluded for unit in units]]
            block = ring.features(units, now_s)
            probabilities, version = forecast(block) if len(units) else (np.zeros((0, len(HORIZONS_S))), "")
            is_active = ring.is_set()[units]
            names = [ring.names[unit] for unit in units.tolist()]
            said = np.flatnonzero(is_active | (probabilities[:, -1] >= _WORTH_WORDS)).tolist()
            reasons = [""] * len(units)
            for row in said:
                reasons[row] = unit_reason(block, row, is_active=bool(is_active[row]))
            is_queue = ring.kind.scope == "queue"
            scored = Scored(
                cast("BottleneckClass", name), None, probabilities, is_active, version, unit=_UNITS[ring.kind.scope],
                names=names, sampled_s=ring.last_ts[units], reasons=reasons,
                nodes=[] if is_queue else [ring.nodes[unit] or "" for unit in units.tolist()],
                jobs=[self.waiting.get(queue, [])[:MOST_JOBS] for queue in names] if is_queue else [],
            )  # fmt: skip
            out.append(scored)
        return out

    # --- queues over a restart ------------------------------------------------------------------------------

    def remembered(self) -> dict[str, Any]:
        """What is remembered of queues, as JSON can hold it."""
        ring = self.rings["shortage"]
        memory = QueueMemory(len(ring.memory.ts))
        vars(memory).update(vars(ring.memory))
        memory.keep(np.arange(ring.count))
        return {"queues": ring.names, "memory": memory.to_lists()}

    def recall(self, remembered: Mapping[str, Any]) -> None:
        """Take up what `remembered` gave; for a ring that has seen no queue yet.

        Raises:
            ValueError: It is of another shape.
        """
        names = [str(name) for name in remembered.get("queues", ())]
        self.rings["shortage"].recall(names, QueueMemory.from_lists(len(names), dict(remembered.get("memory", {}))))

    def nbytes(self) -> int:
        """Bytes of the rings."""
        return sum(ring.nbytes() for ring in self.rings.values())


def node_steps(gpus: RingWindow, now_s: float | None) -> pl.DataFrame:
    """Slowest newest step, against its own, of the GPUs of each node that is known to make steps.

    Args:
        gpus: The newest of the GPUs.
        now_s: The moment; stale GPUs do not count then.

    Returns:
        `node`, `step_ratio`.
    """
    n = gpus.count
    ratio = gpus.latest[INDEX["step_ratio"], :n].astype(np.float64)
    use = ~np.isnan(ratio)
    if now_s is not None:
        use &= gpus.is_fresh(now_s)
    slowest = np.full(len(gpus.node_names), np.nan)
    np.fmax.at(slowest, gpus.node[:n][use], ratio[use])
    known = np.flatnonzero(~np.isnan(slowest))
    names = [gpus.node_names[code] for code in known.tolist()]
    return pl.DataFrame(
        {"node": names, "step_ratio": slowest[known]}, schema={"node": pl.String, "step_ratio": pl.Float64}
    )
