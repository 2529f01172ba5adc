"""The Makefile's recipes, with a Python that writes down how it was called."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).resolve().parents[2] / "Makefile"


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def _checkout(folder: Path, script: str) -> tuple[Path, dict[str, str]]:
    """A checkout in ``folder`` whose Python runs ``script`` of the shell; it and an environment without make's."""
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    shutil.copy(MAKEFILE, folder)
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    side = folder / ".side" / "triton-3.6.0"
    side.mkdir(parents=True)
    for installed in (folder / ".venv", side):
        (installed / ".installed").touch()
    return python, {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "SHARDFUSE"))}


@needs_make
@pytest.mark.parametrize("target", ["test-rest", "install"])
def test_a_checkout_may_have_a_space_in_its_path(tmp_path: Path, target: str):
    checkout = tmp_path / "with space"
    python, environment = _checkout(checkout, 'printf "%s\\n" "$SHARDFUSE_SIDE_TRITON" >> seen')
    if target == "install":
        (checkout / ".venv" / ".installed").unlink()
    subprocess.run(["make", target, f"PYTHON={python}"], cwd=checkout, env=environment, check=True, timeout=60)
    seen = set((checkout / "seen").read_text().splitlines())
    assert seen == ({str(checkout / ".side" / "triton-3.6.0")} if target != "install" else {""})


@needs_make
def test_what_failed_is_named_again_at_the_end(tmp_path: Path):
    """Also where pytest did not come to name it; every job runs all the same."""
    ranks = '*"ranks and not"*) echo "FAILED tests/a.py::b"; exit 1;;'
    failing = f'case "$*" in {ranks} *"--part 3/4"*) echo gone; exit 139;; esac'
    _, environment = _checkout(tmp_path, failing)
    done = subprocess.run(
        ["make", "test", "CHECKS="], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stdout + done.stderr
    table, *ends = done.stdout.split("lanes:\n")[1].split("failed in ")
    results = {line.split()[0]: line.split()[-1] for line in table.splitlines()}
    assert {name for name, result in results.items() if result == "FAILED"} == {"ranks", "interpret-3", "together"}
    assert {"rest", "codegen-2", "demo"} < results.keys()
    assert {tuple(end.splitlines()[:2]) for end in ends} == {
        ("ranks:", "FAILED tests/a.py::b"),
        ("interpret-3:", "gone"),
    }


def test_lint_sees_every_module():
    """The links below src/ show files that stand elsewhere: leaving those out must leave out nothing else."""
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if ruff is None:
        pytest.skip("needs ruff")
    root = MAKEFILE.parent
    done = subprocess.run([ruff, "check", "--show-files"], cwd=root, capture_output=True, text=True, check=True)
    seen = {str(Path(line).relative_to(root)) for line in done.stdout.splitlines() if line.endswith(".py")}
    face = root / "src" / "shardfuse"
    modules = [path for folder in (face, face / "commands", face / "testing") for path in folder.glob("*.py")]
    modules += [path for floor in ("kernels", "parallel", "layers", "tests") for path in (root / floor).rglob("*.py")]
    assert {str(path.relative_to(root)) for path in modules} <= seen
