"""Calls like one before: they go straight to the launch, give the same, and anything else is looked at anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardfuse.kernels.linear import feed_forward, functional, gated_linear, linear_act, settled
from shardfuse.kernels.linear import op as linear
from shardfuse.kernels.norm import launch as norm_launch
from shardfuse.kernels.norm import layer_norm, rms_norm
from shardfuse.kernels.norm import op as norm
from shardfuse.kernels.rope import apply_rope
from shardfuse.kernels.rope import op as rope
from shardfuse.kernels.runtime import alloc, device, dispatch, repeated, tuning
from shardfuse.parallel.core.mesh import SINGLE
from shardfuse.parallel.core.options import TPOptions
from shardfuse.parallel.mlp import fused_mlp

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(dispatch.triton_version() is None, reason="Triton is not installed"),
]

T, D, F, H = 5, 24, 32, 16


def _x(*sizes: int) -> torch.Tensor:
    return torch.randn(*(sizes or (1, T, D)), requires_grad=True)


def _mlp(x: torch.Tensor, *params: Any, impl: str, recompute: int = 0, residual: Any = None) -> torch.Tensor:
    n = (len(params) - 1) // 2
    *first, out = params
    biases = [None] * n if len(params) == n + 1 else first[n:]
    options = TPOptions(SINGLE, impl=impl)
    act = "silu" if n == 2 else "gelu_tanh"
    return fused_mlp(x, first[:n], biases, out, None, options, activation=act, recompute=recompute, residual=residual)


OPS: dict[str, tuple[list[torch.Tensor], Callable[..., Any]]] = {
    "linear_act": ([_x(), _x(F, D), _x(F)], linear_act),
    "activation": ([_x(T, D), _x(F, D), _x(F)], lambda *a, impl: linear_act(*a, activation="gelu_erf", impl=impl)),
    "residual": (
        [_x(), _x(F, D), _x(1, T, F)], lambda x, w, r, impl: linear_act(x, w, residual=r, activation="silu", impl=impl)
    ),
    "three weights": (
        [_x(), _x(F, D), _x(H, D), _x(H, D), _x(H)],
        lambda x, *w, impl: torch.cat(linear_act(x, w[:3], [None, None, w[3]], impl=impl), -1),
    ),
    "gated_linear": ([_x(), _x(F, D), _x(F, D)], gated_linear),
    "rms_norm": ([_x(), _x(D)], rms_norm),
    "layer_norm": ([_x(T, D), _x(D), _x(D)], layer_norm),
    "norm of a sum": ([_x(), _x(D), _x()], lambda x, w, r, impl: torch.cat(rms_norm(x, w, residual=r, impl=impl), -1)),
    "carried": ([_x(), _x(D)], lambda x, w, impl: torch.cat(rms_norm(x, w, carry=True, impl=impl), -1)),
    "mlp": ([_x(), _x(F, D), _x(F), _x(D, F)], _mlp),
    "gated mlp": (
        [_x(), _x(F, D), _x(F, D), _x(D, F)], lambda x, g, u, o, impl: _mlp(x, g, u, None, None, o, impl=impl)
    ),
    "recomputed": (
        [_x(), _x(F, D), _x(F, D), _x(D, F)],
        lambda x, g, u, o, impl: _mlp(x, g, u, None, None, o, impl=impl, recompute=1, residual=2 * x),
    ),
    **{
        f"rope, {order}": (
            [_x(2, *sizes), _x(2, *(1 if n == 2 else n for n in sizes)), *torch.randn(2, 3, H // 2)],
            lambda q, k, cos, sin, impl, first=first: torch.cat(
                [t.flatten() for t in apply_rope(q, k, cos[:, :4], sin[:, :4], heads_first=first, impl=impl)]
            ),
        )
        for order, sizes, first in (("tokens first", (3, 2, H), False), ("heads first", (2, 3, H), True))
    },
}  # fmt: skip


def _grads(run: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    y = run()
    torch.manual_seed(1)
    y.backward(torch.randn_like(y))
    found = [y.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]]
    for leaf in leaves:
        leaf.grad = None
    return found


def _assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """To fp32, in any order of sums: a few hundred roundings of the largest."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))


