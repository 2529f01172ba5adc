"""Whether an op's inputs can tell a right answer from a shortcut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...kernels.dev.registry import Case, OpSpec


def check_drawn(spec: OpSpec, case: Case, device: torch.device, seed: int) -> None:
    """Raises ValueError if the largest floating-point input is whole numbers, or the same for ``seed`` and the next.

    Inputs that the op writes into do not count. Zeros and whole numbers hide an error of rounding, and a GPU multiplies
    them at a higher clock; inputs that do not change hide an answer that was kept.
    """
    first, second = (_largest(spec, spec.make_inputs(case, device, each)) for each in (seed, seed + 1))
    if first is None or second is None or first.numel() < 2:
        return
    if torch.equal(first, first.round()):
        raise ValueError(f"{spec.name}, case {case.name}: make_inputs gives whole numbers only; expected random ones")
    if torch.equal(first, second):
        raise ValueError(f"{spec.name}, case {case.name}: make_inputs gives the same numbers for every seed")


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in ``value``, a tensor or nested containers of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors(each)


def _largest(spec: OpSpec, inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """The largest floating-point input of at least 16 bits, NaN as 0; None without one."""
    read = tensors([value for name, value in inputs.items() if name not in spec.mutates])
    numbers = [x.detach() for x in read if x.is_floating_point() and x.element_size() > 1]
    return max(numbers, key=torch.Tensor.numel).nan_to_num() if numbers else None
