"""P(fault within 1 hour, 24 hours, 7 days) for each node: a recurrent hazard over the fleet's own record of faults.

Nodes differ (gamma–Poisson), a fault calls the next (decaying excitation since the return to service), and the fleet
has restless weeks. A small regression weighs the three, one per horizon, fitted on past faults alone. Until it is
fitted and has earned its place, climatology answers: the fleet's rate, the same for every node. Here belong the
forecaster and its baselines; the record stands in `models/fault_history.py`, reasons in `models/node_risks.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.fault_history import DAY_S, FEATURES, HOUR_S, FaultHistory

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HORIZONS_S = {"p_1h": HOUR_S, "p_24h": DAY_S, "p_7d": 7 * DAY_S}
CLIMATOLOGY_VERSION = "baseline:climatology"
BASELINES = ("climatology", "repeat_offender", "own_rate")
FORMAT = 1
MIN_FAULTS = 30  # fewer say nothing about recurrence
OFFENDER_S = 30 * DAY_S
FILE = "node_failure.json"
_DRAWS_PER_FAULT = 8
_QUIET_ROWS = 40_000
_RIDGE = 3.0
HIGH = 0.999


class NodeModelError(ValueError):
    """The model cannot be fitted or read; the message says what is missing."""


def configuration() -> dict[str, Any]:
    """What makes two fits refits of one another."""
    return {"format": FORMAT, "features": list(FEATURES), "ridge": _RIDGE, "horizons_s": list(HORIZONS_S.values())}


class NodeFailureForecaster:
    """Hazard by horizon: 1 − exp(−exp(features · weights)).

    Args:
        weights: Horizon name to weights: intercept, then `FEATURES`.
        shape: Shape of the gamma law over nodes.
        version: Name in the registry.
    """

    def __init__(self, weights: Mapping[str, list[float]], shape: float, version: str = "") -> None:
        self.weights = {name: list(values) for name, values in weights.items()}
        self.shape = shape
        self.version = version

    @classmethod
    def fit(cls, history: FaultHistory, until_s: float, *, seed: int = 1) -> NodeFailureForecaster:
        """Fit on what was known until a moment.

        Args:
            history: The record; faults that begin later are not looked at.
            until_s: The moment, seconds.
            seed: Seed of the draws of rows.

        Raises:
            NodeModelError: There are fewer than `MIN_FAULTS` faults.
        """
        known = int((history.start <= until_s).sum())
        if known < MIN_FAULTS:
            raise NodeModelError(f"{known} faults until then, {MIN_FAULTS} are needed before a model")
        shape = history.shape(until_s)
        weights = {}
        for i, (name, horizon_s) in enumerate(HORIZONS_S.items()):
            node, at, came, weight = _rows(history, until_s, horizon_s, np.random.default_rng([seed, i]))
            X = np.column_stack((np.ones(len(node)), history.matrix(node, at, shape)))
            offset = np.log(horizon_s / DAY_S)
            weights[name] = _cloglog(X, came, weight, offset)
        return cls(weights, shape)

    def forecast(self, history: FaultHistory, node: Ints, at_s: Floats) -> Floats:
        """P(fault) by horizon, shape (rows, 3); never falling with the horizon."""
        X = np.column_stack((np.ones(len(node)), history.matrix(node, at_s, self.shape)))
        out = np.empty((len(node), len(HORIZONS_S)))
        for i, (name, horizon_s) in enumerate(HORIZONS_S.items()):
            eta = np.clip(X @ np.asarray(self.weights[name]) + np.log(horizon_s / DAY_S), -30, 5)
            out[:, i] = -np.expm1(-np.exp(eta))
        return np.minimum(np.maximum.accumulate(out, axis=1), HIGH)

    def to_files(self) -> dict[str, bytes]:
        """One JSON file."""
        body = {"format": FORMAT, "features": list(FEATURES), "weights": self.weights, "shape": self.shape}
        return {FILE: json.dumps(body, sort_keys=True).encode()}

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], version: str = "") -> NodeFailureForecaster:
        """Read what `to_files` wrote.

        Raises:
            NodeModelError: The file is missing, unreadable or made for other features.
        """
        try:
            body = json.loads(files[FILE])
            if body["format"] != FORMAT or body["features"] != list(FEATURES):
                raise NodeModelError(f"{FILE}: made for other features; train again")
            return cls(body["weights"], float(body["shape"]), version)
        except KeyError as error:
            raise NodeModelError(f"{error} is missing; files: {', '.join(sorted(files))}") from None
        except (TypeError, ValueError) as error:
            raise NodeModelError(f"{FILE}: {error}") from None


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


def _rows(
    history: FaultHistory, until_s: float, horizon_s: float, rng: np.random.Generator
) -> tuple[Ints, Floats, Floats, Floats]:
    """Moments at which nodes were in service, with whether a fault followed, weighted to stand for all of time."""
    last = until_s - horizon_s
    begin = history.since + min(7 * DAY_S, 0.2 * max(last - history.since, 0.0))  # features need a past
    if last <= begin:
        raise NodeModelError(f"the record until then is shorter than a horizon of {horizon_s:.0f} s")
    of = np.flatnonzero((history.start > begin) & (history.start <= until_s))
    ahead_node = np.repeat(history.node[of], _DRAWS_PER_FAULT)
    ahead_at = np.repeat(history.start[of], _DRAWS_PER_FAULT) - rng.random(len(ahead_node)) * horizon_s
    near = history.next_start_s(ahead_node, ahead_at) <= horizon_s
    keep = near & (ahead_at > begin) & (ahead_at <= last) & ~history.is_down(ahead_node, ahead_at)
    # A moment ahead of two faults would be drawn from either: half the weight each.
    twice = np.maximum(_count_ahead(history, ahead_node, ahead_at, horizon_s), 1)
    quiet_node = rng.integers(len(history.nodes), size=_QUIET_ROWS)
    quiet_at = begin + rng.random(_QUIET_ROWS) * (last - begin)
    calm = ~history.is_down(quiet_node, quiet_at) & (history.next_start_s(quiet_node, quiet_at) > horizon_s)
    node = np.concatenate((ahead_node[keep], quiet_node[calm]))
    at = np.concatenate((ahead_at[keep], quiet_at[calm]))
    came = np.concatenate((np.ones(keep.sum()), np.zeros(calm.sum())))
    whole = (last - begin) * len(history.nodes)
    weight = np.concatenate((horizon_s / _DRAWS_PER_FAULT / twice[keep], np.full(int(calm.sum()), whole / _QUIET_ROWS)))
    # In units of independent looks: each fault counts once.
    return node, at, came, weight / horizon_s


def _count_ahead(history: FaultHistory, node: Ints, at_s: Floats, horizon_s: float) -> Ints:
    return history.before(node, at_s + horizon_s) - history.before(node, at_s)


def _cloglog(X: Floats, came: Floats, weight: Floats, offset: float) -> list[float]:
    """Weighted complementary log-log regression, pulled towards the node's own rate (weight 1 on its log)."""
    prior = np.zeros(X.shape[1])
    prior[1 + FEATURES.index("log_own_rate")] = 1.0
    pull = np.full(X.shape[1], _RIDGE)
    pull[0] = 0.1
    beta = prior.copy()
    for _ in range(100):
        eta = np.clip(X @ beta + offset, -30, 5)
        mu = np.exp(eta)
        p = -np.expm1(-mu)
        slope = np.where(p > 1e-12, mu * (1 - p) / np.maximum(p, 1e-12), 1.0)
        score = weight * np.where(came > 0, slope, -mu)
        information = weight * mu * np.where(p > 1e-12, mu * (1 - p) / np.maximum(p, 1e-12), 1.0)
        gradient = X.T @ score - pull * (beta - prior)
        hessian = (X * information[:, None]).T @ X + np.diag(pull)
        step = np.linalg.solve(hessian, gradient)
        beta = beta + np.clip(step, -1, 1)
        if np.abs(step).max() < 1e-9:
            break
    return [float(value) for value in beta]
