"""The feed-forward layer as one autograd function: gradients, memory, and that no pass does anything twice."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from products import PARAM_GRADS, around
from torch import nn

from shardfuse import ParallelMLP, tp_group
from shardfuse.bench.harness.stock import StockGatedMLP, StockMLP
from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.linear import apply_activation, functional
from shardfuse.kernels.runtime import dispatch
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.sharding import local_tensors, spec_of
from shardfuse.parallel.pipeline.split_backward import stage_backward_input, stage_backward_weight

T, D, FFN = 12, 16, 24
LEVELS = (0, 1, 2)
GATED = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
LEVEL = pytest.mark.parametrize("level", LEVELS)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _on_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """What tests the kernels makes its tensors where they run; everything else stays on the CPU."""
    with DEVICE if request.node.get_closest_marker("interpret") else nullcontext():
        yield


class Stock(nn.Module):
    """ParallelMLP's parameters, and its arithmetic in torch's own."""

    def __init__(self, gated: bool, bias: bool, activation: str) -> None:
        super().__init__()
        self.activation, self.gated = activation, gated
        names = ("gate_proj", "up_proj", "down_proj") if gated else ("c_fc", "c_proj")
        for name in names:
            sizes = (FFN, D) if name == names[-1] else (D, FFN)
            setattr(self, name, nn.Linear(*sizes, bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gated:
            return self.down_proj(apply_activation(self.gate_proj(x), self.activation) * self.up_proj(x))
        return self.c_proj(apply_activation(self.c_fc(x), self.activation))


def _pair(
    gated: bool, *, bias: bool = True, activation: str | None = None, **options: Any
) -> tuple[ParallelMLP, Stock]:
    """The same parameters in both."""
    torch.manual_seed(5)
    activation = activation or ("silu" if gated else "gelu_tanh")
    stock = Stock(gated, bias, activation)
    ours = ParallelMLP(D, FFN, gated=gated, bias=bias, activation=activation, **options)
    state = stock.state_dict()
    with torch.no_grad():
        for name, param in ours.named_parameters():
            local_tensors(param)[0].copy_(state[name][spec_of(param).index])
    return ours, stock


def _run(module: nn.Module, x: torch.Tensor, dy: torch.Tensor, context: Any = None) -> dict[str, torch.Tensor]:
    """Output and the gradients of everything that wants one, plain tensors."""
    x = x.detach().clone().requires_grad_(x.requires_grad)
    module.zero_grad()
    with context or nullcontext():
        y = module(x)
    if y.requires_grad:
        y.backward(dy.to(y.dtype))
    grads = {"x": x.grad} | {name: param.grad for name, param in module.named_parameters()}
    return {"y": y.detach()} | {
        name.removeprefix("_orig_mod."): local_tensors(grad)[0] for name, grad in grads.items() if grad is not None
    }


def _verdicts(
    ours: dict[str, Any], low: dict[str, Any], oracle: dict[str, Any], cut: dict[str, Any] | None = None
) -> list[str]:
    """What is wrong. ``cut`` says which part of a whole tensor is ours."""
    assert ours.keys() == low.keys() == oracle.keys(), (ours.keys(), low.keys())
    cut = cut or {}
    # Under autocast y is of the precision that all was computed in.
    options: dict[str, Any] = {
        "terms": 2 * (D + FFN),
        "roundings": 4,
        "computed": ours["y"].dtype if "y" in ours else None,
    }
    found = [
        accuracy.judge(name, out, low[name][cut.get(name, ())], oracle[name][cut.get(name, ())], **options)
        for name, out in ours.items()
    ]
    return [str(verdict) for verdict in found if not verdict.ok]


def _check(ours: nn.Module, stock: nn.Module, x: torch.Tensor, context: Any = None) -> None:
    dy = torch.randn(x.shape, generator=torch.Generator(x.device).manual_seed(1))
    oracle = _run(copy.deepcopy(stock).double(), x.double().requires_grad_(x.requires_grad), dy.double())
    assert _verdicts(_run(ours, x, dy, context), _run(stock, x, dy, context), oracle) == []


def _x(*shape: int, needs: bool = True) -> torch.Tensor:
    return torch.randn(shape or (T, D), requires_grad=needs)


# --- one process ------------------------------------------------------------------------------------------------------


@GATED
@LEVEL
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_every_gradient(gated: bool, level: int, bias: bool):
    for shape in ((T, D), (2, 3, D), (D,), (0, D)):
        _check(*_pair(gated, bias=bias, recompute=level), _x(*shape))


@GATED
@LEVEL
@pytest.mark.parametrize("activation", ["identity", "squared_relu", "quick_gelu"])
def test_every_gradient_of_other_activations(gated: bool, level: int, activation: str):
    _check(*_pair(gated, activation=activation, recompute=level), _x())


@GATED
@LEVEL
def test_every_gradient_under_autocast(gated: bool, level: int):
    context = torch.autocast("cpu", torch.bfloat16)
    ours, stock = _pair(gated, recompute=level)
    _check(ours, stock, _x(), context)
    assert all(param.grad.dtype == torch.float32 for param in ours.parameters())


@pytest.mark.interpret
@GATED
@LEVEL
def test_every_gradient_of_the_kernels(gated: bool, level: int):
    dispatch.counts.clear()
    _check(*_pair(gated, recompute=level, impl="triton"), _x())
    assert set(dispatch.counts) == {("linear_act", "triton")} | ({("gated_linear", "triton")} if gated else set())


def _names(gated: bool) -> list[str]:
    layers = ("gate_proj", "up_proj", "down_proj") if gated else ("c_fc", "c_proj")
    return ["x", *(f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias"))]


def _subsets(names: list[str]) -> list[set[str]]:
    """Each alone, all but each, each layer, none."""
    layers = [{name for name in names if name.startswith(layer)} for layer in {name.split(".")[0] for name in names}]
    return [{name} for name in names] + [{*names} - {name} for name in names] + layers + [set()]


@GATED
@LEVEL
def test_only_what_wants_a_gradient_gets_one(gated: bool, level: int, monkeypatch: pytest.MonkeyPatch):
    ours, stock = _pair(gated, recompute=level)
    for wanted in _subsets(_names(gated)):
        for name, param in itertools.chain(ours.named_parameters(), stock.named_parameters()):
            param.requires_grad_(name in wanted)
        with _counted() as counts:
            _check(ours, stock, _x(needs="x" in wanted))
        weights = [name for name in wanted if name.endswith("weight")]
        first = [name for name in wanted if not name.startswith(("down_proj", "c_proj"))]
        if level:  # level 0 of the reference is torch's own autograd
            assert counts["weight gradient"] == len(weights)
            assert counts["input_grad"] == ("x" in wanted)
            assert counts["input_grad_gated" if gated else "input_grad_act"] == bool(first)


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """How often each product runs inside."""
    counts: Counter[str] = Counter()

    def noted(name: str, run: Any, of: Any) -> Any:
        if name == PARAM_GRADS:
            counts["weight gradient"] += sum(of[2])
            counts["bias gradient"] += sum(of[3])
        else:
            counts[name] += 1
        return run()

    with around(noted):
        yield counts


@GATED
@LEVEL
def test_a_kept_graph_gives_its_gradients_again(gated: bool, level: int):
    ours, stock = _pair(gated, recompute=level)
    oracle = copy.deepcopy(stock).double()
    x, dys = _x(), [torch.randn(T, D) for _ in range(4)]

    def run(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        module.zero_grad()
        x = x.detach().clone().requires_grad_()
        y = module(x)
        a, b, c, d = (dy.to(y.dtype) for dy in dys)
        first = next(iter(module.parameters()))
        y.backward(a, retain_graph=True)
        (dx,) = torch.autograd.grad(y, x, b, retain_graph=True)  # what it leaves behind is for b alone
        y.backward(c, retain_graph=True)
        (dw,) = torch.autograd.grad(y, first, b, retain_graph=True)
        y.backward(d)
        return {"dx": dx, "dw": dw, "x": x.grad} | {name: param.grad for name, param in module.named_parameters()}

    assert _verdicts(run(ours, x), run(stock, x), run(oracle, x.double())) == []


@GATED
@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("order", [1, -1], ids=["", "backwards"])
def test_gradients_asked_for_one_by_one(gated: bool, level: int, order: int):
    ours, stock = _pair(gated, recompute=level)
    names, dy = _names(gated)[::order], torch.randn(T, D)

    def run(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        leaves = {"x": x.detach().clone().requires_grad_()} | dict(module.named_parameters())
        y, grad = module(leaves["x"]), dy.to(x.dtype)
        return {name: torch.autograd.grad(y, leaves[name], grad, retain_graph=True)[0] for name in names}

    x = _x()
    with _counted() as counts:
        grads = run(ours, x)
    assert _verdicts(grads, run(stock, x), run(copy.deepcopy(stock).double(), x.double())) == []
    assert counts["input_grad_gated" if gated else "input_grad_act"] == 1
    assert counts["input_grad"] == 1
    assert counts["gated_forward" if gated else "forward"] == (1 if gated else 2) + (level == 2)


def test_a_second_derivative_is_refused():
    ours, _ = _pair(False, recompute=1)
    x = _x()
    with pytest.raises(RuntimeError, match="create_graph=True asks for second derivatives"):
        torch.autograd.grad(ours(x), x, torch.randn(T, D), create_graph=True)


@GATED
@LEVEL
def test_compiles_whole_and_for_any_number_of_tokens(gated: bool, level: int):
    ours, stock = _pair(gated, recompute=level)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9):
        _check(compiled, stock, _x(tokens, D))


def _kept(module: nn.Module, x: torch.Tensor) -> int:
    """Bytes that autograd keeps for backward beside the parameters."""
    storages = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(x)
    for param in module.parameters():
        storages.pop(param.untyped_storage().data_ptr(), None)
    return sum(storages.values())


@GATED
def test_memory_between_forward_and_backward(gated: bool):
    tokens, hidden, ffn = 64, 32, 128
    x = torch.randn(tokens, hidden, requires_grad=True)
    eager = _kept(StockGatedMLP(hidden, ffn, "silu") if gated else StockMLP(hidden, ffn), x)
    kept = [_kept(ParallelMLP(hidden, ffn, gated=gated, recompute=level), x) for level in LEVELS]
    inputs, features, factors = x.nbytes, tokens * ffn * x.itemsize, 2 if gated else 1
    assert kept[0] <= eager
    assert kept[1] == inputs + factors * features
    assert kept[1] <= 2 / 3 * eager
    assert kept[2] == inputs
    with torch.no_grad():
        assert _kept(ParallelMLP(hidden, ffn, gated=gated, recompute=1), x) == 0


@GATED
def test_frozen_weights_keep_what_is_needed_and_no_more(gated: bool):
    x, features = _x(), T * FFN * 4
    for level in LEVELS[1:]:
        ours, _ = _pair(gated, recompute=level)
        ours.requires_grad_(False)
        assert _kept(ours, x) == (x.nbytes if level == 2 else (2 if gated else 1) * features)  # z alone leads to dx
        (ours.down_proj if gated else ours.c_proj).bias.requires_grad_()
        assert _kept(ours, _x(needs=False)) == 0


@GATED
def test_a_layer_with_hooks_is_called_as_itself(gated: bool):
    ours, stock = _pair(gated, recompute=1)
    called: list[str] = []
    for name, layer in ours.named_children():
        layer.register_forward_hook(lambda *_, name=name: called.append(name))
    _check(ours, stock, _x())
    assert called == [name for name, _ in ours.named_children()]


def test_a_replaced_layer_is_called():
    ours, stock = _pair(False, recompute=2)
    ours.c_proj = stock.c_proj = nn.Sequential(stock.c_proj, nn.Tanh())
    x = _x()
    assert torch.equal(ours(x), stock(x))


@pytest.mark.parametrize("recompute", [3, -1, "selective", None], ids=str)
def test_unknown_levels_are_refused(recompute: Any):
    with pytest.raises(ValueError, match=r"recompute=.*: expected 0 .* 1 .* or 2"):
        ParallelMLP(8, 16, recompute=recompute)


@GATED
def test_operands_that_do_not_fit_are_named(gated: bool):
    for level in LEVELS:
        ours, _ = _pair(gated, recompute=level)
        with pytest.raises(ValueError, match=r"weight 0 has shape \(24, 16\) but x has \(12, 15\)"):
            ours(torch.randn(T, D - 1))
        with pytest.raises(ValueError, match=r"x is torch\.float64"):
            ours(torch.randn(T, D).double())


# --- split backward ---------------------------------------------------------------------------------------------------


def _split(ours: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[dict[str, Any], list[dict[str, Counter[Any]]]]:
    """Output and gradients from a pipeline's two passes; products and collectives of forward, inputs, weights."""
    x = x.detach().clone().requires_grad_()
    ran: list[dict[str, Counter[Any]]] = []

    @contextmanager
    def noted() -> Iterator[None]:
        collectives.reset_counts()
        with _counted() as products:
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
    """Of forward, of the pass over inputs, of the pass over weights."""
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
    ours, stock = _pair(gated, recompute=level, mesh=group, sequence_parallel=sequence_parallel)
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

    low = _run(stock, x.requires_grad_(), dy)
    oracle = _run(copy.deepcopy(stock).double(), x.double().detach().requires_grad_(), dy.double())
    return _verdicts(found, low, oracle, cut)


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
    """Two layers in a row: what a pass leaves behind belongs to the layer, and goes away with the next."""
    group = tp_group(dist.group.WORLD)
    layers = [_pair(gated, recompute=2, mesh=group)[0] for gated in (False, True)]
    _, ran = _split(nn.Sequential(*layers), torch.randn(T, D), torch.randn(T, D))
    expected = [_expected_products(gated, 2) for gated in (False, True)]
    assert [pass_["products"] for pass_ in ran] == [plain + gated for plain, gated in zip(*expected)]


