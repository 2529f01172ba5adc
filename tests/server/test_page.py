"""The live page: its headers, its numbers and its looks in a headless Chromium."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from page_case import IN_BYTES, MARKUP, Running, running, send, shown, stream, wait, wait_for_end
from server_case import SOON_S, tokenizer, until

PAGE = Path(__file__).parents[2] / "serving" / "server" / "page.html"


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running(tokenizer()) as server:
        yield server


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    yield shared
    shared.step_s = 0.0
    until(lambda: shared.busy == 0)


# --- without a browser


def test_the_page_is_its_file_and_is_not_kept(server: Running) -> None:
    answer = httpx.get(server.url)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.text == PAGE.read_text(encoding="utf-8")


def test_the_policy_allows_nothing_but_the_page_itself(server: Running) -> None:
    policy = httpx.get(server.url).headers["content-security-policy"].split("; ")
    assert policy[0] == "default-src 'none'"
    assert {"connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"} <= set(policy)
    for name in ("script-src", "style-src"):
        (sources,) = (each for each in policy if each.startswith(name))
        assert re.fullmatch(rf"{name} 'sha256-[A-Za-z0-9+/]{{43}}='", sources)


def test_the_page_names_no_other_place() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"\b(?:https?|wss?):", text)
    assert not re.search(r"""(?:=|\(|["'`])\s*["'`]?//""", text)
    assert not re.search(r"@import|\bimport\b|url\(", text)


def test_the_page_writes_no_markup() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert not re.search(r"""\s(?:style|on[a-z]+)=["']""", text)  # the policy would refuse both


def test_stats_hold_the_points_after_a_time(server: Running) -> None:
    until(lambda: len(httpx.get(f"{server.url}stats").json()["points"]) > 1)
    points = httpx.get(f"{server.url}stats").json()["points"]
    later = httpx.get(f"{server.url}stats", params={"since": points[0]["time"]}).json()["points"]
    assert later[: len(points) - 1] == points[1:]
    assert httpx.get(f"{server.url}stats", params={"since": points[-1]["time"] + 60}).json()["points"] == []


# --- in a browser


def test_numbers_follow_the_load(server: Running, page: Any) -> None:
    page.goto(server.url)
    wait(page, "text('state') === 'ok' && text('running') === '0'")
    assert shown(page, "model") == page.title().split(" ")[0] == "tiny"
    server.step_s = 0.02
    with ThreadPoolExecutor(2) as clients:
        answers = [clients.submit(server.complete, 120, prompt) for prompt in ("One", "Two")]
        wait(page, "text('running') === '2' && parseInt(text('blocks')) > 0")
        wait(page, "parseFloat(document.querySelector('#generated_per_s .newest').textContent) > 1")
        server.step_s = 0.0
        assert all(answer.result(SOON_S) for answer in answers)
    wait(page, "text('running') === '0'")
    for name in ("generated_per_s", "prompt_per_s", "first_token_s", "between_tokens_s"):
        assert page.locator(f"#{name} .curve").count()
        assert "tokens/s" in page.locator(f"#{name} svg").get_attribute("aria-label") or "_s" in name


def test_a_new_page_draws_what_was_before(server: Running, page: Any) -> None:
    server.complete(20)
    until(lambda: any(point["first_token_s"] for point in httpx.get(f"{server.url}stats").json()["points"]))
    page.goto(server.url)
    wait(page, "document.querySelector('#first_token_s .curve') !== null")


def test_axes_are_round_and_missing_points_are_gaps(server: Running, page: Any) -> None:
    page.goto(server.url)
    wait(page, "text('state') === 'ok'")
    page.evaluate("poll = () => {}")
    found = page.evaluate(
        "values => runs(values.map((value, i) => ({ time: i, value })), 'value').map(run => run.map(p => p.value))",
        [None, 1, 2, None, 3, None, None, 0],
    )
    assert found == [[1, 2], [3], [0]]
    assert page.evaluate("runs([{ time: 0, v: 1 }, { time: 1, v: 2 }, { time: 60, v: 3 }], 'v').length") == 2
    for top, marks in ((10, [0, 5, 10]), (0.01, [0, 0.005, 0.01]), (7, [0, 2.5, 5, 7.5]), (1234, [0, 500, 1000, 1500])):
        assert page.evaluate("top => ticks(top)", top) == pytest.approx(marks)
    page.evaluate("points = [{ time: 0, first_token_s: 0.25 }, { time: 9, first_token_s: null }]; draw(plots[2])")
    assert page.locator("#first_token_s .newest").text_content() == "250 ms, 9 s ago"
    numbers = page.evaluate("[0, 0.0123, 7.5, 123.4, 2261.3, 26000].map(number)")
    assert numbers == ["0", "0.0123", "7.5", "123", "2,261", "26k"]


def test_a_server_with_keys_a_strange_name_and_an_end(page: Any, screenshots: Path) -> None:
    with running(tokenizer(), name=MARKUP, api_keys=("secret",)) as own:
        page.goto(own.url)
        wait(page, "text('state') === 'ok'")
        assert shown(page, "model") == MARKUP
        assert page.title() == f"{MARKUP} \u2013 shardfuse"
        assert not page.locator("#planted").count()
        send(page, "Tell me", 4)
        wait_for_end(page)
        assert shown(page, "error").startswith("401: this server asks for a key")
        page.fill("#key", "secret")
        page.click("#send")
        wait(page, "text('outcome').includes('4 generated tokens')")
        own.served._wrong = lambda: "rank 1 has ended <b>"
        wait(page, "text('state') === 'trouble: rank 1 has ended <b>'")
        own.served._wrong = str
        own.served.draining = True
        wait(page, "text('state').startsWith('draining')")
        page.click("#send")
        wait(page, "text('error').startsWith('503: the server is shutting down')")
        own.stop()
        wait(page, "text('state').includes('does not answer') && text('state').includes('trying again')")
        page.screenshot(path=screenshots / "gone.png")
        page.click("#send")
        wait(page, "text('error').startsWith('the request failed')")


def test_the_page_says_that_the_server_is_back(server: Running, page: Any) -> None:
    page.goto(server.url)
    wait(page, "text('state') === 'ok'")
    page.route("**/stats*", lambda route: route.abort())
    wait(page, "text('state').includes('does not answer')")
    page.unroute("**/stats*")
    wait(page, "text('state') === 'ok'")


def test_nothing_is_wider_than_the_window(server: Running, page: Any) -> None:
    page.goto(server.url)
    wait(page, "text('state') === 'ok'")
    stats = {**httpx.get(f"{server.url}stats").json(), "model": "m" * 200, "needs_key": True, "points": []}
    page.evaluate("stats => { poll = () => {}; showStats(stats); }", stats)
    page.evaluate("showState('down', 'the server does not answer, since 12:00:00; trying again')")
    page.evaluate("byId('error').textContent = 'w'.repeat(2000); turn('you', '', 'w'.repeat(2000))")
    page.evaluate("byId('error').hidden = false")
    for width in (320, 360, 701, 1001):
        page.set_viewport_size({"width": width, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_fields_have_labels_and_text_has_contrast(server: Running, page: Any) -> None:
    page.goto(server.url)
    wait(page, "text('state') === 'ok'")
    assert page.locator("#key").is_hidden()  # this server needs none
    unlabelled = "[...document.querySelectorAll('input, select, textarea')].filter(each => !each.labels.length).length"
    assert page.evaluate(unlabelled) == 0
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for text, back in (
            *[("text", "page"), ("text", "card"), ("muted", "page"), ("muted", "card"), ("muted", "field")],
            *[("text", "mine"), ("accent", "page"), ("on-accent", "accent"), ("rate", "card"), ("latency", "card")],
            *[(name, f"{name}-back") for name in ("good", "warn", "bad")],
        ):
            assert _contrast(page, text, back) >= 4.5, (scheme, text, back)
        assert _contrast(page, "edge", "field") >= 3, scheme


def _contrast(page: Any, *names: str) -> float:
    """WCAG 2.2's contrast ratio of two of the page's colours."""
    style = "name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`)"
    levels = []
    for name in names:
        digits = page.evaluate(style, name).strip().lstrip("#")
        digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        levels.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)
    return max(levels) / min(levels)


def _busy_minutes() -> dict[str, Any]:
    """What a large server might say, with a pause and a rush."""
    points = []
    for second in range(300):
        quiet, rush = 120 <= second < 150, 200 <= second < 230
        wave = 1 + 0.2 * math.sin(second / 17) + 0.05 * math.sin(second * 1.7)
        speed = 0.0 if quiet else 2900.0 * wave * (1.5 if rush else 1)
        points.append(
            {
                "time": 1.7e9 + second,
                "generated_per_s": speed,
                "prompt_per_s": speed * (5 if second % 7 < 2 else 2.6),
                "first_token_s": None if quiet or second % 41 < 4 else 0.16 * wave * (2.5 if rush else 1),
                "between_tokens_s": None if quiet else 0.021 * wave,
            }
        )
    now = {"running": 64, "waiting": 3, "used_blocks": 18_304, "num_blocks": 26_000}
    return {
        "model": "Llama-3.1-8B-Instruct",
        "max_model_len": 131_072,
        "needs_key": False,
        "chat": True,
        "now": now,
        "points": points,
    }


_TALK = (
    (
        "Tell me about a lighthouse.",
        "The lighthouse had not been lit for eleven years when Mara climbed its stairs again.\n\nThe lamp was where "
        "she had left it, wrapped in her father's coat, and the sea below went on as if nobody had ever counted its "
        "waves.",
    ),
    (
        "What does she do first?",
        "She opens the shutters, one after the other, and lets the evening in. Then she sits down on the top step and "
        "waits until the first ship passes, to see whether anyone still looks up.",
    ),
)
_WINDOWS = {"phone": (390, 844), "desktop": (1280, 800)}


@pytest.mark.parametrize("window", _WINDOWS)
def test_the_prompt_box_is_on_the_first_screen(server: Running, page: Any, screenshots: Path, window: str) -> None:
    """In a conversation of two turns, beside a busy server's numbers."""
    width, height = _WINDOWS[window]
    page.set_viewport_size({"width": width, "height": height})
    page.goto(server.url)
    wait(page, "text('state') === 'ok'")
    for question, answer in _TALK:
        pieces = [{"choices": [{"delta": {"content": each}}]} for each in re.split("(?<= )", answer)]
        end = [{"choices": [{"delta": {}, "finish_reason": "stop"}]}]
        usage = [{"choices": [], "usage": {"prompt_tokens": 17, "completion_tokens": 52}}]
        page.evaluate(IN_BYTES, stream(*pieces, *end, *usage))
        send(page, question, 256, "0.7", "chat")
        wait_for_end(page)
    page.evaluate("stats => { poll = () => {}; points = []; showStats(stats); }", _busy_minutes())
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.screenshot(path=screenshots / f"{window}-{scheme}.png")
    page.screenshot(path=screenshots / f"{window}-whole.png", full_page=True)

    assert page.input_value("#kind") == "chat"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    boxes = {name: page.locator(f"#{name}").bounding_box() for name in ("log", "prompt", "send", "seen")}
    for name in ("prompt", "send"):
        assert boxes[name]["y"] >= 0, name
        assert boxes[name]["y"] + boxes[name]["height"] <= height, name
    assert boxes["log"]["height"] >= 200  # the answer has room
    if window == "phone":
        assert boxes["send"]["y"] + boxes["send"]["height"] <= boxes["seen"]["y"]
    else:
        assert boxes["prompt"]["x"] + boxes["prompt"]["width"] <= boxes["seen"]["x"]
        assert boxes["seen"]["y"] + boxes["seen"]["height"] <= height  # all of it at once
    for button in page.locator("button").all():
        assert button.bounding_box()["height"] >= 40
