"""How many things a decoder block launches, forward and backward, and that each is a kernel it cannot do without."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardfuse import ParallelBlock, TransformerConfig
from shardfuse.layers.attention.rope import Rotary, rope_tables

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# In fp32 torch's attention on a GPU repeats the heads of keys and values before it multiplies.
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
_FREE = {"aten._unsafe_view", "aten.detach", "aten.empty", "aten.promote_types"}  # no kernel, no pass over memory


class Launches(TorchDispatchMode):
    """Counts the ops that run something."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).rpartition(".")[0]
        if not func.is_view and name not in _FREE:
            self.counts["attention" if "scaled_dot_product" in name else name] += 1
        return out


def _block(style: str, **options: Any) -> tuple[ParallelBlock, torch.Tensor, Any]:
    config = TransformerConfig(
        style=style, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, **options
    )
    block = ParallelBlock(config, impl="triton", device=DEVICE, dtype=DTYPE)
    x = torch.randn(2, 8, 32, device=DEVICE, dtype=DTYPE, requires_grad=True)
    rope = rope_tables(torch.arange(8, device=DEVICE), Rotary.of(config))
    return block, x, rope


def _count(style: str, **options: Any) -> tuple[Counter[str], Counter[str]]:
    block, x, rope = _block(style, **options)
    with Launches() as forward:
        y = block(x, rope=rope)
    grad = torch.randn_like(y)
    with Launches() as backward:
        y.backward(grad)
    return forward.counts, backward.counts


FORWARD = {"shardfuse.norm_fwd": 2, "shardfuse.apply_rope": 1, "attention": 1}
BACKWARD = {
    "shardfuse.norm_bwd": 2,
    "shardfuse.apply_rope": 1,
    "attention": 1,
    "shardfuse.linear_dgrad": 3,  # q, k and v in one; the output projection; the MLP's first product
    "shardfuse.linear_wgrad": 4,
}


@pytest.mark.interpret
def test_a_gated_block_launches_nothing_but_its_kernels():
    forward, backward = _count("gated")
    assert forward == FORWARD | {"shardfuse.linear_act_fwd": 3, "shardfuse.gated_linear_fwd": 1}
    assert backward == BACKWARD | {"shardfuse.linear_dgrad_gated": 1}


@pytest.mark.interpret
def test_a_gelu_block_launches_nothing_but_its_kernels():
    forward, backward = _count("gelu")
    assert forward == FORWARD | {"shardfuse.linear_act_fwd": 4}
    assert backward == BACKWARD | {"shardfuse.linear_dgrad_act": 1}


@pytest.mark.interpret
def test_dropout_costs_an_rng_key_and_one_launch_at_the_end():
    forward, backward = _count("gated", residual_dropout=0.1)
    drawn = {"shardfuse.dropout": 1, "aten.randint": 1}
    assert forward == FORWARD | drawn | {"shardfuse.linear_act_fwd": 3, "shardfuse.gated_linear_fwd": 1}
    assert backward == BACKWARD | {"shardfuse.dropout": 1, "shardfuse.linear_dgrad_gated": 1}


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="counts kernels on a GPU")
@pytest.mark.parametrize("style", ["gated", "gelu"])
def test_no_elementwise_kernel_runs_on_a_gpu(style: str):
    """By torch's profiler: whatever an op is made of, ours and torch's attention included."""
    block, x, rope = _block(style)
    block, x = block.bfloat16(), x.detach().bfloat16().requires_grad_()

    def step() -> None:
        block(x, rope=rope).backward(x.detach())

    step()  # compiles
    block.zero_grad(set_to_none=True)
    x.grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    stray = [name for name in kernels if "elementwise" in name or "vectorized" in name or "Memcpy" in name]
    assert stray == []
    # Of ours: each product once (four forward, eight backward), rotary positions both ways, each norm's two directions.
    assert sum("_gemm_kernel" in name for name in kernels) == 12
    assert sum("_rope_kernel" in name for name in kernels) == 2
    assert sum("_norm_fwd_kernel" in name for name in kernels) == 2
