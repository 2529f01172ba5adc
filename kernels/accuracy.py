"""How close is close enough: the one rule that tests and benchmark gates share.

The oracle is the reference in fp64 on the same (rounded) inputs. The reference in the low precision makes some error
against it; a kernel may make twice that, plus a floor for results that the low precision happens to hit exactly.
Nobody guesses a tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FACTOR = 2.0


@dataclass(frozen=True)
class Verdict:
    """One output against the oracle: relative Frobenius errors."""

    name: str
    error: float  # ours against fp64
    budget: float  # what it may be

    @property
    def ok(self) -> bool:
        return self.error <= self.budget  # False for NaN

    def __str__(self) -> str:
        return f"{self.name}: error {self.error:.2e} {'<=' if self.ok else '>'} budget {self.budget:.2e}"


def relative_error(out: torch.Tensor, oracle: torch.Tensor) -> float:
    """||out - oracle|| / ||oracle|| in fp64 on the oracle's device; 0 where both are empty, inf where shapes differ."""
    if out.shape != oracle.shape:
        return float("inf")
    if oracle.numel() == 0:
        return 0.0
    oracle64 = oracle.detach().to(torch.float64)
    out64 = out.detach().to(oracle.device, torch.float64)
    scale = oracle64.norm().item()
    return (out64 - oracle64).norm().item() / (scale if scale > 0 else 1.0)


def judge(name: str, out: torch.Tensor, low: torch.Tensor, oracle: torch.Tensor) -> Verdict:
    """Compare ``out`` with the fp64 ``oracle``; ``low`` is the reference computed in ``out``'s own precision.

    The floor is one rounding of the output dtype, for cases where ``low`` is exact by luck (one element, all zeros).
    """
    floor = torch.finfo(out.dtype).eps if out.dtype.is_floating_point else 0.0
    return Verdict(name, relative_error(out, oracle), FACTOR * max(relative_error(low, oracle), floor))
