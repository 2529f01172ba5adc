"""What a decode step of the engine launches on a CPU, for each layer: its kernels, by name, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile
from tuning_case import shipped_tables, table_of

import shardfuse as sf
from shardfuse.kernels.linear import cpu_tables
from shardfuse.kernels.runtime import onednn, processor, tuning

WHY_NOT = onednn.why_not(torch.float32)
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

# Ops that make tensors or look at them: no kernel, no pass over memory.
FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "resize_", "result_type", "promote_types", "is_same_size"),
    *("view", "reshape", "_unsafe_view", "_reshape_alias", "as_strided", "slice", "select", "narrow", "transpose", "t"),
    *("permute", "movedim", "unsqueeze", "squeeze", "expand", "flatten", "unflatten", "split", "split_with_sizes"),
    *("unbind", "detach", "alias", "lift_fresh", "to", "contiguous", "item", "_local_scalar_dense", "is_nonzero"),
}
ATTENTION = {
    "_linear_pointwise": 2,  # q, k and v in one; the output projection, with the residual
    "cat": 1,  # the partners of rotated elements
    **{"mul": 1, "addcmul_": 1},  # the rotation
    "_index_put_impl_": 1,  # K and V in one
    "_scaled_dot_product_flash_attention_for_cpu": 1,
    "sum": 1,  # whether a slot that no sequence owns held NaN
}
GATED = {
    "_linear_pointwise": 3,  # gate, up and down
    **{"linalg_vector_norm": 2, "hypot": 2, "div": 2, "addcmul": 2},  # two norms
}
GELU = {
    "_linear_pointwise": 2,
    "cat": 1,  # the biases of q, k and v
    "native_layer_norm": 2,
}


@pytest.fixture
def every_product_is_onednns(tmp_path: Path) -> Iterator[None]:
    """A table that says so of every size."""
    arch = processor.architecture()
    known = {
        "config": {"from_tokens": 1},
        "measured": {},
        "source": "",
        "source_hash": tuning.source_hash(cpu_tables.SOURCES),
    }
    entries = [known | {"op": cpu_tables.OP, "bucket": cpu_tables.bucket(kind, 1)} for kind in cpu_tables.KINDS]
    with shipped_tables(tmp_path / "shipped") as write:
        write(table_of(*entries, arch=arch, sources={cpu_tables.OP: list(cpu_tables.SOURCES)}), f"{arch}.json")
        yield


def launches(style: str, layers: int) -> Counter[str]:
    """Of one decode step of three sequences."""
    config = sf.TransformerConfig(
        **{"style": style, "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_layers": layers},
        **{"num_heads": 4, "num_kv_heads": 2, "max_positions": 32},
    )
    engine = sf.Engine(sf.ParallelTransformer(config).eval(), num_blocks=8, block_size=16)
    for length in (3, 5, 7):
        engine.add(sf.Request(list(range(1, length + 1)), max_new_tokens=8))
    for _ in range(4):
        engine.step()
    assert engine.stats.decode_tokens == 9
    with profile() as seen:
        engine.step()
    counts: Counter[str] = Counter()
    for event in seen.function_events:
        if event.cpu_parent is None:
            _count(event, counts)
    return counts


def _count(event: Any, counts: Counter[str]) -> bool:
    """Count ``event``, or the launches within it; whether it is any. A sum, which torch begins with a fill, is one."""
    name = event.name.rpartition("::")[2]
    if name == "sum":
        counts[name] += 1
        return True
    within = [_count(inner, counts) for inner in event.cpu_children]  # all of them
    if any(within):
        return True
    if name not in FREE:
        counts[name] += 1
    return name not in FREE


@pytest.mark.parametrize(("style", "mlp"), [("gated", GATED), ("gelu", GELU)], ids=["gated", "gelu"])
def test_a_layer_of_a_decode_step(style: str, mlp: dict[str, int], every_product_is_onednns: None) -> None:
    """The difference between two layers and three is one layer."""
    found = launches(style, 3)
    found.subtract(launches(style, 2))
    assert {name: count for name, count in found.items() if count} == Counter(ATTENTION) + Counter(mlp)
