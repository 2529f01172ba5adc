"""Fused foreign models on our kernels, which a CPU interprets: forward and backward, against the stock models."""

from __future__ import annotations

import pytest
import torch
from foreign import ARCHITECTURES, foreign, tokens
from torch import nn

from shardfuse.bench.harness.gate import join_layers
from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.runtime import dispatch
from shardfuse.layers.fuse import Stats, fuse, stats
from shardfuse.layers.fuse.matchers import rotary

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(dispatch.triton_version() is None, reason="Triton is not installed"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TERMS = 2048  # two layers, forward and backward, and the norms between: what sums that follow one another come to
EVERY_DAY = ("llama", "gemma3_text", "phi3", "gpt2", "falcon")
KINDS = [pytest.param(kind, marks=[] if kind in EVERY_DAY else [pytest.mark.nightly]) for kind in ARCHITECTURES]


def _generates(model: nn.Module, device: str) -> tuple[torch.Tensor, Stats]:
    """Logits without gradients, and what ran."""
    with torch.no_grad(), stats(model) as ran:
        logits = model.eval()(tokens(2, 6).to(device), use_cache=False).logits
    return logits, ran


def _trains(model: nn.Module) -> tuple[dict[str, torch.Tensor], Stats]:
    """Loss and gradients, and what ran in that forward."""
    batch = tokens(2, 6).to(DEVICE)
    torch.manual_seed(0)  # dropout
    with stats(model) as ran:
        loss = model.train()(batch, labels=batch, use_cache=False).loss
    loss.backward()
    grads = {f"d_{name}": param.grad for name, param in model.named_parameters() if param.grad is not None}
    return {"loss": loss.detach(), **join_layers(grads)}, ran


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_compute_what_the_stock_model_does(kind: str, monkeypatch: pytest.MonkeyPatch):
    by_reference = _generates(fuse(foreign(kind)), "cpu")[1]
    expected = {  # attention that a model spells out runs on torch's
        (path, op, impl if impl == "sdpa" else "triton"): times for (path, op, impl), times in by_reference.items()
    }
    monkeypatch.setattr(dispatch, "_AUTO", "triton")
    monkeypatch.setattr(dispatch, "_decided", {})
    rotary.ours.cache_clear()
    ours, stock, oracle = (foreign(kind, dtype, DEVICE) for dtype in (torch.float32, torch.float32, torch.float64))
    fuse(ours)
    found: list[dict[str, torch.Tensor]] = []
    for model in (ours, stock, oracle):
        logits, generating = _generates(model, DEVICE)
        results, training = _trains(model)
        found.append({"logits": logits, **results})
        if model is ours:
            assert generating == expected
            assert training == expected | {("", "linear_cross_entropy", "triton"): 1}
    got, low, exact = found
    assert got.keys() == low.keys() == exact.keys()
    verdicts = [accuracy.judge(name, got[name], low[name], exact[name], terms=TERMS) for name in exact]
    assert [str(verdict) for verdict in verdicts if not verdict.ok] == []
