"""A server in the browser: one whose steps can wait, and what a person does on its live page."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from server_case import END, NAME, SOON_S, until

from shardfuse.serving.server import Served, ServerOptions
from shardfuse.serving.server.run import create_app, listen
from shardfuse.testing import tiny_engine

MARKUP = "<b id=planted>bold</b><img src=x onerror='document.title=1'>"


@dataclass
class Running:
    """A server in a thread of this process. ``step_s`` is what each step of its engine waits."""

    url: str
    served: Any
    server: Any
    thread: threading.Thread
    step_s: float = 0.0

    def complete(self, max_tokens: int, prompt: str = "Tell me", **more: Any) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        answer = httpx.post(f"{self.url}v1/completions", json=body, timeout=60)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    @property
    def busy(self) -> int:
        load = self.served.serve.load
        return load.running + load.waiting

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(SOON_S)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(tokenizer: Any, **options: Any) -> Iterator[Running]:
    """A server of the tiny model with ``tokenizer``, and with ``options`` of ServerOptions."""
    engine = tiny_engine(tokenizer=copy.deepcopy(tokenizer))
    model = Served(engine, tokenizer, [END], ServerOptions(**{"name": NAME} | options))
    socket = listen("127.0.0.1", 0)
    config = uvicorn.Config(create_app(model), log_config=None, lifespan="on", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    running = Running(f"http://127.0.0.1:{socket.getsockname()[1]}/", model, server, thread)
    step = engine.step

    def slowed() -> Any:
        time.sleep(running.step_s)
        return step()

    engine.step = slowed  # type: ignore[method-assign]
    thread.start()
    try:
        until(lambda: server.started)
        yield running
    finally:
        running.stop()
        socket.close()


def shown(page: Any, name: str) -> str:
    return str(page.locator(f"#{name}").inner_text())


def wait(page: Any, condition: str, argument: Any = None) -> None:
    """Until the function's body ``condition`` holds, of ``text(id)`` and ``argument``."""
    page.wait_for_function(
        f"argument => {{ const text = id => document.getElementById(id).textContent; return {condition}; }}",
        arg=argument,
    )


def send(page: Any, prompt: str, max_tokens: int, temperature: str = "0", kind: str = "completion") -> None:
    page.fill("#max-tokens", str(max_tokens))
    page.fill("#temperature", temperature)
    page.select_option("#kind", kind)
    page.fill("#prompt", prompt)
    page.click("#send")


def wait_for_end(page: Any) -> None:
    page.wait_for_function("() => !document.getElementById('send').disabled")


# From now on the page's requests are answered with ``body``, one byte at a time; those for its numbers are not.
IN_BYTES = """body => {
  const bytes = new TextEncoder().encode(body), ask = window.fetch;
  window.fetch = (path, options) => path.startsWith("stats") ? ask(path, options) : new Response(new ReadableStream({
    start(stream) { bytes.forEach(byte => stream.enqueue(new Uint8Array([byte]))); stream.close(); },
  }));
}"""


def stream(*events: Any, end: str = "data: [DONE]\n\n") -> str:
    return "".join(f"data: {json.dumps(each, ensure_ascii=False)}\n\n" for each in events) + end


def piece(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None}
