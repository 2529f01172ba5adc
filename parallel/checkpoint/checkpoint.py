"""Checkpoints that load at any tensor-parallel degree, through torch.distributed.checkpoint.

A checkpoint holds logical tensors: each rank writes its parts, and a reader with other ranks takes the parts that it
needs. Parameters in DTensor mode and in local mode give the same checkpoint, optimizer state included, and each loads
the other's. So do any numbers of data-parallel ranks, stages and tensor-parallel ranks: a stage's model has the names
of the whole one, and tensors that several ranks hold are written once. ``storage.py`` handles the folder: how it is
replaced, and what reading refuses.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from ..core import agreement, collectives
from ..core.mesh import Group, MeshLike, everyone, whole_group
from ..core.sharding import as_stored, host_copy, local_tensor, logical
from . import checked, rng_state, storage, tensor_files
from .entries import named_entries
from .index import FILE

__all__ = [
    "Snapshot",
    "load_checkpoint",
    "read_extra",
    "save_checkpoint",
    "take_snapshot",
    "write_snapshot",
]

StrPath = str | os.PathLike[str]
Index = dict[str, TensorStorageMetadata]  # the contents of the checkpoint
Slots = dict[str, torch.Tensor]  # an optimizer's state of one parameter: exp_avg, exp_avg_sq, step

_SITE = "checkpoint"

# Settings of an optimizer's implementation. The run chooses them, so loading does not restore them.
_HOW = frozenset({"capturable", "differentiable", "foreach", "fused"})


def save_checkpoint(
    path: StrPath,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    states: Mapping[str, Stateful] | None = None,
    extra: dict[str, Any] | None = None,
    group: MeshLike = None,
) -> None:
    """Write the model's parameters and persistent buffers, and the optimizer's state and settings, to folder ``path``.

    All ranks of ``group`` (default: every process) call it and share the file system. ``states`` are further objects
    by name, the same on every rank, with ``state_dict`` and ``load_state_dict``, such as a sampler or a learning-rate
    scheduler. ``extra`` is JSON: step, config. An existing checkpoint is replaced once the new one is complete on disk;
    if writing fails, it does not change.

    Raises ValueError for ``extra`` that is not JSON, states that are more than plain data, optimizer state other than
    numbers and tensors shaped like their parameter, parameter groups whose settings differ between ranks, or a ``path``
    with other files in it; RuntimeError when writing fails. Every rank raises.
    """
    ranks = everyone() if group is None else whole_group(group)
    write_snapshot(path, take_snapshot(model, optimizer, states=states, extra=extra, ranks=ranks), ranks)


@dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint: this rank's parts of the tensors, by key, and the fields of the manifest."""

    tensors: dict[str, torch.Tensor]
    fields: dict[str, Any]

    def on_host(self) -> Snapshot:
        """A copy in host memory, which training does not change."""
        copies = {key: host_copy(tensor) for key, tensor in self.tensors.items()}
        if any(tensor.device.type == "cuda" for tensor in self.tensors.values()):
            torch.cuda.synchronize()
        return Snapshot(copies, self.fields)


def take_snapshot(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    states: Mapping[str, Stateful] | None = None,
    extra: dict[str, Any] | None = None,
    ranks: Group,
) -> Snapshot:
    """The first half of :func:`save_checkpoint`, with all checks. The result shares memory with model and optimizer."""
    with torch.no_grad():
        tensors, fields = agreement.agree(ranks, lambda: _collect(model, optimizer, states or {}, extra))
        if optimizer is not None:
            fields["param_groups"] = _merge(collectives.gather_objects(fields["param_groups"], ranks, site=_SITE))
    return Snapshot(tensors, fields)


def write_snapshot(path: StrPath, snapshot: Snapshot, ranks: Group) -> None:
    """The second half of :func:`save_checkpoint`. It may run in a thread that alone uses the group ``ranks``."""
    target = Path(os.path.realpath(path))
    with storage.explained(target, "writing"), torch.no_grad(), storage.replacing(target, ranks) as folder:
        tensor_files.save(snapshot.tensors, folder, ranks)
        storage.write_manifest(folder, snapshot.fields, ranks)


