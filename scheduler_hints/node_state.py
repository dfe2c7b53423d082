"""What a scheduler's word for the state of a node means for hints: idle, busy, reserved or out.

Here belongs the reading of state words alone (Slurm's `sinfo` and `scontrol` spellings, plain words of other sources);
not how they are fetched, and no decision about a node.
"""

from __future__ import annotations

import functools
import re
from typing import Literal

Condition = Literal["idle", "busy", "reserved", "out"]

_OUT = re.compile(
    r"drain|drng|down|fail|maint|error|unk|no_?respon|not_?respon|perfctrs|power|pow_|reboot|inval|future|block|cordon"
)
_RESERVED = re.compile(r"^(resv|reserved?)$")
_BUSY = re.compile(r"^(alloc|allocated|mix|mixed|comp|completing|busy|running|used)$")
_IDLE = re.compile(r"^(idle|free|plnd|planned|cloud)$")
# sinfo's marks: not responding, powered down or saving, powering up or down, in a maintenance reservation, reboot.
_OUT_MARKS = "*~#!%$@^"
_PLANNED_MARK = "-"


@functools.lru_cache(maxsize=4096)
def node_condition(state: str | None) -> Condition:
    """What a node can be used for.

    Args:
        state: As the scheduler prints it: `idle`, `ALLOCATED+DRAIN`, `mixed-`, `idle*`, `resv`, … None when unknown.

    Returns:
        `idle` free for a job (also when planned for one), `busy` runs jobs, `reserved` idle inside a reservation,
        `out` for everything that runs no new job and for every word that is not known.
    """
    text = (state or "").strip().lower()
    if not text or text[-1] in _OUT_MARKS:
        return "out"
    words = [word for word in re.split(r"[+,\s]+", text.rstrip(_PLANNED_MARK)) if word]
    if any(_OUT.search(word) for word in words):
        return "out"
    if any(_BUSY.match(word) for word in words):
        return "busy"
    if any(_RESERVED.match(word) for word in words):
        return "reserved"
    return "idle" if words and all(_IDLE.match(word) for word in words) else "out"


def is_planned(state: str | None) -> bool:
    """The scheduler has planned a waiting job on this node."""
    text = (state or "").strip().lower()
    return text.endswith(_PLANNED_MARK) or bool(re.search(r"\b(plnd|planned)\b", text))
