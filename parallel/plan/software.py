"""What the software of a run does beside its layout: which attention kernel, how many passes over activations, overlap.

The planner's own is ``OURS``. Published runs name theirs, and ``published.py`` says which of these that is. Shares of
the peak are from the kernels' papers: FlashAttention reaches 25 to 40 % of an A100's peak and FlashAttention-2 50 to
73 % (Dao, arXiv:2307.08691), on an H100 34 % at most, for which 0.28 stands here: it was chosen with torchtitan's runs
in view, and is no independent figure. FlashAttention-3 and cuDNN about twice that, forward (Shah et
al., arXiv:2407.08608). Backward has five products instead of two, at a little less of the peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class Software:
    """``attention``: the share of the dense peak by GPU family, or empty for attention that stores its scores.

    ``passes``: how often a forward reads or writes an activation as wide as the model, and ``ffn_passes`` one as wide
    as the MLP, outside products and attention. ``hides_*``: the share of a collective that runs beside products.
    """

    name: str
    attention: Mapping[str, float]
    passes: float
    ffn_passes: float
    hides_tp: float = 0.0
    hides_dp: float = 0.0
    weight_bytes: float = 4.0  # of a parameter; the other two likewise
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 8.0
    reduce_bytes: float = 2.0  # of a gradient on its way
    logit_bytes: float = 10.0  # of a logit at the loss: in 16 bits, in fp32, and the gradient
    margin: float = 0.0
    dropout: bool = False
    regathers: bool = True
    composed_norms: bool = False  # gated blocks' norms keep their input and its normalised form in fp32
    extra_ffn: int = 0  # activations as wide as the MLP that a gated one keeps beside three, in one process
    tables: int = 0  # as wide as a head in fp32: cosines and sines that a stage's forward keeps for each micro-batch
    fused_loss: int = 0  # bytes in fp32: more logits are never stored; 0: they always are
    shards_weights: int = 3  # the stage of ZeRO from which on weights are divided
    shards_gradients: int = 2
    sums_whole: bool = False  # whether FSDP adds micro-batches' gradients up before it divides them, without a pipeline
    copies_replicas: bool = False  # whether the whole weights of a step are copies where ZeRO does not divide them
    balances: bool = False  # whether stages are cut by cost, with fewer blocks beside the head
    torch_stages: bool = False  # whether torch.distributed.pipelining runs the pipeline: see memory.py
    async_tp: bool = False
    causal: bool = True  # whether attention leaves out masked scores
    offers: tuple[str, ...] = ()  # the degrees, stages of ZeRO and schedules that its runs could have chosen
    stages_apart: bool = True  # whether all data-parallel ranks of a stage lie between it and the next one


FA1 = {"a100": 0.32, "h100": 0.20}
FA2 = {"a100": 0.55, "h100": 0.28, "b200": 0.30, "mi300x": 0.30}
CUDNN = {"a100": 0.55, "h100": 0.50, "b200": 0.45, "mi300x": 0.30}

# Norms read and write (2 each, two of them), bias, dropout and residual in one pass (3.5 each, two): 11, and casts.
FUSED_PASSES, EAGER_PASSES = 14.0, 26.0

# Megatron-LM's mixed precision: weights in 16 bits, gradients in fp32, a master copy and two moments in fp32.
_MIXED: dict[str, Any] = {"weight_bytes": 2, "gradient_bytes": 4, "optimizer_bytes": 12, "logit_bytes": 4}
_FP32: dict[str, Any] = {"reduce_bytes": 4}  # Megatron-LM of 2021 and its like reduce gradients in fp32
# What CUDA's caching allocator reserves beyond what is allocated, where a run reports what is reserved.
RESERVED = 0.12

_PTD = ("tp", "pp", "zero0", "1f1b", "interleaved_1f1b")
_CORE = (*_PTD, "zero1", "cp")
_FSDP = ("zero3",)
_FOUR = ("tp", "pp", "cp", "zero3", "1f1b", "interleaved_1f1b")

MEGATRON_2021 = Software("Megatron-LM of 2021", {}, FUSED_PASSES, 2.0, **_MIXED, **_FP32, dropout=True, offers=_PTD)
_BLOOM: dict[str, Any] = {"weight_bytes": 2, "gradient_bytes": 6, "optimizer_bytes": 12, "logit_bytes": 4, **_FP32}
BLOOM = Software(
    "Megatron-DeepSpeed, BF16Optimizer", {}, FUSED_PASSES, 2.0, **_BLOOM, margin=RESERVED, dropout=True,
    offers=("tp", "pp", "zero1", "1f1b"),
)  # fmt: skip
MEGATRON = Software("Megatron-Core", CUDNN, FUSED_PASSES, 2.0, hides_tp=0.6, hides_dp=0.8, **_MIXED, offers=_CORE)
FOUNDRY = Software("llm-foundry, eager FSDP", FA1, EAGER_PASSES, 2.0, hides_dp=1.0, offers=_FSDP)
_TITAN: dict[str, Any] = {"hides_dp": 1.0, "margin": RESERVED, "regathers": False, "offers": _FOUR}
TITAN_EAGER = Software("torchtitan, eager", FA2, EAGER_PASSES, 6.0, **_TITAN)
TITAN = Software("torchtitan, compiled", FA2, FUSED_PASSES, 3.0, **_TITAN)
TITAN_ASYNC = Software("torchtitan, compiled, async TP", FA2, FUSED_PASSES, 3.0, 0.7, **_TITAN, async_tp=True)
# FSDP2 runs every stage: from the first one on a rank keeps its share of the fp32 weights and gradients.
_OURS: dict[str, Any] = {
    "hides_tp": 0.6,
    "hides_dp": 0.8,
    "async_tp": True,
    "shards_weights": 1,
    "shards_gradients": 1,
    "regathers": False,
    "logit_bytes": 4,
    "reduce_bytes": 4,
    "margin": RESERVED,
    "balances": True,
    "stages_apart": False,
    "fused_loss": 64 << 20,
    "copies_replicas": True,
    "sums_whole": True,
    "torch_stages": True,
}
OURS = Software("shardfuse", FA2, 8.0, 0.0, **_OURS, tables=1)
# Without kernels torch composes RMSNorm of smaller operations, a gated MLP in one process keeps the gate's activation,
# and the tables of cosines and sines are as wide as a head, each.
PLAIN = Software("shardfuse, plain torch", FA2, 8.0, 0.0, **_OURS, tables=2, composed_norms=True, extra_ffn=1)
