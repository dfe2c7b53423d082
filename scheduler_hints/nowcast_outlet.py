"""How a nowcast publishes: the life of what it says, the snapshot, the journal, and what to say when a disk is full.

Nothing here decides what is foreseen or planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from scheduler_hints.journal import Journal
from scheduler_hints.nowcast_config import MARGIN_S, NowcastConfig
from scheduler_hints.schema import Bottleneck
from scheduler_hints.snapshot import Publisher, Snapshot


class Outlet:
    """Publishes the snapshots of one cluster.

    Args:
        publisher: Writes them.
        config: Lives of hints.
        problems: What is wrong in words, by where; changed in place.
    """

    def __init__(self, publisher: Publisher, cluster: str, config: NowcastConfig, problems: dict[str, str]) -> None:
        self.publisher, self.config, self.problems = publisher, config, problems
        self.journal = Journal(publisher.root, cluster)

    def bottlenecks(
        self,
        hints: Sequence[Bottleneck],
        newest_s: float | None,
        tick_s: float,
        versions: Mapping[str, str],
        horizon_s: float | None,
    ) -> None:
        """Publish hints, unless the data are so old that they have died: nothing may make old data live longer.

        Args:
            hints: What is foreseen.
            newest_s: Age of the newest sample, seconds; None: no GPU has a fresh one.
            tick_s: The present tick.
            versions: Class → who forecast it.
            horizon_s: Actionable horizon, seconds.
        """
        if newest_s is None:
            self.problems["telemetry"] = "no fresh sample"
            return
        newest = max(newest_s, 0.0)
        ttl = self._life(self.config.bottleneck_ttl_ticks * tick_s, newest, self.config.exporter_interval_s)
        if ttl <= 0:
            self.problems["telemetry"] = f"newest sample is {newest:.0f} s old"
            return
        self.problems.pop("telemetry", None)
        states = (f"{hint.id} {hint.is_active} {hint.horizon_s} {hint.silenced_by}" for hint in hints)
        self.publish("bottlenecks", hints, ttl, newest, versions, horizon_s, "\n".join(states).encode())

    def life_of_jobs(self, now: datetime, jobs_at: datetime, tick_s: float) -> tuple[float, float]:
        """Seconds that what rests on the scheduler's word may live, 0 or less: not at all; and the age of that word."""
        age = max(0.0, (now - jobs_at).total_seconds())
        ttl = self._life(self.config.window_ttl_ticks * tick_s, age, self.config.jobs_period_s)
        if ttl <= 0:
            self.problems["jobs"] = f"newest word of the scheduler is {age:.0f} s old"
        else:
            self.problems.pop("jobs", None)
        return ttl, age

    @staticmethod
    def _life(ttl_s: float, age_s: float, period_s: float) -> float:
        return ttl_s - max(0.0, age_s - period_s - MARGIN_S)

    def publish(
        self,
        kind: Any,
        items: Sequence[Any],
        ttl_s: float,
        data_age_s: float,
        versions: Mapping[str, str],
        horizon_s: float | None,
        outline: bytes,
    ) -> Snapshot | None:
        """Write a snapshot and its line of the journal; None where the disk refused: the old one expires by itself."""
        try:
            snapshot = self.publisher.publish(
                kind, items, ttl_s=ttl_s, data_age_s=data_age_s, model_versions=versions, actionable_horizon_s=horizon_s
            )
            self.journal.append(snapshot, outline)
        except OSError as error:
            self.problems[kind] = f"{error.strerror or error}: {error.filename or ''}"
            return None
        self.problems.pop(kind, None)
        return snapshot
