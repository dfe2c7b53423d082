"""Rows and onsets of simulated clusters, as bottleneck forecasters are asked about them and judged by.

Here belongs what stands between a recording (`benchmarks/scenarios.py`) and scores
(`benchmarks/bottleneck_scores.py`), and its cache on disk; nothing is learned here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks.scenarios import Scenario, key_of, record
from features.cell_history import CellHistory
from features.history import SampleHistory
from features.windows import FEATURES, FeatureBlock
from models.onsets import Course, Rows, course, tick_rows

TICK_MIN_S = 5.0
_OF_ROWS = ("node", "job", "onset_in_s", "known_s", "weight")


@dataclass(frozen=True, slots=True)
class Asked:
    """One class on one cluster.

    Attributes:
        rows: What a forecaster was asked, tick by tick.
        onsets: Labelled onsets: `gpu`, `job` (codes), `label_s`, `true_s`, `is_ramp`, `length_s` of the ramp.
        samples: Samples of the cluster in all.
    """

    rows: Rows
    onsets: pl.DataFrame
    samples: int


def tick_s(scenario: Scenario) -> float:
    """Tick of a nowcast that reads such samples, s."""
    return max(scenario.sampling_s, TICK_MIN_S)


def asked(
    scenario: Scenario, classes: tuple[str, ...], cache: Path | None, shares: tuple[float, float] = (1.0, 1.0)
) -> dict[str, Asked]:
    """Rows and onsets of classes.

    Args:
        scenario: The cluster.
        classes: The classes.
        cache: Folder of recordings and rows; None: all is made anew.
        shares: As of `tick_rows`.
    """
    out: dict[str, Asked] = {}
    made: tuple[SampleHistory, pl.DataFrame, pl.DataFrame] | None = None
    for name in classes:
        stem = f"{key_of(scenario)}-{name}-{shares[0]:g}-{shares[1]:g}-{len(FEATURES)}"
        files = (cache / f"{stem}-rows.parquet", cache / f"{stem}-onsets.parquet") if cache else None
        if files is None or not all(file.exists() for file in files):
            if made is None:
                recording = record(scenario, cache)
                made = (recording.history(), recording.jobs, recording.truth)
            history, jobs, truth = made
            of = course(history, name, scenario.book, None, jobs)
            begin, end = float(history.ts.min()), float(history.ts.max())
            rows = tick_rows(
                history, of, begin, end, tick_s=tick_s(scenario), shares=shares, seed=scenario.seed
            )  # fmt: skip
            out[name] = Asked(rows, onsets_of(history, of, truth), len(history.ts))
            if files is not None:
                _frame(out[name]).write_parquet(files[0], compression="zstd", compression_level=1)
                out[name].onsets.write_parquet(files[1])
        else:
            out[name] = _read(name, *files)
    return out


def onsets_of(
    history: CellHistory, of: Course, truth: pl.DataFrame, *, column: str = "gpu_uuid", slack_s: float | None = None
) -> pl.DataFrame:
    """Labelled onsets beside what the simulator says of them: only it knows ramps from steps, and the true moment.

    Args:
        history: The samples.
        of: The class followed through them.
        truth: The simulator's own account.
        column: What of it names the things of the history; of a port its node.
        slack_s: How far a label may lie from the true moment, s; None: a minute and an interval.
    """
    come = truth.filter((pl.col("class") == of.bottleneck_class) & pl.col("onset").is_not_null())
    of_gpu: dict[str, list[tuple[float, bool, float]]] = {}
    for uuid, onset, is_step, ramp in come.select(
        column, pl.col("onset").dt.epoch("us") / 1e6, "is_step", pl.col("ramp_start").dt.epoch("us") / 1e6
    ).iter_rows():
        of_gpu.setdefault(uuid, []).append((onset, is_step, np.nan if ramp is None else onset - ramp))
    slack = 60 + history.interval_s if slack_s is None else slack_s
    found = []
    for row in of.onset_row.tolist():
        gpu, at = int(history.gpu[row]), float(history.ts[row])
        near = [one for one in of_gpu.get(history.uuids[gpu].partition("/")[0], ()) if abs(at - one[0]) <= slack]
        true, is_step, length = min(near, key=lambda one: abs(at - one[0])) if near else (at, True, np.nan)
        found.append((gpu, int(history.job[row]), at, min(true, at), not is_step, length))
    kinds = {"gpu": pl.Int64, "job": pl.Int64, "label_s": pl.Float64, "true_s": pl.Float64, "is_ramp": pl.Boolean,
             "length_s": pl.Float64}  # fmt: skip
    return pl.DataFrame(found, schema=kinds, orient="row")


def pooled(parts: list[Rows]) -> Rows:
    """Rows of several clusters as one; clusters do not share GPUs, nodes or jobs."""
    step = [10_000_000 * i for i in range(len(parts))]
    block = FeatureBlock(
        parts[0].block.bottleneck_class,
        np.concatenate([rows.block.gpus + base for rows, base in zip(parts, step, strict=True)]),
        np.concatenate([rows.block.at_s for rows in parts]),
        np.concatenate([rows.block.matrix for rows in parts]),
        parts[0].block.index,
    )
    node = np.concatenate([rows.node + base for rows, base in zip(parts, step, strict=True)])
    job = np.concatenate([np.where(rows.job >= 0, rows.job + base, -1) for rows, base in zip(parts, step, strict=True)])
    rest: list[NDArray] = [np.concatenate([getattr(rows, name) for rows in parts]) for name in _OF_ROWS[2:]]
    return Rows(block, node, job, *rest)


def _frame(of: Asked) -> pl.DataFrame:
    block = of.rows.block
    return pl.DataFrame(block.matrix, schema=list(FEATURES)).with_columns(
        pl.Series("gpu_code", block.gpus), pl.Series("at_s", block.at_s), pl.lit(of.samples).alias("all_samples"),
        *(pl.Series(name, getattr(of.rows, name)) for name in _OF_ROWS),
    )  # fmt: skip


def _read(name: str, rows: Path, onsets: Path) -> Asked:
    frame = pl.read_parquet(rows)
    block = FeatureBlock(
        name, frame["gpu_code"].to_numpy(), frame["at_s"].to_numpy(), frame.select(FEATURES).to_numpy()
    )
    of = Rows(block, *(frame[column].to_numpy() for column in _OF_ROWS))
    samples = int(frame["all_samples"][0]) if frame.height else 0
    return Asked(of, pl.read_parquet(onsets), samples)
