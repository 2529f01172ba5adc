"""Rows of logits as the cross-entropy's kernels take them: of any length, at any address, few or many at once."""

from __future__ import annotations

import pytest
import torch

from shardfuse.kernels.cross_entropy import chunks, reference
from shardfuse.kernels.cross_entropy.reference import Loss
from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.runtime import device
from shardfuse.kernels.runtime.chips import described
from shardfuse.kernels.runtime.dispatch import Choice

pytest.importorskip("triton")
from shardfuse.kernels.cross_entropy import launch

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.mark.interpret
@pytest.mark.parametrize("loops", [False, True], ids=["", "loop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("columns", "width", "pitch", "start"),
    [(33, 33, 33, 0), (40, 40, 41, 1), (41, 48, 48, 0), (7, 7, 16, 5), (64, 64, 64, 3), (1, 3, 3, 0), (2, 5, 8, 1)],
)
def test_odd_widths_and_views(monkeypatch, columns, width, pitch, start, dtype, loops):
    """Rows of any length at any address, whose padding holds NaN; beside them nothing is written."""
    loss = Loss(64, 0, columns, -100, 0.1, 0.02, None)
    scores = (torch.randn(5, width) * 4).to(dtype)
    scores[:, columns:] = float("nan")
    targets = torch.tensor([0, columns - 1, -100, columns // 2, 59])
    monkeypatch.setattr(launch, "programs", lambda rows, *others: 2 if loops else rows)

    def run(impl: str, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        wide = reference.accumulator(logits.dtype)
        stats, found = torch.empty(4, 5, dtype=wide), torch.empty(5, dtype=wide)
        chunks._statistics(logits, targets, loss, Choice(impl, ""), stats)
        again, others = logits.clone(), torch.empty(5, dtype=wide)
        chunks._gradient_(again, targets, stats[None], None, loss, Choice(impl, ""), others)
        chunks._gradient_(logits, targets, None, None, loss, Choice(impl, ""), found)
        of = {"exps": stats[1], "losses": found, "dlogits": logits, "losses again": others, "dlogits again": again}
        return {name: value[targets != -100] for name, value in of.items()}

    room = torch.full((start + 5 * pitch + 9,), 77.0, dtype=dtype)
    logits = room[start : start + 5 * pitch].view(5, pitch)[:, :width]
    logits.copy_(scores)
    ours = run("triton", logits)
    assert not logits[:, columns:].any()
    assert not logits[2].any()
    kept = torch.ones_like(room, dtype=torch.bool)
    kept[start : start + 5 * pitch].view(5, pitch)[:, :width] = False
    assert (room[kept] == 77).all()
    clean = scores.nan_to_num()  # the reference in plain torch keeps NaN of what it multiplies by 0
    low, exact = run("reference", clean.clone()), run("reference", clean.double())
    for name in ours:
        verdict = accuracy.judge(name, ours[name], low[name], exact[name], terms=columns)
        assert verdict.ok, verdict


@pytest.mark.parametrize(
    ("arch", "sms", "megabytes", "width", "itemsize", "expected"),
    [
        ("sm_90", 132, 50, 128256, 2, 132),  # two for each SM would hold 68 MB
        ("sm_90", 132, 50, 152064, 2, 132),
        ("sm_90", 132, 50, 32000, 2, 1024),  # two do fit
        ("sm_90", 132, 50, 128256, 4, 1024),  # even one does not
        ("sm_80", 108, 40, 128256, 2, 108),
        ("sm_86", 82, 6, 128256, 2, 1024),
        ("sm_100", 148, 126, 128256, 2, 1024),
        ("sm_90", 132, 50, 4096, 2, 1024),  # 16 warps, four programs for each SM
        ("gfx942", 304, 256, 128256, 4, 304),
    ],
)
def test_rows_in_flight_fit_the_cache(arch, sms, megabytes, width, itemsize, expected):
    cache = megabytes * 2**20
    assert launch.programs(1024, width, itemsize, arch, sms, cache) == expected
    assert launch.programs(50, width, itemsize, arch, sms, cache) == 50
    chip = described(arch)
    assert (chip.sms, chip.cache) == (sms, cache)


@pytest.mark.parametrize(
    ("width", "pitch", "expected"),
    [(128256, 128256, 16), (50264, 50264, 8), (50257, 50257, 1), (50304, 50304, 16), (48, 52, 4), (96, 98, 2)],
)
def test_what_rows_are_aligned_to_reaches_the_kernels(width, pitch, expected):
    """The padding of a vocabulary is loaded, so that the number of its words does not matter."""
    logits = torch.empty(4, pitch, dtype=torch.bfloat16, device="meta")[:, :width]
    targets = torch.empty(4, dtype=torch.int64, device="meta")
    loss = Loss(width, 0, width - 1, -100, 0.0, 0.0, None)
    with device.capture("sm_90") as launches:
        launch.statistics(logits, targets, loss, torch.empty(4, 4, device="meta"))
        launch.gradient_(logits, targets, None, None, loss, None)
        launch.gradient_(logits, targets, None, None, loss._replace(columns=width), None)
    assert [each.args["ALIGN"] for each in launches] == [expected] * 3
    assert [each.args["PADDED"] for each in launches] == [True, True, False]
    assert all(each.args[name] % expected == 0 for each in launches for name in ("width", "stride"))
