"""``linear_cross_entropy``, forward and backward, against eager, compiled and Liger's, and its products alone.

Time: against the three products of a vocabulary projection (forward, hidden states, weight) on the whole logits by the
stock library, which every loss needs, and against other implementations of the loss. Memory: the peak over forward and
backward of all allocations beyond the operands, gradients included. With a frozen weight that is the logits and tensors
derived from them; with a trained weight ours also sums its gradient in fp32, which the last row shows.

The peers' loss is ``F.cross_entropy`` of 16-bit logits, which takes the least memory of all stock calls. The gate
checks at most CHECKED tokens: in fp64, with gradients, the logits of more would not fit.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from ...kernels.dev.accuracy import Verdict
from ...parallel.cross_entropy import linear_cross_entropy
from ..harness.benchmark import Benchmark, Measurement, Settings, Work
from ..harness.gate import Outputs, check_outputs
from ..harness.problem import lazily_compiled
from ..harness.timing import Timing, compare, input_sets

TARGETS = {
    "time of the three products alone, 128k words, 8192 tokens and up": 1 / 1.08,
    "time of the three products alone, fewer words, 8192 tokens and up": 1 / 1.1,
    "time against every other peer": 1.0,
    "memory against eager, weight frozen": 8.0,
    "CPU, time against eager": 0.97,
}
LARGE_PRODUCTS, PRODUCTS, PEERS, MEMORY, CPU = TARGETS.values()

STEP = "forward + backward, us"
FROZEN, TRAINED = "peak bytes, weight frozen", "peak bytes"

# With fewer tokens the weight's gradient, read and written once per chunk, takes longer than the products.
LARGE = 8192
WORDS = 128 * 1000
CHECKED, CHECKED_CHUNK = 512, 192


@dataclass(frozen=True)
class Shape:
    """T tokens of width D over V words."""

    T: int
    D: int
    V: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"t{self.T}-d{self.D}-v{self.V}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def work(self) -> Work:
        T, D, V = self.T, self.D, self.V
        return Work(6 * T * D * V, 3 * (T * D + D * V + T * V) * self.dtype.itemsize)


GPU = tuple(Shape(T, 4096, V) for V in (32000, 128256, 152064) for T in (2048, 4096, 8192, 16384))
SHORT = tuple(Shape(T, 4096, 128256) for T in (2048, 8192))
DRY = (Shape(40, 24, 100, torch.float32),)
ON_CPU = (Shape(512, 256, 32000, torch.float32),)
ON_CPU_MEMORY = (Shape(2048, 64, 128 * 1024, torch.float32),)  # too slow to time


@dataclass(frozen=True)
class Operands:
    """hidden [T, D], weight [V, D], targets [T], one in eight ignored."""

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def of(cls, shape: Shape, device: torch.device, seed: int = 0) -> Operands:
        generator = torch.Generator(device).manual_seed(seed)
        draw = partial(torch.randn, generator=generator, device=device)
        hidden, weight = draw(shape.T, shape.D), draw(shape.V, shape.D).mul_(shape.D**-0.5)
        targets = torch.randint(shape.V, (shape.T,), generator=generator, device=device)
        targets[::8] = -100
        return cls(hidden, weight, targets).to(shape.dtype)

    def to(self, dtype: torch.dtype) -> Operands:
        hidden, weight = (t.detach().to(dtype).requires_grad_() for t in (self.hidden, self.weight))
        return Operands(hidden, weight, self.targets)


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (hidden, weight, targets)


def timed(settings: Settings) -> tuple[Shape, ...]:
    if settings.dry:
        return DRY
    return (SHORT if settings.short else GPU) if settings.cuda else ON_CPU


def weighed(settings: Settings) -> tuple[Shape, ...]:
    """The shapes for which memory is measured."""
    return timed(settings) if settings.cuda or settings.dry else (*ON_CPU, *ON_CPU_MEMORY)


def plan(settings: Settings) -> list[Measurement]:
    shapes, alone = timed(settings), settings.cuda or settings.dry
    rows = [_products_row(settings, shape) for shape in shapes if alone]
    rows += [_step_row(settings, shape, "eager", PEERS if alone else CPU, _eager) for shape in shapes]
    rows += [_memory_row(settings, shape, FROZEN, MEMORY) for shape in weighed(settings)]
    rows += [_memory_row(settings, shape, TRAINED, None) for shape in weighed(settings)]
    liger = _liger() if settings.cuda else None
    if liger is not None:
        rows += [_step_row(settings, shape, "Liger", PEERS, liger) for shape in shapes]
    if settings.cuda and not settings.dry:
        rows += [_step_row(settings, shape, "torch.compile", PEERS, _compiled(), slow=True) for shape in shapes]
    return rows


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    for shape in dict.fromkeys((*timed(settings), *weighed(settings))):
        if shape.name in names:
            few = Shape(min(shape.T, CHECKED), shape.D, shape.V, shape.dtype)
            operands = Operands.of(few, settings.device)
            chunk = CHECKED_CHUNK if few.T > CHECKED_CHUNK else -(-few.T // 2)
            ours = partial(linear_cross_entropy, impl=settings.impl, chunk_tokens=chunk)
            for verdict in check_outputs(
                _outputs(ours, operands, few.dtype),
                low=partial(_outputs, _eager, operands, few.dtype),
                oracle=lambda: _outputs(_eager, operands.to(torch.float64), torch.float64),  # noqa: B023 called at once
                terms=max(few.T, few.D, few.V),
            ):
                yield shape.name, verdict


def warm(settings: Settings, name: str) -> None:
    for shape in timed(settings):
        if shape.name == name:
            _step(_ours(settings), Operands.of(shape, settings.device))


def _ours(settings: Settings) -> Loss:
    return partial(linear_cross_entropy, impl=settings.impl)


def _eager(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets)


def _compiled() -> Loss:
    call: Any = lazily_compiled(_eager)
    return call


def _liger() -> Loss | None:
    """Liger's fused linear cross-entropy; None if it is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    # The function, not the module next to it, which needs transformers.
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    apply = module.LigerFusedLinearCrossEntropyFunction.apply
    return lambda hidden, weight, targets: apply(hidden, weight, targets)[0]


