"""Which files of other hosts a page would load by itself: the site has to work without a network."""

from __future__ import annotations

import re

# A link (<a href>) is not loaded; neither are the addresses by which a page says where it belongs.
_LOADED = re.compile(
    r"<(?:script|img|iframe|source|audio|video|embed)\b[^>]*?\bsrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b(?![^>]*\brel=[\"']?(?:canonical|prev|next))[^>]*?\bhref=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|(?:@import|url\()\s*[\"']?((?:https?:)?//[^\"')\s]+)"
)


def loaded_from(text: str) -> list[str]:
    """The addresses on other hosts that a page of HTML, or a file of CSS, has the browser load; each once, in order."""
    return list(dict.fromkeys(next(filter(None, found)) for found in _LOADED.findall(text)))
