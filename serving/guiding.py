"""Guided decoding: llguidance (https://github.com/guidance-ai/llguidance) decides which tokens may come next.

Threads compile guides while steps go on, each guide first on trial in another process (``guide_compiler.py``): only one
that stayed within the limits there is compiled here. In a step llguidance's threads write the masks of all guided
sequences into one packed tensor while a GPU still computes the logits, and one pass applies it to the logits.

llguidance marks the end of a text by a token; this module adds that token to a copy of the tokenizer. So an answer may
end by any of its request's stop tokens, and ends without one if no further token is possible.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np
import torch

from ..kernels.runtime.checks import type_name
from .guide import Guide, GuideBusy, GuideRefused
from .guide_compiler import GuideCompiler, Trial
from .guide_process import STACK, build, said

_END = "<|shardfuse: the end of a guided answer|>"
_KEPT = 256  # compiled guides without a request
_LONG = 1 << 16  # characters of a refused guide, which is then forgotten
_SHARE = 4  # a guide may take a quarter of the memory that those in use leave
_PATIENCE_S = 0.02  # a step that only waits for a guide


class _Compiled:
    """A guide that is being compiled, or was compiled or refused, and the live answers that need it."""

    def __init__(self, guide: Guide) -> None:
        self.guide = guide
        self.matcher: Future[Any] = Future()
        self.trial = Trial()
        self.users: weakref.WeakSet[GuideState] = weakref.WeakSet()
        self.nbytes = len(guide.source)

    @property
    def failed_once(self) -> bool:
        """Whether it was not compiled, for a reason outside the guide."""
        if not self.matcher.done() or (error := self.matcher.exception()) is None:
            return False
        return isinstance(error, GuideBusy) or not isinstance(error, GuideRefused)


class GuideState:
    """The position of one answer in its guide; it moves only with the answer's tokens.

    ``done``: the answer is complete, and no further token is possible.
    """

    def __init__(self, guides: Guides, compiled: _Compiled, ends: Collection[int]) -> None:
        self.done = False
        self.guides = guides
        self.matcher: Any = None
        self.compiled = compiled
        self._ends = frozenset(ends)
        compiled.users.add(self)

    @property
    def ready(self) -> bool:
        """Whether the guide is compiled or refused."""
        return self.compiled.matcher.done()

    def begin(self) -> Exception | None:
        """Take a copy of the guide, which must be compiled or refused; return the reason if it was refused."""
        try:
            self.matcher = self.compiled.matcher.result().deep_copy()
        except Exception as error:
            return error
        return None

    def advance(self, token: int) -> None:
        """Advance by ``token``, the answer's next one.

        Raises GuideRefused if the guide has become too complex to continue, RuntimeError if it does not accept it.
        """
        if token in self._ends:  # the mask allows it only after a complete answer
            self.done = True
        elif not self.matcher.consume_token(token):
            why = said(self.matcher)
            if "doesn't satisfy the grammar" in why or "parser stopped" in why:
                raise RuntimeError(f"guide: token {token} is refused: {why}")
            raise GuideRefused(f"guide: it cannot go on: {why}")
        else:
            self.done = self.matcher.is_stopped()

    def fork(self) -> GuideState:
        """A copy for another answer that continues from this position."""
        other = GuideState(self.guides, self.compiled, self._ends)
        other.done = self.done
        other.matcher = None if self.matcher is None else self.matcher.deep_copy()
        return other

    def leave(self) -> None:
        """The answer has ended. A guide that no answer needs is compiled no longer, or kept while there is room."""
        self.matcher = None
        self.compiled.users.discard(self)
        if not self.compiled.users:
            self.guides.unused(self.compiled)

    @functools.cached_property
    def end_words(self) -> np.ndarray:
        """The packed mask [ceil(V / 32)] uint32 of the tokens that may follow a complete answer only."""
        words = np.zeros(self.guides.words, np.uint32)
        for token in self._ends:
            if 0 <= token < self.guides.vocab_size:
                words[token // 32] |= np.uint32(1 << token % 32)
        return words


class Guides:
    """Compiles guides for one tokenizer and a model with logits of ``vocab_size`` tokens.

    One guide may compile for ``timeout_s`` of processor time. All that are in use, compile or are kept for later take
    at most ``memory`` bytes together.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, timeout_s: float = 10.0, memory: int = 1 << 30) -> None:
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"guide_timeout_s={timeout_s!r}: expected a positive number of seconds")
        self.vocab_size = vocab_size
        self.words = 0  # of a mask, once a guide is compiled
        self.end = 0  # llguidance's end token
        self.timeout_s, self.memory = timeout_s, memory
        self._backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._kind = type_name(tokenizer)
        eos = getattr(tokenizer, "eos_token_id", None)
        self._eos = frozenset() if eos is None else frozenset([eos])
        self._lock = threading.Lock()  # guards the next three attributes
        self._tokenizer: Any = None
        self._first: dict[str, Any] = {}  # what the process that compiles needs of the tokenizer
        self._compiler: GuideCompiler | None = None
        self._compiled: OrderedDict[Guide, _Compiled] = OrderedDict()  # the least recently used one first

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
        if compiled is None or compiled.failed_once:
            room = max(0, self.memory - sum(each.nbytes for each in self._compiled.values() if each.users))
            compiled = self._compiled[guide] = _Compiled(guide)
            _in_thread(functools.partial(self._compile, compiled, room))
        self._compiled.move_to_end(guide)
        return GuideState(self, compiled, self._eos.union(stop))

    def unused(self, compiled: _Compiled) -> None:
        """Stop the compilation of a guide that no answer needs; drop the least recently used ones without room."""
        if not compiled.matcher.done():
            compiled.trial.give_up()
            self._compiled.pop(compiled.guide, None)
        elif compiled.matcher.exception() is not None and len(compiled.guide.source) > _LONG:
            self._compiled.pop(compiled.guide, None)
        kept = [each for each in self._compiled.values() if not each.users]
        total = sum(each.nbytes for each in self._compiled.values())
        for number, each in enumerate(kept):
            if total <= self.memory and len(kept) - number <= _KEPT:
                break
            del self._compiled[each.guide]
            total -= each.nbytes

    def close(self) -> None:
        """End the process that compiles, and drop all compiled guides."""
        self._compiled.clear()
        with self._lock:
            if self._compiler is not None:
                self._compiler.close()
            self._compiler = None

    def _compile(self, compiled: _Compiled, room: int) -> None:
        """In a thread: compile a guide on trial, and then here. ``room`` is what guides in use leave, in bytes."""
        guide = compiled.guide
        try:
            with self._lock:
                if self._tokenizer is None:
                    self._read_tokenizer()
                if self._compiler is None:
                    self._compiler = GuideCompiler(self._first, self.timeout_s)
                compiler = self._compiler
            compiled.nbytes += compiler.compile(compiled.trial, guide, room // _SHARE, room, self.memory // _SHARE)
            matcher = build(self._tokenizer, guide.kind, guide.source, guide.any_whitespace)
        except BaseException as error:
            compiled.matcher.set_exception(error)
        else:
            compiled.matcher.set_result(matcher)

    def _read_tokenizer(self) -> None:
        """Sets ``_tokenizer``, ``_first``, ``end`` and ``words``. Takes a second for a vocabulary of 100 000 tokens."""
        from llguidance import LLTokenizer

        copy = type(self._backend).from_str(self._backend.to_str())
        copy.add_special_tokens([_END])
        copy.no_padding()
        copy.no_truncation()
        self.end = copy.token_to_id(_END)
        size = max(self.end + 1, self.vocab_size)
        self.words = -(-size // 32)
        self._first = {"tokenizer": copy.to_str(), "n_vocab": size, "eos_token": self.end}
        try:
            self._tokenizer = LLTokenizer(self._first["tokenizer"], n_vocab=size, eos_token=self.end)
        except ValueError as error:
            raise ValueError(f"guide: llguidance cannot read the tokenizer's tokens as bytes: {error}") from None


def _in_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in a thread that cannot keep the process alive, with twice the stack that a trial had."""
    with _STARTING:
        before = threading.stack_size(2 * STACK)
        try:
            threading.Thread(target=work, name="shardfuse-guide", daemon=True).start()
        finally:
            threading.stack_size(before)


_STARTING = threading.Lock()


def wait_for(states: Sequence[GuideState]) -> None:
    """Wait a moment for one of ``states`` to be ready, if every live sequence waits for its guide."""
    wait([state.compiled.matcher for state in states], _PATIENCE_S, FIRST_COMPLETED)


def masked(logits: torch.Tensor, states: Sequence[GuideState | None]) -> torch.Tensor:
    """A copy of ``logits`` [S, V] with -inf for the tokens that each row's guide, where it has one, does not allow.

    Raises GuideRefused if a guide has become too complex to continue.
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
            raise GuideRefused(f"guide: it cannot go on: {said(each.matcher)}")
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
