"""The shapes of what is published: hints, forecasts, and the snapshot envelope that carries them.

Here belong types alone; how they are computed, stored and served stands elsewhere. Times are UTC, durations seconds,
probabilities 0–1. JSON field names are these names.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

from features.classes import HintClass

BottleneckClass = HintClass
Scope = Literal["gpu", "link", "node", "job", "rack", "pod", "cluster", "queue"]
Severity = Literal["page", "ticket", "info"]
Action = Literal["reserve", "retry_elsewhere", "throttle", "drain_after_job", "none"]
Kind = Literal["bottlenecks", "backfill-windows", "node-risks", "jobs", "reservation-plans", "demand"]
KINDS: tuple[Kind, ...] = ("bottlenecks", "backfill-windows", "node-risks", "jobs", "reservation-plans", "demand")
HORIZONS_S: tuple[int, ...] = (30, 60, 90, 120)
DemandQuantity = Literal["arrivals", "asked_hours", "in_demand"]
DEMAND_HORIZONS_H: tuple[int, ...] = (1, 3, 6, 12, 24, 48, 72, 168, 336)


class Cause(msgspec.Struct, frozen=True):
    """What may lie behind a hint.

    `share_explained`: of the hint's members; `share_affected`: of what the cause could touch.
    """

    kind: Scope
    id: str
    share_explained: float
    share_affected: float
    evidence: str


class LevelCourse(msgspec.Struct, frozen=True):
    """How the level that tells a bottleneck's class goes on over the next two minutes, on one GPU.

    The GPU is the one of the hint's on which it is likeliest. `quantity` is `gpu_temp_c` (°C), `gpu_power_w` (W),
    `nvlink_fill_ratio` (share of the achievable rate) or `fb_free_gib` (free device memory, GiB; the limit is below).
    `now` is the newest reading; `q10`, `q50`, `q90` give, by horizon in seconds as of `probabilities`, what the level
    stays under with 10, 50 and 90 %; they never cross. `limit` is null where it is not known. `model_version` is
    `baseline:persistence` where no model has earned its place: the level stays, within what it has moved by lately.
    """

    gpu_uuid: str
    quantity: str
    unit: str
    now: float
    limit: float | None
    q10: dict[str, float]
    q50: dict[str, float]
    q90: dict[str, float]
    model_version: str


class Bottleneck(msgspec.Struct, frozen=True):
    """A bottleneck whose onset is foreseen, one per class and common cause.

    `probabilities` gives P(onset within h) for each horizon in seconds; it never falls with the horizon.
    `horizon_s` and `probability` are the shortest horizon that reached the publication threshold.
    `is_active` is true when the condition is already set (no forecast, a fact).
    `too_short` has the probabilities of horizons that leave a scheduler no time to act: they are for people, and
    `probabilities` and `horizon_s` are without them. `is_actionable` is false where all horizons are too short.
    `members`: GPUs, links, nodes or queues that are merged into it; `nodes`: theirs, at most 512 names.
    `causes`: what may lie behind it, the likeliest first.
    `since`: when it was first published; id and `since` outlast changes of scope.
    `severity`: `page` needs a person now, `ticket` in working hours, `info` programs alone.
    `advice`: `action` in words.
    `unit`: name of the link (node/device/port) or queue, for those scopes; the jobs of a queue's hint wait in it.
    `levels`: course of the class's quantity on the GPU it is likeliest on; null where it is not measured.
    `silenced_by`: id of the silence that covers it; a scheduler is not served it.
    `is_held_out`: nothing is done about it, so that it can be seen whether it comes true.
    """

    id: str
    cluster: str
    bottleneck_class: BottleneckClass
    scope: Scope
    node: str | None
    gpu_uuid: str | None
    rack: str | None
    pod: str | None
    horizon_s: int
    probability: float
    probabilities: dict[str, float]
    expected_onset: datetime | None
    is_active: bool
    job_ids: list[str]
    action: Action
    reasons: list[str]
    model_version: str
    too_short: dict[str, float] = {}
    is_actionable: bool = True
    since: datetime | None = None
    severity: Severity = "info"
    members: int = 1
    nodes: list[str] = []
    unit: str | None = None
    causes: list[Cause] = []
    advice: str = ""
    levels: LevelCourse | None = None
    silenced_by: str | None = None
    is_held_out: bool = False


class Window(msgspec.Struct, frozen=True):
    """Nodes that stay free from `start` to `end` with the given confidence. `end` null: nothing bounds it yet."""

    id: str
    cluster: str
    nodes: list[str]
    gpus: int
    start: datetime
    end: datetime | None
    duration_s: float | None
    confidence: float
    scope: Scope
    rack: str | None
    pod: str | None
    bounded_by: str | None
    fits_jobs: list[str]


class GpuRisk(msgspec.Struct, frozen=True):
    """Probability that one GPU of a node has a hardware fault within each horizon; part of the node's."""

    gpu_uuid: str
    p_1h: float
    p_24h: float
    p_7d: float
    reasons: list[str]


