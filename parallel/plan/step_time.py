"""How long a step takes, in seconds by part.

A micro-batch's forward through one block takes

    products    the chip model's time (``kernels/runtime/cost.py``) of each, over ``Efficiency``: the share of that
                model's speed that libraries reach, fitted to published runs
    attention   its FLOPs over the dense peak times the kernel's share (``Software.attention``), and times the speed of
                this GPU's products beside that of the GPU of the kernel's paper; attention that stores its scores:
                products, and the passes over the scores
    passes      bytes of norms, residuals and activations over the memory's bandwidth
    tensor      the collectives of tensor parallelism, less what products hide

and backward twice the products, 2.5 times the attention of FlashAttention's kind, twice the passes, and the collectives
again; recomputation repeats the part of forward that it does not keep. Embedding, head and loss are added on the ranks
that have them. The slowest rank sets a pipeline's pace; in this library that is the slowest of its own cut. A
pipeline's step is m micro-batches and the bubble of its schedule: (p - 1) / v of them for 1F1B and its interleaved form
(Narayanan et al., arXiv:2104.04473, section 2.2), for the others that of ``pipeline/timeline.py``. ZeRO 3 gathers a
block's weights while the one before it runs, forward and backward, and reduces gradients so; what does not fit under
the block is exposed. In a pipeline it gathers a stage's weights once a step, as the other stages of ZeRO do, and in
torch's stages m + 1 times (``audit/forms.py``). Other gradients are reduced once a step. The optimizer reads and writes
its state once. With offloading weights and gradients cross the host's link, and the optimizer runs at the speed of the
host's memory: both rates are assumed, no published run shows them.

A collective over n ranks sends (n - 1) / n of its bytes at the rate of the slowest link that it crosses. Ranks that
leave a node together share its adapters: k of them in a node have k adapters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...kernels.runtime.chips import CHIPS
from ..pipeline.modelled_costs import product_us
from ..pipeline.timeline import Costs, closed_form, simulate
from .hardware import Cluster, Gpu
from .layout import Layout
from .shapes import ModelShape
from .software import ATTENTION_BACKWARD, Software
from .stages import slowest

LINKS = 0.8  # of a link's rate that a large collective reaches: NCCL's own tests on such systems show 75 to 85 %
MEMORY = 0.8  # of the memory's bandwidth that a pass over an activation reaches
LOSS_BYTES = 36  # of a logit, forward and backward: casts to and from fp32, maximum, exponential, sum, gradient
SCORE_PASSES = 11  # over [heads, S, S] in 16 bits: scale, mask and softmax in one kernel, dropout, and the copies
_ARCHS = {"a": "sm_80", "h": "sm_90", "b": "sm_100", "g": "sm_100", "m": "gfx942"}  # by the first letter of a GPU


@dataclass(frozen=True)
class Efficiency:
    """Shares of the chip model's speed that large products reach on one kind of GPU: see ``efficiency.py``."""

    bf16: float
    fp8: float
    reference: float  # that in bf16 on the GPU of the attention kernels' papers

    def of(self, precision: str) -> float:
        return self.fp8 if precision == "fp8" else self.bf16


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest rank."""

    products: float
    attention: float
    passes: float
    recompute: float
    tensor: float  # exposed communication of tensor and context parallelism
    gathers: float  # exposed gathers and reductions of ZeRO 3
    loss: float  # head and loss, where the slowest rank has them
    bubble: float  # idle in the pipeline, and its sends
    gradients: float  # exposed reduction of gradients
    optimizer: float

    @property
    def total(self) -> float:
        block = self.products + self.attention + self.passes + self.recompute + self.tensor + self.gathers
        return block + self.loss + self.bubble + self.gradients + self.optimizer

    @property
    def exposed(self) -> float:
        """Communication that nothing hides."""
        return self.tensor + self.gathers + self.gradients


def link_rate(cluster: Cluster, size: int, inner: int) -> float:
    """Bytes/s of a collective over ``size`` ranks, each ``inner`` ranks apart from the next."""
    network = cluster.network
    if cluster.within_node(size * inner):
        return LINKS * network.inside
    together = max(1, network.node // inner)
    outside = network.outside * min(together, size)
    if not cluster.within_pod(size * inner):
        outside /= network.oversubscription
    return LINKS * min(network.inside, outside)


def predict(
    shape: ModelShape,
    layout: Layout,
    cluster: Cluster,
    software: Software,
    efficiency: Efficiency,
    *,
    block: Block | None = None,
    below: float = math.inf,
) -> StepTime:
    """The time of a step of ``layout`` on ``cluster``.

    ``block`` is what :func:`of_block` returns, if that is known already. A step that takes ``below`` seconds or more
    without an idle pipeline comes without that part, which takes longest to predict.
    """
    gpu = cluster.gpu
    bytes_s = gpu.bandwidth * MEMORY
    T, tp, h = layout.tokens, layout.tp, shape.hidden
    divided = tp if layout.sequence_parallel else 1

    block = block or of_block(shape, layout, cluster, software, efficiency)
    products, products_input, products_weight = block.products
    attention, attention_back = block.attention
    passes, exposed_tp, exposed = block.passes, block.exposed_tp, block.exposed
    forward = products + attention + passes + exposed
    again = {"none": 0.0, "selective": attention, "ops": products / 2 + passes, "full": forward}[layout.recompute]
    if layout.mlp_recompute and layout.recompute != "full":
        inner = 2 if shape.gated else 1
        written = 1 if layout.mlp_recompute == 1 else 1 + inner
        again += T * layout.itemsize * written * shape.ffn / tp / bytes_s
        if layout.mlp_recompute == 2:
            again += _seconds(T, inner * shape.ffn // tp, h, cluster, "nt", _share(layout, cluster, efficiency))
            again += exposed_tp / 4 if layout.sequence_parallel else 0.0  # one more gather
    backward = products_input + attention_back + 2 * passes + exposed + again
    whole = forward + backward + products_weight

    head = 3 * _seconds(T, shape.vocab // tp, h, cluster, "nt", efficiency.bf16)
    loss = head + T * shape.vocab / tp * LOSS_BYTES / bytes_s
    gathers = 0.0
    if layout.zero == 3 and layout.pp == 1 and layout.shards > 1:
        gathers = _exposed_gathers(shape, layout, cluster, software, forward, whole - forward)
    m = layout.microbatches
    layers, last = float(-(-shape.layers // (layout.pp * layout.interleave)) * layout.interleave), True
    if layout.pp > 1 and software.balances:
        layers, last = slowest(shape, layout, software, loss / whole)
    loss *= last
    near = cluster.gpus if software.stages_apart else tp * layout.cp * layout.pp
    rate = cluster.network.inside if cluster.within_node(near) else cluster.network.outside
    hop = 2 * T * layout.itemsize * h / divided / (LINKS * rate) + 2 * cluster.network.latency
    state, owned = _state(shape, layout, software)
    step = StepTime(
        products=m * layers * (products + products_input + products_weight),
        attention=m * layers * (attention + attention_back),
        passes=m * layers * 3 * passes,
        recompute=m * layers * again,
        tensor=m * layers * 2 * exposed,
        gathers=m * layers * gathers,
        loss=m * loss,
        bubble=0.0,
        gradients=_reduced(layout, cluster, software, owned),
        optimizer=_offloaded(layout, gpu, software, state, owned) if layout.offload else state * 2 / bytes_s,
    )
    if layout.pp == 1 or step.total >= below:
        return step
    costs = Costs(forward / whole, backward / whole, products_weight / whole)
    idle = _bubble(layout, costs) * (layers * whole + loss) + m * layout.interleave * hop * 0.5
    return replace(step, bubble=idle)


class Block(NamedTuple):
    """Seconds of a micro-batch in one block, without recomputation."""

    products: tuple[float, float, float]  # forward, and backward for inputs and for weights
    attention: tuple[float, float]  # forward and backward
    passes: float  # forward; backward has twice as many
    exposed_tp: float  # communication of tensor parallelism, forward and again backward
    exposed: float  # the same with context parallelism's

    @property
    def total(self) -> float:
        return sum(self.products) + sum(self.attention) + 3 * self.passes + 2 * self.exposed


def of_block(shape: ModelShape, layout: Layout, cluster: Cluster, software: Software, efficiency: Efficiency) -> Block:
    """A micro-batch's time in one block, which neither ZeRO nor the schedule, recomputation or offloading shorten."""
    T, tp, h = layout.tokens, layout.tp, shape.hidden
    divided = tp if layout.sequence_parallel else 1
    width = software.passes * h / divided + software.ffn_passes * (2 if shape.gated else 1) * shape.ffn / tp
    collectives = 0.0
    if tp > 1:
        # Two all-reduces, or as many bytes in gathers and scatters.
        collectives = 4 * T * layout.itemsize * h * (tp - 1) / tp / link_rate(cluster, tp, 1)
    exposed_tp = collectives * (1 - (software.hides_tp if cluster.within_node(tp) else 0.0))
    return Block(
        _products(shape, layout, cluster, efficiency),
        _attention(shape, layout, cluster, software, efficiency),
        T * layout.itemsize * width / (cluster.gpu.bandwidth * MEMORY),
        exposed_tp,
        exposed_tp + (_ring(shape, layout, cluster) if layout.cp > 1 else 0.0),
    )


