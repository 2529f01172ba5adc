"""Links between the documents, which are written for a code host, and the pages that the site has for them.

A path here is a path in the repository (``docs/fuse.md``, ``README.md``, ``examples/train_over_ranks.py``), and a page
is the source path of a page in the site, relative to ``docs/``. A file outside ``docs/`` that a document links has a
page below ``repository/``. A picture in ``docs/`` is a file of the site as it is.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = "docs/"
# The documents at the root that are pages even if nothing links them.
PROJECT = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")

# What ends the README's first screen, and what shows in docs/index.md that the site has that first screen above.
END_OF_FIRST_SCREEN = "<!-- end of the first screen -->"
FIRST_SCREEN = "<!-- on the site, the first screen of README.md is in the place of all above -->"

_PICTURES = (".svg", ".png")
_CODE = re.compile(r"^( *)(```|~~~).*?^\1\2[^\n]*$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_ELSEWHERE = re.compile(r"[a-z][a-z+.-]*:|/")
_COMMENT = re.compile(r"^<!--.*?-->\n", re.DOTALL | re.MULTILINE)


def page_of(path: str) -> str:
    """The page of the file at ``path``, or the picture itself."""
    if path.startswith(DOCUMENTS) and path.endswith((".md", *_PICTURES)):
        return path.removeprefix(DOCUMENTS)
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def targets(markdown: str, path: str) -> list[str]:
    """The path of each file that the document at ``path`` links, without anchors; links elsewhere are left out."""
    found: list[str] = []

    def note(link: str) -> str:
        found.append(_target(link, path)[0])
        return link

    _replace(markdown, note)
    return found


def for_the_site(markdown: str, path: str, page: str = "") -> str:
    """Text of the document at ``path`` with each link to a file turned into one to the file's page.

    ``page`` is where the text is shown, by default the document's own page.
    """
    page = page or page_of(path)

    def to_page(link: str) -> str:
        target, anchor = _target(link, path)
        if link == anchor and page == page_of(path):
            return link
        return posixpath.relpath(page_of(target), posixpath.dirname(page) or ".") + anchor

    return _replace(markdown, to_page)


def with_first_screen(markdown: str, path: str, readme: str) -> str:
    """The page of the document at ``path``, which begins with the first screen of ``readme``, with links for the site.

    Raises ValueError where a document does not have its mark once.
    """
    first, _ = _halves(readme, END_OF_FIRST_SCREEN, "README.md")
    _, rest = _halves(markdown, FIRST_SCREEN, path)
    return for_the_site(_COMMENT.sub("", first), "README.md", page_of(path)) + for_the_site(rest, path)


def linked_files(documents: dict[str, str]) -> set[str]:
    """The paths of the files outside ``docs/`` that have a page, from all documents by path.

    Raises ValueError with every link whose file does not exist.
    """
    found = {target for path, text in documents.items() for target in targets(text, path)}
    missing = [
        f"{path} links {target}, which is no file of the repository: correct the link"
        for path, text in documents.items()
        for target in targets(text, path)
        if not (ROOT / target).is_file()
    ]
    if missing:
        raise ValueError("\n".join(missing))
    return {target for target in (*PROJECT, *found) if page_of(target).startswith("repository/")}


def read_documents() -> dict[str, str]:
    """Every document by its path: those at the root and all below ``docs/``."""
    files = [*(ROOT / name for name in PROJECT), *(ROOT / DOCUMENTS).rglob("*.md")]
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


def _halves(markdown: str, mark: str, path: str) -> list[str]:
    """What is before ``mark`` in the document at ``path``, and what is after it."""
    halves = markdown.split(mark)
    if len(halves) != 2:
        raise ValueError(f"{path} has {len(halves) - 1} lines {mark}: the site's first page needs one")
    return halves


def _target(link: str, path: str) -> tuple[str, str]:
    """The path that ``link`` in the document at ``path`` leads to, and its anchor with the #."""
    target, mark, anchor = link.partition("#")
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) if target else path, mark + anchor


def _replace(markdown: str, change: Callable[[str], str]) -> str:
    """``markdown`` with each link to a file changed, outside of code."""
    parts, end = [], 0
    for code in [*_CODE.finditer(markdown), None]:
        start = code.start() if code else len(markdown)
        prose = markdown[end:start]
        parts.append(_LINK.sub(lambda found: found[1] if _ELSEWHERE.match(found[1]) else change(found[1]), prose))
        if code:
            parts.append(code[0])
            end = code.end()
    return "".join(parts)
