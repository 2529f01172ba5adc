"""The size of parameters without sharding, for the closed forms of :mod:`forms`."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
import torch.distributed

from ..core.sharding import is_dtensor, spec_of


def unsharded_bytes(parameters: Iterable[torch.Tensor], shards: int, itemsize: int | None = None) -> int:
    """Bytes of ``parameters`` gathered from ``shards`` data-parallel shards; a tensor-parallel part counts its own
    size.

    The count pads dimension 0 to a multiple of ``shards``, as FSDP2 does. ``itemsize`` is that of the dtype sent; None:
    the parameter's own.
    """
    total = 0
    for param in parameters:
        rows, *rest = _tensor_parallel_shape(param) or (1,)
        total += -(-rows // shards) * shards * prod(rest) * (itemsize or param.dtype.itemsize)
    return total


def _tensor_parallel_shape(param: torch.Tensor) -> list[int]:
    """The shape of this rank's tensor-parallel part, ignoring any other sharding."""
    if not is_dtensor(param):
        return list(spec_of(param).local_shape)
    shape = list(param.shape)
    for name, size, placement in zip(param.device_mesh.mesh_dim_names or (), param.device_mesh.shape, param.placements):
        if name == "tp" and isinstance(placement, torch.distributed.tensor.Shard):
            shape[placement.dim] //= size
    return shape
