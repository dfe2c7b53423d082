"""The reservation plans that may be believed now: fetched, read item by item, and dropped when they expire.

Here belongs the freshness of plans on a clock that no step of the wall clock moves; not what is done about them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from scheduler_hints.schema import ReservationPlan

_MAX_EXPIRY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class PlansAnswer:
    """Reservation plans as fetched.

    Attributes:
        items: Of that shape, or dicts of it.
        expires_in_s: How long they may be believed, s; 0: not at all.
        problem: Why not, in words.
    """

    items: Sequence[Any]
    expires_in_s: float
    problem: str = ""


class HintsClient(Protocol):
    """The part of `scheduler_hints.client.HintsClient` that is needed here."""

    def reservation_plans(self, **parameters: Any) -> Any: ...
    def expires_in_s(self, answer: Any) -> float: ...


def fetch_from(client: HintsClient, cluster: str) -> Callable[[], PlansAnswer]:
    """A function that asks the hints API for the plans of a cluster; a stale cluster counts as no answer."""

    def fetch() -> PlansAnswer:
        answer = client.reservation_plans(cluster=cluster)
        if cluster in answer.stale_shards:
            return PlansAnswer(answer.items, 0.0, f"the plans of {cluster} are stale")
        return PlansAnswer(answer.items, client.expires_in_s(answer), answer.problem or "")

    return fetch


class _NoAnswerError(Exception):
    """The answer holds for no time that can be believed."""


class PlanFeed:
    """Keeps the last good answer until it expires.

    Args:
        fetch: Gives the newest plans; may raise anything when it cannot.
        monotonic: Seconds on a clock that no step of the wall clock moves.

    Attributes:
        plans: By id; those of the last good answer.
        garbage: What was wrong with items of it that are no plans.
        problem: Why the last question had no good answer; empty when it had.
    """

    def __init__(self, fetch: Callable[[], PlansAnswer], monotonic: Callable[[], float]) -> None:
        self.plans: dict[str, ReservationPlan] = {}
        self.garbage: list[str] = []
        self.problem = "nothing was fetched yet"
        self._fetch, self._monotonic = fetch, monotonic
        self._deadline_s = -math.inf

    def is_fresh(self) -> bool:
        """The plans may be acted on."""
        return self._monotonic() < self._deadline_s

    def poll(self) -> bool:
        """Ask for the newest plans; returns whether there are any that may be acted on, new or kept."""
        asked_s = self._monotonic()
        try:
            answer = self._fetch()
            fresh_s = float(answer.expires_in_s)
            if not 0 < fresh_s <= _MAX_EXPIRY_S:
                odd = f"the answer of the hints API says that it holds for {fresh_s:g} s"
                raise _NoAnswerError(answer.problem or ("the answer had expired" if fresh_s == 0 else odd))
            plans, garbage = _read(answer.items)
        except Exception as error:  # whatever is wrong with the API is an outage to us, and never one of the scheduler
            is_ours = type(error).__module__.partition(".")[0] == __name__.partition(".")[0]
            self.problem = str(error) if is_ours else f"{type(error).__name__}: {error}"
        else:
            self.plans, self.garbage, self.problem = plans, garbage, ""
            # Counted from before the question was asked: never longer than the API meant.
            self._deadline_s = asked_s + fresh_s
        return self.is_fresh()


def _read(items: Sequence[Any]) -> tuple[dict[str, ReservationPlan], list[str]]:
    plans: dict[str, ReservationPlan] = {}
    garbage = []
    for item in items:
        try:
            plan = item if isinstance(item, ReservationPlan) else msgspec.convert(item, ReservationPlan)
            plans.setdefault(plan.id, plan)
        except (msgspec.ValidationError, TypeError, ValueError) as error:
            garbage.append(f"not a reservation plan: {error}"[:500])
    return plans, garbage
