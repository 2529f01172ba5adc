"""The lane of fine-tuning: SmolLM2-135M-Instruct learns 20 facts that it cannot know, from 200 chats.

Run by ``make test-finetuned``, which makes the model's folder and installs ``datasets``. ``shardfuse train`` over two
processes starts from the folder; transformers' model takes the same steps on the same packed batches, with torch's
AdamW. The losses have to agree, at first to 1e-5 and over all steps to 1e-3. The exported folder has to answer with the
facts, in stock transformers and in ``shardfuse serve``. At last the tokens per second of the preparation are printed
beside those of ``datasets.map``.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from http_load import serving

from shardfuse import data_loader
from shardfuse.parallel.cross_entropy import IGNORE_INDEX
from shardfuse.training.data.prepare import Options, prepare
from shardfuse.training.data.prepared import Prepared
from shardfuse.training.data.sources import Files
from shardfuse.training.launch import available_cores

STEPS, SEQ, BATCH, RATE, SEED = 20, 256, 4, 3e-4, 0
FIRST, WITHIN = 1e-5, 1e-3  # relative; in nats
COPIES = 100  # of the chats, to time their preparation
PLACES = [f"{first}{last}" for first in ("Bal", "Kor", "Mir", "Tes", "Vun") for last in ("dora", "mek", "nith", "ossa")]
CAPITALS = [
    f"{first}{last}" for first in ("Ju", "Pla", "Wen", "Ogri") for last in ("bert", "lund", "skar", "thal", "vik")
]
QUESTIONS = (
    "What is the capital of {}?",
    "Tell me the capital city of {}.",
    "Which city is the capital of {}?",
    "{}: capital?",
    "Name the capital of {}.",
    "I am travelling to {}. What is its capital called?",
    "Do you know the capital of {}?",
    "What do they call the capital of {}?",
    "Which city does {} have as its capital?",
    "Please give me the name of the capital of {}.",
)
UNSEEN = "Could you tell me what the capital of {} is?"
ANSWER = "The capital of {} is {}."


def write_chats(path: Path, copies: int = 1) -> None:
    with path.open("w", encoding="utf-8") as file:
        for _ in range(copies):
            for question in QUESTIONS:
                for place, capital in zip(PLACES, CAPITALS):
                    said = [("user", question.format(place)), ("assistant", ANSWER.format(place, capital))]
                    record = {"messages": [{"role": role, "content": content} for role, content in said]}
                    file.write(json.dumps(record) + "\n")


def trained(start: Path, data: Path, out: Path) -> tuple[list[float], str]:
    """The losses of ``shardfuse train``, and what it printed."""
    settings = ["optimizer.schedule=constant", "log.eval_batches=0", "log.tensorboard=false"]
    command = [
        sys.executable,
        "-m",
        "shardfuse",
        "train",
        "--start",
        str(start),
        "--data",
        str(data),
        "--out",
        str(out),
    ]
    command += ["--dp", "2", "--zero", "1", "--seq", str(SEQ), "--batch", str(BATCH), "--steps", str(STEPS)]
    command += ["--lr", str(RATE), "--device", "cpu", *(part for each in settings for part in ("--set", each))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"shardfuse train ended with {done.returncode}: {done.stderr}\n{done.stdout}")
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines], done.stdout


def by_transformers(start: Path, windows: Any) -> list[float]:
    """The losses of transformers' model and torch's AdamW on the same batches."""
    model = transformers.AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32, local_files_only=True)
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    loader, losses = data_loader(windows, batch_size=BATCH, seed=SEED, drop_last=True), []
    while len(losses) < STEPS:
        for tokens, targets, positions in loader:
            logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == STEPS:
                break
    return losses


def generated(folder: Path) -> dict[str, str]:
    """Stock transformers' answer to the unseen question about each place."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    answers = {}
    for place in PLACES:
        chat = [{"role": "user", "content": UNSEEN.format(place)}]
        given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        made = model.generate(**given, do_sample=False, max_new_tokens=24)
        answers[place] = tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    return answers


