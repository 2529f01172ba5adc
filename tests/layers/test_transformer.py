"""The whole model: names, numbers, initialisation, and what every single collective is good for."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from wire import omit, sites_seen

from shardfuse import ParallelTransformer, TransformerConfig
from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.rope import apply_rope
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import Group, tp_group
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.core.sharding import local_tensor, spec_of

TERMS = 512  # two layers, forward and backward: what sums that follow one another come to
SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 4,
    "max_positions": 32,
    "init_std": 0.2,
}
STYLES = {
    "gelu": TransformerConfig(style="gelu", **SMALL),
    "gelu-tied": TransformerConfig(style="gelu", tie_embeddings=True, **SMALL),
    "gated": TransformerConfig(style="gated", **SMALL),
    "gated-tied": TransformerConfig(style="gated", tie_embeddings=True, **SMALL),
}


def _tokens(batch: int = 2, length: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(40, (2, batch, length), generator=generator)
    targets[0, 1] = -100
    return tokens, targets


def _build(style: str, **options: Any) -> ParallelTransformer:
    torch.manual_seed(3)
    return ParallelTransformer(STYLES[style], **options)


def _step(model: ParallelTransformer) -> dict[str, torch.Tensor]:
    """The loss and every gradient; a rank's part of each."""
    model.zero_grad()
    loss = model(*_tokens())
    loss.backward()
    return {"loss": loss.detach()} | {name: local_tensor(param.grad) for name, param in model.named_parameters()}


# --------------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("style", STYLES)
def test_loss_is_the_cross_entropy_of_the_logits(style: str):
    model, (tokens, targets) = _build(style), _tokens()
    logits = model(tokens)
    assert logits.shape == (2, 6, 40)
    assert torch.equal(model(tokens, targets), F.cross_entropy(logits.view(-1, 40), targets.view(-1)))


def test_state_dict_has_the_names_of_starcoder2_and_llama():
    layer = {
        "gelu": "input_layernorm.weight input_layernorm.bias self_attn.q_proj.weight self_attn.q_proj.bias "
        "self_attn.k_proj.weight self_attn.k_proj.bias self_attn.v_proj.weight self_attn.v_proj.bias "
        "self_attn.o_proj.weight self_attn.o_proj.bias post_attention_layernorm.weight post_attention_layernorm.bias "
        "mlp.c_fc.weight mlp.c_fc.bias mlp.c_proj.weight mlp.c_proj.bias",
        "gated": "input_layernorm.weight self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight "
        "self_attn.o_proj.weight post_attention_layernorm.weight mlp.gate_proj.weight mlp.up_proj.weight "
        "mlp.down_proj.weight",
    }
    last = {"gelu": "model.norm.weight model.norm.bias lm_head.weight", "gated": "model.norm.weight lm_head.weight"}
    for style in ("gelu", "gated"):
        names = [f"model.layers.{i}.{name}" for i in range(2) for name in layer[style].split()]
        expected = ["model.embed_tokens.weight", *names, *last[style].split()]
        assert list(_build(style).state_dict()) == expected


