"""The checks of ``make release-check``, each with a fault that it has to find."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import release


@pytest.mark.parametrize(
    ("version", "valid"), [("0.1.0", True), ("1.0.0-rc.1", True), ("1.0", False), ("01.0.0", False)]
)
def test_version_is_semantic(version: str, valid: bool):
    assert (release.version_problem(version) is None) is valid


def test_changelog_describes_the_version():
    text = "## [Unreleased]\n\n- new\n\n## [0.2.0] - 2026-01-01\n\n### Added\n\n- a thing\n\n## [0.1.0]\n\n### Added\n"
    assert release.changelog_problem(text, "0.2.0") is None
    assert "no section" in str(release.changelog_problem(text, "0.3.0"))
    assert "empty" in str(release.changelog_problem(text, "0.1.0"))


@pytest.mark.parametrize(
    ("arguments", "title", "failed"),
    [
        ([], "0.2.0", {"tag v0.2.0"}),
        ([], "Unreleased", {"changelog", "tag v0.2.0"}),
        (["--unreleased"], "Unreleased", set()),
        (["--unreleased"], "0.2.0", set()),
        (["--unreleased"], "0.1.0", {"changelog"}),
    ],
)
def test_a_commit_between_releases(
    arguments: list[str],
    title: str,
    failed: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """The commit after the one that has the tag, with the changes below ``title``; what is built is right."""
    (tmp_path / "pyproject.toml").write_text('version = "0.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{title}]\n\n- a thing\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    answers = {("git", "tag"): "v0.2.0", ("git", "rev-list"): "a" * 40, ("git", "rev-parse"): "b" * 40}
    monkeypatch.setattr(release, "_run", lambda *command, cwd=None: answers.get(command[:2], "{}"))
    monkeypatch.setattr(release, "_build", lambda: (tmp_path, tmp_path, tmp_path))
    monkeypatch.setattr(release, "contents_problem", lambda wheel, rebuilt: None)
    assert release.main(arguments) == bool(failed)
    table = capsys.readouterr().out
    assert {line.split("│")[1].strip() for line in table.splitlines() if "FAILED" in line} == failed


def test_a_tag_stays_on_its_commit():
    assert release.tag_problem(None, "b" * 40) is None
    assert release.tag_problem("b" * 40, "b" * 40) is None
    assert "HEAD" in str(release.tag_problem("a" * 40, "b" * 40))


def test_the_sdist_holds_every_file(tmp_path: Path):
    wheels = []
    for name, files in {"whole": {"a.py": "1", "b.json": "2"}, "less": {"a.py": "1"}, "other": {"a.py": "3"}}.items():
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as archive:
            for file, text in files.items():
                archive.writestr(file, text)
        wheels.append(tmp_path / f"{name}.whl")
    whole, less, other = wheels
    assert release.contents_problem(whole, whole) is None
    assert release.contents_problem(whole, less) == "b.json is missing from the sdist"
    assert release.contents_problem(less, other) == "a.py is not the same from the sdist"


def test_an_unknown_licence_is_named():
    assert release.licence(["MIT", None]) == "MIT"
    assert release.licence([None, "BSD\nand its text"]) == "BSD"
    assert release.licence([None, None, "License :: OSI Approved :: MIT License"]) == "MIT License"
    found = {"known": "MIT", "secret": release.licence([None, "UNKNOWN", "Typing :: Typed"])}
    assert release.licence_problem(found) == "no licence in the metadata of secret"
    assert release.licence_problem({"known": "MIT"}) is None
