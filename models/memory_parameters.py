"""Parameters of a transformer, and those that one rank of a pipeline stage holds.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", equation 2, for GPT; the
same matrices counted one by one for other shapes. What their bytes are stands in `memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.memory_inputs import Training


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of one rank of a stage.

    Attributes:
        dense: Those that all replicas have.
        expert: Those of experts, which replicas share out.
        layer: Of one layer, both kinds: what FSDP gathers at a time.
    """

    dense: float
    expert: float
    layer: float

    @property
    def total(self) -> float:
        """Both kinds."""
        return self.dense + self.expert


def parameters(training: Training) -> int:
    """Parameters of the whole model."""
    dense, dense_whole, expert = _layer_parameters(training)
    once = _positions(training) + _norm(training)
    embeddings = training.vocab * training.hidden * (1 if training.has_one_embedding else 2)
    per_layer = dense + dense_whole + expert * training.experts
    return round(training.layers * per_layer + once + embeddings)


def adapter_parameters(training: Training) -> int:
    """Trained parameters of the whole model where it has LoRA adapters; 0 where it has none."""
    dense, expert = _layer_adapters(training, 1)
    return round(training.layers * (dense + expert * training.experts))


def adapters_of(training: Training, stage: int) -> Weights:
    """Adapters of one rank of a stage, before replicas share any."""
    dense, expert = _layer_adapters(training, training.tensor_parallel)
    experts, layers = expert * training.experts / training.expert_parallel, layers_of(training, stage)
    if training.experts == 1:
        return Weights(layers * (dense + experts), 0.0, dense + experts)
    return Weights(layers * dense, layers * experts, dense + experts)


def _layer_adapters(training: Training, t: int) -> tuple[float, float]:
    """Of one layer: adapters of attention, and of one expert or the only feed-forward; on one of t ranks.

    Beside a matrix of n inputs and m outputs stand r·n and r·m (Hu et al. 2022, "LoRA", section 4.1). Of the pair the
    one that meets the side which tensor parallelism divides is divided, the other is whole.
    """
    if training.lora_rank is None:
        return 0.0, 0.0
    h, f, kv = training.hidden, training.width, training.hidden * training.kv / training.heads
    split_out, split_in = [(h, h), (h, kv)], []  # queries and values
    if training.lora_targets != "qv":
        split_out, split_in = [*split_out, (h, kv)], [(h, h)]
    dense = sum(n + m / t for n, m in split_out) + sum(n / t + m for n, m in split_in)
    expert = 0.0
    if training.lora_targets == "all":
        expert = (1 if training.architecture == "gpt" else 2) * (h + f / t) + (f / t + h)
    return training.lora_rank * dense, training.lora_rank * expert


def _norm(training: Training) -> int:
    return (2 if training.architecture == "gpt" else 1) * training.hidden


def _positions(training: Training) -> int:
    return training.seq * training.hidden if training.architecture == "gpt" else 0


def _layer_parameters(training: Training) -> tuple[float, float, float]:
    """Of one layer: what tensor parallelism divides, what it leaves whole, and one expert or the only feed-forward."""
    h, f = training.hidden, training.width
    keys_values = 2 * h * h * training.kv / training.heads
    if training.architecture == "gpt":
        biases_split, biases_whole = h + 2 * h * training.kv / training.heads, h
        expert = 2 * h * f + f + h
    else:
        biases_split, biases_whole = 0.0, 0
        expert = 3 * h * f
    router = h * training.experts if training.experts > 1 else 0
    return 2 * h * h + keys_values + biases_split, 2 * _norm(training) + biases_whole + router, expert


def layers_of(training: Training, stage: int) -> int:
    """Layers of a stage; where they do not divide evenly, earlier stages have one more."""
    least, more = divmod(training.layers, training.pipeline_parallel)
    return least + (stage < more)


def weights_of(training: Training, stage: int) -> Weights:
    """Parameters of one rank of a stage, before replicas share any."""
    t, p = training.tensor_parallel, training.pipeline_parallel
    split, whole, expert = _layer_parameters(training)
    dense = split / t + whole
    experts = expert * training.experts / training.expert_parallel / t
    layers = layers_of(training, stage)
    table = training.vocab * training.hidden / t
    is_first, is_last = stage == 0, stage == p - 1
    outside = (table + _positions(training)) if is_first else 0.0
    if is_last:
        outside += _norm(training)
        outside += 0 if training.has_one_embedding and is_first else table
    if training.experts == 1:
        return Weights(layers * (dense + experts) + outside, 0.0, dense + experts)
    return Weights(layers * dense + outside, layers * experts, dense + experts)
