"""The learned bottleneck forecaster: per class a discrete-time hazard over (0, 30], (30, 60], (60, 90], (90, 120] s.

One LightGBM per class takes the interval as an input and gives the chance that the onset comes in it, given that it has
not come before; the product over intervals can only make P rise with the horizon. Hazards are calibrated on later time
than the trees saw. Here belong fitting, forecasting and files; rows stand in `models/onsets.py`, baselines in
`models/naive_onsets.py`, the decision to hand over in `models/training_hardware.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.conditions import CLASSES
from features.unit_conditions import UNIT_CLASSES
from features.windows import FeatureBlock
from models.onsets import LAST_S, PURGE_S, Rows
from models.trend import HORIZONS_S, TrendForecaster
from models.unit_onsets import UNIT_MONOTONE, UNIT_PARAMETERS, UNIT_USED

LEARNED = (*CLASSES, *UNIT_CLASSES)  # of GPUs, and of nodes, ports and queues
FORMAT = 4  # 2: windows of ten minutes by cells of time; 3: power and clocks of GPUs, gangs; 4: motion
CARD_FILE = "hazard.json"
PARAMETERS: dict[str, Any] = {
    "objective": "binary", "learning_rate": 0.06, "num_leaves": 12, "min_data_in_leaf": 40, "max_bin": 127,
    "feature_fraction": 0.6, "bagging_fraction": 0.8, "bagging_freq": 1, "lambda_l2": 5.0,
    "min_sum_hessian_in_leaf": 1e-2,
    "verbose": -1, "deterministic": True, "force_row_wise": True,
}  # fmt: skip
ROUNDS = 120
_COURSE = (
    "last", "mean", "spread", "min", "slope_short", "slope_mid", "residual_short", "acceleration",
    "time_to_limit_short_s", "time_to_limit_mid_s", "since_change_s", "near_ratio", "set_ratio", "rise_30s", "new_low",
    "data_age_s",
)  # fmt: skip
_MOTION = ("slope_new", "time_to_limit_new_s", "pace_kept", "stall", "spacing_s", "samples")
# What each class learns from. A feature that cannot cause the class only tells the training days apart: inlet air,
# the job's age in hours.
USED: dict[str, tuple[str, ...]] = {
    "thermal_throttle": (
        *_COURSE, "gpu_power_w_last", "gpu_power_w_change", "gpu_power_w_slope", "activity_ratio_last",
        "activity_ratio_change", "mem_temp_c_change", "sm_clock_hz_change", "inlet_temp_c_change",
        "node_peers_difference", "node_peers_near_ratio", "job_peers_difference", *_MOTION, "way_gone",
        "full_load_distance", "full_load_change", "full_load_slope", "full_load_time_to_limit_s", "resistance_growth",
    ),
    "power_throttle": (
        *_COURSE, "gpu_power_w_change", "gpu_power_w_slope", "power_ratio_last", "power_ratio_change",
        "sm_clock_hz_change", "sm_clock_hz_slope", "activity_ratio_last", "activity_ratio_change",
        "step_ratio_last", "step_ratio_change", "node_peers_difference", "node_peers_near_ratio",
        "job_peers_difference",
    ),
    "nvlink_saturation": (
        *_COURSE, "nvlink_fill_ratio_last", "nvlink_fill_ratio_change", "step_ratio_last", "step_ratio_change",
        "step_ratio_slope", "activity_ratio_last", "activity_ratio_change", "gpu_power_w_change",
        "node_peers_difference", "node_peers_near_ratio", "job_peers_difference", *_MOTION, "way_gone",
        "step_ratio_time_to_slow_s",
    ),
    "memory_exhaustion": (
        *_COURSE, "over_plateau_gib_last", "over_plateau_gib_change", "activity_ratio_change",
        "node_peers_difference", "node_peers_near_ratio", "job_peers_difference", *_MOTION, "over_plateau_share",
    ),
    "straggler": (
        *_COURSE, "step_ratio_last", "step_ratio_change", "step_ratio_slope", "sm_clock_hz_change",
        "gpu_power_w_change", "activity_ratio_change", "node_peers_difference", "node_peers_near_ratio",
        "job_peers_difference",
    ),
}  # fmt: skip
USED.update({name: (*_COURSE, *features) for name, features in UNIT_USED.items()})
# The nearer and the faster, the likelier, whatever else holds: keeps a few training onsets from saying otherwise.
MONOTONE = {
    "last": -1, "slope_short": -1, "time_to_limit_short_s": -1, "time_to_limit_mid_s": -1, "new_low": -1,
    "step_ratio_last": 1, "nvlink_fill_ratio_last": 1, **UNIT_MONOTONE,
}  # fmt: skip
MIN_ONSET_ROWS = 60  # fewer rows ahead of an onset teach nothing
MIN_CALIBRATION_ROWS = 30
FOLDS = (0.5, 0.75)  # of the span: where trees for calibration end
IDENTITY = (1.0, *(0.0 for _ in HORIZONS_S))
ROWS_PER_ONSET = 8.0  # samples of a GPU ahead of one onset say about as much as one
LOW, HIGH = 1e-5, 0.995
_EDGE = 1e-6
_USED = {name: list(features) for name, features in USED.items()}


class ModelFileError(ValueError):
    """Files of a model cannot be used; the message names the file and what is wrong."""


def configuration() -> dict[str, Any]:
    """What makes two fits of this forecaster refits of one another."""
    return {
        "format": FORMAT,
        "features": _USED,
        "parameters": PARAMETERS,
        "parameters_of": UNIT_PARAMETERS,
        "monotone": MONOTONE,
        "rounds": ROUNDS,
        "folds": FOLDS,
    }


class HazardForecaster:
    """P(onset within each horizon) for each class it has learned; the built-in trend for the others.

    Args:
        boosters: Class to LightGBM booster.
        calibration: Class to (slope, intercept by interval), on the logit of the hazard.
        version: Name in the registry.
    """

    def __init__(self, boosters: Mapping[str, Any], calibration: Mapping[str, list[float]], version: str = "") -> None:
        self.boosters = dict(boosters)
        self.calibration = {name: list(values) for name, values in calibration.items()}
        self.version = version
        self._trend = TrendForecaster()

    @property
    def classes(self) -> list[str]:
        """Classes that were learned."""
        return sorted(self.boosters)

    def version_of(self, bottleneck_class: str) -> str:
        """Who forecasts a class: this model, or the trend where it has not learned the class."""
        return self.version if bottleneck_class in self.boosters else self._trend.version

    @classmethod
    def fit(
        cls, rows: Mapping[str, Rows], *, seed: int = 1, threads: int = 1, rounds: int = ROUNDS
    ) -> HazardForecaster:
        """Learn each class that has enough onsets.

        Calibration goes forward in time: trees of the first part forecast the next, trees of both the one after; what
        they said there, and what came, calibrates the trees of the whole.

        Args:
            rows: Rows by class.
            seed: Seed of the trees.
            threads: Threads of a fit.
            rounds: Trees per class.
        """
        boosters: dict[str, Any] = {}
        calibration: dict[str, list[float]] = {}
        for name, of in rows.items():
            if len(of) == 0 or of.person_periods()[2].sum() < MIN_ONSET_ROWS:
                continue
            looks = []
            begin, end = float(of.block.at_s.min()), float(of.block.at_s.max())
            bounds = [begin + share * (end - begin) for share in FOLDS]
            for cut, until in pairwise([*bounds, end + 1.0]):
                past = of.where(of.block.at_s + LAST_S < cut)
                later = of.where((of.block.at_s >= cut + PURGE_S) & (of.block.at_s < until))
                if len(later) and len(past) and past.person_periods()[2].sum() >= MIN_ONSET_ROWS:
                    trees = _trees(name, past, seed, threads, rounds)
                    row, interval, came = later.person_periods()
                    hazard = np.asarray(trees.predict(_design(name, later.block, row, interval), num_threads=threads))
                    looks.append((_logit(hazard), interval, came, later.weight[row]))
            boosters[name] = _trees(name, of, seed, threads, rounds)
            calibration[name] = list(IDENTITY)
            if looks:
                z, interval, came, weight = (np.concatenate(parts) for parts in zip(*looks, strict=True))
                if came.sum() >= MIN_CALIBRATION_ROWS:
                    calibration[name] = _logistic(z, interval, came, weight)
        return cls(boosters, calibration)

    def _raw(self, name: str, block: FeatureBlock) -> NDArray[np.float64]:
        n, k = len(block.matrix), len(HORIZONS_S)
        if n == 0:
            return np.zeros((0, k))
        row, interval = np.repeat(np.arange(n), k), np.tile(np.arange(k), n)
        return np.asarray(self.boosters[name].predict(_design(name, block, row, interval), num_threads=1)).reshape(n, k)

    def hazards(self, block: FeatureBlock) -> NDArray[np.float64]:
        """Calibrated hazard of each interval, shape (rows, intervals)."""
        slope, *intercepts = self.calibration[block.bottleneck_class]
        z = slope * _logit(self._raw(block.bottleneck_class, block)) + np.asarray(intercepts)
        return 1 / (1 + np.exp(-z))

    def forecast(self, block: FeatureBlock) -> NDArray[np.float64]:
        """Probabilities, shape (rows, len(HORIZONS_S)); they never fall with the horizon."""
        if block.bottleneck_class not in self.boosters:
            return self._trend.forecast(block)
        survival = np.cumprod(1 - self.hazards(block), axis=1)
        return np.clip(1 - survival, LOW, HIGH)

    def without(self, names: set[str]) -> HazardForecaster:
        """The same model with some classes given back to the trend."""
        return HazardForecaster(
            {name: booster for name, booster in self.boosters.items() if name not in names},
            {name: values for name, values in self.calibration.items() if name not in names},
            self.version,
        )

    def importance(self, name: str, top: int = 12) -> list[tuple[str, float]]:
        """Features of a class by total gain, as shares, greatest first."""
        booster = self.boosters[name]
        gain = booster.feature_importance("gain")
        order = np.argsort(gain)[::-1][:top]
        names = booster.feature_name()
        return [(names[i], float(gain[i] / max(gain.sum(), 1e-12))) for i in order]

    # --- files ----------------------------------------------------------------------------------------------

    def to_files(self) -> dict[str, bytes]:
        """LightGBM text per class and one JSON."""
        card = {"format": FORMAT, "features": _USED, "calibration": self.calibration}
        files = {CARD_FILE: json.dumps(card, sort_keys=True).encode()}
        for name, booster in self.boosters.items():
            files[f"{name}.txt"] = booster.model_to_string().encode()
        return files

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], version: str = "") -> HazardForecaster:
        """Read what `to_files` wrote.

        Raises:
            ModelFileError: A file is missing, not of this format, or made for other features.
        """
        import lightgbm as lgb

        try:
            card = json.loads(files[CARD_FILE])
        except KeyError:
            raise ModelFileError(f"{CARD_FILE} is missing; there are: {', '.join(sorted(files))}") from None
        except ValueError:
            raise ModelFileError(f"{CARD_FILE} is not JSON") from None
        if card.get("format") != FORMAT or card.get("features") != _USED:
            raise ModelFileError(f"{CARD_FILE}: made for other features or format {card.get('format')}; train again")
        boosters = {}
        for name in card["calibration"]:
            if name not in LEARNED or f"{name}.txt" not in files:
                raise ModelFileError(f"{name}.txt is missing or no class; classes: {', '.join(LEARNED)}")
            try:
                boosters[name] = lgb.Booster(model_str=files[f"{name}.txt"].decode())
            except lgb.basic.LightGBMError as error:
                raise ModelFileError(f"{name}.txt: {error}") from None
        return cls(boosters, card["calibration"], version)


def _trees(name: str, rows: Rows, seed: int, threads: int, rounds: int) -> Any:
    import lightgbm as lgb

    row, interval, came = rows.person_periods()
    data = lgb.Dataset(
        _design(name, rows.block, row, interval), label=came, weight=rows.weight[row],
        feature_name=[*USED[name], "interval"], free_raw_data=True,
    )  # fmt: skip
    monotone = [MONOTONE.get(feature, 0) for feature in USED[name]] + [0]
    parameters = {
        **PARAMETERS,
        **UNIT_PARAMETERS.get(name, {}),
        "seed": seed,
        "num_threads": threads,
        "monotone_constraints": monotone,
    }
    return lgb.train(parameters, data, num_boost_round=rounds)


def _design(name: str, block: FeatureBlock, row: NDArray[np.int64], interval: NDArray[np.int64]) -> NDArray[np.float32]:
    columns = [block.index[feature] for feature in USED[name]]
    return np.concatenate((block.matrix[:, columns][row], interval[:, None].astype(np.float32)), axis=1)


def _logit(p: NDArray[np.float64]) -> NDArray[np.float64]:
    p = np.clip(p, _EDGE, 1 - _EDGE)
    return np.log(p / (1 - p))


def _logistic(
    z: NDArray[np.float64], interval: NDArray[np.int64], came: NDArray[np.float64], weight: NDArray[np.float64]
) -> list[float]:
    """Weighted logistic regression of the outcome on the logit, one intercept per interval, pulled towards identity."""
    k = len(HORIZONS_S)
    X = np.zeros((len(z), k + 1))
    X[:, 0] = z
    X[np.arange(len(z)), interval + 1] = 1
    weight = weight / ROWS_PER_ONSET
    beta = np.array([1.0] + [0.0] * k)
    prior = beta.copy()
    pull = np.array([4.0] + [2.0] * k)
    for _ in range(50):
        p = 1 / (1 + np.exp(-np.clip(X @ beta, -30, 30)))
        gradient = X.T @ (weight * (came - p)) - pull * (beta - prior)
        hessian = (X * (weight * p * (1 - p))[:, None]).T @ X + np.diag(pull)
        step = np.linalg.solve(hessian, gradient)
        beta = beta + np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-8:
            break
    beta[0] = np.clip(beta[0], 0.3, 2.0)
    return [float(value) for value in beta]
