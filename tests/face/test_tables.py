"""Tables fit the terminal, and no width loses what they hold."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest
from rich.text import Text

from shardfuse import cli
from shardfuse.bench.harness.report import Row, show_rows
from shardfuse.kernels.runtime.printing import Sheet, console, figure, prose, text_of, unbroken

WIDTHS = (60, 80, 120)
REASON = "a reason of many words that wrap where they have to [and] are kept"
COMMANDS = [
    ("env",),
    ("bench", "list"),
    ("bench", "stale"),
    ("schedule", "1f1b"),
    ("schedule", "zbv", "--stages", "2", "--model", "llama3-8b"),
]


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """output(60, "env"): standard output of a command that succeeds in a terminal of 60 columns."""

    def run(columns: int, *arguments: str) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["shardfuse", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert not left.value.code
        return capsys.readouterr().out

    return run


def _words(text: str) -> set[str]:
    """Its words without the marks that blocks of lines put between figures."""
    return {word.rstrip(";") for word in text.split() if not set(word) <= set("─")}


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_command_fits_and_loses_nothing(output: Callable[..., str], arguments: tuple[str, ...]):
    wide = output(2000, *arguments)
    for columns in WIDTHS:
        text = output(columns, *arguments)
        assert max(map(len, text.splitlines())) <= columns
        assert "…" not in text
        if arguments[0] != "schedule":  # a timeline has as many marks as columns
            assert _words(wide) - {"name", "GPU"} <= _words(text)  # blocks begin without their first column's heading


def _sheet() -> Sheet:
    columns = (unbroken("case"), prose("why"), figure("ratio"), figure("p"))
    sheet = Sheet(*columns, title="rows of a table", caption="> 1: faster")
    sheet.add("mlp-d256-t64", REASON, "1.25", "0.01")
    sheet.add("block-d1024-t512", "", Text("0.75", "red"), "")
    return sheet


@pytest.mark.parametrize("columns", [12, 20, 40, 60, 80, 200])
def test_a_sheet_keeps_its_words_at_every_width(monkeypatch: pytest.MonkeyPatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = text_of(_sheet())
    assert max(map(len, text.splitlines())) <= columns
    letters = "".join(text.split())
    for word in ("rows of a table", "mlp-d256-t64", "block-d1024-t512", "1.25", "0.75", "0.01", "> 1: faster"):
        assert "".join(word.split()) in letters
    if columns >= 40:  # no word is broken
        assert _words(REASON) <= _words(text)


def test_a_sheet_has_rows_where_they_fit_and_blocks_where_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert "case" in text_of(_sheet())
    monkeypatch.setenv("COLUMNS", "40")
    lines = text_of(_sheet()).splitlines()
    assert lines[1:3] == ["mlp-d256-t64", "  why  a reason of many words that wrap"]
    assert lines[-3:] == ["block-d1024-t512", "  ratio 0.75", "> 1: faster"]


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="a row of 1 cells: expected one for each of the 2 columns"):
        Sheet(unbroken("a"), figure("b")).add("1")


@pytest.mark.parametrize("columns", WIDTHS)
def test_rows_of_a_benchmark_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    row = Row("mlp-d1024-t512-bias-gelu", "forward + backward, us", 12.5, 25.0, "torch.compile", 2.0, 1.5, True, 0.03)
    show_rows(console(), "mlp on some GPU", [row], absolute=True)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    assert {"mlp-d1024-t512-bias-gelu", "forward", "torch.compile", "12.5", "25", "2.000", "1.500", "yes"} <= _words(
        text
    )


def test_without_a_terminal_and_columns_there_are_80(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    nowhere = os.terminal_size((80, 24))

    def no_terminal(*descriptor: int) -> os.terminal_size:
        raise OSError

    monkeypatch.setattr(os, "get_terminal_size", no_terminal)
    assert console().width == nowhere.columns
