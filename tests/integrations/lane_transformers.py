"""The lane of transformers: ``generate_batch`` and ``transformers serve`` on our kernel, in the version at hand.

Run by the Python of an environment for each version (``make test-transformers``). Tokens are compared with the same
version's ``generate`` under its own attention. ``--write`` keeps the rows that ``docs/integrations.md`` shows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import batching_case
import host_table
from batching_case import HOST, REFUSED, Case

from shardfuse.integrations import transformers as plugin
from shardfuse.integrations.conformance import models

START_S = 120.0
SERVED = "llama"

CASES = (
    *(Case(kind) for kind in models.ARCHITECTURES),
    Case("llama", page=4),
    Case("llama", page=256),
    Case("mistral-window", page=4, budget=5),
    Case("gemma3", page=5),
    Case("gpt_oss", page=32),
    Case("llama", twice=True),
    Case("qwen3", fused=True),
    Case("gemma2", fused=True),
)

Row = dict[str, Any]


def batched(case: Case, folder: Path) -> Row:
    """What ``generate_batch`` made of a case, or that the model was refused."""
    if case.architecture in REFUSED:
        return _refused(folder)
    result = batching_case.run(case, folder)
    wrong = batching_case.faults(case, result)
    return {"wrong": wrong, **{name: result.ran.get(name) for name in ("attention", "writes", "copied_pages")}}


def _refused(folder: Path) -> Row:
    try:
        plugin.enable(batching_case.load(folder))
    except ValueError as error:
        return {"wrong": [] if str(error).startswith("enable: ") else [str(error)], "why": "refused by `enable`"}
    return {"wrong": ["enable did not refuse"]}


def served(case: Case, folder: Path) -> Row:
    """What ``transformers serve`` answers to all prompts at once, over HTTP on this machine."""
    expected = models.read(folder)
    log = folder / "serve.log"
    with _server(folder, log) as url, ThreadPoolExecutor(len(expected.prompts)) as pool:
        answers = list(pool.map(lambda prompt: _ask(url, folder, prompt), expected.prompts))
    wrong = sum(one != other for one, other in zip(answers, expected.tokens))
    said = next((line for line in log.read_text().splitlines() if line.startswith("shardfuse: {")), "shardfuse: {}")
    ran = json.loads(said.partition(" ")[2].replace("'", '"'))
    found = [f"{wrong} of {len(answers)} answers differ; see {log}"] if wrong else []
    found += [] if ran.get("attention") else [f"the kernel ran {ran}; see {log}"]
    return {"wrong": found, **{name: ran.get(name) for name in ("attention", "writes", "copied_pages")}}


@contextmanager
def _server(folder: Path, log: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "shardfuse.integrations.transformers", "serve", str(folder), "--continuous-batching",
        "--device", "cpu", "--host", "127.0.0.1", "--port", str(port), "--cb-num-blocks", "100",
        "--cb-max-batch-tokens", str(batching_case.BUDGET), "--cb-block-size", "16",
    ]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    try:
        _wait(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1/completions"
        process.send_signal(signal.SIGINT)
        _until(lambda: "shardfuse: {" in log.read_text(), 20.0)
    finally:
        process.kill()  # transformers' own threads outlive an interrupt
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    def ready() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}; see {log}")
        try:
            return urllib.request.urlopen(url, timeout=5).status == 200  # noqa: S310
        except OSError:
            return False

    if not _until(ready, START_S):
        raise RuntimeError(f"the server is not ready after {START_S:.0f} s; see {log}")


def _until(done: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if done():
            return True
        time.sleep(0.2)
    return False


def _ask(url: str, folder: Path, prompt: list[int]) -> list[int]:
    """The tokens that a server gives to a prompt."""
    text = models.text_of(prompt)
    body = {"model": str(folder), "prompt": text, "max_tokens": models.NEW_TOKENS, "temperature": 0}
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return models.tokens_of(json.load(answer)["choices"][0]["text"])


def main() -> int:
    """The command; returns 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=Path, required=True, help="where the small models lie, or are to be written")
    parser.add_argument("--write", action="store_true", help="keep the rows for docs/integrations.md")
    parser.add_argument("--only", default="", help="cases whose architecture or name holds this")
    options = parser.parse_args()
    version = plugin.HOST.version()
    jobs = [(case, case.name, batched) for case in CASES]
    if importlib.util.find_spec("fastapi") and importlib.util.find_spec("uvicorn"):
        jobs.append((Case(SERVED), "`transformers serve`", served))
    else:
        print("transformers serve was not run: it needs fastapi, uvicorn and openai")
    jobs = [job for job in jobs if options.only in f"{job[0].architecture}, {job[1]}"]
    models.be_quiet()
    rows: list[Row] = []
    for at, (case, name, run) in enumerate(jobs, 1):
        begun = time.monotonic()
        folder = options.models / version / case.architecture
        models.write(case.architecture, folder)
        try:
            row = run(case, folder)
        except Exception as error:  # the other cases are to run, too
            row = {"wrong": [f"{type(error).__name__}: {error}"]}
        wrong = row.pop("wrong")
        label = f"{version} {case.architecture}, {name}".rstrip(", ")
        said = "; ".join(wrong) or row.get("why") or f"equal, {row['attention']} calls"
        print(f"{at:3}/{len(jobs)}  {label:48} {time.monotonic() - begun:5.1f} s  {said}", flush=True)
        ok = not wrong and "why" not in row
        rows.append(
            {"host": HOST, "version": version, "architecture": case.architecture, "case": name, "ok": ok, **row}
            | {"failed": bool(wrong), "why": row.get("why", "; ".join(wrong))}
        )
    if options.write:
        keep(rows, version)
    return 0 if rows and not any(row["failed"] for row in rows) else 1


def keep(rows: list[Row], version: str) -> None:
    """Put the rows of a version beside those of the others."""
    path = host_table.ROWS / f"{HOST}.json"
    before = host_table.read(HOST)["rows"] if path.is_file() else []
    others = [row for row in before if row["version"] != version]
    host_table.write(HOST, sorted(others + rows, key=lambda row: [int(part) for part in row["version"].split(".")]))


if __name__ == "__main__":
    sys.exit(main())
