"""Gradients accumulated in ``main_grad``, and their transfer to an optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardfuse import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    ParallelTransformer,
    TransformerConfig,
    attach_main_grads,
    main_grads_to_grads,
    tp_group,
    zero_main_grads,
)
from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.linear import gated_linear, linear_act
from shardfuse.parallel.core.sharding import local_tensor
from shardfuse.parallel.pipeline.split_backward import stage_backward_input, stage_backward_weight
from shardfuse.parallel.zero.clip import GradientClipper

FUSE = {"fuse_wgrad_accumulation": True}
MICRO = 3
pytestmark = pytest.mark.usefixtures("kernels_on_device")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _triplet(build: Any, **options: Any) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Modules with the same parameters: one with buffers, one without, and the latter in fp64."""
    torch.manual_seed(3)
    plain = build(**options)
    fused, exact = build(**options, **FUSE), build(**{**options, "dtype": torch.float64})
    for module in (fused, exact):
        module.load_state_dict(plain.state_dict())
    attach_main_grads(fused)
    return fused, plain, exact


def _train(module: nn.Module, inputs: list[Any]) -> None:
    dtype = next(module.parameters()).dtype
    for args in inputs:
        out = module(*(arg.to(dtype) if arg.is_floating_point() else arg for arg in args))
        out.backward(torch.ones_like(out))


def _train_all(modules: tuple[nn.Module, ...], inputs: list[Any]) -> None:
    for module in modules:
        _train(module, inputs)
    main_grads_to_grads(modules[0])


def _check(fused: nn.Module, plain: nn.Module, exact: nn.Module, of: str = "grad") -> None:
    """Assert that the first module's gradients, or parameters, are as accurate as the second's."""
    for (name, *_), *params in zip(fused.named_parameters(), *(m.parameters() for m in (fused, plain, exact))):
        found = [local_tensor(param.grad if of == "grad" else param) for param in params]
        terms = sum(sum(param.shape) for param in exact.parameters())  # as if its products were chained
        verdict = accuracy.judge(name, *found, terms=terms, roundings=8)
        assert verdict.ok, verdict


def _model(**options: Any) -> ParallelTransformer:
    sizes: dict[str, Any] = {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_heads": 4,
    }
    sizes |= {name: options.pop(name) for name in ("style", "tie_embeddings") if name in options}
    return ParallelTransformer(TransformerConfig(**sizes), **options)


def _batches() -> list[Any]:
    return [(torch.randint(16, (2, 4)), torch.randint(16, (2, 4))) for _ in range(MICRO)]


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda **k: ColumnParallelLinear(8, 12, activation="silu", **k), (5, 8)),
        (lambda **k: ParallelMLP(8, 12, **k), (5, 8)),
        (lambda **k: ParallelMLP(8, 12, gated=True, recompute=2, **k), (5, 8)),
        (lambda **k: ParallelAttention(16, 4, 2, **k), (2, 5, 16)),
    ],
    ids=["linear", "mlp", "mlp-gated", "attention"],
)
@pytest.mark.parametrize(
    "impl",
    [
        "reference",
        pytest.param(
            "triton",
            marks=pytest.mark.interpret,
        ),
    ],
)
def test_micro_batches_add_up_in_the_buffer(build: Any, shape: tuple[int, ...], impl: str):
    fused, plain, exact = _triplet(lambda **k: build(impl="reference" if "dtype" in k else impl, **k))
    inputs = [(torch.randn(shape),) for _ in range(MICRO)]
    _train(fused, inputs)
    assert all(param.grad is None for param in fused.parameters())
    main_grads_to_grads(fused)
    _train_all((plain, exact), inputs)
    _check(fused, plain, exact)
    for param in fused.parameters():
        assert param.grad.data_ptr() == param.main_grad.data_ptr()  # no copy where dtypes agree


