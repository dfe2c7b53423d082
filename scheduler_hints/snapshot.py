"""Snapshot files: how a writer publishes a kind of hint and how a reader knows whether it is still fresh.

One file per cluster and kind under `published/`, replaced atomically. No HTTP here and no forecasting.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from scheduler_hints.schema import SHAPES, Kind, Snapshot

SCHEMA_VERSION = 1
MAX_TTL_S = 7 * 86_400.0
MAX_BYTES = 512 * 2**20
CLOCK_TOLERANCE_S = 5.0
"""A writer on another boot may be ahead of this clock by this much, s; by more, its snapshots are not believed."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Snapshot)
_temporary_numbers = itertools.count()


class SnapshotError(Exception):
    """A snapshot file cannot be used; the message names the file and what is wrong with it."""


class _Head(msgspec.Struct):
    schema_version: int
    version: int = 0


_head_decoder = msgspec.json.Decoder(_Head)


@functools.cache
def boot_id() -> str:
    """Identity of this boot of the machine; empty where the kernel gives none. It cannot change under a process."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def boottime_s() -> float:
    """Seconds on CLOCK_BOOTTIME: monotonic, counts through suspend, the same in every process."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def snapshot_path(root: Path, cluster: str, kind: str) -> Path:
    return root / cluster / f"{kind}.json"


def write_atomically(path: Path, data: bytes, *, durable: bool = True, mode: int = 0o644) -> None:
    """Replace a file so that a reader sees the old bytes or the new ones, never a mixture.

    Args:
        path: File to replace; its folder is made when it is missing.
        data: New content.
        durable: Wait until the bytes are on the disk. What expires in seconds does not need it: after a crash of the
            machine it is stale anyway.
        mode: Permissions of the new file, before the umask.

    Raises:
        OSError: The disk refused; the old file stays and no temporary file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{next(_temporary_numbers)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that killed writers left in a folder; those of living processes stay."""
    for path in folder.glob(".*.tmp"):
        parts = path.name.split(".")
        if len(parts) < 4 or not parts[-3].isdigit() or Path(f"/proc/{parts[-3]}").exists():
            continue
        with contextlib.suppress(OSError):
            path.unlink()


def parse_snapshot(data: bytes, origin: str | Path) -> Snapshot:
    """Decode the bytes of a snapshot file; items stay raw.

    Args:
        data: Content of the file.
        origin: Name of the file, for messages.

    Raises:
        SnapshotError: The bytes are not a snapshot of a version this program reads.
    """
    try:
        snapshot = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            _check_version(_head_decoder.decode(data).schema_version, origin)
        raise SnapshotError(f"{origin}: not a snapshot: {error}") from error
    _check_version(snapshot.schema_version, origin)
    if snapshot.generated_at.tzinfo is None:
        raise SnapshotError(f"{origin}: generated_at {snapshot.generated_at.isoformat()} has no time zone")
    if not 0 < snapshot.ttl_s <= MAX_TTL_S:
        raise SnapshotError(f"{origin}: ttl_s {snapshot.ttl_s} is not in (0, {MAX_TTL_S:.0f}]")
    return snapshot


def _check_version(version: int, origin: str | Path) -> None:
    if version != SCHEMA_VERSION:
        raise SnapshotError(f"{origin}: schema_version {version}, this program reads {SCHEMA_VERSION}")


