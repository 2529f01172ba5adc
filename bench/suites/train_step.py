"""A whole training step: forward, backward and AdamW, against stock torch, eager and compiled, and Liger's kernels.

On a CPU: ``ParallelMLP``, ``ParallelBlock`` in both styles, and a small Llama of transformers after ``fuse``, in fp32
and in one process. Both sides hold the same weights and run torch's AdamW with the same options; the layers learn a
random target under a mean square, the Llama its own tokens. torch.compile compiles the model alone, as its
documentation does: the optimizer is the same eager one on both sides. Loss and gradients agree with fp64 before a step
is timed.

On a GPU two layers of Llama 3 8B with its vocabulary, in bf16 with torch's fused AdamW: 1.49 G parameters. Both sides
together take 31 GB: 8.9 GB each of weights and moments, 3 GB of one side's gradients, and stock torch's 8.4 GB for the
logits, in bf16 and fp32 with both gradients and softmax, and 1.7 GB of activations. The gate takes fewer tokens of the
same model, whose weights and gradients are 24 GB in fp64: 50 GB in all.
"""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.shapes import MODELS
from ...layers.attention.rope import Rotary
from ...layers.attention.rope import rope_tables as our_tables
from ...layers.block import ParallelBlock
from ...layers.config import TransformerConfig
from ...layers.mlp import ParallelMLP
from ..harness.benchmark import Benchmark, Measurement, Settings, Work
from ..harness.gate import Outputs, check_outputs, join_layers
from ..harness.stock import StockBlock, StockMLP, compiled, rope_tables
from ..harness.timing import Timing, calls_for, compare, compare_rounds, keep_freed_memory
from ..rivals import liger
from . import fuse
from .cross_entropy import peak

STOCK, COMPILED, LIGER = "stock torch", "torch.compile", "Liger"
METRIC, PEAK = "forward + backward + AdamW, us", "peak bytes"  # the latter beside weights and moments
HEAD_DIM = 64
ROPE_THETA = 10000.0
LEARNING_RATE = 1e-4
ROUNDS = 40
SAMPLE_US = 20_000.0  # of a round, so that a small model makes several steps in one
MLP, BLOCK, GATED, LLAMA, LARGE = "mlp", "gelu-block", "gated-block", "llama", "llama3-8b-2-layers"
TARGETS = {
    f"{MLP}, {BLOCK}, {GATED}, against {STOCK}": 0.97,
    f"{LLAMA}, against {STOCK}": fuse.STEP,
    f"{LARGE}, on a GPU, against {STOCK}": 1.0,
}
LAYER_TARGET, LLAMA_TARGET, LARGE_TARGET = TARGETS.values()
_8B, LAYERS, WORDS = MODELS["llama3-8b"], 2, 128256
CHECKED = 1280  # tokens: more than a chunk of the loss


@dataclass(frozen=True)
class Case:
    """A model to train: a layer whose x is [1, T, D], its hidden layer 4 D wide (8/3 D if gated), or a Llama, D = 0."""

    what: str
    T: int = 0
    D: int = 0

    @property
    def name(self) -> str:
        if self.what == LARGE:
            return f"{self.what}-t{self.T}-bf16"
        return f"{self.what}-t{self.T}-d{self.D}" if self.D else self.what

    @property
    def F(self) -> int:
        return 64 * round(8 * self.D / 3 / 64) if self.what == GATED else 4 * self.D


CASES = (*(Case(what, T, D) for T, D in ((64, 256), (512, 1024)) for what in (MLP, BLOCK, GATED)), Case(LLAMA))
SHORT = (*(Case(what, 64, 256) for what in (MLP, BLOCK, GATED)), Case(LLAMA))
DRY = (*(Case(what, 8, HEAD_DIM) for what in (MLP, BLOCK, GATED)), Case(LLAMA))
GPU = (Case(LARGE, 4096),)


@dataclass(frozen=True)
class Side:
    """A model in training. ``forward(call)`` is its loss, a scalar; ``call`` is the model or its compiled form."""

    model: nn.Module
    forward: Callable[[Callable[..., Any]], torch.Tensor]

    def step(self, peer: str = "") -> Callable[[], None]:
        """A call that trains the model by one step, as the ``peer`` of this name does."""
        fused = next(self.model.parameters()).is_cuda or None  # None: torch decides
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=fused)
        peers: dict[str, Callable[..., Any]] = {COMPILED: compiled, LIGER: liger.llama}
        call = peers[peer](self.model) if peer in peers else self.model

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
        return join_layers({"loss": loss.detach().to(next(self.model.parameters()).dtype), **grads})


def sides(case: Case, settings: Settings) -> tuple[Side, Side, Callable[[], Side]]:
    """Ours, the stock model, and what makes the latter's copy in fp64, all with the same weights and the same batch."""
    if not case.D:
        small = case.what == LLAMA
        fused, model, tokens = (*fuse.models(LLAMA), fuse.tokens(settings)) if small else _large(case, settings)
        one = partial(_llama_side, tokens)
        return one(fused), one(model), lambda: one(copy.deepcopy(model).double())
    fused, model = _layers(case)
    x, target = torch.randn(1, case.T, case.D), torch.randn(1, case.T, case.D)
    positions = torch.arange(case.T)
    mine: dict[str, Any] = {}
    stock: dict[str, Any] = {}
    if case.what != MLP:
        mine["rope"] = our_tables(positions, Rotary(HEAD_DIM, ROPE_THETA))
        stock["rope"] = rope_tables(positions, HEAD_DIM, ROPE_THETA)
    layer = partial(_layer_side, x, target)
    return layer(fused, mine), layer(model, stock), lambda: layer(copy.deepcopy(model).double(), stock)


