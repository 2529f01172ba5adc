"""``/v1/completions``: completions of prompts, given as text or tokens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..aio import SlowReader
from ..request import Request, TokenEvent
from . import protocol, translate
from .errors import explained, invalid
from .growing import JsonList, Piece, body_of, size_of, with_fields
from .metrics import AnswerTimes
from .scores import (
    Scores,
    check_prompt_bytes,
    logprobs,
    prompt_bytes,
    prompt_logprobs,
    prompt_scores,
    top_of,
    written,
)
from .served import TOLD, Caller, Served, Usage

USUAL_TOKENS = 16  # of an answer, by OpenAI's API
_LESS = "ask for less of n, max_tokens, logprobs or prompt_logprobs, or stream it without the latter"


@dataclass
class Answer:
    """One choice during generation. ``text``, ``ids`` and ``scores`` are those of an answer that is not streamed."""

    prompt: int  # its position among the prompts
    index: int
    times: AnswerTimes
    text: list[str] = field(default_factory=list)
    ids: JsonList = field(default_factory=JsonList)
    scores: Scores | None = None
    offset: int = 0  # of the next token's text, for streamed log-probabilities
    finish: str | None = None
    stop_reason: int | str | None = None

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
        self._bytes = 0  # of an answer that is not streamed
        self._cached = [0] * len(requests)  # tokens of each prompt that were in the prefix cache
        self._first = [0]
        for each in requests:
            self._first.append(self._first[-1] + each.n)

    def number(self, answer: Answer) -> int:
        """The index of its choice."""
        return self._first[answer.prompt] + answer.index

    @property
    def usage(self) -> Usage:
        prompt = sum(len(each.prompt) for each in self._requests)
        return Usage(prompt, sum(each.times.tokens for each in self.all), sum(self._cached))

    def usage_of(self, answer: Answer) -> Usage:
        """That of ``answer`` so far, with its prompt."""
        return Usage(len(self._requests[answer.prompt].prompt), answer.times.tokens, self._cached[answer.prompt])

    def keep(self, size: int, instead: str = _LESS) -> None:
        """Count ``size`` more bytes to be held until the end. Raises ApiError, which says what to do ``instead``, above
        the server's limit.
        """
        self._bytes += size
        if self._bytes > (most := self._served.options.max_answer_bytes):
            raise invalid(
                f"the answer has more than {most} bytes (--max-answer-bytes): {instead}",
                code="answer_too_large",
            )

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
        for first, end in zip(self._first, self._first[1:]):
            self._served.metrics.longest.observe(max(each.times.tokens for each in self.all[first:end]))
        if (told := TOLD.get(None)) is not None:
            told |= {**self.usage.json(), "finish": ",".join(sorted({str(answer.finish) for answer in self.all}))}

    async def __aiter__(self) -> AsyncIterator[tuple[Answer, TokenEvent]]:
        for position, event in self._held:
            yield self._take(position, event), event
        try:
            async for position, event in self._submitted:
                yield self._take(position, event), event
        except SlowReader as error:
            raise explained(error) from error

    def _take(self, position: int, event: TokenEvent) -> Answer:
        answer = self.all[self._first[position] + event.index]
        if event.error is not None or event.finish in ("cancelled", "timeout"):
            answer.end("abort" if event.error is None else "error")
            self._served.check(event)
        if event.scheduled is not None:
            answer.times.begin(event.scheduled, event.cached_tokens)
            self._cached[position] += event.cached_tokens or 0
        if event.token is not None:
            answer.times.token()
        if event.finish is not None:
            answer.end(event.finish, event.stop_reason)
        return answer


async def requests_of(served: Served, body: protocol.CompletionRequest, caller: Caller) -> list[Request]:
    """The engine's requests, one for each prompt. Raises ApiError."""
    translate.check(body)
    if body.best_of not in (None, body.n):
        raise invalid(
            f"best_of={body.best_of} and n={body.n}: answers are not ranked here, and beam search is not supported: "
            "omit best_of",
            "best_of",
        )
    # With max_tokens=0 the engine still generates one token, and the answer omits it.
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens=0 without echo: expected at least 1", "max_tokens")
    given = _prompts(body)
    if not given:
        raise invalid("prompt: no prompt: expected one at least", "prompt")
    served.check_answers(len(given) * body.n)
    answered = served.logprobs(body.logprobs, "logprobs")
    echoed = answered if body.echo else None
    asked = served.logprobs(body.prompt_logprobs, "prompt_logprobs")
    more = {
        "prompt_logprobs": max((each for each in (echoed, asked) if each is not None), default=None),
        "bad_words": await translate.bad_words(served, body),
    }
    form = translate.Form(served, body, caller, answered, translate.guide(served, body), **more)
    room = max(1, USUAL_TOKENS if body.max_tokens is None else body.max_tokens)
    most = translate.most_encoded(served, body)
    found, size = [], 0
    for each in given:
        await asyncio.sleep(0)  # lets other requests run
        if not isinstance(each, str):
            served.check_tokens(each, "prompt")
        special = isinstance(each, str) and body.add_special_tokens
        tokens = await served.encode(each, special, most) if isinstance(each, str) else each
        tokens = translate.truncated(served, body, tokens, room, special)
        size += prompt_bytes(len(tokens), echoed, asked) * (1 if body.stream else body.n)
        check_prompt_bytes(served, size, "prompt_logprobs" if echoed is None else "logprobs")
        found.append(form.request(tokens, body.max_tokens, USUAL_TOKENS, least=1))
    return found


