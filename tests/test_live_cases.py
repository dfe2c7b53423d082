"""What the nowcast reads live is what ingest reads: the pages of `test_cases_gpu.py`, taken a scrape at a time.

Each of those tests is run with a `read` that keeps its pages. Live, the samples of one moment are one scrape: parsed
with what the source remembers, each value judged by itself, then by the course of its GPU. Ingest reads the page whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import polars as pl
import pytest

from features.cleaning import believable_gpu_samples, clean_gpu_samples
from features.cleaning_live import Courses
from features.conditions import QUANTITIES
from features.telemetry import RingWindow
from features.thresholds import ThresholdBook
from pipelines.sources.exposition import Page, parse_page
from pipelines.sources.wide import Index, Samples, to_frames
from tests import test_cases_gpu as cases

BOOK = ThresholdBook({f"n{i}": "NVIDIA H100 80GB HBM3" for i in range(3)})
NEIGHBOUR = 'DCGM_FI_DEV_GPU_TEMP{gpu="7",UUID="GPU-neighbour",Hostname="n0"} 50 '
Texts = list[tuple[str, str]]


def _tests() -> Iterator[Any]:
    """Each test of the book of cases, once for each of its parameters."""
    for name, test in vars(cases).items():
        if not name.startswith("test_"):
            continue
        marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
        choices = [{marks[0].args[0]: value} for value in marks[0].args[1]] if marks else [{}]
        for given in choices:
            yield pytest.param(test, given, id="-".join([name, *map(str, given.values())]))


def pages_of(test: Any, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Texts:
    """The pages that a test reads."""
    texts: Texts = []
    read = cases.read

    def keep(text: str, *, node: str = "", history: pl.DataFrame | None = None) -> cases.Read:
        texts.append((text, node))
        return read(text, node=node, history=history)

    monkeypatch.setattr(cases, "read", keep)
    wanted = inspect.signature(test).parameters
    test(**given, **({"tmp_path": tmp_path} if "tmp_path" in wanted else {}))
    return texts


def _times(page: Page) -> list[int]:
    return [cases.T0_MS if ts is None else ts for ts in page.ts_ms]


def scrapes(text: str, node: str) -> Iterator[pl.DataFrame]:
    """Frames of a page, a moment each, oldest first, by one index as a source that lives on."""
    index = Index()
    page = parse_page(text.strip() + "\n", index, node)
    times = np.array(_times(page), np.int64)
    names, entities, values = np.array(page.names), np.array(page.entities), np.array(page.values)
    for moment in np.unique(times):
        rows = np.flatnonzero(times == moment)
        flat = Samples(names[rows], entities[rows], np.ones(len(rows), np.int64), times[rows], values[rows])
        yield to_frames(flat, index, "a").gpu


def live(before: str, text: str, node: str) -> RingWindow:
    """Rings of the nowcast after all scrapes."""
    ring = RingWindow(BOOK, courses=Courses())
    for frame in [*scrapes(before, ""), *scrapes(text, node)]:
        ring.observe(believable_gpu_samples(frame))
    return ring


def ingested(text: str, node: str, history: pl.DataFrame | None) -> pl.DataFrame:
    """What ingest stores of the page."""
    return clean_gpu_samples(cases.read(text, node=node).raw.gpu, history=history)[0]


def filled(cleaned: pl.DataFrame, before: str) -> RingWindow:
    """The same rings, filled with what ingest stored."""
    ring = RingWindow(BOOK)
    for frame in scrapes(before, ""):
        ring.observe(clean_gpu_samples(frame)[0])
    ring.observe(cleaned)
    return ring


def same(left: pl.DataFrame, right: pl.DataFrame) -> None:
    assert left.select("gpu_uuid", "node", "ts").equals(right.select("gpu_uuid", "node", "ts"))
    for name in QUANTITIES:
        assert left[name].to_list() == pytest.approx(right[name].to_list(), nan_ok=True), name


@pytest.mark.parametrize(("test", "given"), list(_tests()))
def test_live_and_ingest_read_the_same(
    test: Any, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    with monkeypatch.context() as patch:
        texts = pages_of(test, given, patch, tmp_path)
    # At first nothing is known of before; then another GPU has been read for half an hour, and those here are new.
    for before in ("", f"{NEIGHBOUR}{cases.T0_MS - 1_800_000}\n"):
        history = cases.read(before).raw.gpu if before else None
        for text, node in texts:
            ring = live(before, text, node)
            same(ring.samples(), filled(ingested(text, node, history), before).samples())


def test_the_pages_hold_what_needs_history(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The comparison is worth something only where a course refutes values: each kind of it occurs, and is nulled."""
    found = set()
    for test in (
        cases.test_03_nvlink_bandwidth_is_a_rate_whatever_its_type_says,
        cases.test_05_traffic_that_is_always_zero_under_load,
        cases.test_06_profiling_stuck_at_zero_while_the_gpu_works,
        cases.test_08_values_that_froze,
    ):
        with monkeypatch.context() as patch:
            (text, node), *_ = [page for page in pages_of(test, {}, patch, tmp_path) if page[0].strip()]
        before = f"{NEIGHBOUR}{cases.T0_MS - 1_800_000}\n"
        naive = RingWindow(BOOK)
        for frame in scrapes(text, node):
            naive.observe(believable_gpu_samples(frame))
        judged = live(before, text, node).samples().filter(pl.col("gpu_uuid") != "GPU-neighbour")
        found |= {
            (test.__name__[5:7], name)
            for name in ("nvlink_fill_ratio", "activity_ratio", "gpu_power_w")
            if not naive.samples()[name].equals(judged[name])
        }
    assert found >= {
        ("03", "nvlink_fill_ratio"), ("05", "nvlink_fill_ratio"), ("06", "activity_ratio"), ("08", "gpu_power_w"),
    }  # fmt: skip
