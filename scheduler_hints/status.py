"""The answer of `/v1/status`: how fresh every cluster and kind is, and what the nowcasts say of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from scheduler_hints.shards import State


class KindStatus(msgspec.Struct, frozen=True):
    """Freshness of one kind of one cluster. All but `is_fresh` and `reason` are null where nothing can be read.

    `age_s` is the time since it was published, `data_age_s` that since its newest input was taken.
    """

    is_fresh: bool
    reason: str | None
    version: int | None
    generated_at: datetime | None
    age_s: float | None
    data_age_s: float | None
    expires_in_s: float | None
    ttl_s: float | None
    actionable_horizon_s: float | None
    items: int | None
    invalid_items: int | None
    model_versions: dict[str, str] | None


class ClusterStatus(msgspec.Struct, frozen=True):
    """Freshness of one cluster; `nowcast` is what its nowcast says of itself, null when it says nothing."""

    is_fresh: bool
    kinds: dict[str, KindStatus]
    nowcast: dict[str, Any] | msgspec.Raw | None


class Alive(msgspec.Struct, frozen=True):
    """The process answers."""

    status: str


class Ready(msgspec.Struct, frozen=True):
    """How many shards are fresh, and how many are not by why; no names, since no token is asked for."""

    status: str
    fresh_shards: int
    stale_shards: dict[str, int]


class Status(msgspec.Struct, frozen=True):
    """Freshness of everything the token may see."""

    is_fresh: bool
    at: datetime
    clusters: dict[str, ClusterStatus]


def status_of(state: State, clusters: Sequence[str], kinds: Sequence[str], now_s: float, at: datetime) -> Status:
    """How fresh everything is.

    Args:
        state: Shards at this moment.
        clusters: Clusters to report on.
        kinds: Kinds to report on.
        now_s: Now on CLOCK_BOOTTIME.
        at: Now in UTC.
    """
    found: dict[str, ClusterStatus] = {}
    for cluster in clusters:
        by_kind = {kind: _kind_status(state, cluster, kind, now_s, at) for kind in kinds}
        is_fresh = any(status.is_fresh for status in by_kind.values())
        found[cluster] = ClusterStatus(is_fresh, by_kind, state.nowcast.get(cluster))
    return Status(any(cluster.is_fresh for cluster in found.values()), at, found)


def _kind_status(state: State, cluster: str, kind: str, now_s: float, at: datetime) -> KindStatus:
    reason = state.why_stale(cluster, kind, now_s)
    can_come = state.condition(cluster, kind, now_s) != "impossible"
    said = state.nowcast_problems(cluster, kind, at) if reason is not None and can_come else None
    if said is not None:
        reason = f"{reason}; {said}"
    shard = state.shards.get((cluster, kind))
    if shard is None:
        return KindStatus(False, reason, *(None,) * 10)
    head = shard.head
    age_s = max(0.0, now_s - shard.generated_s)
    return KindStatus(
        is_fresh=reason is None,
        reason=reason,
        version=head.version,
        generated_at=head.generated_at,
        age_s=round(age_s, 3),
        data_age_s=round(head.data_age_s + age_s, 3),
        expires_in_s=round(max(0.0, shard.deadline_s - now_s), 3),
        ttl_s=head.ttl_s,
        actionable_horizon_s=head.actionable_horizon_s,
        items=len(shard.rows),
        invalid_items=shard.invalid,
        model_versions=head.model_versions,
    )
