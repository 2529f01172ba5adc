"""apply_rope: the kernel against the oracle, autograd, in place, strides; the tables against transformers' modules."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardfuse.kernels import accuracy, dispatch, registry
from shardfuse.kernels.rope import apply_rope, cases, schemas
from shardfuse.layers import hf
from shardfuse.layers.config import SCALINGS, TransformerConfig
from shardfuse.layers.rope import Rotary, rope_tables

SPEC = cases.SPEC
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLS = ["reference", pytest.param("triton", marks=pytest.mark.interpret)]
interpret = pytest.mark.interpret
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="compares with transformers' rotary modules, which are not installed (pip install 'shardfuse[hf]')",
)


@pytest.fixture(autouse=True)
def _on_device():
    """Factory functions make their tensors where the kernels run."""
    torch.manual_seed(0)
    with DEVICE:
        yield


def tables(tokens, pairs):
    angles = torch.rand(tokens, pairs) * 1000
    return angles.cos(), angles.sin()


def heads(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def assert_close(ours, oracle):
    """Within twice what fp32 loses on its own: the kernel fuses multiplication and addition."""
    assert ours.shape == oracle.shape
    assert accuracy.relative_error(ours, oracle) <= 2 * torch.finfo(torch.float32).eps


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
    inputs = SPEC.make_inputs(case, DEVICE, seed=1)
    ours = SPEC.run(inputs, case, "triton")
    low = SPEC.run(inputs, case, "reference")
    oracle = SPEC.run(registry.to_double(inputs), case, "reference")
    assert ours.keys() == oracle.keys() == low.keys()
    verdicts = [accuracy.judge(name, ours[name], low[name], oracle[name]) for name in oracle]
    assert all(v.ok for v in verdicts), "; ".join(map(str, verdicts))


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
    assert accuracy.relative_error(ours, theirs) < 4 * torch.finfo(torch.float32).eps


@pytest.fixture
def launches(monkeypatch):
    """The shapes of what every launch out of place rotates, and whether back."""
    seen = []
    inner = schemas.apply_rope

    def watched(q, k, cos, sin, interleaved, conjugate):
        seen.append((tuple(q.shape), None if k is None else tuple(k.shape), conjugate))
        return inner(q, k, cos, sin, interleaved, conjugate)

    monkeypatch.setattr(schemas, "apply_rope", watched)
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
def test_builds_are_named_apart(target):
    builds = cases.builds(target)
    names = [build.config for build in builds]
    assert len(names) == len(set(names)) <= 8
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


# ------------------------------------------------------------------------------------------------------ tables


PARAMETERS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 24.0},
    "longrope": {
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
FACTOR = {"yarn": 1.138629436111989, "longrope": (1 + 1 / 3) ** 0.5}  # 0.1 log 4 + 1; sqrt(1 + log 4 / log 64)


def stock_tables(kind, positions):
    """cos and sin of transformers' Llama, the first half of each: the second repeats it."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": kind, "rope_theta": 5000.0, **PARAMETERS.get(kind, {})}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 256}
    module = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=parameters))
    cos, sin = module(torch.zeros(1), positions[None])
    assert torch.equal(cos[..., :8], cos[..., 8:])
    return cos[0, :, :8], sin[0, :, :8]


def rotary(kind, **options):
    scaling = {"rope_type": kind, **PARAMETERS[kind]} if kind != "default" else None
    return Rotary(16, 5000.0, scaling=scaling, max_positions=256, **options)


@needs_transformers
@pytest.mark.parametrize("length", [40, 200, 600])
@pytest.mark.parametrize("kind", ["default", *SCALINGS])
def test_tables_are_those_of_transformers(kind, length):
    """Below and above the length of pre-training, and above what the model was made for. Bit for bit, so on a CPU."""
    with torch.device("cpu"):
        positions = torch.arange(length)
        ours, stock = rope_tables(positions, rotary(kind), length=length), stock_tables(kind, positions)
    for mine, theirs in zip(ours, stock):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs)
    radius = ours[0].double().square() + ours[1].double().square()
    torch.testing.assert_close(radius, torch.full_like(radius, FACTOR.get(kind, 1.0) ** 2), rtol=1e-6, atol=0)


def test_plain_tables_by_the_formula():
    cos, sin = rope_tables(torch.tensor([[0, 3], [7, 1000]]), Rotary(12, 500.0, 0.5))
    assert cos.shape == sin.shape == (2, 2, 3)
    angles = torch.tensor([[0.0, 3], [7, 1000]]).double()[..., None] * 500.0 ** -(torch.arange(0, 6, 2).double() / 6)
    # An angle of up to 1000 rounded to fp32.
    assert (cos - angles.cos()).abs().max() < 1000 * torch.finfo(torch.float32).eps
    assert (sin - angles.sin()).abs().max() < 1000 * torch.finfo(torch.float32).eps


