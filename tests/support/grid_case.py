"""A small model over a grid, and what one process makes of the same model and batches, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardfuse import ParallelTransformer, TransformerConfig
from shardfuse.parallel.core.sharding import gather

BUDGET = 1e-11  # relative, of tensors whose numbers are of the order of 1
SEED = 3
BATCH, LENGTH, VOCAB = 4, 4, 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_positions": LENGTH,
    "init_std": 0.2,
}
STYLES = {
    "gelu": {"style": "gelu", "tie_embeddings": True, "pad_token_id": 1},
    "gated": {"style": "gated", "attention_sinks": True, "attention_window": 3},
}


def config(style: str, **sizes: Any) -> TransformerConfig:
    return TransformerConfig(**{**SIZES, **STYLES[style], **sizes})


def batches(count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and targets; some targets do not count.

    No sequence begins with the padding token: norms of its zeros would make the first gradients so large that the
    others were compared with no digit.
    """
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
        tokens[:, 0].clamp_(min=2)
        targets = tokens[:, 1:].clone()
        targets[1, 2:] = -100
        found.append((tokens[:, :-1], targets))
    return found


def alone(style: str, steps: int = 3) -> dict[str, torch.Tensor]:
    """What :func:`train` and :func:`logits` find in one process."""
    model = ParallelTransformer(config(style), dtype=torch.float64)
    model.init_weights(SEED)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        loss = model(*batch)
        loss.backward()
        return loss.detach()

    def norm() -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))

    return train(model, step, norm, steps) | logits(model)


def train(
    model: torch.nn.Module, step: Callable[..., torch.Tensor], norm: Callable[[], torch.Tensor], steps: int
) -> dict[str, torch.Tensor]:
    """Losses of ``steps`` of AdamW, the first gradients and their norm, and the parameters before and after.

    ``step(tokens, targets)`` runs forward and backward.
    """
    found = {f"fresh {name}": whole(param) for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for index, batch in enumerate(batches(steps)):
        optimizer.zero_grad()
        found[f"loss {index}"] = step(*batch)
        if index == 0:
            found["norm"] = norm().double()
            found |= {f"gradient of {name}": whole(param.grad) for name, param in model.named_parameters()}
        optimizer.step()
    return found | {name: whole(param) for name, param in model.named_parameters()}


@torch.no_grad()
def logits(
    model: Any, gathered: Callable[[torch.Tensor], torch.Tensor] = lambda found: found
) -> dict[str, torch.Tensor]:
    """The logits of the first batch, and of the same tokens at other positions."""
    tokens = batches(1)[0][0]
    moved = torch.arange(tokens.numel()).view(tokens.shape) * 2 + 1  # they rise within a row: no documents
    return {"logits": gathered(model(tokens)), "moved logits": gathered(model(tokens, positions=moved))}


def whole(tensor: Any) -> torch.Tensor:
    return gather(tensor.detach()).clone()


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], budget: float = BUDGET) -> list[str]:
    """What differs by more than ``budget``; gradients relative to the norm of all of them."""
    if ours.keys() != theirs.keys():
        return [f"other names: {sorted(ours.keys() ^ theirs.keys())}"]
    squares = [value.square().sum() for name, value in theirs.items() if name.startswith("gradient")]
    grads = sum(squares, torch.zeros(())).sqrt()
    found = []
    for name, value in ours.items():
        if name.startswith("fresh") and not torch.equal(value, theirs[name]):
            found.append(f"{name}: other bits")
        scale = grads if name.startswith("gradient") else theirs[name].norm().clamp(min=1.0)
        error = (value - theirs[name]).norm() / scale
        if not error <= budget:
            found.append(f"{name}: {error:.1e} off")
    return found
