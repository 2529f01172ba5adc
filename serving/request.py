"""Requests, the events of their tokens, and the state of a request in the engine."""

from __future__ import annotations

import operator
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch

from .guide import GuideRefused
from .guiding import GuideState
from .logit_changes import LogitChanges
from .sampling_params import SamplingParams, plain
from .text import AnswerText

Finish = Literal["length", "stop", "cancelled", "timeout", "error"]


MAX_ANSWERS = 128  # answers of one request


class QueueFull(RuntimeError):
    """The engine's queue has no room for a request: send it again when others have ended."""


@dataclass(frozen=True)
class Request:
    """A prompt to continue. Immutable: it holds copies of ``prompt``, ``stop`` and ``stop_strings``.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: the most tokens of an answer.
        stop: token ids that end the answer, beside the model's own end-of-sequence tokens; the stopping token is its
            last one.
        ignore_eos: whether only ``stop`` and ``stop_strings`` end the answer before ``max_new_tokens``.
        sampling: how tokens are chosen; by default the likeliest one.
        priority: lower ones are served first; equal ones in the order of their arrival.
        arrival: the engine's step at which the request arrives (0: at once).
        timeout_s: the time limit in seconds from :meth:`Engine.add`; then the request ends with the tokens generated so
            far. None: no limit.
        cache_salt: requests with equal salts share the keys and values of equal beginnings. A salt per tenant keeps
            tenants from inferring other tenants' prompts from response times.
        stop_strings: texts that end the answer, in any tokenization; the engine needs a tokenizer. The answer ends with
            the token that completes the first of them.
        include_stop_str_in_output: whether the answer's text includes the stop string.
        n: the number of answers. They share the prompt's keys and values; answer i draws with ``sampling.seed + i``.
        visible_tokens: special tokens whose text the answer has, such as those around a call of a tool.
        client: the client's name. Waiting clients get equal turns, and ``priority`` orders the requests of one client.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 64
    stop: Collection[int] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    arrival: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    stop_strings: Collection[str] = ()
    include_stop_str_in_output: bool = False
    n: int = 1
    ignore_eos: bool = False
    visible_tokens: Collection[int] = ()
    client: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", _copied(self.prompt, tuple))
        object.__setattr__(self, "stop", token_set(self.stop))
        object.__setattr__(self, "visible_tokens", token_set(self.visible_tokens))
        if isinstance(self.stop_strings, Collection) and not isinstance(self.stop_strings, (str, bytes)):
            texts = tuple(self.stop_strings)
            object.__setattr__(self, "stop_strings", tuple(dict.fromkeys(texts)) if _texts(texts) else texts)

    def stops(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        """The tokens that end an answer of a model with these end-of-sequence tokens."""
        stop = self.stop if isinstance(self.stop, frozenset) else frozenset(self.stop)
        return stop if self.ignore_eos or stop.issuperset(eos_token_ids) else stop.union(eos_token_ids)

    def check(self, vocab_size: int) -> None:
        """Raise ValueError for a field of the wrong type or out of range for any engine."""
        _check_tokens("prompt", self.prompt)
        _check_tokens("stop", self.stop)
        _check_tokens("visible_tokens", self.visible_tokens)
        if not self.prompt:
            raise ValueError("prompt is empty: expected at least one token to continue from")
        if not 0 <= min(self.prompt) <= max(self.prompt) < vocab_size:
            position = next(at for at, token in enumerate(self.prompt) if not 0 <= token < vocab_size)
            raise ValueError(
                f"prompt[{position}] is {self.prompt[position]}: expected 0 to {vocab_size - 1}; does the tokenizer "
                "belong to this model?"
            )
        for name in ("max_new_tokens", "priority", "arrival", "n"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: expected a whole number")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: expected at least 1")
        if not 1 <= self.n <= MAX_ANSWERS:
            raise ValueError(f"n={self.n}: expected 1 to {MAX_ANSWERS} answers")
        if self.timeout_s is not None:
            if not isinstance(self.timeout_s, (int, float)) or isinstance(self.timeout_s, bool):
                raise ValueError(f"timeout_s={self.timeout_s!r}: expected a number of seconds, or None")
            if not 0 < self.timeout_s <= sys.float_info.max:
                raise ValueError(f"timeout_s={self.timeout_s}: expected a positive number of seconds, or None")
        for name in ("cache_salt", "client"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected text")
        if not isinstance(self.stop_strings, tuple):
            raise ValueError(f"stop_strings={self.stop_strings!r}: expected a collection of texts, such as ('\\n\\n',)")
        for text in () if _texts(self.stop_strings) and "" not in self.stop_strings else self.stop_strings:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop_strings: one is {text!r}: expected text of at least one character")
        for name in ("include_stop_str_in_output", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected True or False")
        if not isinstance(self.sampling, SamplingParams):
            raise ValueError(f"sampling={self.sampling!r}: expected SamplingParams, such as SamplingParams(top_p=0.9)")
        self.sampling.check(vocab_size)
        if self.sampling.min_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_tokens={self.sampling.min_tokens}: expected at most max_new_tokens={self.max_new_tokens}"
            )


class TokenSet(frozenset[int]):
    """Token ids that need no check of their types, nor a copy."""


def token_set(tokens: Any) -> Any:
    """``tokens`` as a TokenSet, which may be shared by requests. Other values stay, for :meth:`Request.check`."""
    return tokens if isinstance(tokens, TokenSet) else _copied(tokens, TokenSet)


def _copied(tokens: Any, kind: Callable[[Iterable[Any]], Any]) -> Any:
    """``tokens`` as a ``kind`` of ints. Other values stay or are copied, for :meth:`Request.check`."""
    if isinstance(tokens, (str, bytes)):
        return tokens
    try:
        tokens = tuple(tokens)
        return kind(tokens if plain(tokens) else map(_token, tokens))
    except TypeError:
        return tokens


def _texts(values: Collection[Any]) -> bool:
    return set(map(type, values)) <= {str}


def _token(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError("'bool' object is not a token id")
    return operator.index(value)


def _check_tokens(name: str, tokens: Any) -> None:
    """ValueError unless ``tokens`` are whole numbers."""
    if isinstance(tokens, (str, bytes)):
        raise ValueError(f"{name}={tokens!r}: expected token ids, not text; encode it with the model's tokenizer")
    if not isinstance(tokens, (tuple, frozenset)):
        raise ValueError(f"{name}={tokens!r}: expected a collection of token ids, such as [{tokens!r}]")
    if isinstance(tokens, TokenSet) or plain(tokens):
        return
    try:
        for token in tokens:
            _token(token)
    except TypeError as error:
        raise ValueError(f"{name}: expected whole numbers, token ids ({error})") from None


class ScoredToken(NamedTuple):
    """A token of a prompt, its log-probability there, the likeliest tokens' (token, log-probability), and its rank:
    one more than the number of likelier tokens.
    """

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    rank: int


class PromptScores(Sequence[ScoredToken]):
    """The scored tokens of a prompt, as arrays: each is made when it is read. Equal to a tuple of them."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._ranked = array("i")  # of each its rank, and the likeliest tokens
        self._logprobs = array("d")  # of each its own, and those of the likeliest tokens

    def extend(
        self, tokens: Sequence[int], logprobs: torch.Tensor, ranks: torch.Tensor, tops: torch.return_types.topk
    ) -> None:
        """Append ``tokens`` with their ``logprobs`` [T] fp64 and ``ranks`` [T], and the likeliest ones' [T, most], as
        many for each.
        """
        ranked = torch.cat([ranks.unsqueeze(1), tops.indices], 1).to(torch.int32)
        self._tokens.extend(tokens)
        self._ranked.frombytes(ranked.cpu().numpy().tobytes())
        self._logprobs.frombytes(torch.cat([logprobs.unsqueeze(1), tops.values], 1).cpu().numpy().tobytes())

    def first_wrong(self) -> int | None:
        """The first position whose logits had no log-probabilities, because one was NaN or +inf, or all -inf."""
        if not len(self):
            return None
        wrong = np.isnan(np.frombuffer(self._logprobs, np.float64).reshape(len(self), -1)).any(1)
        return int(wrong.argmax()) if wrong.any() else None

    def clear(self) -> None:
        """Forget them all."""
        self.__init__()  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, at: int) -> ScoredToken: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[ScoredToken, ...]: ...
    def __getitem__(self, at: int | slice) -> ScoredToken | tuple[ScoredToken, ...]:
        if isinstance(at, slice):
            return tuple(self[each] for each in range(len(self))[at])
        at = range(len(self))[at]
        width = len(self._ranked) // len(self)
        part = slice(at * width, (at + 1) * width)
        (rank, *likeliest), (logprob, *best) = self._ranked[part], self._logprobs[part]
        return ScoredToken(self._tokens[at], logprob, tuple(zip(likeliest, best)), rank)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, (PromptScores, tuple)) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(slots=True, unsafe_hash=True)  # frozen ones take four times as long to make
