"""A challenger for a job forecast on the newest released jobs, beside the champion and every baseline, and the verdict.

The newest fifth of the released jobs is held out; the challenger is fitted before its first submit. A champion of the
same configuration that has seen these jobs is stood for by an older fit; one of another configuration is judged on what
is newer than itself. Here belongs that sequence; not the rule (`models/promotion.py`), not the losses
(`models/tasks.py`), and no keeping (`models/training.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.job_history import JobHistory
from features.jobs import microseconds
from models.backtest_figures import compare
from models.backtest_report import Score
from models.calibration import MIN_ROWS
from models.judging import Judged, Task, blocks_of
from models.promotion import MIN_BLOCKS, Decision, Held, decide
from models.registry import Registry, RegistryError
from models.versions import what_changed

Ints = NDArray[np.int64]

TEST_SHARE = 0.20
MAX_JUDGED = 20_000  # held-out jobs that are judged at most, drawn at random
JUDGE_LABELS = 60_000  # outcomes that the judged fits learn from at most


@dataclass(frozen=True, slots=True)
class Judgement:
    """What became of a challenger.

    Attributes:
        promote: It takes over.
        withdraw: The champion has to go back to a baseline.
        reason: Why, in words.
        scores: Its figures and those of each baseline on the held-out jobs.
        champion: Name of the version it was judged against; empty: a baseline.
        champion_scores: That one's figures, on jobs that it has not learnt from; empty where those are too few.
        metrics: `scores` as a card holds them.
        calibration: Its calibration table.
        held: What it had to hold besides, each with its ratio to the one in charge.
        is_judged: There was enough to tell them apart.
    """

    promote: bool
    withdraw: bool
    reason: str
    scores: list[Score] = field(default_factory=list)
    champion: str = ""
    champion_scores: list[Score] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    calibration: list[dict[str, float]] = field(default_factory=list)
    held: list[dict[str, Any]] = field(default_factory=list)
    is_judged: bool = False


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Held-out jobs, and what a challenger that was fitted before them and the baselines said of them."""

    X: NDArray[np.float32]
    test: Ints
    challenger: Any
    judged: Judged
    baselines: dict[str, Judged]
    blocks: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Champion:
    name: str
    model: Any  # a forecaster that stands for it
    changed: str  # what tells the challenger's configuration from its own, in words; empty: a refit
    since: int  # what was submitted before it may have learnt from


def judge(
    task: Task, history: JobHistory, released: Ints, rows: Ints, registry: Registry, moment: int, seed: int,
    threads: int,
) -> Judgement:  # fmt: skip
    """Challenger, champion and baselines on the newest released jobs, and what follows."""
    table = history.table
    rows = rows[np.argsort(table.submit[rows], kind="stable")]
    test = rows[int((1 - TEST_SHARE) * len(rows)) :]
    cut = int(table.submit[test[0]])
    if (released < cut).sum() < MIN_ROWS:
        reason = (
            f"baseline stays: {(released < cut).sum()} jobs were released before the held-out ones, {MIN_ROWS} needed"
        )
        return Judgement(False, False, reason)
    stretch = _stretch(task, history, test, cut, seed, threads)
    judged, baselines, blocks = stretch.judged, stretch.baselines, stretch.blocks
    scores, best = compare(task, judged, baselines, blocks, table.is_bad[stretch.test], seed=seed)
    to_baseline = _decide(task, baselines[best], judged, blocks, f"baseline {best}", changed=True, seed=seed)
    decision = to_baseline
    promote, withdraw, reason, champion_scores = to_baseline.promote, False, to_baseline.reason, []
    champion = _champion(task, registry, history, cut, moment, seed, threads)
    if champion is not None:
        newer, words = stretch, ""
        if champion.since > cut:  # only what is newer than the champion tells them apart
            later = test[table.submit[test] >= champion.since]
            count = len(np.unique(blocks_of(table, later)))
            words = f", on {count} user-days newer than it"
            if count < MIN_BLOCKS:
                reason = (
                    f"champion {champion.name} stays: the configuration changed ({champion.changed}), and on "
                    f"{count} user-days newer than it they cannot be told apart, {MIN_BLOCKS} needed"
                )
                return Judgement(
                    False, False, reason, scores, champion.name, [], _metrics(scores),
                    task.calibration(stretch.challenger, stretch.X, table, stretch.test),
                )  # fmt: skip
            newer = _stretch(task, history, later, champion.since, seed, threads)
        rival = task.judge(champion.model, newer.X, history, newer.test)
        compared, _ = compare(task, rival, newer.baselines, newer.blocks, table.is_bad[newer.test], seed=seed)
        champion_scores = _only_model(compared)
        decision = _decide(
            task, rival, newer.judged, newer.blocks, f"champion {champion.name}", changed=bool(champion.changed),
            seed=seed,
        )  # fmt: skip
        promote, withdraw, reason = _with_champion(
            decision, to_baseline, rival, newer.baselines[best], best, task, newer.blocks, seed
        )
        reason += f" (changed: {champion.changed}{words})" if champion.changed else ""
    held = [
        {"loss": name, "against": champion.name if champion else best, "ratio": _plain(of.value), "low": of.low,
         "high": of.high, "blocks": of.blocks}
        for name, of in decision.held.items()
    ]  # fmt: skip
    return Judgement(
        promote, withdraw, reason, scores, champion.name if champion else "", champion_scores, _metrics(scores),
        task.calibration(stretch.challenger, stretch.X, table, stretch.test), held, decision.is_judged,
    )  # fmt: skip


