"""Two commits' measurements of one benchmark, each commit in a temporary worktree and a process of its own."""

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
from pathlib import Path
from typing import Any

from . import commit_side
from .shift import Shift, balanced_order, compare_times

ROUNDS = 16  # each sample is itself a figure of many calls


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
    """The process of one commit. Its errors are raised here as RuntimeError, with the commit's name."""

    def __init__(self, ref: str, tree: Path, bench: str, device: str | None) -> None:
        self._ref = ref
        command = [sys.executable, commit_side.__file__, bench, *([device] if device else [])]
        environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONSAFEPATH": "1"}
        # A session of its own, so that Ctrl-C reaches it only through ``close``.
        self._process = subprocess.Popen(  # noqa: S603 - this program's own file
            command,
            env=environment,
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            about = self.ask(keys=True)
            if tree.resolve() not in Path(about["package"]).resolve().parents:
                raise RuntimeError(f"commit:{ref} imported {about['package']}, expected a package in its worktree")
        except BaseException:
            self.close()
            raise
        self.keys = [tuple(key) for key in about["keys"]]
        self.device = str(about["device"])

    def ask(self, **request: Any) -> Any:
        """The answer to one request of ``commit_side``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no line to read
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        said = json.loads(line) if line else {"error": "its process ended"}
        if "error" in said:
            raise RuntimeError(f"commit:{self._ref}: {said['error']}")
        return said["answer"]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def compare_commits(
    repository: Path,
    refs: tuple[str, str],
    bench: str,
    *,
    cases: Sequence[str] = (),
    device: str | None = None,
    seed: int = 0,
    rounds: int = ROUNDS,
) -> Iterator[tuple[str, tuple[str, ...], Shift | None, str]]:
    """(device, key, shift, why) of every row that both commits plan; a row that a commit gets wrong has no shift.

    Raises RuntimeError for a commit whose benchmark cannot run, ValueError where the commits share no row.
    """
    with contextlib.ExitStack() as stack:
        sides = []
        for ref in refs:
            side = Side(ref, stack.enter_context(worktree(repository, ref)), bench, device)
            stack.callback(side.close)
            sides.append(side)
        keys = [key for key in sides[0].keys if key in sides[1].keys and (not cases or key[0] in cases)]
        if not keys:
            wanted = f" of {', '.join(cases)}" if cases else ""
            raise ValueError(f"{bench}: the two commits share no row{wanted}")
        for key in keys:
            wrong = [f"commit:{ref}: {each}" for ref, side in zip(refs, sides) for each in side.ask(check=key[0])]
            if wrong:
                yield sides[0].device, key, None, "; ".join(wrong)
                continue
            samples: tuple[list[float], list[float]] = ([], [])
            for order in balanced_order(rounds, random.Random(seed)):  # noqa: S311 - an order, not a secret
                for number in order:
                    samples[number].append(sides[number].ask(time=key))
            yield sides[0].device, key, compare_times(*samples), ""


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # git's subcommands are written out by the callers; Ctrl-C must not interrupt the removal of a worktree.
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)  # noqa: S603
