"""What a Hugging Face folder holds beside weights and sizes: token ids, the tokenizer, settings for generation."""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardfuse import ParallelMLP, ParallelTransformer, TransformerConfig, VocabParallelEmbedding, parallelize
from shardfuse.layers.hf.folders import (
    config_from_hf,
    config_to_hf,
    export_hf,
    load_hf,
    load_hf_weights,
    read_hf_config,
)
from shardfuse.parallel.checkpoint import checked
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.core.sharding import gather

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_positions": 64,
}
IDS = {"bos_token_id": 3, "eos_token_id": [5, 7], "pad_token_id": 9}
COMPANIONS = {
    "generation_config.json": '{"eos_token_id": [5, 7]}',
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": "{}",
    "special_tokens_map.json": "{}",
    "added_tokens.json": "{}",
    "tokenizer.model": "model",
    "vocab.json": "{}",
    "merges.txt": "a b",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
}


def _folder(folder: Path, style: str = "gated", **ids: Any) -> Path:
    """A folder as transformers writes it, with a tokenizer, and files that no export copies."""
    torch.manual_seed(2)
    export_hf(ParallelTransformer(TransformerConfig(style=style, init_std=0.3, **SIZES, **ids)), folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | IDS))
    (folder / "checksums.json").unlink()  # of the config before this change
    for name, text in COMPANIONS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for name in ("README.md", "modeling.py", "pytorch_model.bin"):
        (folder / name).write_text("not ours")
    return folder


def _companions(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    ours = {"config.json", "checksums.json", "model.safetensors", "model.safetensors.index.json"}
    found = {path.relative_to(folder).as_posix(): path for path in files}
    return {
        name: path.read_text() for name, path in found.items() if name not in ours and not name.startswith("model-")
    }


def _ids(folder: Path) -> dict[str, Any]:
    raw = json.loads((folder / "config.json").read_text())
    return {name: raw[name] for name in IDS}


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["gelu", "gated"])
def test_an_export_keeps_ids_and_companions(tmp_path: Path, style: str):
    source = _folder(tmp_path / "source", style)
    model = load_hf(source)
    config = model.config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (3, (5, 7), 9)
    export_hf(model, tmp_path / "target")
    assert _ids(tmp_path / "target") == IDS
    assert _companions(tmp_path / "target") == COMPANIONS
    export_hf(load_hf(tmp_path / "target"), tmp_path / "third")
    assert _companions(tmp_path / "third") == COMPANIONS
    assert not list(tmp_path.rglob("*.tmp"))


def test_an_export_into_its_own_source(tmp_path: Path):
    source = _folder(tmp_path / "source")
    before = _companions(source)
    export_hf(load_hf(source), source)
    assert _companions(source) == before


def test_like_names_another_folder(tmp_path: Path):
    source, other = _folder(tmp_path / "source"), tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("another")
    model = load_hf(source)
    export_hf(model, tmp_path / "target", like=str(other))
    assert _companions(tmp_path / "target") == {"tokenizer.json": "another"}
    export_hf(ParallelTransformer(TransformerConfig(**SIZES)), tmp_path / "fresh")
    assert _companions(tmp_path / "fresh") == {}
    model.loaded_from = None
    export_hf(model, tmp_path / "none")
    assert _companions(tmp_path / "none") == {}


def test_a_source_that_is_gone_is_named(tmp_path: Path):
    model = load_hf(_folder(tmp_path / "source"))
    shutil.rmtree(tmp_path / "source")
    with pytest.raises(FileNotFoundError, match=r"like=.*source: no such folder"):
        export_hf(model, tmp_path / "target", like=tmp_path / "source")
    assert not (tmp_path / "target").exists()
    with pytest.warns(UserWarning, match=r"source, from which the weights were loaded, is gone: .* with like=FOLDER"):
        export_hf(model, tmp_path / "target")
    assert _companions(tmp_path / "target") == {}
    assert load_hf(tmp_path / "target").config == model.config


