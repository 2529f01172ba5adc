"""What a pass of backward asks of a function, what one pass leaves for the next, and where gradients are added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable

from shardfuse.kernels.linear import linear_act
from shardfuse.kernels.runtime import autograd

T, D, F = 3, 4, 5
NOTHING = (False,) * 5
pytestmark = pytest.mark.usefixtures("kernels_on_device")


class _Linear(torch.autograd.Function):
    """x @ w^T + b between arguments that are no tensors. Notes what each pass was asked for, and what it recalled."""

    passes: list[dict[str, Any]]

    @staticmethod
    def forward(ctx: Any, call: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, n: int) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        y = x @ w.t()
        return y if b is None else y + b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        want = autograd.needed_grads(ctx)
        recalled = autograd.load_saved(ctx, [dy])
        _Linear.passes.append({"want": want, "captured": autograd.captured(ctx), "recalled": recalled})
        autograd.save_for_next_pass(ctx, [dy], len(_Linear.passes), want)
        x, w = ctx.saved_tensors
        _, want_x, want_w, want_b, _ = want
        return None, dy @ w if want_x else None, dy.t() @ x if want_w else None, dy.sum(0) if want_b else None, None


def _tensors(x: bool = True, w: bool = True, b: bool | None = True) -> tuple[Any, Any, Any]:
    """x, w and b with gradients where True; b None where None."""
    bias = None if b is None else torch.randn(F, requires_grad=b)
    return torch.randn(T, D, requires_grad=x), torch.randn(F, D, requires_grad=w), bias


def _passes(run: Callable[[torch.Tensor], Any], x: Any, w: Any, b: Any) -> list[dict[str, Any]]:
    _Linear.passes = []
    run(_Linear.apply("call", x, w, b, 3))
    return _Linear.passes


def _asked(run: Callable[[torch.Tensor], Any], x: Any, w: Any, b: Any) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    (only,) = _passes(run, x, w, b)
    return only["want"][1:4], only["captured"][1:4]


def test_this_torch_can_be_asked():
    assert autograd._will_execute is not None
    assert autograd._keeps_graph is not None


@pytest.mark.parametrize(
    "needs", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, None), (0, 1, None), (1, 0, 1)], ids=str
)
def test_a_whole_backward_wants_what_requires_a_gradient(needs: tuple[Any, ...]):
    tensors = _tensors(*(None if need is None else bool(need) for need in needs))
    assert _asked(lambda y: y.sum().backward(), *tensors) == (tuple(map(bool, needs)), (False,) * 3)


@pytest.mark.parametrize("chosen", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("how", ["grad", "backward"])
def test_a_pass_wants_what_it_was_asked_for(how: str, chosen: tuple[int, ...]):
    tensors = _tensors()
    inputs = [tensors[i] for i in chosen]
    if how == "grad":
        want, captured = _asked(lambda y: torch.autograd.grad(y.sum(), inputs), *tensors)
    else:
        want, captured = _asked(lambda y: y.sum().backward(inputs=inputs), *tensors)
    expected = tuple(i in chosen for i in range(3))
    assert want == expected
    assert captured == (expected if how == "grad" else (False,) * 3)  # what goes to .grad may go elsewhere


def test_what_lies_behind_an_input_counts_not_the_input():
    leaf, (_, w, b) = torch.randn(T, D, requires_grad=True), _tensors()
    inner = leaf * 2
    for target in (leaf, inner):
        want, captured = _asked(lambda y, t=target: torch.autograd.grad(y.sum(), t, retain_graph=True), inner, w, b)
        assert want == (True, False, False)
        assert captured == (False, False, False)  # x is no leaf of its own
    assert _asked(lambda y: torch.autograd.grad(y.sum(), w), inner, w, b)[0] == (False, True, False)


def test_without_the_engines_answer_everything_is_wanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(autograd, "_will_execute", None)
    x, w, b = _tensors(b=False)
    want, captured = _asked(lambda y: torch.autograd.grad(y.sum(), x), x, w, b)
    assert want == (True, True, False)
    assert captured == (False, False, False)


def test_a_torch_that_answers_by_itself_is_believed():
    class Context:
        needs_input_grad = (False, True, False)
        next_functions = ((object(), 0), (object(), 0))

    assert autograd.needed_grads(Context()) == (False, True, False)


def test_passes_over_one_gradient_share_what_they_remember():
    x, w, b = _tensors()
    dy = torch.randn(T, F)

    def run(y: torch.Tensor) -> None:
        for target in (x, w, b):
            torch.autograd.grad(y, target, dy, retain_graph=True)
        torch.autograd.grad(y, x, dy)

    recalled = [found["recalled"] for found in _passes(run, x, w, b)]
    assert recalled == [None, 1, 2, None]  # the third was the last with anything to do


def test_another_gradient_recalls_nothing():
    x, w, b = _tensors(b=None)
    dy = torch.randn(T, F)

    def run(y: torch.Tensor) -> None:
        torch.autograd.grad(y, x, dy, retain_graph=True)
        torch.autograd.grad(y, w, dy.clone(), retain_graph=True)  # equal, but nobody knows
        dy.add_(1)
        torch.autograd.grad(y, x, dy, retain_graph=True)
        dy.add_(1)
        torch.autograd.grad(y, w, dy)

    assert [found["recalled"] for found in _passes(run, x, w, b)] == [None] * 4


def test_nothing_is_remembered_where_no_pass_can_follow(monkeypatch: pytest.MonkeyPatch):
    kept: list[bool] = []
    save_for_next_pass = autograd.save_for_next_pass

    def noted(ctx: Any, *args: Any) -> None:
        save_for_next_pass(ctx, *args)
        kept.append(ctx.left is not None)

    monkeypatch.setattr(autograd, "save_for_next_pass", noted)
    x, w, b = _tensors()
    _passes(lambda y: torch.autograd.grad(y.sum(), x), x, w, b)  # the graph is gone afterwards
    _passes(lambda y: y.sum().backward(retain_graph=True), x, w, b)  # nothing is left to do
    _passes(lambda y: torch.autograd.grad(y.sum(), x, retain_graph=True), x, w, b)
    assert kept == [False, False, True]


@pytest.mark.interpret
def test_a_residuals_gradient_may_be_asked_for_first():
    x, w, residual = (torch.randn(*shape, requires_grad=True) for shape in ((T, D), (F, D), (T, F)))
    dy = torch.randn(T, F)
    y = linear_act(x, w, activation="silu", residual=residual, impl="triton")
    grads = [torch.autograd.grad(y, leaf, dy, retain_graph=True)[0] for leaf in (residual, x, w)]
    y = linear_act(x, w, activation="silu", residual=residual, impl="triton")
    for split, whole in zip(grads, torch.autograd.grad(y, (residual, x, w), dy)):
        assert torch.equal(split, whole)


# --- main_grad --------------------------------------------------------------------------------------------------------


def _param(main_grad: torch.Tensor | None, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.zeros(4, 6, dtype=dtype))
    if main_grad is not None:
        param.main_grad = main_grad
    return param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_buffers_are_found_for_what_trains(dtype: torch.dtype):
    buffer = torch.zeros(4, 6, dtype=dtype)
    frozen = _param(None).requires_grad_(False)
    assert [found is buffer for found in autograd.main_grads([_param(buffer), None, frozen])] == [True, False, False]


@pytest.mark.parametrize(
    ("main_grad", "message"),
    [
        (None, r"shape \[4, 6\] has no main_grad: call attach_main_grads"),
        (torch.zeros(6, 4), r"main_grad is torch.float32 \[6, 4\] on cpu: expected.*\[4, 6\]"),
        (torch.zeros(4, 6, dtype=torch.float16), r"main_grad is torch.float16.*torch.float32 or torch.bfloat16"),
        (torch.zeros(6, 4).t(), "contiguous"),
        (torch.zeros(4, 6, device="meta"), "on meta: expected.*on cpu"),
    ],
    ids=["missing", "shape", "dtype", "strides", "device"],
)
def test_a_buffer_that_does_not_fit_is_refused(main_grad: torch.Tensor | None, message: str):
    with pytest.raises(ValueError, match=message):
        autograd.main_grads([_param(main_grad)])


def test_a_captured_gradient_is_returned_not_added():
    class Adding(_Linear):
        @staticmethod
        @once_differentiable
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
            places.append(autograd.destinations(ctx, buffers))
            x, w = ctx.saved_tensors
            return None, dy @ w, dy.t() @ x, None, None

    x, w, _ = _tensors(b=None)
    buffers, places = [torch.zeros(F, D), None, None], []  # of w, b and n
    Adding.apply("call", x, w, None, 3).sum().backward()
    torch.autograd.grad(Adding.apply("call", x, w, None, 3).sum(), [x, w])
    assert places[0][0] is buffers[0]
    assert places[1] == [None, None, None]
