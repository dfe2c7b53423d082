"""Which models jobs train, by their names: what lets the estimator speak of jobs that have been submitted.

Here belong descriptions and what they say of a job; not the formulas (`memory.py`), not the reading of files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import polars as pl

from models.memory import estimate
from models.memory_inputs import MemoryInputError, Training

_INPUTS = tuple(field.name for field in dataclasses.fields(Training))
_NEEDED = tuple(field.name for field in dataclasses.fields(Training) if field.default is dataclasses.MISSING)
_PATTERNS = ("name", "user")


class DescriptionError(ValueError):
    """A wrong description; the message names it and what would be right."""


@dataclass(frozen=True, slots=True)
class Description:
    """What jobs of a name train.

    Attributes:
        name: Pattern of their names, `*` and `?` as in file names, any case.
        user: Pattern of their users; None: anyone's.
        inputs: Inputs of `Training`. Without `data_parallel` it follows from the GPUs of a job.
    """

    name: str
    user: str | None
    inputs: tuple[tuple[str, Any], ...]

    def is_of(self, name: str | None, user: str | None) -> bool:
        """Whether a job is one of these."""
        if name is None or not fnmatchcase(name.lower(), self.name.lower()):
            return False
        return self.user is None or fnmatchcase(user or "", self.user)

    def estimate_bytes(self, gpus: int) -> float | None:
        """Device memory of the fullest GPU of a job on so many GPUs, bytes; None where the model does not fit them."""
        return _bytes(self.inputs, gpus)


@lru_cache(maxsize=10_000)
def _bytes(inputs: tuple[tuple[str, Any], ...], gpus: int) -> float | None:
    asked = dict(inputs)
    shared = asked.get("tensor_parallel", 1) * asked.get("pipeline_parallel", 1) * asked.get("context_parallel", 1)
    asked.setdefault("data_parallel", gpus // shared)
    if asked["data_parallel"] * shared != gpus:
        return None
    try:
        return float(estimate(Training(**asked)).total_bytes)
    except MemoryInputError:  # as experts that these replicas cannot share
        return None


def descriptions_of(data: Mapping[str, Any]) -> tuple[Description, ...]:
    """Descriptions from tables `[[model]]`, each with `name`, perhaps `user`, and inputs of `Training`.

    Raises:
        DescriptionError: There is none, or one has a wrong field or value.
    """
    blocks = data.get("model")
    if set(data) != {"model"} or not isinstance(blocks, list) or not blocks:
        raise DescriptionError(f"tables {', '.join(data) or 'of no name'}; valid: one or more [[model]]")
    return tuple(_description(number, block) for number, block in enumerate(blocks, 1))


def _description(number: int, block: Any) -> Description:
    where = f"[[model]] number {number}"
    if not isinstance(block, Mapping):
        raise DescriptionError(f"{where} is no table")
    odd = sorted(set(block) - set(_INPUTS) - set(_PATTERNS))
    if odd:
        raise DescriptionError(f"{where}: no field {odd[0]!r}; valid: {', '.join((*_PATTERNS, *_INPUTS))}")
    missing = [name for name in ("name", *_NEEDED) if name not in block]
    if missing:
        raise DescriptionError(f"{where} has no {', '.join(missing)}")
    for name in _PATTERNS:
        if not isinstance(block.get(name, "*"), str) or not block.get(name, "*"):
            raise DescriptionError(f"{where}: {name}={block[name]!r} is not valid; valid: a pattern, as llama-*")
    inputs = {name: value for name, value in block.items() if name in _INPUTS}
    try:
        Training(**({"data_parallel": inputs.get("expert_parallel", 1)} | inputs))
    except (MemoryInputError, TypeError) as error:
        raise DescriptionError(f"{where}: {error}") from None
    return Description(block["name"], block.get("user"), tuple(sorted(inputs.items())))


def with_estimates(of_jobs: pl.DataFrame, descriptions: Sequence[Description]) -> pl.DataFrame:
    """Jobs with what their models need.

    Args:
        of_jobs: As `features.memory_use.memory_of_jobs` gives them: `name`, `user`, `gpus`, `peak_bytes`.
        descriptions: Of a job the first that is of it speaks.

    Returns:
        The rows with `is_described` and `estimated_bytes` (of the fullest GPU; null where no description is of the job,
        or its GPUs do not suit the model).
    """
    keys = of_jobs.select("name", "user", "gpus").unique()
    rows = []
    for name, user, gpus in keys.iter_rows():
        found = next((one for one in descriptions if one.is_of(name, user)), None)
        rows.append((name, user, gpus, found is not None, None if found is None else found.estimate_bytes(int(gpus))))
    types = {**keys.schema, "is_described": pl.Boolean, "estimated_bytes": pl.Float64}
    told = pl.DataFrame(rows, schema=types, orient="row")
    return of_jobs.join(told, on=["name", "user", "gpus"], how="left", nulls_equal=True, maintain_order="left")
