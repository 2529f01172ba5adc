"""The launches of ``launch.py`` as torch ops of the same names, with shape functions for torch.compile and opcheck.

None of them is differentiable: ``op.py`` and ``parallel/`` put them together in autograd functions. Lists of results
leave out what was not asked for. ``library.launches`` chooses between an op and its launch.
"""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import library

LAUNCH = f"{__package__}.launch"


def _fwd_fake(x: Any, weights: Any, biases: Any, residual: Any, activation: str, save_preact: bool) -> Any:
    return [x.new_empty((x.shape[0], w.shape[0])) for _ in range(2 if save_preact else 1) for w in weights]


def _gated_fake(x: Any, weights: Any, biases: Any, activation: str, save_preact: bool) -> Any:
    return [x.new_empty((x.shape[0], weights[0].shape[0])) for _ in range(3 if save_preact else 1)]


def _dgrad_fake(dzs: Any, weights: Any) -> torch.Tensor:
    return dzs[0].new_empty((dzs[0].shape[0], weights[0].shape[1]))


def _dgrad_act_fake(dy: Any, weight: Any, z: Any, activation: str, recompute_act: bool) -> Any:
    return [z.new_empty(z.shape) for _ in range(2 if recompute_act else 1)]


def _dgrad_gated_fake(dy: Any, weight: Any, g: Any, u: Any, activation: str, recompute_act: bool) -> Any:
    return [g.new_empty(g.shape) for _ in range(3 if recompute_act else 2)]


def _wgrad_fake(dzs: Any, x: Any, want_bias: Any) -> Any:
    dws = [x.new_empty((dz.shape[1], x.shape[1])) for dz in dzs]
    return dws + [x.new_empty((dz.shape[1],)) for dz, want in zip(dzs, want_bias) if want]


def _wgrad_into_fake(dzs: Any, x: Any, dws: Any, dbs: Any) -> None:
    pass


def _act_grad_fake(dy: Any, z: Any, activation: str) -> torch.Tensor:
    return z.new_empty(z.shape)


def _gated_act_grad_fake(dh: Any, g: Any, u: Any, activation: str) -> Any:
    return g.new_empty(g.shape), g.new_empty(g.shape)


linear_act_fwd = library.register(
    "linear_act_fwd(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor? residual, str activation, bool save_preact)"
    " -> Tensor[]",
    LAUNCH,
    _fwd_fake,
)
gated_linear_fwd = library.register(
    "gated_linear_fwd(Tensor x, Tensor[] weights, Tensor?[] biases, str activation, bool save_preact) -> Tensor[]",
    LAUNCH,
    _gated_fake,
)
linear_dgrad = library.register("linear_dgrad(Tensor[] dzs, Tensor[] weights) -> Tensor", LAUNCH, _dgrad_fake)
linear_dgrad_act = library.register(
    "linear_dgrad_act(Tensor dy, Tensor weight, Tensor z, str activation, bool recompute_act) -> Tensor[]",
    LAUNCH,
    _dgrad_act_fake,
)
linear_dgrad_gated = library.register(
    "linear_dgrad_gated(Tensor dy, Tensor weight, Tensor g, Tensor u, str activation, bool recompute_act) -> Tensor[]",
    LAUNCH,
    _dgrad_gated_fake,
)
linear_wgrad = library.register(
    "linear_wgrad(Tensor[] dzs, Tensor x, bool[] want_bias) -> Tensor[]", LAUNCH, _wgrad_fake
)
linear_wgrad_ = library.register(
    "linear_wgrad_(Tensor[] dzs, Tensor x, Tensor(a!)[] dws, Tensor(b!)?[] dbs) -> ()",
    LAUNCH,
    _wgrad_into_fake,
)
act_grad = library.register("act_grad(Tensor dy, Tensor z, str activation) -> Tensor", LAUNCH, _act_grad_fake)
gated_act_grad = library.register(
    "gated_act_grad(Tensor dh, Tensor g, Tensor u, str activation) -> (Tensor, Tensor)",
    LAUNCH,
    _gated_act_grad_fake,
)
