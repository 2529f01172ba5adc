"""Writes a universal kernel for Hugging Face's ``kernels`` library: Python and Triton, for every version of torch.

The folder is ``build/torch-universal/``, a package of the modules that ``exports.py`` needs. Their sources are copied
as they are, in their places below ``shardfuse``. Three kinds of files differ:

- the package's ``__init__.py`` and ``metadata.json``, which are made here;
- the ``__init__.py`` of a package from which no module takes a name, which is empty;
- ``kernels/runtime/library.py``, in which one line names the namespace of the ops. Two builds, or a build and an
  installed shardfuse, may be in one process, so the name ends in a hash of all sources.

The same sources give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from ...kernels.runtime import library, tuning
from . import exports
from .closure import closure

NAME = "shardfuse"
VARIANT = "torch-universal"
VERSION = 1  # of the interface that a build offers, as the hub counts it
ALLOWED = ("einops", "torch", "triton")  # beside the standard library; Triton comes with torch

_ROOT = Path(__file__).parents[2]  # the package's folder: a checkout's src/shardfuse, by its links
_LIBRARY = "kernels/runtime/library.py"
_NAMESPACE = f'NAMESPACE = "{library.NAMESPACE}"'


@dataclass(frozen=True)
class Build:
    """A kernel: ``files`` by their paths in the package, ``hash`` of the sources, ``namespace`` of its ops."""

    files: dict[str, bytes]
    hash: str
    namespace: str

    def __str__(self) -> str:
        size = sum(map(len, self.files.values())) / 1000
        modules = sum(name.endswith(".py") and bool(content) for name, content in self.files.items())
        functions = (name for name in exports.__all__ if name != "layers")
        return (
            f"kernel {NAME} {self.hash}: {modules} modules, {len(self.files)} files, {size:.0f} kB\n"
            f"functions: {', '.join(functions)}\n"
            f"layers: {', '.join(exports.layers.__all__)}\n"
            f"ops: torch.ops.{self.namespace}"
        )


def build(root: Path = _ROOT) -> Build:
    """The kernel made of the sources of shardfuse in the folder ``root``.

    Raises ValueError where a module would need a package that a universal kernel may not import.
    """
    found = closure(root, ("integrations", "hub", "exports"))
    for package in sorted(found.outside.keys() - sys.stdlib_module_names - set(ALLOWED)):
        importers = ", ".join(".".join(name) for name in sorted(found.outside[package]))
        raise ValueError(
            f"hub: {importers} would bring {package}; a universal kernel imports the standard library, "
            f"{', '.join(ALLOWED)} and nothing else: have exports.py need other modules"
        )
    files = {_path(name, source): source.read_bytes() for name, source in found.modules.items()}
    files |= {"/".join((*name, "__init__.py")): b"" for name in found.folders}
    tables = root / "kernels" / tuning.SHIPPED.name
    files |= {f"kernels/{tables.name}/{each.name}": each.read_bytes() for each in tables.glob("*.json")}
    files["__init__.py"] = _init().encode()
    digest = _hash(files)
    namespace = f"{NAME}_{digest}"
    files[_LIBRARY] = _renamed(files[_LIBRARY], namespace)
    files["metadata.json"] = _metadata(namespace).encode()
    return Build(dict(sorted(files.items())), digest, namespace)


def write(built: Build, out: Path) -> Path:
    """Write a build below the folder ``out``, in the place of an earlier one; return the package's folder.

    Raises ValueError where something else than a build of ours lies there.
    """
    folder = out / "build" / VARIANT
    if folder.exists() and not _is_ours(folder):
        raise ValueError(f"hub: {folder} exists and is no build of {NAME}; choose another folder, or remove it")
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in built.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def _path(name: tuple[str, ...], source: Path) -> str:
    return "/".join((*name, "__init__.py")) if source.name == "__init__.py" else "/".join(name) + ".py"


def _init() -> str:
    names = "".join(f"    {name},\n" for name in exports.__all__)
    quoted = "".join(f'    "{name}",\n' for name in exports.__all__)
    return (
        f'"""{NAME}\'s norms, rotary embedding, gated layers and paged attention, as a kernel of the hub."""\n\n'
        f"from .integrations.hub.exports import (\n{names})\n\n__all__ = [\n{quoted}]\n"
    )


def _hash(files: dict[str, bytes]) -> str:
    """12 digits of a SHA-256 over names and contents."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def _renamed(source: bytes, namespace: str) -> bytes:
    assert source.count(_NAMESPACE.encode()) == 1, f"{_LIBRARY} names its namespace once, in its own line"
    return source.replace(_NAMESPACE.encode(), f'NAMESPACE = "{namespace}"'.encode())


def _metadata(namespace: str) -> str:
    content = {
        "backend": {"type": "cuda"},  # the format has no word for all, and without architectures it excludes none
        "id": namespace,
        "license": "Apache-2.0",
        "name": NAME,
        "python-depends": ["einops"],
        "version": VERSION,
    }
    return json.dumps(content, indent=2) + "\n"


def _is_ours(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "metadata.json").read_text())["name"] == NAME)
    except (OSError, ValueError, KeyError, TypeError):
        return False
