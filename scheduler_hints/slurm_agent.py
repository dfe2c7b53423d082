"""The Slurm agent: holds spare nodes for a waiting job by a lease because a published plan says so, and lets go again.

Here belong the decisions and their order. Commands stand in `slurm_commands.py`, what speaks against a lease in
`slurm_checks.py`, limits and breaker in `slurm_guard.py`, the record in `slurm_audit.py`, freshness in `plan_feed.py`;
`docs/slurm-agent.md` says it in words for operators.

The rules, by weight:

1. No hint, no write. After the last hint's expiry nothing is made, renewed or deleted; leases end by themselves.
2. A lease in which jobs run is never touched. Slurm itself refuses to delete one, so that there is no race to lose.
3. Nothing of others is touched: not their reservations, not nodes that are not idle or planned for another job.
4. Every write is in the record. While the record cannot be written, no lease is made.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from scheduler_hints.plan_feed import PlanFeed, PlansAnswer
from scheduler_hints.schema import ReservationPlan
from scheduler_hints.slurm_audit import Ledger
from scheduler_hints.slurm_checks import fault, job_objection, node_objection, reservation_conflict
from scheduler_hints.slurm_commands import (
    JOB_COST,
    NODES_COST,
    NoSuchReservation,
    Reservation,
    ReservationInUse,
    SlurmBudgetError,
    SlurmCommands,
    SlurmError,
    SlurmJob,
    SlurmTimeout,
    lease_name,
)
from scheduler_hints.slurm_guard import Breaker, Limits

log = logging.getLogger(__name__)

Mode = Literal["advise", "reserve"]
_PURGE = timedelta(seconds=60)  # PURGE_COMP=1
_MIN_RENEWAL = timedelta(seconds=10)
# Requests that it takes: to consider a plan (reservations, nodes, job, create); to renew a lease (delete, create).
_LOOKS, _RENEWAL = 2 + NODES_COST + JOB_COST, 2
_PER_LEASE = 3.0  # requests a minute that a lease needs: renewals, or a look at its job and its removal


class AgentError(Exception):
    """The agent cannot be made like that; the message names the setting."""


class _HintsExpiredError(Exception):
    """The last hint expired in the middle of a round."""


@dataclass(slots=True)
class Lease:
    """A lease of this agent; times UTC.

    Attributes:
        start: When Slurm's reservation begins; a renewal moves it.
        end: When the hold ends, renewed or not.
        made: When these nodes were first held.
        is_real: It is a reservation in Slurm, not only advised.
        is_used: Jobs have begun to run in it: it is left to its end.
    """

    name: str
    hint_id: str
    job_id: str
    user: str
    account: str
    nodes: frozenset[str]
    start: datetime
    end: datetime
    made: datetime
    is_real: bool
    is_used: bool = False


class SlurmAgent:
    """Follows the reservation plans of one cluster.

    Args:
        cluster: Name of the cluster, as in the hints.
        fetch: Gives the newest plans; may raise anything when it cannot.
        commands: Slurm; None, in `advise` mode only: decide without looking at the scheduler.
        mode: `advise` records what it would do and writes nothing to Slurm; `reserve` does it.
        audit: Takes each row of out_actions; raises OSError when it cannot keep it.
        limits: How much it may do.
        breaker_failures: Failed or wrong leases in a row that open the breaker.
        breaker_open_s: How long it stays open, s.
        clock: The moment, UTC.
        monotonic: Seconds on a clock that no step of the wall clock moves.

    Raises:
        AgentError: `reserve` without commands, or an unknown mode.
        LimitError: A limit is out of range.
    """

    def __init__(
        self,
        cluster: str,
        fetch: Callable[[], PlansAnswer],
        commands: SlurmCommands | None,
        *,
        mode: Mode = "advise",
        audit: Callable[[dict[str, Any]], None],
        limits: Limits | None = None,
        breaker_failures: int = 3,
        breaker_open_s: float = 1800.0,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if mode not in ("advise", "reserve"):
            raise AgentError(f"slurm_agent.mode = {mode!r}: advise or reserve")
        if mode == "reserve" and commands is None:
            raise AgentError("slurm_agent.mode = 'reserve' needs the Slurm commands of a cluster with jobs = 'slurm'")
        self.cluster, self.mode = cluster, mode
        self.limits = limits or Limits()
        self.breaker = Breaker(breaker_failures, breaker_open_s, monotonic)
        self.leases: dict[str, Lease] = {}
        self._commands, self._clock, self._monotonic = commands, clock, monotonic
        self._feed = PlanFeed(fetch, monotonic)
        self._ledger = Ledger(cluster, audit, clock)
        self._is_synced = False
        self._looked: dict[str, tuple[float, list[str]]] = {}
        self._vetoed: set[str] = set()

    # --- one round ------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Read the plans, then make, renew or remove leases. What Slurm or the API refuse is recorded, not raised."""
        self._ledger.flush()
        if not self._feed.poll():
            self._ledger.say("hints", "no-hints", f"nothing is done until hints are fresh; {self._feed.problem}"[:500])
            return
        if self._ledger.forget("hints"):
            self._ledger.put("hints-back", is_applied=False, reason="hints are fresh again")
        for number, problem in enumerate(self._feed.garbage):
            self._ledger.say(f"garbage {number}", "refuse", problem)
        plans = {lease_name(plan.id): plan for plan in self._feed.plans.values()}
        self._ledger.keep({"slurm", *plans, *(f"garbage {number}" for number in range(len(self._feed.garbage)))})
        self._looked = {name: looked for name, looked in self._looked.items() if name in plans}
        self._vetoed &= plans.keys()
        try:
            self._adopt(plans)
            self._book()
            for lease in list(self.leases.values()):
                self._tend(lease, plans.get(lease.name))
            for name, plan in plans.items():
                if name not in self.leases and name not in self._vetoed:
                    self._consider(name, plan)
            self._ledger.forget("slurm")
        except SlurmBudgetError as error:
            log.debug("waiting: %s", error)
        except _HintsExpiredError:
            self._ledger.say("hints", "no-hints", "the last hint expired in the middle of a round")
        except SlurmError as error:
            self._ledger.say("slurm", "error", str(error))

    def in_words(self) -> str:
        """How it stands after a round: `hints are fresh: 1 plan, 1 lease`, or why nothing is done."""
        if not self._feed.is_fresh():
            return f"no fresh hints, nothing is done: {self._feed.problem or 'they have expired'}"
        plans, leases = len(self._feed.plans), len(self.leases)
        kind = "lease" if self.mode == "reserve" else "lease that would stand"
        kinds = "leases" if self.mode == "reserve" else "leases that would stand"
        told = f"{plans} plan{'' if plans == 1 else 's'}, {leases} {kind if leases == 1 else kinds}"
        return f"hints are fresh: {told}{'' if plans or leases else '; nothing to do'}"

    def release_all(self) -> list[str]:
        """Remove every lease of an agent on this Slurm, whoever made it, at an operator's word.

        Returns:
            Names of those that stay because jobs run in them; they end by themselves.

        Raises:
            AgentError: There are no Slurm commands.
            SlurmError: Slurm could not be asked, or refused for another reason.
        """
        if self._commands is None:
            raise AgentError("there is no Slurm to release leases on: set jobs = 'slurm' for the cluster")
        self._commands.budget.lift()
        kept = []
        for found in self._commands.reservations(must=True):
            if not found.is_lease or found.end <= self._clock():
                continue
            lease = self.leases.pop(found.name, None) or _lease_of(found, None)
            try:
                self._commands.delete_lease(found.name)
            except ReservationInUse:
                kept.append(found.name)
            except NoSuchReservation:
                pass
            else:
                self._record("release", lease, is_applied=True, reason="asked for by the operator")
        return kept

    def close(self) -> None:
        """Record the end. Leases stay: they end by themselves, and an agent that starts again takes them up."""
        left = ", ".join(sorted(name for name, lease in self.leases.items() if lease.is_real))
        told = f"leases left to end by themselves: {left}" if left else "no lease is left"
        self._ledger.put("stop", is_applied=False, reason=f"stopped; {told}")

    # --- leases there are -----------------------------------------------------------------------------------

    def _adopt(self, plans: dict[str, ReservationPlan]) -> None:
        """At the start, and after a command of unknown outcome: take up the leases that Slurm has."""
        if self._is_synced or self._commands is None or self.mode == "advise":
            return
        now = self._clock()
        there = {
            found.name: found for found in self._commands.reservations(must=True) if found.is_lease and found.end > now
        }
        self.leases = {name: lease for name, lease in self.leases.items() if name in there}
        for name in there.keys() - self.leases.keys():
            self.leases[name] = _lease_of(there[name], plans.get(name))
            self._record("adopt", self.leases[name], is_applied=False, reason="a lease of an earlier run")
        self._is_synced = True

    def _tend(self, lease: Lease, plan: ReservationPlan | None) -> None:
        now = self._clock()
        if lease.end <= now:
            self._finish(lease)
        elif lease.is_used:
            return
        elif plan is None:
            self._release(lease, "its hint is gone", is_verdict=True)
        elif (set(plan.nodes) != lease.nodes or plan.user != lease.user) and (
            (now - lease.made).total_seconds() >= self.limits.check_every_s
        ):
            self._release(lease, "the plan has moved to other nodes", is_verdict=False)
        elif lease.is_real and (now - lease.start).total_seconds() >= self.limits.renew_after_s:
            self._renew(lease, now)

    def _finish(self, lease: Lease) -> None:
        """It has ended by itself."""
        job = None if lease.is_used else self._job_of(lease)
        del self.leases[lease.name]
        self._record("ended", lease, is_applied=False, reason="its time is over")
        if not lease.is_used:
            self._judge(lease, job)

    def _release(self, lease: Lease, reason: str, *, is_verdict: bool) -> None:
        """Remove a lease unless its job has begun to use it."""
        job = None
        if lease.is_real:
            commands = self._slurm(0)
            job = self._job_of(lease)
            if _runs_in(job, lease):
                self._begun(lease, job)
                return
            try:
                self._delete(commands, lease)
            except ReservationInUse:
                self._begun(lease, job)
                return
            except NoSuchReservation:
                reason += "; Slurm had purged it already"
        del self.leases[lease.name]
        self._record("release", lease, is_applied=lease.is_real, reason=reason)
        if is_verdict:
            self._judge(lease, job)

    def _renew(self, lease: Lease, now: datetime) -> None:
        """Make it anew before Slurm purges it as idle: an active one cannot be moved, so it is deleted and made."""
        if lease.end - now < _MIN_RENEWAL:
            return
        commands = self._slurm(_RENEWAL)
        try:
            self._delete(commands, lease)
        except ReservationInUse:
            self._begun(lease, self._job_of(lease))
            return
        except NoSuchReservation:
            if now - lease.start < _PURGE:
                del self.leases[lease.name]
                self._vetoed.add(lease.name)
                reason = "somebody deleted it; it is not made again while its plan stands"
                self._record("lost", lease, is_applied=False, reason=reason)
                return
        if self._create(commands, lease, None):
            lease.start = self._clock()
            self._record("renew", lease, is_applied=True, reason="its job has not started yet")

    def _begun(self, lease: Lease, job: SlurmJob | None) -> None:
        """Jobs run in the lease: it is left to its end."""
        lease.is_used = True
        is_its_own = _runs_in(job, lease)
        if is_its_own:
            self.breaker.succeeded()
        who = "its job" if is_its_own else "another job of its user"
        self._record("used", lease, is_applied=False, reason=f"{who} runs in it; it is left to end by itself")

    def _judge(self, lease: Lease, job: SlurmJob | None) -> None:
        """Whether an unused lease was wrong: its job waits still, or ran elsewhere. A job that is gone says nothing."""
        if job is not None and job.nodes & lease.nodes:
            self.breaker.succeeded()
        elif job is not None and job.state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "COMPLETED"):
            self._count_failure(f"lease {lease.name} was not used by job {lease.job_id} ({job.state.lower()})")

    # --- leases to be made ----------------------------------------------------------------------------------

    def _consider(self, name: str, plan: ReservationPlan) -> None:
        now = self._clock()
        objection = fault(plan, self.cluster, self.limits, now) or self._full()
        if objection is None and self._commands is not None:
            looked_s, nodes = self._looked.get(name, (-math.inf, []))
            if self._monotonic() - looked_s < self.limits.check_every_s and nodes == plan.nodes:
                return
            objection = self._look(self._slurm(_LOOKS), name, plan, now)
            self._looked[name] = (self._monotonic(), plan.nodes)
        if objection is not None:
            facts = {
                "hint_id": plan.id[:200],
                "job_id": plan.job_id[:200],
                "nodes": [n[:253] for n in plan.nodes[:1000]],
            }
            self._ledger.say(name, "refuse", objection, **facts)
            return
        lease = Lease(
            name=name,
            hint_id=plan.id,
            job_id=plan.job_id,
            user=plan.user,
            account=plan.account or "",
            nodes=frozenset(plan.nodes),
            start=max(plan.start, now),
            end=plan.end,
            made=now,
            is_real=self.mode == "reserve",
        )
        # Slurm takes a start that has passed by the time it reads it for an error.
        start = plan.start if plan.start > now + timedelta(seconds=5) else None
        if lease.is_real and not self._create(self._slurm(1), lease, start):
            return
        self.leases[name] = lease
        self._ledger.forget(name)
        self._record("reserve", lease, is_applied=lease.is_real, reason="; ".join(plan.because))

    def _full(self) -> str | None:
        """Why no lease at all may be made now."""
        if self._ledger.is_behind:
            return "the record of actions cannot be written"
        if self.breaker.open_for_s() > 0:
            return "the circuit breaker is open"
        if len(self.leases) >= self.limits.max_leases:
            count = len(self.leases)
            told = "1 lease stands" if count == 1 else f"{count} leases stand"
            return f"{told} (slurm_agent.max_leases = {self.limits.max_leases})"
        return None

    def _look(self, commands: SlurmCommands, name: str, plan: ReservationPlan, now: datetime) -> str | None:
        """What Slurm's present state has against the plan; no more is asked than it takes."""
        there = commands.reservations()
        if any(found.name == name and found.is_lease for found in there):
            self._is_synced = False  # one of ours that we did not know of
        objection = reservation_conflict(name, plan, there, now)
        if objection is not None:
            return objection
        states = commands.node_states()
        held = [node for lease in self.leases.values() for node in lease.nodes]
        objection = node_objection(plan, states, held, self.limits.max_nodes_ratio)
        return objection or job_objection(plan, states, commands.job(plan.job_id))

    # --- Slurm ----------------------------------------------------------------------------------------------

    def _slurm(self, count: int) -> SlurmCommands:
        """Slurm, when the budget is enough for so many requests: a sequence is run whole or not begun."""
        if self._commands is None:
            raise SlurmError("there are no Slurm commands")
        if count and self._commands.budget.left() < count:
            self._commands.budget.book(count)
            raise SlurmBudgetError(f"{count} requests are needed, the budget is used up for now")
        return self._commands

    def _book(self) -> None:
        """Keep requests free of the readers for the leases that stand and are not used yet."""
        held = sum(lease.is_real and not lease.is_used for lease in self.leases.values())
        if held and self._commands is not None:
            self._commands.budget.book(_PER_LEASE * held)

    def _job_of(self, lease: Lease) -> SlurmJob | None:
        """Asked whatever is left of the budget: release and breaker hang on it."""
        return self._slurm(0).job(lease.job_id, must=True) if lease.is_real and lease.job_id else None

    def _delete(self, commands: SlurmCommands, lease: Lease) -> None:
        self._may_write()
        try:
            commands.delete_lease(lease.name)
        except SlurmTimeout:
            self._is_synced = False
            raise

    def _create(self, commands: SlurmCommands, lease: Lease, start: datetime | None) -> bool:
        """Make the reservation; a refusal is recorded and counted, and the lease forgotten."""
        self._may_write()
        account = "" if lease.user else lease.account
        try:
            commands.create_lease(lease.name, sorted(lease.nodes), start, lease.end, lease.user, account)
        except SlurmError as error:
            if isinstance(error, SlurmTimeout):
                self._is_synced = False  # it may have been carried out
            self.leases.pop(lease.name, None)
            self._record("error", lease, is_applied=False, reason=str(error))
            self._count_failure(str(error))
            return False
        return True

    def _may_write(self) -> None:
        if not self._feed.is_fresh():
            raise _HintsExpiredError

    # --- the record -----------------------------------------------------------------------------------------

    def _count_failure(self, why: str) -> None:
        if self.breaker.failed():
            until = f"no lease for {self.breaker.open_for_s():.0f} s"
            reason = f"{self.breaker.in_a_row} failed or wrong leases in a row, {until}; last: {why}"
            self._ledger.put("breaker-open", is_applied=False, reason=reason)

    def _record(self, action: str, lease: Lease, *, is_applied: bool, reason: str) -> None:
        self._ledger.put(
            action,
            is_applied=is_applied,
            reason=reason,
            hint_id=lease.hint_id,
            job_id=lease.job_id,
            nodes=lease.nodes,
            reservation=lease.name,
            user=lease.user,
            start=lease.start,
            end=lease.end,
            mode=self.mode,
        )


def run(agent: SlurmAgent, period_s: float, stop: threading.Event) -> None:
    """Rounds until told to stop, then `close`. Leases are left to their end: a restart takes them up.

    Args:
        agent: The agent.
        period_s: Seconds between rounds.
        stop: Set it to stop after the present round.
    """
    try:
        while not stop.is_set():
            try:
                agent.step()
            except Exception:  # a fault of ours: the next round may do, and leases end by themselves
                log.exception("a round failed")
            stop.wait(period_s)
    finally:
        agent.close()


def _lease_of(found: Reservation, plan: ReservationPlan | None) -> Lease:
    return Lease(
        name=found.name,
        hint_id=plan.id if plan else "",
        job_id=plan.job_id if plan else "",
        user=found.users[0] if found.users else "",
        account=found.accounts[0] if found.accounts else "",
        nodes=found.nodes,
        start=found.start,
        end=found.end,
        made=found.start,
        is_real=True,
    )


def _runs_in(job: SlurmJob | None, lease: Lease) -> bool:
    return job is not None and job.state not in ("PENDING", "CANCELLED") and bool(job.nodes & lease.nodes)
