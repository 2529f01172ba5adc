"""Autograd functions with collectives inside, over 2 and 3 ranks, against the unsharded computation.

Data are small integers in fp64 and every computation is a polynomial, so results are exact and compared bit for bit:
an error of any size is a bug.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from wire import sites_seen

from shardfuse.parallel.core import collectives, mappings
from shardfuse.parallel.core.mesh import SINGLE, Group, tp_group

WORLDS = (2, 3)

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": lambda x: torch.stack((x, x), dim=-1)[..., 0],
}


def _integers(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


def _shard(x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    return x.chunk(group.size, dim)[group.rank]


def _assert_equal(got: torch.Tensor | None, want: torch.Tensor) -> None:
    assert got is not None
    assert torch.equal(got, want), f"{got}\nexpected\n{want}"


# --- each function's forward and backward, as in functional.py's table ------------------------------------------------


def _check_table(rank: int, world: int) -> None:
    group = tp_group(dist.group.WORLD)
    shape = (world, 2 * world, 3 * world)
    everyone = [_integers(seed, *shape) for seed in range(world)]
    total = torch.stack(everyone).sum(0)

    def run(function: Callable[..., torch.Tensor], x: torch.Tensor, want: torch.Tensor, **dim: int) -> None:
        """``want`` is both the forward of ``x`` and, with its partner, the backward of an incoming gradient ``x``."""
        for layout in LAYOUTS.values():
            source = layout(x).requires_grad_()
            _assert_equal(function(source, group, site="a", **dim), want)

    def run_backward(
        function: Callable[..., torch.Tensor], shape: torch.Size, grad: torch.Tensor, want: torch.Tensor, **dim: int
    ) -> None:
        for layout in LAYOUTS.values():
            x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
            function(x, group, site="a", **dim).backward(layout(grad))
            _assert_equal(x.grad, want)

    mine = everyone[rank]
    run(mappings.copy_to, mine, mine)
    run_backward(mappings.copy_to, mine.shape, mine, total)
    run(mappings.reduce_from, mine, total)
    run_backward(mappings.reduce_from, mine.shape, mine, mine)
    for dim in (0, 1, 2, -1):
        gathered, scattered, own = torch.cat(everyone, dim), _shard(total, group, dim), _shard(mine, group, dim)
        run(mappings.all_gather_from, mine, gathered, dim=dim)
        run_backward(mappings.all_gather_from, own.shape, mine, scattered, dim=dim)
        run(mappings.reduce_scatter_to, mine, scattered, dim=dim)
        run_backward(mappings.reduce_scatter_to, gathered.shape, mine, gathered, dim=dim)
        run(mappings.gather_from, mine, gathered, dim=dim)
        run_backward(mappings.gather_from, own.shape, mine, own, dim=dim)
        run(mappings.split_to, mine, own, dim=dim)
        run_backward(mappings.split_to, gathered.shape, mine, gathered, dim=dim)


@pytest.mark.ranks
@pytest.mark.parametrize("world", WORLDS)
def test_forward_and_backward_are_what_the_table_says(ranks: Any, world: int) -> None:
    ranks(world, _check_table)


# --- the functions together: a two-layer network, sharded in each way, against itself on one rank ---------------------


def _network(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (x @ a).square() @ b


def _tensor_parallel(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, group: Group) -> torch.Tensor:
    x = mappings.copy_to(x, group, site="in")
    return mappings.reduce_from(_network(x, a, b), group, site="out")


def _sequence_parallel(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, group: Group) -> torch.Tensor:
    x = mappings.all_gather_from(x, group, dim=0, site="in")
    return mappings.reduce_scatter_to(_network(x, a, b), group, dim=0, site="out")


def _gathered_and_split(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, group: Group) -> torch.Tensor:
    """The hidden layer gathered, used whole by every rank, and split again."""
    hidden = (mappings.copy_to(x, group, site="in") @ a).square()
    hidden = mappings.gather_from(hidden, group, dim=-1, site="gather")
    hidden = _shard(mappings.copy_to(hidden, group, site="split"), group, -1)
    return mappings.reduce_from(hidden @ b, group, site="out")


NETWORKS: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {  # and whether x and y are split over tokens
    "tensor": (_tensor_parallel, False),
    "sequence": (_sequence_parallel, True),
    "gathered": (_gathered_and_split, False),
}


def _check_network(rank: int, world: int, name: str, pairs: bool, recompute: bool) -> None:
    group = tp_group(dist.group.WORLD)
    if pairs:
        group = tp_group([dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2])
    network, split_tokens = NETWORKS[name]
    R = group.size
    seed = rank % 2 if pairs else 0  # the pairs compute different things
    x, a, b = _integers(seed, 4 * R, 5), _integers(seed + 2, 5, 3 * R), _integers(seed + 4, 3 * R, 2)
    grad = _integers(seed + 6, 4 * R, 2)

    whole = [t.clone().requires_grad_() for t in (x, a, b)]
    _network(*whole).backward(grad)

    x_dim = 0 if split_tokens else None
    dims = (x_dim, 1, 0)
    for layout in LAYOUTS.values():
        ours = [layout(t if dim is None else _shard(t, group, dim)).requires_grad_() for t, dim in zip((x, a, b), dims)]
        y = checkpoint(network, *ours, group, use_reentrant=False) if recompute else network(*ours, group)
        _assert_equal(y, _network(x, a, b) if x_dim is None else _shard(_network(x, a, b), group, 0))
        y.backward(layout(grad if x_dim is None else _shard(grad, group, 0)))
        for mine, one, dim in zip(ours, whole, dims):
            assert one.grad is not None
            _assert_equal(mine.grad, one.grad if dim is None else _shard(one.grad, group, dim))


@pytest.mark.ranks
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("world", WORLDS)
def test_a_sharded_network_equals_itself_on_one_rank(ranks: Any, world: int, name: str, recompute: bool) -> None:
    ranks(world, _check_network, name, False, recompute)


@pytest.mark.ranks
@pytest.mark.parametrize("name", NETWORKS)
def test_in_subgroups_of_a_larger_world(ranks: Any, name: str) -> None:
    ranks(4, _check_network, name, True, False)


# --- details ----------------------------------------------------------------------------------------------------------


def _check_copy_all(rank: int, world: int) -> None:
    group = tp_group(dist.group.WORLD)
    everyone = [(_integers(seed, 3, 2), _integers(seed + 9, 4)) for seed in range(world)]

    def copies(*xs: torch.Tensor | None) -> tuple[Any, ...]:
        return mappings.copy_all_to(xs, group, site="norm")

    for run in (copies, torch.compile(copies, fullgraph=True, backend="aot_eager")):
        matrix, vector = (torch.zeros_like(grad).requires_grad_() for grad in everyone[rank])
        collectives.reset_counts()
        first, nothing, last = run(matrix, None, vector)
        assert nothing is None
        torch.autograd.backward((first, last), everyone[rank])
        for x, grads in ((matrix, [grads[0] for grads in everyone]), (vector, [grads[1] for grads in everyone])):
            _assert_equal(x.grad, torch.stack(grads).sum(0))
        if run is copies:
            assert collectives.calls == {("all_reduce", "norm.grad"): 1}
    torch._dynamo.reset()


@pytest.mark.ranks
def test_copy_all_to_reduces_all_gradients_at_once(ranks: Any) -> None:
    ranks(3, _check_copy_all)


def _check_sites(rank: int, world: int) -> list[list[str]]:
    group = tp_group(dist.group.WORLD)
    seen = []
    for network, split_tokens in NETWORKS.values():
        collectives.reset_counts()
        x, a, b = _integers(0, 4 if split_tokens else 8, 5), _integers(1, 5, 3), _integers(2, 3, 2)
        network(x.requires_grad_(), a.requires_grad_(), b, group).sum().backward()
        assert set(collectives.calls.values()) == {1}
        seen.append(sites_seen())
    return seen


@pytest.mark.ranks
def test_each_collective_has_a_site_of_its_own(ranks: Any) -> None:
    for seen in ranks(2, _check_sites):
        assert seen == [
            ["in.grad", "out"],
            ["in", "in.grad", "out", "out.grad"],
            ["gather", "in.grad", "out", "split.grad"],
        ]


def _check_uneven(rank: int, world: int) -> list[str]:
    group = tp_group(dist.group.WORLD)
    messages = []
    try:
        mappings.reduce_scatter_to(torch.zeros(2, 5), group, dim=1, site="tokens")
    except ValueError as error:
        messages.append(str(error))
    return messages


@pytest.mark.ranks
def test_uneven_splits_are_refused(ranks: Any) -> None:
    for messages in ranks(2, _check_uneven):
        assert len(messages) == 1
        assert all("tokens: dimension 1 of a tensor of shape [2, 5] does not divide" in text for text in messages)


def _check_second_order(rank: int, world: int) -> str:
    x = torch.ones(2, requires_grad=True)
    y = mappings.copy_to(x, tp_group(dist.group.WORLD), site="a").pow(3).sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    try:
        grad.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.ranks
def test_second_derivatives_are_refused_not_wrong(ranks: Any) -> None:
    assert all("once_differentiable" in text for text in ranks(2, _check_second_order))


def _check_compiled(rank: int, world: int) -> None:
    group = tp_group(dist.group.WORLD) if world > 1 else SINGLE
    for network, split_tokens in NETWORKS.values():
        x = _integers(rank if split_tokens else 0, 4 * world, 5)
        a, b = _integers(10 + rank, 5, 3), _integers(20 + rank, 3, 2)
        results = []
        for run in (network, torch.compile(network, fullgraph=True, backend="aot_eager")):
            tensors = [t.clone().requires_grad_() for t in (x, a, b)]
            y = run(*tensors, group)
            y.sum().backward()
            results.append([y.detach(), *(t.grad for t in tensors)])
        for eager, compiled in zip(*results):
            _assert_equal(compiled, eager)
    torch._dynamo.reset()


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_compiles_without_graph_breaks(ranks: Any, world: int) -> None:
    ranks(world, _check_compiled)


def test_a_group_of_one_is_the_identity() -> None:
    x = torch.randn(3, 5).t().requires_grad_()
    for function in (mappings.copy_to, mappings.reduce_from):
        assert function(x, SINGLE, site="a") is x
    for function in (
        mappings.all_gather_from,
        mappings.reduce_scatter_to,
        mappings.gather_from,
        mappings.split_to,
    ):
        assert function(x, SINGLE, dim=1, site="a") is x
    assert mappings.copy_all_to([x, None], SINGLE, site="a") == (x, None)


# --- rows that are held in another order than they are needed ---------------------------------------------------------


def _check_exchange(rank: int, world: int) -> None:
    group = tp_group(dist.group.WORLD)
    n = 6 * world
    halves = [[part * n // 2 + row for part in range(2) for row in range(r * 3, r * 3 + 3)] for r in range(world)]
    backwards = [list(range(r * 6, r * 6 + 6)) for r in reversed(range(world))]
    for wanted in (halves, backwards):
        rows = mappings.RowExchange(wanted, group)
        compiled = torch.compile(mappings.exchange_rows, fullgraph=True, backend="aot_eager")
        for run in (mappings.exchange_rows, *([compiled] if world == 2 else [])):
            for layout in LAYOUTS.values():
                own = layout(_shard(_integers(1, n, 3), group, 0)).requires_grad_()
                got = run(own, rows, site="a")
                _assert_equal(got, _integers(1, n, 3)[wanted[rank]])
                got.backward(_integers(2, n, 3)[wanted[rank]])
                _assert_equal(own.grad, _shard(_integers(2, n, 3), group, 0))
    for wrong, message in (([[0, 1]] * world, "equal length, of all of"), ([[1, 0], [2, 3], [4, 5]], "ascending")):
        with pytest.raises(ValueError, match=message):
            mappings.RowExchange(wrong[:world], group)
    torch._dynamo.reset()


@pytest.mark.ranks
@pytest.mark.parametrize("world", WORLDS)
def test_ranks_exchange_rows(ranks: Any, world: int) -> None:
    ranks(world, _check_exchange)