def test_a_tied_head_is_the_embedding_whatever_is_done_to_the_model():
    model = _build("gelu-tied")
    assert "lm_head.weight" in model.state_dict()
    assert "lm_head.weight" not in dict(model.named_parameters())
    for change in (lambda: model.bfloat16(), lambda: model.to_empty(device="cpu"), lambda: model.init_weights(0)):
        change()
        assert model.lm_head.weight is model.model.embed_tokens.weight
    model = _build("gelu-tied", device="meta").to_empty(device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("style", ["gelu", "gated-tied"])
def test_init_weights_depends_on_the_seed_alone(style: str):
    model = _build(style)
    model.init_weights(11)
    with torch.device("meta"):
        empty = ParallelTransformer(STYLES[style])
    assert all(param.is_meta for param in empty.parameters())
    empty.to_empty(device="cpu").init_weights(11)
    for name, value in model.state_dict().items():
        assert torch.equal(value, empty.state_dict()[name]), name
    assert torch.equal(model(_tokens()[0]), empty(_tokens()[0]))
    empty.init_weights(12)
    assert not torch.equal(model.lm_head.weight, empty.lm_head.weight)
    torch.manual_seed(0)
    model.init_weights()
    torch.manual_seed(0)
    empty.init_weights()
    assert torch.equal(model.lm_head.weight, empty.lm_head.weight)


def test_fresh_weights_have_the_configured_spread():
    model = ParallelTransformer(TransformerConfig(hidden_size=128, num_layers=1, init_std=0.05))
    for name, param in model.named_parameters():
        if param.dim() == 2:
            assert param.std().item() == pytest.approx(0.05, rel=0.05), name
        else:
            assert (param == (1.0 if "norm" in name and "weight" in name else 0.0)).all(), name


def test_recompute_changes_nothing_but_memory():
    kept, again = _step(_build("gelu")), _step(_build("gelu", recompute=True))
    for name, value in kept.items():
        assert torch.equal(value, again[name]), name


@pytest.mark.parametrize("style", ["gelu", "gated"])
def test_compiles_without_a_graph_break(style: str):
    model = _build(style)
    eager = _step(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    loss = compiled(*_tokens())
    loss.backward()
    torch.testing.assert_close(loss, eager["loss"])
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, eager[name], msg=lambda text, name=name: f"{name}: {text}")


def test_trains_in_bf16_autocast():
    model = _build("gated")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(*_tokens())
        assert loss.dtype == torch.float32
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


class SoloCache:
    """The plainest cache: one sequence, its keys and values in lists."""

    def __init__(self, config: TransformerConfig) -> None:
        self.kv: list[list[Any]] = [[] for _ in range(config.num_layers)]
        self.logit_indices = torch.tensor([])

    def attend(
        self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, rope: Any, **_: Any
    ) -> torch.Tensor:
        q, k = apply_rope(q, k, *rope)
        self.kv[layer_index].append((k, v))
        keys, values = (torch.cat(parts).transpose(0, 1) for parts in zip(*self.kv[layer_index]))
        length, new = keys.shape[1], len(q)
        mask = torch.arange(length) <= torch.arange(length - new, length)[:, None]
        q = q.transpose(0, 1)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        return out.transpose(0, 1)


@pytest.mark.parametrize("style", ["gelu", "gated"])
def test_steps_over_a_cache_are_one_forward(style: str):
    model = _build(style, dtype=torch.float64)
    tokens = _tokens(1, 9)[0]
    whole, cache = model(tokens)[0], SoloCache(model.config)
    low = model.float()(tokens)[0]
    model = model.double()
    rows, start = [], 0
    for step in (4, 1, 3, 1):  # prefill, decode, a chunk of prompt, decode
        cache.logit_indices = torch.arange(step)
        positions = torch.arange(start, start + step)
        rows.append(model(tokens[0, start : start + step], positions=positions, cache=cache))
        start += step
    verdict = accuracy.judge("logits", torch.cat(rows), low, whole)
    assert verdict.ok, verdict
    cache.logit_indices = torch.tensor([1])
    assert model(tokens[0, :2], positions=torch.arange(2), cache=cache).shape == (1, 40)


def test_what_cannot_work_is_refused():
    model, (tokens, targets) = _build("gelu"), _tokens()
    with pytest.raises(ValueError, match=r"expected tokens \[B, S\].*\[6\]"):
        model(tokens[0])
    with pytest.raises(ValueError, match=r"targets \[2, 5\]"):
        model(tokens, targets[:, :5])
    with pytest.raises(ValueError, match=r"sequences of 33 tokens.*at most 32"):
        model(torch.zeros(1, 33, dtype=torch.long))
    with pytest.raises(ValueError, match=r"positions none"):
        model(tokens[0], cache=SoloCache(model.config))
    with pytest.raises(ValueError, match="token 40 is outside the vocabulary of 40"):
        model(tokens + 40 - tokens.max())
    wide = Group(None, 0, 3, None)
    with pytest.raises(ValueError, match="3 tensor-parallel ranks"):
        ParallelTransformer(STYLES["gelu"], mesh=wide, device="meta", params="local")


# -------------------------------------------------------------------------------------------------------- ranks


def _verdicts(model: ParallelTransformer, ours: dict[str, torch.Tensor], style: str) -> dict[str, accuracy.Verdict]:
    """This rank's loss and gradients against the unsharded model's in fp64."""
    oracle, low = _step(_build(style, dtype=torch.float64)), _step(_build(style))
    assert ours.keys() == oracle.keys()
    verdicts = {}
    for name, out in ours.items():
        index = ... if name == "loss" else spec_of(model.get_parameter(name)).index
        verdicts[name] = accuracy.judge(name, out, low[name][index], oracle[name][index], terms=TERMS)
    return verdicts


def _step_body(rank: int, world: int, style: str, options: dict[str, Any]) -> tuple[float, list[str], bool]:
    group = tp_group(dist.group.WORLD)
    model = _build(style, mesh=group, dtype=torch.float64, **options)
    ours = _step(model)
    wrong = [str(verdict) for verdict in _verdicts(model, ours, style).values() if not verdict.ok]
    tokens = _tokens()[0]
    logits = model(tokens)
    assert logits.shape == (2, 6, 40 // world)
    same = torch.allclose(model.gather_logits(logits), _build(style, dtype=torch.float64)(tokens), rtol=0, atol=1e-12)
    return ours["loss"].item(), wrong, same


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {}),
        (2, {"params": "local"}),
        (2, {"sequence_parallel": True}),
        (2, {"sequence_parallel": True, "params": "local", "recompute": True}),
        (4, {"recompute": True}),
        (4, {"sequence_parallel": True}),
    ],
    ids=lambda value: (
        "-".join(f"{v}" if k == "params" else k for k, v in value.items()) or "plain"
        if isinstance(value, dict)
        else str(value)
    ),
)
@pytest.mark.parametrize("style", STYLES)
def test_loss_and_gradients_over_ranks_are_the_unsharded_ones(
    ranks: Any, style: str, world: int, options: dict[str, Any]
):
    results = ranks(world, _step_body, style, options)
    assert len({loss for loss, _, _ in results}) == 1  # the same bits on every rank
    for rank, (_, wrong, same) in enumerate(results):
        assert not wrong, f"rank {rank}: {wrong}"
        assert same, f"rank {rank}: gathered logits differ"


