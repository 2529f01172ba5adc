"""Peers that a machine lacks, as pure wheels in the checkout's folder ``.whl``, which git ignores::

    pip download --no-deps -d .whl liger-kernel

Importing this module makes them importable in this process, unless the machine has packages of these names.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
import zipfile
from pathlib import Path

from .provenance import package_folder

FOLDER = ".whl"

_unpacked: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def carry(folder: Path) -> list[str]:
    """Make the wheels in ``folder`` importable whose packages are not installed; returns the names of the packages.

    They are unpacked, because Triton reads its kernels' sources from files. Raises ValueError for a wheel with compiled
    parts, or a file that is not a wheel.
    """
    found = []
    for path in sorted(folder.glob("*.whl")):
        if not path.stem.endswith("-none-any"):
            raise ValueError(f"{path}: only pure wheels (...-none-any.whl) can be used here")
        try:
            with zipfile.ZipFile(path) as wheel:
                names = {name.partition("/")[0] for name in wheel.namelist() if "/" in name}
                packages = sorted(name for name in names if not name.endswith((".dist-info", ".data")))
                if any(importlib.util.find_spec(name) is not None for name in packages):
                    continue
                place = tempfile.TemporaryDirectory(prefix="shardfuse-whl-")
                wheel.extractall(place.name)
        except zipfile.BadZipFile as error:
            raise ValueError(f"{path}: not a wheel, or a truncated one; download it again") from error
        _unpacked.append(place)
        sys.path.append(place.name)
        importlib.invalidate_caches()
        found += packages
    return found


carry(package_folder("bench").parent / FOLDER)
