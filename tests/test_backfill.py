"""Long reads of the past: shown while they run, gone on with after an interruption."""

from __future__ import annotations

import io
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipelines.backfill import FINISHED, backfill_mark, resume_from, windows_at_once
from pipelines.progress import Progress, span
from pipelines.store import Store
from tests.services import Process, Prometheus

SINCE = datetime(2026, 11, 1, tzinfo=UTC)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_same_length_is_the_same_backfill() -> None:
    assert backfill_mark(timedelta(days=30)) == backfill_mark(timedelta(hours=720)) == "backfill:2592000s"
    assert backfill_mark(timedelta(days=30)) != backfill_mark(timedelta(days=31))


def test_a_backfill_goes_on_from_its_mark_and_begins_anew_when_it_was_through() -> None:
    inside = SINCE + timedelta(days=3)
    assert resume_from(None, SINCE) == SINCE
    assert resume_from(inside, SINCE) == inside
    assert resume_from(FINISHED, SINCE) == SINCE
    assert resume_from(SINCE - timedelta(days=2), SINCE) == SINCE  # interrupted long ago: all of it lies before


def test_a_long_past_is_read_in_longer_pieces_where_little_is_in_it() -> None:
    assert windows_at_once(0, 1, 300) == 4  # an empty past: more, but by steps
    assert windows_at_once(10, 4, 300) == 12  # an hour at most
    assert windows_at_once(40_000, 1, 300) == 3
    assert windows_at_once(2_000_000, 1, 300) == 1
    assert windows_at_once(600_000, 12, 300) == 3  # the cluster began
    assert windows_at_once(0, 1, 7200) == 1


def test_a_log_gets_a_line_a_minute() -> None:
    log, clock = io.StringIO(), Clock()
    with Progress("prod", stream=log, clock=clock) as progress:
        for done in range(1, 11):
            clock.now_s += 30
            progress(done, 100, 3000)
    lines = log.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0] == "prod: 2 of 100 windows, 100 samples/s, 49 min left"


def test_a_terminal_gets_a_bar_that_ends_with_its_line() -> None:
    terminal, clock = Terminal(), Clock()
    with Progress("prod", stream=terminal, clock=clock) as progress:
        for done in range(1, 11):
            clock.now_s += 3
            progress(done, 10, 600)
    text = terminal.getvalue()
    assert "10/10" in text
    assert "200 samples/s" in text
    assert "3 s left" in text
    assert text.endswith("\n") or text.endswith("\x1b[?25h")


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_what_is_begun_after_the_bar_is_said(stream: io.StringIO) -> None:
    clock = Clock()
    with Progress("prod", stream=stream, clock=clock) as progress:
        progress.stage("reading samples")
        clock.now_s += 61
        progress(4, 4, 600)
        progress.stage("deriving minutes")
        assert stream.getvalue().endswith("\nprod: deriving minutes …\n")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "prod: reading samples …"
    assert len(lines) >= 3


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_what_is_soon_over_shows_nothing(stream: io.StringIO) -> None:
    clock = Clock()
    with Progress("prod", stream=stream, clock=clock) as progress:
        clock.now_s += 1
        progress(1, 1, 5)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (89, "89 s"), (3540, "59 min"), (7500, "2 h 05 min"), (190_000, "2 d 4 h")]
)
def test_lengths_of_time_in_words(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.services("prometheus", "promtool")
def test_a_killed_backfill_goes_on_and_ends_with_all_samples(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    first = now.replace(microsecond=0) - timedelta(hours=2)
    labels = 'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1",Hostname="n1",job="dcgm"}'
    lines = [f"{labels} {k % 90} {(first + timedelta(seconds=15 * k)).timestamp():.0f}" for k in range(480)]
    server = Prometheus(tmp_path / "prometheus", history="# TYPE DCGM_FI_DEV_GPU_TEMP gauge\n" + "\n".join(lines))
    config = tmp_path / "weatherglass.toml"
    config.write_text(
        f'state_dir = "{tmp_path}/state"\n[clusters.a]\njobs = "none"\nprometheus_url = "{server.url}"\n'
        "[ingest]\nwindow_s = 600\n"
    )
    command = [sys.executable, "-m", "weatherglass", "--config", str(config), "ingest", "--since", "2h"]

    def stored() -> tuple[int, datetime | None]:
        with Store.open(f"sqlite:{tmp_path}/state/store/catalogue.sqlite", f"{tmp_path}/state/store/data") as store:
            count = store.query("SELECT count(*) AS n FROM core_gpu_samples")["n"][0]
            return count, store.mark("a", backfill_mark(timedelta(hours=2)))

    try:
        child = Process(command, tmp_path / "first.log")
        child.wait_until(lambda: (tmp_path / "state/store/catalogue.sqlite").exists() and stored()[0] > 0, 60)
        child.kill()
        count, mark = stored()
        assert 0 < count < 440
        assert mark is not None
        assert mark > first
        again = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert again.returncode == 0, again.stderr
        assert f"a: goes on at {mark:%Y-%m-%d %H:%M} UTC, where it was interrupted" in again.stdout
        count, mark = stored()
        assert mark == FINISHED
        assert count >= 480 - 42  # but for what is too new to be read
    finally:
        server.stop()
