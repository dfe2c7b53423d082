"""The promotion rule: a refit must not be worse, a change must win, and too little evidence decides nothing."""

from statistics import NormalDist

import numpy as np
import pytest

from features.vocabulary import QUANTILES
from models.promotion import MIN_BLOCKS, Held, block_bootstrap, decide, mean_interval, ratio_interval
from models.scoring import covered_share, is_covered


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


def _left(scale, seed=0):
    """Losses of the time left, a third of the jobs gone by then."""
    losses, blocks = _losses(seed=seed)
    losses[np.random.default_rng(2).random(len(losses)) < 1 / 3] = np.nan
    return losses * scale, blocks


@pytest.mark.parametrize("same", [True, False], ids=["refit", "change"])
def test_a_win_at_the_submit_does_not_pay_for_a_loss_while_running(same):
    losses, blocks = _losses()
    left, _ = _left(1.0)

    def judged(hour_scale):
        held = Held("time left", {"60s": left, "3600s": left * 0.5}, {"60s": left, "3600s": left * 0.5 * hour_scale})
        return decide(losses, losses * 0.9, blocks, same_configuration=same, coverage=0.8, held=[held])

    good = judged(0.97)
    assert good.promote, good.reason
    assert "time left 0.985 [" in good.reason  # each landmark counts alike, however small its loss
    assert good.held["time left"].high < 1
    assert judged(1.02).promote, "refits by chance differ by as much"
    bad = judged(1.1)
    assert not bad.promote
    assert "champion stays: time left is worse (upper bound > 1.03): loss ratio to champion 0.900" in bad.reason
    assert bad.held["time left"].value == pytest.approx(1.05)


def test_a_change_that_only_rounding_tells_from_the_baseline_is_decided_by_what_is_held():
    losses, blocks = _losses()
    left, _ = _left(1.0)
    rounded = losses * (1 - 5e-9)
    alone = decide(losses, rounded, blocks, same_configuration=False)
    assert not alone.promote, alone.reason
    for scale, promoted in ((0.5, True), (1.0, False), (1.2, False)):
        held = Held("time left", {"60s": left}, {"60s": left * scale})
        for challenger in (rounded, losses * (1 + 5e-9)):
            decision = decide(losses, challenger, blocks, same_configuration=False, held=[held])
            assert decision.promote is promoted, decision.reason


def test_what_is_held_and_cannot_be_judged_keeps_nobody_out_and_says_so():
    losses, blocks = _losses()
    few = np.where(blocks < 12, losses, np.nan)
    held = Held("time left", {"60s": few}, {"60s": few * 3})
    decision = decide(losses, losses * 0.9, blocks, same_configuration=True, held=[held])
    assert decision.promote
    assert "time left not judged: 3.000 (no interval: 12 blocks, 30 needed)" in decision.reason
    nothing = Held("time left", {"60s": losses * np.nan}, {"60s": losses * np.nan})
    assert (
        "time left not judged;" in decide(losses, losses * 0.9, blocks, same_configuration=True, held=[nothing]).reason
    )


def test_twice_next_to_nothing_is_nothing():
    losses, blocks = _losses()
    odds = losses * 1e-5
    held = Held("odds of a start", {"600s": odds}, {"600s": odds * 2})
    assert decide(losses, losses, blocks, same_configuration=True, held=[held]).promote
    odds = losses * 0.1
    held = Held("odds of a start", {"600s": odds}, {"600s": odds * 2})
    assert not decide(losses, losses, blocks, same_configuration=True, held=[held]).promote


def test_what_is_held_is_added_up_in_one_order_whatever_the_names():
    """Sums of floats depend on their order, and a set of names comes in another one in every process."""
    losses, blocks = _losses()
    drawn = np.random.default_rng(5)
    champion = [losses * 10.0 ** drawn.uniform(0, 8) * drawn.uniform(0.5, 1, len(losses)) for _ in range(6)]
    challenger = [part * drawn.uniform(0.5, 2, len(losses)) for part in champion]
    ratios = set()
    for number in range(30):
        names = [f"{number}.{k}" for k in range(6)]
        held = Held("x", dict(zip(names, champion, strict=True)), dict(zip(names, challenger, strict=True)))
        ratios.add(held.ratio(blocks, draws=2, seed=1))
    assert len(ratios) == 1


def _idle_waits(rows=4_000, zero=0.914, seed=0):
    """Waits of an idle cluster, most of them none at all, and the quantiles that are right for them."""
    drawn = np.random.default_rng(seed)
    later = np.exp(drawn.normal(6.0, 1.0, rows))
    waits = np.where(drawn.random(rows) < zero, 0.0, later)
    tail = [np.exp(6.0 + NormalDist().inv_cdf((q - zero) / (1 - zero))) if q > zero else 0.0 for q in QUANTILES]
    return waits, np.tile(tail, (rows, 1))


def test_right_forecasts_of_an_idle_cluster_are_in_guard():
    """Every interval is [0, 0]: it holds 91 % of the waits, and no other would be right."""
    waits, quantiles = _idle_waits()
    plain = is_covered(quantiles[:, 1], quantiles[:, -2], waits).mean()
    shared = covered_share(quantiles, waits).mean()
    assert plain > 0.90
    assert shared == pytest.approx(0.80, abs=0.03)
    losses, blocks = _losses()
    assert not decide(losses, losses * 0.8, blocks, same_configuration=False, coverage=plain).promote
    assert decide(losses, losses * 0.8, blocks, same_configuration=False, coverage=shared).promote
    assert covered_share(np.zeros((1, len(QUANTILES))), np.zeros(1))[0] == pytest.approx(0.80)


def test_wrong_forecasts_of_an_idle_cluster_are_out_of_guard():
    waits, quantiles = _idle_waits(zero=0.6)
    assert covered_share(quantiles * 0, waits).mean() < 0.69  # "never a wait", of which two in five do wait
    waits, _ = _idle_waits()
    _, wide = _idle_waits(zero=0.02)  # hours of wait for everybody
    assert covered_share(wide, waits).mean() < 0.69


def test_without_ties_the_share_is_plain_coverage():
    drawn = np.random.default_rng(1)
    actual = np.exp(drawn.normal(8, 1, 3_000))
    quantiles = np.tile([np.exp(8 + NormalDist().inv_cdf(q)) for q in QUANTILES], (3_000, 1))
    plain = is_covered(quantiles[:, 1], quantiles[:, -2], actual).mean()
    assert covered_share(quantiles, actual).mean() == pytest.approx(plain, abs=0.002)
    # Runs to the limit: the upper levels are one, and right when a fifth runs into it.
    limit = np.exp(8 + NormalDist().inv_cdf(0.80))
    cut, capped = np.minimum(actual, limit), np.minimum(quantiles, limit)
    assert is_covered(capped[:, 1], capped[:, -2], cut).mean() > 0.88
    assert covered_share(capped, cut).mean() == pytest.approx(0.80, abs=0.03)


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
