"""A pipeline stage of a fused causal language model as a module, for engines and pipelines.

A stage runs the stock forward on views (``view.py``), so multipliers, soft-caps, masks, positions and all other code
between the modules stay the model's own. On later stages the stock forward gets zeros instead of embedded tokens, and
its first layer gets the received hidden states. A stage that ends before the head leaves the stock forward after its
last layer.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from ...module import Absent
from .cut import IN_TRAINING, Inner, Slot, accepted, returns


class _Left(Exception):
    """Raised after a stage's last layer, to leave the stock forward."""


class FusedStage(nn.Module):
    """The ``parts`` of ``whole``, a fused causal language model, whose submodules it shares, under the same names.

    Where one process holds both ends of a tied model in two stages, the last stage gets copies of the modules that
    share a parameter: an engine that shards stages manages each parameter in one stage. The pipeline keeps the copies
    equal and adds their gradients; ``whole`` and its optimizer do not see them.
    """

    _whole: Any
    _cut: Any  # None for an undivided model
    _copies: dict[str, nn.Module]

    def __init__(self, whole: Any, parts: range) -> None:
        super().__init__()
        cut = whole.__dict__.get("_pipeline_cut")
        count = len(whole.pipeline_parts()) if cut is None else cut.last + 1
        if not 0 <= parts.start < parts.stop <= count or parts.step != 1:
            raise ValueError(f"parts={parts}: expected a range of the model's {count} parts")
        self.parts, self.first, self.last = parts, parts.start == 0, parts.stop == count
        self.__dict__ |= {"_whole": whole, "_cut": cut, "_copies": {}}  # must not become children of this module
        self.training = whole.training
        if cut is None:
            self._modules, self._parameters, self._buffers = whole._modules, whole._parameters, whole._buffers
            return
        if self.last and not self.first and 0 in whole.__dict__["_kept"]:
            memo: dict[int, Any] = {}
            for path in frozenset().union(*cut.tied.values()):
                self._copies[path] = copy.deepcopy(whole.get_submodule(path), memo)
        self._fill(self, 0)

    def _fill(self, node: nn.Module, depth: int) -> None:
        """Register this stage's modules in ``node``, the module at ``depth`` on the path to the layers."""
        cut = self._cut
        way = (*cut.owner, cut.name)
        for name, child in self._whole.get_submodule(".".join(way[:depth]))._modules.items():
            path = ".".join((*way[:depth], name))
            if name != way[depth]:
                held = child is None or cut.holds(path, self.parts)
                node.add_module(name, self._copies.get(path, child) if held else Absent())
            elif depth < len(cut.owner):
                node.add_module(name, nn.Module())
                self._fill(node.get_submodule(name), depth + 1)
            else:
                layers = (layer if index + 1 in self.parts else Absent() for index, layer in enumerate(child))
                node.add_module(name, nn.ModuleList(layers))

    def forward(
        self,
        x: torch.Tensor,
        targets: torch.Tensor | None = None,
        *,
        batch_size: int | None = None,
        positions: torch.Tensor | None = None,
        scale: float = 1.0,
        draws: Any = None,
    ) -> torch.Tensor:
        """The x for the next stage. The last stage returns the sum of the targets' losses times ``scale``, [1] in fp32
        (fp64 for an fp64 model), or without ``targets`` the logits [B, S, V].

        ``x`` are tokens [B, S], or after the first stage hidden states [B, S, D]. The stock forward finds documents in
        ``positions`` [B, S] by itself (``documents.py``).
        """
        whole = self._whole
        given: dict[str, Any] = {"use_cache": False}
        if positions is not None:
            given["position_ids"] = positions.expand(x.shape[:2])
        if self.first:
            given["input_ids"] = x
        else:
            given["inputs_embeds"] = x.new_zeros(*x.shape[:2], self._cut.embedding)
        head, losses = self.get_submodule(whole._match.name), list[torch.Tensor]()

        def loss(logits: Any, labels: torch.Tensor, vocab_size: int, *args: Any, **kwargs: Any) -> torch.Tensor:
            assert targets is not None  # the stock forward may have changed the labels
            if logits.shape[:-1] != targets.shape:
                raise ValueError(
                    f"{type(whole).__name__} has logits {list(logits.shape)} for targets {list(targets.shape)}: it "
                    "leaves out tokens, or shifts them by itself"
                )
            total = whole.total(logits, targets, vocab_size) * scale
            losses.append(total.double() if x.dtype == torch.float64 else total)  # the dtype that the pipeline expects
            return losses[-1]

        replaced: dict[str, Any] = {whole._match.name: head}
        if self.last and targets is not None:
            given["labels"] = targets
            replaced |= whole.stand_ins(head, loss)
        try:
            out = self._view(x, replaced)(**accepted(whole, given))
        except _Left as left:
            (hidden,) = left.args
            return hidden.clone() if hidden._is_view() else hidden  # engines detach it in place or hook it
        if targets is None:
            logits: torch.Tensor = out["logits"] if isinstance(out, dict) else out[0]
            return logits
        if len(losses) != 1 or not returns(out, losses[0]):
            raise ValueError(f"{type(whole).__name__} returns another loss than that of its head and the targets")
        return torch.stack((losses[0],))  # not a view: FSDP2 warns about views

    def _view(self, x: torch.Tensor, replaced: dict[str, Any]) -> Any:
        """A view of the whole model with this stage's layers."""
        cut, settings = self._cut, {"training": self.training}
        if cut is None:
            return Inner(self._whole, replaced | settings)
        absent = {path: blank for path, blank in cut.blanks.items() if not cut.holds(path, self.parts)}
        flow = _Flow(self, None if self.first else x)
        layers = [Slot(layer, partial(flow.layer, index)) for index, layer in enumerate(cut.layers)]
        return cut.view(self._whole, layers, {**absent, **self._copies, **replaced}, **IN_TRAINING | settings)

    def extra_repr(self) -> str:
        return f"parts {self.parts.start} to {self.parts.stop - 1}"


class _Flow:
    """Passes hidden states through the layers of a stage; ``x`` are those that the stage received."""

    def __init__(self, stage: FusedStage, x: torch.Tensor | None) -> None:
        self.stage, self.cut, self.x = stage, stage._cut, x
        layers: Any = stage.get_submodule(".".join((*self.cut.owner, self.cut.name)))
        self.layers = list(layers)

    def layer(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Stand in for a layer. Raises :class:`_Left` with the hidden states for the next stage."""
        cut, parts, part = self.cut, self.stage.parts, index + 1
        hidden, args, kwargs = cut.taken(args, kwargs)
        if self.x is None:
            self.x = hidden
        result = cut.returned(self.x)
        if part in parts:
            result = self.layers[index](self.x, *args, **kwargs)
            self.x = result[0] if isinstance(result, tuple | list) else result
        if part + 1 >= parts.stop and not self.stage.last:
            raise _Left(self.x)
        return result