def test_fp32_buffers_lose_less_than_bf16_gradients():
    modules = fused, plain, exact = _triplet(lambda **k: ParallelMLP(16, 32, **{"dtype": torch.bfloat16, **k}))
    _train_all(modules, [(torch.randn(8, 16),) for _ in range(64)])
    for (name, param), low, oracle in zip(fused.named_parameters(), plain.parameters(), exact.parameters()):
        assert param.main_grad.dtype == torch.float32
        assert param.grad.dtype == torch.bfloat16
        error = accuracy.relative_error(param.main_grad, oracle.grad)
        assert error <= 0.5 * accuracy.relative_error(low.grad, oracle.grad), name


@pytest.mark.parametrize("style", ["gelu", "gated"])
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
def test_a_model_trains_the_same(style: str, recompute: bool):
    modules = _triplet(_model, style=style, recompute=recompute)
    for _ in range(2):
        batches = _batches()
        for module in modules:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            _train(module, batches)
            main_grads_to_grads(module)  # nothing to do for those without buffers
            GradientClipper(module.parameters(), 0.5, module.group).clip()
            optimizer.step()
            optimizer.zero_grad()
            zero_main_grads(module)
    assert not any(param.main_grad.any() for param in modules[0].parameters() if hasattr(param, "main_grad"))
    _check(*modules, of="parameters")


def test_only_trained_parameters_of_fused_layers_get_buffers():
    model = _model(**FUSE)
    model.model.layers[0].requires_grad_(False)
    attach_main_grads(model, torch.float32)
    with_buffers = {name for name, param in model.named_parameters() if hasattr(param, "main_grad")}
    assert "model.layers.1.mlp.c_fc.weight" in with_buffers
    assert "lm_head.weight" in with_buffers
    assert not any("layers.0." in name or "norm" in name or "embed" in name for name in with_buffers)


def test_a_weight_shared_with_another_layer_gets_both_gradients():
    modules = fused, plain, exact = _triplet(lambda **k: _model(tie_embeddings=True, **k))
    batches = _batches()
    _train_all((plain, exact), batches)
    _train(fused, batches)
    assert fused.lm_head.weight.grad is not None  # the embedding's part
    for _ in range(2):  # a second call adds nothing
        main_grads_to_grads(fused)
        _check(*modules)


def test_frozen_parameters_stay_without_gradients():
    mlp = ParallelMLP(8, 16, **FUSE)
    attach_main_grads(mlp)
    mlp.c_fc.requires_grad_(False)
    _train(mlp, [(torch.randn(4, 8),)])
    main_grads_to_grads(mlp)
    assert mlp.c_fc.weight.grad is None
    assert mlp.c_proj.weight.grad.any()


@pytest.mark.parametrize("level", [0, 2])
def test_a_split_backward_returns_gradients_that_reach_the_optimizer_once(level: int):
    fused, plain, exact = _triplet(lambda **k: ParallelMLP(8, 16, gated=True, recompute=level, **k))
    inputs = [torch.randn(4, 8) for _ in range(2)]
    for x in inputs:
        x.requires_grad_()
        y = fused(x)
        _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], fused.parameters())
        stage_backward_weight(fused.parameters(), groups)
    assert not any(param.main_grad.any() for param in fused.parameters())
    _train(fused, [(x,) for x in inputs])
    main_grads_to_grads(fused)
    _train_all((plain, exact), [(x,) for x in inputs + inputs])
    _check(fused, plain, exact)


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="no layer of this ParallelMLP adds to main_grad; build it with fuse_wgrad"):
        attach_main_grads(ParallelMLP(8, 16))
    with pytest.raises(ValueError, match=r"dtype=torch.float16: expected torch.float32 or torch.bfloat16"):
        attach_main_grads(ParallelMLP(8, 16, dtype=torch.bfloat16, **FUSE), torch.float16)
    for build in (lambda **k: ColumnParallelLinear(8, 16, **k), lambda **k: ParallelMLP(8, 16, gated=True, **k)):
        module = build(**FUSE)
        with pytest.raises(ValueError, match="has no main_grad: call attach_main_grads"):
            module(torch.randn(2, 8))
        with torch.no_grad():
            module(torch.randn(2, 8))  # serving asks for no buffers
        attach_main_grads(module)
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        with pytest.raises(Exception, match=r"main_grad in place, which a compiled backward does not do"):
            compiled(torch.randn(2, 8))


