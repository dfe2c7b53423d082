"""A hazard that adds up: the fleet's rate, the fleet's restless weeks, and what a unit's own past still weighs.

    rate(t) = w₀ + w₁ · (a + faults so far) ÷ (a ÷ fleet's rate + time in service)
              + Σ_j w_j · Σ_marks exp(−age ÷ τ_j) ÷ τ_j

The second term is the gamma–Poisson rate of the unit: some are worse for good.
w_j is the number of faults that a mark brings about in the long run, at the pace τ_j. Marks are returns to service
after a fault, signs of the hardware, and, for all nodes alike, faults of the fleet. Each weight has a gamma prior, so
that little evidence stays near what is usual and never blows up; the fit (expectation–maximisation) is exact, has one
optimum, and knows of no rows that were drawn. One rate gives all horizons, so a probability never falls with the
horizon. Self-exciting point processes: Hawkes 1971; Veen and Schoenberg 2008 for the fit.

Here belongs the hazard of nodes and how much of it each GPU has; mixing with climatology and reading and writing stand
in `models/node_failure.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from features.hardware_signs import SIGNS
from models.fault_history import DAY_S, PRIOR_RATE, RETURN_TAUS_S, SIGN_TAUS_S, FaultHistory

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Faults that one mark brings about at each pace before any has been seen, and how many marks that counts for. Chosen on
# the older 70 % of the recorded faults (docs/nowcast.md); nothing published gives them.
RETURN_PRIOR, RETURN_STRENGTH = 0.04, 30.0
FLEET_PRIOR, FLEET_STRENGTH = 0.1, 60.0
OWN_PRIOR, OWN_STRENGTH = 0.1, 10.0  # of the gamma–Poisson rate; the strength in faults that it expects
SIGN_PRIOR, SIGN_STRENGTH = 0.01, 30.0
BASE_SHARE = 0.5  # of the published rate that is no recurrence
# Which part is at fault: 58.7 % of the unexpected interruptions of Llama 3 (Meta 2024) were of GPUs; counts as 10.
GPU_PRIOR, GPU_STRENGTH = 0.587, 10.0
SAME_PRIOR, SAME_STRENGTH = 0.5, 4.0  # that what a GPU's own mark brings about befalls the same GPU
WARM_UP_S, WARM_UP_SHARE = 7 * DAY_S, 0.2
ITERATIONS, PRECISION = 400, 1e-7
_JUST_BEFORE_S = 1e-3
_SAME_GRID = np.linspace(0.0, 1.0, 41)

PARTS = (
    "base",
    "fleet",
    "own_rate",
    *(f"return_{tau / 3600:g}h" for tau in RETURN_TAUS_S),
    *(f"{sign}_{tau / 3600:g}h" for sign in SIGNS for tau in SIGN_TAUS_S),
)


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A fitted hazard.

    Attributes:
        weights: By `PARTS`; of the base faults per node and second, of the others faults per mark.
        gpu_share: Share of faults that one GPU has, not the node.
        same_share: Share of what a GPU's own marks bring about that befalls the same GPU, not another of the node.
        shape: Of the gamma law over nodes' own rates.
        fleet_rate: Faults per node and second, at which that law has its mean.
    """

    weights: Floats
    gpu_share: float
    same_share: float
    shape: float
    fleet_rate: float

    def expected(self, history: FaultHistory, node: Ints, at_s: Floats, horizon_s: float) -> Floats:
        """Expected faults of nodes within a horizon if no further mark comes, shape (rows,)."""
        weighed = _weighed(self.weights, horizon_s, *_levels(history, node, at_s), units=len(history.nodes))
        return weighed + self.weights[2] * self.lasting(history, node, at_s, horizon_s)

    def lasting(self, history: FaultHistory, node: Ints, at_s: Floats, horizon_s: float) -> Floats:
        """Expected faults by the gamma–Poisson rate of nodes alone."""
        return horizon_s * (self.shape + history.count(node, at_s)) / self._span(history, node, at_s)

    def lasting_of_gpus(self, history: FaultHistory, gpu: Ints, at_s: Floats, horizon_s: float) -> Floats:
        """The same for GPUs: a GPU's own faults weigh for itself."""
        node = history.gpu_node[gpu]
        a_fault = horizon_s / self._span(history, node, at_s)
        of_all = self.same_share * a_fault * history.named_returns.count(node, at_s)
        own = self.same_share * a_fault * history.gpu_returns.count(gpu, at_s)
        whole = self.lasting(history, node, at_s, horizon_s)
        return self.gpu_share * ((whole - of_all) / history.gpus_per_node[node] + own)

    def expected_of_gpus(self, history: FaultHistory, gpu: Ints, at_s: Floats, horizon_s: float) -> Floats:
        """The same for GPUs by their codes in `history.gpus`."""
        node = history.gpu_node[gpu]
        whole = self.expected(history, node, at_s, horizon_s)
        a_fault = self.weights[2] * horizon_s / self._span(history, node, at_s)
        own = self.own_of_gpus(history, gpu, at_s, horizon_s) + a_fault * history.gpu_returns.count(gpu, at_s)
        of_all = _of_marks(self.weights, horizon_s, *_gpu_levels(history, node, at_s, whole_node=True))
        of_all = of_all + a_fault * history.named_returns.count(node, at_s)
        size = history.gpus_per_node[node]
        return self.gpu_share * ((whole - self.same_share * of_all) / size + self.same_share * own)

    def own_of_gpus(self, history: FaultHistory, gpu: Ints, at_s: Floats, horizon_s: float) -> Floats:
        """What the GPU's own marks add to its node's expected faults."""
        return _of_marks(self.weights, horizon_s, *_gpu_levels(history, gpu, at_s))

    def _span(self, history: FaultHistory, node: Ints, at_s: Floats) -> Floats:
        """Seconds by which the gamma–Poisson rate divides."""
        return self.shape / self.fleet_rate + history.exposure_s(node, at_s)


