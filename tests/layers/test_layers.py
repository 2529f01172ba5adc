"""The layers in one process: the stock modules' parameters, numbers and errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from shardfuse import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelAttention,
    ParallelBlock,
    ParallelMLP,
    RMSNorm,
    RowParallelLinear,
    TransformerConfig,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from shardfuse.bench.harness.gate import join_layers
from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.rope import apply_rope
from shardfuse.kernels.runtime import dispatch
from shardfuse.layers.attention.rope import Rotary, rope_tables
from shardfuse.parallel.core.mesh import Group


class StockMLP(nn.Module):
    """ParallelMLP in torch's own modules, under the same names."""

    def __init__(self, hidden: int, ffn: int, activation: Any, gated: bool, bias: bool) -> None:
        super().__init__()
        self.activation, self.gated = activation, gated
        if gated:
            self.gate_proj = nn.Linear(hidden, ffn, bias)
            self.up_proj = nn.Linear(hidden, ffn, bias)
            self.down_proj = nn.Linear(ffn, hidden, bias)
        else:
            self.c_fc = nn.Linear(hidden, ffn, bias)
            self.c_proj = nn.Linear(ffn, hidden, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gated:
            return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return self.c_proj(self.activation(self.c_fc(x)))


class StockAttention(nn.Module):
    """ParallelAttention written out: complex rotation, repeated KV heads, a masked softmax."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, heads * head_dim)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim)
        self.o_proj = nn.Linear(heads * head_dim, hidden)
        self.groups, self.head_dim = heads // kv_heads, head_dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotate(q), _rotate(k).repeat_interleave(self.groups, 2)
        v = v.repeat_interleave(self.groups, 2)
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) * self.head_dim**-0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        return self.o_proj(torch.einsum("bnqk,bknh->bqnh", scores.softmax(-1), v).flatten(2))


def _rotate(x: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    """[B, S, heads, H] turned by position, pairs (i, i + H/2) read as complex numbers."""
    length, half = x.shape[1], x.shape[3] // 2
    frequencies = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(()).double(), torch.arange(length)[:, None] * frequencies)[:, None]
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat((z.real, z.imag), -1).to(x.dtype)


def _run(module: nn.Module, x: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Output and every gradient, for a loss that weighs each output element differently."""
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    module.zero_grad()
    y = module(x, **kwargs)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    (y * weight).sum().backward()
    out = {"y": y.detach()}
    if x.grad is not None:
        out["dx"] = x.grad
    return out | {f"d{name}": param.grad for name, param in module.named_parameters()}


def _terms(stock: nn.Module, x: torch.Tensor) -> int:
    """As if its products and sums followed one another, forward and backward."""
    return x.numel() // x.shape[-1] + sum(sum(param.shape) for param in stock.parameters())


def _agree(ours: nn.Module, stock: nn.Module, x: torch.Tensor) -> None:
    """``ours`` loads ``stock``'s state and is as close to fp64 as it, forward and backward."""
    ours.load_state_dict(stock.state_dict())
    double = x.double() if x.is_floating_point() else x
    oracle = _run(copy.deepcopy(stock).double(), double)
    low = _run(stock, x)
    results = _run(ours, x)
    assert results.keys() == low.keys()
    for name, out in results.items():
        verdict = accuracy.judge(name, out, low[name], oracle[name], terms=_terms(stock, x))
        assert verdict.ok, verdict


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("shape", [(7, 12), (2, 3, 12), (12,), (0, 12)], ids=str)
def test_linear_is_nn_linear(layer: Any, bias: bool, shape: tuple[int, ...]):
    _agree(layer(12, 20, bias), nn.Linear(12, 20, bias), torch.randn(shape))


def test_column_linear_applies_its_activation():
    layer = ColumnParallelLinear(6, 8, activation="relu")
    x = torch.randn(5, 6)
    assert torch.equal(layer(x), F.relu(F.linear(x, layer.weight, layer.bias)))


@pytest.mark.parametrize(
    ("activation", "stock", "gated"),
    [
        ("gelu_tanh", lambda z: F.gelu(z, approximate="tanh"), False),
        ("gelu_erf", F.gelu, False),
        ("silu", F.silu, True),
        ("gelu_tanh", lambda z: F.gelu(z, approximate="tanh"), True),
    ],
    ids=["gelu_tanh", "gelu_erf", "swiglu", "geglu"],
)
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_is_the_stock_mlp(activation: str, stock: Any, gated: bool, bias: bool):
    ours = ParallelMLP(16, 24, activation=activation, gated=gated, bias=bias)
    _agree(ours, StockMLP(16, 24, stock, gated, bias), torch.randn(2, 5, 16))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 8), (4, 2, 8), (6, 1, 4)], ids=["mha", "gqa", "mqa-narrow"]
)
def test_attention_is_written_out_attention(heads: int, kv_heads: int, head_dim: int):
    ours = ParallelAttention(32, heads, kv_heads, head_dim=head_dim)
    _agree(ours, StockAttention(32, heads, kv_heads, head_dim), torch.randn(2, 9, 32))


