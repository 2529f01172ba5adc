"""Attention for training and plain inference, on torch's own paths, chosen in one place.

``attend`` computes, for each sequence and head, with j over the keys that query i may see::

    s_ij = scale * q_i . k_j            softcap * tanh(s_ij / softcap)        with softcap (Gemma 2, arXiv:2408.00118)
    p_ij = exp(s_ij) / (sum_j exp(s_ij) [+ exp(sink)])                        with sinks (gpt-oss, arXiv:2508.10925)
    o_i  = sum_j p_ij v_j

Causal: j <= i. ``window`` (Mistral 7B, arXiv:2310.06825), as transformers counts it: the query itself and the
``window - 1`` tokens before it, i - window < j <= i.

| path | what runs | for |
|---|---|---|
| sdpa | ``F.scaled_dot_product_attention``, which picks its own backend | equal lengths, nothing else: the default |
| mask | the same with a boolean mask [S, S] or [T, T] made on the device | windows and packed batches, anywhere |
| loop | sdpa, mask or math, one packed sequence after another | packed batches on a CPU, whose lengths the host knows |
| varlen | ``torch.nn.attention.varlen``, the ragged FlashAttention | windows, sinks, packed; CUDA, fp16 and bf16 |
| flex | ``flex_attention``, compiled, with a block mask | the same and soft-caps, in fp32 too; GPUs |
| math | plain torch with all scores in memory | all other calls |

The host never reads a tensor of the GPU here, so a CUDA graph can capture every path (flex after a first call that
compiles it). ``sdpa_paths.py`` implements the paths; ``dispatch.counts["attention", path]`` counts their calls.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from ...kernels.runtime import dispatch
from ...kernels.runtime.device import ASSUMED
from ...kernels.runtime.dispatch import Choice
from ...kernels.runtime.names import expected
from . import sdpa_paths as paths

PATHS = ("sdpa", "mask", "loop", "varlen", "flex", "math")

# Every combination that `attend` refuses, with the alternative.
REFUSALS = {
    "lengths": (
        "causal attention wants as many keys as queries; pass causal=False for attention to another sequence, and "
        "serve from a cache with kernels.paged_attention"
    ),
    "packed lengths": "a packed batch wants a key for every query: k and v [T, K, H] with q's T",
    "packed layout": "cu_seqlens wants q [T, N, H] and no batch_size: flatten q, k and v, or leave cu_seqlens out",
    "batch": "q [B*S, N, H] wants batch_size=B or cu_seqlens, or pass q [B, S, N, H]",
    "max_seqlen": "max_seqlen bounds the lengths of a packed batch: pass cu_seqlens as well, or leave it out",
    "window": "a window reaches back from a causal query: pass causal=True, or window=None",
    "dropout": (
        "no fused path of torch drops attention weights under a soft-cap or with sinks: pass dropout_p=0, or "
        "path='math', which keeps all scores in memory"
    ),
}


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    dropout_p: float = 0.0,
    batch_size: int | None = None,
    path: str = "auto",
) -> torch.Tensor:
    """Attention within each sequence of a batch; the formulas and paths are at the top of this module.

    Args:
        q: [B, S, N, H], or [T, N, H] with ``batch_size`` (T = B*S, batch-major) or ``cu_seqlens``.
        k, v: [..., K, H] likewise, N a multiple of K; q's dtype.
        causal: whether a query sees the keys up to its own only. ``False`` allows more or fewer keys than queries.
        scale: of the scores; default H ** -0.5.
        window: how many tokens a query sees, itself included; None: all.
        softcap: bound of the scores, or None.
        sinks: [N], a learned logit of each head that takes part in the softmax and has no value.
        cu_seqlens: [S + 1] int32 on q's device: the start of each sequence of a packed batch and the end of the last
            one, so 0 first and T last. Checked on a CPU; on a GPU other contents give undefined results.
        max_seqlen: a bound of the sequences' lengths. Without it the varlen path takes T, which is correct but starts
            idle thread blocks. On a GPU a bound that is too small is not detected.
        dropout_p: share of the attention weights to drop, by torch's own random generator; pass 0 in evaluation.
        path: ``"auto"``, or one of PATHS, which is honoured or refused.

    Returns q's shape. Gradients reach q, k, v and sinks.

    Raises ValueError for input that does not fit together and for the combinations in REFUSALS.
    """
    if window is not None and cu_seqlens is None and batch_size is None and q.dim() == 4 and window >= k.shape[1] > 0:
        window = None  # T tokens cover every sequence
    plain = window is None and softcap is None and sinks is None and cu_seqlens is None
    plain = plain and path == "auto" and batch_size is None and max_seqlen is None
    if plain and q.dim() == 4 and _settled(q.shape, k.shape, v.shape):
        dispatch.count("attention", "sdpa")
        return paths.sdpa(q, k, v, None, causal, scale, dropout_p)
    q4, k4, v4 = _batched(q, k, v, cu_seqlens, batch_size)
    q4, k4, v4 = _autocast(q4, k4, v4)
    _check(q4, k4, v4, causal, window, softcap, sinks, cu_seqlens, max_seqlen, dropout_p)
    if path == "auto" and (q4.numel() == 0 or k4.numel() == 0):
        path = "math"  # the fused kernels differ in their results for empty tensors
    choice = choose_path(
        q4.device,
        q4.dtype,
        q4.shape[-1],
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks is not None,
        packed=cu_seqlens is not None,
        dropout_p=dropout_p,
        grad=torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, sinks)),
        path=path,
    )
    dispatch.count("attention", choice.impl)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if choice.impl == "sdpa":
        out = paths.sdpa(q4, k4, v4, None, causal, scale, dropout_p)
    elif choice.impl == "loop":
        assert cu_seqlens is not None
        same = {"causal": causal, "scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        out = _loop(q4, k4, v4, cu_seqlens, **same, dropout_p=dropout_p)
    elif choice.impl == "varlen":
        out = paths.varlen(q4, k4, v4, causal, scale, window, sinks, cu_seqlens, max_seqlen)
    elif choice.impl == "flex":
        out = paths.flex(q4, k4, v4, causal, scale, window, softcap, sinks, cu_seqlens)
    else:
        mask = paths.mask_of(q4, k4, causal, window, cu_seqlens)
        if choice.impl == "mask":
            out = paths.sdpa(q4, k4, v4, mask, False, scale, dropout_p)
        else:
            out = paths.plain_math(q4, k4, v4, mask, scale, softcap, sinks, dropout_p)
    return out.reshape(q.shape)


def _loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, **options: Any) -> torch.Tensor:
    """Each sequence of a packed batch [1, T, heads, H] by itself."""
    starts = cu_seqlens.tolist()
    spans = [(start, end - start) for start, end in pairwise(starts) if end > start]
    outs = [attend(*(t.narrow(1, *span) for t in (q, k, v)), **options) for span in spans]
    return torch.cat(outs, dim=1)


# ---------------------------------------------------------------------------------------------------- the choice


def choose_path(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    packed: bool = False,
    dropout_p: float = 0.0,
    grad: bool = True,
    path: str = "auto",
) -> Choice:
    """The path that ``attend`` takes for such a call, and the reason, which names what the preferred paths lack.

    The choice depends on these arguments, the installed versions and whether torch.compile is tracing, never on data.
    Raises ValueError for an unknown ``path``, one that cannot run, and combinations in REFUSALS.
    """
    why_not = _why_not(device, dtype, head_dim, causal, window, softcap, sinks, packed, dropout_p, grad)
    if path != "auto":
        if path not in PATHS:
            raise ValueError(f"attend: path={path!r}: {expected(path, PATHS, 'expected auto or one of')}")
        if missing := why_not(path):
            raise ValueError(f"attend: path={path!r} was asked for, but {missing}; path='auto' takes another")
        return Choice(path, "asked for")
    if not (window or softcap or sinks or packed):
        return Choice("sdpa", "torch's scaled_dot_product_attention, which picks its own backend")
    if dropout_p and (softcap or sinks):
        raise ValueError(f"attend: {REFUSALS['dropout']}")
    on_host = device.type == "cpu"
    reasons: list[str] = []
    for candidate in ("loop", "mask", "math") if on_host else ("varlen", "flex", "mask", "math"):
        missing = why_not(candidate)
        if missing is None:
            return Choice(candidate, "; ".join(reasons) or _STRENGTHS[candidate])
        reasons.append(f"not {candidate}: {missing}")
    raise AssertionError(f"no path, and math takes everything: {reasons}")


_STRENGTHS = {
    "loop": "one sequence after another costs the least on a CPU",
    "mask": "torch's scaled_dot_product_attention with a mask",
    "varlen": "torch's ragged FlashAttention kernel takes windows, sinks and packed batches",
}


def _why_not(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    packed: bool,
    dropout_p: float,
    grad: bool,
) -> Callable[[str], str | None]:
    """The reason why a path cannot take the call; None if it can."""

    def answer(path: str) -> str | None:
        if path == "sdpa" and (window or packed):
            return "it has no windows and no packed batches"
        if path in ("sdpa", "mask") and (softcap or sinks):
            return "scaled_dot_product_attention has no soft-cap and no sinks"
        if path == "loop":
            return _why_not_loop(device, packed)
        if path in ("varlen", "flex") and dropout_p:
            return "it has no dropout"
        if path == "varlen":
            return "it has no soft-cap" if softcap else _why_not_varlen(device, dtype, head_dim, grad)
        if path == "flex":
            return _why_not_flex(device, dtype, head_dim, grad)
        return None

    return answer


def _why_not_loop(device: torch.device, packed: bool) -> str | None:
    if not packed:
        return "the batch is not packed"
    if device.type != "cpu":
        return "the host would wait for the GPU to tell the lengths"
    if torch.compiler.is_compiling():
        return "a graph cannot hold lengths that are read from a tensor"
    return None


def _why_not_varlen(device: torch.device, dtype: torch.dtype, head_dim: int, grad: bool) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return "the ragged FlashAttention kernel is taken on NVIDIA's GPUs only"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the ragged FlashAttention kernel takes fp16 and bf16, not {dtype}"
    if head_dim > 256 or head_dim % 8:
        return f"the ragged FlashAttention kernel takes head sizes that are multiples of 8 up to 256, not {head_dim}"
    major, minor = _capability(device)
    if major < 8:
        return f"the ragged FlashAttention kernel needs compute capability 8.0, and this GPU has {major}.{minor}"
    if grad and head_dim > 192 and (major, minor) not in ((8, 0), (9, 0), (10, 0), (10, 3)):
        return f"FlashAttention has no backward for heads of {head_dim} at compute capability {major}.{minor}"
    return None


def _why_not_flex(device: torch.device, dtype: torch.dtype, head_dim: int, grad: bool) -> str | None:
    if device.type == "cpu":
        return "on a CPU flex_attention has no backward and no graph" if grad or torch.compiler.is_compiling() else None
    if device.type != "cuda":
        return f"flex_attention is not known to work on device {device.type!r}"
    if dispatch.triton_version() is None:
        return "flex_attention needs Triton (pip install triton; Linux only)"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"flex_attention has no kernel for {dtype}"
    if head_dim < 16:
        return f"flex_attention takes head sizes from 16 up, not {head_dim}"
    major, minor = _capability(device)
    if major < 8:
        return f"flex_attention is left alone below compute capability 8.0, and this GPU has {major}.{minor}"
    return None


def _capability(device: torch.device) -> tuple[int, int]:
    """The compute capability; without a GPU (`explain` for another machine), that of the chip that stands for it."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_capability(device)
    return divmod(int(ASSUMED.removeprefix("sm_")), 10)


