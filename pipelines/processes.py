"""A small supervisor of child processes: start, watch, restart, stop. It knows nothing of what the children do.

Each child leads its own session, so that its whole group can be ended: TERM, then KILL. A child also gets TERM from the
kernel when the supervisor dies without a word (kill -9), so nothing is left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_STABLE_S = 30.0
_MAX_BACKOFF_S = 30.0


def _before_exec() -> None:
    """In the child: default signals, and TERM when the parent dies."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@dataclass
class Child:
    """One child process.

    Attributes:
        name: Shown to people; names the log file.
        argv: Command and arguments; never a shell.
        env: Environment in addition to the supervisor's own.
        is_service: A service is restarted when it ends; a task may end once with code 0.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    is_service: bool = True
    process: subprocess.Popen | None = None
    started_at: float = 0.0
    failures: int = 0
    restart_at: float | None = None
    restarts: int = 0

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Processes:
    """Children of one supervisor. Not thread-safe: start, watch and stop from the main thread."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.children: dict[str, Child] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def log_path(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def start(self, child: Child) -> Child:
        """Start a child with its output appended to its log file.

        Raises:
            OSError: The program cannot be started; the message names it.
        """
        self.children[child.name] = child
        with self._log(child.name) as output:
            child.process = subprocess.Popen(
                child.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **child.env},
                start_new_session=True,
                preexec_fn=_before_exec,  # safe: the supervisor has one thread
            )
        child.started_at = time.monotonic()
        child.restart_at = None
        return child

    def _log(self, name: str) -> BinaryIO:
        """The child's log; where it cannot be opened (a full or read-only disk) its output is let go."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            return self.log_path(name).open("ab")
        except OSError:
            return Path(os.devnull).open("ab")

    def watch(self) -> list[str]:
        """Restart services that died (after 1, 2, 4 … 30 s); call it a few times a second.

        Returns:
            What happened since the last call, one line each.
        """
        events = []
        now = time.monotonic()
        for child in self.children.values():
            if child.process is None:
                continue
            if child.restart_at is not None:
                if now >= child.restart_at:
                    events.append(self._restart(child, now))
                continue
            code = child.process.poll()
            if code is None:
                continue
            if not child.is_service:
                if code:
                    events.append(f"{child.name}: failed with code {code}; see {self.log_path(child.name)}")
                child.process = None
                continue
            self._end_group(child, signal.SIGKILL)  # its own children must not outlive it
            child.failures = 0 if now - child.started_at > _STABLE_S else child.failures + 1
            delay = min(2.0 ** max(0, child.failures - 1), _MAX_BACKOFF_S)
            child.restart_at = now + delay
            how = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
            events.append(f"{child.name}: {how}; again in {delay:.0f} s; see {self.log_path(child.name)}")
        return events

    def _restart(self, child: Child, now: float) -> str:
        try:
            self.start(child)
        except OSError as error:  # no memory, no descriptor: later there may be
            child.restart_at = now + _MAX_BACKOFF_S
            return f"{child.name}: cannot be started: {error}; again in {_MAX_BACKOFF_S:.0f} s"
        child.restarts += 1
        return f"{child.name}: restarted (pid {child.pid})"

    def wait_for(self, name: str, timeout_s: float) -> int | None:
        """Exit code of a task, or None when it still runs after `timeout_s`."""
        process = self.children[name].process
        if process is None:
            return 0
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, grace_s: float = 10.0) -> list[str]:
        """End every group, newest first: TERM, then KILL after `grace_s`.

        Returns:
            Names of children that needed KILL.
        """
        started = [child for child in reversed(self.children.values()) if child.process is not None]
        for child in started:
            self._end_group(child, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        stubborn = []
        for child in started:
            assert child.process is not None
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                stubborn.append(child.name)
        for child in started:
            assert child.process is not None
            self._end_group(child, signal.SIGKILL)
            child.process.wait()
            child.process = None
        return stubborn

    @staticmethod
    def _end_group(child: Child, number: signal.Signals) -> None:
        assert child.process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, number)
