"""Import of the recorded traces: what the report says, beside what their README says and what DuckDB finds in them.

The queries read the files directly and know nothing of the import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest

from pipelines.importing import import_files
from pipelines.imports.report import Report, length
from pipelines.imports.targets import ParquetTarget

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)
pytestmark = pytest.mark.traces
MINUTES, SNAPSHOT = "sensors/fasrc-ipmi_gpu_nodes_20250603_1min.parquet", "sensors/fasrc-ipmi_snapshot_20250530.parquet"
SACCT = "sacct/xdmod-phillips-2016.txt"


@pytest.fixture(scope="module")
def load(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Report, pl.DataFrame]]:
    """A function that imports a trace, once: the report, and what was written."""

    @functools.cache
    def load(kind: str, name: str) -> tuple[Report, pl.DataFrame]:
        out = tmp_path_factory.mktemp("out") / "out.parquet"
        target = ParquetTarget(out)
        try:
            report = import_files(kind, traces / name, "c", target, out.parent, now=NOW)
        finally:
            target.close()
        return report, pl.read_parquet(out)

    return load


def rows(sql: str, *parameters: Any) -> list[tuple]:
    with duckdb.connect() as database:
        return database.execute(sql, list(parameters)).fetchall()


def counts(tallies: dict) -> dict:
    return {key: tally.count for key, tally in tallies.items()}


def test_sensors_every_row_is_accounted_for(load: Callable, traces: Path) -> None:
    """README: 412,020 rows of power and temperature in the two files."""
    read = 0
    for name in (MINUTES, SNAPSHOT):
        report, nodes = load("telemetry", name)
        found = dict(rows("SELECT sensor, count(*) FROM read_parquet(?) GROUP BY ALL", str(traces / name)))
        read += report.read
        used = [sensor for sensor in found if sensor in ("Sys Power", "Pwr Consumption", "Ambient Temp", "Inlet Temp")]
        passed = counts(report.passed)
        assert passed == {f"sensor {sensor}": count for sensor, count in found.items() if sensor not in used}
        assert report.dropped == {}
        values = nodes["node_power_w"].count() + nodes["inlet_temp_c"].count()
        nulled = counts(report.nulled)
        assert values + sum(nulled.values()) + sum(passed.values()) == report.read == sum(found.values())
        # 0 W of a controller that answers is no measurement, and nothing else is wrong.
        zeros = rows("SELECT count(*) FROM read_parquet(?) WHERE sensor IN (?, ?) AND value = 0",
                     str(traces / name), "Sys Power", "Pwr Consumption")  # fmt: skip
        assert nulled == {("node_power_w", "zero_is_missing"): zeros[0][0]}
        assert "values of node_power_w: exactly 0 where 0 cannot be (rows " in report.text()
    assert read == 412_020


def test_sensors_values_are_those_of_the_file(load: Callable, traces: Path) -> None:
    """README: power and temperature of GPU nodes."""
    _, nodes = load("telemetry", MINUTES)
    expected = rows(
        "SELECT node, timestamp_utc, max(value) FILTER (sensor IN ('Ambient Temp', 'Inlet Temp')), "
        "max(nullif(value, 0)) FILTER (sensor IN ('Sys Power', 'Pwr Consumption')) FROM read_parquet(?) "
        "WHERE sensor IN ('Ambient Temp', 'Inlet Temp', 'Sys Power', 'Pwr Consumption') GROUP BY ALL ORDER BY ALL",
        str(traces / MINUTES),
    )
    found = nodes.with_columns(pl.col("ts").dt.replace_time_zone(None)).sort("node", "ts")
    assert found.select("node", "ts", "inlet_temp_c", "node_power_w").rows() == expected
    assert (len(expected), nodes["node"].n_unique()) == (79_568, 327)
    # The power of a chassis or of its supplies is no node's own, and water is no air.
    assert nodes["node_power_w"].max() == 45


def test_sensors_one_minute_with_long_silences(load: Callable, traces: Path) -> None:
    """README: one minute, with long silences: gaps, and nodes that do not come back."""
    report, _ = load("telemetry", MINUTES)
    gaps = (
        "WITH times AS (SELECT DISTINCT node, timestamp_utc AS ts FROM read_parquet(?) WHERE sensor IN "
        "('Ambient Temp', 'Inlet Temp', 'Sys Power', 'Pwr Consumption')), gaps AS (SELECT node, ts, "
        "date_diff('second', lag(ts) OVER (PARTITION BY node ORDER BY ts), ts) AS gap FROM times) "
    )
    file = str(traces / MINUTES)
    ((usual, first, last, nodes),) = rows(
        gaps + "SELECT median(gap), min(ts), max(ts), count(DISTINCT node) FROM gaps", file
    )
    ((silent, silences, entities),) = rows(
        gaps + "SELECT max(gap), count(*), count(DISTINCT node) FROM gaps WHERE gap > 600", file
    )
    whose, until = rows(gaps + "SELECT node, ts FROM gaps ORDER BY gap DESC, node LIMIT 1", file)[0]
    ended, first_end = rows(
        "SELECT count(*), min(last) FROM (SELECT max(timestamp_utc) AS last FROM read_parquet(?) "
        "WHERE sensor IN ('Ambient Temp', 'Inlet Temp', 'Sys Power', 'Pwr Consumption') GROUP BY node) "
        "WHERE last < ?::TIMESTAMP - INTERVAL 10 MINUTE",
        file, last,
    )[0]  # fmt: skip
    assert (usual, silent, silences, entities, ended, nodes) == (60, 69_776, 223, 223, 104, 327)
    begin = until - timedelta(seconds=silent)
    assert (
        f"one sample of a node every 60 s; {silences} silences longer than 10 min on {entities} nodes, the longest "
        f"{length(silent)} on {whose} from {begin:%Y-%m-%d %H:%M:%S} UTC"
    ) in report.notes
    assert (
        f"{ended} nodes are silent until the end of the file, the first from {first_end:%Y-%m-%d %H:%M:%S} UTC"
    ) in report.notes
    assert (report.first, report.last) == (first.replace(tzinfo=UTC), last.replace(tzinfo=UTC))
    assert "seen        327 nodes" in report.text()
    snapshot, _ = load("telemetry", SNAPSHOT)
    assert not any("silence" in text for text in snapshot.notes)  # a moment, no course


def test_sensors_power_too_low_for_a_node_is_told(load: Callable, traces: Path) -> None:
    """README: GPU nodes. All that day's figures are of nodes that are switched off."""
    for name in (MINUTES, SNAPSHOT):
        report, nodes = load("telemetry", name)
        ((values, few, low, high),) = rows(
            "SELECT count(*), count(DISTINCT node), min(value), max(value) FROM read_parquet(?) "
            "WHERE sensor IN ('Sys Power', 'Pwr Consumption') AND value > 0 AND value < 50",
            str(traces / name),
        )
        told = [text for text in report.notes if "below 50 W" in text]
        if not values:
            assert told == []
            continue
        power = f"{low:g} W" if low == high else f"{low:g} to {high:g} W"
        noun = "node" if few == 1 else "nodes"
        assert told[0].startswith(
            f"{values:,} value{'s' if values > 1 else ''} of node_power_w on {few} {noun} below 50 W ({power})"
        )
        assert nodes.filter(pl.col("node_power_w") < 50)["node_power_w"].len() == values  # kept as read
        if name == MINUTES:
            assert (values, few, low, high) == (79_012, 325, 10, 45)


