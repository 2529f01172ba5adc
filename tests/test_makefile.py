"""The Makefile's recipes, with a Python that writes down how it was called."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).resolve().parent.parent / "Makefile"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["test-rest", "job-interpret-2", "install"])
def test_a_checkout_may_have_a_space_in_its_path(tmp_path: Path, target: str):
    checkout = tmp_path / "with space"
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$SHARDFUSE_SIDE_TRITON" >> seen\n')
    python.chmod(0o755)
    shutil.copy(MAKEFILE, checkout)
    for name in ("pyproject.toml", "setup.py", "constraints.txt"):
        (checkout / name).touch()
    if target != "install":  # there is nothing to install then
        (checkout / ".venv" / ".installed").touch()
    side = checkout / ".side" / "triton-3.6.0"
    side.mkdir(parents=True)
    (side / ".installed").touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "SHARDFUSE"))}
    subprocess.run(["make", target, f"PYTHON={python}"], cwd=checkout, env=environment, check=True, timeout=60)
    seen = set((checkout / "seen").read_text().splitlines())
    assert seen == ({str(side)} if target != "install" else {""})
