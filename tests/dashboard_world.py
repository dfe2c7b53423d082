"""A small world for the dashboards: a real store filled with a known fleet, and a hints API that says what it is told.

The pages are real and so is the store; only the hints come from a list, because what a page does with them is the
question here, not how they were made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import numpy as np
import polars as pl

from features.vocabulary import conform

CLUSTER = "sim"
CLASSES = ("thermal_throttle", "nvlink_saturation", "memory_exhaustion")


class ApiDownError(Exception):
    """What a client of the hints API raises when nobody answers."""

    code = "unreachable"
    message = "http://127.0.0.1:8700 refused the connection"


class FakeHints:
    """Hints as they are set. `state` is fresh, stale or down."""

    def __init__(self, clusters: Sequence[str] = (CLUSTER,)) -> None:
        self.clusters = list(clusters)
        self.state = "fresh"
        self.ttl_s = 30.0
        self.age_s = 4.0
        self.stale_shards: list[str] = []
        self.actionable_horizon_s: float | None = 41.0
        self.models = {"bottleneck": "baseline:trend"}
        self.bottlenecks: list[dict[str, Any]] = []
        self.risks: list[dict[str, Any]] = []
        self.jobs: list[dict[str, Any]] = []
        self.demand: list[dict[str, Any]] = []
        self.gpus = 256
        self.version = 1
        self.calls: list[tuple[str, dict]] = []

    def __call__(self, path: str, params: Mapping[str, str]) -> dict:
        self.calls.append((path, dict(params)))
        if self.state == "down":
            raise ApiDownError(ApiDownError.message)
        now = datetime.now(UTC)
        if path == "/v1/status":
            return self._status(now)
        if self.state == "stale":
            reason = "expired 10 s ago: its writer has not published since"
            return {
                "error": {
                    "code": "stale",
                    "message": f"no fresh bottlenecks; {CLUSTER}: {reason}",
                    "detail": {"stale_shards": self.clusters, "reasons": {CLUSTER: reason}},
                }
            }
        kind = path.rsplit("/", 1)[-1]
        items = {
            "bottlenecks": self.bottlenecks, "node-risks": self.risks, "jobs": self.jobs, "demand": self.demand,
        }[kind]  # fmt: skip
        cluster = params.get("cluster")
        return {
            "items": [item for item in items if not cluster or item["cluster"] == cluster],
            "version": self.version,
            "generated_at": (now - timedelta(seconds=self.age_s)).isoformat(),
            "stale_shards": self.stale_shards,
            "actionable_horizon_s": self.actionable_horizon_s,
            "model_versions": self.models,
            "data_age_s": self.age_s + 6,
            "expires_in_s": self.ttl_s - self.age_s,
        }

    def _status(self, now: datetime) -> dict:
        is_fresh = self.state == "fresh"
        age_s = self.age_s if is_fresh else self.ttl_s + 10
        kind = {"is_fresh": is_fresh, "age_s": age_s, "ttl_s": self.ttl_s, "version": self.version, "reason": None}
        nowcast = {
            "gpus": self.gpus,
            "fresh_gpus": self.gpus - 8,
            "last_tick": (now - timedelta(seconds=age_s)).isoformat(),
            "excluded_nodes": 1,
            "screened": dict.fromkeys(CLASSES, 0),
            "model_version": "baseline:trend",
        }
        kinds = dict.fromkeys(("bottlenecks", "node-risks", "jobs"), kind)
        return {
            "is_fresh": is_fresh,
            "at": now.isoformat(),
            "clusters": {name: {"is_fresh": is_fresh, "kinds": kinds, "nowcast": nowcast} for name in self.clusters},
        }


def bottleneck(number: int, **changes: Any) -> dict[str, Any]:
    """A bottleneck as the API gives it; `in_s` sets the expected onset from now."""
    in_s = changes.pop("in_s", 40)
    node = changes.pop("node", "n3")
    return {
        "id": f"b{number}",
        "cluster": CLUSTER,
        "bottleneck_class": "thermal_throttle",
        "scope": "gpu",
        "node": node,
        "gpu_uuid": f"GPU-{node}-4",
        "rack": "r1",
        "pod": "p1",
        "horizon_s": 60,
        "probability": 0.62,
        "probabilities": {"30": 0.31, "60": 0.62, "90": 0.84, "120": 0.91},
        "expected_onset": (datetime.now(UTC) + timedelta(seconds=in_s)).isoformat(),
        "is_active": False,
        "job_ids": ["4711"],
        "action": "reserve",
        "reasons": ["margin 3 °C, closing by 0.06 °C/s", "inlet 34 °C"],
        "model_version": "baseline:trend",
        **changes,
    }


def risk(node: str, p_24h: float, **changes: Any) -> dict[str, Any]:
    """A node risk as the API gives it."""
    return {
        "cluster": CLUSTER, "node": node, "p_1h": p_24h / 18, "p_24h": p_24h, "p_7d": min(1.0, p_24h * 5),
        "is_climatology": False, "reasons": ["2 XID 79 in 30 days"], "model_version": "2026-11-29T02-00", **changes,
    }  # fmt: skip


def demand(queue: str | None, middle: float, *, begin: datetime | None = None, **changes: Any) -> list[dict[str, Any]]:
    """Demand of a queue at every horizon as the API gives it: `middle` GPUs, wider with the horizon.

    Args:
        queue: Name of the queue; None: all together.
        middle: The median, GPUs.
        begin: End of the last full hour; None: of this one.
        **changes: Of every item.
    """
    begin = begin or datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    items = []
    for horizon_h in (1, 3, 6, 12, 24, 48, 72, 168, 336):
        half = middle * 0.05 * np.log2(1 + horizon_h)
        levels = dict(zip(("q05", "q10", "q25", "q50", "q75", "q80", "q90", "q95"),
                          (-2, -1.5, -0.6, 0, 0.6, 0.8, 1.5, 2), strict=True))  # fmt: skip
        items.append(
            {
                "cluster": CLUSTER, "queue": queue, "quantity": "in_demand", "unit": "gpus", "horizon_h": horizon_h,
                "target_time": (begin + timedelta(hours=horizon_h)).isoformat(),
                **{name: max(0.0, float(middle + z * half)) for name, z in levels.items()},
                "last_value": middle - 4, "last_week_value": middle + 6, "reclaimable": [],
                "model_version": "demand-experts-2/pool", "generated_at": begin.isoformat(), **changes,
            }
        )  # fmt: skip
    return items


# --- the fleet ----------------------------------------------------------------------------------------------------


def nodes_frame(
    count: int, at: datetime, *, per_rack: int = 4, per_pod: int = 4, cluster: str = CLUSTER
) -> pl.DataFrame:
    """Inventory of `count` nodes of 8 GPUs; n5 is drained."""
    number = range(1, count + 1)
    rack = [(i - 1) // per_rack + 1 for i in number]
    return conform(
        pl.DataFrame(
            {
                "observed_at": [at] * count,
                "cluster": [cluster] * count,
                "node": [f"n{i}" for i in number],
                "rack": [f"r{r}" for r in rack],
                "pod": [f"p{(r - 1) // per_pod + 1}" for r in rack],
                "gpu_model": ["NVIDIA H100 80GB HBM3"] * count,
                "gpus": [8] * count,
                "state": ["drained" if i == 5 else "mixed" for i in number],
                "reason": ["bad NVLink" if i == 5 else None for i in number],
            }
        ),
        "core_nodes",
    )


def jobs_frame(now: datetime, count: int, cluster: str = CLUSTER) -> pl.DataFrame:
    """Jobs on eight nodes each from n1 on; the last quarter of the nodes is free; three jobs wait."""
    rows = []
    used = count * 3 // 4
    for index, first in enumerate(range(1, used + 1, 8)):
        names = [f"n{i}" for i in range(first, min(first + 8, used + 1)) if i != 5]
        rows.append(
            {
                "cluster": cluster, "job_id": str(4711 + index), "user": ("ada", "grace", "edsger")[index % 3],
                "queue": ("train", "research")[index % 2], "submit_time": now - timedelta(hours=9),
                "start_time": now - timedelta(hours=8 - index % 5), "nodes": len(names), "gpus": 8 * len(names),
                "state": "RUNNING", "node_list": ",".join(names), "observed_at": now - timedelta(seconds=40),
            }
        )  # fmt: skip
    for index, gpus in enumerate((64, 128, 16)):
        queue = ("train", "research")[index % 2]
        rows.append(
            {
                "cluster": cluster, "job_id": str(9001 + index), "user": "alan", "queue": queue,
                "submit_time": now - timedelta(minutes=25 * (index + 1)), "start_time": None, "nodes": gpus // 8,
                "gpus": gpus, "state": "PENDING", "node_list": None, "observed_at": now - timedelta(seconds=40),
            }
        )  # fmt: skip
    return conform(pl.DataFrame(rows, infer_schema_length=None), "core_jobs")


def samples_frame(
    nodes: pl.DataFrame, jobs: pl.DataFrame, times: Sequence[datetime], seed: int = 1
) -> pl.DataFrame:  # fmt: skip
    """GPU samples: jobs work, but for job 4712 on its first two nodes; n2 is hot; n7 sends nothing."""
    random = np.random.default_rng(seed)
    owner = {
        node: row["job_id"]
        for row in jobs.filter(pl.col("state") == "RUNNING").iter_rows(named=True)
        for node in row["node_list"].split(",")
    }
    idle_nodes = set(next((r["node_list"].split(",")[:2] for r in jobs.to_dicts() if r["job_id"] == "4712"), []))
    names = [name for name in nodes["node"] if name != "n7"]
    keys = pl.DataFrame(
        {
            "node": np.repeat(names, 8),
            "gpu_index": np.tile(np.arange(8), len(names)),
            "job_id": pl.Series([owner.get(name) for name in names for _ in range(8)], dtype=pl.String),
        }
    ).with_columns(
        pl.lit(nodes["cluster"][0]).alias("cluster"),
        pl.format("GPU-{}-{}", "node", "gpu_index").alias("gpu_uuid"),
        (pl.col("job_id").is_not_null() & ~pl.col("node").is_in(list(idle_nodes))).alias("works"),
    )
    frames = []
    for index, ts in enumerate(times):
        works = keys["works"].to_numpy() & (random.random(keys.height) > (0.06 if index % 12 else 0.5))
        noise = random.random(keys.height)
        frames.append(
            keys.with_columns(
                pl.lit(ts).alias("ts"),
                pl.Series("engine_active_ratio", np.where(works, 0.85 + 0.1 * noise, 0.0), dtype=pl.Float32),
                pl.Series("tensor_active_ratio", np.where(works, 0.3 + 0.2 * noise, 0.0), dtype=pl.Float32),
                pl.Series("dram_active_ratio", np.where(works, 0.4 + 0.2 * noise, 0.0), dtype=pl.Float32),
                ((pl.col("node") == "n2") & (pl.col("gpu_index") < 3)).alias("is_thermal_slowdown"),
            ).drop("works")
        )
    return conform(pl.concat(frames), "core_gpu_samples")


def fill(store: Any, now: datetime, count: int = 32, *, cluster: str = CLUSTER, hours: int = 6, **shape: int) -> None:
    """Write the fleet into the store: inventory, jobs, five minutes of samples, hours of minutes."""
    nodes = nodes_frame(count, now - timedelta(minutes=3), cluster=cluster, **shape)
    jobs = jobs_frame(now, count, cluster)
    end = now - timedelta(seconds=70)
    samples = samples_frame(nodes, jobs, [end - timedelta(seconds=15 * i) for i in range(24)])
    start = end.replace(second=0, microsecond=0) - timedelta(minutes=6)
    minutes = samples_frame(nodes, jobs, [start - timedelta(minutes=5 * i) for i in range(hours * 12)], seed=2)

    def write(writer: Any) -> None:
        writer.upsert("core_nodes", nodes)
        writer.upsert("core_jobs", jobs)
        writer.append("core_gpu_samples", samples)
        writer.append("core_gpu_minutes", minutes)

    store.transact(write)


# --- serving ------------------------------------------------------------------------------------------------------


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


class Served:
    """A WSGI application on a free loopback port, until `stop`."""

    def __init__(self, application: Any) -> None:
        from socketserver import ThreadingMixIn

        class Threaded(ThreadingMixIn, WSGIServer):
            daemon_threads = True
            request_queue_size = 64

        self._server = make_server("127.0.0.1", 0, application, Threaded, _Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def query_of(store: Any, broken: Callable[[], bool] = lambda: False) -> Callable[[str, Sequence], pl.DataFrame]:
    """A query function that fails while `broken()`."""

    def query(sql: str, params: Sequence) -> pl.DataFrame:
        if broken():
            raise OSError("sqlite:var/store/catalogue.sqlite: cannot be opened: disk I/O error")
        return store.query(sql, params)

    return query
