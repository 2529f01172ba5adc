"""Recognise transformers' functions ``apply_rotary_pos_emb`` by their values, and replace them by ours."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ....kernels.rope import apply_rope
from ..probing import Foreign, foreign

NAME = "apply_rotary_pos_emb"  # the name in every model of transformers

Function = Callable[..., Any]

# The layouts in which models expand a table of P/2 angles to a last dimension of P.
_WHOLE: dict[str, Function] = {
    "halves": lambda table: torch.cat([table, table], -1),
    "pairs": lambda table: table.repeat_interleave(2, -1),
    "once": lambda table: table,
}


def _angles(table: torch.Tensor, layout: str) -> torch.Tensor:
    """As :func:`apply_rope` takes them: each once, in fp32."""
    if layout == "halves":
        table = table.narrow(-1, 0, table.shape[-1] // 2)
    elif layout == "pairs":
        table = table[..., ::2]
    return table.float()


def _rotation(function: Function, layout: str, interleaved: bool, impl: str = "auto") -> Function:
    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q [B, N, S, H], k [B, K, S, H] by cos, sin [B, S, P or P/2]; with ``unsqueeze_dim=2`` [B, S, N, H]."""
        rotated = cos.shape[-1] * (2 if layout == "once" else 1)
        if rotated % 2 or rotated > q.shape[-1]:
            return function(q, k, cos, sin, unsqueeze_dim)
        twice = layout == "halves" and cos.dtype is sin.dtype is torch.float32
        if not twice:
            cos, sin = _angles(cos, layout), _angles(sin, layout)
        return apply_rope(  # type: ignore[return-value]
            q, k, cos, sin, interleaved=interleaved, heads_first=unsqueeze_dim == 1, twice=twice, impl=impl
        )

    return rotate


def rotate_one(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor, impl: str = "auto") -> torch.Tensor:
    """Rotate x [B, S, N, H] by sin, cos [B, S, P/2] in interleaved pairs, as GPT-J does."""
    return apply_rope(x, None, cos.float(), sin.float(), interleaved=True, impl=impl)[0]


def none(q: Any, k: Any = None, *tables: Any, **options: Any) -> Any:
    """Stands in for ``apply_rotary_pos_emb``: returns one tensor or two without rotation."""
    return (q, k) if isinstance(k, torch.Tensor) and k.dim() == q.dim() else q


@functools.cache
@torch.no_grad()
def ours(function: Any) -> Function | None:
    """The rotation by our op that equals ``function``, found by a trial in fp64; None if there is none."""
    try:
        takes = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    if takes[4:] not in ((), ("unsqueeze_dim",)):
        return None
    drawn = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 8, generator=drawn, dtype=torch.float64) for heads in (4, 2))
    angles = torch.rand(2, 5, 4, generator=drawn, dtype=torch.float64) * 6
    tables = [table.float().double() for table in (angles.cos(), angles.sin())]  # ours takes them in fp32
    for layout, whole in _WHOLE.items():
        for interleaved in (False, True):  # tried with the reference, as the kernel has no fp64
            if _agree(function, _rotation(function, layout, interleaved, "reference"), q, k, *map(whole, tables)):
                return _rotation(function, layout, interleaved)
    one = functools.partial(rotate_one, impl="reference")
    return rotate_one if _agree(function, one, q.transpose(1, 2), *tables[::-1]) else None


def _agree(theirs: Function, ours: Function, *args: torch.Tensor) -> bool:
    try:
        with foreign(f"its {NAME}"):
            found = theirs(*args)
    except Foreign:
        return False
    results = [result if isinstance(result, tuple) else (result,) for result in (found, ours(*args))]
    if len(results[0]) != len(results[1]) or not all(isinstance(each, torch.Tensor) for each in results[0]):
        return False
    # Some functions compute in fp32 for any input.
    return all(a.shape == b.shape and torch.allclose(a.double(), b.double(), 1e-5, 1e-5) for a, b in zip(*results))
