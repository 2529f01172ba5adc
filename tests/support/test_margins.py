"""What tests/support/margins.py records for ``make test-portable``, and what it leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import margins
import portable
import pytest
import torch

from shardfuse.kernels.dev import accuracy


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which comparisons of this test are recorded."""
    monkeypatch.setattr(accuracy.Verdict, "ok", accuracy.Verdict.ok)
    monkeypatch.setattr(torch.testing, "assert_close", torch.testing.assert_close)
    monkeypatch.setenv(margins.VARIABLE, str(tmp_path))
    margins.install()
    return tmp_path


def test_errors_are_recorded_as_shares_of_their_budgets(recorded: Path):
    torch.testing.assert_close(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.25]), rtol=0.0, atol=1.0)
    assert not accuracy.Verdict("out", 3.0, 2.0).ok
    with margins.left_out():
        assert not accuracy.Verdict("wrong on purpose", 4.0, 2.0).ok
    assert accuracy.Verdict("out", 1.0, 2.0).ok
    found = [(each.kind, each.name, each.ratio) for each in portable.margins(recorded)]
    assert found == [("close", "", 0.25), ("verdict", "out", 1.5), ("verdict", "out", 0.5)]
    (file,) = recorded.glob("*.jsonl")
    assert all("test_errors_are_recorded" in json.loads(line)["test"] for line in file.read_text().splitlines())


@pytest.mark.spoiled
def test_a_spoiled_test_is_left_out(recorded: Path):
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
    assert accuracy.Verdict("out", 1.0, 2.0).ok
    assert list(portable.margins(recorded)) == []
