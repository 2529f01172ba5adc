"""State dicts of whole tensors, such as a stock module's, into layers over two ranks, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from shardfuse import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelAttention,
    ParallelBlock,
    ParallelMLP,
    ParallelTransformer,
    RMSNorm,
    RowParallelLinear,
    TransformerConfig,
    VocabParallelEmbedding,
)
from shardfuse.kernels.dev import accuracy
from shardfuse.layers.attention.paged import PagedAttention
from shardfuse.parallel.checkpoint.entries import full_state_dict
from shardfuse.parallel.core.mesh import tp_group
from shardfuse.parallel.core.sharding import ShardSpec, local_tensor, spec_of

pytestmark = pytest.mark.ranks

TOKENS, WIDTH, FFN, VOCABULARY = 12, 16, 24, 20


class StockMLP(nn.Module):
    """ParallelMLP in torch's own modules, under the same names."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        if gated:
            self.gate_proj, self.up_proj = (nn.Linear(WIDTH, FFN, bias=False) for _ in range(2))
            self.down_proj = nn.Linear(FFN, WIDTH, bias=False)
        else:
            self.c_fc, self.c_proj = nn.Linear(WIDTH, FFN), nn.Linear(FFN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "c_fc"):
            return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class Layer:
    """A layer, the stock module (None: the layer in one process), and the shape of its input (None: no forward)."""

    build: Callable[..., nn.Module]
    stock: Callable[[], nn.Module] | None = None
    shape: tuple[int, ...] | None = (TOKENS, WIDTH)
    call: dict[str, Any] | None = None
    gather: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda _, y: y
    split_input: bool = False


def _config(**change: Any) -> TransformerConfig:
    sizes = {"hidden_size": WIDTH, "intermediate_size": FFN, "vocab_size": VOCABULARY, "num_layers": 2}
    return TransformerConfig(**({"num_heads": 4, "num_kv_heads": 2, "attention_sinks": True} | sizes | change))


def _model(**change: Any) -> Layer:
    def build(**options: Any) -> nn.Module:
        return ParallelTransformer(_config(**change), **options)

    return Layer(build, shape=(2, 6), gather=lambda model, y: model.gather_logits(y))


BATCHED = {"batch_size": 3}
LAYERS = {
    "column": Layer(
        lambda **k: ColumnParallelLinear(WIDTH, FFN, gather_output=True, **k), lambda: nn.Linear(WIDTH, FFN)
    ),
    "row": Layer(
        lambda **k: RowParallelLinear(FFN, WIDTH, **k),
        lambda: nn.Linear(FFN, WIDTH),
        shape=(TOKENS, FFN),
        split_input=True,
    ),
    "mlp": Layer(lambda **k: ParallelMLP(WIDTH, FFN, **k), lambda: StockMLP(gated=False)),
    "mlp-gated": Layer(lambda **k: ParallelMLP(WIDTH, FFN, gated=True, **k), lambda: StockMLP(gated=True)),
    "attention": Layer(lambda **k: ParallelAttention(WIDTH, 8, 4, sinks=True, **k), call=BATCHED),
    "paged": Layer(lambda **k: PagedAttention(4, 2, 8, sinks=True, **k), shape=None),
    "embedding": Layer(
        lambda **k: VocabParallelEmbedding(VOCABULARY, WIDTH, **k),
        lambda: nn.Embedding(VOCABULARY, WIDTH),
        shape=(TOKENS,),
    ),
    "layer-norm": Layer(lambda **k: LayerNorm(WIDTH, **k), lambda: nn.LayerNorm(WIDTH)),
    "rms-norm": Layer(lambda **k: RMSNorm(WIDTH, **k), lambda: nn.RMSNorm(WIDTH, eps=RMSNorm(WIDTH).eps)),
    "block": Layer(lambda **k: ParallelBlock(_config(), **k), call=BATCHED),
    "model": _model(style="gated"),
    "model-tied": _model(tie_embeddings=True),
}


def _stock(layer: Layer) -> nn.Module:
    """The stock module; random norms, biases and sinks, because constants would hide mistakes."""
    stock = (layer.stock or layer.build)()
    for param in stock.parameters():
        nn.init.normal_(param, std=0.5)
    return stock


