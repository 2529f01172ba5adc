"""The page of ``bench report --html``: its content, its refusals, and its filters in a headless Chromium.

Screenshots go to .jobs/screenshots/ where the checkout has a folder .jobs, else to pytest's own folder.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import chromium
from typer.testing import CliRunner

from shardfuse.bench.harness.benchmark import Work
from shardfuse.bench.harness.report import Row
from shardfuse.bench.harness.runner import benchmarks
from shardfuse.bench.harness.timing import Ceilings
from shardfuse.bench.page import build
from shardfuse.bench.page.markup import LogScale
from shardfuse.cli import app

ROOT = Path(__file__).parents[2]
MARKUP = "<b id=planted>t64</b></script><img src=x onerror='document.title=1'>\""
ORIGIN = {"date": "2031-05-01T00:00:00+00:00", "commit": "abc123", "dirty": False, "torch": "2.13.0", "triton": "3.7.1"}
GPU = "Some GPU"


def _row(case: str, ratio: float, target: float | None = 1.0, **changes: Any) -> Row:
    met = None if target is None else ratio >= target
    row = Row(case, "forward, us", 50.0, 50.0 * ratio, "eager", ratio, target, met, noise=0.01, ran="linear_act=triton")
    return dataclasses.replace(row, **changes)


def _record(bench: str, device: str, *rows: Row, **changes: Any) -> dict[str, Any]:
    record = {"bench": bench, "device": device, "gate": "green", "dry": False, "origin": ORIGIN, "missing": []}
    return record | {"rows": [row.record() for row in rows]} | changes


def _gpu(bench: str = "mlp") -> dict[str, Any]:
    more = {"work": Work(flops=32e9, bytes=40e6), "ceilings": Ceilings(flops=800e12, bandwidth=4e12)}
    rows = [_row(f"mlp-t{tokens}-d256", 1 + tokens / 100, between=(0.9, 1.7), **more) for tokens in (8, 16, 64)]
    return _record(bench, GPU, *rows)


def _cpu() -> dict[str, Any]:
    return _record(
        "onednn", "cpu", _row("step-t8-d80", 0.5), _row("step-t16-d96", 1.5, None, ran="gated_linear=onednn")
    )


def _past(**changes: Any) -> dict[str, Any]:
    line = {"date": "2031-04-01T00:00:00Z", "commit": "0123456789abcdef", "device": GPU, "key": "mlp | forward"}
    return line | {"ratio": 1.25, "between": [1.2, 1.3], "verdict": "faster"} | changes


def _file(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content) if path.suffix == ".json" else "\n".join(map(json.dumps, content)))
    return path


def _page(folder: Path, *records: dict[str, Any], history: Any = ()) -> Path:
    paths = [_file(folder / f"{i}.json", record) for i, record in enumerate(records)]
    paths += [_file(folder / "history.jsonl", history)] if history else []
    build.report(paths, html=folder / "page.html", markdown=None, out=None)
    return folder / "page.html"


class _Tags(HTMLParser):
    """The elements of a page as (tag, attributes), its text, and its tables' cells by the number of their line."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.lines, self._inside = "", {}, ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self._inside = dict(attributes).get("id") or ""
            self.lines.setdefault(self._inside, [])
        if tag in ("td", "th") and self._inside:
            self.lines[self._inside].append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._inside and self.lines[self._inside]:
            self.lines[self._inside][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == "tr" else self._inside

    def with_attribute(self, name: str) -> list[str]:
        return [str(attributes[name]) for _, attributes in self.tags if name in attributes]


# --- content


def test_a_gpu_row_shows_its_times_ratio_target_and_ops(tmp_path: Path) -> None:
    tags = _Tags(_page(tmp_path, _gpu(), _cpu()).read_text())
    cells = ["mlp-t8-d256", "forward, us", "eager", "50", "54", "1.080 (0.900 to 1.700)", "1.0%", "1.000", "yes"]
    assert tags.lines["row-0"] == [*cells, "640 (80%)", "800 (20%)", "", "linear_act=triton"]
    # On a processor there is no time, and a row without a target meets none.
    assert tags.lines["row-4"] == [
        "step-t16-d96",
        "forward, us",
        "eager",
        "1.500",
        "1.0%",
        "",
        "",
        "gated_linear=onednn",
    ]
    assert tags.lines["row-3"][-2] == "no"


def test_each_row_has_its_marks_in_the_plots(tmp_path: Path) -> None:
    tags = _Tags(_page(tmp_path, _gpu(), _cpu(), history=[_past(), _past(date="2031-05-01T00:00:00Z")]).read_text())
    marks = tags.with_attribute("data-rows")
    # A line among the ratios, a dot over tokens and one below the roof; the curve has a segment between two rows.
    assert [marks.count(str(number)) for number in range(7)] == [3, 3, 3, 1, 1, 1, 1]
    assert {"0 1", "1 2", "5 6"} == {mark for mark in marks if " " in mark}
    assert {"ratios", "scaling", "roofline", "history", "tables"} <= set(tags.with_attribute("id"))
    assert tags.lines["row-5"] == [
        "mlp | forward",
        GPU,
        "2031-04-01 00:00",
        "0123456789ab",
        "1.250 (1.200 to 1.300)",
        "faster",
    ]


def test_the_head_says_what_is_measured_modelled_and_missing(tmp_path: Path) -> None:
    text = _Tags(_page(tmp_path, _cpu()).read_text()).text
    assert "None of these results was measured on a GPU." in text
    measurable = [each.name for each in benchmarks().values() if "cuda" in each.devices]
    assert f"Without a result for any GPU: {len(measurable)} of {len(measurable)} benchmarks" in text
    assert "kernels/dev/compiled/triton-3.7.1.json" in text
    text = _Tags(_page(tmp_path, _gpu()).read_text()).text
    assert "None of these results" not in text
    assert f"Without a result for any GPU: {len(measurable) - 1} of" in text


@pytest.mark.parametrize(
    ("change", "told"), [({"dry": True}, "a dry run"), ({"gate": "red", "rows": []}, "its gate is red")]
)
def test_what_is_no_result_is_named_and_not_shown(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    tags = _Tags(_page(tmp_path, _gpu() | change).read_text())
    assert f"Not shown: {told}" in tags.text
    assert "None of these results was measured on a GPU." in tags.text
    assert not tags.with_attribute("data-rows")


def test_markup_in_a_record_stays_text(tmp_path: Path) -> None:
    row = _row(MARKUP, 1.2, metric=MARKUP, peer_name=MARKUP, ran=MARKUP)
    record = _record(MARKUP, MARKUP, row, origin=ORIGIN | {"commit": MARKUP, "cpu": MARKUP})
    past = _past(key=MARKUP, commit=MARKUP, device=MARKUP, verdict=MARKUP)
    text = _page(tmp_path, record, history=[past]).read_text()
    tags = _Tags(text)
    assert "planted" not in tags.with_attribute("id")
    assert not [tag for tag, _ in tags.tags if tag in ("b", "img")]
    assert text.count("<script") == text.count("</script>") == 1
    assert MARKUP in tags.text
    assert MARKUP.lower() in tags.with_attribute("data-shape")[1]


def test_the_page_asks_no_other_place_and_runs_its_own_script_alone(tmp_path: Path) -> None:
    text = _page(tmp_path, _gpu(), _cpu()).read_text()
    assert not re.search(r"https?:|\bsrc=|url\(|@import|innerHTML|\sstyle=|\son[a-z]+=", text)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy.startswith("default-src 'none'")
    assert len(re.findall(r"(?:script|style)-src 'sha256-[A-Za-z0-9+/]{43}='", policy)) == 2


def test_a_logarithmic_axis_has_round_ticks() -> None:
    scale = LogScale.over([0.5, 8.0], 0.0, 100.0, 1.0)
    assert scale(2.0) == pytest.approx(50.0)
    assert scale(1e9) == pytest.approx(100.0)
    assert scale.ticks() == pytest.approx([0.5, 1, 2, 5])
    assert LogScale.over([2.0, 6.0], 0, 1, 1.0).ticks() == pytest.approx([2, 3, 5])
    assert LogScale.over([0.89, 1.33], 0, 1, 1.0).ticks() == pytest.approx([0.9, 1, 1.1, 1.2, 1.3])


# --- files and the command


def test_the_command_writes_a_page_and_its_tables(tmp_path: Path) -> None:
    html, markdown = tmp_path / "new" / "page.html", tmp_path / "table.md"
    record = _file(tmp_path / "cpu.json", _cpu())
    found = CliRunner().invoke(app, ["bench", "report", str(record), "--html", str(html), "--markdown", str(markdown)])
    assert found.exit_code == 0, found.output
    assert found.output.split() == [str(html), str(markdown)]
    assert "| step-t8-d80 | forward, us | eager | 0.500 | 1.000 | **no** |" in markdown.read_text()
    assert "step-t8-d80" in html.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"new", "table.md", "cpu.json"}


def test_without_files_the_page_shows_the_committed_results(tmp_path: Path) -> None:
    (tmp_path / "results" / "cpu").mkdir(parents=True)
    _file(tmp_path / "results" / "cpu" / "onednn.json", _cpu())
    build.report([], html=tmp_path / "a.html", markdown=None, out=None, results=tmp_path / "results")
    assert "cpu/onednn.json" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"bench": "mlp"}, "KeyError"),
        (_past(ratio=0), "not positive"),
        (_past(between=[2, 1]), "not positive"),
        (_past(date="yesterday"), "yesterday"),
        ([], "TypeError"),
    ],
    ids=["foreign", "zero", "interval", "date", "list"],
)
def test_a_line_that_is_no_comparison_is_named(tmp_path: Path, line: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"history\.jsonl, line 2, is no comparison \(.*{why}"):
        _page(tmp_path, history=[_past(), line])
    assert not (tmp_path / "page.html").exists()