class TokenEvent:
    """One generated token of one answer. ``finish`` is the reason if it is the last.

    An answer that was cancelled or timed out ends in an event without a token; so does a failed one, with its
    ``error``. If the request asks for ``logprobs``, ``logprob`` is the token's log-probability and ``top_logprobs``
    holds (token, log-probability) of the likeliest ones. ``index`` numbers the answers of a request with ``n`` > 1; a
    request that ends before its first token does so in one event, with index 0. If ``finish`` is "stop",
    ``stop_reason`` is the token or the stop string that ended the answer; None if a guide allowed no further token.

    With a tokenizer, ``text`` is the text that this token made certain: incomplete characters and a possible beginning
    of a stop string wait for the next tokens or the end. The events' texts together are the answer up to its stop
    string, without special tokens.

    ``prompt_logprobs`` has an entry for each token of the prompt but the first, in the first event of a request that
    asks for them.

    The first event with a token of each answer has ``scheduled``, the time (``time.monotonic()``) at which the engine
    first scheduled it; that of answer 0 has ``cached_tokens``, how many tokens of the prompt it then found in the
    prefix cache. Neither takes part in comparisons: both depend on what was served before.
    """

    request: int
    token: int | None
    finish: Finish | None = None
    error: Exception | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    text: str = ""
    prompt_logprobs: Sequence[ScoredToken] | None = None
    index: int = 0
    stop_reason: int | str | None = None
    cached_tokens: int | None = field(default=None, compare=False)
    scheduled: float | None = field(default=None, compare=False)


