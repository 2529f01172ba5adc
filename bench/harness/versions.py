"""Measures one benchmark in two versions of this package, each version in a process of its own.

A version is a commit (in a temporary worktree), a folder with a checkout, a release of the package index, or a wheel or
sdist on disk (``installed.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import installed, version_side
from .shift import Shift, balanced_order, compare_times

ROUNDS = 16  # each sample is a figure from many calls
PREFIXES = ("commit:", "tree:", "release:", "wheel:")
EXPECTED = "commit:REF, tree:FOLDER, release:NUMBER or wheel:FILE"


@dataclass(frozen=True)
class Version:
    """One side of the comparison: ``text`` as the user gave it ("release:0.1.0"), the ``number`` that it stands for
    ("0.1.0", a commit's hash), and the folder at ``path`` that holds the package ``shardfuse``.
    """

    text: str
    number: str
    path: Path


@dataclass(frozen=True)
class Measured:
    """The device's name, the versions' numbers, and (key, shift, why) of every row that both versions plan.

    A row that fails the check in a version has no shift, and ``why`` says so.
    """

    device: str
    numbers: tuple[str, str]
    rows: list[tuple[tuple[str, ...], Shift | None, str]]


@contextlib.contextmanager
def version(repository: Path, text: str) -> Iterator[Version]:
    """The version that ``text`` names; a commit's worktree lasts as long as the context.

    Raises ValueError if no version has that name, RuntimeError if it cannot be checked out or installed.
    """
    prefix, _, name = text.partition(":")
    if prefix == "commit":
        with worktree(repository, name) as tree:
            yield Version(text, _commit(tree), tree / "src")
    elif prefix == "tree":
        path = Path(name).absolute() / "src"
        if not (path / installed.PACKAGE / "__init__.py").is_file():
            raise ValueError(f"{text}: there is no {path / installed.PACKAGE}; name the folder of a checkout")
        yield Version(text, _commit(path), path)
    else:
        path, number = installed.release(name) if prefix == "release" else installed.wheel(Path(name))
        yield Version(text, number, path)


@contextlib.contextmanager
def worktree(repository: Path, ref: str) -> Iterator[Path]:
    """A temporary worktree of ``repository`` at ``ref``, removed at the end, also after Ctrl-C.

    Raises ValueError if ``ref`` names no commit.
    """
    found = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    if found.returncode:
        raise ValueError(f"commit:{ref}: {repository} has no such commit; expected a branch, a tag or a hash")
    with tempfile.TemporaryDirectory(prefix="shardfuse-commit-") as folder:
        tree = Path(folder) / "tree"
        try:
            made = _git(repository, "worktree", "add", "--detach", "--quiet", str(tree), found.stdout.strip())
            if made.returncode:
                raise RuntimeError(f"commit:{ref}: git could not make a worktree: {made.stderr.strip()}")
            yield tree
        finally:
            _git(repository, "worktree", "remove", "--force", str(tree))
            _git(repository, "worktree", "prune")


class Side:
    """The process of one version. Its errors are raised here as RuntimeError, with the version's name."""

    def __init__(self, version: Version, bench: str, device: str | None) -> None:
        self._text = version.text
        command = [sys.executable, version_side.__file__, bench, *([device] if device else [])]
        environment = os.environ | {"PYTHONPATH": str(version.path), "PYTHONSAFEPATH": "1"}
        # A session of its own, so that Ctrl-C reaches it only through ``close``.
        self._process = subprocess.Popen(  # noqa: S603 - this program's own file
            command,
            env=environment,
            cwd=version.path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            about = self.ask(keys=True)
            if version.path.resolve() not in Path(about["package"]).resolve().parents:
                raise RuntimeError(f"{version.text} imported {about['package']}, expected a package in {version.path}")
        except BaseException:
            self.close()
            raise
        self.keys = [tuple(key) for key in about["keys"]]
        self.device = str(about["device"])

    def ask(self, **request: Any) -> Any:
        """The answer to one request of ``version_side``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no line to read
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        said = json.loads(line) if line else {"error": "its process ended"}
        if "error" in said:
            raise RuntimeError(f"{self._text}: {said['error']}")
        return said["answer"]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def compare_versions(
    repository: Path,
    texts: tuple[str, str],
    bench: str,
    *,
    cases: Sequence[str] = (),
    device: str | None = None,
    seed: int = 0,
    rounds: int = ROUNDS,
) -> Measured:
    """Check and time every row of ``bench`` that both versions plan; ``repository`` has the commits.

    Raises RuntimeError for a version whose benchmark cannot run, ValueError if the versions share no row.
    """
    with contextlib.ExitStack() as stack:
        versions = [stack.enter_context(version(repository, text)) for text in texts]
        sides = []
        for each in versions:
            side = Side(each, bench, device)
            stack.callback(side.close)
            sides.append(side)
        keys = [key for key in sides[0].keys if key in sides[1].keys and (not cases or key[0] in cases)]
        if not keys:
            wanted = f" of {', '.join(cases)}" if cases else ""
            raise ValueError(f"{bench}: the two versions share no row{wanted}")
        rows: list[tuple[tuple[str, ...], Shift | None, str]] = []
        for key in keys:
            wrong = [f"{text}: {each}" for text, side in zip(texts, sides) for each in side.ask(check=key[0])]
            if wrong:
                rows.append((key, None, "; ".join(wrong)))
                continue
            samples: tuple[list[float], list[float]] = ([], [])
            for order in balanced_order(rounds, random.Random(seed)):  # noqa: S311 - an order, not a secret
                for number in order:
                    samples[number].append(sides[number].ask(time=key))
            rows.append((key, compare_times(*samples), ""))
        first, second = (each.number for each in versions)
        return Measured(sides[0].device, (first, second), rows)


def _commit(folder: Path) -> str:
    """The commit of the checkout that holds ``folder``; "no commit" outside of a repository."""
    found = _git(folder, "rev-parse", "--short=12", "HEAD")
    if found.returncode:
        return "no commit"
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no").stdout.strip()
    return f"{found.stdout.strip()}{' with changes' if changed else ''}"


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # The callers write out git's subcommands. Ctrl-C must not interrupt the removal of a worktree, hence the session.
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)  # noqa: S603
