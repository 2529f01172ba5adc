"""``index.json``: the place of each part of each tensor. This module builds torch's objects from this JSON.

    {"byteorder": "little", "tensors": {KEY: {"dtype": "float32", "shape": [4, 6], "chunks": [
        {"offsets": [0, 0], "sizes": [2, 6], "file": "__0_0.distcp", "start": 768}, ...]}}}

A chunk's elements lie in the file from byte ``start`` on, row by row. The chunks of a tensor are the cells of a grid
that covers it exactly; those without elements are left out.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from . import checked

FILE = "index.json"

Place = tuple[str, int]  # a file's name, and where in it the elements begin
Chunk = tuple[str, int, list[int]]  # and the sizes

_REMEDY = "load another checkpoint"
_NUMBERS = re.compile(r"b?float\d+(_\w+)?|complex\d+|u?int(8|16|32|64)|bool")
DTYPES = {
    name: dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and _NUMBERS.fullmatch(name := str(dtype).removeprefix("torch."))
}


def describe(metadata: Metadata, places: Mapping[MetadataIndex, Place]) -> dict[str, Any]:
    """The content of ``index.json`` for the tensors of ``metadata``."""
    tensors = {}
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), key
        chunks = []
        for chunk in entry.chunks:
            if math.prod(chunk.sizes):
                file, start = places[MetadataIndex(key, chunk.offsets)]
                chunks.append(
                    {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": file, "start": start}
                )
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[key] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
    return {"byteorder": sys.byteorder, "tensors": tensors}


def read(path: Path, sums: checked.Sums) -> Metadata:
    """The index in file ``path``, whose storage data are each chunk's :data:`Chunk`.

    ``sums`` are those of the checkpoint's files, its own included. Raises ValueError for any index but one whose chunks
    cover its tensors exactly and lie within these files.
    """
    data = checked.read(path)
    checked.check_sum(path, checked.sum_of(data), sums[path.name])
    content = checked.parse(path, data, remedy=_REMEDY)
    try:
        return _metadata(content, sums)
    except _Problem as error:
        raise ValueError(f"{path}: corrupt ({error}); {_REMEDY}") from error


class _Problem(Exception):
    """An error in an index."""


def _metadata(content: Any, sums: checked.Sums) -> Metadata:
    if not isinstance(content, dict) or not isinstance(content.get("tensors"), dict):
        raise _Problem("it has no dictionary 'tensors'")
    if content.get("byteorder") != sys.byteorder:
        raise _Problem(f"its byte order is {content.get('byteorder')!r}, this machine's is {sys.byteorder!r}")
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Chunk] = {}
    for key, entry in content["tensors"].items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "chunks"}:
            raise _Problem(f"{key} is not a tensor of dtype, shape and chunks")
        name, shape, chunks = entry["dtype"], entry["shape"], entry["chunks"]
        if not isinstance(name, str) or name not in DTYPES:
            raise _Problem(f"{key} has the dtype {name!r}")
        if not _is_shape(shape) or not isinstance(chunks, list) or not all(_is_chunk(chunk, shape) for chunk in chunks):
            raise _Problem(f"{key} has a shape or chunks that are not lists of sizes")
        _check_grid(key, shape, chunks)
        for chunk in chunks:
            file, end = chunk["file"], chunk["start"] + math.prod(chunk["sizes"]) * DTYPES[name].itemsize
            if file not in sums:
                raise _Problem(f"{key} is in {file!r}, which is not a file of the checkpoint")
            if end > sums[file][0]:
                raise _Problem(f"{key} ends at byte {end} of {file}, which has {sums[file][0]}")
            places[MetadataIndex(key, chunk["offsets"])] = file, chunk["start"], chunk["sizes"]
        tensors[key] = TensorStorageMetadata(
            TensorProperties(DTYPES[name]),
            torch.Size(shape),
            [ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])) for chunk in chunks],
        )
    return Metadata(tensors, storage_data=places)


def _is_shape(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= 64  # torch's limit
        and all(map(checked.is_count, value))
        and math.prod(max(size, 1) for size in value) < 1 << 48
    )


def _is_chunk(chunk: Any, shape: list[int]) -> bool:
    return (
        isinstance(chunk, dict)
        and chunk.keys() == {"offsets", "sizes", "file", "start"}
        and all(_is_shape(chunk[name]) and len(chunk[name]) == len(shape) for name in ("offsets", "sizes"))
        and isinstance(chunk["file"], str)
        and checked.is_count(chunk["start"])
    )


def _check_grid(key: str, shape: list[int], chunks: list[dict[str, Any]]) -> None:
    """Raise unless the chunks are the cells of a grid that covers the tensor exactly."""
    if not math.prod(shape):
        if chunks:
            raise _Problem(f"{key} has chunks and no elements")
        return
    steps: list[dict[int, int]] = [{} for _ in shape]  # in each dimension, the offset of a row of cells -> its size
    for chunk in chunks:
        for step, offset, size in zip(steps, chunk["offsets"], chunk["sizes"]):
            if step.setdefault(offset, size) != size:
                raise _Problem(f"the chunks of {key} do not tile it")
    for step, length in zip(steps, shape):
        end = 0
        for offset in sorted(step):
            if offset != end or not step[offset]:
                raise _Problem(f"the chunks of {key} overlap or leave a gap at {min(offset, end)}")
            end += step[offset]
        if end != length:
            raise _Problem(f"the chunks of {key} end at {end}, its length is {length}")
    cells = {tuple(chunk["offsets"]) for chunk in chunks}
    if len(cells) != len(chunks) or len(cells) != math.prod(map(len, steps)):
        raise _Problem(f"the chunks of {key} overlap or leave a gap")
