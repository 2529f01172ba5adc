"""Documents cut to a window's length, and windows filled with the pieces."""

from __future__ import annotations

import numpy as np
import pytest

from shardfuse.training.data.packing import best_fit, cut, one_each


def _starts(*lengths: int) -> np.ndarray:
    return np.cumsum([0, *lengths])


def test_pieces_share_the_token_between_them():
    pieces = cut(_starts(1, 2, 9, 17, 18), np.zeros(5, dtype=bool), 8)
    assert pieces.tolist() == [[1, 2], [3, 9], [12, 9], [20, 9], [29, 9], [37, 9], [45, 2]]
    targets = [first + i for first, length in pieces.tolist() for i in range(1, length)]
    assert sorted(targets) == sorted(set(range(47)) - {0, 1, 3, 12, 29})  # each once, but for the documents' first


def test_a_document_that_must_not_be_cut_has_to_fit():
    assert cut(_starts(9), np.array([True]), 8).tolist() == [[0, 9]]
    with pytest.raises(AssertionError):
        cut(_starts(10), np.array([True]), 8)


def test_nothing_gives_no_pieces_and_no_windows():
    pieces = cut(_starts(), np.zeros(0, dtype=bool), 8)
    assert pieces.shape == (0, 2)
    order, bounds = best_fit(pieces, 8)
    assert order.shape == (0, 2)
    assert bounds.tolist() == [0]


def test_the_fullest_window_with_room_takes_a_piece():
    """Inputs 6, 5, 3, 2 into 8: the 3 fits beside the 5 alone, the 2 into either, and better beside the 6."""
    lengths = (7, 6, 4, 3)
    order, bounds = best_fit(cut(_starts(*lengths), np.zeros(4, dtype=bool), 8), 8)
    assert order[:, 1].tolist() == [7, 3, 6, 4]
    assert bounds.tolist() == [0, 2, 4]


@pytest.mark.parametrize("seed", range(3))
def test_windows_hold_every_piece_once_and_within_their_length(seed: int):
    lengths = np.random.default_rng(seed).integers(1, 40, 500)
    pieces = cut(_starts(*lengths.tolist()), np.zeros(500, dtype=bool), 16)
    order, bounds = best_fit(pieces, 16)
    assert sorted(order.tolist()) == pieces.tolist()
    filled = np.add.reduceat(order[:, 1] - 1, bounds[:-1])
    assert filled.max() <= 16
    assert len(filled) <= np.ceil((pieces[:, 1] - 1).sum() / 16) * 1.05  # short pieces fill the gaps
    assert (np.diff(order[bounds[:-1], 0]) > 0).all()  # in the order of the data
    assert len(one_each(pieces, 16)[1]) == len(pieces) + 1
