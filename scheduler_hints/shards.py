"""What the hints API holds in memory: a shard is one snapshot, decoded and ready to be joined into an answer.

Here belong the shapes and the decoding; how files are watched is `reloader.py`. No HTTP, and no rule about who may see
what.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from scheduler_hints import snapshot
from scheduler_hints.gauges import Gauges, gauges_of
from scheduler_hints.outcome_gauges import OutcomesWord
from scheduler_hints.schema import SHAPES, Snapshot

_BATCH = 64
_PAUSE_S = 0.0005
"""Decoding stops this often, this long: a waiting request gets the interpreter, and a thread that sleeps often is not
often taken off the processor while it holds the interpreter."""
_decoders = {kind: msgspec.json.Decoder(shape) for kind, shape in SHAPES.items()}

Key = tuple[str, str]
"""Cluster and kind."""
Condition = Literal["fresh", "expired", "missing", "unreadable", "impossible"]

OF_A_SCHEDULER = ("backfill-windows", "reservation-plans", "demand")
"""Kinds that nobody can publish for a cluster without a scheduler."""

_NOWCAST_PROBLEMS = {
    "bottlenecks": ("telemetry-source", "telemetry-targets", "telemetry-clock", "telemetry"),
    "backfill-windows": ("job-source", "jobs", "windows"),
    "reservation-plans": ("job-source", "jobs", "windows"),
}
"""Names under which a nowcast says what may keep it from publishing a kind, the cause before its effect."""
_SILENT_TICKS = 4  # a nowcast whose last tick is older than this many of them is not heard any more


class _Word(msgspec.Struct, frozen=True):
    """What matters here of a nowcast's own status file."""

    problems: dict[str, str] = {}
    last_tick: datetime | None = None
    tick_s: float = 15.0


_word = msgspec.json.Decoder(_Word)


class Row(msgspec.Struct, frozen=True):
    """One hint: decoded for filters, encoded for answers, and when it expires (CLOCK_BOOTTIME, s)."""

    item: Any
    raw: bytes
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Shard:
    """One snapshot in memory.

    Attributes:
        head: The snapshot without its items.
        tag: Digest of the file; two shards with the same tag are the same bytes.
        rows: Hints in the order in which they were published.
        jobs: Row of each job id, for kind `jobs`.
        generated_s: When it was generated, on this machine's CLOCK_BOOTTIME, s.
        deadline_s: When it expires, on the same clock, s.
        invalid: Items left out because they do not have the kind's shape.
        gauges: Its lines for Prometheus, the most important first.
    """

    head: Snapshot
    tag: str
    rows: tuple[Row, ...]
    jobs: Mapping[str, Row]
    generated_s: float
    deadline_s: float
    invalid: int
    gauges: Gauges


