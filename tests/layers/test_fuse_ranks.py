"""``fuse`` over several ranks: foreign models that are split, against themselves in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardfuse import explain, init_mesh
from shardfuse.layers.fuse import fuse, unfuse

pytest.importorskip("transformers")
from foreign import ARCHITECTURES, foreign, tokens

EVERY_DAY = ("llama", "qwen3", "opt")
FOUR = ("llama", "qwen3", "starcoder2", "cohere")
KINDS = [
    *(pytest.param(kind, 2, marks=[] if kind in EVERY_DAY else [pytest.mark.nightly]) for kind in ARCHITECTURES),
    *(pytest.param(kind, 4, marks=pytest.mark.nightly) for kind in FOUR),
]
# How many parameters are split over the ranks.
SPLIT = {
    **dict.fromkeys(("llama", "mistral", "qwen3", "gemma2", "gemma3_text", "granite", "cohere", "stablelm"), 14),
    **{"qwen2": 20, "opt": 24, "starcoder2": 24, "phi": 24, "gptj": 16, "mixtral": 8},
    **{"olmo2": 6, "mpt": 4, "falcon": 4, "bloom": 8, "gpt_neox": 8},
}


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
    found = {}
    for each in (stock, model):
        each.train()
        torch.manual_seed(0)
        for module in each.modules():  # ranks draw masks of their own for their heads
            for name in ("p", "dropout", "attention_dropout", "hidden_dropout", "attn_pdrop", "resid_pdrop"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        out = each(batch, labels=batch, use_cache=False)
        out.loss.backward()
        grads = {name: param.grad for name, param in each.named_parameters() if param.grad is not None}
        found[each] = {"loss": out.loss.detach(), **grads}
    assert found[model].keys() == found[stock].keys()
    largest = max(value.norm() for name, value in found[stock].items() if name != "loss")
    errors = {}
    for name, value in found[stock].items():
        got = found[model][name]
        got = got.full_tensor() if isinstance(got, DTensor) else got
        errors[name] = float((got - value).norm() / value.norm().clamp(min=1e-5 * largest))
    why = sorted({row.why.partition("; whole on every rank: ")[2] for row in explain(model).rows} - {""})
    split = sum(isinstance(param, DTensor) for param in model.parameters())
    if split:
        with pytest.raises(ValueError, match=rf"unfuse: .* is split over {world} ranks"):
            unfuse(model)
    return errors, split, same, why


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "world"), KINDS)
def test_ranks_do_what_one_process_does(ranks: Any, kind: str, world: int):
    results = ranks(world, _body, kind)
    for errors, split, same, why in results:
        assert {name: error for name, error in errors.items() if not error < 1e-3} == {}
        assert same
        assert split == SPLIT.get(kind, 0), why
