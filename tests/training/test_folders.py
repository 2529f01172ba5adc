"""A command's output folder: it appears when complete, and only the same command replaces it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from shardfuse.training.folders import OutputError, output_folder, write_report

_OUT: dict[str, Any] = {"maker": "a test", "names": ("data",), "need_bytes": 0}


def _write(path: Path, content: str) -> None:
    with output_folder(path, **_OUT) as folder:
        (folder / "data").write_text(content)
        write_report(folder, "a test", {})


def test_output_appears_when_complete_and_replaces_its_own(tmp_path: Path):
    out = tmp_path / "deep" / "out"
    _write(out, "one")
    _write(out, "two")
    assert (out / "data").read_text() == "two"
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]


def test_report_is_json_where_a_number_is_not_finite(tmp_path: Path):
    """The ranks beside the first report no loss: NaN, for which JSON has no word."""
    content = {"ranks": [{"loss": 2.5, "steps": 3}, {"loss": math.nan}], "span": (1, math.inf), "why": "NaN"}
    write_report(tmp_path, "a test", content)
    read = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    ranks = [{"loss": 2.5, "steps": 3}, {"loss": None}]
    assert read == {"made_by": "a test", "ranks": ranks, "span": [1, None], "why": "NaN"}


def test_failure_keeps_the_earlier_output(tmp_path: Path):
    _write(tmp_path / "out", "one")
    with pytest.raises(FileNotFoundError), output_folder(tmp_path / "out", **_OUT) as folder:
        (folder / "data").write_text((tmp_path / "missing").read_text())
    assert (tmp_path / "out" / "data").read_text() == "one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path):
    dead = tmp_path / ".out.writing-dead"
    dead.mkdir()
    (dead / "data").touch()
    with output_folder(tmp_path / "out", **_OUT) as living:
        assert not dead.exists()
        _write(tmp_path / "out", "by another run meanwhile")
        assert living.exists()


@pytest.mark.parametrize("kind", ["file", "foreign", "extra", "mount"])
def test_what_is_not_ours_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("precious")
    else:
        _write(out, "one")
    if kind == "foreign":
        (out / "report.json").write_text('{"made_by": "somebody else"}')
    if kind == "extra":
        (out / "thesis.tex").write_text("precious")
    if kind == "mount":
        monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == str(out))
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(OutputError, match=rf"^--out {out}: .*choose "):
        _write(out, "two")
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_empty_folder_is_taken(tmp_path: Path):
    (tmp_path / "out").mkdir()
    _write(tmp_path / "out", "one")
    assert (tmp_path / "out" / "data").read_text() == "one"


def test_unwritable_place_and_full_disk(tmp_path: Path):
    with pytest.raises(OutputError, match="--out /proc/out: cannot be written to"):
        _write(Path("/proc/out"), "one")
    with (
        pytest.raises(OutputError, match=r"MiB are free on that disk and .* MiB are needed"),
        output_folder(tmp_path / "out", **{**_OUT, "need_bytes": 1 << 60}),
    ):
        pytest.fail("there was room")
    assert list(tmp_path.iterdir()) == []
