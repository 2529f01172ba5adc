"""Linear layers whose weight is split over a tensor-parallel group.

Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3; the sequence-parallel pair is Korthikanti et al.
(arXiv:2205.05198), section 4.2.2. ``parallel/linear.py`` holds the arithmetic, and a table of what crosses ranks.
"""

from __future__ import annotations

import torch
from torch import nn

from ..kernels.linear import ACTIVATIONS, linear_act, linear_act_choice
from ..parallel.core import mappings
from ..parallel.core.mesh import MeshLike
from ..parallel.core.options import TPOptions
from ..parallel.linear import column_linear, row_linear
from ..parallel.overlap.memory.sizes import layer_slots
from ..parallel.overlap.partial_sum import PartialSum
from ..parallel.overlap.policy import OverlapPlan, check_overlap, preview
from .module import CollectiveInfo, CollectiveInfos, FusedGroup, Init, Runs, ShardedModule, check_divides


class _ParallelLinear(ShardedModule):
    """What both kinds have in common: a weight, and an overlap."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    in_features: int
    out_features: int
    fuse_wgrad_accumulation: bool
    overlap: str
    strict: bool
    impl: str
    site: str

    def tp_options(self, site: str) -> TPOptions:
        """What ``parallel/linear.py`` is told of this layer; ``site`` says which of its collectives."""
        return TPOptions(
            self.group,
            sequence_parallel=self.sequence_parallel,
            fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
            impl=self.impl,
            overlap=self.overlap,
            strict=self.strict,
            site=f"{self.site}.{site}",
        )

    def slots(self, tokens: int) -> dict[str, int]:
        """By channel the bytes of a slot that this layer's exchanges of ``tokens`` take where the kernel makes them."""
        if self.group.size == 1 or self.overlap not in ("auto", "kernel"):
            return {}
        late = isinstance(self, RowParallelLinear)
        width = self.out_features if late else self.in_features
        sequence = self.sequence_parallel
        return layer_slots(width, tokens, self.weight.dtype, self.group.size, sequence_parallel=sequence, late=late)

    def _crossing(
        self, when: str, op: str, device: torch.device, tokens: int | None, features_in: int, features_out: int
    ) -> CollectiveInfo:
        """What ``op`` will do with this layer's weight and ``tokens``."""
        if tokens is None:
            return CollectiveInfo(when, op, None)
        shape = {"tokens": tokens, "features_in": features_in, "features_out": features_out}
        path = preview(
            op,
            self.group,
            **shape,
            dtype=self._computes_in(device),
            device=device,
            overlap=self.overlap,
            strict=self.strict,
            impl=self.impl,
        )
        return CollectiveInfo(when, op, path)

    def _computes_in(self, device: torch.device) -> torch.dtype:
        """The dtype of operands on ``device``: that to which autocast, where it is on, takes the weight's."""
        dtype = self.weight.dtype
        if device.type == "meta" or dtype == torch.float64 or not torch.is_autocast_enabled(device.type):
            return dtype
        return torch.get_autocast_dtype(device.type)


class ColumnParallelLinear(_ParallelLinear):
    """``activation(nn.Linear(in_features, out_features)(x))`` with the output features split over the group.

    ``gather_output`` returns all features on every rank. ``fuse_wgrad_accumulation`` adds the parameters' gradients to
    their ``main_grad`` (see ``attach_main_grads``). ``overlap`` says how collectives travel under the products beside
    them ("auto", "kernel", "chunked" or "none"; ``parallel/overlap/policy.py``); with ``strict`` an unavailable one
    raises RuntimeError. ``site`` names the layer's collectives. Weights start as those of nn.Linear do, or normal with
    ``init_std`` (and zero bias).

    Raises ValueError where ``out_features`` does not divide by the group's size, for an unknown activation or overlap.
    """

    op = "linear_act"  # that runs with its parameters; a module around it may know a better one

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str = "identity",
        mesh: MeshLike = None,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        fuse_wgrad_accumulation: bool = False,
        overlap: str = "auto",
        strict: bool = False,
        params: str = "dtensor",
        impl: str = "auto",
        site: str = "linear",
        init_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(mesh, sequence_parallel=sequence_parallel, params=params, dtype=dtype, device=device)
        check_divides("out_features", out_features, self.group)
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation={activation!r}: expected one of {', '.join(ACTIVATIONS)}")
        self.in_features = in_features
        self.out_features = out_features
        self.activation = activation
        self.gather_output = gather_output
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.overlap = check_overlap(overlap)
        self.strict = strict
        self.impl = impl
        self.site = site
        weight_init, bias_init = linear_init(in_features, init_std)
        self.add_parameter("weight", (out_features, in_features), 0, weight_init)
        self.add_parameter("bias", (out_features,) if bias else None, 0, bias_init)
        self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:  # nothing between a stock layer's user and its GEMM
            return linear_act(
                x,
                self.weight,
                self.bias,
                activation=self.activation,
                fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
                impl=self.impl,
            )
        (y,) = project(x, self)
        if self.gather_output:
            y = mappings.gather_from(y, self.group, dim=-1, site=f"{self.site}.gather")
        return y

    def runs(self, device: torch.device) -> Runs:
        return [(self.op, linear_act_choice(self.weight.dtype, device, self.impl, op=self.op))]

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
            backward = self._crossing("backward", op, device, tokens, local, self.in_features)
        if not self.sequence_parallel:
            return [backward]
        forward = self._crossing("forward", "all_gather_linear", device, tokens, self.in_features, local)
        return [forward, *self._gathered_again(forward.path, fused_group), backward]

    def _gathered_again(self, forward: OverlapPlan | None, fused_group: FusedGroup) -> CollectiveInfos:
        """The gather of x in backward, where forward kept this rank's tokens only."""
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
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    return column_linear(x, weights, biases, first.tp_options("in"), activation=first.activation)


