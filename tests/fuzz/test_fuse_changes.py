"""A fused model whose kernels run, changed at random between its calls, beside the stock model with the same changes.

What calls like one before go by (``kernels/runtime/repeated.py``) and what a fused module remembers of its children
must notice each of them.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import torch
from foreign import foreign
from fuzz import Fuzz
from torch import nn
from torch.nn.utils import parametrize

from shardfuse.kernels.runtime import dispatch
from shardfuse.layers.fuse import fuse
from shardfuse.layers.fuse.matchers import rotary

pytest.importorskip("transformers")
pytestmark = [pytest.mark.nightly, pytest.mark.fuzz]

ROUNDS = 4
CHILDREN = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "self_attn.q_proj", "self_attn.v_proj")
# Ours may err by so many times the stock model's error, by an oracle in fp64, and so many roundings of the largest.
FACTOR, ROUNDINGS = 4, 16


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Adapter(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x.mean()


def _twice(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return 2 * out


# --- changes: each is applied to both models, with the same draws; what it returns takes their place


def _mode(model: Any, draw: Random) -> Any:
    return model.train(draw.random() < 0.5)


def _freeze(model: Any, draw: Random) -> Any:
    for param in draw.sample(list(model.parameters()), 3):
        param.requires_grad_(draw.random() < 0.5)
    return model


def _cast(model: Any, draw: Random) -> Any:
    dtype = draw.choice((torch.bfloat16, torch.float32))
    return model if model.lm_head.weight.dtype == torch.float64 else model.to(dtype)  # the oracle stays as it is


def _epsilon(model: Any, draw: Random) -> Any:
    model.model.norm.variance_epsilon = draw.choice((1e-6, 0.1, 1.0))
    return model


def _hook(model: Any, draw: Random) -> Any:
    child = _child(model, draw)
    if child._forward_hooks:
        child._forward_hooks.clear()
    else:
        child.register_forward_hook(_twice)
    return model


def _other_weight(model: Any, draw: Random) -> Any:
    """The same values elsewhere: an element behind, or columns first."""
    param = draw.choice([each for each in model.parameters() if each.dim() == 2])
    room = torch.empty(param.numel() + 1, dtype=param.dtype)
    behind = room[1:].view(param.shape).copy_(param.data)
    param.data = behind if draw.random() < 0.5 else param.data.t().contiguous().t()
    return model


def _replaced(model: Any, draw: Random) -> Any:
    name, child = draw.choice(CHILDREN), None
    parent, _, own = name.partition(".")
    holder = getattr(model.model.layers[0], parent)
    child = getattr(holder, own)
    if isinstance(child, Adapter):
        setattr(holder, own, child.inner)
    elif draw.random() < 0.5:
        setattr(holder, own, Adapter(child))
    elif type(child) is nn.Linear:
        with torch.random.fork_rng([]):
            torch.manual_seed(draw.getrandbits(30))
            other = nn.Linear(child.in_features, child.out_features, bias=True).to(child.weight.dtype)
        setattr(holder, own, other.train(child.training))
    return model


def _parametrized(model: Any, draw: Random) -> Any:
    child = _child(model, draw)
    if parametrize.is_parametrized(child, "weight"):
        parametrize.remove_parametrizations(child, "weight", leave_parametrized=False)
    elif type(child) is nn.Linear:
        parametrize.register_parametrization(child, "weight", Doubled())
    return model


def _copied(model: Any, draw: Random) -> Any:
    if draw.random() < 0.5 or any(parametrize.is_parametrized(each) for each in model.modules()):
        return copy.deepcopy(model)
    return pickle.loads(pickle.dumps(model))


def _child(model: Any, draw: Random) -> Any:
    child = model.model.layers[0].get_submodule(draw.choice(CHILDREN))
    return child.inner if isinstance(child, Adapter) else child


CHANGES: tuple[Callable[[Any, Random], Any], ...] = (
    *(_mode, _freeze, _cast, _epsilon, _hook, _other_weight, _replaced, _parametrized, _copied),
)


# --- calls


@contextlib.contextmanager
def _without_gradients(draw: Random) -> Iterator[None]:
    with torch.no_grad() if draw.random() < 0.5 else torch.inference_mode():
        yield


def _results(model: Any, batch: torch.Tensor, way: str, draw: Random) -> dict[str, torch.Tensor]:
    if way == "without gradients":
        with _without_gradients(draw):
            return {"logits": model(batch, use_cache=False).logits}
    lower = way == "autocast" and model.lm_head.weight.dtype != torch.float64
    with torch.autocast("cpu", torch.bfloat16, enabled=lower):
        logits = model(batch, use_cache=False).logits
    wanted = {name: param for name, param in model.named_parameters() if param.requires_grad}
    found = {"logits": logits.detach()}
    if not wanted or not logits.requires_grad:
        return found
    loss = logits.square().mean()
    if way == "some":
        wanted = dict(draw.sample(sorted(wanted.items()), min(2, len(wanted))))
        grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        return found | {name: grad for name, grad in zip(wanted, grads) if grad is not None}
    loss.backward(retain_graph=way == "twice")
    if way == "twice":
        loss.backward()
    found |= {name: param.grad for name, param in wanted.items() if param.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def _case(number: int, draw: Random) -> str:
    models = [foreign("llama", num_hidden_layers=1, tie_word_embeddings=False) for _ in range(3)]
    models = [models[0], fuse(models[1]), models[2].double()]
    said = []
    for _ in range(ROUNDS):
        change, seed = draw.choice(CHANGES), draw.getrandbits(30)
        models = [change(model, Random(seed)) for model in models]
        way = draw.choice(("backward", "backward", "without gradients", "autocast", "some", "twice"))
        batch = torch.randint(3, 64, (draw.choice((1, 2)), draw.choice((1, 3, 5))))
        said.append(f"{change.__name__[1:]} {seed}, {way} of {tuple(batch.shape)}")
        for _ in range(2):  # the second is like one before
            stock, ours, oracle = (_results(model, batch, way, Random(seed)) for model in models)
            assert ours.keys() == stock.keys(), f"{said}: {sorted(ours.keys() ^ stock.keys())}"
            eps = torch.finfo(torch.bfloat16 if way == "autocast" else models[0].lm_head.weight.dtype).eps
            for name, want in oracle.items():
                kind, found = stock[name].dtype, ours[name].dtype
                assert found == kind, f"{said}: {name} is {found}, not {kind}"
                error, theirs = (float((each[name].double() - want).abs().max()) for each in (ours, stock))
                most = FACTOR * theirs + ROUNDINGS * eps * float(want.abs().max()) + 1e-7
                assert error <= most, f"{said}: {name} is {error:.1e} off, of {most:.1e} allowed"
    return "alike"


@pytest.mark.skipif(dispatch.triton_version() is None, reason="Triton is not installed")
def test_what_changes_between_calls_is_noticed(fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "_AUTO", "triton")
    monkeypatch.setattr(dispatch, "_decided", {})
    rotary.ours.cache_clear()
    before = dispatch.counts["gated_linear", "triton"]
    fuzz.run(_case)
    assert dispatch.counts["gated_linear", "triton"] > before
