"""Windows of the newest samples of every GPU of a cluster, in memory: rings that the nowcast reads.

Here belongs the live side: taking in frames and gathering windows of the GPUs that a screen picked. The arithmetic on
windows stands in `features/windows.py`; the same windows over history in `features/history.py`. No input or output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.cleaning_bounds import bounded
from features.cleaning_live import Courses, Revision, course_inputs
from features.conditions import CLASSES, DISTANCE, INDEX, QUANTITIES, JobState, inputs, quantities
from features.history import SampleHistory
from features.thresholds import ThresholdBook
from features.windows import FEATURES, SLOTS, FeatureBlock, pace_steps, peer_features, screen, window_features

_CHUNK = 8_192  # rows gathered at a time: 8,192 × 12 × 40 × 4 bytes stay near the cache
_MIN_CAPACITY = 1_024
_AHEAD_S = 5.0  # a clock that runs ahead by less than this makes a sample new, not wrong
# Quantities that fall with what a later sample refutes: step times and inlets are not the GPU's exporter's.
_REFUTED = {
    "frozen": tuple(name for name in QUANTITIES if name not in ("step_ratio", "inlet_temp_c")),
    "stuck": (),
    "zero_under_load": ("nvlink_fill_ratio", "nvlink_distance_ratio"),
    "first_of_rate": ("nvlink_fill_ratio", "nvlink_distance_ratio"),
}
FORGET_S = 3_600.0  # a GPU that has been silent for this long gives its place up


class RingWindow:
    """The last samples of every GPU: float32 rings of shape (quantity, gpu, slot) and their times.

    A GPU gets an index when it is first seen and keeps it until `forget`. Samples that are not newer than the last one
    of their GPU are dropped, so that a source may be asked twice for the same minute. A GPU that turns up on another
    node begins anew there.

    Args:
        book: Limits of the nodes.
        stale_s: A GPU whose newest sample is older than this counts nowhere.
        slots: Samples kept per GPU.
        courses: Judges each sample by those before it, as ingest does; None: samples are believed as they come.

    Attributes:
        count: GPUs there are; their indices are 0 … count - 1.
        ahead: Samples of the last `observe` that were dropped because they lay in the future.
    """

    def __init__(
        self, book: ThresholdBook, *, stale_s: float = 45.0, slots: int = SLOTS, courses: Courses | None = None
    ) -> None:
        self.book = book
        self.courses = courses
        self.stale_s = stale_s
        self.slots = slots
        self.count = 0
        self.ahead = 0
        self.uuids: list[str] = []
        self.nodes: list[str] = []
        self.node_names: list[str] = []
        self.gpu_index = np.zeros(0, dtype=np.int32)
        self.node = np.zeros(0, dtype=np.int64)
        self.job = np.zeros(0, dtype=np.int64)
        self.since = np.zeros(0)
        self.last_ts = np.zeros(0)
        self.latest = np.zeros((len(QUANTITIES), 0), dtype=np.float32)
        self.job_ids: list[str] = []
        self._interval_s = 15.0
        self._values = np.zeros((len(QUANTITIES), 0, slots), dtype=np.float32)
        self._ts = np.zeros((0, slots))
        self._util = np.zeros((0, slots if courses is not None else 0), dtype=np.float32)
        self._head = np.zeros(0, dtype=np.int64)
        self._limits: dict[str, NDArray[np.float32]] = book.arrays([])
        self._state = JobState()
        self._index: dict[str, int] = {}
        self._node_codes: dict[str, int] = {}
        self._node_sizes: dict[str, int] = {}
        self._job_codes: dict[str, int] = {}
        self._inlet: dict[str, float] = {}
        self._seen_keys: tuple[pl.Series, pl.Series, NDArray[np.int64], NDArray[np.int64]] | None = None
        self._seen_jobs: tuple[pl.Series, NDArray[np.int64]] | None = None

    # --- taking in ------------------------------------------------------------------------------------------

    def observe(
        self,
        gpu: pl.DataFrame,
        node: pl.DataFrame | None = None,
        job_by_node: Mapping | None = None,
        *,
        now_s: float | None = None,
    ) -> int:
        """Take in samples.

        Args:
            gpu: Rows of `core_gpu_samples` columns, any number per GPU, in any order.
            node: Rows of `core_node_samples` columns; the newest inlet temperature of a node goes with its GPUs.
            job_by_node: Job of a node, for samples that do not name one.
            now_s: The moment of the reading, seconds since 1970. Samples later than it by more than 5 s are dropped,
                and what is there from a later moment (the clock was set back) does not count. None: history, of which
                nothing is too late.

        Returns:
            Number of samples that were newer than what was there.

        Raises:
            ValueError: `ts`, `node` or `gpu_uuid` is absent; the message names it.
        """
        missing = [name for name in ("ts", "node", "gpu_uuid") if name not in gpu.columns]
        if missing:
            raise ValueError(f"samples lack {', '.join(missing)}; they have {', '.join(gpu.columns)}")
        self.ahead = 0
        if node is not None and node.height and {"node", "inlet_temp_c"} <= set(node.columns):
            newest = _until(node, now_s).sort("ts") if "ts" in node.columns else node
            newest = bounded(newest.select("node", "inlet_temp_c"), ("inlet_temp_c",), [])
            self._inlet.update(newest.drop_nulls().iter_rows())
        gpu = gpu.filter(pl.col("ts").is_not_null() & pl.col("gpu_uuid").is_not_null() & pl.col("node").is_not_null())
        told = gpu.height
        gpu = _until(gpu, now_s)
        self.ahead = told - gpu.height
        if not gpu.height:
            return 0
        if gpu["gpu_uuid"].n_unique() == gpu.height:
            return self._observe(gpu, job_by_node, now_s)
        gpu = gpu.sort("ts").with_columns(pl.int_range(pl.len()).over("gpu_uuid").alias("_rank"))
        parts = gpu.partition_by("_rank", maintain_order=True, include_key=False)
        return sum(self._observe(part, job_by_node, now_s) for part in parts)

    def _observe(self, frame: pl.DataFrame, job_by_node: Mapping | None, now_s: float | None) -> int:
        index, host = self._indices(frame)
        if now_s is not None:
            self._clear(index[self.last_ts[index] > now_s + _AHEAD_S])
        ts = frame["ts"].dt.epoch("us").to_numpy() / 1e6
        job = self._jobs(frame, job_by_node)
        columns = inputs(frame)
        if self._inlet and "inlet_temp_c" not in frame.columns:
            by_code = np.array([self._inlet.get(name, np.nan) for name in self.node_names], dtype=np.float32)
            columns["inlet_temp_c"] = by_code[host]
        if self.courses is not None:
            columns |= course_inputs(frame, columns)
        newer = ~(ts <= self.last_ts[index])  # NaN: never seen
        if not newer.all():
            index, host, ts, job = index[newer], host[newer], ts[newer], job[newer]
            columns = {name: values[newer] for name, values in columns.items()}
        if not len(index):
            return 0
        moved = host != self.node[index]
        if moved.any():
            self._move(index[moved], host[moved])
        gaps = ts - self.last_ts[index]
        if np.isfinite(gaps).any():
            self._interval_s = float(np.nanmedian(gaps))
        self.job[index] = job
        util = columns["gpu_util_ratio"]
        if self.courses is not None:
            alone = self._alone(job)
            for revision in self.courses.judge(index, ts, self.last_ts[index], columns, alone):
                self._revise(revision)
        limits = {name: values[index] for name, values in self._limits.items()}
        values, since = quantities(columns, limits, self._state, index, ts, job)
        slot = self._head[index]
        for q in range(len(QUANTITIES)):
            self._values[q, index, slot] = values[q]
            self.latest[q, index] = values[q]
        self._ts[index, slot] = ts
        if self.courses is not None:
            self._util[index, slot] = util
        self._head[index] = (slot + 1) % self.slots
        self.last_ts[index], self.since[index] = ts, since
        if "gpu_index" in frame.columns and frame["gpu_index"].null_count() == 0:
            wanted = frame["gpu_index"].to_numpy()
            self.gpu_index[index] = wanted if newer.all() else wanted[newer]
        return len(index)

    def _alone(self, job: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows are of jobs that have one GPU."""
        gpus = np.bincount(self.job[: self.count] + 1)
        return (job >= 0) & (gpus[job + 1] == 1)

    def _revise(self, revision: Revision) -> None:
        """Take back what later samples refute, as if it had never been measured."""
        gpus, since, until = revision.gpus, revision.since_s, revision.until_s
        names = _REFUTED[revision.reason]
        for step in range(self.slots):
            slot = (self._head[gpus] - 1 - step) % self.slots
            ts = self._ts[gpus, slot]
            earlier = ts >= since
            meant = earlier & (ts <= until)
            g, k = gpus[meant], slot[meant]
            for name in names:
                self._values[INDEX[name], g, k] = np.nan
            if revision.reason == "stuck":  # then utilisation tells how active a GPU was
                idle = self._values[INDEX["activity_ratio"], g, k] == 0
                self._values[INDEX["activity_ratio"], g[idle], k[idle]] = self._util[g[idle], k[idle]]
            if not earlier.all():
                gpus, since, until = gpus[earlier], since[earlier], until[earlier]
            if not len(gpus):
                break
        if revision.reason == "frozen":  # a plateau that was found meanwhile is none
            state = self._state
            none = revision.gpus[state.found[revision.gpus] >= revision.since_s]
            state.plateau[none], state.found[none], state.settling_since[none] = np.nan, np.nan, np.nan

    def _indices(self, frame: pl.DataFrame) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Index of the GPU and code of the node of each row."""
        keys, hosts = frame["gpu_uuid"], frame["node"]
        seen = self._seen_keys
        if seen is not None and seen[0].equals(keys) and seen[1].equals(hosts):
            return seen[2], seen[3]
        known, codes = self._index, self._node_codes
        names, places = keys.to_list(), hosts.to_list()
        for host in places:
            if host not in codes:
                codes[host] = len(self.node_names)
                self.node_names.append(host)
        fresh = [(name, host) for name, host in zip(names, places, strict=True) if name not in known]
        if fresh:
            self._add(fresh)
        index = np.fromiter((known[name] for name in names), dtype=np.int64, count=len(names))
        host = np.fromiter((codes[name] for name in places), dtype=np.int64, count=len(places))
        self._seen_keys = (keys, hosts, index, host)
        return index, host

    def _add(self, fresh: list[tuple[str, str]]) -> None:
        for name, host in fresh:
            self._index[name] = len(self.uuids)
            self.uuids.append(name)
            self.nodes.append(host)
            self._node_sizes[host] = self._node_sizes.get(host, 0) + 1
        self.count = len(self.uuids)
        self._grow(self.count)
        old = self.count - len(fresh)
        self.node[old : self.count] = [self._node_codes[host] for _, host in fresh]
        for name, values in self.book.arrays([host for _, host in fresh]).items():
            self._limits[name][old : self.count] = values

    def _move(self, index: NDArray[np.int64], host: NDArray[np.int64]) -> None:
        """GPUs turned up on other nodes: theirs are the limits there, and nothing that was measured elsewhere."""
        names = [self.node_names[code] for code in host]
        for gpu, name in zip(index.tolist(), names, strict=True):
            self._node_sizes[self.nodes[gpu]] -= 1
            self._node_sizes[name] = self._node_sizes.get(name, 0) + 1
            self.nodes[gpu] = name
        self.node[index] = host
        for name, values in self.book.arrays(names).items():
            self._limits[name][index] = values
        self._clear(index)

    def _clear(self, index: NDArray[np.int64]) -> None:
        """Take GPUs for never seen."""
        if not len(index):
            return
        self._values[:, index], self.latest[:, index] = np.nan, np.nan
        self._ts[index], self.last_ts[index], self.since[index] = np.nan, np.nan, np.nan
        self.gpu_index[index] = 0
        self._head[index], self.job[index], self._state.job[index] = 0, -1, -2  # -2: a job begins with the next sample

    def forget(self, now_s: float, after_s: float = FORGET_S) -> int:
        """Give up the places of GPUs that have been silent, and with them nodes and jobs that nothing refers to.

        Indices change: none taken before is valid after a return above 0.

        Args:
            now_s: The moment, seconds since 1970.
            after_s: Silence after which a GPU is forgotten.

        Returns:
            Number of GPUs forgotten.
        """
        keep = np.flatnonzero(self.age_s(now_s) <= after_s)
        had, have = self.count, len(keep)
        if have == had:
            return 0
        for array in self._arrays():
            array[:have] = array[keep]
        for q in range(len(QUANTITIES)):  # one at a time: the rings of a large cluster do not fit twice
            self._values[q, :have] = self._values[q, keep]
            self.latest[q, :have] = self.latest[q, keep]
        self.uuids = [self.uuids[gpu] for gpu in keep]
        self.nodes = [self.nodes[gpu] for gpu in keep]
        self.count = have
        self._index = {name: gpu for gpu, name in enumerate(self.uuids)}
        self._clear(np.arange(have, had))
        self.node_names = sorted(set(self.nodes))
        self._node_codes = {name: code for code, name in enumerate(self.node_names)}
        self.node[:have] = [self._node_codes[name] for name in self.nodes]
        self._node_sizes = dict(Counter(self.nodes))
        self._inlet = {name: value for name, value in self._inlet.items() if name in self._node_codes}
        codes = np.unique(self.job[:have])
        codes = codes[codes >= 0]
        self.job_ids = [self.job_ids[code] for code in codes]
        self._job_codes = {name: code for code, name in enumerate(self.job_ids)}
        for jobs in (self.job[:have], self._state.job[:have]):
            known = jobs >= 0
            jobs[known] = np.searchsorted(codes, jobs[known])
        self._seen_keys = self._seen_jobs = None
        return had - have

    def _arrays(self) -> list[NDArray]:
        """All that is kept per GPU along the first axis."""
        mine = (self.gpu_index, self.node, self.job, self.since, self.last_ts, self._ts, self._util, self._head)
        courses = self.courses.arrays() if self.courses is not None else []
        return [*mine, *self._limits.values(), *vars(self._state).values(), *courses]

    def _grow(self, wanted: int) -> None:
        have = len(self.node)
        if wanted <= have:
            return
        size = max(_MIN_CAPACITY, wanted + wanted // 8)

        def wider(array: NDArray, fill: float, axis: int = 0) -> NDArray:
            shape = list(array.shape)
            shape[axis] = size
            out = np.full(shape, fill, dtype=array.dtype)
            out[(slice(None),) * axis + (slice(0, have),)] = array
            return out

        self.gpu_index, self.node = wider(self.gpu_index, 0), wider(self.node, 0)
        self.job = wider(self.job, -1)
        self.since, self.last_ts = wider(self.since, np.nan), wider(self.last_ts, np.nan)
        self.latest = wider(self.latest, np.nan, 1)
        self._values, self._ts = wider(self._values, np.nan, 1), wider(self._ts, np.nan)
        self._util = wider(self._util, np.nan)
        self._head = wider(self._head, 0)
        self._limits = {name: wider(values, np.nan) for name, values in self._limits.items()}
        self._state.grow(size)
        if self.courses is not None:
            self.courses.grow(size)

    def _jobs(self, frame: pl.DataFrame, job_by_node: Mapping | None) -> NDArray[np.int64]:
        if "job_id" not in frame.columns or frame["job_id"].dtype == pl.Null:
            ids = pl.Series("job_id", [None], dtype=pl.String).new_from_index(0, frame.height)
        else:
            ids = frame["job_id"]
        if job_by_node and ids.null_count():
            by_node = frame["node"].replace_strict(dict(job_by_node), default=None, return_dtype=pl.String)
            ids = ids.zip_with(ids.is_not_null(), by_node)
        if self._seen_jobs is not None and self._seen_jobs[0].equals(ids, null_equal=True):
            return self._seen_jobs[1]
        for name in ids.unique().drop_nulls().to_list():
            if name not in self._job_codes:
                self._job_codes[name] = len(self.job_ids)
                self.job_ids.append(name)
        codes = ids.replace_strict(self._job_codes, default=-1, return_dtype=pl.Int64) if self._job_codes else None
        out = np.full(len(ids), -1, dtype=np.int64) if codes is None else codes.fill_null(-1).to_numpy()
        self._seen_jobs = (ids, out)
        return out

    def set_book(self, book: ThresholdBook) -> None:
        """Take new limits, as when the inventory has changed."""
        self.book = book
        for name, values in book.arrays(self.nodes).items():
            self._limits[name][: self.count] = values

    # --- reading --------------------------------------------------------------------------------------------

    def age_s(self, now_s: float) -> NDArray[np.float64]:
        """Age of the newest sample of each GPU at a moment, shape (count,)."""
        return now_s - self.last_ts[: self.count]

    def is_fresh(self, now_s: float) -> NDArray[np.bool_]:
        """Which GPUs have a sample that is neither stale nor from the future, shape (count,)."""
        age = self.age_s(now_s)
        return (age <= self.stale_s) & (age >= -self.stale_s)

    def distance(self, bottleneck_class: str) -> NDArray[np.float32]:
        """Newest distance of each GPU to the limit of a class, shape (count,)."""
        return self.latest[INDEX[DISTANCE[bottleneck_class]], : self.count]

    def is_set(self, bottleneck_class: str) -> NDArray[np.bool_]:
        """Where the condition held in the newest two samples of a GPU, shape (count,)."""
        now = self.distance(bottleneck_class) <= 0
        before, _ = self._back(bottleneck_class, 1)
        with np.errstate(invalid="ignore"):
            return now & (before <= 0)

    def _back(self, bottleneck_class: str, steps: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        rows = np.arange(self.count)
        slot = (self._head[: self.count] - 1 - steps) % self.slots
        return self._values[INDEX[DISTANCE[bottleneck_class]], rows, slot], self._ts[rows, slot]

    def screened(self, bottleneck_class: str, now_s: float) -> NDArray[np.int64]:
        """Indices of fresh GPUs that deserve a close look for a class."""
        n = self.count
        steps = pace_steps(self._interval_s, self.slots)
        earlier, ts = self._back(bottleneck_class, steps)
        picked = screen(
            bottleneck_class,
            self.distance(bottleneck_class),
            earlier,
            self.last_ts[:n] - ts,
            self.latest[INDEX["over_plateau_gib"], :n],
            self.latest[INDEX["step_ratio"], :n],
        )
        return np.flatnonzero(picked & self.is_fresh(now_s))

    def features(self, gpus: NDArray[np.int64], bottleneck_class: str, now_s: float) -> FeatureBlock:
        """Features of some GPUs for one class at a moment.

        Args:
            gpus: Indices of GPUs.
            bottleneck_class: The class.
            now_s: The moment, seconds since 1970.
        """
        n = self.count
        peers = peer_features(
            bottleneck_class, self.distance(bottleneck_class), self.is_fresh(now_s), self.job[:n], self.node[:n], gpus
        )
        parts = []
        for first in range(0, len(gpus), _CHUNK):
            rows = gpus[first : first + _CHUNK]
            order = (self._head[rows, None] + np.arange(self.slots)) % self.slots
            values = self._values[:, rows[:, None], order]
            ages = (now_s - self._ts[rows[:, None], order]).astype(np.float32)
            ages = np.where((ages < 0) & (ages >= -_AHEAD_S), np.float32(0), ages)
            parts.append(
                window_features(bottleneck_class, values, ages, now_s - self.since[rows], peers[first : first + _CHUNK])
            )
        matrix = np.concatenate(parts) if parts else np.zeros((0, len(FEATURES)), dtype=np.float32)
        return FeatureBlock(bottleneck_class, gpus, np.full(len(gpus), now_s), matrix)

    def job_id(self, gpu: int) -> str | None:
        """Job on a GPU by its newest sample."""
        code = self.job[gpu]
        return self.job_ids[code] if code >= 0 else None

    def node_size(self, node: str) -> int:
        """GPUs of a node that have been seen."""
        return self._node_sizes.get(node, 0)

    def samples(self) -> pl.DataFrame:
        """All that the rings hold, as `gpu_uuid`, `node`, `ts` (UTC) and `QUANTITIES`, a row a sample, oldest first."""
        gpu, slot = np.nonzero(~np.isnan(self._ts[: self.count]))
        names = pl.DataFrame(
            {"gpu_uuid": self.uuids, "node": self.nodes}, schema=dict.fromkeys(("gpu_uuid", "node"), pl.String)
        )
        ts = pl.Series("ts", np.rint(self._ts[gpu, slot] * 1e6).astype(np.int64)).cast(pl.Datetime("us", "UTC"))
        values = [pl.Series(name, self._values[i, gpu, slot], nan_to_null=True) for name, i in INDEX.items()]
        return names[gpu].with_columns(ts, *values).sort("gpu_uuid", "ts")

    def refuted(self, now_s: float) -> dict[str, NDArray[np.int64]]:
        """Indices of fresh GPUs whose newest sample their course refutes, by reason (`cleaning_findings.REASONS`)."""
        courses, n = self.courses, self.count
        if courses is None:
            return {}
        fresh = self.is_fresh(now_s)
        found = {"frozen": courses.is_frozen, "stuck": courses.is_stuck, "zero_under_load": courses.is_silent}
        return {reason: np.flatnonzero(fresh & flags[:n]) for reason, flags in found.items()}

    def nbytes(self) -> int:
        """Bytes of the rings."""
        return self._values.nbytes + self._ts.nbytes + self._util.nbytes + self.latest.nbytes


def _until(frame: pl.DataFrame, now_s: float | None) -> pl.DataFrame:
    """Rows that are not from the future."""
    return frame if now_s is None else frame.filter(pl.col("ts").dt.epoch("us") <= (now_s + _AHEAD_S) * 1e6)


def history_features(
    samples: pl.DataFrame,
    *,
    at: pl.DataFrame,
    bottleneck_class: str,
    book: ThresholdBook,
    nodes: pl.DataFrame | None = None,
    stale_s: float = 45.0,
) -> FeatureBlock:
    """Features of GPUs at past moments, the numbers a ring would have given then.

    Args:
        samples: `core_gpu_samples` rows.
        at: `gpu_uuid` and `at` (UTC) of each wanted row.
        bottleneck_class: One of `CLASSES`.
        book: Limits of the nodes.
        nodes: `core_node_samples` rows, for inlet temperatures.
        stale_s: As of `RingWindow`.

    Returns:
        One row per row of `at`, in its order; all NaN where the GPU had no sample yet.

    Raises:
        ValueError: The class is unknown.
    """
    if bottleneck_class not in CLASSES:
        raise ValueError(f"no bottleneck class {bottleneck_class!r}; classes: {', '.join(CLASSES)}")
    history = SampleHistory(samples, book, node_samples=nodes, stale_s=stale_s)
    return history.features(
        history.gpu_codes(at["gpu_uuid"]), at["at"].dt.epoch("us").to_numpy() / 1e6, bottleneck_class
    )
