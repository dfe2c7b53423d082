"""What keeps the Slurm agent from doing harm: its limits and its circuit breaker.

Here belong numbers and the breaker's state; not the decisions that ask them (`slurm_agent.py`). The budget of commands
stands with the commands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class LimitError(ValueError):
    """A limit is out of range; the message names it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much the agent may do.

    Attributes:
        max_leases: Leases at a time.
        max_nodes_ratio: Share of all nodes that leases may hold.
        max_lease_s: Longest lease, s.
        max_ahead_s: A lease may begin this long after now, s.
        renew_after_s: A lease that runs without its job is made anew after this long, s: Slurm purges it when it has
            been idle for a minute (PURGE_COMP=1).
        check_every_s: Leases and their jobs are looked at this often, s.
    """

    max_leases: int = 1
    max_nodes_ratio: float = 0.25
    max_lease_s: float = 3600.0
    max_ahead_s: float = 3600.0
    renew_after_s: float = 40.0
    check_every_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_leases < 0:
            raise LimitError(f"max_leases = {self.max_leases}: 0 or more are needed")
        if not 0 <= self.max_nodes_ratio <= 1:
            raise LimitError(f"max_nodes_ratio = {self.max_nodes_ratio}: a ratio from 0 to 1 is needed")
        if not 0 < self.renew_after_s < 60:
            raise LimitError(f"renew_after_s = {self.renew_after_s}: more than 0 and less than 60 s are needed")


class Breaker:
    """Opens after a run of failed or wrong leases; while it is open no lease is made.

    When its time is over one lease is tried; if that fails too it opens again at once.

    Args:
        failures: So many in a row open it.
        open_s: For how long, s.
        monotonic: Clock in seconds.
    """

    def __init__(self, failures: int, open_s: float, monotonic: Callable[[], float]) -> None:
        if failures < 1:
            raise LimitError(f"breaker_failures = {failures}: 1 or more are needed")
        self._failures, self._open_s, self._monotonic = failures, open_s, monotonic
        self._in_a_row = 0
        self._until_s: float | None = None

    @property
    def in_a_row(self) -> int:
        return self._in_a_row

    def open_for_s(self) -> float:
        """Seconds it stays open; 0 when it is closed."""
        return max(0.0, self._until_s - self._monotonic()) if self._until_s is not None else 0.0

    def failed(self) -> bool:
        """Count a failed or wrong lease; true when that opens the breaker."""
        self._in_a_row += 1
        if self._in_a_row < self._failures or self.open_for_s() > 0:
            return False
        self._until_s = self._monotonic() + self._open_s
        return True

    def succeeded(self) -> None:
        """A lease served its job."""
        self._in_a_row, self._until_s = 0, None
