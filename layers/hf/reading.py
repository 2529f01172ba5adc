"""The small files of a model folder, read with their checksums, and the errors of reading them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ...parallel.checkpoint import checked
from ..config import TransformerConfig
from .config import CHECKSUMS, CHECKSUMS_FORMAT, CONFIG, WEIGHTS, config_from_hf
from .plain import check_plain, check_there

StrPath = str | os.PathLike[str]
_USUAL = ("float32", "bfloat16", "float16", "float64")
REMEDY = f"export or copy the folder again, or delete {CHECKSUMS} there if the change was intended"


def read_hf_config(directory: StrPath) -> TransformerConfig:
    """The config of the model in ``directory``, to build the model with before :func:`load_hf_weights`.

    It is not tied if the weights hold a head with other values than the embedding, whatever config.json says. Without
    weights, config.json alone decides.

    Raises FileNotFoundError, or ValueError for a feature that the layers do not have.
    """
    folder = Path(directory)
    check_plain(folder, weights=False)
    sums = read_sums(folder)
    raw, config = read_config(folder, sums)
    if not config.tie_embeddings:
        return config
    from .folders import as_filed  # with torch, which a plan does without

    return as_filed(folder, raw, config, sums)


def read_config(directory: Path, sums: checked.Sums | None) -> tuple[dict[str, Any], TransformerConfig]:
    """What config.json says, and the config that it stands for."""
    check_there(directory, f"{CONFIG} and weights")
    raw = read_json(directory / CONFIG, sums)
    with explained(directory / CONFIG):
        config = config_from_hf(raw)
        if dtype_name(raw) not in _USUAL:
            from .folders import dtype_of  # torch knows them all

            dtype_of(raw)
        return raw, config


def dtype_name(raw: dict[str, Any]) -> str:
    """The dtype that config.json names, as torch calls it."""
    return str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")


def read_sums(directory: Path) -> checked.Sums | None:
    """The checksums that :func:`export_hf` wrote; None where another program wrote the folder."""
    path = directory / CHECKSUMS
    check_regular(path)
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    sums = checked.parse_checked(path, data, CHECKSUMS_FORMAT, remedy=REMEDY).get("files")
    if not checked.is_sums(sums) or any(os.path.basename(name) != name or "\0" in name for name in sums):
        raise ValueError(f"{path}: corrupt (it has no dictionary 'files' of sizes and CRC-32s); {REMEDY}")
    return sums


def check_regular(path: Path) -> None:
    """ValueError for a pipe or a device, which may have no end. Links to files are allowed: Hub caches use them."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a file")


def compare(path: Path, measured: checked.Sum, sums: checked.Sums) -> None:
    """ValueError unless the file is as it was written."""
    if path.name not in sums:
        raise ValueError(f"{path}: not a file of this export ({CHECKSUMS} does not list it); {REMEDY}")
    if measured != sums[path.name]:
        raise ValueError(
            f"{path}: cut short or corrupt ({measured[0]} bytes with CRC-32 {measured[1]:08x}, written were "
            f"{sums[path.name][0]} with {sums[path.name][1]:08x}); {REMEDY}"
        )


def read_json(path: Path, sums: checked.Sums | None) -> dict[str, Any]:
    check_regular(path)
    with explained(path):
        data = path.read_bytes()
    if sums is not None:
        compare(path, checked.sum_of(data), sums)
    value = checked.parse(path, data, remedy=REMEDY)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Replace the errors of reading ``path`` by ones that name it and say what to do."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path}: no such file; a model folder holds {CONFIG} and {WEIGHTS}") from error
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: cut short or corrupt ({error}); export or copy the folder again") from error
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing; export or copy the folder again") from error
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{path}: a value has the wrong type ({error}); export or copy the folder again") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
