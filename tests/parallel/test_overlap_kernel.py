"""Layers whose rows travel inside the kernels (overlap="kernel"), interpreted, on symmetric memory between processes.

The same operands, references and counts (overlap_case.py) as in test_overlap.py, which has the other paths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from overlap_case import (
    KIND,
    SP,
    D,
    T,
    counted_calls,
    local_dy,
    local_leaves,
    recompute_options,
    reference,
    run_backward,
    run_forward,
    whole_operands,
    world_group,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from shardfuse import ParallelMLP, explain
from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.linear import launch
from shardfuse.kernels.runtime import dispatch
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.options import TPOptions
from shardfuse.parallel.linear import column_linear, row_linear
from shardfuse.parallel.overlap import policy
from shardfuse.parallel.overlap.memory.pool import SymmetricMemoryPool
from shardfuse.parallel.pipeline.split_backward import stage_backward_input, stage_backward_weight

pytestmark = [pytest.mark.ranks, pytest.mark.interpret]
IN_KERNEL: dict[str, Any] = {"overlap": "kernel", "strict": True, "impl": "triton"}
PLAIN: dict[str, Any] = {"overlap": "none", "impl": "triton"}  # the same kernels, without overlap


@contextmanager
def _launches() -> Iterator[Counter[str]]:
    """Count the block's GEMMs by exchange ("", "gather", "send") and epilogue."""
    counts: Counter[str] = Counter()
    original = launch.run_gemm

    def run_gemm(layout: str, *args: Any, **options: Any) -> None:
        kind, *_ = launch._remoteness(options.get("remote"))
        counts[f"{kind or 'plain'} {layout}"] += 1
        original(layout, *args, **options)

    launch.run_gemm = run_gemm
    try:
        yield counts
    finally:
        launch.run_gemm = original


def _miss(name: str, ours: torch.Tensor, low: torch.Tensor, oracle: torch.Tensor) -> list[str]:
    verdict = accuracy.judge(name, ours, low, oracle, terms=128)  # a layer of width 48, there and back
    return [] if verdict.ok else [str(verdict)]


