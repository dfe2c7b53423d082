"""How a run is spread over worker processes (pytest-xdist, `pytest -n auto`): how many, and who takes what next.

Here belongs the order of the files and which of them may be taken apart; what a test needs stands in `conftest.py`.
Most of a run's time is spent waiting for real services, so that there is one worker more than there are processors:
one waits while others compute. A file stays with one worker, because what its fixtures make is dear; long files come
first, or the last of them would run alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

# Longest first, by measured time; all others follow in the order of their names.
LONGEST = (
    "test_end_to_end",
    "test_slurm_agent_live",
    "test_recovery",
    "test_pipelines_dagster",
    "test_sources_slurm",
    "test_remote_write",
    "test_fuzz",
    "test_two_ingesters",
    "test_store_faults",
    "test_pipelines_ingest",
    "test_leakage",
    "test_backtest_training",
    "test_bottleneck",
    "test_dashboards",
)
# No two tests of these share anything dear: each goes to whichever worker is free.
APART = ("test_two_ingesters",)


def _name(nodeid: str) -> str:
    return nodeid.split("::", 1)[0].rsplit("/", 1)[-1].removesuffix(".py")


def count() -> int:
    """Workers of `-n auto`."""
    return (os.cpu_count() or 1) + 1


def order(items: list[pytest.Item]) -> None:
    """Put the longest files first, in place; within a file and among the others nothing changes."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(_name(item.nodeid), len(place)))


def unit(nodeid: str) -> str:
    """What goes to one worker as a whole: the test's file, or the test alone."""
    return nodeid if _name(nodeid) in APART else nodeid.split("::", 1)[0]


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """xdist's scheduler of whole files, in the order of the collection and with `unit` for what a worker takes."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    config.option.loadscopereorder = False
    return Scheduler(config, log)


def share_of(ports: Sequence[int]) -> Sequence[int]:
    """This worker's own part of some numbers; all of them where there is one process."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    return ports[int(worker) :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