def fit_recurrence(history: FaultHistory, until_s: float) -> Recurrence:
    """Fit on what was known until a moment; faults that begin later are not looked at.

    The first days of the record are marks alone: of what befell then, the causes were not recorded.
    """
    begun_s = history.since + min(WARM_UP_S, WARM_UP_SHARE * max(until_s - history.since, 0.0))
    known = (history.start <= until_s) & (history.start > begun_s)
    node, at = history.node[known], history.start[known] - _JUST_BEFORE_S
    fleet, own, signs = _levels(history, node, at)
    shape, usual = history.shape(until_s), float(history.fleet_rate(np.array([until_s]))[0])
    own_rate = (shape + history.count(node, at)) / (shape / usual + history.exposure_s(node, at))
    rates = np.column_stack((
        np.ones(len(node)), fleet / np.array(history.fleet.taus_s) / len(history.nodes), own_rate,
        own / np.array(RETURN_TAUS_S), *(level / np.array(SIGN_TAUS_S) for level in signs),
    ))  # fmt: skip
    unit, begin, end = history.in_service(begun_s, until_s)
    everyone = np.zeros(len(unit), dtype=np.int64)
    served = shape / usual + history.exposure_s(unit, begin)
    of_own = (shape + history.count(unit, begin)) * np.log1p((end - begin) / served)
    exposure = np.concatenate((
        [float((end - begin).sum())],
        history.fleet.spent(everyone, begin, end).sum(axis=0) / len(history.nodes), [float(of_own.sum())],
        history.returns.spent(unit, begin, end).sum(axis=0),
        *(marks.spent(unit, begin, end).sum(axis=0) for marks in history.signs.values()),
    ))  # fmt: skip
    base = PRIOR_RATE * BASE_SHARE
    count = len(SIGNS) * len(SIGN_TAUS_S)
    mean = np.concatenate((
        [base, FLEET_PRIOR, OWN_PRIOR], np.full(len(RETURN_TAUS_S), RETURN_PRIOR), np.full(count, SIGN_PRIOR),
    ))  # fmt: skip
    strength = np.concatenate((
        [1 / base, FLEET_STRENGTH, OWN_STRENGTH], np.full(len(RETURN_TAUS_S), RETURN_STRENGTH),
        np.full(count, SIGN_STRENGTH),
    ))  # fmt: skip
    weights = mean.copy()
    for _ in range(ITERATIONS):
        shares = rates * weights
        shares /= np.maximum(shares.sum(axis=1, keepdims=True), 1e-300)
        better = (mean * strength + shares.sum(axis=0)) / (strength + exposure)
        is_done = float(np.max(np.abs(better - weights) / weights)) < PRECISION
        weights = better
        if is_done:
            break
    gpu = history.gpu[known]
    named = float((gpu >= 0).sum())
    gpu_share = (GPU_PRIOR * GPU_STRENGTH + named) / (GPU_STRENGTH + len(gpu))
    same = _same_share(history, weights, node, at, gpu, rates @ weights)
    return Recurrence(weights, gpu_share, same, shape, usual)


