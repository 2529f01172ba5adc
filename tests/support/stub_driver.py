"""Launch the ops' kernels through Triton's own binder, driver and launcher, over a CUDA driver that runs nothing.

    python stub_driver.py FOLDER [--few] [--fault NAME] [--compiled] [--time SECONDS]

FOLDER holds ``libcuda.so.1``, built of stub_cuda.c. The kernels are not compiled; the launcher is, and it packs every
launch's arguments, on CPU tensors, as it would for a GPU. What arrives in the driver is compared, argument by argument,
with what the caller passed, under the types of the signature that the kernel was specialised for. The launches of
``device.Prepared``, which bypass the binder, also go through it, and both must reach the same kernel with the same
arguments; a matrix product's must be those of its tensors.

The launches are those of the ops' test cases, forward and backward: drawn twice, at odd addresses, in exchanges with
other numbers. ``--few`` runs one case of each op, for a Triton that compiles a launcher for every signature.
``--fault`` seeds a fault in what ``device.Prepared`` remembers, or leaves something out of what the plan of a matrix
product is looked up by. It also counts the calls that our Python makes in one call of an op or layer that was called
before, and in a step of an engine.

``--compiled`` launches the builds for sm_90 instead, each op's first as Triton compiles it or finds it in its cache,
and compares the key of each in the cache with the one that compiling ahead of time gives it.

``--time`` measures the host time of fused modules' calls (fused_calls.py) instead, beside the stock modules'.

It prints JSON. It is a separate program because the tests' process interprets its kernels.
"""

from __future__ import annotations

