"""Parameters that are split over a tensor-parallel group: the only place that knows DTensor.

A :class:`ShardSpec` describes which part of which tensor a rank holds. In DTensor mode, the default, a parameter is a
DTensor over the group, which FSDP2, torch's pipelining and distributed checkpoints understand. In local mode it is the
rank's plain tensor with its spec attached, for DDP, ZeroRedundancyOptimizer and DeepSpeed, which do not take DTensors.
Both modes start from the same bits and save the same logical tensors.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn
from torch.autograd.function import once_differentiable

from ...kernels.runtime.names import expected
from .mesh import DATA_DIMS, GRID_DIMS, SINGLE, Group, tp_group

if TYPE_CHECKING:  # imports sympy: takes half as long as importing torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from typing_extensions import TypeIs

PARAM_MODES = ("dtensor", "local")

# Rows that one generator draws. Changing it changes every initialisation from a seed.
BLOCK_ROWS = 16

# The names of the dimensions over which FSDP2 shards and replicates; the last is both, flattened.
_FSDP_DIMS = {*DATA_DIMS, "_".join(DATA_DIMS)}


@dataclass(frozen=True)
class ShardSpec:
    """A logical tensor, and the part of it that each rank of ``group`` holds.

    With ``shard_dim`` None every rank holds all of it. Raises ValueError where the dimension does not divide.
    """

    name: str
    logical_shape: torch.Size
    shard_dim: int | None = None
    group: Group = SINGLE

    def __post_init__(self) -> None:
        shape = torch.Size(self.logical_shape)
        object.__setattr__(self, "logical_shape", shape)
        if self.shard_dim is None:
            return
        if not 0 <= self.shard_dim < len(shape):
            raise ValueError(f"{self.name}: shard_dim={self.shard_dim} is not a dimension of {list(shape)}")
        if shape[self.shard_dim] % self.group.size:
            raise ValueError(
                f"{self.name}: dimension {self.shard_dim} of {list(shape)} does not divide by {self.group.size} ranks; "
                f"use a size that is a multiple of {self.group.size}, or fewer ranks"
            )

    @property
    def index(self) -> tuple[slice, ...]:
        """This rank's part, as an index into the logical tensor."""
        index = [slice(None)] * len(self.logical_shape)
        if self.shard_dim is not None:
            length = self.logical_shape[self.shard_dim] // self.group.size
            index[self.shard_dim] = slice(self.group.rank * length, (self.group.rank + 1) * length)
        return tuple(index)

    @property
    def local_shape(self) -> torch.Size:
        shape = list(self.logical_shape)
        if self.shard_dim is not None:
            shape[self.shard_dim] //= self.group.size
        return torch.Size(shape)

    @property
    def parts(self) -> int:
        """The number of different parts; other ranks of the group hold copies of these."""
        return 1 if self.shard_dim is None else self.group.size

    @property
    def first_copy(self) -> bool:
        """Whether no earlier rank of the group holds a copy of this rank's part."""
        return self.shard_dim is not None or self.group.rank == 0

    @property
    def placements(self) -> tuple[Shard | Replicate, ...]:
        from torch.distributed.tensor import Replicate, Shard

        return tuple(Replicate() if dim is None else Shard(dim) for dim in self.mesh_shard_dims)

    @property
    def mesh_shard_dims(self) -> tuple[int | None, ...]:
        """The dimension that each dimension of the group's mesh splits."""
        return (self.shard_dim,)


