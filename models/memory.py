"""Device memory of a training job per rank, line by line, from published formulas.

Sources, each line's beside it in `estimate`:

- Model states: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section
  3.1 and figure 1 (2 + 2 + K bytes per parameter, K = 12 for Adam in mixed precision; stages 1 to 3 divide by the
  replicas).
- Activations: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4
  with table 2: s·b·h·(34 + 5·a·s/h) bytes a layer, what tensor and sequence parallelism divide of it, and what the
  first stage of a 1F1B or interleaved pipeline holds. For other shapes the same tensors are counted one by one.
- Sequences shared by context parallelism: Liu et al. 2023, "Ring Attention with Blockwise Transformers"; all that is
  by token is divided, model states are as of so many more replicas (Megatron-LM reckons 6 + 12/(d·c) bytes).
- Adapters: Hu et al. 2022, "LoRA"; Dettmers et al. 2023, "QLoRA". Only they have gradients and optimiser states. Of
  activations the same are counted as of full training: frozen matrices need fewer, which is not relied on.
- Parameters: `memory_parameters.py`.

Here belong the formulas. Inputs and their checks: `memory_inputs.py`; what would make a job fit: `memory_advice.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.memory_inputs import BASES, OPTIMIZERS, PRECISIONS, Training
from models.memory_parameters import Weights, adapters_of, layers_of, parameters, weights_of

NCCL_BUFFER_BYTES = 4 * 2**20  # NCCL_BUFFSIZE, NCCL's documentation of environment variables
NCCL_CHANNELS = 16  # of a communicator, assumed; each has a buffer to its ring's next and from its last
FP32 = 4
_SOURCES = {"adam_8bit": "Dettmers et al. 2022", "adam_bf16": "DeepSeek-AI 2024", "lion": "Chen et al. 2023"}


@dataclass(frozen=True, slots=True)
class Line:
    """One part of an estimate.

    Attributes:
        name: What takes the memory.
        bytes: How much, bytes on one rank.
        source: The formula and where it is from.
    """

    name: str
    bytes: float
    source: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """Device memory of the fullest rank.

    Attributes:
        training: What was asked.
        stage: Pipeline stage of that rank, from 0.
        parameters: Parameters of the whole model.
        rank_parameters: Parameters of that rank before replicas share anything.
        lines: Parts of the memory; their sum is the estimate.
    """

    training: Training
    stage: int
    parameters: int
    rank_parameters: float
    lines: tuple[Line, ...]

    @property
    def total_bytes(self) -> float:
        """Sum of all lines, bytes."""
        return sum(line.bytes for line in self.lines)

    @property
    def model_state_bytes(self) -> float:
        """Parameters, gradients and optimiser with its master copy, bytes: what the ZeRO paper counts."""
        names = ("frozen parameters", "parameters", "gradients", "master copy", "optimiser states")
        return sum(line.bytes for line in self.lines if line.name in names)

    def bytes_of(self, name: str) -> float:
        """Bytes of one line; 0 where there is none of that name."""
        return sum(line.bytes for line in self.lines if line.name == name)


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes that one layer holds of one microbatch from forward to backward, on one rank.

    Attributes:
        kept: Without any recomputation.
        attention_core: Of these, what selective recomputation drops.
        layer_input: What full recomputation keeps.
    """

    kept: float
    attention_core: float
    layer_input: float


