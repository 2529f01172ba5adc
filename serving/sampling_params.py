"""How the next token is chosen from logits, for one request."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from .guide import Guide


class NoTokenLeft(ValueError):
    """A request's own options exclude every token that could come next."""


@dataclass(frozen=True)
class SamplingParams:
    """The sampling options of a request. The default takes the likeliest token.

    The order is: ``allowed_tokens`` and ``logit_bias``, penalties, ``min_tokens`` and ``bad_words``, ``guide``,
    ``temperature``, ``top_k``, ``top_p``, ``min_p``; each of the last three applies to the renormalised result of the
    one before. ``top_k`` also keeps tokens as likely as the last one that it keeps.

    Args:
        temperature: 0 takes the likeliest token; above 0 samples from softmax(logits / temperature).
        top_k: keep the k likeliest tokens; 0: all.
        top_p: keep the fewest likeliest tokens whose probabilities add up to ``top_p`` (Holtzman et al.,
            arXiv:1904.09751); 1: all.
        min_p: keep tokens at least ``min_p`` times as likely as the likeliest (Nguyen et al., arXiv:2407.01082).
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in the prompt or the answer
            (Keskar et al., arXiv:1909.05858); 1: none.
        presence_penalty: subtracted from the logits of tokens in the answer.
        frequency_penalty: subtracted once for each occurrence of a token in the answer.
        logit_bias: token -> a number added to its logit.
        allowed_tokens: the only tokens that may be chosen; None: all. Held without repetitions.
        min_tokens: how many tokens an answer has before a stop token or a stop string may end it. Stop tokens are not
            chosen before; a stop string that is complete by then is text like any other. A guide that ends the answer
            earlier fails the request.
        bad_words: sequences of token ids; the last token of a sequence is not chosen after the others in the answer. A
            prompt's tokens do not count. Held as a tuple of tuples.
        logprobs: the number of likeliest tokens that an event lists with their log-probabilities, beside the chosen
            one's; all if the vocabulary has fewer; None: no log-probabilities. They belong to the model's own logits,
            before the options above.
        prompt_logprobs: the same for the prompt's own tokens from the second one on, in the request's first event. Such
            a request computes its whole prompt, without the prefix cache.
        guide: the required form of the answer, see :class:`Guide`; the engine needs a tokenizer.
        seed: of the draws. A token's draw depends only on the seed and the number of tokens in the answer, not on other
            requests, ranks, preemptions or devices.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_tokens: Collection[int] | None = None
    logprobs: int | None = None
    seed: int = 0
    prompt_logprobs: int | None = None
    guide: Guide | None = None
    min_tokens: int = 0
    bad_words: Collection[Sequence[int]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed_tokens", _unique(self.allowed_tokens))
        object.__setattr__(self, "bad_words", _sequences(self.bad_words))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @functools.cached_property
    def prepared(self) -> dict[Any, Any]:
        """What is derived from these options once, for all requests that share them."""
        return {}

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens affect the choice."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @functools.cached_property
    def excludes(self) -> bool:
        """Whether an answer's length, or its tokens, may exclude the next one."""
        return bool(self.min_tokens or self.bad_words)

    @functools.cached_property
    def changes_logits(self) -> bool:
        """Whether logits change before a guide applies."""
        return bool(self.penalises or self.logit_bias or self.allowed_tokens or self.excludes)

    @functools.cached_property
    def likeliest(self) -> bool:
        """Whether the token with the largest logit is all that is asked for."""
        return not (self.temperature or self.changes_logits or self.guide is not None or self.logprobs is not None)

    @property
    def filters(self) -> bool:
        """Whether some tokens are excluded by their probability."""
        return (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)

    def check(self, vocab_size: int) -> None:
        """ValueError for a field of the wrong type or out of range."""
        if self.prepared.get("checked") == vocab_size:
            return
        largest = sys.float_info.max
        _number("temperature", self.temperature, 0, largest, "0 (greedy) or a positive number")
        _number("top_p", self.top_p, sys.float_info.min, 1, "a number above 0, at most 1")
        _number("min_p", self.min_p, 0, 1, "0 to 1")
        _number("repetition_penalty", self.repetition_penalty, sys.float_info.min, largest, "a positive number")
        _number("presence_penalty", self.presence_penalty, -largest, largest, "a finite number")
        _number("frequency_penalty", self.frequency_penalty, -largest, largest, "a finite number")
        _whole("top_k", self.top_k, 0, None, "0 (all tokens) or more")
        _whole("seed", self.seed, -(2**63), 2**64 - 1, "a 64-bit integer")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, None, "None, or 0 or more")
        _whole("min_tokens", self.min_tokens, 0, None, "0 or more")
        if self.guide is not None and not isinstance(self.guide, Guide):
            raise ValueError(f"guide={self.guide!r}: expected a Guide, such as Guide.regex('[0-9]+')")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(f"logit_bias={self.logit_bias!r}: expected a dictionary from tokens to numbers")
            if not (_inside(self.logit_bias, vocab_size) and _finite(self.logit_bias.values())):
                for token, bias in self.logit_bias.items():
                    _whole("logit_bias: a token", token, 0, vocab_size - 1, f"0 to {vocab_size - 1}")
                    _number(f"logit_bias[{token}]", bias, -largest, largest, "a finite number")
        if self.allowed_tokens is not None:
            if isinstance(self.allowed_tokens, (str, bytes)) or not isinstance(self.allowed_tokens, Collection):
                raise ValueError(f"allowed_tokens={self.allowed_tokens!r}: expected a collection of token ids")
            if not self.allowed_tokens:
                raise ValueError("allowed_tokens is empty: expected at least one token, or None for all")
            for token in () if _inside(self.allowed_tokens, vocab_size) else self.allowed_tokens:
                _whole("allowed_tokens: a token", token, 0, vocab_size - 1, f"0 to {vocab_size - 1}")
        self._check_bad_words(vocab_size)
        self.prepared["checked"] = vocab_size

    def _check_bad_words(self, vocab_size: int) -> None:
        if not isinstance(self.bad_words, tuple):
            raise ValueError(f"bad_words={self.bad_words!r}: expected a collection of sequences of token ids")
        for word in self.bad_words:
            if not isinstance(word, tuple):
                raise ValueError(f"bad_words: one is {word!r}: expected token ids, by the model's tokenizer")
            if not word:
                raise ValueError("bad_words: one has no token: expected at least one")
            for token in () if _inside(word, vocab_size) else word:
                _whole("bad_words: a token", token, 0, vocab_size - 1, f"0 to {vocab_size - 1}")


