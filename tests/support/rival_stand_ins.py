"""Stand-ins for libraries that need a GPU: modules with the names and signatures that the adapters in ``bench/rivals``
were written for, computing in plain torch.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardfuse.bench.suites import paged_peers

Tensor = torch.Tensor


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """The module ``name`` with ``contents``, and its parents, until the test ends."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        parent = ".".join(parts[:end])
        if parent not in sys.modules:
            module = ModuleType(parent)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, parent, module)
    for key, value in contents.items():
        setattr(sys.modules[name], key, value)


class _Function:
    """Called as an autograd function is."""

    def __init__(self, forward: Any) -> None:
        self.apply = forward


# --- liger-kernel 0.8.5 -----------------------------------------------------------------------------------------------


def _rms_norm(X: Tensor, W: Tensor | None, eps: float, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
    assert not in_place  # it would overwrite the caller's gradient
    assert casting_mode == "gemma"
    wide = X.float()
    y = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (y if W is None else y * (W.float() + offset)).to(X.dtype)


def _fused_add_rms_norm(X: Tensor, R: Tensor, W: Tensor, eps: float, offset=0.0, casting_mode="llama", in_place=False):
    S = X + R
    return _rms_norm(S, W, eps, offset, casting_mode, in_place), S


def _layer_norm(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
    return F.layer_norm(X, X.shape[-1:], W, B, eps)


class _Rope(torch.autograd.Function):
    """In place, forward and backward, as Liger's kernel is: q and k [B, heads, S, H], tables [1, S, P]."""

    @staticmethod
    def forward(ctx, q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
        ctx.save_for_backward(cos, sin)
        return tuple(_rotate_(x, cos, sin).view_as(x) for x in (q, k))

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        return _rotate_(dq, cos, -sin), _rotate_(dk, cos, -sin), None, None, None, None, None


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    head, (cos, sin) = x[..., : cos.shape[-1]], (table.unsqueeze(1) for table in (cos, sin))
    a, b = head.float().chunk(2, dim=-1)
    head.copy_(head.float() * cos + torch.cat((-b, a), dim=-1) * sin)
    return x


def liger(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "liger_kernel.ops.rms_norm", LigerRMSNormFunction=_Function(_rms_norm))
    fused = _Function(_fused_add_rms_norm)
    install(monkeypatch, "liger_kernel.ops.fused_add_rms_norm", LigerFusedAddRMSNormFunction=fused)
    install(monkeypatch, "liger_kernel.ops.layer_norm", LigerLayerNormFunction=_Function(_layer_norm))
    install(monkeypatch, "liger_kernel.ops.rope", LigerRopeFunction=_Rope)
    silu = _Function(lambda a, b, gate_multiplier=1.0, down_multiplier=1.0: F.silu(a) * b)
    gelu = _Function(lambda a, b: F.gelu(a, approximate="tanh") * b)
    install(monkeypatch, "liger_kernel.ops.swiglu", LigerSiLUMulFunction=silu)
    install(monkeypatch, "liger_kernel.ops.geglu", LigerGELUMulFunction=gelu)


# --- quack-kernels 0.6.5 ----------------------------------------------------------------------------------------------


def quack(monkeypatch: pytest.MonkeyPatch) -> None:
    def rmsnorm(
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        residual_dtype: torch.dtype | None = None,
        eps: float = 1e-6,
        prenorm: bool = False,
        weight_offset: float = 0.0,
    ) -> Any:
        s = x if residual is None else x + residual
        y = _rms_norm(s, weight, eps, weight_offset, "gemma", False)
        return (y, s) if prenorm else y

    install(monkeypatch, "quack.rmsnorm", rmsnorm=rmsnorm)


# --- attention over pages ---------------------------------------------------------------------------------------------


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [Q, N, H] over k and v [L, K, H]; the last query sees every key."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


class _Wrapper:
    """FlashInfer's, of flashinfer-python 0.7.2."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False) -> None:
        assert kv_layout == "HND"

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        outs = []
        for s, last in enumerate(self.last.tolist()):
            pages = self.indices[self.indptr[s] : self.indptr[s + 1]].long()
            keys, values = (x[pages].transpose(1, 2).flatten(0, 1) for x in paged_kv_cache)  # [slots, K, H]
            length = (len(pages) - 1) * self.page_size + last
            outs.append(_attention(q[self.starts[s] : self.starts[s + 1]], keys[:length], values[:length]))
        return torch.cat(outs)


class _Decode(_Wrapper):
    def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs):
        self.starts = list(range(len(indptr)))
        self.indptr, self.indices, self.last, self.page_size = indptr.tolist(), indices, last_page_len, page_size


class _Prefill(_Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, *sizes, causal=False, **kwargs
    ):
        assert causal
        self.starts, self.indptr = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.indices, self.last, self.page_size = paged_kv_indices, paged_kv_last_page_len, sizes[-1]


def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    wrappers = {"BatchDecodeWithPagedKVCacheWrapper": _Decode, "BatchPrefillWithPagedKVCacheWrapper": _Prefill}
    install(monkeypatch, "flashinfer", **wrappers)
    monkeypatch.setattr(paged_peers, "FLASHINFER_WORKSPACE", 8)


def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm 0.33.0."""

    def unified_attention(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
        block_table, softcap, q_descale, k_descale, v_descale, **scratch,
    ):  # fmt: skip
        assert causal
        assert window_size == (-1, -1)
        starts = cu_seqlens_q.tolist()
        for s, length in enumerate(seqused_k.tolist()):
            keys, values = (x[block_table[s].long()].flatten(0, 1)[:length] for x in (k, v))  # of [blocks, B, K, H]
            out[starts[s] : starts[s + 1]] = _attention(q[starts[s] : starts[s + 1]], keys, values)

    install(monkeypatch, "vllm.v1.attention.ops.triton_unified_attention", unified_attention=unified_attention)


def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang 0.5.23."""

    def extend_attention_fwd_unified(
        q, o, k_buffer, v_buffer, k_scale, v_scale, qo_indptr, kv_indptr, kv_indices, prefix_lens, max_len_extend,
        custom_mask=None, mask_indptr=None, sm_scale=None, logit_cap=0.0, is_causal=True,
    ):  # fmt: skip
        starts, ends = qo_indptr.tolist(), kv_indptr.tolist()
        for s, prefix in enumerate(prefix_lens.tolist()):
            slots = kv_indices[ends[s] : ends[s + 1]]
            assert len(slots) == prefix + starts[s + 1] - starts[s]
            o[starts[s] : starts[s + 1]] = _attention(q[starts[s] : starts[s + 1]], k_buffer[slots], v_buffer[slots])

    name = "sglang.kernels.ops.attention.extend_attention"
    install(monkeypatch, name, extend_attention_fwd_unified=extend_attention_fwd_unified)
