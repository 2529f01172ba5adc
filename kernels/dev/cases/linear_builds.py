"""What the ops of this folder launch, as builds for ahead-of-time compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ...runtime import device
from ...runtime.dtypes import NAMES
from ..registry import Build, Case
from ..runs import contiguous
from ..shapes import Projection

_KINDS = {"nt": "fwd", "nn": "dgrad", "tn": "wgrad"}


def collect(
    op: str,
    target: str,
    cases: Iterable[Case],
    launch: Callable[[Case], None],
    projections: Iterable[Projection] = (),
    launch_projection: Callable[[Projection], None] | None = None,
) -> Iterator[Build]:
    """Every launch that ``launch(case)`` makes on ``target``, on tensors of the ``meta`` device.

    Then, at the sizes of the models in ``shapes.py``, those of ``launch_projection``: no configuration that
    ``pick_config`` returns for them goes uncompiled.
    """
    for case in cases:
        with device.capture(target, tf32=case.options.get("tf32", False)) as launches:
            launch(case)
        yield from (build_of(op, item, target) for item in launches)
    for projection in projections:
        assert launch_projection is not None
        with device.capture(target) as launches:
            launch_projection(projection)
        yield from (build_of(op, item, target) for item in launches)


def build_of(op: str, item: device.Launch, target: str) -> Build:
    args, gemm = item.args, item.gemm
    common = {
        "op": op,
        "target": target,
        "fn": item.fn,
        "args": args,
        "num_warps": item.num_warps,
        "num_stages": item.num_stages,
    }
    steps = [args["EPILOGUE"]] if args["EPILOGUE"] != "act" else []
    steps += [args["ACTIVATION"]] if args["ACTIVATION"] != "identity" else []
    if gemm is None:  # an elementwise pass, or the sum of a split product
        name = item.fn.__name__.removeprefix("_").removesuffix("_kernel")
        stored = args["target_ptrs"][0]
        label = [name, str(item.config), NAMES[(stored[0] if isinstance(stored, tuple) else stored).dtype]]
        products = len(args.get("partial_ptrs", ()))
        label += [f"of{products}"] if products > 1 else []
        label += ["wgrad"] if args.get("Ms") is not None else []
        label += steps + _operands(args) + _odd(F=[args["F"]] if "F" in args else [])
        return Build(config="-".join(label), **common)
    tile = item.config
    label = [_KINDS[gemm.layout], f"{tile.block_m}x{tile.block_n}x{tile.block_k}-w{tile.num_warps}-s{tile.num_stages}"]
    label += ["tma"] if tile.use_tma else []
    label += ["swap"] if tile.swap else []
    label += ["tf32" if gemm.precision == "tf32" else NAMES[gemm.dtype]]
    label += [f"to_{NAMES[gemm.out_dtype]}"] if gemm.out_dtype != gemm.dtype else []
    label += [f"{gemm.combine}{gemm.pairs}"] if gemm.pairs > 1 else []
    label += [f"gather{args['PIECES']}"] if gemm.remote == "gather" else []
    label += steps + _operands(args) + _odd(M=args["Ms"], N=args["Ns"], K=args["Ks"])
    exempt = _why_not_tensor_units(gemm, tile) if target == "sm_90" else None
    serial = _why_serial(gemm, tile, target, args["EPILOGUE"]) if exempt is None else None
    return Build(
        config="-".join(label),
        **common,
        wants_wgmma=True,
        wants_tma=True,
        exempt=exempt,
        unpipelined=serial,
        runs={"": contiguous(args["target_ptrs"][0][0])} if args["EPILOGUE"] == "send" else {},  # the peers' rows
        gemm=gemm,
        tile=tile,
    )


def _odd(**sizes: Sequence[int] | None) -> list[str]:
    """Which sizes are not multiples of 16, so that rows that long begin at any element."""
    found = [name.lower() for name, each in sizes.items() if any(size % 16 for size in each or ())]
    return ["odd_" + "".join(found)] if found else []


def _operands(args: dict[str, Any]) -> list[str]:
    """Which of the optional operands a launch has."""
    present = {
        "bias": any(t is not None for t in args.get("bias_ptrs", ())),
        "scales": args.get("scale_ptrs") is not None,
        "by_row": args.get("ROW_SCALES", False),
        "residual": args["EPILOGUE"] == "act" and "a_ptrs" in args and args["source_ptrs"][0] is not None,
        "row_sum": any(t is not None for t in args.get("row_sum_ptrs", ())),
        "out_by_pointer": args.get("USE_TMA", False) and not args["OUT_ALIGNED"],
    }
    targets = args["target_ptrs"]
    saved = len(targets[0] if isinstance(targets[0], tuple) else targets) - 1
    return [name for name, there in present.items() if there] + ([f"and{saved}"] if saved else [])


def _why_serial(gemm: Any, tile: Any, target: str, epilogue: str) -> str | None:
    """Why the loop of a GEMM waits for each of its wgmma or tcgen05 products, or None if it must not."""
    if target == "sm_100" and not tile.use_tma and tile.block_m >= 64 and gemm.dtype.itemsize < 4:
        return "rows begin at any element: what cp.async cannot copy goes through registers into one buffer"
    if target != "sm_90":
        return None
    if epilogue == "gated":
        return "ptxas serialises the products of two accumulators that start at zero within the loop (C7515)"
    if gemm.precision == "tf32" and gemm.layout != "nt":
        return "wgmma reads tf32 along K only: the other operand is transposed through registers in each step"
    if gemm.fp32_sums:
        return "each step's product is added to sums in fp32"
    return None


def _why_not_tensor_units(gemm: Any, tile: Any) -> str | None:
    """Why this GEMM on sm_90 goes without wgmma or TMA, or None if it must have both."""
    if gemm.fp32 and gemm.precision == "ieee":
        return "IEEE fp32 has no tensor-core instruction"
    if not tile.use_tma:
        return "rows are not multiples of 16 bytes: TMA cannot address them"
    if (tile.block_n if tile.swap else tile.block_m) < 64:
        return "wgmma works on 64 rows; smaller blocks use the older tensor-core instruction"
    return None
