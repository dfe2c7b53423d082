"""Long reads of the past: shown while they run, gone on with after an interruption."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import pytest

from pipelines.backfill import FINISHED, backfill_mark, resume_from
from pipelines.progress import Progress, span

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
