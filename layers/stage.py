"""Consecutive parts of a ParallelTransformer as a pipeline stage."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ..parallel.pipeline.partition import Part
from . import dropout as masks
from .attention.rope import rope_tables
from .block import MLP, ResidualStream, joined, normed
from .config import TransformerConfig
from .module import Absent
from .transformer import Decoder, ParallelTransformer


class TransformerStage(ParallelTransformer):
    """The ``parts`` of ``whole`` (see its ``pipeline_parts``), whose submodules it shares, under the same names.

        tokens [B, S] or x -> embedding -> blocks -> norm -> head -> loss, logits or x

    where x [T, D] (with sequence parallelism [T/R, D]) is what the stage before it handed on. Between blocks a branch
    may wait for the next norm (``layers/block.py``); between stages it has joined x.

    Where one process holds both ends of a tied model in two stages, the last one gets a weight of its own, a copy of
    the embedding's: an engine that shards stages manages each parameter in one of them. The pipeline keeps it equal and
    adds its gradient to the embedding's; ``whole`` and its optimizer know nothing of it.
    """

    def __init__(self, whole: ParallelTransformer, parts: range) -> None:
        nn.Module.__init__(self)
        count = len(whole.model.layers) + 2
        if not 0 <= parts.start < parts.stop <= count or parts.step != 1:
            raise ValueError(f"parts={parts}: expected a range of the model's {count} parts")
        self.config, self.group, self.rotary = whole.config, whole.group, whole.rotary
        self.sequence_parallel, self.impl = whole.sequence_parallel, whole.impl
        self.parts, self.first, self.last = parts, parts.start == 0, parts.stop == count
        self._drew = True  # the whole model has checked
        self.model = Decoder.__new__(Decoder)
        nn.Module.__init__(self.model)
        self.model.embed_tokens = whole.model.embed_tokens
        self.model.layers = nn.ModuleList(whole.model.layers)
        self.model.norm, self.lm_head = whole.model.norm, whole.lm_head
        both = not isinstance(whole.lm_head, Absent) and 0 in whole.kept
        if self.config.tie_embeddings and both and self.last and not self.first:
            embedding = copy.deepcopy(whole.model.embed_tokens)
            self.model.embed_tokens = embedding
            self.lm_head = copy.deepcopy(whole.lm_head, {id(whole.lm_head.weight): embedding.weight})
        self.keep(parts)
        if self.config.tie_embeddings and both and self.first:
            self.lm_head = whole.lm_head  # whoever replaces this stage's parameters shall find both holders

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        targets: torch.Tensor | None = None,
        *,
        batch_size: int | None = None,
        positions: torch.Tensor | None = None,
        scale: float = 1.0,
        draws: masks.RngState | None = None,
    ) -> torch.Tensor:
        """The next stage's x; of the last stage the sum of the targets' losses times ``scale``, [1] in fp32 (fp64 for
        fp64), or without ``targets`` the logits [B*S, V/R].

        The first stage reads tokens [B, S] from ``x``, others want ``batch_size=B``. ``positions`` are [B, S], by
        default 0 to S - 1 in each sequence. ``draws`` decides on the masks of dropout, None draws them here and now.
        """
        if self.first:
            batch_size, length = self._check_batch(x, targets)
        elif batch_size is None:
            raise ValueError("a stage behind the first one wants batch_size, the number of sequences in x")
        else:
            length = x.shape[0] * (self.group.size if self.sequence_parallel else 1) // batch_size
        if positions is None:
            positions = torch.arange(length, device=x.device)
        rope = rope_tables(positions, self.rotary, length=length)
        row = 0 if draws is None else draws.pass_by(self.parts.start, batch_size * length)
        places = {part: None if draws is None else draws.place(part, row) for part in self.parts}
        stream: ResidualStream = self._embedded(x, places[0]) if self.first else x
        for part in self._blocks():
            block = self.model.layers[part - 1]
            stream = block(stream, rope=rope, join=False, batch_size=batch_size, place=places[part])
        if not self.last:
            return joined(stream, impl=self.impl)
        y, _ = normed(self.model.norm, stream, MLP, impl=self.impl)
        if targets is None:
            return self.lm_head(y)
        return torch.stack((self._loss(y, targets.reshape(-1), "sum") * scale,))  # no view: FSDP2 warns of them

    def _embedded(self, tokens: torch.Tensor, place: masks.RngOffset | None) -> torch.Tensor:
        return self._dropped(self.model.embed_tokens(tokens.reshape(-1)), place)

    def _blocks(self) -> range:
        return range(max(self.parts.start, 1), min(self.parts.stop, len(self.model.layers) + 1))

    def extra_repr(self) -> str:
        return f"parts {self.parts.start} to {self.parts.stop - 1}"


def part_costs(config: TransformerConfig, length: int) -> list[Part]:
    """The FLOPs of one token's forward through each part, a multiply-add counted as two, in sequences of ``length``.

    Backward takes twice as much of every part, so for a partition it need not be counted. An embedding multiplies
    nothing; what a block does beside its products takes time but is much the same in all of them.
    """
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    projections = width * (2 * heads + 2 * config.num_kv_heads * config.head_dim)
    seen = min(length, config.attention_window or length)
    scores = 2 * heads * seen / 2  # causal: half of them
    products = projections + scores + (3 if config.gated else 2) * width * config.intermediate_size
    blocks = [Part(f"model.layers.{index}", 2.0 * products) for index in range(config.num_layers)]
    return [Part("model.embed_tokens", 0.0), *blocks, Part("lm_head", 2.0 * width * config.vocab_size)]
