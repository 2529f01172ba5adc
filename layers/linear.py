"""Linear layers whose weight is split over a tensor-parallel group.

Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3; the sequence-parallel pair is Korthikanti et al.
(arXiv:2205.05198), section 4.2.2. ``parallel/linear.py`` holds the arithmetic, and a table of the collectives.
"""

from __future__ import annotations

import torch
from torch import nn

from ..kernels.linear import ACTIVATIONS, functional, linear_act
from ..kernels.runtime.checks import whole_number
from ..kernels.runtime.names import expected
from ..parallel.core import mappings
from ..parallel.core.first_calls import compare_call
from ..parallel.linear import column_linear, row_linear
from ..parallel.overlap.memory.sizes import layer_slots
from ..parallel.overlap.partial_sum import PartialSum
from ..parallel.overlap.plan import OverlapPlan
from ..parallel.overlap.policy import preview
from .module import (
    CollectiveInfo,
    CollectiveInfos,
    FusedGroup,
    Init,
    Runs,
    ShardedModule,
    TensorParallel,
    check_divides,
    held,
)
from .options import LayerKwargs, LayerOptions, Unpack


class _ParallelLinear(TensorParallel, ShardedModule):
    """What the two kinds share: their parameters, and what :meth:`collectives` asks the overlap policy."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool, shard_dim: int, site: str, shared: LayerOptions, /
    ) -> None:
        """The weight [F, D] is split along ``shard_dim``, and the bias [F] with it where that is 0."""
        whole_number("in_features", in_features)
        whole_number("out_features", out_features)
        super().__init__(shared)
        self.keep(shared)
        self.in_features = in_features
        self.out_features = out_features
        self.site = site
        weight_init, bias_init = linear_init(in_features, shared.init_std)
        self.add_parameter("weight", (out_features, in_features), shard_dim, weight_init)
        self.add_parameter("bias", (out_features,) if bias else None, 0 if shard_dim == 0 else None, bias_init)
        self.reset_parameters()

    def slots(self, tokens: int) -> dict[str, int]:
        """The bytes of a slot that the in-kernel exchanges of ``tokens`` need, by channel."""
        if self.group.size == 1 or self.overlap not in ("auto", "kernel"):
            return {}
        row = isinstance(self, RowParallelLinear)
        return layer_slots(
            self.out_features if row else self.in_features,
            tokens,
            self.weight.dtype,
            self.group.size,
            sequence_parallel=self.sequence_parallel,
            deferrable=row,
        )

    def _collective(
        self, when: str, op: str, device: torch.device, tokens: int | None, features_in: int, features_out: int
    ) -> CollectiveInfo:
        """How ``op`` will run with this layer's weight and ``tokens``."""
        if tokens is None:
            return CollectiveInfo(when, op, None)
        shape = {"tokens": tokens, "features_in": features_in, "features_out": features_out}
        plan = preview(
            op,
            self.group,
            **shape,
            dtype=self._computes_in(device),
            device=device,
            overlap=self.overlap,
            strict=self.strict,
            impl=self.impl,
        )
        return CollectiveInfo(when, op, plan)

    def _computes_in(self, device: torch.device) -> torch.dtype:
        """The dtype of the operands on ``device``: autocast's where it is on, else the weight's."""
        dtype = self.weight.dtype
        if device.type == "meta" or dtype == torch.float64 or not torch.is_autocast_enabled(device.type):
            return dtype
        return torch.get_autocast_dtype(device.type)


class ColumnParallelLinear(_ParallelLinear):
    """``activation(nn.Linear(in_features, out_features)(x))`` with the output features split over the group.

    ``gather_output`` returns all features on every rank. ``site`` names the layer's collectives. The other keyword
    arguments are documented in :class:`~shardfuse.layers.options.LayerOptions`.

    Raises ValueError where ``out_features`` does not divide by the group's size, and for an unknown ``activation``.
    """

    op = "linear_act"  # the op that `explain` shows; an enclosing module that runs another op on the parameters sets it

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str = "identity",
        gather_output: bool = False,
        site: str = "linear",
        **options: Unpack[LayerKwargs],
    ) -> None:
        shared = LayerOptions.of(type(self), options, LayerKwargs)
        check_divides("out_features", out_features, shared.group)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r}: {expected(activation, ACTIVATIONS)}")
        super().__init__(in_features, out_features, bias, 0, site, shared)
        self.activation = activation
        self.gather_output = gather_output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:  # straight to the GEMM: a stock layer's call is this short
            return linear_act(
                x,
                *held(self, "weight", "bias"),
                activation=self.activation,
                fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
                pack_weight=not self.training,
                impl=self.impl,
            )
        compare_call(self, self.group, x=x)
        (y,) = project(x, self)
        if self.gather_output:
            y = mappings.gather_from(y, self.group, dim=-1, site=f"{self.site}.gather")
        return y

    def runs(self, device: torch.device) -> Runs:
        (weight,) = self.local("weight")
        choice = functional.layer_choice(weight, device, self.impl, self.activation, self.training, self.op)
        return [(self.op, choice)]

    def collectives(
        self, device: torch.device, tokens: int | None, fused_group: FusedGroup | None = None
    ) -> CollectiveInfos:
        fused_group = FusedGroup((self,)) if fused_group is None else fused_group
        local = sum(layer.out_features for layer in fused_group.layers) // self.group.size
        op = "linear_reduce_scatter" if self.sequence_parallel else "linear_all_reduce"
        if self.overlap == "auto":  # parallel/linear.py says why
            why = "dx's sum travels under the weights' gradients as it is"
            backward = CollectiveInfo("backward", op, None if tokens is None else OverlapPlan(reason=why))
        else:
            backward = self._collective("backward", op, device, tokens, local, self.in_features)
        if not self.sequence_parallel:
            return [backward]
        forward = self._collective("forward", "all_gather_linear", device, tokens, self.in_features, local)
        return [forward, *self._gathered_again(forward.plan, fused_group), backward]

    def _gathered_again(self, forward: OverlapPlan | None, fused_group: FusedGroup) -> CollectiveInfos:
        """The second gather of x, in backward, needed where forward kept only this rank's tokens."""
        if fused_group.runs_again:
            return [CollectiveInfo("backward", "all_gather_linear", forward)]
        if self.overlap in ("auto", "none") or (forward is not None and forward.kind == "plain"):
            return []
        why = "this rank's tokens alone are kept; the others' travel again under the product that forms dx"
        return [CollectiveInfo("backward", "all_gather", None if forward is None else OverlapPlan(reason=why))]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, activation={self.activation}, {self.sharding_repr()}"


