"""What *Is my fleet good?* reads from the store: windows of samples, the inventory, the queue, the trend.

Here belong SQL and the assembly of frames; what they mean stands in `features/fleet.py`, how they look in
`fleet_page.py`. Sums over GPUs are made in SQL, so that a page costs the same few megabytes at 100,000 GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl

from dashboards.reading import Query
from features import fleet
from features.vocabulary import schema

WINDOW_S = 300
LOOK_BACK_S = 6 * 3600
_MAX_NAMED_GPUS = 5_000
_FRESHEST = (900, 6 * 3600, 14 * 86_400)
"""How far back the newest sample is looked for, s: near first, since a wide look reads many files."""

BIN_S = {1: 60, 6: 300, 24: 900}
"""Hours shown → length of a bin, s."""

# Three-valued: null where no activity metric is known. Thresholds are compared in the columns' own precision.
_JUDGED = """
    SELECT *, CASE WHEN ran IS NULL AND computed IS NULL THEN NULL
                   ELSE coalesce(ran, true) AND coalesce(computed, true) END AS is_active
    FROM (SELECT *,
        coalesce(engine_active_ratio, sm_active_ratio, gpu_util_ratio) >= ?::FLOAT AS ran,
        CASE WHEN tensor_active_ratio IS NULL AND dram_active_ratio IS NULL THEN NULL
             ELSE coalesce(tensor_active_ratio, 0) >= ?::FLOAT OR coalesce(dram_active_ratio, 0) >= ?::FLOAT
             END AS computed,
        coalesce(is_thermal_slowdown, false) OR coalesce(is_power_brake, false) AS is_slow
        FROM {rows})
"""
_THRESHOLDS = (fleet.BUSY_ENGINE_RATIO, fleet.BUSY_TENSOR_RATIO, fleet.BUSY_DRAM_RATIO)

_COUNTS = {
    "good": "is_active AND NOT is_slow",
    "throttled": "is_active AND is_slow",
    "unproductive": "NOT is_active AND job_id IS NOT NULL",
    "unknown": "is_active IS NULL AND job_id IS NOT NULL",
    "free": "is_active IS NOT TRUE AND job_id IS NULL",
    "orphan": "is_active AND job_id IS NULL",
}

_WINDOW = f"""
    SELECT cluster, node, gpu_uuid, max(gpu_index) AS gpu_index,
        arg_max(job_id, ts) FILTER (job_id IS NOT NULL) AS job_id, max(ts) AS newest, count(*) AS samples,
        {", ".join(f"count(*) FILTER ({test}) AS {name}" for name, test in _COUNTS.items())}
    FROM ({_JUDGED.format(rows="core_gpu_samples WHERE cluster = ? AND ts > ? AND ts <= ?")})
    GROUP BY cluster, node, gpu_uuid
"""

_ACTIVITY = (
    "engine_active_ratio", "sm_active_ratio", "gpu_util_ratio", "tensor_active_ratio", "dram_active_ratio",
)  # fmt: skip
_FLAGS = ("is_thermal_slowdown", "is_power_brake")
_MINUTE = 60_000_000

# Minutes from the table of minutes, and from samples where that table does not reach yet.
_TREND = f"""
    WITH minutes AS (
        SELECT epoch_us(ts) // {_MINUTE} AS minute, job_id, {", ".join(_ACTIVITY + _FLAGS)}
        FROM core_gpu_minutes WHERE cluster = ? AND ts >= ? AND ts < ?
        UNION ALL
        SELECT epoch_us(ts) // {_MINUTE} AS minute, arg_max(job_id, ts) FILTER (job_id IS NOT NULL) AS job_id,
            {", ".join(f"avg({name})::FLOAT AS {name}" for name in _ACTIVITY)},
            {", ".join(f"bool_or({name}) AS {name}" for name in _FLAGS)}
        FROM core_gpu_samples WHERE cluster = ? AND ts >= ? AND ts < ? GROUP BY minute, node, gpu_uuid
    )
    SELECT minute // ? AS bin_number, count(DISTINCT minute) AS minutes,
        {", ".join(f"count(*) FILTER ({test}) AS {name}" for name, test in _COUNTS.items())}
    FROM ({_JUDGED.format(rows="minutes")}) GROUP BY bin_number
