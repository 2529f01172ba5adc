"""The end of a command on an error: one line on standard error, and the traceback under SHARDFUSE_DEBUG."""

from __future__ import annotations

import os
import sys
import traceback

from rich.console import Console


def report(error: BaseException) -> int:
    """Print ``error`` as one line, and under SHARDFUSE_DEBUG its traceback and a worker's; return the exit code, 1."""
    if os.environ.get("SHARDFUSE_DEBUG", "0") != "0":
        traceback.print_exception(type(error), error, error.__traceback__)
        print(getattr(error, "trace", ""), file=sys.stderr, end="")
    print(f"error: {_one_line(error)}", file=sys.stderr)
    return 1


def shown(text: object) -> str:
    """``text`` without control characters: a message may quote a file, and they must not reach the terminal."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in str(text))


def restore(console: Console) -> None:
    """Restore the terminal: a killed worker leaves an unfinished progress bar and a hidden cursor."""
    if console.is_terminal:
        console.show_cursor(True)
        console.print()


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    first = shown(lines[0])
    return first if len(lines) == 1 else f"{first} (--debug shows the rest)"
