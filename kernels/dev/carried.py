"""Compiled kernels in one file: packed on one machine, unpacked into Triton's cache on another.

An entry of Triton's cache is a folder named by the hash of a key: the installed Triton (its version, its Python files
and its library), the kernel's source with all that it calls and what it is specialised for, the assembler's version,
the options of the launch, and the environment variables that change what is compiled. No path is in it, but an entry
lists its own files by absolute paths, which have to be written anew. The library differs between builds for different
Python versions, so an entry compiled under another of these is renamed: it brings its key without the part that names
Triton.

What is packed of an entry is what a launch needs: the metadata and the machine code, or the launcher that the machine's
C compiler made (``.so``; Triton makes it anew where it does not load).
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY_FILE = "shardfuse.key"  # in an entry: its key but for what names Triton, if the compiling process noted it
_GROUP = "__grp__"
_BINARIES = {".cubin", ".hsaco"}
_PROBE = "_probe_kernel"  # of runtime/fences_triton.py: every machine looks at what it compiles itself


@dataclass(frozen=True)
class Carried:
    """What an archive gave: how many kernels, why the others are of no use here, and its notes."""

    kernels: int = 0
    refused: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)


def entry_name(key: str) -> str:
    """The folder of the entry with this key, as Triton names it."""
    return base64.b32encode(hashlib.sha256(key.encode()).digest()).decode().rstrip("=")


def complete(entry: Path) -> bool:
    """Whether an entry is a kernel that has been compiled; its group file is written last."""
    return any(path.name.startswith(_GROUP) for path in entry.iterdir())


def kernels_in(cache: Path) -> set[str]:
    """The names of the entries that are compiled kernels."""
    return {path.parent.name for path in cache.glob(f"*/{_GROUP}*.json") if path.stem != f"{_GROUP}{_PROBE}"}


def pack(
    cache: Path,
    archive: Path,
    notes: Mapping[str, Any] | None = None,
    *,
    compression: int = zipfile.ZIP_DEFLATED,
    limit: int | None = None,
) -> int:
    """Add to ``archive`` what it lacks of ``cache``; ``notes`` go beside its earlier ones. Returns the bytes of it.

    Where it would become larger than ``limit`` bytes, it stays as it is.

    An archive that another Triton compiled, or the same of another Python, is begun anew; the latter's notes stay.
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    partial = archive.with_name(archive.name + ".part")
    partial.unlink(missing_ok=True)
    here = _triton()
    manifest: dict[str, Any] = {"triton": here, "notes": {}}
    if archive.is_file():
        earlier = _manifest(archive)
        if earlier["triton"]["sources"] == here["sources"]:
            manifest["notes"] = earlier["notes"]
        if earlier["triton"] == here:
            shutil.copyfile(archive, partial)
    manifest["notes"] |= notes or {}
    with zipfile.ZipFile(partial, "a", compression) as file:
        held = set(file.namelist())
        for path in _packed(cache):
            name = f"{path.parent.name}/{path.name}"
            if name not in held:
                file.write(path, name)
        file.comment = json.dumps(manifest).encode()
    if limit is not None and partial.stat().st_size > limit:
        partial.unlink()
    else:
        partial.replace(archive)
    return archive.stat().st_size if archive.is_file() else 0


def notes_of(archive: Path) -> Mapping[str, Any]:
    """What was noted when ``archive`` was packed."""
    notes: Mapping[str, Any] = _manifest(archive)["notes"]
    return notes


def unpack(archive: Path, cache: Path) -> Carried:
    """Put the kernels of ``archive`` into ``cache``, as if they had been compiled here."""
    manifest, here = _manifest(archive), _triton()
    same = manifest["triton"] == here
    if not same and manifest["triton"]["sources"] != here["sources"]:
        theirs, ours = (each["version"] for each in (manifest["triton"], here))
        if theirs != ours:
            return Carried(refused=f"Triton {theirs} compiled them, and this is {ours}")
        return Carried(refused=f"another build of Triton {ours} compiled them")
    found = left = 0
    with zipfile.ZipFile(archive) as file:
        by_entry: dict[str, list[str]] = {}
        for name in file.namelist():
            by_entry.setdefault(name.partition("/")[0], []).append(name)
        for entry, names in by_entry.items():
            key = f"{entry}/{KEY_FILE}"
            if not same and key not in names:
                left += 1
                continue
            folder = cache / (entry if same else entry_name(_triton_key() + file.read(key).decode()))
            folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                (folder / name.partition("/")[2]).write_bytes(file.read(name))
            found += _list_files(folder)
    return Carried(found, f"another Python's Triton compiled {left}" if left else "", manifest["notes"])


def _list_files(entry: Path) -> bool:
    """Write what tells Triton that an entry is complete; False where it is no kernel."""
    files = {path.name: str(path) for path in entry.iterdir() if path.suffix in {".json", *_BINARIES}}
    metadata = next((name for name in files if name.endswith(".json")), None)
    if metadata is None:
        return False
    (entry / f"{_GROUP}{metadata}").write_text(json.dumps({"child_paths": files}))
    return True


def _packed(cache: Path) -> Iterator[Path]:
    kernels = kernels_in(cache)
    for path in sorted(cache.glob("*/*")):
        is_part = path.suffix in {".json", *_BINARIES} and not path.name.startswith(_GROUP)
        if path.suffix == ".so" or (path.parent.name in kernels and (is_part or path.name == KEY_FILE)):
            yield path


def _manifest(archive: Path) -> dict[str, Any]:
    with zipfile.ZipFile(archive) as file:
        manifest: dict[str, Any] = json.loads(file.comment)
    return manifest


def _triton_key() -> str:
    from triton.runtime.cache import triton_key

    return str(triton_key())


def _triton() -> dict[str, str]:
    """The installed Triton: its version, a hash of all of it, and one without the library."""
    import triton
    from triton._C import libtriton

    key = _triton_key()
    library = hashlib.sha256(Path(libtriton.__file__).read_bytes()).hexdigest()
    assert library in key, "Triton's key does not name its library"
    whole, sources = (hashlib.sha256(text.encode()).hexdigest() for text in (key, key.replace(library, "")))
    return {"version": triton.__version__, "key": whole, "sources": sources}
