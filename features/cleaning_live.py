"""The judgement of `cleaning_series.py` a sample at a time: what the course of each GPU was is remembered in numbers.

Here belongs what a live reading has in place of the rows before: a few numbers a GPU from which the next sample is
judged, whatever the cluster's size. The rules, their figures and their order are those of ingest; what ingest sees
only from later samples is given as a revision of earlier ones. Keeping samples and revising them is the ring's work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.cleaning_series import (
    BUSY_ACTIVITY,
    BUSY_POWER,
    BUSY_UTIL,
    COVERS,
    FROZEN_COVERS,
    GAUGES,
    OF_THE_JOB,
    PROFILING,
    SAMPLES,
    SILENCE,
)

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]

HORIZON_S = 600.0  # traffic or load that is longer ago than this says nothing of the present
_ROUNDING_S = 1e-3  # times are doubles
_NVLINK = ("nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s")
_KEPT = (*OF_THE_JOB, "inlet_temp_c")  # not of the GPU's exporter
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MORE = ("power_limit_w", *GAUGES)
# What the first 0 of a rate stood behind: nothing odd, a silence or nulls, the beginning of the GPU itself.
_NO, _AFTER_SILENCE, _AT_START = 0, 1, 2


class Revision(NamedTuple):
    """Earlier samples that are not believed any more.

    Attributes:
        reason: `frozen`, `stuck`, `zero_under_load` or `first_of_rate`, as in `cleaning_findings.REASONS`.
        gpus: Indices of GPUs.
        since_s: First moment of each one's samples that are meant, seconds since 1970.
        until_s: Last moment.
    """

    reason: str
    gpus: NDArray[np.int64]
    since_s: NDArray[np.float64]
    until_s: NDArray[np.float64]


def course_inputs(frame: pl.DataFrame, known: dict[str, Floats]) -> dict[str, Floats]:
    """Columns that a judgement needs beside those that are there already; absent ones are NaN.

    Args:
        frame: Rows with any of the columns of `core_gpu_samples`.
        known: What `features.conditions.inputs` made of it.
    """
    absent = np.full(frame.height, np.nan, dtype=np.float32)
    return {
        name: frame[name].cast(pl.Float32).to_numpy(writable=False) if name in frame.columns else absent
        for name in _MORE
        if name not in known
    }


class Courses:
    """What is remembered of each GPU to judge its next sample.

    Attributes:
        is_frozen: GPUs whose newest sample is one of old values that are served again, shape (gpus,).
        is_stuck: GPUs whose profiling counters stand at 0 while they work.
        is_silent: GPUs whose NVLink counters never leave 0 under load.
    """

    def __init__(self, gpus: int = 0) -> None:
        def numbers(kind: type, fill: float = 0) -> NDArray:
            return np.full(gpus, fill, dtype=kind)

        self.power, self.gauges = numbers(np.float32, np.nan), numbers(np.uint64)
        self.still_n, self.still_since = numbers(np.int32), numbers(np.float64, np.nan)
        self.stuck_n, self.stuck_since = numbers(np.int32), numbers(np.float64, np.nan)
        self.loaded_n, self.loaded_first = numbers(np.int32), numbers(np.float64, np.nan)
        self.loaded_last, self.traffic_last = numbers(np.float64, np.nan), numbers(np.float64, np.nan)
        self.rate_mark, self.traffic = numbers(np.int8), numbers(np.float32, np.nan)
        self.is_frozen, self.is_stuck, self.is_silent = numbers(np.bool_), numbers(np.bool_), numbers(np.bool_)
        self._earliest_s = np.nan

    def arrays(self) -> list[NDArray]:
        """All that is kept per GPU along the first axis."""
        return [value for value in vars(self).values() if isinstance(value, np.ndarray)]

    def grow(self, gpus: int) -> None:
        """Make room for more GPUs; those there keep their courses."""
        fresh = Courses(gpus)
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                getattr(fresh, name)[: len(value)] = value
                setattr(self, name, getattr(fresh, name))

    def clear(self, gpu: NDArray[np.int64]) -> None:
        """GPUs begin anew."""
        fresh = Courses(1)
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                value[gpu] = getattr(fresh, name)[0]

    def judge(
        self,
        gpu: NDArray[np.int64],
        ts: NDArray[np.float64],
        before: NDArray[np.float64],
        columns: dict[str, Floats],
        is_alone: Flags,
    ) -> list[Revision]:
        """Judge one sample of each of some GPUs.

        Args:
            gpu: Indices of GPUs, each once.
            ts: Times of the samples, seconds since 1970.
            before: Times of the samples before, NaN where there is none.
            columns: As of `inputs` and `course_inputs`, each value believable by itself; what the course refutes
                becomes NaN in here.
            is_alone: GPUs that are the only one of their job, which have nobody to talk to over NVLink.

        Returns:
            What is not believed any more of the samples before.
        """
        starts = np.isnan(before)
        if starts.any():
            self.clear(gpu[starts])
            if np.isnan(self._earliest_s):
                self._earliest_s = float(ts.min())
        with np.errstate(invalid="ignore"):
            return [
                revision
                for revision in (
                    self._frozen(gpu, ts, starts, columns),
                    self._stuck(gpu, ts, columns),
                    self._silent(gpu, ts, columns, is_alone),
                    self._first_of_rate(gpu, ts, before, starts, columns),
                )
                if len(revision.gpus)
            ]

    def _frozen(
        self, gpu: NDArray[np.int64], ts: NDArray[np.float64], starts: Flags, columns: dict[str, Floats]
    ) -> Revision:
        power, gauges = columns["gpu_power_w"], _print_of(columns)
        still = (power == self.power[gpu]) & (gauges == self.gauges[gpu]) & ~starts
        if still.any():
            beside = [~np.isnan(columns[name]) for name in ("gpu_temp_c", "sm_clock_hz", "fb_used_bytes")]
            still &= _busy(columns) & np.logical_or.reduce(beside)
        self.power[gpu], self.gauges[gpu] = power, gauges
        count, since = np.where(still, self.still_n[gpu] + 1, 1), np.where(still, self.still_since[gpu], ts)
        self.still_n[gpu], self.still_since[gpu] = count, since
        frozen = _long(still, count, ts - since, FROZEN_COVERS.total_seconds())
        fresh = frozen & ~self.is_frozen[gpu]
        self.is_frozen[gpu] = frozen
        if frozen.any():
            for name in columns:
                if name not in _KEPT:
                    columns[name] = np.where(frozen, np.float32(np.nan), columns[name])
        if fresh.any():  # what the run said of other things is not believed either
            self.loaded_n[gpu[fresh]] = 0
        return Revision("frozen", gpu[fresh], since[fresh], ts[fresh])

    def _stuck(self, gpu: NDArray[np.int64], ts: NDArray[np.float64], columns: dict[str, Floats]) -> Revision:
        holds = columns["engine_active_ratio"] == 0
        if holds.any():
            holds &= (columns["gpu_util_ratio"] >= BUSY_UTIL) | (
                columns["gpu_power_w"] >= BUSY_POWER * columns["power_limit_w"]
            )
        count = np.where(holds, self.stuck_n[gpu] + 1, 0)
        since = np.where(count == 1, ts, self.stuck_since[gpu])
        self.stuck_n[gpu], self.stuck_since[gpu] = count, since
        stuck = _long(holds, count, ts - since, COVERS.total_seconds())
        fresh = stuck & ~self.is_stuck[gpu]
        self.is_stuck[gpu] = stuck
        for name in PROFILING if stuck.any() else ():
            columns[name] = np.where(stuck & (columns[name] == 0), np.float32(np.nan), columns[name])
        return Revision("stuck", gpu[fresh], since[fresh], ts[fresh])

    def _silent(
        self, gpu: NDArray[np.int64], ts: NDArray[np.float64], columns: dict[str, Floats], is_alone: Flags
    ) -> Revision:
        most = np.fmax(*(columns[name] for name in _NVLINK))
        zero, flows = most == 0, most > 0
        loaded = zero & _busy(columns) & ~is_alone if zero.any() else zero
        traffic, last = np.where(flows, ts, self.traffic_last[gpu]), self.loaded_last[gpu]
        count = np.where(flows | (ts - last > HORIZON_S), 0, self.loaded_n[gpu]) + loaded
        first = np.where(loaded & (count == 1), ts, self.loaded_first[gpu])
        last = np.where(loaded, ts, last)
        self.traffic_last[gpu], self.loaded_n[gpu] = traffic, count
        self.loaded_first[gpu], self.loaded_last[gpu] = first, last
        silent = _long(~(ts - traffic <= HORIZON_S), count, last - first, COVERS.total_seconds())
        fresh = silent & ~self.is_silent[gpu]
        self.is_silent[gpu] = silent
        for name in _NVLINK if silent.any() else ():
            columns[name] = np.where(silent, np.float32(np.nan), columns[name])
        since = np.where(np.isnan(traffic), -np.inf, np.nextafter(traffic, np.inf))
        return Revision("zero_under_load", gpu[fresh], since[fresh], ts[fresh])

    def _first_of_rate(
        self,
        gpu: NDArray[np.int64],
        ts: NDArray[np.float64],
        before: NDArray[np.float64],
        starts: Flags,
        columns: dict[str, Floats],
    ) -> Revision:
        """The sample before, where it was the 0 with which a rate begins: only the one after it tells."""
        most = np.fmax(*(columns[name] for name in _NVLINK))
        mark = self.rate_mark[gpu]
        wrong = (mark != _NO) & (most > 0) & ~starts
        # A GPU is new where samples would have shown it before, had it been there: two of its steps back.
        wrong &= (mark != _AT_START) | (before - self._earliest_s >= 2 * (ts - before) - _ROUNDING_S)
        begins = (ts - before > SILENCE.total_seconds()) | np.isnan(self.traffic[gpu])
        kind = np.where(starts, _AT_START, np.where(begins, _AFTER_SILENCE, _NO))
        self.rate_mark[gpu], self.traffic[gpu] = np.where(most == 0, kind, _NO), most
        return Revision("first_of_rate", gpu[wrong], before[wrong], before[wrong])


def _busy(columns: dict[str, Floats]) -> Flags:
    active = np.fmax(columns["sm_active_ratio"], columns["engine_active_ratio"]) >= np.float32(BUSY_ACTIVITY)
    return active | (columns["gpu_util_ratio"] >= np.float32(BUSY_UTIL))


def _print_of(columns: dict[str, Floats]) -> NDArray[np.uint64]:
    """A number for the gauges of each row: another one, but for one chance in 2^64, when any of them differs."""
    out = np.zeros(len(columns[GAUGES[0]]), dtype=np.uint64)
    for name in GAUGES:
        out *= _FACTOR
        out += np.ascontiguousarray(columns[name]).view(np.uint32)
    return out


def _long(holds: Flags, count: NDArray[np.int_], span_s: NDArray[np.float64], covers_s: float) -> Flags:
    """Where it holds in runs that are long enough: n samples cover n of their own mean steps."""
    out = holds & (count >= SAMPLES)
    if out.any():
        out &= span_s * count / np.maximum(count - 1, 1) >= covers_s - _ROUNDING_S
    return out