@pytest.fixture
def unasked(monkeypatch):
    """From now on nothing may be checked, chosen or planned."""

    def forbid() -> None:
        for module, name in ((functional, "prepare"), (norm, "_check"), (rope, "_check")):
            monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("it was looked at anew"))

    return forbid


@pytest.mark.parametrize("name", OPS)
def test_a_call_like_one_before_gives_the_same(name: str, unasked):
    """And what the reference gives; it is counted, and its launches run."""
    inputs, op = OPS[name]
    inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
    tuning.forget()

    def run(impl: str = "triton") -> torch.Tensor:
        return op(*inputs, impl=impl)

    want = _grads(lambda: run("reference"), inputs)
    first = _grads(run, inputs)
    with torch.no_grad():
        run()
    unasked()
    before = dispatch.counts.copy()
    again = _grads(run, inputs)
    with torch.no_grad():
        inferred = run()
    counted = dispatch.counts - before
    assert {impl for _, impl in counted} == {"triton"}
    assert len(first) == len(again) == len(want) > 2
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert torch.equal(inferred, first[0])
    for ours, theirs in zip(again, want):
        _assert_close(ours, theirs)


def _known() -> int:
    return sum(map(len, (linear._calls, norm._calls, rope._calls, feed_forward._calls)))


def test_what_a_kind_is():
    """Two calls of each kind; only the second may be known."""
    x, w = torch.randn(T, D), torch.randn(F, D)
    behind = torch.randn(T * D + 1)[1:].view(T, D)
    tuning.forget()
    for each in (x, behind, x.t().contiguous().t(), x[:3], x.view(1, T, D), x.half()):
        before = _known()
        for _ in range(2):
            y = linear_act(each, w.to(each.dtype), impl="triton")
            torch.testing.assert_close(y, linear_act(each, w.to(each.dtype), impl="reference"))
        assert _known() == before + (each.stride(-1) == 1)


@pytest.mark.parametrize(
    ("around", "kinds"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), 0),  # looked at anew
        (dispatch.row_invariance, 0),
        (torch.profiler.profile, 0),
        (lambda: device.slots(1), 1),  # other programs are another kind
    ],
)
def test_what_surrounds_a_call_is_part_of_it(around, kinds: int):
    x, w = torch.randn(T, D), torch.randn(F, D)
    tuning.forget()
    for _ in range(2):
        plain = linear_act(x, w, impl="triton")
    known = _known()
    for _ in range(2):
        with around() as within:
            inside = linear_act(x, w, impl="triton")
            expected = linear_act(x, w, impl="reference")
        assert inside.dtype == expected.dtype
        torch.testing.assert_close(inside, expected, rtol=1e-2, atol=0.1 if inside.dtype == torch.bfloat16 else 1e-4)
    if around is torch.profiler.profile:
        assert any(event.key == "shardfuse::linear_act_fwd" for event in within.key_averages())
    assert torch.equal(linear_act(x, w, impl="triton"), plain)
    assert _known() - known == kinds


@pytest.mark.parametrize("name", ["linear_act", "rms_norm", "mlp"])
def test_what_surrounds_a_backward_is_part_of_it(name: str):
    """Of a graph that was made outside."""
    inputs, op = OPS[name]
    inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
    tuning.forget()
    for _ in range(3):
        y = op(*inputs, impl="triton")
        y.backward(torch.ones_like(y))
    known: Any = {
        "linear_act": lambda: next(iter(linear._calls.values()))._call.backward._kinds,
        "rms_norm": lambda: next(iter(norm._calls.values()))._call.forward._backwards,
        "mlp": lambda: next(iter(feed_forward._calls.values()))._backwards,
    }[name]()
    assert len(known) == 1
    for around in (dispatch.row_invariance, lambda: device.slots(1)):
        y = op(*inputs, impl="triton")
        with around():
            y.backward(torch.ones_like(y))
    assert len(known) == (3 if name == "rms_norm" else 2)  # products that are row-invariant go step by step


