"""Jobs of `sacct -P` text, in batches of whole records. What a field means stands in `pipelines/sources/sacct.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import polars as pl

from pipelines.imports import ImportingError, Piece, Task
from pipelines.imports.job_bounds import FIRST_TIME, LAST_TIME, NOT_ENDED, UNKNOWN_STATE, written_at
from pipelines.imports.lines import HEADER_AGAIN, Line, batches
from pipelines.imports.report import Report
from pipelines.job_history import LIVE_STATES
from pipelines.sources.sacct import DELIMITERS, SacctError, parse_sacct
from pipelines.sources.sacct_zone import ZoneTimes

_FREE_TEXT_LAST = ("jobname", "name", "comment", "submitline", "workdir")
_UNSET = {"", "unknown", "none", "n/a", "(null)", "none assigned", "invalid", "(none)", "unlimited", "partition_limit"}
# Registry column → fields that tell it; a value in one of them and none in the column is a value that was not read.
_TOLD = {
    "eligible_time": ("eligible",), "start_time": ("start",), "end_time": ("end",),
    "planned_start_time": ("plannedstart",), "nodes": ("nnodes", "reqnodes", "allocnodes"),
    "cpus": ("reqcpus", "ncpus", "alloccpus"), "gpus": ("reqtres", "alloctres", "tres", "reqgres", "allocgres"),
    "memory_mib": ("reqmem",), "time_limit_s": ("timelimitraw", "timelimit"), "state": ("state",),
    "node_list": ("nodelist",), "restarts": ("restarts", "restartcnt"), "exit_code": ("exitcode",),
    "elapsed_s": ("elapsedraw", "elapsed"),
}  # fmt: skip
# A job in these states has no such value, whatever the record tells, and why; None: what is told is no loss.
_LIVE: dict[str, str | None] = dict.fromkeys(LIVE_STATES, NOT_ENDED)
_WITHOUT: dict[str, dict[str, str | None]] = {
    "start_time": {"PENDING": None, "CANCELLED": "a job that was cancelled before it started has no start"},
    "end_time": _LIVE,
    "exit_code": dict.fromkeys(LIVE_STATES),
    "elapsed_s": dict.fromkeys(LIVE_STATES),
}
_SLURM_SAYS = "messages of Slurm, no records"
_REASON = "cannot be read or cannot be true"
_NO_SUBMIT = "no submission time that can be read, or no job id"
_AHEAD = "submitted more than a day ahead of now"
_MOST_SEARCHED = 64
_MOST_STEPS = 20_000  # lines that are held back until the record of the next job comes
_EPOCH = re.compile(r"\d{1,12}")
# What Slurm's programs write between records where stderr went to the same file.
_MESSAGE = re.compile(
    r"s[a-z]{3,9}: (?:\w+: )?(?:error|fatal|warning|debug\d?|info)\b|slurm_\w+ error\b", re.IGNORECASE
)


def read_sacct(task: Task) -> Iterator[Piece]:
    """Jobs of each file, with what their steps say.

    Yields:
        `raw_jobs`.

    Raises:
        ImportingError: The first line is no header of sacct.
    """
    for path in task.files:
        written = written_at(path, task.now)
        header: _Header | None = None
        rest: list[Line] = []
        for batch in batches(path, task.report, task.progress):
            if header is None:
                header = _Header(path, batch[0].text)
                batch = batch[1:]
            lines = [*rest, *batch]
            cut = header.last_record(lines)
            rest = lines[cut:]
            if lines[:cut]:
                yield _piece(lines[:cut], header, task, written)
        if header is None:
            raise ImportingError(f"{path}: it is empty, or holds no line that can be read")
        if rest:
            yield _piece(rest, header, task, written)


class _Header:
    """The first line: its delimiter and the places of fields."""

    def __init__(self, path: Path, text: str) -> None:
        self.text = text.lstrip("\ufeff")
        try:
            parse_sacct(self.text + "\n", "", datetime(2000, 1, 1, tzinfo=UTC))
        except SacctError as error:
            raise ImportingError(f"{path}: line 1: {error}") from None
        self.delimiter = max(DELIMITERS, key=self.text.count)
        self.ended = self.text.endswith(self.delimiter)
        names = self.text.removesuffix(self.delimiter).split(self.delimiter)
        self.names = [name.strip().lower().split("%")[0] for name in names]
        self.at = {name: i for i, name in enumerate(self.names)}
        self.cuts = self.text.count(self.delimiter)

    def is_record(self, text: str) -> bool:
        """A whole record stands on the line, or the beginning of one whose name holds a newline."""
        count = text.count(self.delimiter)
        return count >= self.cuts or (self.ended and count == self.cuts - 1)

    def is_continued(self, text: str) -> bool:
        """Perhaps the rest of a name with a newline: no delimiter, or only the one that ends the record."""
        if self.names[-1] not in _FREE_TEXT_LAST or _MESSAGE.match(text):
            return False
        return text.count(self.delimiter) == 0 or (self.ended and text.rstrip().endswith(self.delimiter))

    def last_record(self, lines: list[Line]) -> int:
        """Where the last record of a job begins: what follows it, and its steps, may stand in the next batch."""
        for i in range(len(lines) - 1, max(len(lines) - _MOST_STEPS, 0) - 1, -1):
            if self.is_record(lines[i].text) and "." not in _job_ids(lines[i].text, self)[0]:
                return i
        return len(lines)


def _piece(lines: list[Line], header: _Header, task: Task, written: datetime) -> Piece:
    report = task.report
    good: list[Line] = []
    records: list[Line] = []
    for line in lines:
        if line.text == header.text:
            report.read += 1
            report.skip(HEADER_AGAIN, 1, line.number)
        elif header.is_record(line.text):
            good.append(line)
            records.append(line)
        elif good and header.is_continued(line.text):
            good.append(line)
            report.read += 1
            report.skip("lines that go on with the name of the job before them", 1, line.number, line.text)
        else:
            report.read += 1
            found = line.text.count(header.delimiter) + (0 if header.ended else 1)
            reason = f"fewer fields than the header's {len(header.names)}"
            reason = _SLURM_SAYS if _MESSAGE.match(line.text) else reason
            example = line.text if reason == _SLURM_SAYS else f"{found}: {line.text}"
            report.drop(reason, place=line.number, example=example)
    report.read += len(records)
    zone = _zone_of(records, header, task)
    jobs, _ = _parse(good, header, task, written, zone)
    _count_skipped_times(zone, report)
    ids = [_job_ids(line.text, header) for line in records]
    steps = sum("." in known[0] for known in ids)
    if steps:
        report.skip("steps of jobs: their job tells of them", steps)
    missing = len(ids) - steps - len(jobs)
    if missing > 0:
        missing -= _lost(list(zip(records, ids, strict=True)), jobs, header, task, written)
        missing -= sum(name == "submit_time" for name, _, _ in zone.lost) if zone else 0
    if missing > 0:
        report.skip("records that a later record of the same job replaces", missing)
    _count_nulls(records, ids, jobs, header, report)
    return {"raw_jobs": jobs}


def _parse(
    lines: list[Line], header: _Header, task: Task, written: datetime, zone: ZoneTimes | None = None
) -> tuple[pl.DataFrame, list[str]]:
    text = "\n".join([header.text, *(line.text for line in lines)]) + "\n"
    return parse_sacct(text, task.cluster, written, header.delimiter, now=task.now, zone=zone)


def _lost(
    records: list[tuple[Line, tuple[str, str]]], jobs: pl.DataFrame, header: _Header, task: Task, written: datetime
) -> int:
    """Count the records that give no job: those that give none when they are parsed alone."""
    known = set(jobs["job_id"])
    candidates = [line for line, ids in records if "." not in ids[0] and not known.intersection(ids)]
    lost = 0
    for i, line in enumerate(candidates):
        if i < _MOST_SEARCHED:
            job, warnings = _parse([line], header, task, written)
            if not job.is_empty():
                continue
            is_ahead = any("ahead" in text for text in warnings)
            reason = _AHEAD if is_ahead else _NO_SUBMIT
        elif lost < _MOST_SEARCHED:
            break  # they were not lost, they have other ids
        else:
            reason = _NO_SUBMIT
        lost += 1
        task.report.drop(reason, place=line.number, example=line.text)
    return lost


def _count_nulls(
    records: list[Line], ids: list[tuple[str, str]], jobs: pl.DataFrame, header: _Header, report: Report
) -> None:
    """Count values that were told and not read."""
    columns = [(name, jobs[name] == "UNKNOWN" if name == "state" else jobs[name].is_null()) for name in _TOLD]
    lacking = {
        name: dict(jobs.filter(bad).select("job_id", "state").iter_rows()) for name, bad in columns if bad.any()
    }  # job id → state
    for line, known in zip(records, ids, strict=True) if lacking else ():
        for column, states in lacking.items():
            state = next((states[one] for one in known if one in states), None)
            told = next((text for name in _TOLD[column] if _is_told(text := _field(line.text, header, name))), "")
            if state is None or not told or (column == "gpus" and "gpu" not in told):
                continue
            reason: str | None = UNKNOWN_STATE if column == "state" else _REASON
            if state in _WITHOUT.get(column, ()) and (column == "exit_code" or _is_time(told)):
                reason = _WITHOUT[column][state]
            if reason is not None:
                report.null(column, reason, 1, line.number, told)


def _is_told(text: str) -> bool:
    return text.lower() not in _UNSET and bool(text.strip("0:"))  # nor is a length of 00:00:00


def _is_time(text: str) -> bool:
    if _EPOCH.fullmatch(text):
        return True
    try:
        return FIRST_TIME.year <= datetime.fromisoformat(text).year < LAST_TIME.year
    except ValueError:
        return False


def _zone_of(records: list[Line], header: _Header, task: Task) -> ZoneTimes | None:
    """The zone that times were written in; None for UTC, and for seconds since the epoch, which have none."""
    zone = task.zone.key
    if zone == "UTC" or not records or _EPOCH.fullmatch(_field(records[0].text, header, "submit")):
        return None
    return ZoneTimes(zone)


def _count_skipped_times(zone: ZoneTimes | None, report: Report) -> None:
    if zone is None:
        return
    for name, job_id, at in zone.lost:
        example, reason = f"job {job_id} at {at:%Y-%m-%d %H:%M:%S}", f"no such time in {zone.zone}"
        if name == "submit_time":
            report.drop(f"the submission: {reason}", 1, example=example)
        else:
            report.null(name, f"{reason}: its clocks skip it", 1, example=example)


def _field(text: str, header: _Header, name: str) -> str:
    at = header.at.get(name)
    fields = text.split(header.delimiter) if at is not None else []
    return fields[at].strip() if at is not None and at < len(fields) else ""


def _job_ids(text: str, header: _Header) -> tuple[str, str]:
    """The raw id and the other one; the other's where one is not told."""
    raw, other = _field(text, header, "jobidraw"), _field(text, header, "jobid")
    return (other if raw.lower() in _UNSET else raw), (raw if other.lower() in _UNSET else other)
