"""The live page: its headers, and what a person sees and does on it in a headless Chromium.

Screenshots go to .jobs/screenshots/ where the checkout has a folder .jobs, else to pytest's own folder.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import CHROMIUM, FLAGS, MISSING

from shardfuse.testing import save_tiny_hf, tiny_engine

_MISSING = "the server's packages are not installed: pip install .[serve]"
transformers = pytest.importorskip("transformers", reason=_MISSING)
uvicorn = pytest.importorskip("uvicorn", reason=_MISSING)
run = pytest.importorskip("shardfuse.serving.server.run", reason=_MISSING)
served = pytest.importorskip("shardfuse.serving.server.served", reason=_MISSING)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "serving" / "server" / "page.html"
LIMIT_S = 60.0  # for what takes milliseconds: a test fails instead of waiting for ever
EOS = 257  # of the tiny tokenizer
MARKUP = "<b id=planted>bold</b><img src=x onerror='document.title=1'>"


@dataclass
class Running:
    """A server in a thread of this process. ``step_s`` is what each step of its engine waits."""

    url: str
    served: Any
    server: Any
    thread: threading.Thread
    step_s: float = 0.0

    def complete(self, max_tokens: int, prompt: str = "Tell me", **more: Any) -> str:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        answer = httpx.post(f"{self.url}v1/completions", json=body, timeout=60)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    @property
    def busy(self) -> int:
        load = self.served.serve.load
        return load.running + load.waiting

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def _running(tokenizer: Any, options: Any) -> Iterator[Running]:
    engine = tiny_engine(tokenizer=copy.deepcopy(tokenizer))
    model = served.Served(engine, tokenizer, [EOS], options)
    socket = run.listen("127.0.0.1", 0)
    config = uvicorn.Config(run.create_app(model), log_config=None, lifespan="on", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    running = Running(f"http://127.0.0.1:{socket.getsockname()[1]}/", model, server, thread)
    step = engine.step

    def slowed() -> Any:
        time.sleep(running.step_s)
        return step()

    engine.step = slowed  # type: ignore[method-assign]
    thread.start()
    try:
        _until(lambda: server.started)
        yield running
    finally:
        running.stop()
        socket.close()


def _until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return transformers.AutoTokenizer.from_pretrained(save_tiny_hf(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def shared(tokenizer: Any) -> Iterator[Running]:
    with _running(tokenizer, served.ServerOptions(name="tiny")) as running:
        yield running


@pytest.fixture
def server(shared: Running) -> Iterator[Running]:
    yield shared
    shared.step_s = 0.0
    _until(lambda: shared.busy == 0)


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
    assert not re.search(r"https?:|wss?:", text)
    assert not re.search(r"""(?:=|\(|["'`])\s*["'`]?//""", text)
    assert not re.search(r"@import|\bimport\b|url\(", text)


def test_the_page_writes_no_markup() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert not re.search(r"""\s(?:style|on[a-z]+)=["']""", text)  # the policy would refuse both


def test_stats_hold_the_points_after_a_time(server: Running) -> None:
    _until(lambda: len(httpx.get(f"{server.url}stats").json()["points"]) > 1)
    points = httpx.get(f"{server.url}stats").json()["points"]
    later = httpx.get(f"{server.url}stats", params={"since": points[0]["time"]}).json()["points"]
    assert later[: len(points) - 1] == points[1:]
    assert httpx.get(f"{server.url}stats", params={"since": points[-1]["time"] + 60}).json()["points"] == []


# --- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A window of a fresh profile."""
    if CHROMIUM is None:
        pytest.skip(MISSING)
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"), executable_path=CHROMIUM, args=list(FLAGS)
        )
        context.set_default_timeout(LIMIT_S * 1000)
        yield context
        context.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A tab on no page yet; at its end it has met no error, and has asked one place alone."""
    page, wrong, places = browser.new_page(), [], set()
    page.set_viewport_size({"width": 1280, "height": 800})
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if "Security Policy" in message.text else None)
    page.on("request", lambda request: places.add("/".join(request.url.split("/")[:3])))
    yield page
    page.close()
    assert not wrong
    assert len(places - {"data:,"}) == 1


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = ROOT / ".jobs"
    folder = kept / "screenshots" if kept.is_dir() else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(exist_ok=True)
    return folder


def _text(page: Any, name: str) -> str:
    return str(page.locator(f"#{name}").inner_text())


def _wait(page: Any, condition: str, argument: Any = None) -> None:
    """Until the function's body ``condition`` holds, of ``text(id)`` and ``argument``."""
    page.wait_for_function(
        f"argument => {{ const text = id => document.getElementById(id).textContent; return {condition}; }}",
        arg=argument,
    )


def _send(page: Any, prompt: str, max_tokens: int, temperature: str = "0", kind: str = "completion") -> None:
    page.fill("#prompt", prompt)
    page.fill("#max-tokens", str(max_tokens))
    page.fill("#temperature", temperature)
    page.select_option("#kind", kind)
    page.click("#send")


def _wait_for_end(page: Any) -> None:
    page.wait_for_function("() => !document.getElementById('send').disabled")


def test_numbers_follow_the_load(server: Running, page: Any) -> None:
    page.goto(server.url)
    _wait(page, "text('state') === 'ok' && text('running') === '0'")
    assert _text(page, "model") == page.title().split(" ")[0] == "tiny"
    server.step_s = 0.02
    with ThreadPoolExecutor(2) as clients:
        answers = [clients.submit(server.complete, 120, prompt) for prompt in ("One", "Two")]
        _wait(page, "text('running') === '2' && parseInt(text('blocks')) > 0")
        _wait(page, "parseFloat(document.querySelector('#generated_per_s .newest').textContent) > 1")
        server.step_s = 0.0
        assert all(answer.result(LIMIT_S) for answer in answers)
    _wait(page, "text('running') === '0'")
    for name in ("generated_per_s", "prompt_per_s", "first_token_s", "between_tokens_s"):
        assert page.locator(f"#{name} .curve").count()
        assert "tokens/s" in page.locator(f"#{name} svg").get_attribute("aria-label") or "_s" in name


def test_a_new_page_draws_what_was_before(server: Running, page: Any) -> None:
    server.complete(20)
    _until(lambda: any(point["first_token_s"] for point in httpx.get(f"{server.url}stats").json()["points"]))
    page.goto(server.url)
    _wait(page, "document.querySelector('#first_token_s .curve') !== null")


def test_axes_are_round_and_missing_points_are_gaps(server: Running, page: Any) -> None:
    page.goto(server.url)
    _wait(page, "text('state') === 'ok'")
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
    shown = page.evaluate("[0, 0.0123, 7.5, 123.4, 2261.3, 26000].map(number)")
    assert shown == ["0", "0.0123", "7.5", "123", "2,261", "26k"]


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_an_answer_streams_in_as_the_api_gives_it(server: Running, page: Any, kind: str) -> None:
    page.goto(server.url)
    server.step_s = 0.02
    _send(page, "Tell me", 60, kind=kind)
    _wait(page, "text('answer') !== '' && text('outcome') === 'generating'")
    part = page.locator("#answer").text_content()
    server.step_s = 0.0
    _wait_for_end(page)
    if kind == "chat":
        body = {"messages": [{"role": "user", "content": "Tell me"}], "max_tokens": 60, "temperature": 0}
        answer = httpx.post(f"{server.url}v1/chat/completions", json=body).json()
        expected, prompt = answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]
    else:
        expected, prompt = server.complete(60), len("Tell me")
    whole = page.locator("#answer").text_content()
    assert whole == expected
    assert expected.startswith(part)
    assert len(part) < len(expected)
    outcome = _text(page, "outcome")
    assert re.search(
        rf"{prompt} prompt and \d+ generated tokens · first token after [\d.]+ m?s · then [\d.k,]+ tokens/s", outcome
    )
    assert page.locator("#error").is_hidden()


def test_stop_ends_the_request_on_the_server(server: Running, page: Any) -> None:
    page.goto(server.url)
    server.step_s = 0.05
    before = server.served.metrics.totals.generated
    _send(page, "Tell me", 200)  # 10 s
    _wait(page, "text('outcome') === 'generating'")
    page.click("#stop")
    _until(lambda: server.busy == 0)
    assert server.served.metrics.totals.generated - before < 100
    assert _text(page, "outcome") == "stopped"
    assert page.locator("#error").is_hidden()
    assert page.locator("#stop").is_disabled()


def test_a_refusal_is_shown_and_control_enter_sends_again(server: Running, page: Any) -> None:
    page.goto(server.url)
    _send(page, "Tell me", 100_000)
    _wait_for_end(page)
    refused = httpx.post(f"{server.url}v1/completions", json={"prompt": "Tell me", "max_tokens": 100_000})
    assert _text(page, "error") == f"400: {refused.json()['error']['message']}"
    page.fill("#max-tokens", "4")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    _wait(page, "text('outcome').includes('4 generated tokens')")
    assert page.locator("#error").is_hidden()


_IN_BYTES = """body => {
  const bytes = new TextEncoder().encode(body), ask = window.fetch;
  window.fetch = (path, options) => path.startsWith("stats") ? ask(path, options) : new Response(new ReadableStream({
    start(stream) { bytes.forEach(byte => stream.enqueue(new Uint8Array([byte]))); stream.close(); },
  }));
}"""


def _stream(*events: Any, end: str = "data: [DONE]\n\n") -> str:
    return "".join(f"data: {json.dumps(each, ensure_ascii=False)}\n\n" for each in events) + end


def _piece(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None}


_STREAMS = {  # what comes, and the answer and the error that are shown
    "whole": (_stream(_piece("grüß "), _piece("dich 🙂\n")), "grüß dich 🙂\n", ""),
    "other line ends": (": waiting\r\n" + _stream(_piece("a")).replace("\n", "\r\n"), "a", ""),
    "markup": (_stream(_piece(MARKUP)), MARKUP, ""),
    "error": (_stream(_piece("a"), {"error": {"message": MARKUP}}), "a", MARKUP),
    "cut off": (_stream(_piece("a"), end=""), "a", "the stream ended before the answer did"),
}


def test_a_stream_in_single_bytes_is_shown_as_text(server: Running, page: Any) -> None:
    page.goto(server.url)
    for name, (stream, answer, error) in _STREAMS.items():
        page.evaluate(_IN_BYTES, stream)
        _send(page, "Tell me", 4)
        _wait_for_end(page)
        assert page.locator("#answer").text_content() == answer, name
        assert page.locator("#error").is_visible() == bool(error), name
        assert not error or page.locator("#error").text_content() == error, name
        assert not page.locator("#planted").count(), name


def test_a_server_with_keys_a_strange_name_and_an_end(tokenizer: Any, page: Any, screenshots: Path) -> None:
    with _running(tokenizer, served.ServerOptions(name=MARKUP, api_keys=("secret",))) as own:
        page.goto(own.url)
        _wait(page, "text('state') === 'ok'")
        assert _text(page, "model") == MARKUP
        assert page.title() == f"{MARKUP} \u2013 shardfuse"
        assert not page.locator("#planted").count()
        _send(page, "Tell me", 4)
        _wait_for_end(page)
        assert _text(page, "error").startswith("401: this server asks for a key")
        page.fill("#key", "secret")
        page.click("#send")
        _wait(page, "text('outcome').includes('4 generated tokens')")
        own.served._wrong = lambda: "rank 1 has ended <b>"
        _wait(page, "text('state') === 'trouble: rank 1 has ended <b>'")
        own.served._wrong = str
        own.served.draining = True
        _wait(page, "text('state').startsWith('draining')")
        page.click("#send")
        _wait(page, "text('error').startsWith('503: the server is shutting down')")
        own.stop()
        _wait(page, "text('state').includes('does not answer') && text('state').includes('trying again')")
        page.screenshot(path=screenshots / "gone.png")
        page.click("#send")
        _wait(page, "text('error').startsWith('the request failed')")


def test_the_page_says_that_the_server_is_back(server: Running, page: Any) -> None:
    page.goto(server.url)
    _wait(page, "text('state') === 'ok'")
    page.route("**/stats*", lambda route: route.abort())
    _wait(page, "text('state').includes('does not answer')")
    page.unroute("**/stats*")
    _wait(page, "text('state') === 'ok'")


def test_nothing_is_wider_than_the_window(server: Running, page: Any) -> None:
    page.goto(server.url)
    _wait(page, "text('state') === 'ok'")
    stats = {**httpx.get(f"{server.url}stats").json(), "model": "m" * 200, "needs_key": True, "points": []}
    page.evaluate("stats => { poll = () => {}; showStats(stats); }", stats)
    page.evaluate("showState('down', 'the server does not answer, since 12:00:00; trying again')")
    page.evaluate("byId('answer').textContent = byId('error').textContent = 'w'.repeat(2000)")
    page.evaluate("byId('error').hidden = false")
    for width in (320, 360, 701, 1001):
        page.set_viewport_size({"width": width, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") == width


def test_fields_have_labels_and_text_has_contrast(server: Running, page: Any) -> None:
    page.goto(server.url)
    _wait(page, "text('state') === 'ok'")
    assert page.locator("#key").is_hidden()  # this server needs none
    unlabelled = "[...document.querySelectorAll('input, select, textarea')].filter(each => !each.labels.length).length"
    assert page.evaluate(unlabelled) == 0
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for text, back in (
            *[("text", "page"), ("text", "card"), ("muted", "page"), ("muted", "card"), ("muted", "field")],
            *[("accent", "page"), ("on-accent", "accent"), ("rate", "card"), ("latency", "card")],
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
        "now": now,
        "points": points,
    }


_STORY = """The lighthouse had not been lit for eleven years when Mara climbed its stairs again.

The lamp was where she had left it, wrapped in her father's coat, and the sea below went on as if nobody had ever \
counted its waves."""


def test_screenshots(server: Running, page: Any, screenshots: Path) -> None:
    page.goto(server.url)
    _wait(page, "text('state') === 'ok'")
    pieces = [{"choices": [{"delta": {"content": each}}]} for each in re.split("(?<= )", _STORY)]
    end = [{"choices": [{"delta": {}, "finish_reason": "stop"}]}]
    usage = [{"choices": [], "usage": {"prompt_tokens": 17, "completion_tokens": 52}}]
    page.evaluate(_IN_BYTES, _stream(*pieces, *end, *usage))
    _send(page, "Tell me about a lighthouse.", 128, "0.7", "chat")
    _wait_for_end(page)
    page.evaluate("stats => { poll = () => {}; points = []; showStats(stats); }", _busy_minutes())
    page.screenshot(path=screenshots / "desktop.png")
    page.emulate_media(color_scheme="dark")
    page.screenshot(path=screenshots / "dark.png")
    page.set_viewport_size({"width": 360, "height": 740})
    page.screenshot(path=screenshots / "phone-dark.png", full_page=True)
    page.emulate_media(color_scheme="light")
    page.screenshot(path=screenshots / "phone.png", full_page=True)
    assert len({path.read_bytes() for path in screenshots.glob("*.png")}) >= 4
