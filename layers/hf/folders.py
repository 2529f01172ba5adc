"""Folders that transformers reads and writes: ``config.json`` beside ``model.safetensors``.

Our parameters have transformers' own names and layouts, so a folder needs no conversion: gelu style is a Starcoder2,
gated style a Llama.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import safe_open

from ...parallel.checkpoint import checked
from ...parallel.checkpoint.entries import named_entries
from ...parallel.core.agreement import agree, together
from ...parallel.core.mesh import SINGLE, Group, MeshLike, everyone, tp_group, whole_group
from ...parallel.core.sharding import is_dtensor, local_tensor, logical, shard_slice
from ..config import TransformerConfig
from ..options import LayerOptions, ModelKwargs, Unpack
from ..transformer import ParallelTransformer
from . import claims
from .config import (
    CHECKSUMS,
    CONFIG,
    GENERATION,
    IN_CONFIG,
    INDEX,
    WEIGHTS,
    config_from_hf,
    config_to_hf,
)
from .export import export_hf
from .notices import tell_unread, tell_untied, tell_unused, without_effect
from .plain import check_dtypes, check_plain, check_there
from .reading import (
    REMEDY,
    StrPath,
    check_regular,
    compare,
    dtype_name,
    explained,
    read_config,
    read_hf_config,
    read_json,
    read_sums,
)
from .refusals import in_words
from .tensors import Tensors
from .tying import EMBEDDING, HEAD

__all__ = ["WEIGHTS", "config_from_hf", "config_to_hf", "export_hf", "load_hf", "load_hf_weights", "read_hf_config"]

T = TypeVar("T")
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
    shared, raw, files, config = agree(group, lambda: _read(folder, sums, options))
    assert shared.dtype is not None
    config = _told(folder, raw, config, _as_filed(config, folder, files, shared.dtype, group))
    return agree(group, lambda: _load(folder, sums, raw, files, config, shared, recompute, mlp_recompute))


def _read(
    directory: Path, sums: checked.Sums | None, options: ModelKwargs
) -> tuple[LayerOptions, dict[str, Any], dict[Path, list[str]], TransformerConfig]:
    """The options with the dtype to load in, config.json, the files' names, and our config."""
    shared = LayerOptions.of(load_hf, options, ModelKwargs)
    raw, files = _claimed(directory, sums)
    _, config, kept = _read_config(directory, sums)
    return dataclasses.replace(shared, dtype=shared.dtype or kept), raw, files, config


def _load(
    directory: Path,
    sums: checked.Sums | None,
    raw: dict[str, Any],
    files: dict[Path, list[str]],
    config: TransformerConfig,
    shared: LayerOptions,
    recompute: bool,
    mlp_recompute: int,
) -> ParallelTransformer:
    on_meta = dataclasses.replace(shared, device="meta").kwargs(ModelKwargs)
    try:
        model = ParallelTransformer(config, recompute=recompute, mlp_recompute=mlp_recompute, **on_meta)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(
            f"{directory / CONFIG}: no model has these values ({in_words(error)}); its largest "
            f"fields are {claims.largest(raw)}"
        ) from error
    params: dict[str, torch.Tensor] = dict(model.named_parameters())
    _check_tensors(directory, config, set(params), params, files, raw)
    device = shared.device or torch.get_default_device()
    model._apply(lambda tensor: _empty_like(tensor, device))
    _fill(_by_file_names(named_entries(model), config, files), files)
    _check_unchanged(directory, sums)
    model.loaded_from = directory.absolute()
    model.generation_config = read_generation_config(directory)
    return model.eval()


def _claimed(directory: Path, sums: checked.Sums | None) -> tuple[dict[str, Any], dict[Path, list[str]]]:
    """The config and the files' names, once the sizes that the one claims are compared with the others."""
    check_there(directory, f"{CONFIG} and weights")
    raw = read_json(directory / CONFIG, sums)
    files = _weight_files(directory, sums)
    with explained(directory / CONFIG):
        claims.check_counts(raw, [name for names in files.values() for name in names])
    return raw, files


def check_claims(directory: StrPath) -> None:
    """ValueError if the config in ``directory`` claims more layers than its files hold, or sizes that no model has.

    To be called before anything else reads the config: transformers makes lists as long as it says. Raises the errors
    of :func:`check_plain` as well; a file that the folder's index names and that is missing is left to the loader.
    """
    folder = Path(directory)
    check_there(folder, f"{CONFIG} and weights")
    check_plain(folder)
    with suppress(FileNotFoundError):
        _claimed(folder, read_sums(folder))


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
    raw, config, dtype = agree(ranks, lambda: _read_config(folder, sums))
    wanted = agree(ranks, lambda: named_entries(model))
    names = set().union(*together(ranks, lambda: set(wanted)))
    files = agree(ranks, lambda: _weight_files(folder, sums))
    config = _told(folder, raw, config, _as_filed(config, folder, files, dtype, ranks))
    if names >= {HEAD, EMBEDDING} and _holds_both(files):  # the model has a place for each of two equal ones
        config = dataclasses.replace(config, tie_embeddings=False)

    def fill() -> None:
        _check_config(folder, config, model.config)
        _check_tensors(folder, config, names, wanted, files, {})
        _fill(_by_file_names(wanted, config, files), files)
        _check_unchanged(folder, sums)
        model.loaded_from = folder.absolute()
        model.generation_config = read_generation_config(folder)

    agree(ranks, fill)


