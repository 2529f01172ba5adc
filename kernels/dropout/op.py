"""``dropout``: the public function and its autograd."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import autograd, dispatch
from ..runtime.dtypes import no_kernel
from . import reference, schemas


def dropout(
    x: torch.Tensor,
    p: float,
    rng_key: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    stream: int = 0,
    row_start: int = 0,
    col_start: int = 0,
    impl: str = "auto",
) -> torch.Tensor:
    """x / (1 - p) where a draw by position keeps it and 0 elsewhere, plus ``residual``.

    Args:
        x: [..., C] in bf16, fp16 or fp32. Other dtypes run the reference. Rows are counted over the leading dimensions.
        p: the share that is dropped, from 0 up to but not including 1.
        rng_key: int64 [1] on x's device; see ``new_rng_key``. Equal rng_keys give equal masks.
        residual: x's shape and dtype, or None.
        stream: tells apart the dropouts that share an RNG key, 0 to 2**32 - 1.
        row_start, col_start: where x lies in the tensor of which it is a part. ``col_start`` is a multiple of 4.
        impl: "auto", "triton" or "reference"; see ``kernels/runtime/dispatch.py``. All give the same mask.

    The kernel never stores the mask: backward draws it again. ``reference.py`` says how it is drawn.

    Raises ValueError for arguments that do not fit, RuntimeError for impl="triton" where Triton cannot run.
    """
    check(p, rng_key, x.device, stream=stream, row_start=row_start, col_start=col_start)
    if x.dim() == 0:
        raise ValueError("dropout: x is a scalar: expected [..., C]")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"dropout: residual is {residual.dtype} {list(residual.shape)}: expected x's {x.dtype} {list(x.shape)}"
        )
    choice = dispatch.choose("dropout", x.device, impl, unsupported=autograd.transformed() or no_kernel(x.dtype))
    dispatch.count("dropout", choice.impl)
    call = (p, stream, row_start, col_start, choice.triton)
    if residual is x:  # torch.compile takes no tensor twice
        residual = x.view_as(x)
    if (
        choice.triton
        and torch.is_grad_enabled()
        and (x.requires_grad or (residual is not None and residual.requires_grad))
    ):
        return _Dropout.apply(call, rng_key, x, residual)
    return _run(x, residual, rng_key, call)


def check(
    p: float, rng_key: torch.Tensor | None, on: torch.device, *, stream: int = 0, row_start: int = 0, col_start: int = 0
) -> None:
    """ValueError for what no mask can be drawn from."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout: p={p}: expected at least 0 and less than 1")
    if rng_key is None:
        raise ValueError(f"dropout: p={p} needs an RNG key that decides on the mask; new_rng_key(x.device) draws one")
    if rng_key.dtype != torch.int64 or rng_key.shape != (1,) or rng_key.device != on:
        raise ValueError(
            f"dropout: rng_key is {rng_key.dtype} {list(rng_key.shape)} on {rng_key.device}: expected torch.int64 "
            f"[1] on {on}"
        )
    if not 0 <= stream < 2**32 or row_start < 0 or col_start < 0 or col_start % 4:
        raise ValueError(
            f"dropout: stream={stream}, row_start={row_start}, col_start={col_start}: expected a stream below 2**32, "
            "places from 0 up, and a column that is a multiple of 4"
        )


def new_rng_key(device: torch.device | str) -> torch.Tensor:
    """A rng_key, int64 [1], drawn on ``device`` from torch's own generator there.

    Being torch's, it comes again where ``torch.utils.checkpoint`` recomputes, advances in every replay of a CUDA graph,
    and is saved and restored with ``torch.get_rng_state``. Ranks that are to draw the same masks seed alike.
    """
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)


_Call = tuple[float, int, int, int, bool]  # p, stream, row_start, col_start, whether the kernel runs


def _run(x: torch.Tensor, residual: torch.Tensor | None, rng_key: torch.Tensor, call: _Call) -> torch.Tensor:
    p, stream, row_start, col_start, triton = call
    if not triton:
        rows = x.shape[:-1].numel()
        keep = reference.keep_mask(
            rng_key, p, rows, x.shape[-1], stream=stream, row_start=row_start, col_start=col_start
        )
        return reference.dropout(x, keep.view(x.shape), p, residual)
    y = schemas.dropout(
        _rows(x), None if residual is None else _rows(residual), rng_key, p, stream, row_start, col_start
    )
    return y if x.dim() == 2 else torch.ops.aten._unsafe_view.default(y, x.shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    x = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, rng_key: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.call = call
        ctx.save_for_backward(rng_key)
        return _run(x, residual, rng_key, call)

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (rng_key,) = ctx.saved_tensors
        _, _, want_x, want_residual = autograd.needed_grads(ctx)
        dx = _run(dy, None, rng_key, ctx.call) if want_x else None
        return None, None, dx, dy if want_residual else None
