"""Two Prometheus servers that scrape the same exporters, seconds apart: one of them is read, and then the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from features.cleaning_ports import port_rates
from pipelines.settings import Cluster
from pipelines.sources import build_telemetry
from pipelines.sources.prometheus import PrometheusSource
from pipelines.sources.remote_write import RemoteWriteSource
from pipelines.sources.remote_write_intake import Intake
from pipelines.sources.remote_write_newest import Newest
from pipelines.sources.remote_write_series import Series
from pipelines.sources.replicas import OneReplica, kept_samples
from pipelines.sources.series import REPLICA_LABELS, Index, Samples
from tests.services import Prometheus
from tests.test_remote_write import gpu_labels, request, series_bytes

DAY = datetime(2026, 11, 1, tzinfo=UTC)
STEP_S = 15
STEP_MS = STEP_S * 1000
TEMP, POWER = "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE"
SENT = "node_infiniband_port_data_transmitted_bytes_total"
BYTES_PER_S = 1e9


def at(step: float, late_s: float = 0.0) -> datetime:
    return DAY + timedelta(seconds=step * STEP_S + late_s)


def flat(*series: tuple[int, int, Sequence[int]]) -> Samples:
    """Samples of (name, entity, times)."""
    times = [ts for *_, of_series in series for ts in of_series]
    return Samples(
        np.array([name for name, *_ in series]),
        np.array([entity for _, entity, _ in series]),
        np.array([len(of_series) for *_, of_series in series]),
        np.array(times, np.int64),
        np.zeros(len(times)),
    )


def kept(chooser: OneReplica, replicas: Sequence[int], *series: tuple[int, int, Sequence[int]]) -> list[list[int]]:
    samples = flat(*series)
    left = kept_samples(samples, chooser.keep(samples, np.array(replicas)))
    cuts = np.cumsum(left.counts)[:-1]
    return [part.tolist() for part in np.split(left.ts_ms, cuts)]


def steps(first: int, last: int, late_ms: int = 0) -> list[int]:
    return [step * STEP_MS + late_ms for step in range(first, last)]


def test_of_two_replicas_the_one_with_more_samples_is_kept() -> None:
    chooser = OneReplica(STEP_MS)
    assert kept(chooser, [0, 1], (0, 0, steps(0, 6)), (0, 0, steps(0, 8, 1500))) == [[], steps(0, 8, 1500)]
    # and stayed with, though the other has more now
    assert kept(chooser, [0, 1], (0, 0, steps(8, 16)), (0, 0, steps(8, 14, 1500))) == [[], steps(8, 14, 1500)]


def test_the_other_one_follows_where_the_first_stops() -> None:
    chooser = OneReplica(STEP_MS)
    kept(chooser, [0, 1], (0, 0, steps(0, 8)), (0, 0, steps(0, 7, 1500)))
    # It stops inside a read, between two reads, and comes back to one that is stayed with.
    found = kept(chooser, [0, 1], (0, 0, steps(8, 10)), (0, 0, steps(8, 16, 1500)))
    assert found == [steps(8, 10), steps(11, 16, 1500)]
    assert kept(chooser, [0, 1], (0, 0, steps(16, 20)), (0, 0, steps(16, 20, 1500))) == [[], steps(16, 20, 1500)]
    assert kept(chooser, [0], (0, 0, steps(20, 24))) == [steps(22, 24)]


def test_a_scrape_that_is_missed_changes_nothing() -> None:
    chooser = OneReplica(STEP_MS)
    first = [ts for ts in steps(0, 20) if ts not in (3 * STEP_MS, 11 * STEP_MS)]
    second = [ts for ts in steps(0, 20, 1500) if ts // STEP_MS not in (1, 6, 7)]
    assert kept(chooser, [0, 1], (0, 0, first), (0, 0, second)) == [first, []]


def test_scrapes_that_are_rarer_than_was_said() -> None:
    minutes = [minute * 60_000 for minute in range(10)]
    found = kept(OneReplica(STEP_MS), [0, 1], (0, 0, minutes), (0, 0, [ts + 31_000 for ts in minutes[:9]]))
    assert found == [minutes, []]


def test_what_one_replica_alone_has_is_kept() -> None:
    long, short = steps(0, 8), steps(0, 8, 1500)
    # A metric, another GPU, a series without the label, and a label that tells workloads of one node apart.
    found = kept(
        OneReplica(STEP_MS),
        [0, 1, 1, 1, -1],
        (0, 0, long),
        (0, 0, short[:7]),
        (1, 0, short[:7]),
        (0, 1, short),
        (2, 0, short),
    )
    assert found == [long, [], short[:7], short, short]


def test_metrics_of_a_gpu_are_of_one_replica() -> None:
    found = kept(
        OneReplica(STEP_MS), [0, 1, 0, 1], (0, 0, steps(0, 8)), (0, 0, steps(0, 7, 900)), (1, 0, steps(0, 6)),
        (1, 0, steps(0, 7, 900)),
    )  # fmt: skip
    assert found == [steps(0, 8), [], steps(0, 6), []]


def test_three_replicas_and_entities_beside_each_other() -> None:
    series = [(0, entity, steps(0, 40, 700 * replica)) for entity in range(5) for replica in range(3)]
    found = kept(OneReplica(STEP_MS), [0, 1, 2] * 5, *series)
    assert found == [steps(0, 40), [], []] * 5
    found = kept(
        OneReplica(STEP_MS),
        [0, 1, 2],
        (0, 0, steps(0, 10)),
        (0, 0, steps(0, 9, 700)),
        (0, 0, steps(0, 4, 1400) + steps(20, 24, 1400)),
    )
    assert found == [steps(0, 10), [], steps(20, 24, 1400)]


def test_a_window_that_is_read_again_gives_the_same() -> None:
    chooser, window = OneReplica(STEP_MS), ((0, 0, steps(0, 8)), (0, 0, steps(0, 8, 1500)))
    first = kept(chooser, [0, 1], *window)
    kept(chooser, [0, 1], (0, 0, steps(8, 800)), (0, 0, steps(8, 800, 1500)))
    assert kept(chooser, [0, 1], *window) == first


def test_windows_that_overlap_are_of_one_replica_in_whatever_process() -> None:
    first, second = np.array(steps(0, 40)), np.array(steps(0, 40, 1500))
    for begin in range(0, 400_000, 3_700):
        inside = [times[(times >= begin) & (times < begin + 75_000)].tolist() for times in (first, second)]
        found = kept(OneReplica(STEP_MS), [0, 1], *((0, 0, times) for times in inside))
        assert found == [inside[0], []]


def test_labels_that_tell_replicas() -> None:
    index = Index(replica_labels=("ha",))
    assert [index.replica(labels) for labels in ({}, {"ha": ""}, {"replica": "x"})] == [-1] * 3
    first = index.replica({"ha": "a"})
    assert not index.has_replicas
    assert index.replica({"ha": "b", "replica": "x"}) != first
    assert (
        index.replica({"ha": "a", "replica": "x"}) == first == Index(replica_labels=("ha",)).replica({"ha": "a"}) >= 0
    )
    assert index.has_replicas
    index = Index()
    told = [{name: "1"} for name in ("replica", "prometheus_replica", "__replica__")]
    assert len({index.replica(labels) for labels in (*told, told[0])} - {-1}) == 3
    assert Index(replica_labels=()).replica(told[0]) == -1


# --- read from servers ----------------------------------------------------------------------------------------


def history(label: str, late_s: float, a: range, b: range) -> str:
    """Samples of a GPU and a port by two replicas; a port's counter grows by a gigabyte a second."""
    lines: dict[str, list[str]] = {TEMP: [], POWER: [], SENT: []}
    for told, late, held in (("a", 0.0, a), ("b", late_s, b)):
        gpu = f'{{UUID="GPU-1",gpu="0",Hostname="n1",job="dcgm",instance="n1:9400",{label}="{told}"}}'
        port = f'{{device="mlx5_0",port="1",job="node",instance="n1:9100",{label}="{told}"}}'
        for step in held:
            ts = at(step, late).timestamp()
            lines[TEMP].append(f"{TEMP}{gpu} {40 + step} {ts:.3f}")
            lines[POWER].append(f"{POWER}{gpu} {100 + step} {ts:.3f}")
            # It is stamped when the scrape began and read the moment it was asked for, half a second apart.
            lines[SENT].append(f"{SENT}{port} {BYTES_PER_S * (1000 + step * STEP_S + late / 2):.0f} {ts:.3f}")
    return "".join(f"# TYPE {name} gauge\n" + "\n".join(rows) + "\n" for name, rows in lines.items()) + "# EOF\n"


