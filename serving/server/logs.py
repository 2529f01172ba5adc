"""The log of a server, as text or JSON. What clients send is in it, but ends no line and commands no terminal."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from ..printable import printable

_MESSAGE, _FIELD, _TRACE = 4096, 500, 16 * 1024  # the most characters of each
# The last one's lines would else go to standard error as they are.
_LOGGERS = {"shardfuse.server": None, "shardfuse.access": None, "uvicorn.error": "WARNING", "asyncio": "WARNING"}


class JsonLines(logging.Formatter):
    """A line of JSON for each record: time, level, logger, message, and the record's extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage(), _MESSAGE),
            **{name: _cut(value, _FIELD) for name, value in getattr(record, "told", {}).items()},
        }
        if trace := _trace(self, record):
            line["trace"] = trace
        return json.dumps(line).replace("\x7f", "\\u007f")  # the one control character that JSON does not escape


class PlainLines(logging.Formatter):
    """A readable line for each record: the message, then the extra fields as name=value.

    The lines of a trace follow with an indent, so that none looks like a record's.
    """

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = getattr(record, "told", {})
        # An error is the last field: what it quotes of a client cannot pass for another one.
        shown = ("request_id", "seconds", "prompt_tokens", "completion_tokens", "finish", "error")
        when = self.formatTime(record, "%H:%M:%S")
        words = [when, record.levelname, printable(record.getMessage().rstrip(), _MESSAGE)]
        words += [f"{name}={printable(told[name], _FIELD)}" for name in shown if name in told]
        trace = _trace(self, record).splitlines()
        return "\n".join([" ".join(words), *(f"    {printable(line, _MESSAGE)}" for line in trace)])


def log_to_stderr(form: str, level: str) -> None:
    """Make the server's loggers write to standard error, as "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else PlainLines())
    for name, own in _LOGGERS.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(own or level.upper())


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """The record's traceback and stack; of a long one the beginning and the end, which names the error."""
    found = [] if not record.exc_info else [formatter.formatException(record.exc_info)]
    if record.stack_info:
        found.append(record.stack_info)
    text = "\n".join(found)
    if len(text) <= _TRACE:
        return text
    half = _TRACE // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half:,} more characters)\n{text[-half:]}"


def _cut(value: Any, most: int) -> Any:
    """``value``, a text cut to ``most`` characters."""
    if not isinstance(value, str) or len(value) <= most:
        return value
    return f"{value[:most]}... ({len(value) - most:,} more characters)"