def _stretch(task: Task, history: JobHistory, test: Ints, cut: int, seed: int, threads: int) -> _Stretch:
    """A challenger fitted at a moment, on jobs that were submitted from then on."""
    if len(test) > MAX_JUDGED:
        test = np.sort(np.random.default_rng(seed).choice(test, MAX_JUDGED, replace=False))
    X = task.matrix(history, test)
    challenger = task.fit(history, cut, None, seed=seed, threads=threads, max_labels=JUDGE_LABELS)
    judged, baselines = task.judge(challenger, X, history, test), task.baselines(X, history, test)
    return _Stretch(X, test, challenger, judged, baselines, blocks_of(history.table, test))


def _decide(
    task: Task, in_charge: Judged, challenger: Judged, blocks: NDArray[Any], name: str, *, changed: bool, seed: int
) -> Decision:
    """The rule on the task's primary loss, its coverage, and what it holds besides."""
    held = []
    for words, beginning in task.held.items():
        ours, theirs = (
            {name: losses for name, losses in of.metrics.items() if name.startswith(beginning)}
            for of in (challenger, in_charge)
        )
        held.append(Held(words, theirs, ours))
    is_baseline = name.startswith("baseline")
    return decide(
        in_charge.metrics[task.primary], challenger.metrics[task.primary], blocks, same_configuration=not changed,
        coverage=_coverage(task, challenger), champion_coverage=None if is_baseline else _coverage(task, in_charge),
        champion_name=name, held=held, seed=seed,
    )  # fmt: skip


def _with_champion(
    decision: Decision, to_baseline: Decision, rival: Judged, baseline: Judged, best: str, task: Task,
    blocks: NDArray[Any], seed: int,
) -> tuple[bool, bool, str]:  # fmt: skip
    """Promote, withdraw, reason: no challenger that loses to the best baseline; a champion that clearly does, goes."""
    if decision.promote and to_baseline.ratio.value <= 1.0:
        return True, False, decision.reason
    handed_back = decide(
        rival.metrics[task.primary], baseline.metrics[task.primary], blocks, same_configuration=False, seed=seed
    )
    if handed_back.promote and to_baseline.ratio.value > 1.0:
        return False, True, f"baseline {best} takes over from the champion: {handed_back.reason}"
    if decision.promote:
        return False, False, f"champion stays: challenger loses to baseline {best}: {to_baseline.reason}"
    return False, False, decision.reason


def _champion(
    task: Task, registry: Registry, history: JobHistory, cut: int, moment: int, seed: int, threads: int
) -> _Champion | None:
    """The champion and a forecaster that stands for it; None where a baseline is in charge.

    A champion that was trained after the cut has seen the held-out jobs. One of the challenger's configuration is
    then stood for by a fit as much older than the cut as the champion is older than now; one of another configuration
    can only be judged on what was submitted since it was trained.
    """
    try:
        if registry.present(task.name) is None:
            return None
        loaded = registry.load(task.name, fallback=True, read=task.from_files)
    except RegistryError:
        return None
    changed = what_changed(task.name, loaded.card, task.configuration())
    trained = microseconds(datetime.fromisoformat(loaded.card["trained_at"]))
    if trained <= cut or changed:
        return _Champion(loaded.version, loaded.model, changed, trained)
    stale = cut - (moment - trained)
    try:
        champion = task.fit(history, stale, None, seed=seed, threads=threads, max_labels=JUDGE_LABELS)
    except ValueError:
        return None
    return _Champion(loaded.version, champion, "", cut)


def _metrics(scores: Sequence[Score]) -> list[dict[str, Any]]:
    """Figures as a card holds them."""
    return [
        {
            "metric": score.metric, "baseline": score.baseline, "value": _plain(score.interval.value),
            "low": score.interval.low, "high": score.interval.high, "count": score.count,
        }
        for score in scores
    ]  # fmt: skip


def _only_model(scores: Sequence[Score]) -> list[Score]:
    return [score for score in scores if not score.baseline]


def _coverage(task: Task, judged: Judged) -> float | None:
    return None if task.coverage is None else float(judged.metrics[task.coverage].mean())


def _plain(value: float) -> float | None:
    return value if np.isfinite(value) else None
