"""The feed-forward layer as one autograd function, in one process: gradients, saved memory, launches."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from mlp_case import FFN, GATED, LEVEL, LEVELS, D, T, counted, pair, run_with_grads, verdicts
from torch import nn

from shardfuse import ParallelMLP
from shardfuse.bench.harness.stock import StockGatedMLP, StockMLP
from shardfuse.kernels.runtime import dispatch

pytestmark = pytest.mark.usefixtures("kernels_on_device")


def _check(ours: nn.Module, stock: nn.Module, x: torch.Tensor, context: Any = None) -> None:
    dy = torch.randn(x.shape, generator=torch.Generator(x.device).manual_seed(1))
    oracle = run_with_grads(copy.deepcopy(stock).double(), x.double().requires_grad_(x.requires_grad), dy.double())
    assert verdicts(run_with_grads(ours, x, dy, context), run_with_grads(stock, x, dy, context), oracle) == []


def _x(*shape: int, needs: bool = True) -> torch.Tensor:
    return torch.randn(shape or (T, D), requires_grad=needs)


@GATED
@LEVEL
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_every_gradient(gated: bool, level: int, bias: bool):
    for shape in ((T, D), (2, 3, D), (D,), (0, D)):
        _check(*pair(gated, bias=bias, recompute=level), _x(*shape))


@GATED
@LEVEL
@pytest.mark.parametrize("activation", ["identity", "squared_relu", "quick_gelu"])
def test_every_gradient_of_other_activations(gated: bool, level: int, activation: str):
    _check(*pair(gated, activation=activation, recompute=level), _x())


@GATED
@LEVEL
def test_every_gradient_under_autocast(gated: bool, level: int):
    context = torch.autocast("cpu", torch.bfloat16)
    ours, stock = pair(gated, recompute=level)
    _check(ours, stock, _x(), context)
    assert all(param.grad.dtype == torch.float32 for param in ours.parameters())


@pytest.mark.interpret
@GATED
@LEVEL
def test_every_gradient_of_the_kernels(gated: bool, level: int):
    dispatch.counts.clear()
    _check(*pair(gated, recompute=level, impl="triton"), _x())
    assert set(dispatch.counts) == {("linear_act", "triton")} | ({("gated_linear", "triton")} if gated else set())


def _names(gated: bool) -> list[str]:
    layers = ("gate_proj", "up_proj", "down_proj") if gated else ("c_fc", "c_proj")
    return ["x", *(f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias"))]


def _subsets(names: list[str]) -> list[set[str]]:
    """Each operand alone, all but each, each layer, none."""
    layers = [{name for name in names if name.startswith(layer)} for layer in {name.split(".")[0] for name in names}]
    return [{name} for name in names] + [{*names} - {name} for name in names] + layers + [set()]


@GATED
@LEVEL
def test_only_what_wants_a_gradient_gets_one(gated: bool, level: int, monkeypatch: pytest.MonkeyPatch):
    ours, stock = pair(gated, recompute=level)
    for wanted in _subsets(_names(gated)):
        for name, param in itertools.chain(ours.named_parameters(), stock.named_parameters()):
            param.requires_grad_(name in wanted)
        with counted() as counts:
            _check(ours, stock, _x(needs="x" in wanted))
        weights = [name for name in wanted if name.endswith("weight")]
        first = [name for name in wanted if not name.startswith(("down_proj", "c_proj"))]
        if level:  # level 0 of the reference is torch's own autograd
            assert counts["weight gradient"] == len(weights)
            assert counts["input_grad"] == ("x" in wanted)
            assert counts["input_grad_gated" if gated else "input_grad_act"] == bool(first)


@GATED
@LEVEL
def test_a_kept_graph_gives_its_gradients_again(gated: bool, level: int):
    ours, stock = pair(gated, recompute=level)
    oracle = copy.deepcopy(stock).double()
    x, dys = _x(), [torch.randn(T, D) for _ in range(4)]

    def run(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        module.zero_grad()
        x = x.detach().clone().requires_grad_()
        y = module(x)
        a, b, c, d = (dy.to(y.dtype) for dy in dys)
        first = next(iter(module.parameters()))
        y.backward(a, retain_graph=True)
        (dx,) = torch.autograd.grad(y, x, b, retain_graph=True)  # the saved values serve b alone
        y.backward(c, retain_graph=True)
        (dw,) = torch.autograd.grad(y, first, b, retain_graph=True)
        y.backward(d)
        return {"dx": dx, "dw": dw, "x": x.grad} | {name: param.grad for name, param in module.named_parameters()}

    assert verdicts(run(ours, x), run(stock, x), run(oracle, x.double())) == []


@GATED
@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("order", [1, -1], ids=["", "backwards"])
def test_gradients_asked_for_one_by_one(gated: bool, level: int, order: int):
    ours, stock = pair(gated, recompute=level)
    names, dy = _names(gated)[::order], torch.randn(T, D)

    def run(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        leaves = {"x": x.detach().clone().requires_grad_()} | dict(module.named_parameters())
        y, grad = module(leaves["x"]), dy.to(x.dtype)
        return {name: torch.autograd.grad(y, leaves[name], grad, retain_graph=True)[0] for name in names}

    x = _x()
    with counted() as counts:
        grads = run(ours, x)
    assert verdicts(grads, run(stock, x), run(copy.deepcopy(stock).double(), x.double())) == []
    assert counts["input_grad_gated" if gated else "input_grad_act"] == 1
    assert counts["input_grad"] == 1
    assert counts["gated_forward" if gated else "forward"] == (1 if gated else 2) + (level == 2)


def test_a_second_derivative_is_refused():
    ours, _ = pair(False, recompute=1)
    x = _x()
    with pytest.raises(RuntimeError, match="create_graph=True asks for second derivatives"):
        torch.autograd.grad(ours(x), x, torch.randn(T, D), create_graph=True)


@GATED
@LEVEL
def test_compiles_whole_and_for_any_number_of_tokens(gated: bool, level: int):
    ours, stock = pair(gated, recompute=level)
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9):
        _check(compiled, stock, _x(tokens, D))


def _kept(module: nn.Module, x: torch.Tensor) -> int:
    """The bytes that autograd saves for backward, without the parameters."""
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
        ours, _ = pair(gated, recompute=level)
        ours.requires_grad_(False)
        assert _kept(ours, x) == (x.nbytes if level == 2 else (2 if gated else 1) * features)  # dx needs only z
        (ours.down_proj if gated else ours.c_proj).bias.requires_grad_()
        assert _kept(ours, _x(needs=False)) == 0


@GATED
def test_a_layer_with_hooks_is_called_as_itself(gated: bool):
    ours, stock = pair(gated, recompute=1)
    called: list[str] = []
    for name, layer in ours.named_children():
        layer.register_forward_hook(lambda *_, name=name: called.append(name))
    _check(ours, stock, _x())
    assert called == [name for name, _ in ours.named_children()]


def test_a_replaced_layer_is_called():
    ours, stock = pair(False, recompute=2)
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
        ours, _ = pair(gated, recompute=level)
        with pytest.raises(ValueError, match=r"weight 0 has shape \(24, 16\) but x has \(12, 15\)"):
            ours(torch.randn(T, D - 1))
        with pytest.raises(ValueError, match=r"x is torch\.float64"):
            ours(torch.randn(T, D).double())


@pytest.mark.interpret
@GATED
@LEVEL
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_residual_rides_in_the_last_product(gated: bool, level: int, impl: str):
    ours, stock = pair(gated, recompute=level, impl=impl)
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
