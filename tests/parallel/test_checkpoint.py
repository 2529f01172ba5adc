"""Checkpoints: exact at any tensor-parallel degree, in both parameter modes; whole or absent; clear when they fail."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import resource
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardfuse.layers import ColumnParallelLinear
from shardfuse.parallel.checkpoint import storage
from shardfuse.parallel.checkpoint.checkpoint import full_state_dict, load_checkpoint, read_extra, save_checkpoint
from shardfuse.parallel.core import mappings
from shardfuse.parallel.core.mesh import SINGLE, Group, tp_group
from shardfuse.parallel.core.sharding import ShardSpec, draw_shard, local_tensor, make_parameter, named_seed

WIDTH, FFN = 6, 24
SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {  # logical shape and the dimension that is split
    "up": ((FFN, WIDTH), 0),
    "down": ((WIDTH, FFN), 1),
    "bias": ((FFN,), 0),
    "norm": ((WIDTH,), None),
    "temperature": ((), None),
}


class Net(nn.Module):
    """x [T, D] -> [T, D], column- then row-parallel; ``twin`` is ``up`` under a second name."""

    def __init__(self, group: Group = SINGLE, params: str = "dtensor", seed: int = 0, dtype: Any = None) -> None:
        super().__init__()
        for name, (shape, dim) in SHAPES.items():
            spec = ShardSpec(name, torch.Size(shape), dim, group)
            drawn = draw_shard(shape or (1,), dim, group.rank, group.size, seed=named_seed(seed, name), std=1.0)
            self.register_parameter(name, make_parameter(drawn.view(spec.local_shape).to(dtype), spec, params))
        self.twin = self.up
        self.register_buffer("steps", torch.tensor([seed, seed + 1]))

    def loss(self, x: torch.Tensor, group: Group) -> torch.Tensor:
        up, down, bias, norm, temperature = (local_tensor(getattr(self, name)) for name in SHAPES)
        hidden = (mappings.copy_to(x * norm, group, site="in") @ up.t() + bias).tanh()
        y = mappings.reduce_from(hidden @ down.t(), group, site="out")
        return (y * temperature).square().mean()


def _train(model: Net, optimizer: torch.optim.Optimizer, group: Group, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model.loss(x, group)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    groups = [{"params": [model.up, model.down]}, {"params": [model.bias, model.norm, model.temperature], "lr": lr / 2}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.8, 0.9), foreach=False)


def _full_optimizer(model: Net, optimizer: torch.optim.Optimizer, group: Group) -> dict[str, torch.Tensor]:
    """The optimizer's state, whole, by parameter and slot."""
    whole = {}
    for name, (_, dim) in SHAPES.items():
        for slot, value in optimizer.state[getattr(model, name)].items():
            value = local_tensor(value)
            if slot != "step" and dim is not None and group.size > 1:
                parts = [torch.empty_like(value) for _ in range(group.size)]
                dist.all_gather(parts, value.contiguous(), group=group.pg)
                value = torch.cat(parts, dim)
            whole[f"{name}.{slot}"] = value.clone()
    return whole


def _equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype, name
        assert torch.equal(got[name], want[name]), name


# --- exactness --------------------------------------------------------------------------------------------------------


def _save_trained(rank: int, world: int, path: Path, params: str) -> Any:
    """Train a little, save; what was saved, and how training goes on from there."""
    group = tp_group(dist.group.WORLD) if world > 1 else SINGLE
    model = Net(group, params)
    optimizer = _adamw(model)
    _train(model, optimizer, group, 3)
    save_checkpoint(path, model, optimizer, extra={"step": 3})
    return full_state_dict(model), _full_optimizer(model, optimizer, group)


