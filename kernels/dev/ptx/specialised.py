"""Whether a launch's arguments have what its compiled code takes for granted.

Triton compiles a kernel for constants, for multiples of 16 and for 32-bit integers, and keeps it under a key of these.
A launch that finds another's code computes with the wrong numbers, or reads at odd addresses, and says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

_RANGES = {f"{sign}{bits}": bits for sign in "iu" for bits in (8, 16, 32, 64)}
_Path = tuple[int, ...]


def problems(kinds: Iterable[Any], values: Iterable[Any], constants: Mapping[Any, Any], attrs: Any) -> list[str]:
    """What is wrong with the ``values``, one line each; their ``kinds``, the ``constants`` and the ``attrs`` are those
    of Triton's ASTSource.
    """
    constants = {tuple(path): value for path, value in constants.items()}
    attrs = {tuple(path): value for path, value in (attrs or {}).items()}
    found = []
    for path, kind, value in leaves(kinds, values):
        wrong = ""
        if kind == "constexpr":
            constant = constants.get(path)
            wrong = "" if _equal(constant, value) else f"{value!r}, compiled for {constant!r}"
        elif isinstance(value, int | torch.Tensor):
            wrong = _number(kind, value, attrs.get(path, ()))
        if wrong:
            found.append(f"specialisation: argument {'.'.join(map(str, path))} ({kind}) is {wrong}")
    return found


def leaves(kinds: Iterable[Any], values: Iterable[Any], path: _Path = ()) -> Iterator[tuple[_Path, str, Any]]:
    """Each argument, and each item of a tuple of arguments, with where it stands and its type."""
    for n, (kind, value) in enumerate(zip(kinds, values, strict=True)):
        if isinstance(kind, tuple):
            yield from leaves(kind, value, (*path, n))
        else:
            yield (*path, n), kind, value


def _number(kind: str, value: Any, attributes: Iterable[Any]) -> str:
    number = value.data_ptr() if isinstance(value, torch.Tensor) else int(value)
    what = f"{number:#x}" if isinstance(value, torch.Tensor) else str(number)
    for name, amount in attributes:
        if name == "tt.divisibility" and number % amount:
            return f"{what}, compiled for multiples of {amount}"
    if isinstance(value, torch.Tensor) and number % value.itemsize:
        return f"{what}, not aligned to the {value.itemsize} bytes of its elements"
    if kind in _RANGES and not isinstance(value, torch.Tensor):
        bits = _RANGES[kind]
        least = 0 if kind[0] == "u" else -(1 << bits - 1)
        return "" if least <= number < least + (1 << bits) else f"{what}, out of range"
    return ""


def _equal(constant: Any, value: Any) -> bool:
    if constant is value:
        return True
    try:
        return bool(constant == value) or (constant != constant and value != value)
    except (TypeError, ValueError):
        return False
