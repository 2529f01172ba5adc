"""The models that the engine serves: our own, transformers', and any ``nn.Module`` that follows a protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch import nn

from ..kernels.runtime.checks import type_name
from ..layers.attention.paged import PagedBatch
from ..layers.transformer import ParallelTransformer
from ..layers.trial import trial
from ..parallel.core.mesh import SINGLE, Group
from ..parallel.grid.grid import Grid
from .foreign import is_foreign
from .foreign.probe import Recorder, tokens_of
from .weight_check import check_weights
from .wrapper import Wrapper


class ServableModel(Protocol):
    """The interface of a model for the engine; ``ParallelTransformer`` implements it.

    Your own module needs ``config`` and a forward whose layers call ``cache.attend``, which stores the step's keys and
    values and attends over all of each sequence's. The T tokens of all sequences are concatenated, each with its
    position; tokens after the last sequence's are padding. ``group`` and ``gather_logits`` are for models over several
    ranks and may be left out; so may ``v_head_dim`` if values have the size of keys. A complete example::

        class Decoder(nn.Module):
            def __init__(self, vocab_size: int = 64, width: int = 32, heads: int = 4, depth: int = 2) -> None:
                super().__init__()
                size = width // heads
                self.config = SimpleNamespace(
                    num_layers=depth, num_kv_heads=heads, head_dim=size, vocab_size=vocab_size, max_positions=128
                )
                self.embed, self.place = nn.Embedding(vocab_size, width), nn.Embedding(128, width)
                self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
                self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
                self.head = nn.Linear(width, vocab_size)

            def forward(self, tokens: torch.Tensor, *, positions: torch.Tensor, cache: PagedBatch) -> torch.Tensor:
                x = self.embed(tokens) + self.place(positions)  # [T, D]
                for layer, (qkv, out) in enumerate(zip(self.qkv, self.out)):
                    q, k, v = qkv(x).unflatten(-1, (3, -1, self.config.head_dim)).unbind(1)  # [T, N, H]
                    x = x + out(cache.attend(layer, q, k, v).flatten(1)).tanh()
                return self.head(x[cache.logit_indices])  # [T_selected, V]

        engine = Engine(Decoder(), num_blocks=16)
    """

    config: Any  # num_layers, num_kv_heads, head_dim, vocab_size, max_positions; optionally v_head_dim
    group: Any  # the tensor-parallel ranks that the KV heads are split over

    def __call__(self, tokens: torch.Tensor, *, positions: torch.Tensor, cache: PagedBatch) -> torch.Tensor:
        """tokens [T], positions [T] -> logits [T_selected, V/R] of the tokens ``cache.logit_indices``."""
        ...

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[T_selected, V/R] -> [T_selected, V] on every rank."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


_NEEDED = ("config", "parameters")
_NEEDED_CONFIG = ("num_layers", "num_kv_heads", "head_dim", "vocab_size", "max_positions")


def as_servable(model: Any) -> ServableModel:
    """``model`` behind the engine's interface: the model itself, or a wrapper.

    This function runs a few tokens through a foreign module to check that every layer attends over the cache, and for a
    model of transformers also compares its logits; its buffers stay what they were. Over several ranks all call it.

    Raises TypeError for an object of another kind, ValueError for a model that cannot be served as it is, say because
    one of its weights is NaN.
    """
    if isinstance(model, nn.Module) and any(param.is_meta for param in model.parameters()):
        raise ValueError("Engine: the model is on the meta device: load its weights first, say with load_hf")
    with trial(model):
        return _servable(model)


def _servable(model: Any) -> ServableModel:
    if is_foreign(model):
        from .foreign.served import Served  # takes as long as transformers' own models

        return Served(model)
    _check(model)
    check_weights(bare(model), getattr(model, "group", SINGLE))
    if isinstance(model, ParallelTransformer | Wrapper):
        return cast(ServableModel, model)
    if isinstance(model, nn.Module):
        _check_layers(model)
    if hasattr(model, "group"):
        return cast(ServableModel, model)
    return _Whole(model)


def bare(model: ServableModel) -> Any:
    """The model that was given to :func:`as_servable`."""
    return model.module if isinstance(model, Wrapper) else model


class _Whole(Wrapper):
    """Wraps a model that one process holds and that has no notion of ranks."""

    group: Group = SINGLE

    def __init__(self, model: Any) -> None:
        self.module, self.config = model, model.config
        self.parameters, self.load_state_dict = model.parameters, model.load_state_dict

    def __call__(self, tokens: torch.Tensor, *, positions: torch.Tensor, cache: PagedBatch) -> torch.Tensor:
        logits: torch.Tensor = self.module(tokens, positions=positions, cache=cache)
        return logits

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def _check(model: Any) -> None:
    """TypeError for an object of another kind, ValueError for a model that cannot be served as it is."""
    config = getattr(model, "config", None)
    missing = [name for name in _NEEDED if not hasattr(model, name)]
    missing += [f"config.{name}" for name in _NEEDED_CONFIG if not hasattr(config, name)]
    if hasattr(model, "group") != hasattr(model, "gather_logits"):
        missing.append("gather_logits" if hasattr(model, "group") else "group")
    if missing:
        raise TypeError(
            f"Engine: model is a {type_name(model)}, which has no {missing[0]}: expected a ParallelTransformer, a "
            "causal language model of transformers, or a module like shardfuse.serving.ServableModel; "
            f"{_remedy(model)}"
        )
    rates = ("embedding_dropout", "residual_dropout", "attention_dropout")
    if getattr(model, "training", False) and any(getattr(config, name, 0) for name in rates):
        raise ValueError(
            "the model is in training mode and would drop activations: call model.eval() before serving it"
        )
    if isinstance(getattr(model, "grid", None), Grid):
        raise ValueError(
            "Engine: a model over a grid: load its checkpoint or its state_dict into a ParallelTransformer to serve"
        )
    if getattr(model, "sequence_parallel", False):
        raise ValueError("Engine: a model with sequence_parallel=True: build or load it with sequence_parallel=False")


def _remedy(model: Any) -> str:
    if isinstance(getattr(model, "module", None), nn.Module):  # the wrappers of parallelize, DistributedDataParallel
        return "export_hf(model.module, folder) writes what load_hf(folder, mesh=mesh) loads to serve"
    return "build one, or load a folder with load_hf(folder)"


@torch.no_grad()
def _check_layers(model: Any) -> None:
    """ValueError unless three tokens reach ``cache.attend`` in every layer, once, with the heads of the config."""
    config, what = model.config, type(model).__name__
    recorder = Recorder.over(next(model.parameters()).device)
    logits = model(
        tokens_of(config.vocab_size, 3, recorder.positions.device), positions=recorder.positions, cache=recorder
    )
    reached = [index for index, _ in recorder.layers]
    if sorted(reached) != list(range(config.num_layers)):
        raise ValueError(
            f"Engine: the layers of this {what} called cache.attend with layer_index {reached}: expected each of 0 to "
            f"{config.num_layers - 1} once, as config.num_layers says"
        )
    ranks = model.group.size if hasattr(model, "group") else 1
    values = getattr(config, "v_head_dim", None) or config.head_dim
    expected = {config.num_kv_heads // ranks, 1} if config.num_kv_heads < ranks else {config.num_kv_heads // ranks}
    for index, heads in recorder.layers:
        if heads.kv_heads not in expected or (heads.head_dim, heads.v_head_dim) != (config.head_dim, values):
            raise ValueError(
                f"Engine: layer {index} of this {what} caches {heads.kv_heads} KV heads of sizes {heads.head_dim} and "
                f"{heads.v_head_dim} on this rank: expected {max(expected)} of {config.head_dim} and {values}, as its "
                "config says (num_kv_heads, head_dim, v_head_dim)"
            )
    if logits.dim() != 2 or logits.shape[0] != 1:
        raise ValueError(
            f"Engine: this {what} returned logits {list(logits.shape)} for one wanted token: expected [1, vocabulary]; "
            "select x[cache.logit_indices] before the head"
        )
