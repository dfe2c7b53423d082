"""One row of the vocabulary: what a metric of an exporter feeds, and how it is to be read. No rows, no computing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

# What a series speaks of. Those of FED become rows of frames; the others are read by readers of queues, jobs and pods.
# `xid`: one code of one GPU, as counted by its exporter; `features/xid_counts.py` makes columns of the GPU of it.
Entity = Literal["gpu", "health", "xid", "link", "port", "node", "queue", "kubernetes", "job", "progress"]
# `progress`: how far a job is, in its own words; read by `pipelines/sources/progress_series.py`.
# `job`: a fact of the job on a GPU or node; `features/job_facts.py` lays it on samples of GPUs.
FED: tuple[Entity, ...] = ("gpu", "health", "xid", "job", "link", "port", "node")
ENTITIES: tuple[Entity, ...] = get_args(Entity)
# How a value is to be understood, whatever type the exporter declares.
Kind = Literal[
    "gauge",
    "counter",
    "rate_typed_counter",
    "counter_typed_gauge",
    "bitmask",
    "last_code",
    "window_count",
    "info",
]
KINDS: dict[Kind, str] = {
    "gauge": "the value of that moment",
    "counter": "only grows, but for resets",
    "rate_typed_counter": "a rate already, though declared a counter: never differentiate it",
    "counter_typed_gauge": "only grows, though declared a gauge",
    "bitmask": "bits of reasons: never averaged",
    "last_code": "the last code that was seen; it stays until another comes",
    "window_count": "events of a rolling window: falls by itself",
    "info": "facts in labels, or an id as value",
}
MIB = 2.0**20
BOARD = "_board"  # column of rows whose labels tell index, slot, model and versions of a GPU; their values say nothing
HW_SLOW, HW_HOT = "_hw_slowdown", "_hw_thermal"
FB_SHARE = "_fb_used_share"  # of all memory
JOB_NUMBER, JOB_HERE = "_job_number", "_job_here"  # the value is the id of a job; 1: the job in the labels is here
SWITCH_LABEL = "nvswitch"  # of the switches between the GPUs of a node; empty on links of a GPU
LANE = "#"  # in a name: the number of an NVLink
LANES = 18
# Bits of the clock event reasons.
SW_POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, HW_POWER_BRAKE = 0x4, 0x8, 0x20, 0x40, 0x80


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of one exporter.

    Attributes:
        name: As exposed. `#` stands for the number of an NVLink; in rows that feed nothing `*` stands for anything.
        column: Registry column it feeds, or a helper of `to_columns` (first letter `_`); empty: it feeds no frame.
        scale: Value × scale is in the registry's unit; for rows that feed no frame, in the unit that `meaning` names.
        rank: Of several metrics of a column the lowest rank that has a value wins.
        mask: Not 0: the value is a bit mask, the column is true when any of these bits is set.
        part: Columns with parts are sums (flags: any of them): one addend for each part, spellings of a part replace
            each other.
        where: Labels that must match: (label, regular expression) each.
        entity: What a series of it speaks of.
        kind: How the value is to be understood.
        equals: The column is true when the value is this.
        exporter: Whose metric it is.
        meaning: What it is when it feeds no column, or what is odd about it.
    """

    name: str
    column: str
    scale: float = 1.0
    rank: int = 0
    mask: int = 0
    part: str = ""
    where: tuple[tuple[str, str], ...] = ()
    entity: Entity = "gpu"
    kind: Kind = "gauge"
    equals: float | None = None
    exporter: str = ""
    meaning: str = ""

    @property
    def is_fed(self) -> bool:
        """It becomes a column of a frame, or tells of the board behind one (`BOARD`)."""
        return bool(self.column) and self.entity in FED

    @property
    def is_differentiated(self) -> bool:
        """It is a counter that feeds a rate: differences over time are taken first."""
        return self.kind in ("counter", "counter_typed_gauge") and self.column.endswith("_per_s")


SLOW_MEANING = "a hardware slowdown that is not thermal makes is_power_brake true"

Rows = Callable[..., list[Metric]]


def family(exporter: str, prefix: str = "", **shared: Any) -> Rows:
    """Maker of an exporter's rows: `rows("name other_name", column, scale, **fields)`, one row for each name."""

    def rows(names: str, column: str, scale: float = 1.0, **more: Any) -> list[Metric]:
        fields: dict[str, Any] = {"exporter": exporter} | shared | more
        return [Metric(prefix + name, column, scale, **fields) for name in names.split()]

    return rows


def clock_reasons(rows: Rows, names: str) -> list[Metric]:
    """The flags of a clock event bit mask. 0x8 comes with 0x40 or 0x80; without heat (0x40) it is one for power."""
    return [
        *rows(names, "is_thermal_slowdown", mask=SW_THERMAL | HW_THERMAL, kind="bitmask"),
        *rows(names, "is_power_brake", mask=HW_POWER_BRAKE, kind="bitmask"),
        *rows(names, "is_power_capped", mask=SW_POWER_CAP, kind="bitmask"),
        *rows(names, HW_SLOW, mask=HW_SLOWDOWN, kind="bitmask", meaning=SLOW_MEANING),
        *rows(names, HW_HOT, mask=HW_THERMAL, kind="bitmask", meaning=SLOW_MEANING),
    ]
