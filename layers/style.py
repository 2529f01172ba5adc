"""Our layers in a plain model, by torch's own ``parallelize_module``.

    plan = {
        "layers.*.mlp": FusedMLP(gate="w1", up="w3", down="w2", activation="silu"),
        "layers.*.attention.wq": ColumnParallel(),
        "layers.*.attention.wo": RowParallel(),
        "tok_embeddings": VocabParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)

A style changes a module in place, as torch's styles do: the module becomes one of ours and keeps its parameters and
their names, split over the mesh. As with torch's styles, every rank gets its part of rank 0's values
(``src_data_rank``), and layers between a column and a row style see this rank's features only.

Modules that share a parameter (an embedding and its head) still share it afterwards if the plan names each of them, in
styles that split it alike, such as ``VocabParallel`` and ``ColumnParallel``. Styles that split it differently raise
ValueError. A module that the plan does not name keeps the plain parameter, which it then no longer shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle

from ..kernels.dev.accuracy import judge
from ..kernels.linear import ACTIVATIONS, apply_activation
from ..kernels.runtime.names import expected
from ..parallel.core.mesh import Group, tp_group
from ..parallel.core.sharding import ShardSpec, make_parameter
from .embedding import VocabParallelEmbedding
from .linear import ColumnParallelLinear, RowParallelLinear
from .mlp import ParallelMLP
from .module import ShardedModule
from .norm import LayerNorm, RMSNorm

__all__ = ["ColumnParallel", "FusedMLP", "RowParallel", "SequenceParallelNorm", "VocabParallel"]


class _Style(ParallelStyle):
    """A style; it keeps the options for the layer that the module becomes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{type(self).__name__}({said})"

    def _place(self, mesh: DeviceMesh, like: torch.Tensor) -> dict[str, Any]:
        return {"mesh": mesh, "dtype": like.dtype, "device": "meta", **self.options}


class ColumnParallel(_Style):
    """Makes an ``nn.Linear`` a :class:`ColumnParallelLinear`; ``options`` are that layer's, ``activation`` included.

    x is whole on every rank (with ``sequence_parallel`` this rank's tokens [T/R, D]), y this rank's features.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _expect(module, (nn.Linear,), self)
        place = self._place(device_mesh, linear.weight)
        ours = ColumnParallelLinear(linear.in_features, linear.out_features, linear.bias is not None, **place)
        return become(linear, ours, device_mesh, self.src_data_rank)


class RowParallel(_Style):
    """Makes an ``nn.Linear`` a :class:`RowParallelLinear`; ``options`` are that layer's.

    x holds this rank's features, y is whole on every rank (with ``sequence_parallel`` this rank's tokens).
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _expect(module, (nn.Linear,), self)
        place = self._place(device_mesh, linear.weight)
        ours = RowParallelLinear(linear.in_features, linear.out_features, linear.bias is not None, **place)
        return become(linear, ours, device_mesh, self.src_data_rank)


class VocabParallel(_Style):
    """Makes an ``nn.Embedding`` a :class:`VocabParallelEmbedding`; ``options`` are that layer's."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        table = _expect(module, (nn.Embedding,), self)
        odd = ["max_norm"] if table.max_norm is not None else []
        odd += [name for name in ("scale_grad_by_freq", "sparse") if getattr(table, name)]
        if odd:
            raise ValueError(
                f"{self}: the embedding has {', '.join(odd)}, which a split one does not know: leave it out"
            )
        place = self._place(device_mesh, table.weight)
        ours = VocabParallelEmbedding(table.num_embeddings, table.embedding_dim, table.padding_idx, **place)
        return become(table, ours, device_mesh, self.src_data_rank)


class SequenceParallelNorm(_Style):
    """Makes an ``nn.LayerNorm`` or ``nn.RMSNorm`` over the last dimension ours, for this rank's tokens [T/R, D].

    It also suits a norm over each head that all heads share, for this rank's heads [..., N/R, H]. Backward sums its
    parameters' gradients over the ranks. ``options`` are those of :class:`LayerNorm`.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        norm = _expect(module, (nn.LayerNorm, nn.RMSNorm), self)
        if len(norm.normalized_shape) != 1 or norm.weight is None:
            raise ValueError(f"{self}: expected a norm over the last dimension with a weight, not {norm}")
        options: dict[str, Any] = {"sequence_parallel": True, **self._place(device_mesh, norm.weight)}
        (width,) = norm.normalized_shape
        if isinstance(norm, nn.LayerNorm):
            ours: ShardedModule = LayerNorm(width, norm.eps, norm.bias is not None, **options)
        else:
            eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps  # as torch does
            ours = RMSNorm(width, eps, **options)
        return become(norm, ours, device_mesh, self.src_data_rank)


