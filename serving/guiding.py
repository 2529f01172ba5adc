"""Guided decoding: llguidance (https://github.com/guidance-ai/llguidance) decides which tokens may come next.

Background threads compile guides while steps go on. In a step llguidance's threads write the masks of all guided
sequences into one packed tensor while a GPU still computes the logits, and one pass applies it to the logits.

llguidance marks the end of a text by a token; this module adds that token to a copy of the tokenizer. So an answer may
end by any of its request's stop tokens, and ends without one if no further token is possible.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch

from ..kernels.runtime.checks import type_name
from .guide import Guide, GuideRefused

_END = "<|shardfuse: the end of a guided answer|>"
_KEPT = 256  # compiled guides
_THREADS = 2
_PATIENCE_S = 0.02  # a step that only waits for a guide


class GuideState:
    """The position of one answer in its guide; it moves only with the answer's tokens.

    ``done``: the answer is complete, and no further token is possible.
    """

    def __init__(self, guides: Guides, compiled: Future[Any], ends: Collection[int]) -> None:
        self.done = False
        self.guides = guides
        self.matcher: Any = None
        self.compiled = compiled
        self._ends = frozenset(ends)

    @property
    def ready(self) -> bool:
        """Whether the guide is compiled or refused."""
        return self.compiled.done()

    def begin(self) -> Exception | None:
        """Take a copy of the guide, which must be compiled or refused; return the reason if it was refused."""
        try:
            self.matcher = self.compiled.result().deep_copy()
        except Exception as error:
            return error
        return None

    def advance(self, token: int) -> None:
        """Advance by ``token``, the answer's next one. Raises RuntimeError if the guide does not accept it."""
        if token in self._ends:  # the mask allows it only after a complete answer
            self.done = True
        elif not self.matcher.consume_token(token):
            raise RuntimeError(f"guide: token {token} is refused: {_said(self.matcher)}")
        else:
            self.done = self.matcher.is_stopped()

    def fork(self) -> GuideState:
        """A copy for another answer that continues from this position."""
        other = GuideState(self.guides, self.compiled, self._ends)
        other.done = self.done
        other.matcher = None if self.matcher is None else self.matcher.deep_copy()
        return other

    @functools.cached_property
    def end_words(self) -> np.ndarray:
        """The packed mask [ceil(V / 32)] uint32 of the tokens that may follow a complete answer only."""
        words = np.zeros(self.guides.words, np.uint32)
        for token in self._ends:
            if 0 <= token < self.guides.vocab_size:
                words[token // 32] |= np.uint32(1 << token % 32)
        return words


class Guides:
    """Compiles guides for one tokenizer and a model with logits of ``vocab_size`` tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.words = 0  # of a mask, once a guide is compiled
        self.end = 0  # llguidance's end token
        self._backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._kind = type_name(tokenizer)
        eos = getattr(tokenizer, "eos_token_id", None)
        self._eos = frozenset() if eos is None else frozenset([eos])
        self._tokenizer: Any = None
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._compiled: OrderedDict[Guide, Future[Any]] = OrderedDict()  # the least recently used one first

    def check(self) -> None:
        """Raise ValueError if guided answers are impossible."""
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise ValueError("guide: llguidance is not installed: pip install 'shardfuse[guided]'") from None
        if not callable(getattr(self._backend, "to_str", None)):
            raise ValueError(
                f"guide: the engine's tokenizer is a {self._kind}: expected a tokenizers.Tokenizer or a fast tokenizer "
                "of transformers, whose tokens can be read"
            )

    def start(self, guide: Guide, stop: Collection[int]) -> GuideState:
        """Compile ``guide`` in the background, once; the answer may end with tokens of ``stop`` and the EOS."""
        compiled = self._compiled.get(guide)
        if compiled is None:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, "shardfuse-guide")
            compiled = self._compiled[guide] = self._pool.submit(self._compile, guide)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(guide)
        return GuideState(self, compiled, self._eos.union(stop))

    def close(self) -> None:
        """End the threads and drop all compiled guides."""
        self._compiled.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _compile(self, guide: Guide) -> Any:
        from llguidance import LLMatcher

        with self._lock:
            if self._tokenizer is None:
                self._read_tokenizer()
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(guide), log_level=0)
        except (ValueError, TypeError) as error:  # such as for a text that is not Unicode
            raise GuideRefused(f"guide: this {guide.kind} cannot be compiled: {error}") from None
        matcher.compute_bitmask()  # does llguidance's lazy work here, not in a step
        if matcher.is_error():
            raise GuideRefused(f"guide: this {guide.kind} cannot be compiled: {_said(matcher)}")
        return matcher

    def _read_tokenizer(self) -> None:
        """Sets ``_tokenizer``, ``end`` and ``words``. Takes a second for a vocabulary of 100 000 tokens."""
        from llguidance import LLTokenizer

        copy = type(self._backend).from_str(self._backend.to_str())
        copy.add_special_tokens([_END])
        copy.no_padding()
        copy.no_truncation()
        self.end = copy.token_to_id(_END)
        size = max(self.end + 1, self.vocab_size)
        self.words = -(-size // 32)
        try:
            self._tokenizer = LLTokenizer(copy.to_str(), n_vocab=size, eos_token=self.end)
        except ValueError as error:
            raise ValueError(f"guide: llguidance cannot read the tokenizer's tokens as bytes: {error}") from None


def wait_for(states: Sequence[GuideState]) -> None:
    """Wait a moment for one of ``states`` to be ready, if every live sequence waits for its guide."""
    wait([state.compiled for state in states], _PATIENCE_S, FIRST_COMPLETED)


def masked(logits: torch.Tensor, states: Sequence[GuideState | None]) -> torch.Tensor:
    """A copy of ``logits`` [S, V] with -inf for the tokens that each row's guide, where it has one, does not allow.

    Raises RuntimeError if a guide has become too complex to continue.
    """
    rows = [row for row, state in enumerate(states) if state is not None]
    packed = fill([state for state in states if state is not None], pinned=logits.is_cuda)
    words = packed.to(logits.device, non_blocking=True).unsqueeze(-1)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    refused = ((words >> bits) & 1 == 0).flatten(1)[:, : logits.shape[1]]
    if len(rows) == len(states):
        return logits.masked_fill(refused, float("-inf"))
    at = torch.tensor(rows).to(logits.device, non_blocking=True)
    return logits.index_copy(0, at, logits[at].masked_fill(refused, float("-inf")))


def fill(states: Sequence[GuideState], pinned: bool = False) -> torch.Tensor:
    """The packed masks [S, ceil(V / 32)] int32 of the tokens that may come next; llguidance's threads fill the rows."""
    from llguidance.numpy import fill_next_token_bitmask_par

    guides = states[0].guides
    packed = torch.zeros(len(states), guides.words, dtype=torch.int32, pin_memory=pinned)
    fill_next_token_bitmask_par(_executor(), [(each.matcher, row) for row, each in enumerate(states)], packed.numpy())
    for each in states:
        if each.matcher.is_error():
            raise RuntimeError(f"guide: it cannot go on: {_said(each.matcher)}")
    words, bit = packed.numpy().view(np.uint32), np.uint32(1 << guides.end % 32)
    complete = words[:, guides.end // 32] & bit != 0
    words[:, guides.end // 32] &= ~bit
    for row, each in enumerate(states):
        words[row] = words[row] | each.end_words if complete[row] else words[row] & ~each.end_words
    return packed


@functools.cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor()


def _grammar(guide: Guide) -> str:
    """``guide`` in llguidance's format."""
    from llguidance import LLMatcher

    if guide.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(guide.source, {"whitespace_flexible": guide.any_whitespace})
    if guide.kind == "regex":
        return LLMatcher.grammar_from_regex(guide.source)
    if guide.kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(guide.source))))
    return LLMatcher.grammar_from_lark(guide.source)


def _said(matcher: Any) -> str:
    """llguidance's error message without the description of its own state."""
    return matcher.get_error().partition("\n<state>")[0].strip()[:500]
