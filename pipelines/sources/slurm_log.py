"""Who preempted whom: from slurmctld's log, the only place where Slurm writes it down.

The log is read from where the last reading ended. Only lines on preemptions are understood here.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl

from features.vocabulary import TIME
from pipelines.sources import SourceError

# `[2026-11-30T07:41:28.661] preempted JobId=5_1(8) has been requeued to reclaim resources for JobId=17`; before 18.08
# `preempted job 16 has been killed to reclaim resources for job 17`. In brackets: the raw id of an array's task.
_LINE = re.compile(
    r"^\[(?P<time>[^\]]+)\].*?\bpreempted (?:JobId=|job )(?P<job>\d+)(?:[_+][^\s(]*)?(?:\((?P<raw>\d+)\))?\s.*?"
    r"\bfor (?:JobId=|job )(?P<by>\d+)(?:[_+][^\s(]*)?(?:\((?P<by_raw>\d+)\))?",
    re.IGNORECASE,
)
_SCHEMA = {"time": TIME, "job_id": pl.String, "preempted_by": pl.String}
_MOST = 256 * 2**20  # bytes of an old log that are read at first
_NEAR = timedelta(seconds=90)  # a preempted job has KillWait and the like to end


def parse_preemptions(text: str) -> pl.DataFrame:
    """Preemptions that log lines tell of.

    Args:
        text: Lines of slurmctld's log; times without an offset are of this host's time zone.

    Returns:
        `time`, `job_id` (raw) and `preempted_by` (raw), in the order of the log. Lines whose time cannot be read are
        left out.
    """
    rows = []
    for line in text.splitlines():
        if "preempted" not in line or (found := _LINE.search(line)) is None:
            continue
        try:
            at = datetime.fromisoformat(found["time"].split(" ")[0]).astimezone(UTC)
        except ValueError:
            continue
        rows.append((at, found["raw"] or found["job"], found["by_raw"] or found["by"]))
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def with_preemptors(jobs: pl.DataFrame, preemptions: pl.DataFrame) -> pl.DataFrame:
    """Jobs with `preempted_by` where an attempt ended as the log says that it was preempted.

    Args:
        jobs: Columns of `raw_jobs`.
        preemptions: As given by `parse_preemptions`.

    Returns:
        The jobs in the same order; `preempted_by` stays null where the log tells nothing.
    """
    if jobs.is_empty() or preemptions.is_empty():
        return jobs
    asked = jobs.with_row_index("_at").filter((pl.col("state") == "PREEMPTED") & pl.col("end_time").is_not_null())
    near = (
        asked.select("_at", "job_id", "end_time")
        .join(preemptions.rename({"preempted_by": "_by"}), on="job_id")
        .with_columns((pl.col("time") - pl.col("end_time")).abs().alias("_off"))
        .filter(pl.col("_off") <= _NEAR)
        .sort("_off")
        .unique("_at", keep="first", maintain_order=True)
    )
    joined = jobs.with_row_index("_at").join(near.select("_at", "_by"), on="_at", how="left", maintain_order="left")
    return joined.with_columns(pl.coalesce("_by", "preempted_by").alias("preempted_by")).select(jobs.columns)


class PreemptionLog:
    """slurmctld's log of one cluster.

    Args:
        source: Name of the cluster, for messages.
        path: The log; it may be rotated.
    """

    def __init__(self, source: str, path: str) -> None:
        self.source, self.path = source, Path(path)
        self._place = (0, 0)  # inode and offset
        self._known = pl.DataFrame(schema=_SCHEMA)

    def read(self) -> pl.DataFrame:
        """All preemptions known so far; columns as of `parse_preemptions`.

        Raises:
            SourceError: The log cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                status = self.path.stat()
                inode, offset = self._place
                if inode != status.st_ino or offset > status.st_size:
                    offset = max(0, status.st_size - _MOST)
                file.seek(offset)
                data = file.read()
        except OSError as error:
            raise SourceError(f"{self.source}: slurm_ctld_log {self.path}: {error.strerror}") from error
        whole = data[: data.rfind(b"\n") + 1]
        self._place = (status.st_ino, offset + len(whole))
        found = parse_preemptions(whole.decode("utf-8", "replace"))
        self._known = pl.concat([self._known, found]).unique(maintain_order=True)
        return self._known
