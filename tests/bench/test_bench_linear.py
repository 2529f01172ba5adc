"""The benchmarks of the linear ops: shapes, gates, peers that compute the same, what a GPU will be asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from shardfuse.bench.harness import problem, runner, stock
from shardfuse.bench.harness.benchmark import Benchmark, Settings, Work
from shardfuse.bench.harness.gate import check_outputs
from shardfuse.bench.harness.problem import DRY, Operands, Problem
from shardfuse.bench.harness.timing import Ceilings, Timing
from shardfuse.bench.suites import gated, linear_act, linear_backward, mlp, mlp_pair, small_m
from shardfuse.bench.suites.mlp_pair import Pair, Shape
from shardfuse.kernels.dev import shapes
from shardfuse.kernels.linear import linear_act_choice

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LINEAR = (linear_act, linear_backward, gated, small_m)
MODULES = (*LINEAR, mlp)
NAMES = [module.BENCHMARK.name for module in MODULES]
REFERENCE = linear_act_choice(torch.float32, CPU, "reference")


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "kind", "tp", "D", "widths"),
    [
        ("llama3-8b", "qkv", 1, 4096, (4096, 1024, 1024)),
        ("llama3-70b", "qkv", 8, 8192, (1024, 128, 128)),
        ("llama3-70b", "down", 8, 3584, (8192,)),
        ("qwen3-32b", "qkv", 4, 5120, (2048, 256, 256)),  # 64 heads of 128 on a width of 5120
        ("qwen3-32b", "o", 4, 2048, (5120,)),
        ("qwen3-32b", "gate_up", 1, 5120, (25600, 25600)),
        ("gpt3-175b", "up", 8, 12288, (6144,)),
        ("gpt3-13b", "qkv", 2, 5120, (2560, 2560, 2560)),
    ],
)
def test_projections_of_known_models(model, kind, tp, D, widths):
    found = shapes.projection(model, kind, tp, 16)
    assert (found.D, found.widths, found.F) == (D, widths, sum(widths))


def test_grid_covers_every_model_degree_and_token_count_once():
    names = [each.name for each in shapes.grid((*shapes.KINDS, shapes.GATE_UP))]
    assert len(names) == len(set(names)) == 5 * len(shapes.MODELS) * len(shapes.DEGREES) * len(shapes.TOKENS)


def test_every_split_is_whole():
    for model in shapes.MODELS.values():
        for tp in shapes.DEGREES:
            assert not any(size % tp for size in (model.F, model.N, model.K))
            assert model.N % model.K == 0


def test_short_run_is_a_dozen():
    assert sum(map(len, shapes.SHORT.values())) == 12
    assert shapes.SHORT.keys() == {module.BENCHMARK.name for module in LINEAR}


# --- what fusion can gain ---------------------------------------------------------------------------------------------

H100 = Ceilings(flops=750e12, bandwidth=3e12)


@pytest.mark.parametrize("T", [4096, 16384])
@pytest.mark.parametrize(("gated", "passes"), [(False, 6), (True, 14)])
def test_bound_of_an_mlp(T, gated, passes):
    """By hand: passes * T * F * 2 bytes, over 6 (gated 9) products of 2 * T * D * F."""
    shape = Shape(T, 4096, 16384, torch.bfloat16, gated=gated)
    by_hand = passes * 2 / 3e12 / ((9 if gated else 6) * 2 * 4096 / 750e12)
    work = shape.work()
    assert work.bound(H100) == pytest.approx(by_hand)
    # Each weight's gradient is read in bf16, its buffer read and written in fp32; a third of the products is wgrad.
    added = (2 + 4 + 4) / 3e12 / (3 * 2 * T / 750e12)
    assert shape.work(accumulated=True).bound(H100) == pytest.approx(by_hand + added)


def test_no_bound_where_memory_is_the_limit():
    assert Work(flops=750 * 10**9, bytes=2 * 10**9, extra=3 * 10**8).bound(H100) == pytest.approx(0.1)
    assert Work(flops=750 * 10**9, bytes=4 * 10**9, extra=3 * 10**8).bound(H100) == 0


# --- gates ------------------------------------------------------------------------------------------------------------

TINY = {
    linear_act: DRY["qkv"],
    linear_backward: DRY["up"],
    gated: DRY["gate_up"],
    small_m: DRY["few"],
}


def _chosen(module: ModuleType, settings: Settings) -> list[Problem]:
    return problem.problems((TINY[module],), settings)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Every benchmark with one tiny problem, its rows those of a GPU, on the reference."""
    for module in LINEAR:
        monkeypatch.setattr(module, "chosen", partial(_chosen, module))
    return Settings(CPU, seconds=0.0)


