"""Runs the tutorials below docs/ as a reader would, and writes what they print into their pages.

    python tests/support/tutorials.py --write      # after a change of what a tutorial prints

The blocks of a page run in order, in one folder and one namespace. A block of Python with a title is saved under it; a
line ``$ python FILE`` of a console block runs such a file, and ``$ shardfuse ...`` is run in this process. A block of
text is what the block before it printed. A line ``...`` in it stands for any lines.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
PAGES = ("explain.md", "fuse.md", "kernel.md", "serve.md", "train.md")
WIDTH = "100"  # columns of what commands print
# What pages name and this does not run: it needs several processes, a GPU or minutes. The parser of each is asked in
# tests/face/test_docs_commands.py.
ELSEWHERE = {
    "torchrun --nproc-per-node 8 train.py --dp 2 --pp 2 --tp 2",
    "torchrun --nproc-per-node 2 train.py --tp 2",
    "shardfuse schedule zbv --stages 2 --microbatches 4",
    "shardfuse audit --dp 2 --pp 2 --tp 2 --zero 2 --schedule zbv --microbatches 4",
    "shardfuse serve tiny-model --port 8000",
    "shardfuse bench compare impl:triton norm.py:norm --op rms_norm --case t8192-d4096-bf16",
    "shardfuse inspect rms_norm",
}
# Commands that are to end with exit code 1.
RED = {"shardfuse bench verify rms_norm --impl wrong.py:norm --case t9-d80-fp32 --seed 1"}
SERVE, ADDRESS = "shardfuse serve tiny-model --port 8000", "127.0.0.1:8000"
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_SMALL = re.compile(r"\d\.\d+e-\d+")


class Printed(NamedTuple):
    """What a page shows of an output, where in the page it stands, and what was printed."""

    shown: str
    span: tuple[int, int]
    printed: str


def run(page: str) -> Iterator[Printed]:
    """Run a page in the current folder, and yield each output that it shows.

    Raises whatever a block raises, and ValueError for a command that is neither run nor one of ``ELSEWHERE``.
    """
    with mock.patch.dict(os.environ, COLUMNS=WIDTH), contextlib.ExitStack() as until_the_end:
        yield from _blocks(page, until_the_end)


def _blocks(page: str, until_the_end: contextlib.ExitStack) -> Iterator[Printed]:
    names: dict[str, Any] = {"__name__": "__main__"}
    printed, address = "", ADDRESS
    for block in _BLOCK.finditer((FOLDER / page).read_text()):
        language, title, body = block.groups()
        if language == "text":
            yield Printed(body, block.span(3), printed)
        elif title:
            Path(title).write_text(body.replace(ADDRESS, address))
        elif language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(body, page, "exec"), names)
            printed = out.getvalue()
        elif language == "console":
            commands = [line.removeprefix("$ ").partition(" #")[0].strip() for line in body.splitlines()]
            if SERVE in commands:  # from here on a server of the same weights listens at a port of its own
                from server_case import serve

                address = until_the_end.enter_context(serve()).url.removeprefix("http://")
            printed = "".join(_command(command) for command in commands if command not in ELSEWHERE)


def same(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed, but for line ends, borders and rounding.

    A number may differ by a part in 1,000. One such as 8.6e-08 is an error of rounding, which the processor decides:
    any other of the kind stands for it.
    """
    wanted = [_words(part) for part in re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)]
    found = _words(printed)
    if len(wanted) == 1:
        return _equal(wanted[0], found)
    first, *middle, last = wanted
    if not _equal(first, found[: len(first)]):
        return False
    at = len(first)
    for part in middle:
        places = (i for i in range(at, len(found) - len(part) + 1) if _equal(part, found[i : i + len(part)]))
        at = next(places, len(found) + 1) + len(part)
    return at + len(last) <= len(found) and _equal(last, found[len(found) - len(last) :])


def _words(text: str) -> list[str]:
    return [word for word in text.split() if re.search(r"[^─━│┃┏┓┗┛┡┩└┘┴┳╇╋┬┼╭╮╰╯]", word)]


def _equal(wanted: list[str], found: list[str]) -> bool:
    return len(wanted) == len(found) and all(map(_equal_words, wanted, found))


def _equal_words(wanted: str, found: str) -> bool:
    if wanted == found or (_SMALL.fullmatch(wanted) and _SMALL.fullmatch(found)):
        return True
    number = r"-?\d+\.\d+"
    if re.sub(number, "", wanted) != re.sub(number, "", found):
        return False
    pairs = zip(re.findall(number, wanted), re.findall(number, found), strict=True)
    return all(math.isclose(float(a), float(b), rel_tol=1e-3, abs_tol=2e-4) for a, b in pairs)


def _command(line: str) -> str:
    """What one command line of a page prints."""
    program, *words = shlex.split(line)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if program == "python":
            with mock.patch.object(sys, "argv", words):
                runpy.run_path(words[0], run_name="__main__")
            return out.getvalue()
    if program == "shardfuse":
        from typer.testing import CliRunner

        from shardfuse.cli import app

        done = CliRunner(env={"COLUMNS": WIDTH}).invoke(app, words)
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        if done.exit_code != (line in RED):
            raise ValueError(f"{line!r} ended with exit code {done.exit_code}: {done.output}")
        return done.output
    raise ValueError(f"{line!r} is not run here: begin it with python or shardfuse, or name it in the test")


def _write(page: str) -> None:
    """Put what a page's blocks print in the place of what it shows, but where it shows a part."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        outputs = list(run(page))
        os.chdir(FOLDER)
    text = (FOLDER / page).read_text()
    for shown, (start, end), printed in reversed(outputs):
        if "..." not in shown.splitlines():
            lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
            text = text[:start] + "\n".join(lines) + "\n" + text[end:]
    (FOLDER / page).write_text(text)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/support/tutorials.py --write")
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
    for name in PAGES:
        _write(name)
