"""``write_kv_`` and ``norm_rope_write_kv_``: the public functions, schemas, dispatch. There is no gradient."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import dispatch, library, repeated
from . import checks, cpu, reference
from .checks import Cache
from .reference import Scale

_MAX_HEAD_SIZE = 2048  # of the kernel, which holds a head in registers; the reference takes any
_MAX_TOKENS = 2**31 - 2**13  # the last tile's end still fits 32 bits
_WRITE, _FUSED = "write_kv_", "norm_rope_write_kv_"
Optional = torch.Tensor | None


def write_kv_(
    kv_cache: Cache,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    check: bool | None = None,
    impl: str = "auto",
) -> None:
    """Write this step's keys and values into their pages, in place.

    Args:
        kv_cache: [blocks, K, B, H + Hv], K and V side by side; or a pair, k [blocks, K, B, H] and v [blocks, K, B, Hv].
            Any strides, fastest with a contiguous last dimension; any block size B. fp16, bf16 or fp32, whatever k's
            dtype (fp64 runs the reference), or quantised: float8_e4m3fn, int8.
        k, v: [T, K, H] and [T, K, Hv], fp16, bf16 or fp32; any strides, fastest with a contiguous last dimension.
        slot_mapping: [T] int64, ``block * B + offset`` of each token; negative: padding, nothing is written. No slot
            may be named twice.
        k_scale, v_scale: of a quantised cache. One element (fp32): what to divide by, and what dequantises. A tensor
            [blocks, K, B] (fp32, any strides): a scale for each token and head, which this call writes beside the
            values: the largest magnitude over 448 (fp8) or 127 (int8). None: 1, for fp8 only.
        check: whether slot_mapping is read to see that it fits; None: on a CPU only, where that costs nothing.
        impl: see ``kernels/runtime/dispatch.py``.

    Values saturate; in fp8 NaN stays NaN, int8 holds 0 for it. With written scales a head that holds NaN or infinity
    reads as NaN.

    Raises ValueError for input that does not fit together, RuntimeError when a gradient would be needed.
    """
    check = k.is_cpu if check is None else check
    k_cache, v_cache = checks.parts_of(_WRITE, kv_cache)
    operands = k_cache, v_cache, None, k, v, slot_mapping, None, None, None, None, k_scale, v_scale
    key = None if check else _key(impl, operands, (_WRITE,))
    if key is not None and (launch := _calls.get(key)) is not None:
        launch(*operands)
        return
    checks.check_write(_WRITE, k_cache, v_cache, k, v, slot_mapping)
    scales = _flat(*checks.scales_of(_WRITE, k_cache, k, k_scale, v_scale))
    _WRITE_OP(k_cache, v_cache, k, v, slot_mapping, *scales, check, impl)
    if key is not None:
        _keep(key, operands, _WRITE, impl)


def norm_rope_write_kv_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: Cache,
    slot_mapping: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    plan: cpu.Plan | None = None,
    check: bool | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Normalise the heads of q and k, rotate them, and write k and v into their pages: one launch.

    Args:
        q: [T, N, H] in k's dtype; any strides, fastest with a contiguous last dimension.
        k, v, kv_cache, slot_mapping, k_scale, v_scale, check, impl: as in :func:`write_kv_`. k and v are not changed.
        cos, sin: [T, P/2] fp32, of the angles of each token's position; the first P <= H elements of every head are
            rotated. None: no rotation.
        interleaved: which elements make a pair: i and i + P/2 (GPT-NeoX, Llama), or 2i and 2i + 1 (GPT-J).
        q_norm, k_norm: [H], weights of an RMSNorm over each head (Qwen3, Gemma 3), any floating-point dtype; None: no
            norm.
        eps: added to the mean of squares.
        norm_offset: added to both weights (Gemma: 1).
        plan: from :func:`plan_write`, made once for all layers of a step.

    Returns q [T, N, H] in its dtype, contiguous unless a plan was used; rows of padding tokens are computed like the
    others. fp32 arithmetic, rounded once: to q's dtype, or to the cache's.

    Raises ValueError for input that does not fit together, RuntimeError when a gradient would be needed.
    """
    if plan is not None and isinstance(kv_cache, torch.Tensor) and check is False and impl != "reference":
        plain = q_norm is k_norm is k_scale is v_scale is None and not torch.is_grad_enabled()
        call = q, k, v, kv_cache, slot_mapping, cos, sin
        if plain and library.direct(*call) and plan.fits(*call, interleaved):
            dispatch.count(_FUSED, "reference")
            return plan.run(q, k, v, kv_cache)
    check = k.is_cpu if check is None else check
    k_cache, v_cache = checks.parts_of(_FUSED, kv_cache)
    operands = k_cache, v_cache, q, k, v, slot_mapping, cos, sin, q_norm, k_norm, k_scale, v_scale
    key = None if check else _key(impl, operands, (_FUSED, interleaved, eps, norm_offset))
    if key is not None and (launch := _calls.get(key)) is not None:
        out: torch.Tensor = launch(*operands)
        return out
    checks.check_write(_FUSED, k_cache, v_cache, k, v, slot_mapping)
    checks.check_norm_rope(_FUSED, q, k, cos, sin, q_norm, k_norm)
    scales = _flat(*checks.scales_of(_FUSED, k_cache, k, k_scale, v_scale))
    out = _FUSED_OP(
        q, k, v, k_cache, v_cache, slot_mapping, cos, sin, interleaved, q_norm, k_norm, eps, norm_offset, *scales,
        check, impl,
    )  # fmt: skip
    if key is not None:
        _keep(key, operands, _FUSED, impl, interleaved=interleaved, eps=eps, norm_offset=norm_offset)
    return out


