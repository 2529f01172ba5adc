"""Documents packed in rows, whose positions restart: a model's step against one document per row, in fp64."""

from __future__ import annotations

from typing import Any

import torch

from shardfuse import ParallelTransformer, TransformerConfig
from shardfuse.parallel.core.sharding import gather

BUDGET = 1e-12
SEED, VOCABULARY, LENGTH = 3, 24, 8
# No number of readers or micro-batches divides the rows.
POSITIONS = torch.tensor(
    [
        [0, 1, 2, 0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5, 6, 7],  # one document
        [5, 6, 7, 2, 3, 4, 0, 0],  # documents that begin elsewhere
        [0, 0, 0, 0, 1, 0, 1, 2],  # documents of one token
        [0, 2, 4, 7, 1, 3, 3, 1],  # gaps, which start none
    ]
)
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def config(style: str = "gated", **settings: Any) -> TransformerConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return TransformerConfig(style=style, vocab_size=VOCABULARY, max_positions=LENGTH, **{**sizes, **settings})


def batch(positions: torch.Tensor = POSITIONS) -> Batch:
    """Tokens, targets and ``positions`` [B, S]; all targets of the third row's second document do not count."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(VOCABULARY, (2, *positions.shape), generator=generator)
    targets[1, :2] = targets[2:3, 3:6] = -100
    return tokens, targets, positions


def apart(tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor) -> Batch:
    """The batch with one document per row, padded."""
    length = tokens.shape[1]
    spans = []
    for row, places in enumerate(positions.tolist()):
        starts = [i for i in range(length) if i == 0 or places[i] <= places[i - 1]]
        spans += [(row, start, stop) for start, stop in zip(starts, [*starts[1:], length])]
    alone = torch.zeros(len(spans), length, dtype=torch.int64)
    aims, places = torch.full_like(alone, -100), torch.zeros_like(alone)
    for i, (row, start, stop) in enumerate(spans):
        alone[i, : stop - start], aims[i, : stop - start] = tokens[row, start:stop], targets[row, start:stop]
        last = int(positions[row, stop - 1])
        places[i] = torch.cat((positions[row, start:stop], torch.arange(last + 1, last + 1 + length - stop + start)))
    return alone, aims, places


def one_process(config: TransformerConfig, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor) -> Any:
    """(loss, gradients by name) of a bare model, with one document per row."""
    model = ParallelTransformer(config, dtype=torch.float64)
    model.init_weights(SEED)
    tokens, targets, positions = apart(tokens, targets, positions)
    loss = model(tokens, targets, positions=positions)
    loss.backward()
    return float(loss.detach()), {name: param.grad for name, param in model.named_parameters()}


def grads_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The whole gradients of the parameters here, of a bare model or a spread one. Collective."""
    named = getattr(model, "module", model).named_parameters()
    return {name: gather(param.grad) for name, param in named if param.grad is not None}


def differences(found: Any, expected: Any, budget: float = BUDGET) -> list[str]:
    """Where (loss, gradients) differ; a rank may have a part of the gradients."""
    (loss, grads), (exact, wanted) = found, expected
    scale = max(float(grad.norm()) for grad in wanted.values())
    said = [] if abs(loss - exact) <= budget * abs(exact) else [f"loss {loss} instead of {exact}"]
    for name, grad in grads.items():
        error = float((grad - wanted[name]).norm()) / max(float(wanted[name].norm()), 1e-3 * scale)
        if not error <= budget:
            said.append(f"{name}: {error:.1e} off")
    return said if grads else [*said, "no gradients"]