def _equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def _specs(module: nn.Module) -> list[tuple[bool, ShardSpec]]:
    """For each parameter whether it carries a spec of its own, and the spec."""
    return [(hasattr(param, "shard_spec"), spec_of(param)) for param in module.parameters()]


def _round_trip_body(rank: int, world: int, name: str, params: str) -> None:
    layer, mesh = LAYERS[name], tp_group(dist.group.WORLD)
    stock = _stock(layer)
    expected = {key: value.clone() for key, value in stock.state_dict().items()}
    options = {"mesh": mesh, "params": params}

    ours = layer.build(**options)
    before, own = _specs(ours), ours.state_dict()
    addresses = [local_tensor(param).data_ptr() for param in ours.parameters()]
    first = full_state_dict(ours)
    assert str(ours.load_state_dict(stock.state_dict())) == "<All keys matched successfully>"
    assert _equal(full_state_dict(ours), expected)
    assert [local_tensor(param).data_ptr() for param in ours.parameters()] == addresses
    _check_forward(layer, ours, stock, rank)

    # With assign=True: parameters of the same kind, and no memory of the whole tensor behind a slice.
    for device in (None, "meta"):
        assigned = layer.build(device=device, **options)
        source = {key: value.double() for key, value in expected.items()}
        assigned.load_state_dict(source, assign=True)
        assert _specs(assigned) == before
        assert all(param.requires_grad and param.dtype == torch.float64 for param in assigned.parameters())
        assert _equal(full_state_dict(assigned), source)
        for param in assigned.parameters():
            local = local_tensor(param.detach())
            assert local.untyped_storage().nbytes() == local.numel() * local.element_size()
        if name == "model-tied":
            assert assigned.lm_head.weight is assigned.model.embed_tokens.weight

    # The module's own state loads as before: DTensors, or plain tensors of this rank's shapes.
    for assign in (False, True):
        other = layer.build(**options)
        other.load_state_dict(layer.build(**options).state_dict() | own, assign=assign)
        assert _equal(full_state_dict(other), full_state_dict(ours))
        assert _specs(other) == before

    # Some keys only, under a parent's name, from another dtype and layout.
    key = sorted(expected)[-1]
    part = {f"0.{key}": expected[key].double().mT.contiguous().mT if expected[key].ndim > 1 else expected[key].double()}
    other = layer.build(**options)
    other.load_state_dict(first)
    missing, unexpected = nn.Sequential(other).load_state_dict(part | {"0.spare": torch.ones(1)}, strict=False)
    assert unexpected == ["0.spare"]
    assert len(missing) == len(expected) - 1
    found = full_state_dict(other)
    assert torch.equal(found[key], expected[key])
    assert all(torch.equal(found[each], first[each]) for each in first if each != key and name != "model-tied")


def _check_forward(layer: Layer, ours: nn.Module, stock: nn.Module, rank: int) -> None:
    if layer.shape is None:
        return
    call = layer.call or {}
    tokens = len(layer.shape) == 1 or isinstance(ours, ParallelTransformer)
    x = torch.randint(VOCABULARY, layer.shape) if tokens else torch.randn(layer.shape)
    part = x.chunk(2, -1)[rank] if layer.split_input else x
    with torch.no_grad():
        y = layer.gather(ours, ours(part, **call))
        low = stock(x, **call)
        oracle = stock.double()(x if tokens else x.double(), **call)
    verdict = accuracy.judge("y", y, low, oracle, terms=2 * (WIDTH + FFN))
    assert verdict.ok, verdict


