"""``quantize``, the cast to fp8 with one scale for a tensor or one for each row, against a copy of as many bytes.

By row each number is read from memory once and written as a byte: those are the copy's bytes. One scale for a tensor
needs all of x before the first number can be cast, so x is read twice, and the target counts both readings. On a CPU,
where no kernel runs and the plain-torch passes are many, the copy only shows how many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...kernels.dev.accuracy import Verdict
from ...kernels.runtime.dtypes import BF16, E4M3, FP32, LARGEST, NAMES
from ...kernels.scaled_linear import Quantized, quantize
from ..harness.benchmark import Benchmark, Measurement, Settings, Work
from ..harness.gate import Outputs, check_outputs
from ..harness.timing import Call, Timing, compare, input_sets

TARGETS = {
    "by row, against a copy of the same bytes, 1024 rows and up": 0.90,
    "by tensor, likewise, where bf16 is read twice": 0.90 * 3 / 5,
}
BY_ROW, BY_TENSOR = TARGETS.values()

METRIC, COPY = "cast, us", "copy of the bytes"
FEW_ROWS = 1024  # with fewer the launches dominate, and a share of the bandwidth is meaningless


@dataclass(frozen=True)
class Cast:
    """x [R, C] to e4m3 with one scale, or one for each row. Its name is the case of a benchmark."""

    R: int
    C: int
    scaling: str
    dtype: torch.dtype = BF16

    @property
    def name(self) -> str:
        return f"r{self.R}-c{self.C}-{NAMES[self.dtype]}-e4m3_per_{self.scaling}"

    @property
    def bytes(self) -> int:
        return self.R * self.C * (self.dtype.itemsize + 1)

    @property
    def target(self) -> float | None:
        if self.R < FEW_ROWS:
            return None
        return BY_ROW if self.scaling == "row" else BY_TENSOR

    def draw(self, device: torch.device, seed: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(self.R, self.C, generator=generator, device=device).to(self.dtype)


def _both(R: int, C: int, dtype: torch.dtype = BF16) -> tuple[Cast, Cast]:
    return Cast(R, C, "tensor", dtype), Cast(R, C, "row", dtype)


SHORT = _both(8192, 4096)
GPU = (*SHORT, *_both(8192, 14336), *_both(128, 4096))
ON_CPU = (*_both(512, 4096), *_both(512, 4096, FP32))
DRY = _both(40, 72, FP32)


def casts(settings: Settings) -> tuple[Cast, ...]:
    if settings.dry:
        return DRY
    if not settings.cuda:
        return ON_CPU
    return SHORT if settings.short else GPU


def plan(settings: Settings) -> list[Measurement]:
    return [_row(settings, each) for each in casts(settings)]


def _row(settings: Settings, cast: Cast) -> Measurement:
    def run() -> tuple[Timing, Timing]:
        sets = [cast.draw(settings.device, seed) for seed in range(input_sets(cast.bytes, settings.device))]
        return compare(
            [partial(quantize, x, scaling=cast.scaling, impl=settings.impl) for x in sets],
            [_copied(x.device, cast.bytes // 2) for x in sets],
            settings.device,
            seconds=settings.seconds,
            dry=settings.dry,
        )

    target = cast.target if settings.cuda else None
    return Measurement(cast.name, METRIC, COPY, target, run, work=Work(0, cast.bytes), bf16=False)


def _copied(device: torch.device, half: int) -> Call:
    """A copy that reads and writes ``half`` bytes each."""
    source = torch.empty(half, dtype=torch.uint8, device=device).random_()
    return partial(torch.empty_like(source).copy_, source)


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    for cast in casts(settings):
        if cast.name in names:
            x = cast.draw(settings.device, 0)
            for verdict in check_outputs(
                _outputs(quantize(x, scaling=cast.scaling, impl=settings.impl)),
                low=lambda: _outputs(quantize(x, scaling=cast.scaling, impl="reference")),  # noqa: B023 called at once
                oracle=lambda: _exact(x.double(), cast.scaling),  # noqa: B023
            ):
                yield cast.name, verdict


def _outputs(found: Quantized) -> Outputs:
    """The scales, too: a scale that is a little off makes values that are as close to x."""
    return {"values": found.values.double() * found.scale, "scale": found.scale}


def _exact(x: torch.Tensor, scaling: str) -> Outputs:
    amax = x.abs().amax(1, keepdim=True) if scaling == "row" else x.abs().amax()
    return {"values": x, "scale": amax / LARGEST[E4M3]}


def warm(settings: Settings, name: str) -> None:
    for cast in casts(settings):
        if cast.name == name:
            quantize(cast.draw(settings.device, 0), scaling=cast.scaling, impl=settings.impl)


BENCHMARK = Benchmark(
    name="quantise",
    summary="quantize, the cast to fp8 with one scale for a tensor or for each row, against a copy of as many bytes",
    targets=TARGETS,
    plan=plan,
    check=check,
    warm=warm,
    ops=("scaled_linear",),
)
