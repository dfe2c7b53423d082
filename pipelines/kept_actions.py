"""What agents did, or would have done, brought into `out_actions` from the files in which they record it.

The files are `<state>/actions/<cluster>.jsonl` (`scheduler_hints/slurm_audit.py`). A row may be read twice, where a run
ended between writing and removing: it replaces itself. What actions mean for labels stands in `exclusions.py`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from features.vocabulary import conform
from pipelines.sources import SourceError
from pipelines.store import Store
from scheduler_hints.slurm_audit import actions_path

TABLE = "out_actions"
log = logging.getLogger(__name__)
_KEYS = ("ts", "actor", "action")
_decode = msgspec.json.Decoder(dict[str, Any]).decode


def keep_actions(store: Store, state: Path, cluster: str) -> int:
    """Bring what was recorded into the store; files are removed once their rows are in.

    Args:
        store: The store.
        state: The state folder.
        cluster: Name of the cluster.

    Returns:
        Rows written.

    Raises:
        SourceError: A file cannot be read.
        StoreError: The store cannot be written; the files stay.
    """
    rows = 0
    try:
        for path in _taken(actions_path(state, cluster)):
            told, spoilt = _read(path, cluster)
            if spoilt:
                log.warning("%s: %d lines are no actions (a crash cut them off?) and are passed over", path, spoilt)
            if told:
                frame = conform(pl.DataFrame(told, infer_schema_length=None), TABLE)
                rows += store.transact(lambda w, f=frame: w.upsert(TABLE, f), purpose="keeping actions")
            path.unlink(missing_ok=True)
    except OSError as error:
        raise SourceError(f"{cluster}: the record of actions cannot be read: {error}") from error
    return rows


def _taken(path: Path) -> list[Path]:
    """Files that nobody appends to any more, oldest first: those left by an earlier run, else the one just closed."""
    closed_name = re.compile(re.escape(path.stem) + r"\.\d{20}\.taken")  # names of clusters may hold dots
    left = sorted(one for one in path.parent.glob("*.taken") if closed_name.fullmatch(one.name))
    if left or not path.exists():
        return left
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # whoever waits for it behind us sees that the file has moved
        closed = path.with_name(f"{path.stem}.{time.time_ns():020d}.taken")
        path.rename(closed)
    finally:
        os.close(handle)
    return [closed]


def _read(path: Path, cluster: str) -> tuple[list[dict[str, Any]], int]:
    told, spoilt = [], 0
    with path.open("rb") as file:
        for line in file:
            try:
                row = _decode(line)
                row["ts"] = msgspec.convert(row["ts"], type=datetime)
            except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, KeyError):
                spoilt += bool(line.strip())
                continue
            if row.get("cluster") == cluster and all(row.get(name) for name in _KEYS):
                told.append(row)
            else:
                spoilt += 1
    return told, spoilt
