"""ParallelAttention beyond the plain causal case: packed batches, windows, soft-caps, sinks, dropout, ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfuse import ParallelAttention, ParallelTransformer, TransformerConfig, init_mesh, manual_seed, tp_group
from shardfuse.kernels.dev import accuracy
from shardfuse.layers import transformer
from shardfuse.layers.attention.attention import packed_positions
from shardfuse.layers.attention.rope import Rotary
from shardfuse.parallel.checkpoint.entries import full_state_dict
from shardfuse.parallel.core.random import sharded_draws
from shardfuse.parallel.zero.clip import GradientClipper

LENGTHS = (5, 1, 0, 9)
CU_SEQLENS = torch.tensor([0, 5, 6, 6, 15], dtype=torch.int32)
FEATURES = [{}, {"window": 3}, {"softcap": 1.5}, {"sinks": True}, {"window": 4, "softcap": 2.0, "sinks": True}]


def _attention(mesh: Any = None, dtype: torch.dtype = torch.float64, **options: Any) -> ParallelAttention:
    torch.manual_seed(2)
    attention = ParallelAttention(32, 4, 2, mesh=mesh, dtype=dtype, **options)
    if attention.sinks is not None:
        with torch.no_grad():
            (sinks,) = attention.local("sinks")
            first = attention.group.rank * len(sinks)
            sinks.copy_(torch.linspace(-1, 1, 4)[first : first + len(sinks)])
    return attention


def _plain(attention: ParallelAttention, x: torch.Tensor) -> torch.Tensor:
    """One sequence [S, D] in plain torch."""
    length, rotary = len(x), attention.rotary
    q, k, v = (
        layer(x).unflatten(-1, (-1, 8)).transpose(0, 1)
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    angles = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    assert rotary == Rotary(8)

    def turn(t: torch.Tensor) -> torch.Tensor:
        first, second = t.chunk(2, -1)
        cos, sin = angles.float().cos(), angles.float().sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    q, k, v = turn(q), turn(k).repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    scores = q @ k.transpose(1, 2) * 8**-0.5
    if attention.softcap is not None:
        scores = attention.softcap * (scores / attention.softcap).tanh()
    ago = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (ago < 0) | (ago >= (attention.window or length + 1))
    scores = scores.masked_fill(hidden, float("-inf"))
    if attention.sinks is not None:
        sinks = attention.sinks[:, None, None].expand(-1, length, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return attention.o_proj((weights @ v).transpose(0, 1).flatten(1))


@pytest.mark.parametrize("options", FEATURES, ids=str)
def test_packed_batches_are_sequences_by_themselves(options: dict[str, Any]):
    attention = _attention(**options)
    x = torch.randn(sum(LENGTHS), 32, dtype=torch.float64, requires_grad=True)
    out = attention(x, cu_seqlens=CU_SEQLENS, max_seqlen=max(LENGTHS))
    parts = [_plain(attention, part) for part in x.split(LENGTHS)]
    expected = torch.cat(parts)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)  # the tables of cosines are fp32
    leaves = [x, *attention.parameters()]
    cotangent = torch.randn_like(out)
    for found, wanted in zip(
        torch.autograd.grad(out, leaves, cotangent), torch.autograd.grad(expected, leaves, cotangent)
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", FEATURES, ids=str)
def test_batches_of_equal_length(options: dict[str, Any]):
    attention = _attention(**options)
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    expected = torch.stack([_plain(attention, each) for each in x])
    torch.testing.assert_close(attention(x), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(attention(x.flatten(0, 1), batch_size=2), attention(x).flatten(0, 1))


def test_no_tokens():
    attention = _attention()
    for shape in ((2, 0, 32), (0, 3, 32)):
        assert attention(torch.zeros(shape, dtype=torch.float64)).shape == shape
    nothing = torch.zeros(0, 32, dtype=torch.float64)
    assert attention(nothing, cu_seqlens=torch.zeros(2, dtype=torch.int32)).shape == (0, 32)


def test_positions_of_a_packed_batch():
    assert packed_positions(CU_SEQLENS, 15).tolist() == [*range(5), 0, *range(9)]


def _ranks_body(rank: int, world: int, options: dict[str, Any]) -> torch.Tensor:
    whole, split = _attention(**options), _attention(init_mesh(tp=world), **options)
    for name, value in full_state_dict(split).items():
        assert torch.equal(value, whole.state_dict()[name]), name
    x = torch.randn(15, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    error = accuracy.relative_error(split(x, cu_seqlens=CU_SEQLENS), whole(x, cu_seqlens=CU_SEQLENS))
    assert error < 1e-12
    grads = [
        torch.autograd.grad(each(x, cu_seqlens=CU_SEQLENS).square().sum(), each.parameters()) for each in (split, whole)
    ]
    for (name, _), mine, theirs in zip(whole.named_parameters(), *grads):
        assert accuracy.within(name, mine.full_tensor(), theirs, 1e-10).ok, name
    return x


@pytest.mark.parametrize("options", [{}, {"window": 4, "softcap": 2.0, "sinks": True}], ids=str)
def test_heads_may_be_split_over_ranks(ranks: Any, options: dict[str, Any]):
    ranks(2, _ranks_body, options)


def _dropout_body(rank: int, world: int) -> tuple[list[float], list[float], int]:
    mesh = init_mesh(tp=world)
    manual_seed(3, mesh)
    with sharded_draws(tp_group(mesh), torch.device("cpu")):
        mine = torch.rand(3).tolist()
    with sharded_draws(tp_group(mesh), torch.device("cpu")):
        next_ones = torch.rand(3).tolist()
    attention = _attention(mesh, torch.float32, dropout_p=0.5).train()
    x = torch.randn(2, 7, 32)
    manual_seed(4, mesh)
    first = attention(x)
    manual_seed(4, mesh)
    assert torch.equal(attention(x), first)
    assert not torch.equal(attention(x), first)
    assert torch.equal(attention.eval()(x), attention(x))
    return mine, next_ones, int(torch.randint(1 << 60, (1,)))


def test_attention_dropout_differs_between_ranks_and_leaves_them_alike(ranks: Any):
    (first, second, after), (other, other_second, other_after) = ranks(2, _dropout_body)
    assert len({*map(tuple, (first, second, other, other_second))}) == 4
    assert after == other_after


def test_a_packed_batch_of_another_shape_is_refused():
    attention = _attention(window=4)
    with pytest.raises(ValueError, match=r"a packed batch wants x \[T, D\]"):
        attention(torch.zeros(1, 15, 32, dtype=torch.float64), cu_seqlens=CU_SEQLENS)


@pytest.mark.parametrize("style", ["gelu", "gated"])
def test_a_model_of_a_packed_batch_sees_sequences_by_themselves(style: str):
    config = TransformerConfig(
        style=style, vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4
    )
    model = ParallelTransformer(config, dtype=torch.float64)
    tokens = torch.randint(40, (15,))
    logits = model(tokens, cu_seqlens=CU_SEQLENS, max_seqlen=9)
    parts = [model(part[None])[0] for part in tokens.split(LENGTHS) if len(part)]
    torch.testing.assert_close(logits, torch.cat(parts), rtol=1e-9, atol=1e-12)
    targets = tokens.roll(-1)
    loss = model(tokens, targets, cu_seqlens=CU_SEQLENS)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, targets))
    with pytest.raises(ValueError, match=r"with cu_seqlens, expected tokens \[T\]"):
        model(tokens[None], cu_seqlens=CU_SEQLENS)


def _fused_loss(mesh: Any, **options: Any) -> list[float]:
    config = TransformerConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4)
    model = ParallelTransformer(config, mesh=mesh, dtype=torch.float64, **options)
    model.init_weights(3)
    tokens = torch.arange(24).view(2, 12) * 7 % 40
    found = []
    with pytest.MonkeyPatch.context() as patch:  # the processes that ranks run in outlive a test
        for limit in (1 << 30, 0):
            patch.setattr(transformer, "FUSED_LOSS_BYTES", limit)
            loss = model(tokens, tokens.roll(-1, 1))
            loss.backward()
            found += [loss.item(), GradientClipper(model.parameters(), 1.0, model.group).clip().item()]
            model.zero_grad()
    return found


def _fused_loss_body(rank: int, world: int, options: dict[str, Any]) -> list[float]:
    return _fused_loss(init_mesh(tp=world), **options)


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"fuse_wgrad_accumulation": False}], ids=str)
def test_the_loss_is_the_same_whether_logits_are_stored_or_not(ranks: Any, options: dict[str, Any]):
    plain = _fused_loss(None, **options)
    assert plain[:2] == pytest.approx(plain[2:], rel=1e-9)
    for found in ranks(2, _fused_loss_body, options):
        assert found == pytest.approx(plain, rel=1e-9)
