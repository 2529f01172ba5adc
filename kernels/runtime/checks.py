"""Checks of arguments that several floors share. They run at construction, or after a call has failed.

The command line checks its arguments with them before it imports torch, so this module does not.
"""

from __future__ import annotations

import operator
from typing import Any

from .names import expected


def whole_number(name: str, value: Any, *, least: int = 1) -> int:
    """``value`` as an int; ValueError unless it is a whole number of at least ``least``. A bool is none."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least {least}, an int")
    if number < least:
        raise ValueError(f"{name}={value}: expected at least {least}")
    return number


def check_impl(impl: str) -> None:
    """ValueError unless ``impl`` is one of IMPLS, before any op is asked for it."""
    from .dispatch import IMPLS

    if impl not in IMPLS:
        raise ValueError(f"impl={impl!r}: {expected(impl, IMPLS)}")


def expect_tensor(op: str, name: str, value: Any) -> None:
    """TypeError unless ``value`` is a tensor. Calls that failed use it to say why."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{op}: {name} is a {type_name(value)}: expected a torch.Tensor; torch.as_tensor({name}) makes one"
        )


def type_name(value: Any) -> str:
    """The name of ``value``'s type, with its module where that is not Python's own."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
