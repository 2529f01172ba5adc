"""The engine: continuous batching, in which requests arrive and finish while others are being served.

Under tensor parallelism every rank creates an engine, adds the same requests in the same order and takes the same
steps. All decisions follow from these, and tokens follow from logits that are gathered on every rank, so the ranks
agree without communicating.
"""

from __future__ import annotations

import heapq
import operator
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import torch

from ..kernels.runtime import dispatch
from ..kernels.runtime.dtypes import CACHE_NAMES, QUANTISED
from ..layers.attention.paged import PagedBatch, PagedKVCache, Span, default_block_size
from .allocator import BlockAllocator
from .request import Finish, Request, SequenceState, TokenEvent
from .sampling import sample
from .scheduler import Chunk, Scheduler
from .stats import EngineStats

KV_DTYPES = {CACHE_NAMES[dtype]: dtype for dtype in QUANTISED}


class ServableModel(Protocol):
    """The interface of a model for the engine; ``ParallelTransformer`` implements it."""

    config: Any  # num_layers, num_kv_heads, head_dim, vocab_size, max_positions
    group: Any  # the tensor-parallel ranks that the KV heads are split over

    def __call__(self, tokens: torch.Tensor, *, positions: torch.Tensor, cache: PagedBatch) -> torch.Tensor:
        """tokens [T], positions [T] -> logits [T_selected, V/R] of the tokens ``cache.logit_indices``."""
        ...

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[T_selected, V/R] -> [T_selected, V] on every rank."""
        ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


def _check_servable(model: ServableModel) -> None:
    """ValueError for a model whose dropout is active."""
    config = model.config
    rates = ("embedding_dropout", "residual_dropout", "attention_dropout")
    if getattr(model, "training", False) and any(getattr(config, name, 0) for name in rates):
        raise ValueError(
            "the model is in training mode and would drop activations: call model.eval() before serving it"
        )


class Engine:
    """Serves ``model`` to any number of requests through one paged KV cache.

        engine = Engine(model, num_blocks=256)
        engine.add(Request(prompt, max_new_tokens=32))
        for event in engine.run():
            print(event.request, event.token)

    Args:
        model: see :class:`ServableModel`; call ``model.eval()`` first if it has dropout.
        num_blocks: of the cache.
        block_size: token slots of each; default 256 on a CPU and 16 on a GPU.
        max_num_seqs: the most requests that run at once.
        max_model_len: the longest prompt and answer together; default the model's ``max_positions``.
        max_num_batched_tokens: tokens per step, over all requests; longer prompts are computed in several steps.
        kv_dtype: of the cache, ``"fp8"`` (e4m3) or ``"int8"`` with a scale for each token and head; None: the model's.
        invariant: whether a request's answer must not depend on the other requests in its steps, nor on how its prompt
            is cut. On a GPU every matrix product and attention then computes a token the same way in any batch, at a
            cost; on a CPU there is no such guarantee (see ``kernels.runtime.dispatch.row_invariance``).
        impl: of the paged attention and the cache write; see ``kernels/runtime/dispatch.py``.

    ``stats`` is an :class:`EngineStats`. Raises ValueError for sizes that cannot work.
    """

    def __init__(
        self,
        model: ServableModel,
        *,
        num_blocks: int,
        block_size: int | None = None,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        max_num_batched_tokens: int = 512,
        kv_dtype: str | None = None,
        invariant: bool = False,
        impl: str = "auto",
    ) -> None:
        config = model.config
        _check_servable(model)
        limit = config.max_positions if max_model_len is None else max_model_len
        if not 1 < limit <= config.max_positions:
            raise ValueError(
                f"Engine: max_model_len={limit}: expected 2 to {config.max_positions}, the positions that the model has"
            )
        self.model = model
        self.max_model_len = limit
        self.stats = EngineStats()
        if kv_dtype is not None and kv_dtype not in KV_DTYPES:
            raise ValueError(f"Engine: kv_dtype={kv_dtype!r}: expected None or one of {', '.join(KV_DTYPES)}")
        weight = next(iter(model.parameters()))
        block_size = default_block_size(weight.device) if block_size is None else block_size
        self._allocator = BlockAllocator(num_blocks, block_size)
        self._scheduler = Scheduler(
            self._allocator, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )
        self._cache = PagedKVCache(
            config.num_layers,
            num_blocks,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=weight.dtype if kv_dtype is None else KV_DTYPES[kv_dtype],
            mesh=model.group,
            device=weight.device,
        )
        self._invariant = invariant
        self._impl = impl
        self._clock = 0  # steps taken, including idle ones
        self._next_id = 0
        self._live: dict[int, SequenceState] = {}
        self._arrivals: list[tuple[int, int]] = []  # heap of (step, id): requests still to come
        self._cancelled: list[TokenEvent] = []  # for the next step to report

    @property
    def busy(self) -> bool:
        """Whether any request is waiting, running or still to arrive, or an event is still to be reported."""
        return bool(self._live or self._cancelled)

    def add(self, request: Request) -> int:
        """Queue ``request``; returns its number, which its events carry.

        Raises ValueError, and changes nothing, for a request that cannot be served: an empty or over-long prompt, a
        token outside the vocabulary, more blocks than exist, a number out of range.
        """
        tokens = self._check(request)
        generator = torch.Generator().manual_seed(request.seed)
        number = self._next_id
        self._next_id += 1
        self._live[number] = SequenceState(number, request, tokens, generator)
        heapq.heappush(self._arrivals, (max(request.arrival, self._clock), number))
        return number

    def cancel(self, number: int) -> bool:
        """Cancel request ``number`` and free its blocks; the next step reports its end.

        Returns False if it has already ended; raises ValueError for a number that was never returned by :meth:`add`.
        """
        if not 0 <= number < self._next_id:
            raise ValueError(f"cancel: there is no request {number}; {self._next_id} were added")
        sequence = self._live.pop(number, None)
        if sequence is None:
            return False
        if any(number == waiting for _, waiting in self._arrivals):
            self._arrivals = [entry for entry in self._arrivals if entry[1] != number]
            heapq.heapify(self._arrivals)
        else:
            self._scheduler.remove(sequence)
        self._cancelled.append(TokenEvent(number, None, "cancelled"))
        return True

    def step(self) -> list[TokenEvent]:
        """Admit requests, compute one batch, retire finished ones; returns the new tokens, in order of admission.

        If the model raises, nothing is lost: the next step computes the same tokens again.
        """
        while self._arrivals and self._arrivals[0][0] <= self._clock:
            self._scheduler.add(self._live[heapq.heappop(self._arrivals)[1]])
        began = time.perf_counter()
        chunks = self._scheduler.schedule()
        generated = []
        if chunks:
            tokens = self._compute(chunks)
            self._count(chunks, time.perf_counter() - began)
            generated = self._advance(chunks, tokens)
        self._clock += 1
        cancelled, self._cancelled = self._cancelled, []
        return cancelled + generated

    def run(self) -> Iterator[TokenEvent]:
        """Step until no request is left, yielding each event as it comes; requests may be added meanwhile."""
        while self.busy:
            yield from self.step()

    def generate(self, requests: Sequence[Request]) -> list[list[int]]:
        """Serve ``requests`` to the end: the generated tokens of each.

        Raises RuntimeError while other requests are being served (their events would be lost), and ValueError, serving
        none, if one of these cannot be served.
        """
        if self.busy:
            raise RuntimeError("generate: other requests are being served; add() these and read run() instead")
        for request in requests:
            self._check(request)
        answers: dict[int, list[int]] = {self.add(request): [] for request in requests}
        for event in self.run():
            if event.token is not None:
                answers[event.request].append(event.token)
        return list(answers.values())

    def _check(self, request: Request) -> list[int]:
        """The prompt's tokens as plain integers; ValueError where the request cannot be served."""
        try:
            tokens = [operator.index(token) for token in request.prompt]
        except TypeError as error:
            raise ValueError(f"prompt: expected whole numbers, token ids ({error})") from None
        for name in ("max_new_tokens", "seed", "arrival"):
            if not isinstance(getattr(request, name), int):
                raise ValueError(f"{name}={getattr(request, name)!r}: expected a whole number")
        if not isinstance(request.temperature, (int, float)):
            raise ValueError(f"temperature={request.temperature!r}: expected a number")
        if not isinstance(request.stop, Collection):
            raise ValueError(f"stop={request.stop!r}: expected a collection of token ids, such as [{request.stop!r}]")
        vocabulary = self.model.config.vocab_size
        if not tokens:
            raise ValueError("prompt is empty: expected at least one token to continue from")
        for position, token in enumerate(tokens):
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"prompt[{position}] is {token}: expected 0 to {vocabulary - 1}; does the tokenizer belong to this "
                    "model?"
                )
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={request.max_new_tokens}: expected at least 1")
        if not 0 <= request.temperature < float("inf"):
            raise ValueError(f"temperature={request.temperature}: expected 0 (greedy) or a positive number")
        if not -(2**63) <= request.seed < 2**64:
            raise ValueError(f"seed={request.seed}: expected a 64-bit integer")
        total = len(tokens) + request.max_new_tokens
        if total > self.max_model_len:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and max_new_tokens={request.max_new_tokens} make {total}: expected "
                f"at most max_model_len={self.max_model_len}; shorten either"
            )
        # The last generated token never enters the cache.
        blocks = self._allocator.blocks_for(total - 1)
        if blocks > self._allocator.num_blocks:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens and max_new_tokens={request.max_new_tokens} need {blocks} blocks of "
                f"{self._allocator.block_size} tokens: the cache has {self._allocator.num_blocks}; shorten either, or "
                "make the engine with more num_blocks"
            )
        return tokens

    @torch.no_grad()
    def _compute(self, chunks: Sequence[Chunk]) -> list[int]:
        """Run the model over ``chunks``; one new token for each chunk that samples, in order."""
        spans = [Span(self._allocator.table(c.sequence.id), c.start, c.length, logits=c.samples) for c in chunks]
        batch = PagedBatch.of(self._cache, spans, impl=self._impl)
        ids = [token for c in chunks for token in c.sequence.tokens[c.start : c.start + c.length]]
        tokens = torch.tensor(ids, dtype=torch.int64).to(batch.positions.device, non_blocking=True)
        with dispatch.row_invariance(self._invariant or dispatch.row_invariant()):
            logits = self.model.gather_logits(self.model(tokens, positions=batch.positions, cache=batch))
        return sample(logits, [c.sequence for c in chunks if c.samples])

    def _advance(self, chunks: Sequence[Chunk], tokens: Sequence[int]) -> list[TokenEvent]:
        """Append the step's tokens to their sequences; retire complete ones."""
        events = []
        sampled = iter(tokens)
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.start + chunk.length
            sequence.most_computed = max(sequence.most_computed, sequence.computed)
            if not chunk.samples:
                continue
            token = next(sampled)
            sequence.tokens.append(token)
            finish: Finish | None = sequence.finish()
            if finish is not None:
                self._scheduler.remove(sequence)
                del self._live[sequence.id]
            events.append(TokenEvent(sequence.id, token, finish))
        return events

    def _count(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Add one step to the statistics, before its tokens are appended."""
        stats, allocator = self.stats, self._allocator
        generated = sum(chunk.samples for chunk in chunks)
        prefill = sum(chunk.length for chunk in chunks if not chunk.decodes)
        stats.steps += 1
        stats.generated_tokens += generated
        stats.prefill_tokens += prefill
        stats.recomputed_tokens += sum(chunk.recomputed for chunk in chunks)
        if prefill:
            stats.prefill_seconds += seconds
        else:
            stats.decode_seconds += seconds
            stats.decode_tokens += generated
        stats.preemptions = self._scheduler.preemptions
        stats.peak_seqs = max(stats.peak_seqs, len(chunks))
        stats.peak_blocks = allocator.peak_blocks
        stats.slot_steps += allocator.allocated_slots
        stats.unused_slot_steps += allocator.allocated_slots - allocator.used_slots