@pytest.mark.parametrize("params", ["dtensor", "local"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_stock_state_dict_loads_and_comes_back_bit_for_bit(ranks: Any, name: str, params: str):
    ranks(2, _round_trip_body, name, params)


def _torchs_functions_body(rank: int, world: int, params: str, tied: bool) -> None:
    """torch's functions for whole state dicts, on a model with memory and on one without."""
    layer = LAYERS["model-tied" if tied else "model"]
    expected = _stock(layer).state_dict()
    for device in (None, "meta"):
        for from_first in (False, True):
            model = layer.build(mesh=dist.group.WORLD, params=params, device=device)
            state = {} if from_first and rank else dict(expected)
            how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
            set_model_state_dict(model, state, options=how)
            assert _equal(full_state_dict(model), expected)
            assert all(spec.group.size == 2 for _, spec in _specs(model))
            if params == "dtensor":
                how = StateDictOptions(full_state_dict=True, cpu_offload=True)
                assert _equal(get_model_state_dict(model, options=how), {} if rank else expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("params", ["dtensor", "local"])
def test_torchs_functions_for_whole_state_dicts(ranks: Any, params: str, tied: bool):
    ranks(2, _torchs_functions_body, params, tied)


def _errors_body(rank: int, world: int, params: str) -> list[str]:
    mlp = ParallelMLP(WIDTH, FFN, mesh=dist.group.WORLD, params=params)
    stock = StockMLP(gated=False).state_dict()
    wrong = stock | {"c_fc.weight": torch.ones(FFN + 2, WIDTH), "c_proj.bias": torch.ones(3)}
    half = stock | {"c_fc.bias": stock["c_fc.bias"][: FFN // 2]}
    texts = []
    for state in (wrong, half, {**stock, "c_fc.weight": "text"}, {key: stock[key] for key in list(stock)[1:]}):
        for strict in (True, False):
            try:
                texts.append(str(mlp.load_state_dict(state, strict=strict)))
            except RuntimeError as error:
                texts.append(str(error))
    return texts


@pytest.mark.parametrize("params", ["dtensor", "local"])
def test_a_wrong_shape_names_the_key_and_the_shapes_that_fit(ranks: Any, params: str):
    kind = " as a DTensor" if params == "dtensor" else ""
    for wrong, loose, half, half_loose, text, _, missing, missing_loose in ranks(2, _errors_body, params):
        assert loose == wrong
        assert half_loose == half
        assert "size mismatch for c_fc.weight: copying a param with shape torch.Size([26, 16]) from checkpoint" in wrong
        assert f"Expected the whole torch.Size([24, 16]), or this rank's torch.Size([12, 16]){kind}." in wrong
        assert f"Expected the whole torch.Size([16]), or this rank's torch.Size([16]){kind}." in wrong
        assert wrong.count("size mismatch") == 2
        # A plain tensor of this rank's shape is a part only where parameters are plain.
        assert ("size mismatch for c_fc.bias" in half) == (params == "dtensor")
        assert "expected torch.Tensor or Tensor-like object from checkpoint but received <class 'str'>" in text
        assert 'Missing key(s) in state_dict: "c_fc.weight"' in missing
        assert missing_loose == "_IncompatibleKeys(missing_keys=['c_fc.weight'], unexpected_keys=[])"


@pytest.mark.parametrize("assign", [False, True])
def test_in_one_process_torch_loads_alone(assign: bool):
    state = StockMLP(gated=True).state_dict()
    mlp = ParallelMLP(WIDTH, FFN, gated=True)
    mlp.load_state_dict(state, assign=assign)
    for key, value in mlp.state_dict().items():
        assert torch.equal(value, state[key])
        assert (value.data_ptr() == state[key].data_ptr()) == assign
    with pytest.raises(RuntimeError) as error:
        mlp.load_state_dict(state | {"up_proj.weight": torch.ones(2, 2)})
    assert str(error.value).endswith("the shape in current model is torch.Size([24, 16]).")
    tied = LAYERS["model-tied"].build()
    tied.load_state_dict(LAYERS["model-tied"].build().state_dict(), assign=assign)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def _fsdp_body(rank: int, world: int) -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    mlp = ParallelMLP(WIDTH, FFN, mesh=mesh["tp"])
    state = StockMLP(gated=False).state_dict()
    fully_shard(mlp, mesh=mesh["dp"])
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        mlp.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"size mismatch") as error:
        mlp.load_state_dict({"c_fc.bias": torch.ones(2)}, strict=False)
    assert "Expected" not in str(error.value)
    set_model_state_dict(mlp, dict(state), options=StateDictOptions(full_state_dict=True))
    how = StateDictOptions(full_state_dict=True, cpu_offload=True)
    assert _equal(get_model_state_dict(mlp, options=how), {} if rank else state)


def test_under_fsdp2_torch_loads_alone(ranks: Any):
    ranks(2, _fsdp_body)
