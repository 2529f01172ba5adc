"""Calls of an op like one before: one lookup leads from the operands to the launch.

What a call does follows from its options, from the kinds of its operands (shape, strides, dtype, device, alignment) and
from a few settings of the process. The first call of a kind is checked and settles all of it. Its op keeps what it
found in a :class:`Calls`, as long as the process runs.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch

from . import device, dispatch, library, tuning

Launch = TypeVar("Launch")
Operands = tuple["torch.Tensor | None", ...]


_MOST = 4096  # kinds of calls of an op, as many as plans are kept


class Calls(dict[Any, Launch], Generic[Launch]):
    """What launches the calls of an op, by :func:`key_of`; forgotten with the tables that they were settled by."""

    def __init__(self) -> None:
        super().__init__()
        tuning.also_forget.append(self.clear)

    def __setitem__(self, key: Any, launch: Launch) -> None:
        if len(self) >= _MOST:
            self.clear()
        super().__setitem__(key, launch)


def key_of(impl: str, operands: Operands, options: Any) -> Any:
    """What a call is looked up by; None where it has to be looked at anew: where something watches or changes what
    runs, and of operands that are not simply what lies in their memory.

    The first operand is never None. ``options`` are all that decides beside operands and ``impl``.
    """
    if not library.quiet():
        return None
    kinds: list[Any] = []
    try:
        for tensor in operands:
            if tensor is None:
                kinds.append(None)
            elif type(tensor) not in _PLAIN or tensor.is_neg():
                return None
            else:
                kinds.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15 == 0))
    except RuntimeError:  # a wrapper that a transform of torch.func left behind has no memory
        return None
    tf32 = kinds[0][2] is torch.float32 and device.allow_tf32()  # what `settings` has, without a call
    surrounds = tf32, dispatch._row_invariant, device.setting()
    return dispatch._AUTO if impl == "auto" else impl, options, surrounds, *kinds


def settings(dtype: torch.dtype) -> Any:
    """The settings of the process that decide on launches of operands of ``dtype``; backward asks for its own."""
    return dtype is torch.float32 and device.allow_tf32(), dispatch._row_invariant, device.setting()


_PLAIN = library.PLAIN


def dense(dy: torch.Tensor) -> torch.Tensor:
    """A gradient, copied where it is one number expanded, as a sum leaves it."""
    return dy if dy.stride(-1) else dy.contiguous()


def rows_lie(x: torch.Tensor) -> bool:
    """Whether x [..., D] has elements, and they lie as those of rows [T, D] with a contiguous last dimension."""
    if x.dim() < 2 or not x.numel() or x.is_meta:
        return False
    return x.stride(-1) == 1 and (x.dim() == 2 or x.is_contiguous())
