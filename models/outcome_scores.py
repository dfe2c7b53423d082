"""Losses of published forecasts, beside those of baselines that knew no more than they did when they were published.

Here belong the figures of what `models/outcomes.py` joined; not what is to be thought of them
(`models/outcome_verdicts.py`), and no reading or keeping.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_history import JobHistory, JobTable
from features.job_outcomes import failure_matrix
from features.job_queue import wait_matrix
from features.jobs import feature_matrix
from features.vocabulary import QUANTILE_COLUMNS, QUANTILES
from models import failure, recency, wait
from models.backtest_figures import compare
from models.backtest_report import Score
from models.calibration import MIN_ROWS
from models.judging import Judged, duration_losses
from models.outcomes import FIRST, KINDS, LANDMARKS_S, TASK_OF
from models.promotion import DRAWS, Interval, mean_interval
from models.runtime_choice import day_blocks
from models.scoring import brier, duration_scores, is_covered, log_error
from models.start_plans import plan_scores
from models.tasks import make_task

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PREFIX = "published_"  # of the task in `out_scores`: figures of publications, not of a model on held-out jobs
_KEY = ["job_id", "submit_time"]
_ODDS = ("below_q95", *(f"brier_{seconds}s" for seconds in wait.SOON_S))
_BASELINE = {"runtime": "last2_key", "remaining": "last2_key", "wait": "same_size_last", "failure": "rolling_rate"}


@dataclass
class KindOutcome:
    """How the publications of one kind did.

    Attributes:
        kind: One of `KINDS`, or demand.
        rows: Outcomes judged; a landmark counts by itself.
        best_baseline: Baseline with the lowest primary loss on them; empty where too few were judged.
        scores: Figures of the publications (`baseline` empty) and of each baseline.
        versions: Model versions that spoke → rows.
    """

    kind: str
    rows: int = 0
    best_baseline: str = ""
    scores: list[Score] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)

    @property
    def is_judged(self) -> bool:
        """Enough outcomes for figures."""
        return bool(self.scores)

    def find(self, metric: str, baseline: str = "") -> Interval | None:
        """A figure by name; None where there is none."""
        return next((s.interval for s in self.scores if (s.metric, s.baseline) == (metric, baseline)), None)


def judge_outcomes(
    joined: pl.DataFrame, history: JobHistory, *, draws: int = DRAWS, seed: int = 1
) -> tuple[dict[str, KindOutcome], pl.DataFrame]:
    """Score joined publications beside baselines that knew no more than they did.

    Runtime, wait and bad ends are judged by the first publication of each job; the time left by those at landmarks,
    and the wait by those besides (`wait_male_600s`: by the first publication after ten minutes of waiting; with it the
    odds of a start, as `wait_brier_60s_600s`, and the 95 % bound).

    Args:
        joined: As of `outcomes.join_outcomes`.
        history: Jobs of the cluster; what came after a publication changes nothing of its baselines.
        draws: Bootstrap draws; blocks are user × day of submit.
        seed: Seed of the draws.

    Returns:
        Kind → how it did (without scores under `MIN_ROWS` outcomes), and the rows with the point of one baseline each.
    """
    found: dict[str, KindOutcome] = {}
    rows = [joined.clear()]
    for kind in KINDS:
        outcome = found[kind] = KindOutcome(kind)
        of_kind = joined.filter(pl.col("forecast") == kind).sort(*_KEY, "landmark_s")
        for is_first in (True, False):
            part = of_kind.filter((pl.col("landmark_s") == FIRST) == is_first)
            if part.is_empty():
                continue
            model, baselines, table, point = _JUDGES[kind](part, history)
            column = "baseline_p_fail" if kind == "failure" else "baseline_s"
            rows.append(
                part.with_columns(pl.lit(_BASELINE[kind]).alias("baseline"), pl.Series(column, point, dtype=pl.Float64))
            )
            blocks = day_blocks(table.group("user"), table.submit)
            if is_first != (kind == "remaining"):
                outcome.rows = part.height
                outcome.versions = dict(part["model_version"].fill_null("unknown").value_counts(sort=True).iter_rows())
                if part.height >= MIN_ROWS:
                    scores, outcome.best_baseline = compare(
                        make_task(TASK_OF[kind]), model, baselines, blocks, table.is_bad, draws=draws, seed=seed
                    )
                    outcome.scores += scores
            if kind == "wait" and outcome.scores:
                outcome.scores += plan_scores(part, {"": model} | baselines, blocks, draws=draws, seed=seed)
            if not is_first and outcome.scores:
                landmarks = part["landmark_s"].to_numpy()
                outcome.scores += _at_landmarks(kind, {"": model} | baselines, landmarks, blocks, draws, seed)
    return found, pl.concat(rows, how="vertical_relaxed")


def _at_landmarks(
    kind: str, judged: dict[str, Judged], landmarks: Ints, blocks: NDArray[np.uint64], draws: int, seed: int
) -> Iterator[Score]:
    for at_s in LANDMARKS_S:
        here = landmarks == at_s
        if here.sum() < MIN_ROWS:
            continue
        for name, of in judged.items():
            for metric, losses in of.metrics.items():
                known = int((~np.isnan(losses[here])).sum())
                if known and (metric == "male" or (kind == "wait" and metric in _ODDS)):
                    interval = mean_interval(losses[here], blocks[here], draws=draws, seed=seed)
                    yield Score(f"{kind}_{metric}_{at_s}s", name, interval, known)


_Judges = tuple[Judged, dict[str, Judged], JobTable, Floats]


def _asked(part: pl.DataFrame, history: JobHistory) -> tuple[JobTable, Ints]:
    """The jobs of joined rows as the history has them, and the moments of the publications."""
    facts = history.table.frame.unique(_KEY, keep="last")
    table = JobTable(part.select(_KEY).join(facts, on=_KEY, how="left", maintain_order="left"))
    return table, part["generated_at"].dt.epoch("us").to_numpy()


def _levels(quantiles: Floats, actual: Floats) -> dict[str, Floats]:
    """Whether the outcome was at or below each level; what `level_table` shows."""
    below = actual[:, None] <= quantiles + 0.5
    return {f"below_q{round(100 * level):02d}": below[:, k].astype(np.float64) for k, level in enumerate(QUANTILES)}


def _runtime(part: pl.DataFrame, history: JobHistory) -> _Judges:
    table, moments = _asked(part, history)
    quantiles, actual = part.select(QUANTILE_COLUMNS).to_numpy(), part["actual_s"].to_numpy()
    X = feature_matrix(table, history, moments)
    points = {name: np.exp(recency.baseline_log(name, X)) for name in recency.BASELINES}
    model = Judged(duration_losses(quantiles, actual) | _levels(quantiles, actual))
    others = {name: Judged(duration_scores(point, actual)) for name, point in points.items()}
    return model, others, table, points[_BASELINE["runtime"]]


def _remaining(part: pl.DataFrame, history: JobHistory) -> _Judges:
    table, moments = _asked(part, history)
    quantiles, actual = part.select(QUANTILE_COLUMNS).to_numpy(), part["actual_s"].to_numpy()
    X = feature_matrix(table, history, moments)
    elapsed = np.maximum(moments - table.start, 0) / 1e6
    left = {}
    for name in recency.BASELINES:
        point = np.exp(recency.baseline_log(name, X))
        # A point that has passed is doubled until the limit, as schedulers correct their predictions.
        left[name] = np.maximum(np.fmin(np.where(point > elapsed, point, 2 * elapsed), table.limit_s) - elapsed, 0.0)
    others = {name: Judged({"male": log_error(point, actual)}) for name, point in left.items()}
    covered = is_covered(quantiles[:, QUANTILES.index(0.1)], quantiles[:, QUANTILES.index(0.9)], actual)
    own = {"male": log_error(quantiles[:, QUANTILES.index(0.5)], actual), "coverage_80": covered.astype(np.float64)}
    return Judged(own | _levels(quantiles, actual)), others, table, left[_BASELINE["remaining"]]


def _wait(part: pl.DataFrame, history: JobHistory) -> _Judges:
    table, moments = _asked(part, history)
    actual = part["actual_s"].to_numpy()
    X = wait_matrix(table, history, moments)
    late = actual > wait.SOON_S[0]

    def judged(frame: pl.DataFrame) -> Judged:
        quantiles = frame.select(QUANTILE_COLUMNS).to_numpy()
        odds = {c: frame[c].cast(pl.Float64).fill_null(np.nan).to_numpy() for c in wait.SOON_COLUMNS}
        told = {f"brier_{s}s": brier(odds[c], actual <= s) for s, c in zip(wait.SOON_S, wait.SOON_COLUMNS, strict=True)}
        score = 1.0 - odds[wait.SOON_COLUMNS[0]]
        metrics = duration_losses(quantiles, actual) | _levels(quantiles, actual) | told
        return Judged(metrics, score if np.isfinite(score).all() else None, late)

    points = {name: wait.baseline_s(name, X) for name in wait.BASELINES}
    others = {name: Judged(duration_scores(point, actual), point, late) for name, point in points.items()}
    others["recent_waits"] = judged(wait.WaitForecaster.recent().frame(X))
    return judged(part), others, table, points[_BASELINE["wait"]]


def _failure(part: pl.DataFrame, history: JobHistory) -> _Judges:
    table, moments = _asked(part, history)
    X = failure_matrix(table, history, moments)
    new = recency.stratum(X) == recency.STRATA.index("new")
    said = part["p_fail"].to_numpy()
    rates = {"rolling_rate": failure.rolling_rate(X), "user_rate": failure.rolling_rate(X, narrowest="user")}
    others = {name: Judged({"brier": brier(rate, table.is_bad)}, rate, is_new=new) for name, rate in rates.items()}
    return Judged({"brier": brier(said, table.is_bad)}, said, is_new=new), others, table, rates[_BASELINE["failure"]]


_JUDGES = {"runtime": _runtime, "remaining": _remaining, "wait": _wait, "failure": _failure}