class FusedMLP(_Style):
    """Makes a feed-forward module a :class:`ParallelMLP`: ``down(activation(up(x)))``, or with ``gate``
    ``down(activation(gate(x)) * up(x))``.

    ``gate``, ``up`` and ``down`` are the names of the module's ``nn.Linear`` children, which keep these names.
    ``options`` are ParallelMLP's. Before the style changes anything, it compares the module's result for a few random
    tokens with the formula, and raises ValueError where they differ (another activation, gate and up exchanged,
    dropout). ``check=False`` omits the comparison, for a module whose forward has side effects; a module on the meta
    device is not compared.
    """

    def __init__(
        self, *, up: str, down: str, activation: str, gate: str | None = None, check: bool = True, **options: Any
    ) -> None:
        super().__init__(activation=activation, **options)
        if activation not in ACTIVATIONS:
            raise ValueError(f"FusedMLP: activation={activation!r}: {expected(activation, ACTIVATIONS)}")
        self.names = {"gate_proj": gate, "up_proj": up, "down_proj": down} if gate else {"c_fc": up, "c_proj": down}
        self.check = check

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layers = {ours: _child(module, name, self) for ours, name in self.names.items() if name is not None}
        _check_hooks(module, self)
        if self.check:
            self._compare(module, list(layers.values()))
        *first, last = layers.values()
        ours = _NamedMLP(
            first[0].in_features,
            first[0].out_features,
            gated=len(first) == 2,
            bias=True,
            **self._place(device_mesh, last.weight),
        )
        for name, linear in layers.items():
            layer = getattr(ours, name)
            sizes, expected = ((m.in_features, m.out_features) for m in (linear, layer))
            if sizes != expected:
                raise ValueError(f"{self}: {self.names[name]} is nn.Linear{sizes}, expected nn.Linear{expected}")
            if linear.bias is None:
                del layer._declared["bias"]
                layer.register_parameter("bias", None)
            _shared(linear, layer)  # refuse now: below, other layers may have changed already
        for name, linear in layers.items():
            layer = getattr(ours, name)
            become(linear, layer, device_mesh, self.src_data_rank)
        return ours.take(module, {name: str(theirs) for name, theirs in self.names.items()})

    @torch.no_grad()
    def _compare(self, module: nn.Module, layers: Sequence[nn.Linear]) -> None:
        *first, last = layers
        weight = last.weight
        if weight.is_meta:
            return
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(4, first[0].in_features, generator=generator).to(weight.device, weight.dtype)
        expected = self._plain(x.double(), [_in_fp64(layer) for layer in layers])
        terms = sum(layer.in_features for layer in layers)
        verdict = judge("the module", module(x), self._plain(x, layers), expected, terms=terms)
        if not verdict.ok:
            raise ValueError(
                f"{self}: {type(module).__name__} computes something else ({verdict}); is it another activation, are "
                "gate and up exchanged, or does it drop out (call module.eval() first, and apply dropout outside)?"
            )

    def _plain(self, x: torch.Tensor, layers: Sequence[nn.Linear]) -> torch.Tensor:
        *first, last = layers
        h = apply_activation(first[0](x), self.options["activation"])
        return last(h * first[1](x) if len(first) == 2 else h)

    def __repr__(self) -> str:
        return f"FusedMLP({', '.join(str(name) for name in self.names.values())}, {self.options['activation']})"


class _NamedMLP(ParallelMLP):
    """A ParallelMLP whose layers are registered under other names."""

    names: dict[str, str]

    def take(self, module: nn.Module, names: dict[str, str]) -> nn.Module:
        """Make ``module`` this MLP, with the layers under the ``names`` that they have in ``module``."""
        layers = {name: child for name, child in module._modules.items() if name in names.values()}
        self._modules.clear()
        self._modules.update(layers)
        self.names = names
        return _take_place(module, self)

    def __getattr__(self, name: str) -> Any:
        names = self.__dict__.get("names", {})
        return super().__getattr__(names.get(name, name))


