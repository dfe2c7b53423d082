"""What is kept of every GPU of a cluster in memory, and the place of each in it.

Here belongs giving places to GPUs, moving them and giving them up; taking samples in stands in `features/intake.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.cleaning_live import Courses
from features.conditions import CLASSES, COARSE, QUANTITIES
from features.gangs import Gangs
from features.job_state import JobState
from features.ring import Ring
from features.roster import Roster
from features.thresholds import ThresholdBook

Ints = NDArray[np.int64]

_MIN_CAPACITY = 1_024
_MANY_JOBS = 1_000
_NEVER = -2  # as a job's code: a job begins with the next sample
FORGET_S = 3_600.0  # a GPU that has been silent for this long gives its place up


class GpuPlaces:
    """Arrays with a place for every GPU, which it gets when it is first seen and keeps until `forget`.

    Args:
        book: Limits of the nodes.
        courses: Judges each sample by those before it, as ingest does; None: samples are believed as they come.

    Attributes:
        count: GPUs there are; their indices are 0 … count - 1.
        roster: Names of GPUs, nodes and jobs.
        node, job: Code of each GPU's node, and of its job by its newest sample, -1 for none.
        since: Since when the job has been seen on it, seconds since 1970.
        last_ts: Time of its newest sample, NaN where there is none.
        latest: Quantities of that sample, shape (len(QUANTITIES), places).
    """

    def __init__(self, book: ThresholdBook, courses: Courses | None) -> None:
        self.book = book
        self.courses = courses
        self.count = 0
        self.roster = Roster()
        self.gpu_index = np.zeros(0, dtype=np.int32)
        self.node = np.zeros(0, dtype=np.int64)
        self.job = np.zeros(0, dtype=np.int64)
        self.since = np.zeros(0)
        self.last_ts = np.zeros(0)
        self.latest = np.zeros((len(QUANTITIES), 0), dtype=np.float32)
        coarse = {QUANTITIES.index(name): step for name, step in COARSE.items()}
        self._ring = Ring(has_util=courses is not None, coarse=coarse)
        # Time and distances of the sample before the newest: a condition is set when it held in both.
        self._before_ts = np.zeros(0)
        self._before = np.zeros((0, len(CLASSES)), dtype=np.float32)
        self._limits: dict[str, NDArray[np.float32]] = book.arrays([])
        self._state = JobState()
        self._gangs = Gangs()

    def _add(self, hosts: list[str]) -> None:
        old, self.count = self.count, self.count + len(hosts)
        self._grow(self.count)
        self.node[old : self.count] = self.roster.node_codes(hosts)
        for name, values in self.book.arrays(hosts).items():
            self._limits[name][old : self.count] = values

    def _move(self, index: Ints, host: Ints) -> None:
        """GPUs turned up on other nodes: theirs are the limits there, and nothing that was measured elsewhere."""
        names = [self.roster.node_names[code] for code in host]
        self.roster.move(index, names)
        self.node[index] = host
        for name, values in self.book.arrays(names).items():
            self._limits[name][index] = values
        self._clear(index)

    def _clear(self, index: Ints) -> None:
        """Take GPUs for never seen."""
        if not len(index):
            return
        self._ring.clear(index)
        self.latest[:, index], self._before[index], self._before_ts[index] = np.nan, np.nan, np.nan
        self.last_ts[index], self.since[index] = np.nan, np.nan
        self._gangs.clear(index)
        self.gpu_index[index] = 0
        self.job[index], self._state.job[index] = -1, _NEVER

    def forget(self, now_s: float, after_s: float = FORGET_S) -> int:
        """Give up the places of GPUs that have been silent, and with them nodes and jobs that nothing refers to.

        Indices change: none taken before is valid after a return above 0.

        Args:
            now_s: The moment, seconds since 1970.
            after_s: Silence after which a GPU is forgotten.

        Returns:
            Number of GPUs forgotten.
        """
        keep = np.flatnonzero(now_s - self.last_ts[: self.count] <= after_s)
        had, have = self.count, len(keep)
        if have == had and len(self.roster.job_ids) <= max(_MANY_JOBS, 2 * had):
            return 0  # names of jobs that have ended are given up too where they pile up
        for array in self._arrays():
            array[:have] = array[keep]
        self._ring.keep(keep)
        for q in range(len(QUANTITIES)):
            self.latest[q, :have] = self.latest[q, keep]
        self.count = have
        self._clear(np.arange(have, had))
        self.node[:have], codes = self.roster.keep(keep, self.job[:have])
        for jobs in (self.job[:have], self._state.job[:have]):
            known = jobs >= 0
            jobs[known] = np.searchsorted(codes, jobs[known])
        self._gangs.rename(have, np.asarray(codes, dtype=np.int64))
        return had - have

    def remembered(self) -> pl.DataFrame:
        """What is remembered of jobs beyond the windows, to be given to `recall` after a restart.

        Returns:
            A row for each GPU that has been seen: `gpu_uuid`, `node`, `job_id` (null: none), and the facts of
            `features.conditions.JobState`.
        """
        state, n = self._state, self.count
        names = self.roster.job_ids
        jobs = [names[code] if code >= 0 else None for code in state.job[:n].tolist()]
        keys = {"gpu_uuid": self.roster.uuids, "node": self.roster.nodes, "job_id": jobs}
        facts = {name: values[:n] for name, values in vars(state).items() if name != "job"}
        frame = pl.DataFrame({**keys, **facts}, schema_overrides=dict.fromkeys(keys, pl.String))
        return frame.filter(pl.Series(state.job[:n] != _NEVER))

    def recall(self, told: pl.DataFrame) -> int:
        """Take up what was remembered of jobs before a restart; before any sample. Another job by then is new.

        Args:
            told: As `remembered` gave it; what lacks columns is passed over.

        Returns:
            Number of GPUs that something is remembered of.

        Raises:
            PolarsError: A column is of another kind; nothing has been taken up then.
        """
        facts = [name for name in vars(self._state) if name != "job"]
        if not told.height or not {"gpu_uuid", "node", "job_id", *facts} <= set(told.columns):
            return 0
        told = told.with_columns(pl.col("gpu_uuid", "node", "job_id").cast(pl.String), pl.col(facts).cast(pl.Float64))
        told = told.drop_nulls(["gpu_uuid", "node", *facts]).unique("gpu_uuid", maintain_order=True)
        index, _, fresh = self.roster.indices(told)
        if fresh:
            self._add([node for _, node in fresh])
        self._state.job[index] = self.roster.jobs(told, None)
        for name in facts:
            getattr(self._state, name)[index] = told[name].to_numpy()
        return told.height

    def _arrays(self) -> list[NDArray]:
        """All that is kept per GPU along the first axis, but for the ring."""
        mine = (self.gpu_index, self.node, self.job, self.since, self.last_ts, self._before_ts, self._before)
        courses = self.courses.arrays() if self.courses is not None else []
        return [*mine, *self._limits.values(), *vars(self._state).values(), *self._gangs.arrays(), *courses]

    def _grow(self, wanted: int) -> None:
        if wanted <= len(self.node):
            return
        size = max(_MIN_CAPACITY, wanted + wanted // 8)
        self.gpu_index, self.node = _wider(self.gpu_index, size, 0), _wider(self.node, size, 0)
        self.job = _wider(self.job, size, -1)
        self.since, self.last_ts = _wider(self.since, size), _wider(self.last_ts, size)
        self._before_ts, self._before = _wider(self._before_ts, size), _wider(self._before, size)
        self.latest = _wider(self.latest.T, size).T.copy()
        self._limits = {name: _wider(values, size) for name, values in self._limits.items()}
        self._ring.grow(size)
        self._state.grow(size)
        self._gangs.grow(size)
        if self.courses is not None:
            self.courses.grow(size)

    def set_book(self, book: ThresholdBook) -> None:
        """Take new limits, as when the inventory has changed."""
        self.book = book
        for name, values in book.arrays(self.roster.nodes).items():
            self._limits[name][: self.count] = values

    def set_racks(self, racks: Mapping[str, str | None]) -> None:
        """Say which rack each node is in; those that are absent have no neighbours there."""
        self.roster.racks = dict(racks)


def _wider(array: NDArray, size: int, fill: float = np.nan) -> NDArray:
    out = np.full((size, *array.shape[1:]), fill, dtype=array.dtype)
    out[: len(array)] = array
    return out
