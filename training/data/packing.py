"""Documents cut to a window's length, and windows filled with them."""

from __future__ import annotations

import numpy as np


def cut(starts: np.ndarray, whole: np.ndarray, seq: int) -> np.ndarray:
    """The pieces [P, 2] of documents: the first token and the number of tokens of each, int64.

    ``starts`` [D + 1] are the documents' first tokens and the end of the last. A piece has at most ``seq`` + 1 tokens,
    of which ``seq`` are inputs and ``seq`` are targets; consecutive pieces of a document share the token that ends one
    and begins the next, so every token but a document's first is a target once. Documents marked in ``whole`` [D] have
    to fit and are not cut. A document of one token has no piece.
    """
    lengths = np.diff(starts)
    assert not len(whole) or int(lengths[whole].max(initial=0)) <= seq + 1
    counts = np.maximum(0, -(-(lengths - 1) // seq))  # pieces of each document
    document = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(len(document)) - np.repeat(
        np.cumsum(counts) - counts, counts
    )  # a piece's number in its document
    first = starts[document] + within * seq
    return np.stack((first, np.minimum(seq + 1, starts[document + 1] - first)), axis=1).astype(np.int64)


def one_each(pieces: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """``pieces`` as windows of one piece: see :func:`best_fit`."""
    return pieces, np.arange(len(pieces) + 1)


def best_fit(pieces: np.ndarray, seq: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows of ``seq`` inputs filled with ``pieces`` [P, 2]: best-fit decreasing.

    Returns the pieces in the windows' order, [P, 2], and ``bounds`` [W + 1]: window w holds the pieces bounds[w] to
    bounds[w + 1]. The longest piece goes first, each into the fullest window that has room; windows, and the pieces in
    each, then stand in the order of the data (Johnson et al., SIAM J. Comput. 3 (1974); for language models Ding et
    al., arXiv:2404.10830).
    """
    taken = pieces[:, 1] - 1  # inputs
    by_length = np.argsort(-taken, kind="stable")
    windows: list[list[int]] = []
    open_: list[list[int]] = [[] for _ in range(seq + 1)]  # windows by the room that is left
    rooms = 0  # bit r is set where a window has the room r: the lowest set bit at or above a length is the best fit
    for piece, length in zip(by_length.tolist(), taken[by_length].tolist()):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            window = open_[room].pop()
            if not open_[room]:
                rooms ^= 1 << room
            windows[window].append(piece)
        else:
            room, window = seq, len(windows)
            windows.append([piece])
        if room > length:
            open_[room - length].append(window)
            rooms |= 1 << (room - length)
    for window_pieces in windows:
        window_pieces.sort()
    windows.sort()
    order = np.array([piece for window_pieces in windows for piece in window_pieces], dtype=np.int64)
    bounds = np.cumsum([0, *map(len, windows)], dtype=np.int64)
    return pieces[order], bounds
