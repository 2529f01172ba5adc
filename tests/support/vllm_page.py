"""docs/server_vs_vllm.md, made from what the two lanes beside vLLM have written: vllm_server.json and vllm_tests.json.

``python tests/support/vllm_page.py`` writes it again.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "server_vs_vllm.md"
REQUESTS = ROOT / "tests" / "server" / "vllm_server.json"
TESTS = ROOT / "tests" / "server" / "vllm_tests.json"
OUTCOMES = ("passed", "failed", "refused by design", "not applicable", "skipped")


def write_requests(version: str, near: float, everywhere: dict[str, str], rows: list[dict[str, str]]) -> None:
    """Record the answers of both servers to the same requests, and make the page of it."""
    found = {"version": version, "near": near, "everywhere": everywhere, "rows": rows}
    REQUESTS.write_text(json.dumps(found, indent=1) + "\n")
    write()


def write_tests(version: str, commit: str, outcomes: dict[str, tuple[str, str]]) -> None:
    """Record the outcome of each test, and the reason of one that did not pass, and make the page of it."""
    files: dict[str, Any] = {}
    for test, (outcome, why) in sorted(outcomes.items()):
        path, _, name = test.partition("::")
        file = files.setdefault(path, {"counts": Counter(), "others": []})
        file["counts"][outcome] += 1
        if outcome != "passed":
            file["others"].append({"test": name, "outcome": outcome, "why": why})
    TESTS.write_text(json.dumps({"version": version, "commit": commit, "files": files}, indent=1) + "\n")
    write()


def write() -> None:
    """Make the page of the records."""
    PAGE.write_text(page(json.loads(REQUESTS.read_text()), json.loads(TESTS.read_text())), encoding="utf-8")


def page(requests: dict[str, Any], tests: dict[str, Any]) -> str:
    """The page's text, from what ``write_requests`` and ``write_tests`` record."""
    rows = requests["rows"]
    same = sum(row["differs"] == "same" for row in rows)
    fields = "\n".join(f"- `{key}`: {why}" for key, why in requests["everywhere"].items())
    table = "\n".join(
        f"| {row['case']} | {row['ours']} | {row['theirs']} | {row['differs']} | {row['why']} |" for row in rows
    )
    return f"""# The server beside vLLM's

Made by `make test-vllm-server`, which sends the same requests to `shardfuse serve` and to the server of vLLM
{requests["version"]} over the same small random model in fp32 on a CPU: {same} of {len(rows)} answers are the same.
Of an answer the status, greedy texts, reasons of ends, usage, log-probabilities (to {requests["near"]:g}) and the names
of fields that are not null are compared; of an error only the status. Types of errors differ: here they are OpenAI's,
there names of Python's classes. Where an answer ends within a character, its bytes are U+FFFD here, and vLLM leaves
them out: no difference either. [Below](#vllms-own-tests) is how vLLM's own tests end.

Fields that differ everywhere, and count as no difference below:

{fields}

| case | shardfuse | vLLM | differs | why |
| --- | --- | --- | --- | --- |
{table}

{_tests(tests)}"""


def _tests(tests: dict[str, Any]) -> str:
    counts = {path: [file["counts"].get(each, 0) for each in OUTCOMES] for path, file in tests["files"].items()}
    total = [sum(column) for column in zip(*counts.values())]
    lines = [
        f"| `{path.removeprefix('tests/')}` | {' | '.join(str(count or '') for count in counts[path])} |"
        for path in counts
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for path, file in tests["files"].items():
        for each in file["others"]:
            name = f"{path.rpartition('/')[2]}::{each['test']}"
            reasons.setdefault((each["outcome"], each["why"]), []).append(name)
    listed = sorted(reasons.items(), key=lambda item: (OUTCOMES.index(item[0][0]), item[0][1]))
    whys = "\n".join(
        f"| {outcome} | {why.replace('|', '/')} | {len(names)} | {_named(names)} |" for (outcome, why), names in listed
    )
    return f"""## vLLM's own tests

Made by `make test-vllm-tests VLLM_TESTS=path/to/vllm/tests`, which runs the tests of vLLM {tests["version"]} (commit
{tests["commit"]}) that start its server for texts and chats, against `shardfuse serve`. Each model that they name is
small here: its architecture with random weights, and a tokenizer that is trained on these tests. So a test of a trained
model's words is not applicable. Such a test and a refused one are run all the same: once one passes, the lane fails
until its reason is gone.

| file | {" | ".join(OUTCOMES)} |
| --- | --- | --- | --- | --- | --- |
{chr(10).join(lines)}
| all | {" | ".join(map(str, total))} |

| outcome | why | tests | which |
| --- | --- | --- | --- |
{whys}
"""


def _named(names: list[str]) -> str:
    """The functions among ``names``, each once."""
    functions = Counter(name.partition("[")[0] for name in names)
    return ", ".join(f"`{name}`" + (f" ({count})" if count > 1 else "") for name, count in functions.items())


if __name__ == "__main__":
    write()
