"""``load_pretrained`` and ``save_pretrained``: folders of transformers into shards, and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from shardfuse import (
    full_state_dict,
    fuse,
    init_mesh,
    load_checkpoint,
    load_pretrained,
    parallelize,
    save_checkpoint,
    save_pretrained,
)
from shardfuse.kernels.dev import accuracy
from shardfuse.layers.fuse import Fused
from shardfuse.parallel.core.mesh import data_coordinate

pytest.importorskip("transformers")
import transformers
from foreign import foreign, tokens, without_dropout
from oracle import assert_same_model

BUDGET = accuracy.FACTOR * accuracy.rounding(torch.float32, terms=64)
STEPS = 5
EVERY_DAY = {("gemma2", "tp"), ("phi3", "tp"), ("gpt2", "pipeline"), ("mixtral", "zero 3")}
KINDS = ("gemma2", "phi3", "gpt2", "mixtral", "llama", "qwen2", "opt", "gpt_neox", "gpt_oss", "bloom", "mpt", "olmo2")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "zero 3": {"dp": 2, "zero": 3},
    "pipeline": {"pp": 2, "schedule": "1f1b"},
}
BESIDE = {"tokenizer.json": '{"a": 1}', "chat_template.jinja": "{{ messages }}", "merges.txt": "a b\n"}


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """Makes the folder of a small random model, in several files, with a tokenizer and settings for generation."""

    def make(kind: str, **changes: Any) -> Path:
        path = tmp_path / kind
        model = foreign(kind, torch.float32, **changes)
        model.generation_config.eos_token_id, model.generation_config.max_new_tokens = [5, 9], 6
        model.save_pretrained(path, max_shard_size="20KB")
        for name, text in BESIDE.items():
            (path / name).write_text(text)
        assert len(list(path.glob("*.safetensors"))) > 2
        return path

    return make


def _stock(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def _batches() -> list[torch.Tensor]:
    return [torch.randint(1, 64, (4, 9), generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)


def _train_stock(path: Path, out: Path) -> None:
    """Five steps of the stock model in fp64, saved."""
    model = without_dropout(_stock(path, torch.float64)).train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    optimizer = _optimizer(model)
    for batch in _batches():
        logits = model(batch[:, :-1], use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), out)


def _spread(rank: int, world: int, path: Path, layout: dict[str, Any], expected: Path, out: Path) -> list[str]:
    options = dict(layout)
    mesh = init_mesh(**{name: options.pop(name, 1) for name in ("dp", "pp", "tp")}, device_type="cpu")
    eager = {"experts_implementation": "eager"} if path.name in ("mixtral", "gpt_oss") else {}
    loaded = load_pretrained(path, mesh, dtype=torch.float64, device="meta", model_kwargs=eager)
    assert all(param.is_meta for param in loaded.parameters())
    model = parallelize(without_dropout(loaded), mesh, **options)
    optimizer = _optimizer(model)
    share, readers = data_coordinate(mesh)
    for batch in _batches():
        mine = batch.tensor_split(readers)[share]
        model.step(mine[:, :-1], mine[:, 1:])
        optimizer.step()
        optimizer.zero_grad()
    save_pretrained(model, out, shard_bytes=30_000)
    want = torch.load(expected, weights_only=True)
    return [
        f"{name}: {error:.1e}"
        for name, value in full_state_dict(model).items()
        if not (error := accuracy.relative_error(value, want[name])) <= BUDGET
    ]


CASES = [
    pytest.param(kind, layout, marks=[] if (kind, layout) in EVERY_DAY else [pytest.mark.nightly])
    for kind in KINDS
    for layout in LAYOUTS
]


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_a_folder_is_loaded_trained_and_saved(ranks: Any, folder: Any, kind: str, layout: str, tmp_path: Path):
    """Five steps as the stock model's; what is saved, the stock model loads, and stops generating where it stopped."""
    path, out = folder(kind), tmp_path / "out"
    _train_stock(path, tmp_path / "expected.pt")
    for wrong in ranks(2, _spread, path, LAYOUTS[layout], tmp_path / "expected.pt", out):
        assert wrong == []
    assert len(list(out.glob("*.safetensors"))) > 1
    assert {name: (out / name).read_text() for name in BESIDE} == BESIDE
    model, told = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert {name: keys for name, keys in told.items() if keys} == {}
    assert model.dtype == torch.float64
    assert model.config.to_diff_dict().keys() <= _stock(path).config.to_diff_dict().keys() | {"dtype", "architectures"}
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    assert all(accuracy.relative_error(value, expected[name]) <= BUDGET for name, value in model.state_dict().items())
    assert (model.generation_config.eos_token_id, model.generation_config.max_new_tokens) == ([5, 9], 6)


