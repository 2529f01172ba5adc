"""The cases of a fuzzer: repeatable, within their budget, and named where they fail."""

from __future__ import annotations

from random import Random

import pytest
from fuzz import CaseError, Fuzz


def _drawn(fuzz: Fuzz) -> list[float]:
    numbers = []

    def note(number: int, draw: Random) -> str:
        numbers.append(draw.random())
        return "drawn"

    assert fuzz.run(note) == {"drawn": len(numbers)}
    return numbers


def test_seed_and_number_decide_a_case(monkeypatch: pytest.MonkeyPatch):
    times = iter(range(1000))
    monkeypatch.setattr("fuzz.time.monotonic", lambda: float(next(times)))
    numbers = _drawn(Fuzz("test", 5, seconds=8))
    assert len(set(numbers)) == len(numbers) == 4  # the clock is read once at the start, and twice for each case
    assert [_drawn(Fuzz("test", 5, only=i)) for i in range(4)] == [[each] for each in numbers]
    assert _drawn(Fuzz("test", 6, only=0)) != numbers[:1]


def test_a_failure_says_how_its_case_runs_again(capsys: pytest.CaptureFixture[str]):
    def check(number: int, draw: Random) -> str:
        if draw.random() > 0.5:
            raise ValueError("above a half")
        return "below"

    with pytest.raises(CaseError, match="above a half") as caught:
        Fuzz("test", 1).run(check)
    variables = dict(word.split("=") for word in str(caught.value).split() if "=" in word)
    again = Fuzz.from_environment("test", variables)
    assert capsys.readouterr().out == "\ntest: seed 1, 60 s\n"
    with pytest.raises(CaseError, match=f"case {again.only} failed after 0 others"):
        again.run(check)


def test_the_environment_chooses():
    assert Fuzz.from_environment("test", {"SHARDFUSE_FUZZ_SECONDS": "2.5", "SHARDFUSE_FUZZ_CASE": ""}).seconds == 2.5
    assert Fuzz.from_environment("test", {}).only is None
