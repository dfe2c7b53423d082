"""What a nowcast remembers over a restart: facts of jobs and queues that no window holds, hints that stand.

Files beside the snapshots, replaced whole, once a minute. What is damaged is passed over: one that has forgotten is
better than none. What is remembered is made by `features/places.py` and `scheduler_hints/unit_nowcast.py`.
"""

from __future__ import annotations

import logging
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from scheduler_hints.snapshot import SnapshotError, read_snapshot, snapshot_path, write_atomically

if TYPE_CHECKING:
    from features.telemetry import RingWindow
    from scheduler_hints.unit_nowcast import UnitNowcast

log = logging.getLogger(__name__)

JOBS = "nowcast-jobs.parquet"
QUEUES = "queue-memory.json"
EVERY_S = 60.0


class Memory:
    """Reads and writes what outlives a nowcast of one cluster.

    Args:
        root: The published folder.
        cluster: Name of the cluster.
        window: Windows of GPUs, which know of jobs.
        units: Windows of nodes, ports and queues.
        problems: What is wrong in words, by where; changed in place.
    """

    def __init__(
        self, root: Path, cluster: str, window: RingWindow, units: UnitNowcast, problems: dict[str, str]
    ) -> None:
        self.root, self.cluster, self.window, self.units, self.problems = root, cluster, window, units, problems
        self._written_s = 0.0

    def recall_jobs(self) -> int:
        """Take up what is known of jobs, such as the level that memory settled on; before any sample.

        Returns:
            Number of GPUs that something is remembered of.
        """
        try:
            return self.window.recall(pl.read_parquet(self.root / self.cluster / JOBS))
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            log.warning("%s: what the last run remembered of jobs cannot be read: %s", self.cluster, error)
            return 0

    def recall_queues(self) -> None:
        """Take up what queues were like for days."""
        try:
            self.units.recall(msgspec.json.decode((self.root / self.cluster / QUEUES).read_bytes()))
        except FileNotFoundError:
            return
        except (
            OSError,
            msgspec.DecodeError,
            ValueError,
            AttributeError,
            TypeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            self.problems["queues"] = f"{QUEUES} is passed over, queues are remembered from now on: {error}"

    def published(self, kind: str, shape: type[Any]) -> list[Any]:
        """Items of the snapshot that was published last; none where it cannot be read."""
        try:
            snapshot = read_snapshot(snapshot_path(self.root, self.cluster, kind))
            return [msgspec.json.decode(item, type=shape) for item in snapshot.items]
        except (OSError, SnapshotError, msgspec.DecodeError):
            return []

    def keep(self, now_s: float) -> None:
        """Write down what is remembered, if a minute has passed."""
        if now_s - self._written_s < EVERY_S:
            return
        self._written_s = now_s
        buffer = BytesIO()
        self.window.remembered().write_parquet(buffer, compression="lz4")
        self._write(JOBS, buffer.getvalue(), "remembered")
        self._write(QUEUES, msgspec.json.encode(self.units.remembered()), "queues")

    def _write(self, name: str, content: bytes, part: str) -> None:
        try:
            write_atomically(self.root / self.cluster / name, content, durable=False)
        except OSError as error:
            self.problems[part] = f"{error.strerror or error}: {error.filename or name}"
        else:
            self.problems.pop(part, None)