def _bubble(layout: Layout, costs: Costs) -> float:
    """The idle time of a pipeline's step, as a multiple of a micro-batch's time on one rank; ``costs`` sum to 1."""
    if layout.schedule in ("1f1b", "interleaved_1f1b"):
        # Of fewer micro-batches than ranks, each waits before every further stage of the first rank.
        waits = max(0, layout.pp - layout.microbatches) * (layout.interleave - 1)
        return (layout.pp - 1 + waits) / layout.interleave
    idle = closed_form(layout.schedule, layout.pp, layout.microbatches, costs)
    if idle is not None:
        return layout.microbatches * idle / (1 - idle)
    parts = (round(each, 1) for each in (costs.forward, costs.backward, costs.weight))
    return _simulated(layout.schedule, layout.pp, min(layout.microbatches, 2 * layout.pp), *parts)


@functools.lru_cache(4096)
def _simulated(schedule: str, ranks: int, microbatches: int, forward: float, backward: float, weight: float) -> float:
    """The same by simulation, where no formula holds. With two micro-batches a rank it is what it is with more.

    The costs are rounded to tenths, so that a search simulates few of them: the idle time is approximate.
    """
    step = simulate(schedule, ranks, microbatches, Costs(forward, backward, weight))
    return step.end / (step.stages_per_rank * (forward + backward + weight)) - microbatches


