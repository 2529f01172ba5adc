"""Log-probabilities in OpenAI's form for ``/v1/completions``: written as they come, and only their JSON is kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..request import ScoredToken, TokenEvent
from .growing import JsonList
from .served import Served

_FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class Scores:
    """Log-probabilities of an answer's tokens as OpenAI's object, kept as its JSON, after those ``before`` them."""

    def __init__(self, served: Served, before: Scores | None = None) -> None:
        self._served = served
        self._before = before
        self._offset: int = 0 if before is None else before._offset  # of the next token's text
        self._lists = {name: JsonList() for name in _FIELDS}

    def __len__(self) -> int:
        """Bytes, without those before."""
        return sum(map(len, self._lists.values()))

    def add(self, token: int, logprob: float | None, top: Iterable[tuple[int, float]] | None) -> int:
        """Append a token, with the likeliest ones if ``top`` is not None; return the bytes that it takes."""
        size = len(self)
        text, *more = _score(self._served, token, logprob, top)
        for each, value in zip(self._lists.values(), (text, *more, self._offset)):
            each.add(value)
        self._offset += len(text)
        return len(self) - size

    def json(self) -> bytes:
        """OpenAI's object."""
        before = {} if self._before is None else self._before._lists
        parts = [b'"%b":%b' % (name.encode(), each.json(before.get(name))) for name, each in self._lists.items()]
        return b"{%b}" % b",".join(parts)


def prompt_scores(served: Served, prompt: Sequence[int], scored: Iterable[ScoredToken]) -> Scores:
    """Those of a prompt, whose first token has no log-probability."""
    found = Scores(served)
    found.add(prompt[0], None, None)
    for token, logprob, top in scored:
        found.add(token, logprob, ((token, logprob), *top))
    return found


def top_of(event: TokenEvent) -> tuple[tuple[int, Any], ...]:
    assert event.token is not None
    return ((event.token, event.logprob), *event.top_logprobs)


def logprobs(served: Served, event: TokenEvent, offset: int) -> dict[str, Any]:
    """OpenAI's object for the token of ``event``, whose text begins at the answer's ``offset``; empty without one."""
    if event.token is None:
        return {name: [] for name in _FIELDS}
    return {
        name: [value]
        for name, value in zip(_FIELDS, (*_score(served, event.token, event.logprob, top_of(event)), offset))
    }


def _score(served: Served, token: int, logprob: float | None, top: Any) -> tuple[str, float | None, Any]:
    """A token's text, its log-probability, and those of the likeliest tokens' texts."""
    if top is None:
        return served.piece(token), finite(logprob), None
    likeliest: dict[str, float | None] = {}
    for each, score in sorted(top, key=lambda each: -each[1]):
        likeliest.setdefault(served.piece(each), finite(score))  # parts of characters have equal texts
    return served.piece(token), finite(logprob), likeliest


def finite(logprob: float | None) -> float | None:
    """JSON has no infinity and no NaN: impossible tokens get vLLM's -9999."""
    return None if logprob is None or math.isnan(logprob) else max(logprob, -9999.0)