def _omit_body(rank: int, world: int, style: str, options: dict[str, Any]) -> dict[str, list[str]]:
    """Site -> what is wrong on this rank when the collectives there are left out; "" leaves none out."""
    model = _build(style, mesh=tp_group(dist.group.WORLD), dtype=torch.float64, **options)
    collectives.reset_counts()
    _step(model)
    found = {}
    for site in ["", *sites_seen()]:
        with omit(site) if site else contextlib.nullcontext():
            verdicts = _verdicts(model, _step(model), style)
        found[site] = [name for name, verdict in verdicts.items() if not verdict.ok]
    return found


PLAIN_SITES = {
    "embedding",
    "attention.in.grad",
    "attention.out",
    "mlp.in.grad",
    "mlp.out",
    "head.in.grad",
    "loss.max",
    "loss.sum",
}
SEQUENCE_SITES = PLAIN_SITES | {
    "embedding.grad",
    "attention.in",
    "attention.out.grad",
    "mlp.in",
    "mlp.out.grad",
    "head.in",
    "norm.grad",
}


@pytest.mark.ranks
@pytest.mark.parametrize("style", ["gelu", "gated"])
@pytest.mark.parametrize(("sequence_parallel", "sites"), [(False, PLAIN_SITES), (True, SEQUENCE_SITES)])
def test_every_collective_is_needed(ranks: Any, style: str, sequence_parallel: bool, sites: set[str]):
    found = ranks(2, _omit_body, style, {"sequence_parallel": sequence_parallel})
    assert found[0].keys() == sites | {""}
    assert not found[0][""]
    for site in sites:
        assert any(wrong[site] for wrong in found), f"nobody notices that {site} is missing"


