"""What of a foreseen bottleneck is acted on: what comes early enough, is not silenced and is not held out.

Here belong the rules of the actionable horizon and of the hold-out. The horizon's length is measured in
`scheduler_hints/nowcast.py`, episodes and their probabilities come from `scheduler_hints/episodes.py`, silences from
`scheduler_hints/silences.py`.
"""

from __future__ import annotations

import hashlib
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


def may_act(hint: Bottleneck) -> bool:
    """Whether a plan may be made for a hint."""
    return hint.is_actionable and hint.silenced_by is None and not hint.is_held_out


def is_drawn(hint_id: str, ratio: float) -> bool:
    """Whether a hint is among the share that is held out: by its id alone, so that it stays so while it lasts."""
    digest = hashlib.blake2b(hint_id.encode(), digest_size=8, person=b"holdout").digest()
    return int.from_bytes(digest) < ratio * 2.0**64


def held_out(hints: Sequence[Bottleneck], ratio: float) -> list[Bottleneck]:
    """The same hints; a share of them, drawn by id, is marked: no plan is made for it.

    What is acted on may not come true for that very reason. These show how many would have.

    Args:
        hints: Any hints.
        ratio: Share of them, 0 to 1.
    """
    return [msgspec.structs.replace(hint, is_held_out=is_drawn(hint.id, ratio)) for hint in hints]