@pytest.mark.services("prometheus", "promtool")
@pytest.mark.parametrize("label", ["replica", "prometheus_replica", "__replica__"])
@pytest.mark.parametrize("late_s", [1.0, 2.0])
def test_a_range_of_two_replicas(prometheus: Callable[..., Prometheus], label: str, late_s: float) -> None:
    server = prometheus(history=history(label, late_s, range(20), range(40)))
    source = PrometheusSource("a", server.url, exporter_interval_s=STEP_S)
    try:
        got = source.fetch(at(0), at(40))
        check(got.gpu, got.port)
    finally:
        source.close()


def check(gpu: pl.DataFrame, port: pl.DataFrame) -> None:
    """About one row a step, none of them mixed; the port's rate is the true one."""
    gpu, port = gpu.sort("ts"), port.sort("ts")
    assert 37 <= len(gpu) <= 40
    assert (gpu["ts"].diff().drop_nulls() >= timedelta(seconds=STEP_S)).all()
    assert (gpu["gpu_power_w"] - gpu["gpu_temp_c"]).to_list() == [60] * len(gpu)
    assert len(port) == len(gpu)
    rates = port_rates(port, [])["tx_bytes_per_s"].drop_nulls()
    assert len(rates) == len(port) - 1
    assert ((rates - BYTES_PER_S).abs() <= 0.05 * BYTES_PER_S).all()


