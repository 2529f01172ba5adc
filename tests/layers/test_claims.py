"""A config that claims more than its files hold is refused before what it claims is built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")

import transformers
from torch.nn.modules.module import register_module_module_registration_hook

from shardfuse import load_hf, load_pretrained
from shardfuse.serving.folder import open_folder
from shardfuse.serving.folder_options import FolderOptions
from shardfuse.testing import save_tiny_hf

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 72,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 72, "n_positions": 64}
# For each kind of model its sizes, and the loaders that take it.
FAMILIES: dict[str, tuple[dict[str, Any], tuple[Callable[..., Any], ...]]] = {
    "llama": (SIZES, (load_hf, load_pretrained)),
    "mistral": (SIZES, (load_pretrained,)),
    "gemma2": ({**SIZES, "head_dim": 8}, (load_pretrained,)),
    "mixtral": ({**SIZES, "num_local_experts": 5}, (load_pretrained,)),
    "qwen3_moe": ({**SIZES, **EXPERTS}, (load_pretrained,)),
    "gpt2": (GPT2, (load_pretrained,)),
}
# Fields that size a tensor in each kind of model that has them, and load_hf's own names for them.
SIZING = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_key_value_heads", "vocab_size", "head_dim"),
    *("moe_intermediate_size", "num_experts", "num_local_experts", "n_embd", "n_layer", "n_positions"),
}
OURS = {"num_key_value_heads": "num_kv_heads"}
MODULES = 300  # the sound models have fewer; a layer has some 20


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: Any, tmp_path_factory: Any) -> tuple[str, Path]:
    sizes, _ = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("claims") / request.param
    config = transformers.CONFIG_MAPPING[request.param](**sizes, tie_word_embeddings=False)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return request.param, folder


@pytest.mark.parametrize("claim", [-7, 0, 1000, 10**7, 10**12, 10**30])
def test_a_claim_beyond_the_files_is_refused_with_its_field(family: tuple[str, Path], tmp_path: Path, claim: int):
    name, folder = family
    good = json.loads((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    for field in good.keys() & SIZING:
        (tmp_path / "config.json").write_text(json.dumps({**good, field: claim}))
        for load in FAMILIES[name][1]:
            said, modules = _loaded(load, tmp_path)
            assert modules < MODULES, (field, load)
            if (name, field) != ("qwen3_moe", "intermediate_size"):  # which only its dense layers have
                assert said, (field, load)
                assert claim == 0 or field in said or OURS.get(field, field) in said, (field, load.__name__, said)
                assert claim in (-7, 0, 10**30) or str(claim) in said, said


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        ({"num_labels": 10**9}, "num_labels is 1000000000: expected at most"),
        ({"attention_types": [[["global"], 10**10]]}, "attention_types holds 10000000000 in a list of lists"),
        ({"vision_config": {"num_hidden_layers": 10**9}}, "vision_config.num_hidden_layers is 1000000000: expected at"),
        ({"text_config": {"num_hidden_layers": 3}}, "text_config.num_hidden_layers is 3, and the files hold 2 layers"),
        ({"model_type": "qwen2", "num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers is 1000000000"),
    ],
)
def test_nothing_is_made_as_long_as_a_config_says(tmp_path: Path, claim: dict[str, Any], says: str):
    folder = save_tiny_hf(tmp_path / "tiny")
    (folder / "checksums.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **claim}))
    for load in (load_pretrained, load_hf, lambda folder: open_folder(FolderOptions(folder, device="cpu"))):
        with pytest.raises(ValueError, match=f"config.json: {says}"):
            load(folder)


def test_what_transformers_writes_is_loaded(tmp_path: Path):
    """max_window_layers is 28 by default, whatever the number of layers."""
    config = transformers.CONFIG_MAPPING["qwen2"](**SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["max_window_layers"] > SIZES["num_hidden_layers"]
    assert load_pretrained(tmp_path).config.num_hidden_layers == 2


def _loaded(load: Callable[..., Any], folder: Path) -> tuple[str, int]:
    """The error's message, which must be a ValueError's, and the number of modules that were built."""
    built = []
    hook = register_module_module_registration_hook(lambda module, name, child: built.append(name))
    try:
        load(folder)
    except ValueError as error:
        return str(error), len(built)
    finally:
        hook.remove()
    return "", len(built)
