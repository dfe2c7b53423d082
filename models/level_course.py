"""The course of a GPU's level over the next two minutes, with quantiles, from the windows of the nowcast.

A forest for each quantity and horizon of what followed similar windows; its samples are the forecast: their median the
point, drawn towards the naive forecast that did best on later time, their quantiles moved so that they cover what they
claim there. Readings come in steps, 1 °C for example: what is forecast is the quantity behind the reading, which is
somewhere within its step, so that an interval of a steady GPU is not empty. Until a model has earned the place
`Standing` stands in: the level stays, within what it has moved by lately.

Here belong forecasting, fitting and files; features stand in `features/level_windows.py`, nightly training in
`models/training_levels.py`. Levels of any recorded column are backtested by `models/level.py`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from features.level_windows import HORIZONS_S, LEVELS, LevelBlock
from models.forest import Forest, ForestSize
from models.level_rows import CourseRows

Floats = NDArray[np.float64]

QUANTILES = (0.1, 0.5, 0.9)
STANDING_VERSION = "baseline:persistence"
SIZE = ForestSize(trees=32, min_leaf=15, feature_share=0.5, rows_per_tree=12_000)
HELD_SHARE = 0.3  # newest part of the training time: judges pulls and widths
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Few looks choose a weight badly, and half and half is hard to beat: the choice counts for as many looks as GPUs had
# horizons in the held part, half and half for this many.
EVEN_LOOKS = 30.0
MIN_ROWS = 500
MIN_HELD = 100
NORMAL_10 = 1.2816  # a normal's 90 % quantile, in spreads
FORMAT = 1
CARD_FILE, ARRAYS_FILE = "levels.json", "levels.npz"
NAIVE = ("persistence", "ewma")
_PIECES = 8_192  # rows forecast at a time


class LevelCourseError(ValueError):
    """A model of levels cannot be fitted or read; the message says what is missing."""


def configuration() -> dict[str, Any]:
    """What makes two fits of these forecasters refits of one another."""
    return {
        "format": FORMAT, "quantities": list(LEVELS), "horizons_s": list(HORIZONS_S), "size": asdict(SIZE),
        "quantiles": list(QUANTILES), "weights": list(WEIGHTS), "held_share": HELD_SHARE,
    }  # fmt: skip


class LevelForecaster(Protocol):
    """Gives quantiles of levels ahead."""

    version: str

    def version_of(self, quantity: str) -> str:
        """Name of what forecasts a quantity."""
        ...

    def forecast(self, block: LevelBlock) -> Floats:
        """Quantiles, shape (rows, len(HORIZONS_S), len(QUANTILES)), in the quantity's unit; they never cross."""
        ...


class Standing:
    """The level stays where it is, within what it has moved by lately."""

    version = STANDING_VERSION

    def version_of(self, quantity: str) -> str:  # noqa: ARG002
        """Persistence forecasts every quantity."""
        return self.version

    def forecast(self, block: LevelBlock) -> Floats:
        """Quantiles, shape (rows, len(HORIZONS_S), len(QUANTILES)); NaN where there is no value."""
        level = LEVELS[block.quantity]
        wide = NORMAL_10 * np.maximum(np.nan_to_num(block.roughness), 0.4 * level.step / NORMAL_10)
        last = np.repeat(block.last[:, None], len(HORIZONS_S), axis=1)
        return np.stack((last - wide, last, last + wide), axis=2)


@dataclass(frozen=True, slots=True)
class Ahead:
    """What one quantity at one horizon is forecast by.

    Attributes:
        forest: Of changes from the newest value, in the block's unit.
        weight: Of the forest's median in the point: of a GPU at rest (it moved by noise lately), of one at work.
        naive: What has the rest of the weight, of `NAIVE`.
        widen: What the low and the high quantile are moved out by, as a share of their distance from the point.
    """

    forest: Forest
    weight: tuple[float, float]
    naive: str
    widen: tuple[float, float]


