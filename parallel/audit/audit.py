"""Count the communication of a step: every collective, by group, kind and site, with its bytes.

    with Audit(mesh) as audit:
        step()
        audit.next_step()
        step()
    print(audit.report())             # what this rank sent, step by step; audit.entries holds the same as data

torch's own calls (FSDP2, pipelining, DTensor) are counted as they pass torch's dispatcher. Calls of this package's
layers pass there as well, but the audit takes their counts from :mod:`collectives`: one call each, under its site, for
any implementation (gloo's reduce-scatter is an all-to-all, a small all-reduce of two ranks is a send and a receive).
The audit does not see collectives that torch.compile has captured. An unknown communication operator is an error,
because a count without it would look complete.

:mod:`entries` says what the payload of a collective is, and :mod:`forms` has the closed forms to compare the counts
with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from ..core import collectives
from .entries import TORCH, Entry

# torch's operators, and the argument that holds the payload.
_C10D = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "send": ("send", 0),
}
# The first argument of a functional collective is its payload; of an all-gather it is the shard.
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "isend": "send",
}
# Operators, by library, that send no tensor from this rank; the sender counts a message.
_SILENT = {
    "c10d": {"barrier", "monitored_barrier_", "check_for_nan", "recv_", "recv_any_source_"},
    "_c10d_functional": {"irecv", "wait_tensor", "_wrap_tensor_autograd"},
}


class _Key(NamedTuple):
    step: int
    group: str
    ranks: int
    kind: str
    site: str


class Audit(TorchDispatchMode):
    """Counts the collectives of this process inside the block. ``mesh`` names the groups; None: one group of all ranks.

    It counts one step at a time: :meth:`next_step` begins another. Do not call :func:`collectives.reset_counts` inside.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self._mesh = mesh
        self._step = 0
        self._calls: Counter[_Key] = Counter()
        self._payload: Counter[_Key] = Counter()
        self._told: tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]] = (Counter(), Counter())
        self._groups: dict[str, tuple[str, int]] = {}  # by torch's name of a group: its name here, and its ranks

    def __enter__(self) -> Audit:
        self._told = collectives.calls.copy(), collectives.payload.copy()
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._take_the_rest()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if hasattr(dist, "tensor") and any(issubclass(kind, dist.tensor.DTensor) for kind in types):
            return NotImplemented  # DTensor runs first; its operators on local tensors come back here
        library, _, name = func._schema.name.partition("::")
        if library == "c10d" and name in _C10D:
            kind, holds = _C10D[name]
            self._note(kind, _nbytes(args[holds]), _process_group(args))
        elif library == "_c10d_functional" and name in _FUNCTIONAL:
            kind, group = _FUNCTIONAL[name], _process_group(args)
            self._note(kind, _nbytes(args[0]) * (group.size() if kind == "all_gather" else 1), group)
        elif name not in _SILENT.get(library, {name}):
            raise RuntimeError(
                f"{library}::{name}: a step sends with it, and the audit does not know how much; leave it out of the "
                "audited step, or use a collective that the audit counts"
            )
        return func(*args, **kwargs or {})

    def next_step(self) -> None:
        """Count what follows in the next step."""
        self._take_the_rest()
        self._step += 1

    @property
    def entries(self) -> list[Entry]:
        """The counts, in order of step, group, kind and site."""
        return [Entry(*key, calls, self._payload[key]) for key, calls in sorted(self._calls.items())]

    def report(self) -> str:
        """The entries as a table of text."""
        rows = [("step", "over", "ranks", "collective", "site", "calls", "payload")]
        for e in self.entries:
            rows.append((str(e.step), e.group, str(e.ranks), e.kind, e.site, f"{e.calls:,}", f"{e.payload:,}"))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)

    def _note(self, kind: str, nbytes: int, process_group: dist.ProcessGroup) -> None:
        group, ranks = self._named(process_group)
        ours = collectives.posting()
        if ours is not None:
            self._take(*ours, group, ranks)
        elif ranks > 1:
            self._add(_Key(self._step, group, ranks, kind, TORCH), 1, nbytes)

    def _take(self, kind: str, site: str, group: str, ranks: int) -> None:
        """Assign the calls that ``collectives`` has counted at (kind, site) since the last reading to their group."""
        told_calls, told_payload = self._told
        calls = collectives.calls[kind, site] - told_calls[kind, site]
        nbytes = collectives.payload[kind, site] - told_payload[kind, site]
        if calls:  # later pieces of a counted collective add no call
            told_calls[kind, site] += calls
            told_payload[kind, site] += nbytes
            whole = nbytes * ranks if kind == "all_gather" else nbytes  # collectives counts the shard
            self._add(_Key(self._step, group, ranks, kind, site), calls, whole)

    def _take_the_rest(self) -> None:
        """Count exchanges through shared memory, which never reach torch; those of a layer stay within its group."""
        names = (self._mesh.mesh_dim_names or ()) if self._mesh is not None else ()
        ranks = self._mesh["tp"].size() if self._mesh is not None and "tp" in names else _world()
        for kind, site in list(collectives.calls):
            self._take(kind, site, "tp", ranks)

    def _add(self, key: _Key, calls: int, nbytes: int) -> None:
        self._calls[key] += calls
        self._payload[key] += nbytes

    def _named(self, group: dist.ProcessGroup) -> tuple[str, int]:
        """The name of ``group``, and its number of ranks."""
        key = group.group_name
        if key not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            self._groups[key] = ("all" if self._mesh is None else group_name(self._mesh, ranks)), len(ranks)
        return self._groups[key]


def group_name(mesh: DeviceMesh, ranks: Sequence[int]) -> str:
    """The dimensions of ``mesh`` in which ``ranks`` differ: "dp", "dp x tp"; "" for a single rank."""
    places = torch.cat([(mesh.mesh == rank).nonzero() for rank in ranks])
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return " x ".join(name for name, column in zip(names, places.T) if len(column.unique()) > 1)


def _process_group(args: Iterable[Any]) -> dist.ProcessGroup:
    """The group among an operator's arguments: an object, or for functional collectives its name, the last string."""
    name: Any = None
    for arg in args:
        if isinstance(arg, dist.ProcessGroup):
            return arg
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in arg._type().qualified_name():
            return dist.ProcessGroup.unbox(arg)
        name = arg if isinstance(arg, str) else name
    assert name is not None, "a collective without a group"
    return dist.distributed_c10d._resolve_process_group(name)


def _nbytes(tensors: Any) -> int:
    """The bytes of a tensor, or of all tensors in nested lists."""
    return tensors.nbytes if isinstance(tensors, torch.Tensor) else sum(map(_nbytes, tensors))


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
