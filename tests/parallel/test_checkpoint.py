"""Checkpoints: exact at any tensor-parallel degree, in both parameter modes; whole or absent."""

from __future__ import annotations

import copy
import os
import resource
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_case import FFN, SHAPES, WIDTH, Net, adamw, assert_equal, train
from torch import nn

from shardfuse import ColumnParallelLinear
from shardfuse.parallel.checkpoint import storage, tensor_files
from shardfuse.parallel.checkpoint.checkpoint import load_checkpoint, read_extra, save_checkpoint
from shardfuse.parallel.checkpoint.entries import full_state_dict
from shardfuse.parallel.core.mesh import SINGLE, Group, tp_group
from shardfuse.parallel.core.sharding import ShardSpec, local_tensor, make_parameter


def _full_optimizer(model: Net, optimizer: torch.optim.Optimizer, group: Group) -> dict[str, torch.Tensor]:
    """The optimizer's whole state, by parameter and slot."""
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


# --- exactness --------------------------------------------------------------------------------------------------------


def _save_trained(rank: int, world: int, path: Path, params: str) -> Any:
    """Train a little and save; returns the saved state and the next steps' results."""
    group = tp_group(dist.group.WORLD) if world > 1 else SINGLE
    model = Net(group, params)
    optimizer = adamw(model)
    train(model, optimizer, group, 3)
    save_checkpoint(path, model, optimizer, extra={"step": 3})
    return full_state_dict(model), _full_optimizer(model, optimizer, group)


def _load_and_save(rank: int, world: int, path: Path, params: str, onto: Path) -> Any:
    """Load into a model and optimizer with a different history, then save again."""
    group = tp_group(dist.group.WORLD) if world > 1 else SINGLE
    model = Net(group, params, seed=99)
    optimizer = adamw(model, lr=0.5)
    train(model, optimizer, group, 1)
    extra = load_checkpoint(path, model, optimizer)
    assert extra == {"step": 3}
    assert [settings["lr"] for settings in optimizer.param_groups] == [1e-2, 5e-3]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    save_checkpoint(onto, model, optimizer, extra=extra)
    found = full_state_dict(model), _full_optimizer(model, optimizer, group)
    train(model, optimizer, group, 1)  # the loaded state can be trained
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
            assert_equal(model, saved[0][0])
            assert_equal(optimizer, saved[0][1])


def _contents(rank: int, world: int, path: Path, params: str) -> dict[str, torch.Tensor]:
    _save_trained(rank, world, path, params)
    dist.barrier()
    return {
        key: (entry.size, entry.properties.dtype, sorted((c.offsets, c.sizes) for c in entry.chunks))
        for key, entry in tensor_files.Reader(*storage.open_checkpoint(path))
        .read_metadata()
        .state_dict_metadata.items()
    }


@pytest.mark.ranks
def test_both_parameter_modes_write_the_same_tensors(ranks: Any, tmp_path: Path) -> None:
    dtensor, local = (ranks(2, _contents, tmp_path / params, params)[0] for params in ("dtensor", "local"))
    assert dtensor == local
    assert "model.twin" not in dtensor  # tied: once


def test_resuming_continues_the_same_training(tmp_path: Path) -> None:
    model = Net()
    optimizer = adamw(model)
    train(model, optimizer, SINGLE, 2)
    save_checkpoint(tmp_path / "c", model, optimizer)
    onward = train(model, optimizer, SINGLE, 3)
    again = Net(seed=5)
    optimizer = adamw(again)
    load_checkpoint(tmp_path / "c", again, optimizer)
    assert again.twin is again.up
    assert train(again, optimizer, SINGLE, 3) == onward


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
        train(model, optimizer, SINGLE, 2)
        save_checkpoint(tmp_path / name, model, optimizer)
        onward = train(model, optimizer, SINGLE, 2)
        again = Net(seed=5)
        optimizer = make(again.parameters())
        load_checkpoint(tmp_path / name, again, optimizer)
        assert train(again, optimizer, SINGLE, 2) == onward, name


def test_values_take_the_models_dtype(tmp_path: Path) -> None:
    model = Net()
    save_checkpoint(tmp_path / "c", model)
    half = Net(seed=1, dtype=torch.bfloat16)
    load_checkpoint(tmp_path / "c", half)
    assert torch.equal(half.up, model.up.bfloat16())


