"""The paths of ``layers/attention/sdpa.py``: torch's attention functions, each called with its own conventions.

All take q [B, S, N, H] and k, v [B, S, K, H], checked and of one dtype, and return [B, S, N, H]; a packed batch is one
row of T tokens.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...kernels.runtime import autograd


def sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    dropout_p: float,
) -> torch.Tensor:
    """Run torch's ``scaled_dot_product_attention`` on [B, S, heads, H]."""
    grouped = False
    if q.shape[2] != k.shape[2]:
        if not q.is_cpu and (mask is not None or q.dtype.itemsize > 2 or q.shape[-1] > 256):
            # These calls take the memory-efficient kernel. On CUDA only FlashAttention's and cuDNN's kernels share KV
            # heads among query heads, so without copies torch would fall back to storing all scores.
            k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
        else:
            grouped = True
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=causal,
        scale=scale,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2)


def plain_math(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout_p: float,
) -> torch.Tensor:
    """The formulas of ``sdpa.py`` term by term, in fp32 (fp64 stays)."""
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    kind = q.device.type
    with contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
        rows = q.to(wide).unflatten(2, (k.shape[2], group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        scores = rows @ k.to(wide).permute(0, 2, 3, 1) * scale  # [B, K, N/K * Sq, Sk]
        scores = scores.unflatten(2, (group, length))
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            column = sinks.to(wide).view(k.shape[2], group, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
        out = F.dropout(weights, dropout_p).flatten(2, 3) @ v.to(wide).transpose(1, 2)
    return out.unflatten(2, (group, length)).permute(0, 3, 1, 2, 4).reshape(q.shape).to(q.dtype)


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
) -> torch.Tensor:
    """FlashAttention's ragged kernel on [B, S, heads, H]; a batch of equal lengths is a packed batch too."""
    from torch.nn.attention.varlen import varlen_attn  # late: it loads the compiler and registers the ops below

    starts_q, longest_q = _ragged(q, cu_seqlens, max_seqlen)
    starts_k, longest_k = _ragged(k, cu_seqlens, max_seqlen)
    # The kernel counts the tokens before the query; -1 means all of them, and (-1, 0) means causal.
    reach = (-1 if window is None else window - 1, 0 if causal else -1)
    tokens = [t.flatten(0, 1) if t.stride(-1) == 1 else t.flatten(0, 1).contiguous() for t in (q, k, v)]
    lengths = (starts_q, starts_k, longest_q, longest_k)
    if sinks is not None:
        return _RaggedWithSinks.apply(*tokens, sinks, *lengths, scale, reach)
    attention: Callable[..., Any] = varlen_attn
    return attention(*tokens, *lengths, scale=scale, window_size=reach, **_GROUPED)


def _ragged(x: torch.Tensor, cu_seqlens: torch.Tensor | None, max_seqlen: int | None) -> tuple[torch.Tensor, int]:
    """(the start of each sequence of x [B, S, ...], a bound of their lengths)."""
    batch, length = x.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=x.device) * length if cu_seqlens is None else cu_seqlens
    # A bound of 1 selects the kernel's decoding path, which requires a token of every sequence.
    return starts, max(length if max_seqlen is None else max_seqlen, 2)


# varlen_attn's option for query heads that share KV heads; torch 2.11 needs none.
_GROUPED = {"enable_gqa": True} if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12) else {}


