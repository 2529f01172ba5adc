"""Whether the installed Triton orders cp.async before asynchronous products that read what it copied.

cp.async writes shared memory through the generic proxy; wgmma and tcgen05.mma read it through the async proxy. The PTX
ISA ("Proxies") asks for fence.proxy.async between the wait for the copy and the product, else the product may read what
stood there before. Triton 3.6 leaves the fence out in loops (triton-lang/triton#9610). Tiles of fewer than 64 rows,
and blocks of fewer than four warps, multiply by mma.sync, which reads through the generic proxy; and what TMA copies is
in the async proxy already.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator

from . import tuning
from .chips import multiplies_asynchronously

_FIRST_WITH_FENCES = (3, 7)

_assumed: bool | None = None  # inside assumed()


def asynchronous(arch: str, rows: int, num_warps: int) -> bool:
    """Whether a block of so many warps multiplies a tile of so many rows asynchronously, unless in IEEE fp32."""
    return multiplies_asynchronously(arch) and rows >= 64 and num_warps % 4 == 0


def unfenced(ptx: str) -> int:
    """How many asynchronous products of a kernel follow a wait for cp.async with no fence for their proxy between."""
    bare, waited = 0, False
    for line in ptx.splitlines():
        if "cp.async.wait_group" in line or "cp.async.wait_all" in line:
            waited = True
        elif "fence.proxy.async" in line:
            waited = False
        elif waited and ("wgmma.mma_async" in line or "tcgen05.mma" in line):
            bare += 1
    return bare


def fenced(arch: str) -> bool:
    """Whether asynchronous products on ``arch`` may read what cp.async copied; True where it has no such products.

    Looks at what the compiler makes of a small product, once a process; Triton keeps what it compiled. Where that shows
    nothing, or a process interprets its kernels and so cannot compile, the compiler's version decides.
    """
    if _assumed is not None:
        return _assumed or not multiplies_asynchronously(arch)
    return not multiplies_asynchronously(arch) or _compiles_with_fences(arch)


@functools.cache
def _compiles_with_fences(arch: str) -> bool:
    from . import dispatch

    version = dispatch.triton_version()
    if version is None:
        return True
    ptx = "" if dispatch.interpreting() else _probed(arch)
    copies, product = "cp.async.wait_group" in ptx, re.search(r"wgmma\.mma_async|tcgen05\.mma", ptx)
    if copies and product:
        return unfenced(ptx) == 0
    return tuple(map(int, re.findall(r"\d+", version)[:2])) >= _FIRST_WITH_FENCES


def _probed(arch: str) -> str:
    """The PTX of the probe, or nothing where it is not to be had: what fails here fails again at a kernel, and says so
    there.
    """
    try:
        from . import fences_triton

        return fences_triton.compile_probe(arch)
    except Exception:
        return ""


def refusal(what: str) -> str:
    """What to say of a tile that needs the fences where they are missing."""
    from . import dispatch

    return (
        f"{what} would be multiplied asynchronously, and Triton {dispatch.triton_version()} puts no fence between "
        "cp.async and such products, which may then read stale operands (triton-lang/triton#9610): take tiles of 32 "
        "rows, blocks of two warps, or Triton 3.7 or later"
    )


@contextlib.contextmanager
def assumed(value: bool) -> Iterator[None]:
    """Within the block :func:`fenced` says ``value`` of chips with such products: for builds of another Triton."""
    global _assumed
    outer, _assumed = _assumed, value
    _forget()
    try:
        yield
    finally:
        _assumed = outer
        _forget()


def _forget() -> None:
    for clear in tuning.also_forget:
        clear()
