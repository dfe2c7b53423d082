"""A bottleneck challenger on the newest samples, beside the champion and every baseline: scores and a verdict.

Samples are split by time, older ones to learn and calibrate, newer ones to judge, with a purge of a horizon and a
window between, so that no sample serves twice. A class is handed over by itself: one that has not clearly beaten its
best baseline stays with the trend. Here belongs that sequence; rows stand in `models/onsets.py`, scores in
`models/onset_scores.py`, the rule in `models/promotion.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from features.history import SampleHistory
from features.unit_history import UnitHistory
from models.bottleneck import LEARNED, HazardForecaster
from models.naive_onsets import NAMES, NaiveOnsets
from models.onset_scores import alarms, average_precision, brier, row_losses, skill
from models.onsets import LAST_S, PURGE_S, Course, Rows, sample_rows, screen_recall
from models.promotion import Decision, Interval, decide, ratio_interval
from models.trend import HORIZONS_S, BottleneckForecaster, TrendForecaster

Floats = NDArray[np.float64]

LEARN_SHARE = 0.75
BLOCK_S = 3_600.0
TREND = "trend"


@dataclass(slots=True)
class Judgement:
    """What became of a challenger.

    Attributes:
        model: The challenger fitted before the judged span, with the classes it may forecast; None: too little to
            learn from.
        classes: Classes it may forecast.
        promote: It takes over.
        withdraw: The champion has to go back to the trend.
        reason: Why, in words.
        scores: Metric, baseline (empty for the challenger), value, low, high, rows.
        is_judged: There was enough to tell it from the trend in some class.
    """

    model: HazardForecaster | None = None
    classes: set[str] = field(default_factory=set)
    promote: bool = False
    withdraw: bool = False
    reason: str = ""
    scores: list[tuple[str, str, float, float | None, float | None, int]] = field(default_factory=list)
    is_judged: bool = False


def judge(
    history: SampleHistory,
    courses: Mapping[str, Course],
    champion: tuple[str, BottleneckForecaster, float, bool] | None,
    *,
    seed: int,
    threads: int,
    units: Mapping[str, UnitHistory] | None = None,
) -> Judgement:
    """Fit a challenger on the older samples and judge it on the newest.

    Args:
        history: The samples of the GPUs.
        courses: Each class followed through its samples.
        champion: Name, forecaster, moment of its training (seconds), and whether it has the challenger's
            configuration; None: the trend is in charge.
        seed: Seed of every random choice.
        threads: Threads of the fit.
        units: Samples of the classes that befall nodes, ports or queues, each with a span of its own.
    """
    of = {name: (units or {}).get(name, history) for name in courses}
    span = {n: (float(one.ts.min()), float(one.ts.max())) for n, one in of.items()}
    cut = {n: begin + LEARN_SHARE * (end - begin) for n, (begin, end) in span.items()}
    train = {n: sample_rows(of[n], courses[n], span[n][0], cut[n], seed=seed) for n in courses}
    model = HazardForecaster.fit(train, seed=seed, threads=threads)
    if not model.classes:
        counts = ", ".join(f"{name} {int((rows.onset_in_s <= LAST_S).sum())}" for name, rows in train.items())
        return Judgement(reason=f"trend stays: too few samples ahead of an onset to learn from ({counts})")
    start = {n: at + PURGE_S for n, at in cut.items()}
    test = {n: sample_rows(of[n], courses[n], start[n], span[n][1], seed=seed + 2) for n in courses}
    naive = {n: NaiveOnsets(train[n]) for n in courses}
    judgement = Judgement()
    for n in courses:
        judgement.scores += _scores(n, of[n], courses[n], test[n], model, naive[n], start[n], span[n][1])
    held = set(getattr(champion[1], "classes", ())) if champion is not None else set()
    verdicts = {n: _verdict(n, model, test[n], naive[n], seed) for n in model.classes if len(test[n])}
    for name, (decision, _) in verdicts.items():
        ratio = decision.ratio
        judgement.scores.append((f"{name}.loss_ratio", "best", ratio.value, ratio.low, ratio.high, len(test[name])))
        # A class that a champion forecasts already is judged against that champion below.
        if decision.promote or (name in held and ratio.value < 1):
            judgement.classes.add(name)
    judgement.reason = "; ".join(f"{name}: {decision.reason}" for name, (decision, _) in verdicts.items())
    judgement.model = model.without(set(model.classes) - judgement.classes)
    judgement.promote = bool(judgement.classes)
    judgement.is_judged = any(decision.is_judged for decision, _ in verdicts.values())
    if champion is not None:
        _against(judgement, champion, test, {name: losses for name, (_, losses) in verdicts.items()}, seed)
    return judgement


def _verdict(name: str, model: HazardForecaster, rows: Rows, naive: NaiveOnsets, seed: int) -> tuple[Decision, Floats]:
    """Whether a class is forecast better than by the best of the trend and the naive rules, and that one's losses."""
    rivals = {TREND: row_losses(rows, TrendForecaster().forecast(rows.block))}
    rivals |= {rule: row_losses(rows, naive.forecast(rule, rows.block)) for rule in NAMES}
    best = min(rivals, key=lambda rule: float(rivals[rule].sum()))
    own = row_losses(rows, model.forecast(rows.block))
    if rivals[best].sum() <= 0:
        return Decision(False, f"no onset on {name} to judge by", Interval(1.0, None, None, 0), None), rivals[best]
    decision = decide(
        rivals[best], own, _blocks(0, rows), same_configuration=False, champion_name=f"baseline {best}", seed=seed
    )
    return decision, rivals[best]