def read_generation_config(directory: StrPath) -> dict[str, Any] | None:
    """The settings for generation in ``directory``; None if it has none. Older folders have them in ``config.json``.

    Raises ValueError for a file that is no JSON object.
    """
    path = Path(directory) / GENERATION
    if path.exists():
        return read_json(path, None)
    raw = read_json(Path(directory) / CONFIG, None)
    return {name: raw[name] for name, usual in IN_CONFIG.items() if raw.get(name) not in (None, usual)} or None


def _check_config(directory: Path, found: TransformerConfig, ours: TransformerConfig) -> None:
    """ValueError where the same weights would give a different model."""
    for name in (field.name for field in dataclasses.fields(found) if field.name not in _FREE):
        if getattr(found, name) != getattr(ours, name):
            raise ValueError(
                f"{directory / CONFIG}: {name} is {getattr(found, name)!r}, and {getattr(ours, name)!r} in the model; "
                "build the model from read_hf_config(directory)"
            )


def as_filed(
    directory: Path, raw: dict[str, Any], config: TransformerConfig, sums: checked.Sums | None
) -> TransformerConfig:
    """``config`` as the weights in ``directory`` have it, if there are any."""
    files: dict[Path, list[str]] = {}
    with suppress(FileNotFoundError):
        files = _weight_files(directory, sums)
    return _as_filed(config, directory, files, _dtype_in(directory, raw), SINGLE)


def _as_filed(
    config: TransformerConfig, directory: Path, files: dict[Path, list[str]], dtype: torch.dtype, group: Group
) -> TransformerConfig:
    """``config``, untied if ``files`` hold a head that differs from the embedding in ``dtype``. Collective.

    The files are right where config.json is not, as in transformers; each rank compares its share of the rows.
    """

    def differ() -> bool:
        if not (config.tie_embeddings and _holds_both(files)):
            return False
        both = {path: [name for name in names if name in (HEAD, EMBEDDING)] for path, names in files.items()}
        tensors = Tensors({path: names for path, names in both.items() if names})
        with tensors.explained(HEAD):
            return tensors.differ(HEAD, EMBEDDING, dtype, (group.rank, group.size))

    return dataclasses.replace(config, tie_embeddings=False) if any(together(group, differ)) else config


def _told(
    directory: Path, raw: dict[str, Any], config: TransformerConfig, filed: TransformerConfig
) -> TransformerConfig:
    """``filed``, after telling where config.json, which says ``config``, is wrong or has entries without effect."""
    if filed.tie_embeddings != config.tie_embeddings:
        tell_untied(directory, HEAD, EMBEDDING)
    tell_unread(directory, raw)
    return filed


def _holds_both(files: dict[Path, list[str]]) -> bool:
    return {HEAD, EMBEDDING} <= {name for names in files.values() for name in names}


def _by_file_names(wanted: dict[str, T], config: TransformerConfig, files: dict[Path, list[str]]) -> dict[str, T]:
    """``wanted`` by the names in ``files``, which may hold a tied model's one matrix as its head."""
    if config.tie_embeddings and not any(EMBEDDING in names for names in files.values()):
        return {HEAD if name == EMBEDDING else name: tensor for name, tensor in wanted.items()}
    return wanted


def _check_tensors(
    directory: Path,
    config: TransformerConfig,
    names: set[str],
    wanted: dict[str, torch.Tensor],
    files: dict[Path, list[str]],
    raw: dict[str, Any],
) -> None:
    """ValueError for tensors that are missing, have no place, are quantised or have another shape.

    ``names`` are those of all ranks' tensors, ``wanted`` this rank's; ``raw`` has the fields that may ask for a shape.
    """
    tensors = Tensors(files)
    wanted = _by_file_names(wanted, config, files)
    with explained(directory):
        check_dtypes(tensors.dtypes, [name for name in wanted if name in tensors.dtypes])
    _check_names(directory, config, set(_by_file_names(dict.fromkeys(names), config, files)), tensors)
    for name in (name for name in tensors.shapes if name in wanted):
        with tensors.explained(name):
            claims.check_shape(name, tensors.shapes[name], logical(wanted[name]).shape, raw)


