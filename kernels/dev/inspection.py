"""``shardfuse inspect``: compile an op's kernels for GPUs that are not there, and print what the compiler made of them.

Ten lines name the extremes and what keeps kernels from shipping; a table has a row for each op and target. ``verbose``
adds a row for each kernel, ``json`` prints them all on one line.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from json import dumps

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..runtime import dispatch
from ..runtime.chips import CHIPS
from ..runtime.names import expected
from ..runtime.printing import Sheet, console, figure, prose, unbroken
from . import codegen, counts_report, registry, runs
from .codegen import Report, problems
from .registry import Build

# Words of a problem (codegen.problems), and the budget that it is about.
_BUDGETS = {
    "does not compile": "compilation",
    "is exempt": "exemptions",
    "is excused": "exemptions",
    "races": "races",
    "spills": "spills",
    "shared memory": "shared memory",
    "registers": "registers",
    "pipeline": "pipelining",
    "narrow": "narrow accesses",
    "wgmma": "wgmma",
    "TMA": "TMA",
}


def inspect(
    op: str | None = None,
    target: str | None = None,
    *,
    json: bool = False,
    verbose: bool = False,
    all_ops: bool = False,
    jobs: int | None = None,
) -> int:
    """Compile one ``op`` or all of them, for one ``target`` or for all, in ``jobs`` processes (default: one per core).

    Problems are printed on standard error as they are found. ``json`` prints a single line to standard output, a list
    of rows with the fields of ``codegen.FIELDS``. Returns the exit code: 0 if every kernel is fit to ship, 1 if some
    are not, 2 for arguments that name nothing.
    """
    people = console(stderr=True)
    try:
        builds = _select(op, target, all_ops)
        if jobs is not None and jobs < 1:
            raise ValueError(f"jobs={jobs}: expected at least 1")
    except (ValueError, RuntimeError) as error:
        _print_line(people, f"error: {error}")
        return 2
    wrong = 0

    def on_report(report: Report) -> None:
        nonlocal wrong
        for problem in problems(report):
            wrong += 1
            _print_line(people, f"{report.op} {report.config} on {report.target}: {problem}")

    started = time.monotonic()
    reports = codegen.compile_with_progress(builds, jobs, people, on_report)
    if not json:
        shown = console()
        shown.print(summary(reports))
        shown.print()
        shown.print(totals(reports))
        for table in kernels(reports) if verbose else ():
            shown.print()
            shown.print(table)
    more = "" if json or verbose else "; --verbose lists every kernel"
    people.print(
        f"{len(reports)} builds, {wrong or 'no'} problem{'s' * (wrong != 1)}, Triton {dispatch.triton_version()}, "
        f"{time.monotonic() - started:.0f} s{more}"
    )
    if json:
        print(dumps([report.row() for report in reports]))
    return 1 if wrong else 0


def _print_line(people: Console, line: str) -> None:
    people.print(line, style="red", markup=False, soft_wrap=True)


def _select(op: str | None, target: str | None, all_ops: bool) -> list[Build]:
    """The builds asked for; ValueError where that names nothing."""
    if (op is None) != all_ops:
        raise ValueError(f"name one op ({', '.join(sorted(registry.ops()))}) or pass --all")
    if target is not None and target not in registry.TARGETS:
        raise ValueError(f"no target called {target!r}: {expected(target, registry.TARGETS, 'known are')}")
    specs = list(registry.ops().values()) if op is None else [registry.op(op)]
    if dispatch.triton_version() is None:
        raise RuntimeError(codegen.NO_TRITON)
    builds = [
        build for spec in specs for name in ([target] if target else registry.TARGETS) for build in spec.builds(name)
    ]
    if not builds:
        raise ValueError(f"{op or 'no op'} has no kernels for {target or 'any target'}")
    return builds


# --- ten lines --------------------------------------------------------------------------------------------------------


def summary(reports: Sequence[Report]) -> Table:
    """The verdict and the extremes over all ``reports``, a line for each; long ones wrap."""
    ops, targets = (", ".join(dict.fromkeys(values)) for values in zip(*((r.op, r.target) for r in reports)))
    compiled = [report for report in reports if report.error is None]
    called = _namer(reports)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for heading, said in (
        ("kernels", f"{len(reports)} of {ops}, for {targets}"),
        ("verdict", _verdict(reports)),
        *_extremes(compiled, called),
        ("matrix units", _matrix_units(compiled)),
        ("accesses", _accesses(compiled)),
        ("busiest loop", _loop(compiled, called)),
        ("emulated", _emulated(reports)),
        ("prediction", _prediction(compiled, called)),
    ):
        table.add_row(Text(heading, "bold"), Text(said))
    return table


def _verdict(reports: Sequence[Report]) -> str:
    found = [problem for report in reports for problem in problems(report)]
    unfit = sum(bool(problems(report)) for report in reports)
    if not found:
        return "all are fit to ship"
    budgets = Counter(next(budget for word, budget in _BUDGETS.items() if word in problem) for problem in found)
    said = ", ".join(f"{budget} ({count})" for budget, count in budgets.most_common())
    return f"{unfit} unfit to ship; what fails: {said}"


def _extremes(compiled: Sequence[Report], called: Callable[[Report], str]) -> Iterator[tuple[str, str]]:
    """The kernels that come closest to the limits of their chip, or exceed them."""
    if not compiled:
        return
    registers = max(compiled, key=lambda report: report.registers)
    limit = CHIPS[registers.target].registers_per_thread
    spills = max(compiled, key=lambda report: report.spills)
    spilled = f"{spills.spills} spills at most: {called(spills)}" if spills.spills else "no spills"
    yield "registers", f"{registers.registers} of {limit} per thread at most: {called(registers)}; {spilled}"
    shared = max(compiled, key=lambda report: report.shared_bytes / CHIPS[report.target].shared_per_block)
    room = CHIPS[shared.target].shared_per_block
    yield "shared memory", f"{_kib(shared.shared_bytes)} of {_kib(room)} KiB per block at most: {called(shared)}"
    resident = min(compiled, key=lambda report: report.occupancy)
    yield "occupancy", f"{resident.occupancy:.0%} of an SM's warps at least: {called(resident)}"


def _matrix_units(compiled: Iterable[Report]) -> str:
    """How many of the kernels that should use Hopper's units do, and how many leave a product under way."""
    hopper = [report for report in compiled if report.target == "sm_90"]
    wanted = {"wgmma": [r for r in hopper if r.wants_wgmma], "TMA": [r for r in hopper if r.wants_tma]}
    units = [f"{unit} in {sum(getattr(r, unit.lower()) for r in rs)} of {len(rs)}" for unit, rs in wanted.items() if rs]
    exempt = sum(report.exempt is not None for report in hopper)
    said = [f"{', '.join(units)} that multiply matrices on sm_90; {exempt} exempt" if units else ""]
    if asynchronous := [report for report in compiled if report.wgmma or report.products_pending is not None]:
        ahead = sum(not report.serial for report in asynchronous)
        said.append(f"{ahead} of {len(asynchronous)} loops with wgmma or tcgen05 leave a product under way")
    return "; ".join(filter(None, said)) or "no kernel here has to use wgmma or TMA"