def load_checkpoint(
    path: StrPath,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    states: Mapping[str, Stateful] | None = None,
    group: MeshLike = None,
) -> dict[str, Any]:
    """Load folder ``path``, written by any layout of ranks, into the model, the optimizer and ``states``; return
    ``extra``.

    All ranks of ``group`` (default: every process) call it. Values take the model's dtype and device; optimizer state
    keeps its saved dtype, and the settings of how the optimizer computes (``fused``, ``foreach``, ``capturable``,
    ``differentiable``) do not change. Contents that the caller does not request, such as the optimizer's state or one
    of the states, are skipped. Loading reads and checks everything before it changes anything, which takes memory for a
    second copy. Only the states check themselves as they load, before model and optimizer do.

    Loading runs no code from the checkpoint: it reads JSON and the elements of tensors, and unpickles nothing
    (``storage.py``). If a writer replaces the checkpoint meanwhile, loading starts again, so it never mixes two
    checkpoints.

    Raises FileNotFoundError or ValueError for a checkpoint that is missing, incomplete, corrupt or of another model;
    RuntimeError when reading fails. Every rank raises.
    """
    target = Path(os.path.realpath(path))
    ranks = everyone() if group is None else whole_group(group)
    others = states or {}
    with storage.explained(target, "reading"), torch.no_grad():
        manifest, contents = storage.unmixed(
            target, ranks, lambda folder, found: _read(folder, found, model, optimizer, others, ranks)
        )
        agreement.agree(ranks, lambda: _load_states(target, others, contents.packed))
        for name, entry in contents.entries.items():
            local_tensor(entry).copy_(local_tensor(contents.values[name]))
        if optimizer is not None:
            _restore(model, optimizer, contents.state, manifest["param_groups"])
    return manifest["extra"]


def read_extra(path: StrPath) -> dict[str, Any]:
    """The ``extra`` of a checkpoint alone, for example a config from which to build the model before loading.

    Raises the errors of :func:`load_checkpoint`, on this rank only.
    """
    target = Path(os.path.realpath(path))
    with storage.explained(target, "reading"):
        return storage.open_checkpoint(target)[1]["extra"]


def _model_key(name: str) -> str:
    return f"model.{name}"


def _state_key(name: str, slot: str) -> str:
    return f"optimizer.{name}.{slot}"


def _other_key(name: str) -> str:
    return f"state.{name}"


def _state_holder(optimizer: Optimizer) -> Optimizer:
    """The optimizer that holds ``state``: ZeroRedundancyOptimizer keeps this rank's share in an inner optimizer."""
    # A program with such an optimizer has imported its module; an import here would show its warnings to all programs.
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return (
        optimizer.optim if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer) else optimizer
    )


def _optimized(model: nn.Module, optimizer: Optimizer) -> list[list[tuple[str, torch.Tensor]]]:
    """The optimizer's parameters with their names in the model, one list for each parameter group."""
    names = {id(entry): name for name, entry in named_entries(model).items()}
    groups = []
    for group in optimizer.param_groups:
        if any(id(param) not in names for param in group["params"]):
            raise ValueError(
                "the optimizer holds a parameter that the model does not; make it from model.parameters(), after "
                "anything that replaces them (to_empty, fully_shard)"
            )
        groups.append([(names[id(param)], param) for param in group["params"]])
    return groups


# --- saving -----------------------------------------------------------------------------------------------------------


def _collect(
    model: nn.Module, optimizer: Optimizer | None, others: Mapping[str, Stateful], extra: dict[str, Any] | None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors to save, and the fields of the manifest."""
    tensors = {_model_key(name): logical(entry) for name, entry in named_entries(model).items()}
    tensors |= {_other_key(name): rng_state.pack(name, other.state_dict()) for name, other in others.items()}
    fields: dict[str, Any] = {"extra": _as_json(extra or {}, "extra")}
    if optimizer is None:
        return tensors, fields
    optimizer = _state_holder(optimizer)
    fields["param_groups"] = []
    for group, params in zip(optimizer.param_groups, _optimized(model, optimizer)):
        settings = {
            key: value.item() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        settings = _as_json(settings, "the optimizer's settings")
        fields["param_groups"].append({"params": [name for name, _ in params], "settings": settings})
        for name, param in params:
            for slot, value in optimizer.state.get(param, {}).items():
                if value is not None:
                    tensors[_state_key(name, slot)] = _logical_state(name, slot, value, param)
    return tensors, fields


def _logical_state(name: str, slot: str, value: Any, param: torch.Tensor) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        if value.shape == param.shape:
            return logical(value, param)
        if value.numel() == 1:
            return value
    what = f"of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise ValueError(
        f"the optimizer's {slot!r} of {name} is {what}: only numbers and tensors shaped like their parameter "
        f"({list(param.shape)}) can be saved so that they load at another tensor-parallel degree"
    )


def _as_json(value: dict[str, Any], what: str) -> dict[str, Any]:
    """A copy of ``value`` as a reader will get it, since the caller may change the original while a thread writes."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what} must be JSON (numbers, strings, lists, dictionaries): {error}") from error


