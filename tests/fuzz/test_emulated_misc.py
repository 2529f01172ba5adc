"""Random calls of the ops beside products and attention, compiled and emulated, on views of all kinds.

Norms, rotary embedding, dropout, writes into a KV cache, copies of its blocks, quantisation, and the cross-entropy.
"""

from __future__ import annotations

import dataclasses
from random import Random
from typing import Any

import emulated
import pytest
import torch
from emulated import CPU, Trial, Views
from fuzz import Fuzz

from shardfuse.kernels.cross_entropy import launch, reference
from shardfuse.kernels.cross_entropy.reference import Loss
from shardfuse.kernels.dev import accuracy, registry
from shardfuse.kernels.dev.registry import Case
from shardfuse.kernels.rope import apply_rope
from shardfuse.kernels.runtime.chips import converts_e4m3
from shardfuse.kernels.runtime.dtypes import BF16, E4M3, E5M2, FP16, FP32, INT8
from shardfuse.kernels.scaled_linear import launch as scaled_linear
from shardfuse.kernels.scaled_linear import reference as scaling

pytestmark = [pytest.mark.nightly, pytest.mark.fuzz]

DTYPES = (BF16, FP16, FP32)
WIDTHS = (1, 2, 3, 5, 31, 64, 100, 128, 257, 1000, 1024, 4096, 4100, 8192, 9000, 16384, 17000, 33000)


def _drawn(draw: Random, arch: str) -> Trial:
    kinds = [_norm, _rope, _dropout, _write, _copy, _projection, _loss]
    kinds += [_rope_in_place, _quantised] if converts_e4m3(arch) else [_rope_in_place]
    return draw.choice(kinds)(draw)


# ------------------------------------------------------------------------------------------ judged by the ops' rules


def _norm(draw: Random) -> Trial:
    D, dtype = draw.choice(WIDTHS), draw.choice(DTYPES)
    residual = draw.choice((None, "same", "fp32"))
    options = {
        "weight": draw.choice((None, "same", "fp32")),
        "bias": draw.random() < 0.7,
        "weight_offset": draw.choice((0.0, 1.0)),
        "residual": residual,
        "p": draw.choice((0.0, 0.1, 0.5)) if residual else 0.0,
        # Of few columns little is left of a difference: eps is not to be small beside the mean.
        "eps": 0.5 if D < 4 else 1e-5,
        "layout": draw.choice(("rows", "rows", "columns", "slice")),
        "upstream": draw.choice(("both", "y", "s")) if residual else "y",
    }
    T = draw.choice((1, 2, 3, 7, 33, 70) if D < 3000 else (1, 2, 5))
    spec = registry.op(draw.choice(("rms_norm", "layer_norm")))
    return emulated.of_op(draw, spec, Case("drawn", dtype, {"T": T, "D": D}, options))


