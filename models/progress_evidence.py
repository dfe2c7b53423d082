"""What ended jobs that reported their progress have shown, and the time that a running one still needs by its steps.

How often plans are reached, how long pauses are and how far estimates were off, counted on jobs that had ended; before
any was seen, stated assumptions speak and fade as outcomes come. Here belong the count and the estimate of the steps
left; how it is set beside earlier jobs stands in `reported_progress.py`, the reading of reports in
`features/job_progress.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_progress import LOOK_BACK, progress_at
from models.curves import LEVELS

Floats = NDArray[np.float64]

# Before anything was seen: 62.4 % of the GPU jobs of Helios completed (Hu et al. 2021), which is taken as the share of
# plans that are reached; it counts as much as 10 jobs.
PRIOR_REACHED, PRIOR_JOBS = 0.62, 10
GROUP_PRIOR_JOBS = 5  # the cluster's share counts as much as so many jobs of a user, the user's as of a name family
EVIDENCE_JOBS, EVIDENCE_REPORTS = 2_000, 1_000_000  # newest ended jobs, and their reports, that it is made of at most
PRIOR_OVERHEAD = 0.05  # pauses ÷ steps; fades with the time the job itself was watched, against this
OVERHEAD_WATCHED_S = 1800.0
PRIOR_TAIL_S = 30.0  # from the last step until the end
# Standard deviation of ln(time left ÷ estimate) that is assumed, by how long the pace was watched against what is left.
WATCHED = (0.1, 1.0)
PRIOR_SPREADS = (0.30, 0.15, 0.10)
SPREAD_PRIOR_JOBS = 20
FLOOR_S = 60.0  # differences below do not count in full: reports are a minute apart
STALE_S, STALE_GAPS = 900.0, 5.0  # silent for longer than both: nothing is said of the job any more
STILL_S, STILL_TIMES = 1800.0, 3.0  # the counter stood still for longer than both: it hangs
MAX_OVERHEAD = (-0.6, 2.0)
MAX_SLOWDOWN = (1 / 3, 3.0)
DONE_SHARE = 0.02  # of the steps may be missing in the last report of a job that reached its plan
_NORMAL = np.array([
    -2.326, -1.960, -1.645, -1.282, -1.036, -0.842, -0.674, -0.524, -0.385, -0.253, -0.126, 0.0, 0.126, 0.253, 0.385,
    0.524, 0.674, 0.842, 1.036, 1.282, 1.645, 1.960, 2.326,
])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Evidence:
    """What ended jobs that reported have shown.

    Attributes:
        ended: Jobs of which it is known whether they reached their plan; those that the limit ended are not.
        reached: Of these, such as did.
        groups: The same two numbers, reached and ended, by user and by user and name family (see `group_names`).
        overhead_ratio: Median time of pauses ÷ time of steps.
        tail_s: Median time from the last new step until the end, s.
        spreads: Quantiles at `LEVELS` of ln(time left ÷ estimate), by stratum of `WATCHED`.
        jobs: Jobs that each of these is learnt from.
    """

    ended: int = 0
    reached: int = 0
    groups: dict[str, tuple[int, int]] = field(default_factory=dict)
    overhead_ratio: float = PRIOR_OVERHEAD
    tail_s: float = PRIOR_TAIL_S
    spreads: tuple[tuple[float, ...], ...] = tuple(tuple(float(z) for z in sd * _NORMAL) for sd in PRIOR_SPREADS)
    jobs: tuple[int, ...] = (0, 0, 0)

    @classmethod
    def of(cls, jobs: pl.DataFrame, reports: pl.DataFrame, at: datetime) -> Evidence:
        """Count ended jobs.

        Args:
            jobs: `job_id`, `user`, `name`, `state`, `start_time`, `end_time`, `time_limit_s`; those that ended after
                `at` are passed over.
            reports: Rows of `core_job_progress`; such as were not known by `at` are passed over.
            at: The moment, UTC.
        """
        ended = jobs.filter((pl.col("end_time") < at) & (pl.col("start_time") < pl.col("end_time")))
        ended = ended.filter(pl.col("job_id").is_in(reports["job_id"].unique().implode()))
        ended = ended.sort("start_time").unique("job_id", keep="last", maintain_order=True)
        last = ended.hstack(
            progress_at(ended.with_columns(moment=pl.col("end_time"), known_at=pl.lit(at)), reports)
        ).filter(pl.col("pace_s").is_not_null() & (pl.col("max_steps") >= pl.col("step")))
        if last.is_empty():
            return cls()
        missing = pl.col("max_steps") - pl.col("step")
        close = pl.max_horizontal(DONE_SHARE * pl.col("max_steps"), 2 * pl.col("gap_s").fill_null(0) / pl.col("pace_s"))
        run_s = (pl.col("end_time") - pl.col("start_time")).dt.total_microseconds() / 1e6
        last = last.with_columns(is_reached=missing <= close, run_s=run_s)
        by_limit = (pl.col("state") == "TIMEOUT") | (pl.col("run_s") >= pl.col("time_limit_s") - 60).fill_null(False)
        known = last.filter(pl.col("is_reached") | ~by_limit)
        done = known.filter("is_reached")
        watched = done.filter(pl.col("trained_s") >= OVERHEAD_WATCHED_S)["overhead_ratio"].drop_nulls()
        first = cls(
            known.height, done.height,
            _counts(known),
            _shrunk(watched.to_numpy(), PRIOR_OVERHEAD), _shrunk(done["still_s"].to_numpy(), PRIOR_TAIL_S),
        )  # fmt: skip
        return first._with_spreads(done, reports)

    def _with_spreads(self, done: pl.DataFrame, reports: pl.DataFrame) -> Evidence:
        """How far off estimates were after 1, 2, 4, … minutes of the jobs that reached their plan."""
        parts, told = [], []
        ran_s = (pl.col("ts") - pl.col("start_time")).dt.total_seconds()
        timed = reports.join(done.select("job_id", "start_time"), on="job_id").with_columns(ran_s=ran_s)
        timed = timed.drop("start_time")
        back_s = LOOK_BACK.total_seconds()
        elapsed_s = 60.0
        while not (there := done.filter(pl.col("run_s") > elapsed_s)).is_empty():
            moment = pl.col("start_time") + timedelta(seconds=elapsed_s)
            parts.append(there.select("job_id", "start_time", "end_time", moment=moment))
            near = timed.filter(pl.col("ran_s").is_between(elapsed_s - back_s - 1, elapsed_s + 1))
            told.append(progress_at(parts[-1], near))  # one moment of all jobs at a time: bounds the memory
            elapsed_s *= 2
        if not parts:
            return self
        asked, facts = pl.concat(parts), pl.concat(told)
        estimate_s = estimate(facts, self)
        actual_s = ((asked["end_time"] - asked["moment"]).dt.total_microseconds() / 1e6).to_numpy()
        off = np.log((actual_s + FLOOR_S) / (estimate_s + FLOOR_S))
        number = stratum(facts, estimate_s)
        spreads, jobs = [], []
        for k, assumed in enumerate(self.spreads):
            rows = np.flatnonzero((number == k) & ~np.isnan(off))
            count = asked["job_id"].gather(rows).n_unique()
            share = count / (count + SPREAD_PRIOR_JOBS)
            seen = np.quantile(off[rows], LEVELS) if count else np.zeros(len(LEVELS))
            spreads.append(tuple((share * seen + (1 - share) * np.asarray(assumed)).tolist()))
            jobs.append(count)
        return Evidence(
            self.ended, self.reached, self.groups, self.overhead_ratio, self.tail_s, tuple(spreads), tuple(jobs)
        )

    def p_reached(self, jobs: pl.DataFrame, share_done: Floats) -> Floats:
        """Probability that jobs come to the last of their steps, given the share that is done, shape (n,).

        Jobs that end otherwise are taken to do so anywhere on their way: of these, 1 − share are still there.

        Args:
            jobs: `user`, `name`, n rows.
            share_done: Steps done ÷ steps in all, shape (n,).
        """
        overall = (self.reached + PRIOR_REACHED * PRIOR_JOBS) / (self.ended + PRIOR_JOBS)
        p = np.full(jobs.height, overall)
        for names in group_names(jobs):
            seen = np.array([self.groups.get(name or "", (0, 0)) for name in names], dtype=np.float64).reshape(-1, 2)
            p = (seen[:, 0] + GROUP_PRIOR_JOBS * p) / (seen[:, 1] + GROUP_PRIOR_JOBS)
        return p / (p + (1 - p) * (1 - share_done))


def group_names(jobs: pl.DataFrame) -> tuple[list[str | None], list[str | None]]:
    """Names under which the groups of jobs are counted: the user, and the user with the name without digits."""
    family = pl.col("name").str.to_lowercase().str.replace_all(r"[0-9]+", "#")
    made = jobs.select("user", family=pl.concat_str("user", family, separator="\t"))
    return made["user"].to_list(), made["family"].to_list()


def _counts(known: pl.DataFrame) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for names in group_names(known):
        for name, is_reached in zip(names, known["is_reached"], strict=True):
            if name is not None:
                reached, ended = found.get(name, (0, 0))
                found[name] = (reached + bool(is_reached), ended + 1)
    return found


def _shrunk(values: Floats, prior: float) -> float:
    """Median with the prior as `PRIOR_JOBS` more values' weight."""
    found = values[~np.isnan(values)]
    if not len(found):
        return prior
    return float((len(found) * np.median(found) + PRIOR_JOBS * prior) / (len(found) + PRIOR_JOBS))


