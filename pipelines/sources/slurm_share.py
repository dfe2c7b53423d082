"""The Slurm agent's share of a cluster's requests: its own rate, and the ledger that it shares with the readers.

The ledger stands in `slurm_budget.py`, the agent's own rate in `scheduler_hints/slurm_commands.py`. The agent goes
before the readers: what it books is kept free of them, and what makes leases go (`must`) is never refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import filelock

from pipelines.sources import slurm_budget
from scheduler_hints.slurm_commands import Budget, SlurmBudgetError

log = logging.getLogger(__name__)
T = TypeVar("T")


class AgentShare(Budget):
    """A budget of the agent that counts in the cluster's ledger.

    While the ledger cannot be used, the agent's own rate holds alone.

    Args:
        ledger: The cluster's, as the readers of the same host use it.
        per_minute: Requests a minute on the long run, of those of the ledger.
        monotonic: Clock in seconds.
    """

    def __init__(
        self, ledger: slurm_budget.Budget, per_minute: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(per_minute, monotonic=monotonic)
        self._ledger = ledger
        self._is_warned = False

    def left(self) -> float:
        """Requests that may be made now; what a sequence may be begun with."""
        own = super().left()
        if own == float("inf"):
            return own
        free = self._asked(lambda: self._ledger.per_minute - self._ledger.used(), own)
        return min(own, free)

    def take(self, cost: int = 1, *, must: bool = False) -> None:
        """Spend some.

        Raises:
            SlurmBudgetError: So many are not left, and they need not be made.
        """
        is_lifted = super().left() == float("inf")
        if not must and super().left() < cost:
            raise SlurmBudgetError(self._used_up())
        if not self._asked(lambda: self._ledger.spend(cost, must=must or is_lifted), True):
            raise SlurmBudgetError("all processes together have used up slurm_rpcs_per_minute")
        super().take(cost, must=True)

    def book(self, requests: float) -> None:
        """Keep requests free of the readers: those of a sequence that waits its turn, or of leases that stand.

        More than half of the budget is kept only once the agent's own rate would allow the sequence.
        """
        if requests <= self._ledger.per_minute / 2 or super().left() >= requests:
            self._asked(lambda: self._ledger.book(requests), None)

    def _asked(self, work: Callable[[], T], otherwise: T) -> T:
        try:
            return work()
        except (OSError, filelock.Timeout) as error:
            if not self._is_warned:
                log.warning("%s: the ledger of Slurm requests cannot be used: %s", self._ledger.cluster, error)
                self._is_warned = True
            return otherwise
