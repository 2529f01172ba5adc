"""The kernels of ``launch.py`` as torch ops, with their shape functions: what torch.compile and opcheck see.

None of them is differentiable: ``op.py`` and ``parallel/linear.py`` put them together in autograd functions.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import library


def _fwd_kernel(x: Any, weights: Any, biases: Any, activation: str, save_preact: bool) -> list[torch.Tensor]:
    from . import launch  # Triton, only when a kernel runs

    ys, zs = launch.linear_act_fwd(x, tuple(weights), tuple(biases), activation, save_preact)
    return ys + zs


def _fwd_fake(x: Any, weights: Any, biases: Any, activation: str, save_preact: bool) -> list[torch.Tensor]:
    return [x.new_empty((x.shape[0], w.shape[0])) for _ in range(2 if save_preact else 1) for w in weights]


def _dgrad_kernel(dzs: Any, weights: Any) -> torch.Tensor:
    from . import launch

    return launch.linear_dgrad(tuple(dzs), tuple(weights))


def _dgrad_fake(dzs: Any, weights: Any) -> torch.Tensor:
    return dzs[0].new_empty((dzs[0].shape[0], weights[0].shape[1]))


def _wgrad_kernel(dzs: Any, x: Any, want_bias: Any) -> list[torch.Tensor]:
    from . import launch

    dws, dbs = launch.linear_wgrad(tuple(dzs), x, want_bias)
    return dws + [db for db in dbs if db is not None]


def _wgrad_fake(dzs: Any, x: Any, want_bias: Any) -> list[torch.Tensor]:
    dws = [x.new_empty((dz.shape[1], x.shape[1])) for dz in dzs]
    return dws + [x.new_empty((dz.shape[1],)) for dz, want in zip(dzs, want_bias) if want]


def _act_grad_kernel(dy: Any, z: Any, activation: str) -> torch.Tensor:
    from . import launch

    return launch.act_grad(dy, z, activation)


def _act_grad_fake(dy: Any, z: Any, activation: str) -> torch.Tensor:
    return torch.empty_like(z)


linear_act_fwd = library.register(
    "linear_act_fwd(Tensor x, Tensor[] weights, Tensor?[] biases, str activation, bool save_preact) -> Tensor[]",
    _fwd_kernel,
    _fwd_fake,
)
linear_dgrad = library.register("linear_dgrad(Tensor[] dzs, Tensor[] weights) -> Tensor", _dgrad_kernel, _dgrad_fake)
linear_wgrad = library.register(
    "linear_wgrad(Tensor[] dzs, Tensor x, bool[] want_bias) -> Tensor[]", _wgrad_kernel, _wgrad_fake
)
act_grad = library.register("act_grad(Tensor dy, Tensor z, str activation) -> Tensor", _act_grad_kernel, _act_grad_fake)
