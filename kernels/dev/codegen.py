"""Ahead-of-time compilation: what the compiler makes of every shipped configuration, on a machine without a GPU.

While writing a kernel, in a Python started without TRITON_INTERPRET:

    from shardfuse.kernels import codegen, registry
    for build in registry.op("linear_act").builds("sm_90"):
        report = codegen.compile_build(build)
        print(report, codegen.problems(report))

``compile_builds`` does the same for many at once, in fresh processes, one per core; it also works where this process
interprets its kernels (as tests do). ``shardfuse inspect`` prints the reports (``inspection.py``). Compiled kernels and
what was read off them are kept in Triton's own cache. ``python -m`` of this module is a worker process.

Beside what was compiled stands what ``cost.py`` predicts of it, for kernels that multiply matrices: one kernel serves
many shapes, and the prediction is for the first of them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json import dumps, loads
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..runtime import cost, dispatch, fences
from ..runtime.chips import CHIPS
from . import listings, machine_code, pipelines, registry, runs, workers
from .registry import Build

# The public row of a report, in this order: what names it, what was read off the machine code, what is predicted.
_NAMES = ("op", "config", "target")
_MEASURED = (
    *("registers", "spills", "shared_bytes", "instructions", "wgmma", "tma", "occupancy"),
    *("copies_pending", "wgmma_pending", "products_pending", "overwrites", "unfenced", "loops", "narrow"),
)
_PREDICTED = ("gemm", "flops", "bytes", "waves", "predicted_us", "peak_share", "bound")
FIELDS = (*_NAMES, *_MEASURED, "exempt", "unpipelined", *_PREDICTED)

NO_TRITON = "compiling kernels needs Triton, which is not installed here (pip install triton; Linux only)"


@dataclass(frozen=True)
class Report:
    """What became of one build. The numbers mean nothing where ``error`` is set."""

    op: str
    config: str
    target: str
    registers: int = 0  # per thread
    spills: int = 0  # instructions that load or store thread-local memory
    shared_bytes: int = 0  # per block
    instructions: int = 0  # of the whole kernel, in its machine code
    wgmma: bool = False  # Hopper's warp-group matrix instructions are used
    tma: bool = False  # the tensor memory accelerator loads tiles
    occupancy: float = 0.0  # resident warps as a share of what an SM can hold
    copies_pending: int | None = None  # as in machine_code.py
    wgmma_pending: int | None = None
    products_pending: int | None = None  # of wgmma or tcgen05 as Triton asks for them, as in pipelines.py
    overwrites: int = 0  # likewise
    unfenced: int = 0  # as in runtime/fences.py
    accesses: dict[str, int] = dataclasses.field(default_factory=dict)  # to device memory: "load 128" -> instructions
    loops: list[str] = dataclasses.field(default_factory=list)  # what each holds, as machine_code.described says it
    narrow: list[Any] = dataclasses.field(default_factory=list)  # accesses that could be wider: runs.Narrow
    exempt: str | None = None
    num_warps: int = 0
    blocks_per_sm: int = 0
    wants_wgmma: bool = False
    wants_tma: bool = False
    wants_copies: bool = False
    unpipelined: str | None = None
    error: str | None = None  # why it did not compile
    triton: str = ""  # the compiler's version
    # Of a matrix product, by the model of cost.py; None elsewhere.
    gemm: str | None = None  # layout and shape, "nt 8192x14336x4096"
    flops: int | None = None
    bytes: int | None = None  # to and from device memory
    waves: int | None = None
    predicted_us: float | None = None
    peak_share: float | None = None
    bound: str | None = None

    @property
    def serial(self) -> bool:
        """A loop waits for each of its asynchronous products. ptxas may wait where Triton does not, so that of wgmma
        the machine code counts; tcgen05 signals on barriers, of which Triton's IR alone tells.
        """
        asynchronous = self.wgmma or self.products_pending is not None
        return asynchronous and not (self.wgmma_pending if self.wgmma else self.products_pending)

    def row(self) -> dict[str, Any]:
        """The fields of FIELDS; the measured ones are None where the build did not compile."""
        row = {name: getattr(self, name) for name in FIELDS}
        if self.error is not None:
            row |= dict.fromkeys(_MEASURED)
        return row


def problems(report: Report) -> list[str]:
    """Everything that keeps this build from shipping, one line each; empty when all is well."""
    if report.error is not None:
        return [f"does not compile: {report.error}"]
    chip = CHIPS[report.target]
    found = []
    if report.spills:
        found.append(f"spills: {report.spills} instructions load or store thread-local memory")
    if report.shared_bytes > chip.shared_per_block:
        found.append(
            f"asks for {report.shared_bytes} bytes of shared memory; a block on {chip.name} has {chip.shared_per_block}"
        )
    elif report.blocks_per_sm == 0:
        found.append(f"no block fits on {chip.name}: {report.registers} registers per thread are too many")
    found += _pipeline_problems(report) + _race_problems(report) + _access_problems(report)
    if report.target == "sm_90":
        found += _tensor_unit_problems(report)
    return found


def _pipeline_problems(report: Report) -> list[str]:
    """Loops that wait for all that they have under way; of products a build may say why; excuses that nothing needs."""
    found = []
    if report.wants_copies and not report.copies_pending:
        found.append("does not pipeline: a loop waits for every copy that it has under way")
    serial = report.exempt is None and report.serial
    if serial and report.unpipelined is None:
        found.append("does not pipeline: its loop waits for every matrix product that it has under way")
    if report.unpipelined is not None and not serial:
        found.append(f"is excused from pipelining ({report.unpipelined}) but pipelines")
    return found


def _access_problems(report: Report) -> list[str]:
    """Accesses to device memory that could be wider, unless ``runs.EXCUSES`` says why."""
    found = [runs.Narrow(*each) for each in report.narrow]
    return [f"narrow accesses: {each}" for each in found if runs.excuse(report.target, report.config, each) is None]


def _race_problems(report: Report) -> list[str]:
    """Reads of shared memory that may see another tile than the one that they are meant for."""
    found = []
    if report.overwrites:
        found.append(
            f"races: {report.overwrites} copies go to where a product under way still reads (one buffer too few)"
        )
    if report.unfenced:
        found.append(
            f"races: {report.unfenced} asynchronous products follow a wait for cp.async without fence.proxy.async"
        )
    return found


def _tensor_unit_problems(report: Report) -> list[str]:
    """Hopper's units that a GEMM should use and does not, unless it says why; and excuses that nothing needs."""
    missing = []
    if report.wants_wgmma and not report.wgmma:
        missing.append("compiled without wgmma (no HGMMA in the SASS) and names no exemption")
    if report.wants_tma and not report.tma:
        missing.append("compiled without TMA loads (no UTMALDG in the SASS) and names no exemption")
    if report.exempt is None:
        return missing
    wanted = report.wants_wgmma or report.wants_tma
    return [f"is exempt ({report.exempt}) but needs no exemption"] if wanted and not missing else []


