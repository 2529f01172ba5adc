"""TP = 2 over gloo: our layers against torch's own, ``parallelize_module`` over DTensor.

Both sides hold the same weights, run interleaved in the same two processes with the same threads, and must agree with
the same fp64 oracle, outputs and full gradients, before anything is timed. The peer follows the plan of torch's tensor
parallelism tutorial for a transformer block; q, k and v share one prepared input, which is faster than one input per
projection.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from ...kernels.dev.accuracy import Verdict
from ...kernels.runtime import processor
from ...layers.attention.rope import Rotary
from ...layers.attention.rope import rope_tables as our_tables
from ...layers.block import ParallelBlock
from ...layers.config import TransformerConfig
from ...layers.mlp import ParallelMLP
from ..harness.benchmark import Benchmark, Measurement, Settings
from ..harness.gate import check_outputs, join_layers, module_outputs
from ..harness.ranks import compare_on_ranks, on_ranks, worst
from ..harness.stock import StockBlock, StockMLP, rope_tables, training_step
from ..harness.timing import Timing, keep_freed_memory

RANKS = 2
HEAD_DIM = 64
ROPE_THETA = 10000.0
SECONDS_PER_SIZE = 10.0  # more than other benchmarks: other load affects two processes more


@dataclass(frozen=True)
class Size:
    """One layer at one size: x is [1, T, D], the hidden layer 4 D wide."""

    layer: str  # "mlp" or "block"
    D: int
    T: int

    @property
    def name(self) -> str:
        return f"{self.layer}-d{self.D}-t{self.T}"


_LARGE = 1.8 if "-amd-" in processor.architecture() else 1.0  # where stock torch multiplies slowly
TARGETS = {"mlp-d256-t64": 1.5, "block-d256-t64": 1.9, "mlp-d1024-t512": _LARGE, "block-d1024-t512": _LARGE}
SIZES = tuple(Size(layer, D, T) for D, T in ((256, 64), (1024, 512)) for layer in ("mlp", "block"))
DRY_SIZES = tuple(Size(layer, HEAD_DIM * RANKS, 8) for layer in ("mlp", "block"))


def plan(settings: Settings) -> list[Measurement]:
    def run(size: Size) -> tuple[Timing, Timing]:
        return _results(settings)[size.name].timings

    return [
        Measurement(
            size.name,
            "forward + backward, us",
            "torch parallelize_module (DTensor)",
            TARGETS.get(size.name),
            partial(run, size),
        )
        for size in _sizes(settings)
    ]


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    for name, result in _results(settings).items():
        if name in names:
            yield from ((name, verdict) for verdict in result.verdicts)


@dataclass(frozen=True)
class Result:
    """The ranks' results for one size; no timing if the check failed."""

    verdicts: list[Verdict]
    timings: tuple[Timing, Timing]


def _sizes(settings: Settings) -> tuple[Size, ...]:
    return DRY_SIZES if settings.dry else SIZES


@cache
def _results(settings: Settings) -> dict[str, Result]:
    """Check and measure every size in one launch: the timed modules are the same objects that were checked."""
    seconds = 0.0 if settings.dry else SECONDS_PER_SIZE
    found: dict[str, Result] = on_ranks(_worker, _sizes(settings), seconds, processes=RANKS)
    return found


