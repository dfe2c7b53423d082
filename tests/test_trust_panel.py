"""The panel that says how far bottleneck hints can be trusted: figures by class, nothing yet, a store that is away."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dashboards.reading import Reading
from dashboards.trust import read_scores, trust_panel
from features.vocabulary import schema
from models.hint_scores import TASK
from pipelines.store import Store

NOW = datetime(2026, 11, 5, 3, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:{tmp_path}/catalogue.sqlite", str(tmp_path / "data")) as opened:
        yield opened


def score(cluster: str, metric: str, value: float, days: float = 0, task: str = TASK) -> dict[str, Any]:
    return {"ts": NOW - timedelta(days=days), "cluster": cluster, "task": task, "model_version": "", "baseline": "",
            "metric": metric, "value": value, "low": value / 2, "high": 1.0, "count": 20}  # fmt: skip


def texts(part: Any) -> str:
    if isinstance(part, list | tuple):
        return " ".join(texts(one) for one in part)
    children = getattr(part, "children", part)
    return texts(children) if children is not part else "" if part is None else str(part)


def test_the_newest_figures_of_each_cluster_by_class(store: Store) -> None:
    rows = [
        score("a", "precision", 0.8), score("a", "recall", 0.5), score("a", "precision_thermal_throttle", 0.75),
        score("a", "lead_median_s_thermal_throttle", 61.4), score("a", "precision", 0.1, days=1),
        score("b", "recall_shortage", 0.25), score("c", "precision", 0.9), score("a", "recall", 0.33, task="other"),
        score("b", "precision", 0.2, days=30),
    ]  # fmt: skip
    frame = pl.DataFrame(rows, schema=schema("out_scores"))
    store.transact(lambda w: w.append("out_scores", frame))
    found = read_scores(store.query, ["a", "b"], NOW)
    assert sorted(found["cluster"].unique()) == ["a", "b"]
    shown = texts(trust_panel(Reading(found), several=True))
    assert "All classes  a 80 % 50 %" in shown
    assert "Thermal throttle  a 75 % – 61 s" in shown
    assert "Shortage of GPUs  b – 25 %" in shown
    assert "10 %" not in shown
    assert "2026-11-05" in shown


def test_nothing_judged_and_a_store_that_is_away_are_said() -> None:
    assert "Nothing has been judged yet" in texts(trust_panel(Reading(pl.DataFrame()), several=False))
    assert "no disk" in texts(trust_panel(Reading(error="no disk"), several=False))
