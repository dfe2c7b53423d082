"""Alarms raised on forecasts of events: whether they were right, how early, and what they bring.

Here belongs the walk through a test that is given; not scores of probabilities (`models/event_scores.py`). An alarm
claims an onset within the longest horizon and stands until that is over or the onset has come; lead time counts from
the moment it was raised.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.event_scores import DAY_S, Judged

Floats = NDArray[np.float64]

WORTHS = (1, 2, 5, 10, 20, 50, 100, 200)  # false alarms that one onset caught in time is worth


@dataclass(frozen=True, slots=True)
class AlarmCount:
    """Alarms of one forecaster at one threshold.

    Attributes:
        raised, right: Alarms whose outcome is known, and those that an onset followed within the longest horizon.
        onsets, caught: Onsets, and those at which an alarm stood.
        leads_s: Seconds of warning of each onset caught.
    """

    raised: int
    right: int
    onsets: int
    caught: int
    leads_s: Floats


def count_alarms(judged: Judged, name: str, threshold: float) -> AlarmCount:
    """Walk through the test, raising an alarm whenever the forecast for the longest horizon reaches a threshold."""
    horizon_s = judged.horizons_s[-1]
    picked = np.flatnonzero(judged.given[name][:, -1] >= threshold)
    picked = picked[np.lexsort((judged.at_s[picked], judged.unit[picked]))]
    by_onset = np.lexsort((judged.onset_s, judged.onset_unit))
    onset_unit, onset_s = judged.onset_unit[by_onset], judged.onset_s[by_onset]
    raised = right = 0
    leads: list[float] = []
    for unit in np.unique(judged.unit[picked]):
        mine = picked[judged.unit[picked] == unit]
        at, known = judged.at_s[mine], judged.known[mine, -1]
        onsets = onset_s[onset_unit == unit]
        i = 0
        while i < len(at):
            place = int(np.searchsorted(onsets, at[i], side="right"))
            comes = place < len(onsets) and onsets[place] - at[i] <= horizon_s
            if comes:
                leads.append(float(onsets[place] - at[i]))
            raised += bool(comes or known[i])
            right += bool(comes)
            until = onsets[place] if comes else at[i] + horizon_s
            i = max(i + 1, int(np.searchsorted(at, until, side="left")))
    return AlarmCount(raised, right, len(onset_s), len(leads), np.array(leads))


def unit_days(judged: Judged) -> float:
    """Days of all units together that the test watched: rows × their usual spacing."""
    order = np.lexsort((judged.at_s, judged.unit))
    unit, at = judged.unit[order], judged.at_s[order]
    gaps = np.diff(at)[np.diff(unit) == 0]
    return len(at) * float(np.median(gaps)) / DAY_S if len(gaps) else 0.0


def operating_points(judged: Judged) -> list[dict[str, float | str]]:
    """Alarms of each forecaster when an onset caught in time is worth so many false alarms.

    The threshold follows from the worth alone, 1 ÷ (1 + worth): it is not chosen on the test. Benefit is worth × onsets
    caught − false alarms, per unit and day, in false alarms; never alarming scores 0.

    Returns:
        Rows `worth`, `threshold`, `forecaster`, `alarms`, `precision`, `recall`, `lead_s` (median),
        `false_per_unit_day`, `benefit_per_unit_day`.
    """
    days = max(unit_days(judged), 1e-9)
    out: list[dict[str, float | str]] = []
    for worth in WORTHS:
        for who in judged.given:
            n = count_alarms(judged, who, 1 / (1 + worth))
            false = n.raised - n.right
            out.append(
                {
                    "worth": worth, "threshold": 1 / (1 + worth), "forecaster": who, "alarms": n.raised,
                    "precision": n.right / n.raised if n.raised else float("nan"),
                    "recall": n.caught / n.onsets if n.onsets else float("nan"),
                    "lead_s": float(np.median(n.leads_s)) if len(n.leads_s) else float("nan"),
                    "false_per_unit_day": false / days, "benefit_per_unit_day": (worth * n.caught - false) / days,
                }
            )  # fmt: skip
    return out
