"""What pages read from the hints API: lists with their freshness, counted on a monotonic clock.

An expired hint is never handed on, wherever it expired: at the API, or here while a page was being made. Nothing is
drawn here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from dashboards.reading import Hints, attempt

Freshness = Literal["fresh", "partly", "stale", "down"]


@dataclass(frozen=True, slots=True)
class HintList:
    """One list of the hints API.

    Attributes:
        freshness: fresh; partly (some clusters are stale); stale (none is fresh); down (the API did not answer).
        items: Valid hints, as the API gave them; empty unless fresh or partly.
        version: Version of the snapshot.
        generated_at: When the hints were made.
        expires_at: When they expire, on the clock of this process.
        data_age_s: Age of the newest sample when they were made, s.
        stale_clusters: Clusters without fresh hints.
        actionable_horizon_s: Shortest horizon that a scheduler can act on, s.
        model_versions: Task to model version.
        message: What the API said, when stale or down.
        last_generated_at: When the last fresh hints that this process saw were made, when stale or down.
        last_expired_at: When those expired.
    """

    freshness: Freshness
    items: Sequence[Mapping[str, Any]] = ()
    version: int | None = None
    generated_at: datetime | None = None
    expires_at: datetime | None = None
    data_age_s: float | None = None
    stale_clusters: Sequence[str] = ()
    actionable_horizon_s: float | None = None
    model_versions: Mapping[str, str] = field(default_factory=dict)
    message: str = ""
    last_generated_at: datetime | None = None
    last_expired_at: datetime | None = None

    @property
    def is_valid(self) -> bool:
        """There are hints that may be believed."""
        return self.freshness in ("fresh", "partly")


@dataclass(frozen=True, slots=True)
class _Last:
    generated_at: datetime | None
    expires_s: float


class HintsReader:
    """Reads lists of the hints API.

    Args:
        hints: See `reading.Hints`.
        clock_s: Monotonic seconds.
    """

    def __init__(self, hints: Hints, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._hints = hints
        self._clock_s = clock_s
        self._last: dict[tuple[str, str | None], _Last] = {}

    def list(self, kind: str, cluster: str | None, now: datetime, **params: str) -> HintList:
        """All hints of a kind.

        Args:
            kind: bottlenecks, node-risks or jobs.
            cluster: Name of a cluster; None for all.
            now: Present time, UTC.
            **params: Further parameters of the API.
        """
        asked = {**params, **({"cluster": cluster} if cluster else {})}
        started_s = self._clock_s()
        reading = attempt(f"hints {kind}", lambda: self._hints(f"/v1/{kind}", asked))
        last = self._last.get((kind, cluster))
        if reading.error is not None or not isinstance(reading.value, Mapping):
            return self._invalid("down", reading.error or "the hints API gave no JSON object", last, now)
        answer = reading.value
        if "error" in answer:
            error = answer["error"] if isinstance(answer["error"], Mapping) else {}
            message = str(error.get("message") or "no cluster has fresh hints")
            return self._invalid("stale", message, last, now, _stale_of(error.get("detail")))
        # Counted from when the question was asked: the answer may have been under way for a while.
        expires_s = started_s + float(answer.get("expires_in_s") or 0)
        last = _Last(moment(answer.get("generated_at")), expires_s)
        if expires_s <= self._clock_s():
            return self._invalid("stale", "the hints expired on their way", last, now)
        self._last[kind, cluster] = last
        stale = [str(name) for name in answer.get("stale_shards") or ()]
        return HintList(
            freshness="partly" if stale else "fresh",
            items=[item for item in answer.get("items") or () if isinstance(item, Mapping)],
            version=answer.get("version"),
            generated_at=last.generated_at,
            expires_at=now + timedelta(seconds=expires_s - self._clock_s()),
            data_age_s=answer.get("data_age_s"),
            stale_clusters=stale,
            actionable_horizon_s=answer.get("actionable_horizon_s"),
            model_versions=answer.get("model_versions") or {},
        )

    def status(self) -> Mapping[str, Any]:
        """Freshness of every cluster and kind, as the API gives it.

        Raises:
            Exception: Whatever the API's client raises; a ValueError when the answer is an error.
        """
        answer = self._hints("/v1/status", {})
        if not isinstance(answer, Mapping) or "error" in answer:
            error = answer.get("error") if isinstance(answer, Mapping) else None
            raise ValueError(str((error or {}).get("message") or "the hints API gave no status"))
        return answer

    def _invalid(
        self, freshness: Freshness, message: str, last: _Last | None, now: datetime, stale: Sequence[str] = ()
    ) -> HintList:
        if last is None:
            return HintList(freshness, message=message, stale_clusters=stale)
        expired_ago_s = self._clock_s() - last.expires_s
        return HintList(
            freshness,
            message=message,
            stale_clusters=stale,
            last_generated_at=last.generated_at,
            last_expired_at=now - timedelta(seconds=expired_ago_s),
        )


def moment(value: object) -> datetime | None:
    """A time of the API as a datetime in UTC; None for anything else."""
    if not isinstance(value, str):
        return None
    try:
        parsed = datetime.fromisoformat(value)
    except ValueError:
        return None
    return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)


def _stale_of(detail: object) -> list[str]:
    if isinstance(detail, Mapping):
        shards = detail.get("stale_shards") or detail.get("clusters") or ()
        if isinstance(shards, Mapping | list | tuple):
            return [str(name) for name in shards]
    return []
