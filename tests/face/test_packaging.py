"""The sdist and the wheel hold every module and work without a checkout; type checkers see what users import."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from shardfuse.kernels.runtime import dispatch

ROOT = Path(__file__).parents[2]
FLOORS = ("kernels", "parallel", "layers", "training", "serving", "integrations", "bench")

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
    _copy_checkout(tree)
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
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


def test_wheel_holds_every_module_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name for name in names if name.endswith(".py")} == set(_module_files())
    assert "shardfuse/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"shardfuse"}


def test_wheel_holds_the_tables_that_its_modules_read(wheel):
    with zipfile.ZipFile(wheel) as archive:
        tables = {name for name in archive.namelist() if name.endswith((".csv", ".json"))}
    folders = ("kernels/tuned", "parallel/overlap/profiles", "parallel/plan")
    files = [file for folder in folders for kind in ("csv", "json") for file in (ROOT / folder).glob(f"*.{kind}")]
    shipped = {f"shardfuse/{file.relative_to(ROOT)}" for file in files}
    assert tables == shipped | {"shardfuse/kernels/tuned/planted.json"}


# What imports a server that is not installed here; vLLM's lane imports its own.
WITH_A_HOST = {
    f"shardfuse.integrations.{name}" for name in ("vllm.backend", "vllm.refusal", "sglang.backend", "sglang.checks")
}


def test_every_module_imports_without_the_checkout(site, tmp_path):
    if dispatch.triton_version() is None:
        pytest.skip("the kernels' modules import Triton, which is not installed")
    modules = {_module_name(file) for file in _module_files() if not file.endswith("__main__.py")}
    assert modules > WITH_A_HOST
    modules = sorted(modules - WITH_A_HOST)
    _run([sys.executable, "-c", _IMPORT_ALL, str(site), json.dumps(modules)], cwd=tmp_path, path=site)


def test_the_console_script_is_installed(site, tmp_path):
    out = _run([sys.executable, str(site / "bin" / "shardfuse"), "--version"], cwd=tmp_path, path=site)
    assert out.startswith("shardfuse 0.")


# --- what a user's type checker makes of it ---------------------------------------------------------------------------

_DOWNSTREAM = """
import shardfuse as sf
from typing_extensions import Unpack


def wrapper(width: int, **options: Unpack[sf.LayerKwargs]) -> sf.ParallelMLP:
    return sf.ParallelMLP(width, 4 * width, **options)


mlp = sf.ParallelMLP(16, 32, activation="gelu_tanh", {option}=True)
wrapped = wrapper(16, sequence_parallel=True)
out = sf.linear_act(mlp.c_fc.weight, mlp.c_fc.weight, {argument}="gelu_tanh")
model = sf.parallelize(sf.ParallelTransformer(sf.TransformerConfig(num_layers=2)), None)
sf.save_checkpoint("folder", mlp)
"""


@pytest.mark.nightly
def test_a_type_checker_sees_an_editable_install(tmp_path):
    """The one that README shows: a path file that names src/."""
    tree = tmp_path / "tree"
    tree.mkdir()
    _copy_checkout(tree)
    into = tmp_path / "site"
    wheel_of = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    _run([sys.executable, "-c", wheel_of, str(tmp_path)], cwd=tree)
    (archive,) = tmp_path.glob("*.whl")
    _run([*_PIP, "install", "--no-index", "--no-deps", "--target", str(into), str(archive)], cwd=tmp_path)
    (path_file,) = into.glob("*.pth")
    assert path_file.read_text().strip() == str(tree / "src")
    _check_downstream(tmp_path, tree / "src")


def test_tracebacks_name_the_real_file(tmp_path):
    """In a checkout, whose floors are reached through links."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    code = "import shardfuse; shardfuse.linear_act(None, None)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert f'"{ROOT / "kernels" / "linear" / "op.py"}"' in done.stderr


def test_a_type_checker_sees_the_wheel(site, tmp_path):
    _check_downstream(tmp_path, site)


def _check_downstream(folder: Path, package: Path) -> None:
    """mypy and basedpyright resolve every public name of ``package`` and find a misspelt argument or option, and only
    that."""
    config = {"extraPaths": [str(package)], "pythonVersion": "3.10", "typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    (folder / "mypy.ini").write_text(
        "[mypy]\nignore_missing_imports = true\n[mypy-torch.*,triton.*]\nfollow_imports = skip\n"
    )
    checkers = {
        "mypy": ["mypy", "--follow-imports=silent", "--cache-dir", str(folder / "cache")],
        "basedpyright": ["basedpyright", "--level", "error"],
    }
    wrong = {}  # by file: the misspelt word, if any
    for argument, option, misspelt in (
        ("activation", "sequence_parallel", None),
        ("activatoin", "sequence_parallel", "activatoin"),
        ("activation", "sequence_paralel", "sequence_paralel"),
    ):
        name = f"downstream_{argument}_{option}.py"
        (folder / name).write_text(_DOWNSTREAM.format(argument=argument, option=option))
        wrong[name] = misspelt
    for name, command in checkers.items():
        done = subprocess.run(
            [sys.executable, "-m", *command, *wrong],
            cwd=folder,
            env={**os.environ, "MYPYPATH": str(package)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 1, f"{name}: {done.stdout}{done.stderr}"
        _, *errors = re.split(r"^(?=.* error: )", done.stdout, flags=re.MULTILINE)
        of_file = {file: [error for error in errors if file in error.splitlines()[0]] for file in wrong}
        assert sum(map(len, of_file.values())) == len(errors), done.stdout
        for file, misspelt in wrong.items():
            assert bool(of_file[file]) is (misspelt is not None), done.stdout
            if misspelt is not None:
                said = "".join(of_file[file])
                assert misspelt in said or "No overload" in said, done.stdout


def test_a_checkout_without_links_says_so(tmp_path):
    """As git makes one with core.symlinks=false: each link is a file that names its target."""
    face = tmp_path / "src" / "shardfuse"
    shutil.copytree(ROOT / "src" / "shardfuse", face, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for link in [entry for entry in face.iterdir() if entry.is_symlink()]:
        target = os.readlink(link)
        link.unlink()
        link.write_text(target)
    environment = {**os.environ, "PYTHONPATH": str(face.parent)}
    done = subprocess.run(
        [sys.executable, "-c", "import shardfuse"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "core.symlinks" in done.stderr.splitlines()[-1]


# --- helpers ----------------------------------------------------------------------------------------------------------


def _module_files() -> list[str]:
    """Every module of the tree, by its path in the wheel."""
    face = ROOT / "src" / "shardfuse"
    files = [
        file.relative_to(face) for folder in (face, face / "commands", face / "testing") for file in folder.glob("*.py")
    ]
    files += [file.relative_to(ROOT) for floor in FLOORS for file in (ROOT / floor).rglob("*.py")]
    return sorted(f"shardfuse/{file}" for file in files)


def _copy_checkout(to: Path) -> None:
    """What a build needs, links as links, without what an earlier build left."""
    for folder in (*FLOORS, "src"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, to / folder, symlinks=True, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, to)


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
