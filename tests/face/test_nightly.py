"""The shares that CI takes in turn leave out nothing that runs nightly, fit their time, and fail when a part does."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import nightly
import portable
import pytest
from nightly import ALONE, LIMIT_S, SHARES, Part

from shardfuse.kernels.dev import registry

ROOT = nightly.ROOT
PARTS = [part for share in SHARES for part in share]
# What make test, .ci/run or make check runs, and what checks nothing.
OTHERS = {"test", "lint", "check", "smoke-oldest", "nightly-share", "nightly-environments", "test-environment"}
OTHERS |= {"help", "install", "demo", "serve", "bench", "gpu", "gpu-kernels", "hub-kernel", "codegen", "front", "wheel"}
OTHERS |= {"clean", "emulate-faults", "smollm2"}
OTHERS |= {"test-vllm-tests"}  # wants the sources of vLLM
# Targets that stand for others.
GROUPS = {"test-all": "test-nightly", "test-hosts": "test-vllm"}

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def _rule(database: str, target: str) -> set[str]:
    found = re.search(rf"^{target}:(.*)$", database, re.M)
    assert found, target
    return set(found[1].split())


def _settings(target: str, variable: str) -> list[str]:
    """Every word that the parts of a target give to a variable of make."""
    return [word for part in PARTS if part.target == target for word in shlex.split(part.settings.get(variable, ""))]


@needs_make
def test_every_target_that_checks_is_in_a_share() -> None:
    """A target that the Makefile gains fails this until it is in a share or among OTHERS."""
    database = nightly.database()
    documented = set(re.findall(r"^([\w-]+(?: [\w-]+)*):.*## ", (ROOT / "Makefile").read_text(), re.M))
    targets = {word for line in documented for word in line.split()} | {"test-nightly"}
    for group, member in GROUPS.items():
        assert member in _rule(database, group)
        targets |= _rule(database, group)
    taken = {part.target for part in PARTS} | set(ALONE)
    assert targets - OTHERS - GROUPS.keys() == taken


@needs_make
def test_divided_targets_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of lanes, versions, targets of the compiler, runs and parts: each once."""
    monkeypatch.setenv("MAKEFLAGS", "-- JOBS=rest-2")  # as in a share
    variables = dict(re.findall(r"^(\w+) :?= (.*)$", nightly.database(), re.M))
    for target in ("test-oldest", "test-newest"):
        halves = {"ranks": ["ranks-1", "ranks-2"], "rest": ["rest-1", "rest-2"]}
        jobs = [job for whole in variables["JOBS"].split() for job in halves.get(whole, [whole])]
        assert sorted(_settings(target, "JOBS")) == sorted(jobs)
    assert sorted(_settings("test-transformers", "TRANSFORMERS")) == sorted(variables["TRANSFORMERS"].split())
    assert sorted(_settings("codegen-all", "TARGETS")) == sorted(registry.TARGETS)
    runs = [part.settings["ARGS"] for part in PARTS if part.target == "test-portable"]
    numbers = range(1, len(portable.RUNS) + 1)
    assert sorted(runs) == [f"--run {number} --half {half}" for number in numbers for half in (1, 2)]
    for target, before in (("test-nightly", "-m 'nightly and not fuzz' "), ("test-vllm", "")):
        divided = [part.settings["ARGS"] for part in PARTS if part.target == target]
        assert sorted(divided) == sorted(f"{before}--part {i}/{len(divided)}" for i in range(1, len(divided) + 1))


def test_every_fuzzer_has_its_seconds() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^(pytestmark = .*|@)pytest\.mark\.fuzz\b", path.read_text(), re.M)
    }
    assert marked
    assert sorted(_settings("fuzz", "ARGS")) == sorted(marked)
    assert {part.settings["SEED"] for part in PARTS if part.target == "fuzz"} == {"{seed}"}
    assert {part.settings["SECONDS"] for part in PARTS if part.target == "fuzz"} == {"30"}


