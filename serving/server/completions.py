"""``/v1/completions``: completions of prompts, given as text or tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..aio import SlowReader
from ..request import Request, TokenEvent
from . import protocol, translate
from .errors import explained, invalid
from .growing import body_of, size_of, with_field
from .metrics import AnswerTimes
from .scores import Scores, logprobs, prompt_scores, top_of
from .served import TOLD, Caller, Served, Usage

_LONG = 256  # more scores of a prompt are written beside the event loop
_SCORE = 32  # bytes of a token and its log-probability in an answer's JSON
USUAL_TOKENS = 16  # of an answer, by OpenAI's API


@dataclass
class Answer:
    """One choice during generation. ``text`` and ``scores`` are those of an answer that is not streamed."""

    prompt: int  # its position among the prompts
    index: int
    times: AnswerTimes
    text: list[str] = field(default_factory=list)
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
        self._first = [0]
        for each in requests:
            self._first.append(self._first[-1] + each.n)

    def number(self, answer: Answer) -> int:
        """The index of its choice."""
        return self._first[answer.prompt] + answer.index

    @property
    def usage(self) -> Usage:
        return Usage(sum(len(each.prompt) for each in self._requests), sum(each.times.tokens for each in self.all))

    def keep(self, size: int) -> None:
        """Count ``size`` more bytes to be held until the end. Raises ApiError above the server's limit."""
        self._bytes += size
        if self._bytes > (most := self._served.options.max_answer_bytes):
            raise invalid(
                f"the answer has more than {most} bytes (--max-answer-bytes): stream it, or ask for less of n, "
                "max_tokens or logprobs",
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
        if event.token is not None:
            answer.times.token()
        if event.finish is not None:
            answer.end(event.finish, event.stop_reason)
        return answer


async def requests_of(served: Served, body: protocol.CompletionRequest, caller: Caller) -> list[Request]:
    """The engine's requests, one for each prompt. Raises ApiError."""
    if body.best_of not in (None, body.n):
        raise invalid(f"best_of={body.best_of} and n={body.n}: answers are not ranked here: omit best_of", "best_of")
    if body.stream and body.echo and body.logprobs is not None:
        raise invalid("echo with logprobs is not streamed: set stream or echo to false", "echo")
    # With max_tokens=0 the engine still generates one token, and the answer omits it.
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens=0 without echo: expected at least 1", "max_tokens")
    given: list[Any]
    if isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int)):
        given = [body.prompt]
    else:
        given = list(body.prompt)
    if not given:
        raise invalid("prompt: no prompt: expected one at least", "prompt")
    served.check_answers(len(given) * body.n)
    scores = body.logprobs if body.echo else None
    form = translate.Form(served, body, caller, body.logprobs, translate.guide(served, body), prompt_logprobs=scores)
    found, asked = [], 0
    for each in given:
        await asyncio.sleep(0)  # lets other requests run
        if not isinstance(each, str):
            served.check_tokens(each, "prompt")
        tokens = await served.encode(each, body.add_special_tokens) if isinstance(each, str) else each
        if scores is not None:
            asked += len(tokens) * (scores + 1) * body.n
            _check_scores(served, asked)
        found.append(form.request(tokens, body.max_tokens, USUAL_TOKENS, least=1))
    return found


async def _echoes(served: Served, body: protocol.CompletionRequest, requests: Sequence[Request]) -> list[str]:
    """The texts of the prompts, if they belong to the answers; else empty ones."""
    found = []
    for each in requests:
        await asyncio.sleep(0)
        found.append(await served.text(each.prompt) if body.echo else "")
    return found


def _check_scores(served: Served, scores: int) -> None:
    if scores * _SCORE > (most := served.options.max_answer_bytes):
        raise invalid(
            f"echo with logprobs asks for {scores} log-probabilities: an answer has at most {most} bytes "
            "(--max-answer-bytes); lower logprobs or n, or send a shorter prompt",
            "logprobs",
            "answer_too_large",
        )


async def complete(served: Served, body: protocol.CompletionRequest, caller: Caller) -> list[bytes]:
    """The whole answer, in pieces of its JSON."""
    requests = await requests_of(served, body, caller)
    echoed = await _echoes(served, body, requests)
    before: list[Scores | None] = [None] * len(requests)  # of the prompts' tokens
    async with Answers(served, requests) as answers:
        answers.keep(body.n * sum(map(size_of, echoed)))
        async for answer, event in answers:
            if event.prompt_logprobs is not None:  # in a prompt's first event; all of its answers show them
                prompt = requests[answer.prompt].prompt
                work = (prompt_scores, served, prompt, event.prompt_logprobs)
                found = (
                    await served.aside(*work)
                    if len(prompt) * (body.logprobs or 1) > _LONG
                    else prompt_scores(*work[1:])
                )
                before[answer.prompt] = found
                answers.keep(body.n * len(found))
            if body.max_tokens == 0:
                continue
            answer.text.append(event.text)
            answers.keep(size_of(event.text))
            if body.logprobs is not None:
                if answer.scores is None:
                    answer.scores = Scores(served, before[answer.prompt])
                if event.token is not None:
                    answers.keep(answer.scores.add(event.token, event.logprob, top_of(event)))
    choices = []
    for answer in answers.all:
        await asyncio.sleep(0)
        choice = {
            "index": answers.number(answer),
            "text": echoed[answer.prompt] + "".join(answer.text),
            "finish_reason": _finish(body, answer.finish),
            "stop_reason": None if body.max_tokens == 0 else answer.stop_reason,
        }
        scores = before[answer.prompt] if answer.scores is None else answer.scores
        choices.append(with_field(choice, "logprobs", b"null" if scores is None else scores.json()))
    return body_of(_head(served, caller.name), choices, _usage(body, answers).json())


async def stream(
    served: Served, body: protocol.CompletionRequest, caller: Caller
) -> AsyncIterator[dict[str, Any] | None]:
    """The chunks of a stream. The first is None, sent once the request itself is known to be valid."""
    requests = await requests_of(served, body, caller)
    echoed = await _echoes(served, body, requests)
    head = _head(served, caller.name)
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    rest: dict[str, Any] = {"usage": None} if with_usage else {}
    begun: set[int] = set()
    async with Answers(served, requests) as answers:
        yield None
        async for answer, event in answers:
            number = answers.number(answer)
            text = "" if body.max_tokens == 0 else event.text
            if number not in begun:
                text = echoed[answer.prompt] + text
            begun.add(number)
            scores = None
            if body.logprobs is not None:
                scores = logprobs(served, event, answer.offset)
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


def _finish(body: protocol.CompletionRequest, why: str | None) -> str | None:
    return "length" if why is not None and body.max_tokens == 0 else why
