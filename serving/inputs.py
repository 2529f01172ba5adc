"""The input of a step: one buffer of numbers that rank 0 fills, every rank reads, and a GPU gets in one copy.

The buffer is int32 and every part has a fixed place, so a captured graph reads each step's numbers at the same
addresses. On a CPU the model reads the buffer directly; on a GPU it lies in pinned memory and has a copy on the device.

    header | rows [S] | starts [S + 1] | lens [S] | changes [3, C] | copies [3, C] | tokens [T] | wanted [T]

S sequences at most, T tokens, C entries of each list; extra buffers carry longer lists (``StepInputs.batches``).
``rows`` gives each sequence's row of the block table: the table stays on the device, and a step sends only the blocks
that were added.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ..layers.attention.paged import PagedBatch, PagedKVCache


class Kind(IntEnum):
    """The command of a buffer to a rank."""

    COMPUTE = 0
    CHANGE = 1  # update the block table only
    COPY = 2  # blocks
    RECOVER = 3  # report whether the last step failed on this rank
    IDLE = 4  # wait without a time limit: no request is live
    END = 5  # stop serving
    WARM = 6  # as COMPUTE, but without writing to the cache


class Part(NamedTuple):
    """One sequence's part of a step: ``tokens`` at positions from ``start`` on, for ``row`` of the block table.

    ``wanted`` is the number of tokens at its end that need logits.
    """

    row: int
    start: int
    tokens: Sequence[int]
    wanted: int


class Change(NamedTuple):
    """A block added to a row of the table."""

    row: int
    column: int
    block: int


class Shape(NamedTuple):
    """The header: the lengths and counts of a step that the host knows; ``blocks`` is the table's width."""

    kind: int
    tokens: int = 0
    sequences: int = 0
    wanted: int = 0
    changes: int = 0
    copies: int = 0
    min_query_len: int = 0
    max_query_len: int = 0
    max_seq_len: int = 0
    blocks: int = 0
    step: int = 0
    sealed: int = 0

    @property
    def decodes(self) -> bool:
        """Whether every sequence has one token and needs its logits."""
        return self.max_query_len == 1 and self.tokens == self.wanted == self.sequences


_HEADER = len(Shape._fields)


