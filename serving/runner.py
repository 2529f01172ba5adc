"""The runner computes steps on this rank and makes the other ranks compute them too.

Rank 0's engine calls :meth:`Runner.logits` with the scheduler's chunks. The runner writes them into its buffer
(``inputs.py``), sends that to the other ranks (``ranks.py``), and every rank runs the model over it. On a GPU a step in
which every sequence has one token replays a captured graph (``graphs.py``), on a CPU recorded ops (``recording.py``);
prefill runs the model's own Python.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..kernels.runtime import dispatch, onednn, processor, sealing
from ..layers.attention.paged import PagedBatch, PagedKVCache
from ..parallel.core.collectives import CollectiveError
from . import windows
from .allocator import BlockAllocator
from .graphs import Graphs, cuda_capture
from .inputs import Change, Kind, Part, Shape, StepInputs
from .prompt_logprobs import logit_rows, take_prompt_scores
from .ranks import RanksLost, StepChannel
from .recording import Recordings
from .request import SequenceState
from .scheduler import Chunk, Copy, Way


class Runner:
    """The model, the cache's memory on this rank, and the step's input tensors.

    Args:
        model: a ServableModel.
        allocator: its block tables are the steps' input. Only rank 0 fills it.
        cache_options: of :class:`PagedKVCache`, beside the numbers of layers and blocks.
        max_num_seqs, max_num_batched_tokens, max_model_len: the largest step.
        num_host_blocks: in host memory, for preempted sequences.
        invariant, impl: as in Engine.
    """

    def __init__(
        self,
        model: Any,
        allocator: BlockAllocator,
        cache_options: dict[str, Any],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_host_blocks: int,
        enforce_eager: bool,
        invariant: bool,
        impl: str,
    ) -> None:
        self.model = model
        self.channel = StepChannel(model.group)
        self._allocator = allocator
        self._options = cache_options
        self._sizes = (max_num_batched_tokens, max_num_seqs, allocator.blocks_for(max_model_len))
        self._invariant, self._impl = invariant, impl
        self._steps = 0
        self.followed = False  # whether the other ranks are to be dismissed
        self._max_model_len = max_model_len
        self._num_host_blocks = num_host_blocks
        self._eager = enforce_eager
        self.graphs: Graphs | None = None
        self.recordings: Recordings | None = None
        self._reserved: int | None = None  # the GPU's memory in bytes when the runner was sealed
        self.cache: PagedKVCache | None = None
        self._host: PagedKVCache | None = None
        self._inputs: StepInputs | None = None

    def open(self) -> None:
        """Allocate the cache's memory."""
        if self.cache is None:
            self.cache = PagedKVCache(self.model.config.num_layers, self._allocator.num_blocks, **self._options)
            self._inputs = StepInputs(*self._sizes, self._options["device"])
            self.followed = True
            if self._num_host_blocks:
                self._host = self._host_cache()
            self.graphs, self.recordings = self._graphs(), self._recordings()

    def _graphs(self) -> Graphs | None:
        """The captured decode steps; None with ``enforce_eager``, without a GPU, and over ranks without NCCL."""
        on_gpu = self._options["device"].type == "cuda"
        captured = self.model.group.size == 1 or dist.get_backend(self.model.group.pg) == "nccl"
        if self._eager or not (on_gpu and captured):
            return None
        _, max_num_seqs, _ = self._sizes
        with self._device():
            return Graphs(cuda_capture(), max_num_seqs, self._max_model_len)

    def _recordings(self) -> Recordings | None:
        """The recorded decode steps; None if eager or invariant, without a CPU, and over several ranks."""
        on_cpu = self._options["device"].type == "cpu"
        eager = self._eager or getattr(self.model, "enforce_eager", False)
        if eager or self._invariant or not on_cpu or self.model.group.size > 1:
            return None
        return Recordings(self._model, self.model.parameters())

    def _host_cache(self) -> PagedKVCache:
        options = self._options | {"device": "cpu"}
        host = PagedKVCache(self.model.config.num_layers, self._num_host_blocks, **options)
        if self._options["device"].type != "cpu":
            host.data = host.data.pin_memory()
        return host

    def new_weights(self) -> None:
        """Drop everything derived from the model's parameters, which have changed."""
        for parameter in self.model.parameters():
            onednn.drop(parameter)
        if self.graphs is not None:
            self.graphs = self._graphs()  # parameters may have moved

    def close(self) -> None:
        """Free the cache's memory."""
        self.cache = self._inputs = self._host = self.graphs = self.recordings = None

    def block_seconds(self) -> float:
        """The time of a block's round trip to host memory, measured the second time, after all compilation."""
        cache, host = self.cache, self._host
        if cache is None or host is None:
            return 0.0
        for _ in range(2):
            began = time.perf_counter()
            with self._device():
                cache.swap_blocks(host, [(0, 0)])
                host.swap_blocks(cache, [(0, 0)])
                if cache.data.is_cuda:
                    torch.cuda.synchronize()
        return time.perf_counter() - began

    def invariance(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, this thread computes and chooses implementations in the engine's mode."""
        return self._in_invariance() if self._invariant or dispatch.row_invariant() else _NOTHING

    @contextlib.contextmanager
    def _in_invariance(self) -> Iterator[None]:
        on_cpu = self._options["device"].type == "cpu"
        with dispatch.row_invariance(), processor.one_thread() if on_cpu else _NOTHING:
            yield

    # --- rank 0

    def logits(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Run the model over ``chunks``: the logits [S, V] of those that sample, in their order."""
        inputs = self._open()
        table = self._allocator.table
        gained = [c.sequence for c in chunks if c.sequence.sent != len(table(c.sequence.id))]
        changes = [change for sequence in gained for change in self._gained(sequence)]
        if len(changes) > 2 * len(chunks):  # prefixes found in the cache
            for some in inputs.batches(changes):
                self._everywhere(inputs.pack_list(Kind.CHANGE, some))
            changes = []
        self._steps += 1
        options = {"block_size": self._allocator.block_size, "step": self._steps}
        last = [(c.sequence.row, c.sequence.tokens) for c in chunks if c.length == 1 and c.samples]
        if decodes := len(last) == len(chunks):
            shape = inputs.pack_decodes(last, changes, **options)
        else:
            parts = [
                Part(c.sequence.row, c.start, c.sequence.tokens[c.start : c.start + c.length], logit_rows(c))
                for c in chunks
            ]
            shape = inputs.pack(parts, changes, **options)
        logits = self._everywhere(shape)
        for sequence in gained:
            sequence.sent = len(table(sequence.id))
        assert logits is not None
        return logits if decodes else take_prompt_scores(logits, chunks)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy blocks, in order where they depend on each other."""
        inputs = self._open()
        for some in inputs.batches(copies):
            self._everywhere(inputs.pack_list(Kind.COPY, some))

    def warm_up(self) -> Iterator[str]:
        """Run a step of every size once, on every rank; yield each size before it runs."""
        inputs = self._open()
        tokens, max_num_seqs, _ = self._sizes
        longest, size = min(tokens, self._max_model_len), self._allocator.block_size
        yield f"prefill of {longest} tokens"
        self._everywhere(inputs.pack_warm(longest, 1, block_size=size))
        sizes = [(each, 1) for each in {1, max_num_seqs}] if self.graphs is None else list(self.graphs.sizes())
        for sequences, length in sizes:
            yield f"decode of {sequences} sequences" + (f" up to {length} tokens" if self.graphs else "")
            shape = inputs.pack_warm(sequences, sequences, block_size=size)._replace(max_seq_len=length)
            self._everywhere(inputs.repack(shape))

    def rest(self) -> None:
        """Tell the other ranks that no request is live: they wait for the next one without a limit."""
        if self._inputs is not None and not self.channel.idle:
            self._inputs.pack_kind(Kind.IDLE)
            self.channel.send(self._inputs.buffer, idle=True)

    def dismiss(self) -> None:
        """Make the other ranks' :meth:`follow` return. A repetition without a step between does nothing."""
        if self.followed:
            inputs = self._open()
            inputs.pack_kind(Kind.END)
            self.channel.send(inputs.buffer, idle=True)
            self.followed = False

    def recover(self) -> None:
        """After a failed step on this rank, check that every rank is ready for the next one.

        Raises RanksLost if one is not: it may be waiting in a collective of the failed step.
        """
        if not self.channel.alone:
            inputs = self._open()
            inputs.pack_kind(Kind.RECOVER)
            self.channel.send(inputs.buffer)
            self.channel.gather(1)

    def _gained(self, sequence: SequenceState) -> list[Change]:
        """The blocks of ``sequence`` that the device's block table lacks."""
        table = self._allocator.table(sequence.id)
        return [Change(sequence.row, column, table[column]) for column in range(sequence.sent, len(table))]

    def _everywhere(self, shape: Shape) -> torch.Tensor | None:
        """Execute the buffer's command on every rank."""
        self.followed = True
        if sealing.active():
            shape = self._open().repack(shape._replace(sealed=1))
        self.channel.send(self._open().buffer)
        return self._run(shape)

    # --- the other ranks

    def follow(self) -> None:
        """Compute the steps that rank 0 sends, until :meth:`dismiss`.

        Raises RanksLost if rank 0 has ended or sends nothing in time, and an error of this rank's model unless rank 0
        had one too.
        """
        inputs, failed = self._open(), None
        while True:
            inputs.settle()
            self.channel.receive(inputs.buffer)
            shape = inputs.shape()
            self.channel.rest(shape.kind in (Kind.IDLE, Kind.END))
            if shape.kind == Kind.RECOVER:
                self.channel.gather(0 if failed is None else 1)
                failed = None
            elif failed is not None:
                raise failed
            elif shape.kind == Kind.END:
                return
            try:
                with sealing.sealed() if shape.sealed else _NOTHING:
                    self._run(shape)
            except CollectiveError as error:
                raise RanksLost(f"a rank of the model was lost: {error}") from error
            except Exception as error:
                failed = error

    # --- every rank

    @torch.no_grad()
    def _run(self, shape: Shape) -> torch.Tensor | None:
        with self._device():
            return self._do(shape)

    def _device(self) -> contextlib.AbstractContextManager[Any]:
        """Make the model's GPU this thread's current one."""
        device = self._options["device"]
        return torch.cuda.device(device) if device.type == "cuda" else _NOTHING

    def _do(self, shape: Shape) -> torch.Tensor | None:
        inputs, cache = self._open(), self.cache
        assert cache is not None
        if shape.kind in (Kind.COMPUTE, Kind.WARM):
            logits = self._compute(inputs, shape, cache)
            if self._reserved is not None and (now := self._gpu_memory() or 0) > self._reserved:
                grown, self._reserved = now - self._reserved, now
                what = f"{shape.tokens} tokens of {shape.sequences} sequences up to {shape.max_seq_len}"
                sealing.refuse(f"a step of {what} took {grown} bytes of the GPU's memory")
            return logits
        if shape.kind == Kind.CHANGE:
            inputs.upload()
            inputs.change(shape)
        if shape.kind == Kind.COPY:
            self._copy(inputs.copies(shape), cache)
        return None

    def _copy(self, copies: Sequence[tuple[int, int, int]], cache: PagedKVCache) -> None:
        pairs = {way: [(source, target) for each, source, target in copies if each == way] for way in Way}
        if pairs[Way.OUT] and self._host is not None:
            cache.swap_blocks(self._host, pairs[Way.OUT])
        if pairs[Way.WITHIN]:
            cache.copy_blocks(pairs[Way.WITHIN])
        if pairs[Way.IN] and self._host is not None:
            self._host.swap_blocks(cache, pairs[Way.IN])

    @contextlib.contextmanager
    def memory_sealed(self) -> Iterator[None]:
        """Within the block, a step after which torch has reserved more of the GPU's memory raises SealBroken."""
        self._reserved = self._gpu_memory()
        try:
            yield
        finally:
            self._reserved = None

    def _gpu_memory(self) -> int | None:
        device = self._options["device"]
        return torch.cuda.memory_reserved(device) if device.type == "cuda" else None

    def _compute(self, inputs: StepInputs, shape: Shape, cache: PagedKVCache) -> torch.Tensor:
        if self.graphs is None or not shape.decodes:
            inputs.upload()
            return self._forward(inputs, shape, cache)
        size = self.graphs.size(shape)
        if shape.kind == Kind.WARM:  # padding only: the captured graph serves other steps
            shape = Shape(Kind.COMPUTE, max_query_len=1)
        padded = inputs.pad(shape, *size, block_size=cache.block_size)
        inputs.upload()
        logits = self.graphs.run(size, lambda: self._forward(inputs, padded, cache))
        return logits if padded.wanted == shape.wanted else logits[: shape.wanted]

    def _forward(self, inputs: StepInputs, shape: Shape, cache: PagedKVCache) -> torch.Tensor:
        inputs.change(shape)
        on_cpu = self._options["device"].type == "cpu"
        rows = padded(shape.tokens) if on_cpu and not (shape.decodes or self._invariant) else 0
        tokens, batch = inputs.batch(shape, cache, impl=self._impl, rows=rows)
        # Steps that begin requests compare packed weights with the model's, because this reads all of them.
        with self.invariance(), onednn.serving(compare=not shape.decodes):
            if dispatch.row_by_row(tokens):
                return windows.logits_of(self.model, tokens, batch)
            if self.recordings is not None and shape.decodes:
                return self.recordings.run(tokens, batch)
            return self._model(tokens, batch)

    def _model(self, tokens: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens, positions=batch.positions, cache=batch)
        return self.model.gather_logits(logits)

    def _open(self) -> StepInputs:
        assert self._inputs is not None, "nothing is computed while the engine is closed"
        return self._inputs


_NOTHING = contextlib.nullcontext()


def padded(tokens: int) -> int:
    """The padded number of rows of a CPU step of ``tokens`` with some prefill: at most 1/16 more.

    oneDNN generates code for each number of rows and weight, some 0.2 MB in a millisecond, and never frees it. This
    function leaves 16 numbers between a power of two and the next one.
    """
    step = 1 << max(0, tokens.bit_length() - 5)
    return -(-tokens // step) * step
