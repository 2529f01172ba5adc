"""Seeds and masks that ranks agree on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardfuse import init_mesh, manual_seed, tp_group
from shardfuse.kernels.dropout import new_ticket
from shardfuse.parallel.random import check_alike

CPU = torch.device("cpu")


def test_seeds_depend_on_seed_and_step_alone():
    seeds = {(seed, step): manual_seed(seed, step=step) for seed in (0, 1) for step in (0, 1, 2)}
    assert len(set(seeds.values())) == 6
    first = [int(new_ticket(CPU)) for _ in range(2)]
    manual_seed(1, step=2)
    assert [int(new_ticket(CPU)) for _ in range(2)] == first
    assert first[0] != first[1]
    assert all(manual_seed(*key[:1], step=key[1]) == seed for key, seed in seeds.items())


def _drawn_body(rank: int, world: int, tp: int) -> tuple[int, str]:
    mesh = init_mesh(dp=world // tp, tp=tp)
    manual_seed(7, mesh, step=3)
    check_alike(tp_group(mesh), CPU)
    ticket = int(new_ticket(CPU))
    check_alike(tp_group(mesh), CPU)
    if rank == 1:
        new_ticket(CPU)
    try:
        check_alike(tp_group(mesh), CPU)
    except RuntimeError as error:
        return ticket, str(error)
    return ticket, ""


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_of_a_tensor_parallel_group_draw_alike_and_replicas_do_not(ranks: Any, tp: int):
    (first, one), (second, other) = ranks(2, _drawn_body, tp)
    assert (first == second) == (tp == 2)
    expected = r"tensor-parallel ranks [1] would draw other random numbers than rank 0"
    assert [expected in message for message in (one, other)] == [tp == 2] * 2
