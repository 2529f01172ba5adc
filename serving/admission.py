"""Admission of requests: an engine accepts those that it can serve and for which its queue has room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..kernels.runtime.checks import type_name, whole_number
from .allocator import BlockAllocator
from .clients import Clients
from .guiding import Guides
from .request import MAX_ANSWERS, QueueFull, Request


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

    def check_queue(self, requests: Sequence[Request], clients: Clients) -> None:
        """Raise QueueFull if ``requests``, which come together, would have to wait and the queue has no room for them.

        A full queue admits a client up to its share, which is the limit over the number of waiting clients. If nothing
        of the client waits, it admits up to MAX_ANSWERS answers, while the share is at least 1. So a limit of L bounds
        all answers by L * (1 + ln(L) + MAX_ANSWERS) for any number of clients.
        """
        if not clients.answers:
            return
        answers, tokens = Counter[str](), Counter[str]()
        for request in requests:
            answers[request.client] += request.n
            tokens[request.client] += len(request.prompt) + request.n * request.max_new_tokens
        total, total_tokens = clients.answers, clients.tokens
        for name, asked in answers.items():
            held, held_tokens = clients.queued(name)
            sharing = clients.queueing + (not held)
            first = not held and asked <= MAX_ANSWERS
            if not _fits(self._requests, total, held, asked, sharing, first):
                raise QueueFull(
                    f"{total} answers wait, this request has {asked}, and max_queued_requests={self._requests}: send "
                    "it later"
                )
            if not _fits(self._tokens, total_tokens, held_tokens, tokens[name], sharing, first):
                raise QueueFull(
                    f"{total} answers of {total_tokens} tokens wait, this request has {tokens[name]} (prompt and "
                    f"max_new_tokens), and max_queued_tokens={self._tokens}: send it later"
                )
            total, total_tokens = total + asked, total_tokens + tokens[name]


def _fits(limit: int | None, total: int, held: int, asked: int, sharing: int, first: bool) -> bool:
    """Whether a queue of ``total`` with ``limit`` has room for a client that holds ``held`` of it and asks for more."""
    if limit is None or total + asked <= limit:
        return True
    share = limit // sharing
    return held + asked <= share or (first and share > 0)
