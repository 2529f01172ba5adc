"""The sdist and the wheel hold every module, and work where there is no checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from shardfuse.kernels import dispatch

ROOT = Path(__file__).parent.parent
FLOORS = ("kernels", "parallel", "layers", "training", "serving", "bench")

_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]

pytestmark = pytest.mark.packaging

_IMPORT_ALL = """
import importlib, json, sys
from pathlib import Path
site = Path(sys.argv[1])
for name in json.loads(sys.argv[2]):
    module = importlib.import_module(name)
    assert site in Path(module.__file__).parents, f"{name} came from {module.__file__}"
"""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that what an earlier build left in the tree plays no part."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in (*FLOORS, "shardfuse"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    (tree / "kernels" / "tuned" / "planted.json").write_text("{}")
    out = tmp_path_factory.mktemp("sdist")
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    _run([sys.executable, "-c", build, str(out)], cwd=tree)
    (archive,) = out.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    _run(
        [*_PIP, "wheel", "--no-index", "--no-build-isolation", "--no-deps", "--wheel-dir", str(out), str(sdist)],
        cwd=out,
    )
    (archive,) = out.glob("*.whl")
    return archive


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    _run([*_PIP, "install", "--no-index", "--no-deps", "--target", str(folder), str(wheel)], cwd=folder)
    return folder


def test_sdist_holds_the_licence_and_the_build(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names


def test_wheel_holds_every_module_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name for name in names if name.endswith(".py")} == set(_module_files())
    assert "shardfuse/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"shardfuse"}


def test_wheel_holds_the_tables_of_measured_configurations(wheel):
    with zipfile.ZipFile(wheel) as archive:
        tables = {name for name in archive.namelist() if name.endswith(".json")}
    folders = ("kernels/tuned", "parallel/profiles")
    shipped = {f"shardfuse/{folder}/{file.name}" for folder in folders for file in (ROOT / folder).glob("*.json")}
    assert tables == shipped | {"shardfuse/kernels/tuned/planted.json"}


def test_every_module_imports_without_the_checkout(site, tmp_path):
    if dispatch.triton_version() is None:
        pytest.skip("the kernels' modules import Triton, which is not installed")
    modules = [_module_name(file) for file in _module_files() if not file.endswith("__main__.py")]
    _run([sys.executable, "-c", _IMPORT_ALL, str(site), json.dumps(modules)], cwd=tmp_path, path=site)


def test_the_console_script_is_installed(site, tmp_path):
    out = _run([sys.executable, str(site / "bin" / "shardfuse"), "--version"], cwd=tmp_path, path=site)
    assert out.startswith("shardfuse 0.")


def _module_files() -> list[str]:
    """Every module of the tree, by its path in the wheel."""
    files = [f"shardfuse/{file.relative_to(ROOT / 'shardfuse')}" for file in (ROOT / "shardfuse").rglob("*.py")]
    for floor in FLOORS:
        files += [f"shardfuse/{file.relative_to(ROOT)}" for file in (ROOT / floor).rglob("*.py")]
    return sorted(files)


def _module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _run(command: list[str], *, cwd: Path, path: Path | None = None) -> str:
    """Standard output of ``command``; ``path`` goes before everything installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout
