"""Releases and built packages that ``bench compare`` measures: pip installs each once, without its dependencies.

A version shares torch and Triton with this process, so only the package itself is installed, below
``$XDG_CACHE_HOME/shardfuse/versions`` (``~/.cache`` without the variable). A release has a folder named by its number,
a file on disk one named by its SHA-256. pip installs into a temporary folder beside it, which is renamed when it is
complete.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from ...parallel.checkpoint import storage

PACKAGE = "shardfuse"
SUFFIXES = (".whl", ".tar.gz", ".zip")
_RELEASE = re.compile(r"[0-9][0-9A-Za-z.!+_-]*")
_BUILD = "pass a wheel of it as wheel:PATH"
_REBUILD = "build it again (make wheel), or name another file"
_UNREACHABLE = re.compile("connection broken|Could not fetch URL|Network is unreachable|name resolution")


def release(number: str) -> tuple[Path, str]:
    """The folder that holds the release ``number`` of the package index, and its version.

    Raises ValueError for a text that is no version, RuntimeError if pip cannot install it.
    """
    text = f"release:{number}"
    if not _RELEASE.fullmatch(number):
        raise ValueError(f"{text}: expected the number of a release, such as release:0.1.0")
    return _installed(f"release-{number}", [f"{PACKAGE}=={number}"], text, _BUILD)


def wheel(path: Path) -> tuple[Path, str]:
    """The folder that holds the wheel or sdist at ``path``, installed, and its version.

    An sdist is built with this environment's setuptools, if it has one. Raises ValueError for a file that is missing
    or of another kind, RuntimeError if pip cannot install it.
    """
    text = f"wheel:{path}"
    if not path.is_file():
        raise ValueError(f"{text}: there is no such file; name a wheel or an sdist, such as make wheel leaves in dist/")
    if not path.name.endswith(SUFFIXES):
        raise ValueError(f"{text}: expected a wheel or an sdist, a file that ends in {', '.join(SUFFIXES)}")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    offline = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
    return _installed(f"file-{digest}", [*offline, str(path.absolute())], text, _REBUILD)


def cache() -> Path:
    """The folder of all installed versions."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / PACKAGE / "versions"


def _installed(name: str, requirement: Sequence[str], text: str, remedy: str) -> tuple[Path, str]:
    target = cache() / name
    if not target.is_dir():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            storage.tidy(target)  # what a killed process left
            folder, lock = storage.beside(target)
        except OSError as error:
            raise RuntimeError(
                f"{text}: cannot be installed below {target.parent} ({error.strerror or error}); set XDG_CACHE_HOME to "
                "another folder"
            ) from None
        try:
            _install(folder, requirement, text, remedy)
            _version(folder, text, remedy)
            _rename(folder, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    return target, _version(target, text, remedy)


def _rename(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():  # else another process installed the same version meanwhile
            raise


def _install(folder: Path, requirement: Sequence[str], text: str, remedy: str) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command = [*pip, "--no-deps", "--target", str(folder), *requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - what the user names
    if done.returncode:
        raise RuntimeError(f"{text}: {_why(done.stderr or done.stdout, remedy)}")


def _why(said: str, remedy: str) -> str:
    """pip's error output as one line with a remedy."""
    if "No module named pip" in said:
        return f"{sys.executable} has no pip to install it with; run {sys.executable} -m ensurepip"
    listed = re.search(r"\(from versions: (.*)\)", said)
    offered = "" if listed is None or listed[1] == "none" else listed[1]
    if offered:
        return f"the package index has {offered} for this Python; name one of these, or {remedy}"
    if _UNREACHABLE.search(said):
        return f"pip cannot reach the package index; check the network and pip's index-url, or {remedy}"
    if listed is not None:
        return f"the package index has no {PACKAGE} for this Python; check pip's index-url, or {remedy}"
    lines = [" ".join(line.split()) for line in said.splitlines() if line.strip()] or ["it gave no reason"]
    errors = [line for line in lines if line.lower().startswith("error:")]
    return f"pip could not install it ({(errors or lines)[-1]}); {remedy}"


def _version(folder: Path, text: str, remedy: str) -> str:
    """The version that ``folder`` holds; RuntimeError if it holds another package."""
    versions = {each.metadata["Name"]: each.version for each in metadata.distributions(path=[str(folder)])}
    if PACKAGE not in versions or not (folder / PACKAGE / "__init__.py").is_file():
        held = ", ".join(versions) or "nothing"
        raise RuntimeError(f"{text}: holds {held}, expected the package {PACKAGE}; {remedy}")
    return versions[PACKAGE]