@needs_transformers
def test_a_scaling_of_partly_rotated_heads():
    part = Rotary(16, 5000.0, 0.5)
    ours, factor = rotary("linear", partial_rotary_factor=0.5).frequencies(DEVICE)
    assert_close(ours, part.frequencies(DEVICE)[0].double() / 4)
    assert factor == 1.0


@needs_transformers
def test_which_lengths_matter():
    positions = torch.tensor([0, 5, 300])

    def same(kind, a, b):
        pairs = zip(*(rope_tables(positions, rotary(kind), length=length) for length in (a, b)))
        return all(torch.equal(x, y) for x, y in pairs)

    assert all(same(kind, 10, 9999) for kind in ("default", "linear", "yarn", "llama3"))
    assert same("dynamic", 10, None)
    assert same("dynamic", 256, None)
    assert not same("dynamic", 257, None)
    assert same("longrope", 65, None)
    assert same("longrope", 1, 64)
    assert not same("longrope", 64, 65)


@needs_transformers
@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
def test_scaled_tables_in_a_graph(kind):
    """Without graph breaks, whether the frequencies were asked for before or not; a stand-in is not remembered."""
    positions, how = torch.arange(20), rotary(kind)
    expected = rope_tables(positions, rotary(kind))
    compiled = torch.compile(lambda p: rope_tables(p, how), fullgraph=True, dynamic=True, backend="aot_eager")
    for _ in range(2):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(compiled(positions), expected))
    how = rotary(kind)
    how._known.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert rope_tables(torch.arange(4), how)[0].shape == (4, 8)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(rope_tables(positions, how), expected))


@needs_transformers
@pytest.mark.parametrize("impl", IMPLS)
def test_rotation_is_that_of_transformers(impl):
    """Llama's, whole heads in halves, and GLM's, half of each head in neighbours."""
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

    q, k = heads(2, 6, 4, 16), heads(2, 6, 2, 16)
    for stock, how in ((llama, Rotary(16)), (glm, Rotary(16, partial_rotary_factor=0.5, interleaved=True))):
        cos, sin = rope_tables(torch.arange(6), how)
        ours = apply_rope(q, k, cos, sin, interleaved=how.interleaved, impl=impl)
        repeated = (torch.cat((table, table), -1).expand(2, 6, -1) for table in (cos, sin))
        for mine, theirs in zip(ours, stock(q, k, *repeated, unsqueeze_dim=2)):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=4 * torch.finfo(torch.float32).eps * q.abs().max())


def test_scaling_without_transformers_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RuntimeError, match=r"rope_type='linear'.*pip install 'shardfuse\[hf\]'"):
        rotary("linear")
    rotary("default")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partial_rotary_factor": 0.0}, "is 0 elements"),
        ({"partial_rotary_factor": 1.5}, "is 24 elements"),
        ({"partial_rotary_factor": 0.2}, "is 3 elements"),
        ({"scaling": {"rope_type": "spiral"}}, "rope_type='spiral': expected one of linear, dynamic"),
        ({"scaling": [1]}, r"rope_scaling=\[1\]: expected a dict"),
    ],
)
def test_nonsense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Rotary(16, **options)
    fields = {("rope_scaling" if name == "scaling" else name): value for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        TransformerConfig(head_dim=16, **fields)


@needs_transformers
def test_a_scaling_that_lacks_something_is_refused():
    with pytest.raises(ValueError, match=r"rope_scaling=.*factor"):
        Rotary(16, scaling={"rope_type": "linear"})


def test_config_and_rotary_go_together():
    config = TransformerConfig(head_dim=16, rope_theta=7.0, partial_rotary_factor=0.5, rope_interleaved=True)
    assert Rotary.of(config) == Rotary(16, 7.0, 0.5, None, config.max_positions, True)
    assert hash(TransformerConfig(rope_scaling={"rope_type": "linear", "factor": 2.0})) == hash(TransformerConfig())


# ------------------------------------------------------------------------------------- config.json of transformers


def test_scalings_go_into_config_json_and_come_back():
    for kind, parameters in PARAMETERS.items():
        scaling = {"rope_type": kind, **parameters}
        raw = hf.config_to_hf(TransformerConfig(style="gated", rope_theta=5000.0, rope_scaling=scaling))
        assert raw["rope_parameters"] == {**scaling, "rope_theta": 5000.0}
        assert hf._rope_fields(raw) == {"rope_theta": 5000.0, "rope_scaling": scaling}
    # As transformers 4 wrote it.
    old = {"rope_theta": 9.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert hf._rope_fields(old) == {"rope_theta": 9.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert hf._rope_fields({"rope_parameters": {"rope_type": "default"}}) == {
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }


def test_what_llama_does_not_do_is_neither_read_nor_written():
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0.5: transformers' llama rotates whole heads"):
        hf._rope_fields({"model_type": "llama", "partial_rotary_factor": 0.5})
    for options in ({"partial_rotary_factor": 0.5}, {"rope_interleaved": True}):
        with pytest.raises(ValueError, match="cannot be exported"):
            hf.config_to_hf(TransformerConfig(**options))


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
