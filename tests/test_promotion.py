"""The promotion rule: a refit must not be worse, a change must win, and too little evidence decides nothing."""

import numpy as np
import pytest

from models.promotion import MIN_BLOCKS, block_bootstrap, decide, mean_interval, ratio_interval


def _losses(blocks=200, rows=10, seed=0):
    generator = np.random.default_rng(seed)
    names = np.repeat(np.arange(blocks), rows)
    level = np.repeat(generator.gamma(2.0, 0.5, blocks), rows)
    return level + generator.gamma(2.0, 0.2, blocks * rows), names


def test_interval_covers_the_truth_about_as_often_as_it_says():
    hits = 0
    for seed in range(100):
        losses, blocks = _losses(seed=seed)
        interval = mean_interval(losses, blocks, seed=seed)
        hits += interval.low <= 1.4 <= interval.high
    assert 88 <= hits <= 100


def test_rows_of_one_block_count_as_one_piece_of_evidence():
    losses, blocks = _losses(blocks=40, rows=100)
    wide = mean_interval(losses, blocks)
    naive = mean_interval(losses, np.arange(len(losses)))
    assert wide.high - wide.low > 3 * (naive.high - naive.low)


def test_no_interval_under_thirty_blocks():
    losses, blocks = _losses(blocks=MIN_BLOCKS - 1)
    interval = mean_interval(losses, blocks)
    assert (interval.low, interval.high) == (None, None)
    assert "29 blocks" in str(interval)
    assert mean_interval(*_losses(blocks=MIN_BLOCKS)).low is not None


def test_ratio_is_of_sums_and_same_seed_gives_same_interval():
    losses, blocks = _losses()
    first = ratio_interval(losses * 0.9, losses, blocks, seed=4)
    assert first.value == pytest.approx(0.9)
    assert first == ratio_interval(losses * 0.9, losses, blocks, seed=4)


def test_a_clear_win_promotes_either_kind():
    losses, blocks = _losses()
    for same in (True, False):
        decision = decide(losses, losses * 0.9, blocks, same_configuration=same, coverage=0.8)
        assert decision.promote, decision.reason
        assert decision.ratio.value == pytest.approx(0.9)


def test_a_tie_promotes_a_refit_but_not_a_change():
    losses, blocks = _losses()
    assert decide(losses, losses, blocks, same_configuration=True).promote
    changed = decide(losses, losses, blocks, same_configuration=False, champion_name="baseline last2_key")
    assert not changed.promote
    assert "baseline last2_key stays" in changed.reason


def test_a_refit_that_may_be_worse_by_more_than_one_percent_stays_out():
    losses, blocks = _losses()
    noise = np.repeat(np.random.default_rng(1).normal(1.0, 0.2, 200), 10)
    decision = decide(losses, losses * noise / noise.mean(), blocks, same_configuration=True)
    assert decision.ratio.high > 1.01
    assert not decision.promote
    assert not decide(losses, losses * 1.02, blocks, same_configuration=True).promote


def test_a_small_uncertain_win_does_not_promote_a_change():
    losses, blocks = _losses()
    noise = np.repeat(np.random.default_rng(1).normal(0.99, 0.3, 200), 10)
    decision = decide(losses, losses * noise, blocks, same_configuration=False)
    assert decision.ratio.low < 1 < decision.ratio.high
    assert not decision.promote


def test_few_blocks_keep_the_champion_and_say_so():
    losses, blocks = _losses(blocks=10)
    decision = decide(losses, losses * 0.5, blocks, same_configuration=False)
    assert not decision.promote
    assert "no interval: 10 blocks, 30 needed" in decision.reason


def test_coverage_out_of_guard_keeps_the_champion_unless_it_is_no_better():
    losses, blocks = _losses()
    bad = decide(losses, losses * 0.8, blocks, same_configuration=True, coverage=0.62)
    assert not bad.promote
    assert "coverage out of guard" in bad.reason
    assert decide(losses, losses * 0.8, blocks, same_configuration=True, coverage=0.62, champion_coverage=0.6).promote
    assert not decide(losses, losses * 0.8, blocks, same_configuration=True, coverage=0.95).promote


def test_a_champion_without_any_loss_stays():
    losses, blocks = _losses()
    for challenger in (losses, losses * 0):
        decision = decide(losses * 0, challenger, blocks, same_configuration=True)
        assert not decision.promote
        assert "nothing can be better" in decision.reason


def test_wrong_input_is_refused():
    losses, blocks = _losses()
    with pytest.raises(ValueError, match="at least 1000"):
        decide(losses, losses, blocks, same_configuration=True, draws=10)
    with pytest.raises(ValueError, match="rows"):
        decide(losses[:5], losses, blocks, same_configuration=True)
    with pytest.raises(ValueError, match="0 block"):
        block_bootstrap([np.empty(0)], np.empty(0), lambda s: s)