def _merge(per_rank: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge every rank's parameter groups into one list; their parameters differ between pipeline stages.

    Raises ValueError where their number or settings differ, which no optimizer could load.
    """
    merged = per_rank[0]
    settings = [[json.dumps(group["settings"], sort_keys=True) for group in groups] for groups in per_rank]
    for rank, groups in enumerate(per_rank):
        if settings[rank] != settings[0]:
            raise ValueError(
                f"the optimizer has {len(merged)} parameter group(s) on rank 0 and {len(groups)} on rank {rank}, or "
                "their settings differ; give every rank the same groups in the same order, and keep those that are "
                "empty there"
            )
    for groups in per_rank[1:]:
        for ours, theirs in zip(merged, groups):
            ours["params"] = list(dict.fromkeys(ours["params"] + theirs["params"]))
    return merged


# --- loading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Contents:
    """Checkpoint contents: the model's ``entries`` with new ``values``, the optimizer's state, the packed states."""

    entries: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]
    state: dict[str, Slots]
    packed: dict[str, torch.Tensor]


def _read(
    folder: Path,
    manifest: storage.Manifest,
    model: nn.Module,
    optimizer: Optimizer | None,
    others: Mapping[str, Stateful],
    ranks: Group,
) -> _Contents:
    """Read and check everything, and change nothing."""
    checked.check_files(folder, manifest["files"], ranks)
    reader = tensor_files.Reader(folder, manifest)
    index = cast(Index, agreement.agree(ranks, reader.read_metadata).state_dict_metadata)
    entries = agreement.agree(ranks, lambda: named_entries(model))
    names = set().union(*collectives.gather_objects(set(entries), ranks, site=_SITE))
    agreement.agree(ranks, lambda: _check_fits(folder, entries, names, index))
    groups = agreement.together(ranks, lambda: [] if optimizer is None else _group_names(model, optimizer))
    agreement.agree(ranks, lambda: _check_groups(folder, manifest, optimizer, groups[ranks.rank], groups))
    agreement.agree(ranks, lambda: _check_states(folder, others, index))

    values = {name: torch.empty_like(logical(entry)) for name, entry in entries.items()}
    state = agreement.agree(ranks, lambda: _empty_state(folder, model, optimizer, index))
    packed = {name: torch.empty(index[_other_key(name)].size, dtype=torch.uint8) for name in others}
    wanted = {_model_key(name): value for name, value in values.items()}
    wanted |= {_state_key(name, slot): value for name, slots in state.items() for slot, value in slots.items()}
    wanted |= {_other_key(name): value for name, value in packed.items()}
    tensor_files.load(wanted, reader, ranks)
    return _Contents(entries, values, state, packed)


def _check_fits(folder: Path, entries: dict[str, torch.Tensor], names: set[str], index: Index) -> None:
    """ValueError unless the checkpoint's model has this rank's ``entries`` and exactly the ``names`` of all ranks."""
    saved = {key.removeprefix("model."): value for key, value in index.items() if key.startswith("model.")}
    shaped = {name: logical(entry) for name, entry in entries.items()}
    problems = [f"{name} is not in the checkpoint" for name in entries if name not in saved]
    problems += [f"{name} is not in the model" for name in saved if name not in names]
    problems += [
        f"{name} is {list(saved[name].size)} in the checkpoint and {list(entry.shape)} in the model"
        for name, entry in shaped.items()
        if name in saved and saved[name].size != entry.shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(f"{folder}: not a checkpoint of this model: {'; '.join(problems[:3])}{more}")


def _group_names(model: nn.Module, optimizer: Optimizer) -> list[set[str]]:
    return [{name for name, _ in params} for params in _optimized(model, optimizer)]


def _check_groups(
    folder: Path,
    manifest: storage.Manifest,
    optimizer: Optimizer | None,
    ours: list[set[str]],
    everyones: list[list[set[str]]],
) -> None:
    """ValueError unless the checkpoint has the optimizer's groups, with settings of the same types.

    ``ours`` are the names of this rank's parameters by group, ``everyones`` those of all ranks.
    """
    if optimizer is None:
        return
    if "param_groups" not in manifest:
        raise ValueError(f"{folder}: it holds no optimizer state; pass optimizer=None to load the model alone")
    saved = [set(group["params"]) for group in manifest["param_groups"]]
    found = [set().union(*(groups[i] for groups in everyones if i < len(groups))) for i in range(len(ours))]
    if saved != found:
        raise ValueError(
            f"{folder}: its optimizer has {len(saved)} parameter group(s) of {[len(names) for names in saved]} "
            f"parameters, and yours {len(found)} of {[len(names) for names in found]}, or the groups differ; "
            "build the optimizer as when saving"
        )
    for number, (group, entry) in enumerate(zip(optimizer.param_groups, manifest["param_groups"])):
        for key, value in entry["settings"].items():
            if key not in _HOW and not (_is_alike(value, group[key]) if key in group else _is_plain(value)):
                ours_is = f"{group[key]!r} in yours" if key in group else "nothing in yours"
                raise ValueError(
                    f"{folder / storage.MANIFEST}: {key!r} of parameter group {number} is {value!r}, and {ours_is}; "
                    "build the optimizer as when saving, or load another checkpoint"
                )


def _is_alike(saved: Any, current: Any) -> bool:
    """Whether a saved setting has the type of the optimizer's."""
    if isinstance(current, bool) or current is None or isinstance(saved, bool) or saved is None:
        return type(saved) is type(current)
    if isinstance(current, int | float | torch.Tensor):
        return isinstance(saved, int | float)
    if isinstance(current, list | tuple):
        return isinstance(saved, list) and len(saved) == len(current) and all(map(_is_alike, saved, current))
    return isinstance(saved, type(current))


def _is_plain(value: Any) -> bool:
    """Whether a setting that the optimizer lacks, such as a schedule's ``initial_lr``, is a value or a list of them."""
    return all(not isinstance(each, list | dict) for each in (value if isinstance(value, list) else [value]))


def _check_states(folder: Path, others: Mapping[str, Stateful], index: Index) -> None:
    missing = [name for name in others if _other_key(name) not in index]
    if missing:
        found = [key.removeprefix("state.") for key in index if key.startswith("state.")]
        raise ValueError(
            f"{folder}: it holds no state of {', '.join(map(repr, missing))} (but of: "
            f"{', '.join(map(repr, found)) or 'nothing'}); leave that out of states, or load another checkpoint"
        )
    for name in others:
        entry = index[_other_key(name)]
        if len(entry.size) != 1 or entry.properties.dtype != torch.uint8:
            raise ValueError(f"{folder}: the state of {name!r} is not a row of bytes; load another checkpoint")


def _load_states(folder: Path, others: Mapping[str, Stateful], packed: dict[str, torch.Tensor]) -> None:
    try:
        unpacked = {name: rng_state.unpack(name, value) for name, value in packed.items()}
        for name, state in unpacked.items():
            try:
                others[name].load_state_dict(state)
            except (AttributeError, LookupError, TypeError) as error:
                raise ValueError(f"the state of {name!r} does not load: {type(error).__name__}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _empty_state(folder: Path, model: nn.Module, optimizer: Optimizer | None, index: Index) -> dict[str, Slots]:
    """By parameter name, empty tensors for the optimizer state in the checkpoint, laid out like the parameter.

    Raises ValueError for state of another shape.
    """
    if optimizer is None:
        return {}
    saved: dict[str, list[str]] = {}
    for key in index:
        if key.startswith("optimizer."):
            name, _, slot = key.removeprefix("optimizer.").rpartition(".")
            saved.setdefault(name, []).append(slot)
    state: dict[str, Slots] = {}
    optimizer = _state_holder(optimizer)
    for group, params in zip(optimizer.param_groups, _optimized(model, optimizer)):
        # The device on which torch's optimizers keep their step counts.
        on_device = group.get("capturable") or group.get("fused")
        for name, param in params:
            state[name] = {}
            for slot in saved.get(name, ()):
                entry = index[_state_key(name, slot)]
                dtype = entry.properties.dtype
                if entry.size == logical(param).shape and slot != "step":
                    state[name][slot] = torch.empty_like(logical(param), dtype=dtype)
                elif math.prod(entry.size) != 1:
                    raise ValueError(
                        f"{folder / FILE}: the optimizer's {slot!r} of {name} is {list(entry.size)}, expected "
                        f"a number or {list(logical(param).shape)}; load another checkpoint"
                    )
                else:
                    device = param.device if on_device else "cpu"
                    state[name][slot] = torch.empty(entry.size, dtype=dtype, device=device)
    return state


def _restore(model: nn.Module, optimizer: Optimizer, state: dict[str, Slots], groups: list[dict[str, Any]]) -> None:
    """Hand the optimizer its state and settings."""
    holder = _state_holder(optimizer)
    for params in _optimized(model, holder):
        for name, param in params:
            holder.state.pop(param, None)
            if state[name]:
                holder.state[param] = {slot: as_stored(value, param) for slot, value in state[name].items()}
    # ZeroRedundancyOptimizer's outer settings count: each step copies them to the inner optimizer.
    for group, saved in zip(optimizer.param_groups, groups):
        for key, value in saved["settings"].items():
            if key in _HOW:
                continue
            current = group.get(key)
            if isinstance(current, torch.Tensor):
                current.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
