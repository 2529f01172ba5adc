"""A server over the tiny model, on a loopback port and in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from shardfuse.serving import Request, SamplingParams
from shardfuse.serving.server import Served, ServerOptions
from shardfuse.serving.server.connections import Connections
from shardfuse.serving.server.run import config
from shardfuse.testing import assert_idle, save_tiny_hf, solo_tokens, tiny_engine, tiny_model

NAME, END = "tiny", 257
SOON_S = 60.0  # for what takes milliseconds: a test fails instead of waiting for ever


@functools.cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        return AutoTokenizer.from_pretrained(save_tiny_hf(Path(folder) / "tiny"))


@functools.cache
def model(**sizes: int) -> Any:
    return tiny_model(**sizes)  # type: ignore[arg-type]


class Server:
    """What :func:`serve` has started: its ``url``, its ``served`` and the ``engine`` below it."""

    def __init__(
        self, options: dict[str, Any], engine: dict[str, Any], sizes: dict[str, int], wrong: Callable[[], str]
    ) -> None:
        self.engine = tiny_engine(model(**sizes), tokenizer=copy.deepcopy(tokenizer()), **engine)
        self.served = Served(
            self.engine, copy.deepcopy(tokenizer()), [END], ServerOptions(name=NAME, **options), wrong=wrong
        )
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.connections = Connections(self.served.options, self.served.metrics)
        self._uvicorn = uvicorn.Server(config(self.served, self.connections))
        self._thread = threading.Thread(target=self._uvicorn.run, args=([self.listener],), name="server", daemon=True)

    def start(self) -> None:
        self._thread.start()
        until(lambda: self._uvicorn.started or not self._thread.is_alive())
        assert self._uvicorn.started

    def stop(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(SOON_S)
        assert not self._thread.is_alive()
        self.listener.close()

    def idle(self) -> None:
        """AssertionError unless no request, block or open HTTP request is left, or soon none is."""

        def left() -> dict[str, int]:
            load = self.served.serve.load
            return {
                "running": load.running,
                "waiting": load.waiting,
                "used_blocks": load.used_blocks,
                "live": len(self.engine._live),
                "open_requests": self.served.open_requests,
            }

        with contextlib.suppress(AssertionError):
            until(lambda: not any(left().values()))
        assert not any(left().values()), left()
        assert_idle(self.engine)

    @contextlib.contextmanager
    def steps(self, before: Callable[[], object]) -> Iterator[None]:
        """Within it, ``before`` is called before each step of the engine, in its thread."""
        step = self.engine.step

        def wrapped() -> Any:
            before()
            return step()

        self.engine.step = wrapped  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.engine.step  # type: ignore[method-assign]

    def failing(self, error: Exception) -> contextlib.AbstractContextManager[None]:
        """Within it every step fails in which a request lives."""

        def fail() -> None:
            if self.engine._live:
                raise error

        return self.steps(fail)

    def slow(self, seconds: float = 0.05) -> contextlib.AbstractContextManager[None]:
        return self.steps(lambda: time.sleep(seconds))

    @contextlib.contextmanager
    def held(self, after: int = 0) -> Iterator[threading.Event]:
        """Within it no step but the first ``after`` begins until the event is set; the end of the block sets it."""
        gate, counted = threading.Event(), itertools.count()
        try:
            with self.steps(lambda: next(counted) < after or gate.wait(SOON_S)):
                yield gate
        finally:
            gate.set()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within it requests are queued, and none is computed."""
        self.call(self.served.serve.pause())
        try:
            yield
        finally:
            self.call(self.served.serve.resume())

    def call(self, work: Any) -> Any:
        """What the coroutine ``work`` returns in the server's loop."""
        assert self.served.serve._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self.served.serve._loop).result(SOON_S)

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=SOON_S, **options)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        with self.http() as client:
            return client.post(path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def get(self, path: str, **headers: str) -> httpx.Response:
        with self.http() as client:
            return client.get(path, headers=headers)

    def metrics(self) -> dict[str, float]:
        """The samples of ``/metrics``, by name and by the labels that tell samples of one name apart."""
        from prometheus_client.parser import text_string_to_metric_families

        found = {}
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                own = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                found[sample.name + "".join(f"{{{value}}}" for value in own.values())] = sample.value
        return found


@contextlib.contextmanager
def serve(
    wrong: Callable[[], str] = str,
    engine: dict[str, Any] | None = None,
    sizes: dict[str, int] | None = None,
    **options: Any,
) -> Iterator[Server]:
    """A server with ``options`` of ServerOptions over an engine with those of ``engine``, of a model with ``sizes``.

    At the end nothing may be left in it.
    """
    server = Server(options, engine or {}, sizes or {}, wrong)
    server.start()
    try:
        yield server
        server.idle()
    finally:
        server.stop()


def until(true: Callable[[], object], seconds: float = SOON_S) -> None:
    """Wait for ``true`` to be. AssertionError where it does not come to it."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


def answer(prompt: str | list[int], most: int = 16, **sampling: Any) -> tuple[list[int], str]:
    """The tokens and the text that the model gives by itself, without an engine or a server."""
    given = list(prompt.encode()) if isinstance(prompt, str) else prompt
    tokens = solo_tokens(model(), Request(given, max_new_tokens=most, stop=[END], sampling=SamplingParams(**sampling)))
    return tokens, text_of(tokens)


def text_of(tokens: list[int]) -> str:
    return str(tokenizer().decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def events(text: str) -> list[Any]:
    """The data of server-sent events, each of which has to be JSON, without the last one, [DONE]."""
    *found, last, end = text.split("\n\n")
    assert (last, end) == ("data: [DONE]", "")
    assert all(each.startswith("data: ") for each in found), found
    return [json.loads(each[len("data: ") :]) for each in found]


def run(body: Callable[[], Any]) -> Any:
    """What the coroutine function ``body`` returns, in time."""
    return asyncio.run(asyncio.wait_for(body(), SOON_S))