# ---------------------------------------------------------------------------------------------------- validation


def _batched(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor | None, batch_size: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as [B, S, heads, H]; a packed batch is one row of T tokens."""
    if not (q.dim() == k.dim() == v.dim() and q.dim() in (3, 4)):
        raise ValueError(
            f"attend: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: expected all [B, S, heads, H] or all "
            "[T, heads, H]"
        )
    if cu_seqlens is not None:
        if q.dim() == 4 or batch_size is not None:
            raise ValueError(f"attend: {REFUSALS['packed layout']}")
        return q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    if q.dim() == 4:
        if batch_size not in (None, q.shape[0]):
            raise ValueError(f"attend: batch_size={batch_size}, but q {list(q.shape)} holds {q.shape[0]} sequences")
        return q, k, v
    if batch_size is None:
        raise ValueError(f"attend: {REFUSALS['batch']}")
    if batch_size < 1 or q.shape[0] % batch_size or k.shape[0] % batch_size or v.shape[0] % batch_size:
        raise ValueError(
            f"attend: batch_size={batch_size} does not divide the {q.shape[0]} tokens of q and {k.shape[0]} of k"
        )
    q, k, v = (t.unflatten(0, (batch_size, t.shape[0] // batch_size)) for t in (q, k, v))
    return q, k, v


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Apply scaled_dot_product_attention's autocast cast, for the paths that do not cast themselves."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # torch's function raises for the meta device
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def _settled(q: torch.Size, k: torch.Size, v: torch.Size) -> bool:
    """Whether q, k and v [B, S, heads, H] of these shapes certainly fit, causal or not: a fast check before _check."""
    return q == k == v or (k == v and len(k) == 4 and q[:2] == k[:2] and q[3] == k[3] and q[2] % max(k[2], 1) == 0)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    dropout_p: float,
) -> None:
    """ValueError unless these arguments fit together; q, k, v are [B, S, heads, H]."""
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"attend: k {list(k.shape)} and v {list(v.shape)}: expected two equal shapes [{q.shape[0]}, S, K, "
            f"{q.shape[3]}] for q {list(q.shape)}"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"attend: {q.shape[2]} query heads are not a multiple of {k.shape[2]} KV heads")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device and q.dtype.is_floating_point):
        raise ValueError(
            f"attend: q, k, v are {q.dtype}, {k.dtype}, {v.dtype} on {q.device}, {k.device}, {v.device}: expected one "
            "floating dtype and one device"
        )
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"attend: dropout_p={dropout_p}: expected at least 0 and below 1")
    if window is not None and window < 1:
        raise ValueError(f"attend: window={window}: expected at least 1, the query itself, or None")
    if window is not None and not causal:
        raise ValueError(f"attend: {REFUSALS['window']}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"attend: softcap={softcap}: expected a bound above 0, or None")
    if sinks is not None and (sinks.shape != (q.shape[2],) or sinks.device != q.device):
        raise ValueError(
            f"attend: sinks {list(sinks.shape)} on {sinks.device}: expected one for each query head, [{q.shape[2]}] on "
            f"{q.device}"
        )
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError(f"attend: {REFUSALS['max_seqlen']}")
        if causal and q.shape[1] != k.shape[1]:
            raise ValueError(f"attend: {q.shape[1]} queries and {k.shape[1]} keys: {REFUSALS['lengths']}")
    else:
        _check_packed(q, k, cu_seqlens, max_seqlen)


def _check_packed(q: torch.Tensor, k: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int | None) -> None:
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"attend: {q.shape[1]} queries and {k.shape[1]} keys: {REFUSALS['packed lengths']}")
    if (
        cu_seqlens.dim() != 1
        or cu_seqlens.shape[0] == 0
        or cu_seqlens.dtype != torch.int32
        or cu_seqlens.device != q.device
    ):
        raise ValueError(
            f"attend: cu_seqlens {cu_seqlens.dtype} {list(cu_seqlens.shape)} on {cu_seqlens.device}: expected "
            f"torch.int32 [sequences + 1] on {q.device}"
        )
    if not cu_seqlens.is_cpu or torch.compiler.is_compiling():
        return
    starts = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != q.shape[1] or any(end < start for start, end in pairwise(starts)):
        raise ValueError(
            f"attend: cu_seqlens={starts}: expected 0 first, then never less than before, and the {q.shape[1]} tokens "
            "of q last"
        )
    longest = max((end - start for start, end in pairwise(starts)), default=0)
    if max_seqlen is not None and max_seqlen < longest:
        raise ValueError(f"attend: max_seqlen={max_seqlen}, but cu_seqlens holds a sequence of {longest} tokens")
