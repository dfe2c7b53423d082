"""A small recorded cluster for tests of the pipelines: sources with a fixed past that can fail, settings, a store."""

from datetime import UTC, datetime, timedelta

import polars as pl

from features.vocabulary import conform, schema
from pipelines.settings import parse_settings
from pipelines.sources import Fetched, LiveJobs, SourceError, gpu_frame, node_frame

START = datetime(2026, 5, 4, 8, 0, tzinfo=UTC)
STEP_S = 15
NODES = ("n1", "n2")
GPUS = 2


def seconds(value):
    return timedelta(seconds=value)


def samples(begin, end, nodes=NODES):
    """What exporters would show: every 15 s, each GPU its own figures, the same for the same moment every time."""
    rows = []
    at = begin
    while at < end:
        step = round((at - START).total_seconds()) // STEP_S
        for n, node in enumerate(nodes):
            for g in range(GPUS):
                rows.append((at, node, f"GPU-{n}{g}", g, 40.0 + (step + 3 * n + g) % 20, 300.0 + step % 50, 0))
        at += seconds(STEP_S)
    names = ("ts", "node", "gpu_uuid", "gpu_index", "gpu_temp_c", "gpu_power_w", "xid_last")
    types = schema("raw_gpu_samples")
    return pl.DataFrame(rows, schema={name: types[name] for name in names}, orient="row")


class Recorded:
    """A telemetry source with everything from START on; `edit` changes what it gives, `down` makes it fail."""

    watermark_lag_s = 0.0

    def __init__(self, name="alpha"):
        self.name = name
        self.down = False
        self.edit = lambda frame: frame
        self.warnings = []
        self.asked = []

    def fetch(self, start, end):
        if self.down:
            raise SourceError(f"{self.name}: http://127.0.0.1:1: connection refused; is it running?")
        self.asked.append((start, end))
        gpu = self.edit(samples(max(start, START), end)).filter((pl.col("ts") >= start) & (pl.col("ts") < end))
        gpu = gpu_frame(gpu.with_columns(pl.lit(self.name).alias("cluster")))
        nodes = gpu.select("ts", "cluster", "node").unique().with_columns(is_up=pl.lit(True), inlet_temp_c=pl.lit(22.0))
        return Fetched(gpu, node_frame(nodes), list(self.warnings))

    def latest(self):
        return self.fetch(START, START + seconds(STEP_S))

    def check(self):
        return []

    def close(self):
        pass


def job(job_id, submit_s, start_s=None, end_s=None, state="COMPLETED", nodes=("n1",), gpus=GPUS, user="ada", seen_s=0):
    """One job; times in seconds after START."""

    def at(value):
        return None if value is None else START + seconds(value)

    return {
        "cluster": "alpha", "job_id": str(job_id), "user": user, "account": "acc", "queue": "batch", "name": "train",
        "submit_time": at(submit_s), "eligible_time": at(submit_s), "start_time": at(start_s), "end_time": at(end_s),
        "nodes": len(nodes) or 1, "cpus": 8, "gpus": gpus, "memory_mib": 1024, "time_limit_s": 3600, "state": state,
        "node_list": ",".join(nodes) or None, "reason": None, "planned_start_time": None, "observed_at": at(seen_s),
    }  # fmt: skip


def jobs_frame(rows):
    types = schema("core_jobs")
    return pl.DataFrame(list(rows), schema=types, orient="row")


class Queue:
    """A job source whose jobs are set by the test."""

    name = "alpha"

    def __init__(self, *rows):
        self.rows = list(rows)
        self.down = False

    def fetch_jobs(self, start, end):
        self._fail()
        jobs = jobs_frame(self.rows)
        return jobs.filter(
            (pl.col("submit_time") < end) & (pl.col("end_time").is_null() | (pl.col("end_time") >= start))
        )

    def live(self):
        self._fail()
        jobs = jobs_frame(self.rows).filter(pl.col("state").is_in(["PENDING", "RUNNING"]))
        nodes = pl.DataFrame({"node": NODES}).with_columns(
            observed_at=pl.lit(START),
            cluster=pl.lit("alpha"),
            rack=pl.lit("r1"),
            pod=pl.lit("p1"),
            gpu_model=pl.lit("NVIDIA H100 80GB HBM3"),
            gpus=pl.lit(GPUS),
            state=pl.lit("IDLE"),
        )
        return LiveJobs(jobs, conform(nodes, "core_nodes"))

    def check(self):
        return []

    def _fail(self):
        if self.down:
            raise SourceError("alpha: squeue failed: is slurmctld up?")


def ingest_settings(**changes):
    data = {"window_s": 300, "overlap_s": 60, "lag_s": 20, "initial_history_s": 0, "max_windows_per_run": 48}
    return parse_settings({"ingest": {**data, **changes}}, {}).ingest
