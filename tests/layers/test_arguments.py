"""What layers say of arguments of the wrong kind: sizes and options when they are built, inputs when a call failed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import shardfuse as sf
from shardfuse.layers import module
from shardfuse.parallel.core.rendezvous import init_mesh

CONFIG = sf.TransformerConfig(
    style="gated", vocab_size=16, hidden_size=8, intermediate_size=8, num_heads=2, num_layers=1
)
# By the name of a size, a layer with it.
SIZES: dict[str, Any] = {
    "ParallelMLP.hidden_size": lambda size: sf.ParallelMLP(size, 8),
    "ParallelMLP.ffn_size": lambda size: sf.ParallelMLP(8, size),
    "ColumnParallelLinear.in_features": lambda size: sf.ColumnParallelLinear(size, 8),
    "ColumnParallelLinear.out_features": lambda size: sf.ColumnParallelLinear(8, size),
    "RowParallelLinear.in_features": lambda size: sf.RowParallelLinear(size, 8),
    "RowParallelLinear.out_features": lambda size: sf.RowParallelLinear(8, size),
    "VocabParallelEmbedding.vocab_size": lambda size: sf.VocabParallelEmbedding(size, 8),
    "VocabParallelEmbedding.hidden_size": lambda size: sf.VocabParallelEmbedding(8, size),
    "LayerNorm.hidden_size": sf.LayerNorm,
    "RMSNorm.hidden_size": sf.RMSNorm,
    "Fp8Linear.in_features": lambda size: sf.Fp8Linear(size, 8),
    "Fp8Linear.out_features": lambda size: sf.Fp8Linear(8, size),
    "Fp8Linear.amax_history": lambda size: sf.Fp8Linear(8, 8, amax_history=size),
    "ParallelAttention.hidden_size": lambda size: sf.ParallelAttention(size, 2),
    "ParallelAttention.num_heads": lambda size: sf.ParallelAttention(8, size),
    "ParallelAttention.num_kv_heads": lambda size: sf.ParallelAttention(8, 2, size),
    "ParallelAttention.head_dim": lambda size: sf.ParallelAttention(8, 2, head_dim=size),
    "PagedAttention.num_heads": lambda size: sf.PagedAttention(size, 1, 8),
    "PagedAttention.num_kv_heads": lambda size: sf.PagedAttention(2, size, 8),
    "PagedAttention.head_dim": lambda size: sf.PagedAttention(2, 1, size),
    "PagedKVCache.num_layers": lambda size: sf.PagedKVCache(size, 1, num_kv_heads=1, head_dim=8),
    "PagedKVCache.num_blocks": lambda size: sf.PagedKVCache(1, size, num_kv_heads=1, head_dim=8),
    "TransformerConfig.hidden_size": lambda size: sf.TransformerConfig(hidden_size=size),
    "TransformerConfig.num_kv_heads": lambda size: sf.TransformerConfig(num_kv_heads=size),
    "TransformerConfig.head_dim": lambda size: sf.TransformerConfig(head_dim=size),
}
LAYERS: dict[str, Any] = {
    "ParallelMLP": lambda **options: sf.ParallelMLP(8, 8, **options),
    "ParallelMLP-gated": lambda **options: sf.ParallelMLP(8, 8, gated=True, **options),
    "ColumnParallelLinear": lambda **options: sf.ColumnParallelLinear(8, 8, **options),
    "RowParallelLinear": lambda **options: sf.RowParallelLinear(8, 8, **options),
    "LayerNorm": lambda **options: sf.LayerNorm(8, **options),
    "RMSNorm": lambda **options: sf.RMSNorm(8, **options),
    "ParallelAttention": lambda **options: sf.ParallelAttention(8, 2, **options),
    "ParallelBlock": lambda **options: sf.ParallelBlock(CONFIG, **options),
    "ParallelTransformer": lambda **options: sf.ParallelTransformer(CONFIG, **options),
}
SINGLE: dict[str, Any] = {
    "VocabParallelEmbedding": lambda: sf.VocabParallelEmbedding(16, 8),
    "Fp8Linear": lambda: sf.Fp8Linear(8, 8),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", ["8", 8.0, True, [8], float("nan")], ids=repr)
def test_a_size_of_the_wrong_kind_is_named(name: str, size: Any):
    message = f"{name.partition('.')[2]}={size!r}: expected a whole number of at least 1"
    with pytest.raises(ValueError, match=re.escape(message)):
        SIZES[name](size)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("size", [0, -8])
def test_a_size_below_1_is_named(name: str, size: int):
    with pytest.raises(ValueError, match=f"{name.partition('.')[2]}={size}: expected at least 1"):
        SIZES[name](size)


@pytest.mark.parametrize("name", SIZES)
def test_a_size_may_be_any_whole_number(name: str):
    SIZES[name](np.int64(16 if name.endswith("hidden_size") else 2))


@pytest.mark.parametrize("name", [*LAYERS, "Fp8Linear"])
def test_an_unknown_impl_is_refused_when_the_layer_is_built(name: str):
    build = LAYERS.get(name, lambda **options: sf.Fp8Linear(8, 8, **options))
    with pytest.raises(ValueError, match=r"impl='cuda': expected one of auto, triton, onednn, reference"):
        build(impl="cuda")


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no-grad"])
@pytest.mark.parametrize("name", [*LAYERS, *SINGLE])
def test_an_input_that_is_no_tensor_is_named(name: str, grad: bool):
    layer = (LAYERS | SINGLE)[name]()
    tokens = "tokens" if name in ("ParallelTransformer", "VocabParallelEmbedding") else "x"
    given = np.zeros((2, 8), np.int64 if tokens == "tokens" else np.float32)
    kind = type(layer).__name__
    for x, said in ((given, "numpy.ndarray"), (given.tolist(), "list"), (None, "NoneType")):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(TypeError, match=f"{kind}: {tokens} is a {said}: expected a torch.Tensor; torch.as_tensor"),
        ):
            layer(x)
    with pytest.raises(TypeError, match=f"{kind}: {tokens} is a numpy.ndarray"):
        layer(**{tokens: given})


@pytest.mark.parametrize("name", LAYERS)
def test_the_reference_names_it_too(name: str):
    with pytest.raises(TypeError, match=r"is a numpy\.ndarray: expected a torch\.Tensor"):
        LAYERS[name](impl="reference")(np.zeros((2, 8), np.float32))


def _on_ranks(rank: int, world: int) -> list[str]:
    mesh = init_mesh(tp=world, device_type="cpu")
    said = []
    for name in LAYERS:
        with pytest.raises(TypeError) as caught:
            LAYERS[name](mesh=mesh)(np.zeros((2, 8), np.float32))
        said.append(str(caught.value))
    return said


@pytest.mark.ranks
def test_ranks_name_it_too(ranks: Any):
    for said in ranks(2, _on_ranks):
        assert all("is a numpy.ndarray: expected a torch.Tensor" in message for message in said)


def test_other_errors_pass_unchanged():
    layer = sf.ColumnParallelLinear(8, 8)
    with pytest.raises(ValueError, match="linear_act"):
        layer(torch.zeros(2, 7))
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        layer(torch.zeros(2, 8), y=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        layer()


def test_a_successful_call_checks_nothing(monkeypatch: pytest.MonkeyPatch):
    def never(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(module, "expect_tensor", never)
    for name in LAYERS:
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        x = tokens if name == "ParallelTransformer" else torch.zeros(2, 4, 8)
        LAYERS[name]()(x.flatten(0, 1), batch_size=2) if name == "ParallelBlock" else LAYERS[name]()(x)


def test_tracers_see_a_layers_modules():
    """Layers explain failed calls without hiding their calls from torch's tracers."""
    model = torch.nn.Sequential(sf.ParallelMLP(8, 16, impl="reference"))
    program = torch.export.export(model, (torch.ones(2, 8),), strict=False)
    stacks = {each for node in program.graph.nodes for each, _ in (node.meta.get("nn_module_stack") or {}).values()}
    assert {"0", "0.c_fc", "0.c_proj"} <= stacks
