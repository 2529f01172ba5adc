"""Entries of a config and tensors of a file that a model would not use are told by name, or refused."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardfuse import ParallelTransformer, load_hf, load_pretrained
from shardfuse.kernels.dev import accuracy
from shardfuse.layers.hf.folders import load_hf_weights, read_hf_config

pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
import transformers
from foreign import foreign, tokens
from oracle import assert_same_model

WEIGHTS = "model.safetensors"
UNREAD = "does not read either"


def _fill(path: Path) -> None:
    load_hf_weights(path, ParallelTransformer(read_hf_config(path)))


LOADERS: tuple[Callable[..., Any], ...] = (load_hf, load_pretrained, _fill)


def _folder(path: Path, kind: str = "llama", **entries: Any) -> Path:
    foreign(kind).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | entries))
    return path


def _told(load: Callable[..., Any], path: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(path)
    assert all(each.filename == __file__ for each in caught if UNREAD in str(each.message))
    return [str(each.message) for each in caught if UNREAD in str(each.message)]


# --- entries ----------------------------------------------------------------------------------------------------------

UNREAD_ENTRIES: dict[str, dict[str, Any]] = {
    "final_logit_softcapping=30.0": {"final_logit_softcapping": 30.0},
    "attention_multiplier=0.25": {"attention_multiplier": 0.25},
    "logit_scale=0.0625": {"logit_scale": 0.0625},
    "embedding_multiplier=12.0": {"embedding_multiplier": 12.0},
    "use_sliding_window=True": {"use_sliding_window": True},
    "layer_types=['sliding_attention', 'full_attention']": {"layer_types": ["sliding_attention", "full_attention"]},
    "clip_qkv=8.0": {"clip_qkv": 8.0},
    "use_qk_norm=True": {"use_qk_norm": True},
    "rope_interleaved=True": {"rope_interleaved": True},
    "no_rope_layers=[1, 0]": {"no_rope_layers": [1, 0]},
    "query_pre_attn_scalar=256": {"query_pre_attn_scalar": 256},
    "rope_scaling.mrope_section=[1, 1, 2]": {"rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]}},
    "rope_scaling.factor=4.0": {"rope_scaling": {"factor": 4.0}},
}
HARMLESS: dict[str, Any] = {
    "_name_or_path": "org/model", "auto_map": {}, "is_llama_config": True, "rope_interleaved": False, "use_cache": True,
    "transformers.js_config": {"dtype": "q4"}, "pretraining_tp": 1, "torch_dtype": "float32",
    "final_logit_softcapping": None, "logit_scale": 1.0, "layer_types": ["full_attention"] * 2, "clip_qkv": None,
    "query_pre_attn_scalar": 8, "no_rope_layers": [1, 1], "use_sliding_window": False, "sliding_window": 64,
    "partial_rotary_factor": 1.0, "attention_multiplier": None, "unsloth_version": "2026.1",
    "quantization_config": None, "rope_scaling": {"type": "linear", "factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("says", UNREAD_ENTRIES)
def test_an_entry_without_effect_is_told_once(tmp_path: Path, says: str, load: Callable[..., Any]):
    (told,) = _told(load, _folder(tmp_path, **UNREAD_ENTRIES[says]))
    assert f"config.json has {says}, which transformers' llama does not read either" in told


def test_what_real_folders_have_is_not_worth_a_word(tmp_path: Path):
    for load in LOADERS:
        assert not _told(load, _folder(tmp_path, **HARMLESS))
    assert not _told(load_hf, _folder(tmp_path / "starcoder2", "starcoder2", sliding_window=4))
    assert not _told(load_pretrained, _folder(tmp_path / "gemma2", "gemma2"))  # it reads its own


@pytest.mark.parametrize("entries", [{"is_causal": False}, {"per_layer_config": {"0": {"sliding_window": 4}}}], ids=str)
def test_an_entry_that_transformers_reads_is_not_left_out(tmp_path: Path, entries: dict[str, Any]):
    """The layers refuse it; serving then takes transformers' own model."""
    path = _folder(tmp_path, **entries)
    for load in (load_hf, read_hf_config):
        with pytest.raises(ValueError, match=f"{next(iter(entries))}=.*: transformers reads it"):
            load(path)


