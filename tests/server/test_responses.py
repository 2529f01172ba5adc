"""``/v1/responses``: the same chat as ``/v1/chat/completions``, in the words of OpenAI's newer API."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[serve])")

from server_case import NAME, Server, answer, serve, until

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
ASK = {"input": "hi", "max_output_tokens": 12, "temperature": 0, "ignore_eos": True}
PROMPT = "<|turn|>user: hi<|turn|>"
SCORES = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
CHOICE = {"format": {"type": "json_schema", "name": "a", "schema": {"enum": ["yes"]}}}


def _events(text: str) -> list[Any]:
    """The data of the events, each after a line with its type, numbered from 0."""
    *pieces, end = text.split("\n\n")
    assert end == ""
    found = []
    for piece in pieces:
        name, data = piece.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


def _text(response: Any) -> str:
    (item,) = response["output"]
    (part,) = item["content"]
    return str(part["text"])


def _error(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def test_a_response_is_the_models_own_text(server: Server) -> None:
    prompt = list(server.served.tokenizer.encode(PROMPT, add_special_tokens=False))
    tokens, text = answer(prompt, 12)
    made = server.post(RESPONSES, {**ASK, "model": NAME, "metadata": {"a": "b"}, "user": "me"}, x_request_id="mine")
    found = made.json()
    assert found.pop("created_at") > 0
    usage = found.pop("usage")
    assert usage.pop("input_tokens_details").keys() == {"cached_tokens", "cache_write_tokens"}
    assert usage == {
        "input_tokens": len(prompt),
        "output_tokens": len(tokens),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(prompt) + len(tokens),
    }
    assert found == {
        "id": "resp_mine",
        "object": "response",
        "status": "incomplete",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"},
        "model": NAME,
        "output": [
            {
                "id": "msg_mine",
                "type": "message",
                "role": "assistant",
                "status": "incomplete",
                "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
            }
        ],
        "instructions": None,
        "max_output_tokens": 12,
        "temperature": 0,
        "top_p": 1,
        "top_logprobs": 0,
        "text": {"format": {"type": "text"}},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "truncation": "disabled",
        "background": False,
        "store": False,
        "previous_response_id": None,
        "metadata": {"a": "b"},
        "user": "me",
    }


def _parts(kind: str, *texts: str) -> list[Any]:
    return [{"type": kind, "text": text} for text in texts]


CONVERSATIONS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "instructions": (
        {"instructions": "be brief", "input": "hi"},
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
    ),
    "messages": (
        {"input": [{"role": "developer", "content": "be"}, {"type": "message", "role": "user", "content": "hi"}]},
        [{"role": "developer", "content": "be"}, {"role": "user", "content": "hi"}],
    ),
    "parts": (
        {"input": [{"role": "user", "content": _parts("input_text", "h", "i")}]},
        [{"role": "user", "content": "hi"}],
    ),
}


@pytest.mark.parametrize(("asked", "messages"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_a_conversation_is_the_same_chat(server: Server, asked: dict[str, Any], messages: list[Any]) -> None:
    more = {"temperature": 0.9, "seed": 5}
    found = server.post(RESPONSES, {**ASK, **more, **asked}).json()
    chat = server.post(CHAT, {"messages": messages, "max_tokens": 12, "ignore_eos": True, **more}).json()
    assert _text(found) == chat["choices"][0]["message"]["content"]
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_a_received_message_can_be_sent_back(server: Server) -> None:
    asked = {"input": "hi", "text": CHOICE, **SCORES}
    first = server.post(RESPONSES, asked).json()
    assert (first["status"], first["incomplete_details"], _text(first)) == ("completed", None, '"yes"')
    assert first["text"]["format"]["schema"] == {"enum": ["yes"]}
    again = [{"role": "user", "content": "hi"}, *first["output"], {"role": "user", "content": "sure?"}]
    second = server.post(RESPONSES, {**ASK, "input": again}).json()
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": '"yes"'}, again[-1]]
    chat = server.post(CHAT, {"messages": turns, "max_tokens": 1}).json()
    assert second["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]


def test_the_events_of_a_stream_are_the_whole_response(server: Server) -> None:
    whole = server.post(RESPONSES, {**ASK, **SCORES}, x_request_id="one").json()
    response = server.post(RESPONSES, {**ASK, **SCORES, "stream": True}, x_request_id="one")
    assert response.headers["content-type"].startswith("text/event-stream")
    found = _events(response.text)
    names = [each["type"].removeprefix("response.") for each in found]
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * 12,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    for begun in found[:2]:
        assert (begun["response"]["status"], begun["response"]["output"]) == ("in_progress", [])
        assert begun["response"]["usage"] is None
    assert found[2]["item"] == {**whole["output"][0], "status": "in_progress", "content": []}
    assert found[3]["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    (part,) = whole["output"][0]["content"]
    deltas, (text_done, part_done, item_done, last) = found[4:-4], found[-4:]
    assert "".join(each["delta"] for each in deltas) == text_done["text"] == part["text"]
    assert [score for each in deltas for score in each["logprobs"]] == text_done["logprobs"] == part["logprobs"]
    assert part_done["part"] == part
    assert item_done["item"] == whole["output"][0]
    places = [(each["item_id"], each["output_index"], each["content_index"]) for each in (*found[3:-2],)]
    assert set(places) == {("msg_one", 0, 0)}
    ended = last["response"]
    for each in (whole, ended):
        each.pop("created_at")
        each["usage"].pop("input_tokens_details")  # the second one finds the first one's blocks
    assert ended == whole


def test_a_complete_stream_ends_in_completed(server: Server) -> None:
    last = _events(server.post(RESPONSES, {"input": "hi", "text": CHOICE, "stream": True}).text)[-1]
    assert (last["type"], last["response"]["status"], _text(last["response"])) == (
        *("response.completed", "completed", '"yes"'),
    )


def test_log_probabilities_are_the_chats(server: Server) -> None:
    (item,) = server.post(RESPONSES, {**ASK, **SCORES}).json()["output"]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    made = server.post(CHAT, {**chat, "logprobs": True, "top_logprobs": 2}).json()
    wanted = made["choices"][0]["logprobs"]["content"]
    assert len(wanted) == 12
    assert item["content"][0]["logprobs"] == wanted


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"previous_response_id": "resp_a"}, "previous_response_id", "send the whole conversation"),
    ({"background": True}, "background", "omit it"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools", "/v1/chat/completions has tools"),
    ({"tool_choice": "required"}, "tool_choice", "'none' or 'auto'"),
    ({"top_logprobs": 1}, "top_logprobs", "message.output_text.logprobs"),
    ({"include": ["reasoning.encrypted_content"]}, "include.0", "message.output_text.logprobs"),
    ({"truncation": "auto"}, "truncation", "'disabled'"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort", "'low' was given"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "'low' was given"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format", "'json_schema'"),
    ({"conversation": "conv_a"}, "conversation", "'conv_a' was given"),
    ({"stop": "a"}, "stop", "no such parameter"),
    ({"n": 2}, "n", "no such parameter"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"max_output_tokens": 1000}, None, "context is 256 tokens"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options", "set stream to true"),
    ({"input": []}, "input", "at least 1 item"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input", "'developer'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input.0.content.0",
     "input[0].content[0]: this server takes text only"),
    ({"max_output_token": 1}, "max_output_token", "did you mean 'max_output_tokens'?"),
    ({"input": None}, "input", "nothing was given"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}}, None, "cannot be compiled"),
]  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("more", "param", "said"), REFUSED, ids=lambda each: ",".join(each) if each else "")
def test_what_is_not_plain_text_is_refused(
    server: Server, more: dict[str, Any], param: str | None, said: str, streamed: bool
) -> None:
    if streamed and "stream_options" in more:
        more, param, said = {"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", ""
    error = _error(server.post(RESPONSES, {**ASK, "stream": streamed, **more}), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert said in error["message"]


def test_what_asks_for_nothing_is_taken(server: Server) -> None:
    more = {"tools": [], "tool_choice": "none", "background": False, "previous_response_id": None, "store": True}
    more |= {"reasoning": {}, "truncation": "disabled", "parallel_tool_calls": False, "text": {}, "top_logprobs": 0}
    found = server.post(RESPONSES, {**ASK, **more}).json()
    assert (found["tool_choice"], found["parallel_tool_calls"], found["store"]) == ("none", False, False)
    assert _text(found) == _text(server.post(RESPONSES, ASK).json())


def test_the_errors_of_a_chat_name_the_responses_parameters(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.served.tokenizer, "chat_template", "{{ raise_exception('no') }}")
    assert _error(server.post(RESPONSES, ASK), 400)["param"] == "input"


def test_nothing_is_stored(server: Server) -> None:
    made = server.post(RESPONSES, {**ASK, "store": True}).json()["id"]
    with server.http() as client:
        for method, path in (
            ("GET", made),
            ("DELETE", made),
            ("POST", f"{made}/cancel"),
            ("GET", f"{made}/input_items"),
        ):
            error = _error(client.request(method, f"{RESPONSES}/{path}"), 404)
            assert error["message"] == f"there is no response '{path}': this server stores none"
    assert _error(server.get(RESPONSES), 405)
    assert _error(server.post(RESPONSES, {**ASK, "model": "gpt"}), 404)["code"] == "model_not_found"


def test_a_failure_within_a_stream_is_its_last_event(server: Server) -> None:
    with server.failing(ArithmeticError("a defect")):
        assert _error(server.post(RESPONSES, ASK), 500)["code"] == "model_error"
        *_, last = _events(server.post(RESPONSES, {**ASK, "stream": True}).text)
    assert (last["type"], last["response"]["status"], last["response"]["output"]) == ("response.failed", "failed", [])
    assert last["response"]["error"] == {
        "code": "server_error",
        "message": "the model failed on this request: ArithmeticError: a defect",
        "type": "server_error",
        "param": None,
    }


def test_a_defect_within_a_stream_is_its_last_event(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardfuse.serving.server.chat.scores_of", lambda *_: 1 / 0)
    *_, last = _events(server.post(RESPONSES, {**ASK, **SCORES, "stream": True}).text)
    assert last["response"]["error"]["message"] == "a defect of the server: ZeroDivisionError"


def test_a_long_answer_is_refused_in_both_forms() -> None:
    with serve(max_answer_bytes=1000) as server:
        asked = {**ASK, **SCORES, "max_output_tokens": 100}
        error = _error(server.post(RESPONSES, asked), 400)
        assert error["code"] == "answer_too_large"
        assert "ask for less of max_output_tokens or top_logprobs" in error["message"]
        *_, last = _events(server.post(RESPONSES, {**asked, "stream": True}).text)
        assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")


def test_leaving_a_stream_ends_its_request(server: Server) -> None:
    aborted = "vllm:request_success_total{abort}"
    before = server.metrics()[aborted]
    with server.slow(0.05), server.http() as client:
        asked = {**ASK, "max_output_tokens": 200, "stream": True}
        with client.stream("POST", RESPONSES, json=asked) as response:
            assert "response.created" in next(response.iter_text())
        until(lambda: not server.served.open_requests)
        server.idle()
    assert server.metrics()[aborted] == before + 1


def test_it_needs_a_key_and_counts_its_tokens() -> None:
    with serve(api_keys=("one",)) as server:
        _error(server.post(RESPONSES, ASK), 401)
        _error(server.get(f"{RESPONSES}/resp_a"), 401)
        key = {"authorization": "Bearer one"}
        cached = [
            server.post(RESPONSES, ASK, **key).json()["usage"]["input_tokens_details"]["cached_tokens"]
            for _ in range(2)
        ]
        assert cached == [0, 8]  # one block
        assert server.metrics()["vllm:generation_tokens_total"] == 24


def test_openais_client_knows_every_field(server: Server) -> None:
    """The client itself checks nothing."""
    pytest.importorskip("openai", reason="openai is not installed (pip install .[dev])")
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    Response.model_validate(server.post(RESPONSES, {**ASK, **SCORES}).json())
    event: Any = TypeAdapter(ResponseStreamEvent)
    streams = [server.post(RESPONSES, {**ASK, **SCORES, "stream": True}).text]
    streams.append(server.post(RESPONSES, {"input": "hi", "text": CHOICE, "stream": True}).text)
    with server.failing(ArithmeticError("a defect")):
        streams.append(server.post(RESPONSES, {**ASK, "stream": True}).text)
    found = [event.validate_python(each).type for text in streams for each in _events(text)]
    assert {"response.incomplete", "response.completed", "response.failed"} <= {*found}
