"""``bench compare`` of versions: commits, checkouts, releases and wheels, of a package that says what its row takes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shardfuse.bench.harness import installed
from shardfuse.bench.harness.compare import Options, compare
from shardfuse.bench.harness.versions import compare_versions, worktree

ROOT = Path(__file__).parents[2]

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


def _package(microseconds: int, ok: bool = True) -> dict[str, str]:
    """The files of a package whose row takes so long, and whose check says ``ok``."""
    return {
        name: text.replace("MICROSECONDS", str(microseconds)).replace("OK", str(ok)) for name, text in PACKAGE.items()
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
        for name, text in _package(microseconds, ok).items():
            file = folder / "src" / "shardfuse" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        _git(folder, "add", "--all")
        _git(folder, "commit", "--quiet", "--message", tag)
        _git(folder, "tag", tag)
    return folder


def _worktrees(repository: Path) -> int:
    return len(_git(repository, "worktree", "list").splitlines())


@pytest.mark.parametrize(
    ("texts", "verdict"),
    [
        (("commit:before", "commit:after"), "slower"),
        (("commit:after", "commit:before"), "faster"),
        (("commit:before", "commit:before"), "noise"),
        (("tree:{repository}", "commit:after"), "slower"),  # checked out there: "wrong", made right below
    ],
    ids=["slower", "faster", "same", "changed"],
)
def test_each_version_runs_its_own_package(repository: Path, texts: tuple[str, str], verdict: str):
    runner = repository / "src" / "shardfuse" / "bench" / "harness" / "runner.py"
    before = runner.read_text()
    runner.write_text(_package(100)["bench/harness/runner.py"])
    try:
        a, b = (text.format(repository=repository) for text in texts)
        found = compare_versions(repository, (a, b), "bench")
    finally:
        runner.write_text(before)
    ((key, shift, why),) = found.rows
    assert shift is not None
    assert (found.device, key, shift.verdict, why) == ("cpu", ("case", "us", "peer"), verdict, "")
    for text, number in zip(texts, found.numbers):
        hash_ = _git(repository, "rev-parse", "--short=12", "HEAD" if "tree" in text else text.removeprefix("commit:"))
        assert number == hash_.strip() + (" with changes" if "tree" in text else "")
    assert _worktrees(repository) == 1


def test_a_commit_that_is_wrong_is_not_timed(repository: Path):
    ((_, shift, why),) = compare_versions(repository, ("commit:before", "commit:wrong"), "bench").rows
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
    ("texts", "bench", "cases", "message"),
    [
        (("commit:before", "commit:no-such"), "bench", (), "commit:no-such: .* has no such commit"),
        (("commit:before", "tree:no-such"), "bench", (), "tree:no-such: there is no .*; name the folder of a checkout"),
        (("commit:before", "commit:after"), "other", (), "commit:before: ValueError: no benchmark called other"),
        (("commit:before", "commit:after"), "bench", ("tiny",), "the two versions share no row of tiny"),
    ],
)
def test_what_cannot_be_compared_says_why_and_leaves_nothing(repository: Path, texts, bench, cases, message: str):
    with pytest.raises((ValueError, RuntimeError), match=message):
        compare_versions(repository, texts, bench, cases=cases)
    assert _worktrees(repository) == 1


# --- releases and wheels ----------------------------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, pip's only index, with the releases 1.0 and 2.0 (half as fast); the cache is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number, microseconds in (("1.0", 100), ("2.0", 200)):
        _wheel(folder, "shardfuse", number, _package(microseconds))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
    for name, value in (settings | {"XDG_CACHE_HOME": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    return folder


def _wheel(folder: Path, package: str, number: str, files: dict[str, str]) -> Path:
    info = f"{package}-{number}.dist-info"
    contents = {f"{package}/{name}": text for name, text in files.items()}
    contents[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n"
    contents[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    contents[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*contents, f"{info}/RECORD"])
    path = folder / f"{package}-{number}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in contents.items():
            archive.writestr(name, text)
    return path


def _kept() -> list[str]:
    return sorted(os.listdir(installed.cache())) if installed.cache().exists() else []


def test_a_release_and_a_wheel_are_installed_once(index: Path, capsys: pytest.CaptureFixture[str]):
    leftover = installed.cache() / ".release-1.0.writing-dead"  # of a process that was killed
    leftover.mkdir(parents=True)
    texts = ("release:1.0", f"wheel:{index / 'shardfuse-2.0-py3-none-any.whl'}")
    assert compare(*texts, Options(bench="bench", fail_on_regression=True), json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["versions"], [row["verdict"] for row in found["rows"]]) == (["1.0", "2.0"], ["slower"])
    file, release = _kept()
    assert file.startswith("file-")
    assert release == "release-1.0"
    (index / "shardfuse-1.0-py3-none-any.whl").unlink()  # what is installed is not looked up again
    assert compare("release:1.0", "release:1.0", Options(bench="bench")) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "release:1.0 (1.0) against release:1.0 (1.0) on cpu" in out
    assert "noise" in out
    assert _kept() == [file, release]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("release:3.0", "release:3.0: the package index has 1.0, 2.0 for this Python; name one of these"),
        ("release:latest", "release:latest: expected the number of a release"),
        ("wheel:missing.whl", "wheel:missing.whl: there is no such file"),
        ("wheel:text", "wheel:text: expected a wheel or an sdist"),
        ("wheel:shardfuse-1.0-py3-none-any.whl", "pip could not install it .*is invalid.*; build it again"),
        ("wheel:other-1.0-py3-none-any.whl", "holds other, expected the package shardfuse; build it again"),
    ],
)
def test_what_cannot_be_installed_says_what_to_do_and_leaves_nothing(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, text: str, message: str
):
    monkeypatch.chdir(tmp_path)
    _wheel(tmp_path, "other", "1.0", {"__init__.py": ""})
    whole = (index / "shardfuse-1.0-py3-none-any.whl").read_bytes()
    Path("shardfuse-1.0-py3-none-any.whl").write_bytes(whole[: len(whole) // 2])
    Path("text").write_text("no wheel")
    assert compare(text, text, Options(bench="bench")) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert re.search(message, errors)
    assert _kept() == []


def test_an_index_without_the_package_is_told(index: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert compare("release:1.0", "release:1.0", Options(bench="bench")) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert "the package index has no shardfuse for this Python; check pip's index-url, or pass a wheel of it" in errors


def test_without_a_network_the_error_names_the_index(index: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the port of "discard", where nothing listens
    monkeypatch.setenv("PIP_RETRIES", "1")
    assert compare("release:1.0", "release:1.0", Options(bench="bench")) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert "pip cannot reach the package index; check the network and pip's index-url, or pass a wheel of it" in errors
    assert _kept() == []


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_this_tree_builds_against_this_tree(kind: str, index: Path, tmp_path: Path, monkeypatch, capsys):
    """Both sides run the same code, are right, and are timed. How far apart is for a quiet machine to say."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    tree, dist = tmp_path / "tree", tmp_path / "dist"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "docs", "tests")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=ignored)
    build = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(dist), str(tree)]
    subprocess.run(build, check=True, capture_output=True)
    (file,) = dist.iterdir()
    options = Options(bench="norm", cases=("rms_norm-t512-d1024-fp32",), device="cpu")
    assert compare(f"wheel:{file}", f"tree:{ROOT}", options, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert file.name.startswith(f"shardfuse-{found['versions'][0]}")
    assert {tuple(row["key"][:3]) for row in found["rows"]} == {
        ("norm", options.cases[0], metric) for metric in ("forward, us", "forward + backward, us")
    }
    assert all(row["verdict"] != "refused" and row["between"][0] <= row["ratio"] for row in found["rows"])
