"""Checkpoints that cannot be loaded or saved: one clear line refuses them, nothing changes, and no code runs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_case import FFN, WIDTH, Exploit, Net, adamw, assert_equal, edit, sign, train
from torch import nn
from torch.distributed.checkpoint import metadata

from shardfuse.parallel.checkpoint.checkpoint import load_checkpoint, read_extra, save_checkpoint
from shardfuse.parallel.core.mesh import SINGLE, tp_group


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = Net()
    optimizer = adamw(model)
    train(model, optimizer, SINGLE, 1)
    save_checkpoint(tmp_path / "c", model, optimizer)
    return tmp_path / "c"


def _refused(path: Path, model: nn.Module | None = None, optimizer: Any = None) -> str:
    """The message of a refused load, which must leave model and optimizer unchanged."""
    model = Net(seed=7) if model is None else model
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((ValueError, FileNotFoundError, RuntimeError)) as caught:
        load_checkpoint(path, model, optimizer)
    assert_equal(model.state_dict(), before)
    if optimizer is not None:
        assert not optimizer.state
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_missing(tmp_path: Path) -> None:
    assert "no such checkpoint" in _refused(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        read_extra(tmp_path / "nothing")


def test_not_a_checkpoint(tmp_path: Path) -> None:
    assert "not a checkpoint (it has no checkpoint.json)" in _refused(tmp_path)
    (tmp_path / "file").write_text("hello")
    assert "not a checkpoint" in _refused(tmp_path / "file")


@pytest.mark.parametrize("name", ["checkpoint.json", "index.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "remove"])
def test_damage_is_noticed_before_anything_changes(saved: Path, name: str, damage: str) -> None:
    path = saved / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "flip":
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    else:
        path.write_bytes(data[: len(data) // 2 if damage == "truncate" else 0])
    model = Net(seed=7)
    message = _refused(saved, model, adamw(model))
    if damage == "remove":
        assert "not a checkpoint" in message or "missing" in message
    else:
        assert "cut short" in message or "corrupt" in message


def test_another_model(saved: Path) -> None:
    message = _refused(saved, nn.Linear(WIDTH, FFN))
    assert "not a checkpoint of this model: weight is not in the checkpoint; bias is [24]" not in message
    assert "weight is not in the checkpoint; up is not in the model; down is not in the model (and" in message

    wider = Net()
    wider.norm = nn.Parameter(torch.zeros(WIDTH + 1))
    assert "norm is [6] in the checkpoint and [7] in the model" in _refused(saved, wider)


def test_another_optimizer(saved: Path, tmp_path: Path) -> None:
    model = Net()
    assert "parameter group" in _refused(saved, model, torch.optim.AdamW(model.parameters()))
    save_checkpoint(tmp_path / "bare", model)
    assert "it holds no optimizer state; pass optimizer=None" in _refused(tmp_path / "bare", model, adamw(model))
    with pytest.raises(ValueError, match="the optimizer holds a parameter that the model does not"):
        save_checkpoint(tmp_path / "c", Net(), adamw(model))


def test_state_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adafactor(model.parameters())  # keeps row and column statistics
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"the optimizer's 'row_var' of weight is of shape \[2, 1\]"):
        save_checkpoint(tmp_path / "c", model, optimizer)
    assert not list(tmp_path.iterdir())


def test_extra_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"extra must be JSON .*Tensor is not JSON serializable"):
        save_checkpoint(tmp_path / "c", Net(), extra={"rng": torch.get_rng_state()})
    assert not list(tmp_path.iterdir())


def test_meta_parameters_are_refused(saved: Path) -> None:
    model = Net().to("meta")
    with pytest.raises(ValueError, match="is on the meta device: call model"):
        load_checkpoint(saved, model)


# --- crafted files, whose checksums are right -------------------------------------------------------------------------


def _class_patch() -> bytes:
    """A pickle that sets an attribute of a class that every index needs."""
    return b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}Vpatched\nI1\nstb."


@pytest.mark.parametrize("crafted", ["code", "class", "nothing"])
def test_the_index_for_torchs_tools_is_not_unpickled(saved: Path, tmp_path: Path, crafted: str) -> None:
    pwned = tmp_path / "pwned"
    pickles = {"code": pickle.dumps(Exploit(pwned)), "class": _class_patch(), "nothing": b""}
    before = Net(seed=7)
    load_checkpoint(saved, before)
    (saved / ".metadata").write_bytes(pickles[crafted])
    sign(saved)
    model = Net(seed=8)
    load_checkpoint(saved, model)
    assert_equal(model.state_dict(), before.state_dict())
    assert not pwned.exists()
    assert not hasattr(metadata.Metadata, "patched")


def _tensor(name: str, key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Changes a field of a tensor of the index."""
    return lambda index: index["tensors"][name].update({key: value})


