"""A compiled kernel, launched by Triton's C function with arguments that are ready.

``kernel[grid](...)`` passes four of Triton's Python functions, which ask each time for the device, the stream, hooks,
and scratch memory, and takes longer than the driver does. What is launched again and again may know these: one C
function is left, of a signature for each version of Triton (:data:`PACKED`). Under another version, on an AMD GPU,
and while a profiler's hooks are set, Triton's own functions launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import dispatch

Run = Callable[[tuple[Any, ...]], None]  # takes all of a kernel's arguments
Grid = tuple[int, int, int]


def bind(kernel: Any, grid: Grid, index: int) -> Run:
    """What launches ``kernel``, a ``CompiledKernel`` that has been launched on the device of this ``index``.

    On the current stream, at each launch. The arguments are those of the kernel in its order, constants as well.
    """
    packed, launcher = PACKED.get(version()), getattr(kernel, "run", None)
    own = _own(kernel, grid, index)
    if packed is None or not _known(launcher) or not all(hasattr(hook, "calls") for hook in _hooks()[1:]):
        return own
    return _bound(kernel, launcher, grid, index, own, packed)


def version() -> str:
    """The installed Triton's, without the patch: "3.7"."""
    return ".".join((dispatch.triton_version() or "").split(".")[:2])


def said() -> str:
    """Who launches kernels here, for people."""
    if torch.version.hip is not None:
        return "Triton's Python: on AMD GPUs"
    if version() in PACKED:
        return "Triton's C function"
    return f"Triton's Python: the C function is known of Triton {', '.join(PACKED)}"


def _known(launcher: Any) -> bool:
    """Whether this is Triton's launcher for NVIDIA, asked for nothing beside the launch."""
    from triton.backends.nvidia.driver import CudaLauncher

    return (
        type(launcher) is CudaLauncher
        and not launcher.profile_scratch_size
        and not getattr(launcher, "gsan_enabled", False)
    )


def scratch(size: int, alignment: int = 0, stream: int | None = None) -> torch.Tensor:
    """Where the tensor maps live that a kernel makes. From torch's allocator, so that CUDA graphs capture it."""
    return torch.empty(size, dtype=torch.int8, device="cuda" if _CUDA else "cpu")


_CUDA = torch.cuda.is_available()


# Without a look whether CUDA is initialised: there is a tensor on it.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def _own(kernel: Any, grid: Grid, index: int) -> Run:
    """By Triton's own functions."""
    import triton

    run, makes_maps = kernel[grid], getattr(getattr(kernel, "metadata", None), "global_scratch_size", 0) > 0

    def own(args: tuple[Any, ...]) -> None:
        if makes_maps:  # a context variable: autograd's threads do not inherit it
            triton.set_allocator(scratch)
        if index < 0 or index == _current_device():
            run(*args)
        else:
            with torch.cuda.device(index):
                run(*args)

    return own


def _bound(kernel: Any, launcher: Any, grid: Grid, index: int, own: Run, packed: bool) -> Run:
    """By the C function; by ``own`` where hooks are set, or another device is the current one."""
    from triton.runtime import driver

    (x, y, z), launch, stream = grid, launcher.launch, driver.active.get_current_stream
    function, metadata = kernel.function, kernel.packed_metadata
    cooperative, pdl = launcher.launch_cooperative_grid, launcher.launch_pdl
    annotations, signature = (launcher.arg_annotations, launcher.kernel_signature) if packed else (None, None)
    size = launcher.global_scratch_size * launcher.num_ctas * x * y * z
    hooks, enter, leave = _hooks()

    def run(args: tuple[Any, ...]) -> None:
        if enter.calls or leave.calls or hooks.launch_enter_hook is not enter or hooks.launch_exit_hook is not leave:
            return own(args)
        if index >= 0 and index != _current_device():
            return own(args)
        memory = scratch(size) if size else None
        # Metadata of the launch and the two hooks are None, and so is the memory of a profiler.
        if packed:
            launch(
                x, y, z, stream(index), function, cooperative, pdl, metadata, None, None, None, memory, None,
                annotations, signature, args,
            )  # fmt: skip
        else:
            launch(
                x, y, z, stream(index), function, cooperative, pdl, memory, None, metadata, None, None, None, *args
            )  # fmt: skip

    return run


# Versions of Triton whose C function is known: whether it is one for all kernels, which gets their arguments as one
# tuple, or one for each signature, which gets them one by one.
PACKED = {"3.6": False, "3.7": True, "3.8": True, "3.9": True}


def _hooks() -> tuple[Any, Any, Any]:
    """Where Triton keeps the hooks of launches, and the two chains of them that are there now."""
    from triton import knobs

    return knobs.runtime, knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
