"""The likeliest minute of a wait, and how far forecast starts move between publications."""

from datetime import UTC, datetime, timedelta

import numpy as np
import polars as pl
import pytest

from features.job_history import JobHistory
from models.curves import LEVELS
from models.wait import WaitForecaster
from models.wait_points import likeliest_s, recorded_publications, start_churn

START = datetime(2026, 1, 1, tzinfo=UTC)


def test_the_likeliest_point_is_where_the_distribution_is_dense():
    soon = np.where(LEVELS <= 0.4, 0.0, np.log(3_600.0 * 50**LEVELS))
    late = np.log(np.where(LEVELS < 0.3, 100 + 500 * LEVELS, np.where(LEVELS > 0.7, 20_000 * LEVELS, 7_200 + LEVELS)))
    found = likeliest_s(np.stack([soon, np.sort(late)]))
    assert 0 <= found[0] <= 60
    assert found[1] == pytest.approx(7_200, abs=60)


def test_it_is_more_often_within_a_minute_than_the_median():
    generator = np.random.default_rng(0)
    waits = np.where(generator.random(4_000) < 0.4, 30 * generator.random(4_000), generator.lognormal(8, 1, 4_000))
    curve = np.log(np.maximum(np.quantile(waits, LEVELS), 1.0))
    point = likeliest_s(curve[None])[0]
    assert (np.abs(waits - point) <= 60).mean() > 0.35 > (np.abs(waits - np.median(waits)) <= 60).mean()


def _rows(job: str, forecasts: list[tuple[int, float]]) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "job_id": job, "submit_time": START, "forecast": "wait",
            "generated_at": [START + timedelta(seconds=at) for at, _ in forecasts], "q50_s": [q for _, q in forecasts],
        }
    )  # fmt: skip


def test_churn_by_hand():
    steady = _rows("steady", [(0, 3_000.0), (600, 2_400.0), (1_200, 1_800.0)])
    later = _rows("later", [(0, 3_000.0), (600, 3_000.0), (1_200, 4_400.0)])
    once = _rows("once", [(0, 60.0)])
    found = start_churn(pl.concat([later, steady, once]).sample(fraction=1.0, shuffle=True, seed=2)).sort("job_id")
    assert found["job_id"].to_list() == ["later", "steady"]
    assert found["publications"].to_list() == [3, 3]
    assert found["move_s"].to_list() == pytest.approx([1_300.0, 0.0], abs=1e-3)
    assert found["moved_share"].to_list() == [0.5, 0.0]
    assert found["drift_s"].to_list() == pytest.approx([1_300.0, 0.0], abs=1e-3)


@pytest.mark.traces
def test_recorded_jobs_are_looked_at_while_they_wait(traces):
    kth = pl.read_parquet(traces / "jobs" / "kth-sp2-1996.parquet").sort("submit_time", "job_id")[:3_000]
    history = JobHistory(kth)
    rows = np.arange(2_000, 3_000)
    found = recorded_publications(WaitForecaster.recent(), history, rows, steps=4, most=50)
    assert found.group_by("job_id", "submit_time").len()["len"].is_between(3, 4).all()
    assert found["q50_s"].null_count() == 0
    assert start_churn(found).height == 50
