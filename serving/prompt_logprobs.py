"""Log-probabilities of a prompt's own tokens, from the logits of the steps that compute it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels.runtime import dispatch
from .scheduler import Chunk

_ELEMENTS = 1 << 21  # logits in fp64 at a time: 16 MiB


def logit_rows(chunk: Chunk) -> int:
    """The number of tokens at a chunk's end that need logits, from the first whose next token is not scored yet."""
    first, last = _unscored(chunk)
    return chunk.start + chunk.length - first if first < last else int(chunk.samples)


def take_prompt_scores(logits: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
    """Score prompts as far as these chunks allow, for requests that ask; return the logits [S, V] of sampling chunks.

    ``logits`` [sum of :func:`logit_rows`, V] belong to the chunks in order. Scores depend on the prompt and the weights
    alone, so they stay valid if the step fails afterwards.
    """
    if all(chunk.sequence.request.sampling.prompt_logprobs is None for chunk in chunks):
        return logits
    row, sampled = 0, []
    for chunk in chunks:
        rows, (first, last) = logit_rows(chunk), _unscored(chunk)
        if first < last:
            _score(chunk, first, logits[row : row + last - first])
        row += rows
        if chunk.samples:
            sampled.append(row - 1)
    return logits[torch.tensor(sampled, dtype=torch.int64).to(logits.device)]


def _unscored(chunk: Chunk) -> tuple[int, int]:
    """The range of positions in a chunk whose next token belongs to the prompt and is not scored yet."""
    sequence = chunk.sequence
    if sequence.request.sampling.prompt_logprobs is None:
        return 0, 0
    first = max(chunk.start, len(sequence.prompt_scores))
    return first, min(chunk.start + chunk.length, len(sequence.request.prompt) - 1)


def _score(chunk: Chunk, first: int, logits: torch.Tensor) -> None:
    """Append the scores of the tokens that follow positions ``first``, ... from their logits [rows, V]."""
    sequence = chunk.sequence
    most = min(sequence.request.sampling.prompt_logprobs or 0, logits.shape[1])
    assert first == len(sequence.prompt_scores), "a prompt's tokens are scored in their order"
    following = sequence.request.prompt[first + 1 : first + 1 + len(logits)]
    block = 1 if dispatch.row_by_row(logits) else max(1, _ELEMENTS // logits.shape[1])
    for start in range(0, len(logits), block):
        scores = logits[start : start + block].double().log_softmax(-1)
        tokens = following[start : start + len(scores)]
        own = scores.gather(1, torch.tensor(tokens).to(scores.device).unsqueeze(1))
        ranks = (scores > own).sum(1) + 1
        sequence.prompt_scores.extend(tokens, own.squeeze(1), ranks, scores.topk(most))