def test_a_mode_sees_the_ops():
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.append(str(op))
            return op(*args, **(kwargs or {}))

    x, w = torch.randn(T, D), torch.randn(F, D)
    for _ in range(2):
        linear_act(x, w, impl="triton")
    with Mode():
        linear_act(x, w, impl="triton")
    assert any("shardfuse.linear_act_fwd" in name for name in seen)


@pytest.mark.parametrize("wrong", [torch.randn(F, D + 1), torch.randn(F, D).double(), torch.randn(F, D, device="meta")])
def test_what_does_not_fit_is_refused_after_what_did(wrong: torch.Tensor):
    x, w = torch.randn(T, D), torch.randn(F, D)
    for _ in range(2):
        linear_act(x, w, impl="triton")
    with pytest.raises(ValueError, match="linear_act: "):
        linear_act(x, wrong, impl="triton")


@pytest.mark.parametrize("name", ["linear_act", "rms_norm", "layer_norm", "mlp", "gated mlp", "rope, heads first"])
def test_hooks_may_bring_saved_tensors_that_lie_otherwise(name: str):
    inputs, op = OPS[name]
    inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else torch.stack([x, x], 1)[:, 0]

    run = lambda: op(*inputs, impl="triton")
    want = [_grads(run, inputs) for _ in range(2)][1]

    def hooked() -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, turned):
            return run()

    for _ in range(2):
        for ours, theirs in zip(_grads(hooked, inputs), want):
            _assert_close(ours, theirs)


@pytest.mark.parametrize("name", OPS)
def test_a_checkpoint_repeats_a_first_call(name: str):
    """It refuses a repetition that keeps other tensors than forward did."""
    inputs, op = OPS[name]
    inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
    run = lambda: op(*inputs, impl="triton")
    want = _grads(run, inputs)
    tuning.forget()
    for ours, theirs in zip(_grads(lambda: checkpoint(run, use_reentrant=False), inputs), want):
        _assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["linear_act", "rms_norm", "mlp"])
def test_launches_that_were_promised_aligned_tensors_get_no_others(name: str, monkeypatch):
    """Hooks bring saved tensors whose addresses are no multiples of 16 bytes."""
    inputs, op = OPS[name]
    inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
    run = lambda: op(*inputs, impl="triton")
    want = [_grads(run, inputs) for _ in range(2)][1]
    steps = {"linear_act": settled.Gradients, "rms_norm": norm_launch._Backward, "mlp": settled._Backward}[name]
    monkeypatch.setattr(steps, "__call__", lambda *args: pytest.fail("a launch got what it was not promised"))

    def behind(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, behind):
        for ours, theirs in zip(_grads(run, inputs), want):
            _assert_close(ours, theirs)


@pytest.mark.parametrize("name", OPS)
def test_a_first_call_needs_no_more_memory_than_others(name: str, monkeypatch):
    inputs, op = OPS[name]
    inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
    elements: list[int] = []
    for function in ("empty", "new_empty", "new_empty_of", "empty_like"):
        inner = getattr(alloc, function)

        def counted(*args: Any, inner: Any = inner) -> torch.Tensor:
            out: torch.Tensor = inner(*args)
            elements.append(0 if out.is_meta else out.numel())
            return out

        monkeypatch.setattr(alloc, function, counted)
    tuning.forget()
    totals = []
    for _ in range(3):
        elements.clear()
        _grads(lambda: op(*inputs, impl="triton"), inputs)
        totals.append(sum(elements))
    assert 0 < totals[0] == totals[1] == totals[2]


def test_a_bias_for_several_weights_is_refused_after_one_for_each():
    x, w, b = torch.randn(T, D), torch.randn(F, D), torch.randn(F)
    for _ in range(2):
        linear_act(x, [w, w], [b, b], impl="triton")
    with pytest.raises(ValueError, match="pass a bias or None for each"):
        linear_act(x, [w, w], b, impl="triton")


def test_no_more_kinds_are_kept_than_plans(monkeypatch):
    monkeypatch.setattr(repeated, "_MOST", 3)
    calls: Any = repeated.Calls()
    for key in range(8):
        calls[key] = key
    assert list(calls) == [6, 7]
    tuning.forget()
    assert not calls
