"""The ops that ``bench verify``, ``bench compare`` and ``bench rivals`` know: the project's, and those of users."""

from __future__ import annotations

from ...kernels.dev import registry
from ...kernels.dev.registry import OpSpec
from .loading import from_entry_points, from_file

GROUP = "shardfuse.ops"


def find_op(text: str) -> OpSpec:
    """The op called ``text``: one of ours, an entry point's, or "file.py:OP".

    Raises ValueError if there is none, RuntimeError if its file cannot be imported.
    """
    if text in registry.ops():
        return registry.op(text)
    if ":" in text:
        found = from_file(text, "op", "PATH:NAME, an OpSpec in a Python file")
        if not isinstance(found, OpSpec):
            raise ValueError(
                f"op {text}: is a {type(found).__name__}, expected a shardfuse.kernels.dev.registry.OpSpec"
            )
        return found
    for _, each in from_entry_points(GROUP):
        if isinstance(each, OpSpec) and each.name == text:
            return each
    return registry.op(text)  # raises, and lists the known ones
