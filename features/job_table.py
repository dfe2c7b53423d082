"""Columns of a jobs frame as arrays, and the groups that its rows belong to.

Here belong the table and what a job's own row says; not lookups over time (`features/job_history.py`). Times inside are
int64 microseconds UTC, `NEVER` where unknown.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.job_names import families

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Hashes = NDArray[np.uint64]

NEVER = np.int64(2**62)
BAD_STATES = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
MIN_RUNTIME_S = 1.0  # whole-second clocks show a short run as zero

_INPUTS: dict[str, Any] = {
    "job_id": pl.String, "user": pl.String, "account": pl.String, "queue": pl.String, "name": pl.String,
    "submit_time": pl.Datetime("us", "UTC"), "start_time": pl.Datetime("us", "UTC"),
    "end_time": pl.Datetime("us", "UTC"), "nodes": pl.Int32, "cpus": pl.Int32, "gpus": pl.Int32,
    "memory_mib": pl.Int64, "time_limit_s": pl.Int64, "state": pl.String, "elapsed_s": pl.Int64,
    "array_job_id": pl.String, "array_task": pl.Int32, "gpu_type": pl.String, "node_features": pl.String,
}  # fmt: skip
_SIZE = ("nodes", "cpus", "gpus")
_KIND = ("gpu_type", "node_features")  # as asked for
_PRINTED = r"^([0-9]+)(?:_([0-9]+)|\[([0-9]+)\])(?:\.|$)"  # 123_4 of Slurm, 123[4] of PBS

# A group is the rows that agree in these; "family" is that of the job's name (`features/job_names.py`).
GROUPS: dict[str, tuple[str, ...]] = {
    "all": (),
    "user": ("user",),
    "user_limit": ("user", "time_limit_s"),
    "key": ("user", *_SIZE, "time_limit_s"),
    "family": ("user", "family"),
    "spec": ("user", "family", "queue", *_SIZE, "memory_mib", "time_limit_s"),
    "shape": ("queue", *_SIZE, "time_limit_s"),
    "queue": ("queue",),
    "size": _SIZE,
    "account": ("account",),
    "own_account": ("user", "account"),
    "kind": ("user", *_SIZE, "time_limit_s", "queue", *_KIND),
    "array": ("user", "array"),
}


class JobsError(ValueError):
    """A jobs frame cannot be used; the message names the column and what is needed."""


def check_columns(jobs: pl.DataFrame) -> None:
    """See that jobs have what no job is without.

    Raises:
        JobsError: `job_id` or `submit_time` is absent or null somewhere, or a column of times holds something else.
    """
    for name in ("job_id", "submit_time"):
        if name not in jobs.columns:
            raise JobsError(f"jobs have no column {name!r}; columns: {', '.join(jobs.columns)}")
        if jobs[name].null_count():
            raise JobsError(f"{jobs[name].null_count()} of {jobs.height} jobs have no {name}")
    for name, dtype in _INPUTS.items():
        if isinstance(dtype, pl.Datetime) and name in jobs.columns:
            there = jobs.schema[name]
            if there != pl.Null and not there.is_temporal():
                raise JobsError(f"{name} holds {there}, not times: make it a timestamp with its time zone")


def normalise(jobs: pl.DataFrame) -> pl.DataFrame:
    """The columns that features need, in order and dtype; absent ones become null.

    Raises:
        JobsError: `check_columns` refuses them.
    """
    check_columns(jobs)
    for name, dtype in _INPUTS.items():
        if name in jobs.columns and jobs.schema[name] != dtype:
            try:
                jobs[name].cast(dtype)
            except pl.exceptions.PolarsError as error:
                reason = str(error).splitlines()[0]
                raise JobsError(f"{name} holds {jobs.schema[name]} that is no {dtype}: {reason}") from None
    return jobs.select(
        (pl.col(name) if name in jobs.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in _INPUTS.items()
    )


def _part(number: int) -> pl.Expr:
    """A part of a job id as the scheduler prints that of a task of an array."""
    return pl.col("job_id").str.extract(_PRINTED, number).cast(pl.Int64 if number > 1 else pl.String, strict=False)


_ARRAY = pl.coalesce("array_job_id", _part(1))


def _microseconds(frame: pl.DataFrame, name: str) -> Ints:
    return frame[name].to_physical().fill_null(int(NEVER)).to_numpy().astype(np.int64)


def nobody() -> pl.DataFrame:
    """One job that nobody ever sees."""
    far = pl.Series([datetime(9999, 1, 1, tzinfo=UTC)], dtype=_INPUTS["submit_time"])
    return normalise(pl.DataFrame({"job_id": [""], "submit_time": far}))


class JobTable:
    """Columns of a jobs frame as arrays, each of shape (n,).

    Args:
        jobs: Any subset of the canonical job columns; `job_id` and `submit_time` at least.

    Raises:
        JobsError: A needed column is absent or null.
    """

    def __init__(self, jobs: pl.DataFrame) -> None:
        frame = normalise(jobs)
        self._frame = frame
        self._newer: list[tuple[Ints, pl.DataFrame]] = []  # rows put into the frame when it is asked for
        self._room: dict[Any, NDArray[Any]] = {}  # arrays with spare room behind those that have grown
        self._groups: dict[str, Hashes] = {}
        self._states: dict[tuple[str, ...], Bools] = {}
        self.count = frame.height
        self.submit = _microseconds(frame, "submit_time")
        self.start = _microseconds(frame, "start_time")
        self.end = _microseconds(frame, "end_time")
        backwards = self.end < np.where(self.start == NEVER, self.submit, self.start)
        self.end[backwards] = NEVER
        sizes = {
            name: frame[name].cast(pl.Float64).fill_null(np.nan).to_numpy().copy()
            for name in (*_SIZE, "memory_mib", "time_limit_s")
        }
        self.nodes, self.cpus, self.gpus, self.memory_mib, self.limit_s = sizes.values()
        self.limit_s[~(self.limit_s > 0)] = np.nan
        # Width in the unit the cluster allocates by: GPUs where asked for, else CPUs, else nodes.
        width = np.where(self.gpus > 0, self.gpus, np.where(self.cpus > 0, self.cpus, self.nodes))
        self.width = np.where(width > 0, width, 1.0)
        self.has_name = frame["name"].is_not_null().to_numpy()
        told = frame.select(
            (pl.col("account").is_not_null() & (pl.col("account") != pl.col("user")).fill_null(True)).alias("account"),
            pl.any_horizontal(pl.col(*_KIND).is_not_null()).alias("kind"),
            _ARRAY.is_not_null().alias("array"),
            pl.coalesce("array_task", _part(2), _part(3)).cast(pl.Float64).fill_null(np.nan).alias("task"),
        )
        self.has_account, self.has_kind, self.has_array, self.array_task = (part.to_numpy().copy() for part in told)
        self.is_bad = self.is_state(BAD_STATES)

    @property
    def frame(self) -> pl.DataFrame:
        """The rows in the columns that features need."""
        if self._newer:
            whole = pl.concat([self._frame, *(part for _, part in self._newer)])
            at, behind = np.arange(self.count), self._frame.height
            for rows, part in self._newer:
                at[rows] = behind + np.arange(part.height)
                behind += part.height
            self._frame, self._newer = whole[at], []
        return self._frame

    def put(self, at: Ints, newer: JobTable) -> None:
        """Write the rows of another table over rows of this one, or behind them.

        Args:
            at: Row of each newer one; those that are not there yet go up from `count` without a gap, shape (m,).
            newer: m rows.
        """
        self.count = max(self.count, int(at.max(initial=-1)) + 1)
        self._newer.append((at, newer.frame))
        self.__dict__.pop("_family", None)
        for name in (*_ARRAYS, *(name for name in _DERIVED if name in self.__dict__)):
            self.__dict__[name] = grown(self._room, name, self.__dict__[name], at, getattr(newer, name))
        for name in self._groups:
            self._groups[name] = grown(self._room, ("group", name), self._groups[name], at, newer.group(name))
        for states in self._states:
            self._states[states] = grown(self._room, states, self._states[states], at, newer.is_state(states))

    @cached_property
    def has_run(self) -> Bools:
        """It started and ended, and not within the same tick of the clock."""
        return (self.start != NEVER) & (self.end != NEVER) & (self.end > self.start)

    @cached_property
    def runtime_s(self) -> Floats:
        """Time it ran, at least `MIN_RUNTIME_S`: what the scheduler counted, without suspensions, else end − start.

        NaN where start or end is unknown.
        """
        known = (self.start != NEVER) & (self.end != NEVER)
        counted = self.frame["elapsed_s"].cast(pl.Float64).fill_null(np.nan).to_numpy()
        between = np.where(known, self.end - self.start, 0) / 1e6
        seconds = np.where((counted >= 0) & (counted < between), counted, between)
        return np.where(known, np.maximum(seconds, MIN_RUNTIME_S), np.nan)

    @cached_property
    def wait_s(self) -> Floats:
        """Start − submit; NaN where it has not started."""
        known = self.start != NEVER
        return np.where(known, np.maximum(np.where(known, self.start - self.submit, 0), 0) / 1e6, np.nan)

    @cached_property
    def identity(self) -> Hashes:
        """A hash that names the job: id and submit time."""
        return self.frame.select(pl.struct("job_id", "submit_time").hash(11)).to_series().to_numpy()

    def is_state(self, states: tuple[str, ...]) -> Bools:
        """The row's state is one of these; kept once made."""
        if states not in self._states:
            self._states[states] = self.frame["state"].is_in(states).fill_null(False).to_numpy()
        return self._states[states]

    def group(self, name: str) -> Hashes:
        """Hash of the row's group, kept once made, shape (n,); only equality means anything."""
        if name not in self._groups:
            self._groups[name] = self._hashed(name)
        return self._groups[name]

    @cached_property
    def _family(self) -> pl.Series:
        return families(self.frame["name"])

    def _hashed(self, name: str) -> Hashes:
        made = {"array": _ARRAY}
        if "family" in GROUPS[name]:
            made["family"] = pl.lit(self._family)
        parts = [made.get(part, pl.col(part)) for part in GROUPS[name]]
        if not parts:
            return np.zeros(self.count, dtype=np.uint64)
        text = pl.concat_str([p.cast(pl.String).fill_null("\x00") for p in parts], separator="\x1f")
        return self.frame.select(text.hash(7)).to_series().to_numpy()


_ARRAYS = (
    "submit", "start", "end", "nodes", "cpus", "gpus", "memory_mib", "limit_s", "width", "has_name", "is_bad",
    "has_account", "has_kind", "has_array", "array_task",
)  # fmt: skip
_DERIVED = ("has_run", "runtime_s", "wait_s", "identity")
_SPARE = 1.25  # what grows gets so much more room than it needs


def grown(
    room: dict[Any, NDArray[Any]], name: Any, present: NDArray[Any], at: Ints, values: NDArray[Any]
) -> NDArray[Any]:
    """An array with rows written over its own or behind them; copied only when there is no room left in `room`."""
    count = max(len(present), int(at.max(initial=-1)) + 1)
    held = room.get(name)
    if held is None or len(held) < count:
        held = np.empty((int(_SPARE * count), *present.shape[1:]), dtype=present.dtype)
        held[: len(present)] = present
        room[name] = held
    held[at] = values
    return held[:count]
