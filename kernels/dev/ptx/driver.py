"""Triton's driver over the emulator: what the package launches on CPU tensors runs here, as on a GPU of ``arch``.

Triton's binder, its loader and its C launcher do what they do for a GPU, over the stub of CUDA's driver; compilation
ends with PTX, which stands for the machine code. Which memory a kernel may touch is known from the launch's tensors.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ...runtime.chips import described
from .. import stub_cuda
from ..registry import TARGETS
from .launch import Result, execute
from .memory import Allocation
from .parse import parse
from .program import Program
from .settings import VARIATIONS, Settings
from .specialised import leaves, problems

# NVIDIA's targets: name -> compute capability, 90 for 9.0.
ARCHS = {name: int(number) for name, (backend, number, _) in TARGETS.items() if backend == "cuda"}

log: list[Result] = []  # of every launch since the last ``log.clear()``
settings = Settings()  # of the launches to come
mutate: Callable[[str], str] = lambda text: text  # PTX before it is run: for seeded faults

_programs: dict[str, Program] = {}
_older: list[Any] = []  # tensors that were there when the driver was installed
_memory: list[Allocation] = []  # of the launch under way
_problems: list[str] = []  # of its arguments
_errors: list[BaseException] = []  # of the launch under way: an exception cannot pass through C
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_LEAST_ADDRESS = 1 << 32  # larger numbers in an int64 tensor are taken for addresses


class _Config(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint)]


@ctypes.CFUNCTYPE(None, ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
def _emulate(config: Any, image: Any, arguments: Any) -> None:
    """What the stub calls for a launch."""
    try:
        program = _program(ctypes.string_at(image).decode())
        given = [ctypes.string_at(arguments[i], each.size) for i, each in enumerate(program.kernel.params)]
        grid, block = tuple(config.contents.grid), tuple(config.contents.block)
        if block != (program.kernel.threads, 1, 1):
            raise RuntimeError(
                f"{program.kernel.name}: blocks of {block} threads, compiled for {program.kernel.threads}"
            )
        parameters = [int.from_bytes(each, "little") for each in given]
        memory, of_arguments = list(_memory), list(_problems)  # another thread's launch may begin before this one ends
        result = execute(program, grid, parameters, memory, config.contents.shared, settings)
        result.reports += [f"{problem}: {program.kernel.name}" for problem in of_arguments]
        log.append(result)
    except BaseException as error:
        _errors.append(error)


def install(arch: str, slots: int = 3) -> None:
    """Run this process's launches on CPU tensors here, as on ``arch`` with ``slots`` multiprocessors.

    Before anything has been launched, and for the life of the process. Raises RuntimeError without a C compiler,
    ValueError for an ``arch`` that is not in ARCHS.
    """
    if arch not in ARCHS:
        raise ValueError(f"arch={arch!r}: PTX is emulated for {', '.join(ARCHS)}")
    _older[:] = _living()
    gc.freeze()  # what the imports have made is not looked through for tensors at each launch
    capability = ARCHS[arch]
    folder = tempfile.mkdtemp(prefix="shardfuse-stub-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    library = stub_cuda.build(Path(folder))
    stub = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    ctypes.c_int.in_dll(stub, "stub_capacity").value = described(arch).shared_per_block
    ctypes.c_void_p.in_dll(stub, "stub_emulate").value = ctypes.cast(_emulate, ctypes.c_void_p).value

    import triton.backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver

    from ...runtime import device, dispatch, fences

    class Backend(CUDABackend):
        def hash(self) -> str:
            """Of Triton's cache: what is kept there is no machine code."""
            return f"emulated-{self.target.arch}"

        def make_cubin(self, src: str, metadata: Any, opt: Any, capability: int) -> bytes:
            return src.encode() + b"\0"

    class Driver(nvidia.CudaDriver):
        def __init__(self) -> None:
            self.utils, self.launcher_cls = nvidia.CudaUtils(), _launcher(nvidia.CudaLauncher)
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device: 0

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            return divmod(capability, 10)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_benchmarker(self) -> Any:
            return _instructions

    known = triton.backends.backends
    known["nvidia"] = type(known["nvidia"])(Backend, known["nvidia"].driver)
    driver.set_active(Driver())
    device.architecture = lambda device: arch
    device.program_slots = lambda device: slots  # type: ignore[assignment]
    fences.fenced(arch)  # is remembered, and asks the compiler as on a GPU as long as nothing is interpreted
    dispatch._INTERPRETING = True  # CPU tensors reach the kernels


def _instructions(call: Callable[[], Any], *, quantiles: Any = None, **ignored: Any) -> Any:
    """What ``triton.autotune`` compares in place of milliseconds: the instructions of one call."""
    before = len(log)
    call()
    count = float(sum(result.executed for result in log[before:]))
    return [count for _ in quantiles] if quantiles else count


