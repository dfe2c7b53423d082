"""How far nodes, ports and queues are from the limit of their class, one sample at a time, and what is remembered.

Here belong the quantities that windows of things other than GPUs are made of, and the distances that their labels go
by: a class is set exactly where its distance is ≤ 0. What a thing is used to is the median of all its record for a
label (`features/label_hosts.py`, `features/label_fabric.py`), and for a forecast what it was used to until then. Live
rings and history both pass through `unit_quantities`, so that their numbers agree. GPUs stand in
`features/conditions.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Ints = NDArray[np.int64]

# Rate of a port → the floor from which it counts.
RATES = {
    "ecn_marked_per_s": "port_ecn_per_s", "cnp_per_s": "port_cnp_per_s",
    "retransmits_per_s": "port_retransmits_per_s", "transmit_wait_per_s": "port_wait_ticks_per_s",
}  # fmt: skip
LOADS = ("tx_bytes_per_s", "rx_bytes_per_s")
JUST_CLEAR = 1e-6  # a distance that is clear by a hair, or by the class's second condition
USUAL_S = 1_800.0  # what a thing is used to follows over this time
USUAL_LOOKS = 20  # samples of which it is a plain mean, before
USUAL_CLIP = 1.0  # and how much one sample can say later, in log
_MOST = 2.0  # a distance is told to so many times the way to the limit
_MOST_SIGNS = 20.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of thing that is not a GPU, and the class that befalls it.

    Attributes:
        scope: As labels have it.
        keys: Columns that name the thing.
        inputs: Columns that it is told by; any may be absent.
        quantities: What is kept of a sample: the distance first.
        usuals: How many of its quantities are compared with what it is used to.
    """

    scope: str
    keys: tuple[str, ...]
    inputs: tuple[str, ...]
    quantities: tuple[str, ...]
    usuals: int


KINDS = {
    # In shares of host memory.
    "host_memory": Kind(
        "node", ("node",), ("host_mem_available_bytes", "host_mem_total_bytes", "oom_kills_total"),
        ("distance", "host_free_ratio"), 1,
    ),
    # In shares of the way from nothing to the limit.
    "fabric_congestion": Kind(
        "port", ("node", "device", "port"), (*LOADS, "speed_bytes_per_s", *RATES, "step_ratio"),
        ("distance", "port_load_ratio", "port_signs_ratio", "port_step_ratio"), len(RATES),
    ),
    # In GPUs.
    "shortage": Kind(
        "queue", ("queue",), ("pending_gpu_num", "idle_gpu_num", "running_gpu_num"),
        ("distance", "pending_gpu_num", "idle_gpu_num", "running_gpu_num"), 0,
    ),
}  # fmt: skip
UNIT_CLASSES = tuple(KINDS)


def unit_inputs(bottleneck_class: str, frame: pl.DataFrame) -> dict[str, NDArray[np.float64]]:
    """Input columns of a class, NaN where null or where the column is absent; each of shape (rows,)."""
    absent = np.full(frame.height, np.nan)
    return {
        name: frame[name].cast(pl.Float64).fill_null(np.nan).to_numpy() if name in frame.columns else absent
        for name in KINDS[bottleneck_class].inputs
    }


def host_distance(free: Floats, usual: Floats, kills: Floats, floor: Floats) -> Floats:
    """Distance of nodes to running out of host memory, in shares of the whole.

    Args:
        free: Share that is available, NaN where not known.
        usual: What the node is used to, NaN where not known yet.
        kills: Processes killed for memory since the sample before, NaN where not known.
        floor: Share under which memory counts as exhausted.

    Returns:
        Shape (rows,), NaN where nothing is known.
    """
    with np.errstate(invalid="ignore"):
        low = (free < floor) & (free < usual - floor)
        distance = np.fmax(free - floor, free - (usual - floor))
        distance = np.where(np.isnan(free) & ~np.isnan(kills), 1.0, distance)
        return _by(distance, low | (kills > 0))  # a counter that falls began anew with the host