def _wrapped_body(rank: int, world: int) -> list[str]:
    messages = []

    def refused(call: Any, *args: Any) -> None:
        with pytest.raises(ValueError) as caught:
            call(*args)
        messages.append(str(caught.value))

    x, mlp = torch.randn(4, 8), ParallelMLP(8, 16, **FUSE)
    attach_main_grads(mlp)
    replica = DistributedDataParallel(mlp)
    refused(replica, x)
    refused(attach_main_grads, replica)
    sharded = ParallelMLP(8, 16, **FUSE)
    attach_main_grads(sharded)
    refused(fully_shard(sharded, mesh=init_device_mesh("cpu", (world,))), x)
    return messages


def test_wrappers_that_wait_for_grad_are_refused(ranks: Any):
    for forward, attach, fsdp in ranks(2, _wrapped_body):
        assert "under DistributedDataParallel: it averages param.grad" in forward
        assert "leave DDP out and reduce main_grad yourself" in attach
        assert "has no main_grad" in fsdp
        assert "of no use under FSDP" in fsdp


def _ranks_body(rank: int, world: int, params: str, sequence_parallel: bool, dtype: torch.dtype) -> None:
    group = tp_group(dist.group.WORLD)
    modules = fused, *_ = _triplet(_model, mesh=group, params=params, sequence_parallel=sequence_parallel, dtype=dtype)
    _train_all(modules, _batches())
    for name, param in fused.named_parameters():
        assert isinstance(param.grad, DTensor) == isinstance(param, DTensor) == (params == "dtensor")
        if isinstance(param, DTensor):
            assert param.grad.placements == param.placements
        if hasattr(param, "main_grad"):
            assert param.main_grad.shape == local_tensor(param).shape, name
    _check(*modules)
    norms = [GradientClipper(module.parameters(), 0.1, group).clip() for module in modules]
    verdict = accuracy.judge("norm", norms[0].to(dtype), *norms[1:], terms=256)  # gradients rounded to dtype
    assert verdict.ok, verdict
    torch.optim.AdamW(fused.parameters()).step()


@pytest.mark.parametrize("params", ["dtensor", "local"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_a_sharded_model_trains_the_same(ranks: Any, params: str, sequence_parallel: bool):
    ranks(2, _ranks_body, params, sequence_parallel, torch.float32)


def test_a_sharded_model_in_bf16_gets_gradients_in_its_own_dtype(ranks: Any):
    ranks(2, _ranks_body, "dtensor", False, torch.bfloat16)


@pytest.mark.interpret
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("gated", [False, True])
def test_gradients_that_are_asked_for_are_returned_under_autocast_too(gated: bool, impl: str):
    x = torch.randn(2, 3, 8)
    weights = [torch.nn.Parameter(torch.randn(16, 8)) for _ in range(2 if gated else 1)]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)

    def loss() -> torch.Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            if gated:
                y = gated_linear(x, *weights, impl=impl, fuse_wgrad_accumulation=True)
            else:
                y = linear_act(x, weights[0], activation="relu", impl=impl, fuse_wgrad_accumulation=True)
        return y.float().sum()

    found = torch.autograd.grad(loss(), weights)
    assert not any(weight.main_grad.any() for weight in weights)
    loss().backward()
    for weight, grad in zip(weights, found):
        assert grad.dtype == torch.float32
        assert torch.allclose(weight.main_grad, grad, rtol=2**-7)  # the gradient was rounded to bf16
        assert weight.grad is None
