"""Runtime forecasts on request: what may be asked, and an injected forecaster run on threads, few at a time.

How a forecast is made is not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from scheduler_hints.errors import BadRequestError, ForecastUnavailableError, UnavailableError, decode_body
from scheduler_hints.schema import Quantiles

MAX_JOBS = 1_000
FORECAST_TIMEOUT_S = 30.0
MAX_FORECASTS = 4
SUBMIT_YEARS = (2000, 2200)

_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Some = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]


class JobRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What is known of a job before it is submitted; leave out what is not. `submit_time` defaults to now.

    `gpu_type` and `node_features`: what is asked for, as the scheduler writes it (`h100`, `nvme&ib`).
    """

    job_id: _Text | None = None
    user: _Text | None = None
    account: _Text | None = None
    queue: _Text | None = None
    name: _Text | None = None
    gpu_type: _Text | None = None
    node_features: _Text | None = None
    nodes: _Some | None = None
    cpus: _Some | None = None
    gpus: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] | None = None
    memory_mib: Annotated[int, msgspec.Meta(ge=1, le=10**12)] | None = None
    time_limit_s: Annotated[int, msgspec.Meta(ge=1, le=10**9)] | None = None
    submit_time: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class ForecastRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Jobs of one cluster that are to be forecast, 1 to 1,000."""

    cluster: _Text
    jobs: Annotated[list[JobRequest], msgspec.Meta(min_length=1, max_length=MAX_JOBS)]


_request_decoder = msgspec.json.Decoder(ForecastRequest)


class RuntimeForecast(msgspec.Struct, frozen=True):
    """Runtime of one job of a request; `job_id` is what the request called it.

    `mode_s`: the most likely runtime, the one that most probability lies within 25 % of.
    """

    job_id: str | None
    runtime: Quantiles
    mode_s: float | None


class RuntimeForecasts(msgspec.Struct, frozen=True):
    """Forecasts in the order of the request's jobs, and what they rest on.

    `model_version`: in charge of the cluster's runtimes, as in published forecasts. `rests_on`: `model`: a trained one
    has earned its place; `recent_runtimes`: a baseline, what the same user or request took of late; `time_limits`: no
    job of the cluster has ended yet, a forecast is the job's own time limit (one hour where it has none) with a guessed
    spread. `ended_jobs`: jobs looked back on. `note`: what a reader should know before believing this, or null.
    `data_age_s`: age of the newest word of the scheduler behind it; null where none tells. It may be used for
    `expires_in_s`.
    """

    items: list[RuntimeForecast]
    cluster: str
    generated_at: datetime
    model_version: str
    rests_on: Literal["model", "recent_runtimes", "time_limits"]
    ended_jobs: int
    note: str | None
    data_age_s: float | None
    expires_in_s: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What a forecaster gives: one runtime and one mode for each job in order, and what they rest on.

    `history_days`: how far back it looks for `ended_jobs`. `ttl_s`: how long it may be used.
    """

    runtimes: list[Quantiles]
    modes_s: list[float | None]
    model_version: str
    ended_jobs: int
    history_days: float
    data_age_s: float | None
    ttl_s: float


Forecaster = Callable[[str, list[dict[str, Any]]], Forecast]


def answer_forecast(request: ForecastRequest, cluster: str, made: Forecast, now: datetime) -> RuntimeForecasts:
    """The answer to a request.

    Args:
        request: What was asked.
        cluster: Name of the cluster.
        made: What the forecaster said.
        now: When, UTC.
    """
    items = [
        RuntimeForecast(job.job_id, runtime, mode_s)
        for job, runtime, mode_s in zip(request.jobs, made.runtimes, made.modes_s, strict=True)
    ]
    is_model = not made.model_version.startswith("baseline:")
    none = f"no job of {cluster} that the store knows has ended in the last {made.history_days:.0f} days"
    if made.ended_jobs:
        rests_on, note = "model" if is_model else "recent_runtimes", None
    elif is_model:
        rests_on, note = "model", f"{none}: the model speaks without any history; look whether ingest runs"
    else:
        rests_on = "time_limits"
        note = (
            f"{none}: these are time limits (one hour where a job has none) with a guessed spread; do not plan by them"
        )
    return RuntimeForecasts(
        items, cluster, now, made.model_version, rests_on, made.ended_jobs, note, made.data_age_s, made.ttl_s
    )


class Forecasts:
    """Runs the forecaster, if there is one."""

    def __init__(self, forecast: Forecaster | None) -> None:
        self._forecast = forecast
        self._lock = threading.Lock()
        self._running = 0

    async def run(self, cluster: str, jobs: list[dict[str, Any]]) -> Forecast:
        """Forecast on a thread; each job has the fields of `JobRequest`.

        Raises:
            UnavailableError: There is no forecaster or no model, others are being made, or it takes too long.
        """
        forecast = self._forecast
        if forecast is None:
            raise UnavailableError("no_forecaster", "this API was started without a runtime forecaster")
        with self._lock:
            if self._running >= MAX_FORECASTS:
                raise UnavailableError("busy", f"{self._running} forecasts are being made; come back in a moment")
            self._running += 1
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Forecast] = loop.create_future()

        def settle(outcome: Forecast | Exception) -> None:
            if future.done():  # the request has given up on it
                return
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        def work() -> None:
            try:
                outcome: Forecast | Exception = forecast(cluster, jobs)
            except Exception as error:
                outcome = error
            finally:
                with self._lock:
                    self._running -= 1
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, outcome)

        # A daemon: a forecast that does not come back must not hold the process when it is told to stop.
        threading.Thread(target=work, name="forecast", daemon=True).start()
        try:
            return await asyncio.wait_for(future, FORECAST_TIMEOUT_S)
        except ForecastUnavailableError as error:
            raise UnavailableError("no_forecast", str(error)) from None
        except TimeoutError:
            if not future.cancelled():
                raise
            raise UnavailableError("timeout", f"the forecaster took longer than {FORECAST_TIMEOUT_S:.0f} s") from None


def decode_request(body: bytes) -> ForecastRequest:
    """Decode a body.

    Raises:
        BadRequestError: It is not JSON, or a `submit_time` is not of this age.
        InvalidBodyError: It has the wrong shape; the message names the field.
    """
    request = decode_body(_request_decoder, body, {"request": ForecastRequest, "job": JobRequest})
    first, last = SUBMIT_YEARS
    for index, job in enumerate(request.jobs):
        if job.submit_time is not None and not first <= job.submit_time.year < last:
            name, value, valid = (
                f"jobs[{index}].submit_time",
                job.submit_time.isoformat(),
                f"years {first} to {last - 1}",
            )
            detail = {"parameter": name, "value": value, "valid": valid}
            raise BadRequestError("bad_value", f"{name}={value!r} is out of range; valid: {valid}", detail)
    return request
