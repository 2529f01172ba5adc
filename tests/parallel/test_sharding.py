"""Sharded parameters: specs, both modes, gradients, and the same initialisation over any number of ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardfuse.parallel.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from shardfuse.parallel.checkpoint.entries import full_state_dict
from shardfuse.parallel.core import sharding
from shardfuse.parallel.core.mesh import SINGLE, Group, tp_group
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.core.sharding import (
    BLOCK_ROWS,
    ShardSpec,
    draw_shard,
    gather,
    local_tensor,
    local_tensors,
    logical,
    make_parameter,
    named_seed,
    parameter_seed,
    shard_slice,
    spec_of,
)

# --- initialisation ---------------------------------------------------------------------------------------------------

SIZES = st.integers(1, 5)


@st.composite
def _splits(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A logical shape, the sharded dimension, and the number of parts."""
    shape = [draw(st.integers(1, limit)) for limit in (50, 6, 3)[: draw(st.integers(1, 3))]]
    dim = draw(st.integers(0, len(shape) - 1))
    size = draw(SIZES)
    shape[dim] *= size
    return tuple(shape), dim, size


KINDS = st.sampled_from([{"std": 0.5}, {"bound": 2.0}])


@given(_splits(), KINDS, st.integers(0, 2**63 - 1))
def test_the_ranks_parts_make_up_the_same_tensor(
    split: tuple[tuple[int, ...], int, int], kind: dict[str, float], seed: int
) -> None:
    shape, dim, size = split
    whole = draw_shard(shape, None, 0, 1, seed=seed, **kind)
    assert whole.shape == shape
    parts = [draw_shard(shape, dim, rank, size, seed=seed, **kind) for rank in range(size)]
    assert torch.equal(torch.cat(parts, dim), whole)


