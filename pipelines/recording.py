"""`weatherglass record`: the GPUs of this host into a file of canonical telemetry, to keep, share or backtest on.

Here belong the beat of the samples and the file; not what a GPU is asked (`pipelines/sources/nvml.py`). Samples are
kept in parts beside the file while it is being made: what was recorded before a crash can still be read.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from pipelines.progress import Progress, span
from pipelines.sources.nvml import NvmlReader, Row, frame_of
from pipelines.words import counted

PART_S = 60.0


class RecordingError(ValueError):
    """Nothing can be recorded; the message says why."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What was recorded.

    Attributes:
        path: The file.
        rows, gpus: Samples and GPUs in it.
        seconds: From the first sample to the last.
        late: Beats that were left out because reading took longer than a beat.
        is_whole: It was not interrupted.
    """

    path: Path
    rows: int
    gpus: int
    seconds: float
    late: int
    is_whole: bool


def print_recording(out: Path, *, seconds: float, every_s: float, cluster: str, node: str | None) -> None:
    """Record the GPUs of this host, and say what came of it."""
    reader = NvmlReader(cluster, node)
    try:
        models = ", ".join(f"{n} × {name}" for name, n in Counter(reader.names).items())
        print(f"{models}: every {every_s:g} s for {span(seconds)} into {out}", flush=True)
        made = record(reader, out, seconds=seconds, every_s=every_s)
    finally:
        reader.close()
    early = "" if made.is_whole else ", stopped early"
    print(f"{made.rows:,} samples of {counted(made.gpus, 'GPU')} over {span(made.seconds)} in {made.path}{early}")
    if made.late:
        print(f"{counted(made.late, 'beat')} left out: reading these GPUs takes longer than {every_s:g} s")


def record(
    reader: NvmlReader,
    out: Path,
    *,
    seconds: float,
    every_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Recording:
    """Sample all GPUs for a while.

    Args:
        reader: The GPUs.
        out: File to be made, Parquet; it must not be there yet.
        seconds: How long.
        every_s: Between samples.
        clock: Seconds that never go back.
        sleep: Waits so many seconds.

    Returns:
        What was recorded. After Ctrl-C it holds what there was by then.

    Raises:
        RecordingError: The file is there already, cannot be written, or no GPU gave a sample.
        pipelines.sources.nvml.NvmlError: The driver went away; what was recorded stays in the parts.
    """
    parts = out.with_name(out.name + ".parts")
    for there in (out, parts):
        if there.exists():
            raise RecordingError(f"{there} is there already: name another file, or take it away")
    try:
        parts.mkdir(parents=True)
    except OSError as error:
        raise RecordingError(f"{parts} cannot be made: {error.strerror}") from None
    beats = max(1, round(seconds / every_s))
    is_whole, late = _beats(reader, parts, beats, every_s, clock, sleep)
    frames = pl.scan_parquet(parts / "*.parquet") if any(parts.iterdir()) else None
    if frames is None:
        parts.rmdir()
        raise RecordingError("no GPU gave a sample")
    whole = frames.collect()
    unfinished = out.with_name(out.name + ".part")
    whole.write_parquet(unfinished)
    unfinished.rename(out)
    shutil.rmtree(parts)
    first, last = whole.select(first=pl.col("ts").min(), last=pl.col("ts").max()).row(0)
    return Recording(out, whole.height, whole["gpu_uuid"].n_unique(), (last - first).total_seconds(), late, is_whole)


def _beats(
    reader: NvmlReader,
    parts: Path,
    beats: int,
    every_s: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> tuple[bool, int]:
    """Read at each beat, write a part now and then; whether all of it went through, and beats left out."""
    held: list[Row] = []
    began = clock()
    beat = late = written = 0
    flushed = began
    with Progress("record", "samples", part="beat") as progress:
        try:
            while beat < beats:
                rows = reader.read()
                held += rows
                now = clock()
                if held and now - flushed >= PART_S:
                    written, flushed, held = _write(parts, written, held), now, []
                due = max(beat + 1, int((now - began) / every_s))
                late += due - beat - 1
                progress(min(due, beats), beats, len(rows))
                beat = due
                if beat < beats:
                    sleep(max(0.0, began + beat * every_s - clock()))
            is_whole = True
        except KeyboardInterrupt:
            is_whole = False
        finally:
            if held:
                _write(parts, written, held)
    return is_whole, late


def _write(parts: Path, written: int, rows: list[Row]) -> int:
    path = parts / f"{written:06d}.parquet"
    unfinished = path.with_suffix(".part")
    frame_of(rows).write_parquet(unfinished)
    unfinished.rename(path)
    return written + 1
