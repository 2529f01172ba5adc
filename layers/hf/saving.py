"""A causal language model of transformers, however it is spread over ranks, written as transformers writes it."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...kernels.runtime.checks import type_name
from ...parallel.checkpoint.entries import bare, named_entries
from ...parallel.core.agreement import agree, together
from ...parallel.core.mesh import MeshLike, everyone, whole_group
from ...parallel.core.sharding import gather
from .config import CONFIG, GENERATION
from .export import Part, Publication, first_holders
from .tying import owners, tied, ties

SHARD_BYTES = 5_000_000_000


@torch.no_grad()
def save_pretrained(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    shard_bytes: int = SHARD_BYTES,
    like: str | os.PathLike[str] | None = None,
    group: MeshLike = None,
) -> None:
    """Write ``model`` so that ``AutoModelForCausalLM.from_pretrained(directory)`` gives equal logits.

    ``model`` is one of transformers, fused or not, by itself or as ``parallelize`` returns it. All ranks of ``group``
    (default: every process) call this. The ranks gather one tensor after the other and write files of about
    ``shard_bytes``, so that a rank holds no more than one file's tensors beside its share; a file holds whole layers.
    Names and layouts are those that transformers writes. The folder also gets the config, which says that parameters
    are tied where they are one tensor in memory, the settings for generation, and the tokenizer of the folder ``like``
    (default: the one that the weights were loaded from). ``checksums.json`` holds size and CRC-32 of the files that our
    readers read. All files are complete under temporary names before the first one is renamed.

    Raises TypeError for another kind of model, ValueError for ``shard_bytes`` below 1 and for a ``group`` that holds
    none of the tensors, FileNotFoundError for a missing ``like``, RuntimeError when the folder cannot be written.
    Every rank raises.
    """
    ranks = everyone() if group is None else whole_group(group)
    model = bare(model)
    if not hasattr(model, "config") or not hasattr(model, "_keys_to_ignore_on_load_missing"):
        raise TypeError(
            f"save_pretrained: model is a {type_name(model)}: expected one of transformers, by itself or as "
            "parallelize returns it; for a ParallelTransformer there is export_hf(model, folder)"
        )
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes}: expected at least 1")
    first = agree(ranks, lambda: named_entries(model))
    every = model.state_dict(keep_vars=True)
    pairs = {path: ties(owner, path) for path, owner in owners(model)}
    config, once = copy.deepcopy(model.config), set[str]()
    for path, one in tied(ranks, every, pairs).items():
        if path in pairs:
            _say_tied(config, model, path, one)
            once |= {*pairs[path], *pairs[path].values()} if one else set()
    entries = {name: entry for name, entry in every.items() if name in first or name not in once}
    owned = set(first_holders(together(ranks, lambda: list(entries)))[ranks.rank])
    texts = _texts(model, config, next(iter(first.values())).dtype)
    parts: list[Part] = []
    with Publication.over(ranks, Path(directory), getattr(model, "loaded_from", None), like) as writing:
        errors: list[BaseException] = []
        for number, tensors in enumerate(_shards(entries, owned, shard_bytes)):
            try:
                if not errors and tensors:
                    parts.append(writing.write_part(ranks.rank, number, _as_written(model, tensors)))
            except Exception as error:  # the other ranks still gather
                errors.append(error)

        def done() -> None:
            if errors:
                raise errors[0]

        agree(ranks, done)
        writing.publish(ranks, texts, parts)


def _shards(entries: dict[str, torch.Tensor], owned: set[str], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """The whole tensors named in ``owned``, file by file; every rank takes part in gathering each one."""
    held: dict[str, torch.Tensor] = {}
    before = None
    for name, entry in entries.items():
        layer = re.match(r".*?\.\d+\.", name)
        within = layer is not None and before is not None and layer[0] == before[0]  # conversions need a whole layer
        if held and not within and sum(tensor.nbytes for tensor in held.values()) + entry.nbytes > shard_bytes:
            yield held
            held = {}
        before = layer
        whole = gather(entry)
        if name in owned:
            held[name] = whole.to("cpu", copy=True).contiguous()
    yield held


def _as_written(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names and layouts of transformers' files."""
    from transformers.core_model_loading import revert_weight_conversion

    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, tensors).items()}


def _say_tied(config: Any, model: Any, path: str, one: bool) -> None:
    """Make ``config``, a copy of the model's, say whether the module at ``path`` ties its parameters."""
    owner = model.get_submodule(path)
    for name in ("", *model.config.sub_configs):
        part = getattr(model.config, name, None) if name else model.config
        if part is owner.config and getattr(part, "tie_word_embeddings", False) != one:
            (getattr(config, name) if name else config).tie_word_embeddings = one


def _texts(model: Any, config: Any, dtype: torch.dtype) -> dict[str, str]:
    config.architectures, config.dtype = [type(model).__name__], dtype
    texts = {CONFIG: config.to_json_string()}
    if getattr(model, "generation_config", None) is not None:
        texts[GENERATION] = model.generation_config.to_json_string()
    return texts
