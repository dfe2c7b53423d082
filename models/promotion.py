"""The rule that lets a challenger replace a champion, and the block bootstrap it rests on.

Here belong intervals and the decision; not the losses themselves (`models/scoring.py`) and not the act of promoting
(`models/registry.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_BLOCKS = 30  # fewer say nothing about spread
DRAWS = 1_000
CONFIDENCE = 0.95
NOT_WORSE_RATIO = 1.01  # a refit may cost at most 1 %
TIE = 1e-6  # losses this near are those of one forecaster, rounded in two ways
HELD_RATIO = 1.03  # what is held besides may cost at most 3 %: chance alone moves it by 1 to 2 % between two refits
NEGLIGIBLE = 0.01  # a held loss (Brier, |ln ratio|) under it is as good as none
_KEPT_WEIGHTS = 4_000_000  # draws × blocks up to which weights are kept for the next figure
COVERAGE_GUARD = 0.10  # distance of coverage from nominal that is tolerated

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 95 % interval.

    Attributes:
        value: The figure on the data as it is.
        low: Lower end; None when there are too few blocks for an interval.
        high: Upper end; None likewise.
        blocks: Number of blocks drawn from.
    """

    value: float
    low: float | None
    high: float | None
    blocks: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.3f} (no interval: {self.blocks} blocks, {MIN_BLOCKS} needed)"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Held:
    """Losses that a challenger must hold besides the one it is judged by.

    Attributes:
        name: What they are of, in words.
        champion: Name → loss per row, shape (n,), NaN where there is no outcome; lower is better.
        challenger: The same names on the same rows.
    """

    name: str
    champion: Mapping[str, NDArray[Any]]
    challenger: Mapping[str, NDArray[Any]]

    def ratio(self, blocks: NDArray[Any], *, draws: int, seed: int) -> Interval:
        """Challenger's loss ÷ champion's over all names, each in units of the champion's mean, so that all count alike.

        A mean under `NEGLIGIBLE` counts as that much: twice next to nothing is nothing.
        """
        own, other = np.zeros(len(blocks)), np.zeros(len(blocks))
        is_known = np.zeros(len(blocks), dtype=bool)
        shared = [name for name in self.champion if name in self.challenger]  # in one order: sums of floats differ
        for name in shared:
            rows = ~np.isnan(self.champion[name]) & ~np.isnan(self.challenger[name])
            if not rows.any():
                continue
            a, b = self.challenger[name][rows], self.champion[name][rows]
            spare = max(0.0, NEGLIGIBLE - float(b.mean()))
            unit = (float(b.mean()) + spare) * rows.sum()
            own[rows] += (a + spare) / unit
            other[rows] += (b + spare) / unit
            is_known |= rows
        if not is_known.any():
            return Interval(np.nan, None, None, 0)
        return ratio_interval(own[is_known], other[is_known], blocks[is_known], draws=draws, seed=seed)


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether the challenger takes over, and why, in words an operator can act on.

    Attributes:
        promote: The challenger becomes champion.
        reason: Why, with the figures.
        ratio: Challenger's loss ÷ champion's, with its interval.
        coverage: Challenger's coverage of the 10–90 % interval, None where it has none.
        held: What it had to hold besides, in words → ratio, with its interval.
    """

    promote: bool
    reason: str
    ratio: Interval
    coverage: float | None
    held: Mapping[str, Interval] = field(default_factory=dict)

    @property
    def is_judged(self) -> bool:
        """There was enough to tell the two apart; else the champion stays for want of evidence."""
        return self.ratio.low is not None


def block_bootstrap(
    columns: Sequence[NDArray[Any]],
    blocks: NDArray[Any],
    statistic: Callable[..., Floats],
    *,
    draws: int = DRAWS,
    seed: int = 1,
) -> Interval:
    """Interval of a statistic of sums, by drawing whole blocks with replacement.

    Args:
        columns: Arrays of shape (n,); their sums over the drawn rows are the statistic's arguments.
        blocks: Block of each row, shape (n,), any values that sort.
        statistic: Function of one array per column, each of shape (draws,) or (1,), to an array of the same shape.
        draws: Number of draws.
        seed: Seed of the draws.

    Returns:
        Value and interval; ends are None under `MIN_BLOCKS` blocks.

    Raises:
        ValueError: There is no row, or lengths differ.
    """
    if not len(blocks) or any(len(column) != len(blocks) for column in columns):
        raise ValueError(f"bootstrap of {[len(column) for column in columns]} rows in {len(blocks)} block names")
    _, codes = np.unique(blocks, return_inverse=True)
    count = int(codes.max()) + 1
    sums = np.stack([np.bincount(codes, weights=np.asarray(c, dtype=np.float64), minlength=count) for c in columns])
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(*sums.sum(axis=1, keepdims=True))[0])
    if count < MIN_BLOCKS:
        return Interval(value, None, None, count)
    if count * draws <= _KEPT_WEIGHTS:
        drawn = sums @ _weights(count, draws, seed)
    else:
        generator = np.random.default_rng(seed)
        drawn = np.empty((len(columns), draws))
        step = max(1, 2_000_000 // count)
        for first in range(0, draws, step):
            last = min(draws, first + step)
            drawn[:, first:last] = sums @ generator.multinomial(count, np.full(count, 1 / count), size=last - first).T
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(*drawn)
    values = values[np.isfinite(values)]
    if not len(values):
        return Interval(value, None, None, count)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(value, float(low), float(high), count)


@lru_cache(maxsize=4)
def _weights(count: int, draws: int, seed: int) -> Floats:
    """How often each block is drawn, shape (count, draws); a report asks for the same again and again."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(count, np.full(count, 1 / count), size=draws).T.astype(np.float64)


