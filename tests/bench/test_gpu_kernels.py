"""Kernels that come along with a GPU run, compiled on a CPU, and an archive that gets what a run compiles."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from shardfuse.bench.gpu import ahead, gpu_run
from shardfuse.bench.gpu.journal import Events
from shardfuse.bench.harness import provenance
from shardfuse.kernels.dev import carried, registry
from shardfuse.kernels.dev import carried_cache as kernels

pytestmark = pytest.mark.interpret

OP = "dropout"


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """An archive of two kernels for sm_90, in tmp_path / "out"."""
    monkeypatch.setattr(carried, "_triton", lambda: {"version": "3.6.0", "key": "here", "sources": "same"})
    for name in ("FIRST", "SECOND"):
        _kernel(tmp_path / "cache" / name)
    carried.pack(tmp_path / "cache", tmp_path / "out" / kernels.ARCHIVE, {kernels.ARCH: "sm_90"})
    return tmp_path / "out"


def _kernel(entry: Path) -> None:
    entry.mkdir(parents=True)
    for file in ("kernel.json", "kernel.cubin", "__grp__kernel.json"):
        (entry / file).write_text("{}")


def test_a_run_says_what_came_along_and_keeps_what_it_compiled(packed, tmp_path, monkeypatch):
    run = gpu_run.GpuRun(gpu_run.Options(packed, ("smoke",), (OP,), dry=True))
    cache: list[str] = []

    def compile_one() -> None:
        cache.append(run._environment()["TRITON_CACHE_DIR"])
        shutil.copytree(tmp_path / "cache" / "FIRST", Path(cache[0]) / "THIRD")

    monkeypatch.setattr(run, "_smoke", compile_one)
    run.run()
    found = Events.read(packed / "cpu")
    assert [(e["found"], e["refused"]) for e in found.of("kernels")] == [(2, "")]
    assert [(e["name"], e["compiled"]) for e in found.of("phase")] == [("smoke", 1)]
    assert "kernels: 2 came along, 1 compiled anew" in (packed / "cpu" / "summary.txt").read_text()
    assert not Path(cache[0]).exists()
    assert carried.unpack(packed / kernels.ARCHIVE, tmp_path / "next").kernels == 3


def test_kernels_of_another_capability_are_left_aside(packed):
    before = (packed / kernels.ARCHIVE).read_bytes()
    found = kernels.Kernels(packed, "sm_80", "today")
    assert (found.given.kernels, found.given.refused) == (0, "they are for sm_90, and this is sm_80")
    _kernel(found.folder / "OTHER")
    found.close()
    assert (packed / kernels.ARCHIVE).read_bytes() == before


@pytest.mark.parametrize("how", ["cut", "damaged", "no manifest"])
def test_an_archive_that_cannot_be_read_costs_nothing_else(packed, tmp_path, how):
    archive = packed / kernels.ARCHIVE
    if how == "cut":
        archive.write_bytes(archive.read_bytes()[:-40])
    elif how == "damaged":  # its decoder raises an error of its own
        archive.unlink()
        carried.pack(tmp_path / "cache", archive, compression=zipfile.ZIP_LZMA)
        text = archive.read_bytes()
        at = text.index(b"kernel.json") + 40
        archive.write_bytes(text[: at - 25] + bytes(25) + text[at:])
    else:
        archive.unlink()
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("a", "b")
    before = archive.read_bytes()
    found = kernels.Kernels(packed, "sm_90", "today")
    assert found.given.kernels == 0
    assert "cannot be read" in found.given.refused
    _kernel(found.folder / "THIRD")
    found.close()
    assert archive.read_bytes() == before


def test_an_archive_that_would_be_too_large_stays_as_it_is(packed, monkeypatch):
    before = (packed / kernels.ARCHIVE).read_bytes()
    monkeypatch.setattr(kernels, "LIMIT", len(before))
    found = kernels.Kernels(packed, "sm_90", "today")
    _kernel(found.folder / "THIRD")
    found.close()
    assert (packed / kernels.ARCHIVE).read_bytes() == before
    assert [path.name for path in packed.iterdir()] == [kernels.ARCHIVE]


def test_kernels_are_compiled_once_and_come_along(own_interpreter, tmp_path, monkeypatch):
    cases = [case.name for case in registry.op(OP).tagged("test")][:2]
    monkeypatch.setattr(ahead, "REQUESTS", {"smoke": lambda only: [[OP, case] for case in cases]})
    said = list[str]()
    first = ahead.compile_ahead(tmp_path, ("smoke",), (OP,), 1, said.append)
    given = kernels.Kernels(tmp_path, "sm_90", provenance.package_hash()).given.kernels
    again = ahead.compile_ahead(tmp_path, ("smoke",), (OP,), 1, said.append)  # in another cache, from the archive
    assert first["compiled"] == given == again["found"] > again["compiled"] == first["wrong"] == 0
    assert any(line.startswith(f"smoke: 2 cases, {given} kernels compiled, ") for line in said), said


def test_an_archive_says_which_phases_were_compiled_of_todays_sources(tmp_path, monkeypatch):
    """Not one that was stopped: the run would take its first compilation for a hang."""
    answers: list[dict[str, Any]] = [{"counts": {}}, {"counts": {}}]
    ask_all = lambda requests, *rest: ((n, answers[n]) for n in range(len(answers)))
    monkeypatch.setattr(ahead.workers, "ask_all", ask_all)
    monkeypatch.setattr(ahead, "REQUESTS", {name: lambda only: [["a"]] for name in ("smoke", "benchmarks")})
    (tmp_path / "stopped").mkdir()
    for folder, fresh in (("whole", {"smoke", "benchmarks"}), ("stopped", {"smoke"})):
        ahead.compile_ahead(tmp_path / folder, ("smoke", "benchmarks"), (), 1, lambda line: None)
        found = kernels.Kernels(tmp_path / folder, "sm_90", provenance.package_hash())
        assert (found.fresh, found.adds) == (fresh, folder == "stopped")
        assert kernels.Kernels(tmp_path / folder, "sm_90", "other sources").fresh == set()
        answers[1] = {"error": "the process at work on it ended"}


def test_headlines_are_compiled_before_other_rows():
    asked = ahead._benchmark_requests(())
    headlines = {name[:2] for name in ahead.plan.HEADLINES}
    first = [tuple(each) in headlines for each in asked]
    assert first == sorted(first, reverse=True)
    assert sum(first) >= len(headlines) - 2  # host time and memory have no kernels of their own to compile
