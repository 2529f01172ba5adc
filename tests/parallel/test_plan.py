"""The planner's memory and step time beside published runs, one by one, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plan_page
import pytest

from shardfuse.parallel.plan import check, efficiency, published, shapes
from shardfuse.parallel.plan.hardware import cluster
from shardfuse.parallel.plan.layout import Layout


def test_every_judged_source_is_predicted_without_its_own_runs() -> None:
    sources = plan_page.sources()
    judged = {source.name: source.passed for source in sources if source.passed is not None}
    assert {"megatron2021-T1", "mcore0.8", "torchtitan2412", "torchtitan2506", "llm-foundry"} <= judged.keys()
    assert all(judged.values()), judged


def test_every_miss_has_a_reason_and_every_reason_a_miss() -> None:
    sources = plan_page.sources()
    assert check.unexplained(sources) == []
    steps = [step for source in sources for step in source.steps if step.reason and not step.run.informative]
    assert {(step.run.source, step.run.shape.name, step.run.cluster.gpu.name) for step in steps} == check.MISSED.keys()


def test_large_micro_batches_of_2021_are_predicted_5_to_8_percent_too_slow() -> None:
    """As docs/plan.md says of three layouts that are far from the best."""
    (source,) = (source for source in plan_page.sources() if source.name == "megatron2021-T1")
    wanted = {model for source, model in check.FAR if source == "megatron2021-T1"}
    errors = {step.run.shape.name: step.error for step in source.steps if step.run.shape.name in wanted}
    assert len(errors) == 3
    assert all(0.045 <= error < 0.085 for error in errors.values()), errors


def test_a_wrong_prediction_fails_its_source() -> None:
    runs = [run for run in published.runs() if run.source == "mcore0.8" and run.seconds is not None]
    steps = tuple(check.Step(run, 1.2 * (run.seconds or 0.0), run.seconds or 0.0) for run in runs)
    assert check.Source("mcore0.8", steps).passed is False


SLOW = [pytest.param(name, marks=pytest.mark.nightly) for name in ("examples", "layouts")]


@pytest.mark.parametrize("table", ["steps", "misses", "reasons", *SLOW])
def test_the_pages_tables_are_the_checks(table: str) -> None:
    assert plan_page.shown(table) == plan_page.TABLES[table]()


def test_memory_is_that_of_every_published_split_and_peak() -> None:
    held = check.memory()
    assert sum(each.what == "peak" for each in held) == 19
    assert sum(each.what == "activations" for each in held) == 4
    assert not [each for each in held if not each.passed]


def test_what_ships_is_fitted_to_all_runs() -> None:
    assert efficiency.shipped() == pytest.approx(efficiency.fit(published.runs()), abs=0.002)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="use a multiple of 8"):
        Layout(dp=4, micro=2, batch=12)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (Layout(tp=8, length=2048), ""),
        (Layout(tp=5), "does not divide 32 heads"),
        (Layout(tp=16), "does not divide 32 heads, 8 of keys and values"),
        (Layout(cp=4, length=2052), "in halves"),
        (Layout(tp=8, sequence_parallel=True, length=2052), "does not divide 2052 tokens"),
        (Layout(pp=64), "more than 32 blocks"),
    ],
)
def test_a_layout_says_why_a_model_does_not_fit_it(layout: Layout, why: str) -> None:
    found = layout.why_not(shapes.find("llama3-8b"))
    assert (why in found) if why else not found


def test_the_parameters_of_published_models() -> None:
    billions = {"llama3-8b": 8.03, "llama3-70b": 70.6, "llama3-405b": 405.9, "gpt3-175b": 174.6, "bloom-176b": 176.2}
    assert {name: shapes.find(name).parameters / 1e9 for name in billions} == pytest.approx(billions, rel=1e-3)


def test_a_folders_config_gives_the_shape() -> None:
    llama = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    llama |= {"num_key_value_heads": 8, "vocab_size": 128256, "hidden_act": "silu"}
    assert shapes.from_config(llama).parameters == shapes.find("llama3-8b").parameters
    with pytest.raises(ValueError, match="dense decoders only"):
        shapes.from_config(llama | {"num_local_experts": 8})
    with pytest.raises(ValueError, match="none of vocab_size"):
        shapes.from_config({name: size for name, size in llama.items() if name != "vocab_size"})
    with pytest.raises(ValueError, match="or one of bloom-176b"):
        shapes.find("no such model")


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # tiiuae/falcon-7b, falcon-40b
        ({"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
          "vocab_size": 65024, "multi_query": True, "bias": False, "tie_word_embeddings": True}, 6_921_720_704),
        ({"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
          "vocab_size": 65024, "multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8,
          "bias": False, "tie_word_embeddings": True}, 41_303_293_952),
        # bigscience/bloom-560m, without the norm behind its embedding
        ({"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "vocab_size": 250880},
         559_212_544),
        # mosaicml/mpt-7b, whose positions are no parameters
        ({"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "expansion_ratio": 4,
          "vocab_size": 50432, "no_bias": True}, 6_649_286_656),
        # The text decoder of a multimodal model.
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral", "hidden_size": 4096, "head_dim": 128,
          "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
          "vocab_size": 32768, "hidden_act": "silu"}}, 7_248_023_552),
    ],
    ids=["falcon-7b", "falcon-40b", "bloom-560m", "mpt-7b", "text_config"],
)  # fmt: skip
def test_other_configs_give_their_models_parameters(config: dict[str, Any], parameters: int) -> None:
    """Within norms that only these models have."""
    assert shapes.from_config(config).parameters == pytest.approx(parameters, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"moe_num_experts": 64}, "it has experts .moe_num_experts = 64"),
        ({"ffn_config": {"moe_num_experts": 16}}, "it has experts .ffn_config.moe_num_experts = 16"),
        ({"mamba_d_state": 128}, "it has state-space layers"),
        ({"kv_lora_rank": 512}, "it has latent attention"),
        ({"is_encoder_decoder": True}, "it has an encoder"),
        ({"intermediate_size": [4096, 8192]}, "expects a whole number, one for all blocks"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers = '32'"),
    ],
)
def test_what_is_no_decoder_of_equal_blocks_is_refused(change: dict[str, Any], why: str) -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    assert shapes.from_config(config).layers == 2
    with pytest.raises(ValueError, match=why):
        shapes.from_config(config | change)


def test_a_gemma_is_gated_and_tied() -> None:
    gemma = {"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18}
    gemma |= {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256000}
    gemma |= {"hidden_act": "gelu_pytorch_tanh"}
    assert shapes.from_config(gemma).parameters == 2_506_172_416  # google/gemma-2b's


@pytest.mark.parametrize(("text", "why"), [("{", "not JSON"), ("[]", "expected an object")])
def test_a_broken_config_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=why):
        shapes.find(str(tmp_path))


def test_a_file_changes_the_network(tmp_path: Path) -> None:
    file = tmp_path / "network.toml"
    file.write_text("outside_gb_s = 12.5\nmemory_gib = 64")
    changed = cluster("a100", 16, file)
    assert (changed.network.outside, changed.gpu.memory) == (12.5e9, 64 * 2**30)
    assert changed.network.name == "8 x A100, NVLink 3, 200 Gbit/s, changed by network.toml"
    for text, why in (
        ("outside = 1", "expected some of"),
        ("node = 0", "a number above 0"),
        ("= 1", "not TOML"),
        ("node = 8.5", "expected a whole number"),
        ("latency_us = nan", "expected a finite number"),
        ("memory_gib = inf", "expected a finite number"),
        ("pod = 3", "at least the GPUs of a node"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=why):
            cluster("a100", 16, file)
    with pytest.raises(ValueError, match="expected one of a100-40"):
        cluster("v100", 8)


def test_names_change_the_network() -> None:
    changed = cluster("h100", 16, "pcie-5, ethernet-100").network
    assert (changed.inside, changed.outside, changed.latency) == (50e9, 12.5e9 / 8, 30e-6)
    assert changed.name == "nodes of 8 over pcie-5, ethernet-100"
    with pytest.raises(ValueError, match="or some of pcie-4, pcie-5"):
        cluster("h100", 16, "token-ring")