# --- parts ------------------------------------------------------------------------------------------------------------


def _expect(module: nn.Module, kinds: tuple[type[nn.Module], ...], style: ParallelStyle) -> Any:
    """Return ``module`` if its class is exactly one of ``kinds`` and it has no hooks; raise ValueError otherwise."""
    expected = " or ".join(f"nn.{kind.__name__}" for kind in kinds)
    if type(module) not in kinds:
        raise ValueError(f"{style}: expected {expected}, not {type(module).__name__}; name another module in the plan")
    _check_hooks(module, style)
    return module


def _check_hooks(module: nn.Module, style: ParallelStyle) -> None:
    hooked = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    if hooked:
        raise ValueError(
            f"{style}: the {type(module).__name__} has hooks, which would be lost; apply the style before registering "
            "any"
        )


def _child(module: nn.Module, name: str, style: ParallelStyle) -> nn.Linear:
    children = dict(module.named_children())
    if name not in children:
        raise ValueError(
            f"{style}: {type(module).__name__} has no child {name!r}; it has {', '.join(children) or 'none'}"
        )
    return _expect(children[name], (nn.Linear,), style)


def _in_fp64(layer: nn.Linear) -> nn.Linear:
    twin = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    state = {name: value.double() for name, value in layer.state_dict().items()}
    twin.load_state_dict(state, assign=True)
    return twin


def become(module: nn.Module, ours: ShardedModule, mesh: DeviceMesh, src_data_rank: int | None = 0) -> nn.Module:
    """Give ``ours`` this rank's part of ``module``'s parameters, then turn ``module`` into ``ours``."""
    shared = _shared(module, ours)
    for name, (spec, _) in ours._declared.items():
        param = shared.get(name)
        if param is None:
            theirs = getattr(module, name)
            tp_mesh = tp_group(mesh).mesh
            part = distribute_tensor(theirs.detach(), tp_mesh, spec.placements, src_data_rank=src_data_rank).to_local()
            param = make_parameter(part.contiguous(), spec, ours._params)
            param.requires_grad_(theirs.requires_grad)
            replaced(theirs, param, spec, ours._params)
        ours.register_parameter(name, param)
    return _take_place(module, ours)


class _Styled(NamedTuple):
    """A note on a plain parameter for other modules that share it: how a style placed it, and the new parameter."""

    placing: tuple[Any, ...]
    param: nn.Parameter


def replaced(theirs: Any, param: nn.Parameter, spec: ShardSpec, params: str = "dtensor") -> None:
    """Record on the plain parameter ``theirs`` which parameter replaced it, for other modules that share it."""
    theirs._styled = _Styled(_placing(spec, params), param)


def _placing(spec: ShardSpec, params: str) -> tuple[Any, ...]:
    """The properties that modules which share a parameter must agree on."""
    return spec.logical_shape, spec.shard_dim, spec.group, params


def _shared(module: nn.Module, ours: ShardedModule) -> dict[str, nn.Parameter]:
    """The new parameters, by name, of ``module``'s parameters that an already styled module shares.

    Raises ValueError where ``ours`` would place one differently.
    """
    found = {}
    for name, (spec, _) in ours._declared.items():
        styled = getattr(getattr(module, name), "_styled", None)
        if styled is None:
            continue
        if styled.placing != _placing(spec, ours._params):
            raise ValueError(
                f"{type(module).__name__}.{name} {list(spec.logical_shape)} is shared with a module that a style has "
                f"changed already, and there it is {_said(*styled.placing)}, where {type(ours).__name__} expects it "
                f"{_said(*_placing(spec, ours._params))}: choose styles that split it alike, or give the module a "
                "copy of its own first"
            )
        found[name] = styled.param
    return found


def _said(_: torch.Size, shard_dim: int | None, group: Group, params: str) -> str:
    split = "whole on each" if shard_dim is None else f"split along dimension {shard_dim}"
    return f"{split} of {group.size} ranks (params={params!r})"


def _take_place(module: nn.Module, ours: nn.Module) -> nn.Module:
    """Turn ``module`` into ``ours`` in place, for all its references, as FSDP2 changes a wrapped module's class."""
    ours.train(module.training)
    module.__class__ = type(ours)
    module.__dict__.clear()
    module.__dict__.update(ours.__dict__)
    return module
