"""apply_rope: the kernel against the oracle, autograd, in place, strides."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_matches
from torch._subclasses.fake_tensor import FakeTensorMode

from shardfuse.kernels.dev import accuracy, registry
from shardfuse.kernels.dev.cases import rope as cases
from shardfuse.kernels.rope import apply_rope
from shardfuse.kernels.runtime import device, dispatch

SPEC = cases.SPEC
pytestmark = pytest.mark.usefixtures("on_device")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLS = ["reference", pytest.param("triton", marks=pytest.mark.interpret)]
interpret = pytest.mark.interpret


def tables(tokens, pairs):
    angles = torch.rand(tokens, pairs) * 1000
    return angles.cos(), angles.sin()


def heads(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def assert_close(ours, oracle):
    """Within twice what fp32 loses on its own: the kernel fuses multiplication and addition."""
    assert ours.shape == oracle.shape
    assert accuracy.within("rotated", ours, oracle, 2 * torch.finfo(torch.float32).eps).ok


def textbook(x, cos, sin, interleaved):
    """Every pair a complex number, turned by multiplication; x [..., heads, H], cos and sin [..., P/2], in fp64."""
    x, turn = x.double(), torch.complex(cos.double(), sin.double()).unsqueeze(-2)
    half = cos.shape[-1]
    rotary, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        turned = torch.complex(rotary[..., 0::2], rotary[..., 1::2]) * turn
        return torch.cat((torch.stack((turned.real, turned.imag), -1).flatten(-2), rest), -1)
    turned = torch.complex(rotary[..., :half], rotary[..., half:]) * turn
    return torch.cat((turned.real, turned.imag, rest), -1)


# ------------------------------------------------------------------------------------------------------ results


@interpret
@pytest.mark.parametrize("case", SPEC.tagged("test"), ids=lambda case: case.name)
def test_kernel_matches_the_oracle(case):
    assert_matches(SPEC, case, SPEC.make_inputs(case, DEVICE, seed=1))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [12, 8, 2])
@pytest.mark.parametrize("impl", IMPLS)
def test_pairs_are_turned_like_complex_numbers(impl, rotary, interleaved):
    q, k = heads(2, 5, 3, 12), heads(2, 5, 1, 12)
    cos, sin = tables(5, rotary // 2)
    ours = apply_rope(q, k, cos, sin, interleaved=interleaved, impl=impl)
    for x, y in zip((q, k), ours):
        assert_close(y, textbook(x, cos, sin, interleaved))
        assert torch.equal(y[..., rotary:], x[..., rotary:])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("table_shape", [(5,), (2, 5), (1, 5), (2, 1), (1,), ()], ids=str)
def test_tables_broadcast(table_shape, impl):
    q = heads(2, 5, 3, 8)
    angles = torch.rand(*table_shape, 4) * 9
    ours, none = apply_rope(q, None, angles.cos(), angles.sin(), impl=impl)
    assert none is None
    every = angles.expand(2, 5, 4)
    assert_close(ours, textbook(q, every.cos(), every.sin(), False))


def test_the_reference_sees_other_tables():
    """What it keeps of a table on a CPU holds for that table as it was."""
    q, (cos, sin) = heads(5, 2, 8), tables(5, 4)
    other = sin.flip(0)

    def right(sin, interleaved=False):
        ours, _ = apply_rope(q, None, cos, sin, interleaved=interleaved, impl="reference")
        assert_close(ours, textbook(q, cos, sin, interleaved))
        return ours

    assert torch.equal(right(sin), right(sin))
    right(sin, interleaved=True)
    right(other)
    cos.mul_(-1)
    right(other)
    other.neg_()
    right(other)
    with FakeTensorMode(allow_non_fake_inputs=True):
        apply_rope(q, None, cos, sin, impl="reference")
    right(sin)


STRIDED = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sequence first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "slice of a projection": lambda x: torch.cat((x, x), dim=-2)[..., x.shape[-2] :, :],
    "slice of a head": lambda x: torch.cat((x, x), dim=-1)[..., : x.shape[-1]],
    "unaligned": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "every other element": lambda x: torch.stack((x, x), dim=-1)[..., 0],
}


@interpret
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", STRIDED)
def test_any_strides(layout, inplace):
    q, k = heads(2, 5, 3, 8), heads(2, 5, 2, 8)
    cos, sin = tables(5, 4)
    expected = apply_rope(q, k, cos, sin, impl="triton")
    strided = [STRIDED[layout](x) for x in (q, k)]
    if inplace and layout == "every other element":
        with pytest.raises(RuntimeError, match="wants the last dimension contiguous"):
            apply_rope(*strided, cos, sin, inplace=True, impl="triton")
        return
    ours = apply_rope(*strided, cos, sin, inplace=inplace, impl="triton")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, expected))
    assert all((mine is given) == inplace for mine, given in zip(ours, strided))


@interpret
@pytest.mark.parametrize("inplace", [False, True])
def test_tokens_in_more_dimensions_than_the_kernel_has(inplace):
    """[A, B, C] tokens of which no two dimensions are one: several launches."""
    q = heads(3, 2, 4, 2, 8).permute(1, 2, 0, 3, 4)[:, 1:]
    angles = torch.rand(3, 4) * 9
    expected = textbook(q, *(f(angles).expand(2, 3, 3, 4) for f in (torch.cos, torch.sin)), False)
    ours, _ = apply_rope(q, None, angles.cos(), angles.sin(), inplace=inplace, impl="triton")
    assert_close(ours, expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_in_place_touches_nothing_else(impl):
    fused = heads(6, 8, 12)  # 3 heads of q, 2 of k, 3 of v; 8 of 12 elements are rotated
    before = fused.clone()
    cos, sin = tables(6, 4)
    q, k = fused[:, :3], fused[:, 3:5]
    expected = apply_rope(q.clone(), k.clone(), cos, sin, impl=impl)
    apply_rope(q, k, cos, sin, inplace=True, impl=impl)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip((q, k), expected))
    assert torch.equal(fused[:, 5:], before[:, 5:])
    assert torch.equal(fused[..., 8:], before[..., 8:])


@interpret
@pytest.mark.parametrize("apart", [0, 2**30])
def test_offsets_past_two_to_the_31(apart, tmp_path):
    """Tokens or heads 2**30 elements apart, in a sparse file that is never filled."""
    if DEVICE.type != "cpu":
        pytest.skip("the sparse file stands for memory that a GPU would have to hold")
    near = heads(4, 4, 8, dtype=torch.float16)
    strides = (2**30, 8, 1) if apart else (8, 2**30, 1)
    pool = torch.from_file(str(tmp_path / "pool"), shared=True, size=3 * 2**30 + 64, dtype=torch.float16)
    far = pool.as_strided(near.shape, strides)
    far.copy_(near)
    cos, sin = tables(4, 4)
    expected, _ = apply_rope(near, None, cos, sin, impl="triton")
    ours, _ = apply_rope(far, None, cos, sin, inplace=True, impl="triton")
    assert torch.equal(ours, expected)


# ----------------------------------------------------------------------------------------------------- autograd


def make_leaves(*, tokens=(2, 5)):
    return heads(*tokens, 3 * 8).requires_grad_(), heads(*tokens, 2 * 8).requires_grad_()


def loss_of(leaves, cos, sin, shape, **options):
    """Something of which the gradient is not constant; q and k are views, slices of one tensor, or neither."""
    a, b = (leaf * 1.0 for leaf in leaves)
    if shape == "slices":
        fused = torch.cat((a, b), dim=-1)
        a, b = fused[..., :24], fused[..., 24:]
    q, k = a.view(*a.shape[:-1], 3, 8), b.view(*b.shape[:-1], 2, 8)
    if shape == "fresh":
        q, k = q * 1.0, k * 1.0
    rotated = apply_rope(q, k, cos, sin, **options)
    if options.get("inplace"):
        assert (rotated[0] is q, rotated[1] is k) == (True, True)
    q, k = rotated
    return q.pow(3).sum() + (q.sum(-2) * k.sum(-2).square()).sum()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape", ["fresh", "views", "slices"])
def test_gradients_through_views_and_in_place(shape, inplace, impl):
    cos, sin = tables(5, 3)
    leaves = make_leaves()
    ours = torch.autograd.grad(loss_of(leaves, cos, sin, shape, inplace=inplace, impl=impl), leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    oracle = torch.autograd.grad(loss_of(exact, cos.double(), sin.double(), "fresh", impl="reference"), exact)
    low = torch.autograd.grad(loss_of(leaves, cos, sin, "fresh", impl="reference"), leaves)
    for name, mine, rounded, true in zip("qk", ours, low, oracle):
        verdict = accuracy.judge(name, mine, rounded, true)
        assert verdict.ok, verdict


@interpret
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("shape", ["fresh", "views"])
@pytest.mark.parametrize("frozen", [0, 1])
def test_one_of_the_two_is_frozen(frozen, shape, inplace):
    cos, sin = tables(5, 4)
    leaves = make_leaves()
    leaves[frozen].requires_grad_(False)
    free = leaves[1 - frozen]
    [ours] = torch.autograd.grad(loss_of(leaves, cos, sin, shape, inplace=inplace, impl="triton"), [free])
    [theirs] = torch.autograd.grad(loss_of(leaves, cos, sin, "fresh", impl="reference"), [free])
    assert accuracy.within("rotated", ours, theirs, 4 * torch.finfo(torch.float32).eps).ok


@pytest.fixture
def launches(monkeypatch):
    """The shapes of what every launch out of place rotates, and whether back."""
    seen = []
    inner = device.Prepared.launch

    def watched(self, grid, tensors, *, on):
        q, k = tensors[:2]
        seen.append((tuple(q.shape), None if k is None else tuple(k.shape), self._rest["CONJUGATE"]))
        return inner(self, grid, tensors, on=on)

    monkeypatch.setattr(device.Prepared, "launch", watched)
    return seen


@interpret
def test_one_launch_forward_and_one_backward(launches):
    leaves, (cos, sin) = make_leaves(), tables(5, 4)
    loss_of(leaves, cos, sin, "views", impl="triton").backward()
    both = (2, 5, 3, 8), (2, 5, 2, 8)
    assert launches == [(*both, False), (*both, True)]


@interpret
def test_a_split_backward_rotates_each_gradient_once(launches):
    leaves, (cos, sin) = make_leaves(), tables(5, 4)
    loss = loss_of(leaves, cos, sin, "views", impl="triton")
    [dq] = torch.autograd.grad(loss, leaves[:1], retain_graph=True)
    [dk] = torch.autograd.grad(loss, leaves[1:])
    assert launches[1:] == [((2, 5, 3, 8), None, True), ((2, 5, 2, 8), None, True)]
    whole = torch.autograd.grad(loss_of(leaves, cos, sin, "views", impl="triton"), leaves)
    assert torch.equal(dq, whole[0])
    assert torch.equal(dk, whole[1])


@interpret
def test_nothing_is_rotated_back_for_a_result_that_goes_nowhere(launches):
    leaves, (cos, sin) = make_leaves(), tables(5, 4)
    q, k = (leaf.unflatten(-1, (-1, 8)) for leaf in leaves)
    _, k = apply_rope(q, k, cos, sin, impl="triton")
    k.sum().backward()  # of an expanded gradient, too
    assert launches[1:] == [((2, 5, 2, 8), None, True)]
    assert leaves[0].grad is None
    expected = textbook(torch.ones(2, 5, 2, 8), cos, -sin, False).flatten(-2)
    assert_close(leaves[1].grad, expected)


@interpret
def test_results_may_be_changed_in_place():
    leaves, (cos, sin) = make_leaves(), tables(5, 4)
    q, k = apply_rope(*(leaf.unflatten(-1, (-1, 8)) for leaf in leaves), cos, sin, impl="triton")
    q.mul_(2)
    k.add_(1)
    (q.sum() + k.sum()).backward()
    assert_close(leaves[0].grad, 2 * textbook(torch.ones(2, 5, 3, 8), cos, -sin, False).flatten(-2))


@interpret
def test_what_is_overwritten_is_missed():
    """A tensor that somebody saved for backward must not change unseen."""
    cos, sin = tables(5, 4)
    x, weight = heads(5, 2, 8), heads(5, 2, 8).requires_grad_()
    product = (x * weight).sum()
    apply_rope(x, None, cos, sin, inplace=True, impl="triton")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():  # where nobody counts versions
        x = heads(5, 2, 8)
        assert apply_rope(x, None, cos, sin, inplace=True, impl="triton")[0] is x


@interpret
def test_the_kernel_has_no_second_derivatives_and_says_so():
    leaves, (cos, sin) = make_leaves(), tables(5, 4)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss_of(leaves, cos, sin, "views", impl="triton"), leaves, create_graph=True)
    grads = torch.autograd.grad(loss_of(leaves, cos, sin, "views", impl="reference"), leaves, create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()
    assert leaves[0].grad is not None


# ---------------------------------------------------------------------------------------------------- torch op


@interpret
def test_opcheck():
    cos, sin = tables(5, 3)
    q, k = heads(2, 5, 3, 8), heads(2, 5, 2, 8)
    for other in (k, None):
        torch.library.opcheck(torch.ops.shardfuse.apply_rope.default, (q, other, cos, sin, False, True))
        torch.library.opcheck(torch.ops.shardfuse.apply_rope_.default, (q, other, cos, sin, True, False))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_without_graph_breaks(inplace, impl):
    compiled = torch.compile(loss_of, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (5, 7):
        leaves, (cos, sin) = make_leaves(tokens=(2, length)), tables(length, 4)
        options = {"inplace": inplace, "impl": impl}
        with torch.no_grad():
            quiet = compiled(leaves, cos, sin, "views", **options)
        ours = compiled(leaves, cos, sin, "views", **options)
        theirs = loss_of(leaves, cos, sin, "views", **options)
        torch.testing.assert_close(quiet, theirs.detach(), rtol=1e-5, atol=1e-5)
        for mine, other in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves)):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@interpret
def test_which_implementation_runs():
    q, (cos, sin) = heads(5, 2, 8), tables(5, 4)
    before = dispatch.counts.copy()
    apply_rope(q, None, cos, sin, impl="triton")
    apply_rope(q, None, cos, sin, impl="reference")
    assert (dispatch.counts - before) == {("apply_rope", "triton"): 1, ("apply_rope", "reference"): 1}
    for message, arguments in {
        "this is fp64": (q.double(), None, cos, sin),
        "these are 2050": (heads(1, 1, 2050), None, *tables(1, 1025)),
        "no gradient, and they require one": (q, None, cos.clone().requires_grad_(), sin),
    }.items():
        with pytest.raises(RuntimeError, match=message):
            apply_rope(*arguments, impl="triton")
        apply_rope(*arguments, impl="reference")
    angles = torch.rand(5, 4, requires_grad=True)
    apply_rope(q, None, angles.cos(), angles.sin())[0].sum().backward()
    assert angles.grad is not None


# --------------------------------------------------------------------------------------------------- bad input

Q, (COS, SIN) = torch.zeros(2, 5, 3, 8), (torch.zeros(5, 4), torch.zeros(5, 4))
BAD = {
    r"q has shape \(8,\)": (Q[0, 0, 0], None, COS, SIN),
    "q is torch.int64": (Q.long(), None, COS, SIN),
    r"k has shape \(2, 4, 3, 8\)": (Q, Q[:, :4], COS, SIN),
    r"k has shape \(2, 5, 3, 6\)": (Q, Q[..., :6], COS, SIN),
    r"k has shape \(5, 3, 8\)": (Q, Q[0], COS, SIN),
    "k is torch.bfloat16 but q is torch.float32": (Q, Q.bfloat16(), COS, SIN),
    r"cos has shape \(5, 4\) and sin \(5, 3\)": (Q, None, COS, SIN[:, :3]),
    "cos is torch.bfloat16": (Q, None, COS.bfloat16(), SIN.bfloat16()),
    "cos is torch.float32 and sin torch.float64": (Q, None, COS, SIN.double()),
    "cos has 8 columns.*expected 1 to 4": (Q, None, COS.repeat(1, 2), SIN.repeat(1, 2)),
    "cos has 0 columns": (Q, None, COS[:, :0], SIN[:, :0]),
    r"cos has shape \(4, 4\).*broadcast": (Q, None, COS[:4], SIN[:4]),
    r"cos has shape \(1, 2, 5, 4\)": (Q, None, COS.expand(1, 2, 5, 4), SIN.expand(1, 2, 5, 4)),
    "q is on cpu but k": (Q, Q.to("meta"), COS, SIN),
}


@pytest.mark.parametrize("message", BAD)
def test_refuses(message):
    with pytest.raises(ValueError, match=f"apply_rope: {message}"):
        apply_rope(*BAD[message])


@pytest.mark.parametrize("impl", IMPLS)
def test_refuses_in_place(impl):
    cos, sin = tables(5, 4)
    leaf = heads(5, 2, 8).requires_grad_()
    for q in (leaf, leaf[:, :1], leaf.view(5, 16).unflatten(1, (2, 8))):
        with pytest.raises(ValueError, match="q, a leaf that requires a gradient"):
            apply_rope(q, None, cos, sin, inplace=True, impl=impl)
    with pytest.raises(ValueError, match="k, a leaf"):
        apply_rope(leaf * 1, leaf, cos, sin, inplace=True, impl=impl)
    with torch.no_grad():
        assert apply_rope(leaf, None, cos, sin, inplace=True, impl=impl)[0] is leaf
    with pytest.raises(ValueError, match="elements of q share memory"):
        apply_rope(heads(1, 2, 8).expand(5, 2, 8), None, cos, sin, inplace=True, impl=impl)
    x = heads(5, 2, 8)
    with pytest.raises(ValueError, match="would rotate it twice"):
        apply_rope(x, x, cos, sin, inplace=True, impl=impl)
    pieces = (leaf * 1).unbind(1)  # several views from one function: torch keeps no history of changes to these
    with pytest.raises(RuntimeError, match="multiple views"):
        apply_rope(pieces[0][:, None], None, cos, sin, inplace=True, impl=impl)


# ------------------------------------------------------------------------------------------------------ builds


@pytest.mark.parametrize("target", registry.TARGETS)
def test_builds_are_few_and_of_every_kind(target):
    builds = cases.SPEC.builds(target)
    assert len(builds) <= 8
    assert {build.args["CONJUGATE"] for build in builds} == {build.args["INTERLEAVED"] for build in builds}
    assert any(build.args["BLOCK_TQ"] > 1 for build in builds)
    assert any(build.args["BLOCK_TQ"] == 1 for build in builds)


def test_tiles_waste_little():
    if dispatch.triton_version() is None:
        pytest.skip("Triton is not installed")
    from shardfuse.kernels.rope import launch

    for heads in (*range(1, 80), 96, 112, 128):
        config = launch.pick_config("sm_90", heads, 8, row=128, itemsize=2)
        assert config.block_tq * config.block_n == config.block_tk * config.block_k == 32
        assert -heads % config.block_n <= heads / 8
    assert str(launch.pick_config("sm_90", 32, 0, row=4096, itemsize=4)) == "1x1-1x1-w4"


# ----------------------------------------------------------------------------------------------- beside autograd


def test_tables_seen_in_inference_mode_train_afterwards():
    q, cos, sin = heads(5, 2, 8), torch.rand(5, 4), torch.rand(5, 4)
    with torch.inference_mode():
        apply_rope(q, None, cos, sin)
    apply_rope(q.requires_grad_(), None, cos, sin)[0].sum().backward()
    assert q.grad is not None


@pytest.mark.interpret
def test_forward_mode_and_transforms_take_the_reference():
    q, cos, sin = heads(5, 2, 8), torch.rand(5, 4), torch.rand(5, 4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="forward-mode differentiation has no kernel"):
            apply_rope(dual, None, cos, sin, impl="triton")
        out = torch.autograd.forward_ad.unpack_dual(apply_rope(dual, None, cos, sin)[0])
        assert out.tangent is not None
    with pytest.raises(RuntimeError, match=r"torch.func's transforms have no kernel"):
        torch.func.grad(lambda q: apply_rope(q, None, cos, sin, impl="triton")[0].sum())(q)


@pytest.mark.interpret
def test_what_needs_no_gradient_stays_so():
    q, k, cos, sin = heads(5, 2, 8).requires_grad_(), heads(5, 1, 8), torch.rand(5, 4), torch.rand(5, 4)
    assert [each.requires_grad for each in apply_rope(q, k, cos, sin, impl="triton")] == [True, False]
