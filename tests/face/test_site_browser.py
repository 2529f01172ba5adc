"""The built site as a browser shows it from disk, without a network: the width of every page, and the search.

Screenshots of the first page go to .jobs/screenshots/ where the checkout has a folder .jobs, else to pytest's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chromium

ROOT = Path(__file__).parents[2]
WIDE, NARROW = 1280, 390


@pytest.fixture(scope="module")
def browser(site: Path) -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, site: Path) -> Iterator[Any]:
    """A tab without a network; at its end no page had an error, or asked for anything but files of the site."""
    context = browser.new_context(offline=True)
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
    page.on("console", lambda message: wrong.append(f"{page.url}: {message.text}"))
    page.on("request", lambda request: wrong.append(request.url) if not request.url.startswith(site.as_uri()) else None)
    yield page
    context.close()
    assert wrong == []


def _set_width(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})


def _too_wide(page: Any) -> int:
    """By how many pixels the page scrolls sideways."""
    return int(page.evaluate("document.scrollingElement.scrollWidth - innerWidth"))


def test_no_page_scrolls_sideways(page: Any, site: Path) -> None:
    """Every page of the navigation, and one that shows a file as code."""
    first = (site / "index.html").as_uri()
    page.goto(first)
    links = page.locator("nav.md-nav--primary a.md-nav__link").evaluate_all("links => links.map(link => link.href)")
    pages = {link.partition("#")[0] for link in links} | {
        (site / "repository" / "tests" / "face" / "test_site.py.html").as_uri()
    }
    named = {page.removeprefix(site.as_uri()) for page in pages}
    assert {
        "/index.html",
        "/gpu.html",
        "/tutorials/fuse.html",
        "/reference/ops.html",
        "/repository/index.html",
    } <= named
    found = {}
    for width in (WIDE, NARROW):
        _set_width(page, width)
        for address in sorted(pages):
            page.goto(address)
            assert page.evaluate("innerWidth") == width
            found[address, width] = _too_wide(page)
    assert {key: pixels for key, pixels in found.items() if pixels > 0} == {}


def test_a_page_that_scrolls_sideways_is_noticed(page: Any, site: Path) -> None:
    _set_width(page, NARROW)
    page.goto((site / "index.html").as_uri())
    page.evaluate("document.querySelector('article p').style.width = '500px'")
    assert _too_wide(page) > 100


def test_the_first_page_shows_the_readme_s_picture(page: Any, site: Path, tmp_path: Path) -> None:
    page.goto((site / "index.html").as_uri())
    picture = page.locator("article img").first
    assert picture.evaluate("image => image.complete && image.naturalWidth > 0")
    assert page.locator("article h1").count() == 1
    folder = ROOT / ".jobs" / "screenshots" if (ROOT / ".jobs").is_dir() else tmp_path
    folder.mkdir(exist_ok=True)
    for width in (WIDE, NARROW):
        _set_width(page, width)
        page.screenshot(path=folder / f"site-{width}.png", full_page=True)


@pytest.mark.parametrize(("start", "width"), [("index.html", WIDE), ("tutorials/fuse.html", NARROW)])
def test_the_search_leads_to_a_page(page: Any, site: Path, start: str, width: int) -> None:
    _set_width(page, width)
    page.goto((site / start).as_uri())
    if width == NARROW:
        page.locator("label.md-header__button[for=__search]").click()
    page.locator("input.md-search__input").press_sequentially("checkpoint")
    page.locator("a.md-search-result__link").first.click()
    page.wait_for_url(f"{(site / 'checkpoints.html').as_uri()}*")
    assert page.locator("h1").inner_text().startswith("Checkpoints")
    assert page.locator("article mark").first.inner_text().lower() == "checkpoint"