def _load_and_save(rank: int, world: int, path: Path, params: str, onto: Path) -> Any:
    """Load into a model and optimizer that have gone another way, then save again."""
    group = tp_group(dist.group.WORLD) if world > 1 else SINGLE
    model = Net(group, params, seed=99)
    optimizer = _adamw(model, lr=0.5)
    _train(model, optimizer, group, 1)
    extra = load_checkpoint(path, model, optimizer)
    assert extra == {"step": 3}
    assert [settings["lr"] for settings in optimizer.param_groups] == [1e-2, 5e-3]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    save_checkpoint(onto, model, optimizer, extra=extra)
    found = full_state_dict(model), _full_optimizer(model, optimizer, group)
    _train(model, optimizer, group, 1)  # what was loaded can be trained
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    "modes",
    [("dtensor",) * 4, ("local",) * 4, ("dtensor", "local", "local", "dtensor")],
    ids=["dtensor", "local", "mixed"],
)
def test_parameters_and_optimizer_survive_every_change_of_degree(ranks: Any, tmp_path: Path, modes: Any) -> None:
    saved = ranks(2, _save_trained, tmp_path / "0", modes[0])
    for step, (world, params) in enumerate(zip((1, 4, 2), modes[1:])):
        loaded = ranks(world, _load_and_save, tmp_path / f"{step}", params, tmp_path / f"{step + 1}")
        for model, optimizer in loaded:
            _equal(model, saved[0][0])
            _equal(optimizer, saved[0][1])


def _contents(rank: int, world: int, path: Path, params: str) -> dict[str, torch.Tensor]:
    _save_trained(rank, world, path, params)
    dist.barrier()
    return {
        key: (entry.size, entry.properties.dtype, sorted((c.offsets, c.sizes) for c in entry.chunks))
        for key, entry in storage.Reader(*storage.open_checkpoint(path)).read_metadata().state_dict_metadata.items()
    }


@pytest.mark.ranks
def test_both_parameter_modes_write_the_same_tensors(ranks: Any, tmp_path: Path) -> None:
    dtensor, local = (ranks(2, _contents, tmp_path / params, params)[0] for params in ("dtensor", "local"))
    assert dtensor == local
    assert "model.twin" not in dtensor  # tied: once


def test_resuming_continues_the_same_training(tmp_path: Path) -> None:
    model = Net()
    optimizer = _adamw(model)
    _train(model, optimizer, SINGLE, 2)
    save_checkpoint(tmp_path / "c", model, optimizer)
    onward = _train(model, optimizer, SINGLE, 3)
    again = Net(seed=5)
    optimizer = _adamw(again)
    load_checkpoint(tmp_path / "c", again, optimizer)
    assert again.twin is again.up
    assert _train(again, optimizer, SINGLE, 3) == onward


def test_optimizers_of_other_kinds(tmp_path: Path) -> None:
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "sgd without state": lambda p: torch.optim.SGD(p, lr=0.1),
        "adam amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
        "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.1),
        "adagrad": torch.optim.Adagrad,
    }
    for name, make in makers.items():
        model = Net()
        optimizer = make(model.parameters())
        _train(model, optimizer, SINGLE, 2)
        save_checkpoint(tmp_path / name, model, optimizer)
        onward = _train(model, optimizer, SINGLE, 2)
        again = Net(seed=5)
        optimizer = make(again.parameters())
        load_checkpoint(tmp_path / name, again, optimizer)
        assert _train(again, optimizer, SINGLE, 2) == onward, name


def test_values_take_the_models_dtype(tmp_path: Path) -> None:
    model = Net()
    save_checkpoint(tmp_path / "c", model)
    half = Net(seed=1, dtype=torch.bfloat16)
    load_checkpoint(tmp_path / "c", half)
    assert torch.equal(half.up, model.up.bfloat16())


