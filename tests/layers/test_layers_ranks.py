"""Every layer over 2 and 4 ranks against itself on one, in fp64: outputs, input gradients, parameter gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

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
from shardfuse.kernels.dev import accuracy
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import Group, tp_group
from shardfuse.parallel.core.sharding import local_tensor, spec_of

pytestmark = pytest.mark.ranks

TOKENS, WIDTH, FFN, VOCABULARY = 12, 16, 24, 20
WHOLE = None  # an input or output that every rank holds whole; otherwise the dimension it is split along


@dataclass(frozen=True)
class Layer:
    """How to build a layer, what it reads, and how its input and output lie over the ranks."""

    build: Callable[..., nn.Module]
    shape: tuple[int, ...] = (TOKENS, WIDTH)  # of the logical input
    x_split: int | None = WHOLE
    y_split: int | None = WHOLE
    x_split_sp: int | None = 0  # the same with sequence parallelism; tokens are dimension 0
    y_split_sp: int | None = 0
    call: dict[str, Any] | None = None


def _config(style: str) -> TransformerConfig:
    return TransformerConfig(style=style, hidden_size=WIDTH, intermediate_size=FFN, num_heads=8, num_kv_heads=4)


BATCHED = {"batch_size": 3}
LAYERS = {
    "column": Layer(lambda **k: ColumnParallelLinear(WIDTH, FFN, **k), y_split=1, y_split_sp=1),
    "column-3d": Layer(lambda **k: ColumnParallelLinear(WIDTH, FFN, **k), shape=(2, 3, WIDTH), y_split=2),
    "column-gathered": Layer(lambda **k: ColumnParallelLinear(WIDTH, FFN, gather_output=True, **k), y_split_sp=WHOLE),
    "row": Layer(lambda **k: RowParallelLinear(FFN, WIDTH, **k), shape=(TOKENS, FFN), x_split=1, x_split_sp=1),
    "row-no-bias": Layer(
        lambda **k: RowParallelLinear(FFN, WIDTH, bias=False, **k), shape=(TOKENS, FFN), x_split=1, x_split_sp=1
    ),
    "mlp": Layer(lambda **k: ParallelMLP(WIDTH, FFN, **k)),
    "mlp-3d": Layer(lambda **k: ParallelMLP(WIDTH, FFN, **k), shape=(2, 3, WIDTH)),
    "mlp-gated": Layer(lambda **k: ParallelMLP(WIDTH, FFN, gated=True, **k)),
    "attention": Layer(lambda **k: ParallelAttention(WIDTH, 8, 4, **k), call=BATCHED),
    "attention-3d": Layer(lambda **k: ParallelAttention(WIDTH, 8, 4, **k), shape=(2, 5, WIDTH)),
    "block-gelu": Layer(lambda **k: ParallelBlock(_config("gelu"), **k), call=BATCHED),
    "block-gated": Layer(lambda **k: ParallelBlock(_config("gated"), **k), call=BATCHED),
    "block-recomputed": Layer(lambda **k: ParallelBlock(_config("gelu"), recompute=True, **k), call=BATCHED),
    "layer-norm": Layer(lambda **k: LayerNorm(WIDTH, **k)),
    "rms-norm": Layer(lambda **k: RMSNorm(WIDTH, **k)),
    "embedding": Layer(lambda **k: VocabParallelEmbedding(VOCABULARY, WIDTH, **k), shape=(TOKENS,), x_split_sp=WHOLE),
}


def _part(t: torch.Tensor, dim: int | None, group: Group) -> torch.Tensor:
    return t if dim is WHOLE else t.chunk(group.size, dim)[group.rank]


def _run(module: nn.Module, x: torch.Tensor, dy: torch.Tensor | None, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Output and gradients; ``dy`` None weighs each element of the output differently."""
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    y = module(x, **call)
    if dy is None:
        dy = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y.backward(dy.to(y.dtype))
    out = {"y": y.detach(), "dy": dy}
    if x.grad is not None:
        out["dx"] = x.grad
    return out | {f"d{name}": param.grad for name, param in module.named_parameters()}


