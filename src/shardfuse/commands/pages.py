"""The frame of the commands' HTML pages: one file without scripts, which opens from a disk without a network."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..bench.page.markup import Element, render

_TEMPLATE = Path(__file__).with_name("pages.html")


def page(title: str, elements: Iterable[Element]) -> str:
    """The page of ``elements``; ``title`` is plain text of the project's own, not a user's."""
    template = _TEMPLATE.read_text(encoding="utf-8")
    return template.replace("{title}", title).replace("{main}", render(elements))
