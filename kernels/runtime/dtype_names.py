"""The short names of dtypes, and a dtype on paper: what is computed about a product without torch."""

from __future__ import annotations

from typing import NamedTuple, Protocol

SHORT = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


class Dtype(Protocol):
    """A dtype as configurations and costs see it: torch's, or :class:`OnPaper`."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""


class OnPaper(NamedTuple):
    """A dtype by torch's name for it, and the bytes of an element."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


BF16 = OnPaper("bfloat16", 2)


def short_name(dtype: Dtype) -> str:
    """As in SHORT; torch's own name for a dtype that has no short one."""
    name = str(dtype).removeprefix("torch.")
    return SHORT.get(name, name)
