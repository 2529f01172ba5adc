"""``/v1/completions``: completions of prompts, given as text or tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..request import Request, ScoredToken, TokenEvent
from . import protocol, translate
from .errors import invalid
from .metrics import AnswerTimes
from .served import TOLD, Served, Usage

MAX_PROMPTS = 1024  # choices of one HTTP request
USUAL_TOKENS = 16  # of an answer, by OpenAI's API


@dataclass
class Answer:
    """One choice during generation: the text so far, and where the next chunk begins."""

    prompt: int  # its position among the prompts
    index: int
    times: AnswerTimes
    text: str = ""
    offset: int = 0  # of the next token's text, for streamed log-probabilities
    finish: str | None = None
    stop_reason: int | str | None = None
    events: list[TokenEvent] = field(default_factory=list)

    def end(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.finish, self.stop_reason = reason, stop_reason
        self.times.end(reason)


class Answers:
    """All answers to some ``requests``, in the order of OpenAI's choices: those of the first prompt first.

        async with Answers(served, requests) as answers:  # queued, all or none
            async for answer, event in answers:  # each event after its answer took it
                ...

    Both raise ApiError; the end of the block cancels unfinished answers.
    """

    def __init__(self, served: Served, requests: Sequence[Request]) -> None:
        self._served = served
        self._requests = requests
        arrived = time.monotonic()
        self.all = [
            Answer(position, index, AnswerTimes(served.metrics, arrived, len(each.prompt), index == 0))
            for position, each in enumerate(requests)
            for index in range(each.n)
        ]
        self._held: list[tuple[int, TokenEvent]] = []  # events received and not taken yet
        self._first = [0]
        for each in requests:
            self._first.append(self._first[-1] + each.n)

    def number(self, answer: Answer) -> int:
        """The index of its choice."""
        return self._first[answer.prompt] + answer.index

    @property
    def usage(self) -> Usage:
        return Usage(sum(len(each.prompt) for each in self._requests), sum(each.times.tokens for each in self.all))

    async def __aenter__(self) -> Answers:
        self._submitted = await self._served.submit(self._requests)
        for each in self._requests:
            self._served.metrics.arrived(each.n, each.max_new_tokens)
        if any(each.sampling.guide is not None for each in self._requests):
            try:  # a guide that cannot be compiled has its own error status, in a stream as well
                position, event = await self._submitted.__anext__()
                self._held.append((position, event))
                if event.error is not None:
                    self._take(position, event)
            except BaseException:
                await self.__aexit__()
                raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._submitted.cancel()
        for answer in self.all:
            if answer.finish is None:
                answer.end("abort")
        if (told := TOLD.get(None)) is not None:
            told |= {**self.usage.json(), "finish": ",".join(sorted({str(answer.finish) for answer in self.all}))}

    async def __aiter__(self) -> AsyncIterator[tuple[Answer, TokenEvent]]:
        for position, event in self._held:
            yield self._take(position, event), event
        async for position, event in self._submitted:
            yield self._take(position, event), event

    def _take(self, position: int, event: TokenEvent) -> Answer:
        answer = self.all[self._first[position] + event.index]
        if event.error is not None or event.finish in ("cancelled", "timeout"):
            answer.end("abort" if event.error is None else "error")
            self._served.check(event)
        answer.text += event.text
        if event.token is not None:
            answer.times.token()
        if event.finish is not None:
            answer.end(event.finish, event.stop_reason)
        return answer


async def requests_of(served: Served, body: protocol.CompletionRequest, tenant: str) -> list[Request]:
    """The engine's requests, one for each prompt. Raises ApiError."""
    if body.best_of not in (None, body.n):
        raise invalid(f"best_of={body.best_of} and n={body.n}: answers are not ranked here: omit best_of", "best_of")
    if body.stream and body.echo and body.logprobs is not None:
        raise invalid("echo with logprobs is not streamed: set stream or echo to false", "echo")
    prompts = await _prompts(served, body)
    guide = translate.guide(body)
    # With max_tokens=0 the engine still generates one token, and the answer omits it.
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens=0 without echo: expected at least 1", "max_tokens")
    scores = body.logprobs if body.echo else None
    params = translate.sampling(served, body, body.logprobs, guide, prompt_logprobs=scores)
    lengths = [translate.length(served, body.max_tokens, USUAL_TOKENS, len(prompt)) for prompt in prompts]
    return [
        translate.request(served, body, prompt, max(1, length), params, tenant)
        for prompt, length in zip(prompts, lengths)
    ]


async def _prompts(served: Served, body: protocol.CompletionRequest) -> list[list[int]]:
    given: list[Any]
    if isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int)):
        given = [body.prompt]
    else:
        given = list(body.prompt)
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise invalid(f"prompt: {len(given)} prompts: expected 1 to {MAX_PROMPTS}", "prompt")
    found = []
    for each in given:
        await asyncio.sleep(0)  # lets other requests run
        tokens = await served.encode(each, body.add_special_tokens) if isinstance(each, str) else list(each)
        served.check_tokens(tokens, "prompt")
        found.append(tokens)
    return found


