"""The journal of what was published: one line per changed snapshot, so that "what did it say at 03:12?" has an answer.

Files `published/<cluster>/journal/<hour>.jsonl`, each line a whole Snapshot. The publish job loads them into
`out_hints` and removes files of past hours. No reading of live hints here (`scheduler_hints/snapshot.py`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import BinaryIO

import msgspec

from scheduler_hints.schema import Snapshot

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Snapshot)
FORMAT = "%Y%m%dT%H"


def journal_folder(root: Path, cluster: str) -> Path:
    """Folder of a cluster's journal under the published folder."""
    return root / cluster / "journal"


class Journal:
    """Appends changed snapshots.

    Args:
        root: The published folder.
        cluster: Name of the cluster.
        min_interval_s: Snapshots of a kind that differ in figures alone are written at most this often; one in which
            a hint appears, disappears or changes its state is written at once.
    """

    def __init__(self, root: Path, cluster: str, *, min_interval_s: float = 60.0) -> None:
        self.folder = journal_folder(root, cluster)
        self.min_interval_s = min_interval_s
        self._last: dict[str, tuple[bytes, bytes, datetime]] = {}

    def append(self, snapshot: Snapshot, outline: bytes = b"") -> bool:
        """Write a snapshot if it says something new.

        Args:
            snapshot: As published.
            outline: What must not change unrecorded (ids and states of its hints); empty: the items themselves.

        Returns:
            True when a line was written.

        Raises:
            OSError: The disk refused; the snapshot counts as not written.
        """
        digest = hashlib.blake2b(b"\n".join(bytes(item) for item in snapshot.items), digest_size=16).digest()
        outline = outline or digest
        known = self._last.get(snapshot.kind)
        if known is not None:
            if digest == known[0]:
                return False
            young = snapshot.generated_at - known[2] < timedelta(seconds=self.min_interval_s)
            if outline == known[1] and young:
                return False
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{snapshot.generated_at:{FORMAT}}.jsonl"
        with path.open("a+b") as file:  # a line that a full disk cut off must not take this one with it
            file.write((b"\n" if is_torn(file) else b"") + _encoder.encode(snapshot) + b"\n")
        self._last[snapshot.kind] = (digest, outline, snapshot.generated_at)
        return True


def is_torn(file: BinaryIO) -> bool:
    """Whether a file's last line has no end."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def journal_files(root: Path, cluster: str) -> list[Path]:
    """Journal files of a cluster, oldest first."""
    folder = journal_folder(root, cluster)
    return sorted(folder.glob("*.jsonl")) if folder.is_dir() else []


def read_journal(path: Path) -> Iterator[Snapshot]:
    """Snapshots of one file in order; blank lines and those that a crash or a full disk cut off are passed over.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        for line in file:
            try:
                yield _decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
