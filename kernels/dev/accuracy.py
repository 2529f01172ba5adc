"""How close is close enough: the one rule that tests and benchmark gates share.

The oracle is the reference in fp64 on the same (rounded) inputs. A kernel may make twice the error that the same maths
makes in the low precision. That error is the larger of two:

- what the reference makes in the low precision, which shows how the maths itself carries roundings on;
- what a sum of n terms may cost in whatever order it is formed, ``sqrt(n) * eps``. The reference is one order, its
  BLAS's, which differs from processor to processor and may be a lucky one: blocked sums err less than
  sequential ones. Roundings add up like a random walk, so a sequential sum of n terms, the worst order in
  use, errs by about ``0.2 * sqrt(n) * eps`` of the result's norm, be the terms of one sign or of both (N. J. Higham
  and T. Mary, SIAM J. Sci. Comput. 41(5), A2815, 2019). Sums are formed in fp32 at least, so for 16-bit results the
  rounding of the result outweighs this.

The log of a sum of exponentials (``lse``) adds a third part, which is absolute: a relative error of the sum is an
absolute one of its log. The sum errs by its roundings and by the error of an exponential (``exponential``), which no
reference shows: which exponential a processor computes depends on its vector instructions.

Nobody guesses a tolerance.
"""

from __future__ import annotations

import math
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


def rounding(dtype: torch.dtype, terms: int = 1, roundings: int = 1) -> float:
    """What a sum of ``terms`` terms, in whatever order, may cost in ``dtype``: relative to the norm of the result.

    0 for integers. 16-bit results are sums in fp32, rounded ``roundings`` times on their way, which adds up likewise.
    """
    if not dtype.is_floating_point:
        return 0.0
    summed = torch.promote_types(dtype, torch.float32)
    return max(math.sqrt(roundings) * torch.finfo(dtype).eps, math.sqrt(max(terms, 1)) * torch.finfo(summed).eps)


def exponential(weights: torch.dtype) -> float:
    """The largest relative error of an exponential that weighs values in this dtype.

    In 16 bits 2^-13, a quarter of what the rounding of the weight costs or less: attention kernels compute 2^x on
    [0, 1) as a cubic there. The one of torch's FlashAttention for CPUs, on AVX2, AVX-512 and SVE, errs by 1.07e-4
    (``fexp_u20`` in ATen/cpu/vec; A. C. I. Malossi, Y. Ineichen, C. Bekas, A. Curioni, "Fast Exponential Computation on
    SIMD Architectures", HIPEAC WAPCO 2015). In higher precision a few units in the last place: the exponential's own
    and those of its rounded argument.
    """
    return 2.0**-13 if weights.itemsize < 4 else 4 * torch.finfo(weights).eps


def log_of_sum(oracle: torch.Tensor, terms: int, weights: torch.dtype) -> float:
    """What the log of a sum of ``terms`` exponentials may cost, beside ``rounding``: relative to the oracle's norm."""
    absolute = exponential(weights) + rounding(torch.promote_types(weights, torch.float32), terms)
    norm = oracle.detach().to(torch.float64).norm().item()
    return absolute * math.sqrt(oracle.numel()) / (norm if norm > 0 else 1.0)


def judge(
    name: str,
    out: torch.Tensor,
    low: torch.Tensor,
    oracle: torch.Tensor,
    *,
    terms: int = 1,
    roundings: int = 1,
    computed: torch.dtype | None = None,
    weights: torch.dtype | None = None,
) -> Verdict:
    """Compare ``out`` with the fp64 ``oracle``; ``low`` is the reference computed in ``out``'s own precision.

    ``terms`` is the length of the longest sum behind any number of ``out``, the sums in it that follow one another
    included: 1 where every number is computed by itself. ``roundings`` says how many tensors of ``out``'s precision
    follow one another on the way to it: parts that ranks add up are rounded where one process's are not. ``computed``
    is the precision that it was computed in, where ``out`` has a higher one, as gradients under autocast have.
    ``weights`` says that ``out`` is the log of a sum of exponentials, which weigh values in this dtype.
    """
    floor = rounding(computed or out.dtype, terms, roundings)
    if weights is not None:
        floor += log_of_sum(oracle, terms, weights)
    return within(name, out, oracle, FACTOR * max(relative_error(low, oracle), floor))


def within(name: str, out: torch.Tensor, oracle: torch.Tensor, budget: float) -> Verdict:
    """Compare ``out`` with the ``oracle`` under a budget that follows from what was computed, e.g. ``rounding``."""
    return Verdict(name, relative_error(out, oracle), budget)
