"""``shardfuse bench calibrate``: the fit, the shapes, the gate, resuming, and choices made by what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfuse.bench import calibrate
from shardfuse.bench.calibrate import Options
from shardfuse.bench.timing import Timing
from shardfuse.kernels.accuracy import Verdict
from shardfuse.parallel import link_profile, links
from shardfuse.parallel.link_model import GATHER, NORM, REDUCE, SCATTER
from shardfuse.parallel.mesh import tp_group

DRY = Options(dry=True, device="cpu")


@pytest.mark.parametrize(("start", "per_byte"), [(2e-5, 1e-9), (0.0, 3e-10)])
def test_the_fit_finds_alpha_and_beta(start: float, per_byte: float):
    points = [(float(size), start + per_byte * size) for size in (1 << 10, 1 << 16, 1 << 24)]
    assert calibrate.fit(points) == pytest.approx((start, per_byte), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    "points", [[(1e3, 5.0), (1e6, 1.0)], [(1e3, 1e-9), (1e6, 1.0)], [(1e3, 1.0)]], ids=["falling", "late", "single"]
)
def test_the_fit_of_noise_is_still_a_link(points: list[tuple[float, float]]):
    start, per_byte = calibrate.fit(points)
    assert start >= 0
    assert per_byte > 0


@pytest.mark.parametrize("options", [Options(), Options(short=True), DRY], ids=["", "short", "dry"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_every_operation_has_shapes_that_divide(options: Options, device_type: str):
    found = list(calibrate.shapes_of(options, device_type, 3))
    assert {op for op, *_ in found} == {GATHER, SCATTER, REDUCE, NORM}
    assert all((T % 3 == 0 or op == NORM) and min(T, K, N) > 0 for op, T, K, N in found)
    assert len(found) <= len(list(calibrate.shapes_of(Options(), "cuda", 3)))


@pytest.mark.parametrize(
    ("options", "message"),
    [(Options(ranks=1), r"ranks=1: links join at least 2"), (Options(device="tpu"), r"device='tpu': expected cpu or")],
)
def test_options_that_make_no_sense_are_refused(options: Options, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match=message):
        calibrate.calibrate(options)


# --- a run on ranks that are there already ----------------------------------------------------------------------------


def _run(out: str, change: Callable[[calibrate.Run], None] = lambda run: None) -> calibrate.Outcome:
    run = calibrate.Run(replace(DRY, out=Path(out)), tp_group(dist.group.WORLD))
    change(run)
    return run.run()


def _stopped(rank: int, world: int, out: str) -> tuple[int, int, list[str]]:
    """A run that is stopped after its first row, and the one that goes on: rows on disk, rows, what was timed."""
    timed: list[str] = []

    def stop_at_second(run: calibrate.Run) -> None:
        row = run._row

        def stopping(rig: calibrate.Rig) -> Any:
            if timed:
                raise KeyboardInterrupt
            timed.append(rig.call.op)
            return row(rig)

        run._row = stopping  # type: ignore[method-assign]

    with pytest.raises(KeyboardInterrupt):
        _run(out, stop_at_second)
    held = len(link_profile.read(Path(out)).rows)
    timed.clear()

    def note(run: calibrate.Run) -> None:
        row = run._row
        run._row = lambda rig: timed.append(rig.call.op) or row(rig)  # type: ignore[method-assign, func-returns-value]
        run._links = lambda: pytest.fail("measured again")  # type: ignore[method-assign]
        run._rates = lambda: pytest.fail("measured again")  # type: ignore[method-assign]

    outcome = _run(out, note)
    return held, len(outcome.profile["rows"]), timed


@pytest.mark.ranks
def test_a_run_that_was_stopped_goes_on(ranks: Any, tmp_path: Path):
    for held, rows, timed in ranks(2, _stopped, str(tmp_path / "links.json")):
        assert held == 1
        assert rows == 1 + len(timed)
        assert timed == [SCATTER, REDUCE] + ([NORM] if links.lacking(torch.device("cpu")) is None else [])


def _foreign(rank: int, world: int, out: str) -> str:
    with pytest.raises(ValueError) as caught:
        _run(out)
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"dry": False}, "holds measurements for cpu"),
        ({"origin": {"device": "NVIDIA A100"}}, "measured on NVIDIA A100"),
    ],
)
def test_what_another_run_measured_is_not_overwritten(ranks: Any, tmp_path: Path, changes: dict[str, Any], fault: str):
    path = tmp_path / "links.json"
    held = link_profile.Profile("cpu", "cpu", measured=True, dry=True)
    path.write_text(json.dumps(replace(held, **changes).record()))
    before = path.read_bytes()
    for message in ranks(2, _foreign, str(path)):
        assert fault in message
        assert str(path) in message
    assert path.read_bytes() == before


def _red(rank: int, world: int, out: str) -> tuple[int, tuple[str, ...], int]:
    """One rank's chunks come out wrong."""
    right = calibrate.Rig.result

    def wrong(rig: calibrate.Rig, path: links.Path) -> torch.Tensor:
        y = right(rig, path)
        return y * 2 if rank == 1 and path.kind == "chunked" else y

    calibrate.Rig.result = wrong  # type: ignore[method-assign]
    try:
        outcome = _run(out)
    finally:
        calibrate.Rig.result = right  # type: ignore[method-assign]
    return outcome.code, outcome.red, len(outcome.profile["rows"])


