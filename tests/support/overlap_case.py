"""The MLP that tests of overlap compute with several strategies: operands, this rank's parts, one process's results.

All operands follow from fixed seeds, so ranks make the same ones without communication.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.linear import apply_activation
from shardfuse.parallel.core import collectives
from shardfuse.parallel.core.mesh import Group, tp_group
from shardfuse.parallel.core.options import TPOptions
from shardfuse.parallel.linear import column_linear, row_linear
from shardfuse.parallel.mlp import fused_mlp

T, D, FFN = 24, 16, 48
SP = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
KINDS = ("layers", "mlp", "gated")
KIND = pytest.mark.parametrize("kind", KINDS)


def world_group() -> Group:
    """All processes, as the group of tensor parallelism."""
    return tp_group(dist.group.WORLD)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether fp64 results are equal except for the order of summation."""
    return accuracy.within("fp64", ours, theirs, 1e-12).ok


def whole_operands(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """An MLP's logical operands; w3 and b3 belong to the up layer."""
    shapes = {"x": (T, D), "dy": (T, D), "w1": (FFN, D), "b1": (FFN,), "w3": (FFN, D), "b3": (FFN,)}
    shapes |= {"w2": (D, FFN), "b2": (D,)}
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }


def local_leaves(
    whole: dict[str, torch.Tensor], kind: str, rank: int, world: int, sequence_parallel: bool
) -> dict[str, Any]:
    """This rank's parts of the operands that need a gradient."""
    cut = slice(rank * FFN // world, (rank + 1) * FFN // world)
    tokens = slice(rank * T // world, (rank + 1) * T // world) if sequence_parallel else slice(None)
    index: dict[str, Any] = {"x": tokens, "w1": cut, "b1": cut, "w3": cut, "b3": cut}
    index |= {"w2": (slice(None), cut), "b2": ...}
    if kind == "mlp":
        del index["w3"], index["b3"]
    return {name: whole[name][place].clone().requires_grad_() for name, place in index.items()}


def run_forward(leaves: dict[str, Any], kind: str, group: Group, **options: Any) -> torch.Tensor:
    """ "layers": a column layer of two weights and a row layer; "mlp" and "gated": both as one function."""
    first = [name for name in ("1", "3") if "w" + name in leaves]
    weights, biases = [leaves["w" + name] for name in first], [leaves["b" + name] for name in first]
    if kind != "layers":
        recompute = options.pop("recompute", 0)
        activation = "silu" if kind == "gated" else "gelu_tanh"
        told = TPOptions(group, site="mlp", **options)
        operands = leaves["x"], weights, biases, leaves["w2"], leaves["b2"]
        return fused_mlp(*operands, told, activation=activation, recompute=recompute)
    into, out = (TPOptions(group, site=site, **options) for site in ("in", "out"))
    g, u = column_linear(leaves["x"], weights, biases, into, activation="gelu_tanh")
    return row_linear(g + u, leaves["w2"], leaves["b2"], out)


def stock_forward(leaves: dict[str, torch.Tensor], kind: str) -> torch.Tensor:
    """The result of ``run_forward``, in plain torch and one process."""
    h = apply_activation(F.linear(leaves["x"], leaves["w1"], leaves["b1"]), "silu" if kind == "gated" else "gelu_tanh")
    if kind != "mlp":
        u = F.linear(leaves["x"], leaves["w3"], leaves["b3"])
        h = h * u if kind == "gated" else h + apply_activation(u, "gelu_tanh")
    return F.linear(h, leaves["w2"], leaves["b2"])


def run_backward(y: torch.Tensor, dy: torch.Tensor, leaves: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The output, and the gradients by the leaves' names."""
    for leaf in leaves.values():
        leaf.grad = None
    y.backward(dy.to(y.dtype))
    return {"y": y.detach().clone()} | {name: leaf.grad for name, leaf in leaves.items()}


def reference(
    whole: dict[str, torch.Tensor], kind: str, rank: int, world: int, sequence_parallel: bool
) -> dict[str, torch.Tensor]:
    """This rank's parts of one process's output and gradients."""
    everything = local_leaves(whole, kind, 0, 1, False)
    found = run_backward(stock_forward(everything, kind), whole["dy"], everything)
    parts_of = local_leaves(whole | found, kind, rank, world, sequence_parallel)
    tokens = parts_of["x"].shape[0]
    y = found["y"][rank * tokens : (rank + 1) * tokens] if sequence_parallel else found["y"]
    return {"y": y} | {name: leaf.detach() for name, leaf in parts_of.items()}


def local_dy(
    whole: dict[str, torch.Tensor], leaves: dict[str, Any], rank: int, sequence_parallel: bool
) -> torch.Tensor:
    """This rank's rows of the output's gradient: with sequence parallelism its rows of x, else all."""
    tokens = leaves["x"].shape[0]
    return whole["dy"][rank * tokens : (rank + 1) * tokens] if sequence_parallel else whole["dy"]


def counted_calls() -> dict[Any, tuple[int, int]]:
    """(calls, bytes) of the collectives that carry data, by kind and site."""
    return {
        key: (calls, collectives.payload[key]) for key, calls in collectives.calls.items() if key[0] != "gather_objects"
    }


def recompute_options(kind: str) -> list[dict[str, Any]]:
    """The recomputation options of a kind; only the MLP as one function has any."""
    return [{}] if kind == "layers" else [{"recompute": level} for level in (0, 1, 2)]