@pytest.mark.parametrize("value", [1, "true", {"x": True}])
def test_tied_is_true_or_false(tmp_path: Path, value: Any):
    with pytest.raises(ValueError, match=r"tie_word_embeddings=.*: expected true or false"):
        load_hf(_folder(tmp_path, tie_word_embeddings=value))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "entry", [{"dtype": "float99"}, {"torch_dtype": ["bfloat16"]}, {"torch_dtype": "torch.int8"}], ids=str
)
def test_a_dtype_that_torch_does_not_have_is_refused(tmp_path: Path, entry: dict[str, Any], tied: bool):
    path = _folder(tmp_path, tie_word_embeddings=tied, **{"dtype": None, **entry})
    for load in (load_hf, read_hf_config):
        with pytest.raises(ValueError, match=r"config\.json: dtype=.*: expected a floating-point type"):
            load(path)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "scaling goes first": {
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "an original length outside": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
    "one in both": {
        "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32},
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("case", ROPES)
def test_rotary_entries_mean_what_they_mean_to_transformers(tmp_path: Path, case: str):
    path = _folder(tmp_path, **ROPES[case])
    stock = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    stock.config.use_cache = False
    budget = accuracy.FACTOR * accuracy.rounding(torch.float32, terms=64)
    expected = stock(tokens(2, 40)).logits
    assert accuracy.relative_error(load_hf(path)(tokens(2, 40)), expected) <= budget


# --- tensors ----------------------------------------------------------------------------------------------------------


def _rewritten(path: Path, **changed: Any) -> Path:
    tensors = load_file(path / WEIGHTS) | {name.replace("/", "."): value for name, value in changed.items()}
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, path / WEIGHTS, {"format": "pt"})
    return path


def test_a_buffer_that_training_makes_must_be_in_the_files(tmp_path: Path):
    """The bias of DeepSeek's router: transformers warns and takes zeros."""
    config = transformers.DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=8,
        q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        max_position_embeddings=64,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert name in load_file(tmp_path / WEIGHTS)
    load_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"the files have no {re.escape(name)} \(1 such"):
        load_pretrained(_rewritten(tmp_path, **{name: None}))


def test_two_names_of_one_parameter_are_refused(tmp_path: Path):
    path = _rewritten(_folder(tmp_path), **{"norm.weight": torch.ones(32)})
    with pytest.raises(ValueError, match=r"model\.norm\.weight and norm\.weight, which are both model\.norm\.weight"):
        load_pretrained(path)
    with pytest.raises(ValueError, match=r"norm\.weight \(1 such in all\) has no place"):
        load_hf(path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.9.mlp.up_proj.weight",
        "model.embed_norm.weight",
        "lm_head.bias",
    ],
)
def test_a_tensor_without_a_place_is_named(tmp_path: Path, name: str):
    path = _rewritten(_folder(tmp_path), **{name: torch.ones(2, 32)})
    for load in LOADERS:
        with pytest.raises(ValueError, match=rf"{re.escape(name)} \(1 such in all\) has no place"):
            load(path)


def test_what_older_versions_stored_is_left_out_as_in_transformers(tmp_path: Path):
    foreign("bert", is_decoder=True).save_pretrained(tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    _rewritten(tmp_path, **{"bert.embeddings.position_ids": torch.arange(64)[None]})
    assert_same_model(stock, load_pretrained(tmp_path), tokens())


MASK = torch.ones(64, 64, dtype=torch.uint8).tril()[None, None]
LEFT_OUT: dict[str, tuple[str, torch.Tensor]] = {
    "transformer.h.0.attn.masked_bias": ("gpt2", torch.tensor(-1e4)),
    "transformer.h.1.attn.bias": ("gptj", MASK),
    "transformer.h.0.attn.causal_mask": ("codegen", MASK.bool()),
    "bert.pooler.dense.weight": ("bert", torch.ones(32, 32)),
    "cls.seq_relationship.bias": ("bert", torch.ones(2)),
    "score.weight": ("llama", torch.ones(2, 32)),
    "v_head.summary.weight": ("llama", torch.ones(1, 32)),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_tensor_that_no_logit_depends_on_is_told_and_left_out(tmp_path: Path, name: str):
    kind, tensor = LEFT_OUT[name]
    path = _folder(tmp_path, kind, **({"is_decoder": True} if kind == "bert" else {}))
    stock = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    _rewritten(path, **{name: tensor})
    for load in LOADERS if kind == "llama" else (load_pretrained,):
        with pytest.warns(UserWarning, match=rf"holds {re.escape(name)} \(1 such in all\).* no logit depends on it"):
            model = load(path)
        if load is load_pretrained:
            assert_same_model(stock, model, tokens())
