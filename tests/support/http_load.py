"""A server in a process of its own, and a load of all kinds of requests, good and bad, at random times."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import sockets

PATIENCE_S = 120.0  # for a process to start or end on a busy machine
PROMPTS = [
    f"{word} {number}" for number, word in enumerate(("once", "upon", "a", "time", "there", "was", "some", "load"))
]
NEW = 24  # tokens of a whole answer


class Process:
    """``shardfuse serve`` with some arguments, run by ``python``; ``url`` once it takes requests."""

    def __init__(self, *arguments: str, python: str = sys.executable) -> None:
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 - closed with the process
        command = [python, "-m", "shardfuse", "serve", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.popen = subprocess.Popen(command, stderr=self.log, stdout=subprocess.DEVNULL, env=environment)
        self.url = ""
        self.port = 0

    def said(self) -> str:
        """What it has written to standard error."""
        return Path(self.log.name).read_text()

    def started(self) -> Process:
        """Wait until it takes requests. Fails where it ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := re.search(r"at (http://127\.0\.0\.1:(\d+)) ", self.said())) is None:
            assert self.popen.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)
        self.url, self.port = found[1], int(found[2])
        return self

    def ended(self, signum: int | None = None) -> int:
        """Its exit code, after ``signum``."""
        if signum is not None:
            self.popen.send_signal(signum)
        return self.popen.wait(PATIENCE_S)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE_S)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE_S)

    def children(self) -> list[int]:
        """The processes of its other ranks."""
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                stat = (each / "stat").read_text().rpartition(")")[2].split()
                if int(stat[1]) == self.popen.pid and b"spawn_main" in (each / "cmdline").read_bytes():
                    found.append(int(each.name))
        return found


@contextlib.contextmanager
def serving(*arguments: str, python: str = sys.executable) -> Iterator[Process]:
    """A server on a free port, unless the arguments name one; in the end it is gone."""
    process = Process(*arguments, *([] if "--port" in arguments else ["--port", "0"]), python=python)
    try:
        process.started()
        seen = sockets.listening(process.popen.pid)
        assert seen
        assert all(address.local for address in seen), seen
        yield process
    finally:
        for pid in process.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if process.popen.poll() is None:
            process.popen.kill()
            process.popen.wait()
        process.log.close()


