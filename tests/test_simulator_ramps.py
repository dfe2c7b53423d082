"""Courses of growth: where they end, what a lag makes of them, and that look-alikes differ by their stop alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.scenarios import ACCEPTANCE, ScenarioError, acceptance
from simulator.ramps import LENGTH_S, STOP, Ramp, draw_ramp


@pytest.mark.parametrize("ramp", [Ramp(90.0), Ramp(600, 0.5, 0.3, 0.4), Ramp(600, 2.0, 0.5, 0.1)])
def test_a_ramp_rises_to_one_when_its_length_is_over(ramp):
    level = np.array([ramp.level(x * ramp.length_s) for x in np.linspace(0, 1.2, 500)])
    assert level[0] == 0
    assert (np.diff(level) >= 0).all()
    assert ramp.level(ramp.length_s) == pytest.approx(1)
    assert level[-1] > 1
    for goal in (0.1, 0.35, 0.8, 1.0):
        assert ramp.level(ramp.reaches_s(goal)) == pytest.approx(goal, abs=1e-6)


def test_a_pause_stands_still():
    ramp = Ramp(100.0, 1.0, 0.5, 0.2)
    assert ramp.level(50) == pytest.approx(ramp.level(70)) == pytest.approx(0.625)
    assert ramp.level(71) > ramp.level(70)


def test_the_lag_of_a_straight_ramp_is_the_textbook_one():
    # Response of a first-order lag to a unit ramp: (t - lag·(1 - exp(-t/lag))) / length at t = length.
    assert Ramp(120.0).lagged(30.0) == pytest.approx(1 - 30 / 120 * -math.expm1(-4), abs=1e-3)


def test_lookalikes_are_ramps_that_stop():
    rng = np.random.default_rng(1)
    ramps = [draw_ramp(rng) for _ in range(1000)]
    false = [draw_ramp(rng, is_lookalike=True) for _ in range(1000)]
    for some in (ramps, false):
        lengths = np.log([ramp.length_s for ramp in some])
        assert np.exp(lengths).min() >= LENGTH_S[0]
        assert np.exp(lengths).max() <= LENGTH_S[1]
        assert np.median(np.exp(lengths)) == pytest.approx(math.sqrt(60 * 1800), rel=0.2)
        assert np.mean([ramp.pause_share > 0 for ramp in some]) == pytest.approx(1 / 3, abs=0.08)
    stops = np.array([ramp.stop for ramp in false])
    assert np.quantile(stops, [0, 0.5, 1]) == pytest.approx([STOP[0], sum(STOP) / 2, STOP[1]], abs=0.06)
    assert all(ramp.level(10 * ramp.length_s) == ramp.stop for ramp in false)
    assert all(math.isinf(ramp.stop) for ramp in ramps)


def test_acceptance_scenarios_are_the_committed_ones(tmp_path):
    scenarios = acceptance()
    assert {s.sampling_s for s in scenarios} == {1.0, 5.0, 15.0, 30.0}
    assert all(s.rates["step_ratio"] >= 0.4 and s.missing_ratio == 0.2 for s in scenarios)
    changed = tmp_path / "acceptance.json"
    changed.write_bytes(ACCEPTANCE.read_bytes().replace(b"0.2", b"0.1", 1))
    with pytest.raises(ScenarioError, match=r"acceptance\.json has SHA-256"):
        acceptance(changed)
