"""What a micro-batch leaves on a rank for its backward, in bytes.

A block keeps, in 16 bits, per token (Korthikanti et al., arXiv:2205.05198, section 4, of which this is the general
form: 34 h for GPT, of which 10 h are whole on every tensor-parallel rank without sequence parallelism):

    whole       the inputs of both norms and of both products behind them   8 h   and 2 h of dropout masks
    divided     q, k, v, attention's result and its MLP's intermediates     2 (2 q + 2 kv) + 4 f (gated: 6 f)
    scores      of attention that stores them                               5 a s, with dropout; none in FlashAttention
    statistics  in fp32: a norm's 1 number, LayerNorm's 2, and FlashAttention's 1 for each head

Where software does not gather the inputs of products again in backward (``Software.regathers``), it keeps 4 h of those
whole. Recomputation keeps none of the scores ("selective"), half of the products' results ("ops"), or the block's input
alone ("full"). An MLP of this library keeps its intermediates except the last one (``mlp_recompute=1``), or nothing but
its input (2), of which each rank then keeps its share.

A stage with the head keeps beside its blocks the inputs of the last norm and of the head, and the softmax. A head of
this library that never stores its logits (``Software.fused_loss``) keeps two gradients instead: its input's, and the
weight's in fp32. Where torch runs the pipeline, a stage keeps its result for the next one. If that is on the same rank,
it is the input that the next one keeps.
"""

from __future__ import annotations

from .layout import Layout
from .shapes import ModelShape
from .software import Software
from .stages import Stage

FP32 = 4
# Bytes of a token where tensor-parallel ranks divide the vocabulary: the embedding keeps its row and whether it is
# another rank's; the loss its target's column, two such masks, and two sums.
LOOKUP_BYTES, LOSS_BYTES = 8 + 1, 8 + 2 + 2 * FP32


def stage_bytes(shape: ModelShape, layout: Layout, software: Software, stage: Stage) -> float:
    """What a micro-batch leaves in ``stage``, the head's part (:func:`head_bytes`) apart."""
    kept = stage.blocks * block_bytes(shape, layout, software)
    if stage.blocks and layout.recompute != "full":
        kept += software.tables * layout.length // layout.cp * shape.head_dim * FP32
    if stage.first and layout.tp > 1:
        kept += layout.tokens * LOOKUP_BYTES
    if software.torch_stages:
        kept += handed_bytes(shape, layout) * ((not stage.last) - stage.follows)
    return kept


def handed_bytes(shape: ModelShape, layout: Layout) -> float:
    """What one stage hands the next for a micro-batch."""
    return layout.tokens * layout.itemsize * shape.hidden / _shares(layout)


def block_bytes(shape: ModelShape, layout: Layout, software: Software, *, recompute: str | None = None) -> float:
    """What a micro-batch leaves in one block. ``recompute`` replaces the layout's."""
    recompute = layout.recompute if recompute is None else recompute
    tokens, h, tp, itemsize = layout.tokens, shape.hidden, layout.tp, layout.itemsize
    shares = _shares(layout)
    if recompute == "full":
        return tokens * itemsize * h / shares
    if recompute == "ops":
        outputs = shape.q_width + 2 * shape.kv_width + (2 if shape.gated else 1) * shape.ffn
        halves = (outputs / tp + 2 * h / shares) / 2
        return tokens * itemsize * (halves + shape.q_width / tp + h / shares)
    again = shares if software.regathers else 1
    attention_input, mlp_input = h / again, h / (shares if layout.mlp_recompute == 2 else again)
    norms = 2 * _norm_bytes(shape, layout, software) + (2 * h if software.dropout else 0)
    divided = itemsize * (2 * shape.q_width + 2 * shape.kv_width + _intermediates(shape, layout, software) * shape.ffn)
    if software.attention:
        divided += FP32 * shape.heads
    elif recompute == "none":
        divided += (5 if software.dropout else itemsize) * shape.heads * layout.length
    return tokens * (norms / shares + itemsize * (attention_input + mlp_input) + divided / tp)


def head_bytes(shape: ModelShape, layout: Layout, software: Software) -> float:
    """What a micro-batch leaves in the last norm, the head and the loss."""
    tokens, h, itemsize = layout.tokens, shape.hidden, layout.itemsize
    shares = _shares(layout)
    norm = _norm_bytes(shape, layout, software)
    softmax = softmax_bytes(shape, layout, software)
    if not softmax:
        gradients = tokens * itemsize * h + shape.vocab / layout.tp * h * FP32
        return tokens * norm / shares + gradients
    head = itemsize * h / (shares if software.regathers else 1)
    return tokens * (norm / shares + head) + softmax


def softmax_bytes(shape: ModelShape, layout: Layout, software: Software) -> float:
    """The softmax of a micro-batch, and what the loss keeps of its targets; 0 where logits are never stored."""
    logits = layout.tokens * shape.vocab / layout.tp
    if software.fused_loss and logits * FP32 > software.fused_loss:
        return 0.0
    return logits * software.logit_bytes + layout.tokens * (LOSS_BYTES if layout.tp > 1 else 0)


def _shares(layout: Layout) -> int:
    """Ranks over which the activations between tensor-parallel layers are divided."""
    return layout.tp if layout.sequence_parallel else 1


def _norm_bytes(shape: ModelShape, layout: Layout, software: Software) -> int:
    """What a norm keeps of a token: its input, and its statistics in fp32."""
    if software.composed_norms and shape.gated:
        return 2 * FP32 * shape.hidden + FP32
    return layout.itemsize * shape.hidden + (FP32 if shape.gated else 2 * FP32)


def _intermediates(shape: ModelShape, layout: Layout, software: Software) -> int:
    """Activations as wide as the MLP."""
    if layout.mlp_recompute == 2:
        return 0
    if layout.mlp_recompute == 1:
        return 2 if shape.gated else 1
    if not shape.gated:
        return 2
    return 3 + (software.extra_ffn if layout.tp == 1 else 0)