def check_tokens(x: torch.Tensor) -> None:
    """ValueError unless x is what sequence parallelism splits."""
    if x.dim() != 2:
        raise ValueError(f"with sequence parallelism x is [T/R, D], this rank's tokens, not {list(x.shape)}")


class RowParallelLinear(_ParallelLinear):
    """``nn.Linear(in_features, out_features)`` with the input features split over the group.

    x [..., D/R] holds this rank's features. The bias [F] is whole on every rank and added once, after the sum.
    ``overlap`` and ``strict`` are as in :class:`ColumnParallelLinear`.

    Raises ValueError where ``in_features`` does not divide by the group's size or the overlap is unknown.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        mesh: MeshLike = None,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        overlap: str = "auto",
        strict: bool = False,
        params: str = "dtensor",
        impl: str = "auto",
        site: str = "linear",
        init_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(mesh, sequence_parallel=sequence_parallel, params=params, dtype=dtype, device=device)
        check_divides("in_features", in_features, self.group)
        self.in_features = in_features
        self.out_features = out_features
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.overlap = check_overlap(overlap)
        self.strict = strict
        self.impl = impl
        self.site = site
        weight_init, bias_init = linear_init(in_features, init_std)
        self.add_parameter("weight", (out_features, in_features), 1, weight_init)
        self.add_parameter("bias", (out_features,) if bias else None, None, bias_init)
        self.reset_parameters()

    def forward(self, x: torch.Tensor, *, residual: torch.Tensor | None = None) -> torch.Tensor:
        """``residual`` [..., F], in a group of one only, is added in the product's epilogue."""
        if self.group.size == 1:
            return linear_act(
                x,
                self.weight,
                self.bias,
                residual=residual,
                fuse_wgrad_accumulation=self.fuse_wgrad_accumulation,
                impl=self.impl,
            )
        if residual is not None:
            raise ValueError("residual: what the ranks' products add up to has no epilogue; add it to the result")
        return row_linear(x, self.weight, self.bias, self.tp_options("out"))

    def partial_sum(self, x: torch.Tensor) -> PartialSum:
        """This rank's part of :meth:`forward`, still to be summed over the ranks; nothing is sent. Inference only."""
        assert not torch.is_grad_enabled(), "a deferred all-reduce is inference-only"
        weight, bias = self.local("weight", "bias")
        return PartialSum(linear_act(x, weight, impl=self.impl), bias, self.group, f"{self.site}.out")

    def runs(self, device: torch.device) -> Runs:
        return [("linear_act", linear_act_choice(self.weight.dtype, device, self.impl))]

    def collectives(
        self, device: torch.device, tokens: int | None, fused_group: FusedGroup | None = None
    ) -> CollectiveInfos:
        local = self.in_features // self.group.size
        if not self.sequence_parallel:
            return [self._crossing("forward", "linear_all_reduce", device, tokens, local, self.out_features)]
        return [
            self._crossing("forward", "linear_reduce_scatter", device, tokens, local, self.out_features),
            self._crossing("backward", "all_gather_linear", device, tokens, self.out_features, local),
        ]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.sharding_repr()}"


def linear_init(in_features: int, std: float | None) -> tuple[Init, Init]:
    """How weight and bias start: nn.Linear's uniform(-1/sqrt(D), 1/sqrt(D)) for both, or normal(std) and zeros."""
    if std is not None:
        return Init(std=std), Init(constant=0.0)
    bound = in_features**-0.5 if in_features else 0.0
    return Init(bound=bound), Init(bound=bound)