def estimate(facts: pl.DataFrame, evidence: Evidence) -> Floats:
    """Seconds until the steps are done, shape (n,); NaN where it cannot be told.

    Steps left × pace × slow-down of late × (1 + pauses), less what passed since the last new step (at most a usual gap
    between reports), and the usual time after the last step. Not told: without a number of steps in all or a pace, past
    that number, and where the job is silent or its counter stands still for too long.

    Args:
        facts: As `features.job_progress.progress_at` gives them.
        evidence: What ended jobs have shown.
    """
    known = facts.select(pl.exclude("phase", "reported_at")).cast(pl.Float64).fill_null(np.nan)
    of = {name: known[name].to_numpy() for name in known.columns}
    trained = np.nan_to_num(of["trained_s"])
    weight = trained / (trained + OVERHEAD_WATCHED_S)
    seen = np.clip(np.nan_to_num(of["overhead_ratio"]), *MAX_OVERHEAD)
    pauses = weight * seen + (1 - weight) * evidence.overhead_ratio
    slowdown = np.clip(np.nan_to_num(of["slowdown_ratio"], nan=1.0), *MAX_SLOWDOWN)
    passed = np.fmin(of["still_s"], np.nan_to_num(of["gap_s"], nan=0.0))
    left = of["max_steps"] - of["step"]
    found = np.maximum(left * of["pace_s"] * slowdown * (1 + pauses) - passed, 0.0) + evidence.tail_s
    gap = np.nan_to_num(of["gap_s"], nan=0.0)
    silent = of["silent_s"] > np.maximum(STALE_S, STALE_GAPS * gap)
    still = of["still_s"] > np.maximum(STILL_S, STILL_TIMES * np.nan_to_num(of["longest_s"]))
    return np.where((left < 0) | ~(of["pace_s"] > 0) | silent | still, np.nan, found)


def stratum(facts: pl.DataFrame, estimate_s: Floats) -> NDArray[np.int64]:
    """Index of each row's spread: how long its pace was watched against what is left."""
    watched = facts["trained_s"].fill_null(0.0).to_numpy() / np.maximum(np.nan_to_num(estimate_s), 1.0)
    return np.digitize(watched, WATCHED)
