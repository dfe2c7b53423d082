"""P(fault within 1 hour, 24 hours, 7 days) for each node and each of its GPUs.

Three voices, mixed: a hazard that adds up what the fleet does and what a node's own faults and signs still weigh
(`models/recurrence.py`); the gamma–Poisson rate of the node, for what lasts; and climatology, the fleet's rate, the
same for every node. How much each has to say at a horizon is learned by walking through the record: forecasts as they
would have been made, on outcomes released since. Until the forecaster is fitted and has earned its place, climatology
answers alone. Here belong the forecaster and its baselines; the record stands in `models/fault_history.py`, reasons in
`models/node_risks.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from models.fault_history import DAY_S, HOUR_S, FaultHistory
from models.recurrence import PARTS, Recurrence, fit_recurrence

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HORIZONS_S = {"p_1h": HOUR_S, "p_24h": DAY_S, "p_7d": 7 * DAY_S}
BASELINES = ("climatology", "repeat_offender", "own_rate")
FORMAT = 4
MIN_FAULTS = 30  # fewer say nothing about recurrence
OFFENDER_S = 30 * DAY_S
FILE = "node_failure.json"
HIGH = 0.999
# The walk that the model's say is learned by: its first moment, the least between fits, the most fits, nodes looked at.
WALK_FROM_S, WALK_STEP_S, WALK_FITS, WALK_NODES, WALK_GRID_S = 21 * DAY_S, 7 * DAY_S, 26, 2_000, 0.5 * DAY_S
VOICES = ("hazard", "lasting", "climatology")
SAY_PRIOR = np.array([3.0, 0.5, 3.0])  # looks that speak for each before any has been had


class NodeModelError(ValueError):
    """The model cannot be fitted or read; the message says what is missing."""


def configuration() -> dict[str, Any]:
    """What makes two fits refits of one another."""
    return {"format": FORMAT, "features": list(PARTS), "horizons_s": list(HORIZONS_S.values())}


class NodeFailureForecaster:
    """What a hazard and climatology say together, by horizon.

    Args:
        hazard: The fitted hazard.
        say: Horizon name to the shares of `VOICES` in the forecast; they sum to 1.
        version: Name in the registry.
    """

    def __init__(self, hazard: Recurrence, say: Mapping[str, Sequence[float]], version: str = "") -> None:
        self.hazard = hazard
        self.say = {name: list(shares) for name, shares in say.items()}
        self.version = version

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the hazard by part."""
        return dict(zip(PARTS, self.hazard.weights.tolist(), strict=True))

    @classmethod
    def fit(cls, history: FaultHistory, until_s: float, *, seed: int = 1) -> NodeFailureForecaster:
        """Fit on what was known until a moment.

        Args:
            history: The record; faults that begin later are not looked at.
            until_s: The moment, seconds.
            seed: Seed of the draw of nodes in a large fleet, over which the model's say is learned.

        Raises:
            NodeModelError: There are fewer than `MIN_FAULTS` faults, or the record is shorter than the longest horizon.
        """
        known = int((history.start <= until_s).sum())
        if known < MIN_FAULTS:
            raise NodeModelError(f"{known} faults until then, {MIN_FAULTS} are needed before a model")
        longest = max(HORIZONS_S.values())
        if until_s - history.since <= longest:
            raise NodeModelError(f"the record until then is shorter than a horizon of {longest:.0f} s")
        return cls(fit_recurrence(history, until_s), _learned_say(history, until_s, seed))

    def forecast(self, history: FaultHistory, node: Ints, at_s: Floats) -> Floats:
        """P(fault) of nodes by horizon, shape (rows, 3); never falling with the horizon."""
        usual = history.fleet_rate(at_s)
        return self._mixed([
            (self.hazard.expected(history, node, at_s, horizon_s), self.hazard.lasting(history, node, at_s, horizon_s),
             usual * horizon_s)
            for horizon_s in HORIZONS_S.values()
        ])  # fmt: skip

    def forecast_gpus(self, history: FaultHistory, gpu: Ints, at_s: Floats) -> Floats:
        """P(fault) of GPUs by their codes in `history.gpus`, shape (rows, 3); never falling with the horizon."""
        usual = history.fleet_rate(at_s) * self.hazard.gpu_share / history.gpus_per_node[history.gpu_node[gpu]]
        hazard = self.hazard
        return self._mixed([
            (hazard.expected_of_gpus(history, gpu, at_s, horizon_s),
             hazard.lasting_of_gpus(history, gpu, at_s, horizon_s), usual * horizon_s)
            for horizon_s in HORIZONS_S.values()
        ])  # fmt: skip

    def _mixed(self, expected: list[tuple[Floats, ...]]) -> Floats:
        parts = [
            sum(share * -np.expm1(-faults) for share, faults in zip(self.say[name], voices, strict=True))
            for name, voices in zip(HORIZONS_S, expected, strict=True)
        ]
        return np.minimum(np.maximum.accumulate(np.stack(parts, axis=1), axis=1), HIGH)

    def to_files(self) -> dict[str, bytes]:
        """One JSON file."""
        body = {
            "format": FORMAT, "features": list(PARTS), "weights": self.hazard.weights.tolist(), "say": self.say,
            "gpu_share": self.hazard.gpu_share, "same_share": self.hazard.same_share, "shape": self.hazard.shape,
            "fleet_rate": self.hazard.fleet_rate,
        }  # fmt: skip
        return {FILE: json.dumps(body, sort_keys=True).encode()}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], version: str = "") -> NodeFailureForecaster:
        """Read what `to_files` wrote.

        Raises:
            NodeModelError: The file is missing, unreadable or made for other features.
        """
        try:
            body = json.loads(files[FILE])
            if body["format"] != FORMAT or body["features"] != list(PARTS):
                raise NodeModelError(f"{FILE}: made for other features; train again")
            weights = np.array(body["weights"], dtype=np.float64)
            if weights.shape != (len(PARTS),):
                raise NodeModelError(f"{FILE}: {len(weights)} weights for {len(PARTS)} features; train again")
            others = (float(body[name]) for name in ("gpu_share", "same_share", "shape", "fleet_rate"))
            hazard = Recurrence(weights, *others)
            return cls(hazard, {name: [float(v) for v in body["say"][name]] for name in HORIZONS_S}, version)
        except KeyError as error:
            raise NodeModelError(f"{error} is missing; files: {', '.join(sorted(files))}") from None
        except (TypeError, ValueError) as error:
            raise NodeModelError(f"{FILE}: {error}") from None


