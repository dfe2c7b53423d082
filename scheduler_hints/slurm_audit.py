"""The audit record of the agents: rows of out_actions, one a node, appended to a JSON Lines file.

Here belongs the shape of a row and how it reaches the file; not what is recorded (`slurm_agent.py`,
`kubernetes_agent.py`), and not the loading of the file into the store.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Container, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger(__name__)

ACTOR = "slurm-agent"
_MAX_WAITING = 10_000


def action_rows(
    at: datetime,
    cluster: str,
    action: str,
    *,
    is_applied: bool,
    reason: str,
    hint_id: str = "",
    job_id: str = "",
    nodes: Iterable[str] = (),
    actor: str = ACTOR,
    **detail: Any,
) -> list[dict[str, Any]]:
    """Rows of out_actions for one decision: one for each node; one with an empty node where there is none.

    Args:
        at: When, UTC.
        cluster: Where.
        action: `reserve`, `renew`, `release`, `used`, `ended`, `adopt`, `refuse`, `lost`, `breaker-open`, `no-hints`,
            `hints-back`, `error`, `stop`; of the Kubernetes agent `annotate`, `taint`, `release`.
        is_applied: It was carried out, not only advised.
        reason: Why, in words.
        hint_id: Id of the plan.
        job_id: The planned job.
        nodes: Nodes it is about.
        actor: Who decided.
        **detail: Further facts; JSON types.
    """
    text = msgspec.json.encode(detail).decode() if detail else None
    row = {
        "ts": at,
        "cluster": cluster,
        "actor": actor,
        "action": action,
        "hint_id": hint_id,
        "node": "",
        "job_id": job_id,
        "is_applied": is_applied,
        "reason": reason,
        "detail": text,
    }
    return [row | {"node": node} for node in sorted(nodes)] or [row]


def actions_path(state: Path, cluster: str) -> Path:
    """The file in which what is done on a cluster is recorded."""
    return state / "actions" / f"{cluster}.jsonl"


def jsonl_audit(path: Path) -> Callable[[dict[str, Any]], None]:
    """A function that appends a row to a file as one line, in one write, and has it on disk when it returns.

    A line that a crash cut short is ended before the next one is written, so that it spoils no other. The file is
    opened anew at each call: the loader may move it away at any time.

    Args:
        path: `<state>/actions/<cluster>.jsonl`; its folder is made.

    Returns:
        The function; it raises OSError when the disk refuses.
    """
    lock = threading.Lock()

    def append(row: dict[str, Any]) -> None:
        line = msgspec.json.encode(row) + b"\n"
        with lock:
            path.parent.mkdir(parents=True, exist_ok=True)
            while True:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX)  # another process's line may be half in the file
                    if not _is_there(path, handle):
                        continue  # the loader took it away while we waited
                    size = os.fstat(handle).st_size
                    whole = b"\n" + line if size and os.pread(handle, 1, size - 1) != b"\n" else line
                    if os.write(handle, whole) != len(whole):
                        raise OSError(f"{path}: only part of a line could be written")
                    os.fsync(handle)
                    return
                finally:
                    os.close(handle)

    return append


def _is_there(path: Path, handle: int) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(handle)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


class Ledger:
    """Records decisions: each once while it stays the same, and none lost while the disk refuses.

    Args:
        cluster: Name of the cluster.
        audit: Takes a row; raises OSError when it cannot keep it.
        clock: The moment, UTC.
        actor: Who decides.
    """

    def __init__(
        self,
        cluster: str,
        audit: Callable[[dict[str, Any]], None],
        clock: Callable[[], datetime],
        actor: str = ACTOR,
    ) -> None:
        self._cluster, self._audit, self._clock, self._actor = cluster, audit, clock, actor
        self._said: dict[str, str] = {}
        self._waiting: list[dict[str, Any]] = []

    @property
    def is_behind(self) -> bool:
        """Rows wait because the record cannot be written."""
        return bool(self._waiting)

    def put(self, action: str, *, is_applied: bool, reason: str, **facts: Any) -> None:
        """Record a decision; arguments as of `action_rows`."""
        level = logging.WARNING if action in ("error", "breaker-open") else logging.INFO
        told = "".join(f"; {name}: {', '.join(map(str, sorted(fact))) if isinstance(fact, frozenset) else fact}"
                       for name, fact in facts.items())  # fmt: skip
        log.log(level, "%s%s: %s%s", action, "" if is_applied else " (not applied)", reason, told)
        rows = action_rows(
            self._clock(), self._cluster, action, is_applied=is_applied, reason=reason, actor=self._actor, **facts
        )
        self._waiting = (self._waiting + rows)[:_MAX_WAITING]
        self.flush()

    def say(self, key: str, action: str, reason: str, **facts: Any) -> None:
        """Record what would repeat itself at every round: only when its reason under that key is a new one."""
        if self._said.get(key) != reason:
            self._said[key] = reason
            self.put(action, is_applied=False, reason=reason, **facts)

    def forget(self, key: str) -> bool:
        """It is over; returns whether it had been said."""
        return self._said.pop(key, None) is not None

    def keep(self, keys: Container[str]) -> None:
        """Forget everything said under other keys."""
        self._said = {key: reason for key, reason in self._said.items() if key in keys}

    def flush(self) -> None:
        """Hand rows to the record; what it cannot take is kept for the next time."""
        while self._waiting:
            try:
                self._audit(self._waiting[0])
            except OSError as error:
                log.error("the record of actions cannot be written, nothing is made meanwhile: %s", error)
                return
            del self._waiting[0]
