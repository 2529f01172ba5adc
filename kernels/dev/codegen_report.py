"""The committed record of what the compiler made of every build, and whether it still speaks of these sources.

``make test`` compiles the builds of the chip that is tuned first, and a sample of the others; ``make codegen`` compiles
what the record lacks and writes it, one file for each version of Triton:

    python -m shardfuse.kernels.dev.codegen_report --write    compile what changed, write it, fail on any problem
    python -m shardfuse.kernels.dev.codegen_report --check    compile nothing: is every build recorded, as it is now?

An entry carries Triton's own hash of the build's source: the kernel and all that it calls, where they stand in their
files, and the arguments it is specialised for. A changed file thereby makes the entries of its kernels stale.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from . import codegen, registry, runs
from .registry import Build

FOLDER = Path(__file__).resolve().parent / "compiled"
_COLUMNS = (
    *("registers", "spills", "shared_bytes", "instructions", "wgmma", "tma", "occupancy"),
    *("copies_pending", "wgmma_pending", "products_pending", "overwrites", "unfenced", "loops", "narrow"),
    *("exempt", "unpipelined"),
)
_EXCUSES = slice(-2, None)
_NARROW = 1 + _COLUMNS.index("narrow")
_LOOPS = 1 + _COLUMNS.index("loops")  # in a row, which begins with the hash


def builds() -> Iterator[Build]:
    """Every build of every op for every target."""
    for op in registry.ops().values():
        for target in registry.TARGETS:
            yield from op.builds(target)


def source_hash(build: Build) -> str:
    """What the machine code of a build depends on, but for the compiler: 16 hexadecimal digits."""
    from triton.compiler import ASTSource

    signature, constexprs, attrs = build.specialise()
    source = ASTSource(build.fn, signature=signature, constexprs=constexprs, attrs=attrs)
    key = f"{source.hash()}-{build.num_warps}-{build.num_stages}"
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def path(version: str) -> Path:
    """Where the record of one version of Triton lies."""
    return FOLDER / f"triton-{version}.json"


def write(jobs: int | None = None, *, everything: Collection[str] = ()) -> int:
    """Compile what the record lacks or has of other sources, and ``everything`` of some targets; write the record.

    Returns 1, and leaves such builds out, if any is unfit to ship.
    """
    import triton

    wanted = {" ".join(_key(build)): build for build in builds()}
    hashes = {name: source_hash(build) for name, build in wanted.items()}
    known = read(triton.__version__)
    # An excuse that is another by now may not be needed, or not suffice.
    excuses = {name: [getattr(build, column) for column in _COLUMNS[_EXCUSES]] for name, build in wanted.items()}
    rows = {
        name: row
        for name, row in known.items()
        if name in wanted
        and wanted[name].target not in everything
        and row[0] == hashes[name]
        and row[_EXCUSES] == excuses[name]
    }
    compiled = [build for name, build in wanted.items() if name not in rows]
    reports = codegen.compile_with_progress(compiled, jobs, Console(stderr=True))
    faults = []
    for report in reports:
        name = " ".join((report.op, report.target, report.config))
        problems = codegen.problems(report)
        faults += [f"{name}: {problem}" for problem in problems]
        if not problems:
            row = report.row()
            rows[name] = [hashes[name], *(row[column] for column in _COLUMNS)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    path(triton.__version__).write_text(_as_text(triton.__version__, rows))
    faults += unneeded()
    done = f"{len(wanted)} builds, {len(reports)} of them compiled under Triton {triton.__version__}"
    print("\n".join([*faults, f"{done}, {len(faults)} problems"]))
    return 1 if faults else 0


def _as_text(version: str, rows: dict[str, list[Any]]) -> str:
    """One line for each build; what loops hold is said once, and rows have its numbers."""
    said = sorted({loop for row in rows.values() for loop in row[_LOOPS]})
    numbers = {loop: number for number, loop in enumerate(said)}
    numbered = {
        name: [[numbers[loop] for loop in value] if at == _LOOPS else value for at, value in enumerate(row)]
        for name, row in sorted(rows.items())
    }
    head = json.dumps({"triton": version, "columns": ["source_hash", *_COLUMNS]})[:-1]
    loops = ",\n".join(f"  {json.dumps(loop)}" for loop in said)
    builds = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in numbered.items())
    return f'{head}, "loops": [\n{loops}\n], "builds": {{\n{builds}\n}}}}\n'


def read(version: str) -> dict[str, list[Any]]:
    """The record: "op target config" -> the hash of its source and the columns; empty if they are not today's."""
    file = path(version)
    record = json.loads(file.read_text()) if file.is_file() else {"columns": []}
    if record["columns"][1:] != list(_COLUMNS):
        return {}
    rows: dict[str, list[Any]] = record["builds"]
    for row in rows.values():
        row[_LOOPS] = [record["loops"][number] for number in row[_LOOPS]]
    return rows


