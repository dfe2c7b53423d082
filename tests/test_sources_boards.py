"""What labels tell beside samples, by whichever road it comes: boards, and the traffic of single NVLinks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pipelines.sources.prometheus import PrometheusSource
from pipelines.sources.remote_write_log import LogReader
from pipelines.sources.sample_log import Chunk, SampleLog
from pipelines.sources.scrape import ScrapeSource
from tests.services import Pages, Prometheus, scrape_config
from tests.test_remote_write import series_bytes

NAMES = ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER")
LANES = 18


def board_labels(gpu: int, driver: str = "550.54.15") -> dict[str, str]:
    facts = {"pci_bus_id": f"00000000:{gpu}D:00.0", "modelName": "NVIDIA H100 80GB HBM3"}
    return {"Hostname": "n1", "UUID": f"GPU-{gpu}", "gpu": str(gpu), "DCGM_FI_DRIVER_VERSION": driver} | facts


def exposed(driver: str) -> str:
    return "".join(
        f"{name}{{{','.join(f'{k}={v!r}' for k, v in board_labels(gpu, driver).items())}}} 1\n".replace("'", '"')
        for name in NAMES
        for gpu in (0, 1)
    )


def told(boards: pl.DataFrame) -> list[tuple]:
    return boards.drop("ts").rows()


@pytest.mark.services("prometheus")
def test_every_source_tells_the_same_of_boards(
    pages: Pages, prometheus: Callable[..., Prometheus], tmp_path: Path
) -> None:
    pages.pages["/metrics"] = lambda: exposed("550.54.15")
    server = prometheus([scrape_config("dcgm", [pages.address], interval_s=1)])
    server.wait_for(NAMES[-1], 2)
    now, minute = datetime.now(UTC), timedelta(minutes=1)
    asked = PrometheusSource("a", server.url, exporter_interval_s=1)
    by_query = asked.fetch(now - minute, now + minute)
    asked.close()
    assert told(by_query.boards) == [
        ("a", "n1", f"GPU-{gpu}", f"00000000:{gpu}D:00.0", "NVIDIA H100 80GB HBM3", "550.54.15", None, None)
        for gpu in (0, 1)
    ]
    # Scraped: told by the process that reads the pages and, from the spool, by one that never read any.
    scraper = ScrapeSource("a", [f"{pages.url}/metrics"], tmp_path / "spool")
    assert told(scraper.latest().boards) == told(by_query.boards)
    reader = ScrapeSource("a", [f"{pages.url}/metrics"], tmp_path / "spool")
    fetched = reader.fetch(now - minute, now + minute)
    assert told(fetched.boards) == told(by_query.boards)
    assert fetched.boards["ts"].to_list() == [fetched.gpu["ts"].min()] * 2
    # Sent: told by whoever reads the log.
    log, at_ms = SampleLog(tmp_path / "log"), round(now.timestamp() * 1000)
    labels = [{**board_labels(gpu), "__name__": name, "job": "dcgm"} for name in NAMES for gpu in (0, 1)]
    new = [(i, series_bytes(one, [])) for i, one in enumerate(labels)]
    log.append(Chunk(at_ms - 1, np.arange(6), np.full(6, at_ms), np.ones(6)), new)
    log.close()
    assert told(LogReader("a", tmp_path / "log").fetch(now - minute, now + minute).boards) == told(by_query.boards)
    scraper.close()
    reader.close()


def test_a_new_driver_is_told_within_the_minute_and_old_facts_for_later_windows(pages: Pages, tmp_path: Path) -> None:
    at = datetime(2026, 11, 1, 12, 0, 10, tzinfo=UTC)
    clock = [at]
    source = ScrapeSource("a", [f"{pages.url}/metrics"], tmp_path / "spool", clock=lambda: clock[0])
    for second, driver in ((0, "550.54.15"), (15, "550.54.15"), (30, "570.86.10"), (45, "570.86.10")):
        clock[0] = at + timedelta(seconds=second)
        pages.pages["/metrics"] = exposed(driver)
        source.latest()

    def drivers(begin: int, end: int) -> list[str]:
        span = at + timedelta(seconds=begin), at + timedelta(seconds=end)
        return source.fetch(*span).boards["driver_version"].to_list()

    assert drivers(0, 25) == ["550.54.15"] * 2
    assert drivers(15, 25) == ["550.54.15"] * 2  # told at the beginning of the minute
    assert drivers(25, 60) == ["570.86.10"] * 2
    assert drivers(60, 90) == []  # nothing was read then
    source.close()


@pytest.mark.services("prometheus")
def test_the_newest_samples_sum_single_links_where_nothing_gives_the_whole(
    pages: Pages, prometheus: Callable[..., Prometheus]
) -> None:
    def page() -> str:
        labels = {gpu: f'gpu="{gpu}",UUID="GPU-{gpu}",Hostname="n1"' for gpu in (0, 1)}
        lines = [f"DCGM_FI_DEV_GPU_TEMP{{{one}}} 60" for one in labels.values()]
        lines += [f"DCGM_FI_PROF_NVLINK_{way}_BYTES{{{labels[1]}}} 7e10" for way in ("TX", "RX")]
        for lane in range(LANES):
            lines += [f"DCGM_FI_PROF_NVLINK_L{lane}_TX_BYTES{{{one}}} {lane}e9" for one in labels.values()]
            lines += [f"DCGM_FI_PROF_NVLINK_L{lane}_RX_BYTES{{{one}}} 1e9" for one in labels.values()]
        return "\n".join(lines) + "\n"

    pages.pages["/metrics"] = page
    server = prometheus([scrape_config("dcgm", [pages.address], interval_s=1)])
    server.wait_for(f"DCGM_FI_PROF_NVLINK_L{LANES - 1}_RX_BYTES", 2)
    source = PrometheusSource("a", server.url, exporter_interval_s=1)
    for _ in range(2):  # the second finds its series known
        latest = source.latest().gpu.sort("gpu_uuid")
        assert latest["nvlink_tx_bytes_per_s"].to_list() == pytest.approx([sum(range(LANES)) * 1e9, 7e10])
        assert latest["nvlink_rx_bytes_per_s"].to_list() == pytest.approx([LANES * 1e9, 7e10])
        moment = latest["ts"].max()
        assert isinstance(moment, datetime)
        ranged = source.fetch(moment, moment + timedelta(milliseconds=1)).gpu.sort("gpu_uuid")
        assert latest.select(ranged.columns).equals(ranged)
    source.close()
