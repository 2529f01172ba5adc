"""Calls of tools through the server: forced, in every format, whole and streamed alike, and on their way back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[serve])")

import openai
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import MARKS, NAME, ScriptedServer, scripted, tokenizer_of
from server_case import Server, events, serve
from tool_case import CALLS, FORMATS, WRITERS, tools_of

from shardfuse.serving.tools import ToolFormat

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Köln"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {
    "type": "object",
    "properties": {"zone": {"enum": ["a", "b"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "parameters": TIME}},
]
ASK = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "tool_choice": "required", "max_tokens": 700}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "time"}}}


@pytest.fixture(scope="module")
def wide() -> Iterator[Server]:
    """A model with room for tools in a prompt of bytes, and for calls in an answer of bytes."""
    with serve(sizes={"max_positions": 2048}, engine={"num_blocks": 512}) as server:
        yield server


@pytest.fixture
def roomy(wide: Server) -> Iterator[Server]:
    yield wide
    wide.idle()


@pytest.mark.parametrize(
    "more", [{"parallel_tool_calls": False}, NAMED, {"logit_bias": {"257": -100}}], ids=["one", "named", "several"]
)
def test_a_model_that_has_to_call_tools_does(
    roomy: Server, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardfuse.serving.server.chat._MOST_CALLS", 3)
    for seed in range(1 if "logit_bias" in more else 2):
        body = {**ASK, **more, "seed": seed}
        (choice,) = roomy.post(CHAT, body).json()["choices"]
        calls = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert len(calls) == (3 if "logit_bias" in more else 1)
        assert len({each["id"] for each in calls}) == len(calls)
        for each in calls:
            arguments = json.loads(each["function"]["arguments"])
            if each["function"]["name"] == "time":
                assert arguments["zone"] in ("a", "b")
            else:
                assert arguments["city"] in ("Bern", "Köln")
                assert 1 <= arguments["days"] <= 9
        if more is NAMED:
            assert [each["function"]["name"] for each in calls] == ["time"]
        assert _streamed(roomy, body) == [(each["function"]["name"], each["function"]["arguments"]) for each in calls]


def _streamed(server: Server, body: dict[str, Any]) -> list[tuple[str, str]]:
    """The calls of a stream: a name, an id and a type once for each, and after that arguments alone."""
    calls: list[tuple[str, str]] = []
    chunks = events(server.post(CHAT, {**body, "stream": True}).text)
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks):
        for each in delta.get("tool_calls", []):
            if each["index"] == len(calls):
                assert each["id"]
                assert each["type"] == "function"
                calls.append((each["function"]["name"], each["function"]["arguments"]))
            else:
                assert each.keys() == {"index", "function"}
                assert each["function"].keys() == {"arguments"}
                assert each["index"] == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + each["function"]["arguments"])
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    return calls


def test_calls_and_results_come_back_to_the_model(roomy: Server) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "time", "arguments": '{"zone": "a"}'}}
    answered = {"role": "assistant", "content": None, "tool_calls": [call], "annotations": None, "audio": None}
    messages = [*ASK["messages"], answered, {"role": "tool", "tool_call_id": "a", "content": "noon"}]  # type: ignore[misc]
    tokens = roomy.post("/tokenize", {"messages": messages, "tools": TOOLS}).json()["tokens"]
    text = roomy.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert '<tool_call>\n{"name": "time", "arguments": {"zone": "a"}}\n</tool_call>' in text
    assert "tool: noon" in text
    assert '"name": "weather"' in text
    assert roomy.post(CHAT, {"messages": messages, "tools": TOOLS, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "tide"}}}, "there is no tool 'tide'"),
        ({"tools": None}, "without tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "two have the same name"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs asks for another answer"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template is the server's own"),
    ],
    ids=["unknown", "none", "twice", "both", "template"],
)
def test_what_cannot_be_is_refused(roomy: Server, more: dict[str, Any], message: str) -> None:
    answer = roomy.post(CHAT, {**ASK, **more})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_format_of_the_text_has_no_effect_on_a_forced_call(roomy: Server) -> None:
    plain, formatted = (
        roomy.post(CHAT, {**ASK, "temperature": 0, **more}).json()["choices"][0]["message"]["tool_calls"][0]["function"]
        for more in ({}, {"response_format": {"type": "json_object"}})
    )
    assert formatted == plain


def test_a_template_without_tools_refuses_them(roomy: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roomy.served.tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    assert "does not mention tools" in roomy.post(CHAT, ASK).json()["error"]["message"]
    monkeypatch.setattr(roomy.served.tokenizer, "chat_template", None)
    assert "no chat template" in roomy.post(CHAT, ASK).json()["error"]["message"]


# --- of a model that says what it is told -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FORMATS)
def family(request: pytest.FixtureRequest) -> Iterator[tuple[str, ScriptedServer]]:
    """The name of a format, and a server whose template and tokenizer are of it."""
    with scripted(tokenizer_of(request.param)) as server:
        yield request.param, server


def _called(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as the family's template writes them."""
    plain = [{"type": "function", "function": {"name": of, "arguments": given}} for of, given in calls]
    made = tokenizer_of(name)
    asked = {"role": "user", "content": "hi"}
    before = made.apply_chat_template([asked], tokenize=False)
    answer = {"role": "assistant", "content": "", "tool_calls": plain}
    return str(made.apply_chat_template([asked, answer], tokenize=False)).removeprefix(f"{before}<|turn|>assistant: ")


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_openais_client_calls_and_calls_again_and_is_answered(
    family: tuple[str, ScriptedServer], streamed: bool
) -> None:
    name, server = family
    client: Any = openai.OpenAI(base_url="http://testserver/v1", api_key="none", http_client=server.http, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "Weather in Köln, and the time?"}]
    said = [
        _called(name, ("weather", {"city": "Köln", "days": 2}), ("time", {"zone": "a"})),
        "One more.\n" + _called(name, ("time", {"zone": "b"})),
        "It is noon.",
    ]
    wanted: list[Any] = [
        (None, [("weather", {"city": "Köln", "days": 2}), ("time", {"zone": "a"})]),
        ("One more.", [("time", {"zone": "b"})]),
        ("It is noon.", []),
    ]
    for text, (content, calls) in zip(said, wanted):
        body = {"messages": messages, "tools": TOOLS}
        server.say(text, body)
        asked = {"model": NAME, "temperature": 0, "max_tokens": 900, **body}
        if streamed:
            with client.chat.completions.stream(**asked) as stream:
                choice = stream.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**asked).choices[0]
        message = choice.message
        found = [(each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls or ()]
        assert (message.content or None, found) == (content, calls)
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        sent = message.model_dump(exclude_none=True)
        for each in sent.get("tool_calls", ()):  # of the client's helper for streams alone
            each.pop("index", None)
            each["function"].pop("parsed_arguments", None)
        sent.pop("parsed", None)
        messages.append(sent)
        messages += [
            {"role": "tool", "tool_call_id": each.id, "content": f"result of {each.function.name}"}
            for each in message.tool_calls or ()
        ]
    tokens = server.http.post("/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"]
    rendered = server.tokenizer.decode(tokens)
    turns = "".join(
        f"<|turn|>assistant: {text}" + "".join(f"<|turn|>tool: result of {each}" for each, _ in calls)
        for text, (_, calls) in zip(said, wanted)
    )
    assert rendered.endswith(f"<|turn|>user: Weather in Köln, and the time?{turns}<|turn|>assistant: ")


@pytest.mark.parametrize("special", [False, True], ids=["added", "special"])
@pytest.mark.parametrize("name", FORMATS)
def test_marks_are_found_special_or_not(name: str, special: bool) -> None:
    """And other special tokens have no text, calls or not."""
    with scripted(tokenizer_of(name, special)) as server:
        text = "<|pad|>See:\n" + _called(name, ("time", {"zone": "a"}))
        choice = server.chat(text, ASK | {"tool_choice": "auto"})
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "time", "arguments": '{"zone": "a"}'}
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "See:")
        plain = server.chat(text, {"messages": ASK["messages"]})["message"]["content"]
        marks = MARKS[name][0] if special else ()
        for each in marks:
            text = text.replace(each, "")
        assert plain == text.removeprefix("<|pad|>")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("choice", ["required", "named"])