def _reduced(layout: Layout, cluster: Cluster, software: Software, owned: float) -> float:
    """Exposed seconds a step of what data-parallel ranks exchange once: gradients, and the weights of ZeRO's shards."""
    seconds, n, apart = 0.0, layout.shards, layout.apart(software)
    if layout.zero == 0:
        n *= layout.replicas
        if n > 1:
            seconds = 2 * owned * software.reduce_bytes * (n - 1) / n / link_rate(cluster, n, apart)
    else:
        if n > 1 and (layout.zero < 3 or layout.pp > 1):  # else every block gathers and reduces its own
            gathers = layout.microbatches + 1 if layout.zero == 3 and software.torch_stages else 1
            sent = owned * (software.reduce_bytes + gathers * layout.itemsize) * (n - 1) / n
            seconds = sent / link_rate(cluster, n, apart)
        if layout.replicas > 1:
            sent = 2 * owned / n * software.reduce_bytes * (layout.replicas - 1) / layout.replicas
            seconds += sent / link_rate(cluster, layout.replicas, apart * n)
    return seconds * (1 - software.hides_dp)


def _offloaded(layout: Layout, gpu: Gpu, software: Software, state: float, owned: float) -> float:
    """Seconds a step that weights, gradients and the optimizer take where they live in the host's memory."""
    again = 2 if layout.zero == 3 and layout.pp == 1 else 1
    held = owned / (layout.shards if layout.zero else 1)
    moved = held * layout.microbatches * (again * software.weight_bytes + software.gradient_bytes)
    return moved / gpu.host_link + 2 * state / gpu.host_bandwidth


def _ring(shape: ModelShape, layout: Layout, cluster: Cluster) -> float:
    """Seconds of a pass that context parallelism adds to attention: nothing hides them.

    Keys and values go around once forward, and once more backward, with their gradients in fp32. Each pass counts half
    of both. Each arrival's result is merged with the others' in fp32.
    """
    others = layout.cp - 1
    sent = 2 * layout.tokens * shape.kv_width / layout.tp * others * (2 * layout.itemsize + 4) / 2
    merged = others * layout.tokens * shape.q_width / layout.tp * (3 * 4 + layout.itemsize)
    return sent / link_rate(cluster, layout.cp, layout.tp) + merged / (cluster.gpu.bandwidth * MEMORY)


