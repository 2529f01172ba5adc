"""The state that the endpoints share: the engine behind its AsyncEngine, the tokenizer, and the health."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from ..aio import AsyncEngine, Submitted
from ..chat import ChatFormat
from ..engine import Engine
from ..ranks import RanksLost
from ..request import QueueFull, Request, TokenEvent
from ..sampling import LogitsNotFinite
from .errors import ApiError, explained, invalid, unavailable
from .metrics import Metrics
from .options import ServerOptions
from .weights import NUMBER

TOLD: ContextVar[dict[str, Any]] = ContextVar("told")  # the extra fields in this HTTP request's log line
_PROBE_S = 5.0  # how long a probe's result stays valid
_THREADS = 2  # of the work beside the event loop
_LONG_TEXT = 8192  # characters; longer texts are encoded beside the event loop
_LONG = 2048  # tokens; longer lists are decoded there
_PIECE = 1 << 16  # characters
_UNREAD = 1 << 20  # bytes of events that may wait for the event loop in any case
_CUT = 8  # the tokens that a cut may add to those of the whole text
T = TypeVar("T")


@dataclass(frozen=True)
class Caller:
    """Who sent a request, and how: its ``name`` (X-Request-Id), the client's cache salt and name, and whether its body
    is ``large``.
    """

    name: str
    tenant: str = ""
    client: str = ""
    large: bool = False


class Served:
    """One model, open while the application runs.

    ``tokenizer`` is one of transformers. ``stop_ids`` are tokens that end an answer beside the engine's
    ``generation.eos_token_ids``; its other defaults apply where a request is silent. ``wrong`` returns an error known
    outside the engine, such as a rank that has ended; "" if there is none. Raises ValueError for an unknown format of
    calls.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        stop_ids: Collection[int],
        options: ServerOptions,
        wrong: Callable[[], str] = str,
    ) -> None:
        self.options = options
        self._wrong = wrong
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.chat = ChatFormat(tokenizer, engine.model.config.vocab_size, self.stop_ids, options.tool_call_parser)
        self.defaults = engine.generation
        self.max_model_len = engine.max_model_len
        self.max_positions = engine.model.config.max_positions
        self.vocab_size = engine.model.config.vocab_size
        self.created = int(time.time())
        self.draining = False
        self.open_requests = 0  # unfinished HTTP requests for tokens
        self.metrics = Metrics(options.name)
        self._engine = engine
        self._serve: AsyncEngine | None = None
        self._probed = (-_PROBE_S, "")  # the time of the last probe, and the error it found
        self._probe = asyncio.Lock()
        self._lost: RanksLost | None = None
        self._not_finite: tuple[str, float, int] | None = None  # the last such error, its time, and the tokens by then
        self._idle = asyncio.Event()
        self._threads: ThreadPoolExecutor | None = None

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Serve requests within the block."""
        self._threads = ThreadPoolExecutor(_THREADS, "shardfuse-beside")
        await self.aside(getattr, self, "_longest_token")  # reads the vocabulary
        try:
            async with AsyncEngine(self._engine) as self._serve:
                yield
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def serve(self) -> AsyncEngine:
        if self._serve is None:
            raise unavailable("the server is starting, or has ended")
        return self._serve

    async def submit(self, requests: Sequence[Request]) -> Submitted:
        """Queue ``requests``, all or none. Raises ApiError."""
        try:
            return await self.serve.submit(*requests, most_unread=max(_UNREAD, self.options.max_answer_bytes))
        except RanksLost as error:
            self._lost = error
            raise explained(error) from error
        except QueueFull as error:
            more = "" if len(requests) == 1 else f"; it has {len(requests)} prompts, which wait together or not at all"
            raise explained(QueueFull(f"{error}{more}")) from error
        except RuntimeError as error:  # the engine is closed, or its worker has stopped
            raise unavailable(self.serve.stopped or str(error), "engine_stopped", 30) from error
        except ValueError as error:
            raise invalid(str(error)) from error

    def check(self, event: TokenEvent) -> None:
        """Raise ApiError if ``event`` ends its answer without success."""
        if event.error is not None:
            if isinstance(event.error, RanksLost):
                self._lost = event.error
            if isinstance(event.error, LogitsNotFinite):
                self._not_finite = str(event.error), time.monotonic(), self.metrics.totals.generated
            raise explained(event.error)
        if event.finish == "cancelled":
            raise unavailable("the server ended before the answer did", "cancelled")
        if event.finish == "timeout":
            limit = self.options.request_timeout_s
            raise ApiError(408, f"the answer took longer than the server's limit of {limit:g} s", code="timeout")

    def trouble(self) -> str:
        """A known error, without a probe of the engine; "" if there is none."""
        if wrong := self._wrong():
            return wrong
        if self._lost is not None:
            return str(self._lost)
        if self._serve is None:
            return "starting"
        if self.serve.stopped is not None:
            return self.serve.stopped
        limit = self.options.health_timeout_s
        if (since := self.serve.since_step_s) > limit:
            return f"the engine has ended no step for {since:.0f} s, and {limit:g} s are allowed (--health-timeout)"
        return ""

    async def health(self) -> str:
        """The error; "" if the engine generated a token within the deadline.

        While requests run, a step must have ended within ``health_timeout_s``. Otherwise this method sends a request
        for one token, at most one every few seconds, which detects a dead rank. It also does so after logits that were
        NaN or infinite, until an answer has got a token again.
        """
        if self.draining:
            return "draining: no more requests are taken"
        if wrong := self.trouble():
            return wrong
        load = self.serve.load
        suspect = self._not_finite is not None and self._not_finite[2] == self.metrics.totals.generated
        if (load.running or load.waiting) and not suspect:
            return ""
        async with self._probe:
            when, wrong = self._probed
            if time.monotonic() - when >= _PROBE_S:
                wrong = await self._one_token(self.options.health_timeout_s)
                self._probed = (time.monotonic(), wrong)
        return wrong

    def not_finite(self) -> dict[str, Any] | None:
        """How many answers ended because the model's logits were NaN or infinite, and the last error; None if none."""
        if self._not_finite is None:
            return None
        error, when, _ = self._not_finite
        answers = self.serve.newest_stats.not_finite
        return {"answers": answers, "last_error": error, "seconds_ago": round(time.monotonic() - when, 1)}

    async def _one_token(self, limit: float) -> str:
        try:
            submitted = await asyncio.wait_for(
                self.serve.submit(Request([0], max_new_tokens=1, cache_salt="health")), limit
            )
        except asyncio.TimeoutError:
            return f"the engine took no request within {limit:g} s (--health-timeout)"
        except QueueFull:  # requests have arrived, and take the probe's place
            return ""
        except (RuntimeError, ValueError) as error:
            self._lost = error if isinstance(error, RanksLost) else None
            return str(error)
        try:
            async with within(limit):
                async for _, event in submitted:
                    if event.error is not None:
                        self._lost = event.error if isinstance(event.error, RanksLost) else None
                        return str(event.error)
                    if event.token is not None:
                        return ""
        except asyncio.TimeoutError:
            return f"the engine gave no token within {limit:g} s (--health-timeout)"
        finally:
            submitted.cancel()
        return "the engine gave no token"

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count one HTTP request for tokens. Raises ApiError if the server accepts no more."""
        if self.draining:
            raise unavailable("the server is shutting down: send the request to another one", "draining", 5)
        self.open_requests += 1
        try:
            yield
        finally:
            self.open_requests -= 1
            if not self.open_requests:
                self._idle.set()

    async def drain(self) -> None:
        """Accept no more requests, and wait until the open ones have been answered."""
        self.draining = True
        while self.open_requests:
            self._idle.clear()
            await self._idle.wait()

    # --- text

    async def aside(self, work: Callable[..., T], *args: Any) -> T:
        """``work(*args)``, run beside the event loop: for what takes more than a few milliseconds."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def encode(self, text: str, special: bool, most: int | None = None) -> list[int]:
        """The tokens of ``text``, with ``special`` after the usual first tokens.

        Raises ApiError for invalid text, and for one of more than ``most`` tokens, by default the context's. That may
        be known before the text is encoded: from its length and the longest token's, or from its first pieces.
        """
        most = self.max_model_len if most is None else most
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:  # JSON can contain a lone surrogate
                raise invalid(
                    f"{text[error.start]!a} at character {error.start} is half of a surrogate pair, no text"
                ) from None
        self.check_characters(len(text), most)
        if len(text) > _LONG_TEXT:
            return await self.aside(self._encode_long, text, special, most)
        return self._encode(text, special)

    def check_characters(self, characters: int, most: int) -> None:
        """Raise ApiError if a text of so many characters has more than ``most`` tokens."""
        if characters > most * self._longest_token:
            raise _too_long(-(-characters // self._longest_token), most)

    def _encode_long(self, text: str, special: bool, most: int) -> list[int]:
        if len(text) > max(most, _PIECE):  # else it has few tokens, however long they are
            seen = 0
            for start in range(0, len(text), _PIECE):
                seen += len(self._encode(text[start : start + _PIECE], False)) - _CUT
                if seen > most:
                    raise _too_long(seen, most)
        return self._encode(text, special)

    def _encode(self, text: str, special: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=special))

    @functools.cached_property
    def first_tokens(self) -> list[int]:
        """The special tokens around a text, which precede it if they are all at its beginning."""
        return self._encode("", True)

    @functools.cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token's name, at least as many as in its text."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    async def text(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, special ones included."""
        return await self.aside(self.decode, tokens) if len(tokens) > _LONG else self.decode(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """:meth:`text`, at once."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @functools.cached_property
    def piece(self) -> Callable[[int], str]:
        """The text of one token, remembered for the last ones."""
        return functools.lru_cache(1 << 16)(lambda token: self.decode([token]))

    def logprobs(self, asked: int | None, param: str) -> int | None:
        """How many log-probabilities a token gets that ``asked`` for so many; -1 is the vocabulary.

        Raises ApiError above the server's limit.
        """
        if asked is None:
            return None
        most = self.options.max_logprobs
        limit, found = (self.vocab_size if each == -1 else each for each in (most, asked))
        if found > limit:
            raise invalid(f"{param}={asked}: expected at most {limit} (--max-logprobs)", param)
        return found

    def check_tokens(self, tokens: Collection[int], param: str) -> None:
        """Raise ApiError for a token outside the vocabulary."""
        if tokens and (token := max(tokens)) >= self.vocab_size:
            raise invalid(
                f"{param}: token {token} is out of vocabulary: this model has {self.vocab_size} tokens, from 0 to "
                f"{self.vocab_size - 1}",
                param,
            )

    @property
    def most_memory(self) -> int:
        """Bytes that the values of a body may take; a context's tokens come on top."""
        return (self.options.max_body_memory_mib << 20) + NUMBER * self.max_model_len

    def check_answers(self, answers: int) -> None:
        """Raise ApiError for more ``answers`` to one request than may wait."""
        most = self._engine.max_queued_requests
        if most is not None and answers > most:
            raise invalid(
                f"{answers} answers (prompts times n): at most {most} may wait (--max-queued-requests); send several "
                "requests"
            )

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for another model's ``name``."""
        if name is not None and name != self.options.name:
            raise ApiError(
                404,
                f"there is no model {name!r} here, only {self.options.name!r}",
                code="model_not_found",
                param="model",
            )


def _too_long(tokens: int, most: int) -> ApiError:
    return invalid(
        f"the text has {tokens} tokens or more, and at most {most} are taken: shorten it",
        code="context_length_exceeded",
    )


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """asyncio.timeout, which Python 3.10 lacks.

    ``asyncio.wait_for`` up to Python 3.11 loses a cancellation that comes just as what it waits for ends.
    """
    task = asyncio.current_task()
    assert task is not None
    late = False

    def end() -> None:
        nonlocal late
        late = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, end)
    try:
        yield
    except asyncio.CancelledError:
        if late:
            raise asyncio.TimeoutError from None
        raise
    finally:
        timer.cancel()


@dataclass
class Usage:
    """The token counts of one HTTP request; ``cached`` ones of its prompts were found in the prefix cache."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def response_json(self) -> dict[str, Any]:
        """The same in the words of ``/v1/responses``."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens": self.completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt + self.completion,
        }
