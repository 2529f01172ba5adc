"""Tied parameters: the files of a folder, not its config, say whether a head is its embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from ...parallel.core.agreement import together
from ...parallel.core.mesh import Group

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def owners(model: Any) -> Iterator[tuple[str, Any]]:
    """The modules of transformers' ``model``, by path, that may tie parameters of theirs: each asks its own config."""
    for path, module in model.named_modules(remove_duplicate=False):
        if getattr(module, "_tied_weights_keys", None):
            yield path, module


def ties(owner: Any, path: str = "") -> dict[str, str]:
    """The parameters that ``owner``, the module at ``path``, ties if its config says so, each with its source."""
    from transformers import PreTrainedModel

    tying = SimpleNamespace(  # the parts of a model that the method reads, with a config that ties
        config=SimpleNamespace(tie_word_embeddings=True),
        _tied_weights_keys=owner._tied_weights_keys,
        named_parameters=owner.named_parameters,
        named_buffers=owner.named_buffers,
    )
    prefix = f"{path}." if path else ""
    pairs = PreTrainedModel.get_expanded_tied_weights_keys(tying)  # type: ignore[arg-type]
    return {prefix + name: prefix + source for name, source in pairs.items()}


def tied(ranks: Group, entries: Mapping[str, torch.Tensor], pairs: Mapping[str, Mapping[str, str]]) -> dict[str, bool]:
    """For each owner of ``pairs`` whether all of these are one tensor in memory. Collective.

    ``entries`` are this rank's, by every name. A stage of a pipeline that holds a tied parameter holds its source too.
    Owners without parameters on any rank are left out.
    """

    def found() -> set[tuple[str, bool]]:
        return {
            (path, entries[name] is entries.get(source))
            for path, own in pairs.items()
            for name, source in own.items()
            if name in entries
        }

    every = set[tuple[str, bool]]().union(*together(ranks, found))
    return {path: (path, False) not in every for path, _ in every}
