"""What a training job is asked about when its device memory is estimated: shape of the model, parallelism, precision.

Here belong the inputs, their checks and the bytes that precisions and optimisers take; not the formulas (`memory.py`).
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass
from typing import Any

GIB = 2**30


class MemoryInputError(ValueError):
    """A wrong input of an estimate; the message names it and the valid choices.

    Attributes:
        field: Name of the input.
        value: What was given.
        valid: What would be right.
    """

    def __init__(self, field: str, value: Any, valid: str) -> None:
        near = difflib.get_close_matches(str(value), valid.split(", "), n=1) if isinstance(value, str) else []
        hint = f"; did you mean {near[0]}?" if near else ""
        super().__init__(f"{field}={value!r} is not valid; valid: {valid}{hint}")
        self.field, self.value, self.valid = field, value, valid


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes per parameter, or per element of an activation."""

    parameter: float
    gradient: float
    master: float
    activation: float


# Mixed precision keeps an fp32 master copy beside the parameters: 2 + 2 + 4 bytes, and 8 of Adam's moments (ZeRO,
# Rajbhandari et al. 2020, section 3.1). fp8: parameters in 1 byte; gradients, and activations on the safe side, in 2.
PRECISIONS = {
    "bf16": Bytes(2, 2, 4, 2),
    "fp16": Bytes(2, 2, 4, 2),
    "fp32": Bytes(4, 4, 0, 4),
    "fp8": Bytes(1, 2, 4, 2),
}
# Bytes of state per parameter. In bf16 both moments have two bytes (DeepSeek-AI 2024, "DeepSeek-V3", section 3.3); Lion
# keeps one moment in fp32 (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"). 8-bit: two moments of
# one byte, and one fp32 scale in each block of 2,048 (Dettmers et al. 2022, "8-bit Optimizers via Block-wise
# Quantization").
OPTIMIZERS = {
    "adam": 8.0, "adam_bf16": 4.0, "adam_8bit": 2 * (1 + 4 / 2048), "lion": 4.0, "sgd": 0.0, "sgd_momentum": 4.0
}  # fmt: skip
# Frozen parameters under adapters. NF4: 4 bits each, and of quantised constants 8 bits a block of 64 and 32 bits for
# 256 of those blocks, 0.127 bits (Dettmers et al. 2023, "QLoRA", section 3).
BASES = {"same": None, "nf4": (4 + 8 / 64 + 32 / (64 * 256)) / 8}
LORA_TARGETS = ("qv", "attention", "all")
ARCHITECTURES = ("gpt", "llama")
RECOMPUTATIONS = ("none", "selective", "full")
ZERO_STAGES = (0, 1, 2, 3)
GRADIENTS = ("same", "fp32")
LIMITS = {
    "layers": (1, 10_000), "hidden": (1, 1_000_000), "heads": (1, 100_000), "kv_heads": (1, 100_000),
    "ffn": (1, 10_000_000), "vocab": (1, 10_000_000), "seq": (1, 100_000_000), "micro_batch": (1, 100_000),
    "tensor_parallel": (1, 4_096), "pipeline_parallel": (1, 4_096), "data_parallel": (1, 1_000_000),
    "expert_parallel": (1, 100_000), "virtual_stages": (1, 1_000), "experts": (1, 100_000),
    "experts_per_token": (1, 1_000), "microbatches": (1, 1_000_000), "context_parallel": (1, 4_096),
    "lora_rank": (1, 100_000),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Training:
    """A training job of a transformer whose memory is asked for.

    Attributes:
        layers: Transformer layers.
        hidden: Width of the residual stream.
        heads: Attention heads.
        vocab: Entries of the vocabulary, padding included.
        seq: Tokens of a sequence.
        micro_batch: Sequences that a rank works on at once.
        kv_heads: Heads of keys and values; None: as many as `heads`.
        ffn: Width of the feed-forward layer (of one expert); None: 4 × `hidden` for gpt, 8/3 × `hidden` for llama.
        architecture: `gpt` (LayerNorm, GELU, biases, dropout, learned positions, tied embeddings) or `llama` (RMSNorm,
            SwiGLU, no biases, no dropout, rotary positions, separate output layer).
        is_tied: Whether input and output embeddings are one matrix; None: as the architecture has it.
        precision: Of parameters and activations, one of `PRECISIONS`.
        gradient_precision: `same` as `precision` says, or `fp32` as Megatron-LM accumulates them.
        optimizer: One of `OPTIMIZERS`.
        tensor_parallel: Ranks that share a layer.
        is_sequence_parallel: Whether they share what tensor parallelism leaves whole, too.
        pipeline_parallel: Stages of the pipeline.
        virtual_stages: Chunks of layers per stage (interleaved schedule); 1: plain 1F1B.
        microbatches: Microbatches of a step; None: at least as many as stages.
        data_parallel: Replicas.
        zero_stage: What replicas share: 1 optimiser states, 2 also gradients, 3 also parameters (FSDP full shard).
        recomputation: `none`, `selective` (the core of attention) or `full` (whole layers).
        is_flash: Whether attention never stores its s × s matrices.
        experts: Experts per layer; 1: dense.
        experts_per_token: Experts that a token visits.
        expert_parallel: Ranks, out of the replicas, that share the experts.
        context_parallel: Ranks that share each sequence.
        lora_rank: Rank of LoRA adapters: all else is frozen. None: everything is trained.
        lora_targets: What has adapters: `qv` (queries and values), `attention` (and keys, and the projection) or `all`
            (and the feed-forward).
        base_precision: Of the frozen parameters: `same` as `precision` says, or `nf4` (QLoRA).
        allocator_ratio: Memory that the allocator holds and cannot use, as a share of all tensors.
        context_bytes: Memory that the runtime takes before the first tensor, bytes.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    micro_batch: int = 1
    kv_heads: int | None = None
    ffn: int | None = None
    architecture: str = "llama"
    is_tied: bool | None = None
    precision: str = "bf16"
    gradient_precision: str = "same"
    optimizer: str = "adam"
    tensor_parallel: int = 1
    is_sequence_parallel: bool = False
    pipeline_parallel: int = 1
    virtual_stages: int = 1
    microbatches: int | None = None
    data_parallel: int = 1
    zero_stage: int = 0
    recomputation: str = "none"
    is_flash: bool = True
    experts: int = 1
    experts_per_token: int = 1
    expert_parallel: int = 1
    context_parallel: int = 1
    lora_rank: int | None = None
    lora_targets: str = "qv"
    base_precision: str = "same"
    allocator_ratio: float = 0.05
    context_bytes: int = 1343 * 2**20

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            MemoryInputError: An input is out of range, unknown, or does not divide what it must.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in LIMITS and value is not None:
                low, high = LIMITS[field.name]
                if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                    raise MemoryInputError(field.name, value, f"an integer from {low:,} to {high:,}")
        for name, known in (
            ("architecture", ARCHITECTURES), ("precision", tuple(PRECISIONS)), ("optimizer", tuple(OPTIMIZERS)),
            ("recomputation", RECOMPUTATIONS), ("zero_stage", ZERO_STAGES), ("gradient_precision", GRADIENTS),
            ("lora_targets", LORA_TARGETS), ("base_precision", tuple(BASES)),
        ):  # fmt: skip
            if getattr(self, name) not in known or isinstance(getattr(self, name), bool):
                raise MemoryInputError(name, getattr(self, name), ", ".join(map(str, known)))
        if not 0 <= self.allocator_ratio <= 1:
            raise MemoryInputError("allocator_ratio", self.allocator_ratio, "a share from 0 to 1")
        if not 0 <= self.context_bytes <= 64 * GIB:
            raise MemoryInputError("context_bytes", self.context_bytes, f"bytes from 0 to {64 * GIB}")
        self._check_divisions()

    def _check_divisions(self) -> None:
        for whole, part in (
            ("hidden", "heads"), ("heads", "kv_heads"), ("heads", "tensor_parallel"), ("experts", "expert_parallel"),
            ("data_parallel", "expert_parallel"), ("seq", "context_parallel"),
        ):  # fmt: skip
            total, divisor = getattr(self, whole), getattr(self, part)
            if divisor is not None and total % divisor:
                raise MemoryInputError(part, divisor, f"a divisor of {whole} ({total})")
        if self.pipeline_parallel * self.virtual_stages > self.layers:
            most = max(1, self.layers // self.virtual_stages)
            raise MemoryInputError(
                "pipeline_parallel", self.pipeline_parallel, f"at most {most} for {self.layers} layers"
            )
        if self.virtual_stages > 1 and self.pipeline_parallel == 1:
            raise MemoryInputError("virtual_stages", self.virtual_stages, "1 where there is one stage")
        if self.experts_per_token > self.experts:
            raise MemoryInputError("experts_per_token", self.experts_per_token, f"at most experts ({self.experts})")
        if self.lora_rank is None:
            for name, default in (("lora_targets", "qv"), ("base_precision", "same")):
                if getattr(self, name) != default:
                    raise MemoryInputError(name, getattr(self, name), f"{default} without lora_rank")
        elif self.lora_rank > self.hidden:
            raise MemoryInputError("lora_rank", self.lora_rank, f"at most hidden ({self.hidden})")

    @property
    def kv(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """Width of the feed-forward layer."""
        if self.ffn is not None:
            return self.ffn
        return 4 * self.hidden if self.architecture == "gpt" else round(8 * self.hidden / 3)

    @property
    def has_one_embedding(self) -> bool:
        """Whether input and output embeddings are one matrix."""
        return self.architecture == "gpt" if self.is_tied is None else self.is_tied

    @property
    def gpus(self) -> int:
        """Ranks in all."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    @property
    def replicas(self) -> int:
        """Ranks with the same parameters, which ZeRO shares among: those that share a sequence are such, too."""
        return self.data_parallel * self.context_parallel


_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30,
          "tib": 2**40}  # fmt: skip


def parse_size(text: str) -> int:
    """Bytes of a size as `80GiB`, `80GB` or `81559MiB`.

    Raises:
        MemoryInputError: It is none, or has no unit.
    """
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]+)\s*", text, re.ASCII)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or not 0 < float(found[1]) * unit <= 2**50:
        raise MemoryInputError("size", text, "a number with a unit, as 80GiB, 80GB or 81559MiB")
    return round(float(found[1]) * unit)
