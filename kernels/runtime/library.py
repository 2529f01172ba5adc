"""The ``torch.ops.shardfuse`` namespace.

Ops are registered through ``torch.library.Library`` and differentiated by ``autograd.Function``, which costs less host
time per call than the ``custom_op`` decorator (CONTRIBUTING.md says how to measure a call).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("shardfuse", "FRAGMENT")


def register(schema: str, kernel: Callable[..., Any] | str, fake: Callable[..., Any]) -> Any:
    """Define ``shardfuse::<schema>`` with one kernel for every device and a shape function; returns the op.

    ``kernel`` is a function, or the module that has one of the schema's name, imported when a kernel first runs: it
    needs Triton.
    """
    name = schema.partition("(")[0]
    if isinstance(kernel, str):
        kernel = _later(kernel, name)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardfuse::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.shardfuse, name).default


def _later(module: str, name: str) -> Callable[..., Any]:
    found = functools.cache(importlib.import_module)  # the import system takes microseconds to find it again

    def call(*args: Any) -> Any:
        return getattr(found(module), name)(*args)

    return call