def layer_activations(training: Training) -> LayerActivations:
    """Activations of one layer.

    Korthikanti et al. 2022, section 4.1 and table 2, bytes where an element has two: norms take 4·s·b·h; attention
    11·s·b·h (the input 2, queries and keys 4, values 2, input of the projection 2, its dropout mask 1) and 5·a·s²·b
    (softmax 2, its dropout mask 1, its output 2); the feed-forward 19·s·b·h (input 2, before and after GELU 8 + 8,
    dropout mask 1). That is s·b·h·(34 + 5·a·s/h). Tensor parallelism divides all but norms, both inputs and both masks
    (10·s·b·h); sequence parallelism divides those. Keys and values shrink with `kv_heads`, and the feed-forward has its
    own width; SwiGLU keeps both of its inputs and its output. Flash attention keeps one fp32 number per row instead of
    the matrices (Dao et al. 2022, "FlashAttention").

    Full recomputation keeps the input of the layer, 2·s·b·h; with sequence parallelism each rank has its part of it.
    """
    h, a, s, b, t = training.hidden, training.heads, training.seq, training.micro_batch, training.tensor_parallel
    e = PRECISIONS[training.precision].activation
    has_dropout = training.architecture == "gpt"
    token = s * b / training.context_parallel  # tokens of a rank
    mask = token * h if has_dropout else 0  # 1 byte per element
    visits = training.experts_per_token
    inner = 2 if training.architecture == "gpt" else 3  # before and after GELU; gate, up, and their product
    whole = 2 * e * token * h + e * token * h + mask + e * token * h * visits + mask  # norms; attention; feed-forward
    shared = e * token * h * (2 + 2 * training.kv / a) + inner * e * token * training.width * visits
    core = FP32 * a * token if training.is_flash else (2 * e + (1 if has_dropout else 0)) * a * s * token
    whole_divisor = t if training.is_sequence_parallel else 1
    return LayerActivations(
        whole / whole_divisor + (shared + core) / t, core / t, e * token * h / whole_divisor
    )  # fmt: skip


def held_microbatches(training: Training, stage: int) -> float:
    """Microbatches whose activations a stage holds at once, counted in its own layers.

    1F1B: stage i holds p − i; never more than the step has. Interleaved with m chunks, the first stage holds
    p·(1 + (p − 1)/(p·m)) (Korthikanti et al. 2022, section 4.2.3); later ones fewer by one each.
    """
    p, chunks = training.pipeline_parallel, training.virtual_stages
    held = p - stage + (p - 1) / chunks if chunks > 1 else p - stage
    return min(held, training.microbatches or held)


def estimate(training: Training) -> Estimate:
    """Memory of the fullest rank.

    The first stage holds most microbatches, the last one the logits; those between have less than the first.
    """
    stages = {0, training.pipeline_parallel - 1}
    return max((_of_stage(training, stage) for stage in sorted(stages)), key=lambda found: found.total_bytes)


def _of_stage(training: Training, stage: int) -> Estimate:
    weights = weights_of(training, stage)
    lines = [*_model_states(training, stage), *_activations(training, stage)]
    tensors = sum(line.bytes for line in lines)
    lines += [
        Line(
            "allocator",
            training.allocator_ratio * tensors,
            f"{training.allocator_ratio:.0%} of the tensors: rounding, fragments; Megatron-LM's own estimate adds 5 %",
        ),
        Line("communication", _communication(training), "NCCL: 4 MiB (NCCL_BUFFSIZE) × 16 channels × 2 a communicator"),
        Line(
            "CUDA context",
            training.context_bytes,
            "kernels and context before the first tensor: 1,343 MiB in Hugging Face's model training anatomy",
        ),
    ]
    whole = parameters(training)
    return Estimate(training, stage, whole, weights.total, tuple(line for line in lines if line.bytes))


