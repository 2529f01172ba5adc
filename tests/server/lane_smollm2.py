"""The lane of a trained model: the answers of SmolLM2-135M-Instruct, and where they end.

Run by ``make test-trained``, which makes the folder. Greedily and in fp32, transformers' ``generate`` answers five
prompts. The engine over both ways of loading has to give the same tokens, ``shardfuse generate`` and ``shardfuse
serve`` their text, and all have to end for the same reason. A second round does so with other settings for generation:
a repetition penalty, and a second token that ends an answer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from http_load import Process, serving

import shardfuse as sf
from shardfuse.serving import Engine, Request, SamplingParams

MOST = 64  # tokens of an answer
NEAR = 1e-3  # between the two largest logits: two orders of summation could choose differently there
ENDED = 3  # answers that have to end before MOST
ROUNDS: tuple[dict[str, Any], ...] = ({}, {"repetition_penalty": 1.2, "eos_token_id": [2, 30]})  # 30: a full stop
LOADERS: tuple[Callable[..., Any], ...] = (sf.load_hf, sf.load_pretrained)
CHATS = ("What is the capital of France?", "Explain gravity in one sentence.", "What color is the sky?")
TEXTS = ("Water boils at", "Once upon a time")
Answer = dict[str, Any]  # what a way of asking tells: some of tokens, count, text, finish, stop_reason


def by_transformers(folder: Path, prompts: list[str], tokenizer: Any) -> list[Answer]:
    """The answers that count; ``gap`` is the smallest difference between the two largest logits of any token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    ends, found = model.generation_config.eos_token_id, []
    for prompt in prompts:
        given = tokenizer(prompt, return_tensors="pt")
        options = {"do_sample": False, "max_new_tokens": MOST, "output_scores": True, "return_dict_in_generate": True}
        made = model.generate(**given, **options)
        tokens = made.sequences[0, given["input_ids"].shape[1] :].tolist()
        best = torch.cat(made.scores).topk(2).values  # [T, 2], after the penalty
        ended = tokens[-1] in (ends if isinstance(ends, list) else [ends])
        answer = {"tokens": tokens, "count": len(tokens), "text": tokenizer.decode(tokens, skip_special_tokens=True)}
        answer |= {"finish": "stop" if ended else "length", "stop_reason": tokens[-1] if ended else None}
        found.append(answer | {"gap": float((best[:, 0] - best[:, 1]).min())})
    return found


def by_engine(load: Callable[..., Any], folder: Path, prompts: list[str], tokenizer: Any) -> list[Answer]:
    """All answers at once."""
    with Engine(load(folder).eval(), num_blocks=2 * len(prompts), tokenizer=tokenizer) as engine:
        more = {"max_new_tokens": MOST, "sampling": SamplingParams(**engine.generation.sampling)}
        numbers = [engine.add(Request(tokenizer.encode(each), **more)) for each in prompts]
        events = list(engine.run())
    found = []
    for number in numbers:
        own = [each for each in events if each.request == number]
        answer = {"tokens": [each.token for each in own], "text": "".join(each.text for each in own)}
        found.append(answer | {"finish": own[-1].finish, "stop_reason": own[-1].stop_reason})
    return found


def by_command(folder: Path, text: str, *options: str) -> Answer:
    """What ``shardfuse generate`` writes; its last line on standard error counts tokens, and says why it ended."""
    command = [sys.executable, "-m", "shardfuse", "generate", str(folder), "--prompt", text]
    done = subprocess.run([*command, "--max-tokens", str(MOST), *options], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"shardfuse generate ended with {done.returncode}: {done.stderr}")
    count, _, finish = done.stderr.splitlines()[-1].split()[:3]
    return {"text": done.stdout, "count": int(count), "finish": finish.strip("()")}


def by_server(server: Process, path: str, **body: Any) -> Answer:
    """What the server answers to one request."""
    got = server.post(path, max_tokens=MOST, temperature=0, **body)
    if got.status_code != 200:
        raise RuntimeError(f"{path}: {got.status_code} {got.text}")
    choice, count = got.json()["choices"][0], got.json()["usage"]["completion_tokens"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return {"text": text, "count": count, "finish": choice["finish_reason"], "stop_reason": choice["stop_reason"]}


def run(folder: Path) -> list[str]:
    """Print a line for each prompt; return what differs."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    chats = {text: [{"role": "user", "content": text}] for text in CHATS}
    prompts = [
        tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=True) for each in chats.values()
    ]
    prompts += TEXTS
    began, wrong = time.monotonic(), []
    expected = by_transformers(folder, prompts, tokenizer)
    engines = {f"engine, {load.__name__}": by_engine(load, folder, prompts, tokenizer) for load in LOADERS}
    print(f"transformers {transformers.__version__} and engines, all prompts: {time.monotonic() - began:.1f} s")
    with serving(str(folder), "--log-level", "warning") as server:
        for at, (text, prompt, its) in enumerate(zip(CHATS + TEXTS, prompts, expected)):
            began = time.monotonic()
            ways = {name: answers[at] for name, answers in engines.items()}
            ways["generate"] = by_command(folder, text, *["--chat"] * (text in chats))
            ways["completions"] = by_server(server, "/v1/completions", prompt=prompt)
            if text in chats:
                ways["chat"] = by_server(server, "/v1/chat/completions", messages=chats[text])
            found = [
                f"{text!r}: {way} says {name}={answer[name]!r}, and transformers {its[name]!r}"
                for way, answer in ways.items()
                for name in answer
                if answer[name] != its[name]
            ]
            if its["gap"] < NEAR:
                found.append(f"{text!r}: two logits are {its['gap']:.1e} apart: choose another prompt")
            end = f"{its['count']} tokens, {its['finish']} {its['stop_reason'] or ''}".rstrip()
            said = f"{'differs' if found else 'equal'}: {'; '.join(ways)} ({time.monotonic() - began:.1f} s)"
            print(f"  {text!r}, {end}, gap {its['gap']:.3f}, {said}", flush=True)
            wrong += found
    if sum(each["finish"] == "stop" for each in expected) < ENDED:
        wrong.append(f"fewer than {ENDED} answers end before {MOST} tokens")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="that of make smollm2")
    source = parser.parse_args().folder.absolute()
    transformers.utils.logging.disable_progress_bar()
    wrong = []
    for settings in ROUNDS:
        with tempfile.TemporaryDirectory(prefix="shardfuse-") as name:
            own = Path(name) / "generation_config.json"
            for file in source.iterdir():
                if file.name != own.name:
                    (own.parent / file.name).symlink_to(file)
            own.write_text(json.dumps(json.loads((source / own.name).read_text()) | settings))
            print(f"settings: the model's{f', and {settings}' if settings else ''}")
            wrong += run(own.parent)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
