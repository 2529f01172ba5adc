"""What goes wrong where parallelisms compose: the cases of docs/composed.md, against one process in fp64.

They are those that Megatron-LM issue 7452 reports, as far as this project has what they need; the others have to be
refused. Each test's name stands in the document's table.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from foreign import foreign, tokens
from fused_layout_case import ROUNDED, Layout, compare
from layout_case import BUDGET, compare_spread, make_batches
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import shardfuse as sf
from shardfuse import ParallelAttention, ParallelTransformer, TransformerConfig
from shardfuse.layers.loss import linear_cross_entropy, vocab_parallel_cross_entropy
from shardfuse.layers.style import ColumnParallel, RowParallel, SequenceParallelNorm
from shardfuse.parallel.core.collectives import local_slice
from shardfuse.parallel.core.mesh import data_coordinate, tp_group
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.core.sharding import ShardSpec, make_parameter
from shardfuse.parallel.parallelize import parallelize

pytestmark = pytest.mark.ranks

LENGTH, VOCABULARY = 6, 24
SIZES: dict[str, Any] = {
    "style": "gated",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_positions": LENGTH,
}
LOGITS, TARGET = [0.0, 1.0, 2.0, 3.0], 3  # those of the report


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


# ------------------------------------------------------------------------------------- loss over a split vocabulary


def _smoothing(rank: int, world: int, sequence_parallel: bool) -> list[float]:
    """Errors of loss and gradients of smoothed targets, for the report's scores and for random ones."""
    group, errors = tp_group(dist.group.WORLD), []
    for hidden, weight, targets in (
        (torch.tensor([LOGITS] * 2).double(), torch.eye(4).double(), torch.tensor([TARGET, 0])),
        (torch.randn(4, 8).double(), torch.randn(6, 8).double(), torch.tensor([5, -100, 0, 2])),
    ):
        spec = ShardSpec("weight", weight.shape, 0, group)
        part = make_parameter(weight[spec.index].clone(), spec, "local")
        own = (local_slice(hidden, group, 0) if sequence_parallel else hidden.clone()).requires_grad_()
        options = {"group": group, "sequence_parallel": sequence_parallel}
        loss = linear_cross_entropy(own, part, targets, label_smoothing=0.3, **options)
        loss.backward()
        exact = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        expected = F.cross_entropy(F.linear(*exact), targets, label_smoothing=0.3)
        grads = list(torch.autograd.grad(expected, exact))
        grads[0] = local_slice(grads[0], group, 0) if sequence_parallel else grads[0]
        for ours, theirs in ((loss, expected), (own.grad, grads[0]), (part.grad, grads[1][spec.index])):
            errors.append(_error(ours.detach(), theirs.detach()))
    return errors


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_smoothed_targets_count_the_whole_vocabulary(ranks: Any, sequence_parallel: bool):
    for errors in ranks(2, _smoothing, sequence_parallel):
        assert max(errors) < BUDGET


def _gathered(rank: int, world: int) -> tuple[float, float]:
    """The loss of the report's logits in two parts, and of gathered ones; the latter are refused."""
    group, targets = tp_group(dist.group.WORLD), torch.tensor([TARGET])
    whole = torch.tensor([LOGITS]).double()
    part = whole[:, 2 * group.rank : 2 * group.rank + 2].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(part, targets, group, vocab_size=4)
    loss.backward()
    exact = whole.clone().requires_grad_()
    expected = F.cross_entropy(exact, targets)
    expected.backward()
    with pytest.raises(ValueError, match=r"logits \[1, 4\] on each of 2 ranks for vocab_size=4: expected \[1, 2\]"):
        vocab_parallel_cross_entropy(whole, targets, group, vocab_size=4)
    mesh = init_mesh(tp=2, device_type="cpu")
    model = ParallelTransformer(TransformerConfig(**SIZES), mesh=mesh, dtype=torch.float64)
    model.lm_head.register_forward_hook(lambda _, __, logits: model.gather_logits(logits))
    (batch, _) = make_batches(1, 2, LENGTH, VOCABULARY, [])
    with pytest.raises(
        ValueError, match=r"logits \[12, 24\] on each of 2 ranks for vocab_size=24: expected \[12, 12\]"
    ):
        model(*batch)
    grad = exact.grad[:, 2 * group.rank : 2 * group.rank + 2]
    assert float(expected.detach()) == pytest.approx(0.4401897, abs=1e-7)
    return _error(loss.detach(), expected.detach()), _error(part.grad, grad)


