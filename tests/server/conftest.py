"""The server that the tests of a module share: after each of them nothing may be left in it; and a browser.

Screenshots go to .jobs/screenshots/ where the checkout has a folder .jobs, else to pytest's own folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, FLAGS, MISSING

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[serve])")

from server_case import SOON_S, Server, serve

ROOT = Path(__file__).parents[2]


# Not for the session: after the tests of other folders, some of which fork, its thread was seen not to end.
@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with serve(debug=True) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    yield shared_server
    shared_server.idle()


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
        context.set_default_timeout(SOON_S * 1000)
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
