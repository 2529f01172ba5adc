"""Collectives over 2, 3 and 4 gloo ranks against the same sums and concatenations in one process.

Values are small integers, so sums are exact in every dtype and results are compared bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from wire import omit, sites_seen

from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import SINGLE, Group, tp_group

WORLDS = (2, 3, 4)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.clone(),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": lambda x: torch.stack((x, x), dim=-1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape),
}


def _whole(world: int) -> Group:
    group = tp_group(dist.group.WORLD)
    assert group.size == world
    return group


def _inputs(world: int, shape: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous") -> list[torch.Tensor]:
    """Every rank's data; each rank can compute all of them."""
    generator = torch.Generator().manual_seed(7)
    tensors = [torch.randint(-8, 9, shape, generator=generator).to(dtype) for _ in range(world)]
    return [LAYOUTS[layout](x) for x in tensors]


def _assert_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.is_contiguous()
    assert torch.equal(got, want), f"{got}\nexpected\n{want}"


def _check_all(rank: int, world: int, dtype: torch.dtype) -> None:
    """Every collective, along every dimension, from every layout. Warnings are errors; inputs stay unchanged."""
    group = _whole(world)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layout in LAYOUTS:
            _check_layout(_inputs(world, (world, 2 * world, 3 * world), dtype, layout), group)


def _check_layout(xs: list[torch.Tensor], group: Group) -> None:
    x = xs[group.rank]
    kept = x.clone()
    total = torch.stack(xs).sum(0).to(x.dtype)
    _assert_equal(collectives.all_reduce(x, group, site="sum"), total)
    _assert_equal(collectives.all_reduce(x, group, site="max", op="max"), torch.stack(xs).amax(0))
    for dim in range(-3, 3):
        _assert_equal(collectives.all_gather(x, group, dim=dim, site="gather"), torch.cat(xs, dim))
        own = total.chunk(group.size, dim)[group.rank].contiguous()
        _assert_equal(collectives.reduce_scatter(x, group, dim=dim, site="scatter"), own)
    for src in range(group.size):
        _assert_equal(collectives.broadcast(x, group, src=src, site="broadcast"), xs[src].contiguous())
    assert torch.equal(x, kept)


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("world", WORLDS)
def test_collectives_equal_one_process(ranks: Any, world: int, dtype: torch.dtype) -> None:
    ranks(world, _check_all, dtype)


def _check_average_and_inplace(rank: int, world: int) -> None:
    group = _whole(world)
    xs = [x * world for x in _inputs(world, (4, 6), torch.float32)]
    _assert_equal(collectives.all_reduce(xs[rank], group, site="a", op="avg"), torch.stack(xs).sum(0) / world)
    for layout in ("contiguous", "transposed"):
        x = LAYOUTS[layout](xs[rank])
        assert collectives.all_reduce(x, group, site="a", inplace=True) is x
        assert torch.equal(x, torch.stack(xs).sum(0))


@pytest.mark.ranks
@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_averages_and_works_in_place(ranks: Any, world: int) -> None:
    ranks(world, _check_average_and_inplace)


def _check_empty(rank: int, world: int) -> None:
    group = _whole(world)
    nothing = torch.empty(0, 2 * world)
    assert collectives.all_reduce(nothing, group, site="a").shape == nothing.shape
    for dim, gathered, scattered in ((0, (0, 2 * world), (0, 2 * world)), (1, (0, 2 * world * world), (0, 2))):
        assert collectives.all_gather(nothing, group, dim=dim, site="a").shape == gathered
        assert collectives.reduce_scatter(nothing, group, dim=dim, site="a").shape == scattered
    assert collectives.broadcast(nothing, group, site="a").shape == nothing.shape


@pytest.mark.ranks
@pytest.mark.parametrize("world", WORLDS)
def test_empty_tensors_pass(ranks: Any, world: int) -> None:
    ranks(world, _check_empty)