def test_split_backward_of_a_stack(ranks: Any):
    ranks(2, _stack_body)


# --- ranks ------------------------------------------------------------------------------------------------------------


def _ranks_body(rank: int, world: int, gated: bool, level: int, options: dict[str, Any]) -> list[str]:
    options = dict(options)
    autocast, compiled, bias = (options.pop(name, default) for name, default in _DEFAULTS.items())
    ours, stock = _pair(gated, bias=bias, recompute=level, mesh=tp_group(dist.group.WORLD), **options)
    x, dy = torch.randn(T, D, requires_grad=True), torch.randn(T, D)
    cut: dict[str, Any] = {name: spec_of(param).index for name, param in ours.named_parameters()}
    if options.get("sequence_parallel"):
        cut["x"] = cut["y"] = slice(rank * T // world, (rank + 1) * T // world)
    rows = cut.get("x", slice(None))
    context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    module = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    found = _run(module, x[rows], dy[rows], context)
    low = _run(stock, x, dy, context)
    oracle = _run(copy.deepcopy(stock).double(), x.double().detach().requires_grad_(), dy.double())
    return _verdicts(found, low, oracle, cut)


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
    """The order in which backward starts to sum dx, forms weight gradients, and takes the sum."""
    events: list[str] = []
    start, param_grads = collectives.start_all_reduce, functional.param_grads

    def noted_start(x: torch.Tensor, group: Any, *, site: str) -> Any:
        events.append("start")
        finish = start(x, group, site=site)
        return lambda: (events.append("wait"), finish())[1]

    def noted_param_grads(*args: Any, **kwargs: Any) -> Any:
        events.append("weights")
        return param_grads(*args, **kwargs)

    collectives.start_all_reduce, functional.param_grads = noted_start, noted_param_grads
    try:
        ours, _ = _pair(False, recompute=1, mesh=tp_group(dist.group.WORLD))
        ours(_x()).sum().backward()
    finally:
        collectives.start_all_reduce, functional.param_grads = start, param_grads
    return events


def test_the_input_gradient_travels_while_both_layers_weights_get_theirs(ranks: Any):
    for events in ranks(2, _order_body):
        assert events == ["start", "weights", "weights", "wait"]


@pytest.mark.interpret
@GATED
@LEVEL
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_residual_rides_in_the_last_product(gated: bool, level: int, impl: str):
    ours, stock = _pair(gated, recompute=level, impl=impl)
    x, residual = torch.randn(2, 3, D, requires_grad=True), torch.randn(2, 3, D, requires_grad=True)
    dispatch.counts.clear()
    y = ours(x, residual=residual)
    expected = stock(x) + residual
    torch.testing.assert_close(y, expected)
    leaves = [x, residual]
    for found, wanted in zip(
        torch.autograd.grad(y.square().sum(), [*leaves, *ours.parameters()]),
        torch.autograd.grad(expected.square().sum(), [*leaves, *stock.parameters()]),
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"residual (is|has)"):
        ours(x, residual=residual[0])


@pytest.mark.interpret
def test_x_may_be_its_own_residual_under_compile():
    mlp = ParallelMLP(D, FFN, impl="triton")
    x = torch.randn(2, 3, D, requires_grad=True)
    layer = torch.compile(lambda x: mlp(x, residual=x), fullgraph=True, backend="aot_eager")
    found, expected = layer(x), mlp(x) + x
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), x)[0] for each in (found, expected)))
