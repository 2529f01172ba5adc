"""The options that every command takes, or most of them."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def _set_debug(wanted: bool) -> None:
    if wanted:
        os.environ["SHARDFUSE_DEBUG"] = "1"  # worker processes inherit it


# Its callback does the work; the commands take the option, and ignore it, so that it may stand anywhere on the line.
Debug = Annotated[
    bool, typer.Option("--debug", callback=_set_debug, help="Show tracebacks, as SHARDFUSE_DEBUG=1 does.")
]
Json = Annotated[bool, typer.Option("--json", help="End standard output with one line of JSON.")]
