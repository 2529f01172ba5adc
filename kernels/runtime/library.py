"""The ``torch.ops.shardfuse`` namespace.

Ops are registered through ``torch.library.Library`` and differentiated by ``autograd.Function``, which costs less host
time per call than the ``custom_op`` decorator (CONTRIBUTING.md says how to measure a call).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

NAMESPACE = "shardfuse"  # a build for the kernel hub names its own (integrations/hub/build.py)
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def register(schema: str, kernel: Callable[..., Any] | str, fake: Callable[..., Any]) -> Any:
    """Define ``shardfuse::<schema>`` with one kernel for every device and a shape function; returns the op.

    ``kernel`` is a function, or the module that has one of the schema's name, imported when a kernel first runs: it
    needs Triton.
    """
    name = schema.partition("(")[0]
    _REGISTERED[name] = schema, fake
    if isinstance(kernel, str):
        kernel = _later(kernel, name)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return _op(name)


def register_twin(op: Any, prefix: str, module: str) -> Any:
    """``shardfuse::<prefix>_<name>``, with schema and shape function of the registered ``op``, and the function of that
    name in ``module`` for a kernel.
    """
    name = op._schema.name.partition("::")[2]
    schema, fake = _REGISTERED[name]
    _LIBRARY.define(f"{prefix}_{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(f"{prefix}_{name}", _later(module, name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{prefix}_{name}", fake, lib=_LIBRARY)
    return _op(f"{prefix}_{name}")


def _op(name: str) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


_REGISTERED: dict[str, tuple[str, Callable[..., Any]]] = {}  # schema and shape function, by name


def _later(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return getattr(imported(module), name)(*args)

    return call


imported = functools.cache(importlib.import_module)  # the import system takes microseconds to find a module again


def launches(schemas: Any, *operands: torch.Tensor | None) -> Any:
    """The module whose functions to call on ``operands``: ``schemas``, whose ops launch kernels, or, where nothing else
    has to see them, its module LAUNCH, which has functions of the same names. The dispatcher between the two takes as
    long as all that they do.

    The caller runs outside autograd. It passes every operand whose memory a kernel reads.
    """
    # What `watched` asks, without a call. torch.compile can trace the first question only.
    if torch.compiler.is_compiling() or _modes() or _functions() or _traces() or _profiles() or _level() is not None:
        return schemas
    for tensor in operands:  # a subclass, or one that is not what lies in its memory
        if tensor is not None and (type(tensor) not in PLAIN or tensor.is_neg() or _wrapped(tensor)):
            return schemas
    return imported(schemas.LAUNCH)


def watched() -> bool:
    """Whether torch.compile, a mode (fake tensors, selective checkpointing, FLOP counters), a trace or torch.func must
    see the ops that run.
    """
    return torch.compiler.is_compiling() or bool(_modes() or _functions() or _traces() or _level() is not None)


def quiet() -> bool:
    """Whether nothing has to see the ops that run, or has a say in what they do: what :func:`launches` asks of modes,
    and autocast and forward-mode differentiation.
    """
    return not (
        torch.compiler.is_compiling()
        or _modes()
        or _functions()
        or _traces()
        or _profiles()
        or _level() is not None
        or autocasts()
        or forward_ad._current_level >= 0
    )


def direct(*operands: torch.Tensor | None) -> bool:
    """Whether an op may run on ``operands`` without the dispatcher: no one has to see it, and all are plain tensors."""
    if watched():
        return False
    for tensor in operands:  # noqa: SIM110 - a generator takes three times as long
        if tensor is not None and type(tensor) not in PLAIN:
            return False
    return True


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Within the block a mode that is active wants to see the ops below ours, so one of its kind does not count."""
    global _modes
    outer = _modes
    _modes = lambda: outer() - 1
    try:
        yield
    finally:
        _modes = outer


def _yes(*_: Any) -> bool:
    return True


# Private; where a torch has one of them no longer, every call goes through the dispatcher.
_modes = getattr(torch._C, "_len_torch_dispatch_stack", _yes)
_functions = getattr(torch._C, "_len_torch_function_stack", _yes)
_traces = getattr(torch._C, "_is_tracing", _yes)
_profiles = getattr(torch.autograd, "_profiler_enabled", _yes)
_level = getattr(torch._C._functorch, "maybe_current_level", _yes)
autocasts = getattr(torch._C, "_is_any_autocast_enabled", _yes)
_wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", _yes)
PLAIN = (torch.Tensor, torch.nn.Parameter)
