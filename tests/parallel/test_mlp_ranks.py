"""The feed-forward layer over ranks and in a split backward: no pass runs a product or a collective twice."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mlp_case import GATED, LEVEL, D, T, counted, pair, run_with_grads, verdicts
from products import order_of_backward
from torch import nn

from shardfuse import tp_group
from shardfuse.kernels.runtime import dispatch
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.sharding import local_tensors, spec_of
from shardfuse.parallel.pipeline.split_backward import stage_backward_input, stage_backward_weight

# --- split backward ---------------------------------------------------------------------------------------------------


def _split(ours: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[dict[str, Any], list[dict[str, Counter[Any]]]]:
    """Output and gradients from a pipeline's two passes; products and collectives of forward, inputs, weights."""
    x = x.detach().clone().requires_grad_()
    ran: list[dict[str, Counter[Any]]] = []

    @contextmanager
    def noted() -> Iterator[None]:
        collectives.reset_counts()
        with counted() as products:
            yield
        ran.append({"products": +products, "collectives": Counter(collectives.calls)})

    with noted():
        y = ours(x)
    out = y.detach().clone()
    with noted():
        _, groups = stage_backward_input([y], [dy], [x], ours.parameters())
    with noted():
        stage_backward_weight(ours.parameters(), groups)
    grads = {"x": x.grad} | {name: param.grad for name, param in ours.named_parameters()}
    return {"y": out} | {name: local_tensors(grad)[0] for name, grad in grads.items()}, ran


def _expected_products(gated: bool, level: int) -> list[Counter[str]]:
    """The products of forward, of the pass over inputs and of the pass over weights."""
    first = "gated_forward" if gated else "forward"
    inputs = Counter({"input_grad": 1, "input_grad_gated" if gated else "input_grad_act": 1})
    weights = 3 if gated else 2
    return [
        Counter([first, "forward"]),
        inputs + Counter({first: level == 2}),
        Counter({"weight gradient": weights, "bias gradient": weights}),
    ]


def _split_body(rank: int, world: int, gated: bool, level: int, sequence_parallel: bool) -> list[str]:
    group = tp_group(dist.group.WORLD if world > 1 else None)
    ours, stock = pair(gated, recompute=level, mesh=group, sequence_parallel=sequence_parallel)
    x, dy = torch.randn(T, D), torch.randn(T, D)
    cut: dict[str, Any] = {name: spec_of(param).index for name, param in ours.named_parameters()}
    if sequence_parallel:
        cut["x"] = cut["y"] = slice(rank * T // world, (rank + 1) * T // world)
    rows = cut.get("x", slice(None))
    found, ran = _split(ours, x[rows], dy[rows])

    assert [pass_["products"] for pass_ in ran] == _expected_products(gated, level)
    sends: list[Any] = [[], [], []]
    if world > 1 and sequence_parallel:
        again = [("all_gather", "mlp.in.again")] if level == 2 else []
        sends[0] = [("all_gather", "mlp.in"), ("reduce_scatter", "mlp.out")]
        sends[1] = [("all_gather", "mlp.out.grad"), ("reduce_scatter", "mlp.in.grad"), *again]
    elif world > 1:
        sends[:2] = [("all_reduce", "mlp.out")], [("all_reduce", "mlp.in.grad")]
    assert [pass_["collectives"] for pass_ in ran] == [Counter(sent) for sent in sends]

    low = run_with_grads(stock, x.requires_grad_(), dy)
    oracle = run_with_grads(copy.deepcopy(stock).double(), x.double().detach().requires_grad_(), dy.double())
    return verdicts(found, low, oracle, cut)


@GATED
def test_split_backward_runs_each_product_once(gated: bool):
    for level in (1, 2):
        assert _split_body(0, 1, gated, level, False) == []


@GATED
@LEVEL
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_split_backward_over_ranks_runs_each_product_and_collective_once(
    ranks: Any, gated: bool, level: int, sequence_parallel: bool
):
    assert ranks(2, _split_body, gated, level, sequence_parallel) == [[], []]


def _stack_body(rank: int, world: int) -> None:
    """Two layers in a row: a layer's saved values belong to it and are freed by its next pass."""
    group = tp_group(dist.group.WORLD)
    layers = [pair(gated, recompute=2, mesh=group)[0] for gated in (False, True)]
    _, ran = _split(nn.Sequential(*layers), torch.randn(T, D), torch.randn(T, D))
    expected = [_expected_products(gated, 2) for gated in (False, True)]
    assert [pass_["products"] for pass_ in ran] == [plain + gated for plain, gated in zip(*expected)]


def test_split_backward_of_a_stack(ranks: Any):
    ranks(2, _stack_body)


# --- ranks ------------------------------------------------------------------------------------------------------------


def _ranks_body(rank: int, world: int, gated: bool, level: int, options: dict[str, Any]) -> list[str]:
    options = dict(options)
    autocast, compiled, bias = (options.pop(name, default) for name, default in _DEFAULTS.items())
    ours, stock = pair(gated, bias=bias, recompute=level, mesh=tp_group(dist.group.WORLD), **options)
    x, dy = torch.randn(T, D, requires_grad=True), torch.randn(T, D)
    cut: dict[str, Any] = {name: spec_of(param).index for name, param in ours.named_parameters()}
    if options.get("sequence_parallel"):
        cut["x"] = cut["y"] = slice(rank * T // world, (rank + 1) * T // world)
    rows = cut.get("x", slice(None))
    context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    module = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    found = run_with_grads(module, x[rows], dy[rows], context)
    low = run_with_grads(stock, x, dy, context)
    oracle = run_with_grads(copy.deepcopy(stock).double(), x.double().detach().requires_grad_(), dy.double())
    return verdicts(found, low, oracle, cut)


_DEFAULTS = {"autocast": False, "compiled": False, "bias": True}


@GATED
@LEVEL
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False, "params": "local"},
        {"autocast": True},
        pytest.param(
            {"impl": "triton"},
            marks=[
                pytest.mark.interpret,
                pytest.mark.skipif(not dispatch.interpreting(), reason="CPU tensors: the kernels must be interpreted"),
            ],
        ),
    ],
    ids=["dtensor", "local-no-bias", "autocast", "triton"],
)
def test_every_gradient_over_ranks(
    ranks: Any, gated: bool, level: int, sequence_parallel: bool, options: dict[str, Any]
):
    for wrong in ranks(2, _ranks_body, gated, level, {"sequence_parallel": sequence_parallel, **options}):
        assert wrong == []


@GATED
def test_what_torch_compile_traces_over_ranks_computes_the_same(ranks: Any, gated: bool):
    options = {"compiled": True, "params": "local", "sequence_parallel": True}
    assert ranks(2, _ranks_body, gated, 1, options) == [[], []]


def _order_body(rank: int, world: int) -> list[str]:
    ours, _ = pair(False, recompute=1, mesh=tp_group(dist.group.WORLD))
    x = torch.randn(T, D, requires_grad=True)
    return order_of_backward(lambda: ours(x).sum().backward())


def test_the_input_gradient_travels_while_both_layers_weights_get_theirs(ranks: Any):
    for events in ranks(2, _order_body):
        assert events == ["start", "weights", "weights", "wait"]
