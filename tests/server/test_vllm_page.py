"""docs/server_vs_vllm.md is what the records of the lanes beside vLLM say, and a test's reason covers that test."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import vllm_page
from vllm_page import OUTCOMES
from vllm_reasons import NO_SERVER, NOT_APPLICABLE, REASONS, REFUSED, Reason, judged


def test_the_page_is_made_from_the_records() -> None:
    page = vllm_page.page(json.loads(vllm_page.REQUESTS.read_text()), json.loads(vllm_page.TESTS.read_text()))
    assert vllm_page.PAGE.read_text(encoding="utf-8") == page, "python tests/support/vllm_page.py writes it again"


def test_the_record_counts_its_tests() -> None:
    files = json.loads(vllm_page.TESTS.read_text())["files"]
    assert files
    for path, file in files.items():
        others = Counter(each["outcome"] for each in file["others"])
        counted = {outcome: count for outcome, count in file["counts"].items() if outcome != "passed"}
        assert others == counted, path
        assert set(file["counts"]) <= set(OUTCOMES), path
        assert all(each["why"] for each in file["others"]), path


def test_a_page_of_two_records() -> None:
    row = {"case": "plain", "ours": "200", "theirs": "200", "differs": "same", "why": ""}
    requests = {"version": "1.2", "near": 0.01, "everywhere": {"a.b": "why"}, "rows": [row, {**row, "differs": "text"}]}
    others = [
        {"test": "test_a[x]", "outcome": REFUSED, "why": "no"},
        {"test": "test_a[y]", "outcome": REFUSED, "why": "no"},
    ]
    tests = {
        "version": "1.2",
        "commit": "abc",
        "files": {"tests/f/test_it.py": {"counts": {"passed": 3, REFUSED: 2}, "others": others}},
    }
    page = vllm_page.page(requests, tests)
    assert "1 of 2 answers are the same" in page
    assert "| plain | 200 | 200 | text |  |" in page
    assert "| `f/test_it.py` | 3 |  | 2 |  |  |" in page
    assert "| all | 3 | 0 | 2 | 0 | 0 |" in page
    assert "| refused by design | no | 2 | `test_it.py::test_a` (2) |" in page


@pytest.mark.parametrize(
    ("pattern", "test", "covered"),
    [
        ("test_it.py::test_a", "tests/f/test_it.py::test_a", True),
        ("test_it.py::test_a", "tests/f/test_it.py::test_a[x]", False),
        ("test_it.py::test_a*", "tests/f/test_it.py::test_a[x/y]", True),
        ("test_it.py::*[x/y]", "tests/f/test_it.py::test_a[x/y]", True),
        ("test_it.py::test_a[x]", "tests/f/test_it.py::test_a[x]", True),
        ("test_it.py::test_a[x]", "tests/f/test_it.py::test_ax", False),
        ("it.py::test_a", "tests/f/test_it.py::test_a", False),
    ],
)
def test_patterns(pattern: str, test: str, covered: bool) -> None:
    assert Reason(REFUSED, "no", (pattern,)).covers(test) is covered


def test_a_reason_has_an_outcome_and_tests() -> None:
    for reason in REASONS:
        assert reason.outcome in OUTCOMES
        assert reason.why
        assert reason.tests


def test_a_failure_needs_a_reason_and_a_reason_a_failure() -> None:
    reasons = (
        Reason(REFUSED, "no", ("test_it.py::test_a*",)),
        Reason(NOT_APPLICABLE, "by chance", ("test_it.py::test_drawn",), drawn=True),
        Reason(REFUSED, "forgotten", ("test_it.py::test_gone",)),
    )
    outcomes = {
        "f/test_it.py::test_a[1]": ("failed", "assert 1"),
        "f/test_it.py::test_a[2]": ("passed", ""),
        "f/test_it.py::test_b": ("failed", "assert 2"),
        "f/test_it.py::test_c": ("passed", ""),
        "f/test_it.py::test_d": ("skipped", "no GPU"),
        "f/test_it.py::test_drawn": ("passed", ""),
    }
    found, wrong = judged(outcomes, ["f/test_it.py::test_unit"], reasons)
    assert found == {
        "f/test_it.py::test_a[1]": (REFUSED, "no"),
        "f/test_it.py::test_a[2]": ("passed", ""),
        "f/test_it.py::test_b": ("failed", "assert 2"),
        "f/test_it.py::test_c": ("passed", ""),
        "f/test_it.py::test_d": ("skipped", "no GPU"),
        "f/test_it.py::test_drawn": (NOT_APPLICABLE, "by chance"),
        "f/test_it.py::test_unit": (NOT_APPLICABLE, NO_SERVER),
    }
    assert wrong == [
        "f/test_it.py::test_a[2] passed, and there is a reason why it does not: no",
        "f/test_it.py::test_b failed, and there is no reason for it: assert 2",
        "no test that failed has this reason: forgotten",
    ]


def test_options_of_vllm_are_translated() -> None:
    pytest.importorskip("openai", reason="openai is not installed")
    from vllm_remote import translated

    given = ["--dtype", "half", "--max_model_len", "64", "--enforce-eager", "--lora-modules=a=b", "--max-num-seqs=2"]
    assert translated(given) == ["--max-model-len", "64", "--max-num-seqs", "2"]
    with pytest.raises(ValueError, match="--new-option: an option of vLLM that the lane does not know"):
        translated(["--new-option", "1"])