def _step(loss: Loss, operands: Operands) -> tuple[torch.Tensor, ...]:
    """Gradients of all operands that require them."""
    leaves = [leaf for leaf in (operands.hidden, operands.weight) if leaf.requires_grad]
    return torch.autograd.grad(loss(operands.hidden, operands.weight, operands.targets), leaves)


def _outputs(loss: Loss, operands: Operands, dtype: torch.dtype) -> Outputs:
    """The loss in the operands' dtype, since its logits have that dtype, whatever dtype the loss is stored in."""
    found = loss(operands.hidden, operands.weight, operands.targets)
    dhidden, dweight = torch.autograd.grad(found, (operands.hidden, operands.weight))
    return {"loss": found.detach().to(dtype), "dhidden": dhidden, "dweight": dweight}


# --- rows -------------------------------------------------------------------------------------------------------------


def _timed_row(
    settings: Settings,
    shape: Shape,
    peer_name: str,
    target: float | None,
    peer: Callable[[Operands], Callable[[], object]],
    slow: bool,
) -> Measurement:
    def run() -> tuple[Timing, Timing]:
        size = shape.D * shape.V * shape.dtype.itemsize
        sets = [Operands.of(shape, settings.device, seed) for seed in range(input_sets(size, settings.device))]
        ours = [partial(_step, _ours(settings), operands) for operands in sets]
        others = [peer(operands) for operands in sets]
        return compare(ours, others, settings.device, seconds=settings.seconds, dry=settings.dry)

    return Measurement(shape.name, STEP, peer_name, target, run, slow=slow, work=shape.work)


def _step_row(
    settings: Settings, shape: Shape, peer_name: str, target: float, loss: Loss, *, slow: bool = False
) -> Measurement:
    return _timed_row(settings, shape, peer_name, target, lambda operands: partial(_step, loss, operands), slow)


def _products_row(settings: Settings, shape: Shape) -> Measurement:
    target = None if shape.T < LARGE else LARGE_PRODUCTS if shape.V >= WORDS else PRODUCTS
    return _timed_row(settings, shape, "the three products alone", target, _products, False)


def _products(operands: Operands) -> Callable[[], None]:
    hidden, weight = operands.hidden.detach(), operands.weight.detach()
    dlogits = torch.randn(len(hidden), len(weight), device=hidden.device, dtype=hidden.dtype)

    def run() -> None:
        torch.mm(hidden, weight.T)  # [T, V]
        torch.mm(dlogits, weight)  # [T, D]
        torch.mm(dlogits.T, hidden)  # [V, D]

    return run


def _memory_row(settings: Settings, shape: Shape, metric: str, target: float | None) -> Measurement:
    def run() -> tuple[Timing, Timing]:
        operands = Operands.of(shape, settings.device)
        operands.weight.requires_grad_(metric == TRAINED)
        sides = (_ours(settings), _eager)
        ours, eager = (Timing(peak(partial(_step, loss, operands), settings.device)) for loss in sides)
        return ours, eager

    return Measurement(shape.name, metric, "eager", target, run)


def peak(step: Callable[[], object], device: torch.device) -> int:
    """The most bytes that ``step`` has allocated at once, by the allocator's count."""
    if device.type == "cuda":
        step()  # allocates the workspaces
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    held = most = 0
    profiler: Any = found.profiler
    events = profiler.kineto_results.events()
    for event in sorted((each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


BENCHMARK = Benchmark(
    name="cross_entropy",
    summary="linear_cross_entropy, the loss of a vocabulary projection without its logits: time and memory",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=("linear_cross_entropy",),
    sources=(
        "bench/harness/problem.py",
        "bench/harness/stock.py",
        "parallel/cross_entropy.py",
        "parallel/core/operands.py",
    ),
)
