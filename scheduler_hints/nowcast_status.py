"""What a nowcast says of itself after each tick: counts, ages, timings, problems.

Here belong the content of its status file and nothing that decides; the API serves it under `/v1/status` and, by
`scheduler_hints/nowcast_gauges.py`, to Prometheus.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from scheduler_hints.offers import offered_horizons

if TYPE_CHECKING:
    from scheduler_hints.episodes import Scored
    from scheduler_hints.nowcast import Nowcast

STATUS = "nowcast-status.json"
GONE_S = 86_400.0  # a GPU that has been silent for a day is no longer one of the cluster's


def status_of(
    nowcast: Nowcast, now: datetime, age: np.ndarray, horizon_s: float | None, scores: Sequence[Scored]
) -> dict[str, Any]:
    """The status after a tick.

    Args:
        nowcast: Whose.
        now: Moment of the tick, UTC.
        age: Ages of the newest samples of fresh GPUs, seconds.
        horizon_s: Actionable horizon, seconds; None: not known.
        scores: What was looked at closely, by class.
    """
    refuted = _note_refuted(nowcast, now)
    there = nowcast.window.age_s(now.timestamp()) <= GONE_S
    pace, jobs_at, received_at = nowcast.pace, nowcast.jobs_at, nowcast.last_received_at
    busy = pace.busy_ratio
    return {
        "cluster": nowcast.cluster,
        "last_tick": now.isoformat(),
        "ticks": nowcast.ticks,
        "tick_s": pace.tick_s,
        "wished_tick_s": pace.wished_s,
        "busy_ratio": None if busy is None else round(busy, 4),
        "widened_total": pace.widened_total,
        "missed_ticks_total": pace.missed_total,
        "gpus": int(there.sum()),
        "fresh_gpus": len(age),
        "stale_gpus": int(there.sum()) - int((there & nowcast.window.is_fresh(now.timestamp())).sum()),
        "refuted_gpus": refuted,
        "excluded_nodes": len(nowcast.inventory.excluded),
        "samples_total": nowcast.samples_total,
        "samples_ahead_total": nowcast.samples_ahead_total,
        "received": dict(nowcast.received),
        "last_received_at": received_at.isoformat() if received_at else None,
        "jobs_observed_at": jobs_at.isoformat() if jobs_at else None,
        "sample_age_min_s": float(age.min()) if age.size else None,
        "sample_age_p50_s": float(np.median(age)) if age.size else None,
        "sample_age_p95_s": float(np.quantile(age, 0.95)) if age.size else None,
        "actionable_horizon_s": horizon_s,
        "offered_horizons_s": list(offered_horizons(horizon_s)),
        "screened": {scored.bottleneck_class: len(scored.probabilities) for scored in scores},
        "bottlenecks": nowcast.published,
        "model_version": nowcast.champion.forecaster.version,
        "model_versions": dict(nowcast.champion.versions()),
        "units": {ring.kind.scope: ring.count for ring in nowcast.units.rings.values()},
        "ring_bytes": nowcast.window.nbytes() + nowcast.units.nbytes(),
        "timings_s": {name: round(value, 6) for name, value in nowcast.timings_s.items()},
        "problems": dict(nowcast.problems),
    }


def _note_refuted(nowcast: Nowcast, now: datetime) -> dict[str, int]:
    """Fresh GPUs whose values are not believed for their course, by reason; frozen ones are a problem to solve."""
    window = nowcast.window
    refuted = window.refuted(now.timestamp())
    frozen = refuted.get("frozen", ())
    if len(frozen):
        first = int(frozen[0])
        nowcast.problems["telemetry-values"] = (
            f"{len(frozen)} {'GPU has' if len(frozen) == 1 else 'GPUs have'} had the very same values for minutes "
            f"of work, as {window.uuids[first]} on {window.nodes[first]}: restart the exporter there"
        )
    else:
        nowcast.problems.pop("telemetry-values", None)
    return {reason: len(gpus) for reason, gpus in refuted.items()}
