"""Operators' silences, copied into the store from the file in which the hints API keeps them.

The file has those of the last 90 days, the store all of them. What they mean for labels stands in `exclusions.py`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import polars as pl

from features.vocabulary import schema
from pipelines.sources import SourceError
from pipelines.store import Store
from scheduler_hints.silences import read_silences

TABLE = "core_silences"


def keep_silences(store: Store, published: Path, cluster: str) -> int:
    """Bring silences into the store; one that was taken back ends when it was.

    Args:
        store: The store.
        published: The published folder.
        cluster: Name of the cluster.

    Returns:
        Rows written; 0 when nothing is new.

    Raises:
        SourceError: The file cannot be read.
        StoreError: The store cannot be written.
    """
    try:
        silences = read_silences(published, cluster)
    except (OSError, msgspec.DecodeError) as error:
        raise SourceError(f"{cluster}: silences cannot be read: {error}") from error
    if not silences:
        return 0
    rows = pl.DataFrame(
        [
            {
                "observed_at": silence.created_at, "cluster": cluster, "silence_id": silence.id, "node": silence.node,
                "bottleneck_class": silence.bottleneck_class, "scope": silence.scope, "start_time": silence.start,
                "end_time": silence.until, "reason": silence.reason, "actor": silence.who,
            }
            for silence in silences
        ],
        schema=schema(TABLE),
    )  # fmt: skip
    known = store.query(f'SELECT silence_id, end_time FROM {TABLE} WHERE "cluster" = ?', [cluster])
    new = rows.join(known, on=["silence_id", "end_time"], how="anti")
    if new.is_empty():
        return 0
    return store.transact(lambda w: w.upsert(TABLE, new), purpose="keeping silences")
