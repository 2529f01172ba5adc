"""A small model over a grid, and what one process makes of the same model and batches, in fp64."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardfuse.layers import ParallelTransformer, TransformerConfig
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
    """Tokens and targets; some targets do not count."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[1, 2:] = -100
        found.append((tokens[:, :-1], targets))
    return found


def alone(style: str, steps: int = 3) -> dict[str, torch.Tensor]:
    """Losses, logits, the first step's gradients, and the parameters after ``steps`` of AdamW."""
    model = ParallelTransformer(config(style), dtype=torch.float64)
    model.init_weights(SEED)
    return train(model, model.forward, steps, {}) | {"logits": model(batches()[0][0]).detach()}


def train(model: torch.nn.Module, loss_of: Any, steps: int, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Train ``model`` by ``loss_of(tokens, targets)``, which for a :class:`ParallelModel` runs backward as well."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step, batch in enumerate(batches(steps)):
        optimizer.zero_grad()
        loss = loss_of(*batch)
        if loss.requires_grad:
            loss.backward()
        found[f"loss {step}"] = loss.detach()
        if step == 0:
            found |= {f"gradient of {name}": whole(param.grad) for name, param in model.named_parameters()}
        optimizer.step()
    return found | {name: whole(param) for name, param in model.named_parameters()}


def whole(tensor: Any) -> torch.Tensor:
    return gather(tensor.detach()).clone()


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], budget: float = BUDGET) -> list[str]:
    """What differs by more than ``budget``; gradients relative to the norm of all of them."""
    if ours.keys() != theirs.keys():
        return [f"other names: {sorted(ours.keys() ^ theirs.keys())}"]
    grads = torch.stack([value.norm() for name, value in theirs.items() if name.startswith("gradient")]).norm()
    found = []
    for name, value in ours.items():
        scale = grads if name.startswith("gradient") else theirs[name].norm().clamp(min=1.0)
        error = (value - theirs[name]).norm() / scale
        if not error <= budget:
            found.append(f"{name}: {error:.1e} off")
    return found


def everyone_holds(found: list[str]) -> list[str]:
    """The differences of all ranks."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, found)
    return [each for theirs in held for each in theirs]