class StepInputs:
    """The buffer, the block table that its changes update, and the batch that both describe.

    Args:
        max_tokens: of a step, T.
        max_sequences: of a step, S, which is also the number of rows of the table.
        max_blocks: of a sequence.
        device: the model's.
    """

    def __init__(self, max_tokens: int, max_sequences: int, max_blocks: int, device: torch.device) -> None:
        self.max_listed = max(256, 2 * max_sequences)  # C
        sizes = {
            "header": _HEADER,
            "rows": max_sequences,
            "starts": max_sequences + 1,
            "lens": max_sequences,
            "changes": 3 * self.max_listed,
            "copies": 3 * self.max_listed,
            "tokens": max_tokens,
            "wanted": max_tokens,
        }
        ends = list(accumulate(sizes.values()))
        self._at = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends)}
        on_gpu = device.type != "cpu"
        self.buffer = torch.zeros(ends[-1], dtype=torch.int32, pin_memory=on_gpu)
        self._there = torch.zeros_like(self.buffer, device=device) if on_gpu else self.buffer
        self._copied = torch.cuda.Event() if on_gpu else None
        self._here: dict[str, Any] = {name: self.buffer.numpy()[at] for name, at in self._at.items()}
        self._ends = np.arange(1, max_sequences + 1)  # of sequences that have one token each
        self.scratch_row = max_sequences  # the row that padding may change
        self.table = torch.zeros(max_sequences + 1, max_blocks, dtype=torch.int32, device=device)
        self._index = torch.arange(max(max_tokens, max_sequences), device=device)

    def pack(self, parts: Sequence[Part], changes: Sequence[Change] = (), *, block_size: int, step: int) -> Shape:
        """Write a step into the buffer; at most ``max_listed`` changes."""
        self.settle()
        lengths = [len(part.tokens) for part in parts]
        ends = list(accumulate(lengths))
        lens = [part.start + length for part, length in zip(parts, lengths)]
        here, count, tokens = self._here, len(parts), ends[-1]
        shape = Shape(
            Kind.COMPUTE, tokens, count, sum(part.wanted for part in parts), len(changes), 0,
            min(lengths), max(lengths), max(lens), -(-max(lens) // block_size), step,
        )  # fmt: skip
        self.repack(shape)
        here["rows"][:count] = [part.row for part in parts]
        here["starts"][1 : count + 1] = ends  # the first is always 0
        here["lens"][:count] = lens
        here["tokens"][:tokens] = [token for part in parts for token in part.tokens]
        if not shape.decodes:
            here["wanted"][: shape.wanted] = [
                index for part, end in zip(parts, ends) for index in range(end - part.wanted, end)
            ]
        self._list("changes", changes)
        return shape

    def pack_decodes(
        self,
        sequences: Sequence[tuple[int, Sequence[int]]],
        changes: Sequence[Change] = (),
        *,
        block_size: int,
        step: int,
    ) -> Shape:
        """:meth:`pack` the last token of each of ``sequences``, given by their rows and all of their tokens."""
        self.settle()
        here, count, lens = self._here, len(sequences), [len(tokens) for _, tokens in sequences]
        longest = max(lens)
        shape = Shape(
            Kind.COMPUTE, count, count, count, len(changes), 0, 1, 1, longest, -(-longest // block_size), step
        )  # fmt: skip
        self.repack(shape)
        here["rows"][:count] = [row for row, _ in sequences]
        here["starts"][1 : count + 1] = self._ends[:count]
        here["lens"][:count] = lens
        here["tokens"][:count] = [tokens[-1] for _, tokens in sequences]
        self._list("changes", changes)
        return shape

    def pack_list(self, kind: Kind, entries: Sequence[tuple[int, int, int]]) -> Shape:
        """Write ``entries``, at most ``max_listed``, into the buffer: changes of the table, or copies of blocks."""
        self.settle()
        name = "changes" if kind is Kind.CHANGE else "copies"
        self._list(name, entries)
        return self.repack(Shape(kind, **{name: len(entries)}))

    def pack_warm(self, tokens: int, sequences: int, *, block_size: int) -> Shape:
        """Write a dummy step: ``tokens`` tokens of one sequence, or one token of each of ``sequences``."""
        each = Part(self.scratch_row, 0, [0] * (tokens // sequences), 1)
        return self.repack(self.pack([each] * sequences, block_size=block_size, step=0)._replace(kind=Kind.WARM))

    def repack(self, shape: Shape) -> Shape:
        """Replace the header of the buffer."""
        self._here["header"][:] = shape
        return shape

    def pack_kind(self, kind: Kind) -> Shape:
        """Write a command that needs no numbers."""
        self.settle()
        return self.repack(Shape(kind))

    def _list(self, name: str, entries: Sequence[tuple[int, int, int]]) -> None:
        if entries:
            self._here[name].reshape(3, -1)[:, : len(entries)] = list(zip(*entries))

    def shape(self) -> Shape:
        """The header in the buffer."""
        return Shape(*self._here["header"].tolist())

    def copies(self, shape: Shape) -> list[tuple[int, int, int]]:
        """The block copies in the buffer."""
        return list(zip(*self._here["copies"].reshape(3, -1)[:, : shape.copies].tolist()))

    def batches(self, entries: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """``entries`` in lists that fit the buffer."""
        for first in range(0, len(entries), self.max_listed):
            yield entries[first : first + self.max_listed]

    def upload(self) -> None:
        """Copy the buffer to the device, without waiting."""
        if self._copied is not None:
            self._there.copy_(self.buffer, non_blocking=True)
            self._copied.record()

    def settle(self) -> None:
        """Wait until the last :meth:`upload` has read the buffer; call this before writing to it."""
        if self._copied is not None:
            self._copied.synchronize()

    def pad(self, shape: Shape, sequences: int, max_seq_len: int, *, block_size: int) -> Shape:
        """Pad a decode step of :meth:`pack` to ``sequences`` sequences; the added ones have no token."""
        here, count = self._here, shape.sequences
        if count < sequences:
            here["rows"][count:sequences] = self.scratch_row
            here["starts"][count + 1 : sequences + 1] = shape.tokens
            here["lens"][count:sequences] = 0
            here["tokens"][count:sequences] = 0
        changes = here["changes"].reshape(3, -1)[:, shape.changes : 2 * sequences]
        changes[0], changes[1:] = self.scratch_row, 0
        return shape._replace(
            tokens=sequences, sequences=sequences, wanted=sequences, changes=2 * sequences, min_query_len=0,
            max_seq_len=max_seq_len, blocks=-(-max_seq_len // block_size),
        )  # fmt: skip

    def change(self, shape: Shape) -> None:
        """Apply the table's changes, on the device. A repeated scratch entry is padding."""
        if shape.changes:
            row, column, block = self._part("changes").view(3, -1)[:, : shape.changes]
            self.table.index_put_((row.long(), column.long()), block)

    def batch(self, shape: Shape, cache: PagedKVCache, *, impl: str, rows: int = 0) -> tuple[torch.Tensor, PagedBatch]:
        """Tokens [T] and the batch, computed on the device from the buffer there; a captured graph rereads it.

        Sequences without a token and tokens after the last sequence's are padding; tokens are padded to ``rows``.
        """
        size, count, tokens = cache.block_size, shape.sequences, shape.tokens
        starts, lens = self._part("starts")[: count + 1], self._part("lens")[:count]
        tables = self.table.index_select(0, self._part("rows")[:count])[:, : shape.blocks]
        if shape.decodes:
            positions = (lens - 1).long()
            blocks = tables.gather(1, (positions // size).clamp_(min=0).unsqueeze(1)).squeeze(1)
            slots = torch.where(lens > 0, blocks * size + positions % size, -1)
            positions, wanted = positions.clamp_(min=0), self._index[:tokens]
        else:
            index = self._index[:tokens]
            owner = torch.searchsorted(starts[1:], index.int(), right=True)
            positions = index + (lens - starts[1:])[owner]
            slots = tables[owner, positions // size].long() * size + positions % size
            wanted = self._part("wanted")[: shape.wanted].long()
        if shape.kind == Kind.WARM:
            slots = torch.full_like(slots, -1)
        given = self._part("tokens")[:tokens].long()
        if rows > tokens:
            given, positions, slots = (
                F.pad(x, (0, rows - tokens), value=value) for x, value in ((given, 0), (positions, 0), (slots, -1))
            )
        return given, PagedBatch(
            cache,
            block_tables=tables,
            seq_lens=lens,
            query_start_loc=starts,
            slot_mapping=slots,
            positions=positions,
            logit_indices=wanted,
            min_query_len=shape.min_query_len,
            max_query_len=shape.max_query_len,
            max_seq_len=shape.max_seq_len,
            impl=impl,
        )

    def _part(self, name: str) -> torch.Tensor:
        return self._there[self._at[name]]
