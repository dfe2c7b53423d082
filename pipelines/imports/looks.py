"""What the kept rows of an import are about: how many jobs, GPUs and nodes, how long they were silent, what is odd.

Judged by the rows that were delivered, not by those that were read: a row that was dropped makes no silence. The keys
of kept rows rest on disk; DuckDB looks through them with a bounded memory.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import polars as pl

from features.vocabulary import TABLES
from pipelines.imports.report import Report, length, many
from pipelines.imports.scratch import writing
from pipelines.imports.staging import open_database

# Noun and column of what is counted, by table.
_NOUNS: dict[str, tuple[tuple[str, str], ...]] = {
    "core_jobs": (("job", "job_id"), ("user", "user")),
    "core_gpu_samples": (("GPU", "gpu_uuid"), ("node", "node")),
    "core_node_samples": (("node", "node"),),
    "core_gpu_health": (("GPU", "gpu_uuid"), ("node", "node")),
    "core_link_samples": (("GPU", "gpu_uuid"), ("node", "node")),
    "core_port_samples": (("node", "node"),),
}
# Noun and keys of those whose silences are told, by table.
_ENTITIES = {"core_gpu_samples": ("GPU", ("node", "gpu_uuid")), "core_node_samples": ("node", ("node",))}
_FURTHER = {"core_node_samples": ("node_power_w",)}
_FACTOR = 10.0  # usual intervals that make a silence
# No server with GPUs runs on less; board controllers draw it while the node is off.
_LEAST_NODE_W = 50.0


class Silences(NamedTuple):
    """Gaps between samples of one entity that are far longer than the usual interval.

    Attributes:
        interval_s: Usual time between samples, s.
        limit_s: A gap longer than this is a silence, s.
        count: Silences.
        entities: Entities that had one.
        longest_s: The longest, s.
        entity: Whose it was.
        start_us: When it began, microseconds since 1970.
        ended: Entities whose last sample is followed by a silence until the last one of all.
        first_end_us: The earliest of their last samples.
    """

    interval_s: float
    limit_s: float
    count: int
    entities: int
    longest_s: float
    entity: str
    start_us: int
    ended: int
    first_end_us: int


class Looks:
    """Keys of the rows that were kept.

    Args:
        folder: A folder of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: dict[str, list[str]] = {}
        self._db = open_database(folder)

    def keep(self, table: str, core: pl.DataFrame) -> None:
        """Take rows of a cleaned table that were delivered.

        Raises:
            ImportingError: The disk is full.
        """
        if core.is_empty() or table not in _NOUNS:
            return
        columns = [column for _, column in _NOUNS[table]] + [*_FURTHER.get(table, ()), TABLES[table].time]
        parts = self._parts.setdefault(table, [])
        path = self._folder / f"kept-{table}-{len(parts):06d}.parquet"
        with writing(self._folder.parent):
            core.select(columns).write_parquet(path, compression="lz4")
        parts.append(str(path))

    def tell(self, report: Report) -> None:
        """Put into the report what is seen."""
        for table, parts in self._parts.items():
            for noun, column in _NOUNS[table]:
                found = self._db.execute(f'SELECT count(DISTINCT "{column}") FROM read_parquet(?)', [parts]).fetchone()
                report.seen[noun] = max(report.seen.get(noun, 0), int(found[0]) if found else 0)
        for table, (noun, keys) in _ENTITIES.items():
            found = self.silences(table, keys) if table in self._parts else None
            if found is not None:
                _tell_silences(found, noun, report)
        if "core_node_samples" in self._parts:
            self._tell_standby(report)

    def silences(self, table: str, keys: tuple[str, ...]) -> Silences | None:
        """Silences of entities; None: no entity has two samples.

        Args:
            table: Its name.
            keys: Columns that name an entity.
        """
        entity = "concat_ws(' ', " + ", ".join(f'"{key}"' for key in keys) + ")"
        time = f'epoch_us("{TABLES[table].time}")'
        self._db.execute(
            "CREATE OR REPLACE TEMP TABLE gaps AS "
            "SELECT entity, us, us - lag(us) OVER (PARTITION BY entity ORDER BY us) AS gap "
            f"FROM (SELECT DISTINCT {entity} AS entity, {time} AS us FROM read_parquet(?))",
            [self._parts[table]],
        )
        usual = self._db.execute("SELECT approx_quantile(gap, 0.5) FROM gaps WHERE gap IS NOT NULL").fetchone()
        if usual is None or usual[0] is None:
            return None
        limit = _FACTOR * float(usual[0])
        counts = self._db.execute("SELECT count(*), count(DISTINCT entity) FROM gaps WHERE gap > ?", [limit]).fetchone()
        longest = self._db.execute(
            "SELECT gap, entity, us - gap FROM gaps WHERE gap > ? ORDER BY gap DESC, entity LIMIT 1", [limit]
        ).fetchone()
        ends = self._db.execute(
            "SELECT count(*), min(last) FROM (SELECT max(us) AS last FROM gaps GROUP BY entity) "
            "WHERE last < (SELECT max(us) FROM gaps) - ?",
            [limit],
        ).fetchone()
        count, entities = counts or (0, 0)
        gap, whose, start = longest or (0, "", 0)
        ended, first_end = ends or (0, 0)
        interval_s, limit_s = float(usual[0]) / 1e6, limit / 1e6
        return Silences(interval_s, limit_s, count, entities, gap / 1e6, whose, start, ended, first_end or 0)

    def _tell_standby(self, report: Report) -> None:
        found = self._db.execute(
            "SELECT count(*), count(DISTINCT node), min(node_power_w), max(node_power_w) FROM read_parquet(?) "
            "WHERE node_power_w < ?",
            [self._parts["core_node_samples"], _LEAST_NODE_W],
        ).fetchone()
        if found and found[0]:
            count, nodes, low, high = found
            power = f"{low:g} W" if low == high else f"{low:g} to {high:g} W"
            report.note(
                f"{many(count, 'value')} of node_power_w on {many(nodes, 'node')} below {_LEAST_NODE_W:g} W ({power}): "
                "what a node draws that is switched off, or its sensor measures a part of it; kept as read"
            )

    def close(self) -> None:
        """Let go of the files; the folder is the caller's to remove."""
        self._db.close()


def _tell_silences(found: Silences, noun: str, report: Report) -> None:
    usual = f"one sample of a {noun} every {found.interval_s:g} s"
    if found.count:
        report.note(
            f"{usual}; {many(found.count, 'silence')} longer than {length(found.limit_s)} on "
            f"{many(found.entities, noun)}, the longest {length(found.longest_s)} on {found.entity} from "
            f"{_moment(found.start_us)}"
        )
    else:
        report.note(f"{usual}; no silence longer than {length(found.limit_s)}")
    if found.ended:
        said = "is" if found.ended == 1 else "are"
        report.note(
            f"{many(found.ended, noun)} {said} silent until the end of the file, the first from "
            f"{_moment(found.first_end_us)}"
        )


def _moment(us: int) -> str:
    return f"{datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us):%Y-%m-%d %H:%M:%S} UTC"