def _chunk(name: str, number: int = 0, **fields: Any) -> Callable[[dict[str, Any]], None]:
    """Changes fields of a tensor's chunk."""
    return lambda index: index["tensors"][name]["chunks"][number].update(fields)


def _halves(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """Cuts the chunk of ``up`` [24, 6] in two, and changes fields of the second half."""

    def cut(index: dict[str, Any]) -> None:
        (chunk,) = index["tensors"]["model.up"]["chunks"]
        second = {**chunk, "offsets": [12, 0], "sizes": [12, 6], "start": chunk["start"] + 12 * 6 * 4, **fields}
        index["tensors"]["model.up"]["chunks"] = [{**chunk, "sizes": [12, 6]}, second]

    return cut


INDEXES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no-tensors": (lambda index: index.pop("tensors"), "it has no dictionary 'tensors'"),
    "byte-order": (lambda index: index.update(byteorder="middle"), "its byte order is 'middle'"),
    "not-a-tensor": (lambda index: index["tensors"].update({"model.up": {}}), "model.up is not a tensor"),
    "bytes": (lambda index: index["tensors"]["model.up"].update(type="BYTE_IO"), "model.up is not a tensor"),
    "no-dtype": (_tensor("model.up", "dtype", "nn"), "model.up has the dtype 'nn'"),
    "quantized": (_tensor("model.up", "dtype", "qint8"), "model.up has the dtype 'qint8'"),
    "shape": (_tensor("model.up", "shape", [24.0, 6]), "model.up has a shape or chunks that are not"),
    "huge": (_tensor("model.up", "shape", [1 << 40, 1 << 40]), "model.up has a shape or chunks that are not"),
    "dimensions": (_chunk("model.up", sizes=[144]), "model.up has a shape or chunks that are not"),
    "negative": (_chunk("model.up", start=-8), "model.up has a shape or chunks that are not"),
    "outside": (_chunk("model.up", file="../elsewhere"), "model.up is in '../elsewhere', which is not a file of the"),
    "behind-the-end": (_chunk("model.up", start=1 << 40), "which has "),
    "no-chunks": (_tensor("model.up", "chunks", []), "the chunks of model.up end at 0, its length is 24"),
    "no-chunks-of-a-number": (_tensor("model.temperature", "chunks", []), "the chunks of model.temperature overlap or"),
    "short": (_chunk("model.up", sizes=[23, 6]), "the chunks of model.up end at 23, its length is 24"),
    "late": (_chunk("model.up", offsets=[1, 0], sizes=[23, 6]), "the chunks of model.up overlap or leave a gap at 0"),
    "overlap": (_halves(offsets=[11, 0], sizes=[13, 6]), "the chunks of model.up overlap or leave a gap at 11"),
    "gap": (_halves(offsets=[13, 0], sizes=[11, 6]), "the chunks of model.up overlap or leave a gap at 12"),
    "hole": (_halves(offsets=[12, 1], sizes=[12, 5]), "the chunks of model.up "),
    "twice": (_halves(offsets=[0, 0]), "the chunks of model.up "),
    "no-elements": (_halves(offsets=[24, 0], sizes=[0, 6]), "the chunks of model.up "),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_does_not_describe_the_tensors_is_refused(saved: Path, name: str) -> None:
    change, message = INDEXES[name]
    edit(saved, change, "index.json")
    refused = _refused(saved)
    assert "c/index.json: corrupt (" in refused
    assert message in refused


def test_tensors_may_be_in_several_pieces(saved: Path) -> None:
    before = Net(seed=7)
    load_checkpoint(saved, before)
    edit(saved, _halves(), "index.json")
    model = Net(seed=8)
    load_checkpoint(saved, model)
    assert_equal(model.state_dict(), before.state_dict())


def _copy_tensors(index: dict[str, Any], names: dict[str, str]) -> None:
    index["tensors"].update({new: index["tensors"][old] for new, old in names.items()})


def test_optimizer_state_of_another_shape_is_refused(saved: Path) -> None:
    edit(
        saved, lambda index: index["tensors"].update({"optimizer.up.max": index["tensors"]["model.bias"]}), "index.json"
    )
    model = Net(seed=7)
    assert "the optimizer's 'max' of up is [24], expected a number or [24, 6]" in _refused(saved, model, adamw(model))


def test_states_that_are_not_bytes_are_refused(saved: Path) -> None:
    edit(saved, lambda index: _copy_tensors(index, {"state.x": "model.bias"}), "index.json")
    with pytest.raises(ValueError, match=r"c: the state of 'x' is not a row of bytes"):
        load_checkpoint(saved, Net(), states={"x": Net()})


SETTINGS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no-parameters": (lambda group: group["settings"].update(params=[]), "its 'param_groups' are not lists of names"),
    "further-field": (lambda group: group.update(more=1), "its 'param_groups' are not lists of names"),
    "fewer-names": (
        lambda group: group["params"].pop(),
        "2 parameter group(s) of [1, 3] parameters, and yours 2 of",
    ),
    "text": (
        lambda group: group["settings"].update(lr="fast"),
        "'lr' of parameter group 0 is 'fast', and 0.01 in",
    ),
    "none": (lambda group: group["settings"].update(lr=None), "'lr' of parameter group 0 is None"),
    "truth": (lambda group: group["settings"].update(weight_decay=True), "'weight_decay' of parameter group 0 is True"),
    "number": (lambda group: group["settings"].update(maximize=1), "'maximize' of parameter group 0 is 1, and False"),
    "list": (lambda group: group["settings"].update(lr=[0.1]), "'lr' of parameter group 0 is [0.1]"),
    "betas": (lambda group: group["settings"].update(betas=[0.9]), "'betas' of parameter group 0 is [0.9]"),
    "tree": (
        lambda group: group["settings"].update(extra={"a": 1}),
        "'extra' of parameter group 0 is {'a': 1}, ",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_no_optimizer_of_this_kind_has_are_refused(saved: Path, name: str) -> None:
    change, message = SETTINGS[name]
    edit(saved, lambda manifest: change(manifest["param_groups"][0]))
    model = Net(seed=7)
    optimizer = adamw(model)
    refused = _refused(saved, model, optimizer)
    assert "checkpoint.json" in refused or name == "fewer-names"
    assert message in refused
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]


# --- damage that JSON survives ----------------------------------------------------------------------------------------


def test_an_edited_number_is_noticed(saved: Path) -> None:
    path = saved / "checkpoint.json"
    text = path.read_text()
    assert '"lr": 0.01' in text
    path.write_text(text.replace('"lr": 0.01', '"lr": 0.91'))
    model = Net(seed=7)
    assert "checkpoint.json: corrupt (its content does not have the checksum" in _refused(saved, model, adamw(model))
    with pytest.raises(ValueError, match=r"checkpoint.json: corrupt"):
        read_extra(saved)


@pytest.mark.parametrize("name", ["checkpoint.json", "index.json"])
def test_deep_nesting_is_refused(saved: Path, name: str) -> None:
    (saved / name).write_text("[" * 100_000 + "]" * 100_000)
    if name == "index.json":
        sign(saved)
    assert f"{name}: cut short or corrupt (maximum recursion depth" in _refused(saved)


def test_extra_that_nests_too_deeply_to_be_read_is_refused(tmp_path: Path) -> None:
    extra: dict[str, Any] = {}
    for _ in range(100_000):
        extra = {"x": extra}
    with pytest.raises(ValueError, match="extra must be JSON"):
        save_checkpoint(tmp_path / "c", Net(), extra=extra)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_in_another_format_is_refused(saved: Path) -> None:
    edit(saved, lambda manifest: manifest.update(format="shardfuse checkpoint 1"))
    assert "not written by this version of shardfuse (expected format 'shardfuse checkpoint 2')" in _refused(saved)


def _load_damaged(rank: int, world: int, path: Path) -> str:
    try:
        load_checkpoint(path, Net(tp_group(dist.group.WORLD)))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
def test_every_rank_raises_when_one_finds_damage(ranks: Any, saved: Path) -> None:
    data = (saved / "__0_0.distcp").read_bytes()
    (saved / "__0_0.distcp").write_bytes(data[:-1])
    messages = ranks(2, _load_damaged, saved)
    assert all("__0_0.distcp: cut short" in message for message in messages)
