"""``fuse``: models of transformers on our ops, against themselves as they were.

A training step on a CPU, where the ops are plain torch: fusing must not make it slower. And what a call of a fused
module costs the host of a GPU, for Llama's modules on one token: launches go through Triton's own launcher into a CUDA
driver that runs nothing (``tests/support/stub_driver.py``, in a checkout with gcc). The stock module runs torch's CPU
kernels on the same token, so neither side has the time that CUDA takes to launch a kernel: the stock module launches
several times as many.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...kernels.dev import stub_cuda
from ...kernels.dev.accuracy import Verdict
from ...kernels.runtime import dispatch
from ...layers.fuse import fuse
from ..harness.benchmark import Benchmark, Measurement, Settings
from ..harness.gate import check_outputs
from ..harness.timing import Timing, compare_rounds

TARGETS = {
    "training step on a CPU, against the stock model": 1 / 1.03,
    "host time of a norm, a feed-forward or attention module, or a decoder layer, against the stock one": 1 / 1.15,
    "host time of rotary positions, against the stock function": 1.0,
    "host time of an op or module of ours, against the stock call and the launches that it may take longer": 1.0,
    "host time of an engine's step, against 60 % of the launches that it took before calls were settled": 1.0,
}
STEP, MODULE, ROTARY, OWN, ENGINE = TARGETS.values()
KINDS = ("llama", "gpt2", "falcon", "opt")
HOST_KIND = "llama"
ROUNDS = 40
SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 4),
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 256),
    **dict.fromkeys(("ffn_dim", "n_inner"), 1024),
    **dict.fromkeys(("num_attention_heads", "n_head"), 8),
    **{"intermediate_size": 768, "num_key_value_heads": 4, "vocab_size": 2048, "pad_token_id": 0},
}
TOKENS = (4, 128)
TERMS = 4 * 2 * 2048  # layers, forward and backward, and the longest sum in each: what sums that follow come to
_STUB = Path(__file__).resolve().parents[2] / "tests" / "support"
_HOST = "host time of a call, us"


def models(kind: str) -> tuple[nn.Module, nn.Module]:
    """A small random model of transformers, fused and as it was, with the same weights, in training."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    default = CONFIG_MAPPING[kind]()
    config = CONFIG_MAPPING[kind](**{name: size for name, size in SIZES.items() if hasattr(default, name)})
    stock = AutoModelForCausalLM.from_config(config, trust_remote_code=False).train()
    return fuse(copy.deepcopy(stock)), stock


def tokens(settings: Settings) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(0)
    return torch.randint(3, SIZES["vocab_size"], (1, 8) if settings.dry else TOKENS, generator=drawn)


def train(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Forward and backward, gradients overwritten; returns the loss."""
    model.zero_grad(set_to_none=True)
    loss: torch.Tensor = model(batch, labels=batch, use_cache=False).loss
    loss.backward()
    return loss.detach()


def compare_steps(kind: str, settings: Settings) -> tuple[Timing, Timing]:
    """The training step of both models, interleaved."""
    batch = tokens(settings)
    steps = [partial(train, model, batch) for model in models(kind)]
    for step in steps * 2:
        step()
    return compare_rounds(*steps, rounds=2 if settings.dry else ROUNDS)


def plan(settings: Settings) -> list[Measurement]:
    if importlib.util.find_spec("transformers") is None:
        return []
    metric = "forward + backward, us"
    rows = [Measurement(kind, metric, "stock model", STEP, partial(compare_steps, kind, settings)) for kind in KINDS]
    stub = not settings.dry and _STUB.is_dir() and shutil.which("gcc") and dispatch.triton_version()
    return rows + (list(_host_rows(settings.seconds)) if stub else [])


HOST_CALLS = tuple(
    f"{part}, {way}"
    for part in ("norm", "mlp", "rotary positions", "attention", "decoder layer")
    for way in ("without gradients", "forward", "forward + backward")
)
LONGER = {"linear_act, without gradients": 8, "linear_act, forward": 14, "ParallelMLP, forward": 20}  # launches
STEPS = {
    "eager step of ParallelTransformer, per layer": 200,
    "eager step of a fused Llama, per layer": 248,
    "replayed step": 53,
}


def _host_rows(seconds: float) -> Iterator[Measurement]:
    """Against the stock call, and against one launch: so many of them take as long, on any machine."""

    def run(call: str, launches: int, stock: bool) -> tuple[Timing, Timing]:
        found = _host_times(seconds)[call]
        bare, noise = found["bare"]
        value, noise = found["stock"] if stock else (0.0, noise)
        return Timing(*found["ours"]), Timing(value + launches * bare, noise)

    def row(call: str, peer: str, target: float | None, launches: int = 0, stock: bool = False) -> Measurement:
        return Measurement(HOST_KIND, f"{_HOST}: {call}", peer, target, partial(run, call, launches, stock))

    for call in HOST_CALLS:
        yield row(call, "stock module", ROTARY if call.startswith("rotary") else MODULE, stock=True)
    for call, launches in LONGER.items():
        yield row(call, f"stock call and {launches} bare launches", OWN, launches, stock=True)
    for call, launches in STEPS.items():
        yield row(call, f"{launches} bare launches", ENGINE, launches)
    for call in (*HOST_CALLS, *LONGER, *STEPS):
        yield row(call, "one bare launch", None, 1)


@cache
def _host_times(seconds: float) -> dict[str, Any]:
    """What ``stub_driver.py --time`` prints, in a process of its own: it replaces Triton's driver."""
    with tempfile.TemporaryDirectory() as folder:
        stub_cuda.build(Path(folder))
        unwanted = ("TRITON_INTERPRET", "SHARDFUSE_POISON", "SHARDFUSE_IMPL")
        environment = {name: value for name, value in os.environ.items() if name not in unwanted}
        command = [sys.executable, str(_STUB / "stub_driver.py"), folder, "--time", str(seconds)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)  # noqa: S603 - our own program
    if done.returncode:
        raise RuntimeError(f"{command[1]} --time failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["times"]
    return found


def check(settings: Settings, names: Sequence[str]) -> Iterator[tuple[str, Verdict]]:
    """Loss and gradients of the fused model, by the ops that the timed step runs."""
    for kind in KINDS:
        if kind in names:
            ours, stock = models(kind)
            exact, batch = copy.deepcopy(stock).double(), tokens(settings)
            found = check_outputs(
                _outputs(ours, batch), low=partial(_outputs, stock, batch), oracle=partial(_outputs, exact, batch),
                terms=TERMS,
            )  # fmt: skip
            yield from ((kind, verdict) for verdict in found)


def _outputs(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)  # dropout
    loss = train(model, batch)
    return {"loss": loss} | {f"d_{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}


BENCHMARK = Benchmark(
    name="fuse",
    summary="models of transformers after fuse(): a training step on a CPU, and the host time of a module's call",
    targets=TARGETS,
    plan=plan,
    check=check,
    ops=("linear_act", "gated_linear", "rms_norm", "layer_norm", "rope", "linear_cross_entropy"),
    sources=("layers/fuse", "parallel/mlp.py", "parallel/linear.py", "parallel/cross_entropy.py"),
    devices=("cpu",),
)
