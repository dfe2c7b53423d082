"""Nightly training of the courses of levels: a challenger on the newest samples, beside persistence, EWMA and champion.

Samples are split by time, older ones to learn from, newer ones to judge by, with a purge of a horizon and a window
between. A quantity is handed over by itself: one that has not clearly beaten the better of persistence and EWMA stays
with the stand-in. Here belongs that sequence; rows stand in `models/level_rows.py`, the forecaster in
`models/level_course.py`, the rule in `models/promotion.py`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.history import SampleHistory
from features.level_windows import HORIZONS_S, LEVELS, LevelBlock
from features.thresholds import ThresholdBook
from models.level_course import NAIVE, QUANTILES, LevelCourses, configuration
from models.level_rows import CourseRows, course_rows
from models.onsets import PURGE_S
from models.promotion import decide
from models.registry import Registry, RegistryError
from models.training import TABLE, TrainingReport, act
from models.training_scores import MAX_SAMPLES, Score, metrics, moment_text, score_rows, some_nodes
from models.versions import configuration_id, full_configuration, what_changed

TASK = "level"
LEARN_SHARE = 0.75
TRAIN_ROWS = 40_000
TEST_ROWS = 20_000
BLOCK_S = 3_600.0


@dataclass(slots=True)
class _Verdict:
    quantities: set[str] = field(default_factory=set)
    promote: bool = False
    withdraw: bool = False
    reason: str = ""
    is_judged: bool = False
    scores: list[Score] = field(default_factory=list)


def train_level(
    samples: pl.DataFrame, nodes: pl.DataFrame | None, registry: Registry, at: datetime, *,
    cluster: str = "", seed: int = 1, threads: int = 1, snapshot_id: int | None = None,
    node_samples: pl.DataFrame | None = None, stale_s: float = 45.0,
    limits: Mapping[str, Mapping[str, float]] | None = None, max_samples: int = MAX_SAMPLES,
) -> TrainingReport:  # fmt: skip
    """Train the courses of levels of a cluster.

    Args:
        samples: `core_gpu_samples` rows; those later than `at` change nothing.
        nodes: `core_nodes` rows, for GPU models.
        registry: The cluster's registry.
        at: The moment of training.
        cluster: Name for score rows.
        seed: Seed of every random choice.
        threads: Threads of the fits.
        snapshot_id: Snapshot of the store the samples are of.
        node_samples: `core_node_samples` rows, for inlet temperatures.
        stale_s: Age at which a sample stops counting.
        limits: Limits by part of a model name that replace the built-in ones.
        max_samples: Rows held at once.

    Raises:
        ValueError: A key column of the samples is absent.
        OSError: The registry's disk refused.
    """
    seen = some_nodes(samples.filter(pl.col("ts") <= at), max_samples, seed)
    if not seen.height:
        return _nothing("persistence stays: no samples", cluster, at)
    book = ThresholdBook.from_nodes(nodes, overrides=limits)
    history = SampleHistory(seen, book, node_samples=node_samples, stale_s=stale_s)
    del seen, samples
    begin, end = float(history.ts.min()), float(history.ts.max())
    if end - begin < 10 * PURGE_S:
        told = f"samples span {(end - begin) / 3600:.1f} h, {10 * PURGE_S / 3600:.1f} h are needed"
        return _nothing(f"persistence stays: {told}", cluster, at)
    expected = registry.present(TASK)
    verdict = _judge(history, begin, end, _champion(registry), seed, threads)
    if not verdict.quantities:
        _, reason = act(registry, TASK, "", verdict, expected, at)
        scores = score_rows(verdict.scores, cluster, at, TASK, "")
        return TrainingReport(TASK, None, False, reason, scores, is_judged=verdict.is_judged)
    rows = {
        name: course_rows(history, name, begin, end, count=TRAIN_ROWS, seed=seed) for name in sorted(verdict.quantities)
    }
    model = LevelCourses.fit(rows, seed=seed, threads=threads)
    card = {
        "trained_at": at, "cluster": cluster, "features": {name: list(of) for name, of in model.names.items()},
        "configuration": configuration_id(TASK, configuration()),
        "configuration_parts": full_configuration(TASK, configuration()),
        "seed": seed, "snapshot_id": snapshot_id, "quantities": model.quantities,
        "span": [moment_text(begin), moment_text(end)], "samples": len(history.ts), "metrics": metrics(verdict.scores),
        "decision": verdict.reason, "judged_against": expected,
        "summary": f"{', '.join(model.quantities)}: {verdict.reason}",
    }  # fmt: skip
    version = registry.save(TASK, {**model.to_files(), TABLE: _table(rows)}, card)
    promoted, reason = act(registry, TASK, version, verdict, expected, at)
    facts = {"quantities": model.quantities, "samples": card["samples"]}
    scores = score_rows(verdict.scores, cluster, at, TASK, version)
    return TrainingReport(TASK, version, promoted, reason, scores, facts, verdict.is_judged)


def train_level_again(registry: Registry, version: str, *, threads: int = 1) -> LevelCourses:
    """Fit a kept version anew from its own training table.

    Raises:
        models.registry.RegistryError: The version or its table is missing or damaged.
    """
    loaded = registry.load(TASK, version, with_tables=True)
    table = pl.read_parquet(io.BytesIO(loaded.files[TABLE]))
    rows = {}
    for name, features in loaded.card["features"].items():
        part = table.filter(pl.col("quantity") == name)
        block = LevelBlock(
            name, tuple(features), part.select(features).to_numpy(), part["last"].to_numpy(), part["unit"].to_numpy(),
            {rule: part.select(_names(rule)).to_numpy() for rule in NAIVE},
            part.select(_names("roughness")).to_numpy(),
        )  # fmt: skip
        came = part.select(_names("came")).to_numpy()
        rows[name] = CourseRows(block, part["at_s"].to_numpy(), part["gpu"].to_numpy(), came)
    return LevelCourses.fit(rows, seed=loaded.card["seed"], threads=threads)


def losses(rows: CourseRows, points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean absolute error of points over the horizons whose outcome is known, in the block's unit; NaN without one."""
    error = np.abs(points - rows.came) / rows.block.unit[:, None]
    known = ~np.isnan(error)
    count = known.sum(axis=1)
    return np.where(count > 0, np.where(known, error, 0).sum(axis=1) / np.maximum(count, 1), np.nan)