class LevelCourses:
    """Quantiles of each quantity it has learned; the stand-in for the others.

    Args:
        ahead: Quantity to what forecasts each horizon.
        names: Quantity to the features it was fitted on.
        version: Name in the registry.
    """

    def __init__(
        self, ahead: Mapping[str, list[Ahead]], names: Mapping[str, tuple[str, ...]], version: str = ""
    ) -> None:
        self.ahead = {name: list(of) for name, of in ahead.items()}
        self.names = {name: tuple(of) for name, of in names.items()}
        self.version = version
        self._standing = Standing()

    @property
    def quantities(self) -> list[str]:
        """Quantities that were learned."""
        return sorted(self.ahead)

    def version_of(self, quantity: str) -> str:
        """Who forecasts a quantity: this model, or persistence where it has not learned it."""
        return self.version if quantity in self.ahead else self._standing.version

    @classmethod
    def fit(cls, rows: Mapping[str, CourseRows], *, seed: int = 1, threads: int = 1) -> LevelCourses:
        """Learn each quantity that has enough rows.

        Args:
            rows: Rows by quantity.
            seed: Seed of forests.
            threads: Threads of a fit.
        """
        ahead: dict[str, list[Ahead]] = {}
        names: dict[str, tuple[str, ...]] = {}
        for quantity, of in rows.items():
            known = ~np.isnan(of.came) & ~np.isnan(of.block.last)[:, None]
            if min(known.sum(axis=0)) < MIN_ROWS:
                continue
            ahead[quantity] = [_fit_one(of, known[:, k], k, seed, threads) for k in range(len(HORIZONS_S))]
            names[quantity] = of.block.names
        return cls(ahead, names)

    def forecast(self, block: LevelBlock) -> Floats:
        """Quantiles, shape (rows, len(HORIZONS_S), len(QUANTILES)), never crossing; NaN where there is no value.

        Raises:
            LevelCourseError: The block has other features than this model was fitted on.
        """
        if block.quantity not in self.ahead:
            return self._standing.forecast(block)
        if block.names != self.names[block.quantity]:
            raise LevelCourseError(
                f"{self.version or 'model'}: made for other features of {block.quantity}; train again"
            )
        out = np.empty((len(block.last), len(HORIZONS_S), len(QUANTILES)))
        for first in range(0, len(block.last), _PIECES):
            piece = slice(first, first + _PIECES)
            for k, one in enumerate(self.ahead[block.quantity]):
                drawn = _quantiles(one.forest, block.matrix[piece])
                naive = (block.naive[one.naive][piece, k] - block.last[piece]) / block.unit[piece]
                moves = block.roughness[piece, k] > LEVELS[block.quantity].noise
                weight = np.where(moves, one.weight[1], one.weight[0])
                point = weight * drawn[1] + (1 - weight) * naive
                low = point - (1 + one.widen[0]) * (point - drawn[0]).clip(0)
                high = point + (1 + one.widen[1]) * (drawn[2] - point).clip(0)
                told = np.stack((low, point, high), axis=1)
                out[piece, k] = block.last[piece, None] + told * block.unit[piece, None]
        return out

    def without(self, quantities: set[str]) -> LevelCourses:
        """The same model with some quantities given back to persistence."""
        ahead = {name: of for name, of in self.ahead.items() if name not in quantities}
        return LevelCourses(ahead, self.names, self.version)

    # --- files ----------------------------------------------------------------------------------------------

    def to_files(self) -> dict[str, bytes]:
        """Arrays of the forests and one JSON."""
        arrays: dict[str, NDArray[Any]] = {}
        card: dict[str, Any] = {"format": FORMAT, "horizons_s": list(HORIZONS_S), "quantities": {}}
        for quantity, of in self.ahead.items():
            card["quantities"][quantity] = {
                "features": list(self.names[quantity]),
                "ahead": [{"weight": list(one.weight), "naive": one.naive, "widen": list(one.widen)} for one in of],
            }
            for k, one in enumerate(of):
                arrays |= one.forest.to_arrays(f"{quantity}_{HORIZONS_S[k]}_")
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # ty: ignore[invalid-argument-type]
        return {CARD_FILE: json.dumps(card, sort_keys=True).encode(), ARRAYS_FILE: buffer.getvalue()}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], version: str = "") -> LevelCourses:
        """Read what `to_files` wrote.

        Raises:
            LevelCourseError: A file is missing or damaged, or of another format.
        """
        missing = [name for name in (CARD_FILE, ARRAYS_FILE) if name not in files]
        if missing:
            raise LevelCourseError(f"{missing[0]} is missing; there are: {', '.join(sorted(files))}")
        try:
            card = json.loads(files[CARD_FILE])
            if card["format"] != FORMAT or card["horizons_s"] != list(HORIZONS_S):
                raise LevelCourseError(f"{CARD_FILE}: of format {card['format']}; train again")
            with np.load(io.BytesIO(files[ARRAYS_FILE]), allow_pickle=False) as held:
                arrays = {name: held[name] for name in held.files}
            ahead = {
                quantity: [
                    Ahead(
                        Forest.from_arrays(arrays, f"{quantity}_{horizon_s}_"),
                        (float(one["weight"][0]), float(one["weight"][1])), str(one["naive"]),
                        (float(one["widen"][0]), float(one["widen"][1])),
                    )
                    for horizon_s, one in zip(HORIZONS_S, of["ahead"], strict=True)
                ]
                for quantity, of in card["quantities"].items()
            }  # fmt: skip
            names = {quantity: tuple(of["features"]) for quantity, of in card["quantities"].items()}
        except LevelCourseError:
            raise
        except Exception as error:
            raise LevelCourseError(f"{CARD_FILE}, {ARRAYS_FILE}: damaged: {type(error).__name__}: {error}") from None
        return cls(ahead, names, version)