def _fill(module: nn.Module) -> None:
    """Random norms and biases, the same logical ones in every module: constants would hide mistakes."""
    for index, param in enumerate(module.parameters()):
        spec = spec_of(param)
        if len(spec.logical_shape) == 1:
            whole = torch.randn(spec.logical_shape, generator=torch.Generator().manual_seed(index))
            with torch.no_grad():
                local_tensor(param).copy_(whole[spec.index])


def _layer_body(rank: int, world: int, name: str, sequence_parallel: bool, params: str) -> list[tuple[str, bool]]:
    """One verdict per output and gradient: this rank's part against that of the layer on one rank."""
    layer, group, call = LAYERS[name], tp_group(dist.group.WORLD), LAYERS[name].call or {}
    x = torch.randint(VOCABULARY, layer.shape) if name == "embedding" else torch.randn(layer.shape).double()

    def build(dtype: torch.dtype, **options: Any) -> nn.Module:
        torch.manual_seed(7)  # equal weights at every size of the group
        module = layer.build(dtype=dtype, **options)
        _fill(module)
        return module

    oracle = _run(build(torch.float64), x, None, call)
    low = _run(build(torch.float32), x.float() if x.is_floating_point() else x, oracle["dy"], call)

    split = {"x": layer.x_split, "y": layer.y_split}
    if sequence_parallel:
        split = {"x": layer.x_split_sp, "y": layer.y_split_sp}
    split |= {"dx": split["x"], "dy": split["y"]}
    module = build(torch.float64, mesh=group, sequence_parallel=sequence_parallel, params=params)
    ours = _run(module, _part(x, split["x"], group), _part(oracle["dy"], split["dy"], group), call)
    assert ours.keys() == oracle.keys()

    verdicts = []
    for key, out in ours.items():
        dim = split[key] if key in split else spec_of(module.get_parameter(key[1:])).shard_dim
        parts = (_part(whole[key], dim, group) for whole in (low, oracle))
        verdict = accuracy.judge(key, local_tensor(out), *parts, terms=2 * (WIDTH + FFN))
        verdicts.append((str(verdict), verdict.ok))
    return verdicts


def _cases() -> list[Any]:
    return [
        pytest.param(name, world, sequence_parallel, params, id=f"{name}-{world}-{params}{'-sp' * sequence_parallel}")
        for name, layer in LAYERS.items()
        for world, params in ((2, "dtensor"), (2, "local"), (4, "dtensor"))
        for sequence_parallel in ((False, True) if len(layer.shape) < 3 else (False,))
    ]


@pytest.mark.parametrize(("name", "world", "sequence_parallel", "params"), _cases())
def test_layer_over_ranks_is_the_layer_on_one(ranks: Any, name: str, world: int, sequence_parallel: bool, params: str):
    for rank, verdicts in enumerate(ranks(world, _layer_body, name, sequence_parallel, params)):
        assert len(verdicts) >= 3
        wrong = [text for text, ok in verdicts if not ok]
        assert not wrong, f"rank {rank}: {wrong}"