def test_a_history_needs_a_page_and_a_place_that_can_be_written(tmp_path: Path) -> None:
    history = _file(tmp_path / "h.jsonl", [_past()])
    with pytest.raises(ValueError, match=r"h\.jsonl holds earlier comparisons.*--html"):
        build.report([history], html=None, markdown=tmp_path / "a.md", out=None)
    with pytest.raises(ValueError, match=r"--html .*h\.jsonl/page\.html: cannot be written to \(.*\); choose another"):
        build.report([history], html=history / "page.html", markdown=None, out=None)
    with pytest.raises(ValueError, match=r"none\.jsonl cannot be read \(No such file or directory\)"):
        build.report([tmp_path / "none.jsonl"], html=tmp_path / "page.html", markdown=None, out=None)


# --- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


def test_filters_hide_rows_and_marks_and_nothing_is_wider_than_the_window(browser: Any, tmp_path: Path) -> None:
    wrong: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text))
    hostile = _record("gated", "cpu", _row(MARKUP, 1.1))
    page.goto(_page(tmp_path, _gpu(), _cpu(), hostile, history=[_past()]).as_uri())
    count = page.locator("#count")
    assert count.inner_text() == "7 of 7 rows"
    shown = lambda: page.locator("tr[data-name]:visible").evaluate_all("rows => rows.map(row => row.id)")
    page.fill("#shape", "T16 mlp")
    assert (count.inner_text(), shown()) == ("1 of 7 rows", ["row-1"])
    assert set(page.locator("[data-rows]:not([hidden])").evaluate_all("all => all.map(x => x.dataset.rows)")) == {"1"}
    assert page.locator("#history").is_hidden()
    assert page.locator(".ratio:not(.axis):visible").count() == 1
    page.keyboard.press("Escape")  # empties a search field
    page.fill("#name", "gated_linear")
    assert shown() == ["row-4"]
    page.fill("#name", "")
    page.select_option("#device", "GPU")
    assert shown() == ["row-6", "row-0", "row-1", "row-2"]
    page.click("button[type=reset]")
    page.wait_for_function("() => document.getElementById('count').textContent === '7 of 7 rows'")
    _screenshots(page, tmp_path)
    page.close()
    assert not wrong


def _screenshots(page: Any, folder: Path) -> None:
    folder = ROOT / ".jobs" / "screenshots" if (ROOT / ".jobs").is_dir() else folder
    folder.mkdir(exist_ok=True)
    for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == width
        page.screenshot(path=folder / f"bench-{width}-{scheme}.png", full_page=True)
    assert page.evaluate("[...document.querySelectorAll('.scroll')].some(box => box.scrollWidth > box.clientWidth)")
