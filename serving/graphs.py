"""Captured decode steps: the host replays a step on a GPU with a single call.

Lengths stay on the device, so a graph serves every decode step up to its captured number of sequences and length: a
step is padded to the next captured number, and the next captured length covers its longest sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

import torch

from ..kernels.runtime import sealing
from .inputs import Shape

Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], tuple[torch.Tensor, Run]]  # a first result, and a function that recomputes into one tensor

_SHORTEST = 1024  # tokens; each longer graph covers 4 times as many


class Graphs:
    """The captured steps, each captured at its first use or by a warm-up.

    Args:
        capture: the function that captures a step; :func:`cuda_capture`.
        max_num_seqs, max_model_len: the largest step.
    """

    def __init__(self, capture: Capture, max_num_seqs: int, max_model_len: int) -> None:
        self._capture = capture
        self._seqs = [each for each in (1, 2, 4, *range(8, max_num_seqs, 8)) if each < max_num_seqs] + [max_num_seqs]
        self._lens = []
        length = _SHORTEST
        while length < max_model_len:
            self._lens.append(length)
            length *= 4
        self._lens.append(max_model_len)
        self._graphs: dict[tuple[int, int], Run] = {}

    def size(self, shape: Shape) -> tuple[int, int]:
        """The (number of sequences, longest length) of the graph that serves a decode step."""
        return (
            self._seqs[bisect_left(self._seqs, shape.sequences)],
            self._lens[bisect_left(self._lens, shape.max_seq_len)],
        )

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Every size, the largest first, so that the others reuse its memory."""
        for seqs in reversed(self._seqs):
            for length in reversed(self._lens):
                yield seqs, length

    def run(self, size: tuple[int, int], compute: Run) -> torch.Tensor:
        """Replay the graph of ``size``, whose next replay overwrites the result; the first time, capture ``compute``,
        which runs once, before the capture.
        """
        graph = self._graphs.get(size)
        if graph is None:
            sealing.refuse(f"a decode step of {size[0]} sequences up to {size[1]} tokens would be captured")
            out, self._graphs[size] = self._capture(compute)
            return out
        return graph()


def cuda_capture() -> Capture:
    """Capture in CUDA graphs that share their memory."""
    pool = torch.cuda.graph_pool_handle()

    def capture(compute: Run) -> tuple[torch.Tensor, Run]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # this run does all compilation and lasting allocation
            first = compute()
        torch.cuda.current_stream().wait_stream(aside)
        first.record_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            out = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return first, replay

    return capture
