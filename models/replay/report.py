"""A replay beside those it is to be compared with, on the jobs as they are and on shaken ones.

Here belong which rules stand in every report, their figures and intervals, and the text; the page is
`dashboards/replay_page.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from textwrap import fill
from typing import Any

import numpy as np
import polars as pl

from models.replay.policies import FORECAST, Rule, Schedule, rule_of, run
from models.replay.scores import Scores, interval, score
from models.replay.shaking import shaken
from models.replay.workload import Workload

# What can be done on a Slurm as it is stands first.
BESIDE: dict[str, Rule] = {
    "slurm-actuable, limits": Rule("slurm-actuable"),
    "slurm-actuable, forecasts": rule_of("slurm-actuable", "forecast"),
    "fcfs": Rule("fcfs"),
    "easy, limits": Rule("easy"),
    "easy-sjbf, limits": Rule("easy-sjbf"),
    "easy-sjbf, 2 × limits": Rule("easy-sjbf", scale=2.0),
    "easy-sjbf, forecasts": FORECAST,
    "easy-sjbf, true runtimes": Rule("easy-sjbf", "true"),
}
REFERENCE, CLAIRVOYANT = "easy, limits", "easy-sjbf, true runtimes"
DRAWS = 10  # of each of the two ways of shaking
NOTES = (
    "slurm-actuable is what an unpatched Slurm does: in order of submission, and backfill every 30 s by limits. With "
    "forecasts it is that Slurm with time-min, which takes 25.05.4 or later and time_min_as_soft_limit; an earlier one "
    "gains nothing by forecasts of runtimes.",
    "easy-sjbf reorders the queue, shortest first behind the head: no scheduler does so by a hint alone.",
    "Late: jobs that, first of the queue, started after what they were first promised by the limits of running jobs.",
    "In brackets: 2.5th to 97.5th percentile over shaken inputs (submissions moved by a minute at most; a job in a "
    "hundred left out), the same for every policy.",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one rule: figures on the jobs as they are, and over shaken ones median, low and high of two of them."""

    scores: Scores
    avebsld: tuple[float, float, float] | None
    wait_mean_s: tuple[float, float, float] | None


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Outcome of a replay.

    Attributes:
        asked: Name of the rule that was asked for.
        total: Processors.
        workload: The jobs.
        outcomes: By name, in order.
        schedule: Of the rule that was asked for.
        ratio: Mean slowdown of the asked rule over `REFERENCE`'s on the same shaken inputs: median, low, high; None
            where it is that rule or nothing was shaken.
    """

    asked: str
    total: int
    workload: Workload
    outcomes: dict[str, Outcome]
    schedule: Schedule
    ratio: tuple[float, float, float] | None

    def gap_closed(self) -> float | None:
        """Share of the way from `REFERENCE` to clairvoyance, in mean slowdown; None where there is none to go."""
        worst, best = (self.outcomes[name].scores.avebsld for name in (REFERENCE, CLAIRVOYANT))
        return (worst - self.outcomes[self.asked].scores.avebsld) / (worst - best) if worst > best else None

    def rows(self) -> pl.DataFrame:
        """A row a job: when it was submitted, started and ended in the replay, what was promised and expected."""
        origin = self.workload.origin_s

        def times(seconds: np.ndarray) -> pl.Series:
            return pl.Series((seconds + origin) * 1_000_000).cast(pl.Datetime("us", "UTC"))

        start = self.schedule.start
        promise = pl.Series(np.where(self.schedule.promise < 0, 0, self.schedule.promise + origin) * 1_000_000)
        return pl.DataFrame({
            "job_id": self.workload.job_id, "submit_time": times(self.workload.submit), "start_time": times(start),
            "end_time": times(start + self.workload.run), "processors": self.workload.procs,
            "time_limit_s": self.workload.limit, "expected_s": self.schedule.expected,
            "first_promise": promise.set(promise == 0, None).cast(pl.Datetime("us", "UTC")),
        })  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            "asked": self.asked,
            "processors": self.total,
            "unit": self.workload.unit,
            "jobs": len(self.workload),
            "left_out": list(self.workload.dropped),
            "begin": datetime.fromtimestamp(self.workload.origin_s, UTC).isoformat(),
            "outcomes": {
                name: asdict(one.scores) | {"shaken_avebsld": one.avebsld, "shaken_wait_mean_s": one.wait_mean_s}
                for name, one in self.outcomes.items()
            },
            "gap_closed": self.gap_closed(),
            "avebsld_ratio_to_easy_limits": self.ratio,
        }

    def verdict(self) -> str:
        """What it comes to, in a sentence."""
        mine, other = self.outcomes[self.asked].scores.avebsld, self.outcomes[REFERENCE].scores.avebsld
        said = f"{self.asked}: mean bounded slowdown {mine:.2f}; {REFERENCE}: {other:.2f}"
        if self.ratio is not None:
            middle, low, high = self.ratio
            word = "better" if high < 1 else "worse" if low > 1 else "no difference that outlasts shaking"
            said += f"; {middle:.3f} [{low:.3f}, {high:.3f}] times as much on shaken inputs: {word}"
        return said

    def table(self) -> list[list[str]]:
        """Header and a row for each rule."""
        head = ["", "mean slowdown", "shaken", "mean wait h", "median wait h", "p99 wait h", "longest wait h",
                "mean completion h", "utilisation", "late"]  # fmt: skip
        body = []
        for name, one in self.outcomes.items():
            s = one.scores
            shaken_ = (
                "–" if one.avebsld is None else f"{one.avebsld[0]:.2f} [{one.avebsld[1]:.2f}, {one.avebsld[2]:.2f}]"
            )
            hours = [s.wait_mean_s, s.wait_median_s, s.wait_p99_s, s.wait_max_s, s.jct_mean_s]
            body.append([
                name, f"{s.avebsld:.2f}", shaken_, *(f"{value / 3600:.2f}" for value in hours),
                f"{s.utilisation:.1%}", f"{s.late_share:.2%}",
            ])  # fmt: skip
        return [head, *body]

    def text(self) -> str:
        rows = self.table()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        notes = [fill(note, 110) for note in (*NOTES, *self.workload.dropped)]
        return "\n".join([self.verdict(), "", *(line.rstrip() for line in lines), "", *notes])


def compare(
    workload: Workload,
    total: int,
    rule: Rule,
    name: str,
    *,
    draws: int = DRAWS,
    progress: Callable[[int, int], None] | None = None,
) -> ReplayReport:
    """Replay a rule and those beside it.

    Args:
        workload: The jobs.
        total: Processors.
        rule: What is asked for.
        name: Its name; one of `BESIDE` where it stands there already.
        draws: Of each way of shaking; 0: nothing is shaken.
        progress: Called with replays done and in all.
    """
    known = next((other for other, one in BESIDE.items() if one == rule), None)
    asked = known or name
    slurm = dict(list(BESIDE.items())[:2])  # stays first
    rules = BESIDE if known else slurm | {asked: rule} | BESIDE
    inputs = [one for _, one in shaken(workload, draws)]
    done, whole = 0, len(rules) * (1 + len(inputs))
    outcomes: dict[str, Outcome] = {}
    slowdowns: dict[str, np.ndarray] = {}
    schedule: Schedule | None = None
    for one, of in rules.items():
        found = run(workload, total, of)
        schedule = found if one == asked else schedule
        moved = []
        for copy in inputs:
            moved.append(score(copy, run(copy, total, of), total))
            done += 1
            if progress is not None:
                progress(done, whole)
        slowdowns[one] = np.array([s.avebsld for s in moved])
        shaken_ = (
            (interval(slowdowns[one]), interval(np.array([s.wait_mean_s for s in moved]))) if moved else (None, None)
        )
        outcomes[one] = Outcome(score(workload, found, total), *shaken_)
    assert schedule is not None
    ratio = interval(slowdowns[asked] / slowdowns[REFERENCE]) if inputs and asked != REFERENCE else None
    return ReplayReport(asked, total, workload, outcomes, schedule, ratio)
