"""Triton's interpreter for the tests: products that do not depend on a BLAS, and less useless work.

**Products.** ``tl.dot`` is numpy's matmul, and so OpenBLAS's, which changes the order of summation with the number of
rows, and its kernels with the processor. Here a product is computed in fp64 and rounded once to the accumulator's type:
in fp64 the order of summation matters only 2^29 below the last place of fp32. A GPU's tile has that property by itself:
it sums its rows in one order, independent of the other rows. Such a product is more exact than a GPU's sum in fp32, so
every op also meets its budget once with the interpreter's own products (``fp32_products``).

**bf16.** The interpreter truncates fp32 where a GPU rounds it to the nearest bf16, which doubles the error. Here it
rounds.

**Speed.** Triton 3.6 and 3.7

- search all of ``triton.language`` for functions to replace whenever a kernel calls a function, although the kernel's
  launch already replaced them;
- compute every sum and product of integers in 64 bits too, to assert that it did not overflow, and then assert nothing
  unless the builder's options ask for ``debug``;
- build a table of all dtypes for each look-up of one.

Skipping this work changes no result, check or refusal. Earlier versions, which replace functions permanently, are left
unchanged.

**Versions.** Two interpreters cannot run the kernels (``dispatch.interpreter_breaks`` tells users): Triton 3.6's with
numpy 2.4, which does not convert an array of one element to an integer, and Triton 3.9's, which requires bool masks and
converts a scalar's condition to integers where it meets a block. Here both get the types that they need, so that all
versions are tested.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

refused: str | None = None  # why unchanged processes cannot interpret kernels


def install() -> None:
    """Change the interpreter of this process, once, if it interprets kernels."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    import triton.runtime.interpreter as interpreter  # type: ignore[import-untyped]

    builder = interpreter.InterpreterBuilder
    if hasattr(builder.create_dot, "__wrapped__"):
        return
    builder.create_dot = _rounded_once(interpreter, builder.create_dot)
    interpreter._convert_float = _to_nearest(interpreter._convert_float)
    interpreter._patch_lang_tensor = _index_of_one(interpreter._patch_lang_tensor)
    builder.create_splat = _conditions_stay_bool(builder.create_splat)
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _unless_patched(interpreter, interpreter._patch_lang)
        interpreter._get_np_dtype = _cached_by_name(interpreter._get_np_dtype)
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def allow() -> None:
    """Make shardfuse accept the changed interpreter where it would refuse the original."""
    from shardfuse.kernels.runtime import dispatch

    global refused
    refused = refused or dispatch.interpreter_breaks()
    if refused is not None:
        dispatch._INTERPRETER_BREAKS = None


@contextlib.contextmanager
def fp32_products() -> Iterator[None]:
    """Within the block ``tl.dot`` sums in fp32, as Triton's own interpreter and a GPU do."""
    import triton.runtime.interpreter as interpreter

    builder = interpreter.InterpreterBuilder
    rounded_once = builder.create_dot
    builder.create_dot = rounded_once.__wrapped__
    try:
        yield
    finally:
        builder.create_dot = rounded_once


def _rounded_once(interpreter: Any, create_dot: Callable[..., Any]) -> Callable[..., Any]:
    """``create_dot`` with a product in fp64; products of integers are exact already."""

    @functools.wraps(create_dot)
    def create(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype.kind != "f":
            return create_dot(self, a, b, d, *options)
        zeros = interpreter.TensorHandle(np.zeros(d.data.shape), interpreter.tl.float64)
        product = create_dot(self, a, b, zeros, *options).data
        return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    return create


def _index_of_one(patch: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(patch)
    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    return patched


def _conditions_stay_bool(create_splat: Callable[..., Any]) -> Callable[..., Any]:
    """``create_splat`` for a comparison: its data are bool, but its type is that of the operands."""

    @functools.wraps(create_splat)
    def splat(self: Any, block_type: Any, scalar: Any) -> Any:
        block = create_splat(self, block_type, scalar)
        if scalar.data.dtype == bool:
            block.data = block.data.astype(bool)
        return block

    return splat


def _to_nearest(convert: Callable[..., Any]) -> Callable[..., Any]:
    """``convert`` with fp32 -> bf16 to the nearest, ties to even, unless a kernel asks to round towards zero."""

    @functools.wraps(convert)
    def convert_float(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        kinds = (source.name, target.name)
        if kinds == ("bf16", "fp32"):
            return x.astype(np.uint32) << 16
        if kinds != ("fp32", "bf16") or "RTZ" in str(rounding):
            return convert(x, source, target, rounding)
        bits = np.ascontiguousarray(x).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)

    return convert_float


def _unless_patched(interpreter: Any, patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    language, core = interpreter.tl, interpreter.tl.core

    @functools.cache
    def modules(fn: Any) -> list[ModuleType]:
        """The language modules that ``fn`` sees, in which functions are replaced for it."""
        return [each for each in fn.__globals__.values() if inspect.ismodule(each) and each in (language, core)]

    @functools.wraps(patch_lang)
    def patch(fn: Any) -> Any:
        seen = modules(fn)
        if seen and not any(core.is_builtin(module.load) for module in seen):
            return interpreter._LangPatchScope()  # there is nothing to restore
        return patch_lang(fn)

    return patch


def _cached_by_name(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache by the name, which identifies the type: block and pointer types have no hash."""
    known: dict[str, Any] = {}

    @functools.wraps(np_dtype)
    def look_up(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = np_dtype(dtype)
        return known[dtype.name]

    return look_up
