"""``shardfuse inspect OP --run``: run a case of an op on this CPU, as a GPU would, and print what each kernel did.

Counts are exact: of sectors, wavefronts, bytes and instructions of PTX (``ptx/counters.py``). Cycles are bounds by
public rates. Whether results are right is not judged here: that is ``make emulate``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from json import dumps
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..runtime import dispatch
from ..runtime.printing import Sheet, console, figure, prose, unbroken
from . import counting, registry
from .counting import Question

DEFAULT = "sm_90"
_SHOWN = 8  # names of cases in an error
_UNITS = ("mufu", "fp32", "half", "integer", "compare", "convert", "move", "shuffle", "multiply-adds")


def inspect(
    op: str | None,
    target: str | None,
    case: str | None = None,
    *,
    all_ops: bool = False,
    json: bool = False,
    verbose: bool = False,
    jobs: int | None = None,
) -> int:
    """Run the cases of ``op`` whose name is ``case`` or holds it; default: the first. ``target``: default sm_90.

    ``verbose`` adds a table of instructions by line of source, and one of barriers and divergent branches.

    ``json`` prints a single line to standard output, a list of cases with their launches. Returns the exit code: 0, 1
    where a case does not run or the emulator reports a fault, 2 for arguments that name nothing.
    """
    people, arch = console(stderr=True), target or DEFAULT
    try:
        if op is None or all_ops:
            raise ValueError(f"--run takes one op at a time: name one of {', '.join(sorted(registry.ops()))}")
        questions, others = _select(op, arch, case)
    except (ValueError, RuntimeError) as error:
        _complain(people, f"error: {error}")
        return 2
    begun = time.monotonic()
    answers = _counted(questions, arch, jobs, people)
    wrong = [problem for question, answer in zip(questions, answers) for problem in _problems(question, answer)]
    for problem in wrong:
        _complain(people, problem)
    if json:
        print(dumps([{**q._asdict(), "target": arch, **a} for q, a in zip(questions, answers)]))
    else:
        shown = console()
        for question, answer in zip(questions, answers):
            for renderable in report(question, arch, answer, verbose):
                shown.print(renderable)
    more = f"; {others} other cases: --case" if others else ""
    people.print(
        f"{len(questions)} case{'s' * (len(questions) != 1)} for {arch}, Triton {dispatch.triton_version()}, "
        f"{time.monotonic() - begun:.0f} s{more}",
        highlight=False,
    )
    return 1 if wrong else 0


def _complain(people: Console, line: str) -> None:
    people.print(line, style="red", markup=False, soft_wrap=True)


def _select(op: str, arch: str, case: str | None) -> tuple[list[Question], int]:
    """(the cases asked for, how many others there are); ValueError where that names none."""
    spec = registry.op(op)
    counting.require(arch)
    if not counting.exists(spec, arch):
        raise ValueError(f"target={arch!r}: {op} is for fp8, which this chip lacks")
    known = [question for question, _ in counting.cases(spec)]
    if case is None:
        return known[:1], len(known) - 1
    found = [each for each in known if each.case == case][:1] or [each for each in known if case in each.case]
    if not found:
        names = list(dict.fromkeys(each.case for each in known))
        more = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
        raise ValueError(
            f"case={case!r}: {op} has no case whose name holds that, but {', '.join(names[:_SHOWN])}{more}"
        )
    return found, len(known) - len(found)


def _counted(questions: Sequence[Question], arch: str, jobs: int | None, people: Console) -> list[dict[str, Any]]:
    """With a bar on ``people``, or a line for each case off a terminal."""
    columns = (TextColumn("running"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=people, transient=True, disable=not people.is_terminal) as progress:
        task = progress.add_task("", total=len(questions))

        def advance(index: int, answer: dict[str, Any]) -> None:
            progress.update(task, advance=1)
            if not people.is_terminal:
                people.print(f"ran {questions[index].op} {questions[index].case}", highlight=False, soft_wrap=True)

        if not people.is_terminal:
            people.print(f"running {len(questions)} on this CPU as on {arch}", highlight=False, soft_wrap=True)
        return counting.count(questions, arch, jobs=jobs, machine=True, deep=True, on_answer=advance)


def _problems(question: Question, answer: dict[str, Any]) -> Iterator[str]:
    for problem in [answer["error"]] if answer.get("error") else answer["faults"]:
        yield f"{question.op} {question.case}: {problem}"


# -------------------------------------------------------------------------------------------------------- what is shown


def report(question: Question, arch: str, answer: dict[str, Any], verbose: bool = False) -> Iterator[Any]:
    """Of one case: a part for each kernel."""
    if answer.get("error"):
        return
    for times, launch in counting.distinct(answer["launches"]):
        again = f", launched {times} times" if times > 1 else ""
        grid = " x ".join(map(str, launch["grid"]))
        yield Text(f"{launch['kernel']}{again}", "bold")
        yield Text(f"{question.op} {question.case} for {arch}, grid {grid}, blocks of {launch['threads']} threads")
        yield _facts(launch)
        yield Text()
        yield _accesses(launch)
        yield Text()
        yield _loops(launch)
        yield Text()
        if verbose:
            yield from (_by_source(launch), Text(), _control(launch), Text())


def _facts(launch: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    ratios, units = launch["ratios"], launch["units"]
    used = ", ".join(f"{name} {units[name]:.2f}" for name in _UNITS if units.get(name))
    made = {name: each for name, each in launch.get("machine", {}).items() if name != "issued"}
    cycles = ", ".join(f"{name} {each:,.0f}" for name, each in sorted(launch["bounds"].items(), key=lambda e: -e[1]))
    for heading, said in (
        (
            "instructions",
            f"{launch['issued']:,} by warps, {launch['active']:g} threads in each; {launch['barriers']:g} barriers a "
            f"warp; {launch['parted']:,} branches part a warp",
        ),
        ("by element", f"{used} (of {launch['elements']:,} of {launch['per']})"),
        ("machine code", f"by element, as ptxas makes it: {_listed(made)}"),
        (
            "bytes",
            f"{launch['needed']:,} are necessary; asked {launch['asked']:,}, moved {launch['moved']:,} in sectors: "
            f"{ratios['moved']:.2f} of the necessary, {ratios['by_block']:.2f} if a block loads a sector once",
        ),
        ("sectors", f"used by main loads {_share(ratios['loads'])}, by main stores {_share(ratios['stores'])}"),
        ("wavefronts", f"of shared memory in loops: {_times(ratios['conflicts'])}"),
        ("cycles", f"of a block at least, by public rates, no prediction: {cycles or 'no rates for this chip'}"),
    ):
        table.add_row(Text(heading, "bold"), Text(said))
    return table


def _listed(units: dict[str, float]) -> str:
    return ", ".join(f"{name} {each:.2f}" for name, each in sorted(units.items(), key=lambda unit: -unit[1]))


def _share(value: float | None) -> str:
    return "(none)" if value is None else f"{value:.1%}"


def _times(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f} times those needed"


def _accesses(launch: dict[str, Any]) -> Sheet:
    headings = ("PTX line", "count", "a warp", "requests", "sectors", "used", "wavefronts", "needed")
    table = Sheet(
        unbroken("access"),
        *map(figure, headings),
        prose("argument"),
        prose("source"),
        title="Accesses to memory",
        caption="count: lines of PTX alike; sectors, wavefronts, needed: by request; used: of the sectors' bytes",
    )
    for row in launch["lines"]:
        by = lambda name, row=row: f"{row[name] / row['requests']:.2f}" if row[name] else ""
        used = f"{row['used'] / row['sectors'] / 32:.0%}" if row["sectors"] else ""
        figures = (str(row["ptx"]), str(row["count"]), f"{row['times']:g}", f"{row['requests']:,}", by("sectors"), used)
        kind = row["opcode"].removeprefix("cp.async.").split(".")
        width = next((part for part in kind if part[:1] == "v" and part[1:].isdigit()), "")
        name = " ".join(filter(None, [row["unit"], width, kind[-1] if kind[-1][1:].isdigit() else ""]))
        table.add(name, *figures, by("wavefronts"), by("needed"), row["on"], row["source"])
    return table


def _loops(launch: dict[str, Any]) -> Sheet:
    names = ["issued", *_UNITS, "wavefronts", "needed", "loaded sectors", "stored sectors", "barriers"]
    names = [name for name in names if any(row.get(name) for row in launch["loops"])]
    table = Sheet(
        figure("times a warp"),
        *map(figure, names),
        title="By trip count, in a block and each time",
        caption="what runs most often is a loop's steady state",
    )
    for row in launch["loops"]:
        table.add(f"{row['times']:g}", *(f"{row[name]:,.0f}" if row.get(name) else "" for name in names))
    return table


def _by_source(launch: dict[str, Any]) -> Sheet:
    names = [name for name in _UNITS if any(row.get(name) for row in launch["by_source"])]
    table = Sheet(
        unbroken("source"),
        figure("issued"),
        *map(figure, names),
        title="Instructions by line of source",
        caption="issued: by warps; the others: of threads, by element",
    )
    for row in launch["by_source"]:
        units = (f"{row[name]:.3f}" if row.get(name) else "" for name in names)
        table.add(row["source"], f"{row['issued']:,}", *units)
    return table


def _control(launch: dict[str, Any]) -> Sheet:
    table = Sheet(
        unbroken("control"),
        *map(figure, ("PTX line", "warps", "part there")),
        prose("source"),
        title="Barriers, and branches at which the threads of a warp part",
    )
    for row in launch["control"]:
        parted = f"{row['parted']:,}" if row["parted"] else ""
        table.add(row["what"], str(row["ptx"]), f"{row['warps']:,}", parted, row["source"])
    return table
