"""Where a product's launch may take the place of its op, and where the op has to be seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardfuse.kernels.linear import gated_linear, linear_act, schemas
from shardfuse.kernels.runtime import library

launch = pytest.importorskip("shardfuse.kernels.linear.launch", reason="Triton is not installed")

pytestmark = [pytest.mark.interpret, pytest.mark.usefixtures("kernels_on_device")]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OP = "shardfuse.linear_act_fwd"


class _Subclass(torch.Tensor):
    """A tensor whose functions are noted."""

    noted: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Subclass.noted.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


@contextlib.contextmanager
def _dispatch_mode() -> Iterator[list[str]]:
    noted: list[str] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            noted.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        yield noted


@contextlib.contextmanager
def _function_mode() -> Iterator[list[str]]:
    noted: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            noted.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        yield noted


@contextlib.contextmanager
def _profiler() -> Iterator[list[str]]:
    noted: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield noted
    noted += [event.key.replace("::", ".") for event in profile.key_averages()]


def _operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(3, 8, device=DEVICE), torch.randn(6, 8, device=DEVICE)


@pytest.mark.parametrize("watch", [_dispatch_mode, _function_mode, _profiler])
@pytest.mark.parametrize("grad", [False, True])
def test_what_watches_ops_sees_a_products(watch: Callable[..., Any], grad: bool):
    x, w = _operands()
    expected = linear_act(x, w, impl="triton")
    with watch() as noted:
        y = linear_act(x.requires_grad_(grad), w, impl="triton")
    assert any(OP in each for each in noted)
    assert torch.equal(y, expected)


def test_a_subclass_sees_it():
    x, w = _operands()
    _Subclass.noted = []
    with torch.no_grad():
        linear_act(x.as_subclass(_Subclass), w, impl="triton")
    assert any(OP in each for each in _Subclass.noted)


def test_a_fake_tensor_needs_no_mode_around_the_call():
    with FakeTensorMode() as mode:
        x, w = _operands()
    y = linear_act(x, w, impl="triton")
    assert y.fake_mode is mode
    assert y.shape == (3, 6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_is_one_of_ops():
    """torch.jit.trace records ops: it would take what a launch wrote for a constant."""
    found: list[Any] = []
    torch.jit.trace(lambda x: found.append(library.launches(schemas, x)) or x + 1, _operands()[:1], check_trace=False)
    assert len(found) == 1
    assert found[0] is schemas


def test_operands_that_are_not_what_lies_in_memory():
    x, w = (torch.complex(torch.zeros_like(t), t).conj().imag for t in _operands())
    assert x.is_neg()
    assert w.is_neg()
    plain = linear_act(x.clone(), w.clone(), impl="triton")
    assert torch.equal(linear_act(x, w, impl="triton"), plain)
    # A gradient of the kind, too.
    leaf = x.clone().requires_grad_()
    dy = torch.randn(3, 6, device=DEVICE)
    flipped = torch.complex(torch.zeros_like(dy), -dy).conj().imag
    assert flipped.is_neg()
    for activation in ("identity", "silu"):
        y = linear_act(leaf, w.clone(), activation=activation, impl="triton")
        (expected,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
        assert torch.equal(torch.autograd.grad(y, leaf, flipped)[0], expected)


def test_what_a_transform_left_behind():
    """A wrapper of torch.func outlives it as an ordinary tensor without memory of its own."""
    left: list[torch.Tensor] = []
    x, w = _operands()
    torch.func.grad(lambda x: left.append(x * 2) or left[0].sum())(x)
    assert torch.equal(linear_act(left[0], w, impl="triton"), linear_act(2 * x, w, impl="triton"))


@pytest.mark.parametrize("grad", [False, True])
def test_elsewhere_the_dispatcher_is_left_out(grad: bool, monkeypatch: pytest.MonkeyPatch):
    x, w = _operands()
    for name in [name for name in vars(launch) if isinstance(getattr(schemas, name, None), torch._ops.OpOverload)]:
        monkeypatch.setattr(schemas, name, lambda *_, name=name: pytest.fail(f"{name} went through the dispatcher"))
    x.requires_grad_(grad)
    w.requires_grad_(grad)
    y = linear_act(x, w, activation="silu", impl="triton") + gated_linear(x, w, w, impl="triton")
    if grad:
        y.sum().backward()


def test_without_torchs_answer_every_op_is_dispatched(monkeypatch: pytest.MonkeyPatch):
    for name in ("_modes", "_functions", "_traces", "_profiles", "_level"):
        with monkeypatch.context() as patch:
            patch.setattr(library, name, library._yes)
            assert library.launches(schemas, *_operands()) is schemas
    assert library.launches(schemas, *_operands()) is launch
