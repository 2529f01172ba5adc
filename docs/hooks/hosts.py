"""Which files of other hosts a page would load by itself: the site has to work without a network."""

from __future__ import annotations

import re

# A link (<a href>) is not loaded; neither are the addresses by which a page says where it belongs.
_IN_HTML = re.compile(
    r"<(?:script|img|iframe|source|audio|video|embed)\b[^>]*?\bsrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b(?![^>]*\brel=[\"']?(?:canonical|prev|next))[^>]*?\bhref=[\"']?((?:https?:)?//[^\"'\s>]+)"
)
_IN_CSS = re.compile(r"(?:@import\s*|url\(\s*)[\"']?((?:https?:)?//[^\"')\s]+)")


def loaded_by_page(html: str) -> list[str]:
    """The addresses on other hosts that a page's tags have the browser load; each once, in order."""
    return list(dict.fromkeys(next(filter(None, found)) for found in _IN_HTML.findall(html)))


def loaded_by_style(css: str) -> list[str]:
    """The addresses on other hosts that a style sheet has the browser load; each once, in order."""
    return list(dict.fromkeys(_IN_CSS.findall(css)))
