"""Split layers of a foreign model over the ranks of a tensor-parallel group, in place; their parameters become
DTensors.

The layers before an activation and the projections of queries, keys and values are split by columns: each rank has some
of the features or heads. The layer after them is split by rows. Everything else is whole on every rank and computes the
same there, so all ranks must get the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import distribute_tensor

from ....parallel.core.mappings import RowExchange
from ....parallel.core.mesh import Group
from ....parallel.core.sharding import ShardSpec, make_parameter
from ...style import ColumnParallel, RowParallel, become, replaced
from .. import products
from .split_linear import SplitLinear


def uneven(sizes: Sequence[int], group: Group) -> str | None:
    """The reason why ``sizes`` (numbers of features or heads) do not divide by the ranks, or None."""
    odd = [size for size in sizes if size % group.size]
    return f"{odd[0]} does not divide into {group.size} equal parts" if odd else None


def split(first: list[Any], last: Any, group: Group, exchanges: Sequence[RowExchange | None] = ()) -> None:
    """Split layers ``first`` by columns and the layer ``last`` after them by rows. Every rank calls this function.

    ``exchanges`` gives the features of each rank for every layer in ``first`` that packs several parts.
    """
    for layer, exchange in zip(first, exchanges or [None] * len(first), strict=True):
        _split(layer, ColumnParallel(), group, exchange)
    _split(last, RowParallel(), group, None)


def _split(layer: Any, style: Any, group: Group, exchange: RowExchange | None) -> None:
    assert group.mesh is not None
    transposed = products.is_conv1d(layer)
    if exchange is None and not transposed:
        layer.__class__ = nn.Linear  # also for subclasses that compute the same
        style._apply(layer, group.mesh)
        return
    ours = SplitLinear(
        products.width_in(layer),
        products.width_out(layer),
        layer.bias is not None,
        rows=isinstance(style, RowParallel),
        transposed=transposed,
        exchange=exchange,
        mesh=group.mesh,
        dtype=layer.weight.dtype,
        device="meta",
    )
    become(layer, ours, group.mesh)


def split_head(head: Any, group: Group) -> None:
    """Split the head along the vocabulary; every rank gets whole logits."""
    assert group.mesh is not None
    head.__class__ = nn.Linear
    ColumnParallel(gather_output=True, site="head")._apply(head, group.mesh)


def split_parameter(module: nn.Module, name: str, group: Group) -> None:
    """Split a parameter of ``module`` itself along its first dimension."""
    param = module._parameters[name]
    assert param is not None
    assert group.mesh is not None
    spec = ShardSpec(name, param.shape, 0, group)
    local = distribute_tensor(param.detach(), group.mesh, spec.placements).to_local().contiguous()
    ours = make_parameter(local, spec)
    ours.requires_grad_(param.requires_grad)
    module.register_parameter(name, ours)
    replaced(param, ours, spec)
