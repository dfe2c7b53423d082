"""Communication of jobs: share of steps, skew of gangs, hot links; from frames, from the store, in words."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner

from features.communication import hot_links, job_communication
from features.thresholds import ThresholdBook, thresholds_for
from features.vocabulary import conform
from pipelines.settings import load_settings
from pipelines.store import Store
from weatherglass import cli

H100 = "NVIDIA H100 80GB HBM3"
BOOK = ThresholdBook(default_model=H100)
RATE = thresholds_for(H100).nvlink_one_way_bytes_per_s
NOW = datetime.now(UTC).replace(microsecond=0)
NONE = pl.DataFrame()
PORTS_NONE = pl.DataFrame(schema={"ts": pl.Datetime("us", "UTC"), "node": pl.String})


def gpu(
    minute: int, node: str, uuid: str, job: str | None, fill: float | None, activity: float = 0.9
) -> dict[str, Any]:
    rate = None if fill is None else fill * RATE
    return {
        "ts": NOW - timedelta(minutes=minute), "cluster": "alpha", "node": node, "gpu_uuid": uuid, "job_id": job,
        "nvlink_tx_bytes_per_s": rate, "nvlink_rx_bytes_per_s": None if rate is None else rate / 2,
        "sm_active_ratio": activity,
    }  # fmt: skip


def port(minute: int, node: str, load: float) -> dict[str, Any]:
    return {
        "ts": NOW - timedelta(minutes=minute), "cluster": "alpha", "node": node, "device": "mlx5_0", "port": "1",
        "tx_bytes_per_s": load * 5e10, "rx_bytes_per_s": 0.0, "speed_bytes_per_s": 5e10,
    }  # fmt: skip


def step(minute: int, job: str, rank: int, step_s: float, wait_s: float | None) -> dict[str, Any]:
    return {
        "ts": NOW - timedelta(minutes=minute), "cluster": "alpha", "job_id": job, "rank": rank, "step_time_s": step_s,
        "communication_time_s": wait_s, "source": "api",
    }  # fmt: skip


def test_reports_speak_before_links_and_the_slowest_rank_waits_least() -> None:
    samples = pl.DataFrame([gpu(i, "n1", f"g{i % 4}", "1", 0.1) for i in range(1, 9)])
    progress = pl.DataFrame(
        [step(i, "1", rank, 2.0, 0.2 if rank == 3 else 0.8) for i in range(1, 6) for rank in range(4)]
    )
    row = job_communication(samples, PORTS_NONE, progress, BOOK).to_dicts()[0]
    assert (row["basis"], row["communication_ratio"], row["is_high"]) == ("reported", pytest.approx(0.4), True)
    assert row["nvlink_ratio"] == pytest.approx(0.1)
    assert (row["slowest_rank"], row["gang_skew_ratio"]) == (3, pytest.approx(1.8 / 1.2))
    assert (row["gpus"], row["nodes"]) == (4, 1)


def test_links_give_a_lower_bound_of_working_time_and_shared_nodes_none() -> None:
    samples = pl.DataFrame([
        gpu(1, "n1", "a", "1", 0.4), gpu(2, "n1", "a", "1", 0.2), gpu(3, "n1", "a", "1", 0.0, activity=0.0),
        gpu(1, "n2", "b", "2", 0.1), gpu(1, "n3", "c", "2", 0.1), gpu(1, "n3", "d", "3", None),
        gpu(1, "n4", "e", None, 0.9),
    ])  # fmt: skip
    ports = pl.DataFrame([port(1, "n2", 0.5), port(1, "n3", 0.9), port(1, "n1", 0.05)])
    rows = {row["job_id"]: row for row in job_communication(samples, ports, NONE, BOOK).to_dicts()}
    assert rows["1"]["communication_ratio"] == pytest.approx(0.3, abs=1e-6)  # the checkpoint does not dilute it
    assert rows["2"]["communication_ratio"] == pytest.approx(0.5)  # the port of its own node, not of the shared one
    assert rows["2"]["basis"] == "links"
    assert rows["3"]["communication_ratio"] is None  # no rate is not a rate of nothing
    assert rows["3"]["basis"] is None
    assert rows["3"]["is_high"] is None
    assert None not in rows


def test_a_rank_that_says_more_than_its_step_and_small_gangs_say_nothing() -> None:
    samples = pl.DataFrame([gpu(1, "n1", "a", "1", None)])
    wrong = pl.DataFrame([step(1, "1", rank, 1.0, 1.5) for rank in range(4)])
    assert job_communication(samples, PORTS_NONE, wrong, BOOK)["communication_ratio"].to_list() == [None]
    two = pl.DataFrame([step(1, "1", 0, 1.0, 0.1), step(1, "1", 1, 1.0, 0.5)])
    row = job_communication(samples, PORTS_NONE, two, BOOK).to_dicts()[0]
    assert row["communication_ratio"] == pytest.approx(0.3)
    assert row["gang_skew_ratio"] is None


def test_hot_links_stand_first_and_an_unknown_speed_is_no_load() -> None:
    samples = pl.DataFrame([gpu(i, "n1", "a", "1", 0.95 if i < 3 else 0.2) for i in range(10)])
    ports = pl.DataFrame([port(i, "n2", 0.5) for i in range(4)] + [port(1, "n3", 0.99) | {"speed_bytes_per_s": None}])
    links = hot_links(samples, ports, BOOK)
    assert links["link"].to_list() == ["a", "mlx5_0/1"]
    assert links["hot_ratio"].to_list() == [pytest.approx(0.3), 0.0]
    assert links["load_mean_ratio"].to_list() == [pytest.approx((3 * 0.95 + 7 * 0.2) / 10), pytest.approx(0.5)]
    assert links["samples"].to_list() == [10, 4]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "w.toml"
    path.write_text(f'state_dir = "{tmp_path}/state"\n[clusters.alpha]\n')
    monkeypatch.setenv("WEATHERGLASS_CONFIG", str(path))
    return str(path)


def test_the_command_reads_the_store_and_says_what_is_high_and_what_is_full(config: str) -> None:
    settings = load_settings(config)
    nodes = [
        {"cluster": "alpha", "node": node, "gpu_model": H100, "gpus": 8, "observed_at": NOW} for node in ("n1", "n2")
    ]
    frames = {
        "core_nodes": pl.DataFrame(nodes),
        "core_gpu_samples": pl.DataFrame(
            [gpu(i, "n1", f"GPU-{k}", "17", 0.97) for i in range(1, 6) for k in range(2)]
            + [gpu(60, "n1", "GPU-0", "old", 0.97), gpu(2, "n2", "GPU-9", "18", 0.05)]
        ),
        "core_port_samples": pl.DataFrame([port(i, "n2", 0.12) for i in range(1, 6)]),
        "core_job_progress": pl.DataFrame(
            [step(i, "19", rank, 2.0, 0.5 if rank else 0.1) for i in range(1, 4) for rank in range(4)]
        ).with_columns(observed_at=pl.lit(NOW)),
    }
    with Store.open(settings.store_url, settings.store_data_path) as store:
        for table, frame in frames.items():
            rows = conform(frame, table)
            store.transact(lambda writer, table=table, rows=rows: writer.upsert(table, rows))
    done = CliRunner().invoke(cli, ["communication", "--since", "20m"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert "3 jobs of which communication is known, 1 at 30% of their steps or more" in lines[0]
    assert "17" in lines[2] and "≥ 97%" in lines[2] and "high" in lines[2]  # noqa: PT018
    assert "25%" in lines[3] and "1.27 (rank 0)" in lines[3]  # noqa: PT018
    assert "≥ 12%" in lines[4]
    assert "lower bound" in done.output
    assert "3 links, 2 of them at 90% of what they carry at some time" not in done.output
    assert "4 links, 2 of them at 90% of what they carry at some time" in done.output
    assert "old" not in done.output

    read = json.loads(CliRunner().invoke(cli, ["communication", "--since", "20m", "--json"]).output)
    assert [row["job_id"] for row in read[0]["jobs"]] == ["17", "19", "18"]
    assert len(read[0]["links"]) == 4

    cut = CliRunner().invoke(cli, ["communication", "--since", "20m", "--top", "1"]).output
    assert "2 more jobs: --top 3, or --json" in cut


def test_a_store_that_tells_nothing_says_what_would(config: str) -> None:
    settings = load_settings(config)
    with Store.open(settings.store_url, settings.store_data_path):
        pass
    done = CliRunner().invoke(cli, ["communication"])
    assert done.exit_code == 0
    assert "POST /v1/progress" in done.output