def coverage(rows: CourseRows, told: NDArray[np.float64], seed: int) -> float:
    """Share of outcomes in the 80 % interval, readings spread evenly over their step; NaN without an outcome."""
    step = LEVELS[rows.block.quantity].step
    came = rows.came + np.random.default_rng(seed).uniform(-0.5, 0.5, rows.came.shape) * step
    known = ~np.isnan(came)
    inside = (told[:, :, 0] <= came) & (came <= told[:, :, len(QUANTILES) - 1])
    return float(inside[known].mean()) if known.any() else float("nan")


def _nothing(reason: str, cluster: str, at: datetime) -> TrainingReport:
    return TrainingReport(TASK, None, False, reason, score_rows([], cluster, at, TASK, ""))


def _champion(registry: Registry) -> tuple[str, LevelCourses, float, bool] | None:
    try:
        if registry.champion(TASK) is None:
            return None
        loaded = registry.load(TASK, fallback=True, read=LevelCourses.from_files)
    except RegistryError:
        return None
    is_same = not what_changed(TASK, loaded.card, configuration())
    return loaded.version, loaded.model, datetime.fromisoformat(loaded.card["trained_at"]).timestamp(), is_same


def _judge(
    history: SampleHistory, begin: float, end: float, champion: tuple[str, LevelCourses, float, bool] | None,
    seed: int, threads: int,
) -> _Verdict:  # fmt: skip
    """Challenger fitted on the older samples, quantity by quantity on the newest."""
    cut = begin + LEARN_SHARE * (end - begin)
    verdict, reasons, against = _Verdict(), [], []
    for name in LEVELS:
        train = course_rows(history, name, begin, cut, count=TRAIN_ROWS, seed=seed)
        model = LevelCourses.fit({name: train}, seed=seed, threads=threads)
        test = course_rows(history, name, cut + PURGE_S, end, count=TEST_ROWS, seed=seed + 2)
        if not model.quantities or not len(test):
            continue
        told = model.forecast(test.block)
        own = losses(test, told[:, :, 1])
        known = ~np.isnan(own)
        rivals = {rule: losses(test, test.block.naive[rule]) for rule in NAIVE}
        best = min(rivals, key=lambda rule: float(np.nansum(rivals[rule])))
        if not known.any() or np.nansum(rivals[best]) <= 0:
            continue
        blocks = _blocks(test)
        cover = coverage(test, told, seed)
        decision = decide(
            rivals[best][known], own[known], blocks[known], same_configuration=False, coverage=cover,
            champion_name=f"baseline {best}", seed=seed,
        )  # fmt: skip
        ratio, count = decision.ratio, int(known.sum())
        verdict.scores += [(f"{name}.mae", "", float(own[known].mean()), None, None, count)]
        verdict.scores += [(f"{name}.mae", r, float(rivals[r][known].mean()), None, None, count) for r in NAIVE]
        verdict.scores += [
            (f"{name}.coverage_80", "", cover, None, None, count),
            (f"{name}.loss_ratio", "best", ratio.value, ratio.low, ratio.high, count),
        ]
        verdict.is_judged |= decision.is_judged
        reasons.append(f"{name}: {decision.reason}")
        is_held = champion is not None and name in champion[1].ahead
        if decision.promote or (is_held and ratio.value < 1):
            verdict.quantities.add(name)
        if champion is not None and is_held:
            unseen = known & (test.at_s >= champion[2])
            if unseen.any():
                theirs = losses(test, champion[1].forecast(test.block)[:, :, 1])
                against.append((own[unseen], theirs[unseen], rivals[best][unseen], blocks[unseen]))
    verdict.reason = "; ".join(reasons) or "persistence stays: too few samples to learn from"
    verdict.promote = bool(verdict.quantities)
    if champion is not None:
        _against(verdict, champion, against, seed)
    return verdict