def test_gathered_logits_are_refused_by_the_split_loss(ranks: Any):
    for errors in ranks(2, _gathered):
        assert max(errors) < BUDGET


def _own_loss(rank: int, world: int, sequence_parallel: bool) -> list[str]:
    """The gradients of a loss that each rank computes from gathered logits."""
    mesh = init_mesh(tp=world, device_type="cpu")
    config = TransformerConfig(**SIZES)
    model = ParallelTransformer(config, mesh=mesh, dtype=torch.float64, sequence_parallel=sequence_parallel)
    alone = ParallelTransformer(config, dtype=torch.float64)
    (words, targets), _ = make_batches(2, 3, LENGTH, VOCABULARY, [(0, 2)])
    for each in (model, alone):
        each.init_weights(0)
        F.cross_entropy(each.gather_logits(each(words)).flatten(0, 1), targets.flatten()).backward()
    return _apart(model, alone)


def _apart(model: nn.Module, alone: nn.Module, budget: float = BUDGET) -> list[str]:
    """The parameters of ``model`` with other gradients than those of ``alone``."""
    exact = {name: param.grad for name, param in alone.named_parameters() if param.grad is not None}
    least = 1e-3 * max(float(grad.norm()) for grad in exact.values())  # smaller gradients may be rounding errors
    found = []
    for name, param in model.named_parameters():
        grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        if grad is None or name not in exact:
            found += [] if grad is None and name not in exact else [f"{name} has no gradient on one side"]
            continue
        error = float((grad - exact[name]).norm()) / max(float(exact[name].norm()), least)
        found += [] if error <= budget else [f"{name}: {error:.1e}"]
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_a_loss_of_gathered_logits_is_counted_once(ranks: Any, sequence_parallel: bool):
    assert ranks(2, _own_loss, sequence_parallel) == [[], []]


# ------------------------------------------------------------------------------------------------- whole training


def _uneven(rank: int, world: int) -> list[str]:
    """A share with one valid target beside a full one, micro-batches without any, halves of a sequence without any."""
    ignored = [(0, 1), (1, 0), (2, 3), (3, 0)]
    batches = make_batches(4, 8, LENGTH, VOCABULARY, ignored)
    for _, targets in batches:
        targets[4, :3] = -100
    options = {"zero": 2, "microbatches": 4}
    return compare_spread(TransformerConfig(**SIZES), batches, {"dp": 2, "tp": 2}, options, {"sequence_parallel": True})


def test_uneven_masks_leave_the_mean_over_all_targets(ranks: Any):
    assert ranks(4, _uneven) == [[]] * 4


SINKS = [
    {"degrees": {"tp": 2}, "options": {}, "layers": {}},
    {"degrees": {"dp": 2, "tp": 2}, "options": {"zero": 3}, "layers": {"sequence_parallel": True}},
    {"degrees": {"pp": 2, "tp": 2}, "options": {"schedule": "1f1b"}, "layers": {"sequence_parallel": True}},
]


def _sinks(rank: int, world: int, case: dict[str, Any]) -> list[str]:
    config = TransformerConfig(**SIZES, attention_sinks=True, tie_embeddings=True)
    return compare_spread(config, make_batches(5, 4, LENGTH, VOCABULARY, [(1, 4)]), **case)


