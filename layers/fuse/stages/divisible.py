"""The interface of a fused causal language model to ``parallelize``: parts and stages, initial weights."""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ....parallel.core.mesh import Group
from ....parallel.core.sharding import named_seed
from ....parallel.documents import Documents
from ....parallel.pipeline.partition import Part
from ...embedding import check_tokens
from ...module import Absent
from ..probing import apart
from ..ranks.sequence import FusedLayer
from ..swap import Fused
from .cut import Cut, cut_of, layer_list
from .documents import check_documents
from .stage import FusedStage


class Staged(Fused):
    """The methods of ``pipeline.partition.Divisible`` and the others that ``parallelize`` calls on a model."""

    def stand_ins(self, head: Any, loss: Callable[..., torch.Tensor]) -> dict[str, Any]:
        """The stand-ins for ``head`` and ``loss_function`` with which the stock forward stores no logits."""
        raise NotImplementedError

    def total(self, logits: Any, targets: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """The sum of the losses of ``targets`` [B, S], the token that follows each position (-100: none)."""
        raise NotImplementedError

    @property
    def group(self) -> Group:
        """The tensor-parallel ranks that the model was fused for."""
        group: Group = self._match.ranks
        return group

    def configure(self, *, recompute: bool | None = None, overlap: str | None = None) -> None:
        """Turn the model's gradient checkpointing on or off; None leaves it. ValueError for a model without it."""
        if overlap is not None:
            raise ValueError(f"overlap={overlap!r}: the layers of a fused model choose by themselves; leave it out")
        this: Any = self
        if recompute:
            if not getattr(self, "supports_gradient_checkpointing", False):
                raise ValueError(f"recompute=True: {type(self).__name__} has no gradient checkpointing; leave it out")
            this.gradient_checkpointing_enable({"use_reentrant": False})
        elif recompute is not None:
            this.gradient_checkpointing_disable()

    def init_weights(self, seed: int | None = None) -> None:
        """Initialise every parameter as the stock model does, from ``seed`` and the module's name; None: as stock,
        unseeded.

        Raises ValueError for a model that is split over ranks, and if the stock model leaves a tensor uninitialised.
        """
        if seed is None:
            super().init_weights()  # type: ignore[misc]
            return
        if any(isinstance(param, DTensor) for param in self.parameters()):
            raise ValueError(
                f"{type(self).__name__} is on meta and split over tensor-parallel ranks: load its weights, and fuse it "
                "with the mesh after that"
            )
        _initialise(self, seed)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        names = defaultdict(list)
        for name, param in self.named_parameters(remove_duplicate=False):
            names[param].append(name)
        super()._apply(fn, recurse)
        for first, *others in names.values():  # to_empty() unties shared parameters
            for other in others:
                path, _, name = other.rpartition(".")
                self.get_submodule(path)._parameters[name] = self.get_parameter(first)
        return self

    # ---------------------------------------------------------------------------------------------------- Divisible

    def pipeline_parts(self, length: int | None = None) -> list[Part]:
        """The parts of the model, each with the FLOPs of one token's forward in a sequence of ``length``."""
        config: Any = self.config
        config = config.get_text_config()
        if (why := self.why_stock()) is not None:
            raise ValueError(f"{type(self).__name__} would train with another loss than that of its labels: {why}")
        if _setting(config, "output_router_logits"):
            raise ValueError("output_router_logits=True adds a loss that is no mean over targets: set it to False")
        path = layer_list(self)
        if path is None:
            return [Part("model", 1.0)]
        length = length or _setting(config, "max_position_embeddings") or 2048
        layers: Any = self.get_submodule(path)
        kinds = _setting(config, "layer_types") or [None] * len(layers)
        window = _setting(config, "sliding_window") or length
        this: Any = self
        width = this.get_input_embeddings().weight.shape[-1]
        costs = []
        for kind, layer in zip([*kinds, *[None] * len(layers)], layers):
            seen = min(length, window) if kind == "sliding_attention" else length
            costs.append(_products(layer) + 2.0 * width * seen)  # causal: half of the scores
        return [
            Part("embeddings", 0.0),
            *(Part(f"{path}.{index}", cost) for index, cost in enumerate(costs)),
            Part(self._match.name, _products(this.get_output_embeddings())),
        ]

    def keep(self, parts: Iterable[int]) -> None:
        """Drop all other parts, but keep modules without parameters and, at either end, the sharers of tied ones."""
        cut, kept = self._cut(), set(parts)
        self.__dict__["_kept"] = kept
        for path, module in list(cut.beside(self)):
            if not cut.holds(path, kept):
                _drop(self, path, module)
        for index, layer in enumerate(cut.layers):
            if index + 1 not in kept:
                _drop(self, ".".join((*cut.owner, cut.name, str(index))), layer)

    def stage(self, parts: range) -> nn.Module:
        """A module of the consecutive ``parts``, with the same submodules under the same names."""
        return FusedStage(self, parts)

    def tied_parameters(self) -> list[str]:
        """The parameters shared by the first and the last part. ValueError for a model that cannot be cut."""
        return list(self._cut().tied)

    def check_batch(self, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        """Raise ValueError for a batch that no stage accepts. Ranks with the same batch reach the same verdict."""
        given = {"tokens": tokens, "targets": targets, **({} if positions is None else {"positions": positions})}
        for name, tensor in given.items():
            if tensor.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"{name} are {tensor.dtype}: expected whole numbers, torch.int64 or torch.int32")
        if tokens.dim() != 2 or targets.shape != tokens.shape:
            raise ValueError(
                f"expected tokens [B, S] and targets of the same shape, not tokens {list(tokens.shape)} and targets "
                f"{list(targets.shape)}"
            )
        if positions is not None:
            if positions.shape not in (tokens.shape[1:], tokens.shape):
                expected = f"[{tokens.shape[1]}] or {list(tokens.shape)}"
                raise ValueError(f"positions {list(positions.shape)}: expected {expected}")
            if "position_ids" not in inspect.signature(self.forward).parameters:
                raise ValueError(f"positions: the forward of {type(self).__name__} takes no position_ids")
        config: Any = self.config
        check_tokens(tokens, config.get_text_config().vocab_size)

    def documents(self, tokens: torch.Tensor, positions: torch.Tensor | None) -> Documents | None:
        """None: the stock forward finds documents in its position_ids. ValueError if it would find others, or none."""
        self.check_batch(tokens, tokens, positions)
        if positions is not None:
            check_documents(self, tokens, positions)
        return None

    def boundary(self, batch: int, length: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The hidden states that a stage sends to the next for [batch, length] tokens: [B, S, D], on meta."""
        dtype = next(self.parameters()).dtype if dtype is None else dtype
        cut = self.__dict__.get("_pipeline_cut")
        return torch.empty(batch, length, 0 if cut is None else cut.width, dtype=dtype, device="meta")

    def draws(self, device: torch.device) -> Any:
        """None without a pipeline; in a pipeline a marker, with which each stage draws its own dropout masks."""
        if not self.training or "_pipeline_cut" not in self.__dict__:
            return None
        torch.rand((), device=device)  # advances the generator for the next step
        return True

    def _cut(self) -> Cut:
        cut: Cut | None = self.__dict__.get("_pipeline_cut")
        if any(isinstance(each, FusedLayer) for each in self.modules()):
            raise ValueError(
                "sequence_parallel=True and pipeline stages: the first and the last layer divide the sequences, and "
                "stages have one of them at most; fuse without sequence_parallel"
            )
        if cut is None:
            cut = self.__dict__["_pipeline_cut"] = apart(cut_of, self, self._match.name)
        return cut


def _setting(config: Any, name: str) -> Any:
    """A setting of transformers' configuration; None if it is missing or differs between layers."""
    with contextlib.suppress(Exception):
        return getattr(config, name, None)
    return None


def _products(module: nn.Module) -> float:
    """FLOPs of the products with the module's weights."""
    return 2.0 * sum(param.numel() for param in module.parameters() if param.dim() > 1)


def _drop(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module by :class:`Absent` and drop its tensors; the module object keeps its settings for readers."""
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = Absent()
    for each in module.modules():
        each._parameters = dict.fromkeys(each._parameters)
        each._buffers = dict.fromkeys(each._buffers)


@torch.no_grad()
def _initialise(model: nn.Module, seed: int) -> None:
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    for tensor in tensors.values():
        tensor.fill_(_nothing(tensor.dtype))
    owners = {path: each for path, each in model.named_modules() if hasattr(each, "_init_weights")}
    if not owners:
        raise ValueError(f"{type(model).__name__} is on meta and has no _init_weights: build it on a device")
    devices = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
    with torch.random.fork_rng(devices):
        for path, module in reversed(list(model.named_modules())):  # children before parents
            owner = max((each for each in owners if path == each or path.startswith(f"{each}.") or not each), key=len)
            torch.manual_seed(named_seed(seed, path))
            owners[owner]._init_weights(module)
    for name, tensor in tensors.items():
        empty = tensor.isnan() if tensor.is_floating_point() else tensor == _nothing(tensor.dtype)
        if tensor.dtype == torch.bool or empty.any():
            raise ValueError(
                f"{type(model).__name__} is on meta, and its _init_weights leaves {name} as it is: build it on a device"
            )


def _nothing(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min