async def complete(served: Served, body: protocol.CompletionRequest, name: str, tenant: str) -> dict[str, Any]:
    """The whole answer."""
    requests = await requests_of(served, body, tenant)
    async with Answers(served, requests) as answers:
        async for answer, event in answers:
            if body.logprobs is not None:
                answer.events.append(event)
    # A prompt's first event carries its scores, which all of its answers show.
    scores = {
        answer.prompt: event.prompt_logprobs
        for answer in answers.all
        for event in answer.events
        if event.prompt_logprobs is not None
    }
    choices = [
        _choice(served, body, requests[answer.prompt], answer, answers.number(answer), scores.get(answer.prompt, ()))
        for answer in answers.all
    ]
    return {**_head(served, name), "choices": choices, "usage": _usage(body, answers).json()}


async def stream(
    served: Served, body: protocol.CompletionRequest, name: str, tenant: str
) -> AsyncIterator[dict[str, Any] | None]:
    """The chunks of a stream. The first is None, sent once the request itself is known to be valid."""
    requests = await requests_of(served, body, tenant)
    head = _head(served, name)
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    rest: dict[str, Any] = {"usage": None} if with_usage else {}
    begun: set[int] = set()
    async with Answers(served, requests) as answers:
        yield None
        async for answer, event in answers:
            number = answers.number(answer)
            text = "" if body.max_tokens == 0 else event.text
            if body.echo and number not in begun:
                text = served.decode(requests[answer.prompt].prompt) + text
            begun.add(number)
            scores = None
            if body.logprobs is not None:
                scores = logprobs(served, [event], answer.offset)
                answer.offset += sum(map(len, scores["tokens"]))
            if text or event.finish is not None or scores is not None:
                choice = {
                    "index": number,
                    "text": text,
                    "logprobs": scores,
                    "finish_reason": _finish(body, event.finish),
                    "stop_reason": None if body.max_tokens == 0 else event.stop_reason,
                }
                yield {**head, "choices": [choice], **rest}
    if with_usage:
        yield {**head, "choices": [], "usage": _usage(body, answers).json()}


def _usage(body: protocol.CompletionRequest, answers: Answers) -> Usage:
    usage = answers.usage
    if body.max_tokens == 0:
        usage.completion = 0
    return usage


def _head(served: Served, name: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{name}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": served.options.name,
    }


def _choice(
    served: Served,
    body: protocol.CompletionRequest,
    request: Request,
    answer: Answer,
    number: int,
    prompt_scores: Sequence[ScoredToken],
) -> dict[str, Any]:
    events, text = ([], "") if body.max_tokens == 0 else (answer.events, answer.text)
    before = served.decode(request.prompt) if body.echo else ""
    scores = None
    if body.logprobs is not None:
        scores = logprobs(served, events, 0)
        if body.echo:
            scores = _echoed(served, request.prompt, prompt_scores, scores)
    return {
        "index": number,
        "text": before + text,
        "logprobs": scores,
        "finish_reason": _finish(body, answer.finish),
        "stop_reason": None if body.max_tokens == 0 else answer.stop_reason,
    }


def _finish(body: protocol.CompletionRequest, why: str | None) -> str | None:
    return "length" if why is not None and body.max_tokens == 0 else why


def logprobs(served: Served, events: Sequence[TokenEvent], offset: int) -> dict[str, Any]:
    """The log-probabilities of generated tokens as OpenAI's object; their text begins at the answer's ``offset``."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in events:
        if event.token is None:
            continue
        text = served.decode([event.token])
        _score(served, found, text, event.logprob, [(event.token, event.logprob), *event.top_logprobs], offset)
        offset += len(text)
    return found


def _score(served: Served, found: dict[str, Any], text: str, logprob: Any, top: Any, offset: int) -> None:
    found["tokens"].append(text)
    found["token_logprobs"].append(finite(logprob))
    likeliest: dict[str, float | None] = {}
    for token, score in sorted(top or (), key=lambda each: -each[1]):
        likeliest.setdefault(served.decode([token]), finite(score))  # parts of characters have equal texts
    found["top_logprobs"].append(None if top is None else likeliest)
    found["text_offset"].append(offset)


def finite(logprob: float | None) -> float | None:
    """JSON has no infinity: impossible tokens get vLLM's -9999."""
    return None if logprob is None else max(logprob, -9999.0)


def _echoed(served: Served, prompt: Sequence[int], scores: Any, after: dict[str, Any]) -> dict[str, Any]:
    """Put the prompt's tokens before those of the answer; the first token has no log-probability."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    offset = 0
    first = served.decode(prompt[:1])
    _score(served, found, first, None, None, 0)
    offset += len(first)
    for score in scores:
        text = served.decode([score.token])
        _score(served, found, text, score.logprob, [(score.token, score.logprob), *score.top_logprobs], offset)
        offset += len(text)
    after["text_offset"] = [offset + each for each in after["text_offset"]]
    return {name: found[name] + after[name] for name in found}