@pytest.mark.parametrize("case", SINKS, ids=lambda case: "-".join(case["degrees"]))
def test_sinks_and_tied_embeddings_count_once_in_the_norm(ranks: Any, case: dict[str, Any]):
    world = 4 if len(case["degrees"]) == 2 else 2
    assert ranks(world, _sinks, case) == [[]] * world


def _other_ranks(rank: int, world: int) -> list[str]:
    """A model over the tensor-parallel ranks (0, 2) and (1, 3), beside one over the neighbours, in one process."""
    near = init_mesh(dp=2, tp=2, device_type="cpu")
    far = DeviceMesh("cpu", [[[0, 2]], [[1, 3]]], mesh_dim_names=("dp", "pp", "tp"))
    config, layers = TransformerConfig(**SIZES), {"sequence_parallel": True, "dtype": torch.float64}
    with pytest.raises(ValueError, match=r"built for tensor-parallel ranks \[.*\] and the mesh has \[.*\] along tp"):
        parallelize(ParallelTransformer(config, mesh=near, **layers), far)
    alone = ParallelTransformer(config, dtype=torch.float64)
    batches = make_batches(6, 4, LENGTH, VOCABULARY, [(2, 1)])
    steps = []
    for mesh in (near, far):
        model = parallelize(ParallelTransformer(config, mesh=mesh, device="meta", **layers), mesh, zero=2, seed=0)
        steps.append((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    alone.init_weights(0)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    found = []
    for batch in batches:
        loss = alone(*batch)
        loss.backward()
        for model, theirs in steps:
            share, shares = data_coordinate(model.mesh)
            error = _error(model.step(*(part.tensor_split(shares)[share] for part in batch)), loss.detach())
            found += [] if error <= BUDGET else [f"loss: {error:.1e}"]
            found += _apart(model.module, alone)
            theirs.step()
            theirs.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_model_keeps_to_the_ranks_it_was_built_for(ranks: Any):
    assert ranks(4, _other_ranks) == [[]] * 4


# ------------------------------------------------------------------------------------------ parameters of each head


def _fused(rank: int, world: int, layout: tuple[Any, ...]) -> list[str]:
    return compare(Layout(*layout))


def test_norms_over_each_head_sum_their_gradients(ranks: Any):
    """Of Qwen3, whose norms of queries and keys all heads share."""
    pytest.importorskip("transformers")
    assert ranks(2, _fused, tuple(Layout("qwen3", tp=2))) == [[], []]


def _t5() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config), {"input_ids": tokens(2, 10), "labels": tokens(2, 8)}


def _llava() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    }  # fmt: skip
    seen = CLIPVisionConfig(image_size=8, patch_size=4, **sizes)
    read = LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=16, **sizes)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=seen, text_config=read, image_token_index=63, vision_feature_layer=-1)
    )
    words = tokens(2, 12) % 60 + 1
    words[:, 2:6] = 63
    return model, {"input_ids": words, "labels": words, "pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64)}


def _foreign_body(rank: int, world: int, kind: str, sequence_parallel: bool) -> list[str]:
    """Loss and gradients of a fused model of transformers against its stock code, which computes norms in fp32."""
    model, batch = {"t5": _t5, "llava": _llava}[kind]()
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=drawn) * 0.1)
    stock = model.double().train()
    fused = sf.fuse(copy.deepcopy(stock), init_mesh(tp=world, device_type="cpu"), sequence_parallel=sequence_parallel)
    losses = [each(**batch, use_cache=False).loss for each in (stock, fused)]
    for loss in losses:
        loss.backward()
    error = _error(losses[1].detach(), losses[0].detach())
    return [f"loss: {error:.1e}"] * (error > ROUNDED) + _apart(fused, stock, ROUNDED)


