"""``ParallelMLP`` and the stock modules in pairs: a training step, the bytes kept for backward, the bound of fusion."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...kernels.dev.accuracy import Verdict
from ...kernels.runtime.cost import PASSES, pass_bound, pass_bytes
from ...layers.mlp import ParallelMLP
from ..harness.benchmark import Measurement, Settings, Work
from ..harness.gate import Outputs, check_outputs, module_outputs
from ..harness.stock import StockGatedMLP, StockMLP, compiled, training_step
from ..harness.timing import Timing, ceilings, compare, input_sets

STEP = "forward + backward, us"
INTO_FP32 = "forward + backward into fp32, us"
KEPT = "bytes kept for backward"
BOUND = "gain over eager"

# The sources, besides the ops, of a result that times ParallelMLP.
SOURCES = (
    *(
        "bench/suites/mlp_pair.py",
        "bench/harness/stock.py",
        "kernels/runtime/cost.py",
        "layers/mlp.py",
        "layers/linear.py",
        "layers/module.py",
        "layers/options.py",
        "parallel/zero/main_grad.py",
    ),
    *("parallel/mlp.py", "parallel/linear.py", "parallel/core/operands.py", "parallel/core/options.py"),
    *("parallel/core/sharding.py", "parallel/overlap/policy.py", "parallel/overlap/plan.py"),
    "parallel/overlap/strategies.py",
)
LARGE = 4096  # tokens from which targets of time count
GAIN_TIME = 3.0  # a gain is a difference of two times, and gets this many rows' time
LEAST_GAIN = 1e-3  # a smaller gain is noise
MEMORY_MARGIN = 1.1  # the computed saving over a memory target, so that real allocations can reach the target
LEVELS = (0, 1, 2)  # of recomputation: keep both activations, the pre-activation, the input alone


@dataclass(frozen=True)
class Shape:
    """T tokens through D -> F -> D; a gated shape has two weights in the first step."""

    T: int
    D: int
    F: int
    dtype: torch.dtype
    gated: bool = False
    activation: str = "gelu_tanh"

    @property
    def name(self) -> str:
        size = f"mlp-t{self.T}-d{self.D}-f{self.F}-{str(self.dtype).removeprefix('torch.')}"
        return f"{size}-gated-{self.activation}" if self.gated else size

    @property
    def large(self) -> bool:
        return self.T >= LARGE

    @property
    def weights(self) -> int:
        """The number of elements."""
        return (3 if self.gated else 2) * self.D * self.F

    @property
    def passes(self) -> int:
        """Passes over [T, F] of eager torch beside its products, forward and backward."""
        return sum(PASSES["gated " * self.gated + way] for way in ("forward", "backward"))

    def saving(self, level: int) -> float:
        """Elements that eager keeps for backward, x [T, D] and activations [T, F], over ours at a recomputation level.

        Level 1 keeps half of the activations, level 2 none.
        """
        activations = (4 if self.gated else 2) * self.F
        return (self.D + activations) / (self.D + activations // 2 * (2 - level))

    def work(self, *, accumulated: bool = False) -> Work:
        """A forward and two backward products for each weight, every operand and result counted once."""
        T, D, F, size = self.T, self.D, self.F, self.dtype.itemsize
        products = 9 if self.gated else 6
        extra = pass_bytes(self.passes, T, F, itemsize=size, accumulated=self.weights if accumulated else 0)
        return Work(2 * products * T * D * F, products * (T * D + D * F + T * F) * size, extra)


@dataclass(frozen=True)
class Pair:
    """Both modules with the same weights, and one input with its cotangent."""

    ours: ParallelMLP
    stock: nn.Module
    x: torch.Tensor
    grad: torch.Tensor

    @classmethod
    def of(cls, settings: Settings, shape: Shape, seed: int = 0, **options: Any) -> Pair:
        """A pair; ``options`` are ParallelMLP's."""
        torch.manual_seed(seed)
        stock: nn.Module
        stock = StockGatedMLP(shape.D, shape.F, shape.activation) if shape.gated else StockMLP(shape.D, shape.F)
        stock = stock.to(settings.device, shape.dtype)
        ours = _ours(settings, shape, stock, **options)
        x, grad = (torch.randn(shape.T, shape.D, device=settings.device, dtype=shape.dtype) for _ in range(2))
        return cls(ours, stock, x.requires_grad_(), grad)


