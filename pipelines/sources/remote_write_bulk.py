"""Series of a log, resolved many at a time: a million label sets in seconds, for processes that begin with a whole log.

The metrics of one GPU on one target share all labels but their name, so that each set of labels is taken apart once;
telling sets apart is left to Polars. What is odd goes through `Series` one by one. Nothing is read or stored here.
"""

from __future__ import annotations

import contextlib
import gc
import secrets
from collections.abc import Generator, Sequence

import numpy as np
import polars as pl

from features import metrics
from pipelines.sources.remote_write_series import USELESS, Series
from pipelines.sources.remote_write_wire import NAME_TAG, parse_labels
from pipelines.sources.series import REPLICA_LABELS, Workloads

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_HEAD = len(NAME_TAG)  # of a name's label, behind its own tag and size: the tag of the name, and one byte for its size


class BulkSeries(Series):
    """Series by number, of labels only: what `add_all` numbered, `add` and `take` do not know."""

    def __init__(
        self, table: metrics.MetricTable = metrics.DEFAULT, workloads: Workloads | None = None,
        replica_labels: Sequence[str] = REPLICA_LABELS,
    ) -> None:  # fmt: skip
        super().__init__(table, workloads, replica_labels)
        self._seen: list[tuple[np.ndarray, np.ndarray]] = []  # keys of labels and their numbers, a pair a call
        self._seeds = secrets.randbits(32), secrets.randbits(32)
        self._kinds = sorted({kind for _, kind in self._plain.values()}, key=lambda kind: (kind[:3] != "gpu", kind))

    def add_all(self, labels: Sequence[bytes]) -> np.ndarray:
        """Numbers of series; `USELESS` for those of no use. The same labels are the same number in every call.

        Args:
            labels: Of series of any metrics, as bytes.

        Raises:
            WireError: Some that are of use cannot be read.
        """
        if not labels:
            return np.empty(0, np.int64)
        with _no_collection():
            names, rest, whole = self._taken_apart(labels)
            out = self._known(whole)
            new = out == _NEW
            out[new & (names["code"].to_numpy() == _NOT_WANTED)] = USELESS
            plain = np.flatnonzero(new & (names["code"].to_numpy() >= 0))
            if len(plain):
                out[plain] = self._add_plain(labels, names["code"].to_numpy()[plain], rest[plain], plain)
            for i in np.flatnonzero(new & (names["code"].to_numpy() == _ODD)).tolist():
                out[i] = self._learn(labels[i])
            self._seen.append((whole[new], out[new]))
        return out

    def _known(self, whole: np.ndarray) -> np.ndarray:
        if not self._seen:
            return np.full(len(whole), _NEW, np.int64)
        keys, numbers = (np.concatenate(parts) for parts in zip(*self._seen, strict=True))
        order = np.argsort(keys)
        keys, numbers = keys[order], numbers[order]
        self._seen = [(keys, numbers)]
        at = np.minimum(np.searchsorted(keys, whole), len(keys) - 1)
        return np.where(keys[at] == whole, numbers[at], _NEW)

    def _taken_apart(self, labels: Sequence[bytes]) -> tuple[pl.DataFrame, np.ndarray, np.ndarray]:
        """Each series' name, and keys of its labels without it and of all of them.

        `code` of a name is its number in `_plain`, or `_ODD` or `_NOT_WANTED`.
        """
        one, at = pl.col("labels"), pl.col("at")
        begin, size = at + _HEAD + 1, pl.col("size")
        first, second = self._seeds
        found = pl.Series("at", [None if (place := label.find(NAME_TAG)) < 2 else place for label in labels], pl.Int64)
        frame = (
            pl.DataFrame([pl.Series("labels", labels, dtype=pl.Binary), found])
            .with_columns(_byte(one, at + _HEAD).alias("size"))
            .select(
                one.bin.slice(begin, size).alias("name"),
                one.bin.slice(0, at - 2).hash(first).alias("before"),
                one.bin.slice(begin + size).hash(second).alias("after"),
                one.hash(first).alias("whole"),
                # Before it stand the label's own tag and size, a byte each.
                ((at >= 2) & (_byte(one, at - 2) == 0x0A) & (_byte(one, at - 1) == size + _HEAD + 1)).alias("simple"),
            )
        )
        codes = {name.encode(): i for i, name in enumerate(self._plain)}
        codes |= {name: _ODD for name in self._wanted if name not in codes}
        known = frame["name"].unique().drop_nulls().to_list()
        code = {"name": known, "code": [codes.get(name, _NOT_WANTED) for name in known]}
        named = pl.DataFrame(code, schema={"name": pl.Binary, "code": pl.Int64})
        names = frame.select("name", "simple").join(named, on="name", how="left", maintain_order="left")
        names = names.select(pl.when(pl.col("simple")).then("code").otherwise(_ODD).fill_null(_ODD).alias("code"))
        rest = frame["before"].fill_null(0).to_numpy() * _FACTOR + frame["after"].fill_null(0).to_numpy()
        return names, rest, frame["whole"].to_numpy()

    def _add_plain(self, labels: Sequence[bytes], code: np.ndarray, rest: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Numbers of series whose name and label set tell all; one entity for each set and kind of metric."""
        number_of = {kind: i for i, kind in enumerate(self._kinds)}
        texts, facts = list(self._plain), list(self._plain.values())
        name_of = np.array([name for name, _ in facts], np.int32)
        kind_of = np.array([number_of[kind] for _, kind in facts], np.int64)
        _, sets = np.unique(rest, return_inverse=True)
        pairs = sets * len(self._kinds) + kind_of[code]
        each, first, pair = np.unique(pairs, return_index=True, return_inverse=True)
        entities, replicas = np.full(len(each), USELESS, np.int32), np.full(len(each), -1, np.int32)
        last, found, node, replica = -1, {}, "", -1
        of_gpu: dict[str, int] = {}
        for i, (key, k) in enumerate(zip(each.tolist(), first.tolist(), strict=True)):
            group, kind = divmod(key, len(self._kinds))
            if group != last:  # kinds of one set stand beside each other, those of the GPU first
                last, found, of_gpu = group, parse_labels(labels[at[k]]), {}
                found.pop("__name__", None)
                node, replica = self._node(found), self.index.replica(found)
            replicas[i] = replica
            entity, _, spelling = self._kinds[kind].partition(" ")
            if entity == "health" and spelling in of_gpu:
                entities[i] = self.index.whole(of_gpu[spelling])
                continue
            ids = self._resolve(texts[code[k]], found, node, found.get("job", ""))
            if ids is not None:
                entities[i] = ids[1]
                if entity == "gpu":
                    of_gpu[spelling] = ids[1]
        entity = entities[pair]
        use = entity != USELESS
        out = np.full(len(code), USELESS, np.int64)
        for row in np.flatnonzero(~use).tolist():  # of use it may be yet by another name, or tell something else
            out[row] = self._learn(labels[at[row]])
        out[use] = len(self) + np.arange(int(use.sum()))
        self._name_ids.frombytes(name_of[code[use]].tobytes())
        self._entity_ids.frombytes(entity[use].tobytes())
        self._replica_ids.frombytes(replicas[pair][use].tobytes())
        return out


_NEW, _ODD, _NOT_WANTED = -3, -1, -2


def _byte(one: pl.Expr, at: pl.Expr) -> pl.Expr:
    byte = one.bin.slice(pl.when(at >= 0).then(at), 1)
    whole = pl.when(byte.bin.size() == 1).then(byte)
    return whole.bin.reinterpret(dtype=pl.UInt8, endianness="little").cast(pl.Int64)


@contextlib.contextmanager
def _no_collection() -> Generator[None]:
    """Millions of small objects are made that stay: looking through them for garbage again and again takes a third."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
