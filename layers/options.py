"""The keyword arguments that the layers share. This module alone documents them, sets their defaults and checks them.

A layer takes them as ``**options: Unpack[LayerKwargs]``, or a narrower ``TypedDict`` where some do not apply to it, and
makes one :class:`LayerOptions` of them. A parent passes ``**shared.kwargs(LayerKwargs)`` on to its children.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, cast

import torch

from ..kernels.runtime.checks import check_impl
from ..kernels.runtime.names import expected
from ..parallel.core.mesh import Group, MeshLike, tp_group
from ..parallel.core.sharding import PARAM_MODES
from ..parallel.grid.grid import Grid, check_grid_overlap
from ..parallel.overlap.policy import check_overlap

if sys.version_info >= (3, 11):
    from typing import Unpack
else:
    from typing_extensions import Unpack  # torch installs typing_extensions

__all__ = ["EmbeddingKwargs", "LayerKwargs", "LayerOptions", "ModelKwargs", "NormKwargs", "ParameterKwargs", "Unpack"]


class ParameterKwargs(TypedDict, total=False):
    """The options of every layer with parameters; :class:`LayerOptions` documents the keys."""

    mesh: MeshLike | Grid
    params: str
    dtype: torch.dtype | None
    device: torch.device | str | None


class EmbeddingKwargs(ParameterKwargs, total=False):
    """The options of an embedding."""

    sequence_parallel: bool
    init_std: float | None


class NormKwargs(ParameterKwargs, total=False):
    """The options of a norm."""

    sequence_parallel: bool
    impl: str


class ModelKwargs(NormKwargs, total=False):
    """The options of a block or a model, whose TransformerConfig holds ``init_std``."""

    fuse_wgrad_accumulation: bool
    overlap: str
    strict: bool


class LayerKwargs(ModelKwargs, total=False):
    """The options of linear layers, MLPs and attention: every field of :class:`LayerOptions`."""

    init_std: float | None


Kwargs = TypeVar("Kwargs", bound=Mapping[str, object])


@dataclass(frozen=True)
class LayerOptions:
    """The options that the layers share. A layer takes those that apply to it as keyword arguments.

    Args:
        mesh: the tensor-parallel ranks, as a mesh with a dimension "tp", any one-dimensional mesh or a process group;
            None for one process. Layers over a grid take a mesh of ``init_mesh(grid=...)``.
        sequence_parallel: shard the activations between the parallel layers over tokens, [T/R, D]: less memory, the
            same results. It changes nothing in a group of one.
        fuse_wgrad_accumulation: add the gradients of the linear layers' parameters to their ``main_grad`` (see
            ``attach_main_grads``).
        overlap: how collectives overlap the products beside them: "auto", "kernel", "chunked" or "none"
            (``parallel/overlap/policy.py``); over a grid of two axes also "summa" (``parallel/grid/summa.py``).
        strict: raise RuntimeError where ``overlap`` is unavailable, in place of falling back to "none".
        params: "dtensor" for parameters that are DTensors (FSDP2, distributed checkpoints), "local" for plain tensors.
        impl: "auto", "triton", "onednn" (on CPUs) or "reference" for every op of the layer
            (``kernels/runtime/dispatch.py``).
        init_std: the standard deviation of fresh weights; linear layers then start with a zero bias. None: the stock
            module's own initial values.
        dtype: the parameters' dtype; None: torch's default.
        device: the parameters' device; None: torch's default, so ``with torch.device("meta")`` works.

    Raises TypeError or ValueError for a ``mesh`` without one tensor-parallel group, ValueError for an unknown
    ``overlap``, ``params`` or ``impl``.
    """

    mesh: MeshLike | Grid = None  # a Group or a Grid after __post_init__
    sequence_parallel: bool = False
    fuse_wgrad_accumulation: bool = False
    overlap: str = "auto"
    strict: bool = False
    params: str = "dtensor"
    impl: str = "auto"
    init_std: float | None = None
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        check_impl(self.impl)
        if self.params not in PARAM_MODES:
            raise ValueError(f"params={self.params!r}: {expected(self.params, PARAM_MODES)}")
        if has_grid(self.mesh):
            object.__setattr__(self, "mesh", Grid.of(self.mesh))
            check_grid_overlap(self.overlap, self.grid, self.strict)
            for name in ("sequence_parallel", "fuse_wgrad_accumulation"):
                if getattr(self, name):
                    raise ValueError(f"{name}=True over a grid, which splits tokens anyway and adds to no main_grad")
        else:
            object.__setattr__(self, "mesh", tp_group(cast(MeshLike, self.mesh)))
            check_overlap(self.overlap)
        object.__setattr__(self, "sequence_parallel", self.sequence_parallel and self.group.size > 1)

    @classmethod
    def of(cls, layer: Callable[..., Any], given: Mapping[str, object], accepted: type[Kwargs]) -> LayerOptions:
        """The options ``given`` to ``layer``, a class or a function that takes the keys of ``accepted``.

        Raises TypeError for any other keyword. Its errors name the layer.
        """
        taken = _keys(accepted)
        for name in given:
            if name not in taken:
                raise TypeError(_unexpected(layer, name, taken))
        if has_grid(given.get("mesh")) and not getattr(layer, "takes_grid", False):
            raise ValueError(
                f"{_name(layer)}: mesh: a grid, over which this layer cannot be split: build GridLinear, GridMLP, "
                "GridAttention or GridTransformer, or make a mesh with tp in place of grid"
            )
        try:
            return cls(**cast(Any, given))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{_name(layer)}: {error}") from None

    @property
    def group(self) -> Group:
        """All ranks that share the layer's tensors."""
        return self.mesh.whole if isinstance(self.mesh, Grid) else tp_group(self.mesh)

    @property
    def grid(self) -> Grid:
        """The grid, of one process where the ranks form none."""
        return self.mesh if isinstance(self.mesh, Grid) else Grid()

    def kwargs(self, accepted: type[Kwargs]) -> Kwargs:
        """The fields that are keys of ``accepted``, as the keyword arguments of a child that takes those."""
        return cast(Kwargs, {name: getattr(self, name) for name in _keys(accepted)})


def has_grid(mesh: object) -> bool:
    """Whether ``mesh`` is a grid, or a mesh with its dimensions."""
    return isinstance(mesh, Grid) or set(getattr(mesh, "mesh_dim_names", None) or ()) >= {"grid_i", "grid_k"}


def _name(layer: Callable[..., Any]) -> str:
    """The name of ``layer``, or of the public class that a private one extends."""
    names = [each.__name__ for each in (layer.__mro__ if isinstance(layer, type) else (layer,))]
    return next(name for name in names if not name.startswith("_"))


def _keys(accepted: Any) -> frozenset[str]:
    return accepted.__optional_keys__


def _unexpected(layer: Callable[..., Any], name: str, shared: frozenset[str]) -> str:
    """The message for the keyword ``name``, which is neither an argument of ``layer`` itself nor among ``shared``."""
    classes = layer.__mro__ if isinstance(layer, type) else ()
    functions = [vars(each)["__init__"] for each in classes if "__init__" in vars(each)] or [layer]
    parameters = [parameter for function in functions for parameter in inspect.signature(function).parameters.values()]
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    own = {parameter.name for parameter in parameters if parameter.kind in keywords} - {"self"}
    names = sorted(own | shared)
    return f"{_name(layer)}() got an unexpected keyword argument {name!r}; {expected(name, names)}"