def _accesses(compiled: Iterable[Report]) -> str:
    """Instructions that access device memory by their widths, and how many could be wider."""
    found, narrow = Counter[str](), list[tuple[str, str, runs.Narrow]]()
    for report in compiled:
        found.update(report.accesses)
        narrow += [(report.target, report.config, runs.Narrow(*each)) for each in report.narrow]
    if not found:
        return "none but by TMA"
    kinds = dict.fromkeys(name.split(" ")[0] for name in sorted(found))
    widths = (
        sorted((int(name.split(" ")[1]) for name in found if name.startswith(f"{kind} ")), reverse=True)
        for kind in kinds
    )
    said = [
        f"{kind} " + ", ".join(f"{found[f'{kind} {bits}']}x{bits}" for bits in each)
        for kind, each in zip(kinds, widths)
    ]
    reasons = {str(why.reason if (why := runs.excuse(*each)) else "not excused") for each in narrow}
    times = sum(each.times for *_, each in narrow)
    return (
        f"{'; '.join(said)} bits; {f'{times} could be wider: ' if times else 'none could be wider'}{', '.join(reasons)}"
    )


def _loop(compiled: Sequence[Report], called: Callable[[Report], str]) -> str:
    """Of the kernel with the most registers, the loop that holds most, as ``machine_code.described`` says it."""
    looping = [report for report in compiled if any(loop.startswith("loop") for loop in report.loops)]
    if not looping:
        return "no kernel has one"
    report = max(looping, key=lambda report: report.registers)
    return f"{max((loop for loop in report.loops if loop.startswith('loop')), key=len)}: {called(report)}"


def _emulated(reports: Sequence[Report]) -> str:
    """The committed counts of the emulator for these ops and targets, under the Triton that they were counted with."""
    asked = {(report.target, report.op) for report in reports}
    for version in (str(dispatch.triton_version()), *counts_report.versions()):
        rows = [each for each in counts_report.launches(counts_report.read(version)) if each[:2] in asked]
        if rows:
            shares = (
                f"{name} {_range([s for r in rows if (s := r.ratios[name]) is not None], '{:.0%}') or '-'}"
                for name in ("loads", "stores")
            )
            waves = _range([w for r in rows if (w := r.ratios["conflicts"]) is not None], "{:.2f}")
            more = f"; wavefronts in loops {waves} times those needed" if waves else ""
            return (
                f"sectors used by {', '.join(shares)}{more} ({len(rows)} launches, Triton {version}; --run shows one)"
            )
    return "not counted; --run counts"