def _first_call_wrong(function: Callable[..., Any], part: int | None) -> Callable[..., Any]:
    """``function``, but a result of its first call (of a tuple: one of them) is a thousandth too large.

    The gate runs ours first.
    """
    first = [True]

    def wrong(*arguments: Any, **options: Any) -> Any:
        found = function(*arguments, **options)
        if not first:
            return found
        first.clear()
        return found * 1.001 if part is None else (*found[:part], found[part] * 1.001, *found[part + 1 :])

    return wrong


@pytest.mark.parametrize(
    ("module", "name", "part", "told"),
    [
        (linear_act, "linear_act", 1, {"y1", "dw1"}),
        (small_m, "linear_act", 0, {"y0"}),
        (gated, "gated_linear", None, {"h"}),
        (linear_backward, "linear_act", 0, {"backward.dw0"}),
        (linear_backward, "_ours_dgrad", None, {"dgrad.dz"}),
        (linear_backward, "_ours_wgrad", 1, {"wgrad.db"}),
    ],
    ids=["linear_act", "small_m", "gated", "backward", "dgrad", "wgrad"],
)
@pytest.mark.parametrize("broken", [False, True], ids=["right", "wrong"])
def test_gates(monkeypatch, tiny, module, name, part, told, broken):
    if broken:
        monkeypatch.setattr(module, name, _first_call_wrong(getattr(module, name), part))
    (case,) = (each.name for each in _chosen(module, tiny))
    red = {verdict.name for _, verdict in module.check(tiny, [case]) if not verdict.ok}
    assert red >= told if broken else not red


def test_gate_notices_a_gradient_that_is_written_instead_of_added(monkeypatch, tiny):
    right, first = linear_backward._ours_into, []

    def into(operands: Operands, *arguments: Any) -> None:
        first.append(operands)
        if operands is first[0]:
            operands.buffers[0].zero_()
        right(operands, *arguments)

    monkeypatch.setattr(linear_backward, "_ours_into", into)
    (case,) = (each.name for each in _chosen(linear_backward, tiny))
    red = {verdict.name for _, verdict in linear_backward.check(tiny, [case]) if not verdict.ok}
    assert red == {"into.dw"}


# --- peers ------------------------------------------------------------------------------------------------------------


def _agree(ours: Callable[[Operands], Any], peer: Callable[[Operands], Any], kind: str) -> None:
    """Both against ours in fp64, as any result is judged."""
    operands = Problem(DRY[kind], torch.float32).operands(CPU)
    exact = operands.to(torch.float64)

    def named(found: Any) -> dict[str, torch.Tensor]:
        return dict(enumerate(found if isinstance(found, (tuple, list)) else [found]))

    for verdict in check_outputs(
        named(peer(operands)), low=lambda: named(ours(operands)), oracle=lambda: named(ours(exact))
    ):
        assert verdict.ok, verdict


