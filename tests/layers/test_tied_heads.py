"""Tied parameters: the files of a folder say whether a head is its embedding, and what is saved says so too."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from shardfuse import (
    ParallelTransformer,
    export_hf,
    full_state_dict,
    fuse,
    init_mesh,
    load_hf,
    load_pretrained,
    parallelize,
    save_pretrained,
)
from shardfuse.layers.hf.folders import load_hf_weights, read_hf_config

pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
import transformers
from foreign import ARCHITECTURES, foreign, tokens

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TOLD = "the files hold other values for it, which are kept"
# Encoders that generate tie a bias as well.
DECODER = {"is_decoder": True}
OTHERS: dict[str, dict[str, Any]] = {"bert": DECODER, "roberta": DECODER, "electra": DECODER, "rwkv": {}, "trocr": {}}
LOADERS: tuple[Callable[..., Any], ...] = (load_hf, load_pretrained)


def _folder(path: Path, kind: str = "llama", **changes: Any) -> Path:
    """A folder of ``kind`` whose config ties a head that differs."""
    foreign(kind, tie_word_embeddings=False, **{**OTHERS.get(kind, {}), **changes}).save_pretrained(path)
    return _configured(path, tie_word_embeddings=True)


def _configured(path: Path, **entries: Any) -> Path:
    config = json.loads((path / "config.json").read_text()) | entries
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return path


def _rewritten(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    return path


def _stock(path: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()


def _told(load: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, list[str]]:
    """What ``load`` returns, and its warnings about heads."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = load(*args, **options)
    return loaded, [str(each.message) for each in caught if TOLD in str(each.message)]


def _same(stock: nn.Module, ours: nn.Module) -> None:
    held = ours.state_dict()
    for name, value in stock.state_dict().items():
        assert torch.equal(held[name], value), name


def _tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


# --- loading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *OTHERS])
def test_every_family_keeps_the_head_of_its_file(tmp_path: Path, kind: str):
    stock = _stock(_folder(tmp_path / "in", kind))
    model, told = _told(load_pretrained, tmp_path / "in")
    assert not _tied(stock)
    assert not _tied(model)
    assert not model.config.tie_word_embeddings
    _same(stock, model)
    assert len(told) == len(model._tied_weights_keys)
    model.tie_weights()  # as training programs and resize_token_embeddings do
    save_pretrained(model, tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _same(stock, load_pretrained(tmp_path / "out"))
    _same(stock, _stock(tmp_path / "out"))


def _equal_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


FILES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], bool, int]] = {
    # change of the tensors, whether they stay tied, number of warnings
    "another head": (lambda tensors: None, False, 1),
    "an equal head": (_equal_head, True, 0),
    "no head": (lambda tensors: tensors.pop(HEAD), True, 0),
    "the head alone": (lambda tensors: tensors.pop(EMBEDDING), True, 0),
    "nearly equal": (lambda tensors: (_equal_head(tensors), tensors[HEAD][-1, -1].add_(1)), False, 1),
    "not numbers": (lambda tensors: (_equal_head(tensors), [t.fill_(torch.nan) for t in tensors.values()]), False, 1),
}


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("kind", ["llama", "starcoder2"])
@pytest.mark.parametrize("case", FILES)
def test_the_file_decides(tmp_path: Path, case: str, kind: str, load: Callable[..., Any]):
    change, tied, count = FILES[case]
    path = _rewritten(_folder(tmp_path, kind), change)
    if kind == "starcoder2":
        _configured(path, tie_word_embeddings=...)  # tied by default
    stock = _stock(path)
    assert _tied(stock) == tied
    model, told = _told(load, path)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert len(told) == count
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", FILES)
def test_a_model_is_built_from_the_config_and_filled(tmp_path: Path, case: str):
    change, tied, count = FILES[case]
    path = _rewritten(_folder(tmp_path), change)
    config, silent = _told(read_hf_config, path)
    assert config.tie_embeddings == tied
    assert not silent
    model = ParallelTransformer(config)
    _, told = _told(load_hf_weights, path, model)
    assert len(told) == count
    for name, value in _stock(path).state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0, equal_nan=True)


