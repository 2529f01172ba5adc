"""Connections: their number, the time of headers, clients that read nothing, and pieces of any size."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import h11
import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[serve])")

from server_case import SOON_S, Server, serve, until

from shardfuse.serving.server import ServerOptions, connections
from shardfuse.serving.server.connections import Connection, Connections
from shardfuse.serving.server.metrics import Metrics

HEAD = b"GET /version HTTP/1.1\r\nHost: a\r\n"


def _connect(server: Server, sent: bytes = b"", receive_buffer: int | None = None) -> socket.socket:
    found = socket.socket()
    if receive_buffer is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    found.settimeout(SOON_S)
    found.connect(("127.0.0.1", server.port))
    found.sendall(sent)
    return found


def _rest(found: socket.socket) -> bytes:
    """All that comes until the server closes the connection, or resets it; then the client's end is closed, too."""
    read = b""
    with found, contextlib.suppress(ConnectionError):
        while piece := found.recv(65536):
            read += piece
    return read


def _trickled(found: socket.socket, byte: bytes) -> bytes:
    """What comes while ``byte`` is sent again and again, until the server closes the connection."""
    read, deadline = b"", time.monotonic() + SOON_S
    found.settimeout(0.02)
    while time.monotonic() < deadline:
        try:
            piece = found.recv(65536)
            if not piece:
                return read
            read += piece
            found.sendall(byte)
        except TimeoutError:
            with contextlib.suppress(ConnectionError):  # the next recv says how it ended
                found.sendall(byte)
        except ConnectionError:
            return read
    raise AssertionError("the server kept the connection")


def _refused(server: Server, reason: str) -> float:
    labels = {"model_name": server.served.options.name, "engine": "0", "reason": reason}
    found = server.served.metrics.registry.get_sample_value("shardfuse:requests_refused_total", labels)
    assert found is not None
    return found


def _error(answer: bytes, status: int) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"\r\nConnection: close\r\n" in head + b"\r\n"
    error: dict[str, Any] = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


# --- the time of headers ----------------------------------------------------------------------------------------------


def test_headers_that_trickle_end_with_408() -> None:
    with serve(header_timeout_s=0.3) as server, _connect(server, b"GET /hea") as slow:
        assert "0.3 s" in _error(_trickled(slow, b"a"), 408)["message"]
        assert _refused(server, "header_timeout") == 1


def test_so_do_those_of_a_later_request_on_a_connection() -> None:
    with serve(header_timeout_s=0.3) as server, _connect(server, HEAD + b"\r\nG") as slow:
        answers = _trickled(slow, b"a")
        assert answers.startswith(b"HTTP/1.1 200 ")
        _error(answers[answers.rindex(b"HTTP/1.1") :], 408)


def test_a_connection_that_sends_nothing_is_closed_in_silence() -> None:
    with serve(header_timeout_s=0.2) as server, _connect(server) as silent:
        assert _rest(silent) == b""
        assert _refused(server, "header_timeout") == 0


def test_an_answered_request_whose_body_does_not_end_is_closed() -> None:
    with serve(header_timeout_s=0.3) as server:
        head = b"POST /nothing HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        with _connect(server, head) as endless:
            assert _trickled(endless, b"1\r\na\r\n").count(b"HTTP/1.1 404 ") == 1


def test_a_body_has_more_time_than_headers() -> None:
    with serve(header_timeout_s=0.2) as server:
        body = b'{"prompt": "a"}'
        head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
        with _connect(server, head + b"Content-Length: %d\r\n\r\n" % len(body)) as slow:
            time.sleep(0.5)
            slow.sendall(body)
            assert _rest(slow).startswith(b"HTTP/1.1 200 ")


# --- the number of connections ----------------------------------------------------------------------------------------


def test_a_connection_beyond_the_limit_is_refused_while_the_others_work() -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nConnection: close\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with serve(max_connections=3, max_connections_per_address=3) as server:
        with server.paused():
            working = [_connect(server, request) for _ in range(3)]
            until(lambda: len(server.engine._live) == 3)
            refused = _rest(_connect(server))
            assert _error(refused, 503)["code"] == "too_many_connections"
            assert b"\r\nRetry-After: " in refused
            assert _refused(server, "connections") == 1
        assert all(_rest(each).startswith(b"HTTP/1.1 200 ") for each in working)
        until(lambda: not server.connections._open)
        assert server.get("/version").status_code == 200


