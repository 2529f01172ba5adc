"""Checkpoints that cannot be loaded or saved: one clear line refuses them, nothing changes, and no code runs."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_case import FFN, WIDTH, Exploit, Net, adamw, assert_equal, train
from torch import nn

from shardfuse.parallel.checkpoint import storage
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


@pytest.mark.parametrize("name", ["checkpoint.json", ".metadata", "__0_0.distcp"])
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


def _sign(saved: Path) -> None:
    """Make the manifest match the altered files, as an attacker would."""
    manifest = json.loads((saved / "checkpoint.json").read_text())
    manifest["files"] = {name: storage._checksum(saved / name) for name in manifest["files"]}
    (saved / "checkpoint.json").write_text(json.dumps(manifest))


def test_loading_runs_no_code_from_the_index(saved: Path, tmp_path: Path) -> None:
    (saved / ".metadata").write_bytes(pickle.dumps(Exploit(tmp_path / "pwned")))
    _sign(saved)
    assert "it asks for posix.mkdir, which no index needs" in _refused(saved)
    assert not (tmp_path / "pwned").exists()


_FORMATS = b"torch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING"


def _by_getattr(owner: bytes, name: bytes) -> bytes:
    """A pickle of ``getattr(owner, name)``; ``owner`` is a module and a name in it, on two lines."""
    return b"cbuiltins\ngetattr\n(c%b\nV%b\ntR." % (owner, name)


def test_an_index_that_another_python_wrote_loads(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Net(seed=7)
    load_checkpoint(saved, before)
    index = pickle.loads((saved / ".metadata").read_bytes())
    formats = type(pickle.loads(_by_getattr(_FORMATS, b"TORCH_CHANNELS_LAST")))
    # The first releases of Python 3.11, including Debian 12's, pickle members of enumerations in this way.
    monkeypatch.setattr(formats, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    pickled = pickle.dumps(index, protocol=3)
    paths = b"c%b\nPosixPath\n" % type(saved).__module__.encode()
    assert b"cbuiltins\ngetattr\n" in pickled
    assert paths in pickled
    for module in (b"pathlib", b"pathlib._local"):  # the second is Python 3.13's
        (saved / ".metadata").write_bytes(pickled.replace(paths, b"c%b\nPosixPath\n" % module))
        _sign(saved)
        model = Net(seed=8)
        load_checkpoint(saved, model)
        assert_equal(model.state_dict(), before.state_dict())


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (b"http\nHTTPStatus", b"OK"),  # no checkpoint index needs this enumeration
        (b"torch.distributed.checkpoint.metadata\nos", b"system"),  # an allowed module imports this one
        (b"torch.distributed.checkpoint.metadata\nMetadata", b"__init__"),  # not an enumeration
        (_FORMATS, b"__class__"),
        (_FORMATS, b"__init__.__globals__"),
        (_FORMATS, b"TORCH_CHANNELS_LAST.name"),
        (_FORMATS, b"mro"),
        (_FORMATS + b".TORCH_CHANNELS_LAST", b"name"),
    ],
    ids=lambda part: part.decode().rpartition("\n")[2],
)
def test_getattr_gives_an_index_members_of_its_enumerations_only(saved: Path, owner: bytes, name: bytes) -> None:
    (saved / ".metadata").write_bytes(_by_getattr(owner, name))
    _sign(saved)
    assert re.search(r"it asks for .*, which no index needs", _refused(saved))


def test_loading_runs_no_code_from_an_entry_that_claims_not_to_be_a_tensor(saved: Path) -> None:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    index = pickle.loads((saved / ".metadata").read_bytes())
    index.state_dict_metadata["model.up"] = BytesStorageMetadata()
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    _sign(saved)
    assert "BytesStorageMetadata" in _refused(saved)


def test_loading_reads_no_file_outside(saved: Path) -> None:
    index = pickle.loads((saved / ".metadata").read_bytes())
    for where in index.storage_data.values():
        where.relative_path = "../elsewhere"
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    _sign(saved)
    assert "'../elsewhere', which is not a file of the checkpoint" in _refused(saved)


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
