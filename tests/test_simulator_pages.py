"""Every class on the simulator's pages, by a real Prometheus and by scraping, up to labels; its files and presets."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import polars as pl
import pytest
from prometheus_client.parser import text_string_to_metric_families

from features.labels import LABEL_CLASSES
from features.metrics import DEFAULT
from pipelines import steps
from pipelines.settings import SimulatorSettings, parse_settings
from pipelines.sources.pages import Answer
from pipelines.sources.scrape import ScrapeSource
from pipelines.store import Store
from simulator import host_pages
from simulator.cluster import SimulatedCluster
from simulator.events import MODES as EVENT_MODES
from simulator.exporter import Exporter
from simulator.exposition import Exposition
from simulator.hardware import SimulatorError
from simulator.history import write_history
from simulator.rates import PRESETS, Rates
from simulator.strains import MODES as STRAIN_MODES

START = datetime(2026, 11, 4, 12, tzinfo=UTC)
TICK_S = 15.0
TICKS = 124
QUICK = {"link_s": 0.3, "compute_s": 1.0, "exposed_ratio": 0.2, "power_ratio": 0.95, "pause_every_s": 86_400.0}
# Class, mode, node, GPU and minute of what is injected; its onset is planned 90 s later, a step's at once.
PLAN = (
    ("fabric_congestion", "incast", "n1", 0, 11), ("power_throttle", "cap", "n3", 0, 11),
    ("straggler", "slow_rank", "n4", 1, 11), ("fabric_congestion", "lossy_link", "n6", 0, 11),
    ("thermal_throttle", "cooling", "n7", 2, 11), ("nvlink_saturation", "collective", "n8", 3, 11),
    ("memory_exhaustion", "leak", "n9", 4, 11), ("power_throttle", "brake", "n10", 0, 12),
    ("straggler", "stalled_rank", "n11", 5, 12), ("host_memory", "host_leak", "n2", 0, 12),
    ("host_memory", "host_allocation", "n12", 0, 13), ("thermal_throttle", "voltage_regulator", "n7", 6, 14),
    ("nvlink_saturation", "lane_loss", "n12", 7, 14), ("shortage", "queue", "", 0, 15),
)  # fmt: skip
STEPS = {"brake", "stalled_rank", "lossy_link", "host_allocation", "voltage_regulator", "lane_loss"}


def placed(tick_s: float = TICK_S) -> SimulatedCluster:
    world = SimulatedCluster(12, 4, START, tick_s, fault_scale=0, own_jobs=False)
    for i, nodes in enumerate(("n1,n2", "n3", "n4", "n5,n6", *(f"n{k}" for k in range(7, 13)))):
        world.place_job(str(i), "ada", nodes, profile=QUICK)
    return world


class Served:
    """Answers for the pages of an exporter, as `PageReader` gives them."""

    def __init__(self, exporter: Exporter) -> None:
        self.exporter = exporter

    def read(self, urls: Iterable[str], within_s: float, headers: Any) -> dict[str, Answer]:
        cluster = self.exporter.cluster
        at_ms = round(cluster.time * 1000)
        pages = {f"/metrics/{name}": self.exporter.exposition.page(i) for i, name in enumerate(names_of(cluster))}
        pages["/sd"] = self.exporter._sd
        found = {url: pages[url.removeprefix("http://127.0.0.1:1")] for url in urls}
        return {url: Answer((page or b"").decode(), "", at_ms) for url, page in found.items()}

    def close(self) -> None:
        pass


def names_of(cluster: SimulatedCluster) -> list[str]:
    return cluster.topology.node_names


class Seen:
    """What was scraped of a troubled cluster, both ways, and what was true."""

    def __init__(self, folder: Path) -> None:
        self.world, self.folder = placed(), folder
        names, now = self.world.topology.node_names, [START]
        exporter = Exporter(self.world, "127.0.0.1:1", folder)
        source = ScrapeSource("sim", ["sd+http://127.0.0.1:1/sd"], folder / "state" / "spool" / "sim", tick_s=TICK_S,
                              clock=lambda: now[0])  # fmt: skip
        source._pages.close()
        source._pages = Served(exporter)  # without the sockets
        lines: list[bytes] = []
        for tick in range(TICKS):
            for class_, mode, node, gpu, minute in PLAN:
                if tick == minute * 4:
                    self.world.inject(class_, node, gpu, 0 if mode in STEPS else 90, mode in STEPS, mode)
            exporter.tick(self.world.now + timedelta(seconds=TICK_S))
            now[0] = self.world.now
            stamp = f" {now[0].timestamp():.3f}".encode()
            for i, name in enumerate(names):
                page = exporter.exposition.page(i) or b""
                lines += [_with_node(line, name.encode()) + stamp for line in page.splitlines() if line[:1] != b"#"]
            self.warnings = source.latest().warnings
        source.close()
        self.past = b"\n".join([*lines, b"# EOF", b""])

    @property
    def truth(self) -> pl.DataFrame:
        rows = pl.DataFrame(self.world.truth, infer_schema_length=None).drop_nulls("onset")
        gpu = pl.col("scope").is_null()
        return rows.with_columns(
            pl.when(gpu).then(pl.lit("gpu")).otherwise("scope").alias("scope"),
            pl.when(gpu).then("gpu_uuid").otherwise("scope_id").alias("scope_id"),
        )

    def labels(self, name: str, about: str) -> pl.DataFrame:
        """Labels after a whole ingest of the cluster, by the settings' lines about its telemetry."""
        (self.folder / name).mkdir(exist_ok=True)
        settings = parse_settings(_toml(self.folder, about), {})
        with Store.open(f"sqlite:{self.folder}/{name}/c.sqlite", f"{self.folder}/{name}/data") as store:
            now = self.world.now + timedelta(minutes=5)
            assert steps.ingest_jobs_of(store, settings, "sim", now).error is None
            assert steps.ingest_telemetry_of(store, settings, "sim", now).error is None
            assert steps.ingest_progress_of(store, settings, "sim", now).error is None
            assert steps.derive_of(store, settings, "sim", "feat_labels").error is None
            return store.query("SELECT * FROM feat_labels WHERE NOT is_censored")


