"""Find out whether a foreign decoder keeps the documents of a row apart, by running its stock forward on stand-ins.

transformers' mask functions start a document wherever a position is not its predecessor's plus one, if the model hands
them its ``position_ids``, and if its attention takes a mask. A trial gives the model positions that restart, and looks
at the mask that each layer gets. It runs nothing that has parameters, so ranks may hold any part of the model.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ....parallel.documents import Documents
from ...module import Absent
from ...trial import trial
from ..probing import Foreign, apart, foreign
from .cut import IN_TRAINING, ON_STAND_INS, Inner, Slot, accepted, layer_list

POSITIONS = ((0, 1, 0, 1), (0, 1, 2, 3))  # of a trial: two documents, and one
LENGTH = len(POSITIONS[0])


class _Seen(Exception):
    """Raised at the last layer, to leave the stock forward."""


def check_documents(model: Any, tokens: torch.Tensor, positions: torch.Tensor) -> None:
    """ValueError unless ``model`` attends within the documents that begin where ``positions`` [S] or [B, S] restart."""
    if torch.compiler.is_compiling():
        raise ValueError(
            f"positions of {type(model).__name__} while torch.compile traces: they cannot be read to check that its "
            "masks keep documents apart; call the model uncompiled, or leave positions out"
        )
    restart = Documents.of(positions, tokens.shape) is not None
    jumps = bool((positions.diff() > 1).any())  # there transformers' masks start documents too
    if not restart and not jumps:
        return
    known, chosen = model.__dict__.setdefault("_mixes", {}), getattr(model.config, "_attn_implementation", None)
    if chosen not in known:
        known[chosen] = apart(why_mixed, model)
    if known[chosen] is not None and restart:
        raise ValueError(
            f"positions that restart start documents, and {type(model).__name__} does not keep those of one row apart: "
            f"{known[chosen]}; pass one document per row, padded with targets of -100"
        )
    if known[chosen] is None and jumps:
        raise ValueError(
            f"positions that rise by more than 1: {type(model).__name__} starts a document there, as the masks of "
            "transformers do; pass positions that rise by 1 within a document"
        )


def why_mixed(model: Any) -> str | None:
    """Why a layer of ``model`` could see another document of its row; None if no layer can."""
    cut = model.__dict__.get("_pipeline_cut")
    path = layer_list(model) if cut is None else ".".join((*cut.owner, cut.name))
    if path is None:
        return "it has no nn.ModuleList of layers"
    layers = list(model.get_submodule(path)) if cut is None else list(cut.layers)
    mixing = next((each for layer in layers for each in layer.modules() if isinstance(each, _SEQUENTIAL)), None)
    if mixing is not None:
        return f"its layers mix tokens by a {type(mixing).__name__}, which has no mask"
    try:
        given = _trial(model, path, layers, cut)
    except Foreign as error:
        return str(error)
    if len(given) == len(layers) and all(map(_separates, given)):
        return None
    chosen = getattr(model.config, "_attn_implementation", None)
    maybe = "" if chosen in ("eager", "sdpa") else f" (under {chosen!r}; set_attn_implementation('sdpa') may help)"
    return f"its layers get no mask that separates them{maybe}"


_SEQUENTIAL = (nn.Conv1d, nn.RNNBase)


def _trial(model: Any, path: str, layers: list[Any], cut: Any) -> list[Any]:
    """The arguments of each layer beside the hidden states."""
    *owner, name = path.split(".")
    param = next(model.parameters())
    device = torch.device("cpu") if param.is_meta else param.device
    positions = torch.tensor(POSITIONS, device=device)
    hidden = model.config.get_text_config().hidden_size if cut is None else cut.width
    embedded = model.get_input_embeddings().weight.shape[-1] if cut is None else cut.embedding
    given: list[Any] = []

    def layer(index: int, *args: Any, **kwargs: Any) -> Any:
        given.append((args, kwargs))
        if index == len(layers) - 1:
            raise _Seen
        return args[0] if args else next(iter(kwargs.values()))

    def zeros(width: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*positions.shape, width, dtype=param.dtype, device=device)

    inner: Any = [Slot(each, partial(layer, index)) for index, each in enumerate(layers)]
    way = (*owner, name)
    for depth in range(len(owner), -1, -1):
        module = model.get_submodule(".".join(owner[:depth]))
        beside = {
            key: Slot(child, partial(zeros, hidden))
            for key, child in module.named_children()
            if key != way[depth] and (isinstance(child, Absent) or next(child.parameters(), None) is not None)
        }
        inner = Inner(module, {"device": device, **IN_TRAINING, **beside, way[depth]: inner})
    inputs = {"inputs_embeds": zeros(embedded), "position_ids": positions, "use_cache": False}
    with trial(model), torch.no_grad(), contextlib.suppress(_Seen), foreign(ON_STAND_INS, _Seen):
        inner(**accepted(model, inputs))
    return given


def _separates(arguments: Any) -> bool:
    """Whether a layer's arguments hold masks [..., S, S], all of which hide the first document from the second."""
    tensors = (each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor))
    masks = [each for each in tensors if each.dim() == 4 and each.shape[-2:] == (LENGTH, LENGTH)]
    return bool(masks) and all(map(_hides, masks))


def _hides(mask: torch.Tensor) -> bool:
    across = mask[0, :, 2:, :2]
    if mask.dtype == torch.bool:  # in some models True hides: a token always sees itself
        return bool((across != mask[0, :, 2:3, 2:3]).all())
    return bool((across < torch.finfo(mask.dtype).min / 2).all())