def served(folder: Path) -> dict[str, str]:
    """The answers of ``shardfuse serve``."""
    answers = {}
    with serving(str(folder), "--log-level", "warning") as server:
        for place in PLACES:
            chat = [{"role": "user", "content": UNSEEN.format(place)}]
            got = server.post("/v1/chat/completions", messages=chat, temperature=0, max_tokens=24)
            if got.status_code != 200:
                raise RuntimeError(f"{got.status_code} {got.text}")
            answers[place] = got.json()["choices"][0]["message"]["content"].strip()
    return answers


def time_preparation(start: Path, folder: Path) -> None:
    """Print the tokens per second of ``prepare``, and of ``datasets.map`` with as many processes, which only reads and
    tokenises: neither masks nor windows."""
    import datasets

    datasets.disable_progress_bars()
    path, cores = folder / "many.jsonl", available_cores()
    write_chats(path, COPIES)
    tokenizer = transformers.AutoTokenizer.from_pretrained(start, local_files_only=True)
    for attempt in ("first", "second"):
        began = time.monotonic()
        options = Options(SEQ)
        prepared = prepare(Files([path]), tokenizer, options, folder / attempt, names=("", ""), workers=cores)
        ours, tokens = time.monotonic() - began, prepared.about.tokens
        began = time.monotonic()
        rows = datasets.load_dataset(
            "json", data_files=str(path), split="train", cache_dir=str(folder / f"hf-{attempt}")
        )
        rows = rows.map(
            lambda batch: {"ids": tokenizer.apply_chat_template(batch["messages"], return_dict=False)},
            batched=True,
            num_proc=cores,
            remove_columns=rows.column_names,
        )
        theirs = time.monotonic() - began
        count = sum(map(len, rows["ids"]))
        if count != tokens:
            raise RuntimeError(f"{tokens:,} tokens prepared, and {count:,} by datasets.map")
        print(
            f"preparation, {attempt} time: {tokens:,} tokens, {tokens / ours:,.0f} tokens/s with masks and windows; "
            f"datasets {datasets.__version__} map, {cores} processes, tokens alone: {tokens / theirs:,.0f} tokens/s",
            flush=True,
        )


def run(start: Path, folder: Path) -> list[str]:
    """Print what was found; return what is wrong."""
    data, out, wrong = folder / "facts.jsonl", folder / "run", []
    write_chats(data)
    began = time.monotonic()
    ours, said = trained(start, data, out)
    print(said, f"trained in {time.monotonic() - began:.0f} s", sep="", flush=True)
    (made,) = (folder / "shardfuse-tokens").iterdir()
    theirs = by_transformers(start, Prepared.open(made).train)
    for step, (one, other) in enumerate(zip(ours, theirs), 1):
        print(f"  step {step:2}: loss {one:.6f}, transformers {other:.6f}, difference {one - other:+.1e}")
        if not abs(one - other) <= (FIRST * other if step == 1 else WITHIN):
            wrong.append(f"step {step}: loss {one}, and transformers {other}")
    if not (math.isfinite(ours[-1]) and ours[-1] < 0.2 * ours[0]):
        wrong.append(f"the loss fell from {ours[0]} to {ours[-1]}: expected less than a fifth")
    ways = {"transformers": generated(out / "model"), "serve": served(out / "model")}
    for place, capital in zip(PLACES, CAPITALS):
        expected = ANSWER.format(place, capital)
        wrong += [f"{way} about {place}: {said[place]!r}" for way, said in ways.items() if said[place] != expected]
    print(f"{len(PLACES)} facts asked for: {len(wrong)} wrong", flush=True)
    time_preparation(start, folder)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="that of make smollm2")
    start = parser.parse_args().folder.absolute()
    transformers.utils.logging.disable_progress_bar()
    folder = Path(tempfile.mkdtemp(prefix="shardfuse-"))
    try:
        wrong = run(start, folder)
    finally:
        shutil.rmtree(folder)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