def _init_body(rank: int, world: int, style: str) -> dict[str, torch.Tensor]:
    group = tp_group(dist.group.WORLD if world > 1 else None)
    whole = {}
    for made in ("global", "given", "meta"):
        model = _build(style, mesh=group, device="meta" if made == "meta" else None)
        if made == "meta":
            model.to_empty(device="cpu")
        if made != "global":
            model.init_weights(17)
        for name, param in model.named_parameters():
            local, dim = local_tensor(param).detach(), spec_of(param).shard_dim
            gathered = local if dim is None else collectives.all_gather(local, group, dim=dim, site="test")
            whole[f"{made}: {name}"] = gathered
    return whole


@pytest.mark.ranks
@pytest.mark.parametrize("style", ["gelu-tied", "gated"])
def test_one_seed_gives_the_same_bits_at_every_degree(ranks: Any, style: str):
    (alone,) = ranks(1, _init_body, style)
    for world in (2, 4):
        for whole in ranks(world, _init_body, style):
            assert whole.keys() == alone.keys()
            for name, param in whole.items():
                assert torch.equal(param, alone[name]), (world, name)


def _train_body(rank: int, world: int, options: dict[str, Any]) -> list[float]:
    group = tp_group(dist.group.WORLD if world > 1 else None)
    model = _build("gelu", mesh=group, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(*_tokens())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_five_steps_of_training_do_not_depend_on_the_degree(ranks: Any, sequence_parallel: bool):
    (alone,) = ranks(1, _train_body, {})
    (double,) = ranks(1, _train_body, {"dtype": torch.float64})
    ours = ranks(2, _train_body, {"sequence_parallel": sequence_parallel, "dtype": torch.float64})
    assert ours[0] == ours[1]
    assert double[4] < double[0]
    verdict = accuracy.judge("losses", *(torch.tensor(t, dtype=torch.float64) for t in (ours[0], alone, double)))
    assert verdict.ok, verdict


def _refusals_body(rank: int, world: int) -> list[str]:
    model = _build("gelu", mesh=tp_group(dist.group.WORLD), sequence_parallel=True)
    messages = []
    for arguments in (
        {"tokens": torch.zeros(1, 3, dtype=torch.long)},
        {"tokens": torch.zeros(2, dtype=torch.long), "positions": torch.arange(2), "cache": SoloCache(model.config)},
    ):
        with pytest.raises(ValueError) as caught:
            model(**arguments)
        messages.append(str(caught.value))
    return messages


@pytest.mark.ranks
def test_sequence_parallelism_refuses_what_it_cannot_split(ranks: Any):
    for odd, cached in ranks(2, _refusals_body):
        assert "wants the 1 x 3 tokens of a batch to divide by 2 ranks" in odd
        assert "wants a model with sequence_parallel=False" in cached


def _fsdp_body(rank: int, world: int, style: str, sequence_parallel: bool) -> list[str]:
    """dp = 2 by tp = 2: FSDP2 shards what tensor parallelism has sharded, and averages over half batches."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_mesh(dp=2, tp=2, device_type="cpu")
    assert mesh is not None
    model = _build(style, mesh=mesh, sequence_parallel=sequence_parallel, dtype=torch.float64)
    specs = {name: spec_of(param) for name, param in model.named_parameters()}
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    tokens, targets = _tokens()
    targets[:] = tokens.roll(-1, dims=1)  # nothing ignored: both halves weigh the same
    half = mesh.get_local_rank("dp")
    model(tokens[half : half + 1], targets[half : half + 1]).backward()

    def reference(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        whole = _build(style, dtype=dtype)
        whole(tokens, targets).backward()
        return {name: param.grad for name, param in whole.named_parameters()}

    oracle, low, wrong = reference(torch.float64), reference(torch.float32), []
    for name, param in model.named_parameters():
        assert param.shape == specs[name].logical_shape
        verdict = accuracy.judge(name, param.grad.full_tensor(), low[name], oracle[name], terms=TERMS)
        wrong += [] if verdict.ok else [str(verdict)]
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("style", ["gelu-tied", "gated"])
def test_fsdp2_over_tensor_parallel_ranks_gives_the_unsharded_gradients(
    ranks: Any, style: str, sequence_parallel: bool
):
    assert ranks(4, _fsdp_body, style, sequence_parallel) == [[]] * 4
