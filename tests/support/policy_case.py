"""Shared by tests of the overlap policy: a call, a profile with one measurement, and the resulting choice."""

from __future__ import annotations

from typing import Any

import torch

from shardfuse.parallel.core.mesh import Group
from shardfuse.parallel.overlap import link_profile, policy
from shardfuse.parallel.overlap.link_model import GATHER, Call
from shardfuse.parallel.overlap.link_profile import WITH_HOST, Link, Profile, Row, bucket
from shardfuse.parallel.overlap.plan import OverlapPlan, pure_selection

CPU = torch.device("cpu")
WHERE = bucket(64, 32, 16)


def row_of(op: str = GATHER, plain: float = 10.0, chunked: dict[int, float] | None = None, **more: Any) -> Row:
    """A row for ``call_of()``, of few enough tokens that the host's time counts."""
    by = {"clock": WITH_HOST, **more}
    return Row(op, "fp32", 2, "node", WHERE, plain, {1: 5.0} if chunked is None else chunked, **by)


def profile_of(*rows: Row, **more: Any) -> Profile:
    return Profile("cpu", "cpu", measured=True, rows=rows, **more)


def call_of(op: str = GATHER, T: int = 64, K: int = 32, N: int = 16) -> Call:
    return Call(op, T, K, N, torch.float32, 2)


def choose_pure(profile: Profile | None, call: Call | None = None, **more: Any) -> OverlapPlan:
    options = {"unavailable": "no memory", "device_type": "cpu"} | more
    return pure_selection(profile, "node", call or call_of(), **options)


LINK = Link(start_s=0.0, alpha_s=1.0, bytes_per_s=4.0)
MODEL = profile_of(links={"node": dict.fromkeys(link_profile.COLLECTIVES.values(), LINK)}, gemm_flops={"fp32": 2.0})


def forget(group: Group) -> None:
    """Have the ranks of ``group`` agree again at their next choice."""
    for key in [key for key in policy._agreed if key[0] == id(group.pg)]:
        del policy._agreed[key]