def test_attention_over_flat_tokens_is_the_same():
    attention = ParallelAttention(16, 4, 2)
    x = torch.randn(3, 5, 16)
    assert torch.equal(attention(x.view(15, 16), batch_size=3).view_as(x), attention(x))


def test_attention_does_not_look_ahead_nor_across_sequences():
    attention = ParallelAttention(16, 4, 2)
    x = torch.randn(2, 6, 16)
    changed = x.clone()
    changed[0, 3:] += 1
    before, after = attention(x), attention(changed)
    assert torch.equal(before[0, :3], after[0, :3])
    assert torch.equal(before[1], after[1])
    assert not torch.isclose(before[0, 3:], after[0, 3:]).all(-1).any()


def test_attention_takes_positions_per_token_or_shared():
    attention = ParallelAttention(16, 4, 2)
    x = torch.randn(2, 6, 16)
    default = attention(x)
    assert torch.equal(attention(x, positions=torch.arange(6)), default)
    assert torch.equal(attention(x, positions=torch.arange(6).repeat(2)), default)
    # Attention sees differences of positions only; a stretch is another thing.
    torch.testing.assert_close(attention(x, positions=torch.arange(6) + 5), default, rtol=0, atol=1e-6)
    assert (attention(x, positions=torch.arange(6) * 3) - default).abs().max() > 1e-4


def test_attention_hands_its_heads_and_their_rotation_to_a_cache():
    attention = ParallelAttention(16, 4, 2, layer_index=3, window=6, softcap=9.0, sinks=True)
    x, positions = torch.randn(5, 16), torch.tensor([4, 0, 1, 2, 7])
    seen = {}

    class Cache:
        def attend(self, layer_index, q, k, v, **options):
            seen.update(layer_index=layer_index, q=q, k=k, v=v, **options)
            return q

    out = attention(x, positions=positions, cache=Cache())
    q, k = attention.q_proj(x).view(5, 4, 4), attention.k_proj(x).view(5, 2, 4)
    assert (seen["layer_index"], seen["scale"], seen["interleaved"]) == (3, 0.5, False)
    assert (seen["window"], seen["softcap"]) == (6, 9.0)
    assert torch.equal(seen["sinks"], attention.sinks)
    assert all(map(torch.equal, seen["rope"], rope_tables(positions, Rotary(4))))
    assert torch.equal(seen["q"], q)
    assert torch.equal(seen["k"], k)
    assert torch.equal(seen["v"], attention.v_proj(x).view(5, 2, 4))
    assert torch.equal(out, attention.o_proj(q.reshape(5, 16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_rope_rotates_in_the_inputs_dtype(dtype: torch.dtype):
    x = torch.randn(2, 40, 3, 16).to(dtype)
    out, _ = apply_rope(x, None, *rope_tables(torch.arange(40), Rotary(16)))
    assert out.dtype == dtype
    # The tables are fp32 in every precision: the last place of a frequency turns the last position by its angle.
    angle = 39 * 10000 ** (-2 / 16)
    allowed = max(accuracy.rounding(dtype), angle * accuracy.rounding(torch.float32))
    assert accuracy.within("rotated", out, _rotate(x.double()), 2 * allowed).ok


@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12), (0, 12)], ids=str)
@pytest.mark.parametrize(
    ("ours", "stock"),
    [
        (lambda: LayerNorm(12), lambda: nn.LayerNorm(12)),
        (lambda: LayerNorm(12, bias=False), lambda: nn.LayerNorm(12, bias=False)),
        (lambda: RMSNorm(12, eps=1e-5), lambda: nn.RMSNorm(12, eps=1e-5)),
    ],
    ids=["layer", "layer-no-bias", "rms"],
)
def test_norms_are_torchs(ours: Any, stock: Any, shape: tuple[int, ...]):
    _agree(ours(), stock(), torch.randn(shape))


