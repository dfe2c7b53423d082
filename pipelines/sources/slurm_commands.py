"""Runs Slurm's client commands for the reader: environment, time-outs, what a failure says, what a call costs.

What is asked and what the answers mean stands in `slurm.py`, `sacct.py` and `slurm_text.py`; the requests of all
processes together in `slurm_budget.py`. The agent's own commands stand in `scheduler_hints/slurm_commands.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from datetime import UTC, datetime

from pipelines.sources import SourceError
from pipelines.sources.slurm_budget import Answer, Budget, Price

# Requests to slurmctld that a command makes, counted with sdiag on 22.05; those not named make one.
_QUEUE = Price(2, share_s=15, stale_s=120)
_NODES = Price(2, share_s=45, stale_s=300)
_REST = Price(1, share_s=120, stale_s=900)
_DEAR = Price(2, share_s=120, stale_s=900)
_FREE = Price(0)
_FREE_PROGRAMS = ("sacct", "sacctmgr")  # they speak with slurmdbd
_SAID_BY_DATABASE = re.compile(
    r"Too wide of a date range|slurmdbd: (?:Unknown error|error)|Problem talking", re.IGNORECASE
)
_ERROR_LINE = re.compile(r"^\w+: (?:error|fatal): ", re.MULTILINE)


def price(program: str, arguments: tuple[str, ...]) -> Price:
    """What a command costs slurmctld, and how old its answer may be."""
    if program in _FREE_PROGRAMS or any(word in arguments for word in ("--version", "-V", "--help", "--helpformat")):
        return _FREE
    if program == "squeue":
        return _QUEUE
    what = next((word for word, before in zip(arguments[1:], arguments, strict=False) if before == "show"), "")
    if program == "scontrol" and what.startswith("job"):
        return _QUEUE
    if program == "sinfo" or (program == "scontrol" and what.startswith("node")):
        return _NODES
    return _DEAR if what.startswith("config") else _REST


class Commands:
    """Slurm's client commands.

    Args:
        source: Name for messages.
        conf: SLURM_CONF; empty: the commands' own default.
        folder: Where the commands are; empty: on PATH.
        timeout_s: Time-out of one command, s.
        budget: Requests that all processes together may make; None: no limit, nothing shared.
    """

    def __init__(
        self, source: str, conf: str = "", folder: str = "", timeout_s: float = 30, budget: Budget | None = None
    ) -> None:
        self.source, self.timeout_s, self.budget = source, timeout_s, budget
        self._folder = folder
        # Times of the output as seconds since the epoch, those of the options in UTC; index lists of arrays whole.
        self._env = {
            **os.environ, "TZ": "UTC", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0",
            **({"SLURM_CONF": conf} if conf else {}),
        }  # fmt: skip
        self._conf = conf
        self._version: tuple[int, int] | None = None
        self._fields: frozenset[str] | None = None
        self.calls = 0
        self.warnings: list[str] = []  # what commands complained of although they answered

    def run(self, program: str, *arguments: str) -> str:
        """Standard output of a command, or its last one while that is young enough.

        Raises:
            SourceError: It is not there, failed, did not end in time, or the budget is used up; the message holds what
                it said.
        """
        return self.ask(program, *arguments)[0]

    def ask(self, program: str, *arguments: str) -> tuple[str, datetime]:
        """As `run`, and when it was asked.

        Raises:
            SourceError: As for `run`.
        """
        if self.budget is None:
            at = datetime.now(UTC)
            answer = Answer(self._run(program, arguments), at)
        else:
            question = "\0".join((self._conf, self._folder, program, *arguments))
            answer = self.budget.ask(question, price(program, arguments), lambda: self._run(program, arguments))
        return answer.data.decode("utf-8", "replace"), answer.at

    def version(self) -> tuple[int, int]:
        """Year and month of the commands' release, as (22, 5); (0, 0) when they do not say.

        Raises:
            SourceError: The command is not there or failed.
        """
        if self._version is None:
            found = re.search(r"(\d+)\.(\d+)", self.run("sacct", "--version"))
            self._version = (int(found[1]), int(found[2])) if found else (0, 0)
        return self._version

    def has_field(self, name: str) -> bool:
        """Whether this release's sacct knows a field.

        Raises:
            SourceError: The command is not there or failed.
        """
        if self._fields is None:
            self._fields = frozenset(self.run("sacct", "--helpformat").lower().split())
        return name.lower() in self._fields

    def _run(self, program: str, arguments: tuple[str, ...]) -> bytes:
        path = shutil.which(program, path=self._folder or None)
        if path is None:
            raise SourceError(
                f"{self.source}: {program} is not in {self._folder or 'PATH'}: install Slurm's client commands or set "
                "slurm_bin"
            )
        self.calls += 1
        try:
            done = subprocess.run(
                [path, *arguments], capture_output=True, stdin=subprocess.DEVNULL, timeout=self.timeout_s, env=self._env
            )
        except subprocess.TimeoutExpired:
            raise SourceError(
                f"{self.source}: {program} did not end within {self.timeout_s:g} s: is the controller reachable? "
                "(scontrol ping; slurm_timeout_s)"
            ) from None
        except OSError as error:
            raise SourceError(f"{self.source}: {path}: {error.strerror}") from error
        said = " ".join((done.stderr or (done.stdout if done.returncode else b"")).decode("utf-8", "replace").split())
        # An answer that the database broke off may end with 0 all the same.
        if done.returncode or _SAID_BY_DATABASE.search(said):
            raise SourceError(
                f"{self.source}: {program} failed (exit {done.returncode}): {said[-400:] or 'no message'}"
            )
        if _ERROR_LINE.search(said):
            self.warnings.append(f"{self.source}: {said[:400]}")
        return done.stdout