def _worker(sizes: Sequence[Size], seconds: float) -> dict[str, Result]:
    keep_freed_memory()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    try:
        rigs = {size.name: Rig.of(size, mesh) for size in sizes}
        verdicts = {name: rig.check() for name, rig in rigs.items()}
        green = all(verdict.ok for found in verdicts.values() for verdict in found)
        unmeasured = (Timing(float("nan")),) * 2
        return {
            name: Result(verdicts[name], rig.measure(seconds) if green else unmeasured) for name, rig in rigs.items()
        }
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Rig:
    """Our module and the peer on this rank, and the whole stock module that both represent."""

    ours: nn.Module
    peer: nn.Module
    stock: nn.Module
    x: torch.Tensor
    grad: torch.Tensor
    options: dict[str, Any]  # of ours
    stock_options: dict[str, Any]

    @classmethod
    def of(cls, size: Size, mesh: DeviceMesh) -> Rig:
        torch.manual_seed(0)
        options: dict[str, Any] = {}
        stock_options: dict[str, Any] = {}
        stock: nn.Module
        ours: nn.Module
        if size.layer == "mlp":
            stock, ours = StockMLP(size.D, 4 * size.D), ParallelMLP(size.D, 4 * size.D, mesh=mesh)
        else:
            heads = size.D // HEAD_DIM
            config = TransformerConfig(
                hidden_size=size.D, intermediate_size=4 * size.D, num_heads=heads, rope_theta=ROPE_THETA
            )
            stock, ours = StockBlock(size.D, 4 * size.D, HEAD_DIM), ParallelBlock(config, mesh=mesh)
            options["rope"] = our_tables(torch.arange(size.T), Rotary(HEAD_DIM, ROPE_THETA))
            stock_options["rope"] = rope_tables(torch.arange(size.T), HEAD_DIM, ROPE_THETA)
        peer = parallelize_module(copy.deepcopy(stock), mesh, _peer_plan(size.layer))
        _load(ours, stock)
        x, grad = torch.randn(1, size.T, size.D), torch.randn(1, size.T, size.D)
        return cls(ours, peer, stock, x.requires_grad_(), grad, options, stock_options)

    def check(self) -> list[Verdict]:
        """Compare both sides with the stock module in fp64; every rank takes part in gathering the gradients."""
        low = self._outputs(self.stock)
        exact = self._outputs(copy.deepcopy(self.stock).double(), torch.float64)
        found = []
        terms = sum(sum(param.shape) for param in self.stock.parameters())  # as if its products were consecutive
        for side, module in (("ours", self.ours), ("peer", self.peer)):
            outputs = self._outputs(module)
            for verdict in check_outputs(outputs, low=lambda: low, oracle=lambda: exact, terms=terms):
                found.append(Verdict(f"{side}.{verdict.name}", verdict.error, verdict.budget))
        return worst(found)

    def measure(self, seconds: float) -> tuple[Timing, Timing]:
        """Time forward and backward, interleaved, by rank 0's clock, over a number of rounds that ranks agree on."""
        ours, peer = (partial(self.step, module) for module in (self.ours, self.peer))
        return compare_on_ranks(ours, peer, seconds=seconds)

    def step(self, module: nn.Module) -> None:
        """One complete training step: DTensor's last all-reduces are pending until their results are read."""
        y = training_step(module, self.x, self.grad, **self._options(module))
        assert self.x.grad is not None
        for result in (y, self.x.grad):
            result.flatten()[0].item()

    def _options(self, module: nn.Module) -> dict[str, Any]:
        return self.options if module is self.ours else self.stock_options

    def _outputs(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        found = module_outputs(module, self.x.to(dtype), self.grad.to(dtype), **self._options(module))
        return join_layers(
            {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
        )


def _peer_plan(layer: str) -> dict[str, Any]:
    mlp = {"c_fc": ColwiseParallel(), "c_proj": RowwiseParallel()}
    if layer == "mlp":
        return mlp
    whole = Replicate()
    return {
        "self_attn": PrepareModuleInput(input_layouts=(whole, None), desired_input_layouts=(whole, None)),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        **{f"mlp.{name}": style for name, style in mlp.items()},
    }


@torch.no_grad()
def _load(ours: nn.Module, stock: nn.Module) -> None:
    """Give every sharded parameter its part of the stock module's parameter."""
    whole = stock.state_dict()
    for name, parameter in ours.named_parameters():
        if isinstance(parameter, DTensor):
            parameter.copy_(distribute_tensor(whole[name], parameter.device_mesh, parameter.placements))
        else:
            parameter.copy_(whole[name])


BENCHMARK = Benchmark(
    name="tp_dtensor",
    summary="MLP and decoder block at TP = 2 over gloo, forward and backward, against torch's parallelize_module",
    targets=TARGETS,
    plan=plan,
    check=check,
    sources=(
        *(
            "bench/harness/ranks.py",
            "bench/harness/stock.py",
            "layers/mlp.py",
            "layers/linear.py",
            "layers/attention/attention.py",
            "layers/block.py",
        ),
        *("layers/module.py", "layers/options.py", "parallel/linear.py", "parallel/mlp.py"),
        *("parallel/core/mappings.py", "parallel/core/collectives.py", "parallel/core/operands.py"),
        *("parallel/core/options.py", "parallel/core/sharding.py"),
        *("parallel/overlap/policy.py", "parallel/overlap/plan.py", "parallel/overlap/strategies.py"),
        *("kernels/linear/functional.py", "kernels/linear/product.py", "kernels/linear/op.py"),
        "kernels/linear/reference.py",
    ),
    devices=("cpu",),
)
