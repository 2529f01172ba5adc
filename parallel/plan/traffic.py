"""What a rank sends in a step, by the closed forms that ``shardfuse audit`` holds against counted bytes."""

from __future__ import annotations

from dataclasses import dataclass

from ..audit.entries import sent
from ..audit.forms import Plan, expected, hops
from ..pipeline.partition import owners
from ..pipeline.schedules import find
from .hardware import Cluster
from .layout import Layout
from .memory import parameters
from .shapes import ModelShape
from .software import Software
from .stages import of_rank


@dataclass(frozen=True)
class Flow:
    """Bytes that one rank sends in a step. ``what`` they are, the group's name, the collective, the ``link``: "node"
    where the group lies within one, else "network"."""

    what: str
    group: str
    kind: str
    bytes: float
    link: str


def traffic(shape: ModelShape, layout: Layout, cluster: Cluster, software: Software) -> list[Flow]:
    """What the first pipeline rank of ``layout`` sends, in this library; attention over cp ranks is left out."""
    stages = of_rank(shape, layout, software, 0)
    blocks, last = int(sum(each.blocks for each in stages)), any(each.last for each in stages)
    owned = parameters(shape, layout, stages)
    tied = 0.0
    if shape.tied and not last:
        tied = shape.vocab * shape.hidden * software.gradient_bytes / layout.tp
        tied /= layout.shards if layout.zero >= software.shards_gradients else 1
    plan = Plan(
        dp=layout.shards,
        dp_replicate=layout.replicas,
        tp=layout.tp,
        zero=layout.zero,
        microbatches=layout.microbatches,
        pipelined=layout.pp > 1,
        parameters=int(owned * layout.itemsize),
        gradients=int(owned * software.reduce_bytes),
        activation=layout.tokens * shape.hidden * layout.itemsize,
        tokens=layout.tokens,
        blocks=blocks,
        last=last,
        norms=(2 * blocks + last) * shape.norm_parameters * layout.itemsize,
        tied=int(tied),
        hops=_hops(layout),
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute == "full",
        mlp_recompute=layout.mlp_recompute,
    )
    sizes = {"tp": layout.tp, "dp": layout.shards, "dp_replicate": layout.replicas, "pp": layout.pp}
    sizes["dp_replicate x dp"] = layout.shards * layout.replicas
    apart = layout.apart(software)
    between = layout.tp if not software.stages_apart else layout.tp * layout.shards * layout.replicas
    reach = {"tp": layout.tp, "dp": apart * layout.shards, "pp": between * layout.pp}
    flows = []
    for form in expected(plan):
        link = "node" if cluster.within_node(reach.get(form.group, cluster.gpus)) else "network"
        ranks = 2 if form.what == "tied embedding" else sizes[form.group]
        flows.append(Flow(form.what, form.group, form.kind, sent(form.kind, form.payload, ranks), link))
    return flows


def _hops(layout: Layout) -> int:
    if layout.pp == 1:
        return 0
    shape = find(layout.schedule).layout
    return hops(owners(layout.pp * layout.interleave, layout.pp, shape), 0)
