"""Snapshot files: how a writer publishes a kind of hint and how a reader knows whether it is still fresh.

One file per cluster and kind under `published/`, replaced atomically. No HTTP here and no forecasting.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from scheduler_hints.schema import Kind, Snapshot

SCHEMA_VERSION = 1
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Snapshot)


class SnapshotError(Exception):
    """A snapshot file cannot be used; the message names the file and what is wrong with it."""


def boot_id() -> str:
    """Identity of this boot of the machine; empty where the kernel gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def boottime_s() -> float:
    """Seconds on CLOCK_BOOTTIME: monotonic, counts through suspend, the same in every process."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def snapshot_path(root: Path, cluster: str, kind: str) -> Path:
    return root / cluster / f"{kind}.json"


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a reader sees the old bytes or the new ones, never a mixture.

    Raises:
        OSError: The disk refused; the old file stays and no temporary file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_snapshot(path: Path) -> Snapshot:
    """Read one snapshot file.

    Raises:
        FileNotFoundError: Nothing has been published there yet.
        SnapshotError: The file is not a snapshot of a version this program reads.
    """
    data = path.read_bytes()
    try:
        snapshot = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise SnapshotError(f"{path}: not a snapshot: {error}") from error
    if snapshot.schema_version != SCHEMA_VERSION:
        raise SnapshotError(f"{path}: schema_version {snapshot.schema_version}, this program reads {SCHEMA_VERSION}")
    return snapshot


def expires_in_s(snapshot: Snapshot, now_wall: datetime | None = None) -> float:
    """Seconds until the snapshot expires; negative when it has.

    Counted on CLOCK_BOOTTIME when writer and reader share a boot, else on the wall clock.
    """
    if snapshot.boot_id and snapshot.boot_id == boot_id():
        return snapshot.generated_boottime_s + snapshot.ttl_s - boottime_s()
    age_s = ((now_wall or datetime.now(UTC)) - snapshot.generated_at).total_seconds()
    return snapshot.ttl_s - age_s


class Publisher:
    """Writes snapshots of one cluster with rising versions that survive a restart."""

    def __init__(self, root: Path, cluster: str) -> None:
        self.root = root
        self.cluster = cluster
        self._versions: dict[str, int] = {}
        self._boot_id = boot_id()

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
            data_age_s: Age of the newest input, seconds; it has already been taken off by the caller where it matters.
            model_versions: Task to model version.
            actionable_horizon_s: Shortest horizon a scheduler can still act on, seconds.

        Returns:
            The snapshot as written.

        Raises:
            OSError: The file could not be written; the previous snapshot stays.
        """
        path = snapshot_path(self.root, self.cluster, kind)
        if kind not in self._versions:
            try:
                self._versions[kind] = read_snapshot(path).version
            except (FileNotFoundError, SnapshotError):
                self._versions[kind] = time.time_ns() // 1_000_000
        version = self._versions[kind] + 1
        snapshot = Snapshot(
            schema_version=SCHEMA_VERSION,
            kind=kind,
            cluster=self.cluster,
            version=version,
            generated_at=datetime.now(UTC),
            ttl_s=ttl_s,
            data_age_s=data_age_s,
            actionable_horizon_s=actionable_horizon_s,
            model_versions=dict(model_versions),
            boot_id=self._boot_id,
            generated_boottime_s=boottime_s(),
            items=[msgspec.Raw(_encoder.encode(item)) for item in items],
        )
        write_atomically(path, _encoder.encode(snapshot))
        self._versions[kind] = version
        return snapshot