def _with_node(line: bytes, node: bytes) -> bytes:
    """A line as a Prometheus keeps it that was told the node of its target."""
    name, _, value = line.rpartition(b" ")
    return (name[:-1] + b"," if name.endswith(b"}") else name + b"{") + b'node="' + node + b'"} ' + value


def _toml(folder: Path, about: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(f"""\
state_dir = "{folder}/state"
[clusters.sim]
{about}
jobs = "sacct-file"
jobs_path = "{folder}/sacct.txt"
inventory = "{folder}/inventory.csv"
tick_s = {TICK_S}
exporter_interval_s = {TICK_S}
[ingest]
initial_history_s = {TICKS * TICK_S + 600}
window_s = 600
""")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return Seen(tmp_path_factory.mktemp("troubled"))


def agreed(truth: pl.DataFrame, labels: pl.DataFrame, slack: dict[str, float]) -> pl.DataFrame:
    """Rows of truth with the nearest label of the same thing and class; asserts that nothing else is labelled."""
    key = ["class", "scope", "scope_id"]
    found = labels.rename({"bottleneck_class": "class"}).select(*key, "onset_time")
    alone = found.join(truth, on=key, how="anti")
    assert alone.is_empty(), alone.rows()
    both = truth.join(found, on=key, how="left")
    late = (pl.col("onset_time") - pl.col("onset")).dt.total_seconds()
    both = both.with_columns(late.alias("late_s")).sort(pl.col("late_s").abs()).unique("id", keep="first")
    limit = pl.col("class").replace_strict(slack, default=45.0)
    wrong = both.filter(pl.col("late_s").is_null() | (pl.col("late_s").abs() > limit))
    assert wrong.is_empty(), wrong.select(*key, "mode", "onset", "onset_time").rows()
    return both


def without_slow_gpus(truth: pl.DataFrame, labels: pl.DataFrame) -> pl.DataFrame:
    """Labels but those of slow GPUs, which are the ranks of the truth and one whose clocks its regulator halves."""
    is_gpu = (pl.col("bottleneck_class") == "straggler") & (pl.col("scope") == "gpu")
    causes = (pl.col("class") == "straggler") | (pl.col("mode") == "voltage_regulator")
    both = truth.filter(causes).join(labels.filter(is_gpu), on="gpu_uuid", how="full", suffix="_label")
    late = both.select((pl.col("onset_time") - pl.col("onset")).dt.total_seconds())["onset_time"]
    assert late.null_count() == 0, both.select("gpu_uuid", "mode", "onset", "onset_time").rows()
    assert late.is_between(0, 60).all(), late  # three slow steps at a tick each
    return labels.filter(~is_gpu)


def test_every_class_and_mode_happened(seen: Seen) -> None:
    happened = {(row["class"], row["mode"]) for row in seen.world.truth if row["onset"] is not None}
    assert happened == {(class_, mode) for class_, mode, *_ in PLAN}
    assert {class_ for class_, _ in happened} == set(LABEL_CLASSES)
    assert seen.warnings == []


@pytest.mark.services("prometheus", "promtool")
def test_what_a_prometheus_scraped_is_labelled_as_it_was(seen: Seen, prometheus: Any) -> None:
    server = prometheus(history=seen.past)
    labels = seen.labels("prometheus", f'telemetry = "prometheus"\nprometheus_url = "{server.url}"')
    # A GPU whose clocks its voltage regulator halves lags behind its gang as well; the truth names the cause alone.
    lags = pl.col("scope_id") == "4/6"
    assert labels.filter(lags)["bottleneck_class"].to_list() == ["straggler"]
    labels = without_slow_gpus(seen.truth, labels.filter(~lags))
    # Progress is read a row a minute, and the rule wants three slow steps running.
    both = agreed(seen.truth, labels, {"straggler": 240.0})
    assert set(both["class"]) == set(LABEL_CLASSES)


def test_what_was_scraped_by_ourselves_is_labelled_as_it_was(seen: Seen) -> None:
    labels = seen.labels("scrape", 'telemetry = "scrape"\nscrape_targets = ["http://127.0.0.1:1/metrics"]')
    # What ranks tell of themselves is read from a Prometheus alone.
    labels = without_slow_gpus(seen.truth, labels)
    both = agreed(seen.truth.filter(pl.col("class") != "straggler"), labels, {})
    assert set(both["class"]) == set(LABEL_CLASSES) - {"straggler"}


def test_names_of_hosts_and_ports_are_those_of_node_exporter(seen: Seen) -> None:
    page = (Exposition(seen.world).page(0) or b"").decode()
    found = {family.name: family for family in text_string_to_metric_families(page)}
    names = {line.split("{")[0].split(" ")[0] for line in page.splitlines() if line[:1] != "#"}
    assert {name for name in names if name.startswith(("node_", "training_"))} <= {row.name for row in DEFAULT.metrics}
    for family in host_pages.PORTS:
        row = next(r for r in DEFAULT.by_name[family.name] if r.column)
        assert (row.column, row.entity) == (family.column, "port")
        assert found[family.name.removesuffix("_total")].type == "counter"
    frame = seen.world.node_frame()
    available = found["node_memory_MemAvailable_bytes"].samples[0].value
    assert available == pytest.approx(frame["host_mem_available_bytes"][0], rel=1e-6)
    rates = seen.world.port_frame()
    speed = found["node_infiniband_rate_bytes_per_second"].samples[0]
    assert (speed.value, speed.labels) == (rates["speed_bytes_per_s"][0], {"device": "mlx5_0", "port": "1"})
    ranks = found["training_step_time_seconds"].samples
    own = seen.world.rank_frame().filter(job_id="0", rank=ranks[3].labels["rank"] and int(ranks[3].labels["rank"]))
    assert ranks[3].labels["job_id"] == "0"
    assert ranks[3].value == pytest.approx(own["step_time_s"][0], rel=1e-3)


def test_counters_grow_by_the_rates_of_their_port() -> None:
    world = placed(5)
    world.advance(START + timedelta(minutes=5))
    name = b'node_infiniband_port_data_transmitted_bytes_total{device="mlx5_0",port="1"} '

    def counted(node: int) -> float:
        page = Exposition(world).page(node) or b""
        return float(page.split(b"\n" + name)[1].split(b"\n")[0])

    before = [counted(0), counted(2)]
    rate = 0.0
    for _ in range(12):
        world.step()
        world.port_frame()
        rate += world.port_frame()["tx_bytes_per_s"][0] / 12
    assert (counted(0) - before[0]) / 60 == pytest.approx(rate, rel=1e-6)
    assert counted(2) == before[1]  # its job has one node alone


@pytest.mark.parametrize("class_", sorted(LABEL_CLASSES))
def test_every_class_and_mode_can_be_injected_and_others_are_refused(class_: str) -> None:
    modes = (EVENT_MODES | STRAIN_MODES | {"shortage": ("queue",)})[class_]
    for mode in modes:
        world = placed(5)
        world.advance(START + timedelta(minutes=5))
        row = world.inject(class_, "n1", 0, 30, mode=mode)
        assert (row["class"], row["mode"]) == (class_, mode)
        assert row["onset"] is None
    with pytest.raises(SimulatorError, match=f"no mode 'odd' of {class_}; modes: {', '.join(modes)}"):
        world.inject(class_, "n1", 1, 30, mode="odd")


def test_presets_of_rates() -> None:
    assert tuple(PRESETS) == get_args(SimulatorSettings.model_fields["rates"].annotation)
    assert Rates.preset("default") == Rates()
    every, published, none = (Rates.preset(name) for name in ("every-class", "published", "none"))
    names = ("thermal", "nvlink", "memory", "power", "straggler", "fabric", "host_memory")
    assert all(getattr(every, name) > getattr(published, name) > 0 for name in names)
    assert all(getattr(none, name) == 0 for name in (*names, "hot_aisle", "node_fault_ratio"))
    # All interruptions of Llama 3 are 20 a million GPU-hours; nothing of hardware is more frequent than that.
    assert max(getattr(published, name) for name in names if name != "host_memory") <= 419 / (16_384 * 54 * 24)
    with pytest.raises(SimulatorError, match="no rates 'odd'; presets: default, every-class, published, none"):
        Rates.preset("odd")


def test_a_fault_free_cluster_has_no_fault_whatever_the_scale() -> None:
    world = SimulatedCluster(6, 3, START, 300, fault_scale=1000, rates=Rates.none())
    world.advance_jobs(START + timedelta(days=3))
    world.advance(START + timedelta(days=3, hours=4))
    assert world.faults == []
    assert {row["class"] for row in world.truth} <= {"shortage"}
    assert world.lookalikes == []
    assert len(world.ended) > 100


def test_history_has_files_of_ports_ranks_and_hosts(tmp_path: Path) -> None:
    world = placed()
    world.advance(START + timedelta(minutes=5))
    write_history(world, tmp_path, START + timedelta(minutes=10))
    ports, ranks, nodes = (pl.read_parquet(tmp_path / f"{name}.parquet") for name in ("ports", "ranks", "node"))
    assert ports.group_by("node").len()["len"].unique().to_list() == [20]
    assert ports.filter(node="n1")["tx_bytes_per_s"].min() > 0  # type: ignore[operator]
    assert ranks.filter(job_id="0").group_by("rank").len().height == 16
    assert ranks["ts"].n_unique() == 20
    assert nodes["host_mem_available_bytes"].null_count() == 0
    assert ports.equals(ports.sort("node", "ts"))


def test_the_commands_take_rates(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from simulator.__main__ import main

    said = CliRunner().invoke(main, ["history", "--rates", "none", "--nodes", "1", "--hours", "0.1", "--jobs-days", "0",
                                     "--fault-scale", "50", "--out", str(tmp_path)])  # fmt: skip
    assert said.exit_code == 0, said.output
    assert "rates: none x 50" in said.output
    assert (tmp_path / "ports.parquet").exists()
    refused = CliRunner().invoke(main, ["history", "--rates", "odd"])
    assert refused.exit_code == 2
    assert "every-class" in refused.output
