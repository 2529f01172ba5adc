"""The backward of layers in pieces: its saved memory, its collectives, and its users (a pipeline's split backward, one
gradient at a time, activation checkpointing, main_grad, FSDP2, torch.compile).
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
    KINDS,
    SP,
    D,
    T,
    close,
    local_dy,
    local_leaves,
    recompute_options,
    reference,
    run_backward,
    run_forward,
    whole_operands,
    world_group,
)
from products import NAMES, PARAM_GRADS, around
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from wire import omit, sites_seen

from shardfuse.kernels.linear import functional
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import Group, tp_group
from shardfuse.parallel.core.options import TPOptions
from shardfuse.parallel.linear import column_linear
from shardfuse.parallel.pipeline.split_backward import stage_backward_input, stage_backward_weight

pytestmark = pytest.mark.ranks


# --- memory and collectives -------------------------------------------------------------------------------------------


def _kept_body(rank: int, world: int) -> list[dict[str, int]]:
    """The bytes saved for backward in x's shapes: the whole, and this rank's part."""
    found = []
    for kind in KINDS:
        kept = {}
        for way in ("none", "chunked"):
            leaves = local_leaves(whole_operands(), kind, rank, world, True)
            storages: dict[int, int] = {}

            def keep(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                y = run_forward(leaves, kind, world_group(), sequence_parallel=True, overlap=way)
            kept[way] = sum(storages.values())
            y.sum().backward()
        found.append(kept)
    return found


def test_only_the_own_rows_of_the_input_are_kept(ranks: Any):
    for found in ranks(2, _kept_body):
        for kept in found:
            assert kept["none"] - kept["chunked"] == 8 * T * D // 2


def _omit_body(rank: int, world: int, kind: str, sequence_parallel: bool) -> list[str]:
    """The sites whose omitted collective goes undetected."""
    whole, group, unnoticed = whole_operands(), world_group(), []

    def run() -> dict[str, torch.Tensor]:
        leaves = local_leaves(whole, kind, rank, world, sequence_parallel)
        y = run_forward(leaves, kind, group, sequence_parallel=sequence_parallel, overlap="chunked")
        return run_backward(y, local_dy(whole, leaves, rank, sequence_parallel), leaves)

    collectives.reset_counts()
    expected = run()
    sites = sorted({site for what, site in collectives.calls if what != "gather_objects"})
    assert len(sites) == (5 if sequence_parallel else 2)
    for site in sites:
        with omit(site):
            found = run()
        if all(torch.equal(found[name], value) for name, value in expected.items()):
            unnoticed.append(site)
    return unnoticed


@pytest.mark.parametrize("kind", ["layers", "mlp"])
@SP
def test_a_collective_left_out_is_noticed(ranks: Any, kind: str, sequence_parallel: bool):
    assert ranks(2, _omit_body, kind, sequence_parallel) == [[], []]


# --- users of the backward --------------------------------------------------------------------------------------------


@contextmanager
def _products() -> Iterator[Counter[str]]:
    """The rows of each product in the block, in units of all tokens; weight gradients by their number."""
    counts: Counter[str] = Counter()
    act_grad = functional.act_grad

    def noted(name: str, run: Any, of: Any) -> Any:
        if name == PARAM_GRADS:
            counts["weights"] += sum(of[2])
        else:
            counts[name] += of.tokens
        return run()

    def noted_act_grad(dy: torch.Tensor, *args: Any) -> torch.Tensor:
        counts["act_grad"] += dy.shape[0]
        return act_grad(dy, *args)

    functional.act_grad = noted_act_grad  # type: ignore[assignment]
    try:
        with around(noted):
            yield counts
    finally:
        functional.act_grad = act_grad
        for name in (*NAMES.values(), "act_grad"):
            counts[name] //= T


def _split_body(rank: int, world: int, kind: str, sequence_parallel: bool) -> None:
    """The two passes of a pipeline's split backward: every product and every collective once over both."""
    whole, group = whole_operands(), world_group()
    expected = reference(whole, kind, rank, world, sequence_parallel)
    for options in recompute_options(kind):
        leaves = local_leaves(whole, kind, rank, world, sequence_parallel)
        params = [leaf for name, leaf in leaves.items() if name != "x"]
        dy = local_dy(whole, leaves, rank, sequence_parallel)
        y = run_forward(leaves, kind, group, sequence_parallel=sequence_parallel, overlap="chunked", **options)
        found, ran = {"y": y.detach().clone()}, []
        collectives.reset_counts()
        with _products() as counts:
            _, groups = stage_backward_input([y], [dy], [leaves["x"]], iter(params))
        ran.append((+counts, set(sites_seen())))
        with _products() as counts:
            stage_backward_weight(iter(params), groups)
        ran.append((+counts, {site for _, site in collectives.calls} - ran[0][1]))
        assert set(collectives.calls.values()) == {1}
        _check_split(ran, kind, sequence_parallel, options.get("recompute", 0))
        found |= {name: leaf.grad for name, leaf in leaves.items()}
        assert all(close(value, expected[name]) for name, value in found.items()), options