def _sacct(traces: Path, select: str, more: str = "") -> list[tuple]:
    table = "read_csv(?, delim='|', header=true, quote='', all_varchar=true)"
    return rows(f"SELECT {select} FROM {table} {more}", str(traces / SACCT))


def test_sacct_every_row_is_a_job(load: Callable, traces: Path) -> None:
    """README: raw text of sacct -P, 4,285 rows; times are UTC."""
    report, jobs = load("sacct", SACCT)
    assert _sacct(traces, "count(*), count(DISTINCT jobidraw)") == [(4285, 4285)]
    assert (report.read, len(jobs), jobs["job_id"].n_unique(), report.kept) == (4285, 4285, 4285, {"core_jobs": 4285})
    assert (report.dropped, report.passed) == ({}, {})
    # sacct gives jobs that were cancelled while they waited the moment of the cancelling as start.
    never_ran = "WHERE state LIKE 'CANCELLED%' AND start >= \"end\" AND nodelist = 'None assigned'"
    (((cancelled, zero_long),)) = _sacct(traces, "count(*), count(*) FILTER (elapsed = '00:00:00')", never_ran)
    reason = "a job that was cancelled before it started has no start"
    assert counts(report.nulled) == {("start_time", reason): cancelled}
    assert (cancelled, zero_long, len(jobs) - jobs["start_time"].count()) == (239, 239, 239)
    users, first, last = _sacct(traces, "count(DISTINCT user), min(submit::TIMESTAMP), max(submit::TIMESTAMP)")[0]
    assert report.seen == {"job": 4285, "user": users}
    assert (report.first, report.last) == (first.replace(tzinfo=UTC), last.replace(tzinfo=UTC))
    states = dict(_sacct(traces, "regexp_extract(state, '^[A-Z_]+') AS word, count(*)", "GROUP BY word"))
    assert dict(jobs["state"].value_counts().iter_rows()) == states
    assert states == {"COMPLETED": 2324, "FAILED": 1717, "CANCELLED": 243, "TIMEOUT": 1}