def differences(run: Callable[[], Mapping[str, torch.Tensor]]) -> list[str]:
    """Run under the settings, and under each of VARIATIONS too: which of its results then have other bits.

    ``log`` has the reports of all runs.
    """
    global settings
    usual, found = settings, []
    first = {name: _bits(each) for name, each in run().items()}
    try:
        for name, fields in VARIATIONS.items():
            settings = dataclasses.replace(usual, **fields)
            found += [f"{key}: other bits with {name}" for key, each in run().items() if _bits(each) != first[key]]
    finally:
        settings = usual
    return found


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _launcher(base: Any) -> Any:
    """Triton's launcher, which notes what memory a launch may touch."""
    import triton
    from triton.runtime import _allocation

    class Launcher(base):
        def __init__(self, src: Any, metadata: Any) -> None:
            super().__init__(src, metadata)
            self.kinds = list(src.signature.values())
            self.constants, self.attrs = src.constants, src.attrs

        def __call__(self, *arguments: Any) -> None:
            # Grid, stream, function and metadata; then the kernel's arguments.
            given = _plain(arguments[len(arguments) - len(self.kinds) :])
            _errors.clear()
            _memory[:] = _allocations(list(paired(self.kinds, given)))
            _problems[:] = problems(self.kinds, given, self.constants, self.attrs)
            before = _allocation._allocator.get()
            triton.set_allocator(_recorded(before))
            try:
                super().__call__(*arguments)
            finally:
                triton.set_allocator(before)
            if _errors:
                raise _errors.pop()

    return Launcher


def _program(text: str) -> Program:
    text = mutate(text)
    if text not in _programs:
        _programs[text] = Program(parse(text))
    return _programs[text]


def paired(kinds: Iterable[Any], values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """The kernel's parameters: each argument with its type, without those that are compiled in."""
    return ((kind, value) for _, kind, value in leaves(kinds, values) if kind != "constexpr")


def _plain(value: Any) -> Any:
    """An argument with the tensors that triton.reinterpret wraps; a tuple of arguments with theirs."""
    from triton.runtime.jit import TensorWrapper

    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.base if isinstance(value, TensorWrapper) else value


def _allocations(arguments: list[tuple[str, Any]]) -> list[Allocation]:
    """From the first to the last element of each tensor; with a table of addresses, all storages of the process.

    Of a TensorDescriptor it is the tensor that it describes.
    """
    tensors = [(kind, _plain(value.base) if kind.startswith("tensordesc") else value) for kind, value in arguments]
    found = [
        Allocation(*_extent(value), f"argument {number} {tuple(value.shape)}", _origin(value), value.itemsize)
        for number, (kind, value) in enumerate(tensors)
        if kind.startswith(("*", "tensordesc")) and value is not None
    ]
    if any(_is_table(value) for _, value in arguments):
        whole = _storages()
        ends = [(each.address, each.address + each.size) for each in whole]
        apart = [
            each for each in found if not any(a <= each.address and each.address + each.size <= b for a, b in ends)
        ]
        return whole + apart
    return found


def _is_table(value: Any) -> bool:
    """Whether a kernel may reach other tensors through this one."""
    wide = isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.uint64) and value.numel()
    return bool(wide and value.view(torch.int64).abs().max() >= _LEAST_ADDRESS)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), (last + 1) * tensor.itemsize if tensor.numel() else 0


def _origin(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storages() -> list[Allocation]:
    found = {}
    for each in _older + _living():
        if each.device.type == "cpu" and each.layout is torch.strided:
            storage = each.untyped_storage()
            if storage.nbytes():
                name = f"a tensor {tuple(each.shape)}"
                at = storage.data_ptr()
                found[at] = Allocation(at, storage.nbytes(), name, at, each.itemsize)
    return list(found.values())


def _living() -> list[Any]:
    """The tensors that the collector knows of: instances refer to their class."""
    return [each for each in gc.get_referrers(*_TENSORS) if type(each) in _TENSORS]


def _recorded(allocate: Any) -> Any:
    """The same allocator of scratch memory; what it returns belongs to the launch.

    The host's memory is not as aligned as a GPU's: memory of the driver's own then stands for it, with the same bytes.
    """

    def scratch(size: int, align: int, stream: Any) -> Any:
        room = allocate(size, align, stream)
        if room.data_ptr() % align:
            own = torch.empty(size + align, dtype=torch.uint8)
            own = own[-own.data_ptr() % align :][:size]
            ctypes.memmove(own.data_ptr(), room.data_ptr(), size)
            room = own
        _memory.append(Allocation(room.data_ptr(), size, "scratch"))
        return room

    return scratch