class NodeRisk(msgspec.Struct, frozen=True):
    """Probability that a node has a hardware fault within each horizon.

    `gpus`: those with signs or faults of their own, the likeliest first. `lemon_score`: share of the signals of bad
    hardware that the node showed in 28 days. `spare_rank`: place among the cluster's spares, the best is 1; null: none.
    """

    cluster: str
    node: str
    p_1h: float
    p_24h: float
    p_7d: float
    is_climatology: bool
    reasons: list[str]
    model_version: str
    lemon_score: float | None = None
    spare_rank: int | None = None
    gpus: list[GpuRisk] = []


class Quantiles(msgspec.Struct, frozen=True):
    """Quantiles of a duration in seconds; they never cross."""

    q05_s: float
    q10_s: float
    q25_s: float
    q50_s: float
    q75_s: float
    q80_s: float
    q90_s: float
    q95_s: float


class JobProgress(msgspec.Struct, frozen=True):
    """What a running job last reported of itself. `step_time_s`: of the newest steps, the median.

    `checkpoint_at`: when it last reported the phase `checkpoint`, within 12 hours; null: it did not.
    """

    step: int | None
    max_steps: int | None
    step_time_s: float | None
    phase: str | None
    reported_at: datetime
    checkpoint_at: datetime | None = None


class JobForecast(msgspec.Struct, frozen=True):
    """What is foreseen for one known job. `remaining` for a running job, `wait` and `runtime` for a pending one.

    `wait` and `remaining` count from `generated_at`, however long it has waited or run by then.
    `mode_s`: the most likely runtime, the one that most probability lies within 25 % of; the median `q50_s` of
    `runtime` errs least on the whole, its `q80_s` is for fitting jobs into gaps.
    `p_timeout`, `p_node_failure` and `p_out_of_memory` are parts of `p_fail`; what is left is a failure of its own.
    `reasons` say why it runs as long as foreseen: how far from usual, then up to three groups of facts, each with the
    factor it moves the median by. Where `remaining` follows reported `progress`, that comes first among them, and
    `model_version` ends in `+progress`. It begins with `baseline:` where no trained model has earned its place, and is
    `baseline:no_history` while no job of the cluster has ended: `runtime` is then the time limit with a guessed spread.
    `lost_gpu_hours`: expected to be lost to any bad end without checkpoints, `lost_gpu_hours_hardware` to node failures
    alone, `lost_gpu_hours_checkpointed` to these with a checkpoint each `checkpoint_interval_s`, its own time counted;
    null without GPUs. The interval is null until a failure was seen on the cluster.
    """

    cluster: str
    job_id: str
    state: str
    user: str | None
    queue: str | None
    nodes: int | None
    gpus: int | None
    submit_time: datetime
    start_time: datetime | None
    time_limit_s: int | None
    node_list: list[str]
    runtime: Quantiles | None
    remaining: Quantiles | None
    wait: Quantiles | None
    p_fail: float | None
    p_start_60s: float | None
    p_start_600s: float | None
    p_start_3600s: float | None
    reason: str | None
    model_version: str
    generated_at: datetime
    p_timeout: float | None = None
    p_node_failure: float | None = None
    p_out_of_memory: float | None = None
    reasons: list[str] = msgspec.field(default_factory=list)
    lost_gpu_hours: float | None = None
    lost_gpu_hours_hardware: float | None = None
    lost_gpu_hours_checkpointed: float | None = None
    checkpoint_interval_s: float | None = None
    progress: JobProgress | None = None
    mode_s: float | None = None