def test_embedding_is_nn_embedding():
    _agree(VocabParallelEmbedding(20, 8), nn.Embedding(20, 8), torch.randint(0, 20, (3, 4)))


@pytest.mark.parametrize("token", [-1, 20])
def test_embedding_names_a_token_outside_the_vocabulary(token: int):
    with pytest.raises(ValueError, match=f"token {token} is outside the vocabulary of 20"):
        VocabParallelEmbedding(20, 8)(torch.tensor([3, token]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_is_torchs(reduction: str, dtype: torch.dtype):
    logits, targets = torch.randn(6, 11).to(dtype), torch.tensor([0, 10, -100, 3, 3, -100])
    out = vocab_parallel_cross_entropy(logits, targets, reduction=reduction)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(out, F.cross_entropy(logits.to(wide), targets, reduction=reduction))


def test_cross_entropy_refuses_what_does_not_fit():
    logits = torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"logits \[T, V/R\] and targets \[T\].*\[4, 8\].*\[3\]"):
        vocab_parallel_cross_entropy(logits, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="target 8 is neither in the vocabulary of 8 nor"):
        vocab_parallel_cross_entropy(logits, torch.tensor([0, 8, 1, -100]))
    with pytest.raises(ValueError, match="reduction='median'"):
        vocab_parallel_cross_entropy(logits, torch.zeros(4, dtype=torch.long), reduction="median")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda mesh: ColumnParallelLinear(8, 10, mesh=mesh), r"out_features=10.*4 tensor-parallel ranks.*8 or 12"),
        (lambda mesh: RowParallelLinear(6, 8, mesh=mesh), r"in_features=6.*4 tensor-parallel ranks.*4 or 8"),
        (lambda mesh: ParallelMLP(8, 18, mesh=mesh), r"ffn_size=18.*4 tensor-parallel ranks"),
        (lambda mesh: ParallelAttention(12, 6, mesh=mesh), r"num_heads=6.*4 tensor-parallel ranks"),
        (lambda mesh: ParallelAttention(32, 8, 2, mesh=mesh), r"num_kv_heads=2.*4 tensor-parallel ranks.*such as 4"),
        (lambda mesh: VocabParallelEmbedding(50, 8, mesh=mesh), r"vocab_size=50.*4 tensor-parallel ranks.*48 or 52"),
    ],
    ids=["column", "row", "mlp", "heads", "kv-heads", "vocabulary"],
)
def test_sizes_that_do_not_divide_are_refused(build: Any, message: str):
    with pytest.raises(ValueError, match=message):
        build(Group(None, 0, 4, None))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ColumnParallelLinear(8, 8, activation="swish"), "activation='swish': expected one of"),
        (lambda: ParallelMLP(8, 8, gated=True, activation="swish"), "activation='swish': expected one of"),
        (lambda: ColumnParallelLinear(8, 8, params="plain"), "params='plain': expected one of dtensor, local"),
        (lambda: ParallelAttention(30, 4), "hidden_size=30 is not a multiple of num_heads=4"),
        (lambda: ParallelAttention(32, 4, 3), "num_heads=4 is not a multiple of num_kv_heads=3"),
        (lambda: ParallelAttention(12, 4), "head_dim=3 is odd"),
        (lambda: ParallelAttention(8, 2)(torch.randn(4, 8)), "wants batch_size"),
        (lambda: ParallelAttention(8, 2)(torch.randn(4, 8), batch_size=3), "batch_size=3 does not divide the 4 tokens"),
        (lambda: ParallelAttention(8, 2)(torch.randn(1, 4, 8), positions=torch.arange(3)), r"positions \[3\]"),
        (lambda: TransformerConfig(style="moe"), "style='moe': expected one of gelu, gated"),
        (lambda: TransformerConfig(num_layers=0), "num_layers=0: expected at least 1"),
        (lambda: TransformerConfig(num_heads=8, num_kv_heads=3), "num_heads=8 is not a multiple of num_kv_heads=3"),
    ],
)
def test_what_cannot_work_is_refused(build: Any, message: str):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parametrised_weight_or_bias_is_read(name: str):
    class Negated(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -x

    x = torch.randn(2, 3, 8)
    layers: list[Any] = [
        ColumnParallelLinear(8, 4),
        RowParallelLinear(8, 4),
        ParallelMLP(8, 16),
        ParallelAttention(8, 2),
    ]
    for layer in layers:
        before = layer(x)
        linear = getattr(layer, "q_proj", getattr(layer, "c_proj", layer))
        parametrize.register_parametrization(linear, name, Negated())
        changed = layer(x)
        assert not torch.equal(changed, before)
        with torch.no_grad():
            getattr(linear.parametrizations, name).original.neg_()
        torch.testing.assert_close(layer(x), before)


def test_a_fresh_linear_starts_as_nn_linear_does():
    layer = ColumnParallelLinear(64, 512)
    for param in layer.parameters():
        assert param.abs().max() <= 1 / 8
        assert param.std().item() == pytest.approx(3**-0.5 / 8, rel=0.1)  # of a uniform distribution


def test_weights_follow_the_global_seed_and_a_given_one():
    def build(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return ParallelMLP(8, 16).c_fc.weight.detach()

    assert torch.equal(build(1), build(1))
    assert not torch.equal(build(1), build(2))
    layer = ColumnParallelLinear(8, 16)
    layer.reset_parameters(5)
    first = layer.weight.clone()
    state = torch.get_rng_state()
    layer.reset_parameters(5)
    assert torch.equal(layer.weight, first)
    assert torch.equal(torch.get_rng_state(), state)  # a given seed takes nothing from the global generator


def _block(**kwargs: Any) -> ParallelBlock:
    return ParallelBlock(TransformerConfig(hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2, **kwargs))


def _runs(module: nn.Module) -> dict[str, list[str]]:
    device = torch.device("cpu")
    return {name: [op for op, _ in layer.runs(device)] for name, layer in module.named_children()}


def test_layers_say_which_op_runs_with_their_parameters():
    assert _runs(ParallelMLP(8, 16)) == {"c_fc": ["linear_act"], "c_proj": ["linear_act"]}
    gated = ParallelMLP(8, 16, gated=True)
    assert _runs(gated) == {"gate_proj": ["gated_linear"], "up_proj": ["gated_linear"], "down_proj": ["linear_act"]}
    for recompute in (0, 1):  # apart and as one function
        gated.recompute = recompute
        dispatch.counts.clear()
        gated(torch.randn(3, 8))
        assert dispatch.counts == {("gated_linear", "reference"): 1, ("linear_act", "reference"): 1}


def test_a_block_hands_its_options_on():
    config = TransformerConfig(hidden_size=16, intermediate_size=32, num_heads=4)
    block = ParallelBlock(config, mlp_recompute=2, fuse_wgrad_accumulation=True)
    assert block.mlp.recompute == 2
    fused = [module for module in block.modules() if getattr(module, "fuse_wgrad_accumulation", False)]
    assert len(fused) == 7  # the MLP and six linear layers
    with pytest.raises(ValueError, match="recompute=5: expected 0"):
        ParallelBlock(config, mlp_recompute=5)


@pytest.mark.parametrize("style", ["gelu", "gated"])
@pytest.mark.parametrize("level", [1, 2])
def test_an_mlp_that_keeps_less_gives_the_same_gradients(style: str, level: int):
    stock, ours = _block(style=style), _block(style=style)
    ours.mlp.recompute = level
    for recompute in (False, True):  # of the whole block, around it
        ours.recompute = recompute
        _agree(ours, stock, torch.randn(2, 6, 16))


@pytest.mark.parametrize("style", ["gelu", "gated"])
def test_a_recomputed_block_gives_the_same_gradients(style: str):
    block = _block(style=style)
    x = torch.randn(2, 6, 16)
    kept = {name: out.clone() for name, out in _run(block, x).items()}
    block.recompute = True
    dispatch.counts.clear()
    again = _run(block, x)
    assert dispatch.counts["linear_act", "reference"] > 4  # the forward ran twice, up to its last product
    for name, out in again.items():
        assert torch.equal(out, kept[name]), name


@pytest.mark.parametrize("build", [lambda: ParallelMLP(16, 32), lambda: ParallelAttention(16, 4, 2), _block])
def test_compiles_without_a_graph_break(build: Any):
    module = build()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for batch in (2, 3):  # the second size makes the batch dynamic
        x = torch.randn(batch, 6, 16)
        eager, graph = _run(module, x), _run(compiled, x)
        for name, out in graph.items():
            name = name.replace("_orig_mod.", "")
            torch.testing.assert_close(out, eager[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("style", ["gelu", "gated"])
def test_autocast_to_bf16_costs_what_bf16_costs(style: str):
    block = _block(style=style)
    x = torch.randn(2, 6, 16)
    oracle = _run(copy.deepcopy(block).double(), x.double())
    low = _run(copy.deepcopy(block).bfloat16(), x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        out = _run(block, x)
    assert all(value.dtype == torch.float32 for value in out.values())
    joined, plain, exact = (join_layers(each) for each in (out, low, oracle))  # a key's bias has no gradient but noise
    for name, value in joined.items():
        budget = accuracy.FACTOR * max(
            accuracy.relative_error(plain[name], exact[name]), accuracy.rounding(torch.bfloat16, roundings=4)
        )
        verdict = accuracy.within(name, value, exact[name], budget)
        assert verdict.ok, verdict
    product = "dself_attn.q_proj.weight"
    assert accuracy.relative_error(out[product], oracle[product]) > 1e-4  # bf16 was really used


@pytest.mark.interpret
@pytest.mark.skipif(not dispatch.interpreting(), reason="CPU tensors: the kernels must be interpreted")
def test_an_mlp_trains_through_the_kernels():
    """Five steps of Adam with interpreted kernels, forward and backward, against the reference."""
    dispatch.choose("linear_act", torch.device("cpu"), "triton")  # fails at once where nothing is interpreted
    x, y = torch.randn(9, 20), torch.randn(9, 20)

    def train(impl: str, dtype: torch.dtype) -> list[float]:
        mlp = ParallelMLP(20, 36, impl=impl, dtype=dtype)
        for index, module in enumerate(mlp.children()):
            module.reset_parameters(index)
        optimizer = torch.optim.Adam(mlp.parameters(), lr=1e-2)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = F.mse_loss(mlp(x.to(dtype)), y.to(dtype))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    dispatch.counts.clear()
    ours = torch.tensor(train("triton", torch.float32))
    assert dispatch.counts["linear_act", "triton"] == 10
    assert ours[4] < ours[0]
    low = torch.tensor(train("reference", torch.float32))
    verdict = accuracy.judge(
        "losses", ours, low, torch.tensor(train("reference", torch.float64)).double(), terms=5 * (20 + 36)
    )
    assert verdict.ok, verdict