def _loss_body(rank: int, world: int, reduction: str, dtype: torch.dtype) -> list[tuple[str, bool]]:
    group = tp_group(dist.group.WORLD)
    logits = (torch.randn(TOKENS, VOCABULARY) * 4).to(dtype)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    targets[2] = targets[5] = -100
    weight = torch.rand(TOKENS)  # of each token's loss, so that rows differ

    def run(loss_fn: Callable[..., torch.Tensor], logits: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
        logits = logits.clone().requires_grad_()
        loss = loss_fn(logits, targets, *args, reduction=reduction)
        scale = weight.to(loss.dtype) if reduction == "none" else torch.tensor(3.0, dtype=loss.dtype)
        (loss * scale).sum().backward()
        return loss.detach(), logits.grad

    shard = _part(logits, 1, group)
    collectives.reset_counts()
    ours = run(vocab_parallel_cross_entropy, shard, group)
    assert sum(collectives.calls.values()) == 2
    assert max(collectives.payload.values()) <= 2 * TOKENS * 8  # two numbers per token: logits stay where they are
    assert ours[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert ours[1].dtype == dtype
    oracle = run(F.cross_entropy, logits.double())
    low = run(F.cross_entropy, logits if dtype == torch.bfloat16 else logits.float())
    verdicts = [
        accuracy.judge("loss", ours[0], low[0], oracle[0], terms=logits.shape[-1]),
        accuracy.judge("dlogits", ours[1], _part(low[1], 1, group), _part(oracle[1], 1, group), terms=logits.shape[-1]),
    ]
    return [(str(verdict), verdict.ok) for verdict in verdicts]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_vocab_parallel_cross_entropy_is_torchs(ranks: Any, reduction: str, dtype: torch.dtype):
    for verdicts in ranks(2, _loss_body, reduction, dtype):
        assert all(ok for _, ok in verdicts), verdicts


def _loss_twice_body(rank: int, world: int) -> bool:
    """A graph that is kept gives its gradient again, although backward reuses the softmax's buffer."""
    group = tp_group(dist.group.WORLD)
    logits, targets = torch.randn(TOKENS, 6, requires_grad=True), torch.randint(12, (TOKENS,))
    loss = vocab_parallel_cross_entropy(logits, targets, group)
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    first = first.clone()
    (second,) = torch.autograd.grad(loss, logits)
    return torch.equal(first, second)


def test_cross_entropy_of_a_kept_graph(ranks: Any):
    assert ranks(2, _loss_twice_body) == [True, True]


def _errors_body(rank: int, world: int) -> list[str]:
    group = tp_group(dist.group.WORLD)
    calls = [
        lambda: VocabParallelEmbedding(8, 4, mesh=group)(torch.tensor([1, 8])),
        lambda: vocab_parallel_cross_entropy(torch.randn(2, 4), torch.tensor([1, 8]), group),
        lambda: ParallelMLP(4, 8, mesh=group, sequence_parallel=True)(torch.randn(1, 4, 4)),
        lambda: RowParallelLinear(4, 8, mesh=group, sequence_parallel=True)(torch.randn(3, 2)),
    ]
    messages = []
    for call in calls:
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_bad_input_is_refused_on_every_rank_before_anything_is_sent(ranks: Any):
    expected = [
        "token 8 is outside the vocabulary of 8",
        "target 8 is neither in the vocabulary of 8",
        "with sequence parallelism x is [T/R, D]",
        "dimension 0 of a tensor of shape [3, 8] does not divide by the group's 2 ranks",
    ]
    for messages in ranks(2, _errors_body):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def _weights_body(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Every logical parameter of a block, on every rank."""
    torch.manual_seed(3)
    group = tp_group(dist.group.WORLD if world > 1 else None)
    block = ParallelBlock(_config("gelu"), mesh=group)
    whole = {}
    for name, param in block.named_parameters():
        dim = spec_of(param).shard_dim
        local = local_tensor(param).detach()
        whole[name] = local if dim is None else collectives.all_gather(local, group, dim=dim, site="test")
    return whole


def test_one_seed_gives_the_same_bits_at_every_degree(ranks: Any):
    (alone,) = ranks(1, _weights_body)
    assert len({tuple(t.flatten()[:4].tolist()) for t in alone.values() if t.dim() == 2}) == 6  # all drawn apart
    for world in (2, 4):
        for whole in ranks(world, _weights_body):
            assert whole.keys() == alone.keys()
            for name, param in whole.items():
                assert torch.equal(param, alone[name]), (world, name)
