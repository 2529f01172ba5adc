"""``apply_rope``: the public function and its autograd."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import autograd, dispatch, library, repeated
from ..runtime.dispatch import Choice
from ..runtime.dtypes import FLOATS
from . import reference, schemas

_OP = "apply_rope"
_MAX_ROTARY = 2048  # of the kernel, which holds a head's pairs in registers; the reference takes any
_MAX_TOKENS = 2**31 - 2**13  # the last tile's end still fits 32 bits


def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    inplace: bool = False,
    heads_first: bool = False,
    twice: bool = False,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotary position embedding (Su et al., arXiv:2104.09864, section 3.4) of queries and keys, in one launch.

    Args:
        q: [..., N, H] in bf16, fp16 or fp32; any strides, fastest with a contiguous last dimension. Slices of a fused
            projection need no copy. fp64 runs the reference.
        k: [..., K, H] with q's leading dimensions, dtype and device, or None.
        cos, sin: [..., P/2] fp32, of each token's angles; leading dimensions that broadcast to q's (tables [S, P/2] go
            with q [B, S, N, H]). The first P <= H elements of every head are rotated, the rest is handed through.
        interleaved: which elements make a pair: i and i + P/2 (GPT-NeoX, Llama), or 2i and 2i + 1 (GPT-J).
        inplace: write the result over q and k, and return them.
        heads_first: q is [..., N, S, H] and k [..., K, S, H], as transformers has them; results have their order in
            memory, too.
        twice: cos and sin are [..., P], the angles twice side by side, as transformers has them; one half is read.
        impl: "auto", "triton" or "reference"; see ``kernels/runtime/dispatch.py``.

    Returns (q, k) rotated, in their dtype, rounded once; k is None where it was. Backward rotates by the opposite
    angle and keeps nothing but the tables; cos and sin have gradients with the reference only.

    In place under autograd, a tensor that is a view costs a launch of its own, in backward too.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; in place: leaves that require a gradient, expanded
            tensors, and one tensor as both q and k. Other overlaps in memory are the caller's to avoid.
        RuntimeError: impl="triton" where the kernel cannot run.
    """
    key = None
    if not inplace and dispatch.may_launch(impl, q):
        key = repeated.key_of(impl, (q, k, cos, sin), (interleaved, False, heads_first, twice))
        known = None if key is None else _calls.get(key)
        if known is not None and not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)):
            dispatch.counts[_COUNTED] += 1
            grad = _wants_grad(q) or _wants_grad(k)
            outs = _apply_rope(q, k, cos, sin, interleaved, known) if grad else known(q, k, cos, sin)
            return outs[0], None if k is None else outs[1]
    if heads_first or twice:
        tables = _first_half(cos, sin) if twice else (cos, sin)
        turned = _turned(q, k) if heads_first else (q, k)
        outs = apply_rope(*turned, *tables, interleaved=interleaved, inplace=inplace, impl=impl)
        if key is not None and repeated.key_of(impl, (*turned, *tables), (interleaved, False, False, False)) in _calls:
            _remember(key, q, k, cos, sin)
        return (q, k) if inplace else _turned(*outs) if heads_first else outs
    _check(q, k, cos, sin)
    if inplace:
        _check_inplace(q, k)
    if dispatch.uses_reference(impl, q):
        choice = _REFERENCE
    else:
        choice = rope_choice(q.device, impl, unsupported=_unsupported(q, k, cos, sin, inplace))
    dispatch.count(_OP, choice.impl)
    if not choice.triton:
        if not inplace:
            return reference.apply_rope(q, k, cos, sin, interleaved)
        reference.apply_rope_(q, k, cos, sin, interleaved)
    elif inplace:
        _rotate_(q, k, cos, sin, interleaved)
    else:
        if _wants_grad(q) or _wants_grad(k):
            apply = _ApplyRope.apply if torch.compiler.is_compiling() else _apply_rope
            outs = apply(q, k, cos, sin, interleaved, None)
        else:
            outs = library.launches(schemas, q, k, cos, sin).apply_rope(q, k, cos, sin, interleaved, False)
        if key is not None:
            _remember(key, q, k, cos, sin)
        return outs[0], None if k is None else outs[1]
    return q, k


_REFERENCE = Choice("reference", "settled")
_COUNTED = _OP, "triton"
_calls: repeated.Calls[Any] = repeated.Calls()  # launch.Rotation