@pytest.mark.parametrize("sent", [b"", b"GET /hea", HEAD + b"\r\n"], ids=["silent", "half", "kept"])
def test_one_that_waits_for_a_request_gives_way(sent: bytes) -> None:
    with serve(max_connections=3, max_connections_per_address=3) as server:
        waiting = [_connect(server, sent) for _ in range(3)]
        kept = sent.endswith(b"\r\n\r\n")
        for each in waiting if kept else []:
            answer = b""
            while b"}" not in answer:
                answer += each.recv(65536)
        until(lambda: len(server.connections._waiting) == 3)
        assert server.get("/version").status_code == 200
        answer = _rest(waiting[0])
        assert answer == b"" if kept else _error(answer, 503)
        for each in waiting:
            each.close()


class _Stub:
    """What :class:`Connections` uses of a connection from ``host``."""

    def __init__(self, all_: Connections, host: str) -> None:
        self.client, self.owner, self._all = (host, 1), None, all_
        self.ended = 0

    def end_for_room(self) -> None:
        self.ended += 1
        self._all.leave(self)  # type: ignore[arg-type]


def _made(**options: Any) -> tuple[Connections, Callable[[str, bool], _Stub | None]]:
    given = ServerOptions(**options)
    found = Connections(given, Metrics("tiny"))

    def take(host: str, works: bool = True) -> _Stub | None:
        stub = _Stub(found, host)
        taken = found.take(stub)  # type: ignore[arg-type]
        if works:
            found.waits(stub, False)  # type: ignore[arg-type]
        return stub if taken else None

    return found, take


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ("10.0.0.1", "10.0.0.1", "10.0.0.2"),
        ("2001:db8::1", "2001:db8::ffff:2", "2001:db8:0:1::1"),
        ("::ffff:10.0.0.1", "10.0.0.1", "::ffff:10.0.0.2"),
    ],
)
def test_one_address_takes_its_share_alone(one: str, same: str, other: str) -> None:
    found, take = _made(max_connections=8)
    assert (found.total, found.each) == (8, 6)
    first = [take(one, True) for _ in range(6)]
    assert all(first)
    assert take(same, True) is None
    kept = [take(other, True), take(other, True)]
    assert all(kept)
    assert take("192.0.2.1", True) is None  # full
    found.leave(first[0])  # type: ignore[arg-type]
    assert take(same, True) is not None


def test_a_full_address_ends_its_own_oldest_wait() -> None:
    _, take = _made(max_connections=8, max_connections_per_address=2)
    other, old, new = take("10.0.0.2", False), take("10.0.0.1", False), take("10.0.0.1", False)
    assert other is not None
    assert old is not None
    assert new is not None
    assert take("10.0.0.1", False)
    assert (other.ended, old.ended, new.ended) == (0, 1, 0)


def test_a_trusted_proxy_has_no_share() -> None:
    _, take = _made(max_connections=8, max_connections_per_address=1, trusted_proxies=("10.0.0.0/24",))
    assert all(take("10.0.0.1", True) for _ in range(8))
    assert take("10.0.0.1", True) is None


def test_the_limit_on_files_lowers_that_on_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = 256, 300
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    asked: list[Any] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    found, _ = _made()
    assert asked == [(300, 300)]
    assert 0 < found.total < 300 - 64
    assert found.each == max(1, found.total * 3 // 4)
    assert "--max-connections 4,096 needs more than the 300 files" in found.words()
    hard = 100_000
    found, _ = _made()
    assert 4096 < asked[-1][0] < 10_000
    assert (found.total, found.each) == (4096, 3072)
    assert found.words() == "at most 4,096 connections, 3,072 from one address"


# --- pieces -----------------------------------------------------------------------------------------------------------


def _chunked(body: bytes, size: int) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(each), each) for each in pieces) + b"0\r\n\r\n"


