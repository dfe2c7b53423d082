"""Keyed recency: the baselines every runtime forecast stands beside, and the forecaster until a model is better.

Each takes the newest past runtimes of the same key (user, size, limit), else of the user, else the limit, else of
everyone, and never more than the limit. Here belong these points and the spread they are given; nothing is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.jobs import FEATURES
from models.calibration import MIN_ROWS
from models.curves import LEVELS, MEDIAN, cap, rising

Floats = NDArray[np.float64]
Matrix = NDArray[np.float32]

_LIMIT = "asked_limit"
BASELINES: dict[str, tuple[str, ...]] = {
    "limit": (_LIMIT, "all_median"),
    "last2_user": ("user_last2", _LIMIT, "all_median"),
    "last2_key": ("key_last2", "user_last2", _LIMIT, "all_median"),
    "median_user": ("user_median", _LIMIT, "all_median"),
    "median_key": ("key_median", "user_median", _LIMIT, "all_median"),
}
MIDDLE = "middle"  # median of the keyed ones, for where they contradict each other and little tells which is right
MIDDLE_OF = ("last2_user", "last2_key", "median_key", "median_user")  # where all say the same, the key's are the middle
SPEAKERS = (MIDDLE, *BASELINES)  # who may speak; of equals the first
STRATA = ("key", "user", "new")  # the key has history, only the user has, neither has
SPREAD_LEVELS = (0.1, 0.5, 0.9)
_AT = {name: FEATURES.index(name) for chain in BASELINES.values() for name in chain}
_KEY_COUNT, _USER_COUNT = FEATURES.index("key_count"), FEATURES.index("user_count")
_DEFAULT_LOG = np.log(3600.0)  # with no history and no limit at all
_DEFAULT_SPREAD = 1.5  # standard deviation in ln(seconds) before any outcome is known


def baseline_log(name: str, features: Matrix) -> Floats:
    """Point forecast of a baseline, ln(seconds), shape (n,).

    Raises:
        ValueError: There is no such baseline; the message lists them.
    """
    if name not in BASELINES:
        raise ValueError(f"no baseline {name!r}; baselines: {', '.join(BASELINES)}")
    value = np.full(len(features), np.nan)
    for column in BASELINES[name]:
        value = np.where(np.isnan(value), features[:, _AT[column]], value)
    value = np.nan_to_num(value.astype(np.float64), nan=_DEFAULT_LOG)
    limit = features[:, _AT[_LIMIT]].astype(np.float64)
    return np.maximum(np.fmin(value, limit), 0.0)


def middle_pair(features: Matrix) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places in `MIDDLE_OF` of the two baselines between which the middle lies, each of shape (n,)."""
    order = np.argsort(np.stack([baseline_log(name, features) for name in MIDDLE_OF]), axis=0, kind="stable")
    return order[1], order[2]


def spoken_log(name: str, features: Matrix) -> Floats:
    """Point forecast of one of `SPEAKERS`, ln(seconds), shape (n,).

    Raises:
        ValueError: There is no such baseline; the message lists them.
    """
    if name != MIDDLE:
        return baseline_log(name, features)
    return np.median([baseline_log(part, features) for part in MIDDLE_OF], axis=0)


def empirical_log(features: Matrix) -> Floats:
    """Quantiles at `SPREAD_LEVELS` of the key's newest, else the user's, else everyone's; ln(seconds), shape (n, 3)."""
    found = np.full((len(features), len(SPREAD_LEVELS)), np.nan)
    for group in ("key", "user", "all"):
        columns = [FEATURES.index(f"{group}_{name}") for name in ("low", "median", "high")]
        found = np.where(np.isnan(found), features[:, columns], found)
    limit = features[:, [_AT[_LIMIT]]].astype(np.float64)
    return np.maximum(np.fmin(np.nan_to_num(found.astype(np.float64), nan=_DEFAULT_LOG), limit), 0.0)


def stratum(features: Matrix) -> NDArray[np.int64]:
    """Index into `STRATA` of each row."""
    return np.where(features[:, _KEY_COUNT] > 0, 0, np.where(features[:, _USER_COUNT] > 0, 1, 2))


@dataclass(frozen=True, slots=True)
class KeyedRecency:
    """A baseline with a spread learnt from its own past errors.

    Attributes:
        name: Who speaks, one of `SPEAKERS`.
        offsets: ln(actual ÷ forecast) at each level, by stratum, shape (len(STRATA), len(LEVELS)); 0 at the median.
        losses: MALE of each of `SPEAKERS` on the outcomes it was chosen by.
    """

    name: str
    offsets: Floats
    losses: Mapping[str, float]

    @classmethod
    def fit(cls, features: Matrix, actual_log: Floats, newest: NDArray[np.int64] | None = None) -> KeyedRecency:
        """Choose who has the lowest MALE on all released outcomes, as nothing is trained on them, and learn a spread.

        Args:
            features: As of each job's submit, shape (n, len(FEATURES)); n may be 0.
            actual_log: ln(runtime in seconds), shape (n,).
            newest: Rows that the spread is learnt from, where they are enough; None: all.
        """
        default = np.tile(_DEFAULT_SPREAD * _normal_quantiles(), (len(STRATA), 1))
        if len(actual_log) < MIN_ROWS:
            return cls(MIDDLE, default, {})
        losses = {name: float(np.abs(spoken_log(name, features) - actual_log).mean()) for name in SPEAKERS}
        name = min(SPEAKERS, key=lambda candidate: losses[candidate])
        if newest is not None and len(newest) >= MIN_ROWS:
            features, actual_log = features[newest], actual_log[newest]
        gaps = actual_log - spoken_log(name, features)
        rows = stratum(features)
        pooled = np.quantile(gaps, LEVELS)
        offsets = np.stack(
            [
                np.quantile(gaps[rows == k], LEVELS) if (rows == k).sum() >= MIN_ROWS else pooled
                for k in range(len(STRATA))
            ]
        )
        offsets[:, :MEDIAN] = np.minimum(offsets[:, :MEDIAN], 0.0)
        offsets[:, MEDIAN] = 0.0  # the point stays the baseline's own
        offsets[:, MEDIAN + 1 :] = np.maximum(offsets[:, MEDIAN + 1 :], 0.0)
        return cls(name, offsets, losses)

    def curves(self, features: Matrix) -> Floats:
        """Quantile curves, ln(seconds), shape (n, len(LEVELS)), capped at the limit."""
        limit_s = np.exp(features[:, _AT[_LIMIT]].astype(np.float64))
        return cap(rising(spoken_log(self.name, features)[:, None] + self.offsets[stratum(features)]), limit_s)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "offsets": self.offsets.tolist(), "losses": dict(self.losses)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KeyedRecency:
        return cls(data["name"], np.asarray(data["offsets"], dtype=np.float64), data["losses"])


def _normal_quantiles() -> Floats:
    """Standard normal quantiles at `LEVELS`."""
    from statistics import NormalDist

    return np.array([NormalDist().inv_cdf(float(level)) for level in LEVELS])
