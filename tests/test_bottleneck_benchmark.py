"""The bottleneck benchmark's own arithmetic: claims, events, ticks and what is possible at best."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from benchmarks.bottleneck_bound import bounds, probability
from benchmarks.bottleneck_rows import Asked, onsets_of, pooled
from benchmarks.bottleneck_scores import VISIBLE_S, count
from features.history import SampleHistory
from features.windows import FEATURES, FeatureBlock
from models.onset_scores import all_rows
from models.onsets import TICK_DRIFT, Rows, course, tick_rows
from simulator.ramps import Ramp
from tests.gpu_samples import BOOK, frame, gang, set_temp

THERMAL = "thermal_throttle"


def asked(at, gpu, job, onsets, known=1e6):
    """Rows at moments of GPUs, and onsets of (gpu, job, label, true, is_ramp)."""
    at, gpu, job = (np.asarray(x) for x in (at, gpu, job))
    matrix = np.zeros((len(at), len(FEATURES)), dtype=np.float32)
    block = FeatureBlock(THERMAL, gpu, at.astype(np.float64), matrix)
    rows = Rows(block, gpu * 0, job, np.full(len(at), np.inf), np.full(len(at), known), np.ones(len(at)))
    kinds = {"gpu": pl.Int64, "job": pl.Int64, "label_s": pl.Float64, "true_s": pl.Float64, "is_ramp": pl.Boolean}
    found = pl.DataFrame(onsets, schema=kinds, orient="row").with_columns(length_s=pl.lit(100.0))
    return Asked(rows, found, len(at))


def test_an_alarm_that_goes_on_claims_anew_every_last_horizon():
    at = np.arange(0.0, 380.0, 10.0)
    of = asked(at, at * 0 + 3, at * 0 - 1, [(3, -1, 380.0, 378.0, True)])
    n = count(of, np.ones((len(at), 4)), 0.5)
    # Visible at 2, 132 and 262 s: only the third has it within 120 s.
    assert (n.claims, n.right) == (3, 1)
    assert n.recall() == 1
    assert n.lead == pytest.approx(378 - 262)
    assert count(of, np.full((len(at), 4), 0.4), 0.5).claims == 0


def test_a_late_alarm_is_no_catch():
    of = asked([99.0], [3], [-1], [(3, -1, 110.0, 100.0, True)])
    n = count(of, np.ones((1, 4)), 0.5)
    assert (n.claims, n.right) == (1, 1)  # of the label
    assert n.recall() == 0  # visible at 101 s, and the limit was reached at 100 s
    assert VISIBLE_S == 2


def test_a_gang_counts_once_and_is_caught_by_half():
    onsets = [(g, 7, 60.0 + g, 60.0 + g, False) for g in range(4)]
    n = count(asked([0.0, 0.0], [0, 1], [7, 7], onsets), np.ones((2, 4)), 0.5)
    assert (n.claims, n.right, len(n.lead_s), n.recall()) == (1, 1, 1, 1.0)
    assert not n.is_ramp.any()
    assert count(asked([0.0], [0], [7], onsets), np.ones((1, 4)), 0.5).recall() == 0


def test_ticks_ask_what_the_newest_sample_says():
    arrays = gang(seconds=3600, gpus=4, seed=1, job=None)
    for gpu in range(4):
        set_temp(arrays, gpu, np.floor(70 + 0.006 * arrays["ts"]))
    history = SampleHistory(frame(arrays), BOOK)
    of = course(history, THERMAL, BOOK)
    begin, end = float(history.ts.min()), float(history.ts.max())
    rows = tick_rows(history, of, begin, end, tick_s=15)
    ticks = np.unique(rows.block.at_s)
    assert np.diff(ticks) == pytest.approx(15 * TICK_DRIFT)
    age = rows.block.column("data_age_s")
    assert age.min() >= 0
    assert age.max() < 15.5
    assert age.mean() == pytest.approx(7.5, abs=1.5)
    every = all_rows(history, of, begin, end)
    assert len(rows) == pytest.approx(len(every) / TICK_DRIFT, rel=0.03)
    some = tick_rows(history, of, begin, end, tick_s=15, shares=(1.0, 0.3), seed=2)
    assert some.weight.sum() == pytest.approx(len(rows), rel=0.2)
    two = pooled([some, some])
    assert len(two) == 2 * len(some)
    assert len(np.unique(two.block.gpus)) == 2 * len(np.unique(some.block.gpus))


def test_onsets_are_ramps_where_the_truth_says_so():
    arrays = gang(seconds=3600, gpus=2, seed=1, job=None)
    for gpu in range(2):
        set_temp(arrays, gpu, np.floor(np.minimum(70 + 0.01 * arrays["ts"], 95)))
    history = SampleHistory(frame(arrays), BOOK)
    of = course(history, THERMAL, BOOK)
    at = pl.from_epoch(pl.Series([(history.ts[of.onset_row[0]] - 5) * 1e6]).cast(pl.Int64), time_unit="us")
    truth = pl.DataFrame(
        {"class": THERMAL, "gpu_uuid": history.uuids[0], "onset": at, "ramp_start": at.dt.offset_by("-90s"),
         "is_step": False}
    )  # fmt: skip
    found = onsets_of(history, of, truth)
    assert found["is_ramp"].to_list() == [True, False]
    assert (found["label_s"] - found["true_s"]).to_list() == [5, 0]
    assert found["length_s"][0] == 90


def test_the_bound_is_bayes_rule():
    ramp = Ramp(300.0)
    # Half-way nothing is known but the odds of ramps that go on; too far from the limit there is no onset in time.
    assert probability(ramp, 240.0, 225.0, 240.0, 0.375) == pytest.approx(0.6 / (0.6 + 0.2 / 0.95), rel=0.1)
    assert probability(ramp, 100.0, 85.0, 100.0, 0.375) == 0
    (_, low, caught, lead), (_, high, fewer, shorter) = bounds(15.0, (0.4, 0.7), ramps=400)
    assert high > low
    assert fewer <= caught
    assert shorter <= lead