def test_weights_that_the_checksums_do_not_list_are_not_read(tmp_path: Path):
    """What an export leaves that is killed between its renames: whole weights of before beside listed parts."""
    torch.manual_seed(2)
    model = ParallelTransformer(TransformerConfig(style="gated", **SIZES))
    export_hf(model, tmp_path / "a")
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    export_hf(model, tmp_path / "b")
    content = json.loads((tmp_path / "a" / "checksums.json").read_text())
    listed = content["files"]
    listed["model-00001-of-00001.safetensors"] = listed.pop("model.safetensors")
    (tmp_path / "a" / "model.safetensors").rename(tmp_path / "a" / "model-00001-of-00001.safetensors")
    names = {name: "model-00001-of-00001.safetensors" for name, _ in model.named_parameters()}
    index = {"metadata": {"total_size": 1}, "weight_map": names}
    checked.write_text(tmp_path / "a" / "model.safetensors.index.json", json.dumps(index))
    listed["model.safetensors.index.json"] = checked.checksum(tmp_path / "a" / "model.safetensors.index.json")
    checked.write_json(tmp_path / "a" / "checksums.json", {"format": content["format"], "files": listed})
    want = load_hf(tmp_path / "a").model.norm.weight.clone()
    shutil.copyfile(tmp_path / "b" / "model.safetensors", tmp_path / "a" / "model.safetensors")
    assert torch.equal(load_hf(tmp_path / "a").model.norm.weight, want)
    del listed["model-00001-of-00001.safetensors"]
    checked.write_json(tmp_path / "a" / "checksums.json", {"format": content["format"], "files": listed})
    with pytest.raises(ValueError, match=r"model-00001-of-00001.safetensors: not a file of this export"):
        load_hf(tmp_path / "a")


@pytest.mark.parametrize("name", ["config.json", "checksums.json", "model.safetensors"])
def test_pipes_are_refused(tmp_path: Path, name: str):
    export_hf(ParallelTransformer(TransformerConfig(style="gated", **SIZES)), tmp_path / "a")
    (tmp_path / "a" / name).unlink()
    os.mkfifo(tmp_path / "a" / name)
    with pytest.raises(ValueError, match=rf"{name}: expected a file"):
        load_hf(tmp_path / "a")


def _through(rank: int, world: int, degrees: dict[str, int], options: dict[str, Any], source: Path, out: Path) -> None:
    mesh = init_mesh(**degrees, device_type="cpu")
    model = ParallelTransformer(read_hf_config(source), mesh=mesh, device="meta")
    spread: Any = parallelize(model, mesh, **options)
    load_hf_weights(source, spread.module)
    export_hf(spread, out)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("degrees", "options"), [({"tp": 2}, {}), ({"dp": 2}, {"zero": 3}), ({"pp": 2}, {"schedule": "1f1b"})], ids=str
)
def test_every_layout_keeps_them(ranks: Any, tmp_path: Path, degrees: dict[str, int], options: dict[str, Any]):
    source = _folder(tmp_path / "source")
    ranks(2, _through, degrees, options, source, tmp_path / "target")
    assert _ids(tmp_path / "target") == IDS
    assert _companions(tmp_path / "target") == COMPANIONS


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, (1, 2, None)),  # transformers' defaults for a Llama
        ({"bos_token_id": None, "eos_token_id": None}, (None, None, None)),
        ({"eos_token_id": [1, 2], "pad_token_id": -1}, (1, (1, 2), -1)),
    ],
    ids=str,
)
def test_ids_that_a_config_leaves_out(change: dict[str, Any], expected: tuple[Any, ...]):
    raw = config_to_hf(TransformerConfig(style="gated", **SIZES))
    raw = {name: value for name, value in raw.items() if name not in IDS} | change
    config = config_from_hf(raw)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == expected
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config
    hash(config)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"pad_token_id": 40}, "pad_token_id=40: expected a token of the vocabulary, 0 to 39"),
        ({"pad_token_id": -41}, "pad_token_id=-41: expected at least -40"),
        ({"pad_token_id": "9"}, "pad_token_id='9': expected a whole number"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>': expected a token id, or None"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id=.*: expected a token id, or None"),
        ({"bos_token_id": 1.0}, "bos_token_id=1.0: expected a token id, or None"),
    ],
)
def test_ids_that_are_none(ids: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**SIZES, **ids)


@pytest.mark.parametrize("name", ["org/name", "meta-llama/Llama-3.2-1B"])
def test_the_name_of_a_repository_is_to_be_downloaded_first(name: str):
    with pytest.raises(FileNotFoundError, match=f"^{name}: no such folder.*hf download {name} --local-dir "):
        load_hf(name)
    with pytest.raises(FileNotFoundError, match=r"^/org/name: no such folder: expected config.json and weights; / "):
        load_hf("/org/name")