def _against(
    judgement: Judgement,
    champion: tuple[str, BottleneckForecaster, float, bool],
    test: Mapping[str, Rows],
    best: Mapping[str, Floats],
    seed: int,
) -> None:
    """Challenger against champion over all classes, each in units of its best baseline's loss."""
    name, forecaster, trained_s, is_same = champion
    model = judgement.model
    classes = [n for n in test if n in best and best[n].sum() > 0]
    if model is None or not classes:
        judgement.promote, judgement.reason = False, f"champion {name} stays: no onset to judge by"
        return
    unit = {n: best[n].sum() for n in classes}
    blocks = np.concatenate([_blocks(i, test[n]) for i, n in enumerate(classes)])
    at = np.concatenate([test[n].block.at_s for n in classes])
    own, theirs, baseline = (
        np.concatenate([part(n) / unit[n] for n in classes])
        for part in (
            lambda n: row_losses(test[n], model.forecast(test[n].block)),
            lambda n: row_losses(test[n], forecaster.forecast(test[n].block)),
            lambda n: best[n],
        )
    )
    unseen = at >= trained_s  # a champion is judged on samples newer than itself
    if not unseen.any():
        judgement.promote, judgement.reason = False, f"champion {name} stays: it has seen the newest samples"
        return
    decision = decide(
        theirs[unseen], own[unseen], blocks[unseen], same_configuration=is_same, champion_name=f"champion {name}",
        seed=seed,
    )  # fmt: skip
    judgement.promote = decision.promote and bool(judgement.classes)
    judgement.reason = f"{decision.reason}; {judgement.reason}"
    if not judgement.promote:
        back = decide(
            theirs[unseen], baseline[unseen], blocks[unseen], same_configuration=False,
            champion_name=f"champion {name}", seed=seed,
        )  # fmt: skip
        if back.promote:
            judgement.withdraw, judgement.reason = True, f"trend takes over from the champion: {back.reason}"


def _blocks(number: int, rows: Rows) -> NDArray[np.int64]:
    """A job's hour is one independent look, a node's where there is no job; all queues together are one."""
    hour = np.floor(rows.block.at_s / BLOCK_S).astype(np.int64)
    who = np.where(rows.job >= 0, rows.job * 2, rows.node * 2 + 1)
    return (who * 10_000_000 + hour) * len(LEARNED) + number


def _scores(
    name: str,
    history: SampleHistory | UnitHistory,
    of: Course,
    rows: Rows,
    model: HazardForecaster,
    naive: NaiveOnsets,
    start_s: float,
    end_s: float,
) -> list[tuple[str, str, float, float | None, float | None, int]]:
    """Figures of one class: model (baseline empty) and baselines."""
    if len(rows) == 0:
        return []
    given = {"": model.forecast(rows.block), TREND: TrendForecaster().forecast(rows.block)}
    given |= {baseline: naive.forecast(baseline, rows.block) for baseline in NAMES}
    briers = {who: brier(rows, p) for who, p in given.items()}
    out: list[tuple[str, str, float, float | None, float | None, int]] = []
    n = len(rows)
    for who, p in given.items():
        for i, horizon_s in enumerate(HORIZONS_S):
            out.append((f"{name}.brier_{horizon_s}s", who, float(briers[who][i]), None, None, n))
        out.append((f"{name}.average_precision_120s", who, average_precision(rows, p), None, None, n))
    best, gains = skill(briers[""], {who: value for who, value in briers.items() if who})
    for i, horizon_s in enumerate(HORIZONS_S):
        out.append((f"{name}.brier_skill_{horizon_s}s", best, float(gains[i]), None, None, n))
    blocks = _blocks(0, rows)
    ratio = ratio_interval(row_losses(rows, given[""]), row_losses(rows, given[TREND]), blocks)
    out.append((f"{name}.loss_ratio", TREND, ratio.value, ratio.low, ratio.high, n))
    seen, onsets = screen_recall(history, of, start_s, end_s)
    out.append((f"{name}.screen_recall", "", seen / onsets if onsets else float("nan"), None, None, onsets))
    # Sampling spares every row ahead of an onset, so recall needs no weights; precision by episodes would.
    for who in ("", TREND):
        raised = alarms(history, of, rows, given[who], start_s, end_s)
        out.append((f"{name}.recall_120s", who, raised.recall, None, None, raised.events))
        out.append((f"{name}.lead_s", who, raised.lead_s, None, None, raised.caught))
        out.append((f"{name}.precision_120s", who, _precision(rows, given[who]), None, None, n))
    return out


def _precision(rows: Rows, p: Floats, threshold: float = 0.5) -> float:
    """Weighted share of alarms at single moments that an onset followed."""
    came, known = rows.outcome(LAST_S)
    raised = known & (p[:, -1] >= threshold)
    return float(np.average(came[raised], weights=rows.weight[raised])) if raised.any() else float("nan")
