"""Tables that fit the width they are printed at, whatever it is, and lose nothing.

``COLUMNS`` decides the width, then the terminal, and 80 columns stand for neither. Where a table's columns fit beside
each other, its prose wraps between words; where they do not, each row becomes a block of lines.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

__all__ = ["Column", "Sheet", "console", "figure", "prose", "text_of", "unbroken"]

GAP = 2  # columns between two columns
INDENT = 2


class Column(NamedTuple):
    """A column of a :class:`Sheet`; ``least`` is the narrowest that prose may become, None where nothing wraps."""

    heading: str
    right: bool = False
    least: int | None = None


def unbroken(heading: str) -> Column:
    """A column of names, which are not broken."""
    return Column(heading)


def figure(heading: str) -> Column:
    """A column of numbers, which are not broken and end at the same place."""
    return Column(heading, right=True)


def prose(heading: str, least: int = 24) -> Column:
    """A column of words, which wrap within ``least`` columns or more."""
    return Column(heading, least=least)


class Sheet:
    """A table for :mod:`rich`: a cell is plain text (not markup), a ``Text`` or another renderable."""

    def __init__(self, *columns: Column, title: str = "", caption: str = "") -> None:
        self.columns = columns
        self.title = title
        self.caption = caption
        self.rows: list[tuple[RenderableType, ...]] = []

    def add(self, *cells: RenderableType) -> None:
        """Append a row, a cell for each column; ValueError for another number of them."""
        if len(cells) != len(self.columns):
            raise ValueError(f"a row of {len(cells)} cells: expected one for each of the {len(self.columns)} columns")
        self.rows.append(tuple(Text(cell) if isinstance(cell, str) else cell for cell in cells))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, "bold")
        widths = self._widths(console, options)
        yield from self._blocks() if widths is None else [self._table(widths)]
        if self.caption:
            yield Text(self.caption, "dim")

    def _widths(self, console: Console, options: ConsoleOptions) -> list[int] | None:
        """The columns' widths side by side; None where they do not fit."""
        wide = options.update(width=1 << 16)
        least: list[int] = []
        full: list[int] = []
        for column, cells in zip(self.columns, zip(*self.rows) if self.rows else [()] * len(self.columns)):
            sizes = [Measurement.get(console, wide, cell) for cell in cells]
            heading = Measurement.get(console, wide, Text(column.heading))
            full.append(max(size.maximum for size in [*sizes, heading]))
            if column.least is None:
                least.append(max([heading.minimum, *(size.maximum for size in sizes)]))
            else:
                longest = max(size.minimum for size in [*sizes, heading])
                least.append(max(longest, min(full[-1], column.least)))
        spare = options.max_width - GAP * (len(self.columns) - 1) - sum(least)
        if spare < 0:
            return None
        # The column that lacks least first: whole if that is possible, else in equal shares.
        order = sorted(range(len(full)), key=lambda index: full[index] - least[index])
        for position, index in enumerate(order):
            lacks = full[index] - least[index]
            given = lacks if lacks <= spare else spare // (len(order) - position)
            least[index] += given
            spare -= given
        return least

    def _table(self, widths: Sequence[int]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
        for column, width in zip(self.columns, widths):
            justify: Any = "right" if column.right else "left"
            table.add_column(Text(column.heading), justify=justify, width=width, overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def _blocks(self) -> Iterator[RenderableType]:
        """Each row as its first cell and, below it, the others behind their headings; numbers share a line."""
        for first, *others in self.rows:
            yield first
            block = Table.grid(padding=(0, GAP, 0, 0))
            block.add_column(no_wrap=True)
            block.add_column(overflow="fold")
            figures = Text()
            for column, cell in zip(self.columns[1:], others):
                if isinstance(cell, Text) and not cell:
                    continue
                if isinstance(cell, Text) and column.right:
                    figures.append_text(Text.assemble("; " if figures else "", f"{column.heading} ", cell))
                else:
                    block.add_row(Text(column.heading, "dim"), cell)
            if block.row_count:
                yield Padding(block, (0, 0, 0, INDENT))
            if figures:
                yield Padding(figures, (0, 0, 0, INDENT))


def console(*, stderr: bool = False, **options: Any) -> Console:
    """A console of standard output or error as wide as ``COLUMNS``, else as the terminal, else 80 columns.

    It gives numbers and paths in what it prints no colours. ``options`` are those of rich's Console.
    """
    return Console(stderr=stderr, highlight=False, **options)


def text_of(shown: RenderableType) -> str:
    """``shown`` as plain text, for ``str()`` and logs: as wide as :func:`console`, no spaces at the ends of lines."""
    text = io.StringIO()
    Console(file=text, width=shutil.get_terminal_size().columns, color_system=None).print(shown)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())