@pytest.mark.services("prometheus", "promtool")
def test_the_newest_samples_are_of_the_one_that_brings_most(prometheus: Callable[..., Prometheus]) -> None:
    now, rows = datetime.now(UTC), dict[str, list[str]]()
    for told, first_s, every_s in (("a", 5, 120), ("b", 30, 50)):
        gpu = f'{{UUID="GPU-1",gpu="0",Hostname="n1",job="dcgm",instance="n1:9400",replica="{told}"}}'
        for name in (TEMP, POWER):
            for back_s in range(first_s + 4 * every_s, 0, -every_s):
                ts = (now - timedelta(seconds=back_s)).timestamp()
                rows.setdefault(name, []).append(f"{name}{gpu} {ord(told)} {ts:.3f}")
    page = "".join(f"# TYPE {name} gauge\n" + "\n".join(lines) + "\n" for name, lines in rows.items()) + "# EOF\n"
    server = prometheus(history=page)

    def newest(labels: Sequence[str]) -> list[list[tuple]]:
        source = PrometheusSource("a", server.url, exporter_interval_s=150, replica_labels=labels)
        try:
            return [source.latest().gpu.select("gpu_temp_c", "gpu_power_w").rows() for _ in range(2)]
        finally:
            source.close()

    assert newest(REPLICA_LABELS) == [[(ord("b"), ord("b"))]] * 2
    assert newest(()) == [[(ord("a"), ord("a"))]] * 2  # else whichever is newer at that moment


def test_settings_name_the_labels(tmp_path: Path) -> None:
    cluster = Cluster.model_validate({"replica_labels": ["ha"]})
    assert Cluster().replica_labels == REPLICA_LABELS
    source = build_telemetry("a", cluster, tmp_path)
    try:
        assert isinstance(source, PrometheusSource)
        assert source._index.replica({"ha": "1"}) >= 0
        assert source._index.replica({"replica": "1"}) == -1
    finally:
        source.close()


def series_of(history: str) -> Iterator[tuple[dict[str, str], float, int]]:
    for line in history.splitlines():
        if match := re.fullmatch(r"(\w+)\{(.*)\} (\S+) (\S+)", line):
            labels = {"__name__": match[1], **dict(re.findall(r'(\w+)="([^"]*)"', match[2]))}
            yield labels, float(match[3]), round(float(match[4]) * 1000)


@pytest.mark.parametrize("label", ["replica", "prometheus_replica", "__replica__"])
@pytest.mark.parametrize("late_s", [1.0, 2.0])
def test_a_log_of_two_replicas(tmp_path: Path, label: str, late_s: float) -> None:
    intake = Intake("a", tmp_path, 1 << 22, timedelta(days=36500))
    by_series: dict[tuple[tuple[str, str], ...], list[tuple[float, int]]] = {}
    for labels, value, ts in series_of(history(label, late_s, range(20), range(40))):
        by_series.setdefault(tuple(labels.items()), []).append((value, ts))
    assert intake.take([("x", request(*(series_bytes(dict(k), rows) for k, rows in by_series.items())))]) == [(204, "")]
    intake.close()
    source = RemoteWriteSource("a", tmp_path, port=0, exporter_interval_s=STEP_S)
    got = source.fetch(at(0), at(40))
    check(got.gpu, got.port)
    plain = RemoteWriteSource("a", tmp_path, port=0, exporter_interval_s=STEP_S, replica_labels=())
    assert len(plain.fetch(at(0), at(40)).gpu) == 60  # else every row is there twice


def test_the_newest_of_two_senders_are_of_one_until_it_stops() -> None:
    series, newest = Series(), Newest()
    now = 1_780_000_000_000

    def send(replica: str, step: int, late_ms: int) -> None:
        ts = now + step * STEP_MS + late_ms
        entries = [series_bytes(gpu_labels(name, replica=replica), [(float(step), ts)]) for name in (TEMP, POWER)]
        number, times, values, _ = series.take(entries)
        newest.put(number, times, values, ord(replica), ts)

    def given(at_ms: int) -> set[int]:
        return set(((newest.samples(series, now + at_ms, STEP_MS).ts_ms - now) % STEP_MS).tolist())

    seen = []
    for step in range(16):
        if step < 8:
            send("b", step, 0)
            seen.append(given(step * STEP_MS + 100))
        send("a", step, 1500)
        seen.append(given(step * STEP_MS + 1600))
    assert seen[:16] == [{0}] * 16  # though the other one's are newer every other time
    assert seen[16:] == [{0}] + [{1500}] * 7  # it stopped, and is waited for as long as two scrapes take
