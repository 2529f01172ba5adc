"""The server as raw HTTP sees it: bad bodies, clients that go or stall, limits, health and the log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[serve])")

from server_case import SOON_S, Server, answer, events, serve, until

from shardfuse.serving import RanksLost
from shardfuse.serving.server.responses import EventStream

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
JSON = {"Content-Type": "application/json"}


class Raw:
    """A connection whose bytes the test writes itself."""

    def __init__(self, server: Server, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(SOON_S)
        self.socket.connect(("127.0.0.1", server.port))

    def send(self, path: str, body: Any, *more: str) -> None:
        data = json.dumps(body).encode()
        self.head(path, *JSON_LINE, f"Content-Length: {len(data)}", *more)
        self.socket.sendall(data)

    def head(self, path: str, *lines: str) -> None:
        self.socket.sendall("\r\n".join([f"POST {path} HTTP/1.1", "Host: a", *lines, "", ""]).encode())

    def rest(self) -> bytes:
        """All that comes until the server closes the connection."""
        found = b""
        while piece := self.socket.recv(65536):
            found += piece
        return found

    def close(self) -> None:
        self.socket.close()


JSON_LINE = ("Content-Type: application/json",)


@pytest.fixture
def raw(server: Server) -> Iterator[Raw]:
    connection = Raw(server)
    yield connection
    connection.close()


def _error(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return error


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        (b'{"prompt": ', "application/json", "the body is no JSON"),
        (b"\xff\xfe", "application/json", "the body is no JSON"),
        (b"[" * 20_000, "application/json", "the body is no JSON"),
        (b'{"max_tokens": ' + b"1" * 5000 + b"}", "application/json", "the body is no JSON"),
        (b"", "application/json", "expected a JSON object"),
        (b"[1]", "application/json", r"the body is \[1\]: expected a JSON object"),
        (b'{"prompt": "a"}', "text/plain", "Content-Type: application/json"),
        (b'{"prompt": "a"}', "application/x-www-form-urlencoded", "Content-Type: application/json"),
    ],
    ids=["cut", "bytes", "deep", "digits", "empty", "list", "text", "form"],
)
def test_a_body_that_is_no_object(server: Server, content: bytes, kind: str, said: str) -> None:
    with server.http() as client:
        response = client.post(COMPLETIONS, content=content, headers={"Content-Type": kind})
    assert re.search(said, _error(response, 400)["message"])


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "prompt", "prompt: field required; nothing was given"),
        ({"prompt": 3}, "prompt", "prompt: input should be a valid string, or .* list; 3 was given"),
        ({"prompt": ["a", 3]}, "prompt", "at 1, input should be a valid string"),
        ({"prompt": "a", "temperature": "1"}, "temperature", "valid number; '1' was given"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "valid integer"),
        ({"prompt": "a", "stream": 1}, "stream", "valid boolean; 1 was given"),
        ({"prompt": "a", "stop": [1]}, "stop", r"at 0, input should be a valid string; \[1\] was given"),
        ({"prompt": "a", "temprature": 1}, "temprature", "no such parameter here; did you mean 'temperature'\\?$"),
        ({"prompt": "a", "max_token": 1}, "max_token", "did you mean 'max_tokens'\\?$"),
        ({"prompt": "a", "length_penalty": 1}, "length_penalty", "no such parameter here; /openapi.json lists"),
        (
            {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}},
            "response_format.json_schema.shema",
            "did you mean 'schema'\\?$",
        ),
        (
            {"prompt": "a", "response_format": {"type": "json_schema", "json_shema": {"name": "a"}}},
            "response_format.json_shema",
            "did you mean 'json_schema'\\?$",
        ),
        (
            {"prompt": "a", "response_format": {"type": "text", "json_shema": {"name": "a"}}},
            "response_format.json_shema",
            "/openapi.json lists what there is$",
        ),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format", "'xml'"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "'x' is no token"),
        ({"prompt": "a", "allowed_token_ids": [260]}, "allowed_token_ids", "0 to 259"),
        ({"prompt": "\ud800"}, None, "half of a surrogate pair"),
        ({"prompt": "a", "\ud800": 1}, None, "unicode"),
        ({"prompt": "a", "structured_outputs": {"grammar": "\ud800"}}, None, "cannot be compiled"),
    ],
    ids=lambda each: (
        None if isinstance(each, str) or each is None else ",".join(each).encode("ascii", "replace").decode()
    ),
)
def test_a_wrong_value_is_named(server: Server, body: Any, param: str | None, said: str) -> None:
    with server.http() as client:
        response = client.post(COMPLETIONS, content=json.dumps(body), headers=JSON)
    error = _error(response, 400)
    assert error["param"] == param
    assert re.search(said, error["message"]), error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "", "content": "a"}, "messages.0.role"),
        ({"role": "user", "content": 3}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "noise"}]}, "messages.0.content"),
        (
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
    ],
    ids=["role", "content", "part", "arguments"],
)  # fmt: skip
def test_a_wrong_message_is_named(server: Server, message: Any, param: str) -> None:
    assert _error(server.post("/v1/chat/completions", {"messages": [message]}), 400)["param"] == param


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/responses"])
@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "an image (image_url)"),
        ({"image_url": "http://a/b.png", "uuid": "u"}, "an image (image_url)"),
        ({"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}, "an image (input_image)"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "audio (input_audio)"),
        ({"type": "video_url", "video_url": {"url": "http://a"}}, "a video (video_url)"),
        ({"type": "input_file", "file_id": "f"}, "a file (input_file)"),
        ({"type": "file", "file": {"file_id": "f"}}, "a file (file)"),
    ],
    ids=["image", "no type", "input_image", "audio", "video", "input_file", "file"],
)
def test_a_part_that_is_no_text_is_told_in_one_line(server: Server, path: str, part: Any, said: str) -> None:
    key = "input" if path == "/v1/responses" else "messages"
    text = {"type": "input_text" if key == "input" else "text", "text": "a"}
    body = {key: [{"role": "user", "content": "a"}, {"role": "user", "content": [text, part]}], "modalities": ["text"]}
    error = _error(server.post(path, body), 400)
    assert error["message"] == f"{key}[1].content[1]: this server takes text only, and this is {said}"
    assert error["param"] == f"{key}.1.content.1"


HALF = "\ud800"
FUNCTION = {"name": "f", "description": HALF, "parameters": {"type": "object", "properties": {HALF: {"const": HALF}}}}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": HALF}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": FUNCTION}]},
        {"messages": [{"role": "user", "content": "a"}], "stop": HALF, "max_tokens": 2},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"bos_token": HALF}, "max_tokens": 2},
        {"messages": [{"role": "user", "content": "a"}], "metadata": {HALF: HALF}, "max_tokens": 2},
        {"messages": [{"role": "user", "content": "a"}], "model": HALF},
    ],
    ids=["content", "part", "tool", "stop", "template", "metadata", "model"],
)
def test_half_a_surrogate_pair_breaks_nothing(server: Server, body: Any) -> None:
    with server.http() as client:
        response = client.post("/v1/chat/completions", content=json.dumps(body), headers=JSON)
    assert response.status_code in (200, 400, 404), response.text


def test_a_schema_that_cannot_be_compiled(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "no such type"}}}
    for streamed in (False, True):
        error = _error(server.post(COMPLETIONS, {**SHORT, "response_format": form, "stream": streamed}), 400)
        assert "cannot be compiled" in error["message"]


def test_too_large_by_its_header() -> None:
    with serve(max_body_bytes=100) as server:
        connection = Raw(server)
        connection.head(COMPLETIONS, *JSON_LINE, "Content-Length: 101")
        found = connection.rest().decode()  # without one byte of the body
        assert found.startswith("HTTP/1.1 413")
        assert "connection: close" in found.lower()
        assert '"code":"request_too_large"' in found
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_too_large_in_chunks() -> None:
    with serve(max_body_bytes=100) as server:
        connection = Raw(server)
        connection.head(COMPLETIONS, *JSON_LINE, "Transfer-Encoding: chunked")
        for _ in range(3):
            connection.socket.sendall(b"32\r\n" + b" " * 50 + b"\r\n")
        found = connection.rest().decode()
        assert found.startswith("HTTP/1.1 413")
        assert "connection: close" in found.lower()


def test_a_body_that_does_not_come() -> None:
    with serve(send_timeout_s=0.3) as server:
        connection = Raw(server)
        connection.head(COMPLETIONS, *JSON_LINE, "Content-Length: 50")
        connection.socket.sendall(b"{")
        found = connection.rest().decode()
        assert found.startswith("HTTP/1.1 408")
        assert "connection: close" in found.lower()


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("GET", COMPLETIONS, 405)])
def test_paths_and_methods(server: Server, method: str, path: str, status: int) -> None:
    with server.http() as client:
        error = _error(client.request(method, path), status)
    assert path in error["message"]


# --- clients that go, or that take nothing ----------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_frees_its_blocks(server: Server, raw: Raw, streamed: bool) -> None:
    with server.slow(0.1):  # its 200 steps take 20 s: a server that does not notice ends it as "length", not "abort"
        raw.send(COMPLETIONS, {**LONG, "n": 2, "stream": streamed})
        if streamed:
            assert b"data: " in _until(raw, b"data: ")
        until(lambda: server.served.serve.load.used_blocks)
        before = server.metrics()["vllm:request_success_total{abort}"]
        raw.close()
        until(lambda: not server.served.open_requests)
        until(lambda: not server.served.serve.load.used_blocks)
    assert server.metrics()["vllm:request_success_total{abort}"] == before + 2


def test_a_client_that_goes_while_it_waits(server: Server, raw: Raw) -> None:
    with server.paused():
        raw.send(COMPLETIONS, {**LONG, "stream": True, "response_format": {"type": "json_object"}})
        until(lambda: server.engine._live)
        raw.close()
        until(lambda: not server.served.open_requests)
        until(lambda: not server.engine._live)


def test_a_client_that_goes_just_as_an_event_is_sent_ends_its_stream() -> None:
    sent: list[Any] = []

    async def chunks() -> AsyncGenerator[dict[str, Any] | None, None]:
        while True:
            await asyncio.sleep(0)
            yield {}

    async def main() -> None:
        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) == 3:
                sends.cancel()  # before this call has ended
            assert len(sent) < 100

        sends = asyncio.ensure_future(EventStream(chunks(), SOON_S)._send(send))
        await asyncio.wait([sends])
        assert sends.cancelled()

    asyncio.run(main())
    assert len(sent) == 3


def _until(raw: Raw, mark: bytes) -> bytes:
    found = b""
    while mark not in found:
        piece = raw.socket.recv(65536)
        assert piece, found
        found += piece
    return found


def test_a_reader_that_takes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "shardfuse.server")
    with serve(send_timeout_s=0.3, engine={"num_blocks": 512, "max_num_seqs": 16}) as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        stalled = Raw(server, receive_buffer=4096)
        stalled.send(COMPLETIONS, {**LONG, "n": 8, "logprobs": 20, "stream": True})
        until(lambda: "took nothing for 0.3 s" in caplog.text)
        until(lambda: not server.served.open_requests)
        server.idle()
        assert server.post(COMPLETIONS, SHORT).status_code == 200
        stalled.close()


# --- ids, the log, keys -----------------------------------------------------------------------------------------------


def test_request_ids(server: Server) -> None:
    response = server.post(COMPLETIONS, SHORT, x_request_id="my-id.7")
    assert response.headers["x-request-id"] == "my-id.7"
    assert response.json()["id"] == "cmpl-my-id.7"
    others = {server.get("/version", **{"x-request-id": wrong}).headers["x-request-id"] for wrong in ("a b", "x" * 129)}
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in others)
    assert len(others) == 2


def test_a_line_in_the_log_for_each_request(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shardfuse.access"):
        server.post(COMPLETIONS, {**SHORT, "n": 2, "ignore_eos": True}, x_request_id="one")
        server.post(COMPLETIONS, {**SHORT, "stream": True, "stop": answer("hello", 4)[1][1]}, x_request_id="two")
        server.post(COMPLETIONS, {}, x_request_id="three")
        server.get("/health")  # which is asked for all the time
        until(lambda: len(caplog.records) == 3)
    told: list[Any] = [record.told for record in caplog.records]  # type: ignore[attr-defined]
    assert [each["request_id"] for each in told] == ["one", "two", "three"]
    assert [each["status"] for each in told] == [200, 200, 400]
    assert [each.get("finish") for each in told] == ["length", "stop", None]
    assert (told[0]["prompt_tokens"], told[0]["completion_tokens"]) == (5, 8)
    assert [each.get("error") for each in told] == [None, None, "prompt: field required"]
    assert caplog.records[0].getMessage() == "POST /v1/completions 200"
    assert all(0 <= each["seconds"] < SOON_S for each in told)


def test_keys_guard_what_costs_and_share_no_prefix() -> None:
    with serve(api_keys=("one", "two"), debug=True) as server:
        for path in ("/v1/models", "/debug/leaks", "/nothing"):
            assert _error(server.get(path), 401)["code"] == "invalid_api_key"
            assert _error(server.get(path, authorization="Basic one"), 401)
        assert server.get("/v1/models").headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/version", "/metrics"):
            assert server.get(path).status_code == 200
        body = {**SHORT, "prompt": "a" * 40}
        shared = []
        for key in ("one", "one", "two", "two"):
            before = server.engine.stats.shared_tokens
            assert server.post(COMPLETIONS, body, authorization=f"Bearer {key}").status_code == 200
            server.idle()
            shared.append(server.engine.stats.shared_tokens - before)
        assert shared[0] == shared[2] == 0
        assert shared[1] == shared[3] > 0


# --- limits and health ------------------------------------------------------------------------------------------------


def test_a_full_queue_is_429_and_empties() -> None:
    with serve(engine={"max_num_seqs": 1, "max_queued_requests": 2}) as server, ThreadPoolExecutor(2) as pool:
        with server.paused():
            first = [pool.submit(server.post, COMPLETIONS, SHORT) for _ in range(2)]
            until(lambda: len(server.engine._live) == 2)
            response = server.post(COMPLETIONS, SHORT)
            assert _error(response, 429)["type"] == "rate_limit_error"
            assert int(response.headers["retry-after"]) >= 1
            assert server.get("/health").status_code == 200
        assert [each.result(SOON_S).status_code for each in first] == [200, 200]
        assert server.post(COMPLETIONS, SHORT).status_code == 200


def test_the_prompts_of_a_request_do_not_fill_the_queue_for_each_other() -> None:
    with serve(engine={"max_num_seqs": 1, "max_queued_requests": 3}) as server:
        made = server.post(COMPLETIONS, {**SHORT, "prompt": ["hello", "abc", "a"]})
        assert [each["text"] for each in made.json()["choices"]] == [
            answer(each, 4)[1] for each in ("hello", "abc", "a")
        ]


def test_draining_lets_an_open_stream_end() -> None:
    with serve() as server, server.http() as client:
        asked = {**LONG, "stream": True}
        with server.held(after=4) as gate, client.stream("POST", COMPLETIONS, json=asked) as stream:
            pieces = stream.iter_text()
            first = next(pieces)
            with ThreadPoolExecutor(1) as pool:
                drained = pool.submit(server.call, server.served.drain())
                until(lambda: server.served.draining)
                response = server.post(COMPLETIONS, SHORT)
                assert _error(response, 503)["code"] == "draining"
                assert response.headers["retry-after"]
                assert _error(server.post(COMPLETIONS, {**SHORT, "stream": True}), 503)["code"] == "draining"
                assert _error(server.get("/health"), 503)["code"] == "unhealthy"
                assert not drained.done()
                gate.set()
                found = events(first + "".join(pieces))
                drained.result(SOON_S)
        assert "".join(each["choices"][0]["text"] for each in found) == _greedy_text(200)
        assert found[-1]["choices"][0]["finish_reason"] == "length"


def _greedy_text(most: int) -> str:
    from server_case import model, text_of

    from shardfuse.serving import Request
    from shardfuse.testing import solo_tokens

    return text_of(solo_tokens(model(), Request(list(b"hello"), max_new_tokens=most)))


def test_a_hung_step_is_unhealthy() -> None:
    with serve(health_timeout_s=0.3) as server, ThreadPoolExecutor(1) as pool:
        until(lambda: server.get("/health").json() == {"status": "ok"})
        with server.held():
            waiting = pool.submit(server.post, COMPLETIONS, SHORT)
            until(lambda: server.get("/health").status_code == 503)
            assert "ended no step" in _error(server.get("/health"), 503)["message"]
        assert waiting.result(SOON_S).status_code == 200
        until(lambda: server.get("/health").status_code == 200)


def test_an_idle_engine_that_hangs_is_unhealthy() -> None:
    with serve(health_timeout_s=0.3) as server:
        with server.held():
            assert "--health-timeout" in _error(server.get("/health"), 503)["message"]

        def healthy() -> bool:
            server.served._probed = (-1e9, "")  # what was found counts for a few seconds
            return server.get("/health").status_code == 200

        until(healthy)


def test_lost_ranks_and_what_the_surroundings_know() -> None:
    wrong: list[str] = []
    with serve(wrong=lambda: wrong[0] if wrong else "") as server:
        assert server.get("/health").status_code == 200
        with server.failing(RanksLost("rank 1 has ended")):
            assert _error(server.post(COMPLETIONS, SHORT), 503)["code"] == "ranks_lost"
        assert "rank 1 has ended" in _error(server.get("/health"), 503)["message"]
        wrong.append("rank 2's process has ended")
        assert "rank 2's process" in _error(server.get("/health"), 503)["message"]


def _raises(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    "error", [ValueError("inside the model"), RuntimeError("inside the model")], ids=lambda e: type(e).__name__
)
def test_a_failure_of_the_model_is_500_and_passes(server: Server, error: Exception) -> None:
    with server.failing(error):
        assert _error(server.post(COMPLETIONS, SHORT), 500)["code"] == "model_error"
    server.served._probed = (-1e9, "")
    assert server.get("/health").status_code == 200
    assert server.post(COMPLETIONS, SHORT).json()["choices"][0]["text"] == answer("hello", 4)[1]


def test_one_request_fails_and_others_live(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine finds which of the sequences fails; the others keep their tokens."""
    logits = server.engine._runner.logits

    def fails_on_z(chunks: Any) -> Any:
        if any(tuple(each.sequence.request.prompt) == (ord("z"),) for each in chunks):
            raise ArithmeticError("a defect")
        return logits(chunks)

    monkeypatch.setattr(server.engine._runner, "logits", fails_on_z)
    prompts = ["hello", "z", "abc", "hello"]
    with ThreadPoolExecutor(4) as pool:
        made = [pool.submit(server.post, COMPLETIONS, {**SHORT, "prompt": prompt}) for prompt in prompts]
        found = [each.result(SOON_S) for each in made]
    assert "ArithmeticError" in _error(found[1], 500)["message"]
    for prompt, each in zip(prompts, found):
        if prompt != "z":
            assert each.json()["choices"][0]["text"] == answer(prompt, 4)[1]


