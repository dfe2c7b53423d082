"""Simulated clusters that forecasters of bottlenecks are trained and judged on: what they are, and their samples.

Here belong the fixed acceptance scenarios, their hash, and how a scenario becomes samples, jobs and ground truth; not
the forecasters and no scores. `acceptance.json` is never changed to suit a model: `ACCEPTANCE_SHA256` names the
scenarios that figures in `docs/accuracy.md` were measured on, and the benchmark refuses others.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from features.conditions import INPUTS
from features.history import SampleHistory
from features.thresholds import ThresholdBook
from simulator import frames
from simulator.cluster import SimulatedCluster
from simulator.events import Rates
from simulator.hardware import GPUS_PER_NODE

START = datetime(2026, 3, 2, tzinfo=UTC)
ACCEPTANCE = Path(__file__).with_name("acceptance.json")
ACCEPTANCE_SHA256 = "76742e0fde6f033f4205d64264ccb7b9de68cadc3aae85266aac8cc80d31a41c"


class ScenarioError(ValueError):
    """The acceptance scenarios are not those that were committed."""


class Scenario(msgspec.Struct, frozen=True):
    """One simulated cluster as its exporters show it.

    Attributes:
        seed: Of the cluster; the missing samples follow from it too.
        gpu_model: Name in `simulator.hardware.GPU_MODELS`.
        sampling_s: Time between samples, s.
        missing_ratio: Share of samples that never arrive.
        nodes, hours: Size and length.
        rates: Fields of `simulator.events.Rates`, per GPU-hour.
    """

    seed: int
    gpu_model: str
    sampling_s: float
    missing_ratio: float
    nodes: int
    hours: float
    rates: dict[str, float]

    @property
    def book(self) -> ThresholdBook:
        """Limits of its GPUs."""
        return ThresholdBook(default_model=self.gpu_model)


@dataclass(frozen=True, slots=True)
class Recording:
    """What a scenario gave.

    Attributes:
        scenario: The scenario.
        samples, nodes: As of `core_gpu_samples` and `core_node_samples`, missing ones left out.
        jobs: As of `core_jobs`.
        truth: The simulator's own account of onsets.
    """

    scenario: Scenario
    samples: pl.DataFrame
    nodes: pl.DataFrame
    jobs: pl.DataFrame
    truth: pl.DataFrame

    def history(self) -> SampleHistory:
        """The samples as models see them."""
        stale_s = 2 * self.scenario.sampling_s + 5.0  # as of the nowcast
        return SampleHistory(self.samples, self.scenario.book, node_samples=self.nodes, stale_s=stale_s)


def acceptance(path: Path = ACCEPTANCE) -> list[Scenario]:
    """The acceptance scenarios.

    Raises:
        ScenarioError: The file is not the committed one.
    """
    return msgspec.json.decode(committed(path, ACCEPTANCE_SHA256), type=list[Scenario])


def committed(path: Path, sha256: str) -> bytes:
    """What a file of scenarios holds.

    Raises:
        ScenarioError: It is not the committed one.
    """
    text = path.read_bytes()
    found = hashlib.sha256(text).hexdigest()
    if found != sha256:
        raise ScenarioError(f"{path.name} has SHA-256 {found}; the committed scenarios have {sha256}")
    return text


def key_of(scenario: Scenario) -> str:
    """A name that no other scenario has."""
    return hashlib.sha256(msgspec.json.encode(scenario)).hexdigest()[:16]


def record(scenario: Scenario, cache: Path | None = None) -> Recording:
    """Simulate a scenario, or read what a former run kept.

    Args:
        scenario: What to simulate.
        cache: Folder where simulated frames are kept; None: nothing is.
    """
    key = key_of(scenario)
    names = ("samples", "nodes", "jobs", "truth")
    files = {name: cache / f"{key}-{name}.parquet" for name in names} if cache is not None else {}
    if files and all(file.exists() for file in files.values()):
        return Recording(scenario, *(pl.read_parquet(files[name]) for name in names))
    made = _simulate(scenario)
    for name, file in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        getattr(made, name).write_parquet(file, compression="zstd", compression_level=1)
    return made


def _simulate(scenario: Scenario) -> Recording:
    cluster = SimulatedCluster(
        nodes=scenario.nodes, seed=scenario.seed, start=START - timedelta(days=2), tick_s=scenario.sampling_s,
        gpu_model=scenario.gpu_model, rates=Rates(**scenario.rates),
    )  # fmt: skip
    cluster.advance_jobs(START)
    topology = cluster.topology
    names = [name for name in INPUTS if name != "inlet_temp_c"]
    ticks = int(scenario.hours * 3600 / scenario.sampling_s)
    gpus, nodes = topology.gpus, topology.nodes
    values = {name: np.full((ticks, gpus), np.nan, dtype=np.float32) for name in names}
    inlet = np.full((ticks, nodes), np.nan, dtype=np.float32)
    ts, job = np.zeros(ticks), np.full((ticks, gpus), -1, dtype=np.int64)
    seen, up = np.zeros((ticks, gpus), dtype=bool), np.zeros((ticks, nodes), dtype=bool)
    job_names: dict[int, str] = {}
    for i in range(ticks):
        cluster.step()
        taken = frames.newest(cluster)
        ts[i], job[i], seen[i], up[i] = taken.ts_s, taken.job_ids, taken.is_seen, taken.is_up
        inlet[i] = taken.node["inlet_temp_c"]
        for name, array in values.items():
            array[i] = taken.gpu[name]
        job_names |= frames.job_names(cluster)
    rng = np.random.default_rng(scenario.seed)
    seen &= rng.random(seen.shape) >= scenario.missing_ratio
    at, gpu = np.nonzero(seen)
    codes, index = np.unique(job[at, gpu], return_inverse=True)
    time = pl.Series("ts", np.round(ts * 1e6).astype(np.int64)).cast(pl.Datetime("us", "UTC"))
    node_names = pl.Series(topology.node_names)
    samples = pl.DataFrame(
        {
            "ts": time.gather(at), "node": node_names.gather(gpu // GPUS_PER_NODE),
            "gpu_uuid": pl.Series(topology.uuids).gather(gpu),
            "job_id": pl.Series([job_names.get(int(code)) for code in codes], dtype=pl.String).gather(index),
            **{name: pl.Series(array[at, gpu]).fill_nan(None) for name, array in values.items()},
        }
    ).with_columns(pl.lit(cluster.name).alias("cluster"), pl.col("^is_.*$").cast(pl.Boolean))  # fmt: skip
    up &= rng.random(up.shape) >= scenario.missing_ratio
    at, node = np.nonzero(up)
    of_nodes = pl.DataFrame(
        {"ts": time.gather(at), "node": node_names.gather(node), "inlet_temp_c": pl.Series(inlet[at, node])}
    )
    return Recording(
        scenario, samples, of_nodes, cluster.jobs_frame(), pl.DataFrame(cluster.truth, infer_schema_length=None)
    )