def _learned_say(history: FaultHistory, until_s: float, seed: int) -> dict[str, list[float]]:
    """Shares of the voices at each horizon that would have served best, over forecasts made at past moments."""
    span = until_s - history.since
    first = history.since + min(WALK_FROM_S, 0.25 * span)
    step = max(WALK_STEP_S, (until_s - first) / WALK_FITS)
    nodes = np.arange(len(history.nodes))
    if len(nodes) > WALK_NODES:
        nodes = np.sort(np.random.default_rng(seed).choice(nodes, WALK_NODES, replace=False))
    looks: dict[str, list[tuple[Floats, NDArray[np.bool_]]]] = {name: [] for name in HORIZONS_S}
    for begin in np.arange(first, until_s, step):
        hazard = fit_recurrence(history, begin)
        moments = np.arange(begin, min(begin + step, until_s), WALK_GRID_S)
        node, at = np.tile(nodes, len(moments)), np.repeat(moments, len(nodes))
        up = ~history.is_down(node, at)
        node, at = node[up], at[up]
        usual, nearest = history.fleet_rate(at), history.next_start_s(node, at)
        for name, horizon_s in HORIZONS_S.items():
            known = at + horizon_s <= until_s
            of, when = node[known], at[known]
            voices = (hazard.expected(history, of, when, horizon_s), hazard.lasting(history, of, when, horizon_s),
                      usual[known] * horizon_s)  # fmt: skip
            looks[name].append((-np.expm1(-np.stack(voices, axis=1)), nearest[known] <= horizon_s))
    # A fault counts once, however many moments look at it.
    return {name: _best_say(parts, min(1.0, WALK_GRID_S / HORIZONS_S[name])) for name, parts in looks.items()}