"""

_LAST_ACTIVE = f"""
    SELECT gpu_uuid, max(ts) FILTER (is_active) AS last_active
    FROM ({_JUDGED.format(rows="{table} WHERE cluster = ? AND ts >= ? AND gpu_uuid IN (SELECT unnest(?::VARCHAR[]))")})
    GROUP BY gpu_uuid
"""

_QUEUES = """
    SELECT cluster, coalesce(queue, '') AS queue,
        count(*) FILTER (state = 'RUNNING') AS running_jobs,
        coalesce(sum(gpus) FILTER (state = 'RUNNING'), 0)::BIGINT AS running_gpus,
        count(*) FILTER (state = 'PENDING') AS waiting_jobs,
        coalesce(sum(gpus) FILTER (state = 'PENDING'), 0)::BIGINT AS waiting_gpus,
        min(coalesce(eligible_time, submit_time)) FILTER (state = 'PENDING') AS oldest
    FROM core_jobs WHERE state IN ('RUNNING', 'PENDING') GROUP BY 1, 2 ORDER BY waiting_gpus DESC, cluster, queue
"""

_RUNNING = "SELECT cluster, job_id, user, nodes, gpus, start_time, node_list FROM core_jobs WHERE state = 'RUNNING'"


@dataclass(frozen=True, slots=True)
class FleetNow:
    """The fleet over the newest window of each cluster.

    Attributes:
        states: Result of `fleet.node_states`.
        goodness: The one number and its parts.
        losses: Reasons, largest first.
        newest: Cluster to the time of its newest sample.
        silent: Clusters of the inventory without any sample in the last days.
        window_s: Length of the window, s.
        queues: One row per cluster and queue, `_QUEUES`.
        jobs_at: Cluster to when its jobs were last read.
        nodes_at: Cluster to when its inventory was last read.
    """

    states: pl.DataFrame
    goodness: fleet.Goodness
    losses: Sequence[fleet.Loss]
    newest: Mapping[str, datetime]
    silent: Sequence[str]
    window_s: int
    queues: pl.DataFrame
    jobs_at: Mapping[str, datetime]
    nodes_at: Mapping[str, datetime]


@dataclass(frozen=True, slots=True)
class FleetTrend:
    """Goodness over the last hours: result of `fleet.trend`, and the length of its bins."""

    frame: pl.DataFrame
    bin_s: int
    hours: int


class FleetReader:
    """Reads the fleet from the store.

    Args:
        query: See `reading.Query`.
    """

    def __init__(self, query: Query) -> None:
        self.query = self._query = query
        # Bins that are over, by cluster and length: from when to when they were read, and what they hold.
        self._bins: dict[tuple[str, int], tuple[datetime, datetime, pl.DataFrame]] = {}

    def inventory(self, cluster: str | None = None) -> pl.DataFrame:
        """Nodes: `fleet.NODE_COLUMNS` and `observed_at`."""
        where, params = ("WHERE cluster = ?", [cluster]) if cluster else ("", [])
        columns = ", ".join((*fleet.NODE_COLUMNS, "observed_at"))
        return _typed(self._query(f"SELECT {columns} FROM core_nodes {where}", params), "core_nodes")

    def newest(self, clusters: Sequence[str], now: datetime) -> dict[str, datetime]:
        """Time of the newest sample of each cluster; clusters without samples are left out."""
        found: dict[str, datetime] = {}
        for back_s in _FRESHEST:
            missing = [cluster for cluster in clusters if cluster not in found]
            if not missing:
                break
            rows = self._query(
                "SELECT cluster, max(ts) AS newest FROM core_gpu_samples "
                "WHERE cluster IN (SELECT unnest(?::VARCHAR[])) AND ts >= ? AND ts <= ? GROUP BY cluster",
                [missing, now - timedelta(seconds=back_s), now + timedelta(seconds=60)],
            )
            found |= {row["cluster"]: _utc(row["newest"]) for row in rows.iter_rows(named=True)}
        return found

    def gpu_indices(self, uuids: Sequence[str], now: datetime) -> dict[str, int]:
        """Index of each of these GPUs on its node, as last seen in the newest hours."""
        rows = self._query(
            "SELECT gpu_uuid, arg_max(gpu_index, ts) AS gpu_index FROM core_gpu_samples "
            "WHERE gpu_uuid IN (SELECT unnest(?::VARCHAR[])) AND ts >= ? AND gpu_index IS NOT NULL GROUP BY gpu_uuid",
            [list(uuids), now - timedelta(hours=2)],
        )
        return {row["gpu_uuid"]: row["gpu_index"] for row in rows.iter_rows(named=True)}

    def now(self, clusters: Sequence[str], now: datetime) -> FleetNow:
        """The fleet over the newest `WINDOW_S` of each cluster.

        Args:
            clusters: Names of clusters.
            now: Present time, UTC.
        """
        nodes = self.inventory()
        nodes = nodes.filter(pl.col("cluster").is_in(list(clusters)))
        newest = self.newest(clusters, now)
        parts = [
            self._query(_WINDOW, [*_THRESHOLDS, cluster, end - timedelta(seconds=WINDOW_S), end])
            for cluster, end in newest.items()
        ]
        window = pl.concat([_as_window(part) for part in parts]) if parts else pl.DataFrame(schema=fleet.GPU_WINDOW)
        running = _typed(self._query(_RUNNING, []), "core_jobs").filter(pl.col("cluster").is_in(list(clusters)))
        window = fleet.attribute_jobs(window, nodes, running)
        states = fleet.node_states(window, nodes)
        queues = self._query(_QUEUES, []).filter(pl.col("cluster").is_in(list(clusters)))
        waiting = {
            row["cluster"]: (row["waiting_jobs"], row["waiting_gpus"])
            for row in queues.group_by("cluster")
            .agg(pl.col("waiting_jobs").sum(), pl.col("waiting_gpus").sum())
            .iter_rows(named=True)
        }
        looked_back_to = min(newest.values(), default=now) - timedelta(seconds=LOOK_BACK_S)
        losses = fleet.losses(
            window,
            states,
            running=running,
            waiting=waiting,
            last_active=self._last_active(window, looked_back_to, newest),
            looked_back_to=looked_back_to,
        )
        counts = {name: float(states[name].sum()) for name in fleet.STATES}
        jobs_at = self._query("SELECT cluster, max(observed_at) AS at FROM core_jobs GROUP BY cluster", [])
        return FleetNow(
            states=states,
            goodness=fleet.goodness(counts),
            losses=losses,
            newest=newest,
            silent=[cluster for cluster in clusters if cluster not in newest],
            window_s=WINDOW_S,
            queues=queues,
            jobs_at={r["cluster"]: _utc(r["at"]) for r in jobs_at.iter_rows(named=True) if r["at"] is not None},
            nodes_at={
                row["cluster"]: _utc(row["at"])
                for row in nodes.group_by("cluster").agg(pl.col("observed_at").max().alias("at")).iter_rows(named=True)
                if row["at"] is not None
            },
        )

    def trend(self, clusters: Sequence[str], hours: int, now: datetime) -> FleetTrend:
        """Goodness of the last hours.

        Bins that ended before the newest ten minutes are read once and kept: late samples of older bins show after a
        restart only.

        Args:
            clusters: Names of clusters.
            hours: One of `BIN_S`.
            now: Present time, UTC.
        """
        bin_s = BIN_S[hours]
        nodes = self.inventory()
        gpus = {
            row["cluster"]: float(row["gpus"] or 0)
            for row in nodes.group_by("cluster").agg(pl.col("gpus").sum()).iter_rows(named=True)
            if row["cluster"] in clusters
        }
        tallies = [
            self._tallies(cluster, newest - timedelta(hours=hours), newest, bin_s)
            for cluster, newest in self.newest(clusters, now).items()
        ]
        empty = pl.DataFrame(schema=_TALLY)
        return FleetTrend(fleet.trend(pl.concat([empty, *tallies]), gpus), bin_s, hours)

    def _tallies(self, cluster: str, start: datetime, end: datetime, bin_s: int) -> pl.DataFrame:
        first = _floor(start, bin_s)
        last = _floor(end, bin_s) + timedelta(seconds=bin_s)
        covered, closed, kept = self._bins.get((cluster, bin_s), (last, last, pl.DataFrame(schema=_TALLY)))
        if covered > first:
            whole = self._read_tallies(cluster, first, last, bin_s)
        else:
            fresh = self._read_tallies(cluster, max(first, closed), last, bin_s)
            whole = pl.concat([kept.filter(pl.col("bin") >= first), fresh])
        closed = _floor(end - timedelta(seconds=600), bin_s)
        self._bins[cluster, bin_s] = (first, closed, whole.filter(pl.col("bin") < closed))
        return whole

    def _read_tallies(self, cluster: str, start: datetime, end: datetime, bin_s: int) -> pl.DataFrame:
        reach = self._query(
            "SELECT max(ts) AS reach FROM core_gpu_minutes WHERE cluster = ? AND ts >= ? AND ts < ?",
            [cluster, start, end],
        )["reach"][0]
        border = start if reach is None else _utc(reach) + timedelta(seconds=60)
        rows = self._query(_TREND, [cluster, start, border, cluster, border, end, bin_s // 60, *_THRESHOLDS])
        mean = [(pl.col(name) / pl.col("minutes")).alias(name) for name in ("good", "throttled", "unproductive")]
        return rows.select(
            pl.from_epoch(pl.col("bin_number").cast(pl.Int64) * bin_s, "s")
            .cast(pl.Datetime("us")).dt.replace_time_zone("UTC").alias("bin"),
            pl.lit(cluster).alias("cluster"),
            *mean,
            (pl.col("unknown") / pl.col("minutes")).alias("unknown"),
            (pl.col("free") / pl.col("minutes")).alias("idle"),
        ).sort("bin")  # fmt: skip

    def _last_active(self, window: pl.DataFrame, since: datetime, newest: Mapping[str, datetime]) -> pl.DataFrame:
        idle = window.filter(
            pl.col("job_id").is_not_null() & (pl.col("unproductive") >= fleet.IDLE_SHARE * pl.col("samples"))
        ).head(_MAX_NAMED_GPUS)
        found = []
        for cluster in idle["cluster"].unique():
            uuids = idle.filter(pl.col("cluster") == cluster)["gpu_uuid"].to_list()
            recent = max(since, newest[cluster] - timedelta(hours=1))
            for table, start in (("core_gpu_minutes", since), ("core_gpu_samples", recent)):
                rows = self._query(_LAST_ACTIVE.format(table=table), [*_THRESHOLDS, cluster, start, uuids])
                found.append(rows.select(pl.lit(cluster).alias("cluster"), "gpu_uuid", "last_active").cast(_LAST))
        if not found:
            return pl.DataFrame(schema=_LAST)
        whole = pl.concat(found)
        return whole.group_by("cluster", "gpu_uuid").agg(pl.col("last_active").max())


_TALLY = {
    "bin": pl.Datetime("us", "UTC"), "cluster": pl.String, "good": pl.Float64, "throttled": pl.Float64,
    "unproductive": pl.Float64, "unknown": pl.Float64, "idle": pl.Float64,
}  # fmt: skip
_LAST = pl.Schema({"cluster": pl.String(), "gpu_uuid": pl.String(), "last_active": pl.Datetime("us", "UTC")})


def _as_window(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select(pl.col(name).cast(dtype) for name, dtype in fleet.GPU_WINDOW.items())


def _typed(frame: pl.DataFrame, table: str) -> pl.DataFrame:
    dtypes = schema(table)
    return frame.select(pl.col(name).cast(dtypes[name]) for name in frame.columns)


def _utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC)


def _floor(moment: datetime, step_s: int) -> datetime:
    seconds = int(moment.timestamp()) // step_s * step_s
    return datetime.fromtimestamp(seconds, UTC)
