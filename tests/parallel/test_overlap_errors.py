"""Products that fail during a transfer: the caller gets the error, and no message remains for later collectives."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from overlap_case import local_dy, local_leaves, run_backward, run_forward, whole_operands
from products import around

from shardfuse.parallel.core.mesh import Group, tp_group
from shardfuse.parallel.cross_entropy import linear_cross_entropy
from shardfuse.parallel.overlap.memory.pool import SymmetricMemoryPool

pytestmark = [pytest.mark.ranks, pytest.mark.interpret]

WAYS: dict[str, dict[str, Any]] = {
    "none": {"overlap": "none"},
    "chunked": {"overlap": "chunked"},
    "kernel": {"overlap": "kernel", "strict": True, "impl": "triton"},
}
PRODUCTS = ("forward", "send_forward", "input_grad", "input_grad_act", "send_input_grad", "param_grads")
LIMIT_S = 2.0  # a rank's time limit for a missing peer


@contextmanager
def _failing(name: str = "", at: int = -1) -> Iterator[list[tuple[str, int]]]:
    """Record the block's products, by name and number; number ``at`` of those named ``name`` runs out of memory."""
    numbers: Counter[str] = Counter()
    seen: list[tuple[str, int]] = []

    def noted(each: str, run: Any, of: Any) -> Any:
        seen.append((each, numbers[each]))
        numbers[each] += 1
        if seen[-1] == (name, at):
            raise torch.OutOfMemoryError(f"no memory in {name} {at}")
        return run()

    with around(noted):
        yield seen


def _step(group: Group, kind: str, sequence_parallel: bool, way: str) -> dict[str, torch.Tensor]:
    whole = whole_operands(torch.float32)
    leaves = local_leaves(whole, kind, group.rank, group.size, sequence_parallel)
    y = run_forward(leaves, kind, group, sequence_parallel=sequence_parallel, **WAYS[way])
    return run_backward(y, local_dy(whole, leaves, group.rank, sequence_parallel), leaves)


def _all_body(
    rank: int, world: int, kind: str, sequence_parallel: bool, way: str, names: tuple[str, ...] = PRODUCTS
) -> list[str]:
    """The bitwise differences of a step before and after each of ``names`` fails in turn, on every rank."""
    group, wrong = tp_group(dist.group.WORLD), []
    with _failing() as products:
        expected = _step(group, kind, sequence_parallel, way)
    assert {"forward", "param_grads"} < {name for name, _ in products}
    for name, at in (each for each in products if each[0] in names):
        with _failing(name, at), pytest.raises(torch.OutOfMemoryError, match=f"no memory in {name} {at}"):
            _step(group, kind, sequence_parallel, way)
        found = _step(group, kind, sequence_parallel, way)
        wrong += [f"{key} after {name} {at}" for key in expected if not torch.equal(found[key], expected[key])]
    return wrong


CASES = [
    (kind, sequence, way) for way in ("none", "chunked") for kind in ("layers", "mlp") for sequence in (False, True)
]
CASES += [pytest.param("layers", True, "kernel", marks=pytest.mark.nightly)]


@pytest.mark.parametrize(
    ("kind", "sequence_parallel", "way"), CASES, ids=lambda value: {True: "sp", False: ""}.get(value, value)
)
def test_a_step_after_one_that_failed_on_all_ranks_is_right(ranks: Any, kind: str, sequence_parallel: bool, way: str):
    assert ranks(2, _all_body, kind, sequence_parallel, way) == [[], []]


def test_an_all_reduce_after_one_that_failed_on_all_ranks_is_right(ranks: Any):
    assert ranks(2, _all_body, "mlp", False, "kernel", ("send_forward", "param_grads")) == [[], []]


def _loss_body(rank: int, world: int) -> list[str]:
    """The differences of a loss without logits after each of its products fails in turn, on every rank."""
    group, wrong = tp_group(dist.group.WORLD), []
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(8, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
    weight = torch.randn(12, 16, generator=generator).requires_grad_()
    targets = torch.arange(8)

    def step() -> list[torch.Tensor]:
        loss = linear_cross_entropy(hidden, weight, targets, group=group, chunk_tokens=2)
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    with _failing() as products:
        expected = step()
    for name, at in products:
        with _failing(name, at), pytest.raises(torch.OutOfMemoryError, match=f"no memory in {name} {at}"):
            step()
        if not all(map(torch.equal, step(), expected)):
            wrong.append(f"after {name} {at}")
    return wrong if len(products) == 12 else [f"{products}"]


def test_a_loss_after_one_that_failed_on_all_ranks_is_right(ranks: Any):
    assert ranks(2, _loss_body) == [[], []]


# --- on one rank only -------------------------------------------------------------------------------------------------


def _one_body(rank: int, world: int, way: str) -> tuple[str, float]:
    """Each rank's error when the last one fails and stops, and the others' waiting time."""
    group = tp_group(dist.new_group(range(world), timeout=timedelta(seconds=LIMIT_S)))
    if way == "kernel":
        SymmetricMemoryPool.of(group, device="cpu", timeout_s=LIMIT_S)
    _step(group, "layers", True, way)
    message, start = "", time.monotonic()
    try:
        with _failing("param_grads", 1 if rank == world - 1 else -1):
            _step(group, "layers", True, way)
        start = time.monotonic()
        _step(group, "layers", True, way)
    except RuntimeError as error:
        message = str(error)
    waited = time.monotonic() - start
    dist.barrier()  # on separate connections: all ranks stay alive until here
    return message, waited


@pytest.mark.parametrize("way", WAYS)
def test_the_others_wait_for_one_that_failed_no_longer_than_they_may(ranks: Any, way: str):
    (other, waited), (failed, _) = ranks(2, _one_body, way)
    assert failed == "no memory in param_grads 1"
    assert "waited in vain for data from rank 1" in other if way == "kernel" else "in: all_gather failed" in other
    assert waited < 30  # torch's default is 1800 s
