"""The same windows over recorded samples: what a ring would have said at past moments, all at once.

Here belong the quantities and neighbours of GPUs over history; which samples a window holds stands in
`features/cell_history.py`, the arithmetic in `features/windows.py`. Nothing later than the asked moment enters a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.cell_history import CellHistory
from features.conditions import CLASSES, DISTANCE, INDEX, QUANTITIES, inputs, quantities
from features.gangs import Gangs, rank_steps
from features.job_state import JobState
from features.peers import PEERS, Neighbours, peer_features
from features.ports import PortCourse
from features.roster import rack_codes
from features.thresholds import ThresholdBook
from features.windows import FEATURES, FeatureBlock, screen, window_features

Ints = NDArray[np.int64]

_CHUNK = 4_096


class SampleHistory(CellHistory):
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
        self._index()
        columns = inputs(frame)
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
        step, gang = rank_steps(columns, self.job)
        gang_step = Gangs(len(self.uuids)).medians(self.gpu, self.ts, gang, step)
        for first, last in pairwise(bounds.tolist()):
            rows = order[first:last]
            node = self.node[rows]
            self.values[:, rows], self.since[rows] = quantities(
                {name: values[rows] for name, values in columns.items()},
                {name: values[node] for name, values in limits.items()},
                state, self.gpu[rows], self.ts[rows], self.job[rows], gang_step[rows],
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

    def screened(self, bottleneck_class: str) -> NDArray[np.bool_]:
        """Which samples the screen would have picked when they were the newest, shape (samples,)."""
        distance, ago = self.distance(bottleneck_class), self.minute_ago
        has = ago >= 0
        return screen(
            bottleneck_class,
            distance,
            np.where(has, distance[ago], np.nan).astype(np.float32),
            np.where(has, self.ts - self.ts[ago], np.nan),
            self.values[INDEX["over_plateau_gib"]],
            self.values[INDEX["step_ratio"]],
        )

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