def _check_subgroups(rank: int, world: int) -> None:
    """Two pairs of non-neighbouring ranks out of four, at the same time."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = tp_group(pairs[rank % 2])
    assert (group.rank, group.size) == (rank // 2, 2)
    xs = [_inputs(world, (4, 6), torch.float32)[member] for member in (rank % 2, rank % 2 + 2)]
    x = xs[group.rank]
    _assert_equal(collectives.all_reduce(x, group, site="a"), xs[0] + xs[1])
    _assert_equal(collectives.all_gather(x, group, dim=1, site="a"), torch.cat(xs, 1))
    _assert_equal(
        collectives.reduce_scatter(x, group, dim=1, site="a"), (xs[0] + xs[1]).chunk(2, 1)[group.rank].contiguous()
    )
    _assert_equal(collectives.broadcast(x, group, src=1, site="a"), xs[1])


@pytest.mark.ranks
def test_subgroups_of_a_larger_world(ranks: Any) -> None:
    ranks(4, _check_subgroups)


def _sum_in_bf16(rank: int, world: int) -> float:
    x = torch.full((world,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    return collectives.reduce_scatter(x, _whole(world), site="a").item()


@pytest.mark.ranks
def test_reduce_scatter_rounds_once(ranks: Any) -> None:
    # bf16 holds 256 and 258 but not 257: adding ones one by one would stay at 256.
    assert ranks(3, _sum_in_bf16) == [258.0, 258.0, 258.0]


def _errors(rank: int, world: int) -> list[str]:
    group = _whole(world)
    x = torch.zeros(5, 4)
    messages = []
    for call in (
        lambda: collectives.reduce_scatter(x, group, site="mlp.out"),
        lambda: collectives.all_gather(x, group, dim=2, site="mlp.in"),
        lambda: collectives.all_reduce(x, group, op="mean", site="norm"),
        lambda: collectives.broadcast(x, group, src=2, site="seed"),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.ranks
def test_errors_name_the_site_and_the_numbers(ranks: Any) -> None:
    for messages in ranks(2, _errors):
        assert messages == [
            "mlp.out: dimension 0 of a tensor of shape [5, 4] does not divide by the group's 2 ranks; "
            "make it a multiple of 2",
            "mlp.in: dim=2 is not a dimension of a tensor of shape [5, 4]",
            "norm: op='mean': expected one of sum, max, avg",
            "seed: src=2 is not a rank of a group of 2",
        ]


def _counts(rank: int, world: int) -> tuple[dict[Any, int], dict[Any, int], list[str]]:
    group = _whole(world)
    x = torch.zeros(4, 8, dtype=torch.bfloat16)
    collectives.reset_counts()
    for _ in range(2):
        collectives.all_reduce(x, group, site="out")
    collectives.all_gather(x, group, site="in")
    return dict(collectives.calls), dict(collectives.payload), sites_seen()


@pytest.mark.ranks
def test_calls_and_payload_are_counted_per_site(ranks: Any) -> None:
    for calls, payload, sites in ranks(2, _counts):
        assert calls == {("all_reduce", "out"): 2, ("all_gather", "in"): 1}
        assert payload == {("all_reduce", "out"): 128, ("all_gather", "in"): 64}
        assert sites == ["in", "out"]


def _omitted(rank: int, world: int) -> None:
    """An omitted collective keeps its shape and uses this rank's data alone; other sites are unaffected."""
    group = _whole(world)
    xs = _inputs(world, (4, 6), torch.float32)
    x = xs[rank]
    with omit("here"):
        _assert_equal(collectives.all_reduce(x, group, site="here"), x)
        _assert_equal(collectives.all_gather(x, group, dim=1, site="here"), torch.cat([x, x], 1))
        _assert_equal(collectives.reduce_scatter(x, group, dim=1, site="here"), x.chunk(2, 1)[rank].contiguous())
        _assert_equal(collectives.broadcast(x, group, site="here"), x)
        _assert_equal(collectives.all_reduce(x, group, site="there"), xs[0] + xs[1])
    _assert_equal(collectives.all_reduce(x, group, site="here"), xs[0] + xs[1])


@pytest.mark.ranks
def test_omit_leaves_out_one_site(ranks: Any) -> None:
    ranks(2, _omitted)


def _check_compiled(rank: int, world: int) -> None:
    group = _whole(world)
    x = _inputs(world, (world, 2 * world), torch.float32, "transposed")[rank]
    for function in (
        lambda x: collectives.all_reduce(x, group, site="a", op="max"),
        lambda x: collectives.all_reduce(x.clone(), group, site="a", inplace=True),
        lambda x: collectives.all_gather(x, group, dim=1, site="a"),
        lambda x: collectives.reduce_scatter(x, group, dim=1, site="a"),
        lambda x: collectives.broadcast(x, group, src=1, site="a"),
    ):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), function(x))
    torch._dynamo.reset()


@pytest.mark.ranks
def test_collectives_compile_without_graph_breaks(ranks: Any) -> None:
    ranks(2, _check_compiled)


def test_a_group_of_one_is_the_identity() -> None:
    x = torch.randn(3, 5).t()
    assert collectives.all_reduce(x, SINGLE, site="a") is x
    assert collectives.all_gather(x, SINGLE, dim=1, site="a") is x
    assert collectives.reduce_scatter(x, SINGLE, dim=1, site="a") is x
    assert collectives.broadcast(x, SINGLE, site="a") is x
    assert collectives.gather_objects({"a": 1}, SINGLE, site="a") == [{"a": 1}]


def _check_exchange(rank: int, world: int) -> list[bytes]:
    """Small sums over two ranks use the exchange, large ones gloo's ring: both give the same bits on both ranks."""
    group = _whole(world)
    small = collectives.EXCHANGE_BYTES // 4
    found = []
    for length in (1, small, small + 1):
        x = torch.randn(length, generator=torch.Generator().manual_seed(rank))
        got = collectives.all_reduce(x, group, site="s")
        ring = x.clone()
        dist.all_reduce(ring)
        assert torch.equal(got, ring)
        found.append(got.numpy().tobytes())
    started = [collectives.start_all_reduce(torch.full((3,), i + rank * 10.0), group, site="s") for i in range(3)]
    assert [finish().tolist() for finish in reversed(started)] == [[10.0 + 2 * i] * 3 for i in (2, 1, 0)]
    return found


def test_two_ranks_sum_to_the_same_bits_by_exchange_and_by_ring(ranks: Any) -> None:
    first, second = ranks(2, _check_exchange)
    assert first == second


def _leave(rank: int, world: int) -> None:
    group = _whole(world)
    if rank == 1:
        raise ValueError("this rank has had enough")
    collectives.all_reduce(torch.ones(3), group, site="s")


def test_a_rank_that_leaves_does_not_keep_the_other_waiting(ranks: Any) -> None:
    with pytest.raises(AssertionError, match="this rank has had enough") as caught:
        ranks(2, _leave)
    assert "went on waiting" not in str(caught.value)