def _best_say(looks: list[tuple[Floats, NDArray[np.bool_]]], weight: float) -> list[float]:
    """Shares with the least log loss in all, held towards those of `SAY_PRIOR`."""
    p, came = np.concatenate([part for part, _ in looks]), np.concatenate([part for _, part in looks])
    side = np.where(came[:, None], p, 1 - p)

    def loss(logits: Floats) -> tuple[float, Floats]:
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        mixed = np.maximum(side @ shares, 1e-12)
        slope = weight * (side / mixed[:, None]).sum(axis=0) + SAY_PRIOR / shares
        value = -weight * np.log(mixed).sum() - SAY_PRIOR @ np.log(shares)
        return float(value), -shares * (slope - float(slope @ shares))

    found = minimize(loss, np.zeros(len(VOICES)), jac=True, method="L-BFGS-B", bounds=[(-6.0, 6.0)] * len(VOICES))
    shares = np.exp(found.x - found.x.max())
    return (shares / shares.sum()).tolist()


def baseline(name: str, history: FaultHistory, node: Ints, at_s: Floats) -> Floats:
    """P(fault) by horizon of a baseline, shape (rows, 3).

    `climatology`: the fleet's rate so far. `repeat_offender`: the rate so far of nodes with as many faults in the last
    30 days (0, 1, 2, 3 and more). `own_rate`: gamma–Poisson rate of the node.

    Raises:
        ValueError: There is no such baseline.
    """
    at_s = np.asarray(at_s, dtype=np.float64)
    if name == "climatology":
        rate = history.fleet_rate(at_s)
    elif name == "own_rate":
        shapes = {moment: history.shape(moment) for moment in np.unique(np.floor(at_s / DAY_S) * DAY_S)}
        shape = np.array([shapes[moment] for moment in np.floor(at_s / DAY_S) * DAY_S])
        fleet = history.fleet_rate(at_s)
        rate = (shape + history.count(node, at_s)) / (shape / fleet + history.exposure_s(node, at_s))
    elif name == "repeat_offender":
        rate = _offender_rate(history, node, at_s)
    else:
        raise ValueError(f"no baseline {name!r}; baselines: {', '.join(BASELINES)}")
    return -np.expm1(-rate[:, None] * np.array(list(HORIZONS_S.values())))


def _offender_rate(history: FaultHistory, node: Ints, at_s: Floats) -> Floats:
    """Rate so far of the node's group by recent faults, learned from days before the moment."""
    day = np.floor(at_s / DAY_S) * DAY_S
    everyone = np.arange(len(history.nodes))
    rate = history.fleet_rate(at_s)
    group = np.minimum(history.count(node, at_s, OFFENDER_S), 3)
    first = np.floor(history.since / DAY_S) * DAY_S + DAY_S
    days = np.arange(first, day.max(initial=first) + 1, DAY_S)
    faults, exposure = np.zeros((len(days) + 1, 4)), np.zeros((len(days) + 1, 4))
    for i, moment in enumerate(days):
        at = np.full(len(everyone), moment)
        up = ~history.is_down(everyone, at)
        of = np.minimum(history.count(everyone, at, OFFENDER_S), 3)
        came = history.next_start_s(everyone, at) <= DAY_S
        faults[i + 1] = faults[i] + np.bincount(of[up], weights=came[up], minlength=4)
        exposure[i + 1] = exposure[i] + np.bincount(of[up], minlength=4)
    known = np.clip(np.searchsorted(days, day - DAY_S, side="right"), 0, len(days))
    prior = 2.0  # faults that the fleet's rate counts for
    return (faults[known, group] + prior) / (exposure[known, group] * DAY_S + prior / rate)
