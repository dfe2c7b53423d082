"""The few Slurm commands the agent needs, with checked arguments, time-outs and a budget.

Here belongs what is asked of Slurm and how its answers are read; not when, and no decision (`slurm_agent.py`). Programs
are run with an argument list, never through a shell. What goes into an argument is checked against what Slurm allows in
a name, so that no text from a hint or a job can be read as an option.

SlurmError              a command failed; the message holds what it said
├── SlurmTimeout        no answer in time: it may or may not have been carried out
├── SlurmBudgetError    it was not run: the budget of commands is used up for now
├── ReservationInUse    Slurm keeps a reservation in which jobs run
├── NoSuchReservation   there is no reservation of that name
└── ArgumentError       a name that Slurm would not allow, or that could be read as something else
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

LEASE_FLAGS = ("FLEX", "MAGNETIC", "NO_HOLD_JOBS_AFTER", "PURGE_COMP=1")
LEASE_PREFIX = "wg_"
# Requests to slurmctld that a command makes, counted with sdiag on 22.05; the others make one.
NODES_COST, JOB_COST = 2, 2
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\$?")
_LEASE = re.compile(rf"{LEASE_PREFIX}[A-Za-z0-9_]{{1,60}}")
_JOB = re.compile(r"[0-9]{1,10}([_+][0-9]{1,10})?")
_MAX_OUTPUT = 64 * 2**20
_ABSENT = {"", "(null)", "N/A", "None"}


class SlurmError(Exception):
    """A Slurm command failed."""


class SlurmTimeout(SlurmError):  # noqa: N818  # named after what happened
    """No answer in time; whether it was carried out is not known."""


class SlurmBudgetError(SlurmError):
    """Not run: the budget of Slurm commands is used up for now."""


class ReservationInUse(SlurmError):  # noqa: N818
    """Slurm does not delete a reservation in which jobs run."""


class NoSuchReservation(SlurmError):  # noqa: N818
    """There is no reservation of that name."""


class ArgumentError(SlurmError):
    """A name that may not be given to Slurm."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reservation as Slurm shows it; times UTC."""

    name: str
    nodes: frozenset[str]
    start: datetime
    end: datetime
    users: tuple[str, ...]
    accounts: tuple[str, ...]
    flags: frozenset[str]

    @property
    def is_lease(self) -> bool:
        """Made by an agent: its name and every one of its flags say so."""
        # Slurm shows NO_HOLD_JOBS_AFTER as NO_HOLD_JOBS_AFTER_END.
        shown = {flag.removesuffix("_END") for flag in self.flags}
        return bool(_LEASE.fullmatch(self.name)) and {flag.split("=")[0] for flag in LEASE_FLAGS} <= shown


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job in Slurm's queue. `nodes` are those it runs on, `planned_nodes` those the scheduler has planned for it."""

    job_id: str
    user: str
    account: str
    state: str
    nodes: frozenset[str]
    planned_nodes: frozenset[str]
    reservation: str


