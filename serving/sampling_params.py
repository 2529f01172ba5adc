"""How the next token is chosen from logits, for one request."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from .guide import Guide

MAX_LOGPROBS = 64


@dataclass(frozen=True)
class SamplingParams:
    """The sampling options of a request. The default takes the likeliest token.

    The order is: ``allowed_tokens`` and ``logit_bias``, penalties, ``guide``, ``temperature``, ``top_k``, ``top_p``,
    ``min_p``; each of the last three applies to the renormalised result of the one before. ``top_k`` also keeps tokens
    as likely as the last one that it keeps.

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
        logprobs: the number of likeliest tokens that an event lists with their log-probabilities, beside the chosen
            one's; None: no log-probabilities. They belong to the model's own logits, before the options above.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed_tokens", _unique(self.allowed_tokens))
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
    def likeliest(self) -> bool:
        """Whether the token with the largest logit is all that is asked for."""
        changed = self.penalises or self.logit_bias or self.allowed_tokens or self.guide is not None
        return not (self.temperature or changed or self.logprobs is not None)

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
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS, f"None or 0 to {MAX_LOGPROBS}")
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
        self.prepared["checked"] = vocab_size


def plain(tokens: Iterable[Any]) -> bool:
    """Whether all of ``tokens`` are Python's own integers, found without a look at each from Python."""
    return set(map(type, tokens)) <= {int}


def _unique(tokens: Any) -> Any:
    """``tokens`` once each, in their order, immutable. Other values stay, for :meth:`SamplingParams.check`."""
    if isinstance(tokens, (range, str, bytes)) or not isinstance(tokens, Collection) or not plain(tokens):
        return tokens
    return frozenset(tokens) if isinstance(tokens, Set) else tuple(dict.fromkeys(tokens))


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
