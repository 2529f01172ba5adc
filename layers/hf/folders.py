"""Folders that transformers reads and writes: ``config.json`` beside ``model.safetensors``.

Our parameters have transformers' own names and layouts, so a folder needs no conversion: gelu style is a Starcoder2,
gated style a Llama.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from ...parallel.checkpoint import checked
from ...parallel.checkpoint.checkpoint import named_entries
from ...parallel.core.agreement import agree, together
from ...parallel.core.mesh import Group, MeshLike, everyone, tp_group, whole_group
from ...parallel.core.sharding import local_tensor, logical, shard_slice
from ..config import TransformerConfig
from ..options import LayerOptions, ModelKwargs, Unpack
from ..transformer import ParallelTransformer
from . import claims
from .config import CHECKSUMS, CHECKSUMS_FORMAT, CONFIG, INDEX, WEIGHTS, config_from_hf, config_to_hf
from .export import export_hf

__all__ = ["WEIGHTS", "config_from_hf", "config_to_hf", "export_hf", "load_hf", "load_hf_weights", "read_hf_config"]

StrPath = str | os.PathLike[str]
_REMEDY = f"export or copy the folder again, or delete {CHECKSUMS} there if the change was intended"
# The fields of a config that do not change the meaning of a trained model's weights.
_FREE = (
    *("max_positions", "init_std", "embedding_dropout", "residual_dropout", "attention_dropout"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


def load_hf(
    directory: StrPath,
    *,
    recompute: bool = False,
    mlp_recompute: int = 0,
    **options: Unpack[ModelKwargs],
) -> ParallelTransformer:
    """The model in ``directory``, sharded over ``mesh``; each rank reads its own slices only.

    ``recompute``, ``mlp_recompute`` and ``options`` are those of :class:`ParallelTransformer`. ``dtype=None`` keeps the
    folder's. Reads one ``model.safetensors`` or an index of several files. If the folder holds the ``checksums.json``
    of :func:`export_hf`, files that differ are refused.

    Raises FileNotFoundError for a missing folder or file, ValueError for one that is cut short, corrupt, or of
    another model.
    """
    group = options["mesh"] = tp_group(cast(MeshLike, options.get("mesh")))
    folder = Path(directory)
    sums = _check_files(folder, group)
    return agree(group, lambda: _load(folder, sums, recompute, mlp_recompute, options))


def _load(
    directory: Path, sums: checked.Sums | None, recompute: bool, mlp_recompute: int, options: ModelKwargs
) -> ParallelTransformer:
    shared = LayerOptions.of(load_hf, options, ModelKwargs)
    raw, files = _claimed(directory, sums)
    config, kept = _read_config(directory, sums)
    on_meta = dataclasses.replace(shared, dtype=shared.dtype or kept, device="meta").kwargs(ModelKwargs)
    try:
        model = ParallelTransformer(config, recompute=recompute, mlp_recompute=mlp_recompute, **on_meta)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(
            f"{directory / CONFIG}: no model has these values ({_in_words(error)}); its largest "
            f"fields are {claims.largest(raw)}"
        ) from error
    params: dict[str, torch.Tensor] = dict(model.named_parameters())
    _check_names(directory, config, set(params), files)
    _check_shapes(params, files, raw)
    model.to_empty(device=shared.device or torch.get_default_device())
    _fill(named_entries(model), files)
    _check_unchanged(directory, sums)
    model.loaded_from = directory.absolute()
    return model.eval()


def _claimed(directory: Path, sums: checked.Sums | None) -> tuple[dict[str, Any], dict[Path, list[str]]]:
    """The config and the files' names, once the sizes that the one claims are compared with the others."""
    _check_downloaded(directory)
    raw = _read_json(directory / CONFIG, sums)
    files = _weight_files(directory, sums)
    with _explained(directory / CONFIG):
        claims.check_counts(raw, [name for names in files.values() for name in names])
    return raw, files


def check_claims(directory: StrPath) -> None:
    """ValueError if the config in ``directory`` claims more layers than its files hold, or sizes that no model has.

    To be called before anything else reads the config: transformers makes lists as long as it says. What is missing
    from the folder is left to the loader.
    """
    folder = Path(directory)
    with suppress(FileNotFoundError):
        _claimed(folder, _read_sums(folder))


