"""``bench compare commit:A commit:B``, on a small repository whose package says how long its row takes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from shardfuse.bench.harness.commits import compare_commits, worktree

PACKAGE = {
    "__init__.py": "",
    "bench/__init__.py": "",
    "bench/harness/__init__.py": "",
    "bench/harness/benchmark.py": "def Settings(device, seconds): return device\n",
    "bench/harness/runner.py": """
import itertools
from types import SimpleNamespace as Named

jitter = itertools.cycle((0.0, 0.01, 0.003, 0.007)).__next__
row = lambda: (Named(value=MICROSECONDS * (1 + jitter())), None)
rows = [Named(key=("case", "us", "peer"), run=row, higher_is_better=False)]
check = lambda settings, cases: [("case", Named(ok=OK))]
default_device = lambda: "cpu"

def find(name):
    print("what a benchmark prints is no answer")
    if name != "bench":
        raise ValueError(f"no benchmark called {name}")
    return Named(plan=lambda settings: rows, check=check)
""",
}


def _git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tags "before", "after" (half as fast) and "wrong" (its check is red)."""
    folder = tmp_path_factory.mktemp("repository")
    _git(folder, "init", "--quiet")
    for tag, microseconds, ok in (("before", 100, True), ("after", 200, True), ("wrong", 100, False)):
        for name, text in PACKAGE.items():
            file = folder / "src" / "shardfuse" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("MICROSECONDS", str(microseconds)).replace("OK", str(ok)))
        _git(folder, "add", "--all")
        _git(folder, "commit", "--quiet", "--message", tag)
        _git(folder, "tag", tag)
    return folder


def _worktrees(repository: Path) -> int:
    return len(_git(repository, "worktree", "list").splitlines())


@pytest.mark.parametrize(
    ("refs", "verdict"),
    [(("before", "after"), "slower"), (("after", "before"), "faster"), (("before", "before"), "noise")],
    ids=["slower", "faster", "same"],
)
def test_each_commit_runs_its_own_package(repository: Path, refs: tuple[str, str], verdict: str):
    ((device, key, shift, why),) = compare_commits(repository, refs, "bench")
    assert shift is not None
    assert (device, key, shift.verdict, why) == ("cpu", ("case", "us", "peer"), verdict, "")
    assert _worktrees(repository) == 1


def test_a_commit_that_is_wrong_is_not_timed(repository: Path):
    ((_, _, shift, why),) = compare_commits(repository, ("before", "wrong"), "bench")
    assert shift is None
    assert why.startswith("commit:wrong: ")


def test_a_worktree_is_removed_after_an_interruption(repository: Path):
    def interrupted() -> None:
        with worktree(repository, "before") as tree:
            trees.append(tree)
            assert (tree / "src").is_dir()
            raise KeyboardInterrupt

    trees: list[Path] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not trees[0].exists()
    assert _worktrees(repository) == 1


@pytest.mark.parametrize(
    ("refs", "bench", "cases", "message"),
    [
        (("before", "no-such"), "bench", (), "commit:no-such: .* has no such commit"),
        (("before", "after"), "other", (), "commit:before: ValueError: no benchmark called other"),
        (("before", "after"), "bench", ("tiny",), "the two commits share no row of tiny"),
    ],
)
def test_what_cannot_be_compared_says_why_and_leaves_nothing(repository: Path, refs, bench, cases, message: str):
    with pytest.raises((ValueError, RuntimeError), match=message):
        list(compare_commits(repository, refs, bench, cases=cases))
    assert _worktrees(repository) == 1