@given(_splits())
def test_only_the_blocks_that_a_rank_needs_are_drawn(split: tuple[tuple[int, ...], int, int]) -> None:
    shape, dim, size = split
    for rank in range(size):
        blocks: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharding, "named_seed", lambda seed, name, found=blocks: found.append(int(name)) or 0)
            draw_shard(shape, dim, rank, size, seed=0, std=1.0)
        rows = range(shape[0] // size * rank, shape[0] // size * (rank + 1)) if dim == 0 else range(shape[0])
        assert blocks == sorted({row // BLOCK_ROWS for row in rows})


def test_seeds_and_blocks_give_different_numbers() -> None:
    first, again, other = (draw_shard((64, 8), None, 0, 1, seed=seed, std=1.0) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not (first == other).any()
    assert len(set(first.flatten().tolist())) > 500  # of 512: blocks do not repeat each other


def test_seeds_mean_the_same_numbers_for_ever() -> None:
    # A change here changes every initialisation and every recorded loss curve.
    assert named_seed(7, "model.layers.0.mlp.c_fc.weight") == 1080891285503574898
    assert named_seed(7, "") != named_seed(70, "")
    drawn = draw_shard((33, 2), None, 0, 1, seed=7, bound=1.0)
    assert drawn[[0, 15, 16, 32]].tolist() == [
        [-0.06663012504577637, 0.7911795377731323],
        [-0.4895954132080078, 0.9759564399719238],
        [0.03540599346160889, -0.8243074417114258],
        [-0.9416470527648926, 0.18524408340454102],
    ]


def test_distributions() -> None:
    normal = draw_shard((1000, 100), None, 0, 1, seed=3, std=0.02)
    assert normal.mean().abs() < 5 * 0.02 / normal.numel() ** 0.5  # five standard errors
    assert (normal.std() / 0.02 - 1).abs() < 5 / (2 * normal.numel()) ** 0.5
    uniform = draw_shard((1000, 100), None, 0, 1, seed=3, bound=0.5)
    assert uniform.min() >= -0.5
    assert uniform.max() < 0.5
    assert uniform.mean().abs() < 5 * (1 / 12 / uniform.numel()) ** 0.5


def test_drawing_leaves_the_global_generator_alone_and_ignores_defaults() -> None:
    want = draw_shard((20, 3), 0, 1, 2, seed=5, std=1.0)
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            got = draw_shard((20, 3), 0, 1, 2, seed=5, std=1.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)
    assert torch.equal(torch.get_rng_state(), state)


def test_parameter_seeds_follow_manual_seed() -> None:
    torch.manual_seed(3)
    first = [parameter_seed(), parameter_seed()]
    torch.manual_seed(3)
    with torch.device("meta"):
        assert [parameter_seed(), parameter_seed()] == first
    assert first[0] != first[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"std": 1.0, "bound": 1.0}, "expected either std or bound"),
        ({}, "expected either std or bound"),
        ({"std": 1.0, "shard_dim": 1}, r"dimension 1 of \[4, 3\] does not divide by 2 ranks"),
    ],
)
def test_what_cannot_be_drawn(arguments: dict[str, Any], message: str) -> None:
    arguments = {"shard_dim": 0, **arguments}
    with pytest.raises(ValueError, match=message):
        draw_shard((4, 3), rank=0, size=2, seed=0, **arguments)


# --- specs ------------------------------------------------------------------------------------------------------------


def test_a_spec_says_which_part_a_rank_holds() -> None:
    group = Group(None, 2, 4, None)
    rows = ShardSpec("w", torch.Size((8, 6)), 0, group)
    assert rows.local_shape == (2, 6)
    assert rows.index == (slice(4, 6), slice(None))
    assert rows.placements == (Shard(0),)
    whole = ShardSpec("b", torch.Size((6,)), None, group)
    assert whole.local_shape == (6,)
    assert whole.index == (slice(None),)
    assert whole.placements == (Replicate(),)


def test_specs_that_cannot_be() -> None:
    group = Group(None, 0, 4, None)
    with pytest.raises(
        ValueError, match=r"w: dimension 1 of \[8, 6\] does not divide by 4 ranks; use a size that is a"
    ):
        ShardSpec("w", torch.Size((8, 6)), 1, group)
    with pytest.raises(ValueError, match=r"w: shard_dim=2 is not a dimension of \[8, 6\]"):
        ShardSpec("w", torch.Size((8, 6)), 2, group)
    with pytest.raises(ValueError, match=r"params='dtensors': did you mean 'dtensor'.*expected one of dtensor, local"):
        make_parameter(torch.zeros(2), ShardSpec("w", torch.Size((2,))), "dtensors")
    with pytest.raises(ValueError, match=r"w: this rank's shape is \[8, 6\], expected \[2, 6\]"):
        make_parameter(torch.zeros(8, 6), ShardSpec("w", torch.Size((8, 6)), 0, group), "local")


def test_on_one_process_parameters_are_plain() -> None:
    for params in ("dtensor", "local"):
        local = torch.randn(4, 3)
        param = make_parameter(local, ShardSpec("w", torch.Size((4, 3)), 0), params)
        assert type(param) is nn.Parameter
        assert param.data_ptr() == local.data_ptr()
        assert local_tensor(param) is param
        assert spec_of(param) == ShardSpec("w", torch.Size((4, 3)), 0, SINGLE)
        assert param.tensor_model_parallel is False
        assert torch.equal(gather(param), local)
    bare = nn.Parameter(torch.zeros(2, 5))
    assert spec_of(bare) == ShardSpec("", torch.Size((2, 5)))
    assert shard_slice(bare) == (slice(None), slice(None))


# --- over ranks -------------------------------------------------------------------------------------------------------

SHAPE = (6, 4)


def _whole(dim: int | None) -> torch.Tensor:
    return draw_shard(SHAPE, None, 0, 1, seed=0 if dim is None else dim + 1, std=1.0)


def _parameter(dim: int | None, group: Group, params: str) -> nn.Parameter:
    spec = ShardSpec("w", torch.Size(SHAPE), dim, group)
    return make_parameter(_whole(dim)[spec.index].clone(), spec, params)


def _check_modes(rank: int, world: int) -> None:
    group = tp_group(init_mesh(tp=world))
    for dim in (0, 1, None):
        for params in ("dtensor", "local"):
            param = _parameter(dim, group, params)
            assert isinstance(param, nn.Parameter)
            assert isinstance(param, DTensor) == (params == "dtensor")
            spec = spec_of(param)
            assert (spec.logical_shape, spec.shard_dim) == (SHAPE, dim)
            assert (spec.group.rank, spec.group.size) == (rank, world)
            assert torch.equal(gather(param), _whole(dim))
            assert torch.equal(local_tensor(param), _whole(dim)[shard_slice(param)])
            assert torch.equal(logical(param).full_tensor(), _whole(dim))
            if params == "local":
                assert param.tensor_model_parallel is (dim is not None)


@pytest.mark.ranks
def test_both_modes_hold_the_same_logical_tensor(ranks: Any) -> None:
    ranks(2, _check_modes)


def _check_gradients(rank: int, world: int) -> None:
    """Through local_tensors, gradients get the parameters' layout, accumulate, and may be strided."""
    group = tp_group(init_mesh(tp=world))
    weight, bias = _parameter(0, group, "dtensor"), _parameter(None, group, "dtensor")
    plain, frozen = nn.Parameter(torch.ones(2)), _parameter(1, group, "dtensor").requires_grad_(False)
    for _ in range(2):
        w, none, b, p, f = local_tensors(weight, None, bias, plain, frozen)
        assert none is None
        assert p is plain
        assert not any(isinstance(t, DTensor) for t in (w, b, f))
        assert not f.requires_grad
        # t() makes the gradient of w column-major.
        (w.t().contiguous().t() * w.detach() + 0 * f.sum()).sum().backward()
        (b.sum() + p.sum()).backward()
    assert isinstance(weight.grad, DTensor)
    assert weight.grad.placements == (Shard(0),)
    assert weight.grad.shape == SHAPE
    assert weight.grad.to_local().stride() == weight.to_local().stride()
    assert torch.equal(weight.grad.full_tensor(), 2 * _whole(0))
    assert bias.grad.placements == (Replicate(),)
    assert torch.equal(bias.grad.to_local(), torch.full(SHAPE, 2.0))
    assert torch.equal(plain.grad, torch.full((2,), 2.0))
    assert frozen.grad is None

    weight.grad = None
    for optimizer in (torch.optim.AdamW([weight], foreach=True), torch.optim.SGD([weight])):
        local_tensor(weight).sum().backward()
        optimizer.step()
    with torch.no_grad():
        assert local_tensor(weight).data_ptr() == weight.to_local().data_ptr()


@pytest.mark.ranks
def test_gradients_reach_sharded_parameters(ranks: Any) -> None:
    ranks(2, _check_gradients)


def _check_compiled(rank: int, world: int) -> None:
    group = tp_group(init_mesh(tp=world))
    weight = _parameter(0, group, "dtensor")

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ local_tensor(w)).tanh().sum()

    x = torch.randn(5, SHAPE[0] // world)
    step(x, weight).backward()
    want, weight.grad = weight.grad, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own warnings during compilation
        torch.compile(step, fullgraph=True, backend="aot_eager")(x, weight).backward()
    assert torch.equal(weight.grad.to_local(), want.to_local())
    torch._dynamo.reset()


@pytest.mark.ranks
def test_local_tensors_compile(ranks: Any) -> None:
    ranks(2, _check_compiled)


# --- FSDP2 on top of tensor parallelism -------------------------------------------------------------------------------


class Net(nn.Module):
    """One column-parallel layer; its output gathered by hand would be x @ W.T."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        spec = ShardSpec("weight", torch.Size((8, 4)), 0, group)
        drawn = draw_shard((8, 4), 0, group.rank, group.size, seed=1, std=1.0)
        self.weight = make_parameter(drawn, spec)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert spec_of(self.weight).group.size == self.group.size
        return (x @ local_tensor(self.weight).t()).square()


def _train_fsdp(rank: int, world: int, path: str) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    mesh = init_mesh(dp=2, tp=2)
    assert mesh is not None
    model = Net(tp_group(mesh))
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).chunk(2)[mesh.get_local_rank("dp")]
        model(x).mean(0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = full_state_dict(model)
    save_checkpoint(path, model, optimizer)
    with torch.no_grad():
        local_tensor(model.weight).zero_()
    load_checkpoint(path, model, optimizer)
    assert torch.equal(full_state_dict(model)["weight"], before["weight"])
    return before


@pytest.mark.ranks
def test_fsdp2_trains_sharded_parameters_and_its_checkpoint_loads_without_it(ranks: Any, tmp_path: Any) -> None:
    sharded = ranks(4, _train_fsdp, str(tmp_path / "c"))
    model = Net(SINGLE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.randn(4, 4, generator=torch.Generator().manual_seed(step))).mean(0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in sharded:
        torch.testing.assert_close(state["weight"], model.weight.detach())
    again = Net(SINGLE)
    load_checkpoint(tmp_path / "c", again, torch.optim.AdamW(again.parameters()))
    assert torch.equal(again.weight, sharded[0]["weight"])
