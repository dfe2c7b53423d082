"""The OpenAPI 3.1 document of the hints API, made from the types and parameter tables that the API itself uses."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from typing import Any

import msgspec

from scheduler_hints.answers import JobAnswer, ListAnswer
from scheduler_hints.errors import (
    ApiError,
    BadRequestError,
    ForbiddenError,
    NotFoundError,
    QueryTooLongError,
    UnauthorizedError,
    UnavailableError,
)
from scheduler_hints.extender import FilterResult, HostPriority
from scheduler_hints.feedback import FeedbackKept, FeedbackRequest
from scheduler_hints.forecasts import ForecastRequest, RuntimeForecast, RuntimeForecasts
from scheduler_hints.memory_estimates import MemoryEstimate, MemoryRequest, answer_memory
from scheduler_hints.openapi_extender import extender_paths
from scheduler_hints.openapi_parts import BODY_ERRORS, errors_of, json_of, mark_times, parameter_of
from scheduler_hints.openapi_preemptions import preemption_paths
from scheduler_hints.openapi_silences import silence_paths
from scheduler_hints.placements import PlacementRequest, PlacementsKept
from scheduler_hints.preemptions import ClusterPreemption, PreemptionAnswer
from scheduler_hints.progress import ProgressKept, ProgressRequest
from scheduler_hints.queries import PARAMETERS, Parameter
from scheduler_hints.schema import (
    SHAPES,
    Bottleneck,
    Cause,
    DemandForecast,
    ErrorBody,
    GpuRisk,
    JobForecast,
    JobProgress,
    LevelCourse,
    NodeRisk,
    Quantiles,
    Reclaimable,
    ReservationPlan,
    Spare,
    Window,
)
from scheduler_hints.silences import Silence, SilenceList, SilenceRequest
from scheduler_hints.status import Alive, KindStatus, Ready, Status

VERSION = "1.0"
_SUMMARIES = {
    "bottlenecks": "Bottlenecks that are foreseen or have begun",
    "backfill-windows": "Sets of nodes that stay free for a while",
    "node-risks": "Probability that nodes have a hardware fault",
    "jobs": "Forecasts of pending and running jobs",
    "reservation-plans": "What to hold for which job, and why",
    "demand": "Arrivals and GPUs asked for by queue, an hour to two weeks ahead",
}
_AT = datetime(2026, 3, 14, 3, 12, tzinfo=UTC)
_LATER = datetime(2026, 3, 14, 5, 12, tzinfo=UTC)
_QUANTILES = Quantiles(310, 420, 900, 1800, 3600, 4200, 7100, 9800)
_JOB = JobForecast(
    "alpha", "4711", "PENDING", "ada", "train", 2, 16, _AT, None, 14400, [], _QUANTILES, None, _QUANTILES, 0.04, 0.1,
    0.5, 0.9, "Resources", "runtime-20260314T020000", _AT,
    reasons=[
        "about 3× longer than usual here (20 min)", "×2.1: the last 5 runs of this name by ada took 1.2 h",
        "×1.3: asks for 16 GPUs on 2 nodes, up to 4 h",
    ],
    lost_gpu_hours=0.9, lost_gpu_hours_hardware=0.02, lost_gpu_hours_checkpointed=0.27, checkpoint_interval_s=14_200,
    mode_s=1210,
)  # fmt: skip
_ITEMS: dict[str, Any] = {
    "bottlenecks": Bottleneck(
        "thermal_throttle:gpu:GPU-5f", "alpha", "thermal_throttle", "gpu", "n7", "GPU-5f", "r1", "p1", 60, 0.83,
        {"30": 0.41, "60": 0.83, "90": 0.9, "120": 0.93}, _AT, False, ["4711"], "reserve",
        ["margin to slowdown falls by 4 °C a minute"], "bottleneck-20260314T020000", since=_AT, nodes=["n7"],
        causes=[Cause("gpu", "GPU-5f", 1.0, 1.0, "cooling of this GPU alone: none elsewhere")],
        advice="Hold a spare node for the job.",
        levels=LevelCourse(
            "GPU-5f", "gpu_temp_c", "°C", 83, 90, {"30": 84.2, "60": 87.6, "90": 88.4, "120": 88.9},
            {"30": 85.6, "60": 89.2, "90": 90.7, "120": 91.4}, {"30": 86.9, "60": 90.8, "90": 92.6, "120": 93.5},
            "level-20260314T020000",
        ),
    ),
    "backfill-windows": Window(
        "w-n3-n4", "alpha", ["n3", "n4"], 16, _AT, _LATER, 7200, 0.9, "rack", "r1", "p1", "4711", ["4712"]
    ),
    "node-risks": NodeRisk(
        "alpha", "n7", 0.001, 0.02, 0.11, False, ["2 faults in 28 d, fleet median 0", "3 × XID 94 in 28 d"],
        "node-20260314T020000", 2 / 6, 117, [GpuRisk("GPU-5d4c", 0.0006, 0.014, 0.08, ["3 × XID 94 in 28 d"])],
    ),
    "jobs": _JOB,
    "reservation-plans": ReservationPlan(
        "plan-4711", "alpha", "4711", "ada", None, ["n3", "n4"], _AT, _LATER, ["n7 is about to throttle"],
        "the job starts on cool nodes", 28800, "reserve", 0.72, 1.6, 1.152, 0.157,
        [Spare("n3", 1, 0.002), Spare("n4", 2, 0.003)],
    ),
    "demand": DemandForecast(
        "alpha", "serve", "in_demand", "gpus", 24, _LATER, 21, 24, 30, 38, 45, 47, 52, 58, 40, 36,
        [Reclaimable(_AT, _LATER, 12, 0.87)], "demand-experts-2/pool", _AT,
    ),
}  # fmt: skip
_LIST_TYPES = {
    "bottlenecks": ListAnswer[Bottleneck],
    "backfill-windows": ListAnswer[Window],
    "node-risks": ListAnswer[NodeRisk],
    "jobs": ListAnswer[JobForecast],
    "reservation-plans": ListAnswer[ReservationPlan],
    "demand": ListAnswer[DemandForecast],
}
_FACTS: dict[str, Any] = {
    "version": 42, "versions": {"alpha": 42}, "generated_at": _AT, "stale_shards": [], "actionable_horizon_s": 60.0,
    "model_versions": {"bottleneck": "bottleneck-20260314T020000"}, "data_age_s": 7.5, "expires_in_s": 22.4,
}  # fmt: skip
_CHANGING = {
    "ETag": "Strong; send it back in If-None-Match, an unchanged answer is then a 304 without a body.",
    "X-Expires-In": "Seconds for which the answer may be used, counted on a monotonic clock; on a 304 too.",
}
_MEMORY = MemoryRequest(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq=8192, data_parallel=8, zero_stage=3,
    gpu_memory_bytes=40 * 2**30,
)  # fmt: skip


def _read(
    summary: str, schema: dict[str, Any], example: Any, parameters: list[Any], errors: list[type[ApiError]]
) -> Any:
    headers = {name: {"description": text, "schema": {"type": "string"}} for name, text in _CHANGING.items()}
    answer = {"description": summary, "headers": headers, "content": json_of(schema, example)}
    unchanged = {"description": "Unchanged since the ETag in If-None-Match, and still fresh", "headers": headers}
    common = [BadRequestError, UnauthorizedError, ForbiddenError, QueryTooLongError, UnavailableError]
    return {
        "summary": summary,
        "parameters": parameters,
        "responses": {"200": answer, "304": unchanged} | errors_of(*common, *errors),
    }


@functools.cache
def document() -> bytes:
    """The document as JSON."""
    types = [
        *_LIST_TYPES.values(), JobAnswer, Status, RuntimeForecasts, ForecastRequest, ErrorBody, Alive, Ready,
        MemoryRequest, MemoryEstimate, ProgressRequest, ProgressKept, SilenceRequest, Silence, SilenceList,
        FilterResult, HostPriority, PlacementRequest, PlacementsKept, PreemptionAnswer,
        FeedbackRequest, FeedbackKept,
    ]  # fmt: skip
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    mark_times(
        components,
        [
            *_LIST_TYPES.values(),
            *SHAPES.values(),
            JobProgress,
            Reclaimable,
            JobAnswer,
            Status,
            KindStatus,
            RuntimeForecasts,
            ProgressKept,
            PlacementsKept,
            FeedbackKept,
            Silence,
            ClusterPreemption,
        ],
    )
    names = ["job", "status", "forecasts", "request", "error", "alive", "ready", "memory_request", "memory"]
    names += [
        "progress",
        "kept",
        "silence_request",
        "silence",
        "silences",
        "filter",
        "priority",
        "place",
        "placed",
        "preemption",
        "say",
        "said",
    ]
    of = dict(zip([*_LIST_TYPES, *names], schemas, strict=True))
    paths: dict[str, Any] = {}
    for kind, summary in _SUMMARIES.items():
        parameters = [parameter_of(parameter) for parameter in PARAMETERS[kind]]
        example = {"items": [_ITEMS[kind]]} | _FACTS
        paths[f"/v1/{kind}"] = {"get": _read(summary, of[kind], example, parameters, [])}
    in_path = [
        parameter_of(Parameter("cluster", "string", "Name of the cluster.", "alpha"), "path"),
        parameter_of(Parameter("job_id", "string", "Id of the job as its scheduler prints it.", "4711"), "path"),
    ]
    facts = {name: _FACTS[name] for name in JobAnswer.__struct_fields__ if name != "item"}
    one = _read("Forecast of one pending or running job", of["job"], {"item": _JOB} | facts, in_path, [NotFoundError])
    paths["/v1/jobs/{cluster}/{job_id}"] = {"get": one}
    paths["/v1/status"] = {
        "get": {
            "summary": "Freshness of every cluster and kind, versions, models, and the nowcast's own word",
            "responses": {"200": {"description": "Always answered", "content": json_of(of["status"])}}
            | errors_of(BadRequestError, UnauthorizedError, ForbiddenError),
        }
    }
    request = {"cluster": "alpha", "jobs": [{"job_id": "next", "user": "ada", "gpus": 16, "time_limit_s": 14400}]}
    made = RuntimeForecasts(
        [RuntimeForecast("next", _QUANTILES, 1210.0)], "alpha", _AT, "runtime-20260314T020000", "model", 48_211, None,
        41.5, 600.0,
    )  # fmt: skip
    paths["/v1/runtime-forecasts"] = {
        "post": {
            "summary": "Runtimes of up to 1,000 jobs that are not submitted yet, and what the forecasts rest on",
            "requestBody": {"required": True, "content": json_of(of["request"], request)},
            "responses": {"200": {"description": "In the order asked", "content": json_of(of["forecasts"], made)}}
            | errors_of(*BODY_ERRORS, UnavailableError),
        }
    }
    paths["/v1/memory-estimates"] = {
        "post": {
            "summary": "Device memory that a training job needs on its fullest GPU, and whether it fits",
            "requestBody": {"required": True, "content": json_of(of["memory_request"], _MEMORY)},
            "responses": {
                "200": {"description": "Line by line", "content": json_of(of["memory"], answer_memory(_MEMORY))}
            }
            | errors_of(*BODY_ERRORS),
        }
    }
    row = {"job_id": "4711", "ts": _AT, "step": 1200, "step_time_s": 1.32, "loss": 2.71, "phase": "train"}
    row["max_steps"] = 10_000
    paths["/v1/progress"] = {
        "post": {
            "summary": "Takes how far jobs are, in their own words, up to 1,000 rows; wants a token of role place",
            "requestBody": {"required": True, "content": json_of(of["progress"], {"cluster": "alpha", "rows": [row]})},
            "responses": {
                "200": {"description": "On the disk", "content": json_of(of["kept"], ProgressKept(1, "alpha", _AT))}
            }
            | errors_of(*BODY_ERRORS, UnavailableError),
        }
    }
    paths |= silence_paths(of, _AT)
    paths |= extender_paths(of)
    said = {"cluster": "alpha", "hint_id": "bn-5f", "verdict": "right", "note": "the fan was dead", "node": "n7"}
    answer = json_of(of["said"], FeedbackKept("alpha", "bn-5f", "right", "ada", _AT))
    paths["/v1/feedback"] = {
        "post": {
            "summary": "Takes what came of a hint, in somebody's word; wants a token of role place",
            "requestBody": {"required": True, "content": json_of(of["say"], said)},
            "responses": {"200": {"description": "On the disk", "content": answer}}
            | errors_of(*BODY_ERRORS, UnavailableError),
        }
    }
    placed = {"cluster": "alpha", "placements": [{"job_id": "4711", "nodes": ["n3", "n4"]}]}
    answer = json_of(of["placed"], PlacementsKept(1, "alpha", 90.0, _AT))
    paths["/v1/placements"] = {
        "post": {
            "summary": "Takes what was just placed, so that windows are without it; wants a token of role place",
            "requestBody": {"required": True, "content": json_of(of["place"], placed)},
            "responses": {"200": {"description": "Windows are without these nodes from now on", "content": answer}}
            | errors_of(*BODY_ERRORS, UnavailableError),
        }
    }
    paths |= preemption_paths(of, _AT)
    for path, schema, summary, errors in (
        ("/healthz", of["alive"], "The process is alive", []),
        ("/readyz", of["ready"], "At least one shard is fresh; says why not", [UnavailableError]),
        ("/openapi.json", {"type": "object"}, "This document", [BadRequestError]),
    ):
        answer = {"200": {"description": summary, "content": json_of(schema)}} | errors_of(*errors)
        paths[path] = {"get": {"summary": summary, "security": [], "responses": answer}}
    paths["/metrics"] = {
        "get": {
            "summary": "Prometheus text: own health, freshness, active hints (at most 5,000 gauges)",
            "responses": {
                "200": {"description": "Exposition format", "content": {"text/plain": {"schema": {"type": "string"}}}}
            }
            | errors_of(BadRequestError, UnauthorizedError, ForbiddenError),
        }
    }
    whole = {
        "openapi": "3.1.0",
        "info": {
            "title": "Weatherglass hints API",
            "version": VERSION,
            "description": "What is about to happen on GPU training clusters. Times are UTC, durations seconds, "
            "probabilities 0 to 1. Every error has the shape of ErrorBody.",
        },
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=1)
