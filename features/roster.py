"""Which GPUs, nodes and jobs a live ring knows, and the numbers they go by in its arrays.

Here belong names and their codes; what was measured stands in `features/places.py` and `features/ring.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Roster:
    """Names of GPUs, nodes and jobs by code. A GPU keeps its index until `keep`.

    Attributes:
        uuids: GPU of each index.
        nodes: Node each GPU was last seen on.
        node_names: Node of each code.
        job_ids: Job of each code.
        racks: Rack of a node, where it is known; replaced whole.
    """

    def __init__(self) -> None:
        self.uuids: list[str] = []
        self.nodes: list[str] = []
        self.node_names: list[str] = []
        self.job_ids: list[str] = []
        self.racks: Mapping[str, str | None] = {}
        self._index: dict[str, int] = {}
        self._node_codes: dict[str, int] = {}
        self._node_sizes: dict[str, int] = {}
        self._job_codes: dict[str, int] = {}
        self._seen_keys: tuple[pl.Series, pl.Series, Ints, Ints] | None = None
        self._seen_jobs: tuple[pl.Series, Ints] | None = None
        self._seen_racks: tuple[int, Mapping[str, str | None], Ints] | None = None

    def indices(self, frame: pl.DataFrame) -> tuple[Ints, Ints, list[tuple[str, str]]]:
        """Index of the GPU and code of the node of each row, and the (GPU, node) that are new."""
        keys, hosts = frame["gpu_uuid"], frame["node"]
        seen = self._seen_keys
        if seen is not None and seen[0].equals(keys) and seen[1].equals(hosts):
            return seen[2], seen[3], []
        known, codes = self._index, self._node_codes
        names, places = keys.to_list(), hosts.to_list()
        for host in places:
            if host not in codes:
                codes[host] = len(self.node_names)
                self.node_names.append(host)
        fresh = [(name, host) for name, host in zip(names, places, strict=True) if name not in known]
        for name, host in fresh:
            known[name] = len(self.uuids)
            self.uuids.append(name)
            self.nodes.append(host)
            self._node_sizes[host] = self._node_sizes.get(host, 0) + 1
        index = np.fromiter((known[name] for name in names), dtype=np.int64, count=len(names))
        host = np.fromiter((codes[name] for name in places), dtype=np.int64, count=len(places))
        self._seen_keys = (keys, hosts, index, host)
        return index, host, fresh

    def index_of(self, uuid: str) -> int | None:
        """Index of a GPU; None: not known."""
        return self._index.get(uuid)

    def node_codes(self, hosts: list[str]) -> list[int]:
        """Codes of nodes that have been seen."""
        return [self._node_codes[host] for host in hosts]

    def move(self, index: Ints, names: list[str]) -> None:
        """GPUs turned up on other nodes."""
        for gpu, name in zip(index.tolist(), names, strict=True):
            self._node_sizes[self.nodes[gpu]] -= 1
            self._node_sizes[name] = self._node_sizes.get(name, 0) + 1
            self.nodes[gpu] = name

    def jobs(self, frame: pl.DataFrame, job_by_node: Mapping | None) -> Ints:
        """Code of each row's job, -1 for none.

        Args:
            frame: Rows with `node` and perhaps `job_id`.
            job_by_node: Job of a node, for rows that name none.
        """
        if "job_id" not in frame.columns or frame["job_id"].dtype == pl.Null:
            ids = pl.Series("job_id", [None], dtype=pl.String).new_from_index(0, frame.height)
        else:
            ids = frame["job_id"]
        if job_by_node and ids.null_count():
            by_node = frame["node"].replace_strict(dict(job_by_node), default=None, return_dtype=pl.String)
            ids = ids.zip_with(ids.is_not_null(), by_node)
        if self._seen_jobs is not None and self._seen_jobs[0].equals(ids, null_equal=True):
            return self._seen_jobs[1]
        for name in ids.unique().drop_nulls().to_list():
            if name not in self._job_codes:
                self._job_codes[name] = len(self.job_ids)
                self.job_ids.append(name)
        codes = ids.replace_strict(self._job_codes, default=-1, return_dtype=pl.Int64) if self._job_codes else None
        out = np.full(len(ids), -1, dtype=np.int64) if codes is None else codes.fill_null(-1).to_numpy()
        self._seen_jobs = (ids, out)
        return out

    def keep(self, gpus: Ints, jobs: Ints) -> tuple[list[int], Ints]:
        """Give up all other GPUs, and with them nodes and jobs that nothing refers to.

        Args:
            gpus: Indices that stay, ascending.
            jobs: Codes of their jobs, -1 for none.

        Returns:
            New code of the node of each that stays, and the old codes of the jobs that stay in the order of the new.
        """
        self.uuids = [self.uuids[gpu] for gpu in gpus]
        self.nodes = [self.nodes[gpu] for gpu in gpus]
        self._index = {name: gpu for gpu, name in enumerate(self.uuids)}
        self.node_names = sorted(set(self.nodes))
        self._node_codes = {name: code for code, name in enumerate(self.node_names)}
        self._node_sizes = dict(Counter(self.nodes))
        codes = np.unique(jobs)
        codes = codes[codes >= 0]
        self.job_ids = [self.job_ids[code] for code in codes]
        self._job_codes = {name: code for code, name in enumerate(self.job_ids)}
        self._seen_keys = self._seen_jobs = self._seen_racks = None
        return self.node_codes(self.nodes), codes

    def node_size(self, node: str) -> int:
        """GPUs of a node that have been seen."""
        return self._node_sizes.get(node, 0)

    def rack_of_node(self) -> Ints:
        """Code of the rack of each node code, -1 where it is not known."""
        seen = self._seen_racks
        if seen is None or seen[0] != len(self.node_names) or seen[1] is not self.racks:
            seen = self._seen_racks = (len(self.node_names), self.racks, rack_codes(self.node_names, self.racks))
        return seen[2]


def rack_codes(nodes: list[str], racks: Mapping[str, str | None]) -> Ints:
    """Code of the rack of each node, -1 where it is not known."""
    known: dict[str, int] = {}
    names = [racks.get(node) for node in nodes]
    return np.array([-1 if name is None else known.setdefault(name, len(known)) for name in names], dtype=np.int64)