def _read(rank: int, world: int, path: Path, out: Path) -> tuple[int, int, int, int, torch.Tensor]:
    model: Any = load_pretrained(path, init_mesh(tp=world, device_type="cpu"))
    whole = sum(param.nbytes for param in model.parameters() if not isinstance(param, DTensor))
    held = sum(param.to_local().nbytes for param in model.parameters() if isinstance(param, DTensor))
    save_pretrained(model, out)
    with torch.no_grad():
        return model.reading.nbytes, model.reading.file_bytes, whole, held, model(tokens()).logits


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("phi3", 2),
        *(pytest.param(kind, world, marks=pytest.mark.nightly) for kind in KINDS for world in (1, 2, 4)),
    ],
)
def test_each_rank_reads_its_own_slices(ranks: Any, folder: Any, kind: str, world: int, tmp_path: Path):
    path = folder(kind, **({"num_key_value_heads": 4} if world == 4 else {}))
    found = ranks(world, _read, path, tmp_path / "out")
    stock = _stock(path)
    logits = assert_same_model(stock, _stock(tmp_path / "out"), tokens())
    read, file, whole, *_ = (sum(each) for each in zip(*(numbers[:4] for numbers in found)))
    assert read <= 1.05 * (file / world + whole * (world - 1) / world)
    for nbytes, _, mine, held, ours in found:
        assert nbytes <= 1.01 * (mine + held)
        assert accuracy.relative_error(ours, logits) <= BUDGET


# --- what may be wrong with a folder ----------------------------------------------------------------------------------


def _damaged(path: Path, how: str) -> None:
    index = json.loads((path / "model.safetensors.index.json").read_text())
    shard = path / sorted(set(index["weight_map"].values()))[1]
    match how:
        case "missing":
            shard.unlink()
        case "cut short":
            shard.write_bytes(shard.read_bytes()[:-100])
        case "renamed":
            name = next(name for name, file in index["weight_map"].items() if file == shard.name)
            index["weight_map"][name.replace("layers", "blocks")] = index["weight_map"].pop(name)
            (path / "model.safetensors.index.json").write_text(json.dumps(index))
            tensors = load_file(shard)
            tensors[name.replace("layers", "blocks")] = tensors.pop(name)
            save_file(tensors, shard)
        case "another index":
            name = next(name for name, file in index["weight_map"].items() if file == shard.name)
            index["weight_map"][name.replace("layers", "blocks")] = index["weight_map"].pop(name)
            (path / "model.safetensors.index.json").write_text(json.dumps(index))
        case "another size":
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
        case "more layers":
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": None}))
        case "no config":
            (path / "config.json").unlink()
        case "unknown model":
            (path / "config.json").write_text('{"model_type": "nothing"}')


REFUSED = {
    "missing": (FileNotFoundError, r"model-00002-of-\d+\.safetensors: no such file"),
    "cut short": (ValueError, r"model-00002-of-\d+\.safetensors: cut short or corrupt"),
    "renamed": (ValueError, r"the files have no model\.layers\.\d\S+ \(1 such"),
    "another index": (ValueError, r"File does not contain tensor model\.blocks"),
    "another size": (ValueError, r"model\.layers\.\d\.mlp\.\w+\.weight is \[\d+, \d+\], expected \[\d+, \d+\]"),
    "more layers": (
        ValueError,
        r"config\.json: num_hidden_layers is 3, and the files hold 2 layers",
    ),
    "no config": (FileNotFoundError, r"config\.json: no such file"),
    "unknown model": (ValueError, r"config\.json: .*nothing"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_damaged_folders_are_refused(folder: Any, how: str):
    path = folder("llama")
    _damaged(path, how)
    error, message = REFUSED[how]
    with pytest.raises(error, match=message):
        load_pretrained(path)


def test_names_of_the_hub_and_other_objects_are_refused(folder: Any, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"hf download org/model"):
        load_pretrained("org/model")
    with pytest.raises(TypeError, match=r"save_pretrained: model is a .*Linear: expected one of transformers"):
        save_pretrained(nn.Linear(2, 2), tmp_path)
    model = load_pretrained(folder("llama"))
    with pytest.raises(ValueError, match="shard_bytes=0: expected at least 1"):
        save_pretrained(model, tmp_path, shard_bytes=0)
    with pytest.raises(FileNotFoundError, match="like=nowhere"):
        save_pretrained(model, tmp_path / "out", like="nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match="could not export to"):
        save_pretrained(model, tmp_path / "file")


def test_an_older_export_is_replaced_and_the_bar_is_shown(folder: Any, capfd: Any):
    path = folder("llama")
    model = load_pretrained(path, progress=True)
    assert "loading" in capfd.readouterr().err
    save_pretrained(model, path)
    assert [each.name for each in path.glob("*.safetensors*")] == ["model.safetensors"]
    assert not [each for each in path.iterdir() if each.name.endswith(".tmp")]
    assert_same_model(foreign("llama"), _stock(path), tokens())
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="cut short or corrupt"):
        load_pretrained(path)


# ----------------------------------------------------------------------------------------------- whole state_dicts


def _whole_states(rank: int, world: int, kind: str) -> None:
    """Torch's functions, and plain load_state_dict, between stock and split models."""
    stock, other = foreign(kind), foreign(kind)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1.0)
    full = StateDictOptions(full_state_dict=True)
    for load in (
        lambda model, state: set_model_state_dict(model, state, options=full),
        lambda model, state: model.load_state_dict(state),
    ):
        model = fuse(foreign(kind), init_mesh(tp=world, device_type="cpu"))
        load(model, {name: value.clone() for name, value in other.state_dict().items()})
        for states in (get_model_state_dict(model, options=full), full_state_dict(model)):
            for name, value in other.state_dict().items():
                if name in states:
                    assert torch.equal(states[name], value), name
            assert set(other.state_dict()) - set(states) <= {"lm_head.weight"}
        stock.load_state_dict(full_state_dict(model))
        assert_same_model(other, stock, tokens())
        assert any(isinstance(module, Fused) for module in model.modules())


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["gemma2", *(pytest.param(k, marks=pytest.mark.nightly) for k in KINDS)])
def test_stock_state_dicts_load_into_split_models_and_back(ranks: Any, kind: str):
    ranks(2, _whole_states, kind)


