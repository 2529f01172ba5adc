"""The programs of ``examples/``, on a small folder that they take for a model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardfuse.kernels.dev import accuracy

pytest.importorskip("transformers")
import transformers
from foreign import foreign

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = "def main():\n    return sum(range(10))\n\n\nclass Thing:\n    def __init__(self):\n        self.x = 1\n" * 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Qwen with a tokenizer of bytes, and a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = foreign("qwen2", vocab_size=256)
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def _run(*command: str, processes: int = 1) -> str:
    start = [sys.executable] if processes == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start += [] if processes == 1 else [f"--nproc-per-node={processes}"]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*start, *command], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _losses(printed: str) -> list[float]:
    return [float(line.split("loss ")[1].split(",")[0]) for line in printed.splitlines() if line.startswith("step")]


@pytest.mark.ranks
def test_train_over_ranks(folder: Path):
    """Two ranks that share each layer train as one does, and save the same model with its tokenizer."""
    script, model, text = str(EXAMPLES / "train_over_ranks.py"), str(folder / "model"), str(folder / "text.txt")
    sizes = ["--steps", "4", "--length", "32", "--batch", "4"]
    one = _losses(_run(script, model, text, "--out", str(folder / "one"), *sizes))
    two = _losses(_run(script, model, text, "--out", str(folder / "two"), "--tp", "2", *sizes, processes=2))
    assert two == pytest.approx(one, rel=1e-3)
    assert one[-1] < one[0]
    models = [transformers.AutoModelForCausalLM.from_pretrained(folder / name) for name in ("one", "two")]
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert accuracy.relative_error(ours, theirs) < 1e-2
    assert (folder / "two" / "tokenizer.json").read_text() == (folder / "model" / "tokenizer.json").read_text()


def test_export_and_serve(folder: Path):
    command = [str(EXAMPLES / "export_and_serve.py"), str(folder / "model"), "--out", str(folder / "out")]
    printed = _run(*command, "--prompt", "def", "--prompt", "class", "--max-new-tokens", "3")
    assert [line.split(" -> ")[0] for line in sorted(printed.splitlines())] == ["'class'", "'def'"]
    assert "(length)" in printed


@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
def test_finetune_with_trainer(folder: Path, lora: bool):
    pytest.importorskip("accelerate")
    if lora:
        pytest.importorskip("peft")
    command = [str(EXAMPLES / "finetune_with_trainer.py"), str(folder / "model"), str(folder / "text.txt")]
    printed = _run(*command, "--out", str(folder / "out"), "--steps", "2", "--length", "32", *(["--lora"] * lora))
    assert "gated_linear" in printed
    assert (folder / "out" / ("adapter_model.safetensors" if lora else "model.safetensors")).exists()


def test_examples_are_short():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path.name
        assert path.name in (EXAMPLES.parent / "README.md").read_text()