def read_snapshot(path: Path) -> Snapshot:
    """Read one snapshot file.

    Raises:
        FileNotFoundError: Nothing has been published there yet.
        SnapshotError: The file cannot be read or is not a snapshot of a version this program reads.
    """
    try:
        return parse_snapshot(path.read_bytes(), path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read: {error.strerror}") from error


def expires_in_s(snapshot: Snapshot, now_wall: datetime | None = None, now_boottime_s: float | None = None) -> float:
    """Seconds until the snapshot expires; negative when it has.

    Counted on CLOCK_BOOTTIME when writer and reader share a boot, else on the wall clock. Never more than `ttl_s`:
    a writer whose clock is ahead gains nothing by it, and one that is ahead by more than `CLOCK_TOLERANCE_S` is
    expired, since nothing can be said about its age.
    """
    if snapshot.boot_id and snapshot.boot_id == boot_id():
        now_s = boottime_s() if now_boottime_s is None else now_boottime_s
        age_s = now_s - snapshot.generated_boottime_s
    else:
        age_s = ((now_wall or datetime.now(UTC)) - snapshot.generated_at).total_seconds()
    if age_s < -CLOCK_TOLERANCE_S:
        return age_s
    return snapshot.ttl_s - max(age_s, 0.0)


class Publisher:
    """Writes snapshots of one cluster with versions that rise, survive a restart, and rise across writers too.

    Args:
        root: The published folder.
        cluster: Name of the cluster.
        clock: Gives the moment that stands in them, UTC.
    """

    def __init__(self, root: Path, cluster: str, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.root = root
        self.cluster = cluster
        self._clock = clock
        self._versions: dict[str, int] = {}
        self._written: dict[str, tuple[int, int, int]] = {}
        self._boot_id = boot_id()
        remove_leftovers(root / cluster)

    def _next_version(self, kind: Kind, path: Path) -> int:
        """One above all that was published: by this publisher, or by another that has replaced the file since."""
        known = self._versions.get(kind, 0)
        try:
            if kind in self._versions and _signature(path) == self._written.get(kind):
                return known + 1
            head = _head_decoder.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return max(known, time.time_ns() // 1_000_000) + 1
        return max(known, head.version) + 1

    def publish(
        self,
        kind: Kind,
        items: Sequence[msgspec.Struct],
        *,
        ttl_s: float,
        data_age_s: float,
        model_versions: Mapping[str, str],
        actionable_horizon_s: float | None = None,
    ) -> Snapshot:
        """Encode and replace the snapshot of one kind.

        Args:
            kind: Which kind of hint.
            items: Hints of that kind's shape.
            ttl_s: Time to live from now, seconds.
            data_age_s: Age of the newest input now, seconds; a time to live that is to count from the data has it
                taken off by the caller.
            model_versions: Task to model version.
            actionable_horizon_s: Shortest horizon a scheduler can still act on, seconds.

        Returns:
            The snapshot as written.

        Raises:
            ValueError: The kind is unknown, a number is not finite or out of range; readers would refuse the file.
            TypeError: An item is not of the kind's shape.
            OSError: The file could not be written; the previous snapshot stays.
        """
        shape = SHAPES.get(kind)
        if shape is None:
            raise ValueError(f"no kind {kind!r}; kinds: {', '.join(SHAPES)}")
        if not 0 < ttl_s <= MAX_TTL_S:
            raise ValueError(f"ttl_s {ttl_s} of {kind} is not in (0, {MAX_TTL_S:.0f}]")
        if not (math.isfinite(data_age_s) and math.isfinite(actionable_horizon_s or 0.0)):
            raise ValueError(
                f"{kind}: data_age_s {data_age_s}, actionable_horizon_s {actionable_horizon_s}: not finite"
            )
        stranger = next((item for item in items if not isinstance(item, shape)), None)
        if stranger is not None:
            raise TypeError(f"an item of {kind} is a {type(stranger).__name__}, not a {shape.__name__}")
        path = snapshot_path(self.root, self.cluster, kind)
        version = self._next_version(kind, path)
        snapshot = Snapshot(
            schema_version=SCHEMA_VERSION,
            kind=kind,
            cluster=self.cluster,
            version=version,
            generated_at=self._clock(),
            ttl_s=float(ttl_s),
            data_age_s=float(data_age_s),
            actionable_horizon_s=actionable_horizon_s,
            model_versions=dict(model_versions),
            boot_id=self._boot_id,
            generated_boottime_s=boottime_s(),
            items=[msgspec.Raw(_encoder.encode(item)) for item in items],
        )
        write_atomically(path, _encoder.encode(snapshot), durable=False)
        self._versions[kind] = version
        with contextlib.suppress(OSError):
            self._written[kind] = _signature(path)
        return snapshot


def _signature(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size
