"""A causal language model of transformers behind the engine's interface."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...layers.attention.paged import PagedBatch
from ...layers.fuse.view import names_in
from ..weight_check import check_weights
from ..wrapper import Wrapper
from . import attention, limits, own
from .probe import Heads, Recorder, compare, tokens_of
from .step import Loan, Pass, computing


@dataclass(frozen=True)
class ServedConfig:
    """The sizes that the engine reads; ``num_kv_heads`` counts the heads of all ranks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    vocab_size: int
    max_positions: int


class Served(Wrapper):
    """``model`` over the engine's pages: see :class:`~shardfuse.serving.models.ServableModel`.

    The model keeps its parameters and its forward. It is unchanged outside of the engine's passes, and during a pass
    other threads may run it as before.

    Raises ValueError for a model that cannot be served, and for one whose served logits are not its own.
    """

    enforce_eager = True  # with positions its masks look for packed sequences, reading a value on the host

    def __init__(self, model: Any) -> None:
        limits.check(model)
        attention.register()
        self.module = model
        self.group = limits.group_of(model)
        check_weights(model, self.group)
        self._loans = _loans(model)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._places = "position_ids" in inspect.signature(model.forward).parameters
        self._order: list[nn.Module] | None = None
        layers = self._learn()
        heads = layers[0]
        text = model.config.get_text_config()
        self.config = ServedConfig(
            num_layers=len(layers),
            num_kv_heads=heads.kv_heads * self.group.size,
            head_dim=heads.head_dim,
            v_head_dim=heads.v_head_dim,
            vocab_size=text.vocab_size,
            max_positions=limits.max_positions(model),
        )
        compare(
            *(type(model).__name__, self._serve, self._stock, layers),
            vocab_size=text.vocab_size,
            max_positions=self.config.max_positions,
            group=self.group,
            device=self.device,
        )

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.module.parameters()).device
        return device

    def __call__(self, tokens: torch.Tensor, *, positions: torch.Tensor, cache: PagedBatch) -> torch.Tensor:
        """tokens [T], positions [T] -> logits [T_selected, V], on every rank, of the tokens ``cache.logit_indices``.

        Raises RuntimeError unless every layer attends, in the order that the probe saw.
        """
        return self._serve(tokens, positions, cache)

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return ``logits``: a split head already returns them whole."""
        return logits

    def parameters(self) -> Iterator[nn.Parameter]:
        parameters: Iterator[nn.Parameter] = self.module.parameters()
        return parameters

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        return self.module.load_state_dict(state_dict)

    def _serve(self, tokens: torch.Tensor, positions: torch.Tensor, cache: PagedBatch) -> torch.Tensor:
        with computing(Pass(cache, self._order), self._loans):
            return self._logits(tokens, positions, cache.logit_indices)

    def _stock(self, tokens: torch.Tensor, wide: bool) -> torch.Tensor:
        """tokens [T] of one sequence -> logits [T, V], with the modeling file's own eager attention."""
        every = torch.arange(tokens.shape[0], device=tokens.device)
        with computing(Pass(None, wide=wide), self._loans):
            return self._logits(tokens, every, every)

    def _logits(self, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {"position_ids": positions[None]} if self._places else {}
        if self._keeps:
            given["logits_to_keep"] = wanted
        logits: torch.Tensor = self.module(input_ids=tokens[None], use_cache=False, return_dict=True, **given).logits[0]
        return logits if self._keeps else logits[wanted]

    @torch.no_grad()
    def _learn(self) -> list[Heads]:
        """The sizes that each layer caches, from one pass of three tokens."""
        model, what = self.module, type(self.module).__name__
        text = model.config.get_text_config()
        recorder = Recorder.over(self.device)
        this = Pass(recorder)
        with torch.compiler.set_stance("force_eager"):
            try:
                with computing(this, self._loans):
                    self._logits(tokens_of(text.vocab_size, 3, self.device), recorder.positions, recorder.logit_indices)
            except Exception as error:
                raise ValueError(
                    f"Engine: this {what} cannot be served: its forward fails on a row of tokens without a cache and a "
                    f"mask ({type(error).__name__}: {error}); use model.generate"
                ) from error
        layers = [heads for _, heads in recorder.layers]
        expected = text.num_hidden_layers
        if len(layers) != expected:
            names = sorted({type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()})
            raise ValueError(
                f"Engine: this {what} cannot be served: {len(layers)} of {expected} layers reached the engine's "
                f"attention; expected all, through transformers' AttentionInterface or as one of "
                f"{', '.join(sorted(own.FORWARDS))} (it has: {', '.join(names) or 'no attention'}); use model.generate"
            )
        if this.unlike_causal:
            raise ValueError(
                f"Engine: this {what} cannot be served: its attention is not causal, with or without a sliding window; "
                "use model.generate"
            )
        if len(set(layers)) > 1:
            other = next(index for index, heads in enumerate(layers) if heads != layers[0])
            raise ValueError(
                f"Engine: this {what} cannot be served: layer 0 caches {_said(layers[0])} and layer {other} "
                f"{_said(layers[other])}: one paged cache holds layers of one kind only; use model.generate"
            )
        stored = next(model.parameters()).dtype
        if layers[0].dtype != stored:
            raise ValueError(
                f"Engine: this {what} cannot be served: its first parameter is {stored} and its values are "
                f"{layers[0].dtype}; cast the model to one dtype"
            )
        self._order = list(this.reached)
        return layers


def _loans(model: Any) -> list[Loan]:
    """The loans of a pass: forwards of the model's own attention, and the attention name in configurations."""
    forwards = list(own.loans(model))
    # Falcon's forward reads the name itself, and another thread may need it; its masks are built in full, unused.
    if any("_attn_implementation" in names_in(_stock_class(loan.owner).forward) for loan in forwards):
        return forwards
    configs = {id(each): each for each in (model.config, model.config.get_text_config())}
    for module in model.modules():
        config = module.__dict__.get("config")
        if config is not None and attention.ASKED in getattr(config, "__dict__", {}):
            configs[id(config)] = config
    return [*forwards, *(Loan(config, attention.ASKED, attention.NAME) for config in configs.values())]


def _stock_class(module: nn.Module) -> Any:
    return getattr(type(module), "_stock", type(module))


def _said(heads: Heads) -> str:
    sizes = f"{heads.head_dim}" if heads.head_dim == heads.v_head_dim else f"{heads.head_dim} and {heads.v_head_dim}"
    return f"{heads.kv_heads} KV heads of size {sizes} in {heads.dtype}"
