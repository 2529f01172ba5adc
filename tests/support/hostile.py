"""Hostile requests, and a meter of their cost to others: a second client's longest wait, the event loop's longest
silence, and the server's memory.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from http_load import PATIENCE_S, Process

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
MIB = 1 << 20
KEY, OTHER = "hostile", "other"  # the keys of the sender and of the second client
KEYS = ("--api-key", KEY, "--api-key", OTHER)
_TICK_S = 0.005


@dataclass(frozen=True)
class Hostile:
    """A request with a ``body``, the statuses that it may get, and whether it comes in chunks of ``chunk`` bytes.

    A ``guide`` may take a share of the memory of all guides.
    """

    name: str
    body: Callable[[], bytes]
    statuses: tuple[int, ...] = (400,)
    path: str = COMPLETIONS
    chunk: int = 0
    guide: bool = False


def _json(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps(fields).encode()


def _list(value: str, size: int, before: str = '{"prompt":[', after: str = "]}") -> Callable[[], bytes]:
    """A list of equal values of about ``size`` bytes."""
    return lambda: (before + ",".join([value] * (size // (len(value) + 1))) + after).encode()


def _chat(content: Any, **more: Any) -> Callable[[], bytes]:
    return _json(messages=[{"role": "user", "content": content}], **{"max_tokens": 4, **more})


def _keys(count: int, value: Any) -> dict[str, Any]:
    return {str(number): value for number in range(count)}


def _input(content: Any) -> Callable[[], bytes]:
    return _json(input=[{"role": "user", "content": content}], max_output_tokens=4)


_SHORT = {"prompt": "hi", "max_tokens": 8}
_GRAMMAR = "start: " + " | ".join(f'"{number}"' for number in range(3000))

# Tried on every change.
BODIES = [
    Hostile("1 MiB of 1.5", _list("1.5", MIB)),
    Hostile("8 MB of 1.5", _list("1.5", 8_000_000), (413,)),
    Hostile("8 MB of 1", _list("1", 8_000_000), (413,)),
    Hostile("8 MB of []", _list("[]", 8_000_000), (413,)),
    Hostile("8 MB of {}", _list("{}", 8_000_000), (413,)),
    Hostile("8 MB of texts", _list('"a"', 8_000_000), (413,)),
    Hostile("8 MB of commas in a text", _json(prompt="a," * 3_999_000)),
    Hostile("8 MB of quotes in a text", _json(prompt='"' * 3_999_000)),
    Hostile("8 MB of escapes", _json(prompt="\u4e00" * 1_330_000)),
    Hostile("8 MB of spaces", _json(prompt=" " * 8_000_000)),
    Hostile("8 MB of one letter to tokenize", _json(prompt="a" * 8_000_000, return_token_strs=True), path=TOKENIZE),
    Hostile(
        "100 kB to tokenize with strings",
        _json(prompt="ab" * 50_000, return_token_strs=True),
        (200,),
        TOKENIZE,
    ),
    Hostile("tokens to a text", _json(tokens=[97] * 132_000), path=DETOKENIZE),
    Hostile("100,000 tokens", _json(prompt=[97] * 100_000)),
    Hostile("30,000 unknown fields", _json(**_SHORT, **_keys(30_000, 1))),
    Hostile("a field's name of 1 MB", _json(**_SHORT, **{"x" * 1_000_000: 1})),
    Hostile("a model's name of 1 MB", _json(model="\u4e00" * 300_000, **_SHORT), (404,)),
    Hostile("30,000 wrong biases", _json(logit_bias=_keys(30_000, 1000), **_SHORT)),
    Hostile("30,000 biases of no token", _json(logit_bias={f"x{key}": 1 for key in range(30_000)}, **_SHORT)),
    Hostile("100,000 wrong metadata", _json(metadata=_keys(100_000, 1), **_SHORT), (413,)),
    Hostile("one allowed token 100,000 times", _json(n=32, allowed_token_ids=[97] * 100_000, **_SHORT), (200,)),
    Hostile("one stop token 100,000 times", _json(n=32, stop_token_ids=[97] * 100_000, **_SHORT), (200,)),
    Hostile("stop texts of 6 MB", _json(n=8, stop=["a" * 400_000 + str(i) for i in range(15)], **_SHORT), (200,)),
    Hostile("1024 prompts, 128 answers each", _json(n=128, max_tokens=200, prompt=["a"] * 1024)),
    Hostile("1024 prompts, two wrong lists", _json(prompt=["a"] * 1024, stop_token_ids=list(range(250)) * 400), (200,)),
    Hostile("5,000 empty messages", _json(messages=[{"role": "user", "content": ""}] * 5_000), path=CHAT),
    Hostile("6,000 wrong messages", _json(messages=[{"role": ""}] * 6_000), path=CHAT),
    Hostile("6,000 wrong parts", _chat([{"type": "image"}] * 6_000), path=CHAT),
    Hostile("8 MB in one message", _chat("a" * 7_900_000), path=CHAT),
    Hostile("5,000 parts", _chat([{"type": "text", "text": ""}] * 5_000), (200,), CHAT),
    Hostile("8 MB in one input", _json(input="a" * 7_900_000), path=RESPONSES),
    Hostile("6,000 wrong inputs", _json(input=[{"role": "usr"}] * 6_000), path=RESPONSES),
    Hostile("5,000 parts of an input", _input([{"type": "input_text", "text": ""}] * 5_000), (200,), RESPONSES),
    Hostile(
        "the log-probabilities of a message",
        _input([{"type": "output_text", "text": "a", "logprobs": [1.5] * 100_000}]),
        (200,),
        RESPONSES,
    ),
    Hostile("instructions of 1 MB", _json(input="a", instructions="\u4e00" * 300_000), path=RESPONSES),
    Hostile("nested deeply", lambda: b'{"prompt":' + b"[" * 20_000),
    Hostile("4 MB of no JSON", lambda: b'{"prompt":"' + b"a" * 4_000_000),
    Hostile("numbers of 4,000 digits", _list("1" * 4000, 4_000_000)),
    Hostile("half a megabyte in chunks of a byte", _list("1.5", MIB // 2), (400, 413), chunk=1),
    Hostile("50,000 bad words", _json(bad_words=["a"] * 50_000, **_SHORT)),
    Hostile("128 long bad words", _json(bad_words=["ab " * 2_700] * 128, **_SHORT)),
    Hostile("a bad word of 1 MB", _json(bad_words=["a" * 1_000_000], **_SHORT)),
    Hostile("1 MB to truncate", _json(prompt="a" * 1_000_000, truncate_prompt_tokens=8, max_tokens=8)),
    Hostile("100 kB to truncate", _json(prompt="a" * 100_000, truncate_prompt_tokens=-1, max_tokens=8), (200,)),
    Hostile("64 scores of a prompt", _json(prompt=[97] * 1900, prompt_logprobs=64, n=64, max_tokens=1)),
    Hostile(
        "streamed ids of 64 answers",
        _json(prompt=[97] * 1900, return_token_ids=True, n=64, max_tokens=2, stream=True),
        (200,),
    ),
    Hostile(
        "streamed scores of 64 answers",
        _json(prompt=[97] * 500, echo=True, logprobs=20, n=64, max_tokens=2, stream=True),
        (200,),
    ),
    Hostile("5,000 roles", _json(messages=[{"role": "\u4e00" * 64}] * 5_000), path=CHAT),
    Hostile("echo with 64 log-probabilities", _json(prompt=[97] * 1900, echo=True, logprobs=64, n=64, max_tokens=1)),
    Hostile(
        "64 log-probabilities of 16 answers",
        _json(prompt="a", n=16, max_tokens=100, logprobs=64, ignore_eos=True),
        (200,),
    ),
]
# Tried every night beside them.
MORE = [
    Hostile("8 MB in a few texts", _json(prompt=["ab " * 80_000] * 30)),
    Hostile("8 MB of tools", _chat("a", tools=[{"type": "function"}] * 200_000), (413,), CHAT),
    Hostile("6,000 wrong tools", _chat("a", tools=[{"type": "x"}] * 6_000), path=CHAT),
    Hostile("a schema of 6,000 properties", _chat("a", response_format={
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "object", "properties": _keys(6_000, {"type": "integer"})}},
    }), (200, 400, 429), CHAT, guide=True),
    Hostile("50,000 choices", _json(structured_outputs={"choice": [f"{i:08d}" for i in range(50_000)]}, **_SHORT),
            (200, 400, 429), guide=True),
    Hostile("a grammar of open quotes", _json(structured_outputs={"grammar": 'start: "' + '\\"' * MIB}, **_SHORT)),
    Hostile("a grammar of 3,000 parts", _json(structured_outputs={"grammar": _GRAMMAR}, **_SHORT), (200, 400, 429),
            guide=True),
    Hostile("a pattern of 4 MB", _json(structured_outputs={"regex": "a?" * 2_000_000}, **_SHORT), (400, 429),
            guide=True),
    Hostile("template arguments of 1 MB", _chat("a", chat_template_kwargs=_keys(60_000, "a")), (400, 413), CHAT),
    Hostile("a template argument of the server's", _chat("a", chat_template_kwargs={"chat_template": "{{1}}"}),
            path=CHAT),
    Hostile("calls with arguments of 1 MB", _json(messages=[{
        "role": "assistant",
        "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[" * 1_000_000}}],
    }]), (413,), CHAT),
    Hostile("8 MB of tools of a response", _json(input="a", tools=[{"type": "function"}] * 200_000), (413,), RESPONSES),
    Hostile("64 log-probabilities of a streamed response", _json(
        input="a", include=["message.output_text.logprobs"], top_logprobs=64, stream=True, ignore_eos=True,
    ), (200,), RESPONSES),
    Hostile("1.5 among 100,000 stop tokens", _json(stop_token_ids=[*[97] * 100_000, 1.5], **_SHORT)),
    Hostile("texts among 100,000 tokens", _json(prompt=[*[97] * 100_000, "a"])),
    Hostile("50,000 stop texts", _json(stop=["a"] * 50_000, **_SHORT)),
    Hostile("logit_bias of the vocabulary", _json(logit_bias={str(i): 1 for i in range(250)}, n=64, **_SHORT), (200,)),
    Hostile("penalties over a long prompt", _json(prompt=[97] * 1900, max_tokens=64, n=16, repetition_penalty=1.5,
                                                  frequency_penalty=1), (200,)),
    Hostile("128 streamed echoes", _json(prompt="a" * 1900, echo=True, n=128, max_tokens=2, stream=True), (200,)),
    Hostile("NaN and infinity", lambda: b'{"prompt":"a","temperature":NaN,"top_p":Infinity,"logit_bias":{"1":NaN}}'),
    Hostile("8 MB of surrogates", lambda: b'{"prompt":"' + rb"\ud800" * 1_300_000 + b'"}'),
    Hostile("2 MB of latin-1", lambda: b'{"prompt":"' + b"\xe9" * 2_000_000 + b'"}'),
    Hostile("2 MB of zeros", lambda: b"\x00" * 2_000_000),
    Hostile("one long word in chunks of 1,000", _json(prompt="a" * 2_000_000), chunk=1000),
]  # fmt: skip


def send(port: int, hostile: Hostile, timeout: float = PATIENCE_S) -> tuple[int, int, float]:
    """The status and the bytes of the answer, and the seconds until its end."""
    body, began = hostile.body(), time.monotonic()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    with contextlib.closing(connection):
        if hostile.chunk:
            size = hostile.chunk
            wire = b"".join(
                b"%x\r\n%b\r\n" % (len(part), part)
                for part in (body[start : start + size] for start in range(0, len(body), size))
            )
            head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            connection.connect()
            connection.sock.sendall(
                f"POST {hostile.path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}Transfer-Encoding: chunked\r\n\r\n".encode()
            )
            connection.sock.sendall(wire + b"0\r\n\r\n")
            response = http.client.HTTPResponse(connection.sock)
            response.begin()
        else:
            connection.request("POST", hostile.path, body, headers)
            response = connection.getresponse()
        return response.status, len(response.read()), time.monotonic() - began


@dataclass(frozen=True)
class Seen:
    """What a body cost: the status and bytes of its answer and the seconds until then; the longest wait of a second
    client, and the longest silence of the event loop, in seconds; how long the machine itself kept a process waiting
    meanwhile; and by how many bytes the server's memory grew at most, and for good.

    A silence counts as at most the processor time that the server took in it, so that a busy machine adds none.
    """

    name: str
    sent: int
    status: int
    answer: int
    seconds: float
    wait: float
    silence: float
    machine: float
    peak: int
    kept: int

    def __str__(self) -> str:
        return (
            f"{self.name:38} {self.sent / 1e6:6.2f} MB {self.status} {self.answer:8} B {self.seconds:6.2f} s  "
            f"wait {self.wait * 1e3:5.0f} ms  silence {self.silence * 1e3:5.0f} ms  "
            f"machine {self.machine * 1e3:4.0f} ms  peak {self.peak / 1e6:6.1f} MB  kept {self.kept / 1e6:6.1f} MB"
        )


class Meter:
    """A second client of a server, in a process of its own."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._pipe, child = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._child = context.Process(target=_meter, args=(process.port, process.popen.pid, child), daemon=True)
        self._child.start()
        self._worst()  # it has begun

    def _worst(self) -> tuple[float, float, float]:
        """The longest wait, silence and delay of the machine since the last call."""
        self._pipe.send(None)
        assert self._pipe.poll(PATIENCE_S), "the second client waits for ever"
        found: tuple[float, float, float] = self._pipe.recv()
        return found

    def measure(self, hostile: Hostile, times: int = 1) -> Seen:
        """Send ``hostile`` so many times at once."""
        pid, body = self._process.popen.pid, hostile.body()
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        before = _memory(pid, "VmRSS")
        found: list[Any] = []

        def one() -> None:
            try:
                found.append(send(self._process.port, hostile))
            except OSError as error:
                found.append(error)

        self._worst()
        threads = [threading.Thread(target=one) for _ in range(times)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(4 * _TICK_S)
        wait, silence, machine = self._worst()
        assert not isinstance(found[0], Exception), (hostile.name, found[0])
        peak, kept = _memory(pid, "VmHWM") - before, _memory(pid, "VmRSS") - before
        return Seen(hostile.name, len(body), *found[0], wait, silence, machine, peak, kept)

    def close(self) -> None:
        self._pipe.close()
        self._child.join(PATIENCE_S)


@contextlib.contextmanager
def metered(process: Process) -> Iterator[Meter]:
    meter = Meter(process)
    try:
        yield meter
    finally:
        meter.close()


def _memory(pid: int, name: str) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10


def _meter(port: int, pid: int, pipe: Connection) -> None:
    """Send the worst of three since the last message at each message of ``pipe``, until that is closed."""
    worst = [0.0, 0.0, 0.0]
    body = json.dumps({"prompt": "hi", "max_tokens": 2, "temperature": 0, "ignore_eos": True}).encode()

    clock = (~pid << 3) | 2  # Linux's CPU clock of a process

    def keep(place: int, ask: Callable[[], object]) -> None:
        while True:
            began, computed = time.monotonic(), time.clock_gettime(clock)
            ask()
            seconds = time.monotonic() - began
            if place == 1:
                seconds = min(seconds, time.clock_gettime(clock) - computed)
            worst[place] = max(worst[place], seconds)
            if place != 2:
                time.sleep(_TICK_S)

    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    raw = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def complete() -> None:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {OTHER}"}
        client.request("POST", COMPLETIONS, body, headers)
        response = client.getresponse()
        response.read()
        assert response.status == 200, response.status

    def tick() -> None:
        raw.sendall(b"GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        found = b""
        while b"}" not in found:
            found += raw.recv(4096)

    def pause() -> None:
        time.sleep(_TICK_S)

    for place, ask in enumerate((complete, tick, pause)):
        threading.Thread(target=_guarded, args=(keep, place, ask), daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.recv()
            pipe.send((worst[0], worst[1], max(0.0, worst[2] - _TICK_S)))
            worst[:] = [0.0, 0.0, 0.0]


def _guarded(work: Callable[..., None], *args: Any) -> None:
    """Run ``work``; its error ends the process, which the test sees."""
    try:
        work(*args)
    except BaseException:
        os._exit(1)


class Sender:
    """A process that sends hostile bodies, ``rate`` a second, until :meth:`stop`."""

    def __init__(self, process: Process, bodies: list[Hostile], rate: float, seed: int) -> None:
        self._pipe, child = multiprocessing.Pipe()
        given = [(each.name, each.path, each.body(), each.statuses) for each in bodies]
        context = multiprocessing.get_context("spawn")
        self._child = context.Process(target=_sender, args=(process.port, given, rate, seed, child), daemon=True)
        self._child.start()
        assert self._pipe.poll(PATIENCE_S)
        self._pipe.recv()  # it has begun

    def stop(self) -> tuple[int, list[str]]:
        """How many were answered, and what was wrong with answers."""
        self._pipe.send(None)
        assert self._pipe.poll(PATIENCE_S), "a hostile request is answered by nothing"
        found: tuple[int, list[str]] = self._pipe.recv()
        self._child.join(PATIENCE_S)
        return found


def _sender(port: int, bodies: list[Any], rate: float, seed: int, pipe: Connection) -> None:
    draw, wrong, sent, threads = random.Random(seed), list[str](), [0], list[threading.Thread]()

    def one(name: str, path: str, body: bytes, statuses: tuple[int, ...]) -> None:
        try:
            status, size, _ = send(port, Hostile(name, lambda: body, path=path))
        except OSError as error:
            wrong.append(f"{name}: {error!r}")
            return
        sent[0] += 1
        if status not in (*statuses, 429) or (status >= 400 and size > 4096):
            wrong.append(f"{name}: {status} with {size} bytes")

    pipe.send(None)
    while not pipe.poll(draw.expovariate(rate)):
        threads.append(threading.Thread(target=one, args=draw.choice(bodies)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    pipe.send((sent[0], wrong))
