"""A seal on what a warmed-up server must not do any more: compile a kernel, or take memory that stays.

Inside :func:`sealed`, code that is about to calls :func:`refuse`, which raises and says what it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

_depth = 0


class SealBroken(RuntimeError):
    """Something was compiled or allocated that the warm-up had not seen."""


def active() -> bool:
    """Whether something is sealed."""
    return _depth > 0


def refuse(what: str) -> None:
    """Raise SealBroken inside :func:`sealed`: ``what`` names the op and its shapes."""
    if _depth:
        raise SealBroken(f"{what}, after the seal: warm up with such a step first, or serve without the seal")


@contextlib.contextmanager
def sealed() -> Iterator[None]:
    """Within the block, in all threads, Triton compiles nothing, and :func:`refuse` raises."""
    global _depth
    with _no_compilation():
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1


@contextlib.contextmanager
def _no_compilation() -> Iterator[None]:
    try:
        from triton import knobs
    except ImportError:
        yield
        return
    before: Any = knobs.runtime.jit_cache_hook

    def hook(*args: Any, **told: Any) -> Any:
        refuse(f"Triton would compile {told.get('repr') or told.get('key')}")
        return None if before is None else before(*args, **told)

    knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before
