"""Claims: which waiting jobs will take nodes that are idle now, how many, and how soon with what probability.

Here belongs the reading of the queue by EASY backfilling's rule; not the geometry of windows (`windows.py`) and not the
ends of running jobs (`job_ends.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import polars as pl

from scheduler_hints.job_ends import KILL_WAIT_S, JobEnds

NEVER_S = 1e15
# Reasons that are about a rule, not about nodes: such a job starts when somebody or something else lets it.
_RULE_REASON = (
    r"(?i)^(jobheld|dependency|qos|assoc|max|group|grp|user|account|invalid|licenses|jobarray|badconstraints|deadline"
    r"|partition(down|inactive|timelimit|nodelimit|config)|reservation|burstbuffer|prolog|held|fedjoblock|.*limit)"
)


# Moments at which freed nodes are counted first: 0, 1 s … 180 days, 8 % apart.
_BINS_S = np.concatenate([[0.0], np.geomspace(1, 180 * 86_400, 216)]).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Claim:
    """A waiting job that will take idle nodes.

    Attributes:
        job_id: The job.
        nodes: Nodes it takes.
        from_s: Not before then, seconds from now.
        shortfall: Not before so many nodes more than are idle now are free; 0 when the idle ones are enough.
        by_s: At that moment for certain, as begin time or the scheduler's plan say; `NEVER_S` when neither does.
        why: Added to the sentence in `text`.
    """

    job_id: str
    nodes: int
    from_s: float
    shortfall: int
    by_s: float = NEVER_S
    why: str = ""

    @property
    def text(self) -> str:
        return f"job {self.job_id} is expected to start on {self.nodes} node{'s' * (self.nodes != 1)}{self.why}"


def seconds_until(moment: pl.Expr, now: datetime) -> pl.Expr:
    """A time column as seconds from now."""
    return (moment - pl.lit(now)).dt.total_microseconds() / 1e6


def waiting_jobs(jobs: pl.DataFrame, forecasts: pl.DataFrame, now: datetime, node_gpus: int) -> pl.DataFrame:
    """The queue in the order in which the scheduler is taken to serve it.

    JOB_COLUMNS has no priority. The order is: jobs that wait for `Resources` (Slurm's word for the head of a queue),
    then by planned start, then by eligible or submit time, then by id.

    Args:
        jobs: Rows of JOB_COLUMNS.
        forecasts: Rows of out_job_forecasts.
        now: The moment, UTC.
        node_gpus: GPUs of a usual node, for jobs that state no number of nodes.

    Returns:
        job_id, user, account, need (nodes, ≥ 1), gpus, limit_s, p80_s (0.8 quantile of the runtime; the limit where
        there is no valid forecast), ready_s and planned_s (seconds from now, null when unknown), is_ruled_out.
    """
    runtimes = (
        forecasts.filter(
            pl.col("forecast") == "runtime",
            pl.col("generated_at") <= now,
            pl.col("valid_until").is_null() | (pl.col("valid_until") > now),
        )
        .sort("generated_at")
        .unique("job_id", keep="last", maintain_order=True)
        .select("job_id", pl.col("q80_s").alias("forecast_s"))
    )
    limit = pl.col("time_limit_s").cast(pl.Float64)
    return (
        jobs.filter(pl.col("state") == "PENDING")
        .sort(
            (pl.col("reason").fill_null("").str.to_lowercase() != "resources"),
            "planned_start_time",
            pl.coalesce("eligible_time", "submit_time"),
            "job_id",
            nulls_last=True,
        )
        .join(runtimes, on="job_id", how="left", maintain_order="left")
        .select(
            "job_id",
            "user",
            "account",
            pl.coalesce(
                pl.when(pl.col("nodes") > 0).then("nodes"),
                (pl.col("gpus").cast(pl.Float64) / max(node_gpus, 1)).ceil().cast(pl.Int32),
                pl.lit(1, pl.Int32),
            )
            .clip(1)
            .alias("need"),
            pl.col("gpus").fill_null(0),
            limit.alias("limit_s"),
            pl.when(pl.col("forecast_s").is_null())
            .then(limit)
            .otherwise(pl.min_horizontal("forecast_s", limit + KILL_WAIT_S))
            .alias("p80_s"),
            seconds_until(pl.col("eligible_time"), now).alias("ready_s"),
            seconds_until(pl.col("planned_start_time"), now).alias("planned_s"),
            pl.col("reason")
            .fill_null("")
            .str.replace_all(r"[\s_]", "")
            .str.contains(_RULE_REASON)
            .alias("is_ruled_out"),
        )
    )


def claims(queue: pl.DataFrame, idle: int, freed_at_limit: tuple[np.ndarray, np.ndarray]) -> list[Claim]:
    """Claims of the waiting jobs on the idle nodes.

    - A job that fits now and waits for nothing is no claim: it is what a window is for. It becomes one when the
      scheduler has planned it for later, or when its begin time lies ahead.
    - The first job in order that does not fit is the head. It claims all idle nodes once enough others are free.
    - A job behind the head that does not fit claims only where EASY would start it before the head: its limit ends
      before the head's planned start, or it needs no more than the nodes the head leaves over.
    - A job that a rule holds back (dependency, hold, quota) is no claim; it is like a job not yet submitted.

    Args:
        queue: As made by `waiting_jobs`.
        idle: Nodes that are idle.
        freed_at_limit: Nodes that running jobs give back when all run to their limit: seconds from now, rising, and how
            many nodes are free by then in addition.

    Returns:
        Claims, in order of the queue.
    """
    open_jobs = queue.filter(~pl.col("is_ruled_out"))
    need = open_jobs["need"].to_numpy()
    ready = np.maximum(open_jobs["ready_s"].fill_null(0.0).to_numpy(), 0.0)
    planned = open_jobs["planned_s"].fill_null(NEVER_S).to_numpy()
    planned = np.where(planned > 0, planned, NEVER_S)  # a plan for a moment that has passed says nothing
    limit = open_jobs["limit_s"].fill_null(np.inf).to_numpy()
    ids = open_jobs["job_id"].to_list()
    is_ahead = ready > 0
    found: list[Claim] = []
    for row in np.flatnonzero((need <= idle) & (is_ahead | (planned < NEVER_S))):
        is_plan = planned[row] < NEVER_S and planned[row] >= ready[row]
        at_s = float(planned[row] if is_plan else ready[row])
        why = " as the scheduler has planned" if is_plan else " at its begin time"
        found.append(Claim(ids[row], int(need[row]), at_s, 0, at_s, why))
    blocked = np.flatnonzero((need > idle) & ~is_ahead)
    if len(blocked):
        head = blocked[0]
        shadow_s, extra = _promise(int(need[head]) - idle, freed_at_limit)
        shadow_s = min(shadow_s, float(planned[head]))
        passes = (limit[blocked] <= shadow_s) | (need[blocked] <= extra) | (planned[blocked] < shadow_s)
        passes[0] = True
        rows = blocked[passes]
        # The others come true later than these two in every case.
        for row in dict.fromkeys((rows[np.argmin(need[rows])], rows[np.argmin(planned[rows])])):
            found.append(Claim(ids[row], int(need[row]), 0.0, int(need[row]) - idle, float(planned[row])))
    for row in np.flatnonzero((need > idle) & is_ahead):
        by_s = float(max(planned[row], ready[row]))
        why = " after its begin time"
        found.append(Claim(ids[row], int(need[row]), float(ready[row]), int(need[row]) - idle, by_s, why))
    return found


def _promise(shortfall: int, freed_at_limit: tuple[np.ndarray, np.ndarray]) -> tuple[float, int]:
    """When the head starts if all running jobs run to their limit, and how many nodes it leaves over then."""
    at_s, free = freed_at_limit
    place = int(np.searchsorted(free, shortfall))
    if place >= len(free) or not np.isfinite(at_s[place]):
        return np.inf, 0
    together = int(np.searchsorted(at_s, at_s[place], side="right")) - 1
    return float(at_s[place]), int(free[together]) - shortfall


class Crowd:
    """Chances that enough nodes become free for one of several claims, over joint draws of ends of running jobs.

    Jobs end each by its own law in one half of the draws' models, and jobs of one user and name together in the other:
    a claim must be unlikely under both.
    """

    def __init__(self, ends: JobEnds, nodes_of: np.ndarray, samples: int) -> None:
        self._ends, self._samples = ends, samples
        self._keep = nodes_of > 0
        self._weights = nodes_of[self._keep].astype(np.float32)

    @functools.cached_property
    def _models(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per model: draws of shape (jobs, samples), and nodes free by the end of each bin, shape (bins, samples)."""
        models = []
        for together in (False, True):
            draws = self._ends.draws(self._samples, together=together)[self._keep]
            bins = np.searchsorted(_BINS_S, draws, side="left")
            cells = bins * self._samples + np.arange(self._samples)
            shape = (len(_BINS_S) + 1, self._samples)
            weights = np.broadcast_to(self._weights[:, None], draws.shape)
            freed = np.bincount(cells.ravel(), weights.ravel(), minlength=shape[0] * shape[1]).reshape(shape)
            models.append((draws, np.cumsum(freed, axis=0)))
        return models

    def earliest_s(self, wanted: Sequence[Claim], probability: float) -> tuple[float, Claim | None]:
        """The earliest moment by which any of the claims comes true with more than `probability`.

        Args:
            wanted: Claims with a shortfall.
            probability: As large as the chance may be.

        Returns:
            Seconds from now, `NEVER_S` when it does not come; and the claim that comes first.
        """
        if not wanted:
            return NEVER_S, None
        certain = min(wanted, key=lambda claim: claim.by_s)
        steps = sorted(wanted, key=lambda claim: (claim.from_s, claim.shortfall))
        froms = np.array([claim.from_s for claim in steps])
        least = np.minimum.accumulate(np.array([claim.shortfall for claim in steps]))
        allowed = self._allowed(probability)
        best = certain.by_s
        for draws, freed in self._models:
            best = min(best, self._cross(draws, freed, froms, least, allowed))
        if best >= certain.by_s:
            return certain.by_s, certain if certain.by_s < NEVER_S else None
        place = int(np.searchsorted(froms, best, side="right")) - 1
        return best, next(claim for claim in steps if claim.shortfall == least[place])

    def _allowed(self, probability: float) -> int:
        """Draws of which a claim may come true: fewer than the share, by the noise of so many draws."""
        mean = self._samples * probability
        return int(np.floor(mean - np.sqrt(max(mean * (1 - probability), 0.0))))

    def _cross(self, draws: np.ndarray, freed: np.ndarray, froms: np.ndarray, least: np.ndarray, allowed: int) -> float:
        """The last moment, to 0.2 % or 1 s, by which no more than `allowed` draws free what a claim needs."""

        def comes_true(at_s: float, free: np.ndarray) -> bool:
            place = int(np.searchsorted(froms, at_s, side="right")) - 1
            return place >= 0 and int((free >= least[place]).sum()) > allowed

        low = high = 0.0
        for at_s, free in zip(_BINS_S, freed, strict=False):  # the last row lies beyond the last bin
            if comes_true(at_s, free):
                high = at_s
                break
            low = at_s
        else:
            return NEVER_S
        while high - low > max(1.0, 0.002 * high):
            middle = (low + high) / 2
            free = self._weights @ (draws <= np.float32(middle)).astype(np.float32)
            low, high = (low, middle) if comes_true(middle, free) else (middle, high)
        return low