def test_a_defect_of_the_server_is_500_with_an_id(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.served, "check_model", _raises(KeyError("x")))
    error = _error(server.post(COMPLETIONS, SHORT, x_request_id="mine"), 500)
    assert error["message"] == "a defect of the server: TypeError"


def test_an_answer_that_takes_too_long_is_408() -> None:
    with serve(request_timeout_s=0.2) as server, server.slow(0.05):
        assert _error(server.post(COMPLETIONS, LONG), 408)["code"] == "timeout"
        chunks = events(server.post(COMPLETIONS, {**LONG, "stream": True}).text)
        assert chunks[-1]["error"]["code"] == "timeout"


# --- what operators ask -----------------------------------------------------------------------------------------------


def test_tokenize_and_back(server: Server) -> None:
    text = "Grüße 日本"
    found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == list(text.encode())
    assert (found["count"], found["max_model_len"], len(found["token_strs"])) == (
        len(text.encode()),
        256,
        found["count"],
    )
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": chat}).json() == {"prompt": "<|turn|>user: hi<|turn|>"}
    _error(server.post("/tokenize", {}), 400)
    _error(server.post("/detokenize", {"tokens": [260]}), 400)


def test_nothing_grows(server: Server) -> None:
    """Requests of every kind, again and again: tasks, threads, files and what is open come back."""

    def leaks() -> dict[str, int]:
        server.idle()
        found = server.get("/debug/leaks").json()
        found.pop("resident_bytes")
        return dict(found)

    def ask() -> None:
        server.post(COMPLETIONS, SHORT)
        server.post(COMPLETIONS, {**SHORT, "stream": True})
        server.post(COMPLETIONS, {"prompt": 3})
        gone = Raw(server)
        gone.send(COMPLETIONS, {**LONG, "stream": True})
        _until(gone, b"data: ")
        gone.close()

    ask()
    before = leaks()
    for _ in range(5):
        ask()
    until(lambda: leaks() == before)


def test_debug_is_not_there_unless_it_is_asked_for() -> None:
    with serve() as server:
        _error(server.get("/debug/leaks"), 404)
        assert server.get("/version").json().keys() == {"version"}