def load_hf_weights(directory: StrPath, model: ParallelTransformer, *, group: MeshLike = None) -> None:
    """Fill ``model``, however it is spread over ranks, with the weights in ``directory``.

    All ranks of ``group`` (default: every process) call it: after ``fully_shard``, say, or with a pipeline's parts.
    Each reads its own slices only. Weights take the model's dtype. If the folder holds the ``checksums.json`` of
    :func:`export_hf`, files that differ are refused.

    Raises FileNotFoundError for a missing folder or file, ValueError for one that is cut short, corrupt, or of another
    model, or a model on the meta device. Every rank raises; the model may then be filled in part.
    """
    ranks = everyone() if group is None else whole_group(group)
    folder = Path(directory)
    sums = _check_files(folder, ranks)
    config, _ = agree(ranks, lambda: _read_config(folder, sums))
    wanted = agree(ranks, lambda: named_entries(model))
    names = set().union(*together(ranks, lambda: set(wanted)))

    def fill() -> None:
        _check_config(folder, config, model.config)
        files = _weight_files(folder, sums)
        _check_names(folder, config, names, files)
        _check_shapes(wanted, files, {})
        _fill(wanted, files)
        _check_unchanged(folder, sums)
        model.loaded_from = folder.absolute()

    agree(ranks, fill)


def read_hf_config(directory: StrPath) -> TransformerConfig:
    """The config of the model in ``directory``, to build the model with before :func:`load_hf_weights`.

    Raises FileNotFoundError, or ValueError for a feature that the layers do not have.
    """
    folder = Path(directory)
    return _read_config(folder, _read_sums(folder))[0]


def _read_config(directory: Path, sums: checked.Sums | None) -> tuple[TransformerConfig, torch.dtype]:
    _check_downloaded(directory)
    raw = _read_json(directory / CONFIG, sums)
    with _explained(directory / CONFIG):
        return config_from_hf(raw), _dtype(raw)


def _check_downloaded(directory: Path) -> None:
    """FileNotFoundError for the name of a repository of the Hugging Face Hub in place of a folder."""
    if not directory.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(directory)):
        raise FileNotFoundError(
            f"{directory}: no such folder, and nothing is downloaded here; for the model of this name on the Hugging "
            f"Face Hub: hf download {directory} --local-dir {directory.name}, then load {directory.name!r}"
        )


def _check_config(directory: Path, found: TransformerConfig, ours: TransformerConfig) -> None:
    """ValueError where the same weights would give a different model."""
    for name in (field.name for field in dataclasses.fields(found) if field.name not in _FREE):
        if getattr(found, name) != getattr(ours, name):
            raise ValueError(
                f"{directory / CONFIG}: {name} is {getattr(found, name)!r}, and {getattr(ours, name)!r} in the model; "
                "build the model from read_hf_config(directory)"
            )


def _check_shapes(wanted: dict[str, torch.Tensor], files: dict[Path, list[str]], config: dict[str, Any]) -> None:
    """ValueError for a tensor of another shape, with the fields of ``config`` that ask for it."""
    for path, names in files.items():
        with _explained(path), safe_open(path, framework="pt") as file:
            for name in names:
                if name in wanted:
                    claims.check_shape(name, file.get_slice(name).get_shape(), logical(wanted[name]).shape, config)


def _in_words(error: Exception) -> str:
    """An error's message in one line, without the stack of C++ that torch appends."""
    return " ".join(str(error).partition("\nException raised from")[0].split())


@torch.no_grad()
def _fill(wanted: dict[str, torch.Tensor], files: dict[Path, list[str]]) -> None:
    """Copy this rank's slices of the tensors in ``files`` into ``wanted``."""
    for path, names in files.items():
        with _explained(path), safe_open(path, framework="pt") as file:
            for name in names:
                if name in wanted:
                    local_tensor(wanted[name]).copy_(file.get_slice(name)[shard_slice(wanted[name])])


def _read_sums(directory: Path) -> checked.Sums | None:
    """The checksums that :func:`export_hf` wrote; None where another program wrote the folder."""
    path = directory / CHECKSUMS
    _check_regular(path)
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    sums = checked.parse_checked(path, data, CHECKSUMS_FORMAT, remedy=_REMEDY).get("files")
    if not checked.is_sums(sums) or any(os.path.basename(name) != name or "\0" in name for name in sums):
        raise ValueError(f"{path}: corrupt (it has no dictionary 'files' of sizes and CRC-32s); {_REMEDY}")
    return sums


