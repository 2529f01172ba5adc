"""The live page's prompt box in a headless Chromium: chats, completions, and how either ends."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from page_case import IN_BYTES, MARKUP, Running, piece, running, send, shown, stream, wait, wait_for_end
from server_case import tokenizer, until


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running(tokenizer()) as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    yield shared
    shared.step_s = 0.0
    until(lambda: shared.busy == 0)


@pytest.fixture(scope="module")
def without_template() -> Iterator[Running]:
    """A server of a model without a chat template."""
    plain = copy.deepcopy(tokenizer())
    plain.chat_template = None
    with running(plain) as server:
        yield server


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_an_answer_streams_in_as_the_api_gives_it(server: Running, page: Any, kind: str) -> None:
    page.goto(server.url)
    server.step_s = 0.02
    send(page, "Tell me", 60, kind=kind)
    answered = page.locator("#answer" if kind == "completion" else "#turns .model")
    wait(page, "text('outcome') === 'generating'")
    part = answered.text_content()
    server.step_s = 0.0
    wait_for_end(page)
    if kind == "chat":
        body = {"messages": [_said("user", "Tell me")], "max_tokens": 60, "temperature": 0}
        answer = httpx.post(f"{server.url}v1/chat/completions", json=body).json()
        expected, prompt = answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]
    else:
        expected, prompt = server.complete(60), len("Tell me")
    whole = answered.text_content()
    assert whole == expected
    assert expected.startswith(part)
    assert len(part) < len(expected)
    outcome = shown(page, "outcome")
    assert re.search(
        rf"{prompt} prompt and \d+ generated tokens\s· first after [\d.]+ m?s\s· then [\d.k,]+ tokens/s", outcome
    )
    assert page.locator("#error").is_hidden()


def test_stats_say_whether_the_model_chats(server: Running, without_template: Running) -> None:
    assert httpx.get(f"{server.url}stats").json()["chat"] is True
    assert httpx.get(f"{without_template.url}stats").json()["chat"] is False


def test_a_model_with_a_chat_template_opens_in_chat(server: Running, page: Any) -> None:
    page.goto(server.url)
    wait(page, "text('state') === 'ok'")
    assert page.input_value("#kind") == "chat"
    assert page.input_value("#max-tokens") == "128"  # half of the context
    assert page.locator("#turns").is_visible()
    assert page.locator("#new").is_visible()
    assert page.locator("#no-chat").is_hidden()


def test_a_model_without_a_chat_template_opens_in_completion(without_template: Running, page: Any) -> None:
    page.goto(without_template.url)
    wait(page, "text('state') === 'ok'")
    assert page.input_value("#kind") == "completion"
    assert page.locator("#kind option[value=chat]").is_disabled()
    assert shown(page, "no-chat").startswith("No chat: this model has no chat template")
    assert page.locator("#answer").count()
    assert page.locator("#turns").is_hidden()
    assert page.locator("#new").is_hidden()


def test_a_choice_made_by_hand_stays(server: Running, page: Any) -> None:
    page.goto(server.url)
    wait(page, "text('state') === 'ok'")
    page.select_option("#kind", "completion")
    page.evaluate("byId('state').textContent = 'not yet'")
    wait(page, "text('state') === 'ok'")  # the server has said again that the model chats
    assert page.input_value("#kind") == "completion"
    assert page.locator("#turns").is_hidden()


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _asked(page: Any) -> list[Any]:
    """The bodies that ``page`` sends to the server, as they come."""
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
    return asked


def test_a_question_is_sent_with_the_turns_before_it(server: Running, page: Any) -> None:
    asked = _asked(page)
    page.goto(server.url)
    for question in ("One", "Two"):
        send(page, question, 12, kind="chat")
        wait_for_end(page)
    answers = page.locator("#turns .model").all_text_contents()
    assert page.locator("#turns .you").all_text_contents() == ["One", "Two"]
    assert page.input_value("#prompt") == ""
    assert [each["messages"] for each in asked] == [
        [_said("user", "One")],
        [_said("user", "One"), _said("assistant", answers[0]), _said("user", "Two")],
    ]
    page.click("#new")
    assert not page.locator("#turns > *").count()
    send(page, "Three", 12, kind="chat")
    wait_for_end(page)
    assert asked[2]["messages"] == [_said("user", "Three")]


def test_stop_ends_the_answer_and_not_the_conversation(server: Running, page: Any) -> None:
    asked = _asked(page)
    page.goto(server.url)
    server.step_s = 0.05
    before = server.served.metrics.totals.generated
    send(page, "Tell me", 200, kind="chat")  # 10 s
    wait(page, "text('outcome') === 'generating'")
    page.click("#stop")
    until(lambda: server.busy == 0)
    assert server.served.metrics.totals.generated - before < 100
    wait(page, "text('outcome') === 'stopped'")
    assert page.locator("#error").is_hidden()
    assert page.locator("#stop").is_disabled()
    part = page.locator("#turns .model.stopped").text_content()
    assert part
    server.step_s = 0.0
    send(page, "Go on", 4, kind="chat")
    wait_for_end(page)
    assert asked[1]["messages"] == [_said("user", "Tell me"), _said("assistant", part), _said("user", "Go on")]


def test_a_refused_question_goes_back_into_the_prompt_box(server: Running, page: Any) -> None:
    asked = _asked(page)
    page.goto(server.url)
    send(page, "Tell me", 100_000, kind="chat")
    wait_for_end(page)
    refused = httpx.post(f"{server.url}v1/chat/completions", json=asked[0] | {"stream": False, "stream_options": None})
    assert shown(page, "error") == f"400: {refused.json()['error']['message']}"
    assert page.input_value("#prompt") == "Tell me"
    assert not page.locator("#turns > *").count()
    page.fill("#max-tokens", "4")
    page.click("#send")
    wait(page, "text('outcome').includes('4 generated tokens')")
    assert page.locator("#error").is_hidden()
    assert asked[1]["messages"] == [_said("user", "Tell me")]


def test_enter_sends_and_shift_enter_breaks_the_line(server: Running, page: Any) -> None:
    asked = _asked(page)
    page.goto(server.url)
    page.fill("#max-tokens", "4")
    page.focus("#prompt")
    page.keyboard.press("Enter")  # with nothing to send
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Two")
    page.evaluate(
        "byId('prompt').dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', isComposing: true, bubbles: true }))"
    )
    assert page.input_value("#prompt") == "One\nTwo"
    assert not asked
    page.keyboard.press("Enter")
    wait(page, "text('outcome').includes('4 generated tokens')")
    assert [each["messages"] for each in asked] == [[_said("user", "One\nTwo")]]


_STREAMS = {  # what comes, and the answer and the error that are shown
    "whole": (stream(piece("grüß "), piece("dich 🙂\n")), "grüß dich 🙂\n", ""),
    "other line ends": (": waiting\r\n" + stream(piece("a")).replace("\n", "\r\n"), "a", ""),
    "markup": (stream(piece(MARKUP)), MARKUP, ""),
    "error": (stream(piece("a"), {"error": {"message": MARKUP}}), "a", MARKUP),
    "cut off": (stream(piece("a"), end=""), "a", "the stream ended before the answer did"),
}


def test_a_stream_in_single_bytes_is_shown_as_text(server: Running, page: Any) -> None:
    page.goto(server.url)
    for name, (given, answer, error) in _STREAMS.items():
        page.evaluate(IN_BYTES, given)
        send(page, "Tell me", 4)
        wait_for_end(page)
        assert page.locator("#answer").text_content() == answer, name
        assert page.locator("#error").is_visible() == bool(error), name
        assert not error or page.locator("#error").text_content() == error, name
        assert not page.locator("#planted").count(), name
    page.evaluate(IN_BYTES, stream({"choices": [{"delta": {"content": MARKUP}}]}))
    send(page, MARKUP, 4, kind="chat")
    wait_for_end(page)
    assert page.locator("#turns > *").all_text_contents() == [MARKUP, MARKUP]
    assert not page.locator("#planted").count()


def test_the_end_of_a_long_answer_stays_in_sight(server: Running, page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(server.url)
    usage = {"choices": [{"text": "", "finish_reason": "stop"}], "usage": {"prompt_tokens": 7, "completion_tokens": 90}}
    page.evaluate(IN_BYTES, stream(*[piece(f"line {i}\n") for i in range(90)], usage))
    send(page, "Tell me", 90)
    wait_for_end(page)
    log = "(({ scrollTop, clientHeight, scrollHeight }) => [scrollTop, scrollHeight - clientHeight])(byId('log'))"
    top, most = page.evaluate(log)
    assert most > 0
    assert top == pytest.approx(most, abs=1)