def _odd(fill: int) -> nn.Module:
    """Buffers of all dtypes, and of shapes and layouts that are easily lost."""
    module = nn.Module()
    numbers = torch.arange(24).view(4, 6) + fill
    for dtype in (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.bool):
        module.register_buffer(str(dtype).replace("torch.", "of_"), numbers.to(dtype))
    module.register_buffer("transposed", numbers.t())
    module.register_buffer("strided", numbers[::2, 1::3])
    module.register_buffer("channels_last", numbers.view(1, 2, 3, 4).to(memory_format=torch.channels_last))
    module.register_buffer("conjugate", torch.complex(numbers.float(), numbers.float()).conj())
    module.register_buffer("number", torch.tensor(fill))
    module.register_buffer("empty", torch.empty(0, 3))
    return module


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_dtype_and_layout_comes_back_and_torch_reads_it_too(tmp_path: Path) -> None:
    before, after = _odd(1), _odd(2)
    save_checkpoint(tmp_path / "c", before)
    load_checkpoint(tmp_path / "c", after)
    want = before.state_dict()
    for name, value in want.items():
        assert after.state_dict()[name].dtype == value.dtype
        assert torch.equal(after.state_dict()[name].to(torch.complex64), value.to(torch.complex64)), name
    by_torch = {f"model.{name}": torch.zeros_like(value) for name, value in want.items()}
    dcp.load(by_torch, storage_reader=dcp.FileSystemReader(tmp_path / "c"), no_dist=True)
    for name, value in want.items():
        assert torch.equal(by_torch[f"model.{name}"].to(torch.complex64), value.to(torch.complex64)), name


def test_a_process_alone_needs_no_process_group_and_gives_no_warnings(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_checkpoint(tmp_path / "deep" / "er", model, extra={"config": {"a": [1, 2.5, None]}})
        other = Net(seed=1)
        assert load_checkpoint(tmp_path / "deep" / "er", other) == {"config": {"a": [1, 2.5, None]}}
    assert read_extra(tmp_path / "deep" / "er") == {"config": {"a": [1, 2.5, None]}}
    assert_equal(full_state_dict(other), full_state_dict(model))


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
        assert_equal(dtensor, want)
        assert_equal(local, want)
        assert (first_only != {}) == (rank == 0)


def _copied(rank: int, world: int, params: str) -> tuple[Any, Any]:
    layer = ColumnParallelLinear(WIDTH, FFN, mesh=tp_group(dist.group.WORLD), params=params)
    return full_state_dict(layer), full_state_dict(copy.deepcopy(layer))


@pytest.mark.ranks
@pytest.mark.parametrize("params", ["dtensor", "local"])
def test_a_copied_layer_still_knows_what_it_is_a_part_of(ranks: Any, params: str) -> None:
    for layer, twin in ranks(2, _copied, params):
        assert layer["weight"].shape == (FFN, WIDTH)
        assert_equal(twin, layer)


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
        assert _names(path) == [".metadata", "__0_0.distcp", "checkpoint.json", "index.json"]
    model = Net()
    assert load_checkpoint(path, model) == {"seed": 2}
    assert_equal(full_state_dict(model), full_state_dict(Net(seed=2)))


def test_a_link_goes_on_pointing_to_the_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", Net())
    (tmp_path / "latest").symlink_to(tmp_path / "c")
    save_checkpoint(tmp_path / "latest", Net(), extra={"new": True})
    assert (tmp_path / "latest").is_symlink()
    assert read_extra(tmp_path / "c") == {"new": True}


class Killed(BaseException):
    """Interrupts a save where a signal might."""


@pytest.mark.parametrize("moment", ["rename-aside", "rename-new", "manifest", "data"])
def test_a_checkpoint_is_loadable_at_every_moment(tmp_path: Path, monkeypatch: Any, moment: str) -> None:
    """Saving stops at each step without clean-up, as after a kill; the old checkpoint still loads, and the next save
    cleans up."""
    path = tmp_path / "c"
    save_checkpoint(path, Net(seed=1), extra={"seed": 1})

    def stop(*args: Any, **kwargs: Any) -> None:
        raise Killed

    rename = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        if moment == "data":
            patch.setattr(tensor_files.Writer, "write_data", stop)
        elif moment == "manifest":
            patch.setattr(storage, "write_manifest", stop)
        else:
            victim = path.name if moment == "rename-aside" else ".c.writing"
            patch.setattr(Path, "rename", lambda self, to: stop() if self.name.startswith(victim) else rename(self, to))
        with pytest.raises(Killed):
            save_checkpoint(path, Net(seed=2), extra={"seed": 2})

    model = Net()
    assert load_checkpoint(path, model) == {"seed": 1}
    assert_equal(full_state_dict(model), full_state_dict(Net(seed=1)))
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
    with pytest.raises(ValueError, match=r"home: this folder holds 'thesis.txt', which is not part of a checkpoint"):
        save_checkpoint(tmp_path / "home", Net())
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file: a file of that name exists"):
        save_checkpoint(tmp_path / "file", Net())
    assert _names(tmp_path) == ["file", "home"]
    assert _names(tmp_path / "home") == ["thesis.txt"]


def test_a_full_disk_is_one_clear_line_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save_checkpoint(path, Net(seed=1), extra={"seed": 1})
    big = nn.Linear(300, 300)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # acts like a full disk
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
