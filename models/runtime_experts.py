"""The two forests of the runtime forecaster, one of ln(runtime) and one of ln(runtime ÷ limit), and their samples.

Here belongs growing and asking them together; not how they are weighed (`models/mixture.py`), and not the forecaster
(`models/runtime.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.jobs import OPTIONAL
from models.contributions import ForestParts, explain_forest
from models.forest import Forest, ForestSize
from models.mixture import past_samples

Floats = NDArray[np.float64]
Matrix = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Experts:
    """The forests, as grown on one set of jobs.

    Attributes:
        run: Of ln(runtime); None where it has no weight.
        ratio: Of ln(runtime ÷ limit); None where it has no weight, or no job has a limit.
        usual_limit_log: Median ln(limit), for jobs without one; NaN where none has one.
        highest_limit_log: Highest ln(limit) grown on: longer ones scale as it does; ∞: not kept, or none has one.
    """

    run: Forest | None
    ratio: Forest | None
    usual_limit_log: float
    highest_limit_log: float = np.inf

    @classmethod
    def fit(
        cls, X: Matrix, y: Floats, limit_log: Floats, size: ForestSize, *, seed: int, threads: int,
        ratio_weight: float | None = None,
    ) -> Experts:  # fmt: skip
        has_limit = ~np.isnan(limit_log)
        usual = float(np.median(limit_log[has_limit])) if has_limit.any() else np.nan
        run = ratio = None
        if ratio_weight is None or ratio_weight < 1 or np.isnan(usual):
            run = Forest.fit(X, y, size, seed=seed, threads=threads, optional=OPTIONAL)
        if (ratio_weight is None or ratio_weight > 0) and not np.isnan(usual):
            relative = y - np.where(has_limit, limit_log, usual)
            ratio = Forest.fit(X, relative, size, seed=seed + 1, threads=threads, optional=OPTIONAL)
        return cls(run, ratio, usual, float(np.max(limit_log[has_limit])) if has_limit.any() else np.inf)

    def samples(self, X: Matrix, limit_log: Floats) -> list[NDArray[Any]]:
        """Samples of ln(runtime) of each component, in the order of `mixture.weights`."""
        return self._of_draws(X, limit_log, *(forest.draw(X) if forest else None for forest in (self.run, self.ratio)))

    def explained(self, X: Matrix, limit_log: Floats) -> tuple[list[NDArray[Any]], ForestParts, ForestParts]:
        """`samples`, and how what is typical by each of the two forests comes about."""
        run, run_parts = explain_forest(self.run, X)
        ratio, ratio_parts = explain_forest(self.ratio, X)
        if self.ratio:
            ratio_parts = ratio_parts.with_limit(np.minimum(limit_log, self.highest_limit_log), self.usual_limit_log)
        return self._of_draws(X, limit_log, run, ratio), run_parts, ratio_parts

    def _of_draws(self, X: Matrix, limit_log: Floats, run: Matrix | None, ratio: Matrix | None) -> list[NDArray[Any]]:
        empty = np.full((len(X), 1), np.nan, dtype=np.float32)
        if ratio is not None:
            scale = np.where(np.isnan(limit_log), self.usual_limit_log, np.minimum(limit_log, self.highest_limit_log))
            ratio = ratio + scale[:, None].astype(np.float32)
        return [empty if run is None else run, empty if ratio is None else ratio, *past_samples(X)]
