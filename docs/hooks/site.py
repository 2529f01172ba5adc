"""What mkdocs calls while it builds the site: the first page, pages of files outside ``docs/``, the API reference.

At the end it looks for what pages would load from other hosts.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import hosts
import links
import reference
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

# Warnings of loggers below "mkdocs" end a strict build.
_log = logging.getLogger("mkdocs.hooks.site")
FIRST_PAGE = "index.md"
_LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".yml": "yaml"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made: of repository files that documents link, and of the public names."""
    try:
        linked = links.linked_files(links.read_documents())
        made = reference.pages()
    except ValueError as error:
        raise PluginError(str(error)) from error
    for path in sorted(linked):
        level = InclusionLevel.UNDEFINED if path in links.PROJECT else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, links.page_of(path), content=_content(path), inclusion=level))
    for page, content in made.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page's text with links to files of the repository turned into links to their pages.

    The first page also gets the README's first screen.
    """
    source = page.file.src_uri
    if source.startswith("reference/"):
        return markdown
    if source.startswith("repository/"):
        path = source.removeprefix("repository/")
        return links.for_the_site(markdown, path) if path in links.PROJECT else markdown
    if source == FIRST_PAGE:
        return _first_page(markdown, links.DOCUMENTS + source)
    return links.for_the_site(markdown, links.DOCUMENTS + source)


def on_post_build(config: Any) -> None:
    """Warn of each file of another host that a page would load: the site has to work without a network."""
    find = {".html": hosts.loaded_by_page, ".css": hosts.loaded_by_style}
    for file in sorted(Path(config["site_dir"]).rglob("*")):
        if file.suffix in find:
            for address in find[file.suffix](file.read_text(encoding="utf-8")):
                _log.warning("%s loads %s: take it out, or keep a copy", file.relative_to(config["site_dir"]), address)


def _first_page(markdown: str, path: str) -> str:
    """The site's first page, whose text is the document at ``path``: it begins with the README's first screen."""
    readme = (links.ROOT / "README.md").read_text(encoding="utf-8")
    try:
        return links.with_first_screen(markdown, path, readme)
    except ValueError as error:
        raise PluginError(str(error)) from error


def _content(path: str) -> str:
    """A page for the file at ``path``: a document as it is, other text as code."""
    text = (links.ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n`````{language}\n{text.rstrip()}\n`````\n"
