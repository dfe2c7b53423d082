"""Each night: published forecasts of the last week are joined to what came, scored, and looked at for drift.

The span is the seven days before the last midnight UTC, so that a second run on the same day does the same again.
Joined rows are kept in `out_outcomes`, figures in `out_scores` under tasks of their own (`published_runtime`, …,
`inputs`). Here belong reading, keeping and the figures that Dagster shows; what is scored stands in `models/`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import isfinite
from pathlib import Path

import polars as pl

from features.job_history import JobHistory
from features.jobs import microseconds
from features.vocabulary import QUANTILE_COLUMNS, conform, schema
from models.backtest_report import Score, score_rows
from models.demand_outcomes import demand_words, judge_demand
from models.drift import MAX_WEEKS, Shift, input_shifts
from models.hint_scores import NAME as HINTS_PRECISE
from models.hint_scores import TASK as HINTS_TASK
from models.outcome_scores import PREFIX, KindOutcome, judge_outcomes
from models.outcome_verdicts import VERDICTS, Verdict, kind_words, start_words, verdicts
from models.outcomes import LANDMARKS_S, join_outcomes
from models.promotion import DRAWS, Interval
from models.risk_outcomes import judge_risks, risk_words
from models.start_plans import PLAN, churn_scores
from pipelines.demand import kept_windows
from pipelines.hint_outcomes import score_hints
from pipelines.job_history import read_jobs
from pipelines.store import Reader, Store, Writer
from scheduler_hints.outcome_gauges import OutcomesWord, write_word

CHECKS = (*VERDICTS, HINTS_PRECISE)
SPAN, DAY = timedelta(days=7), timedelta(days=1)
MAX_JOBS = 20_000  # of a week that are judged, drawn by a hash of their ids
INPUTS_TASK = "inputs"
_TASKS = {"failure": "job_failure"}  # kind → task, where the names differ
_FAULTS_SEEN = timedelta(days=365)
_AHEAD = timedelta(days=16)  # demand is forecast two weeks ahead
_INSTANT = timedelta(microseconds=1)
_SHOWN = {
    "runtime": ("male", "male_ratio", "coverage_80"), "remaining": ("male", "male_ratio", "coverage_80"),
    "wait": ("male", "male_ratio", "coverage_80", "churn_moved_share", "planned_male"),
    "failure": ("brier", "brier_ratio", "ece"),
    "node_failure": ("log_loss_ratio_24h", "log_loss_ratio_7d", "happened_24h", "said_24h"),
    "demand": ("in_demand_mae_24h", "in_demand_mae_ratio_24h", "in_demand_coverage_80_24h", "windows_kept_share",
               "windows_confidence"),
}  # fmt: skip


@dataclass
class OutcomesReport:
    """What a night found for one cluster.

    Attributes:
        rows: Rows of `out_outcomes`, one for each job, kind and landmark.
        scores: Rows of `out_scores`.
        jobs: Jobs that started or ended in the span.
        judged: Kind → outcomes judged.
        covered: How many of the jobs that ended had a published runtime, in words: one that starts at once has none.
        verdicts: What is to be thought of it.
        kinds: How times left, waits and odds of a bad end did, in words.
        starts: How steady published starts were and how they stand beside the scheduler's plans, in words.
        demand: How published demand and reclaimable windows did, in words.
        hints: How yesterday's bottleneck hints did, by class, in words.
        until: End of the span.
        figures: The main figures by name, for `/metrics`.
        error: Why there are no figures.
    """

    cluster: str
    rows: int = 0
    scores: int = 0
    jobs: int = 0
    judged: dict[str, int] = field(default_factory=dict)
    covered: str | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    demand: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    until: datetime | None = None
    figures: dict[str, float] = field(default_factory=dict)
    error: str | None = None


def score_outcomes(
    store: Store, cluster: str, now: datetime, *, seed: int = 1, draws: int = DRAWS, is_so_far: bool = False
) -> OutcomesReport:
    """Join, score and keep the outcomes of the seven days before the last midnight.

    Args:
        store: The store.
        cluster: Name of the cluster.
        now: Present time, UTC.
        seed: Seed of the bootstrap.
        draws: Its draws.
        is_so_far: The seven days end now, and nothing is kept: a night would come to other figures.

    Returns:
        What was found. A cluster without jobs or forecasts has verdicts that say "too few".

    Raises:
        StoreError: The store cannot be read or written.
    """
    until = now if is_so_far else now.replace(hour=0, minute=0, second=0, microsecond=0)
    begin = until - SPAN
    report = OutcomesReport(cluster)
    with store.reader() as reader:
        jobs = read_jobs(reader, cluster, begin - MAX_WEEKS * SPAN)
        # No publication is older than the oldest submission among the jobs of the span: what is older is not read.
        released = jobs.filter(_within("start_time", begin, until) | _within("end_time", begin, until))
        oldest = released["submit_time"].min()
        first = oldest if isinstance(oldest, datetime) else begin
        forecasts = _forecasts(reader, cluster, begin, until, first)
        waits = _waits(reader, cluster, begin, until, first)
        demand = reader.query(
            'SELECT * FROM out_demand WHERE "cluster" = ? AND generated_at >= ? AND target_time > ? '
            "AND target_time <= ?",
            [cluster, begin - _AHEAD, begin, until],
        )
        windows = kept_windows(reader, cluster, begin, until)
        risks = reader.query(_RISKS, [cluster, begin - SPAN, until])
        faults = reader.query(
            'SELECT * FROM core_faults WHERE "cluster" = ? AND start_time >= ? AND start_time < ?',
            [cluster, until - _FAULTS_SEEN, until],
        )
    history = JobHistory(jobs)
    joined = join_outcomes(forecasts, jobs, microseconds(begin), microseconds(until))
    found, rows = judge_outcomes(joined, history, draws=draws, seed=seed)
    if found["wait"].is_judged:
        found["wait"].scores += churn_scores(waits)
    found["demand"] = judge_demand(demand, jobs, begin, until, windows=windows, draws=draws, seed=seed)
    found["node_failure"] = judge_risks(risks, faults, begin, until, draws=draws, seed=seed)
    shifts = input_shifts(history, microseconds(begin), microseconds(until))
    report.until, report.figures = until, _figures(found, shifts)
    report.verdicts, report.starts = verdicts(found, shifts), start_words(found["wait"])
    report.kinds = [*kind_words(found), *risk_words(found["node_failure"])]
    report.demand = demand_words(found["demand"])
    told = score_hints(store, cluster, until)
    report.hints = told.words
    if told.verdict is not None:
        report.verdicts.append(told.verdict)
    report.figures |= {f"hints_{score.metric}": round(score.interval.value, 6) for score in told.scores}
    report.judged = {kind: outcome.rows for kind, outcome in found.items()}
    _count(report, jobs, begin, until, found["runtime"])
    rows = conform(rows.with_columns(pl.lit(cluster).alias("cluster")), "out_outcomes")
    scores = _score_rows(found, shifts, cluster, until)
    if told.scores:
        scores = pl.concat([scores, score_rows(told.scores, cluster, until, HINTS_TASK, "")])
    if is_so_far:
        report.rows, report.scores = rows.height, scores.height
        return report

    def keep(writer: Writer) -> tuple[int, int]:
        writer.replace_window("out_hint_outcomes", cluster, until - DAY, until, told.rows)
        kept = writer.replace_window("out_outcomes", cluster, begin, until, rows)
        return kept, writer.replace_window("out_scores", cluster, until, until + _INSTANT, scores)

    report.rows, report.scores = store.transact(keep, purpose="keeping outcomes of forecasts")
    return report


def publish_outcomes(published: Path, report: OutcomesReport) -> None:
    """Leave checks and main figures where the hints API finds them for `/metrics`.

    Raises:
        OSError: They could not be written; those of the night before stay.
    """
    if report.until is not None:
        checks = {verdict.name: verdict.passed for verdict in report.verdicts if verdict.is_judged}
        write_word(published, report.cluster, OutcomesWord(report.until, checks, report.figures))


def _figures(found: dict[str, KindOutcome], shifts: list[Shift]) -> dict[str, float]:
    figures = {f"inputs_psi_{shift.name}": shift.value for shift in shifts}
    for kind, metrics in _SHOWN.items():
        outcome = found[kind]
        for metric in metrics:
            interval = outcome.find(metric, outcome.best_baseline if "_ratio" in metric else "")
            if interval is not None:
                figures[f"{kind}_{metric}"] = interval.value
    for metric in ("planned_share", "planned_male"):
        plan = found["wait"].find(metric, PLAN)
        if plan is not None:
            figures[f"{PLAN}_{metric.removeprefix('planned_')}"] = plan.value
    return {name: round(value, 6) for name, value in figures.items() if isfinite(value)}


def _count(report: OutcomesReport, jobs: pl.DataFrame, begin: datetime, until: datetime, runtime: KindOutcome) -> None:
    ended = jobs.filter(_within("end_time", begin, until) & (pl.col("end_time") > pl.col("start_time")))
    report.jobs = jobs.filter(_within("start_time", begin, until) | _within("end_time", begin, until)).height
    drawn = "" if report.jobs <= MAX_JOBS else f", of {MAX_JOBS:,} jobs that were drawn"
    if ended.height:
        report.covered = f"{ended.height:,} runs ended, {runtime.rows:,} of them had a published runtime{drawn}" + (
            ": the others came and went, or started, between two publications" if runtime.rows < ended.height else ""
        )


def _within(name: str, begin: datetime, until: datetime) -> pl.Expr:
    return ((pl.col(name) >= begin) & (pl.col(name) < until)).fill_null(False)


def _score_rows(found: dict[str, KindOutcome], shifts: list[Shift], cluster: str, at: datetime) -> pl.DataFrame:
    parts = [
        score_rows(outcome.scores, cluster, at, PREFIX + _TASKS.get(kind, kind), next(iter(outcome.versions), ""))
        for kind, outcome in found.items()
        if outcome.scores
    ]
    inputs = []
    for shift in shifts:
        inputs.append(Score(f"psi_{shift.name}", "", Interval(shift.value, None, None, 0), shift.jobs))
        if shift.usual is not None:
            usual = Interval(shift.usual, None, None, 0)
            inputs.append(Score(f"psi_{shift.name}", "highest_week_before", usual, shift.reference_jobs))
    if inputs:
        parts.append(score_rows(inputs, cluster, at, INPUTS_TASK, ""))
    return pl.concat(parts) if parts else pl.DataFrame(schema=schema("out_scores"))


# The first publication of each node and day.
_RISKS = """
SELECT node, generated_at, p_1h, p_24h, p_7d, model_version FROM out_node_risks
WHERE "cluster" = ? AND generated_at >= ? AND generated_at < ?
QUALIFY row_number() OVER (PARTITION BY node, date_trunc('day', generated_at) ORDER BY generated_at) = 1
ORDER BY node, generated_at
"""

# Jobs whose wait or run ended in the span, and the time that a landmark is counted from.
_RELEASED = """
WITH released AS (
    SELECT job_id, submit_time, start_time FROM core_jobs
    WHERE "cluster" = ? AND (start_time >= ? AND start_time < ? OR end_time >= ? AND end_time < ?)
    ORDER BY hash(job_id, submit_time) LIMIT ?
)
"""


def _parameters(cluster: str, begin: datetime, until: datetime, first: datetime) -> list:
    return [cluster, begin, until, begin, until, MAX_JOBS, cluster, first, until]


def _forecasts(reader: Reader, cluster: str, begin: datetime, until: datetime, first: datetime) -> pl.DataFrame:
    """First publications of each job and kind, and of each stretch between landmarks."""
    stretches = " ".join(f"WHEN elapsed_s >= {at} THEN {at}" for at in sorted(LANDMARKS_S, reverse=True))
    columns = ", ".join(f"f.{name}" for name in ("forecast", "generated_at", "model_version", *QUANTILE_COLUMNS,
        "p_fail", "p_start_60s", "p_start_600s", "p_start_3600s", "planned_start_time"))  # fmt: skip
    return reader.query(
        f"""{_RELEASED}, said AS (
            SELECT f."cluster", f.job_id, f.submit_time, {columns}, epoch(f.generated_at) - epoch(
                CASE WHEN f.forecast = 'remaining' THEN r.start_time ELSE f.submit_time END) AS elapsed_s
            FROM out_job_forecasts f JOIN released r ON f.job_id = r.job_id AND f.submit_time = r.submit_time
            WHERE f."cluster" = ? AND f.generated_at >= ? AND f.generated_at < ?
        )
        SELECT * EXCLUDE (elapsed_s) FROM said QUALIFY row_number() OVER (
            PARTITION BY job_id, submit_time, forecast, CASE {stretches} WHEN elapsed_s >= 0 THEN 0 ELSE -1 END
            ORDER BY generated_at) = 1
        ORDER BY job_id, submit_time, forecast, generated_at""",
        _parameters(cluster, begin, until, first),
    )


def _waits(reader: Reader, cluster: str, begin: datetime, until: datetime, first: datetime) -> pl.DataFrame:
    """All publications of the start of the jobs of the span: what `churn_scores` reads."""
    return reader.query(
        f"""{_RELEASED}
        SELECT f.job_id, f.submit_time, f.forecast, f.generated_at, f.q50_s, f.planned_start_time
        FROM out_job_forecasts f JOIN released r ON f.job_id = r.job_id AND f.submit_time = r.submit_time
        WHERE f."cluster" = ? AND f.generated_at >= ? AND f.generated_at < ? AND f.forecast = 'wait'
            AND r.start_time >= f.generated_at
        ORDER BY ALL""",
        _parameters(cluster, begin, until, first),
    )


def verdict_of(report: OutcomesReport, name: str) -> Verdict:
    """A verdict by name; of a cluster that went wrong, that it was not judged.

    Raises:
        KeyError: There is no such verdict; the message lists them.
    """
    if name not in CHECKS:
        raise KeyError(f"no verdict {name!r}; there are: {', '.join(CHECKS)}")
    for verdict in report.verdicts:
        if verdict.name == name:
            return verdict
    return Verdict(name, True, report.error or "there are no figures", is_judged=False)