def _rope_case(draw: Random) -> Case:
    H = draw.choice((2, 6, 10, 33, 64, 80, 128, 256))
    sizes = {"B": draw.choice((0, 1, 2, 3)), "S": draw.choice((1, 3, 17)), "N": draw.choice((1, 2, 4, 9, 32))}
    sizes |= {"K": draw.choice((0, 1, 2, 3)), "H": H, "P": 2 * draw.choice((H // 2, draw.randint(1, H // 2)))}
    layout = draw.choice(("dense", "fused", "heads_first")) if sizes["K"] else "dense"
    options = {"interleaved": draw.random() < 0.5, "inplace": False, "layout": layout}
    return Case("drawn", draw.choice(DTYPES), sizes, options)


def _rope(draw: Random) -> Trial:
    trial = emulated.of_op(draw, registry.op("rope"), _rope_case(draw))
    return dataclasses.replace(trial, empty=False)  # B = 0 stands for one dimension of tokens


def _rope_in_place(draw: Random) -> Trial:
    """Without gradients, over views: ``run`` of the op's cases would rotate a copy of a leaf."""
    case, spec, seed, views = _rope_case(draw), registry.op("rope"), draw.getrandbits(31), Views(draw)
    drawn = spec.make_inputs(case, CPU, seed)
    given = {name: views.of(drawn[name].detach()) for name in "qk" if drawn[name] is not None}
    tables = [views.of(drawn[name]) for name in ("cos", "sin")]

    def check() -> list[str]:
        apply_rope(
            given["q"], given.get("k"), *tables, interleaved=case.options["interleaved"], inplace=True, impl="triton"
        )
        low = spec.run(spec.make_inputs(case, CPU, seed), case, "reference")
        oracle = spec.run(registry.to_double(spec.make_inputs(case, CPU, seed)), case, "reference")
        outs = {f"{name}_out": out for name, out in given.items()}
        verdicts = [spec.judge(case, name, out, low[name], oracle[name]) for name, out in outs.items()]
        return [str(verdict) for verdict in verdicts if not verdict.ok] + views.spoilt()

    label = f"rope in place {case.dtype} {dict(case.sizes)} {dict(case.options)}, laid out: {views}"
    return Trial("rope in place", label, check)


def _dropout(draw: Random) -> Trial:
    sizes = {"R": draw.choice((1, 3, 65)), "C": draw.choice((1, 2, 5, 64, 1000, 1500))}
    options = {
        "p": draw.choice((0.0, 0.1, 0.5, 0.9)),
        "residual": draw.random() < 0.5,
        "stream": draw.choice((0, draw.randrange(2**32))),
        "row_start": draw.choice((0, 7, 2**32 - 2, 2**34)),
        "col_start": draw.choice((0, 4, 4096)),
    }
    return emulated.of_op(draw, registry.op("dropout"), Case("drawn", draw.choice(DTYPES), sizes, options))


def _write(draw: Random) -> Trial:
    K, H = draw.choice((1, 2, 3, 8)), draw.choice((2, 8, 12, 17, 64, 80, 128, 256))
    fused, dtype = draw.random() < 0.6, draw.choice(DTYPES)
    sizes = {"T": draw.choice((1, 3, 8, 40)), "N": K * draw.choice((1, 2, 5)) if fused else 0, "K": K, "H": H}
    sizes |= {"V": draw.choice((H, H, 1, 24, 64)), "B": draw.choice((1, 3, 16, 64))}
    sizes["P"] = 2 * draw.choice((0, H // 2, draw.randint(1, H // 2))) if fused else 0
    cache = draw.choice((None, None, BF16, FP16, E4M3, E4M3, INT8))
    options: dict[str, Any] = {"cache": cache, "layout": draw.choice(("dense", "pair", "slots_first"))}
    options["scales"] = draw.choice(("given", "written")) if cache in (E4M3, INT8) else None
    if fused:
        norm, offset = draw.random() < 0.7, draw.choice((0.0, 1.0))
        options |= {"interleaved": draw.random() < 0.5, "norm": norm, "offset": offset}
    spec = registry.op("norm_rope_write_kv" if fused else "write_kv")
    trial = emulated.of_op(draw, spec, Case("drawn", dtype, sizes, options))
    return dataclasses.replace(trial, empty=False)  # sizes of 0 stand for what is left out


def _copy(draw: Random) -> Trial:
    block_dim = draw.choice((0, 0, 1))
    shape = [draw.choice((1, 3)), draw.choice((1, 5, 16)), draw.choice((1, 7, 33, 64, 600))]
    shape.insert(block_dim, draw.choice((4, 9)))
    options = {"shape": tuple(shape), "block_dim": block_dim, "layout": draw.choice(("dense", "half", "turned"))}
    dtype = draw.choice((*DTYPES, E4M3, INT8))
    case = Case("drawn", dtype, {"pairs": draw.randint(2, 3)}, options)
    return emulated.of_op(draw, registry.op("copy_blocks"), case)


def _projection(draw: Random) -> Trial:
    """The whole of the cross-entropy, with its products."""
    sizes = {"T": draw.choice((1, 5, 20)), "D": draw.choice((1, 16, 24, 64)), "V": draw.choice((2, 50, 71, 200))}
    options = {
        "smoothing": draw.choice((0.0, 0.1)),
        "z_loss": draw.choice((0.0, 0.01)),
        "softcap": draw.choice((None, 5.0)),
        "bias": draw.random() < 0.5,
        "padding": draw.choice((0, 0, 14)),
        "chunk": draw.choice((0, 4, 7, 12)),
        "all": draw.random() < 0.1,
        "way": draw.choice(("once", "again")),
    }
    spec = registry.op("linear_cross_entropy")
    return emulated.of_op(draw, spec, Case("drawn", draw.choice(DTYPES), sizes, options))


# -------------------------------------------------------------------------------------------------------- quantisation


def _quantised(draw: Random) -> Trial:
    """Scales, largest magnitudes and fp8 values are the reference's, bit for bit."""
    shape = (draw.choice((1, 3, 64, 130)), draw.choice((1, 17, 128, 300, 1200)))
    dtype, fp8 = draw.choice(DTYPES), draw.choice((E4M3, E5M2))
    kind, transpose, margin = draw.choice(("own", "given", "history", "rows")), draw.random() < 0.7, draw.choice((0, 1))
    views = Views(draw)
    x = views.of(torch.randn(shape).mul(draw.choice((1.0, 1e-3, 100.0))).to(dtype))
    x = x.t() if draw.random() < 0.3 else x
    options: dict[str, Any] = {"margin": margin}
    if kind == "given":
        options["scale"] = torch.tensor(draw.choice((0.01, 0.5)))
    if kind == "history":
        options["history"] = torch.rand(draw.choice((1, 3, 16))) * 4
    copies = [{name: v.clone() if torch.is_tensor(v) else v for name, v in options.items()} for _ in range(2)]

    def check() -> list[str]:
        if kind == "rows":
            found, want = (of.quantize_rows(x, fp8, transpose) for of in (scaled_linear, scaling))
        else:
            found, want = (of.quantize(x, fp8, transpose, **o) for of, o in zip((scaled_linear, scaling), copies))
        pairs = [*zip(found, want), *([(o["history"] for o in copies)] if kind == "history" else [])]
        wrong = [i for i, (a, b) in enumerate(pairs) if not torch.equal(a.float(), b.float())]
        return [f"results {wrong} differ from the reference's"] * bool(wrong) + views.spoilt()

    label = f"quantise {kind} {dtype} {tuple(x.shape)} {x.stride()} -> {fp8}, {transpose=}, {margin=}; {views}"
    return Trial("quantise", label, check)


# ----------------------------------------------------------------------------------- the loss of given logits, by parts


@dataclasses.dataclass(frozen=True)
class Logits:
    """Logits of a vocabulary in parts, as ranks have them, and what is asked of them."""

    parts: list[torch.Tensor]  # [t, columns + padding] each, views
    losses: list[Loss]  # of each part
    targets: torch.Tensor  # [t]
    gain: torch.Tensor | None  # [t]
    own: bool  # one part, whose statistics the gradient's kernel forms itself


def _loss(draw: Random) -> Trial:
    t, V, dtype = draw.choice((1, 2, 5)), draw.choice((1, 2, 50, 1000, 1025, 8192, 9000)), draw.choice(DTYPES)
    loss = Loss(V, 0, V, -100, draw.choice((0.0, 0.1)), draw.choice((0.0, 0.01)), draw.choice((None, 5.0)))
    ranks = draw.choice([n for n in (1, 1, 2, 3) if n <= V])
    width = -(-V // ranks)
    losses = [loss.part(first, width) for first in range(0, V, width)]
    targets = torch.randint(V, (t,), dtype=draw.choice((torch.int64, torch.int32)))
    kind = draw.choice(("all", "some", "none", "outside"))
    if kind in ("all", "some"):
        targets[:: 1 if kind == "all" else 2] = loss.ignore_index
    if kind == "outside":
        targets[0] = draw.choice((V + 5, -1))
    gain, padding, views = torch.randn(t) if draw.random() < 0.5 else None, draw.choice((0, 0, 7)), Views(draw)
    parts = [views.of(torch.randn(t, part.columns + padding).mul(3).to(dtype)) for part in losses]
    logits = Logits(parts, losses, targets, gain, ranks == 1 and draw.random() < 0.5)
    label = f"loss of {dtype} logits of {t} tokens in {ranks} parts, own={logits.own}, {padding=}, {loss}, "
    label += f"targets {kind} {targets.tolist()} {targets.dtype}, gain {gain}, laid out: {views}"
    return Trial("loss", label, lambda: _wrong_in(logits, loss) + views.spoilt())


def _wrong_in(logits: Logits, loss: Loss) -> list[str]:
    """Statistics, losses and gradients against fp64.

    Bounds are absolute, in units of what is summed: of one word, whose loss is 0, only roundings are left. A score errs
    by a rounding of the cap, an exponential by its own error and by that of its argument, whose size is ``spread``.
    """
    targets, cap = logits.targets, loss.softcap or 0.0
    wide = [part.double() for part in logits.parts]
    found = _computed(logits)
    stats = torch.stack([reference.statistics(part, targets, of) for part, of in zip(wide, logits.losses)])
    z = torch.cat([part[:, : of.columns] for part, of in zip(wide, logits.losses)], 1)
    z = cap * (z / cap).tanh() if cap else z
    lse, mean, spread = z.logsumexp(1), z.abs().mean(1), z.amax(1) - z.amin(1) + cap
    slack = accuracy.FACTOR * (accuracy.rounding(FP32, loss.vocab_size) + accuracy.exponential(FP32))
    counted = targets != loss.ignore_index  # of other tokens no statistics are formed
    flat, one = torch.full_like(lse, cap), torch.ones_like(lse)
    bounds = torch.stack((flat, one, flat, loss.vocab_size * (mean + cap)))
    bounds = torch.stack([bounds * torch.stack((one, each[1] * (1 + spread), one, one)) for each in stats])
    wrong = _beyond("statistics", found[0][..., counted], stats[..., counted], slack * bounds[..., counted])
    gain = None if logits.gain is None else logits.gain.double()
    slant = 1 + 2 * loss.z_loss * lse.abs()
    for part, of, gradient in zip(wide, logits.losses, found[2]):
        want = part.clone()
        losses = reference.gradient_(want, targets, None if logits.own else stats, gain, of)
        unit = 1 + spread + cap + mean + z.abs().amax(1) + slant * lse.abs()
        wrong += _beyond("losses", found[1], losses, slack * unit)
        columns = z[:, of.first : of.first + of.columns]
        unit = (columns - lse[:, None]).exp() * (slant * (1 + spread + lse.abs()))[:, None]
        unit += loss.label_smoothing / loss.vocab_size
        unit += torch.arange(of.first, of.first + of.columns) == targets[:, None]
        unit *= 1 if gain is None else gain.abs()[:, None]
        unit = torch.nn.functional.pad(unit, (0, part.shape[1] - of.columns))
        kind = torch.finfo(gradient.dtype)
        wrong += _beyond("gradient", gradient, want, slack * unit + kind.eps * (want.abs() + kind.smallest_normal))
    return wrong


def _computed(logits: Logits) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Statistics [R, 4, t], losses [t], and what the kernels leave in the logits, the parts of the gradient."""
    targets, tokens = logits.targets, len(logits.targets)
    stats, losses = torch.full((len(logits.parts), 4, tokens), torch.nan), torch.full((tokens,), torch.nan)
    for part, of, into in zip(logits.parts, logits.losses, stats):
        launch.statistics(part, targets, of, into)
    for part, of in zip(logits.parts, logits.losses):
        launch.gradient_(part, targets, None if logits.own else stats, logits.gain, of, losses)
    return stats, losses, logits.parts


def _beyond(name: str, found: torch.Tensor, want: torch.Tensor, bound: torch.Tensor) -> list[str]:
    error = (found.double() - want).abs()
    wrong = (found.isnan() != want.isnan()) | (error > bound)
    if not wrong.any():
        return []
    first = tuple(wrong.nonzero()[0].tolist())
    return [f"{name}: {int(wrong.sum())} of {wrong.numel()} wrong, the first at {list(first)}: {float(found[first])} "
            f"where {float(want[first])} was expected, within {float(bound[first]):.1e}"]  # fmt: skip


@emulated.needed
def test_other_ops(fuzz: Fuzz):
    emulated.run(fuzz, _drawn)