def test_a_tied_model_is_not_filled_with_an_untied_one(tmp_path: Path):
    path = _folder(tmp_path)
    _rewritten(path, lambda tensors: tensors.pop(HEAD))
    model = ParallelTransformer(read_hf_config(path))
    with pytest.warns(UserWarning, match=TOLD), pytest.raises(ValueError, match="build the model from read_hf_config"):
        load_hf_weights(_folder(tmp_path), model)
    _rewritten(path, _equal_head)
    untied = ParallelTransformer(read_hf_config(_configured(path, tie_word_embeddings=False)))
    load_hf_weights(_configured(path, tie_word_embeddings=True), untied)  # it has a place for both
    _same(_stock(path), untied)


@pytest.mark.parametrize("load", LOADERS)
def test_the_values_are_compared_in_the_models_dtype(tmp_path: Path, load: Callable[..., Any]):
    def rounded(tensors: dict[str, torch.Tensor]) -> None:
        _equal_head(tensors)
        for name in tensors.keys() - {HEAD}:
            tensors[name] = tensors[name].bfloat16()

    path = _configured(_rewritten(_folder(tmp_path), rounded), dtype="bfloat16")
    for dtype in (None, torch.float32):
        model, told = _told(load, path, dtype=dtype)
        stock = _stock(path, dtype=dtype or torch.bfloat16)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == _tied(stock) == (not told)
        _same(stock, model)


@pytest.mark.parametrize("load", LOADERS)
def test_a_head_that_the_index_does_not_list_is_read(tmp_path: Path, load: Callable[..., Any]):
    """A merged adapter's file beside the base model's index."""
    foreign("llama", tie_word_embeddings=False).save_pretrained(tmp_path, max_shard_size="20KB")
    path = _configured(tmp_path, tie_word_embeddings=True)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    own, place = (path / index["weight_map"].pop(name) for name in (HEAD, EMBEDDING))
    save_file({**load_file(place), HEAD: load_file(own)[HEAD]}, place, {"format": "pt"})
    index["weight_map"][EMBEDDING] = place.name
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    model, told = _told(load, path)
    assert len(told) == 1
    _same(_stock(path), model)
    index["weight_map"][HEAD] = own.name
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{place.name}: it holds {HEAD}, which model\S+ says is in {own.name}"):
        load(path)


def test_pairs_are_untied_one_by_one(tmp_path: Path):
    """A bias that is equal stays tied beside a weight that is not."""
    bias, tied = "cls.predictions.decoder.bias", "cls.predictions.bias"
    path = _rewritten(_folder(tmp_path / "in", "bert"), lambda tensors: tensors.update({bias: tensors[tied].clone()}))
    stock, (model, told) = _stock(path), _told(load_pretrained, path)
    assert len(told) == 1
    assert "decoder.weight" in told[0]
    assert model.get_parameter(bias) is model.get_parameter(tied)
    assert not _tied(model)
    save_pretrained(model, tmp_path / "out")
    _same(stock, _stock(tmp_path / "out"))
    _same(stock, load_pretrained(tmp_path / "out"))


def test_a_head_is_compared_once_and_only_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from shardfuse.layers.hf.tensors import Tensors

    compared: list[str] = []
    differ = Tensors.differ
    monkeypatch.setattr(Tensors, "differ", lambda self, *given: (compared.append(given[0]), differ(self, *given))[1])
    path = _folder(tmp_path)
    for load in LOADERS:
        _told(load, path)
        assert compared == [HEAD]
        compared.clear()
    _rewritten(path, lambda tensors: tensors.pop(HEAD))
    for load in (*LOADERS, read_hf_config):
        load(path)
    assert not compared


# --- saving: what is one tensor in memory is tied ---------------------------------------------------------------------


def _detached(model: Any) -> Any:
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach() * 0.5 + 0.1)
    return model


def _joined(model: Any) -> Any:
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "bert"])
@pytest.mark.parametrize(("tied", "change"), [(True, _detached), (False, _joined)])
def test_what_is_saved_says_what_it_is(
    tmp_path: Path, kind: str, tied: bool, change: Callable[[Any], Any], fused: bool
):
    model = foreign(kind, tie_word_embeddings=tied, **OTHERS.get(kind, {}))
    model = change(fuse(model) if fused else model)
    save_pretrained(model, tmp_path)
    assert model.config.tie_word_embeddings == tied  # only what is written changes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = load_pretrained(tmp_path)
    _same(model, ours)
    _same(model, _stock(tmp_path))
    if kind != "bert":  # whose biases stay as they were
        assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] != tied
        assert _tied(ours) != tied


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_says_what_it_is(tmp_path: Path, tied: bool):
    foreign("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "in")
    model: Any = load_hf(tmp_path / "in")
    if tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 0.5 + 0.1)
    else:
        model.lm_head.weight = model.model.embed_tokens.weight
    export_hf(model, tmp_path / "out")
    _same(model, load_hf(tmp_path / "out"))
    _same(model, _stock(tmp_path / "out"))
    assert read_hf_config(tmp_path / "out").tie_embeddings != tied


