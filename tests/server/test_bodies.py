"""What a body may cost: it is weighed before it is parsed, described by few errors, and worked on beside the loop."""

from __future__ import annotations

import json
import random
import re
import threading
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[serve])")

from pydantic import ValidationError
from server_case import Server, serve

from shardfuse.serving.server import bodies, protocol, weights
from shardfuse.serving.server.errors import ApiError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MIB = 1 << 20
SHORT = {"prompt": "hi", "max_tokens": 2, "temperature": 0}
MESSAGE = {"role": "user", "content": "hi"}


def keys(count: int, value: Any) -> dict[str, Any]:
    return {str(number): value for number in range(count)}


def naive_weight(raw: bytes) -> int:
    """By a regular expression that removes the texts."""
    texts = re.findall(rb'"(?:[^"\\]|\\.)*"', raw)
    return weights.TEXT * len(texts) + weights._counted(re.sub(rb'"(?:[^"\\]|\\.)*"', b"", raw))


@pytest.mark.parametrize("size", [2, 3, 7, 1 << 16])
def test_a_body_weighs_what_its_values_do_outside_of_texts(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(weights, "_SLICE", size)
    draw = random.Random(size)

    def text(most: int) -> str:
        return "".join(draw.choices('a"\\,[{}]:\u4e00', k=draw.randint(0, most)))

    for _ in range(100):
        raw = json.dumps(
            {text(9): [draw.random(), text(30), {text(3): []}] for _ in range(draw.randint(1, 9))}
        ).encode()
        expected = naive_weight(raw)
        assert weights.weight(raw, expected) == expected
        assert weights.weight(raw, expected - 1) > expected - 1


def test_a_heavy_body_is_refused_unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "from_json", lambda raw: pytest.fail("it was parsed"))
    raw = b'{"prompt":[' + b",".join([b"{}"] * 20_000) + b"]}"
    with pytest.raises(ApiError, match="413") as raised:
        bodies.parsed(raw, protocol.CompletionRequest, 8 * MIB)
    assert "more than the 8 MiB of memory that this server gives them (--max-body-memory-mib)" in str(raised.value.body)