def _same_share(history: FaultHistory, weights: Floats, node: Ints, at: Floats, gpu: Ints, rate: Floats) -> float:
    """By likelihood over a grid: on which GPU faults fell that named one."""
    rows = np.flatnonzero(gpu >= 0)
    if not len(rows):
        return SAME_PRIOR
    own = _rate_of_marks(weights, *_gpu_levels(history, gpu[rows], at[rows])) / rate[rows]
    of_all = _rate_of_marks(weights, *_gpu_levels(history, node[rows], at[rows], whole_node=True)) / rate[rows]
    size = history.gpus_per_node[node[rows]]
    s = _SAME_GRID[:, None]
    likelihood = np.log(np.maximum((1 - s * of_all) / size + s * own, 1e-12)).sum(axis=1)
    with np.errstate(divide="ignore"):
        prior = SAME_STRENGTH * (SAME_PRIOR * np.log(_SAME_GRID) + (1 - SAME_PRIOR) * np.log1p(-_SAME_GRID))
    return float(_SAME_GRID[np.argmax(likelihood + prior)])


def _levels(history: FaultHistory, node: Ints, at_s: Floats) -> tuple[Floats, Floats, list[Floats]]:
    """Levels of the fleet's, the node's own and its signs' marks."""
    moments, back = np.unique(at_s, return_inverse=True)
    fleet = history.fleet.level(np.zeros(len(moments), dtype=np.int64), moments)[back]
    return fleet, history.returns.level(node, at_s), [marks.level(node, at_s) for marks in history.signs.values()]


def _gpu_levels(
    history: FaultHistory, unit: Ints, at_s: Floats, *, whole_node: bool = False
) -> tuple[Floats, list[Floats]]:
    """Levels of the marks that name a GPU: of GPUs, or summed over each node."""
    returns = history.named_returns if whole_node else history.gpu_returns
    signs = history.named_signs if whole_node else history.gpu_signs
    return returns.level(unit, at_s), [marks.level(unit, at_s) for marks in signs.values()]


def _weighed(
    weights: Floats, horizon_s: float, fleet: Floats, own: Floats, signs: list[Floats], *, units: int
) -> Floats:
    tau = np.array(FaultHistory.FLEET_TAUS_S)
    return (
        weights[0] * horizon_s
        + (fleet * -np.expm1(-horizon_s / tau) / units) @ weights[1:2]
        + _of_marks(weights, horizon_s, own, signs)
    )


def _of_marks(weights: Floats, horizon_s: float, own: Floats, signs: list[Floats]) -> Floats:
    """Expected faults of marks within a horizon."""
    n, m = len(RETURN_TAUS_S), len(SIGN_TAUS_S)
    out = (own * -np.expm1(-horizon_s / np.array(RETURN_TAUS_S))) @ weights[3 : 3 + n]
    fade = -np.expm1(-horizon_s / np.array(SIGN_TAUS_S))
    for i, level in enumerate(signs):
        out = out + (level * fade) @ weights[3 + n + i * m : 3 + n + (i + 1) * m]
    return out


def _rate_of_marks(weights: Floats, own: Floats, signs: list[Floats]) -> Floats:
    """Faults per second of marks at their moment."""
    n, m = len(RETURN_TAUS_S), len(SIGN_TAUS_S)
    out = (own / np.array(RETURN_TAUS_S)) @ weights[3 : 3 + n]
    for i, level in enumerate(signs):
        out = out + (level / np.array(SIGN_TAUS_S)) @ weights[3 + n + i * m : 3 + n + (i + 1) * m]
    return out
