"""The pages of the API reference: the public names, in the groups and the order of `docs/reference.md`'s table of them.

Nothing is imported: names come from the source of ``shardfuse/__init__.py`` and ``shardfuse/testing/__init__.py``, and
mkdocstrings reads the docstrings without running the package. So a page needs neither torch nor a GPU.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from links import ROOT, for_the_site

# The title of the page for the names whose group begins with one of this floor.
TITLES = {
    "kernels": "Ops",
    "parallel": "Parallelism",
    "layers": "Layers and models",
    "training": "Data",
    "serving": "Serving",
    "explanation": "Explain",
    "planning": "Plan",
}
TESTING = "Testing"
_PACKAGE = ROOT / "src" / "shardfuse"


def public_names(package: Path = _PACKAGE) -> list[str]:
    """What ``__all__`` of a package lists, without ``__version__``, which has no docstring."""
    return [name for name in _assigned(package, "__all__") if name != "__version__"]


def groups() -> dict[str, list[tuple[list[str], str]]]:
    """By the title of a page, its groups: the names and what that table says of them.

    Raises ValueError for a public name that is in no row of the table, or in two.
    """
    homes = _assigned(_PACKAGE, "_HOMES")
    _, _, after = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8").partition("## Public names")
    table, _, _ = after.partition("\n## ")
    found: dict[str, list[tuple[list[str], str]]] = {title: [] for title in TITLES.values()}
    for cell, what in re.findall(r"^\| (`.*?`) \| (.*) \|$", table, re.MULTILINE):
        names = re.findall(r"`(\w+)`", cell)
        title = TITLES[homes[names[0]].split(".")[0]]
        found[title].append((names, for_the_site(what, "docs/reference.md", _page(title))))
    listed = sorted(name for rows in found.values() for names, _ in rows for name in names)
    if listed != sorted(public_names()):
        wrong = {name for name in {*listed, *public_names()} if listed.count(name) != 1 or name not in public_names()}
        raise ValueError(f"docs/reference.md: expected each public name once in the table; correct {sorted(wrong)}")
    return found


def pages() -> dict[str, str]:
    """The Markdown of every page of the reference, by its path in the site."""
    found = {
        _page(title): f"# {title}\n\n" + "\n".join(_section(names, what) for names, what in rows)
        for title, rows in groups().items()
    }
    testing = public_names(_PACKAGE / "testing")
    entries = "\n".join(_entry(f"testing.{name}") for name in testing)
    found[_page(TESTING)] = (
        f"# {TESTING}\n\n::: shardfuse.testing\n    options: {{heading_level: 2, members: false}}\n\n{entries}"
    )
    return {"reference/index.md": _index(testing), **found}


def _index(testing: list[str]) -> str:
    """The first page: every name with what it is, and where it is described."""
    lines = [
        "# API reference\n",
        "`import shardfuse as sf` has all names below, and `sf.__version__`. A name is imported at its first use.\n",
        "Shapes use one legend: T tokens, D model width, F feed-forward width, N heads, K KV heads, H head size, "
        "V vocabulary, R ranks; a sharded dimension is written `F/R`.\n",
    ]
    for title, rows in groups().items():
        lines += [f"## {title}\n", "| names | what they are |", "|---|---|"]
        for names, what in rows:
            links = ", ".join(f"[`{name}`]({_file(title)}#shardfuse.{name})" for name in names)
            lines.append(f"| {links} | {what} |")
        lines.append("")
    links = ", ".join(f"[`{name}`]({_file(TESTING)}#shardfuse.testing.{name})" for name in testing)
    return "\n".join([*lines, f"## {TESTING}\n", f"`shardfuse.testing` has {links}.\n"])


def _section(names: list[str], what: str) -> str:
    """A group: its names below a heading of their own, or a name alone."""
    if len(names) == 1:
        return _entry(names[0], level=2)
    heading = ", ".join(f"`{name}`" for name in names)
    return f"## {heading}\n\n{what[0].upper()}{what[1:]}.\n\n" + "\n".join(_entry(name) for name in names)


def _entry(name: str, level: int = 3) -> str:
    return f"::: shardfuse.{name}\n    options: {{heading_level: {level}}}\n"


def _page(title: str) -> str:
    return f"reference/{_file(title)}"


def _file(title: str) -> str:
    return f"{title.lower().replace(' ', '_')}.md"


def _assigned(package: Path, name: str) -> Any:
    """The literal that a package's ``__init__.py`` assigns to ``name``."""
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return ast.literal_eval(node.value)
    raise ValueError(f"{package}/__init__.py does not assign {name}: the reference lists what it assigns")
