"""What of a foreseen bottleneck comes early enough to be acted on, and what is for people only.

Here belongs the rule of the actionable horizon; its length is measured in `scheduler_hints/nowcast.py`, episodes and
their probabilities come from `scheduler_hints/episodes.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from scheduler_hints.schema import HORIZONS_S, Bottleneck


def offered_horizons(actionable_s: float | None) -> tuple[int, ...]:
    """Horizons that leave a scheduler time to act, seconds; all of them while the time it needs is not known."""
    return tuple(horizon_s for horizon_s in HORIZONS_S if actionable_s is None or horizon_s >= actionable_s)


def offered(
    hints: Sequence[Bottleneck],
    actionable_s: float | None,
    publish_probability: float,
    publish_by_class: Mapping[str, float] | None = None,
) -> list[Bottleneck]:
    """Hints as they are offered to schedulers.

    Args:
        hints: As of `Episodes.update`, with probabilities of all horizons.
        actionable_s: Time from a sample to a scheduler's act, seconds; None: not known.
        publish_probability: A horizon counts as reached from this probability on.
        publish_by_class: The same of classes that have one of their own.

    Returns:
        The same hints in the same order. Probabilities of shorter horizons stand in `too_short`, and `horizon_s` and
        `probability` are of the shortest horizon that is offered and reached. Where no horizon is long enough, a hint
        whose condition is not set yet is not `is_actionable`, and only people are shown it.
    """
    longer = offered_horizons(actionable_s)
    if len(longer) == len(HORIZONS_S):
        return list(hints)
    own = publish_by_class or {}
    return [_offered(hint, longer, own.get(hint.bottleneck_class, publish_probability)) for hint in hints]


def _offered(hint: Bottleneck, longer: tuple[int, ...], publish_probability: float) -> Bottleneck:
    kept = {str(horizon_s): hint.probabilities[str(horizon_s)] for horizon_s in longer}
    short = {name: p for name, p in hint.probabilities.items() if name not in kept}
    horizon_s, probability = hint.horizon_s, hint.probability
    if not longer:
        horizon_s = HORIZONS_S[-1]
        probability = hint.probabilities[str(horizon_s)]
    elif horizon_s not in longer:
        last = kept[str(longer[-1])]
        horizon_s = next(h for h in longer if kept[str(h)] >= min(publish_probability, last))
        probability = kept[str(horizon_s)]
    return msgspec.structs.replace(
        hint,
        horizon_s=horizon_s,
        probability=probability,
        probabilities=kept,
        too_short=short,
        is_actionable=bool(longer) or hint.is_active,
    )
