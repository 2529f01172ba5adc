"""The tensors in safetensors files, read slice by slice."""

from __future__ import annotations

import math
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .reading import explained

_MAPPED_BYTES = 32 << 20  # of one file, before its pages are given back
_COMPARED_BYTES = 8 << 20  # of each of two tensors, at once


class Tensors:
    """The tensors in ``files``, which gives the names in each; the files' pages do not stay in memory."""

    def __init__(self, files: dict[Path, list[str]]) -> None:
        self.where = {name: path for path, names in files.items() for name in names}
        self.read = 0  # bytes
        self._path: Path | None = None
        self._file: Any = None
        self._since = 0  # bytes, since the file was opened
        self.shapes: dict[str, list[int]] = {}
        self.dtypes: dict[str, str] = {}  # by safetensors' names, such as BF16
        self._sizes: dict[str, int] = {}
        for path, names in files.items():
            with explained(path), safe_open(path, framework="pt") as file:
                for name in names:
                    each = file.get_slice(name)
                    self.shapes[name], self.dtypes[name] = each.get_shape(), each.get_dtype()
                    bits = re.search(r"\d+", self.dtypes[name])
                    self._sizes[name] = math.prod(self.shapes[name]) * (int(bits[0]) if bits else 8) // 8
        self.total = sum(self._sizes.values())

    def size(self, name: str) -> int:
        return self._sizes[name]

    def part(self, name: str, index: Any) -> torch.Tensor:
        part: torch.Tensor = self._slice(name)[index]
        self.read += part.nbytes
        self._since += part.nbytes if isinstance(index, slice) else self._sizes[name]  # columns touch every page
        return part

    def explained(self, name: str) -> AbstractContextManager[None]:
        return explained(self.where[name])

    def differ(self, first: str, second: str, dtype: torch.dtype, share: tuple[int, int]) -> bool:
        """Whether two tensors differ in ``dtype``, in a share of their rows: (index, count), as of a rank in a group.

        A few megabytes are read at a time. Tensors of different shapes differ.
        """
        shape = self.shapes[first]
        if shape != self.shapes[second]:
            return True
        if not shape:
            return not torch.equal(self.part(first, ...).to(dtype), self.part(second, ...).to(dtype))
        index, count = share
        begin, end = (edge * shape[0] // count for edge in (index, index + 1))
        rows = max(1, _COMPARED_BYTES * shape[0] // max(1, self._sizes[first]))
        for start in range(begin, end, rows):
            some = slice(start, min(start + rows, end))
            if not torch.equal(self.part(first, some).to(dtype), self.part(second, some).to(dtype)):
                return True
        return False

    def _slice(self, name: str) -> Any:
        if self._path != self.where[name] or self._since > _MAPPED_BYTES:
            self._path, self._since = self.where[name], 0
            self._file = None  # unmap what was read
            self._file = safe_open(self._path, framework="pt")
        return self._file.get_slice(name)