@pytest.mark.parametrize("share", range(1, len(SHARES) + 1))
@needs_make
def test_a_share_fits(share: int) -> None:
    assert 0 < sum(part.seconds for part in SHARES[share - 1]) <= LIMIT_S
    assert all(part.seconds > 0 for part in SHARES[share - 1])
    assert nightly.title(share).startswith(f"nightly share {share} of {len(SHARES)}, some ")
    expected = {"test-oldest": ".side/oldest/.installed", "test-transformers": ".side/transformers-"}
    for part in SHARES[share - 1]:
        found = [each for each in nightly.environments(share) if each.startswith(expected.get(part.target, ".side/"))]
        assert found or part.target not in expected


@needs_make
def test_environments_are_found_without_running_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = "check: $(OF:%=.side/%/.installed) install\n\t@touch ran; $(MAKE) install\n"
    (tmp_path / "Makefile").write_text(f"help:\n\t@true\n{rule}install .side/a/.installed:\n\t@touch ran\n")
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    monkeypatch.setattr(nightly, "SHARES", ((Part("make check OF='a b'", 1), Part("make check OF=a", 1)),))
    assert nightly.environments(1) == [".side/a/.installed", ".side/b/.installed"]
    assert not (tmp_path / "ran").exists()


def test_what_stays_nightly_is_written_down() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert [target for target in ALONE if f"`make {target}`" not in page] == []


def test_commits_take_turns() -> None:
    count = len(SHARES)
    assert {nightly.share_of(commits) for commits in range(100, 100 + count)} == set(range(1, count + 1))


def _checkout(folder: Path, monkeypatch: pytest.MonkeyPatch, parts: tuple[Part, ...]) -> None:
    """Three commits in a folder whose make says its arguments, and fails where these name red; one share."""
    monkeypatch.setattr(nightly, "ROOT", folder)
    monkeypatch.setattr(nightly, "SHARES", ((Part("make never", 1),), parts))
    (folder / "Makefile").write_text("%:\n\t@echo '$@ $(SEED)' >> said; [ '$@' != red ]\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], *[["commit", "-q", "--allow-empty", "-m", "a"]] * 3):
        subprocess.run([*git, *command], cwd=folder, check=True)


@needs_make
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_share_runs_all_its_parts_and_says_which_are_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _checkout(tmp_path, monkeypatch, (Part("make red A=1", 60), Part("make green SEED={seed}", 61)))
    assert nightly.main(["run"]) == 1  # three commits: share 2 of 2
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True).stdout
    assert (tmp_path / "said").read_text().splitlines() == ["red ", f"green {int(head[:6], 16)}"]
    said = capfd.readouterr()
    assert said.out.startswith("nightly share 2 of 2, some 3 minutes: make red A=1; make green SEED={seed}\n")
    assert re.search(r"FAILED +make red A=1\n.* ok +make green SEED=\d+$", said.out.strip(), re.M)
    assert said.err.splitlines()[-2:] == [
        "error: nightly share 2 is red; again: make nightly-share SHARE=2, or",
        "  make red A=1",
    ]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_hash_chooses_in_a_shallow_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "whole").mkdir()
    _checkout(tmp_path / "whole", monkeypatch, ())
    assert nightly.chosen(None) == 2
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{tmp_path / 'whole'}", shallow], check=True)
    monkeypatch.setattr(nightly, "ROOT", shallow)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=shallow, capture_output=True, text=True).stdout
    assert nightly.chosen(None) == int(head[:6], 16) % 2 + 1


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_share_that_nobody_can_tell_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nightly.main(["title", "--share", str(len(SHARES) + 1)]) == 2
    assert f"expected 1 to {len(SHARES)}" in capsys.readouterr().err
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    assert nightly.main(["title"]) == 2
    assert "no commit chooses a share here" in capsys.readouterr().err
    assert nightly.main(["title", "--share", "1"]) == 0
