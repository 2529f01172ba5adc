"""A fused foreign model trained by one process, and spread over ranks by ``parallelize``: where the two differ.

Three steps of AdamW in fp64. The process alone computes the loss from logits, so nothing of a stage runs there; the
budget is a relative error of 1e-11. The gradients of the stock model, whose norms and rotations compute in fp32, are
compared as well, under the budget of ``accuracy.py`` for fp32.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from foreign import foreign, without_dropout
from layout_case import BUDGET
from torch import nn
from torch.distributed.tensor import DTensor

from shardfuse import fuse, init_mesh, parallelize
from shardfuse.kernels.dev import accuracy
from shardfuse.parallel.core.mesh import data_coordinate

ROWS, LENGTH = 5, 8  # no number of readers or micro-batches divides the rows
STEPS = 3
# Longer than 1e-8, so that gradients that are nothing but rounding errors (of the biases of keys) stay what they are.
EPS = 1e-3


# Whose stock code computes in fp32, whatever it is given: eager attention's softmax, a router's.
IN_FP32 = ("gemma2", "mixtral", "gpt_oss")
ROUNDED = accuracy.FACTOR * accuracy.rounding(torch.float32, terms=64)
DEGREES = ("dp_replicate", "dp", "pp", "tp")


class Layout(NamedTuple):
    """A kind of model, degrees and options."""

    kind: str
    dp: int = 1
    pp: int = 1
    tp: int = 1
    zero: int = 0
    schedule: str | None = None
    microbatches: int | None = None
    recompute: bool | None = None
    sequence_parallel: bool = False
    dp_replicate: int = 1

    @property
    def world(self) -> int:
        return self.dp_replicate * self.dp * self.pp * self.tp

    def __str__(self) -> str:
        degrees = [f"{name}{getattr(self, name)}" for name in DEGREES if getattr(self, name) > 1]
        parts = f"micro{self.microbatches}" if self.microbatches else ""
        flags = [f"zero{self.zero}", self.schedule or "", parts, "recompute" if self.recompute else ""]
        flags.append("sp" if self.sequence_parallel else "")
        return "-".join(filter(None, [self.kind, *degrees, *flags]))


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    grads: dict[str, torch.Tensor]  # of the first step
    params: dict[str, torch.Tensor]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 64, (STEPS, ROWS, LENGTH + 1), generator=generator)
    targets = rows[..., 1:].clone()
    targets[:, 1, 2:], targets[:, 3, :5], targets[:, 4] = -100, -100, -100
    return [(tokens, target) for tokens, target in zip(rows[..., :-1], targets)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS, foreach=False)


@functools.cache
def alone(kind: str, fused: bool = True) -> Trained:
    model = without_dropout(foreign(kind, torch.float64))
    return _trained(fuse(model) if fused else model)


def _trained(model: nn.Module) -> Trained:
    optimizer = optimizer_of(model)
    losses, norms, grads = [], [], {}
    for step, (tokens, targets) in enumerate(batches()):
        logits = model(tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        if step == 0:
            grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        tokens, targets = batches()[0]
        losses.append(float(F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())))
    return Trained(losses, norms, grads, {name: param.detach() for name, param in model.named_parameters()})


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def spread_over(layout: Layout) -> Any:
    mesh = init_mesh(**{name: getattr(layout, name) for name in DEGREES}, device_type="cpu")
    model = fuse(without_dropout(foreign(layout.kind, torch.float64)), mesh, sequence_parallel=layout.sequence_parallel)
    options = {"zero": layout.zero, "schedule": layout.schedule, "microbatches": layout.microbatches}
    return parallelize(model, mesh, recompute=layout.recompute, **options)


def compare(layout: Layout) -> list[str]:
    """The differences of a model in ``layout`` from one process, on this rank."""
    expected, stock = alone(layout.kind), alone(layout.kind, fused=False)
    tight = ROUNDED if layout.kind in IN_FP32 else BUDGET
    spread = spread_over(layout)
    optimizer = optimizer_of(spread)
    share, readers = data_coordinate(spread.mesh)
    mine = [tuple(part.tensor_split(readers)[share] for part in batch) for batch in batches()]
    losses, norms, grads = [], [], {}
    for step, (tokens, targets) in enumerate(mine):
        losses.append(float(spread.step(tokens, targets)))
        if step == 0:
            named = spread.module.named_parameters()
            grads = {name: whole(param.grad) for name, param in named if param.grad is not None}
        norms.append(float(spread.clip_grad_norm_(1.0)))
        optimizer.step()
        optimizer.zero_grad()
    losses.append(float(spread.evaluate(*mine[0])))
    found = [
        f"{what}: {ours} instead of {theirs}"
        for what, ours, theirs in [("losses", losses, expected.losses), ("norms", norms, expected.norms)]
        if not max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True)) <= tight
    ]
    params = {name: whole(param.detach()) for name, param in spread.module.named_parameters()}
    for what, ours, theirs, budget in [
        ("gradient", grads, expected.grads, tight),
        ("stock gradient", grads, stock.grads, ROUNDED),
        ("parameter", params, expected.params, tight),
    ]:
        least = (1e-5 if budget == BUDGET else 1e-2) * float(max(value.norm() for value in theirs.values()))
        for name, value in ours.items():
            error = float((value - theirs[name]).norm()) / max(float(theirs[name].norm()), least)
            if not error <= budget:
                found.append(f"{what} of {name}: {error:.1e} off")
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, (list(params), list(grads)))
    for what, expectation, theirs in [("parameters", expected.params, 0), ("gradients", expected.grads, 1)]:
        if set(itertools.chain.from_iterable(each[theirs] for each in held)) != set(expectation):
            found.append(f"the ranks together do not hold the model's {what}")
    return found
