"""What the nowcast knows of nodes and of the jobs on them.

Here belongs reading the frames of a job source into look-ups by node; not asking the source, and no forecasting. The
look-up that hints go by stands in `places.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field

import polars as pl

# States of nodes that nobody should be told anything about: they are out of service already.
EXCLUDED = re.compile(r"drain|down|maint|fail|reboot|power|not_resp|unknown", re.IGNORECASE)
RUNNING = "RUNNING"


@dataclass(slots=True)
class Inventory:
    """Facts of the nodes and of the jobs that run on them, by node name.

    Attributes:
        rack, pod, gpus, model: As of `core_nodes`; nodes that give none are absent or None.
        excluded: Nodes that are drained, down, in maintenance or otherwise out of service.
        jobs: Ids of running jobs.
        only_job: Id of the job of a node that runs one alone: the job of all its GPUs.
    """

    rack: dict[str, str | None] = field(default_factory=dict)
    pod: dict[str, str | None] = field(default_factory=dict)
    gpus: dict[str, int] = field(default_factory=dict)
    model: dict[str, str | None] = field(default_factory=dict)
    excluded: set[str] = field(default_factory=set)
    jobs: dict[str, list[str]] = field(default_factory=dict)
    only_job: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, jobs: pl.DataFrame, nodes: pl.DataFrame) -> Inventory:
        """From rows of `JOB_COLUMNS` and of `core_nodes`; only `node` must be there.

        Raises:
            ValueError: The nodes have no column `node`.
        """
        if "node" not in nodes.columns:
            raise ValueError(f"nodes lack the column node; they have {', '.join(nodes.columns) or 'none'}")
        out = cls()
        for row in nodes.iter_rows(named=True):
            name = row["node"]
            out.rack[name], out.pod[name] = row.get("rack"), row.get("pod")
            out.model[name] = row.get("gpu_model")
            if row.get("gpus"):
                out.gpus[name] = row["gpus"]
            if row.get("state") and EXCLUDED.search(row["state"]):
                out.excluded.add(name)
        by_node: dict[str, list[str]] = defaultdict(list)
        if {"job_id", "state", "node_list"} <= set(jobs.columns):
            running = jobs.filter(pl.col("state") == RUNNING).select("job_id", "node_list")
            for job_id, node_list in running.iter_rows():
                for name in filter(None, (node_list or "").split(",")):
                    by_node[name].append(job_id)
        out.jobs = dict(by_node)
        out.only_job = {name: ids[0] for name, ids in by_node.items() if len(ids) == 1}
        return out
