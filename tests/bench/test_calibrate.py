"""``shardfuse bench calibrate``: the fit, the shapes, the gate, resuming, and choices made by what it wrote."""

from __future__ import annotations

import errno
import fcntl
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
from hypothesis import given
from hypothesis import strategies as st
from policy_case import forget

from shardfuse.bench import calibrate, calibrate_meter
from shardfuse.bench.calibrate import Options, only_writer
from shardfuse.bench.calibrate_meter import Meter
from shardfuse.bench.calibrate_rig import ends_of
from shardfuse.bench.harness.timing import Timing
from shardfuse.kernels.dev.accuracy import Verdict
from shardfuse.kernels.linear import Product, functional
from shardfuse.kernels.runtime.dispatch import Choice
from shardfuse.parallel.core.mesh import tp_group
from shardfuse.parallel.overlap import link_profile, policy
from shardfuse.parallel.overlap.link_model import GATHER, NORM, REDUCE, SCATTER, Call
from shardfuse.parallel.overlap.plan import OverlapPlan

DRY = Options(dry=True, device="cpu")


@pytest.mark.parametrize(("start", "per_byte"), [(2e-5, 1e-9), (0.0, 3e-10)])
def test_the_fit_finds_alpha_and_beta(start: float, per_byte: float):
    points = [(float(size), start + per_byte * size) for size in (1 << 10, 1 << 16, 1 << 24)]
    assert calibrate_meter.fit(points) == pytest.approx((start, per_byte), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    "points", [[(1e3, 5.0), (1e6, 1.0)], [(1e3, 1e-9), (1e6, 1.0)], [(1e3, 1.0)]], ids=["falling", "late", "single"]
)
def test_the_fit_of_noise_is_still_a_link(points: list[tuple[float, float]]):
    start, per_byte = calibrate_meter.fit(points)
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
        rows = run._rows

        def stopping(call: Call) -> Any:
            if timed:
                raise KeyboardInterrupt
            timed.append(call.op)
            return rows(call)

        run._rows = stopping  # type: ignore[method-assign]

    with pytest.raises(KeyboardInterrupt):
        _run(out, stop_at_second)
    held = len(link_profile.read(Path(out)).rows)
    timed.clear()

    def note(run: calibrate.Run) -> None:
        rows = run._rows
        run._rows = lambda call: timed.append(call.op) or rows(call)  # type: ignore[method-assign, func-returns-value]
        run.meter.links = lambda: pytest.fail("measured again")  # type: ignore[method-assign]
        run.meter.rates = lambda gemm_flops: pytest.fail("measured again")  # type: ignore[method-assign]

    outcome = _run(out, note)
    return held, len(outcome.profile["rows"]), timed


@pytest.mark.ranks
def test_a_run_that_was_stopped_goes_on(ranks: Any, tmp_path: Path):
    for held, rows, timed in ranks(2, _stopped, str(tmp_path / "links.json")):
        assert held == len(link_profile.CLOCKS)
        assert rows == held * (1 + len(timed))
        assert timed == [SCATTER, REDUCE] + ([NORM] if policy.lacking(torch.device("cpu")) is None else [])


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

    def wrong(rig: calibrate.Rig, plan: OverlapPlan) -> torch.Tensor:
        y = right(rig, plan)
        return y * 2 if rank == 1 and plan.kind == "chunked" else y

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


# Shares of plain's time by plan: on the listed shape (each time that it is timed there), at the low end of its bucket
# and at the high end. At the low end a rank's 3 rows do not make 4 pieces.
ONE, TWO, FOUR = (OverlapPlan("chunked", pieces) for pieces in (1, 2, 4))
KERNEL = OverlapPlan("kernel")
SHARES: dict[OverlapPlan, tuple[list[float], ...]] = {
    ONE: ([0.6, 0.65], [0.7], [0.68]),
    TWO: ([0.7], [0.75], [1.1]),
    FOUR: ([0.8], [], [0.9]),
    KERNEL: ([0.98], [], []),
}
SLOWER = 0.2  # added to each share where the host's time counts: there FOUR and the kernel do not beat plain
LISTED, LOW, HIGH = (8, 16, 32), (6, 12, 23), (10, 22, 45)


