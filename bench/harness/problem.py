"""A projection for benchmarks: its operands, the stock calls on them, and rows of ours against a peer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

import torch
import torch.nn.functional as F

from ...kernels.dev.accuracy import Verdict
from ...kernels.dev.shapes import Projection
from ...kernels.linear import apply_activation
from .benchmark import Measurement, Settings, Work
from .gate import Outputs, check_outputs
from .stock import compiled
from .timing import Timing, compare, input_sets

# Only the path matters: few blocks, not all of them full; "few" tokens swap operands and split K.
DRY = {
    "up": Projection("dry", "up", 1, 40, 48, (72,), "gelu_tanh"),
    "qkv": Projection("dry", "qkv", 1, 40, 48, (64, 32, 32)),
    "gate_up": Projection("dry", "gate_up", 1, 40, 48, (72, 72), "silu", bias=False),
    "few": Projection("dry", "up", 1, 3, 96, (40,), "gelu_tanh"),
}


@dataclass(frozen=True)
class Operands:
    """x [T, D], weights [F_i, D], biases [F_i] or None, pre-activations z_i and gradients dy_i [T, F_i]."""

    x: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor | None, ...]
    zs: tuple[torch.Tensor, ...]
    dys: tuple[torch.Tensor, ...]

    @cached_property
    def packed(self) -> torch.Tensor:
        """The weights stacked, [F, D], as a model that fuses by packing would hold them."""
        return self.weights[0].detach() if len(self.weights) == 1 else torch.cat(self.weights).detach()

    @cached_property
    def after(self) -> torch.Tensor:
        """The weight of the next layer, from the (first) output back to the width of x: [D, F]."""
        return self.weights[0].detach().T.contiguous()

    @cached_property
    def buffers(self) -> list[torch.Tensor]:
        """Buffers that accumulate the gradients of the weights, in fp32 (the oracle's in fp64), [F_i, D]."""
        dtype = torch.promote_types(self.x.dtype, torch.float32)
        return [torch.zeros_like(weight, dtype=dtype, requires_grad=False) for weight in self.weights]

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        """The tensors that have a gradient, by the gradient's name."""
        found = {"dx": self.x} | {f"dw{i}": weight for i, weight in enumerate(self.weights)}
        return found | {f"db{i}": bias for i, bias in enumerate(self.biases) if bias is not None}

    def to(self, dtype: torch.dtype) -> Operands:
        """The same values in another precision, as new leaves."""

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to(dtype, copy=True).requires_grad_(tensor.requires_grad)

        return Operands(
            convert(self.x),
            tuple(map(convert, self.weights)),
            tuple(None if bias is None else convert(bias) for bias in self.biases),
            tuple(map(convert, self.zs)),
            tuple(map(convert, self.dys)),
        )


Side = Callable[[Operands], object]


@dataclass(frozen=True)
class Problem:
    """A projection in one precision. Its name is the case of a benchmark."""

    projection: Projection
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.projection.name}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def weight_bytes(self) -> int:
        return self.projection.D * self.projection.F * self.dtype.itemsize

    @property
    def input_bytes(self) -> int:
        """Bytes of x, [T, D]."""
        return self.projection.T * self.projection.D * self.dtype.itemsize

    @property
    def output_bytes(self) -> int:
        """Bytes of one pass over [T, F] of all weights together."""
        return self.projection.T * self.projection.F * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Operations of one product."""
        return 2 * self.projection.T * self.projection.D * self.projection.F

    def operands(self, device: torch.device, seed: int = 0) -> Operands:
        """Random operands, of order 1 after the product; x, weights and biases require gradients."""
        T, D, widths = self.projection.T, self.projection.D, self.projection.widths
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device).mul_(scale).to(self.dtype)

        return Operands(
            draw(T, D).requires_grad_(),
            tuple(draw(width, D, scale=D**-0.5).requires_grad_() for width in widths),
            tuple(draw(width).requires_grad_() if self.projection.bias else None for width in widths),
            tuple(draw(T, width) for width in widths),
            tuple(draw(T, width) for width in widths),
        )

    def operand_sets(self, device: torch.device) -> list[Operands]:
        """As many sets as exceed the cache together."""
        size = self.weight_bytes + self.input_bytes + self.output_bytes
        return [self.operands(device, seed) for seed in range(input_sets(size, device))]


def problems(projections: Iterable[Projection], settings: Settings) -> list[Problem]:
    """The problems of ``projections``: bf16 on a GPU, fp32 on a CPU."""
    return [Problem(projection, torch.bfloat16 if settings.cuda else torch.float32) for projection in projections]


def row(
    settings: Settings,
    problem: Problem,
    metric: str,
    ours: Side,
    peer_name: str,
    peer: Side,
    target: float | None,
    *,
    work: Work | None = None,
    slow: bool = False,
) -> Measurement:
    """A row with both sides on the same operands, in rotation over as many sets as exceed the cache."""

    def run() -> tuple[Timing, Timing]:
        sets = problem.operand_sets(settings.device)
        return compare(
            [partial(ours, operands) for operands in sets],
            [partial(peer, operands) for operands in sets],
            settings.device,
            seconds=settings.seconds,
            dry=settings.dry,
        )

    return Measurement(problem.name, metric, peer_name, target, run, slow=slow, work=work)


def verdicts(
    settings: Settings,
    chosen: Sequence[Problem],
    names: Sequence[str],
    outputs: Callable[[Problem, Operands, str], Outputs],
) -> Iterator[tuple[str, Verdict]]:
    """Compare the named problems' outputs with the oracle; ``outputs`` gets the implementation to use."""
    for problem in chosen:
        if problem.name in names:
            # Each side draws the same operands again and frees them: the largest fit only one side at a time.
            side = partial(_side, settings, problem, outputs)
            for verdict in check_outputs(
                side(problem.dtype, settings.impl),
                low=partial(side, problem.dtype, "reference"),
                oracle=partial(side, torch.float64, "reference"),
                terms=problem.projection.T + problem.projection.D + problem.projection.F,
            ):
                yield problem.name, verdict


