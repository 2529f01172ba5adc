"""Ahead-of-time compilation: what the compiler makes of every shipped configuration, on a machine without a GPU.

While writing a kernel, in a Python started without TRITON_INTERPRET:

    from shardfuse.kernels import codegen, registry
    for build in registry.op("linear_act").builds("sm_90"):
        report = codegen.compile_build(build)
        print(report, codegen.problems(report))

``compile_builds`` does the same for many at once, in fresh processes, one per core; it also works where this process
interprets its kernels (as tests do). On the command line: ``shardfuse inspect linear_act --target sm_90``, or
``shardfuse inspect --all --json``. Compiled kernels and what was read off them are kept in Triton's own cache.

Beside what was compiled stands what ``cost.py`` predicts of it, for kernels that multiply matrices: one kernel serves
many shapes, and the prediction is for the first of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from json import dumps, loads
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..runtime import cost, dispatch
from ..runtime.chips import CHIPS
from . import machine_code, registry, workers
from .registry import Build

# The public row of a report, in this order: what names it, what was read off the machine code, what is predicted.
_NAMES = ("op", "config", "target")
_MEASURED = (
    *("registers", "spills", "shared_bytes", "instructions", "wgmma", "tma", "occupancy"),
    *("copies_pending", "wgmma_pending"),
)
_PREDICTED = ("gemm", "flops", "bytes", "waves", "predicted_us", "peak_share", "bound")
FIELDS = (*_NAMES, *_MEASURED, "exempt", "unpipelined", *_PREDICTED)

_NO_TRITON = "compiling kernels needs Triton, which is not installed here (pip install triton; Linux only)"


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
    found += _pipeline_problems(report)
    if report.target == "sm_90":
        found += _tensor_unit_problems(report)
    return found


def _pipeline_problems(report: Report) -> list[str]:
    """Loops that wait for all that they have under way, unless the build says why; and excuses that nothing needs."""
    waits = []
    if report.wants_copies and not report.copies_pending:
        waits.append("does not pipeline: a loop waits for every copy that it has under way")
    if report.gemm is not None and report.exempt is None and report.wgmma_pending == 0:
        waits.append("does not pipeline: its loop waits for every warp-group product that it has under way")
    if report.unpipelined is None:
        return waits
    return [] if waits else [f"is excused from pipelining ({report.unpipelined}) but pipelines"]


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
        raise RuntimeError(_NO_TRITON)
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
    reader = Path(machine_code.__file__).read_bytes()
    cache = get_cache_manager(hashlib.sha256(reader + binary).hexdigest())
    kept = cache.get_file("machine_code.json")
    if kept is not None:
        return machine_code.MachineCode(**loads(Path(kept).read_text()))
    if listing == "cubin":
        code = machine_code.read_cubin(binary, knobs.nvidia.cuobjdump.path)
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
        raise RuntimeError(_NO_TRITON)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if side_triton is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [side_triton, env.get("PYTHONPATH")]))
    requests: list[dict[str, Any]] = [
        {"op": op, "config": config, "target": target} for op, config, target in _distinct(builds)
    ]
    command = [sys.executable, "-m", f"{__package__}.codegen", "--worker"]
    reports: dict[int, Report] = {}
    for index, answer in workers.ask_all(requests, command, env, jobs or workers.cores()):
        reports[index] = Report(**(requests[index] | answer))
        on_report(reports[index])
    return [reports[index] for index in range(len(requests))]


def _distinct(builds: Sequence[Build]) -> list[tuple[str, str, str]]:
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
    for build in registry.op(op).builds(target):
        other = found.setdefault(build.config, build)
        if _content(other) != _content(build):
            raise ValueError(f"{op} has two different builds called {build.config!r} for {target}: name them apart")
    return found


def _content(build: Build) -> tuple[Any, ...]:
    return (build.fn, build.specialise(), build.num_warps, build.num_stages)


def inspect(
    op: str | None = None,
    target: str | None = None,
    *,
    json: bool = False,
    all_ops: bool = False,
    jobs: int | None = None,
) -> int:
    """``shardfuse inspect``: compile, print what came of it, say what is wrong.

    One ``op`` or all of them, for one ``target`` or for all. ``json`` prints a single line to standard output, a list
    of rows with the fields of FIELDS; everything for people then goes to standard error. Returns the exit code: 0 when
    every build is fit to ship, 1 when some are not, 2 when the question makes no sense.
    """
    people = Console(stderr=True)
    try:
        builds = _select(op, target, all_ops)
        if jobs is not None and jobs < 1:
            raise ValueError(f"jobs={jobs}: expected at least 1")
    except (ValueError, RuntimeError) as error:
        _print_line(people, f"error: {error}")
        return 2
    started = time.monotonic()
    reports = compile_with_progress(builds, jobs, people)
    if not json:
        # Off a terminal rich would assume 80 columns and fold every row.
        console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 230)
        console.print(summary(reports))
        _print_tables(reports, console)
    wrong = [(report, problem) for report in reports for problem in problems(report)]
    for report, problem in wrong:
        _print_line(people, f"{report.op} {report.config} on {report.target}: {problem}")
    people.print(
        f"{len(reports)} builds, {len(wrong) or 'no'} problem{'s' * (len(wrong) != 1)}, "
        f"Triton {dispatch.triton_version()}, {time.monotonic() - started:.0f} s",
        highlight=False,
    )
    if json:
        print(dumps([report.row() for report in reports]))
    return 1 if wrong else 0


def _print_line(console: Console, line: str) -> None:
    console.print(line, style="red", markup=False, highlight=False, soft_wrap=True)


def _select(op: str | None, target: str | None, all_ops: bool) -> list[Build]:
    """The builds asked for; ValueError where that names nothing."""
    if (op is None) != all_ops:
        raise ValueError(f"name one op ({', '.join(sorted(registry.ops()))}) or pass --all")
    if target is not None and target not in registry.TARGETS:
        raise ValueError(f"no target called {target!r}: known are {', '.join(registry.TARGETS)}")
    specs = list(registry.ops().values()) if op is None else [registry.op(op)]
    if dispatch.triton_version() is None:
        raise RuntimeError(_NO_TRITON)
    builds = [
        build for spec in specs for name in ([target] if target else registry.TARGETS) for build in spec.builds(name)
    ]
    if not builds:
        raise ValueError(f"{op or 'no op'} has no kernels for {target or 'any target'}")
    return builds


def compile_with_progress(builds: list[Build], jobs: int | None, people: Console) -> list[Report]:
    """``compile_builds`` with a bar on ``people``, where that is a terminal."""
    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=people, transient=True, disable=not people.is_terminal) as progress:
        task = progress.add_task("", total=len(_distinct(builds)))

        def advance(report: Report) -> None:
            progress.update(task, advance=1, description=f"{report.op} {report.config} {report.target}")

        return compile_builds(builds, jobs=jobs, on_report=advance)


def summary(reports: Sequence[Report]) -> Table:
    """A line for each op and target: how many builds there are, what is wrong with how many, and their extremes."""
    table = Table(title="summary, each configuration below", title_justify="left")
    table.add_column("op on target", overflow="fold")
    for heading in ("builds", "wrong", "exempt", "registers", "shared KiB", "occupancy", "wgmma", "TMA"):
        table.add_column(heading, justify="right", no_wrap=True)
    for op, target in dict.fromkeys((report.op, report.target) for report in reports):
        chosen = [report for report in reports if (report.op, report.target) == (op, target)]
        compiled = [report for report in chosen if report.error is None]
        table.add_row(
            f"{op} on {target}",
            str(len(chosen)),
            str(sum(bool(problems(report)) for report in chosen)),
            str(sum(report.exempt is not None for report in chosen)),
            _range([report.registers for report in compiled], "{:.0f}"),
            _range([report.shared_bytes / 1024 for report in compiled], "{:.0f}"),
            _range([report.occupancy for report in compiled], "{:.0%}"),
            str(sum(report.wgmma for report in compiled)),
            str(sum(report.tma for report in compiled)),
        )
    return table


def _range(values: Sequence[float], form: str) -> str:
    """As in 32-255; "" for none."""
    shown = dict.fromkeys(form.format(value) for value in (min(values), max(values))) if values else {}
    return "-".join(shown)


def _print_tables(reports: list[Report], console: Console) -> None:
    """One table per op and target."""
    for op, target in dict.fromkeys((report.op, report.target) for report in reports):
        chosen = [report for report in reports if (report.op, report.target) == (op, target)]
        modelled = any(report.gemm is not None for report in chosen)
        table = Table(title=f"{op} on {target} ({CHIPS[target].name})", title_justify="left")
        if modelled:
            table.caption = (
                "GEMM and what follows it: predicted for the first shape that runs this kernel, not measured"
            )
        table.add_column("configuration", overflow="fold", min_width=40)
        for heading in ("registers", "spills", "shared KiB", "wgmma", "TMA", "blocks x warps", "occupancy"):
            table.add_column(heading, justify="right")
        for heading in ("GEMM", "GFLOP", "MB", "waves", "us", "of peak", "bound by") if modelled else ():
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("exemption", overflow="fold", max_width=44)
        for report in chosen:
            predicted = _predicted_cells(report) if modelled else []
            table.add_row(report.config, *_cells(report), *predicted, report.exempt or "")
        console.print(table)


def _cells(report: Report) -> list[str]:
    """The measured columns."""
    if report.error is not None:
        return ["failed", *[""] * 6]
    return [
        str(report.registers),
        str(report.spills),
        f"{report.shared_bytes / 1024:.1f}",
        "yes" if report.wgmma else "no",
        "yes" if report.tma else "no",
        f"{report.blocks_per_sm} x {report.num_warps}",
        f"{report.occupancy:.0%}",
    ]


def _predicted_cells(report: Report) -> list[str]:
    """The columns of the cost model."""
    if report.gemm is None or report.flops is None or report.bytes is None or report.peak_share is None:
        return [""] * len(_PREDICTED)
    return [
        report.gemm,
        f"{report.flops / 1e9:,.1f}",
        f"{report.bytes / 1e6:,.1f}",
        str(report.waves),
        f"{report.predicted_us:,.1f}",
        f"{report.peak_share:.0%}",
        report.bound or "",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m shardfuse.kernels.dev.codegen``: what ``shardfuse inspect`` does, and the worker processes' entry."""
    parser = argparse.ArgumentParser(prog="python -m shardfuse.kernels.dev.codegen", description=__doc__)
    parser.add_argument("op", nargs="?", help="one op by name")
    parser.add_argument("--target", help=", ".join(registry.TARGETS))
    parser.add_argument("--all", action="store_true", help="every op")
    parser.add_argument("--json", action="store_true", help="print one line of JSON to standard output")
    parser.add_argument("--jobs", type=int, help="processes (default: one per core)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        workers.serve(_answer)
        return 0
    return inspect(options.op, options.target, json=options.json, all_ops=options.all, jobs=options.jobs)


if __name__ == "__main__":
    sys.exit(main())