HEAVY = json.dumps([{}] * 20_000)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {**SHORT, "structured_outputs": {"json": HEAVY}}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "function": {"name": "f", "arguments": HEAVY}}]}]}),
        ("/tokenize", {"messages": [{"role": "assistant", "tool_calls": [
            {"id": str(n), "function": {"name": "f", "arguments": json.dumps([{}] * 4000)}} for n in range(8)]}]}),
    ],
    ids=["schema", "arguments", "tokenize"],
)  # fmt: skip
def test_json_within_a_text_is_weighed_too(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    loads = json.loads

    def small(text: Any) -> Any:
        assert len(text) < 1000, "it was parsed"
        return loads(text)

    monkeypatch.setattr(json, "loads", small)
    response = server.post(path, body)
    monkeypatch.undo()
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


def test_punctuation_within_a_text_weighs_nothing() -> None:
    for text in (",[{" * 500_000, '"' * 500_000, '\\"' * 500_000):
        found = bodies.parsed(json.dumps({"prompt": text}).encode(), protocol.CompletionRequest, MIB)
        assert found.prompt == text


WRONG: list[tuple[str, dict[str, Any], str | None]] = [
    (COMPLETIONS, {"prompt": [1.5] * 5000}, "prompt"),
    (COMPLETIONS, {"prompt": [*[1] * 5000, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1.5]] * 5000}, "prompt"),
    (COMPLETIONS, {**SHORT, "stop_token_ids": ["a"] * 5000}, "stop_token_ids.0"),
    (COMPLETIONS, {**SHORT, "allowed_token_ids": [-1] * 5000}, "allowed_token_ids.0"),
    (COMPLETIONS, {**SHORT, "stop": [1] * 5000}, "stop"),
    (COMPLETIONS, {**SHORT, "logit_bias": keys(5000, 101)}, "logit_bias.0"),
    (COMPLETIONS, {**SHORT, "logit_bias": {**keys(5000, 1), "a": True}}, "logit_bias.a"),
    (COMPLETIONS, {**SHORT, "logit_bias": {f"x{key}": 1 for key in range(5000)}}, "logit_bias"),
    (COMPLETIONS, {**SHORT, "logit_bias": {"x" * 100_000: 1}}, "logit_bias"),
    (COMPLETIONS, {**SHORT, "metadata": keys(5000, 1)}, "metadata.0"),
    (COMPLETIONS, {**SHORT, **keys(5000, 1)}, "0"),
    (COMPLETIONS, {**SHORT, **keys(60, 1)}, "0"),
    (COMPLETIONS, {**SHORT, "structured_outputs": {"choice": [1] * 5000}}, "structured_outputs.choice.0"),
    (COMPLETIONS, {**SHORT, "stream_options": keys(5000, 1)}, "stream_options.0"),
    (CHAT, {"messages": [{}] * 5000}, "messages.0.role"),
    (CHAT, {"messages": [{**MESSAGE, **keys(5000, 1)}]}, "messages.0.0"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "x"}] * 5000}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}] * 5000}]}, "messages.0.tool_calls.0.id"),
    (CHAT, {"messages": [MESSAGE], "tools": [{}] * 5000}, "tools.0.function"),
    (CHAT, {"messages": [MESSAGE], "chat_template_kwargs": keys(5000, 1)}, "chat_template_kwargs"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "param"), WRONG, ids=[f"{each[2]}-{number}" for number, each in enumerate(WRONG)]
)
def test_a_wrong_body_has_few_errors_and_a_short_answer(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    kind = protocol.CompletionRequest if path == COMPLETIONS else protocol.ChatRequest
    if param == "logit_bias":  # its tokens are checked later
        kind.model_validate(body)
    else:
        with pytest.raises(ValidationError) as raised:
            kind.model_validate(body)
        assert raised.value.error_count() <= 64
    response = server.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert len(response.content) < 1000


LONG = "\U0001f600" * 100_000


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, {**SHORT, LONG: 1}, 400),
        (COMPLETIONS, {**SHORT, "model": LONG}, 404),
        (COMPLETIONS, {**SHORT, "user": [LONG]}, 400),
        (COMPLETIONS, {**SHORT, "response_format": {"type": LONG}}, 400),
        (COMPLETIONS, {**SHORT, "structured_outputs": {"regex": "(" * 100_000}}, 400),
        (COMPLETIONS, {**SHORT, "structured_outputs": {"grammar": LONG}}, 400),
        (COMPLETIONS, {**SHORT, "structured_outputs": {"json": LONG}}, 400),
        (CHAT, {"messages": [MESSAGE], "tool_choice": LONG}, 400),
        (CHAT, {"messages": [MESSAGE], "chat_template_kwargs": {LONG: 1, "messages": 1}}, 400),
        (f"/v1/models/{'x' * 8000}", None, 404),
        (f"/{'x' * 8000}", None, 404),
    ],
    ids=["field", "model", "user", "format", "regex", "grammar", "schema", "choice", "argument", "models", "path"],
)
def test_an_error_has_at_most_four_kilobytes(server: Server, path: str, body: Any, status: int) -> None:
    response = server.get(path) if body is None else server.post(path, body)
    assert response.status_code == status
    assert len(response.content) <= 4096
    assert response.json()["error"]["message"]


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def encoded(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """How many characters each call of the tokenizer has encoded, and in which thread."""
    found: list[tuple[int, str]] = []
    encode = server.served._encode

    def recorded(text: str, special: bool) -> list[int]:
        found.append((len(text), threading.current_thread().name))
        return encode(text, special)

    monkeypatch.setattr(server.served, "_encode", recorded)
    return found


def _too_long(server: Server, path: str, body: dict[str, Any]) -> None:
    error = server.post(path, body)
    assert error.status_code == 400
    assert error.json()["error"]["code"] == "context_length_exceeded"


def test_a_text_that_must_be_too_long_is_not_encoded(server: Server, encoded: list[tuple[int, str]]) -> None:
    text = "a" * (server.served.max_model_len * server.served._longest_token + 1)
    _too_long(server, COMPLETIONS, {**SHORT, "prompt": text})
    _too_long(server, COMPLETIONS, {**SHORT, "prompt": ["a", text]})
    _too_long(server, CHAT, {"messages": [MESSAGE, {"role": "user", "content": text}]})
    _too_long(server, CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]})
    assert sum(characters for characters, _ in encoded) <= 1


