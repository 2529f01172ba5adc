"""Runs a module of an uninstalled tree: ``python bench/run_in_place.py shardfuse.bench.gpu --out DIR``.

For machines where nothing may be installed. The floors stand at the root of the tree but import as ``shardfuse.*``, so
this links them into one package below ``.types`` (as ``make types`` does for mypy) and starts Python with that on its
path; processes started from there inherit it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("kernels", "parallel", "layers", "training", "serving", "bench")


def link(root: Path = ROOT) -> Path:
    """Make or complete ``.types/shardfuse``; the folder to put on the path."""
    package = root / ".types" / "shardfuse"
    package.mkdir(parents=True, exist_ok=True)
    sources = [path for path in (root / "shardfuse").iterdir() if path.suffix == ".py" or path.name == "py.typed"]
    for source in [*sources, *(root / floor for floor in FLOORS)]:
        target = package / source.name
        if not target.exists():
            target.unlink(missing_ok=True)  # a dangling link
            target.symlink_to(os.path.relpath(source, package))
    return package.parent


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python bench/run_in_place.py MODULE [ARGUMENT ...]")
    path = os.pathsep.join(filter(None, (str(link()), os.environ.get("PYTHONPATH"))))
    os.environ |= {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])


if __name__ == "__main__":
    main()