class Budget:
    """A token bucket of requests to slurmctld.

    Args:
        per_minute: Requests a minute on the long run.
        least_burst: At least so many at once, so that a sequence of commands can be carried out whole.
        monotonic: Clock in seconds.
    """

    def __init__(
        self, per_minute: float, least_burst: int = 6, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = per_minute / 60
        self._size = max(per_minute, float(least_burst))
        self._left = self._size
        self._monotonic = monotonic
        self._at = monotonic()

    def left(self) -> float:
        """Requests that may be made now."""
        now = self._monotonic()
        self._left = min(self._size, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
        return self._left

    def lift(self) -> None:
        """No limit from now on: for what an operator asks for by hand."""
        self._left = self._size = float("inf")

    def take(self, cost: int = 1, *, must: bool = False) -> None:
        """Spend some.

        Args:
            cost: Requests.
            must: They are made whatever is left, and later ones wait for it: what lets go of a lease.

        Raises:
            SlurmBudgetError: So many are not left.
        """
        if Budget.left(self) < cost and not must:
            raise SlurmBudgetError(self._used_up())
        self._left = max(self._left - cost, -self._size)

    def book(self, requests: float) -> None:
        """Say that so many will be needed, to whomever else asks; nobody does here."""

    @staticmethod
    def _used_up() -> str:
        return "the budget of requests to Slurm is used up (slurm_agent.rpcs_per_minute)"


class SlurmCommands:
    """Runs scontrol, squeue and sinfo. Every request that a command makes to the controller costs one of the budget.

    Args:
        bin_dir: Folder of the commands; empty: found on PATH.
        conf: SLURM_CONF; empty: the commands' own default.
        timeout_s: Longest time one command may take, s.
        budget: Token bucket.
    """

    def __init__(self, bin_dir: str = "", conf: str = "", timeout_s: float = 30, budget: Budget | None = None) -> None:
        self.budget = budget or Budget(6)
        self._bin, self._timeout_s = bin_dir, timeout_s
        # Nothing of the caller's environment but what finds the programs and the configuration: SQUEUE_*, SCONTROL_*
        # and SLURM_* variables change what the commands print. Times are UTC.
        self._env = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": os.environ.get("HOME", "/"),
            "TZ": "UTC",
            "LC_ALL": "C",
        }
        if conf or os.environ.get("SLURM_CONF"):
            self._env["SLURM_CONF"] = conf or os.environ["SLURM_CONF"]
        self._expand = lru_cache(maxsize=1024)(self._hostnames)

    # --- reading --------------------------------------------------------------------------------------------

    def reservations(self, *, must: bool = False) -> list[Reservation]:
        """All reservations, also those that lie ahead; `must`: asked whatever is left of the budget."""
        found = []
        for line in self._run("scontrol", "--oneliner", "show", "reservation", must=must).splitlines():
            fields: dict[str, str] = {}
            for part in line.split():
                key, _, value = part.partition("=")
                fields.setdefault(key, value)  # free text comes last and may look like a field
            if "ReservationName" not in fields:
                continue
            try:
                found.append(
                    Reservation(
                        name=fields["ReservationName"],
                        nodes=self._names(fields.get("Nodes", "")),
                        start=_moment(fields["StartTime"]),
                        end=_moment(fields["EndTime"]),
                        users=_listed(fields.get("Users", "")),
                        accounts=_listed(fields.get("Accounts", "")),
                        flags=frozenset(flag.split("=")[0] for flag in fields.get("Flags", "").split(",")),
                    )
                )
            except (KeyError, ValueError) as error:
                raise SlurmError(f"scontrol show reservation: cannot read {line[:200]!r}: {error}") from error
        return found

    def node_states(self) -> dict[str, str]:
        """State of every node, in sinfo's words."""
        rows = (line.split("|") for line in self._run("sinfo", "-h", "-N", "-o", "%N|%T", cost=NODES_COST).splitlines())
        return {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}

    def job(self, job_id: str, *, must: bool = False) -> SlurmJob | None:
        """One job of the queue; None when Slurm does not know it any more. `must`: asked whatever is left."""
        _check(_JOB, job_id, "job id")
        form = ("-h", "-a", "--local", "-t", "all", "-o", "%i|%u|%a|%T|%N|%Y|%v")  # not local: a request more
        try:
            text = self._run("squeue", "-j", job_id, *form, cost=JOB_COST, must=must)
        except SlurmError as error:
            if "Invalid job id" in str(error):
                return None
            raise
        for line in text.splitlines():
            row = [field.strip() for field in line.split("|")]
            if len(row) == 7:
                running, planned = self._names(row[4]), self._names(row[5])
                reservation = "" if row[6] in _ABSENT else row[6]
                return SlurmJob(row[0], row[1], row[2], row[3], running, planned, reservation)
        return None

    # --- writing --------------------------------------------------------------------------------------------

    def create_lease(
        self, name: str, nodes: Sequence[str], start: datetime | None, end: datetime, user: str, account: str = ""
    ) -> None:
        """Make a reservation of whole nodes with the flags of a lease.

        Args:
            name: Of the reservation, `wg_…`.
            nodes: Node names.
            start: When it begins, UTC; None: now.
            end: When it ends, UTC.
            user: For whom; empty: for the account.
            account: For whose jobs, where there is no user.

        Raises:
            SlurmError: Slurm refused, or a name is not allowed.
        """
        _check(_LEASE, name, "lease name")
        for node in nodes:
            _check(_NODE, node, "node name")
        if not nodes:
            raise ArgumentError("a lease needs a node")
        whom = f"users={_check(_USER, user, 'user name')}" if user else f"accounts={_check(_USER, account, 'account')}"
        self._run(
            "scontrol", "create", "reservation", f"reservationname={name}", f"nodes={','.join(nodes)}",
            f"starttime={'now' if start is None else _text(start)}", f"endtime={_text(end)}", whom,
            f"flags={','.join(LEASE_FLAGS)}",
        )  # fmt: skip

    def delete_lease(self, name: str) -> None:
        """Delete a reservation of that name, whatever is left of the budget.

        Raises:
            ReservationInUse: Jobs run in it.
            NoSuchReservation: It is gone.
            SlurmError: Slurm refused for another reason, or the name is not that of a lease.
        """
        _check(_LEASE, name, "lease name")
        try:
            self._run("scontrol", "delete", f"reservationname={name}", must=True)
        except SlurmError as error:
            if "is in use" in str(error):
                raise ReservationInUse(str(error)) from error
            if "reservation is invalid" in str(error):
                raise NoSuchReservation(str(error)) from error
            raise

    # --- how ------------------------------------------------------------------------------------------------

    def _names(self, hostlist: str) -> frozenset[str]:
        return frozenset() if hostlist in _ABSENT else self._expand(hostlist)

    def _hostnames(self, hostlist: str) -> frozenset[str]:
        """Expand a host list; scontrol does it by itself, without asking the controller."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._,\[\]-]*", hostlist):
            raise SlurmError(f"not a host list: {hostlist[:200]!r}")
        return frozenset(self._run("scontrol", "show", "hostnames", hostlist, is_local=True).split())

    def _run(self, program: str, *arguments: str, cost: int = 1, must: bool = False, is_local: bool = False) -> str:
        if not is_local:
            self.budget.take(cost, must=must)
        what = f"{program} {' '.join(arguments[:3])}"
        try:
            done = subprocess.run(
                [str(Path(self._bin) / program) if self._bin else program, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self._timeout_s,
                env=self._env,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SlurmTimeout(f"{what}: no answer within {self._timeout_s:g} s") from error
        except OSError as error:
            raise SlurmError(
                f"{what}: cannot be run: {error.strerror or error}; see slurm_bin in the settings"
            ) from error
        if done.returncode:
            said = (done.stderr or done.stdout).decode(errors="replace").strip()
            raise SlurmError(f"{what}: exit {done.returncode}: {said[:500]}")
        if len(done.stdout) > _MAX_OUTPUT:
            raise SlurmError(f"{what}: an answer of {len(done.stdout)} bytes")
        return done.stdout.decode(errors="replace")


def lease_name(plan_id: str) -> str:
    """Name of the reservation of a plan: `wg_` and the id in letters, digits and `_`; a hash keeps long ones apart."""
    if re.fullmatch(r"[A-Za-z0-9-]{1,40}", plan_id):
        return LEASE_PREFIX + plan_id.replace("-", "_")
    plain = re.sub(r"[^A-Za-z0-9]", "_", plan_id)[:40]
    return f"{LEASE_PREFIX}{plain}_{blake2b(plan_id.encode(errors='replace'), digest_size=6).hexdigest()}"


def check_names(nodes: Sequence[str], user: str, account: str, job_id: str) -> None:
    """Refuse names that could not be given to Slurm.

    Raises:
        ArgumentError: Names the first wrong one.
    """
    for node in nodes:
        _check(_NODE, node, "node name")
    if user or not account:
        _check(_USER, user, "user name")
    if account:
        _check(_USER, account, "account")
    _check(_JOB, job_id, "job id")


def _check(pattern: re.Pattern[str], text: str, what: str) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise ArgumentError(f"{str(text)[:80]!r} is no {what}")
    return text


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _moment(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=UTC)


def _listed(text: str) -> tuple[str, ...]:
    return () if text in _ABSENT else tuple(text.split(","))