def _tokenize(text: str, name: str, size: int, *more: str) -> bytes:
    lines = ("POST /tokenize HTTP/1.1", "Host: a", "Content-Type: application/json", f"X-Request-Id: {name}", *more)
    head = "\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""]).encode()
    return head + _chunked(json.dumps({"prompt": text}).encode(), size)


@pytest.mark.parametrize("slice_bytes", [1, 7, 2048])
def test_requests_in_a_row_are_answered_in_order(monkeypatch: pytest.MonkeyPatch, slice_bytes: int) -> None:
    monkeypatch.setattr(connections, "_SLICE_BYTES", slice_bytes)
    with serve() as server:
        texts = ["a" * 50, "b", "c" * 20, "d" * 300]
        sent = [_tokenize(text, f"r{i}", 3, *["Connection: close"][: i == 3]) for i, text in enumerate(texts)]
        reader = h11.Connection(h11.CLIENT)
        with _connect(server, b"".join(sent)) as all_at_once:
            answers = _rest(all_at_once)
        found = []
        for _ in texts:
            answers = _answer(reader, answers, found)
        assert found == [(f"r{i}", len(text)) for i, text in enumerate(texts)]


def _answer(reader: h11.Connection, left: bytes, found: list[Any]) -> bytes:
    """``left`` without its first answer, whose id and count of tokens are added to ``found``."""
    head, _, rest = left.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    length = int(fields[b"content-length"])
    found.append((fields[b"x-request-id"].decode(), json.loads(rest[:length])["count"]))
    return rest[length:]


def test_chunks_of_one_byte_leave_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn takes more than 100 ms of its thread's time; a read that is parsed at once takes a second."""
    turn, times = Connections._turn, []

    def timed(self: Connections) -> None:
        began = time.thread_time()
        turn(self)
        times.append(time.thread_time() - began)

    monkeypatch.setattr(Connections, "_turn", timed)
    with serve() as server, ThreadPoolExecutor(4) as pool:
        text = "a" * 100_000
        requests = [_tokenize(text, f"r{i}", 1, "Connection: close") for i in range(2)]
        asked = [pool.submit(lambda sent: _rest(_connect(server, sent)), each) for each in requests]
        assert all(each.result(SOON_S).startswith(b"HTTP/1.1 200 ") for each in asked)
    assert len(times) > 50
    assert max(times) < 0.1, sorted(times)[-5:]