def compile_build(build: Build) -> Report:
    """Compile in this process and read the machine code. A kernel that does not compile raises what Triton raises.

    Raises RuntimeError where Triton is missing, or where this process interprets its kernels.
    """
    require_compiler()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constexprs, attrs = build.specialise()
    compiled = triton.compile(
        ASTSource(build.fn, signature=signature, constexprs=constexprs, attrs=attrs),
        target=GPUTarget(*registry.TARGETS[build.target]),
        options={"num_warps": build.num_warps, "num_stages": build.num_stages},
    )
    code = _read_cached(compiled.asm)
    chip = CHIPS[build.target]
    threads = compiled.metadata.num_warps * registry.TARGETS[build.target][2]
    owned = runs.runs(compiled.asm["ttir"], build.args, threads, build.runs)
    ahead = pipelines.read(compiled.asm["ttgir"])
    # Warp specialisation adds warps: what counts is what the compiled kernel launches with.
    use = (code.registers, compiled.metadata.shared, compiled.metadata.num_warps)
    return Report(
        op=build.op,
        config=build.config,
        target=build.target,
        registers=code.registers,
        spills=code.spills,
        shared_bytes=compiled.metadata.shared,
        instructions=code.instructions,
        wgmma=code.wgmma > 0,
        tma=code.tma > 0,
        occupancy=chip.occupancy(*use),
        copies_pending=code.copies_pending,
        wgmma_pending=code.wgmma_pending,
        products_pending=ahead.pending,
        overwrites=ahead.overwrites,
        unfenced=fences.unfenced(compiled.asm.get("ptx", "")),
        accesses=code.accesses,
        loops=[
            machine_code.described(region, runs.outputs(region.stores, owned)) for region in code.regions if region.busy
        ],
        narrow=runs.narrow(build.fn.__name__, code.places, owned),
        exempt=build.exempt,
        num_warps=compiled.metadata.num_warps,
        blocks_per_sm=chip.blocks_per_sm(*use),
        wants_wgmma=build.wants_wgmma,
        wants_tma=build.wants_tma,
        wants_copies=build.wants_copies,
        unpipelined=build.unpipelined,
        triton=triton.__version__,
        **_predict(build),
    )


def _predict(build: Build) -> dict[str, Any]:
    """The modelled fields of a report."""
    if build.gemm is None:
        return {}
    modelled = cost.predict(CHIPS[build.target], build.gemm, build.tile)
    return {
        "gemm": f"{build.gemm.layout} {build.gemm.M}x{build.gemm.N}x{build.gemm.K}",
        "flops": modelled.flops,
        "bytes": modelled.bytes,
        "waves": modelled.waves,
        "predicted_us": round(modelled.time_us, 2),
        "peak_share": round(modelled.peak_share, 4),
        "bound": modelled.bound,
    }


def require_compiler() -> None:
    """RuntimeError that says what to do where this process cannot compile kernels."""
    if dispatch.triton_version() is None:
        raise RuntimeError(NO_TRITON)
    if dispatch.interpreting():
        raise RuntimeError(
            "this process interprets its kernels (TRITON_INTERPRET is set), so none of them can be compiled here: "
            "unset it, or use compile_builds, which starts processes of its own"
        )