def _against(
    verdict: _Verdict, champion: tuple[str, LevelCourses, float, bool], against: list[tuple], seed: int
) -> None:
    """Whether the challenger may take over from a champion, by what that one has not seen."""
    name, held, _, is_same = champion
    lost = set(held.ahead) - verdict.quantities
    if not against:
        # Nothing new to tell them apart by: a refit of the same configuration on newer samples goes on.
        verdict.promote = verdict.promote and is_same and not lost
        verdict.reason = f"{'refit of' if verdict.promote else 'stays:'} champion {name}: {verdict.reason}"
        return
    own, theirs, naive, blocks = (np.concatenate(parts) for parts in zip(*against, strict=True))
    decision = decide(theirs, own, blocks, same_configuration=is_same, champion_name=f"champion {name}", seed=seed)
    kept = decide(naive, theirs, blocks, same_configuration=False, champion_name="baseline", seed=seed)
    verdict.is_judged |= decision.is_judged
    verdict.promote = verdict.promote and decision.promote
    verdict.withdraw = not verdict.promote and kept.ratio.low is not None and kept.ratio.low > 1
    verdict.reason = f"{decision.reason}; {verdict.reason}"
    if verdict.withdraw:
        verdict.reason = f"champion {name} goes back to persistence, loss ratio {kept.ratio}; {verdict.reason}"


def _blocks(rows: CourseRows) -> NDArray[np.int64]:
    """Block of each row: a GPU's hour."""
    hour = np.floor(rows.at_s / BLOCK_S).astype(np.int64)
    hour -= hour.min(initial=0)
    return rows.gpu * (int(hour.max(initial=0)) + 1) + hour


def _names(prefix: str) -> list[str]:
    return [f"{prefix}_{horizon_s}s_ahead" for horizon_s in HORIZONS_S]


def _table(rows: Mapping[str, CourseRows]) -> bytes:
    """All that a fit takes, a row a window."""
    frames = []
    for name, of in rows.items():
        block = of.block
        columns: dict[str, Any] = {
            "quantity": [name] * len(of), "at_s": of.at_s, "gpu": of.gpu, "last": block.last, "unit": block.unit,
        }  # fmt: skip
        of_horizons = {"came": of.came, "roughness": block.roughness, **{rule: block.naive[rule] for rule in NAIVE}}
        for prefix, values in of_horizons.items():
            columns |= {column: values[:, k] for k, column in enumerate(_names(prefix))}
        columns |= {feature: block.matrix[:, k] for k, feature in enumerate(block.names)}
        frames.append(pl.DataFrame(columns))
    buffer = io.BytesIO()
    pl.concat(frames, how="diagonal").write_parquet(buffer, compression="zstd")
    return buffer.getvalue()