def test_a_text_that_seems_too_long_is_encoded_up_to_there(
    server: Server, encoded: list[tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.served, "_longest_token", 10_000, raising=False)
    _too_long(server, COMPLETIONS, {**SHORT, "prompt": "a" * 1_000_000})
    assert [characters for characters, _ in encoded] == [1 << 16]
    assert encoded[0][1].startswith("shardfuse-beside")


def test_a_text_whose_pieces_fit_is_encoded_whole(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are those of the whole text, whatever its pieces have."""
    text = "ab" * 100_000
    monkeypatch.setattr(server.served, "_longest_token", 10_000, raising=False)
    monkeypatch.setattr(server.served, "_encode", lambda text, special: [len(text)])
    assert server.call(server.served.encode(text, True, 50)) == [len(text)]


def test_what_takes_long_runs_beside_the_loop(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def spied(where: Any, name: str) -> None:
        real = getattr(where, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append((name, threading.current_thread().name))
            return real(*args, **kwargs)

        monkeypatch.setattr(where, name, call)

    spied(bodies, "from_json")
    spied(server.served.tokenizer, "apply_chat_template")
    spied(server.served, "decode")
    names = ("from_json", "apply_chat_template", "decode")
    parts = [{"type": "text", "text": ""}] * 2000
    small = {"messages": [MESSAGE], "max_tokens": 1, "temperature": 0}
    assert server.post(CHAT, {**small, "messages": [{"role": "user", "content": parts}]}).status_code == 200
    assert server.post("/detokenize", {"tokens": [97] * 8000}).json() == {"prompt": "a" * 8000}
    assert {name for name, _ in seen} == set(names)
    assert all(thread.startswith("shardfuse-beside") for _, thread in seen), seen
    seen.clear()
    assert server.post(CHAT, small).status_code == 200
    assert seen
    assert not any(thread.startswith("shardfuse-beside") for _, thread in seen)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_whole_answer_is_limited_and_a_stream_is_not() -> None:
    body = {**SHORT, "max_tokens": 40, "n": 4, "ignore_eos": True}
    chat = {"messages": [MESSAGE], "max_tokens": 40, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    with serve(max_answer_bytes=2000) as server:
        assert server.post(COMPLETIONS, body).status_code == 200
        for path, asked in (
            (COMPLETIONS, {**body, "logprobs": 5}),
            (COMPLETIONS, {**SHORT, "prompt": "a" * 100, "echo": True, "n": 21}),
            (COMPLETIONS, {**SHORT, "prompt": "a" * 40, "echo": True, "logprobs": 5}),
            (CHAT, chat),
        ):
            error = server.post(path, asked)
            assert error.status_code == 400, asked
            assert error.json()["error"]["code"] == "answer_too_large"
            assert "--max-answer-bytes" in error.json()["error"]["message"]
        for path, asked in ((COMPLETIONS, {**body, "logprobs": 5}), (CHAT, chat)):
            with server.http() as client:
                streamed = client.post(path, json={**asked, "stream": True})
            assert streamed.status_code == 200
            assert streamed.text.endswith("data: [DONE]\n\n")
            assert '"error"' not in streamed.text


def test_tokens_told_at_once_are_limited() -> None:
    with serve(max_tokenized_tokens=1) as server:
        most = server.served.max_model_len
        assert server.post("/tokenize", {"prompt": "a" * most}).json()["count"] == most
        for path, body in (
            ("/tokenize", {"prompt": "a" * (most + 1)}),
            ("/tokenize", {"prompt": "a" * 100 * most}),
            ("/detokenize", {"tokens": [97] * (most + 1)}),
        ):
            assert server.post(path, body).status_code == 400


def test_answers_count_not_prompts() -> None:
    """One request may ask for as many answers as may wait."""
    with serve(engine={"max_queued_requests": 6}) as small:
        assert len(small.post(COMPLETIONS, {**SHORT, "prompt": ["a"] * 3, "n": 2}).json()["choices"]) == 6
        for body in ({"prompt": ["a"] * 7}, {"prompt": "a", "n": 7}, {"prompt": ["a"] * 4, "n": 2}):
            error = small.post(COMPLETIONS, {**SHORT, **body})
            assert error.status_code == 400
            assert "at most 6 may wait (--max-queued-requests)" in error.json()["error"]["message"]
        assert small.post(CHAT, {"messages": [MESSAGE], "n": 7}).status_code == 400


def test_lists_are_prepared_once_for_all_prompts(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """And are unique: a token that is listed a thousand times is held once."""
    made: list[Any] = []
    submit = server.served.submit
    monkeypatch.setattr(server.served, "submit", lambda requests: made.extend(requests) or submit(requests))
    lists = {"stop_token_ids": [5] * 1000, "allowed_token_ids": [97, 98] * 500, "stop": ["x", "x"]}
    body = {**SHORT, "prompt": ["a", "b", "c"], **lists, "logit_bias": {"97": 1}}
    assert server.post(COMPLETIONS, body).status_code == 200
    first, *others = made
    assert len(others) == 2
    assert all(each.sampling is first.sampling for each in others)
    assert set(first.sampling.allowed_tokens) == {97, 98}
    assert len(first.sampling.allowed_tokens) == 2
    assert set(first.stop) - server.served.stop_ids == {5}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "max_tokens": int("9" * 4300)}),
        (COMPLETIONS, {"prompt": [int("9" * 4300)], "max_tokens": 1}),
        (COMPLETIONS, {**SHORT, "top_k": int("9" * 4300)}),
        (COMPLETIONS, {**SHORT, "seed": int("9" * 4300)}),
        (CHAT, {"messages": [MESSAGE], "max_completion_tokens": int("9" * 4300)}),
    ],
    ids=["max_tokens", "prompt", "top_k", "seed", "chat"],
)
def test_a_number_of_the_most_digits_is_refused(server: Server, path: str, body: dict[str, Any]) -> None:
    assert server.post(path, body).status_code == 400


def test_only_utf_8_is_read(server: Server) -> None:
    """Another encoding would hide a body's values from the weighing."""
    body = json.dumps({"user": '"', "prompt": "a"}).encode("utf-16-le")
    with server.http() as client:
        response = client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "no JSON" in response.json()["error"]["message"]


def test_texts_count_as_the_json_that_they_become() -> None:
    asked = {"prompt": "\u4e00" * 40, "echo": True, "max_tokens": 0, "n": 32}
    with serve(max_answer_bytes=10_000) as server:
        assert server.post(COMPLETIONS, {**asked, "prompt": "a" * 40}).status_code == 200
        assert server.post(COMPLETIONS, asked).json()["error"]["code"] == "answer_too_large"
        error = server.post("/detokenize", {"tokens": [97] * 900})
        assert error.status_code == 400
        assert "--max-answer-bytes" in error.json()["error"]["message"]