def project(x: torch.Tensor, *layers: ColumnParallelLinear) -> tuple[torch.Tensor, ...]:
    """Several column-parallel layers on one ``x``: one input collective and one ``linear_act`` for all of them.

    The layers share group, activation, site, impl and sequence parallelism; their weights stay separate operands.
    """
    first = layers[0]
    if first.sequence_parallel:
        check_tokens(x)
    weights, biases = zip(*[held(layer, "weight", "bias") for layer in layers])
    if first.group.size == 1:
        return linear_act(
            x,
            weights,
            biases,
            activation=first.activation,
            fuse_wgrad_accumulation=first.fuse_wgrad_accumulation,
            pack_weight=not first.training,
            impl=first.impl,
        )
    return column_linear(x, weights, biases, first.tp_options(f"{first.site}.in"), activation=first.activation)


def check_tokens(x: torch.Tensor) -> None:
    """ValueError unless x is [T/R, D], as sequence parallelism requires."""
    if x.dim() != 2:
        raise ValueError(f"with sequence parallelism x is [T/R, D], this rank's tokens, not {list(x.shape)}")


class RowParallelLinear(_ParallelLinear):
    """``nn.Linear(in_features, out_features)`` with the input features split over the group.

    x [..., D/R] holds this rank's features. The bias [F] is whole on every rank and added once, after the sum. ``site``
    names the layer's collectives. The other keyword arguments are documented in
    :class:`~shardfuse.layers.options.LayerOptions`.

    Raises ValueError where ``in_features`` does not divide by the group's size.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        site: str = "linear",
        **options: Unpack[LayerKwargs],
    ) -> None:
        shared = LayerOptions.of(type(self), options, LayerKwargs)
        check_divides("in_features", in_features, shared.group)
        super().__init__(in_features, out_features, bias, 1, site, shared)

    def forward(self, x: torch.Tensor, *, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The product's epilogue adds ``residual`` [..., F]; only a group of one rank accepts it."""
        if self.group.size == 1:
            return linear_act(
                x,
                *held(self, "weight", "bias"),
                residual=residual,
                fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
                pack_weight=not self.training,
                impl=self.impl,
            )
        compare_call(self, self.group, x=x)
        if residual is not None:
            raise ValueError("residual: what the ranks' products add up to has no epilogue; add it to the result")
        return row_linear(x, self.weight, self.bias, self.tp_options(f"{self.site}.out"))

    def partial_sum(self, x: torch.Tensor) -> PartialSum:
        """This rank's part of :meth:`forward`, still to be summed over the ranks; nothing is sent. Inference only."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "partial_sum defers the sum over the ranks, without a gradient: call it in torch.no_grad()"
            )
        weight, bias = self.local("weight", "bias")
        y = linear_act(x, weight, pack_weight=not self.training, impl=self.impl)
        return PartialSum(y, bias, self.group, f"{self.site}.out")

    def runs(self, device: torch.device) -> Runs:
        (weight,) = self.local("weight")
        return [("linear_act", functional.layer_choice(weight, device, self.impl, "identity", self.training))]

    def collectives(
        self, device: torch.device, tokens: int | None, fused_group: FusedGroup | None = None
    ) -> CollectiveInfos:
        local = self.in_features // self.group.size
        if not self.sequence_parallel:
            return [self._collective("forward", "linear_all_reduce", device, tokens, local, self.out_features)]
        return [
            self._collective("forward", "linear_reduce_scatter", device, tokens, local, self.out_features),
            self._collective("backward", "all_gather_linear", device, tokens, self.out_features, local),
        ]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.sharding_repr()}"


def linear_init(in_features: int, std: float | None) -> tuple[Init, Init]:
    """How weight and bias start: nn.Linear's uniform(-1/sqrt(D), 1/sqrt(D)) for both, or normal(std) and zeros."""
    if std is not None:
        return Init(std=std), Init(constant=0.0)
    bound = in_features**-0.5
    return Init(bound=bound), Init(bound=bound)