@pytest.mark.parametrize("kind", ["extensions", "refused"])
def test_bytes_beside_a_body_have_a_limit(kind: str) -> None:
    """Chunks' extensions cost as much as a body, and so does the body of a request that has been answered."""
    path, chunk = (
        ("/tokenize", b"1;%s\r\n \r\n" % (b"x" * 500)) if kind == "extensions" else ("/nothing", b"1\r\na\r\n")
    )
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serve(max_body_bytes=1000, header_timeout_s=SOON_S) as server:
        with _connect(server, head.encode()) as endless:
            _trickled(endless, chunk * (4000 // len(chunk)))
        assert _refused(server, "too_large") == (kind == "extensions")


def test_many_small_headers_in_one_read_are_refused() -> None:
    with serve() as server:
        answer = _rest(_connect(server, HEAD + b"a:b\r\n" * 20_000 + b"\r\n"))
        assert answer == b"" or "16,384 bytes" in _error(answer, 400)["message"]
        assert _refused(server, "invalid") == 1


# --- bodies that are too long -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["length", "chunks", "slowly", "no key", "no key, chunks"])
def test_a_body_that_is_too_long_is_dropped(kind: str) -> None:
    """A client that reads only after it has sent everything sees the answer, and no reset."""
    body = b" " * (8 << 20)
    key = "none" if "no key" in kind else "k"
    head = f"POST /tokenize HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
    with serve(api_keys=("k",), max_body_bytes=100_000) as server:
        if "chunks" in kind:
            sent = b"Transfer-Encoding: chunked\r\n\r\n" + b"10000\r\n%s\r\n" % body[: 1 << 16] * 128 + b"0\r\n\r\n"
        else:
            sent = b"Content-Length: %d\r\n\r\n" % len(body) + body
        connection = _connect(server, head.encode())
        if kind == "slowly":
            middle = len(sent) // 2
            connection.sendall(sent[:middle])
            time.sleep(0.3)
            connection.sendall(sent[middle:])
        else:
            connection.sendall(sent)
        answer = b""
        with connection:
            while piece := connection.recv(65536):  # raises for a reset
                answer += piece
        status = 401 if "no key" in kind else 413
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert _refused(server, "too_large") == (status == 413)
        assert server.post("/tokenize", {"prompt": "a"}, authorization="Bearer k").status_code == 200


def test_the_length_of_a_body_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the request before does not count, which is answered when the next one has begun."""
    monkeypatch.setattr(connections, "_SLICE_BYTES", 256)
    head = "POST {} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{}\r\n"
    first = json.dumps({"prompt": "a", "max_tokens": 60, "ignore_eos": True}).encode().ljust(800)
    second = json.dumps({"prompt": "b"}).encode().rjust(600)
    with serve(max_body_bytes=1000) as server:
        connection = _connect(server, head.format("/v1/completions", 800, "").encode() + first)
        connection.sendall(head.format("/tokenize", 600, "Connection: close\r\n").encode())
        with connection:
            answer = connection.recv(65536)  # of the first
            for at in (0, 300):
                time.sleep(0.1)
                connection.sendall(second[at : at + 300])
            while piece := connection.recv(65536):
                answer += piece
        assert answer.count(b"HTTP/1.1 200 ") == 2
        assert b'"count": 1' in answer
        connection = _connect(server, head.format("/v1/completions", 800, "").encode() + first)
        connection.sendall(head.format("/tokenize", 1001, "").encode() + b" " * 1001)
        assert b"HTTP/1.1 413 " in _rest(connection)


def test_a_client_that_waits_before_its_body_is_told_at_once() -> None:
    with serve(max_body_bytes=100) as server:
        head = "POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 200\r\nExpect: 100-continue\r\n\r\n"
        answer = _rest(_connect(server, head.encode()))
        assert answer.startswith(b"HTTP/1.1 413 "), answer
        assert b"100 Continue" not in answer


def test_a_body_without_end_is_not_read_for_ever() -> None:
    with serve(max_body_bytes=100) as server:
        head = b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        with _connect(server, head) as connection, pytest.raises(ConnectionError):
            connection.sendall(b"100000\r\n%s\r\n" % (b" " * (1 << 20)) * 300)


# --- other clients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 400),
        (b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
    ],
    ids=["tls", "no host", "length", "chunk"],
)
def test_what_is_no_request_gets_an_error_object(sent: bytes, status: int) -> None:
    with serve() as server:
        assert _error(_rest(_connect(server, sent)), status)["code"] == "invalid_http"
        assert _refused(server, "invalid") == 1


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /v1/completions", 405),
        (b"GET /ws", 404),
        (b"A" * 3000 + b" /v1/models", 405),
        (b"CONNECT evil.example:443", 404),
        (b"OPTIONS *", 404),
    ],
    ids=["path", "none", "method", "connect", "star"],
)
def test_upgrades_and_strange_methods_reach_nothing(line: bytes, status: int) -> None:
    more = (
        b"Upgrade: websocket\r\nConnection: Upgrade, close\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: YQ==\r\n"
    )
    with serve() as server:
        answer = _rest(_connect(server, line + b" HTTP/1.1\r\nHost: a\r\n" + more + b"\r\n"))
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert _refused(server, "not_found") == 1


def test_a_client_that_never_reads_its_answers_is_cut_off() -> None:
    with serve(send_timeout_s=0.2) as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        requests = b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n" * 400
        with _connect(server, requests, receive_buffer=4096):
            until(lambda: server.connections._open)
            until(lambda: not server.connections._open)


def test_a_defect_in_one_connection_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle = Connection.handle_events

    def fails_once(self: Connection) -> None:
        monkeypatch.setattr(Connection, "handle_events", handle)
        raise KeyError("x")

    with serve() as server:
        monkeypatch.setattr(Connection, "handle_events", fails_once)
        assert _rest(_connect(server, HEAD + b"\r\n")) == b""
        assert server.get("/version").status_code == 200
    assert "a defect of the server" in caplog.text
