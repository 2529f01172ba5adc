"""``make release-check``: whether the commit can be released as the version in its pyproject.toml.

Distributions are built from ``git archive HEAD``, so changes that are not committed play no part. Everything is written
below dist/ and .side/release/. The last table shows each check, and what to do where it failed; exit code 1 if any did.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
WORK = ROOT / ".side" / "release"
# https://semver.org, without build metadata, which a package index refuses.
_SEMANTIC = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?")
_UNKNOWN = ("", "UNKNOWN")

_NAMES = """
import importlib.util as util, sys
import shardfuse
assert "torch" not in sys.modules, "import shardfuse imports torch"
present = [name for name in ("transformers", "fastapi", "matplotlib", "pytest") if util.find_spec(name)]
assert not present, f"the environment holds {present}, which no dependency should bring"
from shardfuse import ParallelMLP
early = {"sympy", "triton", "torch.distributed.tensor"} & set(sys.modules)
assert not early, f"ParallelMLP imports {early}"
for name in shardfuse.__all__:
    getattr(shardfuse, name)
"""
_FORWARD = "import torch, shardfuse; assert shardfuse.ParallelMLP(8, 16)(torch.ones(3, 8)).shape == (3, 8)"
_LICENCES = """
import json
from importlib import metadata
print(json.dumps({each.metadata["Name"]: [each.metadata.get("License-Expression"), each.metadata.get("License"),
    *(each.metadata.get_all("Classifier") or [])] for each in metadata.distributions()}))
"""


class Check(NamedTuple):
    name: str
    problem: str | None  # what is wrong; None: it holds
    remedy: str


def version_problem(version: str) -> str | None:
    """Why ``version`` is no semantic version; None if it is one."""
    return None if _SEMANTIC.fullmatch(version) else f"{version!r} is no semantic version"


def changelog_problem(text: str, version: str) -> str | None:
    """Why the changelog ``text`` does not describe ``version``; None if it does."""
    section = re.search(rf"^## \[{re.escape(version)}\].*?$(.*?)(?=^## |\Z)", text, re.M | re.S)
    if section is None:
        return f"CHANGELOG.md has no section [{version}]"
    lines = [line for line in section[1].splitlines() if line.strip() and not line.startswith("#")]
    return None if lines else f"the section [{version}] of CHANGELOG.md is empty"


def tag_problem(tagged: str | None, head: str) -> str | None:
    """Why a tag on the commit ``tagged`` is in the way of releasing ``head``; None for no tag, or one on ``head``."""
    return None if tagged in (None, head) else f"the tag is on {tagged[:12]}, HEAD is {head[:12]}"  # type: ignore[index]


def contents_problem(wheel: Path, rebuilt: Path) -> str | None:
    """The first file in which two wheels differ; None if their names and bytes are equal."""
    ours, theirs = _contents(wheel), _contents(rebuilt)
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            where = "missing from the sdist" if name not in theirs else "not the same from the sdist"
            return f"{name} is {where}"
    return None


def _contents(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {each.filename: each.CRC for each in archive.infolist()}


def licence(facts: list[str | None]) -> str | None:
    """A distribution's licence from its metadata [License-Expression, License, *classifiers]; None if unknown."""
    expression, text, *classifiers = facts
    named = [each.rpartition(":: ")[2] for each in classifiers if each and each.startswith("License :: ")]
    first = (text or "").strip().partition("\n")[0]
    found = expression or " / ".join(named) or first
    return None if found.strip().upper() in _UNKNOWN else found


def licence_problem(found: Mapping[str, str | None]) -> str | None:
    unknown = sorted(name for name, each in found.items() if each is None)
    return f"no licence in the metadata of {', '.join(unknown)}" if unknown else None


def _run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Standard output; RuntimeError with the last line of the error output if the command fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no output"]
        raise RuntimeError(f"{Path(command[0]).name}: {said[-1]}")
    return done.stdout


def _problem(work: Callable[[], object]) -> str | None:
    try:
        work()
    except RuntimeError as error:
        return str(error)
    return None


def _tagged(tag: str) -> str | None:
    return _run("git", "rev-list", "-n1", tag).strip() if _run("git", "tag", "--list", tag).strip() else None


