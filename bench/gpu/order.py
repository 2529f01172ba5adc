"""The order in which a GPU run measures: the rows that answer most first, those that may hang or take long last."""

from __future__ import annotations

from collections.abc import Collection

Name = tuple[str, str, str, str]  # of a row: benchmark, case, metric, peer

_UP = "llama3-8b-tp1-up-t8192-d4096-f14336-gelu_tanh-bfloat16"
_QKV = "llama3-8b-tp1-qkv-t4096-d4096-f6144-bfloat16"
_GPT = "gpt3-13b-tp1-up-t4096-d5120-f20480-gelu_tanh-bfloat16"
_MLP = "mlp-t4096-d4096-f16384-bfloat16"
_NORM = "rms_norm-t8192-d4096-bf16-residual_same"
_PREFILL = "s1-t8192-n32k8h128-page16-bf16"
_CUBLAS, _COPY = "cuBLAS x @ w.T", "copy of the bytes"
_SMALL = "forward without gradients, us"

HEADLINES: tuple[Name, ...] = (
    ("linear_act", _QKV, "forward, us", _CUBLAS),
    ("linear_act", _UP, "forward, us", _CUBLAS),
    ("paged_decode", "s64-l8192-n32k8h128-page16-bf16", "decode, us", _COPY),
    ("paged_prefill", _PREFILL, "prefill, us", "SDPA FlashAttention, contiguous KV"),
    ("gated", "llama3-8b-tp1-gate_up-t8192-d4096-f28672-silu-bfloat16", "forward, us", "cuBLAS, doubled width"),
    ("linear_backward", _GPT, "dgrad with act', us", "cuBLAS dy @ w"),
    ("linear_backward", _GPT, "wgrad into fp32, us", "eager"),
    ("mlp", _MLP, "forward + backward, us", "eager"),
    ("mlp", _MLP, "forward + backward into fp32, us", "eager, added after backward"),
    ("norm", _NORM, "forward, us", _COPY),
    ("norm", _NORM, "forward + backward, us", _COPY),
    ("rope", "llama8b-b1-s8192-n32-k8-h128-bf16", "forward, us", _COPY),
    ("cross_entropy", "t8192-d4096-v128256-bfloat16", "forward + backward, us", "the three products alone"),
    ("paged_decode", "s64-l1024-n32k8h128-page16-bf16", "decode, us", _COPY),
    ("paged_prefill", _PREFILL, "prefill, us", "SDPA cuDNN, contiguous KV"),
    *(("small_m", _UP.replace("t8192", f"t{tokens}"), _SMALL, _CUBLAS) for tokens in (1, 16, 64)),
    ("scaled_linear", _UP, "scales by tensor, us", "torch._scaled_mm"),
    ("linear_act", _GPT.replace("tanh", "erf"), "host time, us", "eager plus 10 us"),
    ("cache_write", "llama8b-t8192-k8-h128-p16-bf16", "write, us", _COPY),
    ("overlap", "gather-t8192-k8192-n3584-r8-bf16", "every flag set, us", "own plain GEMM"),
)
SPIN = ("overlap", "all_reduce_norm")  # benchmarks whose kernels wait for flags, and so may wait for ever


def ordered(rows: Collection[Name]) -> list[Name]:
    """The headlines, the others, those that may hang."""
    others = [row for row in rows if row not in HEADLINES]
    return [row for row in HEADLINES if row in rows] + sorted(others, key=lambda row: row[0] in SPIN)
