"""Admission of requests: an engine accepts those that it can serve and for which its queue has room."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..kernels.runtime.checks import type_name, whole_number
from .allocator import BlockAllocator
from .guiding import Guides
from .request import QueueFull, Request, SequenceState


class Admission:
    """The limits of one engine; see its arguments. ``guides`` is None if the engine has no tokenizer."""

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        vocab_size: int,
        max_model_len: int,
        max_queued_requests: int | None,
        max_queued_tokens: int | None,
        guides: Guides | None,
    ) -> None:
        self._allocator = allocator
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        limits = {"max_queued_requests": max_queued_requests, "max_queued_tokens": max_queued_tokens}
        for name, limit in limits.items():
            if limit is not None:
                whole_number(f"Engine: {name}", limit)
        self._requests, self._tokens = max_queued_requests, max_queued_tokens
        self._guides = guides

    def check(self, request: Request) -> None:
        """Raise ValueError if the engine cannot serve the request."""
        if not isinstance(request, Request):
            raise ValueError(f"request is a {type_name(request)}: expected a Request, such as Request([1, 2, 3])")
        request.check(self._vocab_size)
        if request.stop_strings and self._guides is None:
            raise ValueError("stop_strings, and the engine has no tokenizer: make it with Engine(..., tokenizer=...)")
        if request.sampling.guide is not None:
            if self._guides is None:
                raise ValueError("guide, and the engine has no tokenizer: make it with Engine(..., tokenizer=...)")
            self._guides.check()
        prompt = len(request.prompt)
        total = prompt + request.max_new_tokens
        if total > self._max_model_len:
            blocks, size = self._allocator.num_blocks, self._allocator.block_size
            cache = f", or make the engine with more num_blocks: the cache has {blocks} of {size} tokens"
            raise ValueError(
                f"a prompt of {prompt} tokens and max_new_tokens={request.max_new_tokens} make {total}: expected "
                f"at most max_model_len={self._max_model_len}; shorten either"
                + (cache if self._max_model_len == blocks * size + 1 else "")
            )

    def check_queue(self, request: Request, queued: Iterable[SequenceState], together: Collection[int] = ()) -> None:
        """Raise QueueFull if the request would have to wait and the queue has no room for it.

        A queue that holds only requests numbered in ``together`` does not make it wait.
        """
        if self._requests is None and self._tokens is None:
            return
        waiting = list(queued)
        if all(each.number in together for each in waiting):
            return
        held, asked = sum(map(_left, waiting)), _most(request, request.n)
        count = len({each.number for each in waiting})
        if count and self._requests is not None and count >= self._requests:
            raise QueueFull(f"{count} requests wait, and max_queued_requests={self._requests}: send this one later")
        if count and self._tokens is not None and held + asked > self._tokens:
            raise QueueFull(
                f"{count} requests of {held} tokens wait, this one has {asked} (prompt and max_new_tokens), and "
                f"max_queued_tokens={self._tokens}: send it later"
            )


def _most(request: Request, answers: int) -> int:
    """The largest number of tokens of its prompt and that many answers together."""
    return len(request.prompt) + answers * request.max_new_tokens


def _left(sequence: SequenceState) -> int:
    """The tokens of a waiting sequence: of all its request's answers before the first token, of one after it."""
    return _most(sequence.request, 1 if sequence.generated else sequence.request.n)