import argparse
import builtins
import ctypes
import gc
import itertools
import json
import os
import struct
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--few", action="store_true")
parser.add_argument("--fault", choices=["aligned", "number", "shape", "strides", "dtype"])
parser.add_argument("--compiled", action="store_true")
parser.add_argument("--time", type=float, metavar="SECONDS", help="for each call")
options = parser.parse_args()
os.environ["TRITON_LIBCUDA_PATH"] = str(options.folder)
stub = ctypes.CDLL(str(options.folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402 - Triton's driver finds the library that is loaded first
import triton  # noqa: E402
from triton import knobs  # noqa: E402
from triton._C.libtriton import get_cache_invalidating_env_vars  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.compiler.compiler import ASTSource, CompiledKernel, make_backend  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.cache import get_cache_key  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from shardfuse import ParallelMLP  # noqa: E402
from shardfuse.kernels.dev import registry  # noqa: E402
from shardfuse.kernels.dev.cases import all_reduce_norm as reduce_cases  # noqa: E402
from shardfuse.kernels.dev.cases import comm as comm_cases  # noqa: E402
from shardfuse.kernels.dev.ptx.driver import paired  # noqa: E402
from shardfuse.kernels.linear import launch as linear_launch  # noqa: E402
from shardfuse.kernels.linear import linear_act, schemas  # noqa: E402
from shardfuse.kernels.linear.plan import Operand  # noqa: E402
from shardfuse.kernels.norm import launch as norm_launch  # noqa: E402
from shardfuse.kernels.norm import rms_norm  # noqa: E402
from shardfuse.kernels.runtime import device, dispatch, fences, signals, tuning  # noqa: E402
from shardfuse.kernels.runtime.dtypes import NAMES  # noqa: E402
from shardfuse.layers.fuse import fuse  # noqa: E402

sys.path.append(str(Path(__file__).parent))
from engine_steps import steps  # noqa: E402
from fused_calls import calls as fused_calls  # noqa: E402

launches = ctypes.c_int.in_dll(stub, "stub_launches")
expected = ctypes.c_int.in_dll(stub, "stub_expected")
arrived = (ctypes.c_uint64 * 256).in_dll(stub, "stub_arguments")
grid_arrived = (ctypes.c_uint * 3).in_dll(stub, "stub_grid")
threads_arrived = ctypes.c_uint.in_dll(stub, "stub_threads")

INTEGERS = {"i1": "b", "i8": "b", "u8": "B", "u1": "B", "i16": "h", "i32": "i", "u32": "I", "i64": "q", "u64": "Q"}
TRITON_NAMES = {
    **NAMES,
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
FLOATS = {"fp32": "f", "f32": "f", "fp64": "d"}

counts: Counter[str] = Counter()
faults: list[str] = []
now = ""


class Driver(nvidia.CudaDriver):  # type: ignore[misc]
    """Triton's, without torch's CUDA."""

    def __init__(self) -> None:
        self.utils = nvidia.CudaUtils()
        self.launcher_cls = nvidia.CudaLauncher
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return (9, 0)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Kernel:
    """What Triton would have compiled, with its launcher and without machine code."""

    __getitem__ = CompiledKernel.__getitem__
    function = 3
    last: tuple[Any, ...] = ()
    made: ClassVar[list[Kernel]] = []

    def __init__(self, fn: Any, signature: dict[str, Any], constants: dict[Any, Any], warps: int) -> None:
        self.src = types.SimpleNamespace(fn=fn, signature=signature, constants=constants)
        names = ("num_warps", "num_ctas", "shared", "global_scratch_size", "global_scratch_align")
        values = dict(zip(names, (warps, 1, 1024, 0, 128)))
        values |= {"profile_scratch_size": 0, "profile_scratch_align": 1, "cluster_dims": (1, 1, 1)}
        values |= {"launch_cooperative_grid": False, "launch_pdl": False, "tensordesc_meta": None}
        self.metadata = types.SimpleNamespace(**values)
        self.packed_metadata = (warps, 1, 1024)
        self.run: Any = nvidia.CudaLauncher(self.src, self.metadata)
        Kernel.made.append(self)
        if self.run is not None and options.time is None:
            self._launch, self.run.launch = self.run.launch, self._checked

    def _init_handles(self) -> None:
        pass

    def launch_metadata(self, *args: Any) -> None:
        return None

    def _checked(self, *given: Any) -> None:
        """In place of the launcher's C function, which both ways of launching end in."""
        x, y, z = given[:3]
        args = given[-1] if hasattr(self.run, "kernel_signature") else given[13:]
        Kernel.last = (self, (x, y, z), args)
        wanted = list(paired(self.src.signature.values(), args))
        expected.value = len(wanted)
        before = launches.value
        self._launch(*given)
        counts["launches"] += launches.value - before
        if launches.value == before:
            return  # an empty grid
        said = f"{now}: {self.src.fn.__name__}"
        if list(grid_arrived) != [x, y, z] or threads_arrived.value != 32 * self.metadata.num_warps:
            faults.append(f"{said}: grid {list(grid_arrived)} of {threads_arrived.value} threads for {[x, y, z]}")
        for i, (kind, value) in enumerate(wanted):
            counts["arguments"] += 1
            problem = differs(kind, value, int(arrived[i]))
            if problem:
                faults.append(f"{said}: argument {i}: {problem}")


def same(ours: Any, theirs: Any) -> bool:
    """Whether both are equal; tensors and kernels must be the same objects."""
    if isinstance(ours, tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return ours is theirs or (not isinstance(ours, torch.Tensor) and type(ours) is type(theirs) and ours == theirs)


def differs(kind: str, value: Any, bits: int) -> str:
    """What is wrong with the ``bits`` that arrived for ``value`` in a parameter of this ``kind``; "" if nothing is."""
    if kind.startswith("*"):
        address = 0 if value is None else value.data_ptr()
        if value is not None and kind[1:].removeprefix("k") != TRITON_NAMES[value.dtype]:
            return f"a tensor of {value.dtype} where the kernel takes {kind}"
        return "" if bits == address else f"address {bits:#x} for a tensor at {address:#x}"
    code = INTEGERS.get(kind) or FLOATS[kind]
    size = struct.calcsize(code)
    (found,) = struct.unpack(code, bits.to_bytes(8, "little")[:size])
    wanted = struct.unpack("f", struct.pack("f", value))[0] if code == "f" else value
    return "" if found == wanted or (found != found and wanted != wanted) else f"{kind} {found} for {value}"


def compile_nothing(
    self: Any, key: Any, signature: Any, index: int, constants: Any, given: Any, *others: Any
) -> Kernel:
    kernels = self.device_caches[index][0]
    if key not in kernels:
        counts["kernels"] += 1
        kernels[key] = Kernel(self, signature, constants, given.num_warps)
    return kernels[key]


def time_calls() -> dict[str, Any]:
    """(us, noise) of each side of each of ``fused_calls``, and of each of ``engine_steps``, interleaved."""
    from shardfuse.bench.harness.timing import compare

    torch.set_num_threads(1)
    dispatch._AUTO = "triton"
    found = {}
    bare = bare_launch()
    for name, ours, stock in fused_calls():
        for call in (ours, stock):
            for _ in range(5):
                call()
        gc.collect()
        gc.freeze()
        sides = compare([ours], [stock], torch.device("cpu"), seconds=options.time)
        sides += compare([bare], [bare], torch.device("cpu"), seconds=options.time / 4)[:1]
        found[name] = {side: (time.value, time.noise) for side, time in zip(("ours", "stock", "bare"), sides)}
    for name, step, layers in steps():
        for _ in range(20):
            step()
        gc.collect()
        gc.freeze()
        ours, once = compare([step], [bare], torch.device("cpu"), seconds=options.time)
        found[name] = {"ours": (ours.value / layers, ours.noise), "bare": (once.value, once.noise)}
    return found


def bare_launch() -> Callable[[], Any]:
    """Triton's C function, called as for RMSNorm's kernel with arguments that are ready: less no launch can take."""
    x, weight, given = torch.randn(1, 32), torch.randn(32), list[Any]()
    rms_norm(x, weight, impl="triton")
    kernel = next(kernel for kernel in Kernel.made if kernel.src.fn.__name__ == "_norm_fwd_kernel")
    launch, kernel.run.launch = kernel.run.launch, lambda *arguments: given.append(arguments)
    tuning.forget()
    norm_launch._forward.cache_clear()
    rms_norm(x, weight, impl="triton")  # through Triton's Python again
    kernel.run.launch = launch
    return lambda: launch(*given[0])


def through_both(self: Any, grid: tuple[int, int, int], tensors: tuple[Any, ...], *, on: torch.Tensor) -> None:
    """A launch of ``Prepared``, and the binder's own: both reach the same kernel with the same grid and arguments."""
    known = bool(self._runs)
    prepared(self, grid, tensors, on=on)
    ours = Kernel.last
    device.launch(self._fn, grid, dict(zip(self._names, tensors)) | self._rest, on=on, **self._launched)
    counts["past the binder" if known else "first"] += 1
    for what, mine, binders in zip(("kernel", "grid", "arguments"), ours, Kernel.last):
        if not same(mine, binders):
            faults.append(f"{now}: {self._fn.__name__}: another {what} than through the binder")
    for what in differing_from(self._fn.__name__, tensors, self._rest):
        faults.append(f"{now}: {self._fn.__name__}: {what} is {self._rest[what]}, another than its tensors'")


def differing_from(kernel: str, tensors: tuple[Any, ...], rest: dict[str, Any]) -> Iterator[str]:
    """The sizes and strides among a matrix product's arguments that are not those of its operands."""
    if kernel == "_act_grad_kernel":
        expected = {"T": tensors[0].shape[0], "F": tensors[0].shape[1], "dy_strides": tensors[0].stride()}
    elif kernel == "_gemm_kernel":
        a, b = tensors[:2]
        expected = {"T": a[0].shape[0], "Ns": tuple(each.shape[0 if rest["TRANS_B"] else 1] for each in b)}
        expected["Ms" if rest["TRANS_A"] else "Ks"] = tuple(each.shape[1] for each in a)
        for name, operands in (("a_strides", a), ("b_strides", b)):  # a single row may claim any pitch
            pairs = zip(operands, rest[name], strict=True)
            expected[name] = tuple((t.stride(0) if t.shape[0] > 1 else pitch, t.stride(1)) for t, (pitch, _) in pairs)
    else:
        expected = {}
    yield from (name for name, value in expected.items() if rest[name] != value)


def seed(fault: str | None) -> None:
    """Have what is remembered of a launch leave out a number, or something of its tensors."""
    launch, known = device.Prepared.launch, device.kinds_of

    def aligned(tensors: Any) -> Any:
        kinds = known(tensors)
        return None if kinds is None else tuple([None if kind is None else (kind[0], True) for kind in kinds])

    def first_number(self: Any, grid: Any, tensors: Any, *, on: torch.Tensor) -> None:
        if self._runs:
            number = next((i for i, value in enumerate(self._values) if type(value) is int and value > 16), None)
            self._values = tuple(value + 16 if i == number else value for i, value in enumerate(self._values))
        launch(self, grid, tensors, on=on)

    if fault == "aligned":
        for module in [module for module in sys.modules.values() if getattr(module, "kinds_of", None) is known]:
            module.kinds_of = aligned  # type: ignore[attr-defined]
    if fault == "number":
        device.Prepared.launch = first_number  # type: ignore[method-assign]
    elif fault is not None:
        for name in ("plan_launch", "plan_act_grad"):
            setattr(linear_launch, name, forgetful(getattr(linear_launch, name), Operand._fields.index(fault)))


def forgetful(find: Callable[..., Any], field: int) -> Callable[..., Any]:
    """``find``, which takes what it found for operands that differ in this ``field`` alone."""
    found: dict[Any, Any] = {}

    def rest_of(value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        if value and isinstance(value[0], torch.Size):
            return value[:field] + value[field + 1 :]
        return tuple(map(rest_of, value))

    def find_again(*call: Any) -> Any:
        key = rest_of(call)
        if key not in found:
            found[key] = find(*call)
        return found[key]

    return find_again


def calls_in(run: Callable[[], Any]) -> dict[str, int]:
    """How many calls our modules make while ``run`` runs, of whatever, and how many imports they ask for. What this
    program itself takes from ``kernels/dev`` does not count.
    """
    found: Counter[str] = Counter(calls=0, imports=0)
    import_module = builtins.__import__

    def ours(frame: Any) -> bool:
        name = "" if frame is None else frame.f_globals.get("__name__", "")
        return name.startswith("shardfuse.") and not name.startswith("shardfuse.kernels.dev.")

    def note(frame: Any, event: str, _: Any) -> None:
        found["calls"] += event in ("call", "c_call") and ours(frame.f_back if event == "call" else frame)

    def note_import(name: str, namespace: Any = None, *others: Any, **named: Any) -> Any:
        found["imports"] += (namespace or {}).get("__name__", "").startswith("shardfuse.")
        return import_module(name, namespace, *others, **named)

    for _ in range(3):
        run()
    builtins.__import__ = note_import
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        builtins.__import__ = import_module
    return found


READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy")


def captured(run: Callable[[], Any]) -> list[str]:
    """What a CUDA graph could not hold of ``run``: reads of values, and kernels that an earlier run did not load.

    The result begins with the number of launches.
    """
    for _ in range(3):
        run()
    found, loaded, launched = [], len(Kernel.made), counts["launches"]
    stock = {name: getattr(torch.Tensor, name) for name in READS}
    for name in READS:
        setattr(torch.Tensor, name, lambda *_, name=name: found.append(f"reads values by {name}") or stock[name](*_))
    try:
        run()
    finally:
        for name in READS:
            setattr(torch.Tensor, name, stock[name])
    found += [f"loads {kernel.src.fn.__name__}" for kernel in Kernel.made[loaded:]]
    return [f"launches {counts['launches'] - launched}", *found]


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose address is one element past a multiple of 16 bytes."""
    if tensor.dim() == 0 or not tensor.is_floating_point():
        return tensor
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return room[1:].view(tensor.shape).copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


epochs = itertools.cycle((1, 2, 16, -3, 2**31 - 1))  # a binder may specialise on 1 and multiples of 16


def other_exchanges(peers: list[torch.Tensor], *, epoch: int | None = 1, **more: Any) -> list[signals.Signals]:
    """``in_one_process`` for the next of ``epochs``. No kernel runs here, so nothing waits for flags."""
    return signals.in_one_process(peers, epoch=None if epoch is None else next(epochs), **more)


def key_of(source: ASTSource, given: dict[str, Any]) -> str:
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return str(get_cache_key(source, backend, backend.parse_options(given), get_cache_invalidating_env_vars()))


def small(value: Any) -> Any:
    """A tensor of few elements on the CPU for one on the meta device, aligned as that is."""
    if isinstance(value, tuple):
        return tuple(map(small, value))
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(32, dtype=torch.uint8).repeat(value.itemsize).view(value.dtype)[value.storage_offset() % 16 :]


def launch_builds() -> None:
    """Launch every build; the first of each op goes on to Triton's compiler, its cache and the stub."""
    keys: list[str] = []
    compile_it = JITFunction._do_compile

    def note(self: Any, key: Any, signature: Any, index: int, constants: Any, given: Any, attrs: Any, warm: Any) -> Any:
        keys.append(key_of(ASTSource(self, signature, constants, attrs), given.__dict__))
        if first:
            return compile_it(self, key, signature, index, constants, given, attrs, warm)
        kernel = Kernel(self, signature, constants, given.num_warps)
        kernel.run = lambda *args: None
        return kernel

    def count(*, cache_hit: bool, **what: Any) -> None:
        counts["found" if cache_hit else "compiled"] += 1

    JITFunction._do_compile = note
    nvidia.CudaLauncher, made = (lambda *args: None), nvidia.CudaLauncher
    fences.fenced("sm_90")  # what it compiles is no build
    knobs.compilation.listener = count
    # From the last to the first: what a kernel's key is must not depend on the kernels before it.
    for op, spec in reversed(registry.ops().items()):
        for number, build in enumerate(spec.builds("sm_90")):
            first = number == 0
            keys.clear()
            given = {"num_warps": build.num_warps, "num_stages": build.num_stages}
            args = {name: small(value) for name, value in build.args.items()}
            build.fn.device_caches.clear()
            device.launch(build.fn, (1, 1, 1), args, **given, on=torch.empty(0), config=None)
            source = ASTSource(build.fn, *build.specialise())
            counts["builds"] += 1
            if keys != [key_of(source, given)]:
                faults.append(f"{op} {build.config}: another key than ahead of time")
    nvidia.CudaLauncher = made


driver.set_active(Driver())
if options.compiled:
    launch_builds()
    print(json.dumps({"triton": triton.__version__, "counts": counts, "faults": faults, "ops": list(registry.ops())}))
    sys.exit()
comm_cases.in_one_process = reduce_cases.in_one_process = other_exchanges  # type: ignore[attr-defined]
JITFunction._do_compile = compile_nothing
device.architecture = lambda on: "sm_90"
device.program_slots = lambda on: 132
dispatch._INTERPRETING = True  # makes impl="triton" acceptable on CPU tensors
if options.time is not None:
    print(json.dumps({"triton": triton.__version__, "times": time_calls()}))
    sys.exit()
seed(options.fault)
prepared = device.Prepared.launch
device.Prepared.launch = through_both  # type: ignore[method-assign]

begun = time.monotonic()
for op, spec in registry.ops().items():
    cases = spec.tagged("test")
    for case in cases[:1] if options.few else cases:
        now = f"{op} {case.name}"
        for number in (1, 2):
            inputs = spec.make_inputs(case, torch.device("cpu"), number)
            names = [] if options.few else list(inputs)
            # All operands aligned, then each one alone at an odd address, then all of them.
            for odd in ([], *([name] for name in names), list(inputs)):
                moved = {
                    name: shifted(value) if name in odd and isinstance(value, torch.Tensor) else value
                    for name, value in inputs.items()
                }
                before = launches.value
                spec.run(moved, case, "triton")
                if launches.value == before and 0 not in (*case.sizes.values(), case.options.get("blocks")):
                    faults.append(f"{now}: nothing was launched")

# Not in those cases: gradient buffers at odd addresses, and operands that differ only in strides.
now = "main_grad"
x, dz, dw, db = torch.randn(32, 48), torch.randn(32, 64), torch.zeros(64, 48), torch.zeros(64)
for buffers in ((dw, db), (shifted(dw), db), (dw, shifted(db)), (dw, db), (dw.bfloat16(), db.bfloat16())):
    schemas.linear_wgrad_([dz], x, [buffers[0]], [buffers[1]])
now = "strides"
w = torch.randn(64, 48)
for rows in (x, torch.randn(48, 32).t(), torch.randn(32, 64)[:, :48], torch.randn(32, 49)[:, :48], torch.randn(32, 48)):
    linear_act(rows, w, impl="triton")
    linear_act(rows, torch.randn(48, 64).t(), impl="triton")
    linear_act(rows[:1], w, residual=dz[:1], impl="triton")
    schemas.act_grad(rows, x, "silu")
    schemas.act_grad(rows[:8], x[:8], "silu")

now = "a step of an engine"
dispatch._AUTO = "triton"
for _, step, _ in itertools.islice(steps(), 2):
    for _ in range(4):
        step()

device.Prepared.launch = prepared  # type: ignore[method-assign]
tuning.forget()
x, mlp = torch.randn(32, 48), ParallelMLP(48, 64, impl="triton")
leaf, weight, bias = (torch.randn(*sizes, requires_grad=True) for sizes in ((32, 48), (64, 48), (64,)))
ours: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear_act": lambda x: linear_act(x, weight, bias, activation="gelu_tanh", impl="triton"),
    "mlp": mlp,
}
stock = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.GELU(), torch.nn.Linear(64, 48))
ours |= {"fused norm": fuse(torch.nn.LayerNorm(48)), "fused mlp": fuse(stock)}
calls = {}
for name, call in ours.items():
    calls[name] = calls_in(torch.no_grad()(lambda call=call: call(x)))
    calls[f"{name}, forward"] = calls_in(lambda call=call: call(leaf))
    calls[f"{name}, forward + backward"] = calls_in(lambda call=call: call(leaf).sum().backward())
calls |= {name.partition(",")[0]: calls_in(step) for name, step, _ in itertools.islice(steps(), 2)}
said = {"triton": triton.__version__, "counts": counts, "faults": faults, "ops": list(registry.ops()), "calls": calls}
if options.few:
    said["captured"] = {name: captured(call) for name, call, _ in fused_calls()}
print(json.dumps(said | {"seconds": round(time.monotonic() - begun, 1)}))