def _build() -> tuple[Path, Path, Path]:
    """The sdist and the wheel, both from the commit, and the wheel that the sdist gives."""
    for folder in (DIST, WORK):
        shutil.rmtree(folder, ignore_errors=True)
    tree = WORK / "tree"
    tree.mkdir(parents=True)
    _run("git", "archive", "-o", WORK / "tree.tar", "HEAD")
    _run("tar", "-xf", WORK / "tree.tar", "-C", tree)
    build = (sys.executable, "-m", "build", "--no-isolation")
    _run(*build, "--wheel", "--outdir", DIST, tree)
    for left in (tree / "build", *tree.glob("src/*.egg-info")):  # an sdist also holds what an egg-info lists
        shutil.rmtree(left, ignore_errors=True)
    _run(*build, "--sdist", "--outdir", DIST, tree)
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    _run(*pip, "--wheel-dir", WORK / "rebuilt", sdist, cwd=WORK)
    (rebuilt,) = (WORK / "rebuilt").glob("*.whl")
    return sdist, wheel, rebuilt


def _environment(name: str, *requirements: str | Path) -> Path:
    """The Python of a new environment that holds ``requirements`` and their dependencies."""
    folder = WORK / name
    _run(sys.executable, "-m", "venv", folder)
    _run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", *requirements)
    return folder / "bin" / "python"


def check(console: Console, *, unreleased: bool = False) -> list[Check]:
    """All checks, in order; RuntimeError where a build or an installation fails.

    ``unreleased``: of a commit between two releases, whose changes may stand below [Unreleased], after the tag.
    """
    project = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    version = project[1] if project else ""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    described = changelog_problem(changelog, version)
    if described and unreleased:
        described = changelog_problem(changelog, "Unreleased")
    checks = [
        Check("semantic version", version_problem(version), "correct version in pyproject.toml"),
        Check("changelog", described, f"give [Unreleased] the title [{version}]"),
    ]
    if not unreleased:
        tag = tag_problem(_tagged(f"v{version}"), _run("git", "rev-parse", "HEAD").strip())
        checks.append(Check(f"tag v{version}", tag, "raise the version; a published tag never moves"))
    console.print("building, and installing torch into an empty environment: some minutes")
    sdist, wheel, rebuilt = _build()
    twine = _environment("twine", "twine")
    python = _environment("wheel", wheel, "torch==2.13.0")
    command = python.parent / "shardfuse"
    read: dict[str, list[str | None]] = json.loads(_run(python, "-c", _LICENCES, cwd=WORK))
    found = {name: licence(facts) for name, facts in read.items()}
    for name in sorted(found, key=str.lower):
        console.print(f"  {name}: {found[name] or 'unknown'}", markup=False)
    metadata = _problem(lambda: _run(twine, "-m", "twine", "check", "--strict", sdist, wheel))
    return [
        *checks,
        Check("metadata", metadata, "correct pyproject.toml or README.md"),
        Check("sdist", contents_problem(wheel, rebuilt), "add the file to package-data or MANIFEST.in"),
        Check("names and imports", _problem(lambda: _run(python, "-c", _NAMES, cwd=WORK)), "see the message"),
        Check("forward", _problem(lambda: _run(python, "-c", _FORWARD, cwd=WORK)), "see the message"),
        Check("shardfuse --help", _problem(lambda: _run(command, "--help", cwd=WORK)), "see the message"),
        Check("shardfuse env", _problem(lambda: _run(command, "env", cwd=WORK)), "see the message"),
        Check("licences", licence_problem(found), "find the licence, or leave the dependency out"),
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--unreleased", action="store_true", help="between two releases: the changes may be [Unreleased]"
    )
    options = parser.parse_args(arguments)
    console = Console()
    try:
        checks = check(console, unreleased=options.unreleased)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table("check", "result", "what to do")
    for each in checks:
        table.add_row(
            each.name, "FAILED" if each.problem else "ok", f"{each.problem}: {each.remedy}" if each.problem else ""
        )
    console.print(table)
    return int(any(each.problem for each in checks))


if __name__ == "__main__":
    raise SystemExit(main())
