"""Compare a layer between ranks in its first calls, so that different construction or calls raise an error.

A collective with different sizes on the ranks aborts a process in C++ or adds unrelated values, and a layer with
another activation on one rank computes wrong numbers without any error. This module compares first calls only;
``parallelize`` compares every step, and TORCH_DISTRIBUTED_DEBUG=DETAIL every collective.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ...kernels.linear import cpu
from . import collectives
from .agreement import SITE, checksum, compare, global_rank
from .mesh import Group
from .sharding import local_tensors, placed_by, spec_of

COMPARED_CALLS = 3
_PACKAGE = __name__.partition(".")[0] + "."
_SIMPLE = (str, int, float, bool, type(None))


def compare_call(layer: nn.Module, group: Group, *, values: bool = False, **inputs: torch.Tensor | None) -> None:
    """In ``layer``'s first calls, compare its ``inputs``' shapes and dtypes over ``group``; in the first one also its
    construction, and the parameters that are whole on every rank. With ``values`` also compare the inputs' elements.

    A collective of the group. The calls of the layer's modules are then not compared. This function does nothing under
    torch.compile, during a CUDA graph capture, and for tensors without values.

    Raises ValueError on every rank where they differ.
    """
    if group.size == 1 or torch.compiler.is_compiling():
        return
    calls = layer.__dict__.get("_compared_calls", 0)
    if calls >= COMPARED_CALLS:
        return
    given = {name: x for name, x in inputs.items() if x is not None}
    if any(type(x) not in (torch.Tensor, nn.Parameter) or x.is_meta for x in given.values()):
        return
    if any(x.is_cuda for x in given.values()) and torch.cuda.is_current_stream_capturing():
        return
    layer.__dict__["_compared_calls"] = calls + 1
    with _disable_current_modes():
        if calls == 0:
            agree_on_processors(group)
            leave_to_caller(layer, below=True)
            compare(group, _built(layer), what=type(layer).__name__)
        compare(
            group,
            {name: f"{list(x.shape)} {x.dtype}" for name, x in given.items()}
            | ({f"the checksum of {name}": str(checksum(x)) for name, x in given.items()} if values else {})
            | {"grad mode": str(torch.is_grad_enabled())},
            what=f"{type(layer).__name__}, call {calls + 1}",
            remedy="ranks that share a layer call it alike, with "
            + ("the same tokens" if values else "inputs of one shape and dtype"),
        )


def agree_on_processors(group: Group) -> None:
    """Make ranks that compute on CPUs choose alike between torch's products and oneDNN's.

    A collective, once in a group. If the ranks' tables differ, ``auto`` takes torch's own products on all ranks from
    now on, with a warning: mixed products would differ in their last bits.
    """
    if group.size == 1 or group.pg in _asked or not _on_cpus(group):
        return
    _asked.add(group.pg)
    said = collectives.gather_objects(cpu.fingerprint(), group, site=SITE)
    rank = next((rank for rank, each in enumerate(said) if each != said[0]), None)
    if rank is None:
        return
    why = (
        f"ranks {global_rank(group, 0)} and {global_rank(group, rank)} choose their products on a CPU differently, by "
        f"{said[0]} and by {said[rank]}, so all take torch's own"
    )
    cpu.settle_for_stock(why)
    warnings.warn(f"{why}; give all ranks one table with SHARDFUSE_TUNED", stacklevel=2)


def _on_cpus(group: Group) -> bool:
    """Whether the ranks of ``group`` may exchange tensors on CPUs; all ranks get the same answer."""
    backend = dist.get_backend(group.pg)
    return "gloo" in backend or "mpi" in backend


_asked: weakref.WeakSet[Any] = weakref.WeakSet()  # process groups


def leave_to_caller(module: nn.Module, *, below: bool = False) -> None:
    """Compare no calls of ``module`` or its modules, because its caller does; with ``below`` only its modules'."""
    for each in module.modules():
        if not (below and each is module):
            each.__dict__["_compared_calls"] = COMPARED_CALLS


def settings(given: Any) -> dict[str, str]:
    """The public attributes of ``given`` that are numbers, names or flags, and the fields of its dataclasses."""
    found = {}
    for name, value in vars(given).items():
        if name.startswith("_"):
            continue
        if isinstance(value, _SIMPLE):
            found[name] = repr(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, Group):
            found |= {f"{name}.{field}": said for field, said in settings(value).items()}
    return found


def _built(layer: nn.Module) -> dict[str, str]:
    """The construction of ``layer``: its modules' arguments and parameters."""
    facts = {}
    for path, module in layer.named_modules():
        prefix = f"{path}." if path else ""
        facts[path or "its class"] = type(module).__name__
        if type(module).__module__.startswith(_PACKAGE):  # other modules may hold values that differ by rank
            facts |= {f"{prefix}{name}": said for name, said in settings(module).items()}
    for name, param in layer.named_parameters():
        spec = spec_of(param)
        facts[f"parameter {name}"] = f"{list(spec.logical_shape)} {param.dtype}"
        if spec.shard_dim is None and spec.group.size > 1 and placed_by(spec, param) and not param.is_meta:
            facts[f"the checksum of {name}"] = str(checksum(local_tensors(param)[0]))
    return facts