def _llama_side(tokens: torch.Tensor, model: nn.Module) -> Side:
    return Side(model, lambda call: call(tokens, labels=tokens, use_cache=False).loss)


def _large(case: Case, settings: Settings) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """The Llama of a GPU, fused and as it was, built on the device, and its tokens."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    gc.collect()  # an earlier row's model: the methods that Liger binds make cycles
    config = LlamaConfig(
        hidden_size=_8B.D,
        intermediate_size=_8B.F,
        num_attention_heads=_8B.N,
        num_key_value_heads=_8B.K,
        num_hidden_layers=LAYERS,
        vocab_size=WORDS,
    )
    torch.manual_seed(0)
    with settings.device:
        stock = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False).train()
        tokens = torch.randint(WORDS, (1, case.T))
    return fuse.fuse(copy.deepcopy(stock)), stock, tokens


def _work(case: Case) -> Work:
    """The products, attention's among them; weights, gradients and both moments, once read and once written."""
    layer, words = 2 * _8B.D * _8B.H * (_8B.N + _8B.K) + 3 * _8B.D * _8B.F, _8B.D * WORDS
    return Work(6 * case.T * (LAYERS * (layer + case.T * _8B.D) + words), 16 * (LAYERS * layer + 2 * words))


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
    chosen = DRY if settings.dry else GPU if settings.cuda else SHORT if settings.short else CASES
    installed = importlib.util.find_spec("transformers") is not None
    return [case for case in chosen if installed or case.D]


def plan(settings: Settings) -> list[Measurement]:
    rows = []
    for case in cases(settings):
        if case.what == LARGE:
            rows += [_row(case, peer, LARGE_TARGET if peer == STOCK else None, settings) for peer in (STOCK, LIGER)]
            rows += [_row(case, peer, None, settings, PEAK) for peer in (STOCK, LIGER)]
            rows.append(_row(case, COMPILED, None, settings))
            continue
        target = LLAMA_TARGET if case.what == LLAMA else LAYER_TARGET
        rows.append(_row(case, STOCK, None if settings.dry else target, settings))
        if not settings.dry:
            rows.append(_row(case, COMPILED, None, settings))
    return rows


def _row(case: Case, peer: str, target: float | None, settings: Settings, metric: str = METRIC) -> Measurement:
    compile, large = peer == COMPILED, case.what == LARGE
    run = partial(measure if metric == METRIC else weigh, case, settings, peer)
    skip = no_compiler() if compile and not large else ""
    if peer == LIGER:
        skip = liger.RIVALS[0].missing(torch.device("cuda"))
    work = _work(case) if large and metric == METRIC else None
    return Measurement(case.name, metric, peer, target, run, slow=compile, work=work, bf16=large, skip=skip)


def weigh(case: Case, settings: Settings, peer: str) -> tuple[Timing, Timing]:
    """The most bytes that a step of either side allocates at once."""
    ours, stock, _ = sides(case, settings)
    return Timing(peak(ours.step(), settings.device)), Timing(peak(stock.step(peer), settings.device))


def measure(case: Case, settings: Settings, peer: str) -> tuple[Timing, Timing]:
    """The step of both sides, interleaved."""
    if case.what == LARGE:
        ours, stock, _ = sides(case, settings)
        return compare([ours.step()], [stock.step(peer)], settings.device, seconds=settings.seconds)
    keep_freed_memory()
    ours, stock, _ = sides(case, settings)
    steps = ours.step(), stock.step(peer)
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
            ours, stock, exact = sides(replace(case, T=min(case.T, CHECKED)), settings)
            oracle = lambda: exact().outputs()  # noqa: B023 called at once
            found = check_outputs(ours.outputs(), low=stock.outputs, oracle=oracle, terms=_terms(case, stock))
            yield from ((case.name, verdict) for verdict in found)


def warm(settings: Settings, name: str) -> None:
    for case in cases(settings):
        if case.name == name:
            sides(case, settings)[0].step()()


def _terms(case: Case, stock: Side) -> int:
    """As if all products were consecutive."""
    if case.what == LLAMA:
        return fuse.TERMS
    return case.T + sum(sum(param.shape) for param in stock.model.parameters())


BENCHMARK = Benchmark(
    name="train_step",
    summary="a training step of MLP, blocks and a fused Llama: stock torch, torch.compile; Liger on a GPU",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=("linear_act", "gated_linear", "rms_norm", "layer_norm", "rope", "linear_cross_entropy"),
    sources=(
        *("bench/harness/stock.py", "bench/suites/cross_entropy.py", "bench/suites/fuse.py", "bench/rivals/liger.py"),
        *("kernels/dev/shapes.py", "layers/fuse", "layers/attention", "layers/block.py"),
        *("layers/mlp.py", "layers/norm.py", "parallel/linear.py", "parallel/mlp.py", "parallel/cross_entropy.py"),
    ),
)
