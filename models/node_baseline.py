"""Which rule speaks for nodes until a model has earned its place: climatology, or the node's own gamma–Poisson rate.

Here belongs that choice by what came of past weeks; the rules stand in `models/node_failure.py`.
"""

from __future__ import annotations

import numpy as np

from models.fault_history import FaultHistory
from models.node_failure import HORIZONS_S, baseline

WEEK_S = 7 * 86_400.0
LOOKS = 26  # weeks back
MIN_FAULTS = 20  # faults that must have followed looks, or nothing is told from them
MARGIN = 0.01  # log loss by which the node's own rate must be ahead: fleets of like nodes make it lose
CLIMATOLOGY, OWN_RATE = "climatology", "own_rate"
_JUDGED = ("p_24h", "p_7d")


def spoken_baseline(history: FaultHistory, at_s: float) -> str:
    """The rule that the outcomes released by a moment speak for.

    Both rules are asked at the ends of past weeks on what was known then, of nodes that were in service; what followed
    within a day and a week is known by `at_s`.

    Args:
        history: Faults; what lies after `at_s` changes nothing.
        at_s: The moment, seconds since 1970.

    Returns:
        `climatology` or `own_rate`.
    """
    moments = at_s - WEEK_S * np.arange(1, LOOKS + 1)
    moments = moments[moments >= history.since + WEEK_S]
    nodes = np.arange(len(history.nodes))
    losses = dict.fromkeys((CLIMATOLOGY, OWN_RATE), np.zeros(len(_JUDGED)))
    faults = 0
    for moment in moments:
        at = np.full(len(nodes), moment)
        up = nodes[~history.is_down(nodes, at)]
        at = at[: len(up)]
        wait_s = history.next_start_s(up, at)
        came = np.stack([wait_s <= HORIZONS_S[name] for name in _JUDGED], axis=1)
        faults += int(came[:, -1].sum())
        for name in losses:
            told = baseline(name, history, up, at)[:, [list(HORIZONS_S).index(column) for column in _JUDGED]]
            p = np.clip(told, 1e-9, 1 - 1e-9)
            losses[name] = losses[name] - np.where(came, np.log(p), np.log1p(-p)).sum(axis=0)
    if faults < MIN_FAULTS:
        return CLIMATOLOGY
    ratio = float(np.mean(losses[OWN_RATE] / losses[CLIMATOLOGY]))
    return OWN_RATE if ratio < 1 - MARGIN else CLIMATOLOGY
