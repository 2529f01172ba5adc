"""Shared by tests of attention on torch's paths: features and their combinations, operands, the fp64 oracle."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise
from typing import Any

import torch

from shardfuse.kernels.dev import accuracy
from shardfuse.layers.attention.sdpa import attend

STARTS = [0, 23, 23, 24, 29, 40]  # one long sequence, an empty one, a single token, short ones
FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": 5},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "packed": {"packed": True},
    "bidirectional": {"causal": False},
}


def every_combination() -> list[tuple[str, ...]]:
    names = [c for size in range(len(FEATURES) + 1) for c in itertools.combinations(FEATURES, size)]
    return [c for c in names if not {"window", "bidirectional"} <= set(c)]


def make_inputs(
    heads: int = 6, kv_heads: int = 2, size: int = 80, tokens: int = STARTS[-1], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """q, k, v [T, heads, size] and sinks [heads], with scores large enough for soft-caps and sinks to matter."""
    q = 2 * torch.randn(tokens, heads, size)
    k, v = torch.randn(tokens, kv_heads, size), torch.randn(tokens, kv_heads, size)
    return q.to(dtype), k.to(dtype), v.to(dtype), torch.randn(heads).to(dtype)


def options_of(names: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for name in names for key, value in FEATURES[name].items()}


def oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink_logits: torch.Tensor,
    starts: list[int],
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    packed: bool = False,
) -> torch.Tensor:
    """The formulas, sequence by sequence and head by head: [T, N, H]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    sequences = []
    for start, end in pairwise(starts):
        i, j = torch.arange(end - start).unsqueeze(1), torch.arange(end - start)
        hidden = torch.zeros(end - start, end - start, dtype=torch.bool)
        if causal:
            hidden |= j > i
        if window is not None:
            hidden |= i - j >= window
        heads = []
        for n in range(q.shape[1]):
            scores = q[start:end, n] @ k[start:end, n // group].T * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp().masked_fill(hidden.to(q.device), 0)
            total = weights.sum(-1, keepdim=True) + (sink_logits[n].exp() if sinks else 0)
            heads.append(weights / total @ v[start:end, n // group])
        sequences.append(torch.stack(heads, dim=1))
    return torch.cat(sequences)


def call_attend(tensors: tuple[torch.Tensor, ...], options: dict[str, Any], **more: Any) -> torch.Tensor:
    """Call ``attend`` on packed tokens, or on the same tokens as two sequences of 20."""
    q, k, v, sinks = tensors
    options = dict(options)
    if options.pop("packed", False):
        options["cu_seqlens"] = torch.tensor(STARTS, dtype=torch.int32, device=q.device)
    else:
        options["batch_size"] = 2
    if options.pop("sinks", False):
        options["sinks"] = sinks
    return attend(q, k, v, **options, **more)


def with_grads(run: Any, tensors: tuple[torch.Tensor, ...], grad: torch.Tensor | None) -> dict[str, torch.Tensor]:
    leaves = [t.detach().requires_grad_(grad is not None) for t in tensors]
    out = run(*leaves)
    results = {"out": out}
    if grad is not None:
        grads = torch.autograd.grad(out, leaves, grad.to(out.dtype), allow_unused=True)
        results |= {name: g for name, g in zip(("dq", "dk", "dv", "dsinks"), grads) if g is not None}
    return results


def judge(tensors: tuple[torch.Tensor, ...], options: dict[str, Any], *, backward: bool = True, **more: Any) -> None:
    """Judge the call by the oracle in fp64; the oracle in the inputs' own precision sets the budget."""
    starts = STARTS if options.get("packed") else [0, 20, 40]
    grad = torch.randn(tensors[0].shape).to(tensors[0]) if backward else None
    ours = with_grads(lambda *t: call_attend(t, options, **more), tensors, grad)
    plain = lambda *t: oracle(*t, starts, **options)
    low = with_grads(plain, tensors, grad)
    exact = with_grads(plain, tuple(t.double() for t in tensors), grad)
    assert set(ours) == set(exact)
    # A head's sums and those over its keys. A score's absolute error is its weight's relative error, so scores of size
    # s multiply the error of their sums by s.
    q, k = tensors[0].double(), tensors[1].double()
    scale = options.get("scale") or q.shape[-1] ** -0.5
    size = scale**2 * q.shape[-1] * q.square().mean().item() * k.square().mean().item()  # the square of a score's size
    terms = math.ceil(max(1.0, size) * (q.shape[-1] + max(b - a for a, b in pairwise(starts))))
    for name, value in ours.items():
        verdict = accuracy.judge(name, value, low[name], exact[name], terms=terms)
        assert verdict.ok, verdict
