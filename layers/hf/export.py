"""Folders that transformers loads, written by however many ranks hold the model."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ...kernels.runtime.checks import type_name
from ...parallel.checkpoint import checked
from ...parallel.checkpoint.entries import bare, full_state_dict
from ...parallel.core.agreement import agree, on_first, together
from ...parallel.core.mesh import Group, MeshLike, everyone, whole_group
from ..transformer import ParallelTransformer
from .config import ANY_PART, CHECKSUMS, CHECKSUMS_FORMAT, COMPANIONS, CONFIG, INDEX, PART, WEIGHTS, config_to_hf
from .tying import EMBEDDING, HEAD, tied


def export_hf(
    model: ParallelTransformer,
    directory: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    group: MeshLike = None,
) -> None:
    """Write ``model`` so that ``AutoModelForCausalLM.from_pretrained(directory)`` gives equal logits.

    All ranks of ``group`` (default: every process) call it, however the model is spread over them; a pipeline's ranks
    pass the parts that they have. Each tensor is written once, in the model's own dtype: all tensors into one file, or
    each stage's into its own file beside an index. The config says that the embeddings are tied where head and
    embedding are one tensor in memory. ``checksums.json`` holds size and CRC-32 of the files that our
    readers read, and the readers compare them. All files are complete under temporary names before the first one is
    renamed. Then this function deletes the weights of an older export and keeps the folder's other files.

    The tokenizer and the settings for generation (``COMPANIONS``) are copied from the folder ``like``, by default the
    folder that the weights were loaded from (``model.loaded_from``, None for a model with fresh weights). If that
    folder is gone, this function warns.

    Raises TypeError for another kind of model, ValueError for one without a counterpart in transformers and for a
    ``group`` that holds none of its tensors, FileNotFoundError for a missing ``like``, RuntimeError when the folder
    cannot be written. Every rank raises.
    """
    ranks = everyone() if group is None else whole_group(group)
    model = cast(ParallelTransformer, bare(model))
    if not isinstance(model, ParallelTransformer):
        raise TypeError(
            f"export_hf: model is a {type_name(model)}: expected a ParallelTransformer, by itself or as parallelize "
            "returns it; for a model of transformers there is save_pretrained(model, folder)"
        )
    state = full_state_dict(model, first_rank_only=True)
    one = tied(ranks, model.state_dict(keep_vars=True), {"": {HEAD: EMBEDDING}}).get("", False)
    if one:
        state.pop(HEAD, None)
    dtypes = together(ranks, lambda: {name: tensor.dtype for name, tensor in state.items()})
    owned = first_holders([list(held) for held in dtypes])
    if not any(dtypes):
        raise ValueError("group: the model's tensors are written by a rank that is not in it; give all that share them")
    # Take the dtype of the written tensors: a parameter may be a copy in another dtype that the model computes with.
    dtype = next(dtype for held in dtypes for dtype in held.values())
    as_held = dataclasses.replace(model.config, tie_embeddings=one)
    config = json.dumps(config_to_hf(as_held, str(dtype).removeprefix("torch.")), indent=2) + "\n"
    with Publication.over(ranks, Path(directory), model.loaded_from, like) as writing:
        mine = {name: state[name].contiguous() for name in owned[ranks.rank]}
        parts = agree(ranks, lambda: [writing.write_part(ranks.rank, 0, mine)] if mine else [])
        writing.publish(ranks, {CONFIG: config}, parts)


class Part(NamedTuple):
    """A file of weights under its temporary name."""

    path: Path
    size: int  # bytes of its tensors
    names: list[str]
    sum: checked.Sum


class Publication:
    """The files of an export; their temporary names contain ``mark``, which is unique."""

    def __init__(self, directory: Path, mark: str, companions: dict[str, Path]) -> None:
        """``companions`` are files to copy, by name."""
        self.directory, self._mark, self._companions = directory, mark, companions
        self._written: list[Path] = []

    @classmethod
    @contextmanager
    def over(cls, ranks: Group, directory: Path, source: Path | None, like: Any) -> Iterator[Publication]:
        """One on every rank; afterwards no file is left under a temporary name.

        ``like``, or else ``source``, is the folder to copy the companions from.
        """
        source = source if like is None else Path(like)
        writing: Publication = on_first(
            ranks, lambda: cls(directory, uuid.uuid4().hex[:8], _companions(source, directory, like is not None))
        )
        try:
            yield writing
        finally:
            for path in writing._written:
                with suppress(OSError):
                    path.unlink()

    def write_part(self, rank: int, number: int, tensors: dict[str, torch.Tensor]) -> Part:
        """Write one file of ``rank``."""
        path = self._temporary(f"part-{rank}-{number}")
        with self._explained():
            self.directory.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path, metadata={"format": "pt"})
            _sync(path)
            return Part(path, sum(tensor.nbytes for tensor in tensors.values()), list(tensors), checked.checksum(path))

    def publish(self, ranks: Group, texts: dict[str, str], parts: list[Part]) -> None:
        """Give every rank's ``parts`` their final names, with the ``texts``, an index and the checksums beside them."""
        every = [part for held in together(ranks, lambda: parts) for part in held]
        on_first(ranks, lambda: self._publish(texts, every))

    def _publish(self, texts: dict[str, str], parts: list[Part]) -> None:
        count = len(parts)
        named = {WEIGHTS if count == 1 else PART.format(i + 1, count): part for i, part in enumerate(parts)}
        if count > 1:
            where = {name: file for file, part in named.items() for name in part.names}
            index = {"metadata": {"total_size": sum(part.size for part in parts)}, "weight_map": where}
            texts = {**texts, INDEX: json.dumps(index, indent=2) + "\n"}
        found = {name: part.sum for name, part in named.items()}
        with self._explained():
            for name, content in texts.items():
                checked.write_text(self._temporary(name), content)
                found[name] = checked.checksum(self._temporary(name))
            for name, source in self._companions.items():
                if name not in texts:
                    self._temporary(name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(source, self._temporary(name))
                    _sync(self._temporary(name))
            checked.write_json(self._temporary(CHECKSUMS), {"format": CHECKSUMS_FORMAT, "files": found})
            # Rename the checksums first: a reader that sees files of both exports then finds a mismatch.
            self._temporary(CHECKSUMS).replace(self.directory / CHECKSUMS)
            for name, part in named.items():
                part.path.replace(self.directory / name)
            for name in {**self._companions, **texts}:
                self._temporary(name).replace(self.directory / name)
            older = [self.directory / WEIGHTS, self.directory / INDEX, *self.directory.glob(ANY_PART)]
            for path in older:
                if path.name not in (*named, *texts):
                    path.unlink(missing_ok=True)

    def _temporary(self, name: str) -> Path:
        path = self.directory / name
        path = path.with_name(f".{path.name}.{self._mark}.tmp")
        if path not in self._written:
            self._written.append(path)
        return path

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise RuntimeError(f"could not export to {self.directory}: {error}") from error


def _companions(source: Path | None, target: Path, asked: bool) -> dict[str, Path]:
    """The files to copy from ``source``, by their names below it. If ``asked``, a missing ``source`` raises."""
    if source is None:
        return {}
    if not source.is_dir():
        if asked:
            raise FileNotFoundError(f"export_hf: like={source}: no such folder; the tokenizer is copied from there")
        warnings.warn(
            f"export_hf: {source}, from which the weights were loaded, is gone: the export has no tokenizer; copy it "
            "from elsewhere, or export again with like=FOLDER",
            stacklevel=2,
        )
        return {}
    if target.is_dir() and source.samefile(target):
        return {}
    found = sorted(path for pattern in COMPANIONS for path in source.glob(pattern) if path.is_file())
    return {path.relative_to(source).as_posix(): path for path in found}


def first_holders(held: list[list[str]]) -> list[list[str]]:
    """The tensors that each rank writes: those that it holds and no lower rank holds."""
    seen: set[str] = set()
    owned = []
    for names in held:
        owned.append([name for name in names if name not in seen])
        seen.update(names)
    return owned


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