@pytest.mark.parametrize(
    "model", [ParallelMLP(8, 8), nn.Linear(2, 2), "folder"], ids=lambda model: type(model).__name__
)
def test_another_model_is_not_exported(tmp_path: Path, model: Any):
    with pytest.raises(TypeError, match=r"export_hf: model is a .*: expected a ParallelTransformer"):
        export_hf(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- the padding token ------------------------------------------------------------------------------------------------

PAD = 9
ROWS = torch.tensor([[1, 2, 3, PAD, 5, 6, PAD], [7, PAD, 11, 12, 13, 14, 15]])
STEPS = 3


def _train(model: nn.Module, logits: Any) -> tuple[list[float], torch.Tensor]:
    """The losses of a few steps, and the gradient of the embedding at the last one."""
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(logits(ROWS)[:, :-1].flatten(0, 1), ROWS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    grad = model.model.embed_tokens.weight.grad  # type: ignore[union-attr]
    return losses, grad  # type: ignore[return-value]


def _ours(rank: int, world: int, folder: Path, params: str) -> tuple[list[float], torch.Tensor]:
    mesh = init_mesh(tp=world, device_type="cpu")
    model = load_hf(folder, mesh=mesh, dtype=torch.float64, params=params)
    losses, grad = _train(model, lambda tokens: model.gather_logits(model(tokens)))
    return losses, grad if world == 1 or params == "local" else gather(grad)


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("style", "tied"), [("gated", False), ("gated", True), ("gelu", False)])
def test_training_is_that_of_the_stock_model(ranks: Any, tmp_path: Path, style: str, tied: bool, world: int):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
    sizes = SIZES | {"num_kv_heads": 4}
    torch.manual_seed(2)
    config = TransformerConfig(style=style, init_std=0.3, pad_token_id=PAD, tie_embeddings=tied, **sizes)
    ours = ParallelTransformer(config)
    assert not ours.model.embed_tokens.weight[PAD].any()  # as fresh as nn.Embedding's
    with torch.no_grad():
        ours.model.embed_tokens.weight[PAD] = 0.25  # as trained as any
    export_hf(ours, tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert stock.model.embed_tokens.padding_idx == PAD
    for module in stock.modules():
        if type(module).__name__.endswith("RMSNorm"):  # transformers computes it in fp32 for any dtype
            module.forward = functools.partial(_rms_norm, module)
    expected, grad = _train(stock, lambda tokens: stock(tokens).logits)
    assert bool(grad[PAD].any()) == tied  # the head's gradient is left
    for losses, found in ranks(world, _ours, tmp_path, "dtensor"):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert (found - grad).norm() <= 1e-10 * grad.norm()
        assert bool(found[PAD].any()) == tied


def _rms_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


def _row_gradients(rank: int, world: int, padding: int, sequence_parallel: bool) -> torch.Tensor:
    mesh = init_mesh(tp=world, device_type="cpu")
    torch.manual_seed(0)
    layer = VocabParallelEmbedding(8, 4, padding, mesh=mesh, sequence_parallel=sequence_parallel)
    layer(torch.tensor([0, 3, 4, 4, 7, 7, 7, 1])).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad if world == 1 else gather(layer.weight.grad)


@pytest.mark.ranks
@pytest.mark.parametrize("padding", [0, 3, 4, 7, -1, 2])
def test_the_padding_row_takes_no_gradient(ranks: Any, padding: int):
    stock = nn.Embedding(8, 4, padding)
    stock(torch.tensor([0, 3, 4, 4, 7, 7, 7, 1])).sum().backward()
    for world, sequence_parallel in ((1, False), (2, False), (2, True), (4, False)):
        for found in ranks(world, _row_gradients, padding, sequence_parallel):
            assert torch.equal(found, stock.weight.grad)
    layer = VocabParallelEmbedding(8, 4, padding)
    assert layer.weight.eq(0).all(dim=1).tolist() == [row == padding % 8 for row in range(8)]


def test_a_padding_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="padding_idx=8: expected a token of the vocabulary, 0 to 7"):
        VocabParallelEmbedding(8, 4, 8)
