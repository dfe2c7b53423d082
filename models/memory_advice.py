"""Whether a training job fits a GPU, what would make it fit, and which smaller GPU would do.

Changes are tried one by one, those that cost least speed first; where none is enough, they are added up. Here belongs
the search; the estimate itself stands in `memory.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from models.memory import Estimate, estimate
from models.memory_inputs import GIB, MemoryInputError, Training

CAPACITIES_GIB = (16, 24, 32, 40, 48, 64, 80, 96, 141, 192, 288)  # of data centre GPUs, nominal
MAX_TENSOR_PARALLEL = 8  # GPUs that share NVLink in a node


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a job, or several together.

    Attributes:
        words: What to change, in words.
        total_bytes: Memory of the fullest rank then, bytes.
        fits: Whether that fits.
        training: The job so changed.
    """

    words: str
    total_bytes: float
    fits: bool
    training: Training


@dataclass(frozen=True, slots=True)
class Advice:
    """How a job stands to a GPU's memory.

    Attributes:
        capacity_bytes: Memory of the GPU, bytes.
        fits: Whether the estimate is within it.
        headroom_bytes: Capacity less estimate; negative: what is lacking.
        smallest_gib: Smallest usual GPU that would hold it, GiB; None when none does.
        changes: Where it does not fit: single changes, then a combination if none is enough alone.
    """

    capacity_bytes: int
    fits: bool
    headroom_bytes: float
    smallest_gib: int | None
    changes: tuple[Change, ...]


def advise(found: Estimate, capacity_bytes: int) -> Advice:
    """Compare an estimate with a GPU.

    Args:
        found: The estimate.
        capacity_bytes: Memory of one GPU, bytes.

    Raises:
        MemoryInputError: The capacity is not positive.
    """
    if capacity_bytes <= 0:
        raise MemoryInputError("gpu_memory_bytes", capacity_bytes, "more than 0")
    total = found.total_bytes
    fits = total <= capacity_bytes
    smallest = next((size for size in CAPACITIES_GIB if size * GIB >= total), None)
    changes = () if fits else _changes(found, capacity_bytes)
    return Advice(capacity_bytes, fits, capacity_bytes - total, smallest, changes)


def _changes(found: Estimate, capacity_bytes: int) -> tuple[Change, ...]:
    singles = []
    for words, training in _candidates(found.training):
        total = estimate(training).total_bytes
        if total < found.total_bytes:
            singles.append(Change(words, total, total <= capacity_bytes, training))
    if any(change.fits for change in singles):
        return tuple(singles)
    combined = _combined(found, capacity_bytes)
    return (*singles, combined) if combined is not None else tuple(singles)


def _combined(found: Estimate, capacity_bytes: int) -> Change | None:
    """Changes added up, each time the first that helps, until it fits or nothing helps; None when it never fits."""
    training, total, words = found.training, found.total_bytes, []
    while total > capacity_bytes:
        for name, tried in _candidates(training):
            less = estimate(tried).total_bytes
            if less < 0.99 * total:
                training, total = tried, less
                words.append(name)
                break
        else:
            return None
    return Change("; ".join(_last_of_each(words)), total, True, training)


def _last_of_each(words: list[str]) -> list[str]:
    """Of repeated changes of one setting the last, in the order of their first."""
    latest = {name.split(" ", 1)[0]: name for name in words}
    return list(latest.values())


def _candidates(training: Training) -> Iterator[tuple[str, Training]]:
    """Single changes; those that cost least speed first."""
    changes: list[tuple[str, dict[str, object]]] = []
    if not training.is_flash:
        changes.append(("flash attention", {"is_flash": True}))
    if training.tensor_parallel > 1 and not training.is_sequence_parallel:
        changes.append(("sequence parallelism", {"is_sequence_parallel": True}))
    if training.data_parallel > 1:
        for stage in range(training.zero_stage + 1, 4):
            changes.append((f"ZeRO stage {stage}", {"zero_stage": stage}))
    if training.recomputation == "none" and not training.is_flash:
        changes.append(("recomputation selective", {"recomputation": "selective"}))
    if training.micro_batch > 1:
        fewer = training.micro_batch // 2
        changes.append((f"micro-batch {fewer}", {"micro_batch": fewer}))
    if training.recomputation != "full":
        changes.append(("recomputation full", {"recomputation": "full"}))
    doubled = 2 * training.tensor_parallel
    if doubled <= MAX_TENSOR_PARALLEL:
        changes.append(_regrouped(training, "tensor_parallel", f"tensor-parallel {doubled}"))
    deeper = 2 * training.pipeline_parallel
    changes.append(_regrouped(training, "pipeline_parallel", f"pipeline-parallel {deeper}"))
    if training.optimizer == "adam":
        changes.append(("8-bit Adam", {"optimizer": "adam_8bit"}))
    if training.data_parallel > 1 or training.zero_stage:
        more = 2 * training.data_parallel
        changes.append((f"data-parallel {more}", {"data_parallel": more}))
    for words, change in changes:
        try:
            yield words, dataclasses.replace(training, **change)
        except MemoryInputError:
            continue  # heads or layers do not divide so


def _regrouped(training: Training, name: str, words: str) -> tuple[str, dict[str, object]]:
    """A degree doubled: with half the replicas on as many GPUs where they divide, else on twice as many."""
    change: dict[str, object] = {name: 2 * getattr(training, name)}
    half = training.data_parallel // 2
    if training.data_parallel % 2 == 0 and half % training.expert_parallel == 0:
        return f"{words} and data-parallel {half}", change | {"data_parallel": half}
    return words, change
