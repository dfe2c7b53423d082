"""How often hardware interrupts jobs, by their size: counted on ended and running jobs, with exact Poisson intervals.

A job is interrupted by hardware when it ended NODE_FAIL, or failed while a fault began on one of its nodes from 10
minutes before its end to 5 minutes after: the attribution of Kokolis et al. 2025, "Revisiting Reliability in
Large-Scale Machine Learning Research Clusters". Where little has been seen, that paper's rates speak.

Here belongs the measurement. What follows for checkpoints: `checkpointing.py`; which node fails: `node_failure.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta

import polars as pl

from models.fault_history import DAY_S, PRIOR_FAULTS, PRIOR_RATE

BEFORE, AFTER = timedelta(minutes=10), timedelta(minutes=5)
FAILED_STATES = ("FAILED", "NODE_FAIL", "BOOT_FAIL")
CLASSES = ((1, 1), (2, 8), (9, 32), (33, 128), (129, 10_000_000))  # nodes of a job, both ends included
PRIOR_PER_NODE_DAY = PRIOR_RATE * DAY_S
PRIOR_SOURCE = (
    "Meta, two clusters of 24,000 A100 in all: 6.50 and 2.34 failures per 1,000 node-days (Kokolis et al. 2025)"
)
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Rate:
    """Failures counted over an exposure.

    Attributes:
        failures: Jobs that hardware interrupted.
        node_days: Nodes × days of the jobs.
        per_node_day: Rate in use: counted, pulled towards the wider group's as if one more failure had been seen there.
        low: Lower end of the rate's 95 % interval (gamma).
        high: Upper end.
    """

    failures: int
    node_days: float
    per_node_day: float
    low: float
    high: float

    @property
    def counted(self) -> tuple[float, float, float] | None:
        """Failures ÷ node-days with the exact Poisson interval (Garwood); None without exposure."""
        if self.node_days <= 0:
            return None
        low, high = poisson_interval(self.failures)
        return self.failures / self.node_days, low / self.node_days, high / self.node_days


@dataclass(frozen=True, slots=True)
class Interruptions:
    """Failure rates of a cluster's jobs.

    Attributes:
        overall: Of all jobs.
        by_size: Of each class of `CLASSES`.
    """

    overall: Rate
    by_size: tuple[Rate, ...]

    def of_nodes(self, nodes: int) -> Rate:
        """The rate of a job on so many nodes."""
        return self.by_size[size_class(nodes)]

    def mttf_s(self, nodes: int) -> tuple[float, float, float]:
        """Mean time to failure of a job on so many nodes with its 95 % interval, s."""
        rate = self.of_nodes(nodes)
        of = [DAY_S / (per * nodes) if per > 0 else math.inf for per in (rate.per_node_day, rate.high, rate.low)]
        return of[0], of[1], of[2]


def poisson_interval(count: int) -> tuple[float, float]:
    """Exact two-sided 95 % interval of a Poisson mean, by the gamma distribution (Garwood 1936)."""
    from scipy.stats import gamma

    tail = (1 - CONFIDENCE) / 2
    low = float(gamma.ppf(tail, count)) if count else 0.0
    return low, float(gamma.ppf(1 - tail, count + 1))


def size_class(nodes: int) -> int:
    """Index of the class of a job on so many nodes.

    Raises:
        ValueError: Fewer than 1.
    """
    for index, (least, most) in enumerate(CLASSES):
        if least <= nodes <= most:
            return index
    raise ValueError(f"nodes={nodes} is not valid; valid: 1 to {CLASSES[-1][1]:,}")


def prior() -> Interruptions:
    """What is believed before anything was seen."""
    return _rates([(0, 0.0)] * len(CLASSES))


def measure(jobs: pl.DataFrame, faults: pl.DataFrame, now: datetime) -> Interruptions:
    """Count interrupted jobs and their exposure.

    Args:
        jobs: `nodes`, `state`, `start_time`, `end_time` (null while it runs), and where known `node_list` (without it
            only NODE_FAIL counts) and `gpus` (where any job has some, only those with GPUs count). Jobs that never
            started or end before they start are passed over.
        faults: `node`, `start_time`.
        now: End of the record, UTC.
    """
    ran = jobs.filter(pl.col("start_time").is_not_null() & (pl.col("nodes") > 0) & (pl.col("nodes") <= CLASSES[-1][1]))
    if "gpus" in ran.columns and (ran["gpus"] > 0).any():
        ran = ran.filter(pl.col("gpus") > 0)
    end = pl.col("end_time").fill_null(now)
    ran = ran.with_columns(days=(end - pl.col("start_time")).dt.total_seconds(fractional=True) / DAY_S)
    ran = ran.filter(pl.col("days") >= 0).with_row_index("row")
    hit = _hit_by_faults(ran, faults)
    ran = ran.join(hit, on="row", how="left").with_columns(
        is_hit=((pl.col("state") == "NODE_FAIL") | pl.col("is_hit")).fill_null(False)
    )
    counts = []
    for least, most in CLASSES:
        part = ran.filter(pl.col("nodes").is_between(least, most))
        counts.append((int(part["is_hit"].sum()), float((part["nodes"] * part["days"]).sum())))
    return _rates(counts)


def _hit_by_faults(ran: pl.DataFrame, faults: pl.DataFrame) -> pl.DataFrame:
    """Failed jobs on whose nodes a fault began around their end: `row`, `is_hit`."""
    failed = ran.filter(pl.col("state").is_in(FAILED_STATES) & pl.col("end_time").is_not_null())
    if failed.is_empty() or faults.is_empty() or "node_list" not in failed.columns:
        return pl.DataFrame(schema={"row": failed.schema["row"], "is_hit": pl.Boolean})
    spots = failed.select("row", pl.col("node_list").str.split(",").alias("node"), "end_time").explode("node")
    begun = faults.select("node", pl.col("start_time").alias("fault_time")).drop_nulls().sort("fault_time")
    spots = spots.with_columns(last=pl.col("end_time") + AFTER).filter(pl.col("node").is_not_null()).sort("last")
    near = spots.join_asof(begun, left_on="last", right_on="fault_time", by="node", check_sortedness=False)
    near = near.filter(pl.col("fault_time") >= pl.col("end_time") - BEFORE)
    return near.select("row").unique().with_columns(is_hit=pl.lit(True))


def _rates(counts: list[tuple[int, float]]) -> Interruptions:
    overall = _rate(sum(k for k, _ in counts), sum(days for _, days in counts), PRIOR_PER_NODE_DAY)
    return Interruptions(overall, tuple(_rate(k, days, overall.per_node_day) for k, days in counts))


def _rate(failures: int, node_days: float, wider: float) -> Rate:
    """Gamma–Poisson: `PRIOR_FAULTS` failures at the wider group's rate are counted with those seen."""
    from scipy.stats import gamma

    shape, days = PRIOR_FAULTS + failures, PRIOR_FAULTS / wider + node_days
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(gamma.ppf(level, shape)) / days for level in (tail, 1 - tail))
    return Rate(failures, node_days, shape / days, low, high)