def _check_split(ran: list[Any], kind: str, sequence_parallel: bool, level: int) -> None:
    (inputs, sites), (weights, later) = ran
    if kind == "layers":
        assert inputs == Counter(input_grad=2, act_grad=2)
        assert sites == ({"out.grad", "in.grad"} if sequence_parallel else {"in.grad"})
        assert later == ({"in.again"} if sequence_parallel else set())
    else:
        gated = kind == "gated"
        assert inputs == Counter(input_grad=1) + Counter(["input_grad_gated" if gated else "input_grad_act"]) + (
            Counter(["gated_forward" if gated else "forward"]) if level == 2 else Counter()
        )
        again = {"mlp.in.again"} if sequence_parallel else set()
        assert sites == {"mlp.in.grad"} | ({"mlp.out.grad"} if sequence_parallel else set()) | (
            again if level == 2 else set()
        )
        assert later == (set() if level == 2 else again)
    assert weights == Counter(weights=2 if kind == "mlp" else 3)


@KIND
@SP
def test_split_backward_runs_each_product_and_collective_once(ranks: Any, kind: str, sequence_parallel: bool):
    ranks(2, _split_body, kind, sequence_parallel)


def _one_by_one_body(rank: int, world: int, kind: str) -> None:
    """Each gradient in a separate pass over one graph."""
    whole = whole_operands()
    expected = reference(whole, kind, rank, world, True)
    for options in recompute_options(kind):
        leaves = local_leaves(whole, kind, rank, world, True)
        y = run_forward(leaves, kind, world_group(), sequence_parallel=True, overlap="chunked", **options)
        collectives.reset_counts()
        dy = local_dy(whole, leaves, rank, True)
        for name in reversed(leaves):
            (grad,) = torch.autograd.grad(y, leaves[name], dy, retain_graph=True)
            assert close(grad, expected[name]), (options, name)
        assert sites_seen() == ["mlp.in.again", "mlp.in.grad", "mlp.out.grad"]
        assert set(collectives.calls.values()) == {1}


@pytest.mark.parametrize("kind", ["mlp", "gated"])
def test_gradients_asked_for_one_by_one(ranks: Any, kind: str):
    ranks(2, _one_by_one_body, kind)


def _one_by_one_column_body(rank: int, world: int) -> None:
    leaves = local_leaves(whole_operands(), "layers", rank, world, True)
    del leaves["w2"], leaves["b2"]
    found = {}
    for way in ("none", "chunked"):
        weights, biases = [leaves["w1"], leaves["w3"]], [leaves["b1"], leaves["b3"]]
        options = TPOptions(world_group(), sequence_parallel=True, overlap=way, site="in")
        ys = column_linear(leaves["x"], weights, biases, options, activation="silu")
        dys = [torch.full_like(y, i + 1.0) for i, y in enumerate(ys)]
        collectives.reset_counts()
        found[way] = [torch.autograd.grad(ys, leaf, dys, retain_graph=True)[0] for leaf in leaves.values()]
    assert collectives.calls == {("all_gather", "in.again"): 1, ("reduce_scatter", "in.grad"): 1}
    assert all(close(ours, theirs) for ours, theirs in zip(found["chunked"], found["none"]))


