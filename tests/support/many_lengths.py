"""How many kernels Triton would compile for 100 lengths of each op, by its own binder; nothing is compiled or run.

    python many_lengths.py [--only KIND ...] [--fault specialised|constant]

A CPU stands in for a GPU (kernels/dev/stand_in.py), so that launches end in the binder, which says whether one needs
another kernel than those before it. The lengths are token counts: rows of a norm, pairs of blocks, queries of a
prefill, sequences of a decode. The cross-entropy also gets 100 vocabularies, multiples of 8, and 100 odd ones.

``--fault`` has the binder forget every ``do_not_specialize``, or compile those arguments in as constants. It prints
JSON: for each kind of call and kernel how many kernels there are, and how many launches.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from shardfuse.kernels.dev import registry, stand_in
from shardfuse.kernels.dev.registry import Case
from shardfuse.kernels.runtime import device
from shardfuse.kernels.runtime.dtypes import BF16, E4M3

CPU = torch.device("cpu")
# All to 33, then ever wider apart, to 5,463: odd, even, multiples of 16.
LENGTHS = (*range(1, 34), *(int(34 * 1.08**k) for k in range(67)))
FEW = tuple(range(1, 101))  # where more would only take longer
WORDS = tuple(8 * length for length in LENGTHS)
ODD_WORDS = tuple(8 * length + 1 + 2 * (n % 4) for n, length in enumerate(LENGTHS))


def plain(name: str, sizes: Mapping[str, int], dtype: torch.dtype = BF16, length: str = "T", **options: Any) -> Any:
    """A length's case of an op: of these ``sizes``, and of its first test case's options but for ``options``."""
    first = registry.op(name).tagged("test")[0]

    def at(count: int) -> tuple[str, Case]:
        return name, Case("drawn", dtype, {**sizes, length: count}, {**first.options, **options})

    return at


def attention(queries: Callable[[int], tuple[int, ...]], **options: Any) -> Callable[[int], tuple[str, Case]]:
    sizes = {"N": 8, "K": 2, "H": 64, "Hv": 64, "block_size": 16}

    def at(length: int) -> tuple[str, Case]:
        asked = queries(length)
        context = tuple(37 * n % 101 for n in range(len(asked)))
        return "paged_attention", Case("drawn", BF16, sizes, {"context": context, "queries": asked, **options})

    return at


def copies(length: int) -> tuple[str, Case]:
    options = {"shape": (2 * length + 3, 2, 3, 16), "block_dim": 0, "layout": "dense"}
    return "copy_blocks", Case("drawn", BF16, {"pairs": length}, options)


HEADS, LAYER = {"N": 4, "K": 2, "H": 64, "P": 64}, {"D": 64, "F": 128}
WRITE = {"N": 0, "K": 2, "H": 64, "V": 64, "B": 16, "P": 0}
LOSS = {"T": 64, "D": 32, "V": 2048}
KINDS: dict[str, Callable[[int], tuple[str, Case]]] = {
    "rms_norm": plain("rms_norm", {"D": 256}, residual="same", p=0.1),
    "layer_norm": plain("layer_norm", {"D": 256}),
    "wide layer_norm": plain("layer_norm", {"D": 20000}, residual="same"),
    "rope": plain("rope", {"B": 0, **HEADS}, length="S"),
    "rope in batches": plain("rope", {"B": 2, **HEADS}, length="S", layout="heads_first"),
    "dropout": plain("dropout", {"C": 256}, length="R"),
    "write_kv": plain("write_kv", WRITE),
    "write_kv, fp8 by row": plain("write_kv", WRITE, cache=E4M3, scales="written"),
    "norm_rope_write_kv": plain("norm_rope_write_kv", {**WRITE, "N": 4, "P": 64}),
    "copy_blocks": copies,
    "linear_act": plain("linear_act", LAYER, activation="gelu_tanh"),
    "gated_linear": plain("gated_linear", LAYER),
    "dgrad_act": plain("dgrad_act", LAYER),
    "dgrad_gated": plain("dgrad_gated", LAYER),
    "wgrad_accumulate": plain("wgrad_accumulate", LAYER),
    "fp8 by tensor": plain("scaled_linear", LAYER, kind="training", scaling="tensor", bias=True),
    "fp8 by row": plain("scaled_linear", LAYER, kind="training", scaling="row", bias=True),
    "fp8, delayed": plain("scaled_linear", LAYER, kind="training", scaling="delayed", bias=True),
    "prefill": attention(lambda length: (length,)),
    "decode": attention(lambda length: (1,) * length, host="bounds"),
    "decode, invariant": attention(lambda length: (1,) * length, invariant=True),
    "loss once": plain("linear_cross_entropy", LOSS, way="once", chunk=0),
    "loss again": plain("linear_cross_entropy", LOSS, way="again", chunk=0),
    "words once": lambda words: plain("linear_cross_entropy", {**LOSS, "V": words}, way="once")(64),
    "words again": lambda words: plain("linear_cross_entropy", {**LOSS, "V": words}, way="again")(64),
}


def lengths_of(kind: str) -> Iterator[tuple[str, int]]:
    """(what a count is for, a length)."""
    if not kind.startswith("words"):
        yield from ((kind, length) for length in (FEW if kind.startswith(("wide", "decode")) else LENGTHS))
        return
    for name, words in (("", WORDS), (", odd", ODD_WORDS)):
        yield from ((kind + name, count) for count in words)


def seed(fault: str | None) -> None:
    """Have each parameter that is not to be specialised on specialised, or made constant."""
    if fault is None:
        return
    create_binder = JITFunction.create_binder

    def create(self: Any) -> Any:
        for param in self.params:
            if param.do_not_specialize and fault == "constant":
                param.__dict__["is_constexpr"] = True
            elif param.do_not_specialize:
                param.do_not_specialize = param.do_not_specialize_on_alignment = False
        return create_binder(self)

    JITFunction.create_binder = create  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", metavar="KIND")
    parser.add_argument("--fault", choices=["specialised", "constant"])
    options = parser.parse_args()
    torch.set_num_threads(1)

    def complain(kernel: str, error: Exception) -> None:
        raise RuntimeError(kernel) from error

    stand_in.install("sm_90", complain, compiling=False)
    seed(options.fault)
    keys: defaultdict[str, defaultdict[str, set[Any]]] = defaultdict(lambda: defaultdict(set))
    launches: Counter[str] = Counter()
    compile_it, now = JITFunction._do_compile, ""

    def note(self: Any, key: Any, *rest: Any) -> Any:
        keys[now][self.__name__].add(key)
        return compile_it(self, key, *rest)

    def counted(*args: Any, **given: Any) -> Any:
        launches[now] += 1
        return launch(*args, **given)

    JITFunction._do_compile = note
    launch, device.launch = device.launch, counted
    for kind in options.only or KINDS:
        seen = ""
        for now, length in lengths_of(kind):
            if now != seen:
                seen = now
                forget()
            name, case = KINDS[kind](length)
            spec = registry.op(name)
            spec.run(spec.make_inputs(case, CPU, 1), case, "triton")
    found = {name: {kernel: len(all_) for kernel, all_ in kernels.items()} for name, kernels in keys.items()}
    print(json.dumps({"triton": triton.__version__, "lengths": len(LENGTHS), "kernels": found, "launches": launches}))


def forget() -> None:
    """Triton's kernels, so that each kind counts its own."""
    for found in gc.get_objects():
        if type(found) is JITFunction:
            found.device_caches.clear()
        elif type(found) is device.Prepared:
            found._runs.clear()


if __name__ == "__main__":
    main()
