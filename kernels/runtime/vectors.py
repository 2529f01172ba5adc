"""What the host knows of strides and Triton does not."""

from __future__ import annotations

from collections.abc import Iterable


def told(strides: Iterable[int], itemsize: int) -> int:
    """The number of elements in 16 bytes, if it divides all ``strides``. 1 if not, and 1 if 16 divides all of them:
    Triton sees that by itself.

    For ``vectors_triton.multiple``. Of an integer Triton looks at two things, whether it is 1 and whether 16 divides
    it: rows of 72 elements of two bytes would be loaded one by one.
    """
    strides = tuple(strides)
    vector = 16 // itemsize
    return 1 if any(stride % vector for stride in strides) or not any(stride % 16 for stride in strides) else vector
