"""Import: how it ends when it cannot end well. A plain sentence, the right exit code, and nothing left behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner

from pipelines.importing import import_files
from pipelines.imports import KINDS, ImportingError
from pipelines.imports.scratch import PREFIX, clear_leftovers, scratch_folder, writing
from pipelines.imports.staging import Staging
from pipelines.imports.targets import ParquetTarget, check_output
from weatherglass import cli

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
EPOCH = round(datetime(2026, 11, 30, 11, tzinfo=UTC).timestamp())
PAGE = 'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-0",Hostname="n1"} 40 '


def call(*arguments: object) -> Any:
    return CliRunner().invoke(cli, ["import", *map(str, arguments)])


def many_jobs(path: Path, count: int) -> Path:
    rows = (f"{i} {i} 5 600 8 -1 -1 16 3600 1024 1 7 2 4 1 -1 -1 -1\n" for i in range(count))
    path.write_text(f"; UnixStartTime: {EPOCH - 10**6}\n" + "".join(rows))
    return path


def start(*arguments: object, before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "weatherglass", "import", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, preexec_fn=before, cwd=Path(__file__).parents[1]
    )


def wait_for_leftovers(folder: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not list(folder.glob(f"{PREFIX}*/*.parquet")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)


# --- leftovers --------------------------------------------------------------------------------------------


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    jobs, out = many_jobs(tmp_path / "a.swf", 300_000), tmp_path / "out"
    out.mkdir()
    killed = start("swf", jobs, "--cluster", "c", "--out", out / "a.parquet")
    wait_for_leftovers(out, killed)
    killed.kill()
    killed.communicate()
    (left,) = out.iterdir()
    assert left.name.startswith(PREFIX)
    (out / f"{PREFIX}notes.txt").write_text("mine")
    with scratch_folder(out) as living:
        (living / "part").write_text("x")
        small = many_jobs(tmp_path / "b.swf", 3)
        done = call("swf", small, "--cluster", "c", "--out", out / "b.parquet")
        assert done.exit_code == 0, done.output
        assert sorted(path.name for path in out.iterdir()) == sorted(["b.parquet", f"{PREFIX}notes.txt", living.name])
        assert (living / "part").read_text() == "x"
    assert sorted(path.name for path in out.iterdir()) == [f"{PREFIX}notes.txt", "b.parquet"]


def test_leftovers_without_a_lock_and_links(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}early").mkdir()  # killed before it had its lock
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    assert clear_leftovers(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{PREFIX}link", "elsewhere"]
    assert clear_leftovers(tmp_path / "nowhere") == 0


# --- disks and signals ------------------------------------------------------------------------------------


def test_interrupted(tmp_path: Path) -> None:
    jobs, out = many_jobs(tmp_path / "a.swf", 300_000), tmp_path / "out"
    out.mkdir()
    process = start("swf", jobs, "--cluster", "c", "--out", out / "a.parquet")
    wait_for_leftovers(out, process)
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "weatherglass: interrupted; nothing was written\n")
    assert process.returncode == 130
    assert list(out.iterdir()) == []


def test_interrupted_in_a_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Staging, table: str) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise RuntimeError("Query interrupted") from error  # what DuckDB makes of it

    monkeypatch.setattr(Staging, "slices", interrupted)
    jobs = many_jobs(tmp_path / "a.swf", 3)
    done = call("swf", jobs, "--cluster", "c", "--out", tmp_path / "o.parquet")
    assert (done.exit_code, done.output) == (130, "weatherglass: interrupted; nothing was written\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.swf"]


def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    """A file size limit stands for a full disk: the same calls fail, and no right to mount one is needed."""
    jobs, out = many_jobs(tmp_path / "a.swf", 100_000), tmp_path / "out"
    out.mkdir()
    (out / "a.parquet").write_bytes(b"PAR1 of an earlier import")

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    process = start("swf", jobs, "--cluster", "c", "--out", out / "a.parquet", before=limited)
    stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (1, "")
    assert stderr.startswith(f"weatherglass: {out}: ")
    assert "Traceback" not in stderr
    assert stderr.count("\n") == 1
    assert [path.name for path in out.iterdir()] == ["a.parquet"]
    assert (out / "a.parquet").read_bytes() == b"PAR1 of an earlier import"


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), pl.exceptions.ComputeError("No space left on device (os error 28)")],
)
def test_full_disks_in_words(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(ImportingError, match="the disk is full; what was begun there is removed"), writing(tmp_path):
        raise error


def test_nothing_is_replaced_when_one_of_several_files_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.prom"
    node = f'ipmi_temperature_celsius{{name="Inlet Temp",instance="n1:9290"}} 25 {EPOCH}000'
    path.write_text(f"{PAGE}{EPOCH}000\n{node}\n")
    done = call("exposition", path, "--cluster", "c", "--out", tmp_path / "o.parquet")
    assert done.exit_code == 0, done.output
    tables = sorted(file.name for file in tmp_path.glob("*.parquet"))
    assert tables == ["o.core_node_samples.parquet", "o.parquet"]
    before = {name: (tmp_path / name).read_bytes() for name in tables}
    sink = pl.LazyFrame.sink_parquet

    def failing(self: pl.LazyFrame, file: Path, **options: Any) -> Any:
        if "core_node_samples" in Path(file).name:
            raise OSError(28, "No space left on device")
        return sink(self, file, **options)

    monkeypatch.setattr(pl.LazyFrame, "sink_parquet", failing)
    path.write_text(f"{PAGE}{EPOCH + 15}000\n{node}\n")
    done = call("exposition", path, "--cluster", "c", "--out", tmp_path / "o.parquet")
    assert "the disk is full" in str(done.exception)
    assert {name: (tmp_path / name).read_bytes() for name in tables} == before
    assert not list(tmp_path.glob(f"{PREFIX}*"))


# --- outputs ----------------------------------------------------------------------------------------------


def test_files_beside_the_output_are_looked_at_too(tmp_path: Path) -> None:
    beside = tmp_path / "o.core_node_samples.parquet"
    beside.write_text("a poem")
    with pytest.raises(ImportingError, match=r"o\.core_node_samples\.parquet: there is a file that is no Parquet"):
        check_output(tmp_path / "o.parquet", [])
    beside.write_bytes(b"PAR1")
    with pytest.raises(ImportingError, match="this file is what is read"):
        check_output(tmp_path / "o.parquet", [beside])
    jobs = many_jobs(tmp_path / "a.swf", 3)
    done = call("swf", jobs, "--cluster", "c", "--out", tmp_path / "o.parquet")
    assert "o.core_node_samples.parquet beside it is of an earlier import and was left as it is" in done.output


@pytest.mark.parametrize("kind", KINDS)
def test_paths_of_no_use(kind: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, said in (
        ("empty", "the file is empty"), ("pipe", "a pipe or a device"), ("nothing", "no such file or folder"),
        ("folder", "no files in the folder" if kind in ("exposition", "prometheus-json") else "a folder; .* one file"),
    ):  # fmt: skip
        target = ParquetTarget(tmp_path / "o.parquet")
        with pytest.raises(ImportingError, match=said):
            import_files(kind, tmp_path / name, "c", target, tmp_path, now=NOW)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "folder", "pipe"]


def test_nothing_of_use_is_said_plainly(tmp_path: Path) -> None:
    for name, text, said in (
        ("a", "no\nswf\n", "a: nothing of it could be used, and nothing was written. Is it of the kind swf?"),
        ("b", "; a comment\n", "b: nothing of it could be used, and nothing was written: it holds no data"),
    ):
        (tmp_path / name).write_text(text)
        done = call("swf", tmp_path / name, "--cluster", "c", "--out", tmp_path / "o.parquet")
        assert done.exit_code == 1
        assert done.stderr.splitlines()[-1].endswith(said)
    done = call("swf", tmp_path / "a", "--cluster", "c", "--at", "2026-11-30T12:00:00Z")
    assert done.exit_code == 2
    assert "--at means nothing for swf; it is for exposition" in done.stderr


def test_a_file_that_changes_while_it_is_read_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.prom"
    path.write_text("".join(f"{PAGE}{EPOCH + i}000\n" for i in range(3)))

    def grow(_: int) -> None:
        with path.open("a") as file:
            file.write("DCGM_FI_DEV")

    target = ParquetTarget(tmp_path / "o.parquet")
    report = import_files("exposition", path, "c", target, tmp_path, now=NOW, progress=grow)
    target.close()
    assert report.rows == 3
    assert "a.prom changed while it was read: import it again when it is whole" in report.notes