def _fit_one(of: CourseRows, known: NDArray[np.bool_], k: int, seed: int, threads: int) -> Ahead:
    rows = np.flatnonzero(known)
    block, at_s = of.block, of.at_s[rows]
    X, unit = block.matrix[rows], block.unit[rows]
    # The quantity behind a reading lies somewhere within its step.
    step = LEVELS[block.quantity].step
    inside = np.random.default_rng(seed).uniform(-0.5, 0.5, len(rows)) * step
    y = (of.came[rows, k] + inside - block.last[rows]) / unit
    cut = np.quantile(at_s, 1 - HELD_SHARE)
    early, late = at_s < cut - HORIZONS_S[k], at_s >= cut
    weights, naive, widen = [0.5, 0.5], NAIVE[0], (0.0, 0.0)
    if early.sum() >= MIN_HELD and late.sum() >= MIN_HELD:
        drawn = _quantiles(Forest.fit(X[early], y[early], SIZE, seed=seed, threads=threads), X[late])
        held, came = rows[late], y[late]
        points = {name: (block.naive[name][held, k] - block.last[held]) / unit[late] for name in NAIVE}
        moves = block.roughness[held, k] > LEVELS[block.quantity].noise
        chosen = moves if moves.sum() >= MIN_HELD else np.ones(len(held), dtype=bool)
        naive = min(points, key=lambda name: float(np.abs(points[name] - came)[chosen].mean()))
        told = points[naive]
        span_s = float(at_s.max() - cut)
        weights = [
            _weight(drawn[1][part], told[part], came[part], of.gpu[held[part]], span_s / HORIZONS_S[k])
            for part in (~moves, moves)
        ]
        weight = np.where(moves, weights[1], weights[0])
        point = weight * drawn[1] + (1 - weight) * told
        widen = (_needed(point - drawn[0], point - came), _needed(drawn[2] - point, came - point))
    return Ahead(Forest.fit(X, y, SIZE, seed=seed, threads=threads), (weights[0], weights[1]), naive, widen)


def _weight(middle: Floats, naive: Floats, came: Floats, gpu: NDArray[np.int64], horizons: float) -> float:
    """Of the forest's median in the point: what did best on held rows, drawn to one half where looks are few."""
    if len(came) < MIN_HELD:
        return 0.5
    losses = [float(np.abs(w * middle + (1 - w) * naive - came).mean()) for w in WEIGHTS]
    looks = len(np.unique(gpu)) * horizons
    share = looks / (looks + EVEN_LOOKS)
    return share * WEIGHTS[int(np.argmin(losses))] + (1 - share) * 0.5


def _quantiles(forest: Forest, X: NDArray[np.float32]) -> Floats:
    """Quantiles of a forest's samples, shape (len(QUANTILES), rows)."""
    ordered = np.sort(forest.draw(X), axis=1)
    last = ordered.shape[1] - 1
    return np.stack([ordered[:, round(q * last)] for q in QUANTILES]).astype(np.float64)


def _needed(told: Floats, came: Floats) -> float:
    """Share by which distances from the point must be moved out for nine in ten to be enough."""
    ok = told > 0
    if ok.sum() < MIN_HELD:
        return 0.0
    ratio = np.quantile(came[ok] / told[ok], QUANTILES[2])
    return float(np.clip(ratio - 1, -0.6, 3.0))