def test_the_format_in_force_is_forced(name: str, choice: str) -> None:
    """A model that would say something else writes a call of its format."""
    with scripted(tokenizer_of(name)) as server:
        body = ASK | {"tool_choice": "required"} | (NAMED if choice == "named" else {}) | {"parallel_tool_calls": False}
        made = server.chat("", body)
        (call,) = made["message"]["tool_calls"]
        assert made["finish_reason"] == "tool_calls"
        assert call["function"]["name"] == "time"  # of those that are allowed, the first by its letters
        assert json.loads(call["function"]["arguments"])["zone"] in ("a", "b")


def test_a_thought_that_the_prompt_begins_makes_no_call() -> None:
    made = tokenizer_of("hermes")
    made.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    call = _called("hermes", ("time", {"zone": "a"}))
    with scripted(made) as server:
        body = ASK | {"tool_choice": "auto"}
        choice = server.chat(f"I could {call}\n</think>\n\n{call}", body)
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["message"]["content"] == f"I could {call}\n</think>"
        assert server.chat(call, body)["message"]["content"] == call
        forced = server.chat(call, ASK | NAMED)  # which writes no thought
        assert len(forced["message"]["tool_calls"]) == 1


def test_an_answer_that_continues_a_thought_makes_no_call_in_it() -> None:
    call = _called("hermes", ("time", {"zone": "a"}))
    with scripted(tokenizer_of("hermes")) as server:
        messages = [*ASK["messages"], {"role": "assistant", "content": "<think>\nI consider "}]  # type: ignore[misc]
        body = {"messages": messages, "tools": TOOLS, "continue_final_message": True, "add_generation_prompt": False}
        choice = server.chat(f"{call}</think>{call}", body)
        assert choice["message"]["content"] == f"{call}</think>"
        assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "none"])
