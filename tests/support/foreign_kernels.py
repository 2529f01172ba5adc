"""What the lane of other projects' emulated kernels asks of a case (tests/integrations/lane_emulated.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from shardfuse.kernels.dev.accuracy import Verdict, rounding, within

Tensor = torch.Tensor
Outputs = dict[str, Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Fault(NamedTuple):
    """A report that is right: the kernel has the fault."""

    kernel: str
    report: str  # how it begins
    reason: str


class Case(NamedTuple):
    """One call of a kernel. ``run`` returns its outputs beside those of plain torch in fp64.

    ``terms`` is the length of the longest sum behind an output, or how many operations in fp32 follow one another.
    ``roundings`` says how many tensors of an output's dtype do, the output included. ``eps`` is the precision of
    what an output was computed from, where its own is higher. ``faults`` must be reported, and nothing else.
    """

    kernel: str
    name: str
    run: Callable[[], tuple[Outputs, Outputs]]
    terms: int = 1
    roundings: int = 1
    eps: float = 0.0
    faults: tuple[Fault, ...] = ()

    def judge(self, found: Outputs, oracle: Outputs) -> list[Verdict]:
        """Each output's error beside what roundings to its dtype may cost."""
        return [within(name, out, oracle[name], self._budget(out.dtype)) for name, out in found.items()]

    def _budget(self, dtype: torch.dtype) -> float:
        coarse = math.sqrt(self.roundings) * self.eps if dtype.is_floating_point else 0.0
        return max(rounding(dtype, self.terms, self.roundings), coarse)


def differentiated(
    theirs: Callable[..., Tensor | Iterable[Tensor]],
    plain: Callable[..., Tensor | Iterable[Tensor]],
    inputs: dict[str, Tensor],
    **options: Any,
) -> tuple[Outputs, Outputs]:
    """The outputs and gradients of ``theirs`` in the dtype of ``inputs``, and of ``plain`` in fp64 on the same numbers.

    Integers are passed as they are.
    """
    wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    return _with_gradients(theirs, inputs, options), _with_gradients(plain, wide, options)


def _with_gradients(function: Callable[..., Any], inputs: dict[str, Tensor], options: dict[str, Any]) -> Outputs:
    """Kernels may write into what they are given, so they get copies."""
    leaves = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    result = function(**leaves, **options)
    results = (result,) if isinstance(result, Tensor) else tuple(result)
    found = {f"out {n}" if len(results) > 1 else "out": each.detach().clone() for n, each in enumerate(results)}
    generator = torch.Generator().manual_seed(7)
    given = [torch.randn(each.shape, generator=generator).bfloat16().to(each.dtype) for each in results]
    torch.autograd.backward(results, given)
    return found | {f"d{name}": x.grad for name, x in leaves.items() if x.grad is not None}


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)
