"""Guided decoding: llguidance (https://github.com/guidance-ai/llguidance) decides which tokens may come next.

Threads compile guides while steps go on, each guide first on trial in another process (``guide_compiler.py``): only one
that stayed within the limits there is compiled here. In a step llguidance's threads write the masks of all guided
sequences into one packed tensor while a GPU still computes the logits, and one pass applies it to the logits.

llguidance marks the end of a text by a token; this module adds that token to a copy of the tokenizer. So an answer may
end by any of its request's stop tokens, and ends without one if no further token is possible.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch

from ..kernels.runtime.checks import type_name
from .guide import Guide, GuideBusy, GuideRefused
from .guide_compiler import GuideCompiler, Trial
from .guide_process import STACK, Refused, build, said
from .guide_tokenizer import by_number, spelling

_END = "<|shardfuse: the end of a guided answer|>"
_KEPT = 256  # compiled guides without a request
_LONG = 1 << 16  # characters of a refused guide, which is then forgotten
_BUILDERS = 2  # threads
_SHARE = 4  # a guide may take a quarter of the memory that those in use leave
_PATIENCE_S = 0.02  # a step that only waits for a guide


class _Compiled:
    """A guide that is being compiled, or was compiled or refused, and the live answers that need it."""

    def __init__(self, guide: Guide) -> None:
        self.guide = guide
        self.matcher: Future[Any] = Future()
        self.trial: Trial | None = None
        self.users: weakref.WeakSet[GuideState] = weakref.WeakSet()
        self.nbytes = len(guide.source)

    @property
    def failed_once(self) -> bool:
        """Whether it was not compiled, for a reason outside the guide."""
        if not self.matcher.done() or (error := self.matcher.exception()) is None:
            return False
        return isinstance(error, GuideBusy) or not isinstance(error, GuideRefused)

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(InvalidStateError):
            self.matcher.set_exception(error)


class GuideState:
    """The position of one answer in its guide; it moves only with the answer's tokens.

    ``done``: the answer is complete, and no further token is possible. ``ends`` are the tokens that may end it.
    """

    def __init__(self, guides: Guides, compiled: _Compiled, ends: Collection[int]) -> None:
        self.done = False
        self.guides = guides
        self.matcher: Any = None
        self.compiled = compiled
        self.ends = ends if isinstance(ends, frozenset) else frozenset(ends)
        compiled.users.add(self)

    @property
    def ready(self) -> bool:
        """Whether the guide is compiled or refused."""
        return self.compiled.matcher.done()

    def begin(self) -> Exception | None:
        """Take a copy of the guide, which must be compiled or refused; return the reason if it was refused."""
        self.guides.trim()
        try:
            self.matcher = self.compiled.matcher.result().deep_copy()
        except Exception as error:
            return error
        return None

    def advance(self, token: int) -> None:
        """Advance by ``token``, the answer's next one.

        Raises GuideRefused if the guide has become too complex to continue, RuntimeError if it does not accept it.
        """
        if token in self.ends:  # the mask allows it only after a complete answer
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
        other = GuideState(self.guides, self.compiled, self.ends)
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
        bits = np.zeros(self.guides.words * 32, np.uint8)
        ends = np.fromiter(self.ends, np.int64, len(self.ends))
        bits[ends[(ends >= 0) & (ends < self.guides.vocab_size)]] = 1
        return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


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
        self._tokenizer: Any = None
        self._numbers: dict[str, int] = {}  # of added tokens that are no text
        self._compiler: GuideCompiler | None = None
        self._compiled: OrderedDict[Guide, _Compiled] = OrderedDict()  # the least recently used one first
        self._admitting = threading.Lock()
        # The program does not end before their threads do: a thread inside llguidance would crash it.
        self._sender: ThreadPoolExecutor | None = None
        self._builders: ThreadPoolExecutor | None = None

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
        new = compiled is None or compiled.failed_once
        if compiled is None or new:
            compiled = self._compiled[guide] = _Compiled(guide)
        self._compiled.move_to_end(guide)
        state = GuideState(self, compiled, self._eos.union(stop))
        if new:
            self._send(self._begin, compiled)
        return state

    def unused(self, compiled: _Compiled) -> None:
        """Stop the compilation of a guide that no answer needs, and forget it if it is not worth its memory."""
        unfinished = not compiled.matcher.done()
        if unfinished:
            self._send(self._drop, compiled)  # after its trial has begun, if that is under way
        refused = not unfinished and compiled.matcher.exception() is not None
        forgotten = unfinished or (refused and len(compiled.guide.source) > _LONG)
        if forgotten and self._compiled.get(compiled.guide) is compiled:
            del self._compiled[compiled.guide]
        self.trim()

    def trim(self) -> None:
        """Drop the least recently used guides without an answer until the others have room."""
        kept = [each for each in self._compiled.values() if not each.users]
        total = sum(each.nbytes for each in self._compiled.values())
        for number, each in enumerate(kept):
            if total <= self.memory and len(kept) - number <= _KEPT:
                break
            del self._compiled[each.guide]
            total -= each.nbytes

    def close(self) -> None:
        """End the process that compiles, and drop all compiled guides."""
        for pool in (self._sender, self._builders):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.close()
        for each in self._compiled.values():
            each.fail(GuideBusy("guide: the engine is closed"))
        self._compiled.clear()
        self._sender = self._builders = self._compiler = None

    def _in_use(self, but: _Compiled) -> int:
        """The bytes of all guides but one that answers need."""
        return sum(each.nbytes for each in list(self._compiled.values()) if each.users and each is not but)

    def _send(self, work: Callable[[_Compiled], None], compiled: _Compiled) -> None:
        """Run ``work`` in the one thread that talks to the process, which compiles the guides."""
        try:
            if self._sender is None:
                self._sender = ThreadPoolExecutor(1, "shardfuse-guide-sender")
            self._sender.submit(_guarded, work, compiled)
        except RuntimeError as error:  # no thread can be started, or the program ends
            compiled.fail(GuideBusy(f"guide: it cannot be compiled now: {error}"))

    def _begin(self, compiled: _Compiled) -> None:
        """Begin a guide's trial."""
        if not compiled.users:
            raise GuideBusy("guide: its request has ended")
        if self._tokenizer is None:
            self._read_tokenizer()
        if self._compiler is None:
            self._compiler = GuideCompiler(self._first, weakref.WeakMethod(self._again))
        room = max(0, self.memory - self._in_use(compiled))
        done = functools.partial(self._tried, compiled)
        compiled.trial = Trial(
            self._numbered(compiled.guide), room // _SHARE, room, self.memory // _SHARE, self.timeout_s, done
        )
        self._compiler.send(compiled.trial)

    def _again(self, trial: Trial) -> None:
        """Send a trial again whose process ended."""
        for compiled in list(self._compiled.values()):
            if compiled.trial is trial:
                self._send(self._resend, compiled)

    def _resend(self, compiled: _Compiled) -> None:
        trial = compiled.trial  # None once it has ended, which another thread notices
        if self._compiler is not None and trial is not None:
            self._compiler.send(trial)

    def _drop(self, compiled: _Compiled) -> None:
        trial = compiled.trial
        if self._compiler is not None and trial is not None:
            self._compiler.drop(trial)

    def _tried(self, compiled: _Compiled, found: int | Exception) -> None:
        """A trial has ended, with the bytes that the guide took or an error."""
        compiled.trial = None  # which knows this object: an engine that is dropped goes without garbage collection
        if isinstance(found, Exception):
            compiled.fail(found)
            return
        try:
            if self._builders is None:
                self._builders = ThreadPoolExecutor(_BUILDERS, "shardfuse-guide")
            with _STARTING:  # threads with twice the stack that a trial had
                before = threading.stack_size(2 * STACK)
                try:
                    self._builders.submit(_guarded, functools.partial(self._build, found), compiled)
                finally:
                    threading.stack_size(before)
        except RuntimeError as error:
            compiled.fail(GuideBusy(f"guide: it cannot be compiled now: {error}"))

    def _build(self, nbytes: int, compiled: _Compiled) -> None:
        """Compile a guide that took ``nbytes`` on trial."""
        guide = self._numbered(compiled.guide)
        with self._admitting:
            if not compiled.users:
                raise GuideBusy("guide: its request has ended")
            if self._in_use(compiled) + nbytes > self.memory:
                raise GuideBusy(
                    f"guide: this {guide.kind} takes {nbytes >> 20} MiB of memory, and the guides in use leave less: "
                    "try again later"
                )
            compiled.nbytes += nbytes
        try:
            matcher = build(self._tokenizer, guide.kind, guide.source, guide.any_whitespace)
        except Refused as error:
            raise GuideRefused(f"guide: this {guide.kind} cannot be compiled: {error}") from None
        with contextlib.suppress(InvalidStateError):  # the engine was closed
            compiled.matcher.set_result(matcher)

    def _numbered(self, guide: Guide) -> Guide:
        """``guide`` with numbers in the place of tokens' names."""
        return Guide.grammar(by_number(guide.source, self._numbers)) if guide.kind == "grammar" else guide

    def _read_tokenizer(self) -> None:
        """Sets ``_tokenizer``, ``_numbers``, ``_first``, ``end`` and ``words``. Takes a second for a vocabulary of
        100 000 tokens.
        """
        from llguidance import LLTokenizer

        copy = type(self._backend).from_str(self._backend.to_str())
        copy.add_special_tokens([_END])
        copy.no_padding()
        copy.no_truncation()
        self.end = copy.token_to_id(_END)
        size = max(self.end + 1, self.vocab_size)
        self.words = -(-size // 32)
        text, self._numbers = spelling(copy.to_str())
        self._first: dict[str, Any] = {"tokenizer": text, "n_vocab": size, "eos_token": self.end}
        try:
            self._tokenizer = LLTokenizer(self._first["tokenizer"], n_vocab=size, eos_token=self.end)
        except ValueError as error:
            raise ValueError(f"guide: llguidance cannot read the tokenizer's tokens as bytes: {error}") from None


def _guarded(work: Callable[[_Compiled], None], compiled: _Compiled) -> None:
    """Run ``work``; its error is the guide's."""
    try:
        work(compiled)
    except BaseException as error:
        compiled.fail(error)


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