def _worst(rank: int, world: int, out: str) -> tuple[list[list[float]], float, list[Any]]:
    """The shares that are written for each clock, the noise, and what was timed; rank 1 sees other shares."""
    left = {
        (shape, plan): list(shares) for plan, of in SHARES.items() for shape, shares in zip((LISTED, LOW, HIGH), of)
    }
    timed: list[Any] = []

    def shares(rig: calibrate.Rig, plan: OverlapPlan) -> list[tuple[float, float, float]]:
        shape = (rig.call.T, rig.call.K, rig.call.N)
        timed.append((shape, plan))
        found = left[shape, plan].pop(0)
        return [
            (each if rank == 0 else 1.0 / each, 1e-3 * len(timed), 0.01 * len(timed))
            for each in (found, found + SLOWER)
        ]

    def fix(run: calibrate.Run) -> None:
        run._shares = shares  # type: ignore[method-assign]
        run._paths = lambda call: list(SHARES)  # type: ignore[method-assign]
        run._checked = lambda call, plans: calibrate.Rig.of(call, run.group, run.device)  # type: ignore[method-assign]
        run._calls = lambda: [Call(GATHER, *LISTED, run.dtype, world)]  # type: ignore[method-assign]

    rows = link_profile.parse(_run(out, fix).profile, out).rows
    assert [row.clock for row in rows] == list(link_profile.CLOCKS)
    found = []
    for row in rows:
        assert row.plain_s == 1e-3  # on the first shape
        assert row.kernel_s is not None
        found.append([seconds / row.plain_s for seconds in (*row.chunked_s.values(), row.kernel_s)])
    return found, rows[0].noise, timed


@pytest.mark.ranks
def test_a_path_counts_by_its_worst_share_in_the_bucket(ranks: Any, tmp_path: Path):
    for shares, noise, timed in ranks(2, _worst, str(tmp_path / "links.json")):
        by_device, with_host = shares
        assert by_device == pytest.approx([0.7, 1.1, 0.9, 0.98])
        assert with_host == pytest.approx([share + SLOWER for share in by_device])
        assert noise == pytest.approx(0.01 * len(timed))
        # All on the listed shape, the fastest twice; at the ends what beat plain by more than the margin by some clock.
        assert timed[:5] == [(LISTED, plan) for plan in (ONE, TWO, FOUR, KERNEL, ONE)]
        assert timed[5:] == [*[(LOW, plan) for plan in (ONE, TWO)], *[(HIGH, plan) for plan in (ONE, TWO, FOUR)]]


