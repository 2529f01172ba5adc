"""Read lines of a file as requests and write their answers as lines, in OpenAI's batch format (``shardfuse generate``).

A line is ``{"custom_id", "method", "url", "body"}``, or a body alone, which may have a ``custom_id`` too. A line
without a ``custom_id`` is named after its number. Answers are ``{"id", "custom_id", "response", "error"}``;
``response`` has a ``status_code``, a ``request_id`` and the ``body`` that the server would send.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from ...kernels.runtime.names import expected
from . import chat, completions, protocol
from .errors import ApiError, explained, invalid
from .served import Caller, Served
from .wrong_bodies import wrong_body

# The beginning of every answer. It identifies an interrupted answer at the end of a file.
BEGINS = b'{"id": "batch_req_'
_URLS: dict[str, tuple[ModuleType, type[protocol.Sampled]]] = {
    "/v1/completions": (completions, protocol.CompletionRequest),
    "/v1/chat/completions": (chat, protocol.ChatRequest),
}
_ENVELOPE = ("method", "url", "body")


@dataclass(frozen=True)
class Line:
    """One request. ``found`` is its JSON, or the error of a line without valid JSON; ``name`` is its ``custom_id``."""

    number: int
    name: str
    found: Any


def read_line(text: bytes, number: int) -> Line | None:
    """Line ``number`` of a file, from 1 on; None for an empty one. :func:`answer` reports errors in it."""
    if not text.strip():
        return None
    own = f"line-{number}"
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Line(number, own, invalid(f"line {number} is no JSON: {error}"))
    if not isinstance(found, dict):
        return Line(number, own, invalid(f"line {number} is no JSON object: expected a request's body"))
    name = found.get("custom_id")
    if name is None:
        return Line(number, own, found)
    if not isinstance(name, str) or not name or not _encodes(name):
        wrong = invalid(f"line {number}: custom_id: expected text of at least one character", "custom_id")
        return Line(number, own, wrong)
    return Line(number, name, found)


def renamed(line: Line) -> Line:
    """The error for a ``line`` with the name of an earlier one, which is then named after its number."""
    wrong = invalid(f"line {line.number}: custom_id {line.name!r} was used before", "custom_id")
    return Line(line.number, f"line-{line.number}", wrong)


def _encodes(text: str) -> bool:
    """Whether the text has no lone surrogate, which JSON can contain but a UTF-8 file cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


async def answer(served: Served, line: Line) -> dict[str, Any]:
    """The answer; for an invalid line or a failed answer with the error's status and body.

    Raises ApiError 503 if no line can be answered any more.
    """
    name = uuid.uuid4().hex
    try:
        if isinstance(line.found, ApiError):
            raise line.found
        status, body = 200, await _complete(served, line.found, name)
    except Exception as failure:  # includes our own defects, which must not lose the other answers
        error = explained(failure)
        if error.status_code == 503:
            raise error from failure
        status, body = error.status_code, error.body
    response = {"status_code": status, "request_id": name, "body": body}
    return {"id": f"batch_req_{name}", "custom_id": line.name, "response": response, "error": None}


async def _complete(served: Served, line: Mapping[str, Any], name: str) -> dict[str, Any]:
    if any(key in line for key in _ENVELOPE):
        if unknown := sorted(set(line) - {*_ENVELOPE, "custom_id"}):
            raise invalid(f"{unknown[0]}: expected custom_id, method, url and body, or a body alone", unknown[0])
        if line.get("method") != "POST":
            raise invalid(f"method: {line.get('method')!r}: expected 'POST'", "method")
        url, body = line.get("url"), line.get("body")
        if not isinstance(url, str) or url not in _URLS:
            raise invalid(f"url: {url!r}: {expected(url, _URLS)}", "url")
    else:
        body = {key: value for key, value in line.items() if key != "custom_id"}
        if not {"prompt", "messages"} & body.keys():
            raise invalid("expected prompt or messages, or OpenAI's custom_id, method, url and body")
        url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    kind, form = _URLS[url]
    try:
        asked = form.model_validate(body)
    except ValidationError as error:
        raise wrong_body(form, error, body) from None
    if asked.stream or asked.stream_options is not None:
        raise invalid("stream: the answers of a batch are whole: omit it", "stream")
    served.check_model(asked.model)
    found: dict[str, Any] = json.loads(b"".join(await kind.complete(served, asked, Caller(name))))
    return found
