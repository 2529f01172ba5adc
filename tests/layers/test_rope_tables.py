"""The rotary tables of a model: against transformers' modules, in the models, and in its config.json."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardfuse.kernels.dev import accuracy
from shardfuse.kernels.rope import apply_rope
from shardfuse.layers.attention.rope import Rotary, rope_tables
from shardfuse.layers.config import SCALINGS, TransformerConfig
from shardfuse.layers.hf import config

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLS = ["reference", pytest.param("triton", marks=pytest.mark.interpret)]
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="compares with transformers' rotary modules, which are not installed (pip install 'shardfuse[hf]')",
)


@pytest.fixture(autouse=True)
def _on_device():
    """Factory functions make their tensors where the kernels run."""
    torch.manual_seed(0)
    with DEVICE if DEVICE.type == "cuda" else nullcontext():  # on a CPU it would only slow down what is called
        yield


def heads(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def assert_close(ours, oracle):
    """Within twice what fp32 loses on its own: the kernel fuses multiplication and addition."""
    assert ours.shape == oracle.shape
    assert accuracy.within("angles", ours, oracle, 2 * torch.finfo(torch.float32).eps).ok


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
        raw = config.config_to_hf(TransformerConfig(style="gated", rope_theta=5000.0, rope_scaling=scaling))
        assert raw["rope_parameters"] == {**scaling, "rope_theta": 5000.0}
        assert config._rope_fields(raw) == {"rope_theta": 5000.0, "rope_scaling": scaling}
    # As transformers 4 wrote it.
    old = {"rope_theta": 9.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert config._rope_fields(old) == {"rope_theta": 9.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert config._rope_fields({"rope_parameters": {"rope_type": "default"}}) == {
        "rope_theta": 10000.0,
        "rope_scaling": None,
    }


def test_what_llama_does_not_do_is_neither_read_nor_written():
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0.5: transformers' llama rotates whole heads"):
        config._rope_fields({"model_type": "llama", "partial_rotary_factor": 0.5})
    for options in ({"partial_rotary_factor": 0.5}, {"rope_interleaved": True}):
        with pytest.raises(ValueError, match="cannot be exported"):
            config.config_to_hf(TransformerConfig(**options))