def _prediction(compiled: Iterable[Report], called: Callable[[Report], str]) -> str:
    """The cost model's range, and its slowest kernel."""
    modelled = [(report.predicted_us, report) for report in compiled if report.predicted_us is not None]
    if not modelled:
        return "none: the model covers matrix products"
    shares = _range([report.peak_share or 0.0 for _, report in modelled], "{:.0%}")
    time_us, slowest = max(modelled, key=lambda pair: pair[0])
    return (
        f"{shares} of peak; slowest {time_us:,.1f} us, {slowest.gemm}, bound by {slowest.bound}: {called(slowest)} "
        "(modelled, not measured)"
    )


def _namer(reports: Sequence[Report]) -> Callable[[Report], str]:
    """What names a kernel among ``reports``: its op and target only where there are several."""
    ops, targets = ({getattr(report, of) for report in reports} for of in ("op", "target"))

    def called(report: Report) -> str:
        op = f"{report.op} " if len(ops) > 1 else ""
        return f"{op}{report.config}{f' on {report.target}' if len(targets) > 1 else ''}"

    return called


# --- tables -----------------------------------------------------------------------------------------------------------


def totals(reports: Sequence[Report]) -> Sheet:
    """A row for each op and target: how many kernels there are, how many are unfit to ship, and their extremes."""
    headings = ("kernels", "unfit", "exempt", "registers", "shared KiB", "occupancy", "wgmma", "TMA")
    table = Sheet(unbroken("op on target"), *map(figure, headings))
    for (op, target), chosen in _by_op_and_target(reports):
        compiled = [report for report in chosen if report.error is None]
        table.add(
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


def kernels(reports: Sequence[Report]) -> Iterator[Sheet]:
    """A table for each op and target, with a row for each kernel."""
    for (op, target), chosen in _by_op_and_target(reports):
        modelled = any(report.gemm is not None for report in chosen)
        headings = ["registers", "spills", "shared KiB", "wgmma", "TMA", "blocks x warps", "occupancy"]
        headings += ["GEMM", "GFLOP", "MB", "waves", "us", "of peak", "bound by"] if modelled else []
        table = Sheet(
            unbroken("configuration"),
            *map(figure, headings),
            prose("exemption"),
            title=f"{op} on {target} ({CHIPS[target].name})",
            caption="GEMM and what follows it: predicted for the first shape that runs this kernel, not measured"
            if modelled
            else "",
        )
        for report in chosen:
            predicted = _predicted_cells(report) if modelled else []
            table.add(report.config, *_cells(report), *predicted, report.exempt or "")
        yield table
        loops = Sheet(unbroken("configuration"), prose("what a thread does outside of loops, and in each of them"))
        for report in chosen:
            for at, loop in enumerate(report.loops):
                loops.add("" if at else report.config, loop)
        yield loops


def _by_op_and_target(reports: Sequence[Report]) -> Iterator[tuple[tuple[str, str], list[Report]]]:
    for op, target in dict.fromkeys((report.op, report.target) for report in reports):
        yield (op, target), [report for report in reports if (report.op, report.target) == (op, target)]


def _cells(report: Report) -> list[str]:
    """The measured columns."""
    if report.error is not None:
        return ["failed", *[""] * 6]
    return [
        str(report.registers),
        str(report.spills),
        _kib(report.shared_bytes),
        "yes" if report.wgmma else "no",
        "yes" if report.tma else "no",
        f"{report.blocks_per_sm} x {report.num_warps}",
        f"{report.occupancy:.0%}",
    ]


def _predicted_cells(report: Report) -> list[str]:
    """The columns of the cost model."""
    if report.gemm is None or report.flops is None or report.bytes is None or report.peak_share is None:
        return [""] * 7
    return [
        report.gemm,
        f"{report.flops / 1e9:,.1f}",
        f"{report.bytes / 1e6:,.1f}",
        str(report.waves),
        f"{report.predicted_us:,.1f}",
        f"{report.peak_share:.0%}",
        report.bound or "",
    ]


def _kib(nbytes: int) -> str:
    return f"{nbytes / 1024:.1f}"


def _range(values: Sequence[float], form: str) -> str:
    """As in 32-255; "" for none."""
    shown = dict.fromkeys(form.format(value) for value in (min(values), max(values))) if values else {}
    return "-".join(shown)
