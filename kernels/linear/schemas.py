"""The kernels of ``launch.py`` as torch ops, with their shape functions: what torch.compile and opcheck see.

None of them is differentiable: ``op.py`` and ``parallel/`` put them together in autograd functions. Lists of results
are what the launchers return, those that were not asked for left out.
"""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import library


def _fwd_kernel(x: Any, weights: Any, biases: Any, residual: Any, activation: str, save_preact: bool) -> Any:
    from . import launch  # Triton, only when a kernel runs

    ys, zs = launch.linear_act_fwd(x, tuple(weights), tuple(biases), residual, activation, save_preact)
    return ys + zs


def _fwd_fake(x: Any, weights: Any, biases: Any, residual: Any, activation: str, save_preact: bool) -> Any:
    return [x.new_empty((x.shape[0], w.shape[0])) for _ in range(2 if save_preact else 1) for w in weights]


def _gated_kernel(x: Any, weights: Any, biases: Any, activation: str, save_preacts: bool) -> Any:
    from . import launch

    return launch.gated_linear_fwd(x, tuple(weights), tuple(biases), activation, save_preacts)


def _gated_fake(x: Any, weights: Any, biases: Any, activation: str, save_preacts: bool) -> Any:
    return [x.new_empty((x.shape[0], weights[0].shape[0])) for _ in range(3 if save_preacts else 1)]


def _dgrad_kernel(dzs: Any, weights: Any) -> torch.Tensor:
    from . import launch

    return launch.linear_dgrad(tuple(dzs), tuple(weights))


def _dgrad_fake(dzs: Any, weights: Any) -> torch.Tensor:
    return dzs[0].new_empty((dzs[0].shape[0], weights[0].shape[1]))


def _dgrad_act_kernel(dy: Any, weight: Any, z: Any, activation: str, rebuild: bool) -> Any:
    from . import launch

    return launch.linear_dgrad_act(dy, weight, z, activation, rebuild)


def _dgrad_act_fake(dy: Any, weight: Any, z: Any, activation: str, rebuild: bool) -> Any:
    return [z.new_empty(z.shape) for _ in range(2 if rebuild else 1)]


def _dgrad_gated_kernel(dy: Any, weight: Any, g: Any, u: Any, activation: str, rebuild: bool) -> Any:
    from . import launch

    return launch.linear_dgrad_gated(dy, weight, g, u, activation, rebuild)


def _dgrad_gated_fake(dy: Any, weight: Any, g: Any, u: Any, activation: str, rebuild: bool) -> Any:
    return [g.new_empty(g.shape) for _ in range(3 if rebuild else 2)]


def _wgrad_kernel(dzs: Any, x: Any, want_bias: Any) -> Any:
    from . import launch

    dws, dbs = launch.linear_wgrad(tuple(dzs), x, want_bias)
    return dws + [db for db in dbs if db is not None]


def _wgrad_fake(dzs: Any, x: Any, want_bias: Any) -> Any:
    dws = [x.new_empty((dz.shape[1], x.shape[1])) for dz in dzs]
    return dws + [x.new_empty((dz.shape[1],)) for dz, want in zip(dzs, want_bias) if want]


def _wgrad_into_kernel(dzs: Any, x: Any, dws: Any, dbs: Any) -> None:
    from . import launch

    for buffer in (*dws, *dbs):
        if buffer is not None and not buffer.is_contiguous():
            raise ValueError(
                f"linear_wgrad_: a buffer has shape {tuple(buffer.shape)} and strides {buffer.stride()}: expected one "
                "that is contiguous"
            )
    launch.linear_wgrad_(tuple(dzs), x, tuple(dws), tuple(dbs))


def _wgrad_into_fake(dzs: Any, x: Any, dws: Any, dbs: Any) -> None:
    pass


def _act_grad_kernel(dy: Any, z: Any, activation: str) -> torch.Tensor:
    from . import launch

    return launch.act_grad(dy, z, activation)


def _act_grad_fake(dy: Any, z: Any, activation: str) -> torch.Tensor:
    return z.new_empty(z.shape)


def _gated_act_grad_kernel(dh: Any, g: Any, u: Any, activation: str) -> Any:
    from . import launch

    return launch.gated_act_grad(dh, g, u, activation)


def _gated_act_grad_fake(dh: Any, g: Any, u: Any, activation: str) -> Any:
    return g.new_empty(g.shape), g.new_empty(g.shape)


linear_act_fwd = library.register(
    "linear_act_fwd(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor? residual, str activation, bool save_preact)"
    " -> Tensor[]",
    _fwd_kernel,
    _fwd_fake,
)
gated_linear_fwd = library.register(
    "gated_linear_fwd(Tensor x, Tensor[] weights, Tensor?[] biases, str activation, bool save_preacts) -> Tensor[]",
    _gated_kernel,
    _gated_fake,
)
linear_dgrad = library.register("linear_dgrad(Tensor[] dzs, Tensor[] weights) -> Tensor", _dgrad_kernel, _dgrad_fake)
linear_dgrad_act = library.register(
    "linear_dgrad_act(Tensor dy, Tensor weight, Tensor z, str activation, bool rebuild) -> Tensor[]",
    _dgrad_act_kernel,
    _dgrad_act_fake,
)
linear_dgrad_gated = library.register(
    "linear_dgrad_gated(Tensor dy, Tensor weight, Tensor g, Tensor u, str activation, bool rebuild) -> Tensor[]",
    _dgrad_gated_kernel,
    _dgrad_gated_fake,
)
linear_wgrad = library.register(
    "linear_wgrad(Tensor[] dzs, Tensor x, bool[] want_bias) -> Tensor[]", _wgrad_kernel, _wgrad_fake
)
linear_wgrad_ = library.register(
    "linear_wgrad_(Tensor[] dzs, Tensor x, Tensor(a!)[] dws, Tensor(b!)?[] dbs) -> ()",
    _wgrad_into_kernel,
    _wgrad_into_fake,
)
act_grad = library.register("act_grad(Tensor dy, Tensor z, str activation) -> Tensor", _act_grad_kernel, _act_grad_fake)
gated_act_grad = library.register(
    "gated_act_grad(Tensor dh, Tensor g, Tensor u, str activation) -> (Tensor, Tensor)",
    _gated_act_grad_kernel,
    _gated_act_grad_fake,
)