def test_special_tokens_stay_hidden(tools: Any) -> None:
    """The marks of a thought, and a mark that the client stops at."""
    made = tokenizer_of("mistral")
    made.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    with scripted(made) as server:
        body = {"messages": ASK["messages"], "tools": tools}
        call = '[TOOL_CALLS]time[ARGS]{"zone": "a"}'
        shown = server.chat(f"<think>x{call}</think>y", body)
        assert shown["message"]["content"] == (f"x{call}y" if tools else 'xtime{"zone": "a"}y')
        stop = {"stop_token_ids": [made.convert_tokens_to_ids("[TOOL_CALLS]")]}
        stopped = server.chat(f"hey{call}", body | stop)
        assert (stopped["message"]["content"], stopped["finish_reason"]) == ("hey", "stop")


def test_a_mark_that_ends_answers_has_no_text() -> None:
    made = tokenizer_of("llama3")
    with scripted(made, [made.convert_tokens_to_ids("<|python_tag|>")]) as server:
        assert server.chat("hey<|python_tag|>", ASK | {"tool_choice": "auto"})["message"]["content"] == "hey"


@pytest.mark.parametrize("schema", [{"required": 5}, {"properties": ["a"]}, {"properties": {"a": {"anyOf": 5}}}])
def test_a_schema_that_is_none_is_no_fault_of_the_servers(family: tuple[str, ScriptedServer], schema: Any) -> None:
    name, server = family
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    text = "<tool_call><function=f><parameter=a>5</parameter></function>" if name == "qwen3-coder" else "hi"
    assert server.chat(text, ASK | {"tools": tools, "tool_choice": "auto"})["finish_reason"] in ("stop", "tool_calls")
    asked = server.http.post("/v1/chat/completions", json=ASK | {"tools": tools, "max_tokens": 40, "temperature": 0})
    assert asked.status_code in (200, 400)


CUT = 'Say.\n{"name": "time", "parameters": {"zo'


@pytest.mark.parametrize(
    ("more", "finish", "arguments"),
    [
        ({}, "tool_calls", '{"zone": "a"}'),
        ({"max_tokens": len(CUT)}, "length", '{"zo'),
        ({"stop": ["ne"]}, "stop", '{"zo'),
        ({"stop": ["zone"], "include_stop_str_in_output": True}, "stop", '{"zone'),
    ],
)
def test_a_call_that_is_cut_says_why(more: dict[str, Any], finish: str, arguments: str) -> None:
    with scripted(tokenizer_of("llama3")) as server:
        choice = server.chat(CUT + 'ne": "a"}}', ASK | {"tool_choice": "auto"} | more)
        assert choice["finish_reason"] == finish
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "time", "arguments": arguments}