def mean_interval(losses: NDArray[Any], blocks: NDArray[Any], *, draws: int = DRAWS, seed: int = 1) -> Interval:
    """Mean of a loss with its block-bootstrap interval; rows where it is NaN are left out."""
    known = ~np.isnan(losses)
    losses, blocks = losses[known], blocks[known]
    return block_bootstrap([losses, np.ones(len(losses))], blocks, lambda s, n: s / n, draws=draws, seed=seed)


def ratio_interval(
    losses: NDArray[Any], reference: NDArray[Any], blocks: NDArray[Any], *, draws: int = DRAWS, seed: int = 1
) -> Interval:
    """Σ losses ÷ Σ reference on the same rows, with its block-bootstrap interval."""
    return block_bootstrap([losses, reference], blocks, lambda a, b: a / b, draws=draws, seed=seed)


def decide(
    champion_losses: NDArray[Any],
    challenger_losses: NDArray[Any],
    blocks: NDArray[Any],
    *,
    same_configuration: bool,
    coverage: float | None = None,
    champion_coverage: float | None = None,
    nominal_coverage: float = 0.80,
    champion_name: str = "champion",
    held: Sequence[Held] = (),
    draws: int = DRAWS,
    seed: int = 1,
) -> Decision:
    """Judge a challenger on the same rows as the champion.

    A refit of the same configuration takes over when the upper bound of its loss ratio is at most 1 % above one; a
    changed configuration only when the interval lies below one. Either way coverage must be in guard: within
    0.10 of nominal, or no farther from it than the champion's, and what is held besides must not be worse: upper bound
    at most 3 % above one. Under `MIN_BLOCKS` blocks there is no interval and the champion stays; what is held and has
    fewer keeps nobody out.

    Args:
        champion_losses: Loss of the champion (or of the baseline in charge) per row, shape (n,), lower is better.
        challenger_losses: Loss of the challenger on the same rows, shape (n,).
        blocks: Block of each row (user × day for jobs), shape (n,).
        same_configuration: The challenger is a refit of the champion's own configuration.
        coverage: Mean of `scoring.covered_share` of the challenger's interval; None where there is none. (The plain
            share of outcomes inside is beyond nominal wherever outcomes fall together on an end.)
        champion_coverage: The champion's share.
        nominal_coverage: What it should be.
        champion_name: How the reason names the one in charge.
        held: Other losses that must not get worse.
        draws: Bootstrap draws, ≥ 1,000.
        seed: Seed of the draws.

    Raises:
        ValueError: No rows, lengths differ, or too few draws.
    """
    if draws < DRAWS:
        raise ValueError(f"draws = {draws}: at least {DRAWS}")
    ratio = ratio_interval(challenger_losses, champion_losses, blocks, draws=draws, seed=seed)
    if not np.isfinite(ratio.value):
        return Decision(False, f"{champion_name} stays: its loss is zero, nothing can be better", ratio, coverage)
    facts = f"loss ratio to {champion_name} {ratio}"
    if ratio.low is None or ratio.high is None:
        return Decision(False, f"{champion_name} stays: {facts}", ratio, coverage)
    if coverage is not None:
        distance = abs(coverage - nominal_coverage)
        allowed = COVERAGE_GUARD
        if champion_coverage is not None:
            allowed = max(allowed, abs(champion_coverage - nominal_coverage))
        facts += f", coverage {coverage:.3f} of nominal {nominal_coverage:.2f}"
        if distance > allowed + 1e-9:
            return Decision(
                False, f"{champion_name} stays: coverage out of guard ±{allowed:.2f}: {facts}", ratio, coverage
            )
    if same_configuration:
        promote = ratio.high <= NOT_WORSE_RATIO
        rule = f"a refit needs an upper bound ≤ {NOT_WORSE_RATIO:.2f}"
    else:
        promote = ratio.high < 1.0 - TIE
        rule = "a changed configuration needs an interval below 1"
    ratios = {item.name: item.ratio(blocks, draws=draws, seed=seed) for item in held}
    if not same_configuration and max(abs(ratio.low - 1.0), abs(ratio.high - 1.0)) <= TIE:
        # Both say the same but for rounding: what else the challenger tells better is then what it brings.
        promote = any(of.high is not None and of.high < 1.0 for of in ratios.values())
        rule = "as good as equal, so that what is held decides: an interval below 1"
    worse = ""
    for name, of in ratios.items():
        is_unknown = of.high is None
        facts += f", {name} {'not judged: ' if is_unknown else ''}{of}" if of.blocks else f", {name} not judged"
        if of.high is not None and of.high > HELD_RATIO and not worse:
            worse = f": {name} {'is' if (of.low or 0.0) > 1 else 'may be'} worse (upper bound > {HELD_RATIO:.2f})"
    if promote and not worse:
        return Decision(True, f"challenger takes over: {facts}; {rule}", ratio, coverage, ratios)
    return Decision(False, f"{champion_name} stays{worse if promote else ''}: {facts}; {rule}", ratio, coverage, ratios)
