"""The lane of lm-eval: its ``local-completions`` against the server, on tasks that are written here.

Run by the Python of an environment that has lm-eval (``make test-server``). Log-likelihoods are compared with those of
the model's own forward, answers with its greedy ones.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["OPENAI_API_KEY"] = "a-key"

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import server_case
import torch
from server_case import NAME, Server, answer, model, save_tiny_hf

CLOSE = 1e-9  # between sums of fp64 numbers of the order of 100

CHOICES = [
    {"question": "The capital of Switzerland is", "choices": ["Bern", "Zürich", "Genf"], "answer": 0},
    {"question": "2 + 2 =", "choices": ["3", "4", "22", "five"], "answer": 1},
    {"question": "日本の首都は", "choices": ["東京", "京都"], "answer": 0},
    {"question": "a", "choices": ["b", "bb", "bbb"], "answer": 2},
]
TEXTS = [{"question": text} for text in ("hello", "Once upon a time", "def f(x):", "Grüße", "1, 2, 3,")]
UNTIL, MOST = ["\n", "1"], 16

TASKS: dict[str, dict[str, Any]] = {
    "tiny_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "tiny_answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{question}}",
        "generation_kwargs": {"until": UNTIL, "max_gen_toks": MOST, "temperature": 0, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def write_tasks(folder: Path) -> None:
    """A file of tasks for lm-eval, and their documents; JSON is YAML, too."""
    for (name, task), documents in zip(TASKS.items(), (CHOICES, TEXTS)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(each) + "\n" for each in documents))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **task}))


def evaluate(server: Server, folder: Path, tokenized: bool) -> dict[str, list[dict[str, Any]]]:
    """What lm-eval asked and was answered: the samples of each task."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    arguments = {
        "base_url": f"{server.url}/v1/completions",
        "model": NAME,
        "tokenizer": str(folder / "model"),
        "tokenizer_backend": "huggingface",
        "tokenized_requests": tokenized,
        "num_concurrent": 2,
        "max_length": 256,
        "max_retries": 1,
    }
    made = lm_eval.simple_evaluate(
        "local-completions",
        model_args=arguments,
        tasks=list(TASKS),
        batch_size=4 if tokenized else 1,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    found: dict[str, list[dict[str, Any]]] = made["samples"]
    return found


@torch.no_grad()
def likelihood(context: str, continuation: str) -> tuple[float, bool]:
    """The log-likelihood of ``continuation`` by the model's own forward, and whether each token is likeliest."""
    tokens = list((context + continuation).encode())
    scores = model()(torch.tensor([tokens[:-1]]))[0].log_softmax(-1)[len(context.encode()) - 1 :]
    own = tokens[len(context.encode()) :]
    greedy = scores.argmax(-1).tolist() == own
    return float(scores[torch.arange(len(own)), own].sum()), greedy


def faults(samples: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What differs from the model's own."""
    found = []
    asked = [(each["arguments"], each["resps"]) for each in samples["tiny_choices"]]
    pairs = [(pair, reply) for arguments, replies in asked for pair, reply in zip(_pairs(arguments), replies)]
    if len(pairs) != sum(len(each["choices"]) for each in CHOICES):
        found.append(f"{len(pairs)} log-likelihoods were asked for")
    for (context, continuation), ((sum_, greedy),) in pairs:
        wanted, likeliest = likelihood(context, continuation)
        if abs(float(sum_) - wanted) > CLOSE or str(greedy) != str(likeliest):
            found.append(f"{context!r} {continuation!r}: {sum_}, {greedy}, and the model says {wanted}, {likeliest}")
    if len(samples["tiny_answers"]) != len(TEXTS):
        found.append(f"{len(samples['tiny_answers'])} answers were asked for")
    for each in samples["tiny_answers"]:
        ((context, _),), ((said,),) = _pairs(each["arguments"]), each["resps"]
        text = answer(context, MOST)[1]
        wanted_text = text[: min((text.index(stop) for stop in UNTIL if stop in text), default=len(text))]
        if said != wanted_text:
            found.append(f"{context!r}: {said!r}, and the model says {wanted_text!r}")
    return found


def _pairs(arguments: Any) -> list[tuple[Any, Any]]:
    """lm-eval writes them down as lists, or as dictionaries with numbered names."""
    each = arguments.values() if isinstance(arguments, dict) else arguments
    return [tuple(pair.values()) if isinstance(pair, dict) else tuple(pair) for pair in each]


def main() -> int:
    import lm_eval

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        write_tasks(folder)
        save_tiny_hf(folder / "model")
        bad = []
        for tokenized in (True, False):
            with server_case.serve(api_keys=("a-key",)) as server:
                began = time.monotonic()
                wrong = faults(evaluate(server, folder, tokenized))
                print(
                    f"lm-eval {lm_eval.__version__}, prompts as {'tokens' if tokenized else 'text'}:",
                    "equal" if not wrong else "\n".join(wrong),
                    f"({time.monotonic() - began:.1f} s)",
                )
                bad += wrong
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
