"""The same windows over recorded samples: what a ring would have said at past moments, all at once.

Here belongs gathering from a sorted table; the arithmetic stands in `features/windows.py`, the live rings in
`features/ring.py`, whose cells of time say which samples a window holds. Nothing later than the asked moment enters a
row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.conditions import CLASSES, DISTANCE, INDEX, LABEL_FLAGS, QUANTITIES, JobState, inputs, quantities
from features.peers import PEERS, Neighbours, peer_features
from features.ports import PortCourse
from features.ring import FAR_CELLS, NEAR_CELLS, PACE_CELLS, Windows, far_cell, near_cell
from features.roster import rack_codes
from features.thresholds import ThresholdBook
from features.windows import FEATURES, FeatureBlock, screen, window_features

Ints = NDArray[np.int64]

_CHUNK = 4_096


class SampleHistory:
    """Recorded samples, sorted by GPU and time, with the quantities of `features/conditions.py` beside them.

    Args:
        samples: `core_gpu_samples` rows in any order; rows without time, node or GPU are left out, as are repeats.
        book: Limits of the nodes.
        node_samples: `core_node_samples` rows, for inlet temperatures.
        stale_s: A GPU whose newest sample is older than this at a moment is no peer then.
        racks: Rack of each node, where it is known.
        port_samples: `core_port_samples` rows, for the ports of nodes.

    Attributes:
        uuids: GPU of each code.
        gpu: Code of each sample's GPU, shape (samples,), ascending.
        ts: Times, seconds, ascending within a GPU.
        values: Shape (len(QUANTITIES), samples).
        flags: `LABEL_FLAGS`, NaN where null or absent, shape (samples,) each.
        job: Job code of each sample, -1 for none; `job_ids` names them.
        node: Node code of each sample; `node_names` names them.
        rack: Code of the rack of each node code, -1 where it is not known.
        since: Since when the sample's job has been on the GPU, seconds.
        interval_s: Median time between samples of a GPU.
    """

    def __init__(
        self,
        samples: pl.DataFrame,
        book: ThresholdBook,
        *,
        node_samples: pl.DataFrame | None = None,
        stale_s: float = 45.0,
        racks: Mapping[str, str | None] | None = None,
        port_samples: pl.DataFrame | None = None,
    ) -> None:
        missing = [name for name in ("ts", "node", "gpu_uuid") if name not in samples.columns]
        if missing:
            raise ValueError(f"samples lack {', '.join(missing)}; they have {', '.join(samples.columns)}")
        self.stale_s = stale_s
        frame = samples.drop_nulls(["ts", "node", "gpu_uuid"])
        if "job_id" not in frame.columns or frame["job_id"].dtype == pl.Null:
            frame = frame.with_columns(pl.lit(None, dtype=pl.String).alias("job_id"))
        frame = _with_inlet(frame, node_samples).unique(["gpu_uuid", "ts"], keep="last").sort("gpu_uuid", "ts")
        self.uuids, self.gpu = _codes(frame["gpu_uuid"])
        self.node_names, self.node = _codes(frame["node"])
        self.job_ids, self.job = _codes(frame["job_id"])
        self.cluster = frame["cluster"][0] if "cluster" in frame.columns and frame.height else ""
        self.rack = rack_codes(self.node_names, racks or {})
        self._ports = PortCourse(port_samples, self.node_names)
        self.ts = frame["ts"].dt.epoch("us").to_numpy() / 1e6
        self.starts = np.searchsorted(self.gpu, np.arange(len(self.uuids) + 1))
        gaps = np.diff(self.ts)[np.diff(self.gpu) == 0] if len(self.ts) > 1 else np.zeros(0)
        self.interval_s = float(np.median(gaps)) if len(gaps) else 15.0
        self._base = float(self.ts.min()) if len(self.ts) else 0.0
        self._span = (float(self.ts.max()) - self._base + 1.0) * 2 if len(self.ts) else 1.0
        self._keys = self.gpu * self._span + (self.ts - self._base)
        self._near = _Cells(self.gpu, near_cell(self.ts))
        self._far = _Cells(self.gpu, far_cell(self.ts))
        columns = inputs(frame)
        absent = np.full(frame.height, np.nan, dtype=np.float32)
        self.flags = {
            name: frame[name].cast(pl.Float32).to_numpy(writable=False) if name in frame.columns else absent
            for name in LABEL_FLAGS
        }
        del frame
        limits = book.arrays(self.node_names)
        self.values = np.full((len(QUANTITIES), len(self.ts)), np.nan, dtype=np.float32)
        self.since = np.full(len(self.ts), np.nan)
        self._fill(columns, limits)

    def _fill(self, columns: dict[str, NDArray[np.float32]], limits: dict[str, NDArray[np.float32]]) -> None:
        """Quantities in the order of time: the k-th samples of all GPUs together, since job state runs along."""
        state = JobState(len(self.uuids))
        rank = np.arange(len(self.ts)) - self.starts[:-1][self.gpu]
        order = np.argsort(rank, kind="stable")
        bounds = np.searchsorted(rank[order], np.arange(int(rank.max(initial=-1)) + 2))
        for first, last in pairwise(bounds.tolist()):
            rows = order[first:last]
            node = self.node[rows]
            self.values[:, rows], self.since[rows] = quantities(
                {name: values[rows] for name, values in columns.items()},
                {name: values[node] for name, values in limits.items()},
                state, self.gpu[rows], self.ts[rows], self.job[rows],
            )  # fmt: skip

    def gpu_codes(self, uuids: pl.Series) -> NDArray[np.int64]:
        """Codes of GPUs by UUID.

        Raises:
            ValueError: There is no sample of one of them; the message names it.
        """
        known = {name: i for i, name in enumerate(self.uuids)}
        unknown = sorted(set(uuids.to_list()) - set(known))
        if unknown:
            raise ValueError(f"no samples of GPU {unknown[0]!r} ({len(unknown)} such GPUs)")
        return np.array([known[name] for name in uuids.to_list()], dtype=np.int64)

    def distance(self, bottleneck_class: str) -> NDArray[np.float32]:
        """Distance of every sample to the limit of a class, shape (samples,)."""
        return self.values[INDEX[DISTANCE[bottleneck_class]]]

    def last_at(self, gpu: NDArray[np.int64], at_s: NDArray[np.float64]) -> NDArray[np.int64]:
        """Row of the newest sample of a GPU at or before a moment, -1 where there is none."""
        clipped = np.clip(at_s - self._base, -1.0, self._span / 2)
        row = np.searchsorted(self._keys, gpu * self._span + clipped, side="right") - 1
        return np.where(row >= self.starts[gpu], row, -1)

    def screened(self, bottleneck_class: str) -> NDArray[np.bool_]:
        """Which samples the screen would have picked when they were the newest, shape (samples,)."""
        distance, ago = self.distance(bottleneck_class), self._minute_ago
        has = ago >= 0
        return screen(
            bottleneck_class,
            distance,
            np.where(has, distance[ago], np.nan).astype(np.float32),
            np.where(has, self.ts - self.ts[ago], np.nan),
            self.values[INDEX["over_plateau_gib"]],
            self.values[INDEX["step_ratio"]],
        )

    @cached_property
    def _minute_ago(self) -> Ints:
        """Row of the sample of about a minute before each, -1 where there is none; as `Ring.minute_ago`."""
        cells = self._far
        rank = np.full(max(PACE_CELLS) + 2, len(PACE_CELLS))
        rank[list(PACE_CELLS)] = np.arange(len(PACE_CELLS))
        out, best = np.full(len(self.ts), -1), np.full(len(self.ts), len(PACE_CELLS))
        for back in range(1, max(PACE_CELLS) + 1):
            row = cells.row_before(cells.before, back)
            gap = np.where((row >= 0) & (self.gpu[row] == self.gpu), cells.cell - cells.cell[row], len(rank))
            found = rank[np.minimum(gap, len(rank) - 1)]
            better = found < best
            out[better], best[better] = row[better], found[better]
        return out

    def windows(self, gpu: Ints, last: Ints) -> Windows:
        """Windows that end with given samples: those that a ring holds when they are the newest.

        Args:
            gpu: GPU codes, shape (rows,).
            last: Row of each one's newest sample, -1 for none.
        """
        newest = np.maximum(last, 0)
        near, far = self._near, self._far
        far_rows = far.row_before(far.before[newest, None], np.arange(FAR_CELLS - 1, 0, -1))
        near_rows = near.row_before(near.before[newest, None], np.arange(NEAR_CELLS - 1, 0, -1))
        begin = near.cell[newest, None] - NEAR_CELLS
        in_far = (near.cell[far_rows] <= begin) & (far.cell[far_rows] > far.cell[newest, None] - FAR_CELLS)
        in_near = near.cell[near_rows] > begin
        rows = np.concatenate((far_rows, near_rows, newest[:, None]), axis=1)
        inside = np.concatenate((in_far, in_near, np.ones((len(last), 1), dtype=bool)), axis=1)
        inside &= (rows >= self.starts[gpu, None]) & (last >= 0)[:, None]
        rows = np.where(inside, rows, 0)
        is_even = inside & far.is_end[rows]
        is_even[:, -1] = inside[:, -1]
        values = np.where(inside, self.values[:, rows], np.float32(np.nan))
        return Windows(values, np.where(inside, self.ts[rows], np.nan), is_even)

    def features(self, gpu: NDArray[np.int64], at_s: NDArray[np.float64], bottleneck_class: str) -> FeatureBlock:
        """Features of GPUs at moments.

        Args:
            gpu: GPU codes, shape (rows,).
            at_s: Moments, seconds, shape (rows,).
            bottleneck_class: The class.
        """
        at_s = np.asarray(at_s, dtype=np.float64)
        last = self.last_at(gpu, at_s)
        ports = self._ports.at(self.node[last], at_s, self.stale_s)
        ports[last < 0] = np.nan
        around = np.concatenate((self._peers(gpu, at_s, bottleneck_class), ports), axis=1)
        out = np.full((len(gpu), len(FEATURES)), np.nan, dtype=np.float32)
        for first in range(0, len(gpu), _CHUNK):
            part = slice(first, first + _CHUNK)
            values, ts, is_even = self.windows(gpu[part], last[part])
            ages = (at_s[part, None] - ts).astype(np.float32)
            job_age = np.where(last[part] >= 0, at_s[part] - self.since[last[part]], np.nan)
            out[part] = window_features(bottleneck_class, values, ages, is_even, job_age, around[part])
        return FeatureBlock(bottleneck_class, gpu, at_s, out)

    def _peers(self, gpu: NDArray[np.int64], at_s: NDArray[np.float64], bottleneck_class: str) -> NDArray[np.float32]:
        distance, temp = self.distance(bottleneck_class), self.values[INDEX["gpu_temp_c"]]
        everyone = np.arange(len(self.uuids))
        moments, moment_of_row = np.unique(at_s, return_inverse=True)
        order = np.argsort(moment_of_row, kind="stable")
        bounds = np.searchsorted(moment_of_row[order], np.arange(len(moments) + 1))
        parts = [np.zeros((0, len(PEERS)), dtype=np.float32)]
        for i, moment in enumerate(moments):
            rows = order[bounds[i] : bounds[i + 1]]
            last = self.last_at(everyone, np.full(len(everyone), moment))
            fresh = (last >= 0) & (moment - self.ts[last] <= self.stale_s)
            node = self.node[last]
            of = Neighbours(
                np.where(last >= 0, distance[last], np.nan).astype(np.float32),
                np.where(last >= 0, temp[last], np.nan).astype(np.float32),
                fresh, np.where(last >= 0, self.job[last], -1), node, self.rack[node],
            )  # fmt: skip
            parts.append(peer_features(bottleneck_class, of, gpu[rows]))
        out = np.empty((len(gpu), len(PEERS)), dtype=np.float32)
        out[order] = np.concatenate(parts)
        return out


class _Cells:
    """Samples by cells of time.

    Attributes:
        cell: Number of each sample's cell.
        is_end: Samples that are the newest of their cell and GPU.
        before: How many such there are before each sample.
    """

    def __init__(self, gpu: Ints, cell: Ints) -> None:
        self.cell = cell
        self.is_end = np.ones(len(cell), dtype=bool)
        if len(cell):
            self.is_end[:-1] = (np.diff(gpu) != 0) | (np.diff(cell) != 0)
        self._ends = np.flatnonzero(self.is_end)
        self.before = np.cumsum(self.is_end) - self.is_end

    def row_before(self, before: Ints, back: Ints | int) -> Ints:
        """Row of the newest sample of the cell so many filled cells back, -1 before the first of all."""
        place = before - back
        return np.where(place >= 0, self._ends[np.maximum(place, 0)], -1)


def history_features(
    samples: pl.DataFrame,
    *,
    at: pl.DataFrame,
    bottleneck_class: str,
    book: ThresholdBook,
    nodes: pl.DataFrame | None = None,
    racks: Mapping[str, str | None] | None = None,
    ports: pl.DataFrame | None = None,
    stale_s: float = 45.0,
) -> FeatureBlock:
    """Features of GPUs at past moments, the numbers a ring would have given then.

    Args:
        samples: `core_gpu_samples` rows.
        at: `gpu_uuid` and `at` (UTC) of each wanted row.
        bottleneck_class: One of `CLASSES`.
        book: Limits of the nodes.
        nodes: `core_node_samples` rows, for inlet temperatures.
        racks: Rack of each node, where it is known.
        ports: `core_port_samples` rows, for the ports of nodes.
        stale_s: As of `RingWindow`.

    Returns:
        One row per row of `at`, in its order; all NaN where the GPU had no sample yet.

    Raises:
        ValueError: The class is unknown.
    """
    if bottleneck_class not in CLASSES:
        raise ValueError(f"no bottleneck class {bottleneck_class!r}; classes: {', '.join(CLASSES)}")
    history = SampleHistory(samples, book, node_samples=nodes, stale_s=stale_s, racks=racks, port_samples=ports)
    return history.features(
        history.gpu_codes(at["gpu_uuid"]), at["at"].dt.epoch("us").to_numpy() / 1e6, bottleneck_class
    )


def _codes(series: pl.Series) -> tuple[list[str], NDArray[np.int64]]:
    """Sorted distinct names and the code of each row, -1 for null."""
    names = sorted(series.drop_nulls().unique().to_list())
    if not names:
        return [], np.full(len(series), -1, dtype=np.int64)
    codes = series.replace_strict(names, list(range(len(names))), default=-1, return_dtype=pl.Int64)
    return names, codes.fill_null(-1).to_numpy().astype(np.int64)


def _with_inlet(frame: pl.DataFrame, node_samples: pl.DataFrame | None) -> pl.DataFrame:
    if node_samples is None or "inlet_temp_c" not in node_samples.columns or "inlet_temp_c" in frame.columns:
        return frame
    inlet = node_samples.select("ts", "node", "inlet_temp_c").drop_nulls().sort("ts")
    return frame.sort("ts").join_asof(inlet, on="ts", by="node", strategy="backward", check_sortedness=False)
