"""The lane of vLLM: its real engine on a CPU with our backend, token by token against transformers' ``generate``.

Run by the Python of an environment that has vLLM (``make test-vllm``). A process for each case: an engine keeps what it
has allocated until its process ends. ``--write`` keeps the rows that ``docs/integrations.md`` shows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from shardfuse.integrations.conformance import models, server

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import host_table

HOST = "vLLM"
TIMEOUT_S = 300.0
BUDGET = 32  # tokens of a step: most prompts take several
SEQS = 4  # fewer than prompts: some wait, and start while others decode


class Case(NamedTuple):
    """One engine."""

    architecture: str
    block_size: int = 16
    tp: int = 1
    own_process: bool = False  # of the engine
    layout: str = ""
    compiled: bool = False
    served: bool = False  # by vLLM's HTTP server
    refused: str = ""  # the dtype of a cache that the backend does not have

    @property
    def name(self) -> str:
        """What sets the case apart from an architecture's plain one."""
        parts = [f"blocks of {self.block_size}"] if self.block_size != 16 else []
        parts += [f"TP {self.tp}"] if self.tp > 1 else []
        parts += ["an engine process of its own"] if self.own_process else []
        parts += [f"layout {self.layout}"] if self.layout else []
        parts += ["torch.compile"] if self.compiled else []
        parts += [f"{self.refused} is refused at the start"] if self.refused else []
        return ", ".join(parts + (["vLLM's server, asked by the conformance kit"] if self.served else []))


CASES = (
    *(Case(kind) for kind in models.ARCHITECTURES),
    Case("llama", 32),
    Case("llama", 128),
    Case("mistral-window", 32),
    Case("gemma3", 32),
    Case("llama", layout="LBHNC"),
    Case("llama", own_process=True),
    Case("qwen3", tp=2, own_process=True),
    Case("bloom", tp=2, own_process=True),
    Case("llama", compiled=True),
    Case("llama", served=True),
    Case("llama", refused="fp8_e5m2"),
)
EXTENSION = "shardfuse.integrations.vllm.WorkerStats"


