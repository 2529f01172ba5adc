"""Triton's interpreter without the work that comes to nothing, which is much of what interpreting takes.

What it computes, checks and refuses stays Triton's own. Triton 3.6 and 3.7

- look through all of ``triton.language`` for functions to replace, whenever a kernel calls a function, though they
  were replaced when that kernel was launched;
- compute every sum and product of integers in 64 bits too, to assert that it did not overflow, and then assert nothing
  unless the builder's options ask for ``debug``;
- make a table of all dtypes for each look-up of one.

Versions before, which replace functions for good, are left as they are.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def install() -> None:
    """In this process, once, if it has loaded the interpreter."""
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if hasattr(interpreter, "_LangPatchScope") and not hasattr(interpreter._patch_lang, "__wrapped__"):
        interpreter._patch_lang = _unless_patched(interpreter, interpreter._patch_lang)
        interpreter._get_np_dtype = _cached_by_name(interpreter._get_np_dtype)
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def _unless_patched(interpreter: Any, patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    language, core = interpreter.tl, interpreter.tl.core

    @functools.cache
    def modules(fn: Any) -> list[ModuleType]:
        """Of the language, those that ``fn`` sees, whose functions are replaced for it."""
        return [each for each in fn.__globals__.values() if inspect.ismodule(each) and each in (language, core)]

    @functools.wraps(patch_lang)
    def patch(fn: Any) -> Any:
        seen = modules(fn)
        if seen and not any(core.is_builtin(module.load) for module in seen):
            return interpreter._LangPatchScope()  # there is nothing to restore
        return patch_lang(fn)

    return patch


def _cached_by_name(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """By the name, which tells types apart: those of blocks and pointers have no hash."""
    known: dict[str, Any] = {}

    @functools.wraps(np_dtype)
    def look_up(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = np_dtype(dtype)
        return known[dtype.name]

    return look_up
