"""A CPU stands in for a GPU: ops on CPU tensors launch their kernels for it, which are compiled and do not run.

A launch goes through Triton's own binder, which decides what a kernel is specialised for, and from there into Triton's
cache on disk: what a program compiles in a process that called :func:`install` is what it would compile on the GPU.
Results are whatever the memory holds.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..runtime import device, dispatch, fences
from ..runtime.chips import CHIPS
from . import carried, registry

TARGET = "sm_90"  # what a GPU run is for

counts: Counter[str] = Counter()  # of kernels: "compiled", "found" in the cache, "left" to another process; "bytes"


class _Driver:
    """What Triton's JIT asks of a driver before it launches."""

    def __init__(self, target: Any) -> None:
        self.get_current_target = lambda: target
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device=None: 0


class _Nothing:
    """Takes the place of a compiled kernel."""

    function = packed_metadata = None

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def launch_metadata(self, *args: Any) -> None:
        return None

    def run(self, *args: Any) -> None:
        return None


class Claimed(Exception):
    """Another process is compiling the kernel."""


def install(arch: str, on_error: Callable[[str, Exception], None], *, compiling: bool = True) -> None:
    """Have this process's CPU tensors stand for tensors on ``arch`` from now on; there is no way back.

    Processes that share a cache compile each kernel once: one that another has begun is left to it. ``on_error`` is
    told what did not compile. Without ``compiling`` launches end in Triton's binder.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    target = GPUTarget(*registry.TARGETS[arch])
    fences.fenced(arch)  # compiled now, and not left to another process

    def compile_here(
        self: Any, key: Any, signature: Any, index: int, constants: Any, options: Any, attrs: Any, *rest: Any
    ) -> _Nothing:
        kernels = self.device_caches[index][0]
        if key not in kernels:
            kernels[key] = _Nothing()
            if not compiling:
                return kernels[key]
            try:
                source = ASTSource(self, signature, constants, attrs)
                binary = triton.compile(source, target=target, options=options.__dict__).asm["cubin"]
                counts["bytes"] += len(binary)
            except Claimed:
                counts["left"] += 1
            except Exception as error:
                on_error(self.__name__, error)
        return kernels[key]

    if compiling:
        _share_the_cache()
    driver.set_active(_Driver(target))
    JITFunction._do_compile = compile_here
    device.architecture = lambda device: arch
    device.program_slots = functools.cache(lambda on: device.capped(CHIPS[arch].sms))
    dispatch._why_not_triton = lambda device: None
    dispatch._decided.clear()


def _share_the_cache() -> None:
    """Compile in this process only what no other has begun in the same cache, count it, and note each entry's key."""
    from triton import knobs
    from triton.compiler import compiler
    from triton.runtime import cache

    plain = cache.get_cache_key

    def claiming(*args: Any, **kwargs: Any) -> str:
        key: str = plain(*args, **kwargs)
        entry = Path(knobs.cache.dir) / carried.entry_name(key)
        try:
            entry.mkdir(parents=True)
        except FileExistsError:
            if not carried.complete(entry):
                raise Claimed from None
        else:
            (entry / carried.KEY_FILE).write_text(key.removeprefix(cache.triton_key()))
        return key

    def count(*, cache_hit: bool, **what: Any) -> None:
        counts["found" if cache_hit else "compiled"] += 1

    compiler.get_cache_key = claiming
    knobs.compilation.listener = count