def _between(rank: int, world: int, path: Path) -> None:
    """A checkpoint of the split model loads into the stock one, with its optimizer, and back."""
    stock, model = foreign("gpt2"), fuse(foreign("gpt2"), init_mesh(tp=world, device_type="cpu"))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.5)
    optimizers = [_optimizer(each) for each in (model, stock)]
    model(tokens(), labels=tokens()).loss.backward()
    optimizers[0].step()
    save_checkpoint(path / "fused", model, optimizers[0])
    load_checkpoint(path / "fused", stock, optimizers[1])
    for name, value in full_state_dict(model).items():
        assert torch.equal(stock.state_dict()[name], value), name
    for each, optimizer in zip((model, stock), optimizers):  # the same step, of the same state
        for param in each.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    save_checkpoint(path / "stock", stock, optimizers[1])
    after = full_state_dict(model)
    load_checkpoint(path / "stock", model, optimizers[0])
    for name, value in full_state_dict(model).items():
        assert accuracy.relative_error(value, after[name]) <= BUDGET, name


@pytest.mark.ranks
def test_checkpoints_move_between_fused_and_stock(ranks: Any, tmp_path: Path):
    ranks(2, _between, tmp_path)


# --------------------------------------------------------------------------------------------------------- memory


def _peak(rank: int, world: int, path: Path, layout: dict[str, int]) -> tuple[int, int, int]:
    """Bytes that loading added to the resident memory at its peak, this rank's share, and the largest tensor."""
    mesh = init_mesh(**{name: size for name, size in layout.items() if name != "zero"}, device_type="cpu")
    small = fuse(foreign("llama"), mesh if "tp" in layout else None)  # imports what loading needs
    parallelize(small, mesh, zero=layout.get("zero", 0))
    Path("/proc/self/clear_refs").write_text("5")  # begin to measure the peak anew
    before = _kilobytes("VmRSS") * 1024
    model: nn.Module = load_pretrained(path, mesh, device="meta" if "zero" in layout else None)
    if "zero" in layout:
        model = parallelize(model, mesh, zero=layout["zero"])
    added = _kilobytes("VmHWM") * 1024 - before
    share = sum((param.to_local() if isinstance(param, DTensor) else param).nbytes for param in model.parameters())
    return added, share, max(param.nbytes for param in model.parameters())


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


@pytest.mark.ranks
@pytest.mark.parametrize("layout", [{"tp": 2}, {"dp": 2, "zero": 3}], ids=str)
@pytest.mark.parametrize("layers", [8, pytest.param(32, marks=pytest.mark.nightly)])
def test_no_rank_holds_more_than_its_share(ranks: Any, tmp_path: Path, layers: int, layout: dict[str, int]):
    """Of a model of 0.6 GB, nightly of 2 GB, in bf16."""
    sizes = {"hidden_size": 1024, "intermediate_size": 6144, "vocab_size": 32000, "num_attention_heads": 16}
    sizes |= {"num_key_value_heads": 4, "num_hidden_layers": layers, "head_dim": 64, "tie_word_embeddings": False}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(torch.bfloat16)
    model.to_empty(device="cpu")
    for param in model.parameters():
        torch.nn.init.zeros_(param)
    model.save_pretrained(tmp_path, max_shard_size="400MB")
    total = sum(param.nbytes for param in model.parameters())
    assert total > (0.4e9 if layers == 8 else 1.5e9)
    del model
    for added, share, largest in ranks(2, _peak, tmp_path, layout):
        assert share < 0.55 * total
        assert added <= 1.2 * share + largest
    shutil.rmtree(tmp_path)
