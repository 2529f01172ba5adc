"""Closed forms of the expected communication of a training step, to compare with the counts of :mod:`audit`.

Per rank and step, in payload (see :mod:`entries`): Psi bytes of gathered parameters and G of reduced gradients, both of
this rank's pipeline stages and tensor-parallel part without sharding; M backward passes (micro-batches of a pipeline or
of accumulation); A bytes of activations [T, D] of one of them; L blocks in the stages.

    data parallelism     all-reduce   reduce-scatter   all-gather   all-gather, M = 1
    zero 0, over dp_replicate x dp   G               -              -             -
    zero 1, 2, over dp      -               G             Psi           Psi       kept whole from the first micro-batch
                                                                                  to the last
    zero 3, over dp         -               G           2 M Psi        2 Psi      gathered in forward and in backward
    zero 3, in a pipeline   -               G          (M + 1) Psi     2 Psi      torch's stages keep them whole from a
                                                                                  backward to the end of a forward
    hybrid, over dp_replicate      G / dp            -              -             -        on top of the rows over dp

An all-reduce is a reduce-scatter and an all-gather, so one micro-batch moves 2 Psi up to stage 2 and 3 Psi in stage 3
(Rajbhandari et al., arXiv:1910.02054, section 7). With accumulation, stage 3 moves (2 M + 1) Psi.

    tensor parallelism, for each of the M          all-reduce    with sequence parallelism: reduce-scatter, all-gather
    blocks (Megatron-LM, arXiv:1909.08053)            4 L A                                    4 L A        4 L A
    the same, recomputed in backward                  6 L A                                    6 L A        6 L A
    the same, MLPs alone with mlp_recompute=2         4 L A                                    4 L A        5 L A
    embedding (where the first stage is)                A                                        A            A
    head (where the last stage is)                      A                                        A            A
    loss: of each token one maximum, two sums      12 T bytes    as all-reduces
    norms' gradients                                    -        as all-reduces, as large as the norms

    pipeline, for each of the M                       sends
    hidden states, to a stage on another rank           A        A / R
    their gradients, back                               A        A / R

    an embedding shared with the head, at both ends of a pipeline: its gradient as this rank has it, in one all-reduce
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from .entries import TORCH, Entry

LOSS_NUMBERS = 3  # per token: its largest logit, its sum of exponentials and its target's logit
LOSS_BYTES = 4  # per number: losses are formed in fp32


@dataclass(frozen=True)
class Plan:
    """One rank's part in a step; where the module docstring says so, bytes are those of one micro-batch."""

    dp: int = 1
    dp_replicate: int = 1
    tp: int = 1
    zero: int = 0
    microbatches: int = 1  # M: backward passes in a step
    pipelined: bool = False  # whether one of torch's schedules runs them
    parameters: int = 0  # Psi
    gradients: int = 0  # G
    activation: int = 0  # A
    tokens: int = 0  # T
    blocks: int = 0  # L
    first: bool = True  # whether this rank has the embedding
    last: bool = True  # whether this rank has the head
    norms: int = 0  # bytes of the norms' parameters
    tied: int = 0  # bytes of gradients that the two ends of the pipeline sum
    hops: int = 0  # this rank's sends to other ranks: stages that send hidden states, plus stages that send gradients
    sequence_parallel: bool = False
    recompute: bool = False
    mlp_recompute: int = 0


class Form(NamedTuple):
    """A line of the closed form: what one step sends in one kind of collective over a group."""

    what: str
    group: str
    kind: str
    payload: int
    sites: tuple[str, ...]  # the sites that it covers: names, or their beginnings up to a dot


class Line(NamedTuple):
    """A line of the closed form and the count."""

    form: Form
    calls: int
    counted: int

    @property
    def ok(self) -> bool:
        return self.counted == self.form.payload


def expected(plan: Plan) -> list[Form]:
    """The closed form of ``plan``'s step, without the lines that send nothing.

    Raises ValueError for a ``zero`` that is not 0 to 3.
    """
    if plan.zero not in range(4):
        raise ValueError(f"zero={plan.zero!r}: expected 0, 1, 2 or 3")
    forms = [*_data_parallel(plan), *_tensor_parallel(plan)]
    hop = plan.activation // plan.tp if plan.sequence_parallel else plan.activation
    forms.append(Form("between stages", "pp", "send", plan.microbatches * plan.hops * hop, (TORCH,)))
    forms.append(Form("tied embedding", "pp", "all_reduce", plan.tied, ("pipeline.tied",)))
    return [form for form in forms if form.payload]


def _data_parallel(plan: Plan) -> list[Form]:
    sites = (TORCH,)
    if plan.zero == 0:
        group = " x ".join(name for name, size in (("dp_replicate", plan.dp_replicate), ("dp", plan.dp)) if size > 1)
        return [Form("gradients", group, "all_reduce", plan.gradients, sites)] if group else []
    forms = []
    if plan.dp > 1:
        again = 1 if plan.pipelined else plan.microbatches  # the number of gathers in backward
        times = plan.microbatches + again if plan.zero == 3 else 1
        forms.append(Form("gradients", "dp", "reduce_scatter", plan.gradients, sites))
        forms.append(Form("parameters", "dp", "all_gather", times * plan.parameters, sites))
    if plan.dp_replicate > 1:
        forms.append(Form("gradients of shards", "dp_replicate", "all_reduce", plan.gradients // plan.dp, sites))
    return forms


def _tensor_parallel(plan: Plan) -> list[Form]:
    if plan.tp == 1:
        return []
    M, A = plan.microbatches, plan.activation
    kinds = ("reduce_scatter", "all_gather") if plan.sequence_parallel else ("all_reduce",)
    forms = []
    for kind in kinds:
        again = plan.mlp_recompute == 2 and kind == "all_gather"
        times = ((6 if plan.recompute else 4) + again) * plan.blocks
        forms.append(Form("blocks", "tp", kind, M * times * A, ("attention.", "mlp.")))
        forms.append(Form("embedding", "tp", kind, M * A * plan.first, ("embedding",)))
        forms.append(Form("head", "tp", kind, M * A * plan.last, ("head.",)))
    loss = LOSS_NUMBERS * LOSS_BYTES * plan.tokens
    forms.append(Form("loss", "tp", "all_reduce", M * loss * plan.last, ("loss.",)))
    if plan.sequence_parallel:
        forms.append(Form("norms' gradients", "tp", "all_reduce", M * plan.norms, ("norm.",)))
    return forms


def compare(forms: Sequence[Form], entries: Iterable[Entry]) -> tuple[list[Line], list[Entry]]:
    """Each form with its count among one step's ``entries``, and the entries that no form covers."""
    left = {entry: entry for entry in entries}
    lines = []
    for form in forms:
        mine = [entry for entry in left if _covers(form, entry)]
        for entry in mine:
            del left[entry]
        lines.append(Line(form, sum(entry.calls for entry in mine), sum(entry.payload for entry in mine)))
    return lines, list(left)


def _covers(form: Form, entry: Entry) -> bool:
    if (form.group, form.kind) != (entry.group, entry.kind):
        return False
    return any(entry.site == site or entry.site.startswith(site.rstrip(".") + ".") for site in form.sites)


def hops(owners: Sequence[int], rank: int) -> int:
    """Sends of ``rank`` for each micro-batch, forward and backward, with stage i on rank ``owners[i]``."""
    borders = [(here, there) for here, there in pairwise(owners) if here != there]
    return sum((here == rank) + (there == rank) for here, there in borders)