@dataclass(eq=False)
class SequenceState:
    """An answer in the engine: the ``index``-th of request ``number``.

    ``tokens`` are the prompt and the generated tokens; the first ``computed`` of them are in the cache. ``hashes`` are
    those of its full blocks, as far as they were needed; the allocator knows the first ``published`` of them. While the
    sequence waits, the keys and values of its first ``kept`` tokens are in host memory. While it runs, it owns ``row``
    of the device's block table, which holds its first ``sent`` blocks. A token of ``stop`` ends it.
    """

    id: int
    request: Request
    tokens: list[int]
    number: int = 0
    index: int = 0
    computed: int = 0
    most_computed: int = 0  # the value of computed before a preemption freed the cache
    hashes: list[bytes] = field(default_factory=list)
    published: int = 0
    kept: int = 0
    row: int = -1
    sent: int = 0
    queued: int = 0  # the answers that it counts for while it waits or is yet to arrive
    arrives: int | None = None  # the engine's step at which it will arrive
    order: float = 0  # the position of its arrival in the queue
    rank: float = 0  # its priority; better after enough overtakes
    due: int = 0  # the number of its client's admissions at that point
    turn: float | None = None  # the virtual time for which its client was charged; -inf once it has run
    scheduled: float | None = None  # the time of its first admission, or of that of the answer it was forked from
    begun: bool = False  # whether its first token was told
    cached: int = 0  # tokens of its prompt in the prefix cache at that time
    text: AnswerText | None = None  # if the engine has a tokenizer
    guide: GuideState | None = None  # if its request has one
    prompt_scores: PromptScores = field(default_factory=lambda: PromptScores())  # from its second token on
    changes: LogitChanges = field(default_factory=LogitChanges)
    stop: frozenset[int] = frozenset()

    @property
    def seed(self) -> int:
        """The seed of its draws, 64 bits."""
        return (self.request.sampling.seed + self.index) % 2**64

    def fork(self, number: int, index: int) -> SequenceState:
        """The ``index``-th answer to the same request, as sequence ``number``, before either has a token."""
        shared: dict[str, Any] = {"stop": self.stop, "changes": self.changes.fork(), "scheduled": self.scheduled}
        if self.guide is not None:
            shared["guide"] = self.guide.fork()
        return SequenceState(number, self.request, list(self.tokens), self.number, index, **shared)

    @property
    def ends(self) -> Collection[int]:
        """The tokens that may end it."""
        return self.stop if self.guide is None else self.guide.ends

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def skippable(self) -> int:
        """The number of its first tokens that need no computing if their keys and values are known.

        The last token must be computed, for the next one's logits; so must each token of a prompt with requested
        log-probabilities.
        """
        if self.request.sampling.prompt_logprobs is not None and len(self.prompt_scores) < len(self.request.prompt) - 1:
            return len(self.prompt_scores)
        return len(self.tokens) - 1

    def accept(self, token: int) -> tuple[Finish | None, str]:
        """Append a generated token; return the reason if this completes the answer, and the new text."""
        self.tokens.append(token)
        if self.guide is not None:
            self.guide.advance(token)
            if self.guide.done and self.generated < (least := self.request.sampling.min_tokens):
                raise GuideRefused(
                    f"guide: it ends the answer after {self.generated} tokens, and min_tokens={least}: lower "
                    "min_tokens, or allow longer answers"
                )
        elif self.text is None:  # of :meth:`finish`, what can be
            if token in self.stop:
                return "stop", ""
            ended = len(self.tokens) - len(self.request.prompt) >= self.request.max_new_tokens
            return "length" if ended else None, ""
        if self.text is None:
            return self.finish(), ""
        text = self.text.push(token)
        if self.finish() is not None:
            text += self.text.flush()
        return self.finish(), text

    def rest(self) -> str:
        """The withheld text, for a request that ends without another token."""
        return "" if self.text is None else self.text.flush()

    @property
    def stop_reason(self) -> int | str | None:
        """The token or the stop string that ends it."""
        if self.generated and (self.tokens[-1] in self.stop or (self.guide and self.tokens[-1] in self.guide.ends)):
            return self.tokens[-1]
        return None if self.text is None else self.text.stop_string

    def finish(self) -> Finish | None:
        """The reason why this sequence is complete, or None."""
        if self.stop_reason is not None or (self.guide is not None and self.guide.done):
            return "stop"
        return "length" if self.generated >= self.request.max_new_tokens else None
