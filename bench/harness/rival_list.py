"""``shardfuse bench rivals``: the rivals that are here, and why the others are not."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.text import Text

from ...kernels.runtime.printing import Sheet, console, prose, unbroken
from .ops import find_op
from .rivals import Listed, listed
from .verify import find_device


@dataclass(frozen=True)
class Line:
    """One rival as it is printed; ``why`` is the reason for skipping it, or empty."""

    op: str
    name: str
    version: str | None
    source: str
    why: str


def show(op: str | None, *, device: str | None = None, files: Sequence[str] = (), json: bool = False) -> int:
    """Print every rival of ``op`` (default: of all ops); returns 0, or 2 if the op or a file is wrong."""
    try:
        on = find_device(device)
        name = None if op is None else find_op(op).name
        lines = [_line(each, each.broken or (each.rival.missing(on) if each.rival else "")) for each in listed(files)]
    except (ValueError, RuntimeError) as error:
        errors = console(stderr=True)
        errors.print("[red]error:[/]", end=" ")
        errors.print(str(error), markup=False)
        return 2
    lines = [line for line in lines if name in (None, line.op) or not line.op]
    if json:
        print(jsonlib.dumps({"device": str(on), "rivals": [asdict(line) for line in lines]}), flush=True)
        return 0
    columns = (unbroken("op"), unbroken("rival"), unbroken("version"), prose("from"), prose("here"))
    table = Sheet(*columns, title=f"rivals on {on}")
    for line in sorted(lines, key=lambda line: (line.op, bool(line.why))):
        here = Text(f"skipped: {line.why}", "yellow") if line.why else Text("found", "green")
        table.add(line.op, line.name, line.version or "", line.source, here)
    console().print(table)
    return 0


def _line(each: Listed, why: str) -> Line:
    if each.rival is None:
        return Line("", "", None, each.source, why)
    return Line(each.rival.op, each.rival.name, each.rival.version, each.source, why)