def plan_write(
    q: torch.Tensor,
    kv_cache: Cache,
    slot_mapping: torch.Tensor,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    impl: str = "auto",
) -> cpu.Plan | None:
    """What all layers of a step share that rotate by the same tables and write to the same slots, on a CPU.

    q [T, N, H] and kv_cache count by their shapes and dtypes. The plan is for these slots and tables with the contents
    that they have now: :func:`norm_rope_write_kv_` with ``check=False`` and without norms uses it if they are the same
    tensors and torch counts no change of theirs, and else does without. It also reads k and v as columns of q's matrix
    where they are, and may return q as columns of another.

    Returns None where there is nothing to plan: for a GPU, in other dtypes than fp32, for pairs and quantised caches,
    where padding stands before a token, and in ``row_invariance``, where calls with and without padding take one way.
    """
    if not isinstance(kv_cache, torch.Tensor) or not q.is_cpu or impl in ("triton", "reference"):
        return None
    if dispatch.row_invariant():
        return None
    if dispatch.default_impl() in ("triton", "reference") or not library.direct(q, kv_cache, slot_mapping, cos, sin):
        return None
    return cpu.make_plan(q, kv_cache, slot_mapping, cos, sin, interleaved)


_calls: repeated.Calls[Any] = repeated.Calls()


def _key(impl: str, operands: Any, options: Any) -> Any:
    """What a call is looked up by that checks no slots; None where it has to be looked at anew."""
    first = operands[0]
    if torch.is_grad_enabled() or first.is_meta or not dispatch.may_launch(impl, first):
        return None
    return repeated.key_of(impl, operands, options)


def _keep(key: Any, operands: Any, op: str, impl: str, **options: Any) -> None:
    """After a call that ran the kernel: have those of its kind launch it, if that is all that they need."""
    k_cache, v_cache, _, k, v, *_ = operands
    if dispatch.choose(op, k_cache.device, impl, unsupported=_unsupported(k, v, k_cache, v_cache)).triton:
        launch = library.imported(f"{__package__}.launch").settle(op, *operands, **options)
        if launch is not None:
            _calls[key] = launch


def _flat(k_scale: Scale, v_scale: Scale) -> tuple[Optional, Optional, Optional, Optional]:
    """As the schemas have them: only what is written is declared to change."""
    return k_scale.given, v_scale.given, k_scale.written, v_scale.written


