"""What one GPU holds at its fullest moment, in bytes by kind.

Weights, gradients and the optimizer's state count bytes per parameter (``Software``): 18 in Megatron-LM's mixed
precision (2 + 4 + 12), 16 where FSDP keeps weights in fp32 and gathers them in 16 bits. ZeRO divides the optimizer's
state by the shards in stage 1, gradients in stage 2, weights in stage 3 (Rajbhandari et al., arXiv:1910.02054), where
the weights of two blocks are gathered at a time.

A block keeps for its backward, in 16 bits, per token (Korthikanti et al., arXiv:2205.05198, section 4, of which this is
the general form: 34 h for GPT, of which 10 h are whole on every tensor-parallel rank without sequence parallelism):

    whole       the inputs of both norms and of both products behind them   8 h   and 2 h of dropout masks
    divided     q, k, v, attention's result and its MLP's intermediates     2 (2 q + 2 kv) + 4 f (gated: 6 f)
    scores      of attention that stores them                               5 a s, with dropout; none in FlashAttention

Where software does not gather the inputs of products again in backward (``Software.regathers``), it keeps 4 h of those
whole. Recomputation keeps none of the scores ("selective"), or the block's input alone ("full", plus one whole block
while it is recomputed). One block's backward works on the gradients of its MLP's intermediates beside them. Stage i of
p keeps p - i micro-batches; an interleaved schedule's first rank keeps the activations of its layers
1 + (p - 1) / (p v) times.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, fields

from ..pipeline.timeline import simulate
from .layout import Layout
from .shapes import ModelShape
from .software import Software

V_SHAPED = ("zbv", "dualpipev")  # schedules whose first rank has both ends of the model


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. ``margin`` is what the allocator holds beyond what it gave out."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float  # of the block whose backward runs
    logits: float
    gathered: float
    margin: float

    @property
    def total(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))

    @property
    def states(self) -> float:
        """Weights, gradients and the optimizer's state."""
        return self.weights + self.gradients + self.optimizer


def of_rank(shape: ModelShape, layout: Layout, software: Software, rank: int) -> Memory:
    """What pipeline rank ``rank`` holds."""
    layers = -(-shape.layers // layout.pp)
    first, last = rank == 0, rank == (0 if layout.schedule in V_SHAPED else layout.pp - 1)
    ends = (shape.embedding_parameters if first else 0) + (shape.head_parameters if last else 0)
    if shape.tied and last and not first:
        ends += shape.vocab * shape.hidden  # a copy of the embedding
    owned = (layers * shape.layer_parameters + ends) / layout.tp
    shards = layout.shards
    weights = owned * software.weight_bytes / (shards if layout.zero >= software.shards_weights else 1)
    gradients = owned * software.gradient_bytes / (shards if layout.zero >= software.shards_gradients else 1)
    optimizer = owned * software.optimizer_bytes / (shards if layout.zero else 1)
    if layout.offload:
        weights = gradients = optimizer = 0.0
    gathered = _gathered(shape, layout, software, owned, ends)
    kept = _kept(layout, rank) * layers * block_bytes(shape, layout, software)
    working = layout.tokens * layout.itemsize * (3 if shape.gated else 2) * shape.ffn / layout.tp
    if layout.tp > 1 and not software.async_tp:
        working += 2 * layout.tokens * layout.itemsize * shape.hidden  # a gathered input, and a partial sum
    if layout.recompute in ("full", "ops"):
        working += block_bytes(shape, layout, software, recompute="none")
    logits = layout.tokens * shape.vocab / layout.tp * software.logit_bytes if last else 0.0
    held = weights + gradients + optimizer + gathered + kept + working + logits
    return Memory(weights, gradients, optimizer, kept, working, logits, gathered, software.margin * held)


def _gathered(shape: ModelShape, layout: Layout, software: Software, owned: float, ends: float) -> float:
    """Weights in 16 bits where others are kept, and what ZeRO 3 gathers: two blocks, or in a pipeline all of a stage.

    There FSDP also adds up a step's gradients before it divides them.
    """
    if layout.zero == 3 and (layout.shards > 1 or layout.offload):
        if layout.pp > 1:
            return owned * (layout.itemsize + software.gradient_bytes)
        return (2 * shape.layer_parameters + ends) / layout.tp * layout.itemsize
    whole = layout.zero < software.shards_weights or layout.shards == 1
    return 0.0 if whole and software.weight_bytes <= layout.itemsize else owned * layout.itemsize


def predict(shape: ModelShape, layout: Layout, software: Software) -> Memory:
    """What the fullest rank holds: the first or the last of a pipeline."""
    ranks = {0, layout.pp - 1}
    return max((of_rank(shape, layout, software, rank) for rank in ranks), key=lambda memory: memory.total)


def on_host(shape: ModelShape, layout: Layout, software: Software) -> float:
    """What the fullest rank's host holds where weights, gradients and the optimizer's state are offloaded, in bytes."""
    there = dataclasses.replace(layout, offload=False)
    return max(of_rank(shape, there, software, rank).states for rank in {0, layout.pp - 1})


def block_bytes(shape: ModelShape, layout: Layout, software: Software, *, recompute: str | None = None) -> float:
    """What a micro-batch leaves in one block for backward, on one rank."""
    recompute = layout.recompute if recompute is None else recompute
    tokens, h, tp = layout.tokens, shape.hidden, layout.tp
    whole = tp if layout.sequence_parallel else 1
    if recompute == "full":
        return tokens * layout.itemsize * h / whole
    ffn = (3 + software.extra_ffn if shape.gated else 2) * shape.ffn
    divided = layout.itemsize * (2 * shape.q_width + 2 * shape.kv_width + ffn)
    if recompute == "ops":
        outputs = shape.q_width + 2 * shape.kv_width + (2 if shape.gated else 1) * shape.ffn
        halves = (outputs / tp + 2 * h / whole) / 2
        return tokens * layout.itemsize * (halves + shape.q_width / tp + h / whole)
    inputs = layout.itemsize * 2 * h
    extra = software.extra_norms if shape.gated else 0
    norms = layout.itemsize * (2 + extra) * h + (2 * h if software.dropout else 0)
    scores = 0.0
    if not software.attention and recompute == "none":
        scores = (5 if software.dropout else layout.itemsize) * shape.heads * layout.length
    return tokens * (norms / whole + inputs / (whole if software.regathers else 1) + (divided + scores) / tp)


def _kept(layout: Layout, rank: int) -> float:
    """How many micro-batches of its layers a rank keeps at a time."""
    if layout.pp == 1:
        return 1.0
    if layout.schedule not in ("1f1b", "interleaved_1f1b"):
        return _peaks(layout.schedule, layout.pp, min(layout.microbatches, 2 * layout.pp))[rank]
    if layout.interleave == 1:
        return float(min(layout.pp - rank, layout.microbatches))
    kept = layout.pp * (1 + (layout.pp - 1 - 2 * rank) / (layout.pp * layout.interleave))
    return min(kept, float(layout.microbatches))


@functools.lru_cache(4096)
def _peaks(schedule: str, ranks: int, microbatches: int) -> tuple[float, ...]:
    """The same of each rank, counted in the order in which torch runs the schedule's passes."""
    return simulate(schedule, ranks, microbatches).peak_activations