def _layers_body(rank: int, world: int, kind: str, sequence_parallel: bool) -> list[str]:
    """The errors: results against one process in fp64, by the plain path's error; counts; launches."""
    group, wrong = world_group(), []
    oracle = reference(whole_operands(), kind, rank, world, sequence_parallel)
    whole = whole_operands(torch.float32)
    again = [("all_gather", {"layers": "in.again"}.get(kind, "mlp.in.again"))] if sequence_parallel else []
    levels = recompute_options(kind)[:: 2 if world == 2 else 3]  # 0 and 2; level 1's launches are level 0's
    for options in levels:
        found, counted = {}, {}
        for way in (PLAIN, IN_KERNEL):
            leaves = local_leaves(whole, kind, rank, world, sequence_parallel)
            collectives.reset_counts()
            with _launches() as launches:
                y = run_forward(leaves, kind, group, sequence_parallel=sequence_parallel, **way, **options)
                found[way["overlap"]] = run_backward(y, local_dy(whole, leaves, rank, sequence_parallel), leaves)
            counted[way["overlap"]] = counted_calls()
        for name, value in found["kernel"].items():
            wrong += _miss(f"{options} {name}", value, found["none"][name], oracle[name])
        plain = counted["none"] | dict.fromkeys(again, (1, T // world * D * 4))
        if counted["kernel"] != plain:
            wrong.append(f"{options}: counted {counted['kernel']}, not {plain}")
        # Gathers: x in forward, at level 2 once more in backward, and dy; sums: y and dx.
        gathers = 2 + (options.get("recompute") == 2) if sequence_parallel else 0
        ran = {end: sum(n for key, n in launches.items() if key.startswith(end)) for end in ("gather", "send")}
        if ran != {"gather": gathers, "send": 2}:
            wrong.append(f"{options}: ran {launches}")
    return wrong


@pytest.mark.parametrize(("world", "kind"), [(2, "layers"), (2, "mlp"), (2, "gated"), (3, "layers"), (3, "mlp")])
@SP
def test_layers_in_kernels_give_what_one_process_does(ranks: Any, world: int, kind: str, sequence_parallel: bool):
    for wrong in ranks(world, _layers_body, kind, sequence_parallel):
        assert not wrong


def _split_body(rank: int, world: int, kind: str) -> None:
    """A pipeline's split backward around another layer's whole step, which reuses the slots."""
    group = world_group()
    oracle, whole = reference(whole_operands(), kind, rank, world, True), whole_operands(torch.float32)
    for options in recompute_options(kind)[::2]:
        made = []
        leaves = local_leaves(whole, kind, rank, world, True)
        y = run_forward(leaves, kind, group, sequence_parallel=True, **PLAIN, **options)
        low = run_backward(y, local_dy(whole, leaves, rank, True), leaves)
        for _ in range(2):
            leaves = local_leaves(whole, kind, rank, world, True)
            made.append((leaves, run_forward(leaves, kind, group, sequence_parallel=True, **IN_KERNEL, **options)))
        (leaves, y), (others, z) = made
        params = [leaf for name, leaf in leaves.items() if name != "x"]
        with _launches() as first:
            _, groups = stage_backward_input([y], [local_dy(whole, leaves, rank, True)], [leaves["x"]], iter(params))
        between = run_backward(z, local_dy(whole, others, rank, True), others)
        with _launches() as second:
            stage_backward_weight(iter(params), groups)
        assert not [key for key in first if key.endswith("tn")]
        assert set(second) == {"plain tn"}
        found = {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}
        for these in (found, between):
            misses = [miss for name in these for miss in _miss(name, these[name], low[name], oracle[name])]
            assert not misses, options


@KIND
def test_split_backward_runs_each_product_once_and_keeps_what_it_needs(ranks: Any, kind: str):
    ranks(2, _split_body, kind)


def _wrapped_body(rank: int, world: int) -> None:
    """With checkpointing, several calls in one graph, and FSDP2."""
    torch.manual_seed(0)
    group = world_group()
    make = lambda **more: ParallelMLP(D, 48, mesh=group, sequence_parallel=True, **more)
    mlp, plain = make(**IN_KERNEL), make(overlap="none")
    plain.load_state_dict(mlp.state_dict())
    x = torch.randn(T // world, D, generator=torch.Generator().manual_seed(rank))
    for recompute in (False, True):
        grads = {}
        for name, module in (("kernel", mlp), ("none", plain)):
            module.zero_grad()
            leaf = x.clone().requires_grad_()
            call = (lambda h, module=module: checkpoint(module, h, use_reentrant=False)) if recompute else module
            call(call(leaf)).square().mean().backward()  # two of them in one graph, the second one's x from the first
            grads[name] = [leaf.grad, *(p.grad.to_local() for p in module.parameters())]
        for ours, theirs in zip(grads["kernel"], grads["none"]):
            torch.testing.assert_close(ours, theirs)
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    sharded = ParallelMLP(D, 48, mesh=mesh["tp"], sequence_parallel=True, **IN_KERNEL)
    fully_shard(sharded, mesh=mesh["dp"])
    sharded(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.to_local().isfinite().all() for p in sharded.parameters())


def test_checkpointing_two_layers_in_a_graph_and_fsdp(ranks: Any):
    ranks(2, _wrapped_body)


def _choice_body(rank: int, world: int) -> list[str]:
    """The reported choice, from the layer and from strict."""
    group, said = world_group(), []
    mlp = ParallelMLP(D, 48, mesh=group, overlap="kernel", impl="triton")
    mlp(torch.zeros(4, D))
    said.append(str(explain(mlp, torch.zeros(4, D))))
    # On a CPU `auto` runs the reference, which cannot exchange: the plain path, or with strict an error.
    auto = {"overlap": "kernel", "impl": "auto"}
    ParallelMLP(D, 48, mesh=group, **auto)(torch.zeros(4, D))
    try:
        ParallelMLP(D, 48, mesh=group, strict=True, **auto)(torch.zeros(4, D))
    except RuntimeError as error:
        said.append(str(error))
    return said


def test_the_choice_is_explained(ranks: Any):
    for told, error in ranks(2, _choice_body):
        assert "kernel" in told
        assert "strict=True" in error
        assert "the product runs the reference" in error or "the product runs oneDNN" in error


def _probe_body(rank: int, world: int) -> tuple[str, str]:
    """Unreliable memory: every rank falls back and gives the reason."""
    original = SymmetricMemoryPool.probe
    SymmetricMemoryPool.probe = lambda self, timeout_s=None: "probe: rank 1 does not reach rank 0"  # type: ignore[method-assign]
    try:
        group = world_group()
        x, weight = torch.ones(4, D), torch.ones(D, D)
        before = dispatch.counts.copy()
        plan = policy.select(
            "linear_all_reduce", group, tokens=4, features_in=D, features_out=D, dtype=x.dtype, device=x.device,
            overlap="kernel", impl="triton",
        )  # fmt: skip
        assert dispatch.counts == before
        assert weight.isfinite().all()
        return plan.kind, plan.reason
    finally:
        SymmetricMemoryPool.probe = original  # type: ignore[method-assign]


def test_memory_that_fails_its_probe_is_not_used(ranks: Any):
    assert ranks(2, _probe_body) == [("plain", "probe: rank 1 does not reach rank 0")] * 2


def _featureless_body(rank: int, world: int) -> list[str]:
    """The errors of layers without features on one side: their product is empty, or all zeros."""
    group, wrong = world_group(), []
    for out_features, in_features in ((0, D), (D, 0)):
        for sequence_parallel in (False, True):
            options = TPOptions(group, sequence_parallel=sequence_parallel, site="s", **IN_KERNEL)
            for column in (True, False):
                x = torch.ones(4, in_features, requires_grad=True)
                weight = torch.ones(out_features, in_features, requires_grad=True)
                if column:
                    (y,) = column_linear(x, [weight], [None], options)
                else:
                    y = row_linear(x, weight, None, options)
                y.sum().backward()
                rows = (8 if column else 2) if sequence_parallel else 4
                if y.shape != (rows, out_features) or y.any() or x.grad.any() or weight.grad.shape != weight.shape:
                    wrong.append(f"{y.shape} of {list(weight.shape)}, column {column}, sequence {sequence_parallel}")
    return wrong


def test_layers_without_features_go_plainly(ranks: Any):
    assert ranks(2, _featureless_body) == [[], []]
