"""Answers of the hints API: their shapes, their bytes, their ETags, and the rule that nothing expired is in them.

An answer is encoded once per query and set of shards. Only its tail changes with time (`data_age_s`, `expires_in_s`,
in steps of 0.1 s, each rounded to the careful side), so a repeated read costs a look-up and a few bytes.
No HTTP server here and no query parsing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Generic, TypeVar

import msgspec

from scheduler_hints.errors import NotFoundError, UnavailableError
from scheduler_hints.filters import select
from scheduler_hints.placements import needs_of, nodes_in_flight, without
from scheduler_hints.schema import JobForecast
from scheduler_hints.shards import Row, Shard, State

T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
_STEPS_PER_S = 10


class ListAnswer(msgspec.Struct, Generic[T], frozen=True):
    """Hints of one kind, from every fresh shard that was asked for.

    `version` is the highest version among the shards and `versions` has that of each cluster. `generated_at` is that
    of the oldest. `stale_shards` names the clusters that were asked for and have nothing fresh. `data_age_s` is the
    age of the newest input of the oldest shard, now. The answer must not be used for longer than `expires_in_s`,
    counted on a monotonic clock. Keys of `model_versions` are tasks, or cluster/task when several clusters answer.
    """

    items: list[T]
    version: int
    versions: dict[str, int]
    generated_at: datetime
    stale_shards: list[str]
    actionable_horizon_s: float | None
    model_versions: dict[str, str]
    data_age_s: float
    expires_in_s: float


class JobAnswer(msgspec.Struct, frozen=True):
    """The forecast of one job."""

    item: JobForecast
    version: int
    generated_at: datetime
    model_versions: dict[str, str]
    data_age_s: float
    expires_in_s: float


class Encoded:
    """An answer whose bytes are ready but for the two numbers that change with time.

    Attributes:
        etag: Strong ETag in quotes: shards by content, query, encoding (identity is the only one there is).
        deadline_s: Until when it may be served, CLOCK_BOOTTIME, s.
        size: Bytes held.
    """

    __slots__ = ("_head", "_headers", "_not_modified", "_start", "_step", "_taken_s", "body", "deadline_s", "etag")

    def __init__(self, head: bytes, etag: bytes, deadline_s: float, taken_s: float) -> None:
        """Args: `head` is the JSON up to the changing tail; `taken_s` when the newest input was taken."""
        self.etag = etag
        self.deadline_s = deadline_s
        self.body = b""
        self._head = head
        self._taken_s = taken_s
        self._step = -1
        self._start: dict[str, Any] = {}
        self._not_modified: dict[str, Any] = {}

    @property
    def size(self) -> int:
        return 2 * len(self._head)

    def at(self, now_s: float) -> tuple[dict[str, Any], bytes]:
        """ASGI start message and body of a 200 at `now_s`, which must lie before the deadline."""
        step = int((self.deadline_s - now_s) * _STEPS_PER_S)
        if step != self._step:
            self._encode(step)
        return self._start, self.body

    def not_modified(self, now_s: float) -> dict[str, Any]:
        """ASGI start message of a 304 at `now_s`."""
        step = int((self.deadline_s - now_s) * _STEPS_PER_S)
        if step != self._step:
            self._encode(step)
        return self._not_modified

    def _encode(self, step: int) -> None:
        expires_in = step / _STEPS_PER_S
        age_s = max(0.0, self.deadline_s - expires_in - self._taken_s)
        tail = f',"data_age_s":{math.ceil(age_s * _STEPS_PER_S) / _STEPS_PER_S},"expires_in_s":{expires_in}}}'
        self.body = self._head + tail.encode()
        common = [
            (b"etag", self.etag),
            (b"cache-control", b"private, no-cache"),
            (b"x-expires-in", str(expires_in).encode()),
        ]
        content = [(b"content-type", b"application/json"), (b"content-length", str(len(self.body)).encode())]
        self._start = {"type": "http.response.start", "status": 200, "headers": content + common}
        self._not_modified = {"type": "http.response.start", "status": 304, "headers": common}
        self._step = step


def _unavailable(state: State, kind: str, clusters: Sequence[str], now_s: float) -> UnavailableError:
    reasons = {cluster: state.why_stale(cluster, kind, now_s) for cluster in clusters}
    first = next(iter(reasons.items()), None)
    words = f"{first[0]}: {first[1]}" if first else "no cluster is configured"
    detail = {"stale_shards": list(reasons), "reasons": reasons}
    can_come = any(state.condition(cluster, kind, now_s) != "impossible" for cluster in clusters)
    advice = "Go on as without hints" + (" and ask again" if can_come else "")
    return UnavailableError("stale", f"no fresh {kind}; {words}. {advice}", detail)


def _etag(*parts: str) -> bytes:
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()
    return f'"{digest}"'.encode()


def encode_list(state: State, kind: str, clusters: Sequence[str], values: dict[str, Any], now_s: float) -> Encoded:
    """Encode the answer to a list query.

    Args:
        state: Shards at this moment.
        kind: Kind of hint.
        clusters: Clusters asked for.
        values: Checked parameters.
        now_s: Now on CLOCK_BOOTTIME.

    Raises:
        UnavailableError: No shard that was asked for is fresh.
    """
    fresh: list[Shard] = []
    stale: list[str] = []
    for cluster in clusters:
        shard = state.fresh(cluster, kind, now_s)
        if shard is None:
            stale.append(cluster)
        else:
            fresh.append(shard)
    if not fresh:
        raise _unavailable(state, kind, clusters, now_s)
    deadline_s = min(shard.deadline_s for shard in fresh)
    chosen: list[Row] = []
    every: list[Row] = []
    flying: list[str] = []
    for shard in fresh:
        rows: Sequence[Row] = shard.rows
        cluster = shard.head.cluster
        if kind == "backfill-windows" and (placed := state.placements.get(cluster)):
            taken, until_s = nodes_in_flight(placed, now_s)
            deadline_s = min(deadline_s, until_s)
            if taken:
                jobs = state.fresh(cluster, "jobs", now_s)
                rows = without(rows, taken, needs_of(None if jobs is None else jobs.jobs))
                flying += [cluster, *sorted(taken)]
        every += rows
    for row in select(kind, values, every):
        if row.deadline_s > now_s:
            chosen.append(row)
            deadline_s = min(deadline_s, row.deadline_s)
    heads = [shard.head for shard in fresh]
    horizons = [head.actionable_horizon_s for head in heads if head.actionable_horizon_s is not None]
    facts = {
        "version": max(head.version for head in heads),
        "versions": {head.cluster: head.version for head in heads},
        "generated_at": min(head.generated_at for head in heads),
        "stale_shards": stale,
        "actionable_horizon_s": max(horizons) if horizons else None,
        "model_versions": _model_versions(fresh, is_one=len(clusters) == 1),
    }
    head = b'{"items":[' + b",".join([row.raw for row in chosen]) + b"]," + _encode(facts)[1:-1]
    tags = [f"{shard.head.cluster} {shard.tag}" for shard in fresh]
    query = _encode(values).decode()
    etag = _etag(kind, query, *tags, "stale", *stale, f"{len(chosen)}", *flying, "identity")
    return Encoded(head, etag, deadline_s, min(shard.generated_s - shard.head.data_age_s for shard in fresh))


def _model_versions(shards: Sequence[Shard], *, is_one: bool) -> dict[str, str]:
    if is_one:
        return shards[0].head.model_versions
    return {
        f"{shard.head.cluster}/{task}": version
        for shard in shards
        for task, version in shard.head.model_versions.items()
    }


def encode_job(state: State, cluster: str, job_id: str, now_s: float) -> Encoded:
    """Encode the answer about one job.

    Raises:
        UnavailableError: The cluster's job forecasts are not fresh.
        NotFoundError: They are, and the job is not among them.
    """
    shard = state.fresh(cluster, "jobs", now_s)
    if shard is None:
        raise _unavailable(state, "jobs", [cluster], now_s)
    row = shard.jobs.get(job_id)
    if row is None:
        raise NotFoundError(
            "unknown_job",
            f"no forecast for job {job_id!r} of cluster {cluster!r}; only pending and running jobs have one",
            {"cluster": cluster, "job_id": job_id},
        )
    if row.deadline_s <= now_s:
        raise UnavailableError("stale", f"the forecast for job {job_id!r} of cluster {cluster!r} has expired", None)
    head = shard.head
    facts = {"version": head.version, "generated_at": head.generated_at, "model_versions": head.model_versions}
    encoded = b'{"item":' + row.raw + b"," + _encode(facts)[1:-1]
    etag = f'"{shard.tag}-{hashlib.blake2b(job_id.encode(), digest_size=6).hexdigest()}"'.encode()
    return Encoded(encoded, etag, row.deadline_s, shard.generated_s - head.data_age_s)


def matches(if_none_match: bytes, etag: bytes) -> bool:
    """Whether an `If-None-Match` header names this ETag."""
    if if_none_match == etag:
        return True
    tags = [tag.strip().removeprefix(b"W/") for tag in if_none_match.split(b",")]
    return etag in tags or tags == [b"*"]
