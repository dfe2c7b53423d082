"""What a seed gives stays what it was: numbers of the simulated cluster change only with what is simulated."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

from simulator.cluster import SimulatedCluster
from simulator.rates import Rates

# Of work, physics, jobs and node faults, without disturbances. Another digest is a change of all that was measured.
DIGEST = "e56767d5439eed4a"


def test_frames_of_a_seed_are_what_they_were() -> None:
    rates = Rates(thermal=0, nvlink=0, memory=0, hot_aisle=0)
    cluster = SimulatedCluster(8, 11, datetime(2026, 3, 2, tzinfo=UTC), 5.0, fault_scale=60, rates=rates)
    cluster.advance_jobs(datetime(2026, 3, 3, 9, tzinfo=UTC))
    digest = hashlib.sha256()
    for i in range(360):
        cluster.step()
        if i % 40 == 0:
            for frame in (cluster.gpu_frame(), cluster.node_frame(), cluster.port_frame(), cluster.rank_frame()):
                told = frame.select(
                    sorted(n for n in frame.columns if frame[n].null_count() < frame.height and n != "own_step_time_s")
                )  # fmt: skip  # own steps stand in the frame of ranks
                digest.update(told.write_csv(float_precision=2).encode())
    digest.update(cluster.jobs_frame().write_csv().encode() + cluster.faults_frame().write_csv().encode())
    assert len(cluster.faults) >= 5, "node faults are part of it"
    assert digest.hexdigest()[:16] == DIGEST


def test_modules_of_the_simulator_are_short_enough_to_read() -> None:
    folder = Path(__file__).parent.parent / "simulator"
    sizes = {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.py")}
    assert {name: size for name, size in sizes.items() if size > 300} == {}
