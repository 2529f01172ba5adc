"""The benchmarks `overlap` and `all_reduce_norm`: plans, gates, what is timed."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardfuse.bench.harness import projection, runner, stale, virtual_ranks
from shardfuse.bench.harness.benchmark import Settings
from shardfuse.bench.harness.report import Row
from shardfuse.bench.harness.timing import Timing
from shardfuse.bench.suites import all_reduce_norm, overlap
from shardfuse.kernels.comm import reduce
from shardfuse.kernels.comm.reduce_config import pick_shots
from shardfuse.kernels.dev.accuracy import judge
from shardfuse.kernels.dev.cases import all_reduce_norm as reduce_cases
from shardfuse.kernels.dev.registry import to_double
from shardfuse.kernels.linear import linear_act
from shardfuse.kernels.linear.config import pick_config
from shardfuse.kernels.linear.gemm import Gemm
from shardfuse.kernels.runtime import device as chips
from shardfuse.kernels.runtime.signals import ExchangeTimeout
from shardfuse.parallel.overlap import link_model, link_profile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU, GPU = torch.device("cpu"), torch.device("cuda")
DRY = Settings(DEVICE, dry=True)
MODULES = (overlap, all_reduce_norm)
NAMES = [module.BENCHMARK.name for module in MODULES]
interpret = pytest.mark.interpret


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine's GPU were one."""
    monkeypatch.setattr(projection, "load", lambda device: link_profile.shipped("sm_90"))


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_short_plan_is_short_and_part_of_the_whole_one(module: Any, h100: None):
    assert runner.find(module.BENCHMARK.name) is module.BENCHMARK
    short, whole = ([row.key for row in module.plan(Settings(GPU, short=short))] for short in (True, False))
    assert 6 <= len(short) <= 15
    assert len(set(whole)) == len(whole)
    assert set(short) < set(whole)
    assert {case for case, *_ in whole} == {each.name for each in module.problems(Settings(GPU))}


def test_targets_are_those_of_the_project(h100: None):
    whole = Settings(GPU)
    assert list(overlap.TARGETS.values()) == [1 / 1.03, 1 / 1.10]
    targets = {(row.case.split("-")[0], row.metric): row.target for row in overlap.plan(whole)}
    for op in ("gather", "scatter"):
        assert targets[op, overlap.TIME] == 1 / 1.10
    assert targets["gather", overlap.SET] == 1 / 1.03
    assert {each.sizes[-1] for each in overlap.problems(whole) if each.gathers} == {2, 4, 8}
    untargeted = (overlap.EXPOSED, projection.PROJECTED)
    assert {target for (_, metric), target in targets.items() if metric in untargeted} == {None}
    assert list(all_reduce_norm.TARGETS.values()) == [1.5]
    cases = {case.name: case for case in all_reduce_norm.problems(whole)}
    assert {case.sizes["T"] for case in cases.values()} == {1, 16, 64}
    for row in all_reduce_norm.plan(whole):
        T, D, R = (cases[row.case].sizes[letter] for letter in "TDR")
        taken = "one shot" if pick_shots(T, D, 2, R) == 1 else "two shots"
        assert row.target == (1.5 if row.metric.startswith(taken) else None)


@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_projections_say_that_they_are_and_from_what(module: Any, h100: None):
    """Never a measurement: no target, no noise, and the model's inputs beside it."""
    rows = [row for row in module.plan(Settings(GPU)) if "projected" in row.metric]
    assert len(rows) == len(module.problems(Settings(GPU)))
    for row in rows:
        assert row.peer_name == (
            "projected plain collective: start 8.4 us, alpha 3.4 us, beta 450 GB/s, copies 450 GB/s, GEMM 989 TFLOP/s, "
            "published or assumed for NVIDIA H100"
        )
        found = Row.of(row, *row.run())
        assert (found.target, found.met, found.noise, found.work) == (None, None, None, None)