def run(case: Case, folder: Path) -> dict[str, Any]:
    """One engine over the prompts of ``folder``, in this process: what came out, and what ran."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}  # no network
    os.environ["SHARDFUSE_VLLM_REPLACES"] = "CPU_ATTN"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if case.own_process else "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if case.tp > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, sorted(os.sched_getaffinity(0))[: case.tp]))
    if case.layout:
        os.environ["VLLM_KV_CACHE_LAYOUT"] = case.layout
    if case.served:
        return serve(folder)
    import vllm

    if case.refused:
        return {"version": vllm.__version__.partition("+")[0], "why": _refusal(vllm, case, folder)}
    steps = Counter[str]() if case.own_process else _watch_steps()
    expected = models.read(folder)
    engine = vllm.LLM(
        model=str(folder),
        dtype="float32",
        enforce_eager=not case.compiled,
        max_model_len=192,
        block_size=case.block_size,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=SEQS,
        tensor_parallel_size=case.tp,
        disable_log_stats=False,
        enable_prefix_caching=True,
        worker_extension_cls=EXTENSION,
        skip_tokenizer_init=True,
    )
    engine.collective_rpc("shardfuse_reset_stats")
    steps.clear()
    greedy = vllm.SamplingParams(temperature=0, max_tokens=models.NEW_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in expected.prompts]
    found = [list(each.outputs[0].token_ids) for each in engine.generate(prompts, greedy, use_tqdm=False)]
    # Once more, when their prefixes are in the cache.
    again = [list(each.outputs[0].token_ids) for each in engine.generate(prompts, greedy, use_tqdm=False)]
    metrics = {each.name: getattr(each, "value", 0) for each in engine.get_metrics()}
    layers = [] if case.own_process else _layers(engine)
    return {
        "version": vllm.__version__.partition("+")[0],
        "wrong": sum(a != b for a, b in zip(found + again, expected.tokens * 2)),
        "prompts": 2 * len(prompts),
        "ranks": engine.collective_rpc("shardfuse_stats"),
        "prefix_hits": int(metrics["vllm:prefix_cache_hits"]),
        "steps": dict(steps),
        "backend": sorted({type(layer.impl).__name__ for layer in layers}),
        "layout": sorted({_layout(layer.kv_cache) for layer in layers}),
    }


def _refusal(vllm: Any, case: Case, folder: Path) -> str:
    """What vLLM says when its engine is asked for what the backend does not have."""
    try:
        vllm.LLM(model=str(folder), dtype="float32", kv_cache_dtype=case.refused, skip_tokenizer_init=True)
    except ValueError as error:
        return str(error)
    return ""


def serve(folder: Path) -> dict[str, Any]:
    """vLLM's server over the prompts of ``folder``, asked over HTTP; every request three times."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "model": folder, "dtype": "float32", "max-model-len": 192, "block-size": 16, "max-num-seqs": SEQS,
        "max-num-batched-tokens": BUDGET, "host": "127.0.0.1", "port": port, "worker-extension-cls": EXTENSION,
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    root = f"http://127.0.0.1:{port}"
    running = subprocess.Popen(command, env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"})
    try:
        _wait_for(f"{root}/health", running)
        answers = list(server.check(f"{root}/v1", folder))
        ranks = _post(f"{root}/collective_rpc", {"method": "shardfuse_stats"})["results"]
        with urllib.request.urlopen(f"{root}/metrics", timeout=30) as page:  # noqa: S310 - our own server
            hits = re.search(r"^vllm:prefix_cache_hits_total\S* (\S+)", page.read().decode(), re.MULTILINE)
    finally:
        running.terminate()
        running.wait(60)
    import vllm

    return {
        "version": vllm.__version__.partition("+")[0],
        "wrong": sum(bool(answer.wrong) for answer in answers),
        "prompts": len(answers),
        "ranks": ranks,
        "prefix_hits": float(hits[1]) if hits else 0,
    }


def _wait_for(url: str, running: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + TIMEOUT_S / 2
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()  # noqa: S310
            return
        except OSError:
            if running.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server did not come up (exit code {running.poll()})") from None
            time.sleep(0.5)


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return json.load(answer)


def _watch_steps() -> Counter[str]:
    """Counts the kinds of steps that the backend is given from now on, in this process."""
    from shardfuse.integrations.vllm.backend import ShardfuseBuilder

    kinds: Counter[str] = Counter()
    build = ShardfuseBuilder.build

    def watched(self: Any, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        queries = (common.query_start_loc[1:] - common.query_start_loc[:-1]).tolist()
        before = [length - query for length, query in zip(common.seq_lens.tolist(), queries)]
        kinds["all"] += 1
        kinds["mixed"] += 1 in queries and max(queries) > 1
        kinds["chunked"] += any(query > 1 and start > 0 for query, start in zip(queries, before))
        return build(self, common_prefix_len, common, fast_build)

    ShardfuseBuilder.build = watched
    return kinds


def _layers(engine: Any) -> list[Any]:
    config = engine.llm_engine.vllm_config.compilation_config
    return [each for each in config.static_forward_context.values() if hasattr(each, "impl")]


def _layout(cache: Any) -> str:
    """vLLM's name for the strides of [blocks, KV heads, block size, 2 * head size], where heads are several."""
    return "LBHNC" if cache.stride(1) > cache.stride(2) else "LBNHC"


def faults(case: Case, result: dict[str, Any]) -> list[str]:
    """What is wrong with a result, a line each."""
    if case.refused:
        asked = f"the attention backend SHARDFUSE does not support kv_cache_dtype={case.refused}"
        return [] if asked in result["why"] else [f"vLLM said {result['why']!r}"]
    found = [f"{result['wrong']} of {result['prompts']} answers differ"] if result["wrong"] else []
    if len(result["ranks"]) != case.tp:
        found.append(f"{len(result['ranks'])} ranks answered, expected {case.tp}")
    for ran in result["ranks"]:
        if not ran.get("attention") or ran["attention"] != ran.get("writes"):
            found.append(f"the kernel ran {ran}")
    if result["prefix_hits"] <= 0:
        found.append("no prefix was found in the cache")
    if not (case.own_process or case.served):
        lacks = [kind for kind in ("mixed", "chunked") if not result["steps"].get(kind)]
        found += [f"no step was {kind}" for kind in lacks]
        found += [] if result["backend"] == ["ShardfuseImpl"] else [f"the layers have {result['backend']}"]
        if case.layout and result["layout"] != [case.layout]:
            found.append(f"the cache lies as {result['layout']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=Path, required=True, help="where the small models lie, or are to be written")
    parser.add_argument("--write", action="store_true", help="keep the rows for docs/integrations.md")
    parser.add_argument("--only", default="", help="cases whose architecture or name holds this")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="of these, every Nth from the Ith on")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        case = CASES[options.case]
        options.result.write_text(json.dumps(run(case, options.models / case.architecture)))
        return 0
    models.be_quiet()
    rows: list[dict[str, Any]] = []
    chosen = [
        (number, case) for number, case in enumerate(CASES) if options.only in f"{case.architecture}, {case.name}"
    ]
    if not chosen:
        parser.error(f"--only {options.only!r}: no case has that in its architecture or name")
    part, parts = map(int, options.part.split("/"))
    if not 1 <= part <= parts <= len(chosen):
        parser.error(f"--part {options.part}: of {len(chosen)} cases, expected I/N with 1 <= I <= N <= {len(chosen)}")
    chosen = chosen[part - 1 :: parts]
    for at, (number, case) in enumerate(chosen, 1):
        begun = time.monotonic()
        models.write(case.architecture, options.models / case.architecture)
        result, wrong = _apart(number, options.models)
        wrong = wrong or faults(case, result)
        label = f"{case.architecture}, {case.name}".rstrip(", ")
        print(
            f"{at:3}/{len(chosen)}  {label:48} {time.monotonic() - begun:5.1f} s  {'; '.join(wrong) or 'ok'}",
            flush=True,
        )
        first = (result.get("ranks") or [{}])[0]
        rows.append(
            {
                "host": HOST,
                "architecture": case.architecture,
                "case": case.name,
                "ok": not wrong,
                "refused": bool(case.refused),
                "why": "; ".join(wrong),
                "version": result.get("version"),
                "attention": first.get("attention"),
                "writes": first.get("writes"),
            }
        )
    if options.write:
        whole = len(chosen) == len(CASES)
        host_table.write(HOST.lower(), rows if whole else host_table.merged(HOST.lower(), rows))
    return 0 if all(row["ok"] for row in rows) else 1


def _apart(number: int, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The result of a case in processes of its own, or why there is none. What vLLM leaves in TMPDIR goes with them."""
    result = folder / f"vllm-{number}.json"
    log = result.with_suffix(".log")
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--models", str(folder), "--case", str(number), "--result", str(result)]
    with log.open("w") as out, tempfile.TemporaryDirectory(prefix="vllm-") as scratch:
        environment = os.environ | {"TMPDIR": scratch}
        running = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        try:
            code = running.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return {}, [f"not done after {TIMEOUT_S:.0f} s; see {log}"]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    if code or not result.is_file():
        return {}, [f"exit code {code}; see {log}"]
    return json.loads(result.read_text()), []


if __name__ == "__main__":
    sys.exit(main())
