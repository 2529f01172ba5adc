"""A server of completions in a process of its own, and what its clients measure."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
import weakref
from collections.abc import Sequence
from pathlib import Path

from .latency import Times

START_S = 300.0
HOST = "127.0.0.1"


class HttpServer:
    """A server that ``command`` starts on ``port`` and that answers ``/health``; it ends with this object.

    Raises RuntimeError with the end of what it printed where it does not start.
    """

    def __init__(self, command: Sequence[str], port: int, log: Path, environment: dict[str, str]) -> None:
        self.port = port
        with log.open("w") as out:
            # The program that the user named, or this one.
            self._child = subprocess.Popen(command, env=environment, stdout=out, stderr=out)  # noqa: S603
        weakref.finalize(self, _end, self._child)
        deadline = time.monotonic() + START_S
        while not self._healthy():
            if self._child.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace").strip()[-1500:] or "(nothing was printed)"
                raise RuntimeError(f"{command[0]}: the server did not start: {said.splitlines()[-1]}\n{said}")
            time.sleep(0.2)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def load(self, prompts: Sequence[Sequence[int]], new: int, gaps: Sequence[float]) -> Times:
        """Send each prompt after its gap to the one before, streamed, greedily, for ``new`` tokens."""
        return asyncio.run(_load(self.port, prompts, new, gaps))


def free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def our_server(folder: Path, **options: str) -> HttpServer:
    """``shardfuse serve`` of ``folder`` with ``options`` of its command line."""
    port = free_port()
    given = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    command = [sys.executable, "-m", "shardfuse", "serve", str(folder), "--port", str(port), "--name", "m", *given]
    return HttpServer(command, port, folder / "ours.log", _environment(os.environ))


def vllm_server(python: str, folder: Path, max_model_len: int, max_num_seqs: int) -> HttpServer:
    """vLLM's own server of ``folder``, in the environment of ``python``."""
    port = free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--host", HOST, "--served-model-name", "m", "--dtype", "float32"]
    command += ["--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs)]
    kept = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONSAFEPATH"] = "1"  # a checkout's folder `kernels` would shadow the package that it imports
    return HttpServer(command, port, folder / "vllm.log", _environment(environment))


def _environment(given: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    # Freed memory stays the process's, for all sides (timing.keep_freed_memory).
    return {**given, "MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


async def _load(port: int, prompts: Sequence[Sequence[int]], new: int, gaps: Sequence[float]) -> Times:
    times = Times(texts=[""] * len(prompts))
    began = due = time.monotonic()
    tasks = []
    for number, (prompt, gap) in enumerate(zip(prompts, gaps)):
        due += gap
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(_one(port, prompt, new, times, number)))
    await asyncio.gather(*tasks)
    times.whole = time.monotonic() - began
    return times


async def _one(port: int, prompt: Sequence[int], new: int, times: Times, number: int) -> None:
    """One request over a bare socket: what a client costs comes off the cores that serve."""
    body = {"model": "m", "prompt": list(prompt), "max_tokens": new, "temperature": 0, "ignore_eos": True}
    content = json.dumps(body | {"stream": True}).encode()
    sent = last = time.monotonic()
    reader, writer = await asyncio.open_connection(HOST, port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    await writer.drain()
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{status.decode().strip()}: {(await reader.read())[:300]!r}")
        first = True
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            (choice, *_), now = json.loads(line[6:])["choices"] or [None], time.monotonic()
            if choice is None or not choice["text"]:
                continue
            times.texts[number] += choice["text"]
            (times.first if first else times.between).append(now - last)
            first, last = False, now
    finally:
        writer.close()
    if first:
        raise RuntimeError(f"request {number} got no token after {time.monotonic() - sent:.1f} s")
