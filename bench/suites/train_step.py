"""A whole training step on a CPU: forward, backward and AdamW, against stock torch, eager and compiled.

``ParallelMLP``, ``ParallelBlock`` in both styles, and a small Llama of transformers after ``fuse``, in fp32 and in one
process. Both sides hold the same weights and run torch's AdamW with the same options; the layers learn a random target
under a mean square, the Llama its own tokens. torch.compile compiles the model alone, as its documentation does: the
optimizer is the same eager one on both sides. Loss and gradients agree with fp64 before a step is timed.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.dev.accuracy import Verdict
from ...layers import ParallelBlock, ParallelMLP, TransformerConfig
from ...layers.attention.rope import Rotary
from ...layers.attention.rope import rope_tables as our_tables
from ..harness.benchmark import Benchmark, Measurement, Settings
from ..harness.gate import Outputs, check_outputs, join_layers
from ..harness.stock import StockBlock, StockMLP, compiled, rope_tables
from ..harness.timing import Timing, calls_for, compare_rounds, keep_freed_memory
from . import fuse

STOCK, COMPILED = "stock torch", "torch.compile"
METRIC = "forward + backward + AdamW, us"
HEAD_DIM = 64
ROPE_THETA = 10000.0
LEARNING_RATE = 1e-4
ROUNDS = 40
SAMPLE_US = 20_000.0  # of a round, so that a small model makes several steps in one
MLP, BLOCK, GATED, LLAMA = "mlp", "gelu-block", "gated-block", "llama"
TARGETS = {f"{MLP}, {BLOCK}, {GATED}, against {STOCK}": 0.97, f"{LLAMA}, against {STOCK}": fuse.STEP}
LAYER_TARGET, LLAMA_TARGET = TARGETS.values()


@dataclass(frozen=True)
class Case:
    """A model to train: a layer whose x is [1, T, D], its hidden layer 4 D wide (8/3 D if gated), or a Llama."""

    what: str
    T: int = 0
    D: int = 0

    @property
    def name(self) -> str:
        return self.what if self.what == LLAMA else f"{self.what}-t{self.T}-d{self.D}"

    @property
    def F(self) -> int:
        return 64 * round(8 * self.D / 3 / 64) if self.what == GATED else 4 * self.D


CASES = (*(Case(what, T, D) for T, D in ((64, 256), (512, 1024)) for what in (MLP, BLOCK, GATED)), Case(LLAMA))
SHORT = (*(Case(what, 64, 256) for what in (MLP, BLOCK, GATED)), Case(LLAMA))
DRY = (*(Case(what, 8, HEAD_DIM) for what in (MLP, BLOCK, GATED)), Case(LLAMA))


@dataclass(frozen=True)
class Side:
    """A model in training. ``forward(call)`` is its loss, a scalar; ``call`` is the model or its compiled form."""

    model: nn.Module
    forward: Callable[[Callable[..., Any]], torch.Tensor]

    def step(self, *, compile: bool = False) -> Callable[[], None]:
        """A call that trains the model by one step."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        call = compiled(self.model) if compile else self.model

        def run() -> None:
            self.forward(call).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run

    def outputs(self) -> Outputs:
        """The loss, and every parameter's gradient."""
        self.model.zero_grad(set_to_none=True)
        loss = self.forward(self.model)
        loss.backward()
        grads = {f"d_{name}": param.grad for name, param in self.model.named_parameters() if param.grad is not None}
        return join_layers({"loss": loss.detach(), **grads})


def sides(case: Case, settings: Settings) -> tuple[Side, Side, Side]:
    """Ours, the stock model, and the stock model in fp64, all with the same weights and the same batch."""
    if case.what == LLAMA:
        fused, model = fuse.models(LLAMA)
        one = partial(_llama_side, fuse.tokens(settings))
        return one(fused), one(model), one(copy.deepcopy(model).double())
    fused, model = _layers(case)
    x, target = torch.randn(1, case.T, case.D), torch.randn(1, case.T, case.D)
    positions = torch.arange(case.T)
    mine: dict[str, Any] = {}
    stock: dict[str, Any] = {}
    if case.what != MLP:
        mine["rope"] = our_tables(positions, Rotary(HEAD_DIM, ROPE_THETA))
        stock["rope"] = rope_tables(positions, HEAD_DIM, ROPE_THETA)
    layer = partial(_layer_side, x, target)
    return layer(fused, mine), layer(model, stock), layer(copy.deepcopy(model).double(), stock)


