"""What one field of sacct, squeue or slurmrestd means: times, limits, counts, TRES, memory, states, exit codes.

Expressions over text columns alone; records and frames of jobs stand in `sacct.py`. What cannot be read becomes null.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

import polars as pl

from features.vocabulary import TIME

PENDING, RUNNING = "PENDING", "RUNNING"
STATES = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", PENDING, "PREEMPTED",
    "REQUEUED", "RESIZING", "REVOKED", RUNNING, "SUSPENDED", "TIMEOUT", "UNKNOWN",
)  # fmt: skip
# States that a job passes through, and what they mean for its nodes.
_STATE_OF = {
    "COMPLETING": RUNNING, "CONFIGURING": RUNNING, "SIGNALING": RUNNING, "STAGE_OUT": RUNNING,
    "STOPPED": "SUSPENDED", "REQUEUE_FED": PENDING, "REQUEUE_HOLD": PENDING,
    "RESV_DEL_HOLD": PENDING, "SPECIAL_EXIT": PENDING,
}  # fmt: skip
# States of attempts that were cut off, where the record has an end; without one the job still waits or runs.
_CUT_OFF = {"REQUEUED": PENDING, "RESIZING": RUNNING}
# Jobs that hold or wait for nodes.
LIVE_STATES = (PENDING, RUNNING, "SUSPENDED")

_UNSET = ("", "unknown", "none", "n/a", "(null)", "none assigned", "invalid", "(none)")
# A year outside of these is a unit misread or a field overflown.
_FIRST_TIME, _LAST_TIME = datetime(1990, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
_LAST_EPOCH_S = int(_LAST_TIME.timestamp())
_MOST = 2_000_000_000  # of nodes, CPUs, GPUs: more is an overflow
_MAX_LIMIT_MIN = 2**32  # what Slurm can hold
_UNITS_MIB = {"K": 2.0**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20, "P": 2.0**30}
# Texts of GRES that a job asked for; those of what it was given may name a kind that it left open.
_ASKED_GRES = ("tresperjob", "trespernode", "reqgres")
# Memory per CPU is kept with the top bit set; some versions print it so.
_PER_CPU_32, _PER_CPU_64 = 2**31, 2**63


class Fields:
    """Expressions over the text columns that are there; null for those that are not.

    Args:
        names: Names of the columns, in lower case.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = set(names)

    def text(self, name: str) -> pl.Expr:
        if name not in self.names:
            return pl.lit(None, dtype=pl.String)
        value = pl.col(name).str.strip_chars()
        return pl.when(~value.str.to_lowercase().is_in(_UNSET)).then(value)

    def first(self, *names: str) -> pl.Expr:
        return pl.coalesce([self.text(name) for name in names])

    def time(self, name: str) -> pl.Expr:
        value = self.text(name)
        epoch = value.cast(pl.Int64, strict=False)
        written = (
            value.str.strip_suffix("Z")
            .str.replace(" ", "T")
            .str.to_datetime("%Y-%m-%dT%H:%M:%S%.f", time_unit="us", strict=False)
        )
        from_epoch = pl.when(epoch.is_between(1, _LAST_EPOCH_S)).then(epoch * 1_000_000).cast(TIME)
        told = pl.coalesce(from_epoch, written.dt.replace_time_zone("UTC"))
        return pl.when(told.is_between(_FIRST_TIME, _LAST_TIME)).then(told)

    def job_id(self) -> pl.Expr:
        """The raw id; without one the printed id, of a pending array without its tasks."""
        return self.first("jobidraw", "jobid").str.replace(r"_\[.*$", "")

    def array_job_id(self) -> pl.Expr:
        """Of `123_4`, `123_[1-10%2]` and `123+0`: 123; null for a job by itself."""
        told = [pl.when(self.text(name) != "0").then(self.text(name)) for name in ("arrayjobid", "hetjobid")]
        return pl.coalesce(self.text("jobid").str.extract(r"^(\d+)[_+]"), *told)

    def array_task(self) -> pl.Expr:
        """Of `123_4`: 4; null for a job by itself, and for the tasks that still wait in one row."""
        return _count(self.text("jobid").str.extract(r"^\d+_(\d+)$"))

    def array_tasks(self) -> pl.Expr:
        """Tasks that one row stands for: 10 for `123_[1-10%2]`; null for a row of one job, or of an unknown number."""
        body = self.text("jobid").str.extract(r"_\[([^\]%]*)")
        return body.map_elements(count_tasks, return_dtype=pl.Int64)

    def exit_code(self) -> pl.Expr:
        """`exit:signal`; from the status of wait(2) where a program gives that."""
        status = self.text("exitstatus").cast(pl.Int64, strict=False)
        waited = pl.format("{}:{}", status // 256 % 256, status % 128)
        printed = self.text("exitcode").str.extract(r"^(\d+:\d+)$")
        return pl.coalesce(printed, pl.when(status >= 0).then(waited))

    def count(self, *names: str) -> pl.Expr:
        return pl.coalesce([_count(self.text(name)) for name in names])

    def _tres_texts(self) -> list[pl.Expr]:
        """What was asked for before what was given."""
        return [self.text(name) for name in ("reqtres", "alloctres", "tres")]

    def tres(self, key: str, *names: str) -> pl.Expr:
        """A count of TRES: of the named columns, else of what was asked for before what was given."""
        texts = [self.text(name) for name in names] or self._tres_texts()
        return pl.coalesce([_count(t.str.extract(rf"(?:^|,){key}=(\d+)(?:,|$)")) for t in texts])

    def gpus(self, *names: str) -> pl.Expr:
        """The untyped count where there is one, else the sum over types; null where TRES name no GPU."""
        counts = []
        for tres in [self.text(name) for name in names] or self._tres_texts():
            untyped = _count(tres.str.extract(r"(?:^|,)gres/gpu=(\d+)(?:,|$)"))
            typed = tres.str.extract_all(r"(?:^|,)gres/gpu:[^=,]+=[^,]*")
            counts += [untyped, _total(typed.list.eval(_count(pl.element().str.extract(r"=(\d+)$"))))]
        return pl.coalesce(counts)

    def no_gpus(self) -> pl.Expr:
        """0 where TRES are told: what they do not name, the job has not. A count that cannot be read is not 0."""
        told = self._tres_texts()
        names = pl.any_horizontal(tres.str.contains(r"(?:^|,)gres/gpu[:=]").fill_null(False) for tres in told)
        return pl.when(pl.coalesce(told).is_not_null() & ~names).then(0)

    def gres_gpus(self, *names: str) -> pl.Expr:
        """Of GRES texts: `gpu:4`, `gpu:a100:4`, `gres:gpu:8`."""
        parts = self.first(*names).str.extract_all(r"gpu(?::[A-Za-z][^:,()]*)?(?::\d+)?")
        return _total(parts.list.eval(_count(pl.element().str.extract(r":(\d+)$").fill_null("1"))))

    def gpu_type(self) -> pl.Expr:
        """Kind of GPU that was asked for, `a100` of `gres/gpu:a100=4`; never of what was given, which may be chosen."""
        asked = [self.text(name) for name in ("reqtres", *_ASKED_GRES)]
        kinds = (r"(?:^|[,:/])gpu:([A-Za-z][^:,()=]*)", r"(?:^|[,:/])gpu:([^:,()=]+)[=:]")
        return pl.coalesce([text.str.extract(kind) for text in asked for kind in kinds]).str.to_lowercase()

    def tres_memory(self) -> pl.Expr:
        return pl.coalesce([_mib(t.str.extract(r"(?:^|,)mem=([0-9.]+[KMGTP]?)")) for t in self._tres_texts()])

    def req_memory(self) -> list[pl.Expr]:
        """ReqMem in MiB and what it is for: `n` a node, `c` a CPU, null the job."""
        value = self.text("reqmem")
        size = _mib(value.str.extract(r"^([0-9.]+[KMGTP]?)"))
        per = value.str.extract(r"([nc])$")
        flagged = (
            pl.when(size >= _PER_CPU_64).then(size - _PER_CPU_64).when(size >= _PER_CPU_32).then(size - _PER_CPU_32)
        )
        return [
            pl.coalesce(flagged, size).alias("_req_mib"),
            pl.when(flagged.is_not_null()).then(pl.lit("c")).otherwise(per).alias("_req_per"),
        ]

    def duration(self, raw: str, text: str) -> pl.Expr:
        """Seconds told as a whole number or as `[D-]HH:MM:SS`; null where neither is one."""
        seconds = self.text(raw).cast(pl.Int64, strict=False)
        return pl.coalesce(pl.when(seconds.is_between(0, _LAST_EPOCH_S)).then(seconds), _seconds(self.text(text)))

    def bytes(self, name: str) -> pl.Expr:
        """Bytes; a letter behind the number is a power of 1024."""
        told = self.text(name)
        number = told.str.extract(r"^([0-9.]+)[KMGTP]?$").cast(pl.Float64, strict=False)
        size = number * _unit_mib(told).fill_null(2.0**-20) * 2.0**20
        return pl.when(size.is_between(0, 2.0**53)).then(size.round()).cast(pl.Int64)

    def limit(self) -> pl.Expr:
        """Seconds; null for UNLIMITED, Partition_Limit and blanks."""
        raw = self.text("timelimitraw").cast(pl.Int64, strict=False)
        minutes = pl.when(raw.is_between(0, _MAX_LIMIT_MIN)).then(raw * 60)
        return pl.coalesce(minutes, _seconds(self.text("timelimit")))

    def state(self) -> pl.Expr:
        """The first word of `CANCELLED by 1000`.

        An attempt that a requeue or a change of size cut off, and that has an end, is `REQUEUED` or `RESIZING`.
        """
        word = self.text("state").str.extract(r"^([A-Za-z_]+)").str.to_uppercase()
        lasts = self.time("end").is_null()
        word = pl.when(lasts).then(word.replace(_CUT_OFF)).otherwise(word).replace(_STATE_OF)
        return pl.when(word.is_in(STATES)).then(word).otherwise(pl.lit("UNKNOWN"))


def count_tasks(body: str) -> int | None:
    """Tasks of an array's list of indices, as `1-10`, `1,3,7-9` or `0-20:5`; None where it is cut off or no list."""
    total = 0
    for part in body.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", part.strip())
        if found is None:
            return None
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if last < first or step < 1:
            return None
        total += (last - first) // step + 1
    return total


def _count(text: pl.Expr) -> pl.Expr:
    value = text.cast(pl.Int64, strict=False)
    return pl.when(value.is_between(0, _MOST)).then(value)


def _total(counts: pl.Expr) -> pl.Expr:
    """Sum of lists; null for an empty one, and where one of the counts cannot be read."""
    is_whole = (counts.list.len() > 0) & ~counts.list.eval(pl.element().is_null()).list.any()
    return pl.when(is_whole).then(counts.list.sum())


def _mib(text: pl.Expr) -> pl.Expr:
    number = text.str.extract(r"^([0-9.]+)").cast(pl.Float64, strict=False)
    return number * _unit_mib(text).fill_null(1.0)


def _unit_mib(text: pl.Expr) -> pl.Expr:
    """What the letter at the end stands for, MiB; null without one."""
    unit = text.str.extract(r"([KMGTP])$")
    return unit.replace_strict(list(_UNITS_MIB), list(_UNITS_MIB.values()), default=None, return_dtype=pl.Float64)


def _seconds(text: pl.Expr) -> pl.Expr:
    """`[D-]HH:MM:SS`, `MM:SS` or whole minutes."""
    pattern = r"^(?:(\d{1,10})-)?(\d{1,10})(?::(\d{1,10}))?(?::(\d{1,10}))?$"
    parts = [text.str.extract(pattern, i).cast(pl.Int64, strict=False) for i in range(1, 5)]
    days, first, second, third = parts
    clock = pl.when(third.is_not_null()).then(first * 3600 + second * 60 + third)
    short = pl.when(days.is_not_null()).then(first * 3600 + second.fill_null(0) * 60)  # D-HH, D-HH:MM
    brief = first * 60 + second.fill_null(0)  # MM, MM:SS
    return days.fill_null(0) * 86_400 + pl.coalesce(clock, short, brief)
