"""The tables of docs/tools.md: each row is a tool, and each row has a test."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "tools.md"


def rows(heading: str) -> list[str]:
    """The first cells of the table under ``heading``, without the marks of code."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [line.split("|")[1].strip().replace("`", "") for line in lines[2:]]
