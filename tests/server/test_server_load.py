"""The server as a process: a load of good and bad requests, signals, ranks that die, and what is left of it all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")

import sockets
from http_load import KINDS, Load, Process, leaks, serving

from shardfuse.testing import save_tiny_hf

FLAT_BYTES = 48 << 20  # by which memory may grow from a part of the load to its end: a request's leak would be more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In fp64: an answer does not depend on its company."""
    return save_tiny_hf(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose answers last long enough for what happens meanwhile."""
    return save_tiny_hf(tmp_path_factory.mktemp("long") / "long", max_positions=100_000, num_layers=8)


def loaded(folder: Path, count: int, rate: float) -> None:
    with serving(str(folder), "--debug-endpoints", "--max-body-bytes", "100000", "--log-level", "warning") as process:
        first = Load(process.url, count // 4, rate, seed=1)
        first.run()
        before = leaks(process)
        then = Load(process.url, count - count // 4, rate, seed=2)
        then.run()
        seen = first.seen + then.seen
        assert seen.total() == count
        assert {kind for kind in KINDS if seen[kind]} == set(KINDS), seen
        after = leaks(process)
        deadline = time.monotonic() + 20  # connections that the clients have closed
        while after["files"] > before["files"] and time.monotonic() < deadline:
            time.sleep(0.2)
            after = leaks(process)
        assert after["used_blocks"] == 0
        for what in ("tasks", "threads", "files"):
            assert after[what] <= before[what], (before, after)
        assert after["resident_bytes"] - before["resident_bytes"] < FLAT_BYTES, (before, after)
        assert process.get("/health").status_code == 200
        print(f"{count} requests: {dict(seen)}; before {before}, after {after}")
        assert process.ended(signal.SIGTERM) == 0, process.said()
        assert "ERROR" not in process.said()


def test_a_load_leaves_nothing_behind(folder: Path) -> None:
    loaded(folder, 300, 120.0)


@pytest.mark.nightly(seconds=100)
def test_a_load_of_ten_thousand_leaves_nothing_behind(folder: Path) -> None:
    loaded(folder, 10_000, 60.0)


def _stream(process: Process, lines: list[str], began: threading.Event, most: int) -> None:
    body = {"prompt": "once", "max_tokens": most, "ignore_eos": True, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line:
                lines.append(line)
                began.set()


@contextlib.contextmanager
def _streaming(process: Process, most: int, count: int = 1) -> Iterator[list[str]]:
    """``count`` streams of answers of ``most`` tokens, from the first line on; they have ended at the block's end."""
    lines: list[str] = []
    began = threading.Event()
    threads = [threading.Thread(target=_stream, args=(process, lines, began, most)) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        assert began.wait(60)
        yield lines
    finally:
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_sigterm_drains_and_a_second_signal_ends_at_once(long: Path) -> None:
    """And the port is free again for the next server, but not beside it."""
    with serving(str(long), "--no-warmup") as process:
        port = str(process.port)
        with _streaming(process, 300) as lines:
            process.popen.send_signal(signal.SIGTERM)
            refused = None
            while "data: [DONE]" not in lines:
                try:
                    answer = process.post("/v1/completions", prompt="x", max_tokens=1)
                except httpx.ConnectError:
                    break
                refused = answer.status_code if answer.status_code != 200 else refused
            assert refused == 503
            assert process.ended() == 0, process.said()
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
    with serving(str(long), "--no-warmup", "--port", port) as process:
        assert process.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
        taken = Process(str(long), "--port", port)
        assert taken.ended() == 1
        assert taken.said().count("\n") == 1
        assert f"error: port {port} on 127.0.0.1 cannot be used" in taken.said()
        taken.log.close()
        with _streaming(process, 90_000) as lines:
            process.popen.send_signal(signal.SIGTERM)
            until = time.monotonic() + 60
            while process.get("/health").status_code != 503:
                assert time.monotonic() < until
            answer = process.post("/v1/completions", prompt="x", max_tokens=1)
            assert answer.status_code == 503
            assert int(answer.headers["Retry-After"]) > 0
            assert process.ended(signal.SIGTERM) == 1
        assert "error" in json.loads(lines[-2][6:])
        assert "1 open requests are ended" in process.said()


def test_a_folder_that_is_none_is_refused_in_a_line(tmp_path: Path) -> None:
    process = Process(str(tmp_path / "none"), "--port", "0")
    assert process.ended() == 1
    assert process.said().startswith(f"error: {tmp_path / 'none'}: no such folder")
    assert process.said().count("\n") == 1
    process.log.close()


@pytest.mark.ranks
def test_a_rank_that_is_lost_under_load(folder: Path) -> None:
    """Killed in one server and stopped in the next: each server takes the port and gives the answers of the last."""
    ranks, port = ("--tp", "2", "--device", "cpu", "--health-timeout", "8"), "0"
    with serving(str(folder)) as process:
        alone = process.post("/v1/completions", prompt="once", max_tokens=16, temperature=0).json()["choices"]
    for how in (signal.SIGKILL, signal.SIGSTOP):
        with serving(str(folder), *ranks, "--port", port) as process:
            port = str(process.port)
            _lose(process, how, alone)
    with serving(str(folder), *ranks, "--port", port) as process:
        assert process.post("/v1/completions", prompt="once", max_tokens=16, temperature=0).json()["choices"] == alone


def test_guides_that_would_end_or_fill_the_server_do_not(folder: Path) -> None:
    """One that overflows a stack is a 400, one that compiles for ever ends with its client, and others go on."""
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)}
    deep = {"$defs": {**chain, "d5000": {"type": "integer"}}, "$ref": "#/$defs/d0"}
    with serving(str(folder)) as process:
        pid = process.popen.pid
        answer = process.post("/v1/completions", prompt="a", structured_outputs={"json": deep})
        assert answer.status_code == 400
        assert "too complex" in answer.json()["error"]["message"]
        (compiler,) = sockets.family(pid)[1:]
        for number in (9999991, 9999973):
            endless = {"prompt": "a", "structured_outputs": {"json": {"type": "integer", "multipleOf": number}}}
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{process.url}/v1/completions", json=endless, timeout=0.5)
        answer = process.post("/v1/completions", prompt="a", max_tokens=4, structured_outputs={"regex": "[0-9]+"})
        assert answer.status_code == 200
        deadline = time.monotonic() + 20
        while sockets.family(pid) != [pid, compiler] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert sockets.family(pid) == [pid, compiler]  # nothing compiles any more
        deadline = time.monotonic() + 20
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{process.url}/v1/completions", json=endless, timeout=0.5)
        assert process.ended(signal.SIGTERM) == 0
        assert "Traceback" not in process.said()
    while (left := Path(f"/proc/{compiler}").exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def _lose(process: Process, how: signal.Signals, alone: list[dict[str, Any]]) -> None:
    """Send ``how`` to the other rank under a load, and expect errors, 503 and a clean end."""
    assert process.post("/v1/completions", prompt="once", max_tokens=16, temperature=0).json()["choices"] == alone
    assert process.get("/health").status_code == 200
    (child,) = process.children()
    with _streaming(process, 240, count=3) as lines:
        os.kill(child, how)
    ends = [line for line in lines if '"error"' in line]
    assert len(ends) == 3, lines[-6:]
    # One whose answer has not begun yet gets the error instead of a stream.
    assert all(json.loads(line.removeprefix("data: "))["error"]["code"] == "ranks_lost" for line in ends)
    assert process.get("/health").status_code == 503
    assert process.post("/v1/completions", prompt="x", max_tokens=1).status_code == 503
    if how is signal.SIGSTOP:
        os.kill(child, signal.SIGCONT)
    assert process.ended(signal.SIGTERM) == 0
    assert not Path(f"/proc/{child}").exists()
