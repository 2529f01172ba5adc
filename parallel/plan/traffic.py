"""What a rank sends in a step, by the closed forms that ``shardfuse audit`` holds against counted bytes."""

from __future__ import annotations

from dataclasses import dataclass

from ..audit.audit import sent
from ..audit.forms import Plan, expected, hops
from ..pipeline.partition import owners
from ..pipeline.schedules import find
from .hardware import Cluster
from .layout import Layout
from .shapes import ModelShape
from .software import Software


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
    matrices = -(-shape.layers // layout.pp) * shape.layer_parameters + shape.embedding_parameters
    owned = (matrices + (shape.head_parameters if layout.pp == 1 else 0)) // layout.tp
    activation = layout.tokens * shape.hidden * layout.itemsize
    blocks = -(-shape.layers // layout.pp)
    plan = Plan(
        dp=layout.shards,
        dp_replicate=layout.replicas,
        tp=layout.tp,
        zero=layout.zero,
        microbatches=layout.microbatches,
        pipelined=layout.pp > 1,
        parameters=owned * layout.itemsize,
        gradients=int(owned * software.reduce_bytes),
        activation=activation,
        tokens=layout.tokens,
        blocks=blocks,
        first=True,
        last=layout.pp == 1,
        norms=4 * (2 * blocks + 1) * shape.hidden,
        hops=_hops(layout),
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute == "full",
    )
    sizes = {"tp": layout.tp, "dp": layout.shards, "dp_replicate": layout.replicas, "pp": layout.pp}
    sizes["dp_replicate x dp"] = layout.shards * layout.replicas
    apart = layout.apart(software)
    between = layout.tp if not software.stages_apart else layout.tp * layout.shards * layout.replicas
    reach = {"tp": layout.tp, "dp": apart * layout.shards, "pp": between * layout.pp}
    flows = []
    for form in expected(plan):
        spans = reach.get(form.group, cluster.gpus)
        link = "node" if spans <= cluster.network.node else "network"
        flows.append(Flow(form.what, form.group, form.kind, sent(form.kind, form.payload, sizes[form.group]), link))
    return flows


def _hops(layout: Layout) -> int:
    if layout.pp == 1:
        return 0
    shape = find(layout.schedule).layout
    return hops(owners(layout.pp * layout.interleave, layout.pp, shape), 0)
