"""linear_cross_entropy with a sharded vocabulary: against one process in fp64, with counts of collectives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cross_entropy_case import EVERY, D, T, V, eager, gain_for, with_grads
from wire import omit

from shardfuse.kernels.dev import accuracy
from shardfuse.layers.loss import linear_cross_entropy
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import tp_group
from shardfuse.parallel.core.sharding import ShardSpec, make_parameter, unwrap


def _ranks_body(
    rank: int,
    world: int,
    reduction: str,
    dtype: torch.dtype,
    impl: str,
    params: str,
    sequence_parallel: bool,
    words: int,
) -> list[str]:
    """Loss and gradients over ranks against one process in fp64, and the collectives' counts."""
    group = tp_group(dist.group.WORLD)
    rows, tokens, chunk = -(-V // world), 18, 7
    torch.manual_seed(3)
    hidden, whole = (
        torch.randn(tokens, D).to(dtype),
        {"w": torch.randn(rows * world, D), "b": torch.randn(rows * world)},
    )
    whole = {name: t.to(dtype) for name, t in whole.items()}
    targets, gain = torch.randint(words, (tokens,)), gain_for(reduction, tokens)
    targets[::5] = -100
    options = {"reduction": reduction, **EVERY}

    specs = {name: ShardSpec(name, t.shape, 0, group) for name, t in whole.items()}
    weight, bias = (make_parameter(whole[name][spec.index].clone(), spec, params) for name, spec in specs.items())
    own = collectives.local_slice(hidden, group, 0) if sequence_parallel else hidden.clone()
    collectives.reset_counts()
    ours = with_grads(
        linear_cross_entropy, (own.requires_grad_(), weight, bias), targets, gain, group=group, vocab_size=words,
        sequence_parallel=sequence_parallel, chunk_tokens=chunk, impl=impl, **options,
    )  # fmt: skip
    (ours["dweight"], ours["dbias"]), _ = unwrap((ours["dweight"], ours["dbias"]))

    exchanges = math.ceil(tokens / chunk) if reduction != "none" else 1
    kind = "all_reduce" if reduction != "none" else "all_gather"
    expected = {(kind, "loss.statistics"): exchanges}
    expected["reduce_scatter" if sequence_parallel else "all_reduce", "loss.in.grad"] = 1
    if sequence_parallel:
        expected["all_gather", "loss.in"] = 1
    assert dict(collectives.calls) == expected
    wide = 8 if dtype == torch.float64 else 4
    share = 4 * tokens * wide * (world if reduction != "none" else 1)
    assert collectives.payload[kind, "loss.statistics"] == share  # four numbers per token and rank, whatever V is

    def alone(to):
        cut = [hidden.to(to), whole["w"][:words].to(to), whole["b"][:words].to(to)]
        found = with_grads(eager, [t.requires_grad_() for t in cut], targets, gain, **options)
        for name, leaf in (("dweight", "w"), ("dbias", "b")):
            padded = torch.zeros_like(whole[leaf], dtype=to)
            padded[:words] = found[name]
            found[name] = padded[specs[leaf].index]
        if sequence_parallel:
            found["dhidden"] = collectives.local_slice(found["dhidden"], group, 0)
        return found

    low, oracle = alone(dtype), alone(torch.float64)
    found = []
    for name, exact in oracle.items():
        if dtype == torch.float64:
            verdict = accuracy.within(name, ours[name], exact, 4 * V * torch.finfo(dtype).eps)
        else:
            verdict = accuracy.judge(name, ours[name].to(dtype), low[name], exact, terms=V)
        found += [] if verdict.ok else [str(verdict)]
    with torch.no_grad():
        again = linear_cross_entropy(
            own, weight, targets, bias, group=group, vocab_size=words, sequence_parallel=sequence_parallel, impl=impl,
            **options,
        )  # fmt: skip
    torch.testing.assert_close(again, ours["loss"])
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "reduction", "dtype", "impl", "params", "sequence_parallel", "words"),
    [
        (2, "mean", torch.float64, "auto", "dtensor", False, V),
        (2, "sum", torch.float64, "auto", "local", True, V),
        (2, "none", torch.float64, "auto", "dtensor", True, V),
        (2, "mean", torch.float32, "triton", "dtensor", True, V),
        (2, "none", torch.float32, "triton", "local", False, V),
        (2, "mean", torch.bfloat16, "auto", "local", False, V),
        (2, "mean", torch.float64, "auto", "local", False, 20),  # the second rank has only padding
        (2, "none", torch.float32, "triton", "local", False, 20),
        (3, "mean", torch.float64, "auto", "local", False, 31),
    ],
)
def test_over_ranks(ranks, world, reduction, dtype, impl, params, sequence_parallel, words):
    for rank, wrong in enumerate(ranks(world, _ranks_body, reduction, dtype, impl, params, sequence_parallel, words)):
        assert not wrong, f"rank {rank}: {wrong}"


