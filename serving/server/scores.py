"""Log-probabilities in OpenAI's form for ``/v1/completions``, and a prompt's own in vLLM's form: written as they come,
and only their JSON is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from ..request import ScoredToken, TokenEvent
from .errors import invalid
from .growing import JsonList
from .served import Served

T = TypeVar("T")
_LONG = 256  # more scores of a prompt are written beside the event loop
_OPENAI, _VLLM = 32, 64  # bytes of a token and its log-probability in an answer's JSON, at least
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

    @property
    def end(self) -> int:
        """Characters of the tokens' texts, with those before."""
        return self._offset

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


def prompt_bytes(tokens: int, echoed: int | None, asked: int | None) -> int:
    """The least bytes of the scores of a prompt of so many ``tokens``: ``echoed`` likeliest ones of each in OpenAI's
    form, ``asked`` in vLLM's; None: that form is not asked for.
    """
    return tokens * sum(size * (most + 1) for size, most in ((_OPENAI, echoed), (_VLLM, asked)) if most is not None)


def check_prompt_bytes(served: Served, size: int, param: str) -> None:
    """Raise ApiError for more bytes of prompts' scores than an answer may have."""
    if size > (most := served.options.max_answer_bytes):
        raise invalid(
            f"{param} asks for {size} bytes of log-probabilities of the prompt or more: an answer has at most {most} "
            f"(--max-answer-bytes); lower {param} or n, or send a shorter prompt",
            param,
            "answer_too_large",
        )


async def written(
    served: Served,
    form: Callable[[Served, Sequence[int], Sequence[ScoredToken], int], T],
    prompt: Sequence[int],
    scored: Sequence[ScoredToken],
    most: int,
) -> T:
    """A prompt's scores in a ``form``, written beside the event loop if they are many."""
    given = served, prompt, scored, most
    return await served.aside(form, *given) if len(prompt) * (most + 1) > _LONG else form(*given)


def prompt_scores(served: Served, prompt: Sequence[int], scored: Iterable[ScoredToken], most: int) -> Scores:
    """Those of a prompt in OpenAI's form, whose first token has no log-probability, with ``most`` likeliest tokens."""
    found = Scores(served)
    found.add(prompt[0], None, None)
    for token, logprob, top, _ in scored:
        found.add(token, logprob, ((token, logprob), *top[:most]))
    return found


def prompt_logprobs(served: Served, prompt: Sequence[int], scored: Iterable[ScoredToken], most: int) -> bytes:
    """Those of a prompt in vLLM's form: null, then for each token an object with its own id and ``most`` likeliest
    ones. Of tokens with equal scores each has a rank of its own.
    """
    found = JsonList()
    found.add(None)
    for token, logprob, top, rank in scored:
        ranked = {token: (logprob, rank)}
        ranked |= {each: (score, place) for place, (each, score) in enumerate(top[:most], 1)}
        found.add(
            {
                str(each): {"logprob": finite(score), "rank": place, "decoded_token": served.piece(each)}
                for each, (score, place) in ranked.items()
            }
        )
    return found.json()


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
