"""Copies from one rank's memory to its peers', all of them in one call of the host where CUDA has one.

A ``copy_`` for each peer costs the host more than the copies take: with 8 ranks and 8 pieces, 112 of them and a flag
each. ``cuMemcpyBatchAsync`` (CUDA 12.8 and later) takes any number. The copies of one call run side by side, in any
order; those of the next call on the stream begin when all of them are done, which is what a flag behind its data needs.
NCCL's copy-engine collectives (``src/ce_coll.cc``, since 2.28) use it in the same way, for data and for flags.

torch does not expose the function, so it is looked up in the driver's library, which torch has loaded.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch

_LIBRARY = "libcuda.so.1"
_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a source is read when it is the copy's turn
_BESIDE_KERNELS = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: the copy engines, rather than multiprocessors
_LEGACY_STREAMS = (0, 1)  # CUDA's default stream, for which the driver refuses batches
_NOT_SUPPORTED = 801

_Batch = Callable[[list[int], list[int], int, int], bool]


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes of cuda.h."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),  # a kind of memory and a number: ignored for a GPU's own
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


def spread(tensors: Sequence[torch.Tensor], rank: int, to: Sequence[int], start: int, nbytes: int) -> None:
    """Copy ``nbytes`` bytes from byte ``start`` of ``tensors[rank]`` to the same place in those of the ranks ``to``.

    On a GPU in the order of the current stream, without a kernel between GPUs; on a CPU this thread does it.
    """
    source = tensors[rank]
    if source.is_cuda and len(to) > 0:
        stream = torch.cuda.current_stream(source.device).cuda_stream
        batch = None if stream in _LEGACY_STREAMS else _batch()
        targets = [tensors[peer].data_ptr() + start for peer in to]
        if batch is not None and batch(targets, [source.data_ptr() + start] * len(to), nbytes, stream):
            return
    piece = _bytes(source)[start : start + nbytes]
    for peer in to:
        _bytes(tensors[peer])[start : start + nbytes].copy_(piece, non_blocking=True)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


@functools.cache
def _batch() -> _Batch | None:
    """The driver's function for batches of copies, None if it has none. It returns False where it cannot be used."""
    try:
        call = ctypes.CDLL(_LIBRARY).cuMemcpyBatchAsync
    except (OSError, AttributeError):
        return None
    attributes = _Attributes(source_order=_STREAM_ORDER, flags=_BESIDE_KERNELS)
    first, failed = ctypes.c_size_t(0), ctypes.c_size_t()
    shared = ctypes.byref(attributes), ctypes.byref(first), ctypes.c_size_t(1), ctypes.byref(failed)

    def batch(targets: list[int], sources: list[int], nbytes: int, stream: int) -> bool:
        count = len(targets)
        places, sizes = ctypes.c_uint64 * count, ctypes.c_size_t * count
        error = call(
            places(*targets), places(*sources), sizes(*[nbytes] * count), ctypes.c_size_t(count), *shared,
            ctypes.c_void_p(stream),
        )  # fmt: skip
        if error not in (0, _NOT_SUPPORTED):
            raise RuntimeError(
                f"cuMemcpyBatchAsync failed with CUDA's error {error} for {count} copies of {nbytes} bytes"
            )
        return error == 0

    return batch
