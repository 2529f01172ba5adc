"""Objects that users bring: ``PATH:NAME`` in a Python file, and entry points of installed packages."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any


def from_file(text: str, option: str, expected: str) -> Any:
    """The object that ``text``, "kernel.py:function", names.

    ``option`` and ``expected`` complete the error: ValueError if there is no such object, RuntimeError if the file
    cannot be imported.
    """
    path, _, name = text.rpartition(":")
    if not path or not name:
        raise ValueError(f"{option} {text}: expected {expected}")
    if not Path(path).is_file():
        raise ValueError(f"{option} {text}: there is no file {path}; expected {expected}")
    found = getattr(_module(Path(path), option), name, None)
    if found is None:
        raise ValueError(f"{option} {text}: {path} defines no function {name}; expected {expected}")
    return found


def from_entry_points(group: str) -> Iterator[tuple[str, Any]]:
    """(source, object) of every entry point in ``group``, in the order of their names; a tuple or list gives several.

    An entry point that does not import gives the exception in place of the object, so that the others still count.
    """
    for point in sorted(metadata.entry_points(group=group), key=lambda point: (point.name, point.value)):
        source = f"{point.dist.name} ({point.value})" if point.dist is not None else point.value
        try:
            found = point.load()
        except Exception as error:
            found = RuntimeError(f"its import raised {type(error).__name__}: {error}")
        for each in found if isinstance(found, (tuple, list)) else (found,):
            yield source, each


def _module(path: Path, option: str) -> Any:
    """The module in ``path``, registered under a name of its own: Triton looks kernels up by module."""
    name = f"_implementation_{path.stem}_{abs(hash(path.resolve()))}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ValueError(f"{option} {path}: expected a Python file, NAME.py")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise RuntimeError(f"{option} {path}: its import raised {type(error).__name__}: {error}") from error
    return module