def fabric_distance(
    fill: Floats, rates: Floats, usual: Floats, limits: Mapping[str, Floats], step_ratio: Floats
) -> tuple[Floats, Floats]:
    """Distance of ports to congestion: 1 without any sign, 0 at the limit, for signs and for steps alike.

    Args:
        fill: Load of the fuller direction, of the speed, shape (rows,).
        rates: Rates of `RATES`, shape (len(RATES), rows).
        usual: What the port is used to of each.
        limits: As of `ThresholdBook.arrays`, of each row.
        step_ratio: Slowest step of the node's job against its own, NaN where steps are not known.

    Returns:
        The distance, NaN where nothing is known, and the highest sign in shares of its limit; each of shape (rows,).
    """
    signs = np.full(fill.shape, np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        is_high = fill >= limits["port_full_ratio"]
        for rate, own, floor in zip(rates, usual, RATES.values(), strict=True):
            burst = limits["port_burst_ratio"] * own
            is_high |= (rate >= limits[floor]) & (rate > burst)
            signs = np.fmax(signs, rate / np.fmax(limits[floor], burst))
        signs = np.minimum(signs, _MOST_SIGNS)
        distance = 1 - np.fmax(fill / limits["port_full_ratio"], signs)
        slow = (limits["step_slow_ratio"] - step_ratio) / (limits["step_slow_ratio"] - 1)
        # Signs alone are no congestion where steps are known: these have to be slow as well.
        both = np.where(np.isnan(distance) | np.isnan(slow), distance, np.fmax(distance, slow))
        return _by(np.minimum(both, _MOST), is_high & ~(step_ratio <= limits["step_slow_ratio"])), signs


def queue_distance(pending: Floats, idle: Floats) -> Floats:
    """Idle less pending GPUs, set where it is below 0; NaN where a count is absent or below zero."""
    with np.errstate(invalid="ignore"):
        margin = np.where((pending >= 0) & (idle >= 0), idle - pending, np.nan)
        return _by(margin, margin < 0)


def _by(distance: Floats, is_set: NDArray[np.bool_]) -> Floats:
    """The distance on the side of 0 on which the rule has it."""
    return np.where(is_set, np.fmin(distance, 0.0), np.fmax(distance, np.where(np.isnan(distance), np.nan, JUST_CLEAR)))


class UnitState:
    """What is remembered of things: what each is used to, and its last count of kills.

    What a thing is used to follows its samples over half an hour, in log and with no single one weighing much, so that
    neither a burst nor a leak of minutes moves it far.

    Args:
        usuals: Quantities that are followed.
        units: Things.
    """

    _ARRAYS = ("usual", "seen_s", "looks", "kills")

    def __init__(self, usuals: int, units: int = 0) -> None:
        self.usual = np.full((units, usuals), np.nan)
        self.seen_s = np.full(units, np.nan)
        self.looks = np.zeros(units)
        self.kills = np.full(units, np.nan)

    def grow(self, units: int) -> None:
        """Make room for more things; those there keep their state."""
        fresh = UnitState(self.usual.shape[1], units)
        for name in self._ARRAYS:
            getattr(fresh, name)[: len(self.seen_s)] = getattr(self, name)
        vars(self).update(vars(fresh))

    def keep(self, units: Ints) -> None:
        """Give up all but some things."""
        for name in self._ARRAYS:
            setattr(self, name, getattr(self, name)[units])

    def of(self, units: Ints) -> UnitState:
        """What is remembered of some things, to be changed freely."""
        out = UnitState(self.usual.shape[1])
        for name in self._ARRAYS:
            setattr(out, name, getattr(self, name)[units])
        return out

    def follow(self, unit: Ints, ts: NDArray[np.float64], values: Floats) -> NDArray[np.float64]:
        """What things were used to before a sample of each, which is then taken in.

        Args:
            unit: Indices of things, each once.
            ts: Times, seconds.
            values: Shape (usuals, rows), NaN where not known.

        Returns:
            Shape (usuals, rows); the value itself at the first.
        """
        now = np.log1p(np.maximum(values, 0)).T
        old, looks = self.usual[unit], self.looks[unit]
        gain = np.maximum(1 / (looks + 1), -np.expm1(-np.maximum(ts - self.seen_s[unit], 0) / USUAL_S))
        gain = np.where(np.isnan(gain), 1.0, gain)[:, None]
        moved = np.where((looks >= USUAL_LOOKS)[:, None], np.clip(now - old, -USUAL_CLIP, USUAL_CLIP), now - old)
        base = np.where(np.isnan(old), now, old)
        self.usual[unit] = np.where(np.isnan(now) | np.isnan(old), base, old + gain * moved)
        self.seen_s[unit], self.looks[unit] = ts, looks + 1
        return np.expm1(base).T

    def killed(self, unit: Ints, total: NDArray[np.float64]) -> NDArray[np.float64]:
        """Growth of a count since the sample before, NaN at the first."""
        new = total - self.kills[unit]
        self.kills[unit] = np.where(np.isnan(total), np.nan, total)
        return new


def unit_quantities(
    bottleneck_class: str,
    columns: Mapping[str, NDArray[np.float64]],
    limits: Mapping[str, NDArray[np.float32]],
    state: UnitState,
    unit: Ints,
    ts: NDArray[np.float64],
) -> NDArray[np.float32]:
    """Quantities of one sample of each of some things.

    Args:
        bottleneck_class: One of `UNIT_CLASSES`.
        columns: As of `unit_inputs`.
        limits: Limits of each row's node.
        state: What is remembered of things; updated.
        unit: Index of each row's thing in `state`, each once.
        ts: Times, seconds.

    Returns:
        Shape (len(quantities of the kind), rows), NaN where not known.
    """
    if bottleneck_class == "host_memory":
        total = columns["host_mem_total_bytes"]
        with np.errstate(invalid="ignore", divide="ignore"):
            free = columns["host_mem_available_bytes"] / np.where(total > 0, total, np.nan)
        usual = state.follow(unit, ts, free[None])[0]
        kills = state.killed(unit, columns["oom_kills_total"])
        parts = (host_distance(free, usual, kills, limits["host_memory_floor_ratio"]), free)
    elif bottleneck_class == "fabric_congestion":
        fill = port_fill(columns)
        rates = np.stack([columns[name] for name in RATES])
        usual = state.follow(unit, ts, rates)
        distance, signs = fabric_distance(fill, rates, usual, limits, columns["step_ratio"])
        parts = (distance, fill, signs, columns["step_ratio"])
    else:
        counts = [columns[name] for name in KINDS[bottleneck_class].inputs]
        parts = (queue_distance(counts[0], counts[1]), *counts)
    return np.stack(parts).astype(np.float32)


def port_fill(columns: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Load of the fuller direction of ports, of their speed; NaN where not known."""
    speed = columns["speed_bytes_per_s"]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.fmax(columns[LOADS[0]], columns[LOADS[1]]) / np.where(speed > 0, speed, np.nan)
