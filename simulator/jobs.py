"""A job of the simulated scheduler: what was asked, what will become of it, and what has become of it.

Only the record stands here. Who submits jobs: `workload.py`; who starts them: `scheduler.py`; what they do to a GPU:
`physics.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")


@dataclass(slots=True, eq=False)
class Profile:
    """How a job behaves on its GPUs. Times in seconds of the job's own clock.

    Attributes:
        kind: train, serve or notebook.
        compute_s: Computing time of one step at full clock, s.
        link_s: Time NVLink would be busy per step at its achievable rate, s; 0 without collectives.
        exposed_ratio: Share of link time that cannot hide behind computing.
        link_efficiency: Rate during collectives ÷ achievable rate.
        power_ratio: Demand on the power limit while computing (above 1: power-capped).
        sm_ratio, tensor_ratio, dram_ratio: Activity while computing.
        memory_ratio: Plateau of device memory ÷ (total − reserved).
        warmup_s: Loading and compiling before the first step, s.
        pause_every_s, pause_s: Checkpoints (or a person thinking): period and length, s.
        eval_every_s, eval_s, burst_s: Evaluation: period, length, NVLink burst at its start, s.
        phase: Random offset of the two cycles, 0-1.
        reports_steps: The job exports its step time.
    """

    kind: str = "train"
    compute_s: float = 1.0
    link_s: float = 0.0
    exposed_ratio: float = 0.15
    link_efficiency: float = 0.97
    power_ratio: float = 0.9
    sm_ratio: float = 0.85
    tensor_ratio: float = 0.4
    dram_ratio: float = 0.45
    memory_ratio: float = 0.85
    warmup_s: float = 90.0
    pause_every_s: float = 1800.0
    pause_s: float = 20.0
    eval_every_s: float = 3600.0
    eval_s: float = 60.0
    burst_s: float = 5.0
    phase: float = 0.5
    reports_steps: bool = True

    @property
    def step_s(self) -> float:
        """Duration of an undisturbed step, s."""
        return self.compute_s + max(self.exposed_ratio * self.link_s, self.link_s - self.compute_s)


@dataclass(slots=True, eq=False)
class Job:
    """One job. Times are seconds since the epoch, UTC.

    Attributes:
        per_node: GPUs on each of its nodes.
        habit: Arguments of `workload.draw_profile`; the profile is drawn when the job is put on GPUs.
        runtime_s: How long it would run if nothing disturbed it and no limit ended it, s.
        outcome: State it would end in.
        gives_up_at: Cancelled if still pending at this time; None: patient.
        after: Job that must end first.
        nodes_held, gpus_held: Node numbers, and flat GPU numbers, while and after it runs.
        lost_s: Running time lost to slow steps so far, s.
    """

    id: int
    user: str
    account: str
    queue: str
    name: str
    submit: float
    nodes: int
    per_node: int
    limit_s: float | None
    runtime_s: float
    outcome: str = "COMPLETED"
    cpus: int = 0
    memory_mib: int = 0
    habit: tuple[str, int, int, int] = ("train", 1, 0, 0)
    profile: Profile | None = None
    array_id: int | None = None
    array_task: int | None = None
    gives_up_at: float | None = None
    after: Job | None = None
    priority: int = 0
    key: int = -1
    state: str = "PENDING"
    eligible: float | None = None
    start: float | None = None
    end: float | None = None
    nodes_held: tuple[int, ...] = ()
    gpus_held: tuple[int, ...] = ()
    reason: str = "Priority"
    planned_start: float | None = None
    lost_s: float = 0.0
    external_id: str | None = None
    end_event: int = 0

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node

    @property
    def job_id(self) -> str:
        return self.external_id if self.external_id is not None else str(self.id)

    @property
    def limit_end(self) -> float:
        """Latest time it can hold its nodes; infinite without a limit or before it starts."""
        if self.start is None or self.limit_s is None:
            return float("inf")
        return self.start + self.limit_s
