"""The demo's page: what the report holds is on it, escaped, and fits a telephone's window."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardfuse.commands.demo_page import PAGE, _ticks, page, write_page

CHROMIUM = shutil.which("chromium")
LOSSES = [5.5, 4.25, None, 2.5]  # the third was not finite
HOSTILE = "<img src=x onerror='document.title=1'>"


def _report(**changes: Any) -> dict[str, Any]:
    report = {
        "settings": {"model": {"num_layers": 3, "hidden_size": 256}, "parallel": {"tp": 2, "precision": "fp32"}},
        "ranks": [{"steps": 4, "tokens_per_second": 1234.5, "held_out": 2.125}],
        "agreement": {"sharded": [5.5, 4.25], "unsharded": [5.5, 4.0]},
        "baselines": {"unigram": 3.09, "bigram": 2.35},
        "text": HOSTILE,
        "checks": [{"check": "losses differ by little", "ok": True}, {"check": "answers are equal", "ok": False}],
        "requests": [
            {"prompt_tokens": 16, "arrival": 0, "tokens": [1, 2, 3, 4], "finish": "length"},
            {"prompt_tokens": 21, "arrival": 2, "tokens": [5, 8], "finish": "stop"},
            {"prompt_tokens": 9, "arrival": 3, "tokens": [], "finish": "cancelled"},
        ],
        "serving": {
            "generated_tokens": 6, "prefill_seconds": 0.5, "decode_seconds": 1.0, "steps": 8, "peak_seqs": 1,
            "kv_waste": 0.25,
        },
        "serving_calls": [{"op": "paged_attention", "runs": "reference", "calls": 1234}],
        "model": {
            "parameters": 1_500_000,
            "rows": [
                {"path": path, "layers": 1, "kind": kind, "op": op, "runs": runs, "why": "no GPU"}
                for path, kind, op, runs in (
                    ("norm", "LayerNorm", "layer_norm", "reference"),
                    ("head", "Linear", "linear_act", "triton"),
                )
            ],
        },
        "environment": {"python": "3.11", "packages": {"torch": "2.13"}},
    }  # fmt: skip
    return report | changes


def _text(html: str) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", html[html.index("<main>") :]).split())


def test_the_page_tells_what_the_report_holds():
    html = page(_report(), LOSSES)
    text = _text(html)
    for said in (
        "1 of 2 checks held",
        "FAILED answers are equal",
        "1.50 M parameters",
        "over 2 tensor-parallel processes in fp32",
        "held-out text after training, 2.125",
        "2 4.250000 4.000000 6.2e-02",
        "prompt of 21 tokens, arrives after step 2, first token in step 5, last of 2 in step 8 (stop)",
        "request 2: no token (cancelled)",
        "head 1 Linear linear_act triton [1]",
        "paged_attention reference 1,234",
        "packages torch 2.13",
    ):
        assert said in text
    assert text.count("no GPU") == 1  # a shared reason is said once
    assert "<img" not in html  # whatever a text holds is escaped
    assert "<script" not in html
    assert not re.findall(r"(?:src|href)=.https?:", html)


def test_drawings_stand_where_the_numbers_say():
    html = page(_report(), LOSSES)
    curve = re.findall(r'd="([^"]*)" class="sharded"', html)[-1]  # the first is the legend's
    assert re.sub(r"[\d.]+", "", curve) == "M hL M h"  # a gap at the loss that was not finite
    places = [tuple(map(float, point.split())) for point in re.findall(r"[\d.]+ [\d.]+", curve)]
    assert [x for x, _ in places] == [0.0, 33.33, 100.0]  # steps 1, 2 and 4 of 4
    assert places[0][1] == 0.0  # the highest loss on top
    assert (places[1][1] - places[0][1]) / (places[2][1] - places[0][1]) == pytest.approx(1.25 / 3, abs=1e-3)
    lanes = re.findall(r'<rect x="([\d.]+)" width="([\d.]+)" height="10" class="(\w+)">', html)
    assert [(kind, float(x), float(width)) for x, width, kind in lanes] == [
        *(("waits", 0, 0), ("runs", 0, 50)),
        *(("waits", 25, 25), ("runs", 50, 50)),
    ]


@pytest.mark.parametrize("losses", [[], [None], [2.5]], ids=["none", "not-finite", "one"])
def test_a_run_of_few_steps_has_a_page(losses: list[float | None]):
    report = _report(requests=[], ranks=[{"steps": len(losses), "tokens_per_second": 0.0, "held_out": math.nan}])
    html = page(report, losses)
    assert ('class="plot"' in html) == (losses == [2.5])
    assert "nan" not in html


def test_ticks_are_round_and_within():
    assert _ticks(1.9, 5.87) == [2, 3, 4, 5]
    assert _ticks(1, 240) == [50, 100, 150, 200]
    assert _ticks(3.0, 3.0) == [3.0]


def test_the_page_fits_and_runs_nothing(tmp_path: Path):
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: on Debian and Ubuntu, apt install chromium")
    write_page(tmp_path, _report(), LOSSES)
    asked: list[str] = []
    for tab in _tabs(tmp_path):
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("console", lambda message: asked.append(message.text))
        tab.goto((tmp_path / PAGE).as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert tab.title() == "shardfuse demo"
        for shape in ("path.sharded", "rect.runs"):
            assert tab.locator(f".plot {shape}, .lane {shape}").first.bounding_box()["width"] > 50
        colours = tab.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
        light, dark = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
        assert abs(light - dark) > 500  # of 765
    assert asked == [(tmp_path / PAGE).as_uri()] * 3


def _tabs(folder: Path) -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for width, scheme in ((1100, "light"), (375, "light"), (375, "dark")):
            yield browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        browser.close()
