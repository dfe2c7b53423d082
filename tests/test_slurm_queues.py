"""Queues as Slurm's exporters and Slurm's own metrics tell them, through a real Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from features.vocabulary import conform
from pipelines.scheduler import ingest_scheduler
from pipelines.sources.promql import PromQL
from pipelines.sources.slurm import Commands, SlurmSource
from pipelines.sources.slurm_queues import slurm_queue_samples
from pipelines.store import Store
from tests import ksm_pages as ksm
from tests.services import Prometheus

pytestmark = pytest.mark.services("prometheus", "promtool")
# Blocks of a recorded past end on even hours; all of this lies in one of them.
T0 = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=6)
MEBI = 2.0**20


def at(minutes: float) -> datetime:
    return T0 + timedelta(minutes=minutes)


def exposed(exporter: str, *series: tuple[str, float, dict[str, str]]) -> list[ksm.Series]:
    return [(f"slurm_{name}", {"job": exporter, "instance": "c:1", **labels}, value) for name, value, labels in series]


EXPORTERS = {
    "slurm-vpenso": exposed(
        "vpenso",
        ("queue_pending", 7, {}),
        ("partition_jobs_pending", 5, {"partition": "gpu"}),
        ("user_jobs_pending", 4, {"user": "ada"}),
        ("scheduler_mean_cycle", 2_500_000, {}),
        ("gpus_alloc", 0, {}),  # not to be believed
        ("node_cpu_alloc", 3, {"node": "n1", "status": "mixed"}),
        ("rpc_stats", 9, {"operation": "x"}),
    ),
    "slurm-rivosinc": exposed(
        "rivosinc",
        ("pending_reason_total", 3, {"reason": "Priority"}),
        ("partition_job_state_total", 2, {"partition": "gpu", "state": "RUNNING"}),
        ("node_count_per_state", 6, {"state": "idle"}),
        ("job_alloc_cpus", 8, {"jobid": "1"}),
    ),
    "slurm-slinky": exposed(
        "slinky",
        ("jobs_pending_total", 1, {}),
        ("partition_jobs_pending_total", 11, {"partition": "gpu"}),
        ("partition_memory_alloc_bytes", 512, {"partition": "gpu"}),
        ("bfscheduler_cycle_mean_seconds", 3_000_000, {}),
        ("node_memory_bytes", 64_000, {"node": "n1"}),
    ),
    "slurm": exposed(
        "slurmctld",
        ("bf_depth", 12, {}),
        ("jobs_pending", 27, {}),
        ("partition_memory_alloc_bytes", 1024, {"partition": "gpu"}),
        ("user_jobs_memory_alloc", 5, {"username": "ada"}),
        ("node_cpus", 5, {"node": "n1"}),
    ),
}
EXPECTED = {
    ("slurm-vpenso", "", "queue_pending"): 7, ("slurm-vpenso", "gpu", "jobs_pending"): 5,
    ("slurm-vpenso", "", "user_jobs_pending:ada"): 4, ("slurm-vpenso", "", "scheduler_mean_cycle_s"): 2.5,
    ("slurm-rivosinc", "", "pending_reason_total:Priority"): 3,
    ("slurm-rivosinc", "gpu", "job_state_total:RUNNING"): 2, ("slurm-rivosinc", "", "node_count_per_state:idle"): 6,
    ("slurm-slinky", "", "jobs_pending_total"): 1, ("slurm-slinky", "gpu", "jobs_pending_total"): 11,
    # Megabytes and microseconds there, whatever the names say; bytes in Slurm's own.
    ("slurm-slinky", "gpu", "memory_alloc_bytes"): 512 * MEBI,
    ("slurm-slinky", "", "bfscheduler_cycle_mean_seconds"): 3,
    ("slurm", "", "bf_depth"): 12, ("slurm", "", "jobs_pending"): 27, ("slurm", "gpu", "memory_alloc_bytes"): 1024,
}  # fmt: skip


def test_each_exporter_by_its_own_units(prometheus: Callable[..., Prometheus], tmp_path: Path) -> None:
    unknown = exposed("two", ("partition_memory_alloc_bytes", 9, {"partition": "odd"}), ("nodes_idle", 3, {}))
    series = [one for part in EXPORTERS.values() for one in part] + unknown
    api = PromQL("a", prometheus(history=ksm.history((at(0), at(10), series))).url, 30)
    frame = slurm_queue_samples(api, "a", at(2), at(9))
    assert conform(frame, "core_queue_samples").equals(frame)
    assert (frame["ts"].min(), frame["ts"].max()) == (at(2), at(8))
    found = {(row["source"], row["queue"], row["metric"]): row["value"] for row in frame.iter_rows(named=True)}
    # Of an instance that nothing tells of, only what all exporters mean alike.
    odd = {key: found.pop(key) for key in list(found) if key not in EXPECTED}
    assert found == EXPECTED
    assert [(queue, metric, value) for (_, queue, metric), value in odd.items()] == [("", "nodes_idle", 3)]
    assert slurm_queue_samples(api, "a", at(-60), at(-50)).is_empty()
    assert slurm_queue_samples(api, "a", at(2), at(9), matcher='job="vpenso"')["source"].unique().to_list() == [
        "slurm-vpenso"
    ]

    source = SlurmSource("a", Commands("a", folder=str(tmp_path)))  # Slurm itself does not answer
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as store:
        reports = [ingest_scheduler(store, source, "a", "", at(minutes), api) for minutes in (6, 9)]
        rows = store.query("SELECT ts FROM core_queue_samples WHERE metric = 'queue_pending' ORDER BY ts")
    assert all(report.queue_rows > 0 and report.error for report in reports)
    assert rows["ts"].to_list() == [at(minute) for minute in range(9)]
