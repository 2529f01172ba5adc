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

from . import codegen, registry
from .registry import Build

FOLDER = Path(__file__).resolve().parent / "compiled"
_COLUMNS = (
    *("registers", "spills", "shared_bytes", "instructions", "wgmma", "tma", "occupancy"),
    *("copies_pending", "wgmma_pending", "overwrites", "unfenced", "exempt", "unpipelined"),
)
_EXCUSES = slice(-2, None)


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
    known = _recorded(triton.__version__)
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
    done = f"{len(wanted)} builds, {len(reports)} of them compiled under Triton {triton.__version__}"
    print("\n".join([*faults, f"{done}, {len(faults)} problems"]))
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items()))
    head = json.dumps({"triton": triton.__version__, "columns": ["source_hash", *_COLUMNS]})[:-1]
    path(triton.__version__).write_text(f'{head}, "builds": {{\n{lines}\n}}}}\n')
    return 1 if faults else 0


def _recorded(version: str) -> dict[str, list[Any]]:
    """The rows of a record that has today's columns."""
    file = path(version)
    record = json.loads(file.read_text()) if file.is_file() else {"columns": []}
    rows: dict[str, list[Any]] = record["builds"] if record["columns"][1:] == list(_COLUMNS) else {}
    return rows


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
    return lines + [f"{name} is no build any more" for name in recorded if name not in now]


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