@pytest.mark.parametrize(("exposed", "figure"), [(False, "total_s"), (True, "exposed_s")])
def test_projections_are_the_models(exposed: bool, figure: str, h100: None):
    call = link_model.Call("all_gather_linear", 8192, 8192, 3584, torch.bfloat16, 8)
    profile = link_profile.shipped("sm_90")
    row = projection.projection("case", call, GPU, exposed=exposed)
    kinds = ("kernel", "plain")
    expected = [getattr(link_model.predict(profile, "node", call, kind), figure) * 1e6 for kind in kinds]
    assert [timing.value for timing in row.run()] == expected


def test_links_that_nobody_knows_are_not_projected(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(projection, "load", lambda device: None)
    assert not any("projected" in row.metric for module in MODULES for row in module.plan(Settings(GPU)))
    measured = replace(link_profile.shipped("sm_90"), measured=True, device="Some GPU")
    monkeypatch.setattr(projection, "load", lambda device: measured)
    assert overlap.plan(Settings(GPU))[-1].peer_name.endswith(", measured on Some GPU")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_products_that_wait_have_the_tiles_of_those_that_do_not(arch: str):
    """Or "every flag set" would compare tile shapes."""
    for problem in overlap.problems(Settings(GPU)):
        T, K, N, _ = problem.sizes
        gemm = Gemm("nt", T, N, K, torch.bfloat16, torch.bfloat16, epilogue=("bias", "gelu_tanh"))
        if problem.gathers:
            assert pick_config(arch, replace(gemm, remote="gather")) == pick_config(arch, gemm)


def test_results_are_missing(tmp_path: Path):
    found = {item.name: item.state for item in stale.survey(tmp_path)}
    assert found["overlap"] == found["all_reduce_norm"] == "missing"
    assert not set(overlap.BENCHMARK.ops + all_reduce_norm.BENCHMARK.ops) & found.keys()  # none lacks a benchmark


# --- gates and sides, on a GPU with its streams, elsewhere by ranks that take turns -----------------------------------


@interpret
@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_gate_is_green(module: Any):
    names = list(dict.fromkeys(row.gate for row in module.plan(DRY)))
    verdicts = list(module.check(DRY, names))
    assert {case for case, _ in verdicts} == set(names)
    assert all(verdict.ok for _, verdict in verdicts), [str(verdict) for _, verdict in verdicts]


def _off(call: Any) -> Any:
    """``call`` with results that are a little too large."""

    def run(*args: Any, **kwargs: Any) -> Any:
        found = call(*args, **kwargs)
        return tuple(1.001 * each for each in found) if isinstance(found, tuple) else 1.001 * found

    return run


@interpret
@pytest.mark.parametrize(
    ("module", "name"),
    [
        (overlap, "all_gather_linear"),
        (overlap, "linear_reduce_scatter"),
        (overlap, "linear_all_reduce"),
        (all_reduce_norm, "all_reduce_rmsnorm"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_op_turns_its_benchmark_red(module: Any, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, name, _off(getattr(module, name)))
    monkeypatch.setattr(all_reduce_norm, "MODES", all_reduce_norm.MODES[:1])
    cases = [each.name for each in module.problems(DRY) if module is all_reduce_norm or each.spec.name == name]
    assert len(cases) == 1
    verdicts = [verdict for _, verdict in module.check(DRY, cases)]
    assert not verdicts[0].ok


@interpret
def test_product_that_waits_for_flags_is_checked_too(monkeypatch: pytest.MonkeyPatch):
    problem = overlap.problems(DRY)[0]
    monkeypatch.setattr(overlap, "_waiting", lambda *given: _off(overlap._forward(*given)))
    [row] = [row for row in overlap.plan(DRY) if row.metric == overlap.SET]
    assert row.gate != problem.name
    red = [(gate, verdict.name) for gate, verdict in overlap.check(DRY, [problem.name, row.gate]) if not verdict.ok]
    assert red == [(row.gate, overlap.FLAGGED)]


@interpret
def test_the_row_with_every_flag_set_is_checked_without_a_kernel_that_waits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(overlap, "_ranks", lambda *given: pytest.fail("ranks wait for each other"))
    [row] = [row for row in overlap.plan(DRY) if row.metric == overlap.SET]
    [(gate, verdict)] = overlap.check(DRY, [row.gate])
    assert (gate, verdict.name, verdict.ok) == (row.gate, overlap.FLAGGED, True)


@interpret
@pytest.mark.parametrize("index", range(3), ids=["gather", "scatter", "reduce"])
def test_peers_do_what_ours_does(index: int):
    """Step by step: the same result. Then the copies alone leave in the slots what ours sends."""
    problem = overlap.problems(DRY)[index]
    with overlap._ranks(DRY, problem) as ranks:
        sides = overlap._Sides.of(problem, ranks, 0)
        for slot in sides.slots:
            slot.fill_(math.nan)
        found = sides.in_turn(ranks)
        found = torch.cat(found) if problem.spec is overlap.SCATTER else torch.stack(found)
        low = overlap._reference(problem, sides.drawn)["y"]
        oracle = overlap._reference(problem, to_double(sides.drawn, DEVICE))["y"]
        verdict = judge("y", found, low, oracle, terms=problem.spec.terms(problem.case))
        assert verdict.ok, verdict
        for slot in sides.slots:
            slot.fill_(math.nan)
        ranks.run(sides.copies)
        assert not any(slot.isnan().any() for slot in sides.slots)


@interpret
@pytest.mark.parametrize("norm", [all_reduce_norm.OURS, all_reduce_norm.TORCH])
def test_steps_return_what_ours_does(norm: str):
    (case,) = all_reduce_norm.problems(DRY)
    mode = all_reduce_norm.MODES[0]
    with all_reduce_norm._ranks(DRY, case, mode) as ranks:
        drawn = reduce_cases.make_inputs(case, DEVICE, 0)
        found = [torch.stack(each) for each in zip(*ranks.run(all_reduce_norm._steps(ranks, drawn, norm)))]
    low, oracle = (reduce_cases.SPEC.run(each, case, "reference") for each in (drawn, to_double(drawn, DEVICE)))
    for name, out in zip(("y", "s"), found):
        verdict = judge(name, out, low[name], oracle[name], terms=reduce_cases.SPEC.terms(case))
        assert verdict.ok, verdict


@interpret
@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_call_whose_wait_gave_up_has_no_number(module: Any, monkeypatch: pytest.MonkeyPatch):
    def gives_up(x: torch.Tensor, *args: Any, signals: Any, **options: Any) -> Any:
        signals.report.copy_(torch.tensor([1, 0, 1, 3, 7, 6, 0, 0], dtype=torch.int32))
        return x, x

    row = next(row for row in module.plan(DRY) if row.metric in (overlap.TIME, all_reduce_norm.MODES[0].metric))
    monkeypatch.setattr(module, "all_gather_linear" if module is overlap else "all_reduce_rmsnorm", gives_up)
    with pytest.raises(ExchangeTimeout, match=r"in vain for data from rank 1 \(chunk 3, exchange 7"):
        row.run()


# --- figures from timings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("whole", "products", "share"), [(10.0, 8.0, 20.0), (10.0, 10.0, 0.1), (8.0, 10.0, 0.1), (20.0, 10.0, 50.0)]
)
def test_exposed_is_what_the_products_do_not_take(whole: float, products: float, share: float):
    found = overlap._share(Timing(whole, 0.01), Timing(products, 0.02))
    assert found.value == pytest.approx(share)
    assert found.noise == 0.02
    assert overlap._share(Timing(whole), Timing(products)).noise is None


@pytest.mark.parametrize(("products", "copies", "peer"), [(3.0, 2.0, 3.0), (2.0, 3.0, 3.0)])
def test_peer_of_an_overlap_is_the_slower_half(
    products: float, copies: float, peer: float, monkeypatch: pytest.MonkeyPatch
):
    times = {"product": products, "copies": copies}
    sides = SimpleNamespace(ours="ours", product="product", copies="copies")
    seconds: list[float] = []

    def compare(settings: Settings, ours: list[Any], alone: list[partial[Any]]) -> tuple[Timing, Timing]:
        (name,) = alone[0].args
        seconds.append(settings.seconds)
        return Timing(10.0 + times[name]), Timing(times[name])

    monkeypatch.setattr(overlap, "_sets", lambda problem, ranks: [sides])
    monkeypatch.setattr(overlap, "_compare", compare)
    settings = replace(DRY, device=CPU, seconds=3.0)
    found = overlap._overlapped(settings, overlap.problems(settings)[0])
    assert [timing.value for timing in found] == [10.0 + peer, peer]  # ours from the same run
    assert seconds == [1.5, 1.5]


def test_time_of_an_exchange_is_its_share_of_a_row(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, int, int]] = []  # which side, which operands, which rank

    def made(name: str) -> Any:
        def make(ranks: Any, drawn: int, **options: Any) -> Any:
            return lambda rank: calls.append((name, drawn, rank))

        return make

    def compare(ours: list[Any], steps: list[Any], *args: Any, **options: Any) -> tuple[Timing, Timing]:
        calls.clear()
        ours[0]()
        return Timing(80.0, 0.01, 16.0), Timing(160.0, 0.02)

    monkeypatch.setattr(all_reduce_norm, "SPEC", SimpleNamespace(make_inputs=lambda case, device, seed: seed))
    monkeypatch.setattr(
        all_reduce_norm, "_ranks", lambda *given: virtual_ranks.TakingTurns(2, (1,), torch.float32, CPU)
    )
    monkeypatch.setattr(all_reduce_norm, "_ours", made("ours"))
    monkeypatch.setattr(all_reduce_norm, "_steps", made("steps"))
    monkeypatch.setattr(all_reduce_norm, "compare", compare)
    found = all_reduce_norm._time(Settings(GPU), None, all_reduce_norm.MODES[0], all_reduce_norm.OURS)
    assert found == (Timing(10.0, 0.01, 2.0), Timing(20.0, 0.02))
    assert calls == [("ours", drawn, rank) for rank in range(2) for drawn in range(all_reduce_norm.SETS)]


# --- shares of a chip -------------------------------------------------------------------------------------------------


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many programs each launch has."""
    seen: list[int] = []
    launch = chips.Prepared.launch

    def noted(self: Any, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
        seen.append(grid[0])
        launch(self, grid, *args, **options)

    monkeypatch.setattr(chips.Prepared, "launch", noted)
    return seen


@interpret
def test_products_take_no_more_than_their_share(grids: list[int]):
    size = 4096 if DEVICE.type == "cuda" else 128  # of many tiles
    x, weight = torch.randn(size, 16, device=DEVICE), torch.randn(size, 16, device=DEVICE)
    linear_act(x, weight, impl="triton")
    with chips.slots(2):
        linear_act(x, weight, impl="triton")
        with chips.slots(1):
            linear_act(x, weight, impl="triton")
        linear_act(x, weight, impl="triton")
    linear_act(x, weight, impl="triton")
    assert grids[1:4] == [2, 1, 2]
    assert grids[0] == grids[4] > 2


def test_shares_end_with_their_block_whatever_happens():
    free = chips.program_slots(CPU)
    with contextlib.suppress(KeyError), chips.slots(1):
        assert chips.program_slots(CPU) == chips.capped(64) == 1
        raise KeyError
    assert chips.program_slots(CPU) == free
    assert chips.capped(64) == 64
    with pytest.raises(ValueError, match=r"slots\(0\): expected at least 1"), chips.slots(0):
        pass


@interpret
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks that take turns are a CPU's, and kernels are not interpreted"
)
@pytest.mark.parametrize("gather", [False, True], ids=["scattered", "gathered"])
def test_sums_of_sent_addends_take_no_more_than_their_share(grids: list[int], gather: bool):
    shape = (4 + 4, 16) if gather else (2, 2, 16)
    with virtual_ranks.TakingTurns(2, shape, torch.float32, CPU) as ranks:

        def body(rank: int) -> Any:
            peers, signals = ranks.begin(rank)
            return reduce.reduce_scattered(peers, signals, 4, 16, torch.float32, gather=gather)

        body(0)
        ranks.run(body)
    assert ranks.share == 1
    assert grids[0] > 1
    assert grids[1:] == [1, 1]


# --- with a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="ranks that run beside each other need a GPU")
@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_every_row_on_a_gpu(module: Any):
    """Graphs, real waits, every peer: tiny shapes, single calls."""
    outcome = runner.run(module.BENCHMARK, DRY)
    assert outcome.green
    assert len(outcome.rows) == len(module.plan(DRY))
