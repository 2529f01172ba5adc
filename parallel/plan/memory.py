"""What one GPU holds at its fullest moment, in bytes by kind.

Weights, gradients and the optimizer's state count bytes per parameter (``Software``): 18 in Megatron-LM's mixed
precision (2 + 4 + 12), 16 where FSDP keeps weights in fp32 and gathers them in 16 bits. ZeRO divides the optimizer's
state by the shards in stage 1, gradients in stage 2, weights in stage 3 (Rajbhandari et al., arXiv:1910.02054), where
the weights of two blocks are gathered at a time.

What micro-batches leave for their backward is in ``activations.py``, how many of them a rank keeps in ``stages.py``.
One block's backward works on the gradients of its MLP's intermediates beside them, and on what recomputation makes
again: the MLP's pre-activations, or one whole block. Norms, and biases added after a sum over tensor-parallel ranks,
are whole on each of these.

FSDP keeps the whole gradients of a step with several micro-batches until the last one. Torch's pipeline stages have a
buffer for every micro-batch's input and for the gradient of its result. Where backward is split, the inputs' gradients
stay until the next step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..pipeline.schedules import find
from .activations import block_bytes, handed_bytes, head_bytes, softmax_bytes, stage_bytes
from .layout import Layout
from .shapes import ModelShape
from .software import Software
from .stages import Stage, among_fullest, fullest
from .stages import of_rank as stages_of


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. ``margin`` is what the allocator holds beyond what it gave out."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # of all micro-batches that the rank keeps, without ``logits``
    working: float  # of the block whose backward runs
    logits: float  # what the last norm, the head and the loss keep
    gathered: float  # whole weights, and whole gradients of a step's first micro-batches
    buffers: float  # of a pipeline's stages
    margin: float

    @property
    def total(self) -> float:
        held = self.weights + self.gradients + self.optimizer + self.activations + self.working
        return held + self.logits + self.gathered + self.buffers + self.margin

    @property
    def states(self) -> float:
        """Weights, gradients and the optimizer's state."""
        return self.weights + self.gradients + self.optimizer


def of_rank(shape: ModelShape, layout: Layout, software: Software, rank: int) -> Memory:
    """What pipeline rank ``rank`` holds."""
    stages = stages_of(shape, layout, software, rank)
    last = any(stage.last for stage in stages)
    ends = _end_parameters(shape, layout, stages)
    owned = parameters(shape, layout, stages)
    shards = layout.shards
    weights = owned * software.weight_bytes / (shards if layout.zero >= software.shards_weights else 1)
    gradients = owned * software.gradient_bytes / (shards if layout.zero >= software.shards_gradients else 1)
    optimized = owned - (_copied(shape, stages) / layout.tp if stages[0].first else 0)
    optimizer = optimized * software.optimizer_bytes / (shards if layout.zero else 1)
    if layout.offload:
        weights = gradients = optimizer = 0.0
    gathered = _gathered(shape, layout, software, owned, ends)
    logits = head_bytes(shape, layout, software) if last else 0.0
    sizes = [stage_bytes(shape, layout, software, stage) + (logits if stage.last else 0.0) for stage in stages]
    early = [softmax_bytes(shape, layout, software) if stage.last else 0.0 for stage in stages]
    most, counts = fullest(sizes, early, layout, rank)
    kept = most - logits
    again = (2 if shape.gated else 1) if layout.mlp_recompute == 2 else 0
    working = layout.tokens * layout.itemsize * ((3 if shape.gated else 2) + again) * shape.ffn / layout.tp
    if layout.tp > 1 and not software.async_tp:
        working += 2 * layout.tokens * layout.itemsize * shape.hidden  # a gathered input, and a partial sum
    if layout.recompute in ("full", "ops"):
        working += block_bytes(shape, layout, software, recompute="none")
    buffers = _buffers(shape, layout, stages, counts) if software.torch_stages else 0.0
    held = weights + gradients + optimizer + gathered + kept + working + logits + buffers
    return Memory(weights, gradients, optimizer, kept, working, logits, gathered, buffers, software.margin * held)