def plain(tokens: Iterable[Any]) -> bool:
    """Whether all of ``tokens`` are Python's own integers, found without a look at each from Python."""
    return set(map(type, tokens)) <= {int}


def _unique(tokens: Any) -> Any:
    """``tokens`` once each, in their order, immutable. Other values stay, for :meth:`SamplingParams.check`."""
    if isinstance(tokens, (range, str, bytes)) or not isinstance(tokens, Collection) or not plain(tokens):
        return tokens
    return frozenset(tokens) if isinstance(tokens, Set) else tuple(dict.fromkeys(tokens))


def _sequences(words: Any) -> Any:
    """``words`` as a tuple of tuples. What is no collection stays, for :meth:`SamplingParams.check`."""

    def copied(given: Any) -> Any:
        return tuple(given) if isinstance(given, Collection) and not isinstance(given, (str, bytes)) else given

    words = copied(words)
    return tuple(map(copied, words)) if isinstance(words, tuple) else words


def _inside(tokens: Collection[Any], vocab_size: int) -> bool:
    """Whether all of ``tokens`` are plain integers of the vocabulary."""
    if isinstance(tokens, range):
        tokens = (tokens[0], tokens[-1]) if tokens else ()
    return not tokens or (plain(tokens) and 0 <= min(tokens) <= max(tokens) < vocab_size)


def _finite(values: Collection[Any]) -> bool:
    """Whether all of ``values`` are plain finite numbers."""
    try:
        return set(map(type, values)) <= {int, float} and all(map(math.isfinite, values))
    except OverflowError:
        return False


def _number(name: str, value: Any, least: float, most: float, expected: str) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: expected a number")
    if not least <= value <= most or math.isnan(value):
        raise ValueError(f"{name}={value}: expected {expected}")


def _whole(name: str, value: Any, least: int, most: int | None, expected: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: expected a whole number")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name}={value}: expected {expected}")
