"""What could be done about a hint, in one word for programs and in a sentence for people, and who has to know of it.

Here belong the rules by class, scope, cause and size; no probabilities and no places.
"""

from __future__ import annotations

from typing import NamedTuple

from scheduler_hints.schema import Action, Severity

WIDE = frozenset({"rack", "pod", "cluster"})  # what touches many jobs at once
PAGE_PROBABILITY = 0.9  # a wide cause pages from this P on, or when it is set
PAGE_NODES = 2  # and when it is seen on so many nodes
PAGE_GPUS = 128  # a whole gang of so many GPUs pages
PAGE_GANG_RATIO = 0.9  # when this share of it is touched
PAGE_AFTER_S = 600.0  # and has been for this long: what passes by itself by then needs nobody
TICKET_AFTER_S = 300.0  # a condition that has been set for this long is worth a look in working hours
# Classes that a person in the machine room or at the switches can do something about.
FACILITY = frozenset({"thermal_throttle", "power_throttle", "fabric_congestion"})


class Advice(NamedTuple):
    """An action and the sentence that goes with it."""

    action: Action
    words: str


def advise(name: str, scope: str, cause: str, *, is_active: bool, has_job: bool) -> Advice:
    """What a scheduler or an operator could do.

    Args:
        name: Class of the hint.
        scope: Its scope.
        cause: Kind of its likeliest cause.
        is_active: The condition is set.
        has_job: A job is touched.
    """
    if name == "shortage":
        return Advice("reserve", "Hold free nodes for the largest waiting job, or let short jobs fill gaps.")
    if not has_job:
        return Advice("none", "No job is touched: place none there for now.")
    if cause == "job":
        return _of_job(name)
    if name in ("memory_exhaustion", "host_memory"):
        return Advice("retry_elsewhere", "Checkpoint now; the job may go on with more memory elsewhere.")
    if scope in WIDE:
        if name in ("thermal_throttle", "power_throttle"):
            told = "cooling" if name == "thermal_throttle" else "power"
            return Advice("throttle", f"Lower power there, start nothing new, and have the {told} looked at.")
        return Advice("throttle", "Start no large job there until it clears, and have the network looked at.")
    if name in ("thermal_throttle", "power_throttle", "straggler") and is_active:
        return Advice("drain_after_job", "Let the job end, then drain the node and have it looked at.")
    if name in ("nvlink_saturation", "fabric_congestion"):
        return Advice("reserve", "Hold a spare node: its links slow every rank of the job.")
    return Advice("reserve", "Hold a spare node for the job.")


def _of_job(name: str) -> Advice:
    """The job itself is the likeliest cause: other nodes would not help it."""
    if name in ("memory_exhaustion", "host_memory"):
        return Advice("retry_elsewhere", "The job grows by itself: checkpoint now, and start again with less a rank.")
    if name in ("thermal_throttle", "power_throttle"):
        return Advice("throttle", "The job's own load does it: lower its power limit.")
    if name == "straggler":
        return Advice("none", "The job's own work is uneven: tell its owner.")
    return Advice("none", "The job's own traffic does it: spare nodes would not help; tell its owner.")


def severity(
    name: str,
    scope: str,
    *,
    probability: float,
    is_active: bool,
    active_for_s: float,
    nodes: int,
    gpus: int,
    gang_ratio: float,
) -> Severity:
    """Who has to know: a person now (`page`), a person in working hours (`ticket`), programs alone (`info`).

    Args:
        name: Class of the hint.
        scope: Its scope.
        probability: P within the last horizon, 1 when set.
        is_active: The condition is set.
        active_for_s: For how long it has been set, s.
        nodes: Nodes touched.
        gpus: GPUs touched.
        gang_ratio: Share of the job's GPUs that is touched, for the scope `job`.
    """
    if name in FACILITY and scope in WIDE and nodes >= PAGE_NODES and (is_active or probability >= PAGE_PROBABILITY):
        return "page"
    if scope == "job" and is_active and gpus >= PAGE_GPUS and gang_ratio >= PAGE_GANG_RATIO:
        return "page" if active_for_s >= PAGE_AFTER_S else "ticket"
    if is_active and (scope in WIDE or active_for_s >= TICKET_AFTER_S):
        return "ticket"
    return "info"