def _side(
    settings: Settings,
    problem: Problem,
    outputs: Callable[[Problem, Operands, str], Outputs],
    dtype: torch.dtype,
    impl: str,
) -> Outputs:
    return outputs(problem, problem.operands(settings.device).to(dtype), impl)


def warm(
    settings: Settings,
    chosen: Sequence[Problem],
    name: str,
    outputs: Callable[[Problem, Operands, str], Outputs],
) -> None:
    """Run ours once on the problem of that name, if there is one."""
    for problem in chosen:
        if problem.name == name:
            outputs(problem, problem.operands(settings.device), settings.impl)


# --- stock calls ------------------------------------------------------------------------------------------------------


def stock_linear(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    biases: tuple[torch.Tensor | None, ...],
    activation: str = "identity",
) -> tuple[torch.Tensor, ...]:
    """act(x @ W^T + b) for every weight, as stock modules call it."""
    return tuple(apply_activation(F.linear(x, weight, bias), activation) for weight, bias in zip(weights, biases))


def eager(operands: Operands, activation: str) -> tuple[torch.Tensor, ...]:
    return stock_linear(operands.x, operands.weights, operands.biases, activation)


@torch.no_grad()
def plain_gemm(operands: Operands) -> torch.Tensor:
    """One cuBLAS product of all widths together, [T, F], without bias or activation."""
    return operands.x @ operands.packed.T


def lazily_compiled(call: Callable[..., object], **options: object) -> Callable[..., object]:
    """``call``, compiled at its first use, when its row is measured."""

    @cache
    def made() -> Callable[..., object]:
        return compiled(call, **options)

    return lambda *tensors: made()(*tensors)
