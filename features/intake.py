"""Taking samples of GPUs into rings: whose they are, whether they are new, late or refuted, and what they say.

Here belongs what a sample changes; the arrays that it changes stand in `features/places.py` and `features/ring.py`,
reading them in `features/telemetry.py`. No input or output.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.cleaning_bounds import bounded
from features.cleaning_live import Courses, Revision, course_inputs
from features.conditions import CLASSES, DISTANCE, INDEX, QUANTITIES, inputs, quantities
from features.gangs import rank_steps
from features.job_state import JobState
from features.places import FORGET_S, GpuPlaces
from features.ports import PORTS, node_ports
from features.thresholds import ThresholdBook
from features.windows import WINDOW_S

Ints = NDArray[np.int64]
Times = NDArray[np.float64]

AHEAD_S = 5.0  # a clock that runs ahead by less than this makes a sample new, not wrong
# Quantities that fall with what a later sample refutes: step times and inlets are not the GPU's exporter's.
_REFUTED = {
    "frozen": tuple(
        name for name in QUANTITIES if name not in ("straggler_distance_ratio", "step_ratio", "inlet_temp_c")
    ),
    "stuck": (),
    "zero_under_load": ("nvlink_fill_ratio", "nvlink_distance_ratio"),
    "first_of_rate": ("nvlink_fill_ratio", "nvlink_distance_ratio"),
}
_STEPS = ("step_time_s", "own_step_time_s")
_DISTANCES = [INDEX[DISTANCE[name]] for name in CLASSES]


class Intake(GpuPlaces):
    """What is kept of every GPU changes here with each sample.

    A sample that comes late goes to its place if it is of the last ten minutes; what was there already is dropped, so
    that a source may be asked twice for the same minute. A GPU that turns up on another node begins anew there.

    Args:
        book: Limits of the nodes.
        courses: Judges each sample by those before it, as ingest does; None: samples are believed as they come.

    Attributes:
        ahead: Samples of the last `observe` that were dropped because they lay in the future.
        late: Samples of the last `observe` that were older than the newest of their GPU and had not been there.
    """

    def __init__(self, book: ThresholdBook, courses: Courses | None = None) -> None:
        super().__init__(book, courses)
        self.ahead = 0
        self.late = 0
        self._inlet: dict[str, float] = {}
        self._ports: dict[str, tuple] = {}

    def observe(
        self,
        gpu: pl.DataFrame,
        node: pl.DataFrame | None = None,
        job_by_node: Mapping | None = None,
        *,
        port: pl.DataFrame | None = None,
        now_s: float | None = None,
    ) -> int:
        """Take in samples.

        Args:
            gpu: Rows of `core_gpu_samples` columns, any number per GPU, in any order.
            node: Rows of `core_node_samples` columns; the newest inlet temperature of a node goes with its GPUs.
            job_by_node: Job of a node, for samples that do not name one.
            port: Rows of `core_port_samples` columns; the newest of each node counts while it is fresh.
            now_s: The moment of the reading, seconds since 1970. Samples later than it by more than 5 s are dropped,
                and what is there from a later moment (the clock was set back) does not count. None: history, of which
                nothing is too late.

        Returns:
            Number of samples that had not been there.

        Raises:
            ValueError: `ts`, `node` or `gpu_uuid` is absent; the message names it.
        """
        missing = [name for name in ("ts", "node", "gpu_uuid") if name not in gpu.columns]
        if missing:
            raise ValueError(f"samples lack {', '.join(missing)}; they have {', '.join(gpu.columns)}")
        self.ahead = self.late = 0
        if node is not None and node.height and {"node", "inlet_temp_c"} <= set(node.columns):
            newest = _until(node, now_s).sort("ts") if "ts" in node.columns else node
            newest = bounded(newest.select("node", "inlet_temp_c"), ("inlet_temp_c",), [])
            self._inlet.update(newest.drop_nulls().iter_rows())
        if port is not None and port.height:
            if now_s is not None:  # the clock was set back
                self._ports = {
                    name: told for name, told in self._ports.items() if told[0].timestamp() <= now_s + AHEAD_S
                }
            for name, ts, *values in node_ports(_until(port, now_s)).iter_rows():
                if name not in self._ports or ts > self._ports[name][0]:
                    self._ports[name] = (ts, *values)
        gpu = gpu.filter(pl.col("ts").is_not_null() & pl.col("gpu_uuid").is_not_null() & pl.col("node").is_not_null())
        told = gpu.height
        gpu = _until(gpu, now_s)
        self.ahead = told - gpu.height
        if not gpu.height:
            return 0
        if gpu["gpu_uuid"].n_unique() == gpu.height:
            return self._observe(gpu, job_by_node, now_s)
        # Gangs are compared second by second, so that where there are steps nothing later may come before.
        has_steps = any(name in gpu.columns and gpu[name].null_count() < gpu.height for name in _STEPS)
        second = pl.col("ts").dt.epoch("s") if has_steps else pl.lit(0, dtype=pl.Int64)
        gpu = gpu.sort("ts").with_columns(second.alias("_second"))
        gpu = gpu.with_columns(pl.int_range(pl.len()).over("gpu_uuid", "_second").alias("_rank"))
        parts = gpu.partition_by("_second", "_rank", maintain_order=True, include_key=False)
        return sum(self._observe(part, job_by_node, now_s) for part in parts)

    def _observe(self, frame: pl.DataFrame, job_by_node: Mapping | None, now_s: float | None) -> int:
        index, host, fresh = self.roster.indices(frame)
        if fresh:
            self._add([node for _, node in fresh])
        if now_s is not None:
            self._clear(index[self.last_ts[index] > now_s + AHEAD_S])
        ts = frame["ts"].dt.epoch("us").to_numpy() / 1e6
        job = self.roster.jobs(frame, job_by_node)
        columns = inputs(frame)
        if self._inlet and "inlet_temp_c" not in frame.columns:
            by_code = np.array([self._inlet.get(name, np.nan) for name in self.roster.node_names], dtype=np.float32)
            columns["inlet_temp_c"] = by_code[host]
        if self.courses is not None:
            columns |= course_inputs(frame, columns)
        newer = ~(ts <= self.last_ts[index])  # NaN: never seen
        if newer.all():
            return self._newer(index, host, ts, job, columns, frame)
        with np.errstate(invalid="ignore"):
            late = ~newer & (ts < self.last_ts[index]) & (ts > self.last_ts[index] - WINDOW_S)
        late &= host == self.node[index]
        taken = 0
        if late.any():
            taken = self._late(index[late], ts[late], job[late], _where(columns, late))
        if newer.any():
            columns = _where(columns, newer)
            taken += self._newer(index[newer], host[newer], ts[newer], job[newer], columns, frame.filter(newer))
        return taken

    def _newer(
        self, index: Ints, host: Ints, ts: Times, job: Ints, columns: dict[str, NDArray], frame: pl.DataFrame
    ) -> int:
        """Take samples that are newer than what is there of their GPUs."""
        moved = host != self.node[index]
        if moved.any():
            self._move(index[moved], host[moved])
        self.job[index] = job
        util = columns["gpu_util_ratio"]
        if self.courses is not None:
            alone = self._alone(job)
            for revision in self.courses.judge(index, ts, self.last_ts[index], columns, alone):
                self._revise(revision)
        limits = {name: values[index] for name, values in self._limits.items()}
        step, gang = rank_steps(columns, job)
        gang_step = self._gangs.medians(index, ts, gang, step)
        values, since = quantities(columns, limits, self._state, index, ts, job, gang_step)
        self._ring.put(index, ts, values, util)
        self._before_ts[index] = self.last_ts[index]
        for k, quantity in enumerate(_DISTANCES):
            self._before[index, k] = self.latest[quantity, index]
        for q in range(len(QUANTITIES)):
            self.latest[q, index] = values[q]
        self.last_ts[index], self.since[index] = ts, since
        if "gpu_index" in frame.columns and frame["gpu_index"].null_count() == 0:
            self.gpu_index[index] = frame["gpu_index"].to_numpy()
        return len(index)

    def _late(self, index: Ints, ts: Times, job: Ints, columns: dict[str, NDArray]) -> int:
        """Take samples that come after newer ones of their GPUs: by what is known of the job now, which they leave."""
        if self.courses is not None:  # what the course has refuted meanwhile may hold for them too
            courses = self.courses
            usable = ~(courses.is_frozen[index] | courses.is_stuck[index] | courses.is_silent[index])
            index, ts, job, columns = index[usable], ts[usable], job[usable], _where(columns, usable)
        if not len(index):
            return 0
        limits = {name: values[index] for name, values in self._limits.items()}
        _, gang = rank_steps(columns, job)
        gang_step = self._gangs.median_of(gang, float(ts.min()))
        places = np.arange(len(index))
        values, _ = quantities(columns, limits, _copied(self._state, index), places, ts, job, gang_step)
        is_new = self._ring.put(index, ts, values, columns["gpu_util_ratio"])
        between = ~(ts <= self._before_ts[index])
        is_new |= between
        gpus = index[between]
        self._before_ts[gpus], self._before[gpus] = ts[between], values[_DISTANCES][:, between].T
        taken = int(is_new.sum())
        self.late += taken
        return taken

    def forget(self, now_s: float, after_s: float = FORGET_S) -> int:
        """As of `GpuPlaces`; inlets and ports of nodes that are gone go with them."""
        gone = super().forget(now_s, after_s)
        if gone:
            known = set(self.roster.node_names)
            self._inlet = {name: value for name, value in self._inlet.items() if name in known}
            self._ports = {name: told for name, told in self._ports.items() if name in known}
        return gone

    def _ports_of(self, gpus: Ints, now_s: float, stale_s: float) -> NDArray[np.float32]:
        """Ports of the nodes of some GPUs, NaN where they are not fresh; shape (len(gpus), len(PORTS))."""
        out = np.full((len(gpus), len(PORTS)), np.nan, dtype=np.float32)
        if self._ports:
            for row, node in enumerate(self.node[gpus].tolist()):
                told = self._ports.get(self.roster.node_names[node])
                if told is not None and 0 <= now_s - told[0].timestamp() + AHEAD_S <= stale_s + AHEAD_S:
                    out[row] = [np.nan if value is None else value for value in told[1:]]
        return out

    def _alone(self, job: Ints) -> NDArray[np.bool_]:
        """Which rows are of jobs that have one GPU."""
        gpus = np.bincount(self.job[: self.count] + 1)
        return (job >= 0) & (gpus[job + 1] == 1)

    def _revise(self, revision: Revision) -> None:
        """Take back what later samples refute, as if it had never been measured."""
        gpus, since, until = revision.gpus, revision.since_s, revision.until_s
        refuted = [INDEX[name] for name in _REFUTED[revision.reason]]
        if refuted:  # the newest is the sample before by the time this one is taken
            self._ring.take_back(gpus, since, until, refuted)
            newest = gpus[(self.last_ts[gpus] >= since) & (self.last_ts[gpus] <= until)]
            for quantity in refuted:
                self.latest[quantity, newest] = np.nan
        if revision.reason == "stuck":  # then utilisation tells how active a GPU was
            self._ring.use_util(gpus, since, until, INDEX["activity_ratio"])
        if revision.reason == "frozen":  # a plateau that was found meanwhile is none
            state = self._state
            none = gpus[state.found[gpus] >= since]
            state.plateau[none], state.found[none], state.settling_since[none] = np.nan, np.nan, np.nan


def _copied(state: JobState, gpus: Ints) -> JobState:
    """What is remembered of some GPUs' jobs, to be changed freely."""
    out = JobState()
    for name, values in vars(state).items():
        setattr(out, name, values[gpus])
    return out


def _where(columns: Mapping[str, NDArray], rows: NDArray[np.bool_]) -> dict[str, NDArray]:
    return {name: values[rows] for name, values in columns.items()}


def _until(frame: pl.DataFrame, now_s: float | None) -> pl.DataFrame:
    """Rows that are not from the future."""
    return frame if now_s is None else frame.filter(pl.col("ts").dt.epoch("us") <= (now_s + AHEAD_S) * 1e6)
