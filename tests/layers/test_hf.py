"""Folders exchanged with transformers: equal logits both ways, and clear words about folders that are no good."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
import torch.distributed as dist
from oracle import assert_same_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardfuse import ParallelTransformer, TransformerConfig
from shardfuse.kernels.dev import accuracy
from shardfuse.layers.hf import folders
from shardfuse.layers.hf.folders import (
    config_from_hf,
    config_to_hf,
    export_hf,
    load_hf,
    load_hf_weights,
    read_hf_config,
)
from shardfuse.parallel.checkpoint import checked
from shardfuse.parallel.core.mesh import tp_group

TOKENS = torch.arange(14).view(2, 7) * 5 % 40
TERMS = 256  # two layers: what sums that follow one another come to
SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_positions": 64,
    "rope_theta": 500.0,
    "norm_eps": 1e-4,
    "init_std": 0.3,
}
STYLES = {
    "gelu": TransformerConfig(style="gelu", **SMALL),
    "gelu-tied-no-bias": TransformerConfig(style="gelu", tie_embeddings=True, bias=False, **SMALL),
    "gated": TransformerConfig(style="gated", **SMALL),
    "gated-tied-bias": TransformerConfig(style="gated", tie_embeddings=True, bias=True, **SMALL),
    "gated-wide-heads": TransformerConfig(style="gated", head_dim=8, **SMALL),
    "gelu-wide-heads": TransformerConfig(style="gelu", head_dim=8, **SMALL),
}


def _model(style: str, **options: Any) -> ParallelTransformer:
    torch.manual_seed(2)
    model = ParallelTransformer(STYLES[style], **options)
    with torch.no_grad():  # biases and norms start as constants, which would hide mistakes
        for name, param in model.named_parameters():
            if param.dim() == 1:
                offsets = torch.randn(param.shape, generator=torch.Generator().manual_seed(len(name)))
                param.add_(offsets * 0.3)
    return model


def _group(world: int) -> Any:
    return tp_group(dist.group.WORLD if world > 1 else None)


def _export_body(rank: int, world: int, style: str, source: str, target: str) -> None:
    export_hf(load_hf(source, mesh=_group(world)), target)


def _logits_body(rank: int, world: int, directory: str, options: dict[str, Any]) -> torch.Tensor:
    model = load_hf(directory, mesh=_group(world), **options)
    with torch.no_grad():
        return model.gather_logits(model(TOKENS))


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


# ---------------------------------------------------------------------------------------------- with transformers


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("style", STYLES)
def test_transformers_reads_what_we_write(ranks: Any, tmp_path: Path, style: str, world: int):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
    model, folder = _model(style), tmp_path / "ours"
    export_hf(model, folder)
    if world > 1:  # written by sharded ranks
        ranks(world, _export_body, style, str(folder), str(tmp_path / "again"))
        folder = tmp_path / "again"
    theirs, low = (
        _logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))
        for dtype in (torch.float64, torch.float32)
    )
    with torch.no_grad():
        verdict = accuracy.judge("logits", model(TOKENS), low, theirs, terms=TERMS)
    assert verdict.ok, verdict


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("shards", [False, True], ids=["one-file", "index"])
@pytest.mark.parametrize("kind", ["Starcoder2", "Llama"])
def test_we_read_what_transformers_writes(ranks: Any, tmp_path: Path, kind: str, shards: bool, world: int):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
    torch.manual_seed(4)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config)
    theirs.save_pretrained(tmp_path, max_shard_size="4KB" if shards else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    low = _logits(theirs)
    oracle = _logits(theirs.double())
    for options in ({}, {"params": "local"}):
        for ours in ranks(world, _logits_body, str(tmp_path), options):
            verdict = accuracy.judge("logits", ours, low, oracle, terms=TERMS)
            assert verdict.ok, (verdict, options)


# ------------------------------------------------------------------------------------------------------ alone


@pytest.mark.parametrize("style", STYLES)
def test_a_config_survives_the_round_trip(style: str):
    raw = json.loads(json.dumps(config_to_hf(STYLES[style])))
    assert config_from_hf(raw) == STYLES[style]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_folder_gives_the_same_bits_back(tmp_path: Path, dtype: torch.dtype):
    model = _model("gelu-tied-no-bias", dtype=dtype)
    export_hf(model, tmp_path / "a" / "b")
    again = load_hf(tmp_path / "a" / "b")
    for name, value in model.state_dict().items():
        assert again.state_dict()[name].dtype == dtype
        assert torch.equal(again.state_dict()[name], value), name
    assert sorted(os.listdir(tmp_path / "a" / "b")) == ["checksums.json", "config.json", "model.safetensors"]
    with safe_open(tmp_path / "a" / "b" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a dict
    assert load_hf(tmp_path / "a" / "b", dtype=torch.float64).lm_head.weight.dtype == torch.float64


def test_the_config_names_the_dtype_of_what_is_written(tmp_path: Path):
    """Not of the parameters, where the model computes with a copy in another one and its hooks give what is exact."""
    model = _model("gelu", dtype=torch.bfloat16)
    model._register_state_dict_hook(
        lambda module, state, prefix, metadata: {name: value.detach().float() for name, value in state.items()}
    )
    export_hf(model, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].dtype == torch.float32
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


def test_an_export_replaces_an_older_one_and_leaves_other_files(tmp_path: Path):
    export_hf(_model("gated"), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    model = _model("gelu")
    export_hf(model, tmp_path)
    assert torch.equal(load_hf(tmp_path).lm_head.weight, model.lm_head.weight)
    assert sorted(os.listdir(tmp_path)) == ["checksums.json", "config.json", "model.safetensors", "tokenizer.json"]


def test_an_export_that_fails_says_where_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    export_hf(_model("gelu"), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RuntimeError, match=r"could not export to .*No space left on device"):
        export_hf(_model("gated"), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"could not export to .*file"):
        export_hf(_model("gelu"), tmp_path / "file" / "below")


def _unwritable_body(rank: int, world: int, target: str) -> str:
    torch.manual_seed(2)
    model = ParallelTransformer(STYLES["gelu"], mesh=_group(world))
    with pytest.raises(RuntimeError) as caught:
        export_hf(model, target)
    return str(caught.value)


@pytest.mark.ranks
def test_a_failed_export_raises_on_every_rank(ranks: Any, tmp_path: Path):
    (tmp_path / "file").touch()
    for message in ranks(2, _unwritable_body, str(tmp_path / "file")):
        assert "could not export to" in message


def _change_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))


def _change_weights(folder: Path, change: Any) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def _cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


BROKEN: dict[str, tuple[Any, str]] = {
    "no-config": (lambda f: (f / "config.json").unlink(), r"config\.json: no such file"),
    "no-weights": (lambda f: (f / "model.safetensors").unlink(), r"neither model\.safetensors nor"),
    "config-cut": (lambda f: _cut(f / "config.json", 20), r"config\.json: "),
    "config-list": (lambda f: (f / "config.json").write_text("[]"), r"config\.json: expected a JSON object"),
    "weights-cut": (lambda f: _cut(f / "model.safetensors", 5000), r"model\.safetensors: cut short or corrupt"),
    "weights-empty": (lambda f: _cut(f / "model.safetensors", 0), r"model\.safetensors: cut short or corrupt"),
    "weights-foreign": (lambda f: (f / "model.safetensors").write_bytes(b"PK" * 99), "cut short or corrupt"),
    "other-model": (lambda f: _change_config(f, model_type="bert"), "'bert': expected one of star.*load_pretrained"),
    "other-activation": (lambda f: _change_config(f, hidden_act="relu"), "hidden_act='relu'"),
    "other-rope": (
        lambda f: _change_config(f, rope_parameters={"rope_type": "spiral", "factor": 4.0}),
        "rope_type='spiral'",
    ),
    "other-width": (
        lambda f: _change_config(f, intermediate_size=32),
        r"model\.layers\.0\.mlp\.c_fc\.bias is \[24\], expected \[32\]",
    ),
    "no-width": (lambda f: _change_config(f, hidden_size=None), "'hidden_size' is missing"),
    "more-layers": (
        lambda f: _change_config(f, num_hidden_layers=3),
        r"num_hidden_layers is 3, and the files hold 2 layers",
    ),
    "fewer-layers": (lambda f: _change_config(f, num_hidden_layers=1), r"model\.layers\.1.*\(16 such in all\) has no"),
    "lost-tensor": (
        lambda f: _change_weights(f, lambda state: state.pop("model.norm.bias")),
        r"model\.norm\.bias \(1 such in all\), which no weights file holds",
    ),
    "endless-heads": (
        lambda f: _change_config(f, head_dim=float("inf")),
        r"config\.json: head_dim=inf: expected a whole",
    ),
    "many-layers": (
        lambda f: _change_config(f, num_hidden_layers=1 << 62),
        r"num_hidden_layers is 10\^18 or so: expected a number that a model can have",
    ),
    "huge-vocabulary": (
        lambda f: _change_config(f, vocab_size=1 << 40),
        r"is \[40, 16\], expected \[1099511627776, 16\] \(vocab_size=1099511627776\)",
    ),
    "rope-list": (lambda f: _change_config(f, rope_parameters=[1]), r"config\.json: a value has the wrong type"),
    "odd-dtype": (lambda f: _change_config(f, dtype="int8"), "dtype='int8'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_folder_that_is_no_good_is_named(tmp_path: Path, name: str):
    export_hf(_model("gelu"), tmp_path)
    (tmp_path / "checksums.json").unlink()  # as where another program wrote the folder
    breakage, message = BROKEN[name]
    breakage(tmp_path)
    expected = FileNotFoundError if name in ("no-config", "no-weights") else ValueError
    with pytest.raises(expected, match=message) as caught:
        load_hf(tmp_path)
    assert str(tmp_path) in str(caught.value)


# --- checksums --------------------------------------------------------------------------------------------------------


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGED: dict[str, tuple[Any, str]] = {
    "a-weight": (
        lambda f: _flip(f / "model.safetensors", -7),
        r"model\.safetensors: cut short or corrupt \(\d+ bytes with",
    ),
    "weights-cut": (
        lambda f: _cut(f / "model.safetensors", 5000),
        r"model\.safetensors: cut short or corrupt \(5000",
    ),
    "no-weights": (lambda f: (f / "model.safetensors").unlink(), r"neither model\.safetensors nor"),
    "config": (lambda f: _change_config(f, norm_epsilon=1e-3), r"config\.json: cut short or corrupt \(\d+ bytes with"),
    "no-config": (lambda f: (f / "config.json").unlink(), r"config\.json: no such file"),
    "checksums": (lambda f: _flip(f / "checksums.json", -9), r"checksums\.json: (cut short or )?corrupt"),
    "checksums-cut": (lambda f: _cut(f / "checksums.json", 30), r"checksums\.json: cut short or corrupt"),
    "checksums-deep": (
        lambda f: (f / "checksums.json").write_text("[" * 100_000),
        r"checksums\.json: cut short or cor",
    ),
    "config-deep": (lambda f: (f / "config.json").write_text("[" * 100_000), r"config\.json: cut short or corrupt"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_to_an_export_is_noticed_before_anything_changes(tmp_path: Path, name: str):
    export_hf(_model("gelu"), tmp_path)
    damage, message = DAMAGED[name]
    damage(tmp_path)
    expected = FileNotFoundError if name.startswith("no-") else ValueError
    with pytest.raises(expected, match=message):
        load_hf(tmp_path)
    model = _model("gelu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7)
    with pytest.raises(expected, match=message):
        load_hf_weights(tmp_path, model)
    assert all((param == 7).all() for param in model.parameters())
    if "weight" not in name:
        with pytest.raises(expected, match=message):
            read_hf_config(tmp_path)


def test_a_file_that_the_checksums_do_not_list_is_refused(tmp_path: Path):
    export_hf(_model("gelu"), tmp_path)
    sums = json.loads((tmp_path / "checksums.json").read_text())
    del sums["files"]["config.json"], sums["sha256"]
    checked.write_json(tmp_path / "checksums.json", sums)
    with pytest.raises(ValueError, match=r"config\.json: not a file of this export \(checksums\.json does not"):
        load_hf(tmp_path)


def test_an_export_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another export replaces it after the checksums were compared."""
    export_hf(_model("gelu"), tmp_path)
    other = _model("gelu")
    with torch.no_grad():
        other.lm_head.weight.fill_(7)
    read = safetensors.safe_open

    def late(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(folders, "safe_open", read)
        export_hf(other, tmp_path)
        return read(*args, **kwargs)

    monkeypatch.setattr(folders, "safe_open", late)
    with pytest.raises(ValueError, match="another export replaced it while it was being read; load it again"):
        load_hf(tmp_path)
    assert (load_hf(tmp_path).lm_head.weight == 7).all()


def test_an_export_that_ends_halfway_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    export_hf(_model("gelu"), tmp_path)
    replace = Path.replace

    def halt(self: Path, target: Path) -> Path:
        if target.name == "config.json":
            raise KeyboardInterrupt
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", halt)
        with pytest.raises(KeyboardInterrupt):
            export_hf(_model("gated"), tmp_path)
    with pytest.raises(ValueError, match=r"config\.json: cut short or corrupt"):
        load_hf(tmp_path)


def _damaged_body(rank: int, world: int, directory: str) -> str:
    with pytest.raises(ValueError) as caught:
        load_hf(directory, mesh=_group(world))
    return str(caught.value)


@pytest.mark.ranks
def test_every_rank_hears_of_a_damaged_export(ranks: Any, tmp_path: Path):
    export_hf(_model("gelu"), tmp_path)
    _flip(tmp_path / "model.safetensors", -7)
    for message in ranks(2, _damaged_body, str(tmp_path)):
        assert "model.safetensors: cut short or corrupt" in message


def test_an_index_that_points_nowhere_is_named(tmp_path: Path):
    export_hf(_model("gelu"), tmp_path)
    (tmp_path / "checksums.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="'weight_map' is missing"):
        load_hf(tmp_path)
    names = {name: "model-1.safetensors" for name, _ in _model("gelu").named_parameters()}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(FileNotFoundError, match=r"model-1\.safetensors"):
        load_hf(tmp_path)


def test_old_llama_folders_with_rotary_frequencies_load(tmp_path: Path):
    model = _model("gated")
    export_hf(model, tmp_path)
    (tmp_path / "checksums.json").unlink()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _change_weights(tmp_path, lambda state: state.update({name: torch.ones(2)}))
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]  # transformers 4 knew rope_theta only
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert_same_model(model, load_hf(tmp_path), TOKENS)


def _half_broken_body(rank: int, world: int, whole: str, broken: str) -> str:
    with pytest.raises(ValueError) as caught:
        load_hf(broken if rank == 1 else whole, mesh=_group(world))
    return str(caught.value)


@pytest.mark.ranks
def test_a_rank_that_cannot_load_stops_the_others(ranks: Any, tmp_path: Path):
    for name in ("whole", "broken"):
        export_hf(_model("gelu"), tmp_path / name)
    _cut(tmp_path / "broken" / "model.safetensors", 5000)
    for message in ranks(2, _half_broken_body, str(tmp_path / "whole"), str(tmp_path / "broken")):
        assert "cut short or corrupt" in message