def _write_kv_(
    kv_cache: torch.Tensor,
    v_cache: Optional,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: Optional,
    v_scale: Optional,
    k_scales: Optional,
    v_scales: Optional,
    check: bool,
    impl: str,
) -> None:
    if check:
        checks.check_slots(_WRITE, kv_cache, slot_mapping)
    choice = dispatch.choose(_WRITE, kv_cache.device, impl, unsupported=_unsupported(k, v, kv_cache, v_cache))
    dispatch.count(_WRITE, choice.impl)
    scales = Scale(k_scale, k_scales), Scale(v_scale, v_scales)
    if choice.triton:
        from . import launch

        launch.write_kv_(kv_cache, v_cache, k, v, slot_mapping, *scales)
    else:
        reference.write_kv_(kv_cache, v_cache, k, v, slot_mapping, *scales)


def _norm_rope_write_kv_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    v_cache: Optional,
    slot_mapping: torch.Tensor,
    cos: Optional,
    sin: Optional,
    interleaved: bool,
    q_norm: Optional,
    k_norm: Optional,
    eps: float,
    norm_offset: float,
    k_scale: Optional,
    v_scale: Optional,
    k_scales: Optional,
    v_scales: Optional,
    check: bool,
    impl: str,
) -> torch.Tensor:
    if check:
        checks.check_slots(_FUSED, kv_cache, slot_mapping)
    choice = dispatch.choose(_FUSED, kv_cache.device, impl, unsupported=_unsupported(k, v, kv_cache, v_cache))
    dispatch.count(_FUSED, choice.impl)
    scales = Scale(k_scale, k_scales), Scale(v_scale, v_scales)
    if choice.triton:
        from . import launch

        return launch.norm_rope_write_kv_(
            q, k, v, kv_cache, v_cache, slot_mapping, cos, sin, interleaved, q_norm, k_norm, eps, norm_offset, *scales
        )
    new_k = reference.norm_rope(k, cos, sin, interleaved, k_norm, eps, norm_offset)
    reference.write_kv_(kv_cache, v_cache, new_k, v, slot_mapping, *scales)
    # A tensor of its own, even where there is nothing to do.
    new_q = reference.norm_rope(q, cos, sin, interleaved, q_norm, eps, norm_offset).to(q.dtype)
    return new_q.clone(memory_format=torch.contiguous_format) if new_q is q else new_q.contiguous()


def _unsupported(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, v_cache: Optional) -> str | None:
    """Why the kernel cannot take this call, or None."""
    if torch.float64 in (k.dtype, kv_cache.dtype):
        return "the kernel computes in fp32, and this is fp64"
    if max(k.shape[2], v.shape[2]) > _MAX_HEAD_SIZE:
        return f"the kernel holds head sizes up to {_MAX_HEAD_SIZE}, and this is {max(k.shape[2], v.shape[2])}"
    if k.shape[0] > _MAX_TOKENS:
        return f"the kernel counts up to {_MAX_TOKENS} tokens, and these are {k.shape[0]}"
    for cache in (kv_cache, v_cache):
        if cache is not None and cache.stride(-1) != 1:
            return f"the kernel wants kv_cache with stride 1 in its last dimension, and this is {cache.stride(-1)}"
    return None


def _write_kv_fake_(*_: object) -> None:
    return None


def _norm_rope_write_kv_fake_(q: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


# The choice of implementation is made inside the ops: how many tokens the reference leaves out, no graph can hold.
_SCALES = "Tensor? k_scale, Tensor? v_scale, Tensor(c!)? k_scales, Tensor(d!)? v_scales"
_WRITE_OP = library.register(
    "write_kv_(Tensor(a!) kv_cache, Tensor(b!)? v_cache, Tensor k, Tensor v, Tensor slot_mapping, "
    f"{_SCALES}, bool check, str impl) -> ()",
    _write_kv_,
    _write_kv_fake_,
)
_FUSED_OP = library.register(
    "norm_rope_write_kv_(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, Tensor(b!)? v_cache, Tensor slot_mapping, "
    "Tensor? cos, Tensor? sin, bool interleaved, Tensor? q_norm, Tensor? k_norm, float eps, float norm_offset, "
    f"{_SCALES}, bool check, str impl) -> Tensor",
    _norm_rope_write_kv_,
    _norm_rope_write_kv_fake_,
)