# --- over ranks -------------------------------------------------------------------------------------------------------


def _split(rank: int, world: int, path: Path, out: Path) -> list[tuple[int, bool]]:
    mesh = init_mesh(tp=world, device_type="cpu")
    found = []
    for load, save in ((load_pretrained, save_pretrained), (lambda path, mesh: load_hf(path, mesh=mesh), export_hf)):
        model, told = _told(load, path, mesh)
        save(model, out / str(len(found)))
        weight = model.lm_head.weight
        assert isinstance(weight, DTensor)
        found.append((len(told), weight is model.model.embed_tokens.weight))
    return found


def _staged(rank: int, world: int, path: Path, out: Path) -> list[tuple[int, bool]]:
    mesh = init_mesh(pp=world, device_type="cpu")
    loaded, told = _told(load_pretrained, path, mesh, device="meta")
    model = parallelize(loaded, mesh, schedule="gpipe")
    model.step(tokens()[:, :-1], tokens()[:, 1:])
    save_pretrained(model, out / "0")
    return [(len(told), False)]


@pytest.mark.ranks
@pytest.mark.parametrize("body", [_split, _staged])
@pytest.mark.parametrize("equal", [False, True])
def test_ranks_agree_on_rows_that_one_of_them_compares(ranks: Any, tmp_path: Path, body: Any, equal: bool):
    path = _rewritten(_folder(tmp_path / "in"), _equal_head if equal else FILES["nearly equal"][0])
    expected = _stock(path)
    found = ranks(2, body, path, tmp_path / "out")
    for rank, loads in enumerate(found):
        for number, (told, tied) in enumerate(loads):
            assert told == (not equal and rank == 0)
            assert tied == (equal and body is _split)
            _same(expected, _stock(tmp_path / "out" / str(number)))


def _apart(rank: int, world: int, layout: dict[str, int], kind: str, tied: bool, out: Path) -> None:
    """A model that is tied, or not, in memory alone, spread and saved."""
    change = _detached if tied else _joined
    mesh = init_mesh(**{name: size for name, size in layout.items() if name != "zero"}, device_type="cpu")
    model = change(foreign(kind, tie_word_embeddings=tied))
    model = parallelize(
        fuse(model, mesh), mesh, zero=layout.get("zero", 0), schedule="gpipe" if "pp" in layout else None
    )
    save_pretrained(model, out)


@pytest.mark.ranks
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 3}], ids=str)
def test_what_ranks_save_says_what_it_is(ranks: Any, tmp_path: Path, layout: dict[str, int], tied: bool):
    ranks(2, _apart, layout, "llama", tied, tmp_path)
    expected = (_detached if tied else _joined)(foreign("llama", tie_word_embeddings=tied))
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] != tied
    assert (HEAD in _names(tmp_path)) == tied
    _same(expected, _stock(tmp_path))
    _same(expected, load_pretrained(tmp_path))


def _names(path: Path) -> set[str]:
    return {name for file in path.glob("*.safetensors") for name in load_file(file)}


def _trained(rank: int, world: int, path: Path, out: Path) -> dict[str, torch.Tensor]:
    """A pipeline of our own model, filled and exported."""
    mesh = init_mesh(pp=world, device_type="cpu")
    model = parallelize(ParallelTransformer(read_hf_config(path), device="meta"), mesh, schedule="gpipe")
    _told(load_hf_weights, path, model.module)
    export_hf(model.module, out)
    return full_state_dict(model.module)


@pytest.mark.ranks
@pytest.mark.parametrize("case", ["another head", "no head", "the head alone"])
def test_stages_export_what_they_have(ranks: Any, tmp_path: Path, case: str):
    path = _rewritten(_folder(tmp_path / "in"), FILES[case][0])
    ranks(2, _trained, path, tmp_path / "out")
    _same(_stock(path), _stock(tmp_path / "out"))
    assert read_hf_config(tmp_path / "out").tie_embeddings == FILES[case][1]
