"""The lane of vLLM's own tests: those that ask its OpenAI-compatible server, run against ``shardfuse serve``.

``make test-vllm-tests VLLM_TESTS=path/to/vllm/tests`` runs it, in an environment that has vLLM and pytest. The tests
are not part of this project: the folder is that of a checkout or source distribution of the installed version. Each
test's outcome is written to vllm_tests.json, from which docs/server_vs_vllm.md is made. A failure without a reason in
tests/support/vllm_reasons.py fails the lane, and so does a reason whose tests pass.
"""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import vllm_models
import vllm_page
import vllm_remote
from vllm_reasons import REASONS, judged

# By the folder whose conftest.py they use: the files that start a server of OpenAI's text interface.
FILES = {
    "tests/entrypoints": (
        "openai/chat_completion/test_batched_chat_completions.py",
        "openai/chat_completion/test_chat.py",
        "openai/chat_completion/test_chat_completion.py",
        "openai/chat_completion/test_chat_echo.py",
        "openai/chat_completion/test_chat_logit_bias_validation.py",
        "openai/chat_completion/test_completion_with_function_calling.py",
        "openai/chat_completion/test_enable_force_include_usage.py",
        "openai/chat_completion/test_include_reasoning.py",
        "openai/chat_completion/test_logprob_token_ids.py",
        "openai/chat_completion/test_root_path.py",
        "openai/chat_completion/test_thinking_token_budget.py",
        "openai/completion/test_completion.py",
        "openai/completion/test_prompt_validation.py",
        "openai/completion/test_token_in_token_out.py",
        "openai/models/test_models.py",
        "openai/test_chunked_prompt.py",
        "openai/test_openai_schema.py",
        "openai/test_return_token_ids.py",
        "openai/test_return_tokens_as_ids.py",
        "serve/instrumentator/test_basic.py",
        "serve/tokenize/test_tokenization.py",
        "tool_parsers/test_hermes_tool_parser.py",
    ),
    "tests/tool_use": (
        "test_chat_completions.py",
        "test_parallel_tool_calls.py",
        "test_tool_calls.py",
    ),
}
TESTS_FAILED = pytest.ExitCode.TESTS_FAILED
CORPUS = ("entrypoints/openai", "entrypoints/serve", "tool_use")  # whose texts train the tokenizer


class Recorder:
    """A plug-in of pytest: the raw outcome of every test, by its id, and of a failure its first line."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.without_server: set[str] = set()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        asking = [item for item in items if _asks(item)]
        left_out = [item for item in items if not _asks(item)]
        self.without_server |= {item.nodeid for item in left_out}
        config.hook.pytest_deselected(items=left_out)
        items[:] = asking

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes[f"{report.nodeid}::"] = ("failed", _first_line(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        earlier = self.outcomes.get(report.nodeid, ("", ""))[0]
        if report.failed and earlier != "failed":
            self.outcomes[report.nodeid] = ("failed", _first_line(report))
        elif report.skipped and earlier != "failed":
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.outcomes[report.nodeid] = ("skipped", why.removeprefix("Skipped: "))
        elif report.when == "call" and not earlier:
            self.outcomes[report.nodeid] = ("passed", "")


def _asks(item: pytest.Item) -> bool:
    """Whether a test asks a server: by a fixture, or by itself."""
    names = getattr(item, "fixturenames", [])
    function = getattr(item, "function", None)
    return (
        any("server" in name or "client" in name for name in names)
        or item.name.startswith("test_openapi_")
        or (function is not None and "RemoteOpenAIServer" in inspect.unwrap(function).__code__.co_names)
    )


def _first_line(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).strip().splitlines()[0][:200]


def version_of(tests: Path) -> tuple[str, str]:
    """The version and the commit that a folder of vLLM's tests belongs to. ValueError if nothing there says so."""
    root = tests.parent
    if (root / "PKG-INFO").exists():  # a source distribution
        lines = (root / "PKG-INFO").read_text().splitlines()
        version = next(line.partition(": ")[2] for line in lines if line.startswith("Version: "))
        text = (root / "vllm" / "_version.py").read_text() if (root / "vllm" / "_version.py").exists() else ""
        commit = text.rpartition("commit_id = ")[2].strip().strip("'").removeprefix("g")
        return version, commit
    if (root / ".git").exists():
        git = ["git", "-C", str(root)]
        tag = subprocess.run([*git, "describe", "--tags", "--exact-match"], capture_output=True, text=True)
        commit = subprocess.run([*git, "rev-parse", "--short=9", "HEAD"], capture_output=True, text=True)
        return tag.stdout.strip().removeprefix("v"), commit.stdout.strip()
    raise ValueError(f"{tests}: expected the folder tests of a checkout of vLLM, or of its source distribution")


def run(root: Path, only: str) -> Recorder:
    """Run the files of FILES in ``root``, or those whose path holds ``only``."""
    recorder = Recorder()
    (root / "pytest.ini").write_text("[pytest]\n")
    for folder, files in FILES.items():
        chosen = [str(root / folder / each) for each in files if only in each]
        if chosen:
            settings = ["-c", str(root / "pytest.ini"), "--rootdir", str(root), "--confcutdir", str(root / folder)]
            # native: in any other form pytest parses sources, which once in a while Python 3.11 fails to do.
            arguments = [*settings, "-q", "-p", "no:cacheprovider", "--tb=native", *chosen]
            if (code := pytest.main(arguments, plugins=[recorder])) not in (pytest.ExitCode.OK, TESTS_FAILED):
                raise RuntimeError(f"pytest ended with {code!r}: not every test has been run")
    return recorder


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tests", type=Path, help="vLLM's folder tests")
    parser.add_argument("--python", required=True, help="the Python of an environment that has the server")
    parser.add_argument("--only", default="", help="files whose path holds this; nothing is written then")
    options = parser.parse_args()
    tests = options.tests.resolve()
    version, commit = version_of(tests)
    with tempfile.TemporaryDirectory(prefix="shardfuse-") as place:
        cache = Path(place) / "hub"
        os.environ |= {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "", "DO_NOT_TRACK": "1"}
        import vllm

        if version != vllm.__version__.partition("+")[0]:
            print(f"error: {tests} is of vLLM {version or 'without a tag'}, and {vllm.__version__} is installed")
            return 2
        # Without vLLM's sources, which would be imported in the place of what is installed.
        root = Path(place) / "vllm"
        root.mkdir()
        for each in ("tests", "examples"):
            (root / each).symlink_to(tests.parent / each)
        texts = [path.read_text() for each in CORPUS for path in sorted((tests / each).rglob("*.py"))]
        vllm_models.write_cache(cache, texts)
        vllm_remote.install(root, str(Path(options.python).absolute()), cache)
        recorder = run(root, options.only)
    found, wrong = judged(recorder.outcomes, recorder.without_server, REASONS)
    print(dict(Counter(outcome for outcome, _ in found.values())))
    if not options.only:
        vllm_page.write_tests(version, commit, found)
    if wrong:
        print("\n" + "\n".join(sorted(wrong)))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