@dataclass(frozen=True)
class GridSpec(ShardSpec):
    """A logical tensor that a mesh of several dimensions splits, ``group``'s.

    ``grid_shard_dims`` names for each dimension of the mesh the tensor's dimension that it splits, None where its ranks
    hold copies. Where two split the same one, the first cuts it and the second cuts the pieces.
    """

    grid_shard_dims: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "logical_shape", torch.Size(self.logical_shape))
        object.__setattr__(self, "shard_dim", next((dim for dim in self.grid_shard_dims if dim is not None), None))
        for dim, length in enumerate(self.logical_shape):
            parts = math.prod(size for size, at in zip(self._sizes, self.grid_shard_dims) if at == dim)
            if length % parts:
                raise ValueError(
                    f"{self.name}: dimension {dim} of {list(self.logical_shape)} does not divide by the {parts} ranks "
                    f"of a grid; use a size that is a multiple of {parts}, or fewer ranks"
                )

    @property
    def copied_over(self) -> set[str]:
        """The dimensions of the mesh whose ranks hold copies."""
        assert self.group.mesh is not None
        names = self.group.mesh.mesh_dim_names or ()
        return {name for name, dim in zip(names, self.grid_shard_dims) if dim is None}

    @property
    def _sizes(self) -> tuple[int, ...]:
        assert self.group.mesh is not None
        return tuple(self.group.mesh.shape)

    @property
    def index(self) -> tuple[slice, ...]:
        assert self.group.mesh is not None
        spans = [(0, length) for length in self.logical_shape]
        for size, place, dim in zip(self._sizes, self.group.mesh.get_coordinate() or (), self.grid_shard_dims):
            if dim is not None:
                start, length = spans[dim]
                spans[dim] = start + place * (length // size), length // size
        return tuple(slice(start, start + length) for start, length in spans)

    @property
    def local_shape(self) -> torch.Size:
        return torch.Size([part.stop - part.start for part in self.index])

    @property
    def parts(self) -> int:
        return math.prod(size for size, dim in zip(self._sizes, self.grid_shard_dims) if dim is not None)

    @property
    def first_copy(self) -> bool:
        assert self.group.mesh is not None
        places = self.group.mesh.get_coordinate() or ()
        return not any(place for place, dim in zip(places, self.grid_shard_dims) if dim is None)

    @property
    def mesh_shard_dims(self) -> tuple[int | None, ...]:
        return self.grid_shard_dims


def make_parameter(local: torch.Tensor, spec: ShardSpec, params: str = "dtensor") -> nn.Parameter:
    """The parameter that ``spec`` describes, around this rank's tensor ``local`` (not copied).

    ``params`` is "dtensor" or "local"; in a group of one both give a plain parameter. In local mode the parameter
    carries ``shard_spec`` and ``tensor_model_parallel`` (Megatron's and DeepSpeed's name).
    """
    if params not in PARAM_MODES:
        raise ValueError(f"params={params!r}: {expected(params, PARAM_MODES)}")
    if local.shape != spec.local_shape:
        raise ValueError(f"{spec.name}: this rank's shape is {list(local.shape)}, expected {list(spec.local_shape)}")
    if params == "dtensor" and spec.group.size > 1:
        return nn.Parameter(as_dtensor(local, spec))
    param = nn.Parameter(local)
    tag(param, spec)
    return param


def tag(param: torch.Tensor, spec: ShardSpec) -> None:
    """Attach ``spec`` to a plain parameter.

    A norm over the ranks, as Megatron and DeepSpeed form it, counts ``tensor_model_parallel`` parameters of every rank
    and others of the first rank alone. Over a grid some ranks hold copies of a part: only the first one is marked.
    """
    param.shard_spec = spec  # type: ignore[attr-defined]
    marked = spec.shard_dim is not None and spec.group.size > 1 and spec.first_copy
    param.tensor_model_parallel = marked  # type: ignore[attr-defined]


def as_dtensor(local: torch.Tensor, spec: ShardSpec) -> DTensor:
    """A DTensor that shares ``local``'s memory."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, spec.group.mesh, spec.placements, run_check=False)


def is_dtensor(x: Any) -> TypeIs[DTensor]:
    """Whether ``x`` is a DTensor, without importing the class: no DTensor exists before its module is imported.

    torch.compile can trace this function, as it contains no import.
    """
    return hasattr(torch.distributed, "tensor") and isinstance(x, torch.distributed.tensor.DTensor)


def spec_of(param: torch.Tensor) -> ShardSpec:
    """The spec of a parameter; a plain one that was never sharded is a whole tensor.

    For a DTensor that FSDP2 has sharded as well, this is the tensor-parallel part, which forward sees.
    """
    if not is_dtensor(param):
        spec = getattr(param, "shard_spec", None)
        return ShardSpec("", param.shape) if spec is None else spec
    if set(param.device_mesh.mesh_dim_names or ("tp",)) <= _FSDP_DIMS:
        return ShardSpec("", param.shape)
    inner = [name for name in param.device_mesh.mesh_dim_names or () if name in GRID_DIMS]
    # Tensor-parallel ranks are the innermost dimension of a mesh, or its innermost ones in a grid.
    placements = param.placements[-max(1, len(inner)) :]
    dims = [each.dim if isinstance(each, torch.distributed.tensor.Shard) else None for each in placements]
    if inner:
        mesh = param.device_mesh if len(inner) == param.device_mesh.ndim else param.device_mesh[tuple(inner)]
        return GridSpec("", param.shape, group=grid_ranks(mesh), grid_shard_dims=tuple(dims))
    return ShardSpec("", param.shape, dims[0], tp_group(param.device_mesh))


def grid_ranks(mesh: DeviceMesh, pg: Any = None) -> Group:
    """The ranks of a grid, ``mesh``, as a group; without ``pg`` it describes them and cannot send."""
    rank = 0
    for size, place in zip(mesh.shape, mesh.get_coordinate() or ()):
        rank = rank * size + place
    return Group(pg, rank, mesh.size(), mesh)


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """This rank's plain tensor of a parameter; gradients flow back to the parameter."""
    return local_tensors(param)[0]


def local_tensors(*params: torch.Tensor | None) -> tuple[Any, ...]:
    """:func:`local_tensor` of several parameters in one step of autograd; None stays None."""
    if torch.compiler.is_compiling():
        return tuple(param.to_local() if is_dtensor(param) else param for param in params)
    plain, specs = unwrap(params)
    if torch.is_grad_enabled():
        # Pass only tensors that need a gradient: one differentiable input makes every output of an autograd function
        # differentiable.
        wanted = [i for i, spec in enumerate(specs) if spec is not None and params[i].requires_grad]  # type: ignore[union-attr]
        if wanted:
            for i, tensor in zip(wanted, _ToLocal.apply(*[params[i] for i in wanted])):
                plain[i] = tensor
    return tuple(plain)


class _ToLocal(torch.autograd.Function):
    """``DTensor.to_local`` of several parameters, whose gradients have the parameters' layout.

    It avoids to_local's recomputation for each gradient, which takes longer than a small GEMM.
    """

    @staticmethod
    def forward(ctx: Any, *params: DTensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        plain, ctx.specs = unwrap(params)
        return tuple(tensor.view_as(tensor) for tensor in plain if tensor is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return wrap_grads(grads, ctx.specs)


def unwrap(params: Sequence[torch.Tensor | None]) -> tuple[list[Any], list[Any]]:
    """Plain tensors, for autograd functions that take parameters directly, and the specs for :func:`wrap_grads`."""
    if "tensor" not in torch.distributed.__dict__:  # is_dtensor inlined for all: each layer's call comes here
        return list(params), [None] * len(params)
    kind = torch.distributed.tensor.DTensor
    plain = [param._local_tensor if isinstance(param, kind) else param for param in params]
    return plain, [param._spec if isinstance(param, kind) else None for param in params]


def wrap_grads(grads: Sequence[torch.Tensor | None], specs: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
    """Wrap plain gradients in the layout of the parameters; None stays None."""
    wrapped = []
    for grad, spec in zip(grads, specs):
        if grad is not None and spec is not None:
            kind = torch.distributed.tensor.DTensor
            # DTensor's own operations share the spec, too; a copy would be hashed and compared again every time. Its
            # __init__ does nothing, behind a wrapper of Dynamo's that takes twice as long as __new__.
            grad = kind.__new__(kind, grad.contiguous(), spec, requires_grad=False)
        wrapped.append(grad)
    return tuple(wrapped)


def logical(tensor: torch.Tensor, param: torch.Tensor | None = None) -> torch.Tensor:
    """The logical tensor of a parameter or of its optimizer state: a DTensor that shares this rank's memory.
    Plain tensors that were never sharded stay as they are.

    Optimizer state does not carry a spec: pass the parameter that it belongs to as ``param``.
    """
    if is_dtensor(tensor):
        return tensor.detach()
    spec = spec_of(tensor if param is None else param)
    return tensor.detach() if spec.group.size == 1 else as_dtensor(tensor.detach(), spec)


def as_stored(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The inverse of ``logical``: ``value`` as an optimizer stores state of ``param``: a DTensor if that is one."""
    return value if is_dtensor(param) else local_tensor(value)


def gather(param: torch.Tensor) -> torch.Tensor:
    """The whole logical tensor, on every rank of its group."""
    whole = logical(param)
    return whole.full_tensor() if is_dtensor(whole) else whole


def placed_by(spec: ShardSpec, param: torch.Tensor) -> bool:
    """Whether ``spec`` alone places ``param``; FSDP2 shards a parameter once more."""
    return not is_dtensor(param) or param.device_mesh == spec.group.mesh


def part_of(whole: torch.Tensor, param: torch.Tensor, spec: ShardSpec, *, copy: bool = False) -> torch.Tensor:
    """This rank's part of the plain tensor ``whole``, in the layout of ``param``, which ``spec`` alone places.

    It shares ``whole``'s memory; with ``copy`` a slice has memory of its own. A tensor that is not whole, or not plain,
    is returned as it is.
    """
    if is_dtensor(whole) or whole.shape != spec.logical_shape:
        return whole
    part = whole.detach()[spec.index]
    if copy and spec.shard_dim is not None:
        part = part.clone(memory_format=torch.contiguous_format)
    return as_dtensor(part, spec) if is_dtensor(param) else part


def shard_slice(param: torch.Tensor) -> tuple[slice, ...]:
    """This rank's part of a parameter, as an index into the logical tensor, including any other sharding of it."""
    if not is_dtensor(param):
        return spec_of(param).index
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    lengths, starts = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths))


def on_first_rank(param: torch.Tensor) -> bool:
    """Whether this rank is the first of those that hold parts or copies of a parameter."""
    if is_dtensor(param):
        return not any(param.device_mesh.get_coordinate() or ())
    return spec_of(param).group.rank == 0


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``tensor`` copied to host memory, in the same layout.

    From a GPU the copy into pinned memory is still under way on return: synchronize before reading it.
    """
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    from_gpu = local.device.type == "cuda"
    copy = torch.empty_like(local, device="cpu", pin_memory=from_gpu, requires_grad=False)
    copy.copy_(local.detach(), non_blocking=from_gpu)
    return torch.distributed.tensor.DTensor(copy, tensor._spec, requires_grad=False) if is_dtensor(tensor) else copy


def parameter_seed() -> int:
    """A seed from torch's global CPU generator: the same on all ranks that called ``torch.manual_seed`` alike."""
    return int(torch.randint(2**62, (), device="cpu", dtype=torch.int64))


def named_seed(seed: int, name: str) -> int:
    """A seed for the parameter ``name``, the same in every process and Python version."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draw_shard(
    logical_shape: tuple[int, ...] | torch.Size,
    shard_dim: int | None,
    rank: int,
    size: int,
    *,
    seed: int,
    std: float | None = None,
    bound: float | None = None,
) -> torch.Tensor:
    """This rank's part of a random tensor that does not depend on how it is split: fp32, on the CPU.

    Normal with ``std`` or uniform in [-``bound``, ``bound``). Blocks of BLOCK_ROWS rows (entries of the first
    dimension) have generators of their own, so a rank with a slice of the rows draws only the blocks it touches, and
    a rank with a slice of the columns draws whole rows and keeps its part.
    """
    shape = torch.Size(logical_shape)
    if shard_dim is not None and shape[shard_dim] % size:
        raise ValueError(f"draw_shard: dimension {shard_dim} of {list(shape)} does not divide by {size} ranks")
    index = [slice(0, n) for n in shape]
    if shard_dim is not None:
        length = shape[shard_dim] // size
        index[shard_dim] = slice(rank * length, (rank + 1) * length)
    return draw_part(shape, index, seed=seed, std=std, bound=bound)


def draw_part(
    logical_shape: tuple[int, ...] | torch.Size,
    parts: Sequence[slice],
    *,
    seed: int,
    std: float | None = None,
    bound: float | None = None,
) -> torch.Tensor:
    """:func:`draw_shard` of any ``parts``, one slice for each dimension."""
    if (std is None) == (bound is None):
        raise ValueError(f"draw_shard: expected either std or bound, got std={std}, bound={bound}")
    shape = torch.Size(logical_shape)
    index = [slice(*part.indices(n)) for part, n in zip(parts, shape)]
    rows = index[0]
    out = torch.empty([part.stop - part.start for part in index], dtype=torch.float32, device="cpu")
    generator = torch.Generator()
    for start in range(rows.start - rows.start % BLOCK_ROWS, rows.stop, BLOCK_ROWS):
        generator.manual_seed(named_seed(seed, str(start // BLOCK_ROWS)))
        stop = min(start + BLOCK_ROWS, shape[0])
        block = torch.empty((stop - start, *shape[1:]), dtype=torch.float32, device="cpu")
        if std is not None:
            block.normal_(0.0, std, generator=generator)
        elif bound is not None:
            block.uniform_(-bound, bound, generator=generator)
        first, last = max(start, rows.start), min(stop, rows.stop)
        part = (slice(first - start, last - start), *index[1:])
        out[first - rows.start : last - rows.start] = block[part]
    return out
