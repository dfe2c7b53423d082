"""Windows of the newest ten minutes of every GPU of a cluster, in memory: what the nowcast reads.

Here belongs reading: which GPUs deserve a close look, and their windows. How samples are taken in stands in
`features/intake.py`, where they are kept in `features/ring.py`, the arithmetic on windows in `features/windows.py`;
the same windows over history in `features/history.py`. No input or output.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from features.cleaning_live import Courses
from features.conditions import CLASSES, DISTANCE, INDEX
from features.intake import AHEAD_S, Intake
from features.peers import Neighbours, peer_features
from features.ring import Windows
from features.thresholds import ThresholdBook
from features.windows import FEATURES, FeatureBlock, screen, window_features

_CHUNK = 4_096  # rows gathered at a time: 4,096 × 12 × 75 × 4 bytes stay near the cache


class RingWindow(Intake):
    """The newest ten minutes of every GPU, as features of the GPUs that are asked for.

    Args:
        book: Limits of the nodes.
        stale_s: A GPU whose newest sample is older than this counts nowhere.
        courses: Judges each sample by those before it, as ingest does; None: samples are believed as they come.
    """

    def __init__(self, book: ThresholdBook, *, stale_s: float = 45.0, courses: Courses | None = None) -> None:
        super().__init__(book, courses)
        self.stale_s = stale_s

    @property
    def uuids(self) -> list[str]:
        """GPU of each index."""
        return self.roster.uuids

    @property
    def nodes(self) -> list[str]:
        """Node of each GPU."""
        return self.roster.nodes

    @property
    def node_names(self) -> list[str]:
        """Node of each code in `node`."""
        return self.roster.node_names

    @property
    def job_ids(self) -> list[str]:
        """Job of each code in `job`."""
        return self.roster.job_ids

    def age_s(self, now_s: float) -> NDArray[np.float64]:
        """Age of the newest sample of each GPU at a moment, shape (count,)."""
        return now_s - self.last_ts[: self.count]

    def is_fresh(self, now_s: float) -> NDArray[np.bool_]:
        """Which GPUs have a sample that is neither stale nor from the future, shape (count,)."""
        age = self.age_s(now_s)
        return (age <= self.stale_s) & (age >= -self.stale_s)

    def distance(self, bottleneck_class: str) -> NDArray[np.float32]:
        """Newest distance of each GPU to the limit of a class, shape (count,)."""
        return self.latest[INDEX[DISTANCE[bottleneck_class]], : self.count]

    def is_set(self, bottleneck_class: str) -> NDArray[np.bool_]:
        """Where the condition held in the newest two samples of a GPU, shape (count,)."""
        with np.errstate(invalid="ignore"):
            before = self._before[: self.count, CLASSES.index(bottleneck_class)] <= 0
            return before & (self.distance(bottleneck_class) <= 0)

    def screened(self, bottleneck_class: str, now_s: float) -> NDArray[np.int64]:
        """Indices of fresh GPUs that deserve a close look for a class."""
        n = self.count
        slot, ts = self._ring.minute_ago(self.last_ts[:n])
        earlier = self._ring.far_value(slot, INDEX[DISTANCE[bottleneck_class]])
        picked = screen(
            bottleneck_class,
            self.distance(bottleneck_class),
            np.where(np.isnan(ts), np.float32(np.nan), earlier),
            self.last_ts[:n] - ts,
            self.latest[INDEX["over_plateau_gib"], :n],
            self.latest[INDEX["step_ratio"], :n],
        )
        return np.flatnonzero(picked & self.is_fresh(now_s))

    def features(self, gpus: NDArray[np.int64], bottleneck_class: str, now_s: float) -> FeatureBlock:
        """Features of some GPUs for one class at a moment.

        Args:
            gpus: Indices of GPUs.
            bottleneck_class: The class.
            now_s: The moment, seconds since 1970.
        """
        n = self.count
        node = self.node[:n]
        of = Neighbours(
            self.distance(bottleneck_class), self.latest[INDEX["gpu_temp_c"], :n], self.is_fresh(now_s),
            self.job[:n], node, self.roster.rack_of_node()[node],
        )  # fmt: skip
        ports = self._ports_of(gpus, now_s, self.stale_s)
        around = np.concatenate((peer_features(bottleneck_class, of, gpus), ports), axis=1)
        parts = []
        for first in range(0, len(gpus), _CHUNK):
            rows = gpus[first : first + _CHUNK]
            values, ts, is_even = self._ring.gather(rows, self.last_ts[rows])
            ages = (now_s - ts).astype(np.float32)
            ages = np.where((ages < 0) & (ages >= -AHEAD_S), np.float32(0), ages)
            job_age = now_s - self.since[rows]
            parts.append(
                window_features(bottleneck_class, values, ages, is_even, job_age, around[first : first + _CHUNK])
            )
        matrix = np.concatenate(parts) if parts else np.zeros((0, len(FEATURES)), dtype=np.float32)
        return FeatureBlock(bottleneck_class, gpus, np.full(len(gpus), now_s), matrix)

    def windows(self, gpus: NDArray[np.int64]) -> Windows:
        """Gathered windows of some GPUs, each up to its newest sample."""
        return self._ring.gather(gpus, self.last_ts[gpus])

    def limits(self, name: str, gpus: NDArray[np.int64]) -> NDArray[np.float64]:
        """A limit of `Thresholds` of some GPUs, NaN where it is not known."""
        return self._limits[name][gpus].astype(np.float64)

    def job_id(self, gpu: int) -> str | None:
        """Job on a GPU by its newest sample."""
        code = self.job[gpu]
        return self.job_ids[code] if code >= 0 else None

    def node_size(self, node: str) -> int:
        """GPUs of a node that have been seen."""
        return self.roster.node_size(node)

    def samples(self) -> pl.DataFrame:
        """All that windows hold, as `gpu_uuid`, `node`, `ts` (UTC) and `QUANTITIES`, a row a sample, oldest first."""
        values, ts, _ = self._ring.gather(np.arange(self.count), self.last_ts[: self.count])
        gpu, slot = np.nonzero(~np.isnan(ts))
        names = pl.DataFrame(
            {"gpu_uuid": self.uuids, "node": self.nodes}, schema=dict.fromkeys(("gpu_uuid", "node"), pl.String)
        )
        times = pl.Series("ts", np.rint(ts[gpu, slot] * 1e6).astype(np.int64)).cast(pl.Datetime("us", "UTC"))
        columns = [pl.Series(name, values[i, gpu, slot], nan_to_null=True) for name, i in INDEX.items()]
        return names[gpu].with_columns(times, *columns).sort("gpu_uuid", "ts")

    def refuted(self, now_s: float) -> dict[str, NDArray[np.int64]]:
        """Indices of fresh GPUs whose newest sample their course refutes, by reason (`cleaning_findings.REASONS`)."""
        courses, n = self.courses, self.count
        if courses is None:
            return {}
        fresh = self.is_fresh(now_s)
        found = {"frozen": courses.is_frozen, "stuck": courses.is_stuck, "zero_under_load": courses.is_silent}
        return {reason: np.flatnonzero(fresh & flags[:n]) for reason, flags in found.items()}

    def nbytes(self) -> int:
        """Bytes of the rings."""
        return self._ring.nbytes() + self.latest.nbytes
