"""``python -m shardfuse.integrations.hub OUT``: the command behind ``make hub-kernel``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from . import build


def main(out: Annotated[Path, typer.Argument(help="the folder that gets build/torch-universal")]) -> None:
    """Build a universal kernel for Hugging Face's kernels library, and say what it holds."""
    try:
        built = build.build()
        folder = build.write(built, out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(built)
    print(f"in {folder}")


if __name__ == "__main__":
    typer.run(main)
