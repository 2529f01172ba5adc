"""vLLM's offline ``LLM`` as a side of a comparison: in a process, and in an environment, of its own.

This file is also the program of that process, which has vLLM and none of this project: it reads JSON on its standard
input and answers on its standard output, a line for a line.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

PAUSE = 0.02  # seconds in which the other process's threads go to sleep


class Vllm:
    """vLLM, serving prompts of token ids from the model in ``folder``, ``new`` greedy tokens each.

    ``python`` is the interpreter of its environment; ``preload`` a library for that process.

    Raises RuntimeError with the end of what it printed where it cannot start, or ends.
    """

    def __init__(
        self, python: str, folder: Path, prompts: list[list[int]], new: int, *, preload: Path | None = None
    ) -> None:
        kept = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "", "VLLM_CPU_KVCACHE_SPACE": "1"}
        # Freed memory stays the process's, as in this one (timing.keep_freed_memory).
        environment |= {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
        environment |= {"LD_PRELOAD": str(preload)} if preload is not None else {}
        self._log = folder / "vllm.log"
        with self._log.open("w") as log:
            self._child = subprocess.Popen(  # noqa: S603 - the interpreter that the user named, and this very file
                [python, __file__],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        weakref.finalize(self, self._child.kill)
        self._ask({"folder": str(folder), "prompts": prompts, "new": new})

    def tokens(self) -> list[list[int]]:
        """The tokens that it adds to each prompt."""
        found: list[list[int]] = self._ask("tokens")
        return found

    def sample(self, calls: int) -> float:
        """Microseconds for all prompts, by that process's clock."""
        time.sleep(PAUSE)
        taken: float = self._ask(calls)
        time.sleep(PAUSE)
        return taken

    def _ask(self, what: Any) -> Any:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(what) + "\n")
            self._child.stdin.flush()
        answer = self._child.stdout.readline()
        if not answer:
            said = self._log.read_text(errors="replace")[-1500:]
            raise RuntimeError(f"vLLM ended with code {self._child.wait()}:\n{said}")
        return json.loads(answer)


def _main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints goes to the log
    asked = json.loads(sys.stdin.readline())
    from vllm import LLM, SamplingParams

    llm = LLM(model=asked["folder"], dtype="float32", skip_tokenizer_init=True, max_model_len=256, max_num_seqs=32)
    sampling = SamplingParams(temperature=0.0, max_tokens=asked["new"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]

    def call() -> Any:
        llm.reset_prefix_cache()
        return llm.generate(prompts, sampling, use_tqdm=False)

    for _ in range(2):
        found = call()
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        calls = json.loads(line)
        if calls == "tokens":
            answer: Any = [list(each.outputs[0].token_ids) for each in found]
        else:
            began = time.perf_counter()
            for _ in range(calls):
                call()
            answer = (time.perf_counter() - began) / calls * 1e6
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _main()
