"""Captured decode steps: a GPU replays one with a single call of the host.

A graph serves every decode step of at most as many sequences and tokens as it was captured for, since lengths stay on
the device: a step is padded to the next number of sequences, and its longest sequence counts as the next length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

import torch

from ..kernels.runtime import sealing
from .inputs import Shape

Run = Callable[[], torch.Tensor]
Capture = Callable[[Run], Run]  # returns what computes into the same tensor again

_SHORTEST = 1024  # tokens; longer graphs are for 4 times as many


class Graphs:
    """The captured steps, each made when it is first wanted, or by a warm-up.

    Args:
        capture: makes one; :func:`cuda_capture`.
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
        """The sequences and the longest length of the graph that serves a decode step."""
        return (
            self._seqs[bisect_left(self._seqs, shape.sequences)],
            self._lens[bisect_left(self._lens, shape.max_seq_len)],
        )

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Every size, the largest first, whose memory the others then find."""
        for seqs in reversed(self._seqs):
            for length in reversed(self._lens):
                yield seqs, length

    def run(self, size: tuple[int, int], compute: Run) -> torch.Tensor:
        """Replay the graph of ``size``, captured of ``compute`` when it is missing. The next replay overwrites it."""
        graph = self._graphs.get(size)
        if graph is None:
            sealing.refuse(f"a decode step of {size[0]} sequences up to {size[1]} tokens would be captured")
            graph = self._graphs[size] = self._capture(compute)
        return graph()


def cuda_capture() -> Capture:
    """Capture in CUDA graphs that share their memory."""
    pool = torch.cuda.graph_pool_handle()

    def capture(compute: Run) -> Run:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # what compiles or allocates for good does it here
            compute()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            out = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    return capture