def _ours(settings: Settings, shape: Shape, stock: nn.Module, **options: Any) -> ParallelMLP:
    options |= {"gated": shape.gated, "activation": shape.activation, "impl": settings.impl}
    ours = ParallelMLP(shape.D, shape.F, dtype=shape.dtype, device=settings.device, **options)
    ours.load_state_dict(stock.state_dict())
    return ours


def pairs(settings: Settings, shape: Shape, **options: Any) -> list[Pair]:
    """As many pairs as exceed the cache together."""
    size = shape.weights * shape.dtype.itemsize
    return [Pair.of(settings, shape, seed, **options) for seed in range(input_sets(size, settings.device))]


# --- the gate ---------------------------------------------------------------------------------------------------------


def verdicts(
    settings: Settings, shapes: Sequence[Shape], names: Sequence[str], options: Sequence[dict[str, Any]] = ({},)
) -> Iterator[tuple[str, Verdict]]:
    """Check output and gradients of ParallelMLP, built with each of ``options``, on the named shapes."""
    for shape in shapes:
        if shape.name in names:
            pair = Pair.of(settings, shape)
            low = module_outputs(pair.stock, pair.x, pair.grad)
            exact = copy.deepcopy(pair.stock).double()
            oracle = module_outputs(exact, pair.x.double(), pair.grad.double())
            del exact  # frees its weights, which are large
            for chosen in options:
                ours = _outputs(_ours(settings, shape, pair.stock, **chosen), pair, chosen)
                for verdict in check_outputs(
                    ours,
                    low=lambda: low,  # noqa: B023 called at once
                    oracle=lambda: oracle,  # noqa: B023
                    terms=pair.x.shape[0] + sum(sum(param.shape) for param in pair.stock.parameters()),
                ):
                    yield shape.name, Verdict(_label(chosen) + verdict.name, verdict.error, verdict.budget)


def _outputs(ours: ParallelMLP, pair: Pair, options: dict[str, Any]) -> Outputs:
    """y, dx and the parameters' gradients, from ``grad`` or ``main_grad``."""
    if not options.get("fuse_wgrad_accumulation"):
        return module_outputs(ours, pair.x, pair.grad)
    attach_buffers(ours)
    x = pair.x.detach().requires_grad_()
    y = training_step(ours, x, pair.grad)
    assert x.grad is not None
    grads = {f"d_{name}": parameter.main_grad for name, parameter in ours.named_parameters()}  # type: ignore[attr-defined]
    return {"y": y, "d_x": x.grad} | grads


def _label(options: dict[str, Any]) -> str:
    return "".join(f"{name}={value}: " for name, value in options.items())


def attach_buffers(module: nn.Module) -> None:
    """Give every parameter an fp32 ``main_grad``, as in training that accumulates in fp32."""
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)  # type: ignore[attr-defined]


# --- rows -------------------------------------------------------------------------------------------------------------


def step_row(
    settings: Settings,
    shape: Shape,
    peer_name: str,
    target: float | None,
    *,
    peer: Callable[[nn.Module], nn.Module] = lambda stock: stock,
    compile: bool = False,
    metric: str = STEP,
    **options: Any,
) -> Measurement:
    """A training step. ``peer`` wraps the stock module for timing; ``options`` are ParallelMLP's."""

    def run() -> tuple[Timing, Timing]:
        found = pairs(settings, shape, **options)
        others = [peer(pair.stock) for pair in found]
        return compare(
            [_step(pair.ours, pair) for pair in found],
            [_step(other, pair, compiled(other) if compile else None) for other, pair in zip(others, found)],
            settings.device,
            seconds=settings.seconds,
            dry=settings.dry,
        )

    work = shape.work() if peer_name == "eager" else Work(shape.work().flops, shape.work().bytes)
    return Measurement(shape.name, metric, peer_name, target, run, slow=compile, work=work)


def accumulating_row(settings: Settings, shape: Shape, target: float | None) -> Measurement:
    """A step whose gradients are added to fp32 buffers: by ours in the products, by eager after them."""

    def run() -> tuple[Timing, Timing]:
        found = pairs(settings, shape, fuse_wgrad_accumulation=True)
        for pair in found:
            attach_buffers(pair.ours)
            attach_buffers(pair.stock)
        return compare(
            [_step(pair.ours, pair) for pair in found],
            [_adding_step(pair) for pair in found],
            settings.device,
            seconds=settings.seconds,
            dry=settings.dry,
        )

    work = shape.work(accumulated=True)
    return Measurement(shape.name, INTO_FP32, "eager, added after backward", target, run, work=work)