class _RaggedWithSinks(torch.autograd.Function):
    """The ragged kernel with a sink in every softmax.

    With l the log-sum-exp that the kernel returns and m = log(exp(l) + exp(sink)), the result is the kernel's result
    times exp(l - m). The kernel's backward forms the weights as exp(s - m) and their gradients from rowsum(dout * out),
    so from this result and m it forms the correct gradients of q, k and v. The gradient of the sink, a column without a
    value, is -exp(sink - m) * rowsum(dout * out), summed over the tokens. (The public function has no gradient through
    its log-sum-exp, so autograd could not do this.)
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor,
        starts_q: torch.Tensor,
        starts_k: torch.Tensor,
        longest_q: int,
        longest_k: int,
        scale: float,
        reach: tuple[int, int],
    ) -> torch.Tensor:
        ctx.call = longest_q, longest_k, reach == (-1, 0)
        ctx.scale, ctx.reach = scale, list(reach)
        out, lse, random_state = torch.ops.torch_attn._varlen_attn(
            q, k, v, starts_q, starts_k, *ctx.call, scale, ctx.reach
        )  # [T, N, H], [N, T] fp32
        total = torch.logaddexp(lse, sinks.float().unsqueeze(1))
        out = out * (lse - total).exp().t().unsqueeze(-1)
        if out.dtype != q.dtype:  # torch 2.11 compiles a cast that changes nothing to a graph without gradients
            out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, starts_q, starts_k, out, total, random_state)
        return out

    @staticmethod
    @autograd.first_order
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, starts_q, starts_k, out, total, random_state = ctx.saved_tensors
        want = autograd.needed_grads(ctx)
        dq = dk = dv = dsinks = None
        if any(want[:3]):
            dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
                dout, q, k, v, out, total, starts_q, starts_k, *ctx.call, random_state, ctx.scale, ctx.reach
            )
        if want[3]:
            rows = torch.linalg.vecdot(dout.float(), out.float()).t()  # [N, T]
            weight = (sinks.float().unsqueeze(1) - total).exp()
            dsinks = -torch.linalg.vecdot(weight, rows).to(sinks.dtype)
        return dq, dk, dv, dsinks, None, None, None, None, None, None


def flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """``flex_attention`` on [B, S, heads, H], compiled together with the block mask that lets it skip blocks.

    Uncompiled it would store all scores, and the mask all pairs of tokens. A CPU runs it uncompiled: it has no kernel.
    """
    call = _flex_graph
    if not (q.is_cpu or torch.compiler.is_compiling()):
        constants = (causal, scale, window, softcap, sinks is None, cu_seqlens is None, q.shape[2:], k.shape[2])
        call = _compiled_flex((*constants, q.dtype, q.device, torch.is_grad_enabled()))
    return call(q, k, v, causal, scale, window, softcap, sinks, cu_seqlens)


def _flex_graph(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    from torch.nn.attention import flex_attention as flex

    attention: Callable[..., Any] = flex.flex_attention
    visible = visible_pairs(causal, window, None if cu_seqlens is None else documents_of(cu_seqlens, q.shape[1]))
    options: dict[str, Any] = {"scale": scale, "enable_gqa": q.shape[2] != k.shape[2]}
    if visible is not None:
        options["block_mask"] = flex.create_block_mask(
            lambda batch, head, i, j: visible(i, j), None, None, q.shape[1], k.shape[1], device=q.device
        )
    if softcap is not None:
        options["score_mod"] = lambda score, batch, head, i, j: softcap * torch.tanh(score / softcap)
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    if sinks is None:
        return attention(*heads, **options).transpose(1, 2)
    out, aux = attention(*heads, **options, return_aux=flex.AuxRequest(lse=True))
    share = torch.sigmoid(aux.lse - sinks.float().unsqueeze(1))  # [B, N, S]: exp(l) / (exp(l) + exp(sink))
    return (out * share.unsqueeze(-1)).to(q.dtype).transpose(1, 2)


@functools.cache
def _compiled_flex(constants: tuple[Any, ...]) -> Callable[..., torch.Tensor]:
    """``_flex_graph``, compiled for calls with these ``constants``.

    torch.compile gives up at the eighth graph of a code object. Each kind of layer gets its own copy of the code, so
    that only different lengths and layouts add graphs.
    """
    copy = types.FunctionType(_flex_graph.__code__.replace(), _flex_graph.__globals__)
    return torch.compile(copy, fullgraph=True)


# ---------------------------------------------------------------------------------------------------- masks

_Visible = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def visible_pairs(causal: bool, window: int | None, documents: torch.Tensor | None) -> _Visible | None:
    """The function (i, j) -> bool of broadcasting index tensors: whether query i sees key j. None: always."""
    if not causal and documents is None:
        return None

    def visible(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        seen = []
        if causal:
            seen.append(j <= i)
        if window is not None:
            seen.append(j > i - window)
        if documents is not None:
            seen.append(documents[i] == documents[j])
        return functools.reduce(operator.and_, seen)

    return visible


def documents_of(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """The number, from 1, of the sequence that each of ``tokens`` tokens belongs to, computed on the device."""
    positions = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, positions, right=True)


def mask_of(
    q: torch.Tensor, k: torch.Tensor, causal: bool, window: int | None, cu_seqlens: torch.Tensor | None
) -> torch.Tensor | None:
    """Bool [Sq, Sk], True where a query may see a key; None where all may see all."""
    visible = visible_pairs(causal, window, None if cu_seqlens is None else documents_of(cu_seqlens, q.shape[1]))
    if visible is None:
        return None
    i, j = (torch.arange(t.shape[1], device=t.device) for t in (q, k))
    return visible(i.unsqueeze(1), j)
