"""The site: its links, its reference and its page of proofs, by text alone.

The site is built where mkdocs is installed (``make docs``); test_site_browser.py looks at it in a browser.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

import shardfuse
from shardfuse import testing

ROOT = Path(__file__).resolve().parents[2]
HOOKS = str(ROOT / "docs" / "hooks")
sys.path.insert(0, HOOKS)
try:
    import hosts
    import links
    import reference
finally:
    sys.path.remove(HOOKS)

DOCUMENTS = links.read_documents()


def test_every_link_leads_somewhere():
    """Of all documents, outside docs/ too, whether they are read in the site or on a code host."""
    assert {"examples/train_over_ranks.py", "README.md"} <= links.linked_files(DOCUMENTS)
    with pytest.raises(ValueError, match=r"docs/new\.md links docs/nowhere\.md"):
        links.linked_files({"docs/new.md": "[x](nowhere.md)"})


def test_links_become_links_to_pages():
    text = "[a](../README.md#x) [b](fuse.md) [c](../bench/a.py) [d](https://e.org) `[e](f)`\n"
    there = "[a](repository/README.md#x) [b](fuse.md) [c](repository/bench/a.py.md) [d](https://e.org) `[e](f)`\n"
    assert links.for_the_site(text, "docs/cpu.md") == there
    assert links.for_the_site("[a](docs/fuse.md) [b](LICENSE)", "README.md") == "[a](../fuse.md) [b](LICENSE.md)"
    block = "```text\n[a](b.md)\n```\n"
    assert links.for_the_site(block, "README.md") == block


def test_an_anchor_of_another_page_and_a_picture():
    assert links.for_the_site("[a](#x)", "docs/cpu.md") == "[a](#x)"
    assert links.for_the_site("[a](#x)", "docs/cpu.md", "reference/ops.md") == "[a](../cpu.md#x)"
    assert links.for_the_site("![a](docs/a.svg)", "README.md") == "![a](../a.svg)"
    assert links.linked_files({"README.md": "![a](docs/overview.svg)"}) == set(links.PROJECT)


def test_the_first_page_begins_with_the_readme():
    first = "# a\n\n<!-- results -->\n\n![b](docs/b.svg) [c](docs/c.md#d) [e](CHANGELOG.md) [f](#later)\n\n"
    readme = f"{first}{links.END_OF_FIRST_SCREEN}\n\n## later\n"
    page = f"# documents\n\n{links.FIRST_SCREEN}\n\n[g](../README.md)\n"
    found = links.with_first_screen(page, "docs/index.md", readme).split()
    linked = ["![b](b.svg)", "[c](c.md#d)", "[e](repository/CHANGELOG.md)", "[f](repository/README.md#later)"]
    assert found == ["#", "a", *linked, "[g](repository/README.md)"]
    for wrong in ("# documents\n", page + page):
        with pytest.raises(ValueError, match=r"docs/index\.md has [02] lines <!-- on the site"):
            links.with_first_screen(wrong, "docs/index.md", readme)
    for wrong in (first, readme + readme):
        with pytest.raises(ValueError, match=r"README\.md has [02] lines <!-- end of the first screen -->"):
            links.with_first_screen(page, "docs/index.md", wrong)


def test_what_a_page_loads_from_other_hosts_is_found():
    quiet = '<a href="https://e.org">x</a><link rel="canonical" href="https://e.org/"><img src="a.png">'
    assert hosts.loaded_by_page(quiet) == []
    loud = '<script defer src="https://a.org/x.js"></script><link rel=stylesheet href="//b.org/x.css">'
    assert hosts.loaded_by_page(quiet + loud + loud) == ["https://a.org/x.js", "//b.org/x.css"]
    style = "@import 'http://c.org/x'; a { background: url(https://d.org/x.png); mask: url(#x) }"
    assert hosts.loaded_by_style(style) == ["http://c.org/x", "https://d.org/x.png"]


@pytest.mark.parametrize("path", DOCUMENTS)
def test_lists_begin_after_an_empty_line(path: str):
    """A code host shows a list without one; Python-Markdown shows a paragraph."""
    text = re.sub(r"^( *)```.*?^\1```$", "", DOCUMENTS[path], flags=re.DOTALL | re.MULTILINE)
    assert re.findall(r"^(?! *(?:[-*]|\d+\.) )\S.*\n(?:[-*]|\d+\.) .*", text, re.MULTILINE) == []


def test_every_public_name_has_one_entry():
    entries = Counter(re.findall(r"^::: shardfuse\.(\S+)$", "\n".join(reference.pages().values()), re.MULTILINE))
    names = [*shardfuse.__all__, *(f"testing.{name}" for name in testing.__all__)]
    assert entries == Counter([*names, "testing"]) - Counter(["__version__"])
    index = reference.pages()["reference/index.md"]
    assert [name for name in names if f"#shardfuse.{name})" not in index and name != "__version__"] == []
    assert "sf.__version__" in index


def test_the_navigation_names_every_page_once():
    """By text: mkdocs.yml names a function, so that a loader of plain YAML refuses it."""
    _, _, navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    named = Counter(re.findall(r"[\w/]+\.md$", navigation, re.MULTILINE))
    pages = [links.page_of(path) for path in DOCUMENTS]
    assert named == Counter([*pages, *reference.pages()])


def _headings(markdown: str) -> list[str]:
    """The headings of a document as the site shows them; those with code, links or other markup are left out."""
    text = re.sub(r"^```.*?^```$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    return [f">{heading}<a" for heading in re.findall(r"^#+ ([^`*\[&<\n]+)$", text, re.MULTILINE)]


def _marks(path: str) -> dict[str, list[str]]:
    """The decorators of each function in a file, as text."""
    tree = ast.parse((ROOT / path).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: [ast.unparse(each) for each in node.decorator_list] for node in found}


def test_every_proof_exists():
    rows = [line for line in DOCUMENTS["docs/proof.md"].splitlines() if line.startswith("| ")]
    text = "\n".join(rows)
    cited = re.findall(r"\[`([\w/.-]+)(?:::(\w+))?`\]\(\.\./([\w/.-]+)\)", text)
    assert len(cited) > 40
    for path, test, target in cited:
        assert path == target
        assert (ROOT / path).is_file(), path
        if test:
            assert test in _marks(path), f"{path} has no {test}"
    for row in rows:  # a row says of a test that make test does not run, that it does not
        for path, test in re.findall(r"`([\w/.-]+)::(\w+)`", row):
            marks = _marks(path)[test]
            assert "pytest.mark.nightly" not in marks or "nightly" in row, row
            assert "pytest.mark.gpu" not in marks or "GPU" in row, row
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", DOCUMENTS["docs/proof.md"])) <= targets | {"test-nightly"}


def test_every_composed_case_names_its_test():
    rows = [line for line in DOCUMENTS["docs/composed.md"].splitlines() if line.startswith("| ")]
    named = re.findall(r"`(test_\w+)`", "\n".join(rows))
    assert set(named) == {name for name in _marks("tests/parallel/test_composed.py") if name.startswith("test_")}
    for row in rows[1:]:
        assert re.search(r"`test_\w+`", row), row


def test_the_site_has_every_public_name_once(site: Path):
    names = set(shardfuse.__all__) - {"__version__"}
    html = "".join(file.read_text() for file in (site / "reference").glob("*.html"))
    anchors = Counter(re.findall(r'<h\d id="shardfuse\.(\w+)"', html))
    assert {name: count for name, count in anchors.items() if name != "testing"} == dict.fromkeys(names, 1)


def test_the_site_begins_with_the_first_screen(site: Path):
    html = (site / "index.html").read_text()
    first, _, rest = DOCUMENTS["README.md"].partition(links.END_OF_FIRST_SCREEN)
    shown = [heading in html for heading in _headings(first) + _headings(rest)]
    assert shown == [True] * len(_headings(first)) + [False] * len(_headings(rest))
    assert _headings(rest)
    picture = re.search(r'<img [^>]*src="([^"]+)"', html)
    assert picture
    assert (site / picture[1]).is_file()
    assert "<!--" not in html
