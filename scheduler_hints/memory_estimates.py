"""Memory estimates on request: what may be asked, and the answer. How it is estimated stands in `models/memory.py`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from models.memory import estimate
from models.memory_advice import Advice, advise
from models.memory_inputs import MemoryInputError, Training
from scheduler_hints.errors import InvalidBodyError, decode_body

_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]


class MemoryRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A training job of a transformer. What is left out is as the architecture and the docs say."""

    layers: _Count
    hidden: _Count
    heads: _Count
    vocab: _Count
    seq: _Count
    micro_batch: _Count = 1
    kv_heads: _Count | None = None
    ffn: _Count | None = None
    architecture: Literal["gpt", "llama"] = "llama"
    is_tied: bool | None = None
    precision: Literal["bf16", "fp16", "fp32", "fp8"] = "bf16"
    gradient_precision: Literal["same", "fp32"] = "same"
    optimizer: Literal["adam", "adam_bf16", "adam_8bit", "lion", "sgd", "sgd_momentum"] = "adam"
    tensor_parallel: _Count = 1
    is_sequence_parallel: bool = False
    pipeline_parallel: _Count = 1
    virtual_stages: _Count = 1
    microbatches: _Count | None = None
    data_parallel: _Count = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    recomputation: Literal["none", "selective", "full"] = "none"
    is_flash: bool = True
    experts: _Count = 1
    experts_per_token: _Count = 1
    expert_parallel: _Count = 1
    context_parallel: _Count = 1
    lora_rank: _Count | None = None
    lora_targets: Literal["qv", "attention", "all"] = "qv"
    base_precision: Literal["same", "nf4"] = "same"
    allocator_ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.05
    context_bytes: Annotated[int, msgspec.Meta(ge=0, le=64 * 2**30)] = 1343 * 2**20
    gpu_memory_bytes: Annotated[int, msgspec.Meta(ge=2**20, le=2**50)] | None = None


class MemoryLine(msgspec.Struct, frozen=True):
    """One part of the memory of the fullest rank, with the formula's source."""

    name: str
    bytes: int
    source: str


class MemoryChange(msgspec.Struct, frozen=True):
    """What could be changed, and the memory of the fullest rank then."""

    change: str
    total_bytes: int
    gpus: int
    fits: bool


class MemoryEstimate(msgspec.Struct, frozen=True):
    """Device memory of the fullest rank; `fits` and what follows it only where `gpu_memory_bytes` was given.

    `requested_bytes` is the memory of all GPUs then, `estimated_ratio` the share of a GPU's that is needed.
    """

    parameters: int
    rank_parameters: int
    gpus: int
    stage: int
    total_bytes: int
    model_state_bytes: int
    lines: list[MemoryLine]
    smallest_gpu_gib: int | None
    gpu_memory_bytes: int | None
    fits: bool | None
    headroom_bytes: int | None
    changes: list[MemoryChange]
    requested_bytes: int | None = None
    estimated_ratio: float | None = None


_decoder = msgspec.json.Decoder(MemoryRequest)


def decode_memory_request(body: bytes) -> MemoryRequest:
    """Decode a body.

    Raises:
        BadRequestError: It is not JSON.
        InvalidBodyError: It has the wrong shape; the message names the field.
    """
    return decode_body(_decoder, body, {"request": MemoryRequest})


def answer_memory(request: MemoryRequest) -> MemoryEstimate:
    """Estimate the memory of a request.

    Raises:
        InvalidBodyError: Values do not go together, as heads that tensor parallelism does not divide.
    """
    asked = msgspec.structs.asdict(request)
    capacity = asked.pop("gpu_memory_bytes")
    try:
        training = Training(**asked)
    except MemoryInputError as error:
        detail = {"parameter": error.field, "value": error.value, "valid": error.valid}
        raise InvalidBodyError("invalid_body", str(error), detail) from None
    return memory_answer(training, capacity)


def memory_answer(training: Training, capacity_bytes: int | None) -> MemoryEstimate:
    """The estimate of a job, compared with a GPU where one is given.

    Args:
        training: The job.
        capacity_bytes: Memory of one GPU, bytes.
    """
    found = estimate(training)
    advice: Advice = advise(found, capacity_bytes or 2**50)
    is_asked = capacity_bytes is not None
    return MemoryEstimate(
        parameters=found.parameters,
        rank_parameters=round(found.rank_parameters),
        gpus=training.gpus,
        stage=found.stage,
        total_bytes=round(found.total_bytes),
        model_state_bytes=round(found.model_state_bytes),
        lines=[MemoryLine(line.name, round(line.bytes), line.source) for line in found.lines],
        smallest_gpu_gib=advice.smallest_gib,
        gpu_memory_bytes=capacity_bytes,
        fits=advice.fits if is_asked else None,
        headroom_bytes=round(advice.headroom_bytes) if is_asked else None,
        changes=[
            MemoryChange(change.words, round(change.total_bytes), change.training.gpus, change.fits)
            for change in advice.changes
        ],
        requested_bytes=training.gpus * capacity_bytes if capacity_bytes is not None else None,
        estimated_ratio=found.total_bytes / capacity_bytes if capacity_bytes is not None else None,
    )
