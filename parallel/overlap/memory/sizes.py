"""The bytes of symmetric memory that a channel, a pool or a model takes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch

from ....kernels.comm.reduce_config import flagged_programs, gathered_slot_shape, slot_shape
from ....kernels.runtime.device import INTERPRETER
from ....kernels.runtime.signals import CHUNKS, PHASES

ALIGN = 256  # of everything that a kernel may read in wide pieces
# The most rows whose sum over the ranks may be deferred to the next norm (partial_sum.py): a step of decoding. For a
# model 8192 wide they are 1 MiB, about what all_reduce_rmsnorm moves in one shot (pick_shots). Channel "decode" has
# room for that many from its first use on.
DECODE_TOKENS = 64

# Every pool's first channels.
BARRIER = "barrier"
PROBE = "probe"
PROBE_WORDS = 1024  # int32, from each rank to each, there and back


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def pad_bytes(ranks: int) -> int:
    """A channel's flags, int32 [PHASES, R, CHUNKS]."""
    return aligned(4 * PHASES * ranks * CHUNKS)


def own_slots(ranks: int) -> dict[str, int]:
    """The slots of a pool's own channels: a barrier has only flags, a probe int32 [2, R, PROBE_WORDS]."""
    return {BARRIER: 0, PROBE: 2 * ranks * PROBE_WORDS * 4}


def channel_bytes(slot_bytes: int, ranks: int) -> int:
    """A channel on one rank: flags and two slots."""
    return pad_bytes(ranks) + 2 * aligned(slot_bytes)


def layout(slots: Mapping[str, int], ranks: int) -> tuple[dict[str, int], int]:
    """(where each channel begins, the bytes of all on a rank) for ``slots``, the bytes of each channel's slot."""
    places, end = {}, 0
    for name, slot_bytes in slots.items():
        places[name] = end
        end += channel_bytes(slot_bytes, ranks)
    return places, end


def layer_slots(
    width: int, tokens: int, dtype: torch.dtype, ranks: int, *, sequence_parallel: bool, deferrable: bool
) -> dict[str, int]:
    """The channels of one layer that exchanges ``tokens`` rows of ``width``, and the bytes of a slot of each.

    ``deferrable`` is for a row-parallel layer, whose sum the next norm may form.
    """
    if sequence_parallel:
        rows = {"gather": tokens, "reduce": ranks * -(-tokens // ranks)}
        return {name: count * width * dtype.itemsize for name, count in rows.items()}
    slots = {"reduce": math.prod(gathered_slot_shape(tokens, width, ranks)) * dtype.itemsize}
    return slots | decode_slots(width, dtype, ranks) if deferrable else slots


@functools.cache
def decode_slots(width: int, dtype: torch.dtype, ranks: int, tokens: int = DECODE_TOKENS) -> dict[str, int]:
    """The channels for ``all_reduce_rmsnorm`` of up to ``tokens`` rows, and the bytes of a slot of each on any device.

    One shot and two raise different flags, and a device-counted channel must raise all of its flags each time.
    """
    archs = (INTERPRETER, "any GPU")
    return {
        decode_channel(shots): dtype.itemsize
        * max(math.prod(slot_shape(tokens, width, ranks, shots, flagged_programs(arch))) for arch in archs)
        for shots in (1, 2)
    }


def decode_channel(shots: int) -> str:
    """The channel for ``all_reduce_rmsnorm`` in so many shots."""
    return "decode" if shots == 1 else f"decode{shots}"


def largest(*slots: Mapping[str, int]) -> dict[str, int]:
    """The largest of the ``slots`` of each channel, in order of first appearance."""
    found: dict[str, int] = {}
    for each in slots:
        for name, nbytes in each.items():
            found[name] = max(nbytes, found.get(name, 0))
    return found


def model_slots(
    *,
    hidden: int,
    tokens: int,
    dtype: torch.dtype,
    ranks: int,
    ffn: int | None = None,
    decode_tokens: int = DECODE_TOKENS,
) -> dict[str, int]:
    """The channels of a model and the bytes of a slot of each, for exchanges of up to ``tokens`` rows of ``hidden``.

    "gather" is for ``all_gather_linear``; "reduce" for ``linear_reduce_scatter`` and for ``linear_all_reduce``, which
    needs more; "decode" and "decode2" for ``all_reduce_rmsnorm`` of up to ``decode_tokens`` rows, in one shot and in
    two. Attention and MLPs exchange hidden rows only. Give ``ffn`` for layers that exchange rows of that width:
    row-parallel ones with ``ffn`` outputs, column-parallel ones with ``ffn`` inputs.
    """
    width = max(hidden, ffn or 0)
    return {
        "gather": tokens * width * dtype.itemsize,
        "reduce": math.prod(gathered_slot_shape(tokens, width, ranks)) * dtype.itemsize,
        **decode_slots(width, dtype, ranks, decode_tokens),
    }


def pool_bytes(
    *,
    hidden: int,
    tokens: int,
    dtype: torch.dtype,
    ranks: int,
    ffn: int | None = None,
    decode_tokens: int = DECODE_TOKENS,
) -> int:
    """The bytes on each rank of a pool with the channels of :func:`model_slots`."""
    slots = model_slots(hidden=hidden, tokens=tokens, dtype=dtype, ranks=ranks, ffn=ffn, decode_tokens=decode_tokens)
    return layout({**own_slots(ranks), **slots}, ranks)[1]


def table(slots: Mapping[str, int], ranks: int, limit: int | None, title: str) -> str:
    """A printable table of a pool's bytes by channel."""
    rows = [("channel", "slots", "bytes")]
    rows += [(name, f"2 x {text(n)}", text(channel_bytes(n, ranks))) for name, n in slots.items()]
    total = text(layout(slots, ranks)[1])
    rows.append(("total", "", total if limit is None else f"{total} of {text(limit)}"))
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join([title, *(f"  {a:{first}}  {b:{second}}  {c}" for a, b, c in rows)])


def text(nbytes: int) -> str:
    """A number of bytes as "384 B", "1.5 MiB"."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{nbytes} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