def test_one_call_where_calls_are_not_parallel(family: tuple[str, ScriptedServer]) -> None:
    """Also of a model that calls as it likes, and is cut within the second call."""
    name, server = family
    text = _called(name, ("time", {"zone": "a"}), ("weather", {"city": "Bern", "days": 2}))
    body = ASK | {"tool_choice": "auto", "parallel_tool_calls": False}
    for most in (900, len(text) - 8):
        choice = server.chat(text[:most], body)
        assert [each["function"]["name"] for each in choice["message"]["tool_calls"]] == ["time"]
        assert choice["finish_reason"] == "tool_calls"


def _whole_and_streamed_are_alike(server: ScriptedServer, name: str, data: st.DataObject) -> None:
    wanted = data.draw(CALLS)
    parts = st.sampled_from(
        ["", " ", "\n", "Well.", "<think>", "</think>", "é", *MARKS[name][0], '{"name": "f"', "[", "`"]
    )
    text = data.draw(parts) + WRITERS[name](wanted, data.draw) + data.draw(parts) + data.draw(parts)
    tools = [
        {"type": "function", "function": {"name": each.name, "parameters": each.parameters}}
        for each in tools_of(wanted)
    ]
    body = {"messages": ASK["messages"], "tools": tools, "temperature": 0}
    body["max_tokens"] = data.draw(st.integers(1, 400))
    body["stop"] = data.draw(st.sampled_from([[], [], ["\n"], ['"'], ["ell", "_call"]]))
    body["parallel_tool_calls"] = data.draw(st.sampled_from([None, False]))
    whole = server.chat(text, body)
    streamed = server.http.post("/v1/chat/completions", json=body | {"stream": True})
    content, calls, finish = "", list[dict[str, Any]](), None
    for chunk in events(streamed.text):
        (choice,) = chunk["choices"]
        finish = choice["finish_reason"] or finish
        content += choice["delta"].get("content") or ""
        for each in choice["delta"].get("tool_calls", ()):
            if each["index"] == len(calls):
                calls.append(each)
            else:
                calls[-1]["function"]["arguments"] += each["function"]["arguments"]
    message = whole["message"]
    assert (content, finish) == (message["content"] or "", whole["finish_reason"])
    assert [each["function"] for each in calls] == [each["function"] for each in message.get("tool_calls", ())]
    assert [(each["type"], each["index"], bool(each["id"])) for each in calls] == [
        ("function", at, True) for at in range(len(calls))
    ]


@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_concatenated_deltas_are_the_whole_message(family: tuple[str, ScriptedServer], data: st.DataObject) -> None:
    _whole_and_streamed_are_alike(family[1], family[0], data)


@pytest.mark.nightly(seconds=60)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_concatenated_deltas_are_the_whole_message_for_long(
    family: tuple[str, ScriptedServer], data: st.DataObject
) -> None:
    _whole_and_streamed_are_alike(family[1], family[0], data)


def test_ids_are_of_the_form_that_templates_take(family: tuple[str, ScriptedServer]) -> None:
    name, server = family
    made = [server.chat(_called(name, ("time", {"zone": "a"})), ASK | {"tool_choice": "auto"}) for _ in range(2)]
    ids = [each["message"]["tool_calls"][0]["id"] for each in made]
    assert len(set(ids)) == 2
    assert all((len(each) == 9 and each.isalnum()) if name == "mistral" else each.startswith("call_") for each in ids)


class Plain(ToolFormat):
    """A format of another package: ``!name`` and nothing else, which cannot be forced."""

    def parser(self, tools: Any, thought: str = "") -> Any:
        return PlainParser()


class PlainParser:
    calls, cut = 0, False

    def push(self, text: str) -> list[Any]:
        return [text] if text else []

    def flush(self) -> list[Any]:
        return ["!"]


def test_another_packages_format_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(tokenizer_of("hermes"), tool_call_parser="pythonic") as server:
        assert type(server.served.chat.tools).__name__ == "Pythonic"  # whatever the template says
        monkeypatch.setattr(server.served.chat, "tools", Plain())
        assert server.chat("a", ASK | {"tool_choice": "auto"})["message"]["content"] == "a!"
        refused = server.http.post("/v1/chat/completions", json=ASK)
        assert refused.status_code == 400
        assert "cannot be forced" in refused.json()["error"]["message"]


def test_an_unknown_format_is_refused_at_the_start() -> None:
    with (
        pytest.raises(ValueError, match=r"tool format 'hermess': did you mean 'hermes'.*expected auto, or one of"),
        scripted(tokenizer_of("hermes"), tool_call_parser="hermess"),
    ):
        pass