def _remember(key: Any, q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """After a call that ran the kernel: have those of its kind launch it, if one launch of these tensors is all."""
    dense = cos.stride() == sin.stride() and all(t is None or t.stride(-1) == 1 for t in (q, k, cos))
    if dense and not q.is_meta:
        launch = library.imported(f"{__package__}.launch").Rotation(q, k, cos, sin, *key[1])
        if launch.whole:
            _calls[key] = launch


def _turned(q: torch.Tensor, k: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Tokens before heads, or the other way round."""
    return q.transpose(-2, -3), None if k is None else k.transpose(-2, -3)


def _first_half(*tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of the last dimension of each of ``tables``; ValueError where it is odd."""
    for name, table in zip(("cos", "sin"), tables):
        if not table.dim() or table.shape[-1] % 2:
            raise ValueError(
                f"apply_rope: {name} has shape {tuple(table.shape)}: expected [..., P] with P even, the angles twice; "
                "or pass twice=False"
            )
    return tuple([table.narrow(-1, 0, table.shape[-1] // 2) for table in tables])


def _rotated_back_by_kernel(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    heads_first: bool,
    twice: bool,
) -> Any:
    """By the opposite angles, outside autograd."""
    key = repeated.key_of("triton", (q, k, cos, sin), (interleaved, True, heads_first, twice))
    known = None if key is None else _calls.get(key)
    if known is not None:
        return known(q, k, cos, sin)
    first, second = _turned(q, k) if heads_first else (q, k)
    tables = _first_half(cos, sin) if twice else (cos, sin)
    outs = library.launches(schemas, first, second, *tables).apply_rope(first, second, *tables, interleaved, True)
    if key is not None:
        _remember(key, q, k, cos, sin)
    return _turned(*[*outs, None][:2]) if heads_first else outs


def rope_choice(device: torch.device, impl: str = "auto", *, unsupported: str | None = None) -> Choice:
    """Which implementation :func:`apply_rope` takes on ``device``, and why."""
    return dispatch.choose(_OP, device, impl, unsupported=unsupported)


def _unsupported(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, inplace: bool
) -> str | None:
    """Why the kernel cannot take this call, or None."""
    if q.dtype == torch.float64 or cos.dtype == torch.float64:
        return "the kernel computes in fp32, and this is fp64"
    if 2 * cos.shape[-1] > _MAX_ROTARY:
        return f"the kernel rotates up to {_MAX_ROTARY} elements of a head, and these are {2 * cos.shape[-1]}"
    if q.shape[:-2].numel() > _MAX_TOKENS:
        return f"the kernel counts up to {_MAX_TOKENS} tokens, and these are {q.shape[:-2].numel()}"
    if inplace and not all(x is None or x.stride(-1) == 1 for x in (q, k)):
        return "in place the kernel wants the last dimension contiguous, and here it is strided"
    transformed = autograd.transformed()
    if transformed:
        return transformed
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return "the kernel's backward gives cos and sin no gradient, and they require one"
    return None


def _wants_grad(x: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and x is not None and x.requires_grad


class _ApplyRope(torch.autograd.Function):
    """q and k rotated by the kernel into tensors of their own; k may be None."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        interleaved: bool,
        known: Any,
    ) -> Any:
        _keep(ctx, cos, sin, interleaved)
        ctx.layout = (False, False) if known is None else (known.heads_first, known.twice)
        if known is not None:
            outs = tuple(known(q, k, cos, sin)[: 1 if k is None else 2])
        else:
            outs = tuple(library.launches(schemas, q, k, cos, sin).apply_rope(q, k, cos, sin, interleaved, False))
        if not all(ctx.needs_input_grad[: len(outs)]):
            ctx.mark_non_differentiable(*[out for out, needed in zip(outs, ctx.needs_input_grad) if not needed])
        return outs

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, *dys: torch.Tensor | None) -> Any:
        return *_rotated_back(ctx, dys), None, None, None, None


_apply_rope = autograd.direct(_ApplyRope)


class _ApplyRopeInPlace(torch.autograd.Function):
    """x, and k where neither is a view, rotated by the kernel where they lie.

    The engine rewrites the history of a view for functions whose first argument it is and that have one result.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
    ) -> Any:
        _keep(ctx, cos, sin, interleaved)
        schemas.apply_rope_(x, k, cos, sin, interleaved, False)
        if k is None:
            ctx.mark_dirty(x)
            return x
        ctx.mark_dirty(x, k)
        return x, k

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, *dys: torch.Tensor | None) -> Any:
        return *_rotated_back(ctx, dys), None, None, None


def _keep(ctx: Any, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    ctx.save_for_backward(cos, sin)
    ctx.interleaved = interleaved
    ctx.set_materialize_grads(False)


def _rotated_back(ctx: Any, dys: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
    """The gradients of q and k: those that are there and wanted, rotated by the opposite angles in one launch."""
    cos, sin = ctx.saved_tensors
    # A single one is why this runs. (Of a view that was changed in place the engine knows another node than ours.)
    want = autograd.needed_grads(ctx) if len(dys) > 1 else (True,)
    asked = [i for i, (dy, wanted) in enumerate(zip(dys, want)) if dy is not None and wanted]
    found: list[torch.Tensor | None] = [None, None]
    if asked:
        first, second = [*(dys[i] for i in asked), None][:2]
        assert first is not None
        layout = getattr(ctx, "layout", (False, False))  # in place there is one
        for i, dx in zip(asked, _rotated_back_by_kernel(first, second, cos, sin, ctx.interleaved, *layout)):
            found[i] = dx
    return found


def _rotate_(q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    xs = [x for x in (q, k) if x is not None]
    grads = [_wants_grad(x) for x in xs]
    if not any(grads):
        schemas.apply_rope_(q, k, cos, sin, interleaved, False)
        if not torch.compiler.is_compiling():  # which goes by the op's schema
            torch.autograd.graph.increment_version([x for x in xs if not x.is_inference()])
    elif torch.compiler.is_compiling():  # which has no notion of marking dirty what is a view
        outs = _ApplyRope.apply(q, k, cos, sin, interleaved, None)
        for x, out in zip(xs, outs):
            x.copy_(out)
    elif all(grads) and (k is None or not any(x._is_view() for x in xs)):
        _ApplyRopeInPlace.apply(q, k, cos, sin, interleaved)
    else:
        for x in xs:
            _rotate_(x, None, cos, sin, interleaved)


# ---------------------------------------------------------------------------------------------------- checks


def _check(q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> None:
    shape, dtype, device, table_shape = q.shape, q.dtype, q.device, cos.shape
    if len(shape) < 2:
        raise ValueError(f"{_OP}: q has shape {tuple(shape)}: expected [..., heads, head size]")
    if dtype not in FLOATS:
        raise ValueError(f"{_OP}: q is {dtype}: expected bf16, fp16 or fp32")
    lead = shape[:-2]
    if k is not None and (k.dim() != len(shape) or k.shape[:-2] != lead or k.shape[-1] != shape[-1]):
        raise ValueError(
            f"{_OP}: k has shape {tuple(k.shape)} but q has {tuple(shape)}: expected the same but for the number of "
            "heads, the dimension before the last"
        )
    if k is not None and k.dtype != dtype:
        raise ValueError(f"{_OP}: k is {k.dtype} but q is {dtype}: expected the same dtype")
    if sin.shape != table_shape or not table_shape:
        raise ValueError(f"{_OP}: cos has shape {tuple(table_shape)} and sin {tuple(sin.shape)}: expected [..., P/2]")
    if cos.dtype != sin.dtype or cos.dtype not in (torch.float32, torch.float64):  # fp64 is the oracle's
        raise ValueError(f"{_OP}: cos is {cos.dtype} and sin {sin.dtype}: expected fp32, whatever q's dtype")
    if not 0 < 2 * table_shape[-1] <= shape[-1]:
        raise ValueError(
            f"{_OP}: cos has {table_shape[-1]} columns, one for each pair that is rotated: expected 1 to "
            f"{shape[-1] // 2}, as heads have {shape[-1]} elements (half a table, not one that repeats itself)"
        )
    own = table_shape[:-1]
    if own != lead and (len(own) > len(lead) or not _broadcasts(own, lead)):
        raise ValueError(
            f"{_OP}: cos has shape {tuple(table_shape)}, q {tuple(shape)}: expected leading dimensions that broadcast "
            f"to q's {tuple(lead)}, a row for each token"
        )
    if cos.device != device or sin.device != device or (k is not None and k.device != device):
        raise ValueError(f"{_OP}: q is on {device} but k, cos or sin is elsewhere; move them together")


def _broadcasts(own: torch.Size, lead: torch.Size) -> bool:
    return all(a == b or a == 1 for a, b in zip(reversed(own), reversed(lead)))


def _check_inplace(q: torch.Tensor, k: torch.Tensor | None) -> None:
    for name, x in (("q", q), ("k", k)):
        if x is None:
            continue
        if _wants_grad(x) and _is_leaf(x):
            raise ValueError(
                f"{_OP}: inplace=True would overwrite {name}, a leaf that requires a gradient (or a view of one): pass "
                "inplace=False, or call it under torch.no_grad()"
            )
        if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape)):
            raise ValueError(
                f"{_OP}: inplace=True, but elements of {name} share memory (it is expanded): pass inplace=False or "
                f"{name}.clone()"
            )
    if k is q:
        raise ValueError(f"{_OP}: inplace=True with q as k would rotate it twice: pass k=None")


def _is_leaf(x: torch.Tensor) -> bool:
    return x.is_leaf or (not torch.compiler.is_compiling() and x._base is not None and x._base.is_leaf)
