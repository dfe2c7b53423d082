"""Progress of long work: what is begun, a bar on a terminal, now and then a line in a log. Short work has no bar.

Only how it is shown; the work calls it after each part.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from pipelines.words import counted

_QUIET_S = 2.0  # a bar that is gone at once is a flicker
_LINE_PERIOD_S = 60.0


class Progress:
    """Shows how far work in parts of equal length has come. Call it after each part; `close` it at the end.

    Args:
        label: What is done, as the name of a cluster.
        unit: What the parts bring, as `samples`.
        stream: Where it is shown; None: standard error.
        clock: Seconds that never go back.
        part: What a part is called, as `window`.
    """

    def __init__(
        self,
        label: str,
        unit: str = "samples",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        part: str = "window",
    ) -> None:
        self._part = part
        self._label, self._unit, self._clock = label, unit, clock
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._began = self._said = clock()
        self._bar: Any = None
        self._shown = self._rows = 0

    def __call__(self, done: int, total: int, rows: int) -> None:
        """Show it.

        Args:
            done: Parts done.
            total: Parts in all.
            rows: What the last part brought.
        """
        now = self._clock()
        self._rows += rows
        text = self._text(done, total, now - self._began)
        if not self._is_terminal:
            if now - self._said >= _LINE_PERIOD_S:
                self._said = now
                print(f"{self._label}: {done:,} of {counted(total, self._part)}, {text}", file=self._stream, flush=True)
            return
        if self._bar is None:
            if now - self._began < _QUIET_S:
                return
            self._open(total)
        self._bar.label = f"{self._label}  {text}"
        self._bar.update(done - self._shown)
        self._shown = done

    def stage(self, what: str) -> None:
        """Say what is begun, so that no work is silent for long; a bar that is shown ends before.

        Args:
            what: As `reading samples`.
        """
        self.close()
        print(f"{self._label}: {what} …", file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the line of the bar."""
        if self._bar is not None:
            self._bar.render_finish()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, total: int) -> None:
        import click

        self._bar = click.progressbar(
            length=total, label=self._label, file=self._stream, show_eta=False, show_pos=True, width=24
        )
        self._bar.render_progress()

    def _text(self, done: int, total: int, elapsed_s: float) -> str:
        rate = self._rows / elapsed_s if elapsed_s > 0 else 0.0
        left = "" if done >= total or not done else f", {span(elapsed_s / done * (total - done))} left"
        return f"{rate:,.0f} {self._unit}/s{left}"


def span(seconds: float) -> str:
    """A length of time as people say it: `40 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"
