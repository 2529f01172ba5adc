"""Dropout by position: the mask, its statistics, and that every way to draw it gives the same one."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import assert_matches
from torch.utils.checkpoint import checkpoint

from shardfuse.kernels.dev import registry
from shardfuse.kernels.dropout import dropout, new_rng_key, reference, schemas

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = registry.op("dropout")
RNG_KEY = torch.tensor([-(2**62) + 12345], device=DEVICE)


def _words(counter: list[int], key: int) -> list[int]:
    found = reference.philox([torch.tensor([c]) for c in counter], torch.tensor([key]))
    return [int(word) for word in found]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # known answers of Random123's philox4x32-10
        ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, -1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ],
)
def test_philox_gives_the_published_words(counter: list[int], key: int, words: list[int]):
    assert _words(counter, key) == words


@pytest.mark.interpret
@pytest.mark.parametrize("case", SPEC.tagged("test"), ids=lambda case: case.name)
def test_kernel_matches_the_oracle(case: registry.Case):
    inputs = SPEC.make_inputs(case, DEVICE, seed=1)
    ours, low = assert_matches(SPEC, case, inputs), SPEC.run(inputs, case, "reference")
    for name in ours:  # the very same mask
        assert torch.equal(ours[name] == 0, low[name] == 0)


@pytest.mark.interpret
@pytest.mark.parametrize("p", [0.0, 2**-32, 0.1, 0.5, 1 - 2**-20])
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_as_many_are_kept_as_p_says(p: float, impl: str):
    x = torch.ones(64, 256, device=DEVICE)
    y = dropout(x, p, RNG_KEY, impl=impl)
    kept = y != 0
    off = 5 * math.sqrt(p * (1 - p) / x.numel())  # of what chance allows, five standard deviations
    assert abs(kept.float().mean().item() - (1 - p)) <= off
    assert torch.equal(y[kept], torch.full_like(y[kept], 1 / (1 - p)))


def test_masks_of_other_rng_keys_streams_and_places_are_independent():
    masks = [
        reference.keep_mask(rng_key, 0.5, 64, 64, stream=stream, row_start=row, col_start=col)
        for rng_key, stream, row, col in (
            (RNG_KEY, 0, 0, 0), (RNG_KEY + 1, 0, 0, 0), (RNG_KEY, 1, 0, 0), (RNG_KEY, 0, 64, 0), (RNG_KEY, 0, 0, 64),
            (RNG_KEY, 0, 2**32, 0),
        )
    ]  # fmt: skip
    for i, one in enumerate(masks):
        for other in masks[:i]:
            agree = (one == other).float().mean().item()
            assert abs(agree - 0.5) < 5 * 0.5 / 64


@pytest.mark.interpret
@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_parts_of_a_tensor_draw_parts_of_one_mask(impl: str):
    x = torch.randn(12, 48, device=DEVICE)
    whole = dropout(x, 0.3, RNG_KEY, impl=impl)
    for rows, cols in ((slice(0, 5), slice(0, 48)), (slice(5, 12), slice(16, 48)), (slice(3, 4), slice(44, 48))):
        part = dropout(x[rows, cols], 0.3, RNG_KEY, row_start=rows.start, col_start=cols.start, impl=impl)
        assert torch.equal(part, whole[rows, cols])


@pytest.mark.interpret
def test_shapes_and_strides():
    for x in (
        torch.randn(2, 3, 40, device=DEVICE),
        torch.randn(40, device=DEVICE),
        torch.randn(40, 6, device=DEVICE).t(),
    ):
        expected = dropout(x, 0.4, RNG_KEY, impl="reference")
        found = dropout(x, 0.4, RNG_KEY, residual=x, impl="triton")
        assert found.shape == x.shape
        torch.testing.assert_close(found, expected + x)
        x.requires_grad_()
        dy = torch.ones((), device=DEVICE).expand(x.shape)
        (dx,) = torch.autograd.grad(dropout(x, 0.4, RNG_KEY, impl="triton").add_(1), x, dy)
        torch.testing.assert_close(dx, reference.dropout(dy, expected != 0, 0.4))


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("cols", "pitch", "start"), [(33, 33, 1), (40, 43, 0), (3, 8, 5), (64, 64, 3), (1, 2, 1)])
def test_odd_widths_and_views(cols: int, pitch: int, start: int, dtype: torch.dtype):
    """x and the residual are rows of other tensors that begin anywhere: bit for bit as of rows that are aligned."""
    room = torch.randn(2, start + 6 * pitch, device=DEVICE).to(dtype)
    x, residual = (part[start:].view(6, pitch)[:, :cols] for part in room)
    before = room.clone()
    found = dropout(x, 0.4, RNG_KEY, residual=residual, impl="triton")
    dense = dropout(x.contiguous(), 0.4, RNG_KEY, residual=residual.contiguous(), impl="triton")
    assert found.is_contiguous()
    assert torch.equal(found, dense)
    assert torch.equal(room, before)
    torch.testing.assert_close(found, dropout(x, 0.4, RNG_KEY, residual=residual, impl="reference"))


@pytest.mark.interpret
def test_a_recomputed_forward_draws_the_same_mask():
    x = torch.randn(8, 64, device=DEVICE, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return dropout(x.square(), 0.5, new_rng_key(x.device), impl="triton").sin()

    torch.manual_seed(3)
    (plain,) = torch.autograd.grad(layer(x).sum(), x)
    torch.manual_seed(3)
    (again,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).sum(), x)
    assert torch.equal(plain, again)
    (other,) = torch.autograd.grad(layer(x).sum(), x)
    assert not torch.equal(plain, other)


@pytest.mark.interpret
def test_opcheck():
    x = torch.randn(5, 24, device=DEVICE)
    for residual in (None, x):
        torch.library.opcheck(torch.ops.shardfuse.dropout.default, (x, residual, RNG_KEY, 0.2, 1, 3, 8))
    assert schemas.dropout(x, None, RNG_KEY, 0.2, 1, 3, 8).shape == x.shape


@pytest.mark.interpret
@pytest.mark.parametrize("impl", ["triton", pytest.param("reference", marks=pytest.mark.nightly)])
def test_compiles(impl: str):
    compiled = torch.compile(
        lambda x, rng_key: dropout(x, 0.3, rng_key, residual=x, impl=impl),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for rows in (3, 7):
        x = torch.randn(rows, 20, device=DEVICE, requires_grad=True)
        y, expected = compiled(x, RNG_KEY), dropout(x, 0.3, RNG_KEY, residual=x, impl=impl)
        assert torch.equal(y, expected)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])


def test_gradients_against_finite_differences():
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    residual = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, r: dropout(x, 0.4, RNG_KEY.cpu(), residual=r), (x, residual))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"p": 1.0}, r"p=1.0: expected at least 0 and less than 1"),
        ({"p": -0.1}, r"p=-0.1"),
        ({"rng_key": None}, r"needs an RNG key .* new_rng_key\(x.device\) draws one"),
        ({"rng_key": torch.zeros(2, dtype=torch.int64)}, r"rng_key is torch.int64 \[2\].*expected torch.int64 \[1\]"),
        ({"rng_key": torch.zeros(1)}, r"rng_key is torch.float32"),
        ({"col_start": 2}, r"a column that is a multiple of 4"),
        ({"stream": -1}, r"stream=-1"),
        ({"residual": torch.zeros(8)}, r"residual is torch.float32 \[8\]: expected x's torch.float32 \[2, 8\]"),
        ({"impl": "fast"}, r"impl='fast'"),
    ],
)
def test_bad_input(arguments: dict, message: str):
    call = {"p": 0.1, "rng_key": torch.zeros(1, dtype=torch.int64)} | arguments
    with pytest.raises(ValueError, match=message):
        dropout(torch.zeros(2, 8), **call)


@pytest.mark.interpret
def test_columns_far_to_the_right():
    x = torch.ones(2, 64, device=DEVICE)
    far = 2**31 - 16
    found, expected = (dropout(x, 0.5, RNG_KEY, col_start=far, impl=impl) for impl in ("triton", "reference"))
    assert torch.equal(found, expected)


def test_the_reference_has_second_derivatives_and_transforms():
    x, rng_key = torch.randn(3, 8, requires_grad=True), RNG_KEY.cpu()
    (dx,) = torch.autograd.grad(dropout(x.square(), 0.5, rng_key).sum(), x, create_graph=True)
    assert torch.equal(torch.autograd.grad(dx.sum(), x)[0] != 0, dx != 0)
    assert torch.equal(torch.func.grad(lambda x: dropout(x.square(), 0.5, rng_key).sum())(x.detach()), dx.detach())
