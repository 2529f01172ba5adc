"""A decoder-only transformer over a tensor-parallel group.

    tokens [B, S] -> embedding -> x [T, D] (T = B*S; with sequence parallelism [T/R, D]) -> blocks -> norm
    -> head -> logits [B, S, V/R] -> loss over the sharded vocabulary

Modules, parameters and their layout are called as in transformers' Starcoder2ForCausalLM (``style="gelu"``) and
LlamaForCausalLM (``style="gated"``).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from ..kernels.cross_entropy.op import check_targets
from ..parallel.core import mappings
from ..parallel.core.first_calls import compare_call
from ..parallel.core.random import check_alike
from ..parallel.core.sharding import named_seed, parameter_seed
from ..parallel.cross_entropy import IGNORE_INDEX
from ..parallel.documents import Documents
from ..parallel.overlap.partial_sum import PartialSum
from ..parallel.overlap.policy import check_overlap
from ..parallel.pipeline.partition import Part
from . import dropout as masks
from .attention.attention import AttentionCache, packed_positions
from .attention.rope import Rotary, rope_tables
from .batch import attention_in, check_batch, check_packed
from .block import MLP, ParallelBlock, ResidualStream, joined, make_norm, normed
from .config import TransformerConfig, part_costs
from .embedding import VocabParallelEmbedding, check_tokens
from .linear import ColumnParallelLinear, RowParallelLinear
from .loss import linear_cross_entropy, vocab_parallel_cross_entropy
from .module import Absent, Layer, ShardedModule, hooked_everywhere, is_plain_module
from .norm import LayerNorm, RMSNorm
from .options import EmbeddingKwargs, LayerOptions, ModelKwargs, NormKwargs, Unpack


class ServingCache(AttentionCache, Protocol):
    """A serving batch, as the model uses it."""

    logit_indices: torch.Tensor  # [T_selected]: the tokens whose logits are wanted


# Logits that take more than this in fp32 are formed chunk by chunk; smaller ones are faster in one piece.
FUSED_LOSS_BYTES = 64 << 20


class Decoder(nn.Module):
    """Embedding, blocks and the last norm."""

    embedding: Callable[..., Any] = VocabParallelEmbedding
    block: Callable[..., Any] = ParallelBlock
    norms: tuple[Callable[..., Any], Callable[..., Any]] = (LayerNorm, RMSNorm)

    def __init__(
        self, config: TransformerConfig, *, recompute: bool, mlp_recompute: int, **options: Unpack[ModelKwargs]
    ) -> None:
        shared = LayerOptions.of(type(self), options, ModelKwargs)
        super().__init__()
        kinds, embedding = type(self), dataclasses.replace(shared, init_std=config.init_std).kwargs(EmbeddingKwargs)
        self.embed_tokens = kinds.embedding(config.vocab_size, config.hidden_size, config.pad_token_id, **embedding)
        self.layers = nn.ModuleList(
            kinds.block(config, index, recompute=recompute, mlp_recompute=mlp_recompute, **shared.kwargs(ModelKwargs))
            for index in range(config.num_layers)
        )
        self.norm = make_norm(config, kinds.norms, **shared.kwargs(NormKwargs))


class ParallelTransformer(Layer):
    """The model of ``config`` sharded over ``mesh``'s tensor-parallel ranks (one process needs none).

    ``recompute`` keeps only every block's input for backward; ``mlp_recompute`` is ParallelMLP's ``recompute``, for the
    MLPs alone. The other keyword arguments are documented in :class:`~shardfuse.layers.options.LayerOptions`;
    ``init_std`` is ``config``'s. Fresh weights follow torch's global seed and are the same at every tensor-parallel
    degree; :meth:`init_weights` draws them again from a seed of its own.

    Raises ValueError where heads, KV heads, feed-forward width or vocabulary do not divide by the group's size.
    """

    decoder: Callable[..., Any] = Decoder
    head: Callable[..., Any] = ColumnParallelLinear
    loaded_from: Path | None = None  # the Hugging Face folder of the weights, which has their tokenizer
    generation_config: dict[str, Any] | None = None  # that folder's, as its file has it

    def __init__(
        self,
        config: TransformerConfig,
        *,
        recompute: bool = False,
        mlp_recompute: int = 0,
        **options: Unpack[ModelKwargs],
    ) -> None:
        shared = LayerOptions.of(type(self), options, ModelKwargs)
        super().__init__()
        self.config = config
        self.group, self.sequence_parallel, self.impl = shared.group, shared.sequence_parallel, shared.impl
        self.rotary = Rotary.of(config)
        self.kept = set(range(config.num_layers + 2))  # parts, see pipeline_parts
        self._drew = False  # whether the ranks have checked that their generators agree
        kinds = type(self)
        self.model = kinds.decoder(
            config, recompute=recompute, mlp_recompute=mlp_recompute, **shared.kwargs(ModelKwargs)
        )
        if config.tie_embeddings:
            shared = dataclasses.replace(shared, device="meta")  # the embedding's weight takes its place
        self.lm_head = kinds.head(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            site="head",
            init_std=config.init_std,
            **shared.kwargs(ModelKwargs),
        )
        self._tie()
        self.register_load_state_dict_post_hook(_tie_loaded)

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        cache: ServingCache | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> torch.Tensor:
        """Logits or loss of whole sequences, or, with ``cache``, the next-token logits of a serving batch.

        - ``tokens`` [B, S]: logits [B, S, V/R] (:meth:`gather_logits` makes them whole); with ``targets`` [B, S], the
          token that follows each one (-100: none), the mean loss, a scalar that is the same on every rank. Logits that
          would take more than FUSED_LOSS_BYTES are then never stored (``linear_cross_entropy``).
          A token starts a document at the beginning of a row, and where its position is not above its predecessor's in
          ``positions`` [S] or [B, S] (default 0 to S - 1); attention never crosses documents. The host waits for a
          GPU's positions to find them; while torch.compile traces or a CUDA graph is captured it cannot, so the bound
          is S documents a row, which is correct but slow.
        - ``tokens`` [T], ``cu_seqlens`` [S + 1]: the same for a packed batch, [T, V/R] and ``targets`` [T]; see
          :func:`shardfuse.layers.attention.sdpa.attend` for these and ``max_seqlen``.
        - ``tokens`` [T], ``positions`` [T], ``cache``: logits [T_selected, V/R] of the tokens ``cache.logit_indices``.
        """
        given = {"tokens": tokens, "targets": targets, "positions": positions, "cu_seqlens": cu_seqlens}
        compare_call(self, self.group, values=True, **given)
        if cache is not None:
            if not (targets is cu_seqlens is max_seqlen is None):
                raise ValueError("with a cache there are no targets, cu_seqlens or max_seqlen: it knows its sequences")
            return self._serve(tokens, positions, cache)
        if cu_seqlens is None:
            if max_seqlen is not None:
                raise ValueError(
                    "max_seqlen bounds the lengths of a packed batch: pass cu_seqlens as well, or leave it"
                )
            batch, length = self._check_batch(tokens, targets, positions)
            documents = self.documents(tokens, positions)
            positions, how = attention_in(batch, length, positions, documents, tokens.device)
        else:
            length = self._check_packed(tokens, targets, cu_seqlens, max_seqlen)
            how = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
            if positions is None:
                positions = packed_positions(cu_seqlens, len(tokens))
            elif positions.shape != tokens.shape:
                raise ValueError(f"positions {list(positions.shape)}: expected {list(tokens.shape)}")
        rope = rope_tables(self._local_positions(positions), self.rotary, length=length)
        x: ResidualStream = self._dropped(self.model.embed_tokens(tokens.reshape(-1)))
        for block, follower in zip(self.model.layers, self._followers()):
            x = block(x, rope=rope, join=False, **follower, **how)
        y, _ = normed(self.model.norm, x, MLP, impl=self.impl)
        if targets is None:
            logits = self._logits(y)
            return logits.view(*tokens.shape, logits.shape[-1])
        return self._loss(y, targets.reshape(-1))

    def _logits(self, y: torch.Tensor) -> torch.Tensor:
        """[T, V/R], of all tokens."""
        return self.lm_head(y)

    def _local_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """The ``positions`` of the tokens over which this rank attends."""
        return positions

    @property
    def _token_ranks(self) -> int:
        """The number of ranks over which the tokens of x are spread between blocks."""
        return self.group.size if self.sequence_parallel else 1

    def _loss(self, y: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        head = self.lm_head
        if targets.numel() * head.weight.shape[0] // self.group.size * 4 <= FUSED_LOSS_BYTES or not is_plain_module(
            head
        ):
            size = None if self.group.size == 1 else self.config.vocab_size  # a replaced head may have gathered
            return vocab_parallel_cross_entropy(
                head(y), targets.long(), self.group, reduction=reduction, vocab_size=size
            )
        return linear_cross_entropy(
            y,
            head.weight,
            targets,
            group=self.group,
            sequence_parallel=self.sequence_parallel,
            reduction=reduction,
            fuse_wgrad_accumulation=head.fuse_wgrad_accumulation,
            impl=head.impl,
            site="head",
        )

    def _serve(self, tokens: torch.Tensor, positions: torch.Tensor | None, cache: ServingCache) -> torch.Tensor:
        if self.sequence_parallel:
            raise ValueError("a cache wants a model with sequence_parallel=False: build or load one like that to serve")
        if positions is None or tokens.dim() != 1 or positions.shape != tokens.shape:
            given = "none" if positions is None else list(positions.shape)
            raise ValueError(
                f"with a cache, expected tokens [T] and positions [T], not tokens {list(tokens.shape)}, "
                f"positions {given}"
            )
        rope = rope_tables(positions, self.rotary)
        wanted, drops = cache.logit_indices, self._drops_rows(len(tokens), cache)
        x: ResidualStream = self.model.embed_tokens(tokens)
        for index, (block, follower) in enumerate(zip(self.model.layers, self._followers())):
            rows = {"rows": wanted} if drops and index == len(self.model.layers) - 1 else {}
            x = block(x, cache=cache, rope=rope, join=not follower, **rows, **follower)
        if isinstance(x, tuple) and isinstance(x[1], PartialSum):
            y, _ = normed(self.model.norm, x, MLP, impl=self.impl)
            return self.lm_head(y if drops else y[wanted])  # every rank sums the same number of tokens
        x = joined(x, impl=self.impl)
        return self.lm_head(self.model.norm(x if drops else x[wanted]))

    def _drops_rows(self, tokens: int, cache: ServingCache) -> bool:
        """Whether the last block computes only the tokens with requested logits after its attention, since nothing
        reads the others. False if one of its modules is hooked or replaced and would see fewer rows.
        """
        if len(cache.logit_indices) == tokens or not len(self.model.layers):
            return False
        return not hooked_everywhere() and all(map(is_plain_module, self.model.layers[-1].modules()))

    def _followers(self) -> list[dict[str, Any]]:
        """For each block the argument ``then``, the following norm, which may form the block's last sum over the ranks.

        A block has {} instead in one process, with gradients, or if it or its successor is hooked or replaced.
        """
        if self.group.size == 1 or self.sequence_parallel or torch.is_grad_enabled():
            return [{}] * len(self.model.layers)
        return [{} if norm is None else {"then": norm} for norm in self._norms_between()]

    def _norms_between(self) -> list[nn.Module | None]:
        """The norm after each block, None where a hooked or replaced block would see the deferred sum."""
        blocks = list(self.model.layers)
        seen = [not (isinstance(block, ParallelBlock) and is_plain_module(block)) for block in blocks] + [False]
        norms: list[Any] = [getattr(block, "input_layernorm", None) for block in blocks] + [self.model.norm]
        return [None if seen[i] or seen[i + 1] else norms[i + 1] for i in range(len(blocks))]

    def deferred_sums(self) -> list[tuple[nn.Module, RowParallelLinear]]:
        """The norms that may form a sum over the ranks, each with the row-parallel layer whose sum it is."""
        between = zip(self.model.layers, self._norms_between())
        return [
            pair for block, norm in between if isinstance(block, ParallelBlock) for pair in block.deferred_sums(norm)
        ]

    def _dropped(self, x: torch.Tensor, place: masks.RngOffset | None = None) -> torch.Tensor:
        """The embeddings ``x``, in training after dropout of ``config.embedding_dropout``."""
        self._check_draws(x.device)
        dropout = masks.draw(
            self.config.embedding_dropout,
            x,
            self.group,
            sequence_parallel=self.sequence_parallel,
            training=self.training,
            place=place,
        )
        return x if dropout is None else dropout.apply(x, 0, impl=self.impl)

    def _check_draws(self, device: torch.device) -> bool:
        """Whether dropout is active; the first time, the ranks check that their generators agree."""
        config = self.config
        drops = max(config.residual_dropout, config.embedding_dropout, config.attention_dropout) > 0
        if drops and self.training and not self._drew and not torch.compiler.is_compiling():
            self._drew = True
            check_alike(self.group, device)
        return drops and self.training

    def _check_batch(
        self, tokens: torch.Tensor, targets: torch.Tensor | None, positions: torch.Tensor | None = None
    ) -> tuple[int, int]:
        """B and S of a batch [B, S]; ValueError for one that the model cannot take."""
        ranks = self.group.size if self.sequence_parallel else 1
        return check_batch(tokens, targets, positions, longest=self.config.max_positions, ranks=ranks)

    def _check_packed(
        self, tokens: torch.Tensor, targets: torch.Tensor | None, cu_seqlens: torch.Tensor, max_seqlen: int | None
    ) -> int:
        """A bound of the lengths of a packed batch's sequences."""
        ranks, longest = self.group.size if self.sequence_parallel else 1, self.config.max_positions
        return check_packed(tokens, targets, cu_seqlens, max_seqlen, longest=longest, ranks=ranks)

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[..., V/R] -> [..., V] on every rank."""
        return mappings.gather_from(logits, self.group, dim=-1, site="head.gather")

    @torch.no_grad()
    def init_weights(self, seed: int | None = None) -> None:
        """Draw every parameter again, each from ``seed`` and its own name; None takes a seed from torch's global one.

        The same seed gives the same model, bit for bit, at every tensor-parallel degree, on every device, whatever
        was built before it. Call it after ``to_empty`` when the model was built under ``torch.device("meta")``.
        """
        seed = parameter_seed() if seed is None else seed
        for name, module in self.named_modules():
            if isinstance(module, ShardedModule) and not (module is self.lm_head and self.config.tie_embeddings):
                module.reset_parameters(named_seed(seed, name))

    def configure(self, *, recompute: bool | None = None, overlap: str | None = None) -> None:
        """Change settings that the model was built with; None keeps a setting. ValueError for an unknown overlap."""
        for module in self.modules():
            if recompute is not None and isinstance(module, ParallelBlock):
                module.recompute = recompute
            if overlap is not None and "overlap" in vars(module):
                self._check_overlap(overlap)
                vars(module)["overlap"] = overlap

    def _check_overlap(self, overlap: str) -> None:
        check_overlap(overlap)

    # ------------------------------------------------------------------------------------------------ in a pipeline
    # These methods implement the protocol Divisible of parallel/pipeline/partition.py. Part 0 is the embedding, part i
    # is block i - 1, and the last part is norm and head. Block i is model.layers.i on every stage.

    def pipeline_parts(self, length: int | None = None) -> list[Part]:
        """The parts of the model, each with the FLOPs of one token's forward in a sequence of ``length``."""
        return part_costs(self.config, self.config.max_positions if length is None else length)

    def keep(self, parts: Iterable[int]) -> None:
        """Drop all parts except ``parts``. A tied head among them keeps the embedding's weight, under its own name."""
        kept, model, this = set(parts), cast(Any, self.model), cast(Any, self)
        head = len(model.layers) + 1
        self.kept = kept
        if 0 not in kept and not (self.config.tie_embeddings and head in kept):
            model.embed_tokens = Absent()
        for index in range(len(model.layers)):
            if index + 1 not in kept:
                model.layers[index] = Absent()
        if head not in kept:
            model.norm = this.lm_head = Absent()

    def stage(self, parts: range) -> nn.Module:
        """The consecutive ``parts`` as a module of their own, with the same submodules under the same names."""
        return TransformerStage(self, parts)

    def tied_parameters(self) -> list[str]:
        """The parameters shared by the first and the last part."""
        return ["model.embed_tokens.weight"] if self.config.tie_embeddings else []

    def check_batch(self, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        """ValueError for a batch that no stage could take. Ranks with the same batch reach the same verdict."""
        self._check_batch(tokens, targets, positions)
        check_tokens(tokens, self.config.vocab_size)
        check_targets("cross-entropy", targets, self.config.vocab_size, IGNORE_INDEX)

    def documents(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> Documents | None:
        """The documents of a batch [B, S] whose ``positions`` [S] or [B, S] restart; None where no row holds several.
        ValueError for positions of another shape or dtype."""
        self._check_batch(tokens, None, positions)
        return Documents.of(positions, tokens.shape)

    def boundary(self, batch: int, length: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The activations that one stage sends to the next for a micro-batch [batch, length]: [T, D] or [T/R, D], on
        meta. ``dtype`` is by default the parameters'.
        """
        rows, ranks = batch * length, self.group.size if self.sequence_parallel else 1
        if rows % ranks:
            raise ValueError(
                f"sequence parallelism wants the {batch} x {length} tokens of a micro-batch to divide by {ranks} "
                "ranks: change batch size, length or microbatches, or pass sequence_parallel=False"
            )
        dtype = next(self.parameters()).dtype if dtype is None else dtype
        return torch.empty(rows // ranks, self.config.hidden_size, dtype=dtype, device="meta")

    def draws(self, device: torch.device) -> masks.RngState | None:
        """The RngState of a new step's dropout masks, for all its micro-batches and stages; None without dropout. The
        first call is a collective."""
        if not self._check_draws(device):
            return None
        config = self.config
        blocks = [config.residual_dropout] * config.num_layers
        return masks.RngState([config.embedding_dropout, *blocks, 0.0], device)

    def _tie(self) -> None:
        embedding, head = self.model.embed_tokens, self.lm_head
        if self.config.tie_embeddings and not isinstance(embedding, Absent) and not isinstance(head, Absent):
            head.weight = embedding.weight

    def _apply(self, fn: Any, recurse: bool = True) -> ParallelTransformer:
        super()._apply(fn, recurse)
        self._tie()  # to_empty() and device moves may give embedding and head a parameter each
        return self


class TransformerStage(ParallelTransformer):
    """The ``parts`` of ``whole`` (see its ``pipeline_parts``), whose submodules it shares, under the same names.

        tokens [B, S] or x -> embedding -> blocks -> norm -> head -> loss, logits or x

    where x [T, D] (with sequence parallelism [T/R, D]) is the previous stage's result. Between blocks the next norm may
    add a branch to x (``layers/block.py``); between stages every branch is part of x.

    Where one process holds both ends of a tied model in two stages, the last stage gets a weight of its own, a copy of
    the embedding's: an engine that shards stages manages each parameter in one stage. The pipeline keeps the copy equal
    and adds its gradient to the embedding's; ``whole`` and its optimizer do not see it.
    """

    def __init__(self, whole: ParallelTransformer, parts: range) -> None:
        nn.Module.__init__(self)
        count = len(whole.model.layers) + 2
        if not 0 <= parts.start < parts.stop <= count or parts.step != 1:
            raise ValueError(f"parts={parts}: expected a range of the model's {count} parts")
        self.config, self.group, self.rotary = whole.config, whole.group, whole.rotary
        self.sequence_parallel, self.impl = whole.sequence_parallel, whole.impl
        self.parts, self.first, self.last = parts, parts.start == 0, parts.stop == count
        self._drew = True  # the whole model checks the generators
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
            self.lm_head = whole.lm_head  # an engine that replaces this stage's parameters must find both holders

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        targets: torch.Tensor | None = None,
        *,
        batch_size: int | None = None,
        positions: torch.Tensor | None = None,
        documents: Documents | None = None,
        scale: float = 1.0,
        draws: masks.RngState | None = None,
    ) -> torch.Tensor:
        """The x for the next stage. The last stage returns the sum of the targets' losses times ``scale``, [1] in fp32
        (fp64 for an fp64 model), or without ``targets`` the logits [B*S, V/R].

        The first stage reads tokens [B, S] from ``x``; the others need ``batch_size=B``. ``positions`` are [B, S], by
        default 0 to S - 1 in each sequence. ``documents`` bound those that the positions tell apart (see
        :meth:`documents`); with None each sequence is one, whatever its positions. ``draws`` determines the dropout
        masks; None draws new ones.
        """
        if self.first:
            batch_size, length = self._check_batch(x, targets)
        elif batch_size is None:
            raise ValueError("a stage behind the first one wants batch_size, the number of sequences in x")
        else:
            length = x.shape[0] * self._token_ranks // batch_size
        positions, how = attention_in(batch_size, length, positions, documents, x.device)
        rope = rope_tables(self._local_positions(positions), self.rotary, length=length)
        row = 0 if draws is None else draws.pass_by(self.parts.start, batch_size * length)
        places = {part: None if draws is None else draws.place(part, row) for part in self.parts}
        stream: ResidualStream = self._embedded(x, places[0]) if self.first else x
        for part in self._blocks():
            block = self.model.layers[part - 1]
            stream = block(stream, rope=rope, join=False, place=places[part], **how)
        if not self.last:
            return joined(stream, impl=self.impl)
        y, _ = normed(self.model.norm, stream, MLP, impl=self.impl)
        if targets is None:
            return self._logits(y)
        return torch.stack((self._loss(y, targets.reshape(-1), "sum") * scale,))  # not a view: FSDP2 warns about views

    def _embedded(self, tokens: torch.Tensor, place: masks.RngOffset | None) -> torch.Tensor:
        return self._dropped(self.model.embed_tokens(tokens.reshape(-1)), place)

    def _blocks(self) -> range:
        return range(max(self.parts.start, 1), min(self.parts.stop, len(self.model.layers) + 1))

    def extra_repr(self) -> str:
        return f"parts {self.parts.start} to {self.parts.stop - 1}"


def _tie_loaded(model: ParallelTransformer, _: Any) -> None:
    """load_state_dict(assign=True) gives embedding and head a parameter each."""
    model._tie()
