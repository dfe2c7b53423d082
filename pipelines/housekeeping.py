"""Housekeeping of the store: merging, expiry, retention, leftovers, health.

Nothing here changes what a query of kept rows answers. Files are removed only under the writer lock, and only when no
reader or open transaction can still want them: replaced files after an hour at the earliest (those of a UTC day
together), unreferenced ones after a day.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import duckdb
import psutil

from features.vocabulary import TABLES
from pipelines.catalogue import LAKE, MARKS, META, SCHEMA_VERSION, Location, check_version, quoted, quoted_text
from pipelines.store_errors import StoreError, StoreInputError
from pipelines.words import counted

if TYPE_CHECKING:
    from pipelines.store import Store

# One merged file is as large as `target_file_size`, so one operation reads about that much: the bound on memory.
_GROUPS_PER_CALL = 1
_GROUPS_PER_TABLE = 200
_DELETED_RATIO = 0.2  # files that lost this share of their rows are written anew
_KEEP_REPLACED = timedelta(hours=1)
_KEEP_ORPHANS = timedelta(days=1)
_MIN_FREE_BYTES = 2**30
_FEW_ORPHANS = 10
_CHECKED_FILES = 10_000
_NAMED_FILES = 3

log = logging.getLogger(__name__)


class Check(NamedTuple):
    """One finding of a health check: what was looked at, whether it is well, and what to know or do."""

    name: str
    ok: bool
    message: str


class File(NamedTuple):
    """A file that the newest snapshot refers to; `size_bytes` as it was written."""

    path: str
    size_bytes: int


def compact(store: Store, now: datetime) -> dict[str, int]:  # noqa: ARG001 (the present matters to the siblings)
    """See `Store.compact`. The lock is given up between groups, so that writers have their turn."""
    before = _files(store)
    groups = 0
    worth = store.query(
        f"SELECT table_name FROM ducklake_table_info('{LAKE}') WHERE file_count > 1 OR delete_file_count > 0"
    )["table_name"]
    for table in [name for name in [*TABLES, MARKS, META] if name in set(worth)]:
        store.maintenance(
            f"CALL ducklake_rewrite_data_files('{LAKE}', '{table}', delete_threshold => {_DELETED_RATIO})",
            purpose=f"compacting {table}",
        )
        for _ in range(_GROUPS_PER_TABLE):
            merged = store.maintenance(
                f"CALL ducklake_merge_adjacent_files('{LAKE}', '{table}', max_compacted_files => {_GROUPS_PER_CALL})",
                purpose=f"compacting {table}",
            )
            if not merged:
                break
            groups += 1
    after = _files(store)
    return {"files_before": before[0], "files_after": after[0], "bytes_after": after[1], "groups": groups}


def expire(store: Store, now: datetime, snapshot_days: float) -> dict[str, int]:
    """See `Store.expire`."""
    purpose = "expiring snapshots"
    # A reader whose snapshot expires under it finds an empty table instead of an error: never the youngest ones.
    keep = max(timedelta(days=snapshot_days), _KEEP_REPLACED)
    snapshots = store.maintenance(
        f"CALL ducklake_expire_snapshots('{LAKE}', older_than => {_day_before(now - keep)})", purpose=purpose
    )
    old = store.maintenance(
        f"CALL ducklake_cleanup_old_files('{LAKE}', older_than => {_day_before(now - _KEEP_REPLACED)})", purpose=purpose
    )
    removed, kept = _remove_orphans(store, now)
    remove_spill(store.location)
    return {"snapshots": len(snapshots), "old_files": len(old), "orphans": removed, "orphans_kept": kept}


def _remove_orphans(store: Store, now: datetime) -> tuple[int, int]:
    """Remove unreferenced files, unless they are most of all: then the catalogue is more likely wrong than they.

    Returns:
        Files removed, and files left.
    """
    purpose = "removing unreferenced files"
    older_than = f"older_than => {_literal(now - _KEEP_ORPHANS)}"
    found = store.maintenance(
        f"CALL ducklake_delete_orphaned_files('{LAKE}', dry_run => true, {older_than})", purpose=purpose
    )
    if len(found) > _FEW_ORPHANS and 2 * len(found) > _count_files(store):
        log.warning(
            "%s: %d files are not in the catalogue %s, more than half of all: kept, since the catalogue may be "
            "a wrong or an old one; restore it from a backup, or move those files away (the first: %s)",
            store.location.data_path, len(found), store.location.label, found[0][0],
        )  # fmt: skip
        return 0, len(found)
    removed = store.maintenance(f"CALL ducklake_delete_orphaned_files('{LAKE}', {older_than})", purpose=purpose)
    return len(removed), 0


def _count_files(store: Store) -> int:
    """Files in the data folder, those of older snapshots and unreferenced ones among them."""
    location = store.location
    if location.is_local:
        return sum(file.is_file() for file in Path(location.data_path).rglob("*"))
    return store.query("SELECT count(*) AS n FROM glob(?)", [f"{location.data_path}**"])["n"][0]


def catalogue_files(cursor: duckdb.DuckDBPyConnection) -> Iterator[File]:
    """Data and delete files of the newest snapshot, table by table."""
    for table in [*TABLES, MARKS, META]:
        rows = cursor.execute(
            "SELECT data_file, data_file_size_bytes, delete_file, delete_file_size_bytes "
            f"FROM ducklake_list_files('{LAKE}', '{table}')"
        ).fetchall()
        for data_file, data_bytes, delete_file, delete_bytes in rows:
            yield File(data_file, data_bytes)
            if delete_file is not None:
                yield File(delete_file, delete_bytes)


def retain(store: Store, now: datetime, days: Mapping[str, float]) -> dict[str, int]:
    """See `Store.retain`. Whole UTC days go at once, so that files are dropped instead of rewritten."""
    missing = sorted({table.retention for table in TABLES.values()} - set(days))
    if missing:
        raise StoreInputError(
            f"no retention given for: {', '.join(missing)}; given: {', '.join(sorted(days)) or 'none'}"
        )
    deleted = {}
    for table in TABLES.values():
        cutoff = (now.astimezone(UTC) - timedelta(days=days[table.retention])).replace(
            hour=0, minute=0, second=0, microsecond=0
        )
        rows = store.maintenance(
            f"DELETE FROM {quoted(table.name)} WHERE {quoted(table.time)} < ?",
            [cutoff],
            purpose=f"retention {table.name}",
        )
        if rows and rows[0][0]:
            deleted[table.name] = rows[0][0]
    return deleted


def remove_partials(store: Store, since_s: float) -> list[str]:
    """Remove the files that a failed transaction of the lock's holder left, newer than `since_s` (epoch seconds).

    The caller holds the writer lock: no other transaction can own an unreferenced file.
    """
    if not store.location.is_local or store.lock.path is None:
        return []
    with store._cursor() as cursor:
        orphans = cursor.execute(
            f"CALL ducklake_delete_orphaned_files('{LAKE}', dry_run => true, cleanup_all => true)"
        ).fetchall()
    removed = []
    for (name,) in orphans:
        file = Path(name)
        if file.is_relative_to(store.location.data_path) and file.stat().st_mtime >= since_s - 1:
            file.unlink(missing_ok=True)
            removed.append(name)
    return removed


def remove_spill(location: Location) -> None:
    """Remove the spill folders of this process and of processes that have ended."""
    try:
        folders = list(location.spill_root.iterdir())
    except OSError:
        return
    for folder in folders:
        if folder.name.isdigit() and (int(folder.name) == os.getpid() or not psutil.pid_exists(int(folder.name))):
            shutil.rmtree(folder, ignore_errors=True)


def check(store: Store) -> list[Check]:
    """See `Store.check`."""
    location, found = store.location, []
    try:
        snapshot = store.snapshot()
        found.append(Check("store catalogue", True, f"{location.label}: opens, snapshot {snapshot}"))
        with store._cursor() as cursor:
            version = check_version(cursor, location)
        found.append(
            Check("store schema", version == SCHEMA_VERSION, f"schema version {version}, known {SCHEMA_VERSION}")
        )
    except StoreError as error:
        found.append(Check("store catalogue", False, str(error)))
    if location.is_local and found[0].ok:
        found.append(_check_files(store))
    if location.is_local:
        found += _check_folder(Path(location.data_path))
    if location.lock_path is not None:
        try:
            free = store.lock.is_free()
        except OSError as error:
            found.append(Check("store lock", False, f"{location.lock_path}: {error.strerror}; make it writable"))
        else:
            message = "free" if free else f"held by {store.lock.holder()}: writers wait"
            found.append(Check("store lock", True, f"{location.lock_path}: {message}"))
    return found


def _check_files(store: Store) -> Check:
    """Whether the newest files that the catalogue names (their names begin with a time) are there in their sizes."""
    name, folder = "store files", store.location.data_path
    wrong = []
    for attempt in range(2):  # maintenance may replace files in between
        try:
            with store._cursor() as cursor:
                files = sorted(catalogue_files(cursor), key=lambda file: Path(file.path).name, reverse=True)
        except duckdb.Error as error:
            return Check(name, False, str(store.error(error)))
        files = files[:_CHECKED_FILES]
        wrong = [file.path for file in files if _size_bytes(file.path) != file.size_bytes]
        if not wrong or attempt:
            break
    if not wrong:
        return Check(
            name, True, f"{folder}: {counted(len(files), 'file')} of the catalogue looked at, all there in size"
        )
    named = ", ".join(wrong[:_NAMED_FILES]) + (", …" if len(wrong) > _NAMED_FILES else "")
    return Check(
        name, False,
        f"{len(wrong)} of {len(files)} files of the catalogue are missing or of a wrong size: restore them from a "
        f"backup, or, if there is none, move catalogue and data folder away and let ingest fill a new store: {named}",
    )  # fmt: skip


def _size_bytes(path: str) -> int | None:
    try:
        return Path(path).stat().st_size
    except OSError:
        return None


def _check_folder(folder: Path) -> list[Check]:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".weatherglass-check-") as file:
            file.write(b"\0" * 4096)
            file.flush()
        found = [Check("store data", True, f"{folder}: writable")]
    except OSError as error:
        found = [Check("store data", False, f"{folder}: cannot be written: {error.strerror}; fix owner, mode or space")]
    free_bytes = shutil.disk_usage(folder).free
    enough = free_bytes >= _MIN_FREE_BYTES
    advice = "" if enough else "; free some, or lower retention in [store]"
    return [*found, Check("store disk", enough, f"{folder}: {free_bytes / 2**30:.1f} GiB free{advice}")]


def _files(store: Store) -> tuple[int, int]:
    """Live data files of the lake and their bytes."""
    rows = store.query(
        f"SELECT coalesce(sum(file_count), 0)::BIGINT AS files, coalesce(sum(file_size_bytes), 0)::BIGINT AS bytes "
        f"FROM ducklake_table_info('{LAKE}')"
    )
    return rows["files"][0], rows["bytes"][0]


def _day_before(moment: datetime) -> str:
    """The last moment of the UTC day before `moment`.

    On a SQLite catalogue DuckLake 1.0 compares times as text, '2026-11-30 02:31' with '2026-11-30T01:31': a cutoff
    holds for its whole day, and files replaced a second ago would go. So only whole days before it are named.
    """
    midnight = moment.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return _literal(midnight - timedelta(microseconds=1))


def _literal(moment: datetime) -> str:
    return f"{quoted_text(moment.astimezone(UTC).strftime('%Y-%m-%d %H:%M:%S.%f+00'))}::TIMESTAMPTZ"
