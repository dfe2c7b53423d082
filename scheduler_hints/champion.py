"""The bottleneck forecaster that is in charge: the registry's champion, and the trend where there is none or it breaks.

Here belong taking over a new champion and what happens when it gives no forecast; models stand in `models/`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from features.classes import HINT_CLASSES
from features.windows import FeatureBlock
from models.registry import Registry, RegistryError
from models.trend import BottleneckForecaster, TrendForecaster

TASK = "bottleneck"
FATAL = (SystemExit, KeyboardInterrupt, GeneratorExit)
"""What ends a process on purpose. All else must not, a panic of a library in Rust included, which is no `Exception`."""


class Champion:
    """Forecasts by whoever is in charge.

    Args:
        registry: Where models come from; None: the built-in trend stays in charge.
        problems: What is wrong in words, by where; changed in place.
    """

    def __init__(self, registry: Registry | None, problems: dict[str, str]) -> None:
        self.registry, self.problems = registry, problems
        self.forecaster: BottleneckForecaster = TrendForecaster()
        self._name: str | None = None
        self._broken: dict[str, None] = {}  # models that gave no forecast at this tick, in order, each once

    def reload(self) -> None:
        """Take over the registry's champion when it has changed; a damaged one leaves the present forecaster alone."""
        if self.registry is None:
            return
        try:
            champion = self.registry.champion(TASK)
            if champion != self._name:
                self.forecaster = TrendForecaster() if champion is None else self._load(self.registry, champion)
                self._name = champion
        except (RegistryError, OSError, ImportError) as error:
            self.problems["registry"] = str(error)
        else:
            self.problems.pop("registry", None)

    @staticmethod
    def _load(registry: Registry, champion: str) -> BottleneckForecaster:
        from models.bottleneck import HazardForecaster

        loaded = registry.load(TASK, champion, read=HazardForecaster.from_files)
        loaded.model.version = loaded.version
        return loaded.model

    def forecast(self, block: FeatureBlock) -> tuple[np.ndarray, str]:
        """Probabilities, shape (rows, horizons), and who gave them: the trend where the model breaks."""
        forecaster = self.forecaster
        try:
            probabilities = forecaster.forecast(block)
        except FATAL:
            raise
        except BaseException as error:
            self._broken[f"{forecaster.version}: {error}"] = None
            forecaster = TrendForecaster()
            probabilities = forecaster.forecast(block)
        return probabilities, forecaster.version_of(block.bottleneck_class)

    def note(self) -> None:
        """After all classes of a tick: say which models gave no forecast."""
        if self._broken:
            self.problems["model"] = "; ".join(self._broken)
        else:
            self.problems.pop("model", None)
        self._broken.clear()

    def versions(self) -> Mapping[str, str]:
        """Who forecasts which class."""
        return {name: self.forecaster.version_of(name) for name in HINT_CLASSES}
