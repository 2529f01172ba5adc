"""Materialize a model's parameters on their device, with initial values that all ranks agree on."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .core import collectives
from .core.mesh import data_group, whole_group
from .core.sharding import local_tensors, parameter_seed


def device_of(mesh: DeviceMesh | None, wanted: torch.device | str | None) -> torch.device:
    """``wanted`` if given, else the device of ``mesh``'s ranks; without a mesh the GPU if there is one."""
    if wanted is not None:
        return torch.device(wanted)
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if mesh is None else mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def place(model: nn.Module, mesh: DeviceMesh | None, device: torch.device, seed: int | None) -> None:
    """Materialize ``model`` on ``device``, with equal values on all ranks that hold the same tensor. Collective.

    Raises ValueError for parameters on meta that the model cannot initialise.
    """
    params = dict(model.named_parameters())
    empty = [name for name, param in params.items() if param.is_meta]
    if not empty:
        moves = mesh is not None and device.type != "cpu"  # sharding moves the model from any device
        if moves and any(param.device.type != device.type for param in params.values()):
            model.to(device)
        data = data_group(mesh)
        with torch.no_grad():
            for tensor in (*local_tensors(*params.values()), *model.buffers()):
                tensor.copy_(collectives.broadcast(tensor, data, site="parallelize.values"))
        return
    if len(empty) < len(params):
        there = next(name for name in params if name not in empty)
        raise ValueError(
            f"{empty[0]} is on the meta device and {there} is not: materialising the one would redraw the other; "
            "build all of the model on meta, or none of it"
        )
    if not hasattr(model, "init_weights"):
        raise ValueError(
            f"{type(model).__name__} has parameters on the meta device and no init_weights(seed) to draw them: "
            "materialise it first (to_empty), or build it on a device"
        )
    model.to_empty(device=device)
    model.init_weights(_agreed_seed(mesh) if seed is None else seed)  # type: ignore[operator]


def _agreed_seed(mesh: DeviceMesh | None) -> int:
    """Rank 0's seed, on every rank: replicas need different random numbers but equal weights."""
    seed = torch.tensor(
        parameter_seed(), dtype=torch.int64, device=device_of(mesh, None) if mesh is not None else "cpu"
    )
    return int(collectives.broadcast(seed, whole_group(mesh), site="parallelize.seed"))


def allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate memory on ``device`` for this rank's part of each parameter of ``module`` that is on meta.

    Shared parameters stay shared, and buffers keep their values.
    """
    kept = [(each, name, buffer) for each in module.modules() for name, buffer in each._buffers.items()]
    if any(isinstance(each, FSDPModule) for each in module.modules()):  # it keeps references to parameters
        module.to_empty(device=device)
    else:
        _allocate(module, device)
    for each, name, buffer in kept:
        each._buffers[name] = buffer if buffer is None or buffer.is_meta else buffer.to(device)


def _allocate(module: nn.Module, device: torch.device) -> None:
    placed: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for name, param in each._parameters.items():
            if param is None or not param.is_meta:
                continue
            if id(param) not in placed:
                local = torch.empty_like(param._local_tensor if isinstance(param, DTensor) else param, device=device)
                held = DTensor(local, param._spec, requires_grad=False) if isinstance(param, DTensor) else local
                placed[id(param)] = nn.Parameter(held, requires_grad=param.requires_grad)
                placed[id(param)].__dict__.update(param.__dict__)
            each._parameters[name] = placed[id(param)]
