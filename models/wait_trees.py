"""The trees of a wait forecaster: a forest, the outcomes in its leaves, and boosted odds, grown on the same moments.

Here belong growing them together and drawing from them; not the choice of what they are grown on, and not how what they
say is corrected (`models/wait.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.forest import Forest, ForestSize
from models.wait_leaves import Drawn, Leaves
from models.wait_odds import StartOdds

Floats = NDArray[np.float64]
Matrix = NDArray[np.float32]

_DAY_US = 86_400e6


@dataclass(frozen=True, slots=True)
class WaitTrees:
    """What is grown on outcomes of like moments.

    Attributes:
        forest: Of ln(wait).
        leaves: Outcomes in the leaves of the forest.
        boosted: Odds of classes of waits; None in models of an earlier release.
        trust: How far they move what the leaves say.
    """

    forest: Forest
    leaves: Leaves
    boosted: StartOdds | None = None
    trust: float = 0.0

    @classmethod
    def fit(
        cls, X: Matrix, waits: Floats, start: NDArray[np.int64], at: int, size: ForestSize, *, seed: int, threads: int
    ) -> WaitTrees:
        """Grow on outcomes.

        Args:
            X: Features of the moments, shape (n, f).
            waits: ln(seconds) from each moment to the start, shape (n,).
            start: When each started, µs, shape (n,).
            at: Moment of the fit, µs.
            size: Size of the forest.
            seed: Seed of every random choice.
            threads: Threads of the fit; they change nothing but the time.
        """
        forest = Forest.fit(X, waits, size, seed=seed, threads=threads)
        leaves = Leaves.fit(forest, X, waits, start, at)
        none = np.empty((0, 1), dtype=np.float32)  # the leaves hold what the samples would
        forest = replace(forest, samples=none, leaf_rows=np.empty(0, dtype=np.int32))
        return cls(forest, leaves, StartOdds.fit(X, waits, (at - start) / _DAY_US, seed=seed))

    def draw(self, X: Matrix) -> Drawn:
        """Outcomes of moments like each row, weighed by the boosted odds."""
        return self.draws(X, (self.trust,))[0]

    def draws(self, X: Matrix, trusts: tuple[float, ...]) -> list[Drawn]:
        """The same for each of several trusts."""
        plain = self.leaves.draw(self.forest, X)
        if self.boosted is None or not any(trusts):
            return [plain] * len(trusts)
        shares = self.boosted.shares(X)
        return [plain.weighed(shares, trust) if trust else plain for trust in trusts]

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        return self.forest.to_arrays("forest_") | self.leaves.to_arrays("leaves_")

    @classmethod
    def from_files(
        cls, arrays: Mapping[str, NDArray[Any]], described: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> WaitTrees:
        boosted = None
        if "boosted_classes" in described:
            boosted = StartOdds(files["wait_odds.txt"].decode(), tuple(described["boosted_classes"]))
            boosted.check()
        return cls(
            Forest.from_arrays(arrays, "forest_"), Leaves.from_arrays(arrays, "leaves_"), boosted,
            float(described.get("trust", 0.0)),
        )  # fmt: skip