def _llama_side(tokens: torch.Tensor, model: nn.Module) -> Side:
    return Side(model, lambda call: call(tokens, labels=tokens, use_cache=False).loss)


def _layers(case: Case) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    stock: nn.Module
    ours: nn.Module
    if case.what == MLP:
        stock, ours = StockMLP(case.D, case.F), ParallelMLP(case.D, case.F)
    else:
        gated = case.what == GATED
        config = TransformerConfig(
            style="gated" if gated else "gelu",
            hidden_size=case.D,
            intermediate_size=case.F,
            num_heads=case.D // HEAD_DIM,
            rope_theta=ROPE_THETA,
        )
        stock, ours = StockBlock(case.D, case.F, HEAD_DIM, gated=gated), ParallelBlock(config)
    ours.load_state_dict(stock.state_dict())
    return ours, stock


def _layer_side(x: torch.Tensor, target: torch.Tensor, model: nn.Module, options: dict[str, Any]) -> Side:
    dtype = next(model.parameters()).dtype
    x, target = x.to(dtype), target.to(dtype)
    return Side(model, lambda call: F.mse_loss(call(x, **options), target))


def cases(settings: Settings) -> list[Case]:
    chosen = DRY if settings.dry else SHORT if settings.short else CASES
    installed = importlib.util.find_spec("transformers") is not None
    return [case for case in chosen if installed or case.what != LLAMA]


def plan(settings: Settings) -> list[Measurement]:
    rows = []
    for case in cases(settings):
        target = LLAMA_TARGET if case.what == LLAMA else LAYER_TARGET
        rows.append(_row(case, STOCK, None if settings.dry else target, settings))
        if not settings.dry:
            rows.append(_row(case, COMPILED, None, settings))
    return rows


def _row(case: Case, peer: str, target: float | None, settings: Settings) -> Measurement:
    compile = peer == COMPILED
    run = partial(measure, case, settings, compile=compile)
    skip = no_compiler() if compile else ""
    return Measurement(case.name, METRIC, peer, target, run, slow=compile, bf16=False, skip=skip)


def measure(case: Case, settings: Settings, *, compile: bool) -> tuple[Timing, Timing]:
    """The step of both sides, interleaved."""
    keep_freed_memory()
    ours, stock, _ = sides(case, settings)
    steps = ours.step(), stock.step(compile=compile)
    for step in steps * 2:  # the optimizer's state is made, and the peer is compiled
        step()
    if settings.dry:
        return compare_rounds(*steps, rounds=1)
    return compare_rounds(*steps, rounds=ROUNDS, calls=calls_for(steps[0], SAMPLE_US))


@functools.cache
def no_compiler() -> str:
    """Why torch.compile cannot compile for this CPU; empty where it can."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "torch.compile needs a C++ compiler on a CPU, and finds none: install g++, or name one in CXX"
    return ""


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    """Loss and gradients of the step, by the ops that the timed step runs."""
    for case in cases(settings):
        if case.name in names:
            ours, stock, exact = sides(case, settings)
            found = check_outputs(ours.outputs(), low=stock.outputs, oracle=exact.outputs, terms=_terms(case, stock))
            yield from ((case.name, verdict) for verdict in found)


def _terms(case: Case, stock: Side) -> int:
    """As if all products were consecutive."""
    if case.what == LLAMA:
        return fuse.TERMS
    return case.T + sum(sum(param.shape) for param in stock.model.parameters())


BENCHMARK = Benchmark(
    name="train_step",
    summary="a training step of MLP, blocks and a fused Llama on a CPU: stock torch, torch.compile",
    targets=TARGETS,
    plan=plan,
    check=check,
    ops=("linear_act", "gated_linear", "rms_norm", "layer_norm", "rope", "linear_cross_entropy"),
    sources=(
        *("bench/harness/stock.py", "bench/suites/fuse.py", "layers/fuse", "layers/attention", "layers/block.py"),
        *("layers/mlp.py", "layers/norm.py", "parallel/linear.py", "parallel/mlp.py", "parallel/cross_entropy.py"),
    ),
    devices=("cpu",),
)
