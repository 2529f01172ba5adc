"""The cases of models' sizes, made small: what is built ahead of time runs here in the same configurations.

A small product would get small tiles. ``configured`` asks ``pick_config`` what it does at the model's sizes: tiles,
stages and parts of K are theirs, while the loops are long enough to refill each stage, programs have several tiles, and
the last ones are ragged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from ...cross_entropy import launch as cross_entropy
from ...cross_entropy.chunks import chunk_size
from ...linear import plan
from ...linear.gemm import Gemm
from ...runtime import device, tuning
from ...runtime.chips import described
from ...runtime.dtypes import BF16
from ..registry import Case, OpSpec
from ..shapes import Projection, projection


class Small(NamedTuple):
    """A case that runs, and the sizes of the products that choose its configurations."""

    name: str
    case: Case
    sizes: Mapping[int, int] = {}  # of products: small -> the model's
    tf32: bool = False  # torch's setting for fp32 products

    @property
    def rounded(self) -> dict[str, Any]:
        """What ``accuracy.judge`` has to know beside what the op says: tf32 has as many bits as fp16."""
        return {"computed": torch.float16} if self.tf32 else {}


# Sizes of a case by its letters; what is smaller already stays. Multiples of 16 stay so, others become odd. A product's
# may be summed over, so each has at least as many steps of K as a pipeline has stages and two; widths of several
# weights halve twice.
_PRODUCT = {"T": 400, "D": 432, "F": 448}
_REMOTE = {"T": 400, "K": 432, "N": 448, "R": 2}
_STREAMED = {"D": 912, "F": 960, "K": 912, "N": 960}  # where weights stream past few tokens: steps of 128
_SMALL: dict[str, dict[str, int]] = {
    **dict.fromkeys(("linear_act", "gated_linear", "dgrad_act", "dgrad_gated", "wgrad_accumulate"), _PRODUCT),
    "scaled_linear": {"T": 784, "D": 800, "F": 832},  # a stage of fp8 has 128 of K
    "linear_cross_entropy": {"T": 64, "D": 80, "V": 9232},  # wider than the widest block
    "all_gather_linear": _REMOTE,
    "linear_reduce_scatter": _REMOTE,
    "all_reduce_rmsnorm": {"T": 17},
    "rms_norm": {"T": 13},
    "layer_norm": {"T": 13},
    "dropout": {"R": 13},
    "write_kv": {"T": 13},
    "norm_rope_write_kv": {"T": 13},
    "rope": {"B": 2, "S": 9},
}
# The projections of models whose configurations the ops' own cases do not have: (model, kind, tensor parallelism) -> T.
_PROJECTIONS: dict[str, dict[tuple[str, str, int], tuple[int, ...]]] = {
    "linear_act": {
        ("gpt3-13b", "o", 1): (1, 64),
        ("gpt3-13b", "o", 8): (256,),
        ("gpt3-13b", "qkv", 1): (1, 64, 256),
        ("gpt3-13b", "qkv", 4): (64,),
        ("gpt3-13b", "up", 1): (32,),
        ("gpt3-13b", "up", 2): (256,),
        ("gpt3-13b", "up", 8): (1, 256),
        ("gpt3-13b", "qkv", 8): (1,),
        ("llama3-8b", "o", 1): (64, 256, 1024, 4096),
        ("llama3-8b", "o", 4): (1, 64),
        ("llama3-8b", "qkv", 1): (1, 64, 256, 1024),
        ("llama3-8b", "qkv", 2): (1,),
        ("llama3-8b", "qkv", 8): (256,),
        ("llama3-8b", "up", 4): (32, 64),
    },
    "gated_linear": {
        ("llama3-8b", "gate_up", 1): (64,),
        ("llama3-8b", "gate_up", 4): (1, 64, 256),
        ("llama3-8b", "gate_up", 8): (1, 256),
    },
    "dgrad_act": {
        ("gpt3-13b", "down", 1): (1, 64),
        ("gpt3-13b", "down", 2): (256,),
        ("gpt3-13b", "down", 8): (1, 64, 256),
    },
    "dgrad_gated": {
        ("llama3-8b", "down", 1): (1, 64),
        ("llama3-8b", "down", 4): (1, 64, 256),
        ("llama3-8b", "down", 8): (1, 256),
    },
    "wgrad_accumulate": {
        ("gpt3-13b", "o", 8): (1,),
        ("llama3-8b", "o", 4): (1,),
    },
}
# Where no tensor cores multiply: tiles of 64, steps of 16.
_PLAIN = {"T": 144, "D": 112, "F": 144}
# Seconds in the emulator: of a launch; of a product of two numbers by FMA, by tensor cores, and there after TMA.
_LAUNCH, _BY_FMA, _BY_TENSOR_CORES, _BY_TMA = 0.1, 6e-8, 1.5e-8, 5e-9
_CHUNK = 64  # tokens of a cross-entropy
_CONTEXT, _QUERIES = (1023, 130), (37, 5)  # of paged attention, in place of as many sequences alike


def cases(spec: OpSpec, *, deep: bool = False) -> list[Small]:
    """What is built of an op ahead of time and can run on one machine.

    ``deep``: products have twice as many steps of K as their pipelines have stages, or more.
    """
    found = []
    for large in filter(_runs, spec.tagged("codegen")):
        case = _small(spec.name, large, deep)
        found.append(Small(large.name, case, _enlarged(large, case), bool(large.options.get("tf32"))))
    for of, tokens in _PROJECTIONS.get(spec.name, {}).items():
        found += [_small_projection(spec, projection(*of, T), deep) for T in tokens]
    return found


def some(specs: Iterable[OpSpec]) -> list[tuple[OpSpec, Small]]:
    """Cases of every op that together launch each kernel in each configuration that all cases do, on the chip that
    ``device.architecture`` names: greedily the case with most that is new for its cost, but for those all of whose
    launches others make.
    """
    found = [(spec, small, launched(spec, small)) for spec in specs for small in cases(spec)]
    shown = [{each.name for each in launches} | {spec.name} for spec, _, launches in found]
    cost = [sum(each.cost for each in launches) for _, _, launches in found]
    missing, chosen = set[str]().union(*shown), list[int]()
    while missing:
        chosen.append(max(range(len(found)), key=lambda n: len(shown[n] & missing) ** 2 / cost[n]))
        missing -= shown[chosen[-1]]
    for n in sorted(chosen, key=lambda n: -cost[n]):
        if shown[n] <= set[str]().union(*(shown[other] for other in chosen if other != n)):
            chosen.remove(n)
    return [found[n][:2] for n in sorted(chosen)]


class Launched(NamedTuple):
    name: str  # the kernel with its configuration
    cost: float  # roughly, in seconds of an emulator


def launched(spec: OpSpec, small: Small) -> list[Launched]:
    """What a case launches; nothing runs."""
    noted: list[Launched] = []

    def note(fn: Any, grid: Any, args: Any, *, config: Any, gemm: Gemm | None = None, **others: Any) -> None:
        cost = _LAUNCH
        if gemm is not None:
            fast = config.use_tma and not gemm.fp32
            each = _BY_FMA if gemm.fp32 and not small.tf32 else _BY_TMA if fast else _BY_TENSOR_CORES
            cost += gemm.M * gemm.N * gemm.K * each
        noted.append(Launched(f"{fn.__name__} {config}", cost))

    launch, device.launch = device.launch, note
    try:
        with configured(small):
            spec.run(spec.make_inputs(small.case, torch.device("cpu"), 1), small.case, "triton")
    finally:
        device.launch = launch
    return noted


def _runs(case: Case) -> bool:
    """``run`` of the communicating ops knows their forward; what is built of their backward is the product's."""
    return not case.options.get("backward") and case.options.get("layout") != "nn"


