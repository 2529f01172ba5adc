"""Compare the gradients of parameters that every tensor-parallel rank holds whole.

Such a gradient has to be complete on every rank, because nothing sums it over them afterwards: otherwise the copies of
the parameter train apart. It is a part of a sum where the parameter's module sees only this rank's heads, features or
tokens, as a norm over each head does. This project's layers sum it in backward. In a plain model the plan that
``parallelize_module`` got decides, and beside layers over a grid the model's own code, so ``ParallelModel`` makes this
comparison in its first steps.

Two numbers represent a gradient: its norm and its sum. Complete gradients differ between ranks by rounding at most,
parts of one sum by about their own size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .core import collectives
from .core.mesh import Group
from .core.sharding import local_tensor, spec_of

SHARE = 0.05  # of a gradient's norm: the largest difference that rounding explains
LEAST = 1e-3  # of the largest norm: a smaller gradient may be nothing but rounding errors
SITE = "step.gradients"


@torch.no_grad()
def check_whole_grads(named: Iterable[tuple[str, nn.Parameter]], tp: Group, everyone: Group) -> None:
    """Raise ValueError on all ranks if a parameter that is whole on the ranks of ``tp`` has different gradients there.

    ``named`` are this rank's parameters, on every rank of ``everyone`` the same ones. A collective of both groups.
    """
    held = {name: param for name, param in named if spec_of(param).shard_dim is None and not _is_partial(param.grad)}
    if tp.size == 1 or not held:
        return
    found = torch.stack([_summary(param) for param in held.values()])  # [P, 2]
    both = collectives.all_reduce(torch.cat((found, -found)), tp, site=SITE, op="max")
    largest, smallest = both[: len(held)], -both[len(held) :]
    norms = largest[:, 0]
    apart = ((largest - smallest).amax(-1) > SHARE * norms) & (norms > LEAST * norms.max())
    wrong = collectives.all_reduce(apart.double(), everyone, site=SITE, op="max").tolist()
    names = [name for name, differs in zip(held, wrong) if differs]
    if names:
        raise ValueError(
            f"step: the gradients of {', '.join(names)} differ between tensor-parallel ranks that each hold the whole "
            "parameter, so its copies would train apart: if its module sees only a rank's own heads, features or "
            "tokens, name it in the plan (SequenceParallelNorm sums the gradient over the ranks), or sum it in a hook "
            "of the parameter; if the model drops out, call manual_seed(seed, mesh) first"
        )


def _is_partial(grad: torch.Tensor | None) -> bool:
    """Whether DTensor still has to sum ``grad``."""
    return isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements)


def _summary(param: nn.Parameter) -> torch.Tensor:
    """The norm and the sum of this rank's part of the gradient, in fp64."""
    if param.grad is None:
        return torch.zeros(2, dtype=torch.float64, device=param.device)
    grad = local_tensor(param.grad).double()
    return torch.stack((grad.norm(), grad.sum()))
