"""What each command imports before it can work: heavy packages come only where the command needs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardfuse.testing import save_tiny_hf

# Modules that take long to import, or that stand for what does.
HEAVY = {
    *("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
    *("torch.distributed.pipelining", "torch._dynamo", "torch._inductor", "torch.onnx", "sympy", "triton", "numpy"),
    *("transformers", "transformers.models.auto", "transformers.configuration_utils", "transformers.modeling_utils"),
    *("transformers.generation", "tokenizers", "safetensors", "llguidance", "fastapi", "uvicorn"),
    *("prometheus_client", "matplotlib", "pandas", "einops"),
}
TORCH = {"torch", "numpy"}
SERVES = TORCH | {"einops", "safetensors", "tokenizers", "transformers"}  # of transformers what tokenizers need

_RUN = """
import atexit, json, sys

names = json.loads(sys.argv.pop(1))
atexit.register(lambda: print("loaded", json.dumps([name for name in names if name in sys.modules]), file=sys.stderr))
sys.argv[0] = "shardfuse"
from shardfuse.cli import main

main()
"""


def _run(*arguments: object, **environment: str) -> tuple[str, set[str]]:
    """What a command prints, and the heavy modules that it has imported at its end."""
    command = [sys.executable, "-c", _RUN, json.dumps(sorted(HEAVY)), *map(str, arguments)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(command, input="Once\n", capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    told = done.stderr.splitlines()[-1]
    return done.stdout, set(json.loads(told.removeprefix("loaded ")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
    return save_tiny_hf(tmp_path_factory.mktemp("model") / "tiny", dtype=torch.float32)


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (("--help",), set()),
        (("generate", "--help"), set()),
        (("plan", "--help"), set()),
        (("env",), TORCH | {"einops"}),
        (("plan", "--model", "llama3-8b", "--gpus", 8), set()),
        (("schedule", "interleaved_zb", "--model", "llama3-8b", "--length", 1024), set()),
    ],
)
def test_commands_without_a_model(arguments: tuple[object, ...], allowed: set[str]):
    assert _run(*arguments)[1] <= allowed


def test_a_plan_of_a_folder_or_a_file(folder: Path, tmp_path: Path):
    out = tmp_path / "run.toml"
    assert _run("plan", "--model", folder, "--gpus", 4, "--out", out)[1] <= {"safetensors"}
    assert _run("plan", "--model", out, "--gpus", 4, "--json")[1] <= {"safetensors"}


def test_completion_needs_no_torch():
    asked = {"_SHARDFUSE_COMPLETE": "complete_bash", "COMP_WORDS": "shardfuse gen", "COMP_CWORD": "1"}
    assert _run(**asked) == ("generate\n", set())


@pytest.mark.parametrize("name", ["generate", "chat"])
@pytest.mark.parametrize("more", [(), ("--temperature", 1), ("--tiny",)], ids=["greedy", "sampled", "tiny"])
def test_a_model_of_our_own_layers(folder: Path, name: str, more: tuple[object, ...]):
    """Without torch's compiler, DTensor, and transformers' models: long enough for a step to be recorded."""
    model = () if "--tiny" in more else (folder,)
    answer, loaded = _run(name, *model, *more, "--max-tokens", 40)
    assert answer
    assert "torch" in loaded
    assert loaded <= SERVES
