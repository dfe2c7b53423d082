"""Training of what forecasts hardware: bottlenecks from samples, node failure from faults.

The same sequence as for jobs (`models/training.py`): a challenger is judged on the newest data it has not seen, beside
the champion and the baselines; then it is fitted anew on everything, kept with its training table, and promoted when it
has earned that. Here belongs that sequence, not the forecasters (`models/bottleneck.py`, `models/node_failure.py`).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.conditions import CLASSES
from features.history import SampleHistory
from features.thresholds import ThresholdBook
from features.unit_history import UnitHistory
from features.unit_windows import UNIT_FEATURES
from features.windows import FEATURES, FeatureBlock
from models import bottleneck, node_failure
from models.bottleneck import HazardForecaster
from models.bottleneck_judgement import judge
from models.fault_history import DAY_S, FaultHistory
from models.node_failure import BASELINES, HORIZONS_S, NodeFailureForecaster, NodeModelError, baseline
from models.node_risks import sizes_of
from models.onsets import PURGE_S, Rows, course, sample_rows
from models.promotion import decide, mean_interval
from models.registry import Registry, RegistryError
from models.training import TABLE, TrainingReport, act
from models.training_scores import MAX_SAMPLES, Score, metrics, moment_text, score_rows, some_nodes
from models.unit_training import unit_histories
from models.versions import configuration_id, full_configuration, what_changed

TEST_SHARE = 0.30  # of the record of faults
GRID_S = 6 * 3_600.0  # moments at which nodes are judged


def train_bottleneck(
    samples: pl.DataFrame, jobs: pl.DataFrame | None, nodes: pl.DataFrame | None, registry: Registry, at: datetime, *,
    cluster: str = "", seed: int = 1, threads: int = 1, snapshot_id: int | None = None,
    node_samples: pl.DataFrame | None = None, excluded: pl.DataFrame | None = None, stale_s: float = 45.0,
    limits: Mapping[str, Mapping[str, float]] | None = None,
    max_samples: int = MAX_SAMPLES, port_samples: pl.DataFrame | None = None,
) -> TrainingReport:  # fmt: skip
    """Train the bottleneck forecaster of a cluster.

    Args:
        samples: `core_gpu_samples` rows; those later than `at` change nothing.
        jobs: `core_jobs` rows, for jobs that failed, and for the occupancy of queues.
        nodes: `core_nodes` rows, for GPU models and the GPUs there are.
        registry: The cluster's registry.
        at: The moment of training.
        cluster: Name for score rows.
        seed: Seed of every random choice.
        threads: Threads of the fits.
        snapshot_id: Snapshot of the store the samples are of.
        node_samples: `core_node_samples` rows, for inlet temperatures and host memory.
        excluded: Spans `node`, `start`, `end` from which nothing may be learned.
        stale_s: Age at which a sample stops counting as a peer.
        limits: Limits by part of a model name that replace the built-in ones.
        max_samples: Rows held at once.
        port_samples: `core_port_samples` rows, for the fabric.

    Raises:
        ValueError: A key column of the samples is absent.
        OSError: The registry's disk refused.
    """
    task = "bottleneck"
    seen = some_nodes(samples.filter(pl.col("ts") <= at), max_samples, seed)
    book = ThresholdBook.from_nodes(nodes, overrides=limits)
    if not seen.height:
        return TrainingReport(task, None, False, "trend stays: no samples", score_rows([], cluster, at, task, ""))
    racks = None if nodes is None or "rack" not in nodes.columns else dict(nodes.select("node", "rack").iter_rows())
    history = SampleHistory(seen, book, node_samples=node_samples, stale_s=stale_s, racks=racks)
    del seen, samples
    span_s = float(history.ts.max() - history.ts.min())
    if span_s < 10 * PURGE_S:
        reason = f"trend stays: samples span {span_s / 3600:.1f} h, {10 * PURGE_S / 3600:.1f} h are needed"
        return TrainingReport(task, None, False, reason, score_rows([], cluster, at, task, ""))
    known_jobs = None if jobs is None else jobs.filter(pl.col("end_time") <= at)
    units = unit_histories(
        history, book, at, node_samples=node_samples, port_samples=port_samples, jobs=jobs, nodes=nodes
    )  # fmt: skip
    of = {**dict.fromkeys(CLASSES, history), **units}
    courses = {name: course(one, name, book, excluded, known_jobs) for name, one in of.items()}
    expected = registry.present(task)
    judgement = judge(history, courses, _bottleneck_champion(registry), seed=seed, threads=threads, units=units)
    if judgement.model is None or not judgement.classes:
        _, reason = act(registry, task, "", judgement, expected, at)
        scores = score_rows(judgement.scores, cluster, at, task, "")
        return TrainingReport(task, None, False, reason, scores, is_judged=judgement.is_judged)
    begin, end = float(history.ts.min()), float(history.ts.max())
    rows = {
        name: sample_rows(of[name], courses[name], float(of[name].ts.min()), float(of[name].ts.max()), seed=seed)
        for name in sorted(judgement.classes)
    }
    model = HazardForecaster.fit(rows, seed=seed, threads=threads)
    card = {
        "trained_at": at, "cluster": cluster, "features": {name: list(bottleneck.USED[name]) for name in model.classes},
        "configuration": configuration_id(task, bottleneck.configuration()),
        "configuration_parts": full_configuration(task, bottleneck.configuration()),
        "seed": seed, "snapshot_id": snapshot_id,
        "classes": model.classes, "span": [moment_text(begin), moment_text(end)], "samples": len(history.ts),
        "onsets": {name: len(one.onset_row) for name, one in courses.items()}, "calibration": model.calibration,
        "importance": {name: model.importance(name) for name in model.classes},
        "metrics": metrics(judgement.scores), "decision": judgement.reason,
        "judged_against": expected, "summary": f"{', '.join(model.classes)}: {judgement.reason}",
    }  # fmt: skip
    version = registry.save(task, {**model.to_files(), TABLE: _table(rows, of)}, card)
    promoted, reason = act(registry, task, version, judgement, expected, at)
    scores = score_rows(judgement.scores, cluster, at, task, version)
    facts = {"classes": model.classes, "onsets": card["onsets"], "samples": card["samples"]}
    return TrainingReport(task, version, promoted, reason, scores, facts, judgement.is_judged)


def train_bottleneck_again(registry: Registry, version: str, *, threads: int = 1) -> HazardForecaster:
    """Fit a kept version anew from its own training table.

    Raises:
        models.registry.RegistryError: The version or its table is missing or damaged.
    """
    loaded = registry.load("bottleneck", version, with_tables=True)
    table = pl.read_parquet(io.BytesIO(loaded.files[TABLE]))
    rows = {}
    for (name,), part in table.partition_by("bottleneck_class", as_dict=True, maintain_order=True).items():
        names = UNIT_FEATURES.get(str(name), FEATURES)
        block = FeatureBlock(
            str(name), part["gpu"].to_numpy(), part["at_s"].to_numpy(),
            part.select(pl.col(names).fill_null(float("nan"))).to_numpy(), {n: i for i, n in enumerate(names)},
        )  # fmt: skip
        columns = (part[column].to_numpy() for column in ("node", "job", "onset_in_s", "known_s", "weight"))
        rows[str(name)] = Rows(block, *columns)
    return HazardForecaster.fit(rows, seed=loaded.card["seed"], threads=threads)


def _bottleneck_champion(registry: Registry) -> tuple[str, HazardForecaster, float, bool] | None:
    try:
        if registry.champion("bottleneck") is None:
            return None
        loaded = registry.load("bottleneck", fallback=True, read=HazardForecaster.from_files)
    except RegistryError:
        return None
    model = loaded.model
    model.version = loaded.version
    is_same = not what_changed("bottleneck", loaded.card, bottleneck.configuration())
    return loaded.version, model, datetime.fromisoformat(loaded.card["trained_at"]).timestamp(), is_same


def _table(rows_of: Mapping[str, Rows], histories: Mapping[str, SampleHistory | UnitHistory]) -> bytes:
    frames = []
    for name, rows in rows_of.items():
        history = histories[name]
        frame = pl.DataFrame(rows.block.matrix, schema=list(rows.block.index)).with_columns(
            pl.lit(name).alias("bottleneck_class"),
            pl.Series("gpu", rows.block.gpus),
            pl.Series("gpu_uuid", [history.uuids[i] for i in rows.block.gpus]),
            pl.Series("at_s", rows.block.at_s),
            pl.Series("node", rows.node),
            pl.Series("job", rows.job),
            pl.Series("onset_in_s", rows.onset_in_s),
            pl.Series("known_s", rows.known_s),
            pl.Series("weight", rows.weight),
        )
        frames.append(frame)
    buffer = io.BytesIO()
    pl.concat(frames, how="diagonal").write_parquet(buffer, compression="zstd")
    return buffer.getvalue()


# --- node failure -----------------------------------------------------------------------------------------


def train_node_failure(
    faults: pl.DataFrame, nodes: pl.DataFrame, registry: Registry, at: datetime, *, cluster: str = "", seed: int = 1,
    threads: int = 1, snapshot_id: int | None = None, signs: pl.DataFrame | None = None,
) -> TrainingReport:  # fmt: skip
    """Train the node-failure forecaster of a cluster.

    Args:
        faults: `core_faults` rows; those later than `at` change nothing.
        nodes: `core_nodes` rows: every node there is.
        registry: The cluster's registry.
        at: The moment of training.
        cluster: Name for score rows.
        seed: Seed of every random choice.
        threads: Not used: the fit is small.
        snapshot_id: Snapshot of the store the faults are of.
        signs: `core_gpu_signs` rows; those later than `at` change nothing. None: none known.
    """
    del threads
    task = "node_failure"
    known = faults.filter(pl.col("start_time") <= at).with_columns(
        pl.when(pl.col("end_time") <= at).then("end_time").alias("end_time")
    )
    seen = signs.filter(pl.col("ts") <= at) if signs is not None else None
    history = FaultHistory(known, nodes["node"].unique().to_list(), signs=seen, sizes=sizes_of(nodes))
    now_s = at.timestamp()
    expected = registry.present(task)
    try:
        model = NodeFailureForecaster.fit(history, now_s, seed=seed)
        verdict, scores = _judge_nodes(history, registry, now_s, seed)
    except NodeModelError as error:
        empty = score_rows([], cluster, at, task, "")
        return TrainingReport(task, None, False, f"climatology stays: {error}", empty)
    card = {
        "trained_at": at, "cluster": cluster, "features": list(node_failure.configuration()["features"]),
        "configuration": configuration_id(task, node_failure.configuration()),
        "configuration_parts": full_configuration(task, node_failure.configuration()),
        "seed": seed, "snapshot_id": snapshot_id,
        "span": [moment_text(history.since), moment_text(now_s)],
        "faults": len(history.start), "nodes": len(history.nodes),
        "weights": model.weights, "say": model.say, "gpu_share": model.hazard.gpu_share,
        "same_share": model.hazard.same_share, "metrics": metrics(scores), "decision": verdict.reason,
        "judged_against": expected,
        "summary": f"{len(history.start)} faults of {len(history.nodes)} nodes: {verdict.reason}",
    }  # fmt: skip
    buffer = io.BytesIO()
    learned = known if seen is None else pl.concat([known, seen.drop("cluster", strict=False)], how="diagonal_relaxed")
    learned.write_parquet(buffer, compression="zstd")
    version = registry.save(task, {**model.to_files(), TABLE: buffer.getvalue()}, card)
    promoted, reason = act(registry, task, version, verdict, expected, at)
    return TrainingReport(
        task, version, promoted, reason, score_rows(scores, cluster, at, task, version),
        {"faults": len(history.start), "nodes": len(history.nodes)}, verdict.is_judged,
    )  # fmt: skip


def node_losses(history: FaultHistory, node: NDArray[np.int64], at_s: NDArray[np.float64], p: Any, end_s: float) -> Any:
    """Log loss by horizon, shape (rows, 3), NaN where the outcome is not known by `end_s`."""
    out = np.full(p.shape, np.nan)
    nearest = history.next_start_s(node, at_s)
    for i, horizon_s in enumerate(HORIZONS_S.values()):
        came = nearest <= horizon_s
        known = at_s + horizon_s <= end_s
        q = np.clip(p[:, i], 1e-9, 1 - 1e-9)
        out[:, i] = np.where(known, -np.where(came, np.log(q), np.log1p(-q)), np.nan)
    return out


@dataclass(frozen=True, slots=True)
class _NodeVerdict:
    promote: bool
    withdraw: bool
    reason: str
    is_judged: bool


def _judge_nodes(
    history: FaultHistory, registry: Registry, now_s: float, seed: int
) -> tuple[_NodeVerdict, list[Score]]:
    """Challenger fitted at the cut, on the newest part of the record, against the champion and the baselines."""
    cut = now_s - TEST_SHARE * (now_s - history.since)
    challenger = NodeFailureForecaster.fit(history, cut, seed=seed)
    moments = np.arange(cut, now_s - DAY_S, GRID_S)
    node = np.tile(np.arange(len(history.nodes)), len(moments))
    at_s = np.repeat(moments, len(history.nodes))
    up = ~history.is_down(node, at_s)
    node, at_s = node[up], at_s[up]
    if not len(node):
        raise NodeModelError("the record is too short to judge on")
    given = {"": challenger.forecast(history, node, at_s)}
    given |= {name: baseline(name, history, node, at_s) for name in BASELINES}
    losses = {name: node_losses(history, node, at_s, p, now_s) for name, p in given.items()}
    usual = losses["climatology"]  # of a long horizon a short record may know no outcome
    count = np.maximum((~np.isnan(usual)).sum(axis=0), 1)
    unit = np.where(np.isnan(usual).all(axis=0), np.nan, np.nansum(usual, axis=0) / count)
    pooled = {name: np.nansum(loss / unit, axis=1) for name, loss in losses.items()}
    scores: list[Score] = []
    for i, horizon in enumerate(HORIZONS_S):
        known = ~np.isnan(losses[""][:, i])
        if not known.any():
            continue
        for name in given:
            interval = mean_interval(losses[name][known, i], node[known], seed=seed)
            scores.append(
                (f"log_loss_{horizon[2:]}", name, interval.value, interval.low, interval.high, int(known.sum()))
            )
    best = min(BASELINES, key=lambda name: float(pooled[name].sum()))
    to_best = decide(
        pooled[best], pooled[""], node, same_configuration=False, champion_name=f"baseline {best}", seed=seed
    )
    champion = _node_champion(registry)
    if champion is None:
        return _NodeVerdict(to_best.promote, False, to_best.reason, to_best.is_judged), scores
    name, rival, trained_s, is_same = champion
    unseen = at_s >= trained_s
    if len(np.unique(at_s[unseen])) * GRID_S < 7 * DAY_S:
        # Nothing new to tell them apart by: a refit of the same configuration on more of the record goes on.
        promote = is_same and to_best.ratio.value < 1
        return _NodeVerdict(promote, False, f"refit of champion {name}: {to_best.reason}", to_best.is_judged), scores
    theirs = np.nansum(node_losses(history, node, at_s, rival.forecast(history, node, at_s), now_s) / unit, axis=1)
    decision = decide(
        theirs[unseen], pooled[""][unseen], node[unseen], same_configuration=is_same,
        champion_name=f"champion {name}", seed=seed,
    )  # fmt: skip
    if decision.promote and to_best.ratio.value < 1:
        return _NodeVerdict(True, False, decision.reason, True), scores
    back = decide(theirs[unseen], pooled[best][unseen], node[unseen], same_configuration=False, seed=seed)
    if back.promote:
        return _NodeVerdict(False, True, f"climatology takes over from the champion: {back.reason}", True), scores
    return _NodeVerdict(False, False, decision.reason, decision.is_judged), scores


def _node_champion(registry: Registry) -> tuple[str, NodeFailureForecaster, float, bool] | None:
    try:
        if registry.champion("node_failure") is None:
            return None
        loaded = registry.load("node_failure", fallback=True, read=NodeFailureForecaster.from_files)
    except RegistryError:
        return None
    model = loaded.model
    model.version = loaded.version
    is_same = not what_changed("node_failure", loaded.card, node_failure.configuration())
    return loaded.version, model, datetime.fromisoformat(loaded.card["trained_at"]).timestamp(), is_same