@pytest.mark.parametrize(("kind", "sequence_parallel"), [("t5", False), ("llava", True)])
def test_encoders_feed_the_ranks_of_the_model(ranks: Any, kind: str, sequence_parallel: bool):
    pytest.importorskip("transformers")
    assert ranks(2, _foreign_body, kind, sequence_parallel) == [[], []]


class _Heads(nn.Module):
    """Attention with one norm for all heads of 4, and the mean of its loss."""

    def __init__(self, width: int = 16, vocabulary: int = 8) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q_norm = nn.RMSNorm(4, eps=1e-5)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.table(words)
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        heads = F.scaled_dot_product_attention(self.q_norm(q), k, v, is_causal=True)
        return F.cross_entropy(
            self.head(x + self.wo(heads.transpose(1, 2).flatten(2))).flatten(0, 1), targets.flatten()
        )


PLAN: dict[str, Any] = {"w[qkv]": ColumnParallel(), "wo": RowParallel()}


def _plain(rank: int, world: int, dp: int) -> list[str]:
    """A plain model whose plan names the norm; without it every rank refuses the first step."""
    mesh = init_mesh(dp=dp, tp=2, device_type="cpu")
    torch.manual_seed(0)
    alone = _Heads().double()
    words = torch.randint(8, (4, 5), generator=torch.Generator().manual_seed(0))
    batch = words[:, :-1], words[:, 1:]
    share, shares = data_coordinate(mesh)
    mine = [part.tensor_split(shares)[share] for part in batch]
    plans = {"named": PLAN | {"q_norm": SequenceParallelNorm()}, "left out": PLAN}
    models = {name: parallelize_module(copy.deepcopy(alone), mesh["tp"], plan) for name, plan in plans.items()}
    wrong = parallelize(models["left out"], mesh, zero=2)
    with pytest.raises(ValueError, match=r"the gradients of q_norm.weight differ between tensor-parallel ranks"):
        wrong.step(*mine)
    right = parallelize(models["named"], mesh, zero=2)
    alone(*batch).backward()
    right.step(*mine)
    other = copy.deepcopy(alone)
    with torch.no_grad():
        other.head.bias.add_(mesh.get_local_rank("tp"))
    with pytest.raises(ValueError, match=r"the checksum of head.bias is .* on rank \d and .* on rank \d"):
        parallelize(parallelize_module(other, mesh["tp"], PLAN), mesh)
    return _apart(right.module, alone)


@pytest.mark.parametrize("dp", [1, 2])
def test_a_plain_models_gradients_are_compared(ranks: Any, dp: int):
    assert ranks(2 * dp, _plain, dp) == [[]] * 2 * dp


# ----------------------------------------------------------------------------------------------------- not offered


def _not_offered(rank: int, world: int) -> None:
    for name in ("cp", "ep"):
        mesh = DeviceMesh("cpu", list(range(world)), mesh_dim_names=(name,))
        model = ParallelTransformer(TransformerConfig(**SIZES))
        with pytest.raises(ValueError, match=f"dimension '{name}' of 2 ranks, over which nothing would be spread"):
            parallelize(model, mesh)
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            init_mesh(**{name: 2})
    mesh = init_mesh(tp=2, device_type="cpu")
    with pytest.raises(ValueError, match=r"num_kv_heads=1.*2 tensor-parallel ranks"):
        ParallelTransformer(TransformerConfig(**SIZES | {"num_kv_heads": 1}), mesh=mesh)


def test_context_and_expert_parallelism_are_refused(ranks: Any):
    ranks(2, _not_offered)


def test_experts_predictions_ahead_and_cross_attention_are_refused():
    for option in ("num_experts", "num_nextn_predict_layers"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
            TransformerConfig(**SIZES, **{option: 4})
    x = torch.randn(1, 3, 16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'encoder_hidden_states'"):
        ParallelAttention(16, 4)(x, encoder_hidden_states=x)
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="output_router_logits=True adds a loss that is no mean over targets"):
        parallelize(sf.fuse(foreign("mixtral", output_router_logits=True)))