def _deeper(sizes: Mapping[str, int]) -> dict[str, int]:
    """Of products: by 1.35, which is enough for what the tables above have."""
    return {letter: -(-size * 27 // 320) * 16 if letter in "TDFKN" else size for letter, size in sizes.items()}


def _small(op: str, case: Case, deep: bool) -> Case:
    if op == "paged_attention":
        return _small_attention(case)
    if op == "copy_blocks":
        return _small_copies(case)
    most = _SMALL[op] | (_STREAMED if _streams(op, case.sizes.get("T", 0)) else {})
    if most == _PRODUCT and _is_plain(case.dtype, bool(case.options.get("tf32"))):
        most = _PLAIN
    elif deep and "T" in most and len(most) > 1:  # the others multiply nothing
        most = _deeper(most) | ({"D": 592} if op == "linear_cross_entropy" else {})
    sizes = {letter: _shrunk(size, most.get(letter, size)) for letter, size in case.sizes.items()}
    more = {"chunk": _CHUNK} if op == "linear_cross_entropy" else {}
    return dataclasses.replace(case, sizes=sizes, options={**case.options, **more})


def _streams(op: str, tokens: int) -> bool:
    return _SMALL[op] in (_PRODUCT, _REMOTE) and tokens <= 64


def _is_plain(dtype: torch.dtype, tf32: bool) -> bool:
    return dtype == torch.float32 and not tf32


def _shrunk(size: int, most: int) -> int:
    if size <= most:
        return size
    return most if size % 16 == 0 else most - 1


def _small_attention(case: Case) -> Case:
    """One KV head and two sequences of unlike lengths, one longer than a quantum of invariant mode."""
    group, most = case.sizes["N"] // case.sizes["K"], max(case.options["queries"])
    # Where the host knows bounds, they choose the tile: the longest sequence keeps its queries.
    queries = (most, 1) if case.options.get("host") else _QUERIES
    sizes = {**case.sizes, "N": group, "K": 1}
    return dataclasses.replace(case, sizes=sizes, options={**case.options, "context": _CONTEXT, "queries": queries})


def _small_copies(case: Case) -> Case:
    """Few layers and blocks, and the whole of each."""
    blocks = case.options["block_dim"]
    shape = tuple(min(size, 9) if place <= blocks else size for place, size in enumerate(case.options["shape"]))
    return dataclasses.replace(case, sizes={"pairs": 4}, options={**case.options, "shape": shape})


def _small_projection(spec: OpSpec, large: Projection, deep: bool) -> Small:
    """As a case of the op. Of a projection's widths configurations depend on the sum."""
    most = _PRODUCT | (_STREAMED if large.T <= 64 else {})
    most = _deeper(most) if deep else most
    T, D, F = min(large.T, most["T"]), most["D"], most["F"]
    like = next(case for case in spec.tagged("codegen") if case.dtype == BF16)
    backward = spec.name in ("dgrad_act", "dgrad_gated")
    given = {"activation": large.activation, "bias": large.bias, "weights": len(large.widths), "residual": False}
    if backward:
        given |= {"activation": like.options["activation"], "recompute_act": False}
    options = {name: given.get(name, value) for name, value in like.options.items()}
    if backward:  # the product's output is the projection's input
        sizes = {T: large.T, D: large.F, F: large.D}
    elif spec.name == "gated_linear":
        sizes = {T: large.T, D: large.D, F: large.widths[0], 2 * F: large.F}
    else:
        sizes = {T: large.T, D: large.D, sum(F >> i for i in range(len(large.widths))): large.F}
    return Small(large.name, Case(large.name, BF16, {"T": T, "D": D, "F": F}, options), sizes)


@contextlib.contextmanager
def configured(small: Small) -> Iterator[None]:
    """Within the block, products of ``small``'s sizes get the configurations of the model's, and rows of logits go
    through fewer programs where the model's do.
    """

    def enlarged(gemm: Gemm) -> Gemm:
        m, n, k = (small.sizes.get(size, size) for size in (gemm.M, gemm.N, gemm.K))
        return dataclasses.replace(gemm, M=m, N=n, K=k)

    def programs(rows: int, width: int, itemsize: int, arch: str, sms: int, cache_bytes: int) -> int:
        large, chip = small.sizes.get(rows, rows), described(arch)
        found = fitting(large, small.sizes.get(width, width), itemsize, arch, chip.sms, chip.cache)
        return rows if found == large else min(rows, sms)

    pick, fitting, matmul = plan.pick_config, cross_entropy.programs, torch.backends.cuda.matmul
    precision = matmul.fp32_precision
    tuning.forget()
    plan.pick_config = lambda arch, gemm: pick(arch, enlarged(gemm))
    cross_entropy.programs = programs
    matmul.fp32_precision = "tf32" if small.tf32 else "ieee"
    try:
        yield
    finally:
        plan.pick_config, cross_entropy.programs, matmul.fp32_precision = pick, fitting, precision
        tuning.forget()


def _enlarged(large: Case, small: Case) -> dict[int, int]:
    """Every size of a product that is made of ``small``'s sizes: what ``large`` has in its place."""
    pairs = {letter: (small.sizes[letter], size) for letter, size in large.sizes.items() if letter in "TDKFNV"}
    found = {few: many for few, many in pairs.values() if few != many}
    widths = [(few >> i, many >> i) for few, many in [pairs.get("F", (0, 0)), pairs.get("N", (0, 0))] for i in range(3)]
    for count in (1, 2, 3):
        for parts in itertools.combinations_with_replacement(widths, count):
            few, many = (sum(part[i] for part in parts) for i in range(2))
            if few and few != many:
                found.setdefault(few, many)
    if "chunk" in small.options:
        T, D, V = (large.sizes[letter] for letter in "TDV")
        summed = large.options["way"] != "again"
        found[small.options["chunk"]] = chunk_size(T, V, D, large.dtype.itemsize, summed=summed)
    return found