def test_a_column_layers_gradients_asked_for_one_by_one(ranks: Any):
    ranks(2, _one_by_one_column_body)


def _wrapped_body(rank: int, world: int, sequence_parallel: bool) -> None:
    """With activation checkpointing, and with accumulation in main_grad."""
    whole, group = whole_operands(), world_group()
    for kind in KINDS:
        expected = reference(whole, kind, rank, world, sequence_parallel)
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "overlap": "chunked"}
        leaves = local_leaves(whole, kind, rank, world, sequence_parallel)
        dy = local_dy(whole, leaves, rank, sequence_parallel)
        y = checkpoint(run_forward, leaves, kind, group, use_reentrant=False, **options)
        found = run_backward(y, dy, leaves)
        assert all(close(value, expected[name]) for name, value in found.items()), kind

        leaves = local_leaves(whole, kind, rank, world, sequence_parallel)
        for leaf in leaves.values():
            leaf.main_grad = torch.zeros_like(leaf, requires_grad=False)
        for _ in range(2):
            run_forward(leaves, kind, group, fuse_wgrad_accumulation=True, **options).backward(dy)
        for name, leaf in leaves.items():
            assert close(leaf.grad if name == "x" else leaf.main_grad, 2 * expected[name]), (kind, name)


@SP
def test_checkpointing_and_main_grad(ranks: Any, sequence_parallel: bool):
    ranks(2, _wrapped_body, sequence_parallel)


class _Module(torch.nn.Module):
    """A gated MLP over this rank's parts of the parameters."""

    def __init__(self, leaves: dict[str, torch.Tensor], group: Group, way: str) -> None:
        super().__init__()
        self.group, self.way = group, way
        for name, leaf in leaves.items():
            if name != "x":
                setattr(self, name, torch.nn.Parameter(leaf.detach().clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        leaves = {"x": x, **dict(self.named_parameters())}
        return run_forward(leaves, "gated", self.group, sequence_parallel=True, overlap=self.way)


def _fsdp_body(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group, whole, found = tp_group(mesh), whole_operands(), {}
    for way in ("none", "chunked"):
        module = _Module(local_leaves(whole, "gated", group.rank, 2, True), group, way)
        fully_shard(module, mesh=mesh["dp"])
        x = (
            local_leaves(whole, "gated", group.rank, 2, True)["x"].detach() + mesh.get_local_rank("dp")
        ).requires_grad_()
        module(x).sum().backward()
        found[way] = {"x": x.grad} | {name: p.grad.to_local() for name, p in module.named_parameters()}
    assert all(close(found["chunked"][name], value) for name, value in found["none"].items())


def test_under_fsdp(ranks: Any):
    ranks(4, _fsdp_body)


def _compiled_body(rank: int, world: int) -> None:
    whole, group = whole_operands(), world_group()
    leaves = local_leaves(whole, "layers", rank, world, True)
    step = lambda leaves, **options: run_forward(leaves, "layers", group, sequence_parallel=True, **options)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = run_backward(compiled(leaves, overlap="chunked"), local_dy(whole, leaves, rank, True), leaves)
    expected = reference(whole, "layers", rank, world, True)
    assert all(close(value, expected[name]) for name, value in found.items())
    with pytest.raises(Exception, match=r"strict=True, but under torch\.compile"):
        compiled(leaves, overlap="chunked", strict=True)
    torch._dynamo.reset()


def test_torch_compile_gets_the_plain_composition(ranks: Any):
    ranks(2, _compiled_body)
