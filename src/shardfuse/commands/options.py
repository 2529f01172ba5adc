"""The options that every command takes, or most of them."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def _set_debug(wanted: bool) -> None:
    if wanted:
        os.environ["SHARDFUSE_DEBUG"] = "1"  # worker processes inherit it


# The callback does the work. Every command takes the option and ignores it, so that it may stand anywhere in a line.
Debug = Annotated[
    bool, typer.Option("--debug", callback=_set_debug, help="Show tracebacks, as SHARDFUSE_DEBUG=1 does.")
]
Json = Annotated[bool, typer.Option("--json", help="End standard output with one line of JSON.")]
