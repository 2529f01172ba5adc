"""Token embedding whose vocabulary is split over a tensor-parallel group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.runtime.checks import whole_number
from ..kernels.runtime.dispatch import Choice
from ..parallel.core import mappings
from ..parallel.core.first_calls import compare_call
from ..parallel.core.mesh import Group
from .config import check_padding
from .module import Init, Runs, ShardedModule, check_divides
from .options import EmbeddingKwargs, LayerOptions, Unpack


class VocabParallelEmbedding(ShardedModule):
    """``nn.Embedding(vocab_size, hidden_size)`` with weight [V/R, D] on every rank.

    Each rank looks up the tokens of its slice, zero for the others, and the sum over the group is the embedding
    (Shoeybi et al., arXiv:1909.08053, section 3): tokens [...] -> [..., D], replicated. With sequence parallelism the
    sum is scattered over tokens: [T] -> [T/R, D]. Fresh weights are normal with a standard deviation of 1, as
    nn.Embedding's, or ``init_std``. ``padding_idx`` is nn.Embedding's: the row of this token starts at zero and gets no
    gradient from the embedding. The other keyword arguments (``mesh``, ``sequence_parallel``, ``params``, ``dtype``,
    ``device``) are documented in :class:`~shardfuse.layers.options.LayerOptions`.

    Raises ValueError at construction where ``vocab_size`` does not divide by the group's size or does not hold
    ``padding_idx``, and in forward, on a CPU, for a token outside the vocabulary. On a GPU such a token's embedding is
    zero (torch's own lookup asserts at R = 1): a check would make the host wait for the GPU.
    """

    weight: nn.Parameter

    def __init__(
        self, vocab_size: int, hidden_size: int, padding_idx: int | None = None, **options: Unpack[EmbeddingKwargs]
    ) -> None:
        shared = LayerOptions.of(type(self), options, EmbeddingKwargs)
        super().__init__(shared)
        self.check_sizes(vocab_size)
        whole_number("hidden_size", hidden_size)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.padding_idx = None if padding_idx is None else check_padding("padding_idx", padding_idx, vocab_size)
        self._padding_row = self._row_of_padding()
        std = 1.0 if shared.init_std is None else shared.init_std
        self.add_parameter("weight", (vocab_size, hidden_size), 0, Init(std=std))
        self.reset_parameters()

    def check_sizes(self, vocab_size: int) -> None:
        """ValueError for a vocabulary that the ranks cannot divide."""
        check_divides("vocab_size", vocab_size, self.group)

    @property
    def vocab_ranks(self) -> Group:
        """The ranks that divide the vocabulary."""
        return self.group

    def _row_of_padding(self) -> int | None:
        """The row of ``padding_idx`` on this rank; None if another rank has it."""
        rows = self.vocab_size // self.vocab_ranks.size
        if self.padding_idx is None or self.padding_idx // rows != self.vocab_ranks.rank:
            return None
        return self.padding_idx % rows

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        super().reset_parameters(seed)
        (weight,) = self.local("weight")
        if self._padding_row is not None and not weight.is_meta:
            weight[self._padding_row] = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        (weight,) = self.local("weight")
        if self.group.size == 1:
            return self._lookup_whole(tokens, weight)
        return look_up(
            self,
            tokens,
            weight,
            self.group,
            self.vocab_size,
            self.padding_idx,
            sequence_parallel=self.sequence_parallel,
        )

    def _lookup_whole(self, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return F.embedding(tokens, weight, self.padding_idx)
        try:
            return F.embedding(tokens, weight, self.padding_idx)
        except IndexError:  # torch's error names neither the token nor the size of the vocabulary
            self._check(tokens)
            raise

    def _check(self, tokens: torch.Tensor) -> None:
        check_tokens(tokens, self.vocab_size)

    def runs(self, device: torch.device) -> Runs:
        return [("embedding", Choice("reference", "torch's own embedding"))]

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f"padding_idx={self.padding_idx}, "
        return f"{self.vocab_size}, {self.hidden_size}, {padding}{self.sharding_repr()}"


def look_up(
    module: nn.Module,
    tokens: torch.Tensor,
    weight: torch.Tensor,
    group: Group,
    vocab_size: int,
    padding_idx: int | None,
    *,
    sequence_parallel: bool = False,
) -> torch.Tensor:
    """``module``'s embeddings of ``tokens``, where this rank has the rows ``weight`` [V/R, D] of the table."""
    compare_call(module, group, values=True, tokens=tokens)
    check_tokens(tokens, vocab_size)
    x = look_up_slice(tokens, weight, group, padding_idx)
    if sequence_parallel:
        return mappings.reduce_scatter_to(x, group, dim=0, site="embedding")
    return mappings.reduce_from(x, group, site="embedding")


def look_up_slice(tokens: torch.Tensor, weight: torch.Tensor, group: Group, padding_idx: int | None) -> torch.Tensor:
    """The embeddings of the ``tokens`` in this rank's slice ``weight`` [V/R, D] of the table; 0 for the others."""
    first = group.rank * weight.shape[0]
    rows = tokens - first
    elsewhere = (rows < 0) | (rows >= weight.shape[0])
    padding = None if padding_idx is None or not first <= padding_idx < first + weight.shape[0] else padding_idx - first
    x = F.embedding(rows.masked_fill(elsewhere, 0), weight, padding)
    return x.masked_fill(elsewhere[..., None], 0)


def check_tokens(tokens: torch.Tensor, vocab_size: int) -> None:
    """ValueError for a token outside the vocabulary, on a CPU."""
    if tokens.device.type != "cpu" or torch.compiler.is_compiling() or tokens.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(tokens))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token {low if low < 0 else high} is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1}): does "
            "the tokenizer belong to this model?"
        )
