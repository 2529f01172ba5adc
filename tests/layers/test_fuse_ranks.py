"""``fuse`` over several ranks: foreign models that are split, against themselves in one process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardfuse import explain, init_mesh
from shardfuse.kernels.dev import accuracy
from shardfuse.layers.fuse import Fused, fuse, tp_plan, unfuse
from shardfuse.parallel.core import collectives

pytest.importorskip("transformers")
from foreign import ARCHITECTURES, foreign, tokens, without_dropout

BUDGET = accuracy.FACTOR * accuracy.rounding(torch.float32, terms=64)
EVERY_DAY = ("llama", "gpt2", "phi3")
FOUR = ("llama", "qwen3", "starcoder2", "cohere", "gpt2", "phi3", "olmo2")
KINDS = [
    *(pytest.param(kind, 2, marks=[] if kind in EVERY_DAY else [pytest.mark.nightly]) for kind in ARCHITECTURES),
    *(pytest.param(kind, 4, marks=pytest.mark.nightly) for kind in FOUR),
]
# How many parameters are split over the ranks.
SPLIT = {
    **dict.fromkeys(("llama", "mistral", "qwen3", "granite", "stablelm"), 16),
    **dict.fromkeys(("gemma2", "gemma3_text", "cohere"), 15),  # the head's weight is the table's
    **{"qwen2": 22, "opt": 21, "starcoder2": 21, "phi": 23, "gptj": 17, "mixtral": 10, "gpt_oss": 18},
    **{"olmo2": 20, "mpt": 9, "falcon": 5, "bloom": 13, "gpt_neox": 14, "phi3": 10, "gpt2": 13},
}


def _trained(model: Any, batch: torch.Tensor, steps: int = 1) -> dict[str, torch.Tensor]:
    """Loss and gradients of the first of ``steps`` of AdamW, without dropout, and the parameters after the last."""
    without_dropout(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)
    found: dict[str, torch.Tensor] = {}
    for step in range(steps):
        out = model(batch, labels=batch, use_cache=False)
        out.loss.backward()
        if step == 0:
            grads = {f"{name}.grad": param.grad for name, param in model.named_parameters() if param.grad is not None}
            found = {"loss": out.loss.detach()} | {name: _whole(grad) for name, grad in grads.items()}
        if steps > 1:
            optimizer.step()
        optimizer.zero_grad()
    return found | {name: _whole(param) for name, param in model.named_parameters()}


def _whole(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()


def _errors(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, float]:
    """Those past the budget: norms and the loss compute in fp32, the rest in fp64."""
    assert got.keys() == want.keys()
    least = 1e-2 * max(float(value.norm()) for name, value in want.items() if name.endswith(".grad"))
    errors = {
        name: float((got[name] - x).norm()) / max(float(x.norm()), least if name.endswith(".grad") else 0.0)
        for name, x in want.items()
    }
    return {name: error for name, error in errors.items() if not error <= BUDGET}


def _body(rank: int, world: int, kind: str) -> tuple[dict[str, float], int, bool, list[str]]:
    mesh = init_mesh(tp=world, device_type="cpu")
    sizes = {"num_key_value_heads": 4} if world == 4 else {}
    stock, model = (foreign(kind, torch.float64, **sizes) for _ in range(2))
    batch = tokens()
    names = list(model.state_dict())
    fuse(fuse(model, mesh), mesh)
    with pytest.raises(ValueError, match="was fused without a mesh; unfuse the model first"):
        fuse(fuse(foreign("llama")), mesh)
    assert list(model.state_dict()) == names
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "no_repeat_ngram_size": 1}
    with torch.no_grad():
        same = torch.equal(model.generate(batch, **options), stock.generate(batch, **options))
    errors = _errors(_trained(model, batch, 10), _trained(stock, batch, 10))
    why = sorted({row.why.partition("; whole on every rank: ")[2] for row in explain(model).rows} - {""})
    assert len({type(param) for param in model.parameters()}) == 1  # torch's tools take no mixture
    split = sum(isinstance(param, DTensor) and param.placements[0].is_shard() for param in model.parameters())
    if split:
        with pytest.raises(ValueError, match=rf"unfuse: .* is split over {world} ranks"):
            unfuse(model)
    return errors, split, same, why


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "world"), KINDS)
def test_ranks_do_what_one_process_does(ranks: Any, kind: str, world: int):
    results = ranks(world, _body, kind)
    for errors, split, same, why in results:
        assert errors == {}
        assert same
        assert split == SPLIT[kind], why


# Whose layers may divide sequences.
DIVIDING = ("llama", "gpt2", "phi3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt_neox", "starcoder2")
DIVIDING += ("granite", "cohere", "stablelm", "phi", "olmo2", "mpt", "gptj")


def _divided(rank: int, world: int, kind: str) -> list[dict[str, float]]:
    mesh, batch = init_mesh(tp=world, device_type="cpu"), tokens(2, 6 * world)
    stock, model = (foreign(kind, torch.float64) for _ in range(2))
    fuse(model, mesh, sequence_parallel=True)
    want = _trained(stock, batch)
    collectives.reset_counts()
    found = [_errors(_trained(model, batch), want)]
    calls = collectives.calls
    assert calls["all_gather", "attention.in"] == calls["reduce_scatter", "attention.out"] == 2
    assert calls["all_gather", "layers.out"] == calls["all_gather", "layers.in.grad"] == 1
    assert calls["all_reduce", "mlp.out"] == calls["all_reduce", "attention.out"] == 0
    model.gradient_checkpointing_enable()
    found.append(_errors(_trained(model, batch), want))
    with pytest.raises(ValueError, match=rf"sequences of 5 tokens do not divide by the {world} ranks"):
        model(tokens(2, 5))
    for layer in model.modules():  # layers whose children are hooked get whole sequences
        if isinstance(layer, Fused) and type(layer).__name__.endswith("MLP"):
            next(layer.children()).register_forward_hook(lambda *_: None)
    found.append(_errors(_trained(model, batch), want))
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(tokens(2, 5)).logits.argmax(-1), stock.eval()(tokens(2, 5)).logits.argmax(-1))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "llama" else [pytest.mark.nightly]) for kind in DIVIDING]
)
def test_layers_divide_sequences(ranks: Any, kind: str):
    for found in ranks(2, _divided, kind):
        for errors in found:
            assert errors == {}


def _further(rank: int, world: int) -> None:
    """Copies, pickles, torch.compile and refusals."""
    mesh, batch = init_mesh(tp=world, device_type="cpu"), tokens(2, 8)
    with pytest.raises(ValueError, match=r"model\.layers\.0 \(MixtralDecoderLayer\): mlp is a MixtralSparseMoeBlock"):
        fuse(foreign("mixtral"), mesh, sequence_parallel=True)
    for kind in ("phi3", "gpt2"):
        stock, model = foreign(kind, torch.float64), fuse(foreign(kind, torch.float64), mesh)
        want = _trained(stock, batch)
        twin = copy.deepcopy(model)
        with pytest.raises(TypeError, match="split over 2 ranks and cannot be pickled: save full_state_dict"):
            pickle.dumps(model)
        for each in (model, twin):
            assert _errors(_trained(each, batch), want) == {}
            with torch.no_grad():
                each.lm_head.weight.mul_(2.0)  # the other one keeps its own
        if kind == "gpt2":
            continue
        torch._dynamo.reset()
        compiled = torch.compile(copy.deepcopy(model).eval(), fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            logits = compiled(batch, use_cache=False).logits
            assert accuracy.relative_error(logits, model.eval()(batch).logits) <= BUDGET


@pytest.mark.ranks
def test_copies_pickles_compile_and_refusals(ranks: Any):
    ranks(2, _further)


def _plans(rank: int, world: int) -> dict[str, tuple[Any, Any]]:
    mesh = init_mesh(tp=world, device_type="cpu")
    models = {kind: fuse(foreign(kind), mesh) for kind in ("llama", "qwen3", "gpt_neox", "starcoder2", "phi3", "gpt2")}
    return {kind: (tp_plan(model), model.config.base_model_tp_plan) for kind, model in models.items()}


@pytest.mark.ranks
def test_the_plan_is_the_one_that_transformers_has(ranks: Any):
    """Found by structure, and equal to what is written in its configurations."""
    for plans in ranks(2, _plans):
        ours, _ = plans.pop("gpt2")  # Conv1D, for which it has no word
        assert ours == {}
        for ours, theirs in plans.values():
            assert ours == theirs
