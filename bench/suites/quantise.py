"""``quantize``, the cast to fp8 with one scale for a tensor, against a copy of as many bytes.

It reads x twice, for the largest magnitude and for the cast, and writes a byte for each number; the copy's bytes are
those of one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ...kernels.dev.accuracy import Verdict
from ...kernels.runtime.dtypes import NAMES
from ...kernels.scaled_linear import Quantized, quantize
from ..harness.benchmark import Benchmark, Measurement, Settings, Work
from ..harness.gate import check_outputs
from ..harness.timing import Call, Timing, compare, input_sets

METRIC, COPY = "cast, us", "copy of the bytes"


@dataclass(frozen=True)
class Cast:
    """x [R, C] to e4m3 with one scale. Its name is the case of a benchmark."""

    R: int
    C: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"r{self.R}-c{self.C}-{NAMES[self.dtype]}-e4m3_per_tensor"

    @property
    def bytes(self) -> int:
        return self.R * self.C * (self.dtype.itemsize + 1)

    def draw(self, device: torch.device, seed: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(self.R, self.C, generator=generator, device=device).to(self.dtype)


GPU = (Cast(8192, 4096), Cast(8192, 14336), Cast(128, 4096))
SHORT = GPU[:1]
DRY = (Cast(40, 72, torch.float32),)


def casts(settings: Settings) -> tuple[Cast, ...]:
    return DRY if settings.dry else SHORT if settings.short else GPU


def plan(settings: Settings) -> list[Measurement]:
    return [_row(settings, each) for each in casts(settings)]


def _row(settings: Settings, cast: Cast) -> Measurement:
    def run() -> tuple[Timing, Timing]:
        sets = [cast.draw(settings.device, seed) for seed in range(input_sets(cast.bytes, settings.device))]
        return compare(
            [partial(quantize, x, impl=settings.impl) for x in sets],
            [_copied(x.device, cast.bytes // 2) for x in sets],
            settings.device,
            seconds=settings.seconds,
            dry=settings.dry,
        )

    return Measurement(cast.name, METRIC, COPY, None, run, work=Work(0, cast.bytes), bf16=False)


def _copied(device: torch.device, half: int) -> Call:
    """A copy that reads and writes ``half`` bytes each."""
    source = torch.empty(half, dtype=torch.uint8, device=device).random_()
    return partial(torch.empty_like(source).copy_, source)


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    for cast in casts(settings):
        if cast.name in names:
            x = cast.draw(settings.device, 0)
            for verdict in check_outputs(
                {"values": _widened(quantize(x, impl=settings.impl))},
                low=lambda: {"values": _widened(quantize(x, impl="reference"))},  # noqa: B023 called at once
                oracle=lambda: {"values": x.double()},  # noqa: B023
            ):
                yield cast.name, verdict


def _widened(found: Quantized) -> torch.Tensor:
    return found.values.double() * found.scale


def warm(settings: Settings, name: str) -> None:
    for cast in casts(settings):
        if cast.name == name:
            quantize(cast.draw(settings.device, 0), impl=settings.impl)


BENCHMARK = Benchmark(
    name="quantise",
    summary="quantize, the cast to fp8 with one scale for a tensor, against a copy of as many bytes",
    targets={},
    plan=plan,
    check=check,
    warm=warm,
    ops=("scaled_linear",),
    devices=("cuda",),
)
