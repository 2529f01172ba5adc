"""The launches of ``launch.py`` as torch ops, with their shape functions: what torch.compile and opcheck see.

Neither is differentiable: ``op.py`` sees to that.
"""

from __future__ import annotations

from typing import Any

from ..runtime import library

LAUNCH = f"{__package__}.launch"


def _fake(q: Any, k: Any, cos: Any, sin: Any, interleaved: bool, conjugate: bool) -> Any:
    return [x.new_empty(x.shape) for x in (q, k) if x is not None]


def _inplace_fake(q: Any, k: Any, cos: Any, sin: Any, interleaved: bool, conjugate: bool) -> None:
    pass


_ARGUMENTS = "Tensor cos, Tensor sin, bool interleaved, bool conjugate"
apply_rope = library.register(f"apply_rope(Tensor q, Tensor? k, {_ARGUMENTS}) -> Tensor[]", LAUNCH, _fake)
apply_rope_ = library.register(f"apply_rope_(Tensor(a!) q, Tensor(b!)? k, {_ARGUMENTS}) -> ()", LAUNCH, _inplace_fake)