def bound_row(settings: Settings, shape: Shape, target: float | None) -> Measurement:
    """The gain over eager as a share of the pass-count bound; all times from this run."""

    def run() -> tuple[Timing, Timing]:
        found = pairs(settings, shape)
        ours, eager = compare(
            [_step(pair.ours, pair) for pair in found],
            [_step(pair.stock, pair) for pair in found],
            settings.device,
            seconds=GAIN_TIME * settings.seconds,
        )
        gemms = [_gemms(pair, shape) for pair in found]
        gemm, _ = compare(gemms, gemms, settings.device, seconds=settings.seconds)
        bandwidth = ceilings(settings.device).bandwidth
        bound = pass_bound(gemm.value, bandwidth, shape.work().extra)
        gain = eager.value / ours.value - 1
        return Timing(gain, gain_noise(gain, ours, eager, gemm)), Timing(bound)

    return Measurement(shape.name, BOUND, "pass-count bound", target, run, higher_is_better=True)


def gain_noise(gain: float, ours: Timing, eager: Timing, gemm: Timing) -> float:
    """The noise of a gain's share of its bound: a small difference of two times multiplies the noise of both."""
    ours_and_eager = (ours.noise or 0.0) + (eager.noise or 0.0)
    return ours_and_eager * (1 + gain) / max(abs(gain), LEAST_GAIN) + (gemm.noise or 0.0)


def memory_row(settings: Settings, shape: Shape, level: int, target: float | None) -> Measurement:
    """Bytes kept between forward and backward, including x, at one level of recomputation.

    ``target`` applies if F is large enough compared to D.
    """
    if target is not None and shape.saving(level) < MEMORY_MARGIN * target:
        target = None

    def run() -> tuple[Timing, Timing]:
        pair = Pair.of(settings, shape, recompute=level)
        return Timing(kept_bytes(pair.ours, pair)), Timing(kept_bytes(pair.stock, pair))

    return Measurement(shape.name, f"{KEPT}, recompute={level}", "eager", target, run)


def kept_bytes(module: nn.Module, pair: Pair) -> int:
    """Bytes that ``module(x)`` keeps for backward, with x and without the parameters.

    On a GPU by the allocator's count, elsewhere by the tensors that autograd saves.
    """
    if pair.x.is_cuda:
        training_step(module, pair.x, pair.grad)  # allocates the workspaces
        before = torch.cuda.memory_allocated(pair.x.device)
        y = module(pair.x)
        return torch.cuda.memory_allocated(pair.x.device) - before - y.nbytes + pair.x.nbytes
    saved = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = module(pair.x)
    for other in (y, pair.x, *module.parameters()):
        saved.pop(other.untyped_storage().data_ptr(), None)
    return sum(saved.values()) + pair.x.nbytes


def _step(module: nn.Module, pair: Pair, call: Callable[..., torch.Tensor] | None = None) -> Callable[[], object]:
    return lambda: training_step(module, pair.x, pair.grad, call=call)


def _adding_step(pair: Pair) -> Callable[[], None]:
    def step() -> None:
        training_step(pair.stock, pair.x, pair.grad)
        for parameter in pair.stock.parameters():
            parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]

    return step


def _gemms(pair: Pair, shape: Shape) -> Callable[[], None]:
    """Only the products of forward and backward, on random hidden activations [T, F]."""
    with torch.no_grad():
        h = torch.randn(shape.T, shape.F, device=pair.x.device, dtype=pair.x.dtype)
        inward = [weight for weight in pair.stock.parameters() if weight.shape == (shape.F, shape.D)]
        outward = torch.randn(shape.D, shape.F, device=pair.x.device, dtype=pair.x.dtype)

    @torch.no_grad()
    def run() -> None:
        for weight in inward:
            torch.mm(pair.x, weight.T)  # [T, F]
            torch.mm(h, weight)  # [T, D]
            torch.mm(h.T, pair.x)  # [F, D]
        torch.mm(h, outward.T)  # [T, D]
        torch.mm(pair.grad, outward)  # [T, F]
        torch.mm(pair.grad.T, h)  # [D, F]

    return run
