"""Gradient clipping by one norm over the whole model, however its parameters are spread over the ranks.

Each rank sums the squares of its gradient shards and divides by the number of ranks that hold a copy of the same shard.
One all-reduce over all ranks then gives the square of the norm, the same everywhere. Clipping each rank by its own norm
would let replicas drift apart, and clipping each pipeline stage by its own would change the gradient's direction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..core import collectives
from ..core.mesh import MeshLike, degree, whole_group
from ..core.sharding import local_tensors, spec_of


class GradientClipper:
    """Scales gradients so that their norm over the whole model is at most ``max_norm``.

    Args:
        parameters: this rank's: plain ones, DTensors over any dimensions of ``mesh`` (tensor parallelism, FSDP2),
            or tensor-parallel parts in local mode. Along ``mesh``'s "pp", ranks hold different parameters.
        max_norm: above 0; infinity measures only.
        mesh: all ranks of the model: the mesh of ``init_mesh``, or a group if there is only one dimension.
        copies: for parameters that several pipeline stages hold, such as tied embeddings, the number of holders.

    Raises ValueError for a ``max_norm`` of 0 or less, and for parameters that are spread over more than ``mesh``.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        max_norm: float,
        mesh: MeshLike = None,
        *,
        copies: Mapping[torch.nn.Parameter, int] | None = None,
    ) -> None:
        if not max_norm > 0:
            raise ValueError(f"max_norm={max_norm}: expected a norm above 0 (float('inf') to measure without clipping)")
        self._max_norm = max_norm
        self._group = whole_group(mesh)
        stages = degree(mesh, "pp") if isinstance(mesh, DeviceMesh) else 1
        ranks = self._group.size // stages  # the ranks that hold parts or copies of the same parameters
        self._parameters = list(parameters)
        self._held: dict[int, list[torch.nn.Parameter]] = defaultdict(list)  # by the number of ranks with a copy
        for param in self._parameters:
            shards = _shards(param)
            if ranks % shards:
                raise ValueError(
                    f"mesh: its {ranks} rank(s) cannot hold a parameter of shape {list(param.shape)} that is split in "
                    f"{shards}: pass the whole mesh with which the model was made and sharded"
                )
            times = 1 if copies is None else copies.get(param, 1)
            self._held[ranks // shards * times].append(param)
        double = any(param.dtype == torch.float64 for param in self._parameters)
        self._dtype = torch.float64 if double else torch.float32
        self._device = next((param.device for param in self._parameters), torch.device("cpu"))

    @torch.no_grad()
    def clip(self) -> torch.Tensor:
        """Scale the gradients in place; returns the norm before, an fp32 scalar (fp64 for fp64 parameters).

        A gradient that is not finite makes the norm not finite on every rank. A collective: ranks without a gradient
        call it, too.
        """
        norm = self.norm()
        scale = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
        grads = _gradients(self._parameters)
        if grads:
            torch._foreach_mul_(grads, scale)
        return norm

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        """The norm that :meth:`clip` returns, without scaling."""
        squares = torch.zeros((), dtype=torch.float64, device=self._device)  # fp64: ranks may hold different dtypes
        for held, params in self._held.items():
            grads = [grad for grad in _gradients(params) if grad.numel()]
            if grads:
                norms = torch.stack(torch._foreach_norm(grads, 2, dtype=self._dtype))
                squares += norms.double().square().sum() / held
        total = collectives.all_reduce(squares, self._group, site="clip.norm", inplace=True)
        return total.sqrt().to(self._dtype)


def _shards(param: torch.Tensor) -> int:
    """The number of different parts of ``param`` over the ranks."""
    if isinstance(param, DTensor):
        mesh, placements = param.device_mesh, param.placements
        sizes = [mesh.size(dim) for dim, placement in enumerate(placements) if not placement.is_replicate()]
        return int(torch.Size(sizes).numel())
    return spec_of(param).parts


def _gradients(params: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """This rank's plain tensors of the existing gradients."""
    wanted = [param for param in params if param.grad is not None]
    for param in wanted:
        # A gradient that DTensor derived itself may still need a sum over the ranks; this project's layers sum.
        if isinstance(param.grad, DTensor) and param.grad.placements != param.placements:  # type: ignore[attr-defined]
            param.grad = param.grad.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return list(local_tensors(*(param.grad for param in wanted)))