def _omission_body(rank: int, world: int, reduction: str, site: str) -> bool:
    """Whether omitting a collective changes the loss or a gradient."""
    group = tp_group(dist.group.WORLD)
    torch.manual_seed(5)
    hidden, weight, targets = torch.randn(8, D), torch.randn(2, 12, D)[group.rank], torch.randint(24, (8,))
    tensors = [collectives.local_slice(hidden, group, 0).requires_grad_(), weight.clone().requires_grad_(), None]

    def run():
        gain = torch.ones(8) if reduction == "none" else torch.ones(())
        options = {"group": group, "sequence_parallel": True, "reduction": reduction}
        return with_grads(linear_cross_entropy, tensors, targets, gain, **options)

    right = run()
    with omit(site):
        wrong = run()
    return any(not torch.allclose(right[name], wrong[name]) for name in right)


@pytest.mark.ranks
@pytest.mark.parametrize("site", ["loss.in", "loss.statistics", "loss.in.grad"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_collective_is_needed(ranks, reduction, site):
    assert all(ranks(2, _omission_body, reduction, site))


def _split_body(rank: int, world: int) -> dict[str, Any]:
    """A split backward over ranks sums the hidden states' gradient once, and main_grad gets a DTensor's local part."""
    group = tp_group(dist.group.WORLD)
    torch.manual_seed(7)
    x, whole, targets = torch.randn(T, D), torch.randn(24, D), torch.randint(24, (T,))
    spec = ShardSpec("w", whole.shape, 0, group)
    weight = make_parameter(whole[spec.index].clone(), spec)
    weight.main_grad = torch.zeros(12, D)
    x.requires_grad_()
    collectives.reset_counts()
    options = {"group": group, "chunk_tokens": 8, "fuse_wgrad_accumulation": True}
    loss = linear_cross_entropy(x, weight, targets, **options)
    (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert not weight.main_grad.any()
    loss.backward(inputs=[weight])
    assert weight.grad is None
    counted = collectives.calls["all_reduce", "loss.in.grad"]

    leaf, exact = whole.double().requires_grad_(), x.detach().double().requires_grad_()
    dexact, dleaf = torch.autograd.grad(eager(exact, leaf, targets), (exact, leaf))
    errors = [accuracy.relative_error(dx, dexact), accuracy.relative_error(weight.main_grad, dleaf[spec.index])]
    return {"sums": counted, "errors": errors}


@pytest.mark.ranks
def test_a_split_backward_over_ranks(ranks):
    for found in ranks(2, _split_body):
        assert found["sums"] == 1
        assert max(found["errors"]) < V * torch.finfo(torch.float32).eps


def _compiled_body(rank: int, world: int, reduction: str, sequence_parallel: bool) -> None:
    group = tp_group(dist.group.WORLD)
    options = {"group": group, "sequence_parallel": sequence_parallel, "reduction": reduction}

    def step(hidden, weight, targets):
        return linear_cross_entropy(hidden, weight, targets, **options).mean()

    torch.manual_seed(9)
    hidden, weight, targets = torch.randn(6, D), torch.randn(2, 12, D)[rank], torch.randint(24, (6,))
    if sequence_parallel:
        hidden = collectives.local_slice(hidden, group, 0)
    tensors = [hidden.requires_grad_(), weight.clone().requires_grad_()]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(*(torch.autograd.grad(call(*tensors, targets), tensors) for call in (compiled, step))):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.ranks
@pytest.mark.parametrize(("reduction", "sequence_parallel"), [("mean", False), ("none", True)])
def test_compiles_over_ranks(ranks, reduction, sequence_parallel):
    ranks(2, _compiled_body, reduction, sequence_parallel)


def _errors_body(rank: int, world: int) -> str:
    group = tp_group(dist.group.WORLD)
    hidden, weight = torch.randn(4, D), torch.randn(3, D)
    with pytest.raises(ValueError, match=r"vocab_size=7.*3 rows on each of 2 ranks: expected 1 to 6"):
        linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64), group=group, vocab_size=7)
    with pytest.raises(ValueError, match=r"expected \[8\], one for each of 2 ranks' tokens"):
        linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.int64), group=group, sequence_parallel=True)
    with pytest.raises(ValueError) as caught:
        linear_cross_entropy(hidden, weight, torch.tensor([0, 6, 1, 2]), group=group)
    return str(caught.value)


@pytest.mark.ranks
def test_errors_over_ranks(ranks):
    first, second = ranks(2, _errors_body)
    assert first == second
    assert "target 6 is neither in the vocabulary of 6" in first