def _read_cached(asm: Mapping[str, Any]) -> machine_code.MachineCode:
    """Disassembling takes as long as compiling, so what was read is kept in Triton's cache like the binary itself."""
    from triton import knobs
    from triton.runtime.cache import get_cache_manager

    listing = "cubin" if "cubin" in asm else "amdgcn"
    binary: bytes = asm[listing].encode() if listing == "amdgcn" else asm[listing]
    reader = b"".join(Path(str(module.__file__)).read_bytes() for module in (machine_code, listings))
    cache = get_cache_manager(hashlib.sha256(reader + binary).hexdigest())
    kept = cache.get_file("machine_code.json")
    if kept is not None:
        return machine_code.MachineCode.of(loads(Path(kept).read_text()))
    if listing == "cubin":
        code = machine_code.read_cubin(binary, knobs.nvidia.cuobjdump.path, knobs.nvidia.nvdisasm.path)
    else:
        code = machine_code.read_amdgcn(asm[listing])
    cache.put(dumps(dataclasses.asdict(code)), "machine_code.json", binary=False)
    return code


def compile_builds(
    builds: Sequence[Build],
    *,
    jobs: int | None = None,
    side_triton: str | None = None,
    on_report: Callable[[Report], None] = lambda report: None,
) -> list[Report]:
    """Compile every build once, in ``jobs`` fresh processes (default: one per core); one report per distinct build.

    The processes look builds up by (op, target, config) in the registry. ``side_triton`` names a folder that holds
    another Triton than the installed one. ``on_report`` is called in this thread as reports come in. A build that
    does not compile gives a report with ``error`` set.
    """
    if dispatch.triton_version() is None and side_triton is None:
        raise RuntimeError(NO_TRITON)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if side_triton is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [side_triton, env.get("PYTHONPATH")]))
    requests: list[dict[str, Any]] = [
        {"op": op, "config": config, "target": target} for op, config, target in distinct(builds)
    ]
    command = [sys.executable, "-m", f"{__package__}.codegen"]
    reports: dict[int, Report] = {}
    for index, answer in workers.ask_all(requests, command, env, jobs or workers.cores()):
        reports[index] = Report(**(requests[index] | answer))
        on_report(reports[index])
    return [reports[index] for index in range(len(requests))]


def distinct(builds: Sequence[Build]) -> list[tuple[str, str, str]]:
    """What names a build: op, configuration and target, each once, in order."""
    return list(dict.fromkeys((build.op, build.config, build.target) for build in builds))


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """What a worker does with one request: find the build, compile it, report."""
    build = _builds_by_config(request["op"], request["target"]).get(request["config"])
    if build is None:
        raise LookupError(f"{request['op']} has no build called {request['config']!r} for {request['target']}")
    return dataclasses.asdict(compile_build(build))


@functools.cache
def _builds_by_config(op: str, target: str) -> dict[str, Build]:
    """The builds of one op for one target; ValueError where two differ and share a name."""
    found: dict[str, Build] = {}
    contents: dict[str, tuple[Any, ...]] = {}
    seen = set()
    for build in registry.op(op).launched(target):
        alike = (build.config, *_fingerprint(build))
        if alike in seen:
            continue
        seen.add(alike)
        content = (build.fn, build.specialise(), build.num_warps, build.num_stages)
        if contents.setdefault(build.config, content) != content:
            raise ValueError(f"{op} has two different builds called {build.config!r} for {target}: name them apart")
        found.setdefault(build.config, build)
    return found


def _fingerprint(build: Build) -> tuple[Any, ...]:
    """What decides at least as finely as Triton how a launch is compiled: thousands differ in sizes alone."""

    def mark(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16
        if isinstance(value, int):
            return type(value), value % 16, value == 1, value >= 1 << 63, value.bit_length() > 31
        return tuple(map(mark, value)) if isinstance(value, tuple) else value

    constants = {param.name for param in build.fn.params if param.is_constexpr}
    args = [(name, value if name in constants else mark(value)) for name, value in build.args.items()]
    # Not the kernel itself: its hash is its key in Triton's cache, which ``specialise`` has to settle first.
    return id(build.fn), build.num_warps, build.num_stages, *args


def compile_with_progress(
    builds: Sequence[Build],
    jobs: int | None,
    people: Console,
    on_report: Callable[[Report], None] = lambda report: None,
) -> list[Report]:
    """``compile_builds`` with a bar on ``people``, or with a line for every tenth of the builds off a terminal."""
    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    total, done = len(distinct(builds)), 0
    with Progress(*columns, console=people, transient=True, disable=not people.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def advance(report: Report) -> None:
            nonlocal done
            done += 1
            progress.update(task, advance=1, description=f"{report.op} {report.config} {report.target}")
            if not people.is_terminal and done * 10 // total > (done - 1) * 10 // total:
                people.print(f"compiled {done} of {total}", highlight=False, soft_wrap=True)
            on_report(report)

        return compile_builds(builds, jobs=jobs, on_report=advance)


if __name__ == "__main__":
    workers.serve(_answer)