def test_a_process_alone_needs_no_process_group_and_gives_no_warnings(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_checkpoint(tmp_path / "deep" / "er", model, extra={"config": {"a": [1, 2.5, None]}})
        other = Net(seed=1)
        assert load_checkpoint(tmp_path / "deep" / "er", other) == {"config": {"a": [1, 2.5, None]}}
    assert read_extra(tmp_path / "deep" / "er") == {"config": {"a": [1, 2.5, None]}}
    _equal(full_state_dict(other), full_state_dict(model))


def _gather_full(rank: int, world: int) -> tuple[Any, ...]:
    group = tp_group(dist.group.WORLD)
    both = [full_state_dict(Net(group, params)) for params in ("dtensor", "local")]
    first_only = full_state_dict(Net(group), first_rank_only=True)
    return (*both, first_only)


@pytest.mark.ranks
def test_full_state_dict_is_the_unsharded_models(ranks: Any) -> None:
    want = full_state_dict(Net())
    assert list(want) == list(Net().state_dict())
    for rank, (dtensor, local, first_only) in enumerate(ranks(2, _gather_full)):
        _equal(dtensor, want)
        _equal(local, want)
        assert (first_only != {}) == (rank == 0)


def _copied(rank: int, world: int, params: str) -> tuple[Any, Any]:
    layer = ColumnParallelLinear(WIDTH, FFN, mesh=tp_group(dist.group.WORLD), params=params)
    return full_state_dict(layer), full_state_dict(copy.deepcopy(layer))


@pytest.mark.ranks
@pytest.mark.parametrize("params", ["dtensor", "local"])
def test_a_copied_layer_still_knows_what_it_is_a_part_of(ranks: Any, params: str) -> None:
    for layer, twin in ranks(2, _copied, params):
        assert layer["weight"].shape == (FFN, WIDTH)
        _equal(twin, layer)


def test_full_state_dict_is_a_copy() -> None:
    model = Net()
    before = full_state_dict(model)["up"]
    with torch.no_grad():
        model.up.add_(1)
    assert not torch.equal(before, model.up)


# --- whole or absent --------------------------------------------------------------------------------------------------


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_saving_again_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "c"
    for seed in range(3):
        save_checkpoint(path, Net(seed=seed), extra={"seed": seed})
        assert _names(tmp_path) == ["c"]
        assert _names(path) == [".metadata", "__0_0.distcp", "checkpoint.json"]
    model = Net()
    assert load_checkpoint(path, model) == {"seed": 2}
    _equal(full_state_dict(model), full_state_dict(Net(seed=2)))


def test_a_link_goes_on_pointing_to_the_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", Net())
    (tmp_path / "latest").symlink_to(tmp_path / "c")
    save_checkpoint(tmp_path / "latest", Net(), extra={"new": True})
    assert (tmp_path / "latest").is_symlink()
    assert read_extra(tmp_path / "c") == {"new": True}


class Killed(BaseException):
    """Ends a save where a signal might."""


@pytest.mark.parametrize("moment", ["rename-aside", "rename-new", "manifest", "data"])
def test_a_checkpoint_is_loadable_at_every_moment(tmp_path: Path, monkeypatch: Any, moment: str) -> None:
    """Saving is cut short at each step as a kill would, with no clean-up; the old checkpoint still loads, and the next
    save tidies up."""
    path = tmp_path / "c"
    save_checkpoint(path, Net(seed=1), extra={"seed": 1})

    def stop(*args: Any, **kwargs: Any) -> None:
        raise Killed

    rename = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        if moment == "data":
            patch.setattr(storage.Writer, "write_data", stop)
        elif moment == "manifest":
            patch.setattr(storage, "write_manifest", stop)
        else:
            victim = path.name if moment == "rename-aside" else ".c.writing"
            patch.setattr(Path, "rename", lambda self, to: stop() if self.name.startswith(victim) else rename(self, to))
        with pytest.raises(Killed):
            save_checkpoint(path, Net(seed=2), extra={"seed": 2})

    model = Net()
    assert load_checkpoint(path, model) == {"seed": 1}
    _equal(full_state_dict(model), full_state_dict(Net(seed=1)))
    save_checkpoint(path, Net(seed=3), extra={"seed": 3})
    assert _names(tmp_path) == ["c"]
    assert read_extra(path) == {"seed": 3}


def test_a_live_writers_folder_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with storage.replacing(path, SINGLE) as folder:
        storage.tidy(path)
        assert folder.exists()
        shutil.rmtree(folder)
        folder.mkdir()


def test_other_peoples_files_are_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("")
    with pytest.raises(ValueError, match=r"home: this folder holds 'thesis.txt', which no checkpoint does"):
        save_checkpoint(tmp_path / "home", Net())
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file: a file is in the way"):
        save_checkpoint(tmp_path / "file", Net())
    assert _names(tmp_path) == ["file", "home"]
    assert _names(tmp_path / "home") == ["thesis.txt"]


def test_a_full_disk_is_one_clear_line_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save_checkpoint(path, Net(seed=1), extra={"seed": 1})
    big = nn.Linear(300, 300)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # as good as a full disk
    try:
        with pytest.raises(RuntimeError) as caught:
            save_checkpoint(path, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == (
        f"{path}: no space left while writing the checkpoint; free some, or choose another path"
    )
    assert _names(tmp_path) == ["c"]
    assert load_checkpoint(path, Net()) == {"seed": 1}


def _one_rank_fails(rank: int, world: int, path: Path) -> str:
    group = tp_group(dist.group.WORLD)
    big = nn.Module()
    spec = ShardSpec("w", torch.Size((300 * world, 300)), 0, group)
    big.register_parameter("w", make_parameter(torch.zeros(300, 300), spec))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        save_checkpoint(path, big)
    except RuntimeError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "no error"


@pytest.mark.ranks
def test_every_rank_raises_when_one_cannot_write(ranks: Any, tmp_path: Path) -> None:
    for message in ranks(2, _one_rank_fails, tmp_path / "c"):
        assert "no space left on rank 1 while writing" in message
    assert _names(tmp_path) == []


# --- clear when they fail ---------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = Net()
    optimizer = _adamw(model)
    _train(model, optimizer, SINGLE, 1)
    save_checkpoint(tmp_path / "c", model, optimizer)
    return tmp_path / "c"


def _refused(path: Path, model: nn.Module | None = None, optimizer: Any = None) -> str:
    """The message with which loading refuses; neither model nor optimizer may have changed."""
    model = Net(seed=7) if model is None else model
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((ValueError, FileNotFoundError, RuntimeError)) as caught:
        load_checkpoint(path, model, optimizer)
    _equal(model.state_dict(), before)
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
    message = _refused(saved, model, _adamw(model))
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
    assert "it holds no optimizer state; pass optimizer=None" in _refused(tmp_path / "bare", model, _adamw(model))
    with pytest.raises(ValueError, match="the optimizer holds a parameter that the model does not"):
        save_checkpoint(tmp_path / "c", Net(), _adamw(model))


def test_state_that_cannot_be_split_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adafactor(model.parameters())  # keeps row and column statistics
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"the optimizer's 'row_var' of weight is of shape \[2, 1\]"):
        save_checkpoint(tmp_path / "c", model, optimizer)
    assert _names(tmp_path) == []


def test_extra_must_be_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"extra must be JSON .*Tensor is not JSON serializable"):
        save_checkpoint(tmp_path / "c", Net(), extra={"rng": torch.get_rng_state()})
    assert _names(tmp_path) == []


def test_meta_parameters_are_refused(saved: Path) -> None:
    model = Net().to("meta")
    with pytest.raises(ValueError, match="is on the meta device: call model"):
        load_checkpoint(saved, model)


class Exploit:
    """Unpickling it would touch a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def _sign(saved: Path) -> None:
    """Make the manifest agree with what was tampered with, as an attacker would."""
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
    # The first releases of Python 3.11, Debian 12's among them, name members of enumerations so.
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
        _equal(model.state_dict(), before.state_dict())


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (b"http\nHTTPStatus", b"OK"),  # an enumeration that no index needs
        (b"torch.distributed.checkpoint.metadata\nos", b"system"),  # a module that an allowed one imports
        (b"torch.distributed.checkpoint.metadata\nMetadata", b"__init__"),  # no enumeration
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
    assert "'../elsewhere', which is no file of the checkpoint" in _refused(saved)


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
