"""A model trained by one process, and spread over ranks by ``parallelize``: where the two differ.

Steps in fp64, then an evaluation; the budget is a relative error of 1e-11.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardfuse import ParallelTransformer, TransformerConfig
from shardfuse.parallel.core.mesh import data_coordinate
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.parallelize import parallelize

BUDGET = 1e-11
SEED = 3  # of the weights
Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]
Results = tuple[list[float], list[float], dict[str, torch.Tensor]]


def make_batches(
    seed: int, rows: int, length: int, vocab_size: int, ignored: Sequence[tuple[int, int]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets [rows, length] of two steps. Of each (row, begin) in ``ignored`` the targets from ``begin`` on
    do not count."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(2):
        tokens = torch.randint(vocab_size, (rows, length + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        for row, begin in ignored:
            targets[row, begin:] = -100
        batches.append((tokens[:, :-1], targets))
    return batches


def train_alone(config: TransformerConfig, batches: Batches) -> Results:
    """Losses, norms of gradients and parameters of one process without this package's engines."""
    model = ParallelTransformer(config, dtype=torch.float64)
    model.init_weights(SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for tokens, targets in batches:
        loss = model(tokens, targets)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    losses.append(float(model(*batches[0]).detach()))
    return losses, norms, {name: param.detach() for name, param in model.named_parameters()}


def compare_spread(
    config: TransformerConfig,
    batches: Batches,
    degrees: dict[str, int],
    options: dict[str, Any],
    layers: dict[str, Any],
) -> list[str]:
    """The differences of a model over a mesh of ``degrees`` from :func:`train_alone`, on this rank.

    ``options`` are parallelize's, ``layers`` ParallelTransformer's.
    """
    mesh = init_mesh(**degrees)
    with torch.device("meta"):
        model = ParallelTransformer(config, mesh=mesh, dtype=torch.float64, **layers)
    spread = parallelize(model, mesh, seed=SEED, **options)
    expected, expected_norms, whole = train_alone(config, batches)
    optimizer = torch.optim.SGD(spread.parameters(), lr=0.1, momentum=0.9)
    share, readers = data_coordinate(mesh)
    mine = [tuple(part.tensor_split(readers)[share] for part in batch) for batch in batches]
    losses, norms = [], []
    for tokens, targets in mine:
        losses.append(float(spread.step(tokens, targets)))
        norms.append(float(spread.clip_grad_norm_(1.0)))
        optimizer.step()
        optimizer.zero_grad()
    losses.append(float(spread.evaluate(*mine[0])))
    found = [
        f"{what}: {ours} instead of {theirs}"
        for what, ours, theirs in [("losses", losses, expected), ("norms", norms, expected_norms)]
        if not max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True)) <= BUDGET
    ]
    for name, param in spread.module.named_parameters():
        value = param.detach().full_tensor() if isinstance(param, DTensor) else param.detach()
        error = (value - whole[name]).norm() / whole[name].norm()
        if not error <= BUDGET:
            found.append(f"{name}: {error:.1e} off")
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, [name for name, _ in spread.module.named_parameters()])
    if set(itertools.chain.from_iterable(held)) != set(whole):
        found.append("the ranks together do not hold the model's parameters")
    return found
