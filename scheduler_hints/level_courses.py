"""The course of a level over the next two minutes, attached to hints: what an operator sees beside a probability.

Here belong which GPU and which quantity a hint tells of, the champion that forecasts it, and its stand-in; not the
forecast itself (`models/level_course.py`) and not the hints (`scheduler_hints/episodes.py`). Only GPUs of hints are
forecast, one per hint: the one on which it is likeliest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from features.conditions import DISTANCE, INDEX, JUST_CLEAR
from features.level_windows import HORIZONS_S, LEVELS, OF_CLASS, LevelBlock, level_block
from features.ring import Windows
from features.telemetry import RingWindow
from features.thresholds import GIB
from models.level_course import QUANTILES, LevelForecaster, Standing
from models.registry import Registry, RegistryError
from scheduler_hints.schema import Bottleneck, LevelCourse

TASK = "level"
MOST_HINTS = 1_000  # the most probable ones: nobody reads more courses, and a tick has other work
_FREE = "fb_free_gib"
_DIGITS = {"°C": 1, "W": 0, "ratio": 3, "GiB": 2}
_NAMES = [f"q{100 * q:.0f}" for q in QUANTILES]


class LevelCourses:
    """Forecasts the levels of hints. Whatever goes wrong here, the hints go out, and a problem says what it was.

    Args:
        registry: Where models come from; None: the level is taken to stay.
        problems: What is wrong in words, by where; changed in place.
    """

    def __init__(self, registry: Registry | None, problems: dict[str, str]) -> None:
        self.registry, self.problems = registry, problems
        self.forecaster: LevelForecaster = Standing()
        self._champion: str | None = None

    def reload(self) -> None:
        """Take over the registry's champion when it has changed; a damaged one leaves the present forecaster alone."""
        if self.registry is None:
            return
        wrong = ""
        try:
            champion = self.registry.champion(TASK)
            if champion != self._champion:
                self.forecaster = Standing() if champion is None else self._load(self.registry, champion)
                self._champion = champion
        except (RegistryError, OSError, ImportError) as error:
            wrong = str(error)
        self._note("registry-levels", wrong)

    @staticmethod
    def _load(registry: Registry, champion: str) -> LevelForecaster:
        from models.level_course import LevelCourses as Model

        loaded = registry.load(TASK, champion, read=Model.from_files)
        loaded.model.version = loaded.version
        return loaded.model

    def attach(
        self, hints: Sequence[Bottleneck], worst: Mapping[str, str], window: RingWindow, now_s: float
    ) -> list[Bottleneck]:
        """The hints with the course of their class's level, where it is measured, in the same order.

        Args:
            hints: Most probable first.
            worst: Id of a hint to its likeliest GPU.
            window: Newest samples.
            now_s: The moment, seconds since 1970.
        """
        out, wrong = list(hints), ""
        by_quantity: dict[str, list[int]] = defaultdict(list)
        index: dict[int, int] = {}
        for row, hint in enumerate(hints[:MOST_HINTS]):
            gpu = window.roster.index_of(worst[hint.id]) if hint.id in worst else None
            if gpu is not None and hint.bottleneck_class in OF_CLASS:
                by_quantity[OF_CLASS[hint.bottleneck_class]].append(row)
                index[row] = gpu
        for quantity, rows in by_quantity.items():
            try:
                gpus = np.array([index[row] for row in rows], dtype=np.int64)
                gathered = window.windows(gpus)
                block = level_block(quantity, gathered, np.full(len(gpus), now_s))
                told, version, problem = self._forecast(block)
                wrong = wrong or problem
                shift, limit = _limits(quantity, gpus, gathered, window)
            except Exception as error:
                wrong = f"{quantity}: {type(error).__name__}: {error}"
                continue
            for k in np.flatnonzero(np.isfinite(told).all(axis=(1, 2))).tolist():
                uuid, now = window.uuids[gpus[k]], block.last[k] + shift[k]
                course = _course(quantity, uuid, now, told[k] + shift[k], limit[k], version)
                out[rows[k]] = msgspec.structs.replace(hints[rows[k]], levels=course)
        self._note("levels", wrong)
        return out

    def _forecast(self, block: LevelBlock) -> tuple[NDArray[np.float64], str, str]:
        """Quantiles, who gave them, and what is wrong with the champion."""
        try:
            return self.forecaster.forecast(block), self.forecaster.version_of(block.quantity), ""
        except Exception as error:
            standing = Standing()
            return standing.forecast(block), standing.version, f"{self.forecaster.version}: {error}"

    def _note(self, name: str, problem: str) -> None:
        if problem:
            self.problems[name] = problem
        else:
            self.problems.pop(name, None)


def _limits(
    quantity: str, gpus: NDArray[np.int64], gathered: Windows, window: RingWindow
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What makes a level of `LEVELS` what is published, and the limit of that; NaN where it is not known."""
    none = np.zeros(len(gpus))
    if quantity == "gpu_temp_c":
        return none, _slowdown_c(gathered)
    if quantity == "nvlink_fill_ratio":
        return none, window.limits("nvlink_full_ratio", gpus)
    if quantity == "memory_distance_gib":  # published as what is free
        floor = window.limits("memory_floor_bytes", gpus) / GIB
        return floor, floor
    return none, np.full(len(gpus), np.nan)


def _slowdown_c(gathered: Windows) -> NDArray[np.float64]:
    """Where slowdown begins, by the newest sample that tells it; NaN where none of the window does.

    A slowdown that is active holds the distance at 0 however cool the GPU has become meanwhile: such a sample says
    nothing of where it began.
    """
    distance = gathered.values[INDEX[DISTANCE["thermal_throttle"]]].astype(np.float64)
    limit = gathered.values[INDEX["gpu_temp_c"]] + distance
    newest_s = np.where(np.isnan(limit) | (np.abs(distance) <= JUST_CLEAR), -np.inf, gathered.ts)
    newest = newest_s.argmax(axis=1)
    rows = np.arange(len(limit))
    return np.where(np.isfinite(newest_s[rows, newest]), limit[rows, newest], np.nan)


def _course(quantity: str, uuid: str, now: float, told: NDArray[np.float64], limit: float, version: str) -> LevelCourse:
    unit = LEVELS[quantity].unit
    digits = _DIGITS[unit]
    low = 0.0 if quantity != "gpu_temp_c" else -np.inf
    told = np.maximum(told, low)
    quantiles = {
        name: {str(h): round(float(told[j, k]), digits) for j, h in enumerate(HORIZONS_S)}
        for k, name in enumerate(_NAMES)
    }
    return LevelCourse(
        gpu_uuid=uuid, quantity=_FREE if quantity == "memory_distance_gib" else quantity, unit=unit,
        now=round(float(now), digits), limit=round(float(limit), digits) if np.isfinite(limit) else None,
        **quantiles, model_version=version,
    )  # fmt: skip
