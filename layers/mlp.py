"""The feed-forward layer of a transformer, split over a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..kernels.linear import ACTIVATIONS, apply_activation, functional, gated_linear, linear_act, linear_act_choice
from ..kernels.runtime.checks import whole_number
from ..kernels.runtime.dispatch import uses_reference
from ..kernels.runtime.names import expected
from ..parallel.core.first_calls import compare_call
from ..parallel.core.sharding import local_tensors
from ..parallel.mlp import RECOMPUTE, fused_mlp
from ..parallel.overlap.partial_sum import PartialSum
from .linear import ColumnParallelLinear, RowParallelLinear, check_tokens, held, project
from .module import (
    FusedGroup,
    Layer,
    TensorParallel,
    check_divides,
    held_outside_compile,
    hooked_everywhere,
    is_plain_module,
)
from .options import LayerKwargs, LayerOptions, Unpack

SITE = "mlp"


class ParallelMLP(TensorParallel, Layer):
    """``c_proj(activation(c_fc(x)))``, or gated: ``down_proj(activation(gate_proj(x)) * up_proj(x))``.

    x and the result are [..., D], replicated; with sequence parallelism [T/R, D]. The first layer splits columns, the
    second rows, so the activation between them stays where it is: one all-reduce forward and one backward (with
    sequence parallelism an all-gather and a reduce-scatter each way). Parameters are called as in Starcoder2
    (``c_fc``, ``c_proj``) or, gated, as in Llama (``gate_proj``, ``up_proj``, ``down_proj``).

    ``gated`` selects the second form. ``activation=None`` means tanh-GeLU, or SiLU where gated; ``bias=None`` means
    biases unless gated. ``recompute`` says which tensors are kept for backward: 0 the input, the pre-activation and the
    hidden activation, 1 the first two, 2 the input alone (the first product then runs twice). The other keyword
    arguments are documented in :class:`~shardfuse.layers.options.LayerOptions`.

    The two layers run as one autograd function (``parallel/mlp.py``). In three cases they run one after the other, each
    saving its own tensors: where a layer was replaced or has hooks (FSDP2 on a single layer, adapters); under
    torch.compile over several ranks, where the compiler decides what is saved; and on one rank without gradients, or
    without kernels at ``recompute=0``, where torch's own autograd saves the same.

    Raises ValueError where ``ffn_size`` does not divide by the group's size, and for an unknown ``activation`` or
    ``recompute``.
    """

    column: Callable[..., Any] = ColumnParallelLinear
    row: Callable[..., Any] = RowParallelLinear

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        activation: str | None = None,
        gated: bool = False,
        bias: bool | None = None,
        recompute: int = 0,
        **options: Unpack[LayerKwargs],
    ) -> None:
        shared = LayerOptions.of(type(self), options, LayerKwargs)
        super().__init__()
        self.keep(shared)
        self.gated = gated
        self.activation = activation or ("silu" if gated else "gelu_tanh")
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation={activation!r}: {expected(activation, ACTIVATIONS)} (SwiGLU is silu with gated=True)"
            )
        if recompute not in RECOMPUTE:
            raise ValueError(
                f"recompute={recompute!r}: expected 0 (keep the activations), 1 (keep the pre-activation) or 2 (keep "
                "the input only)"
            )
        whole_number("hidden_size", hidden_size)
        self.recompute = recompute
        self.check_sizes(hidden_size, ffn_size, shared)
        bias = not gated if bias is None else bias
        kwargs = shared.kwargs(LayerKwargs)
        column, row = type(self).column, type(self).row
        if gated:
            self.gate_proj = column(hidden_size, ffn_size, bias, site=SITE, **kwargs)
            self.up_proj = column(hidden_size, ffn_size, bias, site=SITE, **kwargs)
            self.down_proj = row(ffn_size, hidden_size, bias, site=SITE, **kwargs)
            self.gate_proj.op = self.up_proj.op = "gated_linear"
        else:
            activation = self.activation
            self.c_fc = column(hidden_size, ffn_size, bias, activation=activation, site=SITE, **kwargs)
            self.c_proj = row(ffn_size, hidden_size, bias, site=SITE, **kwargs)

    def check_sizes(self, hidden_size: int, ffn_size: int, shared: LayerOptions) -> None:
        """ValueError for widths that the ranks cannot divide."""
        check_divides("ffn_size", ffn_size, self.group)

    def forward(self, x: torch.Tensor, *, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The last product's epilogue adds ``residual``, of the result's shape and dtype (one rank only)."""
        if self.group.size > 1:
            compare_call(self, self.group, x=x)
        layers = self._layers()
        plain = all(map(is_plain_module, layers))
        alone = plain and self.group.size == 1 and not (torch.compiler.is_compiling() or hooked_everywhere())
        if alone and residual is None and not (self.recompute or self.fuse_wgrad_accumulation):
            params = [held_outside_compile(layer, *_PARAMETERS) for layer in layers]
            if functional.stays_plain(self.impl, x, params[0][0], not self.training):
                return functional.plain_mlp(x, params, self.activation)
        *first, last = layers
        if not plain or self._composed(x):
            h = self._hidden(x, alone)
            if not alone:
                return last(h) if residual is None else last(h, residual=residual)
            return linear_act(
                h, *held(last, *_PARAMETERS), residual=residual, pack_weight=not last.training, impl=self.impl
            )
        if self.sequence_parallel:
            check_tokens(x)
        return fused_mlp(
            x,
            [layer.weight for layer in first],
            [layer.bias for layer in first],
            last.weight,
            last.bias,
            self.tp_options(SITE),
            activation=self.activation,
            recompute=self.recompute,
            residual=residual,
        )

    def partial_sum(self, x: torch.Tensor) -> PartialSum:
        """This rank's part of :meth:`forward`, still to be summed over the ranks. Inference only, tokens replicated."""
        compare_call(self, self.group, x=x)
        return self._layers()[-1].partial_sum(self._hidden(x))

    def _composed(self, x: torch.Tensor) -> bool:
        """Whether the layers run one after the other although they could run as one function."""
        if self.group.size > 1:
            return torch.compiler.is_compiling()
        if not torch.is_grad_enabled():  # running as one function only changes what backward keeps
            return True
        if self.recompute or self.fuse_wgrad_accumulation:
            return False
        return uses_reference(self.impl, x) or not linear_act_choice(x.dtype, x.device, self.impl).triton

    def _hidden(self, x: torch.Tensor, alone: bool = False) -> torch.Tensor:
        """The hidden activation of x from the first layer's own call; ``alone``: in one process, without hooks."""
        if not self.gated:
            if not alone:
                return self.c_fc(x)
            pack = not self.c_fc.training  # a module's call takes longer than one of an op
            return linear_act(
                x, *held(self.c_fc, *_PARAMETERS), activation=self.activation, pack_weight=pack, impl=self.impl
            )
        gate, up, activation = self.gate_proj, self.up_proj, self.activation
        if not (is_plain_module(gate) and is_plain_module(up)):
            return apply_activation(gate(x), activation) * up(x)
        if self.group.size > 1 and (torch.is_grad_enabled() or self.sequence_parallel):
            g, u = project(x, gate, up)
            return apply_activation(g, activation) * u
        return gated_linear(  # this case has no collective
            x,
            *local_tensors(gate.weight, up.weight, gate.bias, up.bias),
            activation=activation,
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
            pack_weight=not self.training,
            impl=self.impl,
        )

    def fused_groups(self) -> list[FusedGroup]:
        """The layers that share a product and its collectives."""
        *first, last = self._layers()
        if all(map(is_plain_module, [*first, last])):
            return [FusedGroup(tuple(first), runs_again=self.recompute == 2)]
        return [FusedGroup(tuple(first))] if all(map(is_plain_module, first)) else []

    def _layers(self) -> list[Any]:
        found, names = self._modules, _GATED if self.gated else _PLAIN
        if names[0] not in found:  # a subclass may rename the layers
            return [getattr(self, name) for name in names]
        return [found[name] for name in names]  # nn.Module's own search takes longer than a small product


_PARAMETERS = ("weight", "bias")
_GATED, _PLAIN = ("gate_proj", "up_proj", "down_proj"), ("c_fc", "c_proj")
