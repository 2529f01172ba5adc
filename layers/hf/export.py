"""Folders that transformers loads, written by however many ranks hold the model."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ...parallel.checkpoint.checkpoint import bare, full_state_dict
from ...parallel.core.agreement import on_first, together
from ...parallel.core.mesh import MeshLike, everyone, whole_group
from ..transformer import ParallelTransformer
from .config import ANY_PART, CONFIG, INDEX, PART, WEIGHTS, config_to_hf


def export_hf(model: ParallelTransformer, directory: str | os.PathLike[str], *, group: MeshLike = None) -> None:
    """Write ``model`` so that ``AutoModelForCausalLM.from_pretrained(directory)`` gives equal logits.

    All ranks of ``group`` (default: every process) call it, however the model is spread over them; a pipeline's ranks
    pass the parts that they have. Each tensor is written once, in the model's own dtype: all tensors into one file, or
    each stage's into its own file beside an index. The files are complete under temporary names before the first one is
    renamed. Then the weights of an older export are deleted; other files of the folder stay.

    Raises ValueError for a model without a counterpart in transformers and for a ``group`` that holds none of its
    tensors, RuntimeError when the folder cannot be written. Every rank raises.
    """
    ranks = everyone() if group is None else whole_group(group)
    model = cast(ParallelTransformer, bare(model))
    state = full_state_dict(model, first_rank_only=True)
    if model.config.tie_embeddings:
        state.pop("lm_head.weight", None)
    dtypes = together(ranks, lambda: {name: tensor.dtype for name, tensor in state.items()})
    owned = _first_holders([list(held) for held in dtypes])
    if not any(dtypes):
        raise ValueError("group: the model's tensors are written by a rank that is not in it; give all that share them")
    # Take the dtype of the written tensors: a parameter may be a copy in another dtype that the model computes with.
    dtype = next(dtype for held in dtypes for dtype in held.values())
    config = config_to_hf(model.config, str(dtype).removeprefix("torch."))
    target = Path(directory)
    writing = on_first(ranks, lambda: _Export(target, uuid.uuid4().hex[:8], owned))
    mine = {name: state[name].contiguous() for name in owned[ranks.rank]}
    try:
        sizes = together(ranks, lambda: writing.write_part(ranks.rank, mine))
        on_first(ranks, lambda: writing.publish(config, sum(sizes)))
    finally:
        writing.discard(ranks.rank)


class _Export:
    """The files of an export; their temporary names contain ``mark``, which is unique."""

    def __init__(self, directory: Path, mark: str, owned: list[list[str]]) -> None:
        """``owned`` are the names of the tensors that each rank writes."""
        self.directory, self._mark = directory, mark
        writers = [rank for rank, names in enumerate(owned) if names]
        count = len(writers)
        parts = [WEIGHTS] if count == 1 else [PART.format(i + 1, count) for i in range(count)]
        self._parts = dict(zip(writers, parts))
        self._where = {name: self._parts[rank] for rank in writers for name in owned[rank]}

    def write_part(self, rank: int, tensors: dict[str, torch.Tensor]) -> int:
        """Write the file of ``rank`` under its temporary name; returns the bytes of its tensors."""
        if not tensors:
            return 0
        path = self._temporary(self._parts[rank])
        with self._explained():
            self.directory.mkdir(parents=True, exist_ok=True)
            save_file(tensors, path, metadata={"format": "pt"})
            _sync(path)
        return sum(tensor.nbytes for tensor in tensors.values())

    def publish(self, config: dict[str, Any], size: int) -> None:
        """Write the config and the index, and give every file its final name."""
        texts: dict[str, dict[str, Any]] = {CONFIG: config}
        if len(self._parts) > 1:
            texts[INDEX] = {"metadata": {"total_size": size}, "weight_map": self._where}
        with self._explained():
            for name, content in texts.items():
                self._temporary(name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
                _sync(self._temporary(name))
            files = [*self._parts.values(), *texts]
            for name in files:
                self._temporary(name).replace(self.directory / name)
            older = [self.directory / WEIGHTS, self.directory / INDEX, *self.directory.glob(ANY_PART)]
            for path in older:
                if path.name not in files:
                    path.unlink(missing_ok=True)

    def discard(self, rank: int) -> None:
        """Delete this rank's files that still have a temporary name; rank 0 also deletes config and index."""
        names = [self._parts.get(rank), *((CONFIG, INDEX) if rank == 0 else ())]
        for name in names:
            if name is not None:
                with suppress(OSError):
                    self._temporary(name).unlink()

    def _temporary(self, name: str) -> Path:
        return self.directory / f".{name}.{self._mark}.tmp"

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise RuntimeError(f"could not export to {self.directory}: {error}") from error


def _first_holders(held: list[list[str]]) -> list[list[str]]:
    """For each rank the tensors that it holds and no rank before it holds."""
    seen: set[str] = set()
    owned = []
    for names in held:
        owned.append([name for name in names if name not in seen])
        seen.update(names)
    return owned


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