@given(st.integers(1, 1 << 20))
def test_a_bucket_is_what_lies_between_its_ends(size: int):
    low, middle, high = link_profile.bucket_ends(size)
    names = [link_profile.bucket(tokens, 1, 1) for tokens in (low, size, middle, high)]
    assert len(set(names)) == 1
    assert link_profile.bucket(low - 1, 1, 1) not in names
    assert link_profile.bucket(high + 1, 1, 1) not in names


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks_", [2, 3, 8])
def test_the_ends_of_a_bucket_are_shapes_of_it(device_type: str, ranks_: int):
    for op, *sizes in calibrate.shapes_of(Options(), device_type, ranks_):
        call = Call(op, *sizes, torch.bfloat16, ranks_)
        ends = ends_of(call)
        assert call not in ends
        assert {link_profile.bucket(*end[1:4]) for end in ends} <= {link_profile.bucket(*sizes)}
        assert op == NORM or all(end.T % ranks_ == 0 for end in ends)
        for side in range(1, 4) if len(ends) == 2 else ():
            low, _, high = link_profile.bucket_ends(call[side])
            step = 1 if op == NORM and side == 1 else ranks_ if side == 1 else max(1, high // 32)
            assert ends[0][side] - step < low <= ends[0][side]
            assert ends[1][side] <= high < ends[1][side] + step


def _from_network(rank: int, world: int, out: str) -> tuple[list[str], float | None, float | None]:
    """A run over several machines, and then one on this node, into one file: links, and the copy rate after each."""

    def between(run: calibrate.Run) -> None:
        run.link = "network"

    def on_node(run: calibrate.Run) -> None:
        run.meter.peer_copy = lambda: 5e9 + rank  # type: ignore[method-assign]
        run.meter.rates = lambda gemm_flops: pytest.fail("measured again")  # type: ignore[method-assign]

    before = _run(out, between).profile
    after = _run(out, on_node).profile
    assert {row["link"] for row in after["rows"]} == {"node", "network"}
    return sorted(after["links"]), before.get("copy_bytes_per_s"), after.get("copy_bytes_per_s")


@pytest.mark.ranks
def test_a_node_adds_its_copy_rate_to_what_a_network_measured(ranks: Any, tmp_path: Path):
    for found in ranks(2, _from_network, str(tmp_path / "links.json")):
        assert found == (["network", "node"], None, 5e9)


@pytest.mark.parametrize("wins", [None, "stock took 1 us"])
@pytest.mark.parametrize("op", [GATHER, REDUCE])
def test_plain_runs_what_a_layer_would_run(op: str, wins: str | None, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU: the kernel, but stock torch where a table says that it is faster for the rows that a rank has."""
    asked, ran = [], []

    def measured(x: torch.Tensor, *_: Any) -> str | None:
        asked.append(tuple(x.shape))
        return wins

    def compute(product: Product, arriving: Any = None) -> list[torch.Tensor]:
        ran.append(product.choice.impl)
        return [product.rows[0] @ product.weights[0].t()]

    choice = lambda *_, stock_wins=None, **__: Choice("reference" if stock_wins else "triton", "")
    for name, value in {"measured": measured, "linear_act_choice": choice}.items():
        monkeypatch.setattr(functional, name, value)
    monkeypatch.setattr(Product, "compute", compute)
    rig = calibrate.Rig.of(Call(op, 8, 16, 32, torch.float32, 2), tp_group(None), torch.device("cpu"))
    rig.result(OverlapPlan())
    assert asked == [(4 if op == GATHER else 8, 16)]
    assert ran == ["reference" if wins else "triton"]


# --- one writer -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_a_second_run_for_one_file_is_refused_while_the_first_goes_on(ranks: Any, tmp_path: Path):
    path = tmp_path / "links.json"
    with only_writer(path):
        for message in ranks(2, _foreign, str(path)):
            assert f"{path} is being written by another run" in message
    with only_writer(path):  # its lock file stays, and locks nobody out
        pass
    assert os.listdir(tmp_path) == [".links.json.lock"]


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    told = r"links.json.lock cannot be locked \(No locks available\): choose a file"
    with pytest.raises(ValueError, match=told), only_writer(tmp_path / "links.json"):
        pass


# --- the command ------------------------------------------------------------------------------------------------------


def _chosen(rank: int, world: int, path: str) -> tuple[str, str]:
    """What a group chooses by the file as it is, and as it would be had its figures been measured."""
    group, shape = tp_group(dist.group.WORLD), {"tokens": 8, "features_in": 16, "features_out": 32}
    like = {"dtype": torch.float32, "device": torch.device("cpu")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(link_profile.VARIABLE, path)
        dry = policy.select(GATHER, group, **shape, **like)
        content = json.loads(Path(path).read_text()) | {"dry": False}
        for row in content["rows"]:
            row |= {"plain_s": 1.0, "noise": 0.0, "chunked_s": {"2": 0.5 if row["clock"] == "with_host" else 0.4}}
        dist.barrier()  # both have read it
        if rank == 0:
            Path(path).write_text(json.dumps(content))
        forget(group)
        measured = policy.select(GATHER, group, **shape, **like)
    return dry.reason, f"{measured.kind} in {measured.pieces}, {measured.reason}"


@pytest.mark.nightly
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
        assert (
            measured == "chunked in 2, measured with the host's time (t8-k16-n32 fp32, 2 ranks): 0.50 of plain's time"
        )


def test_times_are_compared_by_two_clocks_over_rounds_that_ranks_share(monkeypatch: pytest.MonkeyPatch):
    rounds: list[tuple[int, int]] = []

    def compare(ours: Any, peer: Any, *, rounds: int, calls: int, seen: Any = rounds) -> tuple[Timing, Timing]:
        seen.append((rounds, calls))
        return Timing(1e4), Timing(1e4)

    def queued(ours: Any, peer: Any, device: torch.device, *, align: Any, **more: int) -> tuple[Timing, Timing]:
        align()
        compare(ours, peer, **more)
        return Timing(8e3, host=1e3), Timing(9e3, host=1e3)

    monkeypatch.setattr(calibrate_meter, "compare_fixed", compare)
    monkeypatch.setattr(calibrate_meter, "compare_queued", queued)
    meter = Meter(tp_group(None), torch.device("cpu"), torch.float32, seconds=2 * Options().seconds, dry=False)
    ours, peer = meter.compare(lambda: None, lambda: None)
    assert rounds == [(3, 1), (75, 1), (3, 1), (20, 4)]  # 1.5 s of two calls of 10 ms; the fewest rounds of four
    assert [ours.by(clock).value for clock in link_profile.CLOCKS] == [8e3, 1e4]
    assert [peer.by(clock).value for clock in link_profile.CLOCKS] == [9e3, 1e4]


def test_a_piece_costs_what_the_host_takes_for_it(monkeypatch: pytest.MonkeyPatch):
    """Links and rates are the device's."""
    times = calibrate_meter.Times(Timing(50.0, host=30.0), Timing(90.0))
    monkeypatch.setattr(Meter, "compare", lambda *_: (times, times))
    meter = Meter(tp_group(None), torch.device("cpu"), torch.float32, seconds=1.0, dry=True)
    assert meter._piece_seconds() == pytest.approx(30e-6)  # one rank: one piece
    assert meter._seconds_of(lambda: None) == pytest.approx(50e-6)


def test_a_profile_of_the_first_format_is_not_overwritten(tmp_path: Path):
    """Its rows do not say by which clock."""
    path = tmp_path / "links.json"
    path.write_text(json.dumps(link_profile.Profile("cpu", "cpu", measured=True).record() | {"format": 1}))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"links\.json: format 1, and this version reads 2"):
        calibrate.Run(replace(DRY, out=path), tp_group(None)).run()
    assert path.read_bytes() == before


def test_a_verdict_compares_with_plain_in_fp64():
    call = Call(REDUCE, 4, 8, 8, torch.float32, 1)
    rig = calibrate.Rig.of(call, tp_group(None), torch.device("cpu"))
    (verdict,) = rig.verdicts(OverlapPlan())
    assert isinstance(verdict, Verdict)
    assert verdict.ok
    assert verdict.error > 0