GELU = {"activation": "gelu_tanh"}
PEERS = {
    "linear_act, eager": ("up", partial(linear_act._ours, **GELU, impl="auto"), partial(problem.eager, **GELU)),
    "linear_act, fused": (  # on a CPU torch takes the erf form here, on a GPU the tanh form
        "up",
        partial(linear_act._ours, activation="gelu_erf", impl="auto"),
        partial(linear_act._fused, problem=Problem(DRY["up"], torch.float32)),
    ),
    "linear_act, plain": (
        "up",
        lambda operands: linear_act._ours(operands, "identity", "auto")[0] - operands.biases[0],
        problem.plain_gemm,
    ),
    "linear_act, packed": (
        "qkv",
        lambda operands: torch.cat(linear_act._ours(operands, "identity", "auto"), -1) - torch.cat(operands.biases),
        problem.plain_gemm,
    ),
    "small_m, eager": ("few", partial(small_m._ours, **GELU, impl="auto"), partial(small_m._eager, **GELU)),
    "dgrad": (
        "up",
        partial(linear_backward._ours_dgrad, **GELU, choice=REFERENCE),
        partial(linear_backward._eager_dgrad, **GELU),
    ),
    "wgrad": ("up", partial(linear_backward._ours_wgrad, **GELU, choice=REFERENCE), linear_backward._eager_wgrad),
    "gated": (
        "gate_up",
        partial(gated._ours, activation="silu", impl="auto"),
        gated._eager(Problem(DRY["gate_up"], torch.float32)),
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_peers_compute_what_ours_computes(name):
    kind, ours, peer = PEERS[name]
    _agree(ours, peer, kind)


def test_accumulating_peers_add_the_same():
    operands = Problem(DRY["up"], torch.float32).operands(CPU)
    linear_backward._ours_into(operands, "gelu_tanh", REFERENCE)
    once = operands.buffers[0].clone()
    linear_backward._eager_into(operands)
    torch.testing.assert_close(operands.buffers[0], 2 * once)
    assert once.norm() > 1


def test_liger_is_a_peer_where_it_is_installed(monkeypatch):
    settings = Settings(GPU, short=True)
    assert not any("Liger" in row.peer_name for row in gated.plan(settings))

    names: list[str] = []
    for name, function in (("swiglu", "LigerSiLUMulFunction"), ("geglu", "LigerGELUMulFunction")):
        module = ModuleType(f"liger_kernel.ops.{name}")
        act = {"swiglu": "silu", "geglu": "gelu_tanh"}[name]
        multiply = lambda gate, up, act=act: names.append(act) or problem.apply_activation(gate, act) * up
        setattr(module, function, type(function, (), {"apply": staticmethod(multiply)}))
        monkeypatch.setitem(sys.modules, f"liger_kernel.ops.{name}", module)
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(stock.importlib.util, "find_spec", lambda name: name == "liger_kernel" or None)
    rows = [row for row in gated.plan(settings) if "Liger" in row.peer_name]
    assert {row.metric for row in rows} == {gated.FORWARD, mlp_pair.STEP}
    assert len(rows) == 2 * len(shapes.SHORT["gated"])

    found = list(gated._liger_rows(Settings(CPU, dry=True), Problem(DRY["gate_up"], torch.float32)))
    assert len(found) == 2
    assert all(timing.value > 0 for row in found[:1] for timing in row.run())
    assert names == ["silu"]
    multiply = stock.liger_multiply("silu")
    _agree(partial(gated._ours, activation="silu", impl="auto"), partial(gated._stock, multiply=multiply), "gate_up")
    assert stock.liger_multiply("relu") is None


# --- the MLP ----------------------------------------------------------------------------------------------------------

MLP = Shape(6, 16, 32, torch.float32)
GATED_MLP = Shape(6, 16, 32, torch.float32, gated=True, activation="silu")


@pytest.mark.parametrize("shape", [MLP, GATED_MLP], ids=["plain", "gated"])
@pytest.mark.parametrize("broken", [False, True], ids=["right", "wrong"])
def test_mlp_gate(monkeypatch, shape, broken):
    if broken:
        right = mlp_pair.ParallelMLP.forward
        monkeypatch.setattr(mlp_pair.ParallelMLP, "forward", lambda self, x: right(self, x) * 1.001)
    found = list(mlp_pair.verdicts(Settings(CPU), [shape], [shape.name], mlp.VARIANTS))
    red = {verdict.name for _, verdict in found if not verdict.ok}
    labels = {"y", "recompute=1: y", "recompute=2: y", "fuse_wgrad_accumulation=True: y"}
    assert labels <= {verdict.name for _, verdict in found}
    assert red >= labels if broken else not red


def test_bytes_kept_by_eager_are_what_the_formula_says():
    pair = Pair.of(Settings(CPU), MLP)
    assert mlp_pair.kept_bytes(pair.stock, pair) == 4 * (6 * 16 + 2 * 6 * 32)
    pair = Pair.of(Settings(CPU), GATED_MLP)
    assert mlp_pair.kept_bytes(pair.stock, pair) == 4 * (6 * 16 + 4 * 6 * 32)


@pytest.mark.parametrize(("shape", "target"), [(MLP, mlp.MEMORY), (GATED_MLP, gated.MEMORY)], ids=["plain", "gated"])
def test_recomputation_keeps_less(shape, target):
    levels = [mlp_pair.memory_row(Settings(CPU), shape, level, target) for level in mlp_pair.LEVELS]
    ours, eager = zip(*(row.run() for row in levels))
    kept = [each.value for each in ours]
    assert kept == sorted(kept, reverse=True)
    assert kept[2] == 4 * 6 * 16  # x alone
    assert eager[1].value / kept[1] >= target


@pytest.mark.parametrize("shape", [MLP, GATED_MLP], ids=["plain", "gated"])
def test_bound_row_compares_gains(monkeypatch, shape):
    monkeypatch.setattr(mlp_pair, "ceilings", lambda device: H100)
    ran: list[tuple[int, ...]] = []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: ran.append((*a.shape, b.shape[1])) or product(a, b))
    ours, bound = mlp_pair.bound_row(Settings(CPU, seconds=0.0), shape, 0.8).run()
    assert ours.value > -1
    assert bound.value > 0
    flops = sum(2 * m * k * n for m, k, n in ran[: 9 if shape.gated else 6])
    assert flops == shape.work().flops  # the products of one step, all of them


def test_gain_is_as_noisy_as_both_times_together():
    """A gain of 10 % between times that are each 1 % apart from themselves: 22 % of it, and the products' own."""
    noise = mlp_pair.gain_noise(0.1, Timing(100.0, 0.01), Timing(110.0, 0.01), Timing(90.0, 0.005))
    assert noise == pytest.approx(0.02 * 1.1 / 0.1 + 0.005)


def test_memory_target_counts_where_arithmetic_allows_it():
    targets = {row.case: row.target for row in mlp.plan(Settings(GPU)) if row.metric.endswith("recompute=1")}
    for shape in mlp.GPU_SHAPES:
        assert targets[shape.name] == (mlp.MEMORY if shape.F >= 2 * shape.D else None)
    assert {None, mlp.MEMORY} == set(targets.values())


def test_accumulating_sides_add_the_same_gradients():
    pair = Pair.of(Settings(CPU), MLP, fuse_wgrad_accumulation=True)
    for module in (pair.ours, pair.stock):
        mlp_pair.attach_buffers(module)
    for _ in range(2):
        mlp_pair._step(pair.ours, pair)()
        mlp_pair._adding_step(pair)()
    stock_buffers = {name: parameter.main_grad for name, parameter in pair.stock.named_parameters()}
    for name, parameter in pair.ours.named_parameters():
        torch.testing.assert_close(parameter.main_grad, stock_buffers[name])
        assert parameter.main_grad.norm() > 0


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("short", [True, False], ids=["short", "all"])
@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_gpu_plan(module, short):
    plan = module.plan(Settings(GPU, short=short))
    assert len({row.key for row in plan}) == len(plan)
    assert {row.target for row in plan} <= {None, *module.TARGETS.values()}
    assert all(row.slow for row in plan if "torch.compile" in row.peer_name)
    assert all((row.work is not None) == row.metric.endswith("us") for row in plan if "host" not in row.metric)
    # Rows against eager say how much of the bound was won.
    assert all(row.work.extra > 0 for row in plan if row.peer_name == "eager" and row.work and "gelu" in row.case)
    slow = [row.slow for row in plan]
    assert slow == sorted(slow), "a slow peer stands before a fast one"
    if short:
        assert sum("max-autotune" in row.peer_name for row in plan) <= 2


def test_short_plans_fit_one_call():
    """A quick row takes about a second with its operands, one against a searching peer most of a minute."""
    rows = [row for module in MODULES for row in module.plan(Settings(GPU, short=True))]
    assert sum(not row.slow for row in rows) <= 100
    assert sum(row.slow for row in rows) <= 16


def test_targets_of_the_large_shapes():
    plan = [row for row in linear_act.plan(Settings(GPU)) if row.peer_name == "cuBLAS x @ w.T"]
    large = {each.name: each.projection.T >= 4096 for each in linear_act.chosen(Settings(GPU))}
    assert {row.target for row in plan} == {None, linear_act.PLAIN}
    assert all((row.target == linear_act.PLAIN) is large[row.case] for row in plan)
    fp32 = {row.case: row.target for row in mlp.plan(Settings(GPU, short=True)) if row.metric == mlp_pair.INTO_FP32}
    assert [case for case, target in fp32.items() if target == 1.12] == [mlp.SHORT_SHAPES[0].name]


@pytest.mark.parametrize("measured", [linear_act.BENCHMARK, gated.BENCHMARK, mlp.BENCHMARK], ids=lambda b: b.name)
def test_cpu_rows_run(monkeypatch, measured: Benchmark):
    monkeypatch.setattr(linear_act, "ON_CPU", (DRY["up"],))
    monkeypatch.setattr(gated, "ON_CPU", (DRY["gate_up"],))
    monkeypatch.setattr(mlp, "CPU_SHAPES", (MLP,))
    outcome = runner.run(measured, Settings(CPU, seconds=0.0))
    assert outcome.green
    assert outcome.rows
    assert all(row.ratio > 0 and row.target is not None for row in outcome.rows if "recompute=0" not in row.metric)


def test_a_compiled_module_without_a_truth_value_may_take_the_forward():
    class Compiled:
        """As torch 2.11's compiled modules."""

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return module(x)

        def __len__(self) -> int:
            raise TypeError("Linear does not support len()")

    module, x = torch.nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    y = stock.training_step(module, x, torch.ones(4, 2), call=Compiled())
    assert torch.equal(y, module(x))
    assert torch.equal(module.bias.grad, torch.full((2,), 4.0))