def unneeded() -> list[str]:
    """Excuses for narrow accesses that no build of any version's record needs, one line each.

    Nothing as long as a record has other columns than today's.
    """
    versions = [file.stem.removeprefix("triton-") for file in FOLDER.glob("triton-*.json")]
    if not all(read(version) for version in versions):
        return []
    needed = {_why(*each) for version in versions for each in _narrow(version)}
    return [
        f"{each.kernel} is excused from wide accesses to {each.arguments} in {each.build} ({each.reason}) but has them"
        for each in runs.EXCUSES
        if each not in needed
    ]


def stale(version: str) -> list[str]:
    """What the record of ``version`` lacks or holds of other sources, one line each; nothing where it is whole."""
    file = path(version)
    if not file.is_file():
        return [f"there is no {file.name}"]
    record = json.loads(file.read_text())
    recorded = record["builds"]
    now = {" ".join(_key(build)): source_hash(build) for build in builds()}
    lines = [f"{name} is not in it" for name in now if name not in recorded]
    lines += [f"{name} was compiled from other sources" for name, h in now.items() if recorded.get(name, [h])[0] != h]
    if record["columns"][1:] != list(_COLUMNS):
        lines.insert(0, f"its columns are {', '.join(record['columns'][1:])}: {', '.join(_COLUMNS)} are recorded now")
    lines += [f"{name} is no build any more" for name in recorded if name not in now]
    return (
        lines
        + [f"{name}: narrow accesses: {each}" for name, each in _narrow(version) if not _why(name, each)]
        + unneeded()
    )


def _narrow(version: str) -> list[tuple[str, runs.Narrow]]:
    """What a record of today's columns says of accesses that could be wider, with the names of their builds."""
    return [(name, runs.Narrow(*each)) for name, row in read(version).items() for each in row[_NARROW]]


def _why(name: str, narrow: runs.Narrow) -> runs.Excuse | None:
    _, target, config = name.split(" ", 2)
    return runs.excuse(target, config, narrow)


def _key(build: Build) -> tuple[str, str, str]:
    return build.op, build.target, build.config


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m shardfuse.kernels.dev.codegen_report", description=__doc__)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--write", action="store_true", help="compile every build and write the record")
    choice.add_argument("--check", action="store_true", help="say what of the record is stale; exit 1 if anything is")
    parser.add_argument(
        "--everything",
        nargs="*",
        choices=registry.TARGETS,
        metavar="TARGET",
        help="with --write: also what the record has already, of these targets (default: of all)",
    )
    parser.add_argument("--jobs", type=int, help="processes (default: one per core)")
    options = parser.parse_args(arguments)
    codegen.require_compiler()
    if options.write:
        everything = () if options.everything is None else options.everything or registry.TARGETS
        return write(options.jobs, everything=everything)
    import triton

    lines = stale(triton.__version__)
    print("\n".join(lines) or "the record is whole")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
