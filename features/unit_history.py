"""The windows of nodes, ports and queues over recorded samples, with the state of their label beside them.

Here belongs what stands in `features/history.py` for GPUs; live rings stand in `features/unit_ring.py`. A label may
look at all of a record, a window never sees what came after its moment.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.cell_history import CellHistory
from features.history import SampleHistory
from features.label_fabric import fabric_states, node_steps, port_series
from features.label_hosts import host_states
from features.occupancy import shortage_states
from features.queue_memory import MEMORY, QueueMemory
from features.thresholds import ThresholdBook
from features.unit_conditions import KINDS, UnitState, unit_inputs, unit_quantities
from features.unit_windows import UNIT_FEATURES, unit_block, unit_features, unit_screen
from features.windows import FeatureBlock

Ints = NDArray[np.int64]

_CHUNK = 4_096


class UnitHistory(CellHistory):
    """Recorded samples of one kind of thing, sorted by thing and time.

    Args:
        bottleneck_class: One of `UNIT_CLASSES`.
        samples: Rows of `core_node_samples`, of `core_port_samples`, or of occupancy (`ts`, `queue` and the counts of
            `features/occupancy.py`); any subset of their quantities, in any order.
        book: Limits of the nodes.
        gpus: Samples of the GPUs, for the steps and jobs of each port's node; None: no steps are known.

    Attributes:
        state: State of the label at each sample, shape (samples,).
        node, job: Code of each sample's node and job, -1 for none; `node_names` and `job_ids` name them.

    Raises:
        ValueError: A key column is absent.
    """

    def __init__(
        self, bottleneck_class: str, samples: pl.DataFrame, book: ThresholdBook, gpus: SampleHistory | None = None
    ) -> None:
        kind = KINDS[bottleneck_class]
        missing = [name for name in ("ts", kind.keys[0]) if name not in samples.columns]
        if missing:
            raise ValueError(f"samples of {kind.scope}s lack {', '.join(missing)}; they have {samples.columns}")
        self.bottleneck_class = bottleneck_class
        if bottleneck_class == "fabric_congestion":
            series, frame = port_series(samples)
            ratio, _ = node_steps(series, gpus)
            frame = frame.with_columns(pl.Series("step_ratio", ratio))
            self.state, series = fabric_states(series, frame, book, gpus)
        else:
            rule = shortage_states if bottleneck_class == "shortage" else lambda rows: host_states(rows, book)
            series, self.state = rule(samples)
            key = kind.keys[0]
            frame = samples.drop_nulls(["ts", key]).unique([key, "ts"], keep="last").sort(key, "ts")
        self.uuids, self.gpu, self.ts = series.names, series.gpu, series.ts
        self.cluster = series.cluster
        self.node_names = sorted({name for name in series.nodes if name is not None})
        codes = {name: code for code, name in enumerate(self.node_names)}
        of_unit = np.array([codes.get(name or "", -1) for name in series.nodes], dtype=np.int64)
        self.node = of_unit[self.gpu] if len(of_unit) else np.zeros(0, dtype=np.int64)
        self.job_ids = sorted({job for job in series.jobs if job is not None})
        codes = {name: code for code, name in enumerate(self.job_ids)}
        self.job = np.array([codes.get(job or "", -1) for job in series.jobs], dtype=np.int64)
        self._index()
        self._memory = np.zeros((len(self.ts) if bottleneck_class == "shortage" else 0, len(MEMORY)), dtype=np.float32)
        self._fill(unit_inputs(bottleneck_class, frame), book, series.nodes)

    def _fill(self, columns: dict[str, NDArray[np.float64]], book: ThresholdBook, nodes: list[str | None]) -> None:
        """Quantities in the order of time, since what things are used to runs along."""
        kind = KINDS[self.bottleneck_class]
        self.values = np.full((len(kind.quantities), len(self.ts)), np.nan, dtype=np.float32)
        limits = book.arrays([name or "" for name in nodes])
        state, memory = UnitState(kind.usuals, len(self.uuids)), QueueMemory(len(self.uuids))
        rank = np.arange(len(self.ts)) - self.starts[:-1][self.gpu]
        order = np.argsort(rank, kind="stable")
        bounds = np.searchsorted(rank[order], np.arange(int(rank.max(initial=-1)) + 2))
        for first, last in pairwise(bounds.tolist()):
            rows = order[first:last]
            unit, ts = self.gpu[rows], self.ts[rows]
            self.values[:, rows] = unit_quantities(
                self.bottleneck_class, {name: values[rows] for name, values in columns.items()},
                {name: values[unit] for name, values in limits.items()}, state, unit, ts,
            )  # fmt: skip
            if len(self._memory):
                pending, idle, running = (values[rows] for values in columns.values())
                memory.update(unit, ts, pending, idle, running)
                self._memory[rows] = memory.features(unit, ts, pending, idle)

    def distance(self, bottleneck_class: str) -> NDArray[np.float32]:
        """Distance of every sample to the limit, shape (samples,), by what its thing was used to until then."""
        self._check(bottleneck_class)
        return self.values[0]

    def screened(self, bottleneck_class: str) -> NDArray[np.bool_]:
        """Which samples the screen would have picked when they were the newest, shape (samples,)."""
        self._check(bottleneck_class)
        ago = self.minute_ago
        has, distance = ago >= 0, self.values[0]
        earlier = np.where(has, distance[ago], np.nan).astype(np.float32)
        return unit_screen(bottleneck_class, distance, earlier, np.where(has, self.ts - self.ts[ago], np.nan))

    def features(self, gpu: Ints, at_s: NDArray[np.float64], bottleneck_class: str) -> FeatureBlock:
        """Features of things at moments.

        Args:
            gpu: Codes of things, shape (rows,).
            at_s: Moments, seconds, shape (rows,).
            bottleneck_class: The class of this history.
        """
        self._check(bottleneck_class)
        at_s = np.asarray(at_s, dtype=np.float64)
        last = self.last_at(gpu, at_s)
        out = np.full((len(gpu), len(UNIT_FEATURES[bottleneck_class])), np.nan, dtype=np.float32)
        for first in range(0, len(gpu), _CHUNK):
            part = slice(first, first + _CHUNK)
            values, ts, is_even = self.windows(gpu[part], last[part])
            ages = (at_s[part, None] - ts).astype(np.float32)
            memory = None
            if len(self._memory):
                memory = np.where((last[part] >= 0)[:, None], self._memory[last[part]], np.float32(np.nan))
            out[part] = unit_features(bottleneck_class, values, ages, is_even, memory)
        return unit_block(bottleneck_class, gpu, at_s, out)

    def _check(self, bottleneck_class: str) -> None:
        if bottleneck_class != self.bottleneck_class:
            raise ValueError(f"this history is of {self.bottleneck_class}, not of {bottleneck_class!r}")
