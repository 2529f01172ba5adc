"""``/v1/responses``: OpenAI's newer form of a chat, as plain text. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from ..request import Request, TokenEvent
from . import chat, protocol
from .completions import Answers
from .errors import ApiError, invalid
from .growing import JsonList, Piece, size_of, with_pieces
from .protocol_responses import InputMessage, NamedSchemaFormat, ResponseRequest
from .responses import error_of
from .served import Caller, Served, Usage

_REFUSED = {
    "previous_response_id": "no response is stored here: send the whole conversation as input",
    "background": "no response is stored here, so its answer comes with the request: omit it",
    "tools": "this path answers with text alone: /v1/chat/completions has tools",
}
_SAME = (
    *("temperature", "top_p", "seed", "top_k", "min_p", "repetition_penalty"),
    *("ignore_eos", "priority", "cache_salt"),
)
_NAMES = {"messages": "input", "response_format": "text.format"}  # of parameters in the errors of a chat
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # of the few that OpenAI's clients know, by status
_OURS = ("answer_too_large",)  # codes of errors with status 400 that no other prompt would avoid
_LESS = "ask for less of max_output_tokens or top_logprobs"
_PLACE = {"output_index": 0, "content_index": 0}


async def _request_of(served: Served, body: ResponseRequest, caller: Caller) -> Request:
    """The request for the engine: that of the same chat. Raises ApiError."""
    for name, why in _REFUSED.items():
        if getattr(body, name) not in (None, False, []):
            raise invalid(f"{name}: {why}", name)
    if body.top_logprobs and not body.include:
        raise invalid(
            "top_logprobs without log-probabilities: set include to ['message.output_text.logprobs']", "top_logprobs"
        )
    given = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    messages = [protocol.Message(role=each.role, content=_text_of(each)) for each in given]
    if body.instructions is not None:
        messages.insert(0, protocol.Message(role="system", content=body.instructions))
    same = protocol.ChatRequest(
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        response_format=_format_of(body),
        logprobs=bool(body.include),
        top_logprobs=body.top_logprobs if body.include else None,
        **{name: getattr(body, name) for name in _SAME},
    )
    try:
        return (await chat.request_of(served, same, caller)).request
    except ApiError as error:
        detail = error.body["error"]
        detail["param"] = _NAMES.get(detail["param"], detail["param"])
        raise


def _text_of(message: InputMessage) -> str:
    content = message.content
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _format_of(body: ResponseRequest) -> Any:
    wanted = None if body.text is None else body.text.format
    if not isinstance(wanted, NamedSchemaFormat):
        return wanted
    schema = protocol.JsonSchema(name=wanted.name, schema=wanted.schema_)
    return protocol.JsonSchemaFormat(type="json_schema", json_schema=schema)


class _Growing:
    """The response to ``request`` while its answer is generated, as OpenAI's objects and events."""

    def __init__(self, served: Served, body: ResponseRequest, caller: Caller, request: Request) -> None:
        self._served, self._scored = served, bool(body.include)
        self._item_id = f"msg_{caller.name}"
        self._text: list[str] = []
        self._scores = JsonList()
        self._sent = 0  # events
        form = {"type": "text"} if body.text is None or body.text.format is None else body.text.format
        self._head: dict[str, Any] = {
            "id": f"resp_{caller.name}",
            "object": "response",
            "created_at": int(time.time()),
            "model": served.options.name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "text": {"format": form if isinstance(form, dict) else form.model_dump(by_alias=True)},
            "tools": [],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": None, "summary": None},
            "truncation": "disabled",
            "background": False,
            "store": False,
            "previous_response_id": None,
            "metadata": body.metadata or {},
            "user": body.user,
        }

    def take(self, event: TokenEvent) -> tuple[JsonList, int]:
        """Append the text and the log-probabilities of ``event``; return the latter, and the bytes to keep."""
        new = JsonList()
        if self._scored:
            for score in chat.scores_of(self._served, event):
                new.add(score)
                self._scores.add(score)
        self._text.append(event.text)
        return new, len(new) + size_of(event.text)

    def _part(self) -> list[Piece]:
        part = {"type": "output_text", "text": "".join(self._text), "annotations": []}
        return with_pieces(part, "logprobs", self._scores.pieces())

    def _item(self, status: str, part: Sequence[Piece] = ()) -> list[Piece]:
        item = {"id": self._item_id, "type": "message", "role": "assistant", "status": status}
        return with_pieces(item, "content", [b"[", *part, b"]"])

    def _response(
        self, status: str, item: Sequence[Piece] = (), *, usage: Usage | None = None, error: Any = None
    ) -> list[Piece]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        told = {"status": status, "error": error, "incomplete_details": cut}
        told["usage"] = None if usage is None else usage.response_json()
        return with_pieces({**self._head, **told}, "output", [b"[", *item, b"]"])

    def whole(self, finish: str | None, usage: Usage) -> list[Piece]:
        """The JSON of the complete response."""
        status = _status(finish)
        return self._response(status, self._item(status, self._part()), usage=usage)

    def _event(self, name: str, field: str, value: Sequence[Piece], **more: Any) -> list[Piece]:
        head = {"type": f"response.{name}", "sequence_number": self._sent, **more}
        self._sent += 1
        return [b"event: response.%b\ndata: " % name.encode(), *with_pieces(head, field, value), b"\n\n"]

    def begin(self) -> Iterator[list[Piece]]:
        """The events before the first token."""
        yield self._event("created", "response", self._response("in_progress"))
        yield self._event("in_progress", "response", self._response("in_progress"))
        yield self._event("output_item.added", "item", self._item("in_progress"), output_index=0)
        yield self._event("content_part.added", "part", self._part(), item_id=self._item_id, **_PLACE)

    def delta(self, text: str, scores: JsonList) -> list[Piece]:
        place = {"item_id": self._item_id, **_PLACE}
        return self._event("output_text.delta", "logprobs", scores.pieces(), **place, delta=text)

    def end(self, finish: str | None, usage: Usage) -> Iterator[list[Piece]]:
        """The events after the last token."""
        status, text = _status(finish), "".join(self._text)
        place = {"item_id": self._item_id, **_PLACE}
        yield self._event("output_text.done", "logprobs", self._scores.pieces(), **place, text=text)
        yield self._event("content_part.done", "part", self._part(), **place)
        yield self._event("output_item.done", "item", self._item(status, self._part()), output_index=0)
        yield self._event(status, "response", self.whole(finish, usage))

    def failed(self, error: ApiError) -> list[Piece]:
        """The event that ends a stream with ``error``."""
        detail = error.body["error"]
        ours = detail["code"] in _OURS
        told = {**detail, "code": "server_error" if ours else _CODES.get(error.status_code, "server_error")}
        return self._event("failed", "response", self._response("failed", error=told))


def _status(finish: str | None) -> str:
    return "incomplete" if finish == "length" else "completed"


async def complete(served: Served, body: ResponseRequest, caller: Caller) -> list[Piece]:
    """The whole response, in pieces of its JSON."""
    request = await _request_of(served, body, caller)
    made = _Growing(served, body, caller, request)
    async with Answers(served, [request]) as answers:
        async for _, event in answers:
            answers.keep(made.take(event)[1], _LESS)
    return made.whole(answers.all[0].finish, answers.usage)


async def stream(served: Served, body: ResponseRequest, caller: Caller) -> AsyncIterator[list[Piece] | None]:
    """The events of a stream. The first is None, sent once the request itself is known to be valid.

    The last events have the whole answer, so its size is limited as that of an answer that is not streamed.
    """
    request = await _request_of(served, body, caller)
    made = _Growing(served, body, caller, request)
    async with Answers(served, [request]) as answers:
        yield None
        try:
            for each in made.begin():
                yield each
            async for _, event in answers:
                scores, size = made.take(event)
                answers.keep(size, _LESS)
                if size:
                    yield made.delta(event.text, scores)
            for each in made.end(answers.all[0].finish, answers.usage):
                yield each
        except Exception as error:
            yield made.failed(error_of(error))