def _model_states(training: Training, stage: int) -> list[Line]:
    weights, adapters, layers = weights_of(training, stage), adapters_of(training, stage), layers_of(training, stage)
    size = PRECISIONS[training.precision]
    gradient = FP32 if training.gradient_precision == "fp32" else size.gradient
    zero, is_lora = training.zero_stage, training.lora_rank is not None
    trained = adapters if is_lora else weights

    def held(per_parameter: float, from_stage: int, of: Weights) -> float:
        replicas = training.replicas if zero >= from_stage else 1
        sharing = replicas // training.expert_parallel if zero >= from_stage else 1
        return per_parameter * (of.dense / replicas + of.expert / sharing)

    shared = f"ZeRO stage {zero}" if zero else "ZeRO's baseline"
    state, of_state = OPTIMIZERS[training.optimizer], _SOURCES.get(training.optimizer, "Rajbhandari et al. 2020")
    frozen = BASES[training.base_precision] or size.parameter
    lines = [
        Line(
            "parameters", held(size.parameter, 3, trained),
            f"{size.parameter:g} bytes each; {shared}, Rajbhandari et al. 2020",
        ),
        Line("gradients", held(gradient, 2, trained), f"{gradient:g} bytes each; Rajbhandari et al. 2020, section 3.1"),
        Line("master copy", held(size.master, 1, trained), f"fp32, {size.master:g} bytes; Rajbhandari et al. 2020"),
        Line(
            "optimiser states", held(state, 1, trained),
            f"{training.optimizer}, {state:.3g} bytes each; {of_state}",
        ),
    ]  # fmt: skip
    if is_lora:
        source = "Dettmers et al. 2023 (QLoRA)" if training.base_precision == "nf4" else "Hu et al. 2022 (LoRA)"
        # What is quantised are the matrices of layers, not the embeddings.
        outside = weights.total - layers * weights.layer
        kept = held(frozen, 3, Weights(weights.dense - outside, weights.expert, 0.0))
        kept += held(size.parameter, 3, Weights(outside, 0.0, 0.0))
        lines.insert(
            0, Line("frozen parameters", kept, f"{frozen:.3g} bytes each, embeddings {size.parameter:g}; {source}")
        )
    if zero == 3 and training.replicas > 1:
        # The layer at work and the one fetched ahead are whole; so are the gradients of the one at work.
        whole = 2 * size.parameter * weights.layer
        if is_lora:
            whole = 2 * (frozen * weights.layer + size.parameter * adapters.layer)
        lines.append(
            Line(
                "gathered layers",
                whole + trained.layer * gradient,
                "FSDP: parameters of two layers and gradients of one are whole; Zhao et al. 2023, PyTorch FSDP",
            )
        )
    if training.base_precision == "nf4":
        lines.append(
            Line("layer at work", weights.layer * size.activation, "its parameters as they are computed with; QLoRA")
        )
    return lines


def _activations(training: Training, stage: int) -> list[Line]:
    h, t = training.hidden, training.tensor_parallel
    token = training.seq * training.micro_batch / training.context_parallel
    e, divisor = PRECISIONS[training.precision].activation, t if training.is_sequence_parallel else 1
    layer, held = layer_activations(training), held_microbatches(training, stage)
    kept = {
        "none": layer.kept,
        "selective": layer.kept - layer.attention_core,
        "full": layer.layer_input,
    }[training.recomputation]
    again = {"none": 0.0, "selective": layer.attention_core, "full": layer.kept}[training.recomputation]
    count = layers_of(training, stage)
    lines = [
        Line(
            "activations",
            kept * count * held,
            f"{count} layers × {held:.4g} microbatches held; Korthikanti et al. 2022, table 2",
        ),
        Line("recomputed layer", again, "one layer's dropped activations while they are computed again"),
    ]
    if training.context_parallel > 1:
        lines.append(
            Line(
                "keys and values of others",
                4 * e * token * h * training.kv / training.heads / t,
                "those at work and those on their way; Liu et al. 2023, Ring Attention",
            )
        )
    if stage == 0 and training.architecture == "gpt":
        lines.append(
            Line("embedding dropout", token * h * held / divisor, "s·b·h·p; Korthikanti et al. 2022, section 4.3")
        )
    if stage == training.pipeline_parallel - 1:
        lines.append(
            Line(
                "output layer and logits",
                2 * e * token * h / divisor + FP32 * token * training.vocab / t,
                "4·s·b·h + 4·s·b·v with fp32 logits; Korthikanti et al. 2022, section 4.3",
            )
        )
    return lines


def _communication(training: Training) -> float:
    if training.gpus == 1:
        return 0.0
    groups = sum(
        getattr(training, f"{kind}_parallel") > 1 for kind in ("tensor", "pipeline", "data", "expert", "context")
    )
    return groups * 2.0 * NCCL_CHANNELS * NCCL_BUFFER_BYTES
