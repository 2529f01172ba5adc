"""The ``torch.ops.shardfuse`` namespace.

Ops are registered through ``torch.library.Library`` and differentiated by ``autograd.Function``, which costs less host
time per call than the ``custom_op`` decorator (CONTRIBUTING.md says how to measure a call).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("shardfuse", "FRAGMENT")


def register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``shardfuse::<schema>`` with one kernel for every device and a shape function; returns the op."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardfuse::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.shardfuse, name).default