def _check_regular(path: Path) -> None:
    """ValueError for a pipe or a device, which may have no end. Links to files are allowed: Hub caches use them."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a file")


def _check_files(directory: Path, group: Group) -> checked.Sums | None:
    """Compare the files with their checksums; return these. The ranks that share a folder share the work."""
    place = socket.gethostname(), os.path.realpath(directory)
    found = together(group, lambda: (place, _read_sums(directory)))
    if any(sums != found[0][1] for _, sums in found):
        raise ValueError(f"{directory}: the ranks find different {CHECKSUMS} there; give all the same model")
    peers = [rank for rank, (where, _) in enumerate(found) if where == place]

    def check() -> None:
        sums = found[0][1] or {}
        for name in sorted(sums)[peers.index(group.rank) :: len(peers)]:
            _check_regular(directory / name)
            with _explained(directory / name):
                measured = checked.checksum(directory / name)
            _compare(directory / name, measured, sums)

    agree(group, check)
    return found[0][1]


def _compare(path: Path, measured: checked.Sum, sums: checked.Sums) -> None:
    """ValueError unless the file is as it was written."""
    if path.name not in sums:
        raise ValueError(f"{path}: not a file of this export ({CHECKSUMS} does not list it); {_REMEDY}")
    if measured != sums[path.name]:
        raise ValueError(
            f"{path}: cut short or corrupt ({measured[0]} bytes with CRC-32 {measured[1]:08x}, written were "
            f"{sums[path.name][0]} with {sums[path.name][1]:08x}); {_REMEDY}"
        )


def _check_unchanged(directory: Path, sums: checked.Sums | None) -> None:
    """ValueError if another export replaced files while they were read; an export replaces the checksums first."""
    if _read_sums(directory) != sums:
        raise ValueError(f"{directory}: another export replaced it while it was being read; load it again")


def _weight_files(directory: Path, sums: checked.Sums | None) -> dict[Path, list[str]]:
    """For each weights file the names of the parameters in it."""
    whole = (directory / WEIGHTS).exists() if sums is None else WEIGHTS in sums  # else a broken export's
    if whole or not (directory / INDEX).exists():
        path = directory / WEIGHTS
        if not path.exists():
            raise FileNotFoundError(f"{directory}: neither {WEIGHTS} nor {INDEX} is there")
        _check_regular(path)
        with _explained(path), safe_open(path, framework="pt") as file:
            return {path: list(file.keys())}
    index = _read_json(directory / INDEX, sums)
    with _explained(directory / INDEX):
        names = index["weight_map"]
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ValueError("'weight_map' does not give a file's name for each tensor")
    files: dict[Path, list[str]] = {}
    for name, file_name in names.items():
        if os.path.basename(file_name) != file_name or not file_name or "\0" in file_name:
            raise ValueError(f"{directory / INDEX}: it points to {file_name!r}, outside the folder")
        if sums is not None and file_name not in sums:
            raise ValueError(
                f"{directory / file_name}: not a file of this export ({CHECKSUMS} does not list it); {_REMEDY}"
            )
        files.setdefault(directory / file_name, []).append(name)
    return files


def _check_names(directory: Path, config: TransformerConfig, wanted: set[str], files: dict[Path, list[str]]) -> None:
    found = {name for names in files.values() for name in names}
    # Old Llama folders hold the rotary frequencies, and a folder may hold a tied head beside its embedding.
    spare = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        spare.add("lm_head.weight")
    missing, foreign = sorted(wanted - found), sorted(found - wanted - spare)
    if missing:
        raise ValueError(
            f"{directory}: {CONFIG} asks for {missing[0]} ({len(missing)} such in all), which no weights file holds"
        )
    if foreign:
        raise ValueError(
            f"{directory}: {foreign[0]} ({len(foreign)} such in all) has no place in the model of {CONFIG}"
        )


def _dtype(raw: dict[str, Any]) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={name!r}: expected a floating-point type such as float32 or bfloat16")
    return dtype


def _read_json(path: Path, sums: checked.Sums | None) -> dict[str, Any]:
    _check_regular(path)
    with _explained(path):
        data = path.read_bytes()
    if sums is not None:
        _compare(path, checked.sum_of(data), sums)
    value = checked.parse(path, data, remedy=_REMEDY)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value


@contextmanager
def _explained(path: Path) -> Iterator[None]:
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