def _prompts(body: protocol.CompletionRequest) -> list[str | list[int]]:
    """The prompts of ``body``, each as its text or its tokens."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    prompts: Any = body.prompt
    return [prompts] if prompts and isinstance(prompts[0], int) else list(prompts)


@dataclass
class Shown:
    """What the answers to one prompt show of it, as far as the body asks: its text, its tokens' ids as JSON, and its
    scores in OpenAI's and in vLLM's form.
    """

    text: str
    ids: bytes
    scores: Scores | None = None
    logprobs: bytes | None = None

    def __len__(self) -> int:
        """Bytes, at most, without the scores."""
        return size_of(self.text) + len(self.ids)

    async def score(self, served: Served, body: protocol.CompletionRequest, request: Request, event: TokenEvent) -> int:
        """Take the scores of the prompt that ``event`` has; return the bytes that they take."""
        scored, echoed = event.prompt_logprobs or (), request.sampling.logprobs
        if body.echo and echoed is not None:
            self.scores = await written(served, prompt_scores, request.prompt, scored, echoed)
        asked = served.logprobs(body.prompt_logprobs, "prompt_logprobs")
        if asked is not None:
            self.logprobs = await written(served, prompt_logprobs, request.prompt, scored, asked)
        return len(self.scores or ()) + len(self.logprobs or b"")


async def _shown(served: Served, body: protocol.CompletionRequest, requests: Sequence[Request]) -> list[Shown]:
    found = []
    for given, each in zip(_prompts(body), requests):
        await asyncio.sleep(0)
        shown = ""
        if body.echo:  # as it was given, unless it was cut
            whole = body.truncate_prompt_tokens is None
            shown = given if whole and isinstance(given, str) else await served.text(each.prompt)
        found.append(Shown(shown, json.dumps(each.prompt).encode() if body.return_token_ids else b""))
    return found


async def complete(served: Served, body: protocol.CompletionRequest, caller: Caller) -> list[bytes]:
    """The whole answer, in pieces of its JSON."""
    requests = await requests_of(served, body, caller)
    shown = await _shown(served, body, requests)
    async with Answers(served, requests) as answers:
        answers.keep(body.n * sum(map(len, shown)))
        async for answer, event in answers:
            of = shown[answer.prompt]
            if event.prompt_logprobs is not None:  # in a prompt's first event; all of its answers show them
                answers.keep(body.n * await of.score(served, body, requests[answer.prompt], event))
            if body.max_tokens == 0:
                continue
            answer.text.append(event.text)
            answers.keep(size_of(event.text))
            if body.return_token_ids and event.token is not None:
                answers.keep(answer.ids.add(event.token))
            if body.logprobs is not None:
                if answer.scores is None:
                    answer.scores = Scores(served, of.scores)
                if event.token is not None:
                    answers.keep(answer.scores.add(event.token, event.logprob, top_of(event)))
    choices = []
    for answer in answers.all:
        await asyncio.sleep(0)
        of = shown[answer.prompt]
        choice = {
            "index": answers.number(answer),
            "text": of.text + "".join(answer.text),
            "finish_reason": _finish(body, answer.finish),
            "stop_reason": None if body.max_tokens == 0 else answer.stop_reason,
        }
        scores = of.scores if answer.scores is None else answer.scores
        more = {
            "logprobs": b"null" if scores is None else scores.json(),
            "prompt_logprobs": of.logprobs or b"null",
            "token_ids": answer.ids.json() if body.return_token_ids else b"null",
            "prompt_token_ids": of.ids or b"null",
        }
        choices.append(with_fields(choice, **more))
    return body_of(_head(served, caller.name), choices, _usage(body, answers.usage).json())


async def stream(
    served: Served, body: protocol.CompletionRequest, caller: Caller
) -> AsyncIterator[dict[str, Any] | list[Piece] | None]:
    """The chunks of a stream. The first is None, sent once the request itself is known to be valid."""
    requests = await requests_of(served, body, caller)
    shown = await _shown(served, body, requests)
    head = _head(served, caller.name)
    options = body.stream_options or protocol.StreamOptions()
    with_usage, continuous = options.include_usage, options.include_usage and options.continuous_usage_stats
    hidden = body.max_tokens == 0
    begun: set[int] = set()
    async with Answers(served, requests) as answers:
        yield None
        async for answer, event in answers:
            number, of, request = answers.number(answer), shown[answer.prompt], requests[answer.prompt]
            first = number not in begun
            begun.add(number)
            if event.prompt_logprobs is not None:
                await of.score(served, body, request, event)
            text = "" if hidden else event.text
            choice: dict[str, Any] = {"index": number, "text": of.text + text if first else text}
            more: dict[str, bytes] = {}
            if body.logprobs is None:
                choice["logprobs"] = None
            elif first and of.scores is not None:  # one chunk with the scores of the prompt, which may be long
                scores = Scores(served, of.scores)
                if event.token is not None and not hidden:
                    scores.add(event.token, event.logprob, top_of(event))
                answer.offset = scores.end
                more["logprobs"] = scores.json()
            else:
                choice["logprobs"] = logprobs(served, event, answer.offset)
                answer.offset += sum(map(len, choice["logprobs"]["tokens"]))
            choice["finish_reason"] = _finish(body, event.finish)
            choice["stop_reason"] = None if hidden else event.stop_reason
            if body.return_token_ids:
                choice["token_ids"] = [] if hidden or event.token is None else [event.token]
                if first:
                    more["prompt_token_ids"] = of.ids
            silent = body.logprobs is None and not body.return_token_ids
            if silent and not choice["text"] and event.finish is None:
                continue
            rest: dict[str, Any] = {"usage": None} if with_usage else {}
            if continuous:
                rest["usage"] = _usage(body, answers.usage_of(answer)).json()
            if more:
                yield [b"data: ", with_fields({**head, **rest}, choices=b"[%b]" % with_fields(choice, **more)), b"\n\n"]
            else:
                yield {**head, "choices": [choice], **rest}
    if with_usage:
        yield {**head, "choices": [], "usage": _usage(body, answers.usage).json()}


def _usage(body: protocol.CompletionRequest, usage: Usage) -> Usage:
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


def _finish(body: protocol.CompletionRequest, why: str | None) -> str | None:
    return "length" if why is not None and body.max_tokens == 0 else why