def _products(
    shape: ModelShape, layout: Layout, cluster: Cluster, efficiency: Efficiency
) -> tuple[float, float, float]:
    """Seconds of one block's products: forward, and backward for inputs and for weights."""
    tp, h = layout.tp, shape.hidden
    sizes = (
        ((shape.q_width + 2 * shape.kv_width) // tp, h),
        (h, shape.q_width // tp),
        ((2 if shape.gated else 1) * shape.ffn // tp, h),
        (h, shape.ffn // tp),
    )
    share = _share(layout, cluster, efficiency)
    passes = {
        kind: sum(_seconds(layout.tokens, F, D, cluster, kind, share) for F, D in sizes) for kind in ("nt", "nn", "tn")
    }
    return passes["nt"], passes["nn"], passes["tn"]


def _share(layout: Layout, cluster: Cluster, efficiency: Efficiency) -> float:
    """Of the chip model's speed in bf16 that a block's products reach in the layout's precision."""
    return efficiency.of(layout.precision) * cluster.gpu.flops[layout.precision] / cluster.gpu.peak


def _seconds(T: int, F: int, D: int, cluster: Cluster, kind: str, share: float) -> float:
    """The time of a product of x [T, D] and W [F, D], or of one of its gradients."""
    arch = _ARCHS.get(cluster.gpu.name[0])
    if arch is None:  # no chip model: the rate was measured
        return 2 * T * F * D / (cluster.gpu.peak * share)
    scale = CHIPS[arch].flops["bf16"] / cluster.gpu.peak
    return product_us(arch, kind, T, max(1, F), max(1, D)) * 1e-6 * scale / share


def _attention(
    shape: ModelShape, layout: Layout, cluster: Cluster, software: Software, efficiency: Efficiency
) -> tuple[float, float]:
    """Seconds of one block's attention, forward and backward."""
    flops = 4.0 * layout.tokens * layout.length * shape.q_width / layout.tp
    peak = cluster.gpu.peak
    if software.attention:
        share = _of_family(software.attention, cluster.gpu.name) * efficiency.bf16 / efficiency.reference
        forward = flops / (2 if software.causal else 1) / (peak * share)
        return forward, ATTENTION_BACKWARD * forward
    scores = layout.tokens * layout.length * shape.heads / layout.tp
    forward = flops / (peak * efficiency.bf16) + SCORE_PASSES * scores / (cluster.gpu.bandwidth * MEMORY)
    return forward, 2 * forward


def _of_family(shares: Mapping[str, float], name: str) -> float:
    """The share of the GPU's family: "a100-40" is an "a100", "h200" an "h100", "gb200" a "b200"."""
    family = {"h": "h100", "a": "a100", "b": "b200", "g": "b200", "m": "mi300x"}.get(name[0], name)
    return shares.get(family, min(shares.values()))


def _exposed_gathers(
    shape: ModelShape, layout: Layout, cluster: Cluster, software: Software, forward: float, backward: float
) -> float:
    """Seconds a block and micro-batch: its weights twice, its gradients once, less what the block's passes hide."""
    n = layout.shards
    weights = (
        shape.layer_parameters
        / layout.tp
        * layout.itemsize
        * (n - 1)
        / n
        / link_rate(cluster, n, layout.apart(software))
    )
    back = weights * (1 + software.reduce_bytes / layout.itemsize)
    hidden_forward, hidden_backward = software.hides_dp * forward, software.hides_dp * backward
    return max(0.0, weights - hidden_forward) + max(0.0, back - hidden_backward)


def _state(shape: ModelShape, layout: Layout, software: Software) -> tuple[float, float]:
    """Bytes that the optimizer reads on a rank, and the elements of which it has gradients."""
    owned = shape.parameters / layout.tp / layout.pp
    held = software.weight_bytes + software.gradient_bytes + software.optimizer_bytes
    return owned * held / (layout.shards if layout.zero else 1), owned