class Spare(msgspec.Struct, frozen=True):
    """A node held: its place among the cluster's spares (the best is 1) and P(fault within 24 h); null: not known."""

    node: str
    spare_rank: int | None
    p_24h: float | None


class ReservationPlan(msgspec.Struct, frozen=True):
    """What to hold for whom, from when to when, and why.

    `action`: `reserve` for a job about to start, `migrate` for a running one: checkpoint, and go on on the spares.
    `probability`: the trouble comes and would have hit the job. `saved_gpu_hours`: saved if it does; null where nobody
    knows how long the job runs. `benefit_gpu_hours` = saved × probability; `cost_gpu_hours` = GPU-hours idle if it does
    not × (1 − probability): no plan is published whose benefit is known to be less. `cost_if_wrong_gpu_s`: the most it
    can cost, GPU-seconds of the whole hold. `spares`: the nodes, the best ranked first.
    """

    id: str
    cluster: str
    job_id: str
    user: str
    account: str | None
    nodes: list[str]
    start: datetime
    end: datetime
    because: list[str]
    benefit: str
    cost_if_wrong_gpu_s: float
    action: Literal["reserve", "migrate"] = "reserve"
    probability: float | None = None
    saved_gpu_hours: float | None = None
    benefit_gpu_hours: float | None = None
    cost_gpu_hours: float | None = None
    spares: list[Spare] = []


class Reclaimable(msgspec.Struct, frozen=True):
    """Hours in which a queue with a daily trough leaves `units` free of the most it used in four weeks.

    `confidence` is the share of past forecasts at the same leads that held in every hour of such a window.
    """

    start: datetime
    end: datetime
    units: int
    confidence: float


class DemandForecast(msgspec.Struct, frozen=True):
    """What is foreseen of one quantity of one queue at `target_time`. `queue` null: all queues together.

    `arrivals`: jobs submitted within the hour that ends then. `asked_hours`: units × time limit of those jobs.
    `in_demand`: units of the jobs that run or pend then. `q05` to `q95` never cross; `q50` is the point forecast.
    `reclaimable`: windows of a queue that falls each day, begun within the horizon; else empty.
    """

    cluster: str
    queue: str | None
    quantity: DemandQuantity
    unit: str
    horizon_h: int
    target_time: datetime
    q05: float
    q10: float
    q25: float
    q50: float
    q75: float
    q80: float
    q90: float
    q95: float
    last_value: float
    last_week_value: float
    reclaimable: list[Reclaimable]
    model_version: str
    generated_at: datetime


class Snapshot(msgspec.Struct, frozen=True):
    """Everything of one kind that one writer last published for one cluster: one file, replaced atomically.

    `version` rises with every publication and survives restarts of the writer. `ttl_s` counts from `generated_at`;
    readers on the same boot (`boot_id`) count it on CLOCK_BOOTTIME from `generated_boottime_s`, so that a step of
    the wall clock neither revives nor kills a hint. `items` are raw JSON of the kind's shape.
    """

    schema_version: int
    kind: Kind
    cluster: str
    version: int
    generated_at: datetime
    ttl_s: float
    data_age_s: float
    actionable_horizon_s: float | None
    model_versions: dict[str, str]
    boot_id: str
    generated_boottime_s: float
    items: list[msgspec.Raw]


class ErrorDetail(msgspec.Struct, frozen=True):
    """The one shape of an error."""

    code: str
    message: str
    detail: dict | list | str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """Envelope of an error: `{"error": {"code", "message", "detail"}}`."""

    error: ErrorDetail


SHAPES: dict[str, type[msgspec.Struct]] = {
    "bottlenecks": Bottleneck,
    "backfill-windows": Window,
    "node-risks": NodeRisk,
    "jobs": JobForecast,
    "reservation-plans": ReservationPlan,
    "demand": DemandForecast,
}
