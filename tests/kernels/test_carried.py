"""Compiled kernels in an archive: what is packed, and when another machine's Triton takes it."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from shardfuse.kernels.dev import carried
from shardfuse.kernels.runtime import dispatch

HERE = {"version": "3.6.0", "key": "here", "sources": "same"}
KEY = "-source-assembler-options-environment"


def _entry(cache: Path, name: str, *, finished: bool = True, key: str | None = None) -> Path:
    """An entry of Triton's cache, as it writes them."""
    entry = cache / name
    entry.mkdir(parents=True)
    files = {"_kernel.json": b"{}", "_kernel.cubin": b"machine code", "_kernel.ttir": b"for people"}
    for file, content in files.items():
        (entry / file).write_bytes(content)
    if finished:
        group = {"child_paths": {file: str(entry / file) for file in files}}
        (entry / "__grp___kernel.json").write_text(json.dumps(group))
    if key is not None:
        (entry / carried.KEY_FILE).write_text(key)
    return entry


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, HERE, "triton here")


def _install(monkeypatch: pytest.MonkeyPatch, triton: dict[str, str], key: str) -> None:
    monkeypatch.setattr(carried, "_triton", lambda: triton)
    monkeypatch.setattr(carried, "_triton_key", lambda: key)


def test_an_entry_arrives_with_its_own_paths(triton, tmp_path):
    entry = _entry(tmp_path / "a", "NAME")
    (tmp_path / "a" / "LAUNCHER").mkdir()
    (tmp_path / "a" / "LAUNCHER" / "launcher.so").write_bytes(b"code")
    assert carried.pack(tmp_path / "a", tmp_path / "k.zip", {"for": 1}) == (tmp_path / "k.zip").stat().st_size
    given = carried.unpack(tmp_path / "k.zip", tmp_path / "b")
    assert (given.kernels, given.refused, given.notes) == (1, "", {"for": 1})
    there = tmp_path / "b" / "NAME"
    group = json.loads((there / "__grp___kernel.json").read_text())["child_paths"]
    assert group == {name: str(there / name) for name in ("_kernel.json", "_kernel.cubin")}  # the rest stays behind
    assert (there / "_kernel.cubin").read_bytes() == (entry / "_kernel.cubin").read_bytes()
    assert (tmp_path / "b" / "LAUNCHER" / "launcher.so").exists()
    assert carried.kernels_in(tmp_path / "b") == {"NAME"}


def test_what_was_not_finished_stays_behind(triton, tmp_path):
    _entry(tmp_path / "a", "NAME", finished=False)
    carried.pack(tmp_path / "a", tmp_path / "k.zip")
    assert carried.unpack(tmp_path / "k.zip", tmp_path / "b").kernels == 0


def test_a_later_call_adds_to_the_archive(triton, tmp_path):
    archive = tmp_path / "k.zip"
    _entry(tmp_path / "a", "FIRST")
    carried.pack(tmp_path / "a", archive, {"first": 1})
    _entry(tmp_path / "a", "SECOND")
    carried.pack(tmp_path / "a", archive, {"second": 2})
    with zipfile.ZipFile(archive) as file:
        assert len(file.namelist()) == len(set(file.namelist())) == 4
    given = carried.unpack(archive, tmp_path / "b")
    assert (given.kernels, given.notes) == (2, {"first": 1, "second": 2})


def test_another_pythons_build_of_the_same_triton_finds_them_under_its_own_key(triton, tmp_path, monkeypatch):
    archive = tmp_path / "k.zip"
    _entry(tmp_path / "a", carried.entry_name("triton here" + KEY), key=KEY)
    _entry(tmp_path / "a", "NOT_NOTED")
    carried.pack(tmp_path / "a", archive, {"for": 1})
    _install(monkeypatch, HERE | {"key": "there"}, "triton there")
    given = carried.unpack(archive, tmp_path / "b")
    assert carried.kernels_in(tmp_path / "b") == {carried.entry_name("triton there" + KEY)}
    assert (given.kernels, given.notes) == (1, {"for": 1})
    assert given.refused == "another Python's Triton compiled 1"
    # Packed again over there, they are that Triton's.
    carried.pack(tmp_path / "b", archive)
    given = carried.unpack(archive, tmp_path / "c")
    assert (given.kernels, given.refused, given.notes) == (1, "", {"for": 1})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": "3.7.1"}, "Triton 3.6.0 compiled them, and this is 3.7.1"),
        ({}, "another build of Triton 3.6.0 compiled them"),
    ],
    ids=["release", "build"],
)
def test_another_tritons_kernels_are_left_aside(triton, tmp_path, monkeypatch, change, why):
    _entry(tmp_path / "a", "NAME", key=KEY)
    carried.pack(tmp_path / "a", tmp_path / "k.zip")
    _install(monkeypatch, HERE | {"key": "other", "sources": "other"} | change, "another")
    assert carried.unpack(tmp_path / "k.zip", tmp_path / "b") == carried.Carried(refused=why)
    assert not (tmp_path / "b").exists()
    carried.pack(tmp_path / "b", tmp_path / "k.zip")  # and what is compiled instead begins the archive anew
    assert carried.unpack(tmp_path / "k.zip", tmp_path / "b").refused == ""


@pytest.mark.skipif(dispatch.triton_version() is None, reason="Triton is not installed")
def test_the_installed_triton_is_known_with_and_without_its_library():
    found = carried._triton()
    assert found["version"] == dispatch.triton_version()
    assert len({found["key"], found["sources"]}) == 2
