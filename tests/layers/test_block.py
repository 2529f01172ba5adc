"""ParallelBlock's sums: the same result and gradients whoever looks in, in 16 bits, recomputed, compiled, wrapped."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardfuse import (
    Engine,
    LayerNorm,
    ParallelBlock,
    ParallelTransformer,
    TransformerConfig,
    attach_main_grads,
    manual_seed,
)
from shardfuse.kernels.dev import accuracy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = TransformerConfig(
    style="gated", vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2
)
GELU = dataclasses.replace(CONFIG, style="gelu", bias=None)
TOKENS = torch.arange(24).view(2, 12) * 7 % 40


def _run(block: nn.Module, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    leaves = [x, *block.parameters()]
    y = block(x, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y) / 8)]


@pytest.mark.interpret
@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("config", [CONFIG, GELU], ids=["gated", "gelu"])
@pytest.mark.parametrize(
    "options",
    [{}, {"mlp_recompute": 1}, {"mlp_recompute": 2}, {"recompute": True}, {"fuse_wgrad_accumulation": True}],
    ids=str,
)
def test_autocast_over_a_wide_stream(impl: str, config: TransformerConfig, options: dict[str, Any]):
    torch.manual_seed(0)
    block = ParallelBlock(config, impl=impl, device=DEVICE, **options)
    stock = ParallelBlock(config, impl="reference", device=DEVICE)
    stock.load_state_dict(block.state_dict())
    if options.get("fuse_wgrad_accumulation"):
        attach_main_grads(block)
    x = torch.randn(2, 6, 32, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y, expected = block(x), stock(x)
    assert y.dtype == expected.dtype == torch.float32
    assert accuracy.within("y", y, expected, 2**-6).ok
    (dx,), (wanted,) = (torch.autograd.grad(each.square().sum(), x) for each in (y, expected))
    assert accuracy.within("dx", dx, wanted, 2**-5).ok


class Adapter(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("dropped", [0.0, 0.3])
@pytest.mark.parametrize(
    "name", ["self_attn.o_proj", "mlp.c_proj", "mlp", "input_layernorm", "post_attention_layernorm"]
)
def test_submodules_may_be_replaced(name: str, dropped: float):
    torch.manual_seed(0)
    block = ParallelBlock(dataclasses.replace(GELU, residual_dropout=dropped), dtype=torch.float64)
    replaced = copy.deepcopy(block)
    outer, _, last = name.rpartition(".")
    setattr(replaced.get_submodule(outer), last, Adapter(replaced.get_submodule(name)))
    x = torch.randn(2, 6, 32, dtype=torch.float64, requires_grad=True)
    found = []
    for each in (block, replaced):
        manual_seed(4)
        found.append(_run(each, x))
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs)


def test_a_stock_norm_fits_in():
    block = ParallelBlock(GELU)
    block.input_layernorm = nn.LayerNorm(32)
    assert isinstance(block.post_attention_layernorm, LayerNorm)
    assert block(torch.randn(1, 3, 32)).shape == (1, 3, 32)


def test_hooks_see_a_branch_alone():
    torch.manual_seed(0)
    block, x = ParallelBlock(CONFIG, dtype=torch.float64), torch.randn(1, 5, 32, dtype=torch.float64)
    seen = {}
    plain = block(x)
    for name in ("self_attn", "mlp", "input_layernorm"):
        block.get_submodule(name).register_forward_hook(lambda m, i, out, name=name: seen.__setitem__(name, out))
    torch.testing.assert_close(block(x), plain)
    torch.testing.assert_close(x + seen["self_attn"] + seen["mlp"], plain)
    assert seen["input_layernorm"].shape == x.shape


@pytest.mark.parametrize("options", [{}, pytest.param({"recompute": True}, marks=pytest.mark.nightly)], ids=str)
def test_dropout_compiles(options: dict[str, Any]):
    config = dataclasses.replace(CONFIG, residual_dropout=0.2, embedding_dropout=0.1)
    model = ParallelTransformer(config, dtype=torch.float64, **options)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    for each in (model, compiled):
        manual_seed(2)
        loss = each(TOKENS, TOKENS.roll(-1, 1))
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for mine, theirs in zip(*found):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dropped", [0.0, 0.3])
def test_recompute_keeps_one_tensor_for_each_block(dropped: float):
    config = dataclasses.replace(GELU, residual_dropout=dropped)
    block = ParallelBlock(config, recompute=True)
    x = torch.randn(2, 6, 32, requires_grad=True)
    branch = torch.randn(2, 6, 32, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        block((x, branch, None), join=False)
    assert sum(n for n in kept if n >= x.numel()) <= x.numel()


def _fsdp_body(rank: int, world: int) -> list[float]:
    losses = []
    for policy in (None, MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = ParallelTransformer(dataclasses.replace(CONFIG, max_positions=20000))
        model.init_weights(3)
        mesh = init_device_mesh("cpu", (world,))
        options = {} if policy is None else {"mp_policy": policy}
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        # Far from position 0 rounded angles would be other angles.
        loss = model(TOKENS, TOKENS.roll(-1, 1), positions=torch.arange(12) * 997)
        loss.backward()
        losses.append(loss.item())
    return losses


def test_fsdp_with_mixed_precision_leaves_the_angles_alone(ranks: Any):
    for exact, mixed in ranks(2, _fsdp_body):
        assert mixed == pytest.approx(exact, rel=0.01)


def test_positions_are_heard():
    model = ParallelTransformer(CONFIG, dtype=torch.float64)
    default = model(TOKENS)
    torch.testing.assert_close(model(TOKENS, positions=torch.arange(12)), default)
    torch.testing.assert_close(model(TOKENS, positions=torch.arange(12).expand(2, 12)), default)
    assert (model(TOKENS, positions=torch.arange(12).flip(0)) - default).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": torch.arange(3)}, r"positions \[3\]: expected \[12\] or \[2, 12\]"),
        ({"max_seqlen": 4}, "max_seqlen bounds the lengths of a packed batch"),
        ({"cache": object(), "targets": TOKENS}, "with a cache there are no targets"),
    ],
)
def test_arguments_that_would_be_ignored_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ParallelTransformer(CONFIG)(TOKENS, **options)


def test_packed_sequences_longer_than_the_model_are_refused():
    model = ParallelTransformer(dataclasses.replace(CONFIG, max_positions=8))
    cu_seqlens = torch.tensor([0, 12, 24], dtype=torch.int32)
    for options in ({}, {"max_seqlen": 12}):
        with pytest.raises(ValueError, match="a sequence of 12 tokens: this model was made for at most 8"):
            model(TOKENS.flatten(), cu_seqlens=cu_seqlens, **options)
    with pytest.raises(ValueError, match=r"cu_seqlens \[0\]: expected"):
        model(TOKENS.flatten(), cu_seqlens=cu_seqlens[:0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_window": 0}, "attention_window=0"),
        ({"attention_window": 2.5}, r"attention_window=2\.5"),
        ({"attention_softcap": -1.0}, r"attention_softcap=-1\.0"),
        ({"attention_sinks": "no"}, "attention_sinks='no'"),
        ({"attention_sinks": True, "attention_dropout": 0.1}, "attention_dropout=0.1 with a soft-cap or sinks"),
    ],
)
def test_configs_that_no_forward_could_take_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


def test_what_cannot_be_served_is_refused_at_once():
    with pytest.raises(ValueError, match=r"would drop activations: call model\.eval"):
        Engine(ParallelTransformer(dataclasses.replace(CONFIG, residual_dropout=0.1)), num_blocks=8)
    with pytest.raises(ValueError, match="kv_dtype='fp4': expected None or one of fp8, int8"):
        Engine(ParallelTransformer(CONFIG).eval(), num_blocks=8, kv_dtype="fp4")


def test_gemmas_norms_start_where_their_weights_are_kept():
    model = ParallelTransformer(dataclasses.replace(CONFIG, norm_offset=1.0), dtype=torch.float64)
    plain = ParallelTransformer(CONFIG, dtype=torch.float64)
    state = {name: value - 1 if "norm" in name else value for name, value in plain.state_dict().items()}
    model.load_state_dict(state)
    torch.testing.assert_close(model(TOKENS), plain(TOKENS))
    assert not any(
        value.any() for name, value in ParallelTransformer(model.config).state_dict().items() if "norm" in name
    )
    assert "weight_offset=1" in repr(model)


def test_no_tokens():
    model = ParallelTransformer(CONFIG)
    assert model(TOKENS[:, :0]).shape == (2, 0, 40)