def parameters(shape: ModelShape, layout: Layout, stages: Sequence[Stage]) -> float:
    """Of a pipeline rank's ``stages`` on one tensor-parallel rank."""
    blocks = sum(stage.blocks for stage in stages)
    return blocks * _block_parameters(shape, layout) + _end_parameters(shape, layout, stages)


def _end_parameters(shape: ModelShape, layout: Layout, stages: Sequence[Stage]) -> float:
    """Of embedding and head, which tensor-parallel ranks divide, and of the last norm."""
    count = shape.embedding_parameters if stages[0].first else 0
    if not any(stage.last for stage in stages):
        return count / layout.tp
    count += shape.head_parameters - shape.norm_parameters + _copied(shape, stages)
    return count / layout.tp + shape.norm_parameters


def _copied(shape: ModelShape, stages: Sequence[Stage]) -> int:
    """Of the last stage's copy of a tied embedding. On the first stage's rank the optimizer does not see it."""
    return shape.vocab * shape.hidden if shape.tied and any(each.last and not each.first for each in stages) else 0


def _block_parameters(shape: ModelShape, layout: Layout) -> float:
    """Of a block on one tensor-parallel rank."""
    return (shape.layer_parameters - shape.layer_repeated) / layout.tp + shape.layer_repeated


def _gathered(shape: ModelShape, layout: Layout, software: Software, owned: float, ends: float) -> float:
    """Weights in 16 bits where others are kept, and what FSDP gathers and adds up, see this module's text.

    ZeRO 3 gathers two blocks at a time, or in a pipeline all of a stage. FSDP2 also copies weights that it replicates.
    """
    split = layout.shards > 1 or layout.offload
    accumulated = 0.0
    sums_whole = layout.microbatches > 1 and (layout.pp > 1 or software.sums_whole)
    if split and sums_whole and layout.zero >= max(1, software.shards_gradients):
        accumulated = owned * software.gradient_bytes
    if layout.zero == 3 and split and layout.pp == 1:
        return (2 * _block_parameters(shape, layout) + ends) * layout.itemsize + accumulated
    copies = layout.offload or (layout.zero >= software.shards_weights and split)
    copies = copies or (software.copies_replicas and layout.shares > 1)
    return (owned * layout.itemsize if copies or software.weight_bytes > layout.itemsize else 0.0) + accumulated


def _buffers(shape: ModelShape, layout: Layout, stages: Sequence[Stage], counts: Sequence[int]) -> float:
    """What no backward needs of the buffers of a step's micro-batches; ``counts`` of each stage have inputs in use."""
    if layout.pp == 1:
        return 0.0
    m, each = layout.microbatches, 2 if find(layout.schedule).splits_backward else 1
    slots = sum(
        (0 if stage.first else each * (m - count)) + (0 if stage.last else m) for stage, count in zip(stages, counts)
    )
    return slots * handed_bytes(shape, layout)


def predict(shape: ModelShape, layout: Layout, software: Software, *, limit: float = math.inf) -> Memory:
    """What the fullest rank holds; where some rank holds more than ``limit`` bytes, what one of those holds."""
    first, *others = among_fullest(shape, layout, software)
    found = of_rank(shape, layout, software, first)
    for rank in others:
        if found.total > limit:
            break
        found = max(found, of_rank(shape, layout, software, rank), key=lambda memory: memory.total)
    return found


def least(shape: ModelShape, layout: Layout, software: Software) -> tuple[float, float]:
    """A cheap bound from below: bytes that the fullest rank holds at least on its GPU and, offloaded, on its host.

    These are the weights, gradients and optimizer's state of the average pipeline rank.
    """
    owned = shape.parameters / layout.tp / layout.pp
    shards, zero = layout.shards, layout.zero
    states = owned * (
        software.weight_bytes / (shards if zero >= software.shards_weights else 1)
        + software.gradient_bytes / (shards if zero >= software.shards_gradients else 1)
        + software.optimizer_bytes / (shards if zero else 1)
    )
    return (0.0, states) if layout.offload else (states, 0.0)


def on_host(shape: ModelShape, layout: Layout, software: Software) -> float:
    """What the fullest rank's host holds where weights, gradients and the optimizer's state are offloaded, in bytes."""
    there = dataclasses.replace(layout, offload=False)
    return max(of_rank(shape, there, software, rank).states for rank in among_fullest(shape, there, software))
