"""How many requests all processes together send to one slurmctld, and the answers that they share.

Nowcast, ingest, publishing and inventory each poll the same controller from processes of their own. They keep one
ledger of requests and the last answer to each question in the state folder: a young answer is given again instead of
asking, and when the minute's requests are used up an older one serves, else the question waits. What is asked and what
the answer means stands in `slurm_commands.py` and `slurmrestd.py`. The Slurm agent writes its requests in the same
ledger, before those of the readers (`slurm_share.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import filelock

from pipelines.sources import SourceError

_WINDOW_S = 60.0
_BOOKED_S = 30.0  # an agent that is gone holds back the readers no longer than this
_LOOK_AGAIN_S = 5.0  # a booking may be used long before it ends
_KEPT_S = 3600.0  # answers to questions that nobody asks any more
_USUAL_PER_MINUTE = 6.0  # ages are meant for this budget; a larger one shortens them


@dataclass(frozen=True)
class Answer:
    """What was said.

    Attributes:
        data: The bytes.
        at: When the question was put.
    """

    data: bytes
    at: datetime


@dataclass(frozen=True)
class Price:
    """What a question costs and how old its answer may be.

    Attributes:
        requests: Requests to slurmctld that it makes; 0: none, it is always asked anew.
        share_s: An answer younger than this is given again, s.
        stale_s: When the budget is used up, one younger than this is given, s.
    """

    requests: int
    share_s: float = 0.0
    stale_s: float = 0.0


class Budget:
    """The requests of one cluster.

    Args:
        cluster: Its name, for messages and files.
        folder: Folder of ledger and answers; made when missing.
        per_minute: Requests in any minute.
        timeout_s: How long a question waits for its turn, s.
        clock: Seconds since the epoch.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        cluster: str,
        folder: Path,
        per_minute: float = _USUAL_PER_MINUTE,
        timeout_s: float = 30,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.cluster, self.per_minute, self.timeout_s = cluster, per_minute, timeout_s
        self._folder, self._clock, self._sleep = folder, clock, sleep

    def ask(self, question: str, price: Price, work: Callable[[], bytes]) -> Answer:
        """The answer to a question: shared, or of `work` when its turn comes.

        Args:
            question: What is asked, the same text for the same thing.
            price: Its cost and ages.
            work: Asks; what it raises is passed on, and the requests count all the same.

        Raises:
            SourceError: The budget is used up and no answer is young enough, or the state folder cannot be used.
        """
        if price.requests <= 0:
            return self._asked(work)
        name = hashlib.blake2b(question.encode(), digest_size=12).hexdigest()
        path, scale = self._folder / f"{name}.answer", _USUAL_PER_MINUTE / self.per_minute
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Whoever asks the same at this moment waits, and shares the answer.
            with filelock.FileLock(self._folder / f"{name}.lock", timeout=2 * self.timeout_s, thread_local=False):
                known = self._kept(path)
                if known and self._age_s(known) <= price.share_s * scale:
                    return known
                if not self._await_turn(price, known, scale):
                    assert known is not None
                    return known
                answer = self._asked(work)
                self._keep(path, answer)
                return answer
        except filelock.Timeout:
            raise SourceError(
                f"{self.cluster}: another process has not had its answer to the same question to Slurm for "
                f"{2 * self.timeout_s:g} s: is the controller reachable? (scontrol ping)"
            ) from None
        except OSError as error:
            raise SourceError(f"{self.cluster}: {self._folder}: cannot keep the ledger: {error.strerror}") from error

    def used(self) -> int:
        """Requests of the last minute."""
        with self._lock():
            return sum(cost for _, cost, _ in self._ledger(_WINDOW_S))

    def spend(self, cost: int, *, must: bool) -> bool:
        """Write down requests that are made without this budget's `ask`, as the agent's.

        Args:
            cost: Requests.
            must: They are made whatever the budget says, and count all the same.

        Returns:
            True when they are written down and may be made.

        Raises:
            OSError: The state folder cannot be used.
            filelock.Timeout: Another process keeps the ledger.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._lock():
            ledger = self._ledger(_WINDOW_S)
            if not must and sum(spent for _, spent, _ in ledger) + cost > max(self.per_minute, cost):
                return False
            self._put(ledger, cost, is_agent=True)
        return True

    def book(self, requests: float) -> None:
        """Keep so many of each minute's requests free for `spend`, for half a minute or until booked anew.

        Raises:
            OSError: The state folder cannot be used.
            filelock.Timeout: Another process keeps the ledger.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._lock():
            self._write(self._folder / "booking.json", json.dumps([self._clock() + _BOOKED_S, requests]).encode())

    def _await_turn(self, price: Price, known: Answer | None, scale: float) -> bool:
        """True when it is this question's turn; False when the known answer shall do."""
        began = self._clock()
        while True:
            wait_s = self._reserve(price.requests)
            if wait_s <= 0:
                return True
            if known and self._age_s(known) <= price.stale_s * scale:
                return False
            waited_s = self._clock() - began
            if waited_s + wait_s > self.timeout_s:
                age = f"the last answer is {self._age_s(known):.0f} s old" if known else "there is no earlier answer"
                raise SourceError(
                    f"{self.cluster}: Slurm was not asked: its {self.per_minute:g} requests a minute are used up "
                    f"(slurm_rpcs_per_minute) and {age}; the next is free in {wait_s:.0f} s"
                )
            self._sleep(wait_s)

    def _reserve(self, cost: int) -> float:
        """0 and the requests are written down, or the seconds until they might be."""
        window_s = _WINDOW_S * max(1.0, cost / self.per_minute)
        room = max(self.per_minute, cost) - cost
        with self._lock():
            ledger = self._ledger(window_s)
            spent = sum(spent for _, spent, _ in ledger)
            now = self._clock()
            until, booked = self._booked(ledger, now)
            if spent + booked <= room:
                self._put(ledger, cost, is_agent=False)
                return 0.0
            if spent <= room:
                return min(max(until - now, 0.01), _LOOK_AGAIN_S)
            for at, one, _ in ledger:
                spent -= one
                if spent <= room:
                    return max(at + window_s - now, 0.01)
        return window_s

    def _booked(self, ledger: list[tuple[float, int, bool]], now: float) -> tuple[float, float]:
        """Until when how many requests are kept free: what is booked and not yet spent within the minute."""
        try:
            until, requests = json.loads((self._folder / "booking.json").read_bytes())
            if not now < float(until) <= now + _BOOKED_S + 1:
                return now, 0.0
            spent = sum(cost for at, cost, is_agent in ledger if is_agent and at > now - _WINDOW_S)
            return float(until), max(0.0, min(float(requests), self.per_minute) - spent)
        except (OSError, ValueError, TypeError):
            return now, 0.0

    def _put(self, ledger: list[tuple[float, int, bool]], cost: int, *, is_agent: bool) -> None:
        self._write(self._folder / "ledger.json", json.dumps([*ledger, (self._clock(), cost, is_agent)]).encode())

    def _ledger(self, window_s: float) -> list[tuple[float, int, bool]]:
        """Time, cost and side of the window's requests, oldest first; what a clock set back left ahead is dropped."""
        now = self._clock()
        try:
            rows = json.loads((self._folder / "ledger.json").read_bytes())
            return sorted((float(at), int(cost), bool(who)) for at, cost, who in rows if now - window_s < at <= now + 1)
        except FileNotFoundError:
            return []
        except (ValueError, TypeError):  # cut off by a full disk
            return []

    def _lock(self) -> filelock.BaseFileLock:
        return filelock.FileLock(self._folder / "ledger.lock", timeout=self.timeout_s, thread_local=False)

    def _asked(self, work: Callable[[], bytes]) -> Answer:
        at = self._clock()
        return Answer(work(), datetime.fromtimestamp(at, UTC))

    def _age_s(self, answer: Answer) -> float:
        age_s = self._clock() - answer.at.timestamp()
        return age_s if age_s >= 0 else _KEPT_S  # the clock was set back

    def _kept(self, path: Path) -> Answer | None:
        try:
            head, _, data = path.read_bytes().partition(b"\n")
            return Answer(data, datetime.fromtimestamp(float(head), UTC))
        except (OSError, ValueError):
            return None

    def _keep(self, path: Path, answer: Answer) -> None:
        self._write(path, f"{answer.at.timestamp():.6f}\n".encode() + answer.data)
        for other in self._folder.glob("*.answer"):
            try:
                if self._clock() - other.stat().st_mtime > _KEPT_S:
                    other.unlink()
            except FileNotFoundError:
                continue

    def _write(self, path: Path, data: bytes) -> None:
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=".new-")  # readable by its owner alone
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
