"""oneDNN's products on a CPU, as ``auto`` chooses them, against stock torch.

On AMD's processors stock torch multiplies with MKL's slow code. The rows against "stock torch, MKL's fast path forced"
tell what is left of each gain where that is not so, as on Intel's: none of this is owed to fusion alone. Every ratio is
the median over rounds in which both sides run once, one after the other.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.dev.accuracy import Verdict
from ...kernels.linear import apply_activation, gated_linear, linear_act
from ...kernels.runtime import processor
from ...layers.mlp import ParallelMLP
from ..harness import fast_mkl
from ..harness.benchmark import Benchmark, Measurement, Settings
from ..harness.fast_mkl import Forced
from ..harness.gate import Outputs, check_outputs, module_outputs
from ..harness.stock import StockGatedMLP, StockMLP, compiled, training_step
from ..harness.timing import Timing, calls_for, compare_rounds, keep_freed_memory

ROUNDS, FEW_ROUNDS = 40, 120  # of many tokens, and of few: there a round is short
SAMPLE_US = 10000.0  # of one side in one round, at least


@dataclass(frozen=True)
class Case:
    """T tokens through D -> F, in an MLP back to D.

    ``way``: "forward" (of the op, weights packed), "step" (forward and backward), or "inference" (in eval(), packed).
    """

    what: str  # "linear_act", "gated_linear", "mlp", "gated_mlp"
    way: str
    T: int
    D: int
    F: int

    @property
    def name(self) -> str:
        return f"{self.what}-{self.way}-t{self.T}-d{self.D}-f{self.F}"

    @property
    def metric(self) -> str:
        return "forward + backward, us" if self.way == "step" else f"{self.way}, us"


LARGE, SMALL = (512, 1024, 4096), (64, 256, 1024)
FEW = (1, 2, 4, 8)
AMD = {
    Case("linear_act", "forward", *LARGE): 2.2,
    Case("gated_linear", "forward", *LARGE): 2.0,
    Case("mlp", "step", *LARGE): 1.8,
    Case("mlp", "step", *SMALL): 1.5,
    Case("mlp", "inference", *LARGE): 2.0,
    Case("gated_mlp", "inference", *LARGE): 2.0,
}
INTEL = {case: 1.05 if case.way == "inference" else 0.98 for case in AMD}
FEW_TOKENS = {Case("mlp", way, T, *SMALL[1:]): 0.97 for way in ("step", "inference") for T in FEW}
TARGETS = {
    **{f"AMD, {case.name}": target for case, target in AMD.items()},
    **{f"Intel, {case.name}": target for case, target in INTEL.items()},
    "1 to 8 tokens": 0.97,
}
DRY = (
    Case("linear_act", "forward", 8, 32, 64),
    Case("gated_mlp", "inference", 8, 32, 64),
    Case("mlp", "step", 8, 32, 64),
)
STOCK = "stock torch"


def cases(settings: Settings) -> dict[Case, float | None]:
    """The cases and their targets on this processor."""
    if settings.dry:
        return dict.fromkeys(DRY)
    vendor = processor.architecture().split("-")[1]
    mine: dict[Case, float | None] = {"amd": dict(AMD), "intel": dict(INTEL)}.get(vendor, dict.fromkeys(AMD))  # type: ignore[assignment]
    return mine | FEW_TOKENS


def plan(settings: Settings) -> list[Measurement]:
    found = cases(settings)
    rows = [_row(case, STOCK, target, settings) for case, target in found.items()]
    if settings.dry:
        return rows
    if fast_mkl.available():
        rows += [_row(case, fast_mkl.NAME, None, settings) for case in found]
    return rows + [_row(case, "torch.compile", None, settings) for case in found if case.what.endswith("mlp")]


def _row(case: Case, peer: str, target: float | None, settings: Settings) -> Measurement:
    def run() -> tuple[Timing, Timing]:
        torch._dynamo.reset()
        keep_freed_memory()
        ours = _ours(case)
        for _ in range(3):
            ours()
        rounds = 1 if settings.dry else FEW_ROUNDS if case.T in FEW else ROUNDS
        calls = 1 if settings.dry else calls_for(ours, SAMPLE_US)
        kinds: dict[str, Any] = {STOCK: build, fast_mkl.NAME: partial(Forced, __name__), "torch.compile": _compiled}
        theirs = kinds[peer](case.name)
        for _ in range(0 if isinstance(theirs, Forced) else 3):
            theirs()
        return compare_rounds(ours, theirs, rounds=rounds, calls=calls)

    return Measurement(case.name, case.metric, peer, target, run, slow=peer == "torch.compile", bf16=False)


def build(name: str) -> Callable[[], object]:
    """The stock call of the case ``name``, here or in another process."""
    return _stock(_named(name))


def _named(name: str) -> Case:
    return next(case for case in (*AMD, *FEW_TOKENS, *DRY) if case.name == name)


def _compiled(name: str) -> Callable[[], object]:
    return _stock(_named(name), compile=True)


def _operands(case: Case) -> tuple[Any, ...]:
    drawn = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(rows, case.D, generator=drawn) * case.D**-0.25 for rows in (case.T, case.F, case.F))
    return x, weights, torch.randn(case.F, generator=drawn)


def _modules(case: Case) -> tuple[nn.Module, nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    gated = case.what == "gated_mlp"
    stock = StockGatedMLP(case.D, case.F, "silu") if gated else StockMLP(case.D, case.F)
    ours = ParallelMLP(case.D, case.F, gated=gated, activation="silu" if gated else "gelu_tanh")
    ours.load_state_dict(stock.state_dict())
    x, dy = torch.randn(case.T, case.D), torch.randn(case.T, case.D)
    return ours.train(case.way == "step"), stock.train(case.way == "step"), x, dy


def _ours(case: Case) -> Callable[[], object]:
    if case.what.endswith("mlp"):
        ours, _, x, dy = _modules(case)
        return _module_call(case, ours, x, dy)
    x, (first, second), bias = _operands(case)
    if case.what == "linear_act":
        return torch.no_grad()(partial(linear_act, x, first, bias, activation="gelu_tanh", pack_weight=True))
    return torch.no_grad()(partial(gated_linear, x, first, second, activation="silu", pack_weight=True))


def _stock(case: Case, *, compile: bool = False) -> Callable[[], object]:
    if case.what.endswith("mlp"):
        _, stock, x, dy = _modules(case)
        return _module_call(case, stock, x, dy, call=compiled(stock.forward) if compile else None)
    x, (first, second), bias = _operands(case)

    @torch.no_grad()
    def run() -> torch.Tensor:
        if case.what == "linear_act":
            return F.gelu(F.linear(x, first, bias), approximate="tanh")
        return F.silu(F.linear(x, first)) * F.linear(x, second)

    return run


def _module_call(
    case: Case, module: nn.Module, x: torch.Tensor, dy: torch.Tensor, call: Any = None
) -> Callable[[], object]:
    if case.way == "step":
        return partial(training_step, module, x.requires_grad_(), dy, call=call)
    return torch.no_grad()(partial(module if call is None else call, x))


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    for case in cases(settings):
        if case.name in names:
            ours, low, oracle = (partial(_outputs, case, side) for side in ("ours", "stock", "exact"))
            for verdict in check_outputs(ours(), low=low, oracle=oracle, terms=case.T + case.D + case.F):
                yield case.name, verdict


def _outputs(case: Case, side: str) -> Outputs:
    if case.what.endswith("mlp"):
        ours, stock, x, dy = _modules(case)
        module = ours if side == "ours" else stock
        if side == "exact":
            module, x, dy = copy.deepcopy(stock).double(), x.double(), dy.double()
        if case.way == "step":
            return module_outputs(module, x, dy)
        with torch.no_grad():
            return {"first": module(x), "second": module(x), "third": module(x)}  # packed from the second on
    if side == "ours":
        return {"y": _ours(case)()}  # type: ignore[dict-item]
    x, (first, second), bias = _operands(case)
    if side == "exact":
        x, first, second, bias = (each.double() for each in (x, first, second, bias))
    if case.what == "linear_act":
        return {"y": apply_activation(F.linear(x, first, bias), "gelu_tanh")}
    return {"y": F.silu(F.linear(x, first)) * F.linear(x, second)}


BENCHMARK = Benchmark(
    name="onednn",
    summary="oneDNN's products on a CPU, as auto chooses them, against stock torch",
    targets=TARGETS,
    plan=plan,
    check=check,
    ops=("linear_act", "gated_linear"),
    sources=("kernels/linear/onednn.py", "kernels/linear/cpu.py", "kernels/runtime/onednn.py", "layers/mlp.py"),
    devices=("cpu",),
)
