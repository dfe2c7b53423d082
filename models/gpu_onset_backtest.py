"""Backtest of the bottleneck classes of GPUs on canonical telemetry: the classes' own labels, models and baselines.

Here belongs what a record of GPUs must have; the protocol stands in `models/hazard_backtest.py`, nodes and ports in
`models/unit_onset_backtest.py`.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from features.conditions import CLASSES
from features.history import SampleHistory
from features.thresholds import MODELS, ThresholdBook
from models.event_report import EventReport
from models.hazard_backtest import backtest_course, present
from models.onset_backtest import OnsetBacktestError, Step, unheard
from models.onsets import Rows, course


def backtest_telemetry(
    samples: pl.DataFrame,
    bottleneck_class: str,
    *,
    gpu_model: str | None = None,
    seed: int = 1,
    threads: int = 1,
    step: Step = unheard,
) -> EventReport:
    """Backtest a class of GPU bottlenecks on canonical telemetry.

    Args:
        samples: Rows of `core_gpu_samples`, any subset of its columns.
        bottleneck_class: One of `features.conditions.CLASSES`.
        gpu_model: Model whose limits hold for every node; None: limits that hold for any.
        seed: Seed of every random choice.
        threads: Threads of a fit.
        step: Told what is begun.

    Raises:
        OnsetBacktestError: The class cannot be told from these columns, or has too few onsets.
    """
    if bottleneck_class not in CLASSES:
        raise OnsetBacktestError(f"no class {bottleneck_class!r} of GPUs; classes: {', '.join(CLASSES)}")
    if missing := [name for name in ("ts", "node", "gpu_uuid") if name not in samples.columns]:
        raise OnsetBacktestError(f"samples lack {', '.join(missing)}; they have {', '.join(samples.columns)}")
    step("windows of GPUs")
    book = ThresholdBook(default_model=gpu_model or "")
    history = SampleHistory(samples, book)
    if not len(history.ts):
        raise OnsetBacktestError("the telemetry holds no rows with a time, a node and a GPU")
    of = course(history, bottleneck_class, book)
    if (of.state == -1).all():
        columns = ", ".join(present(samples))
        raise OnsetBacktestError(
            f"these columns do not tell when a GPU is in {bottleneck_class}: {columns}; "
            f"what each class needs stands in docs/nowcast.md{_of_model(bottleneck_class, gpu_model)}"
        )
    uuids, nodes = np.array(history.uuids, dtype=object), np.array(history.node_names, dtype=object)

    def names(rows: Rows) -> dict[str, pl.Series]:
        return {
            "node": pl.Series(nodes[rows.node].tolist(), dtype=pl.String),
            "gpu_uuid": pl.Series(uuids[rows.block.gpus].tolist(), dtype=pl.String),
        }

    return backtest_course((history, of), (history, of), unit="GPU", names=names, seed=seed, threads=threads, step=step)


def _of_model(bottleneck_class: str, gpu_model: str | None) -> str:
    """What the model of the GPUs has to do with a class that is not told: its limits are rated by model alone."""
    if bottleneck_class != "nvlink_saturation":
        return ""
    if not gpu_model:
        return "; how much its links carry is told by --gpu-model alone, as 'NVIDIA H100 80GB HBM3'"
    if any(pattern in gpu_model.upper().replace("-", " ").replace("_", " ") for pattern, _ in MODELS):
        return ""
    known = ", ".join(pattern for pattern, _ in MODELS)
    return f"; no limits are known of the model {gpu_model!r}; known: {known}"
