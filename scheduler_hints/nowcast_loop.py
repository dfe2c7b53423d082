"""The loop that drives a nowcast: asks the sources, ticks on a monotonic clock, never stops because of a source.

Here belong scheduling and the handling of sources that fail, hang or come late; what a tick does stands in
`scheduler_hints/nowcast.py`. Sources are injected, so that nothing here knows Prometheus or Slurm.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

import polars as pl

from scheduler_hints.champion import FATAL
from scheduler_hints.nowcast import Nowcast

log = logging.getLogger(__name__)

WAIT_SHARE = 0.5  # of a tick that the loop waits for samples before it scores what it has
JOBS_WAIT_SHARE = 0.1  # and then for jobs, before it cuts windows from the last ones
LOG_EVERY_S = 60.0  # a problem that lasts is logged at most this often
ASKED_AT_MOST = 10_000  # GPUs beyond which a tick should not depend on questions to a server or to exporters
SHOWN = 3  # warnings of a source that are quoted
_OURS = ("pipelines", "scheduler_hints", "models", "features")  # their errors are sentences


class Newest(Protocol):
    """What a telemetry source gives: newest sample of each GPU, node and port, and in words what it could not read."""

    @property
    def gpu(self) -> pl.DataFrame: ...
    @property
    def node(self) -> pl.DataFrame: ...
    @property
    def port(self) -> pl.DataFrame: ...
    @property
    def warnings(self) -> Sequence[str]: ...


class TelemetrySource(Protocol):
    """Source of newest samples."""

    name: str

    def latest(self) -> Newest:
        """The newest samples.

        A source that is sent to may also have `receiver_problem`, in words why it is not up, and `received`, what it
        counted by name; one whose every answer costs a question `is_asked`.
        """
        ...


class Live(Protocol):
    """What a job source gives: pending and running jobs, and the nodes."""

    @property
    def jobs(self) -> pl.DataFrame: ...
    @property
    def nodes(self) -> pl.DataFrame: ...


class JobSource(Protocol):
    """Source of live jobs."""

    name: str

    def live(self) -> Live: ...


class Poll:
    """One question at a time to one source, in a thread of its own, so that a source that hangs delays nothing.

    Args:
        name: Name for logs and problems.
        ask: The question.
    """

    def __init__(self, name: str, ask: Callable[[], Any]) -> None:
        self.name = name
        self.problem: str | None = None
        self.failures_total = 0
        self.seconds = 0.0
        self._ask = ask
        self._thread: threading.Thread | None = None
        self._answer: tuple[Any, datetime, float] | BaseException | None = None
        self._logged = self._warned = -LOG_EVERY_S

    def start(self) -> None:
        """Ask, unless the last question still waits for its answer."""
        if self._thread is None:
            self._answer = None
            # A daemon: a source that hangs must not keep the process from ending either.
            thread = threading.Thread(target=self._work, name=f"poll-{self.name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the machine gives no more threads at present
                self._fail(error)
            else:
                self._thread = thread

    def _work(self) -> None:
        began = time.perf_counter()
        asked_at = datetime.now(UTC)  # before the answer: an age counted from here is never too young
        try:
            self._answer = self._ask(), asked_at, time.perf_counter() - began
        except BaseException as error:  # a thread of its own: nothing to let through to
            self._answer = error

    def take(self, wait_s: float) -> tuple[Any, datetime] | None:
        """The answer and when it was asked for; None when there is none yet or the source failed."""
        if self._thread is None:
            return None
        self._thread.join(timeout=max(wait_s, 0))
        if self._thread.is_alive():
            self.problem = f"{self.name}: no answer yet"
            return None
        self._thread = None
        if self._answer is None or isinstance(self._answer, BaseException):
            self._fail(self._answer or RuntimeError("ended without an answer"))
            return None
        answer, asked_at, self.seconds = self._answer
        self.problem = None
        return answer, asked_at

    def warn(self, text: str) -> None:
        """Log what an answer lacked, now and then."""
        if time.monotonic() - self._warned >= LOG_EVERY_S:
            self._warned = time.monotonic()
            log.warning("source %s: %s", self.name, text)

    def _fail(self, error: BaseException) -> None:
        self.failures_total += 1
        said = _said(self.name, error)
        self.problem = f"{self.name}: {said}"
        if time.monotonic() - self._logged >= LOG_EVERY_S:
            self._logged = time.monotonic()
            log.warning("source %s failed, going on without it: %s", self.name, said)


def _said(name: str, error: BaseException) -> str:
    """An error in words, without the name of its source before it; one that is not ours with its kind."""
    text = str(error).removeprefix(f"{name}: ")
    is_ours = type(error).__module__.partition(".")[0] in _OURS
    return text if is_ours else f"{type(error).__name__}: {text}"


def run(
    nowcast: Nowcast,
    telemetry_source: TelemetrySource,
    job_source: JobSource | None,
    tick_s: float,
    stop_event: threading.Event,
    *,
    job_forecasts: Callable[[], Any] | None = None,
    node_risks: Callable[[], Any] | None = None,
    jobs_period_s: float | None = None,
    clean: Callable[[pl.DataFrame], pl.DataFrame] | None = None,
    on_tick: Callable[[dict[str, Any]], None] | None = None,
    wall_clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object] | None = None,
) -> None:
    """Tick until told to stop.

    Ticks never overlap. The nowcast says how far apart they are (`scheduler_hints/pace.py`); one that overruns all the
    same makes the loop leave out those it missed, which are counted.

    Args:
        nowcast: What ticks.
        telemetry_source: Gives newest samples; asked once a tick.
        job_source: Gives live jobs; None: there is no scheduler.
        tick_s: Seconds between ticks, on the monotonic clock, while there is time.
        stop_event: Set it to stop after the present tick.
        job_forecasts: Gives the newest job forecasts when jobs are taken in.
        node_risks: Gives the newest risks of nodes then.
        jobs_period_s: Seconds between questions to the job source; default: the nowcast's own setting.
        clean: Applied to GPU samples before they are taken in, as the cleaning of ingest.
        on_tick: Called with the status after each tick.
        wall_clock: Gives the moment of a tick.
        clock: Seconds that never go back.
        wait: Lets so many seconds pass; default: until `stop_event` is set.
    """
    wait = wait or stop_event.wait
    telemetry = Poll(telemetry_source.name, telemetry_source.latest)
    jobs = Poll(job_source.name, job_source.live) if job_source is not None else None
    period_s = nowcast.config.jobs_period_s if jobs_period_s is None else jobs_period_s
    next_tick = clock()
    next_jobs = next_tick
    while not stop_event.is_set():
        if jobs is not None and clock() >= next_jobs:
            jobs.start()
            next_jobs = clock() + period_s
        telemetry.start()
        _take_samples(nowcast, telemetry, WAIT_SHARE * tick_s, clean)
        _note(nowcast, "receiver", getattr(telemetry_source, "receiver_problem", None))
        _note(nowcast, "telemetry-kind", _asks_too_much(nowcast, telemetry_source, telemetry))
        nowcast.received = getattr(telemetry_source, "received", {})
        if jobs is not None:
            _take_jobs(nowcast, jobs, JOBS_WAIT_SHARE * tick_s, job_forecasts, node_risks)
        try:
            status = nowcast.tick(wall_clock())
            if on_tick is not None:
                on_tick(status)
        except FATAL:
            raise
        except BaseException:  # the next tick may well succeed; hints expire by themselves meanwhile
            log.exception("tick failed")
        period = tick_s * nowcast.pace.stretch
        next_tick += period
        behind = clock() - next_tick
        if behind > 0:
            missed = int(-(-behind // period))
            nowcast.pace.missed_total += missed
            next_tick += period * missed
        wait(max(0.0, next_tick - clock()))


def _asks_too_much(nowcast: Nowcast, source: TelemetrySource, poll: Poll) -> str | None:
    """That a cluster has outgrown being asked for its samples, with figures; None when it has not."""
    gpus = nowcast.window.count
    if gpus <= ASKED_AT_MOST or not getattr(source, "is_asked", False):
        return None
    return (
        f"{gpus:,} GPUs are asked for at every tick, which took {poll.seconds:.1f} s; above {ASKED_AT_MOST:,} have "
        'Prometheus send its samples: telemetry = "remote-write"'
    )


def _take_samples(
    nowcast: Nowcast, poll: Poll, wait_s: float, clean: Callable[[pl.DataFrame], pl.DataFrame] | None
) -> None:
    got = poll.take(wait_s)
    _note(nowcast, "telemetry-source", poll.problem)
    if got is None:
        return
    newest, asked_at = got
    try:
        _note_warnings(nowcast, poll, getattr(newest, "warnings", ()))
        began = nowcast.clock()
        gpu = clean(newest.gpu) if clean is not None else newest.gpu
        nowcast.spent("clean", nowcast.clock() - began)
        port = getattr(newest, "port", None)
        nowcast.observe(gpu, newest.node, asked_at + timedelta(seconds=poll.seconds), port=port)
    except FATAL:
        raise
    except BaseException as error:
        said = _said(poll.name, error)
        _note(nowcast, "telemetry-source", f"{poll.name}: {said}")
        log.warning("samples of %s could not be taken in: %s", poll.name, said)


def _take_jobs(
    nowcast: Nowcast,
    poll: Poll,
    wait_s: float,
    job_forecasts: Callable[[], Any] | None,
    node_risks: Callable[[], Any] | None,
) -> None:
    got = poll.take(wait_s)
    _note(nowcast, "job-source", poll.problem)
    if got is None:
        return
    live, asked_at = got
    try:
        forecasts = job_forecasts() if job_forecasts is not None else ()
        risks = node_risks() if node_risks is not None else ()
        nowcast.observe_jobs(live.jobs, live.nodes, forecasts, asked_at, risks)
    except FATAL:
        raise
    except BaseException as error:
        said = _said(poll.name, error)
        _note(nowcast, "job-source", f"{poll.name}: {said}")
        log.warning("jobs of %s could not be taken in: %s", poll.name, said)


def _note_warnings(nowcast: Nowcast, poll: Poll, warnings: Sequence[str]) -> None:
    if not warnings:
        _note(nowcast, "telemetry-targets", None)
        return
    more = f"; and {len(warnings) - SHOWN} more" if len(warnings) > SHOWN else ""
    plural = "s" if len(warnings) > 1 else ""
    quoted = "; ".join(str(warning).removeprefix(f"{poll.name}: ") for warning in warnings[:SHOWN])
    text = f"{len(warnings)} warning{plural}: {quoted}{more}"
    _note(nowcast, "telemetry-targets", text)
    poll.warn(text)


def _note(nowcast: Nowcast, key: str, problem: str | None) -> None:
    if problem is None:
        nowcast.problems.pop(key, None)
    else:
        nowcast.problems[key] = problem
