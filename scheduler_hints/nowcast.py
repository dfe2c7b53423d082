"""The nowcast: newest samples and live jobs in, hints of one cluster out, every tick.

Here belongs the state between ticks and what a tick does. Pure of input and output but for the publisher, the journal
and the model registry; sources are read by `scheduler_hints/nowcast_loop.py`, which calls in here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import polars as pl

from features.classes import GPU_CLASSES
from features.cleaning_live import Courses
from features.port_course import PortRates
from features.telemetry import RingWindow
from features.thresholds import ThresholdBook
from models.registry import Registry
from scheduler_hints.champion import FATAL, Champion
from scheduler_hints.episodes import Episodes, Scored
from scheduler_hints.inventory import Inventory
from scheduler_hints.level_courses import LevelCourses
from scheduler_hints.nowcast_config import MARGIN_S, NowcastConfig
from scheduler_hints.nowcast_memory import Memory
from scheduler_hints.nowcast_outlet import Outlet
from scheduler_hints.nowcast_status import STATUS, status_of
from scheduler_hints.offers import held_out, may_act, offered
from scheduler_hints.pace import Pace
from scheduler_hints.places import Places
from scheduler_hints.schema import Bottleneck, NodeRisk, ReservationPlan
from scheduler_hints.silences import SilenceBook, silenced
from scheduler_hints.snapshot import Publisher, write_atomically
from scheduler_hints.unit_nowcast import UnitNowcast
from scheduler_hints.watches import SURE, Threshold

FORGET_EVERY_S = 600.0  # how often places of GPUs that are gone are given up


class Nowcast:
    """Scores every GPU of one cluster at each tick and publishes what it foresees.

    Args:
        cluster: Name of the cluster.
        publisher: Writes its snapshots.
        config: What it goes by.
        registry: Where models come from; None: the built-in trend stays in charge.
        overrides: Limits per GPU model that replace the built-in ones.
        clock: Seconds that never go back, for timings.

    Attributes:
        pace: How often it ticks at present; it makes the tick wider before ticks take too long.
        received: What its source counted, by name, for its status.
        jobs_at: When the scheduler last told of jobs.
    """

    def __init__(
        self,
        cluster: str,
        publisher: Publisher,
        config: NowcastConfig | None = None,
        *,
        registry: Registry | None = None,
        overrides: Mapping[str, Mapping[str, float]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.cluster = cluster
        self.publisher = publisher
        self.config = config or NowcastConfig()
        self.pace = Pace(self.config.tick_s)
        self.received: Mapping[str, int] = {}
        self.clock = clock
        self._overrides = overrides
        book = ThresholdBook(overrides=overrides)
        self.window = RingWindow(book, stale_s=self.config.stale_s, courses=Courses())
        own = {name: Threshold(p, max(SURE, p)) for name, p in self.config.publish_by_class.items()}
        self.episodes = Episodes(
            cluster, self.config.publish_probability, thresholds=own, stale_keep_s=2 * self.config.tick_s
        )
        queue_stale_s = max(self.config.stale_s, 2 * self.config.jobs_period_s + MARGIN_S)
        self.units = UnitNowcast(book, self.config.stale_s, queue_stale_s)
        self.silences = SilenceBook(publisher.root, cluster)
        self.inventory = Inventory()
        self.problems: dict[str, str] = {}
        self.champion = Champion(registry, self.problems)
        self.levels = LevelCourses(registry, self.problems)
        self.outlet = Outlet(publisher, cluster, self.config, self.problems)
        self.memory = Memory(publisher.root, cluster, self.window, self.units, self.problems)
        self.timings_s: dict[str, float] = {}
        self.ticks = 0
        self.samples_total = 0
        self.samples_ahead_total = 0
        self.last_received_at: datetime | None = None
        self._jobs: pl.DataFrame | None = None
        self._nodes: pl.DataFrame | None = None
        self._forecasts: Any = None
        self.jobs_at: datetime | None = None
        self._bottlenecks: list[Bottleneck] = []
        self._port_rates = PortRates()
        self._before: dict[str, float] = {}  # stages between the last tick and the next, seconds
        self._after_s = 0.0  # what came after scoring at the last tick
        self._plans: Sequence[ReservationPlan] = ()
        self._node_risks: Sequence[NodeRisk] = ()
        self._forgot_s: float | None = None  # first reading, then the last one at which places were given up
        self.memory.recall_queues()
        # Hints and plans that were published last go on under their names, so that a restart makes no new leases.
        self.episodes.resume(self.memory.published("bottlenecks", Bottleneck))
        self._plans = self.memory.published("reservation-plans", ReservationPlan)
        self._reload()  # a model's libraries take seconds to load: not in the first tick

    # --- taking in ------------------------------------------------------------------------------------------

    def observe(
        self,
        gpu: pl.DataFrame,
        node: pl.DataFrame | None = None,
        received_at: datetime | None = None,
        *,
        port: pl.DataFrame | None = None,
    ) -> int:
        """Take in newest samples.

        Args:
            gpu: Rows of `core_gpu_samples` columns; some quantities may be absent.
            node: Rows of `core_node_samples` columns.
            received_at: When they arrived; samples that lie ahead of it are dropped. None: they are history.
            port: Rows of `raw_port_samples` columns: counters, which become rates against those before.

        Returns:
            How many were new.

        Raises:
            ValueError: A key column is absent.
        """
        began = self.clock()
        now_s = received_at.timestamp() if received_at is not None else None
        rates = self._port_rates.take(port, received_at) if port is not None and port.height else None
        taken = self.window.observe(gpu, node, self.inventory.only_job, port=rates, now_s=now_s)
        self.units.observe(node, rates, self.window, now_s)
        self._note_ahead(self.window.ahead)
        if taken and received_at is not None:
            self.last_received_at = received_at
        self.samples_total += taken
        self.spent("observe", self.clock() - began)
        return taken

    def spent(self, stage: str, seconds: float) -> None:
        """Count work that was done for the next tick before it."""
        self._before[stage] = self._before.get(stage, 0.0) + seconds

    def _note_ahead(self, samples: int) -> None:
        self.samples_ahead_total += samples
        if samples:
            self.problems["telemetry-clock"] = (
                f"{samples} sample{'' if samples == 1 else 's'} from the future dropped: synchronise the clocks "
                "of their nodes and of this machine"
            )
        else:
            self.problems.pop("telemetry-clock", None)

    def warm(self, gpu: pl.DataFrame, node: pl.DataFrame | None = None, *, port: pl.DataFrame | None = None) -> int:
        """Fill the windows with recent history from the store or the spool, oldest first; before the first tick."""
        rates = self._port_rates.take(port) if port is not None and port.height else None
        taken = self.window.observe(gpu, node, self.inventory.only_job, port=rates) if gpu.height else 0
        self.units.observe(node, rates, self.window, None)
        return taken

    def observe_jobs(
        self,
        jobs: pl.DataFrame,
        nodes: pl.DataFrame,
        forecasts: Any = (),
        observed_at: datetime | None = None,
        node_risks: Sequence[NodeRisk] = (),
    ) -> None:
        """Take in pending and running jobs, the inventory, and the newest job forecasts.

        Args:
            jobs: Rows of `JOB_COLUMNS`.
            nodes: Rows of `core_nodes` columns.
            forecasts: `JobForecast`s, handed on to the window and plan makers.
            observed_at: When the scheduler said so; the life of windows counts from then.
            node_risks: The newest risks of nodes, for plans.
        """
        began = self.clock()
        self._jobs, self._nodes, self._forecasts, self._node_risks = jobs, nodes, forecasts, node_risks
        self.jobs_at = observed_at or datetime.now(UTC)
        inventory = Inventory.read(jobs, nodes)
        if inventory.model != self.inventory.model:
            book = ThresholdBook.from_nodes(nodes, overrides=self._overrides)
            self.window.set_book(book)
            self.units.set_book(book)
        if inventory.rack != self.inventory.rack:
            self.window.set_racks(inventory.rack)
        self.inventory = inventory
        self.units.observe_jobs(jobs, nodes, self.jobs_at)
        self.spent("jobs", self.clock() - began)

    # --- the tick -------------------------------------------------------------------------------------------

    def tick(self, now: datetime) -> dict[str, Any]:
        """Score, publish, and say how it went.

        Args:
            now: The moment, UTC.

        Returns:
            The status that was written: timings in seconds by stage, counts, ages, problems.
        """
        began = self.clock()
        stages = {"observe": 0.0, **self._before}
        before_s = sum(stages.values())
        self._before = {}

        def lap(name: str, since: float) -> float:
            moment = self.clock()
            stages[name] = moment - since
            return moment

        now_s = now.timestamp()
        self._reload()
        mark = lap("reload", began)
        age = self.window.age_s(now_s)[self.window.is_fresh(now_s)]
        scores = self._score(now_s)
        scores += self.units.score(now_s, self.champion.forecast, self.inventory.excluded)
        self.champion.note()
        scored = mark = lap("score", mark)
        # Before anything is published: what is said now must hold until the next tick, however late that comes.
        self.pace.foresee(before_s + scored - began + self._after_s)
        horizon = self._actionable_s(age)
        place = Places(self.window, self.inventory, now_s)
        self.episodes.stale_keep_s = 2 * self.pace.tick_s
        foreseen = self.episodes.update(now, scores, place) if age.size else []
        foreseen = offered(foreseen, horizon, self.config.publish_probability, self.config.publish_by_class)
        self._bottlenecks = self._marked(foreseen, now)
        mark = lap("episodes", mark)
        self._bottlenecks = self.levels.attach(self._bottlenecks, self.episodes.worst, self.window, now_s)
        mark = lap("levels", mark)
        newest_s = float(age.min()) if age.size else None
        self.outlet.bottlenecks(self._bottlenecks, newest_s, self.pace.tick_s, self.champion.versions(), horizon)
        mark = lap("publish", mark)
        self._publish_windows(now, horizon)
        mark = lap("windows", mark)
        self.memory.keep(now_s)
        done = lap("remember", mark)
        self._after_s = done - scored
        stages["tick"] = done - began
        self.timings_s = stages
        self.ticks += 1
        self.pace.note(before_s + done - began)
        self._note("load", self.pace.problem())
        status = self._write_status(now, age, horizon, scores)
        # After all else: indices change. By the last reading: while the source is down, no GPU is gone for that.
        # What a restart remembers has no sample yet: it is not gone before sources have had time to tell of it.
        read_s = self.last_received_at.timestamp() if self.last_received_at is not None else None
        if self._forgot_s is None:
            self._forgot_s = read_s
        elif read_s is not None and abs(read_s - self._forgot_s) >= FORGET_EVERY_S:
            self._forgot_s = read_s
            self.window.forget(read_s)
            self.units.forget(read_s)
        return status

    def _marked(self, hints: list[Bottleneck], now: datetime) -> list[Bottleneck]:
        """Hints with what keeps schedulers from acting on them: a silence, or the share that is held out."""
        hints = held_out(silenced(hints, self.silences.active(now)), self.config.holdout_ratio)
        self._note("silences", self.silences.problem)
        return hints

    def _actionable_s(self, age: np.ndarray) -> float | None:
        """Time from a sample to a scheduler's act: p95 of sample ages, the present tick, the scheduler's own period."""
        if not age.size:
            return None
        return max(float(np.quantile(age, 0.95)), 0.0) + self.pace.tick_s + self.config.consumer_period_s

    def _note(self, part: str, problem: str | None) -> None:
        if problem is None:
            self.problems.pop(part, None)
        else:
            self.problems[part] = problem

    def _score(self, now_s: float) -> list[Scored]:
        excluded = self._excluded()
        scores = []
        for name in GPU_CLASSES:
            gpus = self.window.screened(name, now_s)
            if excluded is not None:
                gpus = gpus[~excluded[gpus]]
            block = self.window.features(gpus, name, now_s)
            is_active = self.window.is_set(name)[gpus]
            probabilities, version = self.champion.forecast(block)
            scores.append(Scored(name, block, probabilities, is_active, version))
        return scores

    def _excluded(self) -> np.ndarray | None:
        if not self.inventory.excluded:
            return None
        codes = [i for i, name in enumerate(self.window.node_names) if name in self.inventory.excluded]
        return np.isin(self.window.node[: self.window.count], codes)

    def _publish_windows(self, now: datetime, horizon_s: float | None) -> None:
        if self._jobs is None or self._nodes is None or self.jobs_at is None:
            return
        ttl, age = self.outlet.life_of_jobs(now, self.jobs_at, self.pace.tick_s)
        if ttl <= 0:
            return
        try:
            windows, plans = self._plan(self._jobs, self._nodes, now)
        except FATAL:
            raise
        except BaseException as error:
            self.problems["windows"] = f"{type(error).__name__}: {error}"
            return
        self.problems.pop("windows", None)
        versions = {"runtime": _runtime_version(self._forecasts)}
        self.outlet.publish("backfill-windows", windows, ttl, age, versions, None, _outline(windows))
        versions = {**self.champion.versions(), **versions}
        self.outlet.publish("reservation-plans", plans, ttl, age, versions, horizon_s, b"")

    def _plan(self, jobs: pl.DataFrame, nodes: pl.DataFrame, now: datetime) -> tuple[Sequence[Any], Sequence[Any]]:
        from scheduler_hints.plans import reservation_plans
        from scheduler_hints.windows import backfill_windows

        windows = backfill_windows(
            jobs, nodes, self._forecasts, now, self.config.window_confidence,
            guard_s=self.config.window_guard_s, cluster=self.cluster,
        )  # fmt: skip
        self._plans = reservation_plans(
            [hint for hint in self._bottlenecks if may_act(hint)], windows, jobs, nodes, now,
            self.config.plan_lease_s, cluster=self.cluster,
            min_probability=self.config.publish_probability, by_class=self.config.publish_by_class,
            node_risks=self._node_risks, forecasts=self._forecasts,
            previous=self._plans,
        )  # fmt: skip
        return windows, self._plans

    @property
    def published(self) -> int:
        """Bottlenecks that stand at present."""
        return len(self._bottlenecks)

    # --- models, status ----------------------------------------------------------------------------

    def _reload(self) -> None:
        self.champion.reload()
        self.levels.reload()

    def _write_status(
        self, now: datetime, age: np.ndarray, horizon_s: float | None, scores: Sequence[Scored]
    ) -> dict[str, Any]:
        self.problems.pop("status", None)
        status = status_of(self, now, age, horizon_s, scores)
        try:
            write_atomically(self.publisher.root / self.cluster / STATUS, msgspec.json.encode(status))
        except OSError as error:
            self.problems["status"] = str(error)
            status["problems"] = dict(self.problems)
        return status


def _outline(windows: Sequence[Any]) -> bytes:
    return "\n".join(f"{window.id} {window.start}" for window in windows).encode()


def _runtime_version(forecasts: Any) -> str:
    values = forecasts.values() if isinstance(forecasts, Mapping) else forecasts or ()
    for forecast in values:
        return str(getattr(forecast, "model_version", "baseline"))
    return "none"