def _empty_like(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Memory on ``device`` for a tensor on meta. ``torch.empty_like`` would import sympy for that."""
    if is_dtensor(tensor):
        return torch.empty_like(tensor, device=device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@torch.no_grad()
def _fill(wanted: dict[str, torch.Tensor], files: dict[Path, list[str]]) -> None:
    """Copy this rank's slices of the tensors in ``files`` into ``wanted``."""
    for path, names in files.items():
        with explained(path), safe_open(path, framework="pt") as file:
            for name in names:
                if name in wanted:
                    local_tensor(wanted[name]).copy_(file.get_slice(name)[shard_slice(wanted[name])])


def _check_files(directory: Path, group: Group) -> checked.Sums | None:
    """Refuse what is no plain folder, and compare the files with their checksums; return these. The ranks that share a
    folder share the work.
    """
    place = socket.gethostname(), os.path.realpath(directory)

    def first() -> tuple[tuple[str, str], checked.Sums | None]:
        check_plain(directory)
        return place, read_sums(directory)

    found = together(group, first)
    if any(sums != found[0][1] for _, sums in found):
        raise ValueError(f"{directory}: the ranks find different {CHECKSUMS} there; give all the same model")
    peers = [rank for rank, (where, _) in enumerate(found) if where == place]

    def check() -> None:
        sums = found[0][1] or {}
        for name in sorted(sums)[peers.index(group.rank) :: len(peers)]:
            check_regular(directory / name)
            with explained(directory / name):
                measured = checked.checksum(directory / name)
            compare(directory / name, measured, sums)

    agree(group, check)
    return found[0][1]


def _check_unchanged(directory: Path, sums: checked.Sums | None) -> None:
    """ValueError if another export replaced files while they were read; an export replaces the checksums first."""
    if read_sums(directory) != sums:
        raise ValueError(f"{directory}: another export replaced it while it was being read; load it again")


def _weight_files(directory: Path, sums: checked.Sums | None) -> dict[Path, list[str]]:
    """For each weights file the names of the parameters in it."""
    whole = (directory / WEIGHTS).exists() if sums is None else WEIGHTS in sums  # else a broken export's
    if whole or not (directory / INDEX).exists():
        path = directory / WEIGHTS
        if not path.exists():
            raise FileNotFoundError(f"{directory}: neither {WEIGHTS} nor {INDEX} is there")
        check_regular(path)
        with explained(path), safe_open(path, framework="pt") as file:
            return {path: list(file.keys())}
    index = read_json(directory / INDEX, sums)
    with explained(directory / INDEX):
        names = index["weight_map"]
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ValueError("'weight_map' does not give a file's name for each tensor")
    files: dict[Path, list[str]] = {}
    for name, file_name in names.items():
        if os.path.basename(file_name) != file_name or not file_name or "\0" in file_name:
            raise ValueError(f"{directory / INDEX}: it points to {file_name!r}, outside the folder")
        if sums is not None and file_name not in sums:
            raise ValueError(
                f"{directory / file_name}: not a file of this export ({CHECKSUMS} does not list it); {REMEDY}"
            )
        files.setdefault(directory / file_name, []).append(name)
    for path, held in files.items():
        check_regular(path)
        with explained(path), safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                if name not in names:  # transformers reads the files, whatever the index lists
                    held.append(name)
                elif names[name] != path.name:
                    raise ValueError(f"it holds {name}, which {INDEX} says is in {names[name]}; copy the folder again")
    return files


def _check_names(directory: Path, config: TransformerConfig, wanted: set[str], tensors: Tensors) -> None:
    found = set(tensors.shapes)
    # Old Llama folders hold the rotary frequencies, and a folder may hold a tied head beside its embedding.
    spare = {name for name in found if name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings:
        spare.add("lm_head.weight")
    missing, foreign = sorted(wanted - found), sorted(found - wanted - spare)
    unused = [name for name in foreign if without_effect(name, tensors.shapes[name], tensors.dtypes[name])]
    foreign = [name for name in foreign if name not in unused]
    if missing:
        raise ValueError(
            f"{directory}: {CONFIG} asks for {missing[0]} ({len(missing)} such in all), which no weights file holds"
        )
    if foreign:
        raise ValueError(
            f"{directory}: {foreign[0]} ({len(foreign)} such in all) has no place in the model of {CONFIG}"
        )
    tell_unused(directory, unused)


def _read_config(directory: Path, sums: checked.Sums | None) -> tuple[dict[str, Any], TransformerConfig, torch.dtype]:
    raw, config = read_config(directory, sums)
    return raw, config, _dtype_in(directory, raw)


def _dtype_in(directory: Path, raw: dict[str, Any]) -> torch.dtype:
    with explained(directory / CONFIG):
        return dtype_of(raw)


def dtype_of(raw: dict[str, Any]) -> torch.dtype:
    """The dtype that config.json names; ValueError for one that torch does not have, or that is no float."""
    name = dtype_name(raw)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={name!r}: expected a floating-point type such as float32 or bfloat16")
    return dtype