@dataclass(frozen=True, slots=True)
class State:
    """All shards at one moment; never changed, only replaced.

    Attributes:
        shards: Those that could be read, expired ones included.
        problems: Why the others could not.
        nowcast: Raw JSON of each nowcast's own status file.
        outcomes: What the newest night said of each cluster's published forecasts.
        placements: What schedulers have just placed, by cluster.
        generation: Rises with each change.
        without_scheduler: Clusters for which no scheduler is configured.
    """

    shards: Mapping[Key, Shard] = field(default_factory=dict)
    problems: Mapping[Key, str] = field(default_factory=dict)
    nowcast: Mapping[str, msgspec.Raw] = field(default_factory=dict)
    outcomes: Mapping[str, OutcomesWord] = field(default_factory=dict)
    placements: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    generation: int = 0
    without_scheduler: frozenset[str] = frozenset()

    def fresh(self, cluster: str, kind: str, now_s: float) -> Shard | None:
        """The shard if it has not expired at `now_s` (CLOCK_BOOTTIME)."""
        shard = self.shards.get((cluster, kind))
        return shard if shard is not None and now_s < shard.deadline_s else None

    def condition(self, cluster: str, kind: str, now_s: float) -> Condition:
        """In one word, how a shard stands at `now_s`; impossible: its cluster has nothing that it could be made of."""
        is_fresh = self.fresh(cluster, kind, now_s) is not None
        if kind in OF_A_SCHEDULER and cluster in self.without_scheduler and not is_fresh:
            return "impossible"
        if (cluster, kind) in self.problems:
            return "unreadable"
        shard = self.shards.get((cluster, kind))
        if shard is None:
            return "missing"
        return "fresh" if is_fresh else "expired"

    def why_stale(self, cluster: str, kind: str, now_s: float) -> str | None:
        """Why a shard is not fresh, in words; None when it is."""
        match self.condition(cluster, kind, now_s):
            case "fresh":
                return None
            case "unreadable":
                return self.problems[cluster, kind]
            case "impossible":
                return "no scheduler is configured"
            case "missing":
                return "nothing has been published yet"
        age_s = now_s - self.shards[cluster, kind].deadline_s
        return f"expired {age_s:.0f} s ago: nothing newer has been published"

    def nowcast_parts(self, cluster: str) -> list[str]:
        """Names of what a nowcast says is in trouble, as `receiver`; none when it says nothing."""
        try:
            return sorted(_word.decode(self.nowcast[cluster]).problems)
        except (KeyError, msgspec.DecodeError, UnicodeDecodeError):
            return []

    def nowcast_problems(self, cluster: str, kind: str, at: datetime) -> str | None:
        """What the nowcast says keeps it from publishing a kind, or that it is silent; None when it says nothing.

        Args:
            cluster: Name of the cluster.
            kind: Kind of hint; None is returned for those that the nowcast does not publish.
            at: Now in UTC.
        """
        names = (kind, *_NOWCAST_PROBLEMS.get(kind, ()))
        if len(names) == 1 or cluster not in self.nowcast:
            return None
        try:
            said = _word.decode(self.nowcast[cluster])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if said.last_tick is not None and said.last_tick.tzinfo is not None:
            silent_s = (at - said.last_tick).total_seconds()
            if silent_s > _SILENT_TICKS * said.tick_s:
                return f"the nowcast has not ticked for {silent_s:.0f} s: is it running?"
        found = [said.problems[name] for name in names if name in said.problems]
        return f"the nowcast says: {'; '.join(found)}" if found else None


def load_shard(data: bytes, cluster: str, kind: str, origin: str | Path, now_s: float, now_wall: datetime) -> Shard:
    """Decode a snapshot file into a shard.

    Args:
        data: Content of the file.
        cluster: Cluster it must be of.
        kind: Kind it must be of.
        origin: Name of the file, for messages.
        now_s: Now on CLOCK_BOOTTIME.
        now_wall: Now on the wall clock, for writers on another machine.

    Raises:
        SnapshotError: It is no snapshot, or one of another cluster or kind.
    """
    whole = snapshot.parse_snapshot(data, origin)
    if (whole.cluster, whole.kind) != (cluster, kind):
        raise snapshot.SnapshotError(f"{origin}: holds {whole.kind} of {whole.cluster!r}, not {kind} of {cluster!r}")
    left_s = snapshot.expires_in_s(whole, now_wall, now_s)
    if left_s < -snapshot.CLOCK_TOLERANCE_S and _is_ahead(whole, now_wall, now_s):
        raise snapshot.SnapshotError(
            f"{origin}: generated_at {whole.generated_at.isoformat()} lies ahead of this machine's clock, so its age "
            "is unknown: synchronise the clocks of the two machines"
        )
    deadline_s = now_s + left_s
    decode = _decoders[kind].decode
    has_age = "generated_at" in SHAPES[kind].__struct_fields__
    rows: list[Row] = []
    jobs: dict[str, Row] = {}
    for count, raw in enumerate(whole.items, 1):
        if count % _BATCH == 0:
            time.sleep(_PAUSE_S)
        try:
            item = decode(raw)
            row = Row(item, bytes(raw), deadline_s - _lag_s(item, whole) if has_age else deadline_s)
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError):
            continue
        rows.append(row)
        if kind == "jobs":
            jobs[row.item.job_id] = row
    return Shard(
        head=msgspec.structs.replace(whole, items=[]),
        tag=hashlib.blake2b(data, digest_size=12).hexdigest(),
        rows=tuple(rows),
        jobs=jobs,
        generated_s=deadline_s - whole.ttl_s,
        deadline_s=deadline_s,
        invalid=len(whole.items) - len(rows),
        gauges=gauges_of(kind, cluster, [row.item for row in rows]),
    )


def _is_ahead(whole: Snapshot, now_wall: datetime, now_s: float) -> bool:
    if whole.boot_id and whole.boot_id == snapshot.boot_id():
        return whole.generated_boottime_s > now_s
    return whole.generated_at > now_wall


def _lag_s(item: Any, whole: Snapshot) -> float:
    """How much older a hint is than the snapshot that carries it: a forecast published again does not live anew."""
    return max(0.0, (whole.generated_at - item.generated_at).total_seconds())