@pytest.mark.ranks
def test_a_wrong_result_is_not_timed(ranks: Any, tmp_path: Path):
    for code, red, rows in ranks(2, _red, str(tmp_path / "links.json")):
        assert code == 1
        assert red
        assert all(line.startswith("rank 1: all_gather_linear chunked in") for line in red)
        assert rows == 0


def _lucky(rank: int, world: int, out: str) -> list[float]:
    """Chunked shares of plain's time where the fastest path was only lucky the first time."""
    seen: list[links.Path] = []

    def share(rig: calibrate.Rig, path: links.Path) -> tuple[float, float, float]:
        again = path in seen
        seen.append(path)
        return (1.2 if again else 0.5 + 0.1 * path.pieces), 1e-3, 0.0

    def fix(run: calibrate.Run) -> None:
        run._share = share  # type: ignore[method-assign]
        run._calls = lambda calls=run._calls: calls()[:1]  # type: ignore[method-assign, misc]

    (row,) = link_profile.parse(_run(out, fix).profile, out).rows
    return [row.chunked_s[pieces] / row.plain_s for pieces in (1, 2, 4)]


@pytest.mark.ranks
def test_the_fastest_path_is_timed_twice(ranks: Any, tmp_path: Path):
    for shares in ranks(2, _lucky, str(tmp_path / "links.json")):
        assert shares == pytest.approx([1.2, 0.7, 0.9])


# --- the command ------------------------------------------------------------------------------------------------------


def _chosen(rank: int, world: int, path: str) -> tuple[str, str]:
    """What a group chooses by the file as it is, and as it would be had its figures been measured."""
    group, shape = tp_group(dist.group.WORLD), {"tokens": 8, "features_in": 16, "features_out": 32}
    like = {"dtype": torch.float32, "device": torch.device("cpu")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(link_profile.VARIABLE, path)
        dry = links.choose(GATHER, group, **shape, **like)
        content = json.loads(Path(path).read_text()) | {"dry": False}
        for row in content["rows"]:
            row |= {"plain_s": 1.0, "noise": 0.0, "chunked_s": {"2": 0.5}}
        dist.barrier()  # both have read it
        if rank == 0:
            Path(path).write_text(json.dumps(content))
        links.forget(group)
        measured = links.choose(GATHER, group, **shape, **like)
    return dry.reason, f"{measured.kind} in {measured.pieces}, {measured.reason}"


@pytest.mark.ranks
def test_the_command_writes_what_choices_are_then_made_by(ranks: Any, tmp_path: Path):
    out = tmp_path / "links.json"
    command = [sys.executable, "-m", "shardfuse", "bench", "calibrate", "--dry", "--json", "--device", "cpu"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["out"], said["gate"], said["dry"], said["device"]) == (str(out), "green", True, "cpu")
    profile = link_profile.read(out)
    assert said["rows"] == profile.record()["rows"]
    assert {row.op for row in profile.rows} - {NORM} == {GATHER, SCATTER, REDUCE}
    assert set(profile.links["node"]) == {"all_gather", "reduce_scatter", "all_reduce"}
    assert profile.origin["ranks"] == 2
    assert {"torch", "triton", "device", "date", "cpus"} <= profile.origin.keys()
    assert "commit" not in profile.origin
    assert "all_gather_linear t8-k16-n32 fp32" in done.stderr  # progress
    assert "no job uses a dry run's" in done.stderr
    for dry, measured in ranks(2, _chosen, str(out)):
        assert "dry run" in dry
        assert measured == "chunked in 2, measured (t8-k16-n32 fp32, 2 ranks): 0.50 of plain's time"


def test_times_are_compared_with_a_sync_and_rounds_that_ranks_share(monkeypatch: pytest.MonkeyPatch):
    rounds: list[int] = []

    def compare(ours: Any, peer: Any, *, rounds: int, calls: int, seen: list[int] = rounds) -> tuple[Timing, Timing]:
        seen.append(rounds)
        return Timing(1e4), Timing(1e4)

    monkeypatch.setattr(calibrate, "compare_fixed", compare)
    run = object.__new__(calibrate.Run)
    run.options, run.group = Options(), tp_group(None)
    run._compare(lambda: None, lambda: None)
    assert rounds == [3, 75]  # 1.5 s of two calls of 10 ms


def test_a_verdict_compares_with_plain_in_fp64():
    call = calibrate.link_model.Call(REDUCE, 4, 8, 8, torch.float32, 1)
    rig = calibrate.Rig.of(call, tp_group(None), torch.device("cpu"))
    (verdict,) = rig.verdicts(links.Path())
    assert isinstance(verdict, Verdict)
    assert verdict.ok
    assert verdict.error > 0