def test_sacct_fields_are_those_of_the_text(load: Callable, traces: Path) -> None:
    _, jobs = load("sacct", SACCT)
    expected = _sacct(
        traces,
        "jobidraw, user, account, partition, jobname, submit::TIMESTAMP, eligible::TIMESTAMP, "
        "CASE WHEN nodelist <> 'None assigned' THEN start::TIMESTAMP END, "
        '"end"::TIMESTAMP, nnodes::INT, reqcpus::INT, exitcode, '
        "coalesce(nullif(regexp_extract(timelimit, '^(\\d+)-', 1), ''), '0')::INT * 86400 "
        "+ epoch(('1970-01-01 ' || regexp_extract(timelimit, '(\\d+:\\d+:\\d+)$', 1))::TIMESTAMP)::INT",
    )
    times = ("submit_time", "eligible_time", "start_time", "end_time")
    found = jobs.with_columns(pl.col(name).dt.replace_time_zone(None) for name in times).select(
        "job_id", "user", "account", "queue", "name", *times, "nodes", "cpus", "exit_code", "time_limit_s"
    )
    assert sorted(found.rows(), key=str) == sorted(expected, key=str)


def test_sacct_gpus_and_memory(load: Callable, traces: Path) -> None:
    """Only the allocation names GPUs there, and memory per CPU is printed with its top bit set."""
    _, jobs = load("sacct", SACCT)
    told = "nullif(regexp_extract(alloctres, 'gres/gpu=(\\d+)', 1), '')"
    gpus = dict(_sacct(traces, f"jobidraw, coalesce({told}, '0')::INT"))
    assert dict(jobs.select("job_id", "gpus").iter_rows()) == gpus
    per_cpu = "regexp_extract(reqmem, '^(\\d+)', 1)::BIGINT - 2147483648"
    flagged = _sacct(traces, f"jobidraw, {per_cpu}, reqcpus::INT", "WHERE reqmem LIKE '2147486648M%'")
    assert len(flagged) == 4238
    memory = dict(jobs.select("job_id", "memory_mib").iter_rows())
    assert all(memory[job] == per_cpu * cpus for job, per_cpu, cpus in flagged)
    row = jobs.filter(pl.col("job_id") == "165381").row(0, named=True)
    assert row["node_list"].split(",")[:2] == ["cpn-f13-03-01", "cpn-f13-03-02"]
    assert len(row["node_list"].split(",")) == row["nodes"] == 8
