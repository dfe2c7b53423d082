"""Memory of training jobs: against figures that papers and other projects published, and against formulas by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest
from click.testing import CliRunner

from models.memory import estimate, held_microbatches, layer_activations
from models.memory_advice import advise
from models.memory_inputs import GIB, MemoryInputError, Training, parse_size
from models.memory_parameters import adapter_parameters, parameters
from scheduler_hints.api import create_app
from scheduler_hints.memory_estimates import MemoryRequest
from scheduler_hints.reloader import ShardStore
from tests.hints_support import ask, publish
from weatherglass import cli

# Korthikanti et al. 2022, table 3: name, heads, width, layers, tensor- and pipeline-parallel, interleaved chunks,
# micro-batch. Sequence 2,048, vocabulary 51,200.
PAPER = {
    "22B": (64, 6144, 48, 8, 1, 1, 4),
    "175B": (96, 12288, 96, 8, 8, 3, 1),
    "530B": (128, 20480, 105, 8, 35, 3, 1),
    "1T": (160, 25600, 128, 8, 64, 1, 1),
}
BILLIONS = {"22B": 22, "175B": 175, "530B": 530, "1T": 1000}
S, V = 2048, 51_200


def paper(name: str, **changes: object) -> Training:
    a, h, layers, t, p, chunks, b = PAPER[name]
    made = Training(
        layers, h, a, V, S, b, architecture="gpt", is_flash=False, tensor_parallel=t, pipeline_parallel=p,
        virtual_stages=chunks,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def llama8b(**changes: object) -> Training:
    made = Training(32, 4096, 32, 128_256, 8192, kv_heads=8, ffn=14_336)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def activation_bytes(training: Training) -> float:
    found = estimate(training)
    return sum(found.bytes_of(name) for name in ("activations", "embedding dropout", "output layer and logits"))


@pytest.mark.parametrize("name", PAPER)
def test_parameters_are_those_the_models_are_named_after(name: str) -> None:
    assert parameters(paper(name)) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_parameters_by_the_published_formula_and_of_published_models() -> None:
    _, h, layers, *_ = PAPER["175B"]
    by_formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (V + S) / (12 * layers * h))  # Narayanan et al. 2021, eq. 2
    assert parameters(paper("175B")) == pytest.approx(by_formula + 2 * h, rel=1e-12)  # + the last norm
    assert parameters(llama8b()) == 8_030_261_248  # Llama 3.1 8B, as its checkpoint counts them
    mixtral = Training(32, 4096, 32, 32_000, 4096, kv_heads=8, ffn=14_336, experts=8, experts_per_token=2)
    assert parameters(mixtral) == 46_702_792_704  # Mixtral 8x7B, as its checkpoint counts them


@pytest.mark.parametrize("name", PAPER)
def test_activations_of_a_layer_are_table_2_of_the_paper(name: str) -> None:
    a, h, _, t, _, _, b = PAPER[name]
    sbh, attention = S * b * h, 5 * a * S / h
    whole = layer_activations(paper(name, tensor_parallel=1))
    split = layer_activations(paper(name))
    both = layer_activations(paper(name, is_sequence_parallel=True))
    assert whole.kept == pytest.approx(sbh * (34 + attention))
    assert split.kept == pytest.approx(sbh * (10 + 24 / t + attention / t))
    assert both.kept == pytest.approx(sbh * (34 + attention) / t)
    assert split.kept - split.attention_core == pytest.approx(sbh * (10 + 24 / t))
    assert both.kept - both.attention_core == pytest.approx(sbh * 34 / t)
    assert whole.layer_input == split.layer_input == 2 * sbh


def test_selective_recomputation_drops_what_the_paper_says() -> None:
    for name, share in (("175B", 0.70), ("530B", 0.65)):  # section 5: GPT-3 and MT-NLG
        layer = layer_activations(paper(name, tensor_parallel=1))
        assert layer.attention_core / layer.kept == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("name", PAPER)
def test_both_techniques_save_about_five_times_and_full_recomputation_ten(name: str) -> None:
    baseline = activation_bytes(paper(name))
    both = activation_bytes(paper(name, is_sequence_parallel=True, recomputation="selective"))
    assert baseline / both >= 4.95  # the abstract: "5x"
    for single in ({"is_sequence_parallel": True}, {"recomputation": "selective"}):  # section 6.1: nearly half
        assert 0.45 < activation_bytes(paper(name, **single)) / baseline < 0.70
    assert 0.07 < activation_bytes(paper(name, recomputation="full")) / baseline < 0.13  # section 6.1: about 10 %


def test_first_stage_holds_what_the_paper_says() -> None:
    a, h, layers, t, p, chunks, b = PAPER["530B"]
    training = paper("530B", is_sequence_parallel=True, recomputation="selective")
    found = estimate(training)
    assert found.stage == 0
    held = layers * (1 + (p - 1) / (p * chunks)) * 34 * S * b * h / t  # section 4.2.3
    assert found.bytes_of("activations") == pytest.approx(held)
    plain = dataclasses.replace(training, virtual_stages=1)
    assert estimate(plain).bytes_of("activations") == pytest.approx(layers * 34 * S * b * h / t)
    assert estimate(plain).bytes_of("embedding dropout") == pytest.approx(S * b * h * p / t)  # section 4.3
    assert [held_microbatches(plain, stage) for stage in (0, 1, 34)] == [35, 34, 1]
    few = dataclasses.replace(plain, microbatches=4)
    assert held_microbatches(few, 0) == 4
    one = paper("22B", is_sequence_parallel=True)
    _, h, _, t, _, _, b = PAPER["22B"]
    assert estimate(one).bytes_of("output layer and logits") == pytest.approx(4 * S * b * h / t * (1 + V / h))
    assert a == training.heads


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_model_states_are_table_1_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    training = Training(36, 4096, 32, 50_304, 1024, architecture="gpt", data_parallel=64, zero_stage=stage)
    found = estimate(training)
    of_7_5_billion = found.model_state_bytes / found.parameters * 7.5e9
    assert of_7_5_billion / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_model_states_of_llama_are_what_megatron_lm_reckons() -> None:
    # Megatron-LM's own tests: GiB of weights and optimiser with the distributed optimiser and fp32 gradients.
    for changes, gib in (
        ({"tensor_parallel": 2, "data_parallel": 2}, 44.87260437),
        ({"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 32}, 11.91927338),
    ):
        found = estimate(llama8b(zero_stage=1, gradient_precision="fp32", **changes))
        assert found.model_state_bytes / GIB == pytest.approx(gib, rel=1e-4)
    activations = llama8b(tensor_parallel=2, data_parallel=2, is_sequence_parallel=True)
    assert activation_bytes(activations) / GIB == pytest.approx(22.64, rel=0.2)  # theirs leaves SwiGLU's third out


def test_optimisers_and_precisions_by_hand() -> None:
    bytes_each = {
        ("bf16", "adam"): 16, ("fp16", "adam"): 16, ("fp32", "adam"): 16, ("fp8", "adam"): 15, ("bf16", "sgd"): 8,
        ("bf16", "sgd_momentum"): 12, ("bf16", "adam_bf16"): 12, ("bf16", "lion"): 12, ("fp32", "sgd"): 8,
        ("bf16", "adam_8bit"): 10 + 8 / 2048,
    }  # fmt: skip
    for (precision, optimizer), each in bytes_each.items():
        found = estimate(llama8b(precision=precision, optimizer=optimizer))
        assert found.model_state_bytes == pytest.approx(each * found.parameters, rel=1e-9), (precision, optimizer)
    double = estimate(llama8b(precision="fp32")).bytes_of("activations")
    core = layer_activations(llama8b()).attention_core * 32  # flash keeps fp32 numbers in any precision
    assert double - core == pytest.approx(2 * (estimate(llama8b()).bytes_of("activations") - core))


def test_adapters_are_those_of_the_papers_and_of_peft() -> None:
    for rank, millions in ((1, 4.7), (8, 37.7)):  # Hu et al. 2022, table 4: GPT-3 with adapters of queries and values
        training = paper("175B", tensor_parallel=1, pipeline_parallel=1, virtual_stages=1, lora_rank=rank)
        assert adapter_parameters(training) / 1e6 == pytest.approx(millions, abs=0.05)
        assert estimate(training).bytes_of("frozen parameters") / 1e9 == pytest.approx(350, rel=0.01)  # section 4.2
    llama7b = Training(32, 4096, 32, 32_000, 2048, ffn=11_008, lora_rank=8)
    # What PEFT prints, trainable and all parameters: Llama 7B, rank 8 on queries and values; Llama 3 8B, 16 on all.
    assert (adapter_parameters(llama7b), parameters(llama7b)) == (4_194_304, 6_742_609_920 - 4_194_304)
    all_of_8b = llama8b(lora_rank=16, lora_targets="all")
    assert (adapter_parameters(all_of_8b), parameters(all_of_8b)) == (41_943_040, 8_072_204_288 - 41_943_040)
    assert adapter_parameters(llama8b()) == 0
    found, whole = estimate(all_of_8b), estimate(llama8b())
    assert found.bytes_of("optimiser states") == 8 * 41_943_040
    assert found.model_state_bytes == 2 * 8_030_261_248 + 16 * 41_943_040
    assert found.bytes_of("activations") == whole.bytes_of("activations")
    shared = estimate(llama8b(lora_rank=16, lora_targets="all", data_parallel=8, zero_stage=3))
    assert shared.model_state_bytes == pytest.approx(found.model_state_bytes / 8)
    split = estimate(llama8b(lora_rank=16, lora_targets="attention", tensor_parallel=2))
    of_layer = 16 * (3 * 4096 + 4096 / 2 + 2 * 1024 / 2 + 4096 / 2 + 4096)
    assert split.bytes_of("parameters") == 2 * 32 * of_layer


def test_a_model_of_65_billion_is_tuned_on_one_gpu_of_48_gigabytes_as_qlora_says() -> None:
    llama65b = Training(
        80, 8192, 64, 32_000, 512, ffn=22_016, recomputation="full", lora_rank=64, lora_targets="all",
        base_precision="nf4", optimizer="adam_8bit",
    )  # fmt: skip
    assert parameters(llama65b) / 1e9 == pytest.approx(65.3, abs=0.1)
    found = estimate(llama65b)
    of_layers = 80 * (4 * 8192**2 + 3 * 8192 * 22_016 + 2 * 8192)
    bits = (found.bytes_of("frozen parameters") - 2 * (parameters(llama65b) - of_layers)) * 8 / of_layers
    assert bits == pytest.approx(4.127, abs=1e-3)
    assert found.total_bytes < 48 * GIB
    trained = {"lora_rank": None, "lora_targets": "qv", "base_precision": "same", "optimizer": "adam"}
    assert estimate(dataclasses.replace(llama65b, **trained)).total_bytes > 780 * 10**9  # section 1, of full tuning


def test_ranks_that_share_a_sequence_share_its_activations_and_the_optimiser() -> None:
    training = llama8b(data_parallel=2, context_parallel=4, zero_stage=1, gradient_precision="fp32")
    found, alone = estimate(training), estimate(dataclasses.replace(training, context_parallel=1))
    assert training.gpus == 8
    assert found.model_state_bytes / found.rank_parameters == 6 + 12 / (2 * 4)  # Megatron-LM's bytes per parameter
    for name in ("activations", "output layer and logits"):
        assert found.bytes_of(name) == alone.bytes_of(name) / 4
    assert found.bytes_of("keys and values of others") == 2 * 2 * 2 * (8192 / 4) * (4096 / 4)
    assert found.bytes_of("communication") == 2 * alone.bytes_of("communication")
    assert alone.bytes_of("keys and values of others") == 0


def test_experts_are_shared_by_fewer_replicas() -> None:
    mixtral = Training(
        32, 4096, 32, 32_000, 4096, kv_heads=8, ffn=14_336, experts=8, experts_per_token=2, data_parallel=16,
        expert_parallel=8, zero_stage=1,
    )  # fmt: skip
    experts = 32 * 8 * 3 * 4096 * 14_336
    dense = parameters(mixtral) - experts
    found = estimate(mixtral)
    assert found.bytes_of("parameters") == pytest.approx(2 * (dense + experts / 8))
    assert found.bytes_of("optimiser states") == pytest.approx(8 * (dense / 16 + experts / 8 / 2))
    busier = layer_activations(dataclasses.replace(mixtral, experts_per_token=4)).kept
    assert busier > layer_activations(mixtral).kept


def test_overheads_are_lines_of_their_own_and_lines_add_up() -> None:
    found = estimate(llama8b(tensor_parallel=2, data_parallel=4, pipeline_parallel=2))
    assert found.total_bytes == pytest.approx(sum(line.bytes for line in found.lines))
    assert found.bytes_of("CUDA context") == 1343 * 2**20
    tensors = found.total_bytes - sum(found.bytes_of(n) for n in ("allocator", "communication", "CUDA context"))
    assert found.bytes_of("allocator") == pytest.approx(0.05 * tensors)
    assert found.bytes_of("communication") == 3 * 2 * 16 * 4 * 2**20
    assert estimate(llama8b()).bytes_of("communication") == 0
    assert all(line.source for line in found.lines)


def test_the_last_stage_can_be_the_fullest() -> None:
    many_words = Training(8, 1024, 16, 2_000_000, 4096, pipeline_parallel=4, micro_batch=4)
    assert estimate(many_words).stage == 3


def test_wrong_inputs_name_the_offender_and_the_valid_choices() -> None:
    for changes, field, word in (
        ({"precision": "bf17"}, "precision", "did you mean bf16"),
        ({"optimizer": "adamw"}, "optimizer", "adam, adam_bf16, adam_8bit, lion, sgd, sgd_momentum"),
        ({"tensor_parallel": 3}, "tensor_parallel", "a divisor of heads (32)"),
        ({"kv_heads": 5}, "kv_heads", "a divisor of heads"),
        ({"layers": 0}, "layers", "1 to 10,000"),
        ({"layers": True}, "layers", "an integer"),
        ({"micro_batch": 1.5}, "micro_batch", "an integer"),
        ({"zero_stage": 4}, "zero_stage", "0, 1, 2, 3"),
        ({"zero_stage": True}, "zero_stage", "0, 1, 2, 3"),
        ({"pipeline_parallel": 33}, "pipeline_parallel", "at most 32"),
        ({"virtual_stages": 2}, "virtual_stages", "1 where there is one stage"),
        ({"experts_per_token": 2}, "experts_per_token", "at most experts (1)"),
        ({"experts": 8, "expert_parallel": 8}, "expert_parallel", "a divisor of data_parallel (1)"),
        ({"context_parallel": 3}, "context_parallel", "a divisor of seq (8192)"),
        ({"lora_rank": 5000}, "lora_rank", "at most hidden (4096)"),
        ({"lora_targets": "all"}, "lora_targets", "qv without lora_rank"),
        ({"base_precision": "nf4"}, "base_precision", "same without lora_rank"),
        ({"lora_rank": 8, "lora_targets": "mlp"}, "lora_targets", "qv, attention, all"),
        ({"allocator_ratio": -0.1}, "allocator_ratio", "0 to 1"),
        ({"context_bytes": -1}, "context_bytes", "bytes from 0"),
    ):
        with pytest.raises(MemoryInputError) as raised:
            llama8b(**changes)
        assert raised.value.field == field, changes
        assert word in str(raised.value), str(raised.value)


def test_sizes_are_read_with_their_unit() -> None:
    assert parse_size("80GiB") == 80 * GIB
    assert parse_size(" 80 gb ") == 80 * 10**9
    assert parse_size("81559MiB") == 81_559 * 2**20
    for wrong in ("80", "GiB", "-1GiB", "0GiB", "80 GiBs", "1e3GiB", "9999999TiB"):
        with pytest.raises(MemoryInputError, match="number with a unit"):
            parse_size(wrong)


def test_advice_tells_what_makes_it_fit_and_every_change_is_what_it_says() -> None:
    found = estimate(llama8b(data_parallel=8))
    advice = advise(found, 80 * GIB)
    assert not advice.fits
    assert advice.headroom_bytes == pytest.approx(80 * GIB - found.total_bytes)
    fitting = [change for change in advice.changes if change.fits]
    assert fitting[0].words == "ZeRO stage 2"
    for change in advice.changes:
        assert change.total_bytes == estimate(change.training).total_bytes < found.total_bytes
        assert change.fits == (change.total_bytes <= 80 * GIB)
    assert advise(found, 200 * GIB).fits
    assert advise(found, 200 * GIB).changes == ()
    with pytest.raises(MemoryInputError):
        advise(found, 0)


def test_changes_are_added_up_where_none_is_enough_alone() -> None:
    seventy = Training(80, 8192, 64, 128_256, 8192, 4, kv_heads=8, ffn=28_672)
    *singles, both = advise(estimate(seventy), 80 * GIB).changes
    assert not any(change.fits for change in singles)
    assert both.fits
    assert both.training.gpus > 1
    assert both.total_bytes == estimate(both.training).total_bytes <= 80 * GIB
    hopeless = Training(1, 1_000_000, 1, 1000, 1_000_000)
    assert not any(change.fits for change in advise(estimate(hopeless), GIB).changes)


def test_a_smaller_gpu_is_named_where_it_would_do() -> None:
    found = estimate(llama8b(data_parallel=8, zero_stage=3, recomputation="full"))
    advice = advise(found, 80 * GIB)
    assert advice.fits
    assert advice.smallest_gib is not None
    assert advice.smallest_gib * GIB >= found.total_bytes > (advice.smallest_gib - 8) * GIB
    assert advice.smallest_gib < 80


ARGUMENTS = [
    "--layers", "32", "--hidden", "4096", "--heads", "32", "--kv-heads", "8", "--ffn", "14336", "--vocab", "128256",
    "--seq", "8192",
]  # fmt: skip


def test_the_command_prints_a_table_and_what_would_fit() -> None:
    done = CliRunner().invoke(cli, ["estimate-memory", *ARGUMENTS, "--dp", "8", "--gpu-memory", "80GiB"])
    assert done.exit_code == 1
    assert "8.03 billion parameters on 8 GPUs" in done.output
    assert "does not fit 80 GiB" in done.output
    assert "ZeRO stage 2" in done.output
    fits = CliRunner().invoke(
        cli, ["estimate-memory", *ARGUMENTS, "--dp", "8", "--zero", "3", "--recompute", "full", "--gpu-memory", "80GB"]
    )
    assert fits.exit_code == 0
    assert "fits 74.51 GiB" in fits.output
    assert "in all" in CliRunner().invoke(cli, ["estimate-memory", *ARGUMENTS]).output


def test_the_command_refuses_wrong_usage_with_two() -> None:
    for wrong, word in ((["--precision", "bf17"], "bf16"), (["--gpu-memory", "80"], "80GiB"), (["--tp", "3"], "heads")):
        done = CliRunner().invoke(cli, ["estimate-memory", *ARGUMENTS, *wrong])
        assert done.exit_code == 2, done.output
        assert word in done.output


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "inf", "1.5", "99999999999999"])
def test_the_command_refuses_numbers_that_cannot_be(wrong: str) -> None:
    numbers = [
        one.opts[0] for one in cli.commands["estimate-memory"].params if getattr(one.type, "name", "") == "integer"
    ]
    assert len(numbers) > 15
    for option in numbers:
        if (option, wrong) == ("--zero", "0"):
            continue
        done = CliRunner().invoke(cli, ["estimate-memory", *ARGUMENTS, option, wrong])
        assert done.exit_code == 2, (option, done.output)
        assert option.strip("-").replace("-", "_") in done.output.replace("-", "_"), done.output
    assert CliRunner().invoke(cli, ["estimate-memory", *ARGUMENTS, "--gpu-memory", f"{wrong}x"]).exit_code == 2


def test_json_of_the_command_is_the_answer_of_the_api(tmp_path) -> None:
    publish(tmp_path)
    app = create_app(tmp_path, (), store=ShardStore(tmp_path, ["alpha"]))
    body = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14_336, "vocab": 128_256, "seq": 8192,
            "gpu_memory_bytes": 80 * GIB}  # fmt: skip
    reply = ask(app, "/v1/memory-estimates", method="POST", body=json.dumps(body).encode())
    assert reply.status == 200
    printed = CliRunner().invoke(cli, ["estimate-memory", *ARGUMENTS, "--gpu-memory", "80GiB", "--json"])
    assert json.loads(printed.output) == reply.json()
    assert reply.json()["fits"] is False
    for change, status, word in (
        ({"heads": 33}, 422, "divisor"),
        ({"colour": "red"}, 422, "unknown field `colour`; valid: layers, hidden"),
        ({"zero": 3}, 422, "did you mean `zero_stage`?"),
        ({"recompute": "full"}, 422, "did you mean `recomputation`?"),
        ({"layers": "32"}, 422, "layers"),
        ({"layers": 10**12}, 422, "layers"),
        ({"layers": 100_000}, 422, "10,000"),
        ({"precision": "bf17"}, 422, "bf17"),
        ({"allocator_ratio": 2}, 422, "allocator_ratio"),
        *(
            ({name: wrong}, 422, name)
            for name, default in body.items()
            for wrong in (0, -1, 1.5, True)
            if isinstance(default, int)
        ),
    ):
        wrong = ask(app, "/v1/memory-estimates", method="POST", body=json.dumps(body | change).encode())
        assert wrong.status == status, wrong.body
        assert word in wrong.json()["error"]["message"]
    assert ask(app, "/v1/memory-estimates", method="POST", body=b"{").status == 400
    assert ask(app, "/v1/memory-estimates", "x=1", method="POST", body=json.dumps(body).encode()).status == 400
    assert ask(app, "/v1/memory-estimates").status == 405


def test_the_api_takes_every_input_with_the_same_default() -> None:
    asked = {field.name: field.default for field in dataclasses.fields(Training)}
    taken = dict(zip(MemoryRequest.__struct_fields__, [None] * 100, strict=False))
    assert set(taken) == set(asked) | {"gpu_memory_bytes"}
    request = MemoryRequest(layers=1, hidden=1, heads=1, vocab=1, seq=1)
    for name, default in asked.items():
        if default is not dataclasses.MISSING:
            assert getattr(request, name) == default, name