class Load:
    """``count`` requests that arrive as a Poisson process, ``rate`` of them a second; ``seen`` counts what came.

    Every answer is checked: a good request gets what it gets alone, or 429; a bad one its own error.
    """

    def __init__(self, url: str, count: int, rate: float, seed: int) -> None:
        self.seen: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self._url, self._count, self._rate = url, count, rate
        self._random = random.Random(seed)
        self._alone: dict[str, str] = {}

    def run(self) -> None:
        """Send all of them. Fails with the first answers that were wrong, and where one does not come."""
        asyncio.run(asyncio.wait_for(self._run(), PATIENCE_S + 4 * self._count / self._rate))
        assert not self.wrong, self.wrong[:5]

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=64)
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE_S, limits=limits) as client:
            for prompt in PROMPTS:
                answer = await client.post("/v1/completions", json=self._body(prompt))
                self._alone[prompt] = answer.json()["choices"][0]["text"]
            tasks: set[asyncio.Task[None]] = set()
            due = time.monotonic()
            for number in range(self._count):
                due += self._random.expovariate(self._rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
                task = asyncio.create_task(self._one(client, kind, self._random.choice(PROMPTS), number))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)

    async def _one(self, client: httpx.AsyncClient, kind: str, prompt: str, number: int) -> None:
        try:
            outcome = await getattr(self, f"_{kind}")(client, prompt)
        except Exception as error:
            outcome = f"raised {type(error).__name__}: {error}"
        self.seen[kind if outcome == "" else f"{kind}: {outcome}" if outcome == "429" else "wrong"] += 1
        if outcome not in ("", "429"):
            self.wrong.append(f"request {number}, {kind}: {outcome}")

    def _body(self, prompt: str, **more: Any) -> dict[str, Any]:
        return {"prompt": prompt, "max_tokens": NEW, "temperature": 0, **more}

    def _checked(self, status: int, text: str, prompt: str) -> str:
        """ "" for the right answer, or for a full queue its status; else what is wrong."""
        if status == 429:
            return "429"
        if status != 200:
            return f"status {status}: {text[:200]}"
        return "" if text == self._alone[prompt] else f"{text!r} in place of {self._alone[prompt]!r}"

    async def _plain(self, client: httpx.AsyncClient, prompt: str) -> str:
        answer = await client.post("/v1/completions", json=self._body(prompt))
        text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
        return self._checked(answer.status_code, text, prompt)

    async def _several(self, client: httpx.AsyncClient, prompt: str) -> str:
        answer = await client.post("/v1/completions", json=self._body([prompt, PROMPTS[0]], n=2))
        if answer.status_code != 200:
            return self._checked(answer.status_code, answer.text, prompt)
        texts = [choice["text"] for choice in answer.json()["choices"]]
        expected = [self._alone[each] for each in (prompt, prompt, PROMPTS[0], PROMPTS[0])]
        return "" if texts == expected else f"{texts} in place of {expected}"

    async def _chat(self, client: httpx.AsyncClient, prompt: str) -> str:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": NEW, "seed": 5}
        answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            return self._checked(answer.status_code, answer.text, prompt)
        text = answer.json()["choices"][0]["message"]["content"]
        return "" if text == self._alone.setdefault(f"chat {prompt}", text) else f"{text!r}: another one came before"

    async def _stream(self, client: httpx.AsyncClient, prompt: str, pause_s: float = 0.0, pieces: int = 0) -> str:
        """``pieces``: after how many the client goes; 0: it stays."""
        text, count = "", 0
        async with client.stream("POST", "/v1/completions", json=self._body(prompt, stream=True)) as answer:
            if answer.status_code != 200:
                return self._checked(answer.status_code, (await answer.aread()).decode(), prompt)
            last = ""
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                last = line[len("data: ") :]
                if last != "[DONE]":
                    text += json.loads(last)["choices"][0]["text"]
                count += 1
                if count == pieces:
                    return "" if self._alone[prompt].startswith(text) else f"{text!r} begins no {self._alone[prompt]!r}"
                await asyncio.sleep(pause_s)
        return self._checked(200, text, prompt) if last == "[DONE]" else f"it ended with {last!r}"

    async def _slow_reader(self, client: httpx.AsyncClient, prompt: str) -> str:
        return await self._stream(client, prompt, pause_s=0.05)

    async def _leaves_a_stream(self, client: httpx.AsyncClient, prompt: str) -> str:
        return await self._stream(client, prompt, pieces=self._random.randint(1, 3))

    async def _leaves(self, client: httpx.AsyncClient, prompt: str) -> str:
        """Before a whole answer."""
        with contextlib.suppress(httpx.TimeoutException):
            await client.post("/v1/completions", json=self._body(prompt, max_tokens=200), timeout=0.02)
        return ""

    async def _bad(self, client: httpx.AsyncClient, prompt: str) -> str:
        path = "/v1/completions"
        status, sent = self._random.choice(
            [
                (400, {"content": b"{"}),
                (400, {"json": {"prompt": 5}}),
                (400, {"json": {"prompt": prompt, "max_tokns": 3}}),
                (400, {"json": self._body(prompt * 100)}),
                (400, {"json": self._body(prompt, max_tokens=10**9)}),
                (404, {"json": self._body(prompt, model="another")}),
                (413, {"content": b"x" * 200_000}),
            ]
        )
        answer = await client.post(path, **sent)  # type: ignore[arg-type]
        if answer.status_code != status:
            return f"status {answer.status_code} in place of {status} for {str(sent)[:80]}: {answer.text[:200]}"
        return "" if answer.json()["error"]["message"] else "an error without a message"


# How often each kind comes.
KINDS = {
    "plain": 30,
    "stream": 25,
    "several": 5,
    "chat": 10,
    "slow_reader": 3,
    "leaves_a_stream": 10,
    "leaves": 7,
    "bad": 10,
}


def leaks(process: Process) -> dict[str, int]:
    """What the server holds, once nothing is served."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found: dict[str, int] = process.get("/debug/leaks").json()
        if not (found["running"] or found["waiting"] or found["open_requests"]):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
