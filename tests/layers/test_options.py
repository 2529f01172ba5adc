"""The keyword arguments that the layers share: one dataclass, its TypedDicts, and the layers that take them."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, get_type_hints

import pytest
import torch

import shardfuse as sf
from shardfuse.layers import options
from shardfuse.layers.options import (
    EmbeddingKwargs,
    LayerKwargs,
    LayerOptions,
    ModelKwargs,
    NormKwargs,
    ParameterKwargs,
)
from shardfuse.parallel.core.mesh import SINGLE, Group

CONFIG = sf.TransformerConfig(hidden_size=8, intermediate_size=8, num_heads=2, num_layers=1)
# Layer -> its positional arguments, the shared options that it takes, and one that it refuses.
LAYERS: dict[Any, tuple[tuple[Any, ...], Any, str | None]] = {
    sf.ColumnParallelLinear: ((8, 8), LayerKwargs, None),
    sf.RowParallelLinear: ((8, 8), LayerKwargs, None),
    sf.ParallelMLP: ((8, 8), LayerKwargs, None),
    sf.ParallelAttention: ((8, 2), LayerKwargs, None),
    sf.ParallelBlock: ((CONFIG,), ModelKwargs, "init_std"),
    sf.ParallelTransformer: ((CONFIG,), ModelKwargs, "init_std"),
    sf.load_hf: (("folder",), ModelKwargs, "init_std"),
    sf.VocabParallelEmbedding: ((8, 8), EmbeddingKwargs, "overlap"),
    sf.LayerNorm: ((8,), NormKwargs, "overlap"),
    sf.RMSNorm: ((8,), NormKwargs, "overlap"),
    sf.PagedAttention: ((2, 2, 4), ParameterKwargs, "sequence_parallel"),
}
GIVEN = {
    "mesh": SINGLE,
    "sequence_parallel": True,
    "fuse_wgrad_accumulation": True,
    "overlap": "none",
    "strict": True,
    "params": "local",
    "impl": "reference",
    "init_std": 0.5,
    "dtype": torch.float64,
    "device": "cpu",
}
each_layer = pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)


def _fields() -> dict[str, Any]:
    hints = get_type_hints(LayerOptions)
    return {field.name: hints[field.name] for field in dataclasses.fields(LayerOptions)}


def test_the_typed_dict_has_the_fields_of_the_dataclass():
    assert get_type_hints(LayerKwargs) == _fields()
    assert LayerKwargs.__optional_keys__ == set(_fields()) == set(GIVEN)


@pytest.mark.parametrize("narrower", [ParameterKwargs, EmbeddingKwargs, NormKwargs, ModelKwargs])
def test_the_narrower_ones_have_some_of_them(narrower: Any):
    assert get_type_hints(narrower).items() < _fields().items()
    assert narrower.__optional_keys__ == set(get_type_hints(narrower))


def test_every_field_is_documented():
    text = inspect.getdoc(LayerOptions) or ""
    assert all(text.count(f"\n    {name}: ") == 1 for name in _fields())


@each_layer
def test_a_signature_has_the_type_of_its_options(layer: Any):
    _, accepted, _ = LAYERS[layer]
    function = layer.__init__ if isinstance(layer, type) else layer
    assert get_type_hints(function)["options"] == options.Unpack[accepted]


@each_layer
def test_a_docstring_names_the_layers_own_arguments_and_where_the_others_are(layer: Any):
    text = inspect.getdoc(layer) or ""
    assert ("ParallelTransformer" if layer is sf.load_hf else "layers.options.LayerOptions") in text
    own = [each.name for each in inspect.signature(layer).parameters.values() if each.kind is each.KEYWORD_ONLY]
    assert not [name for name in own if name not in text]


@each_layer
def test_a_layer_takes_its_options_and_no_others(layer: Any):
    arguments, accepted, refused = LAYERS[layer]
    if layer is not sf.load_hf:
        layer(*arguments, **{name: GIVEN[name] for name in accepted.__optional_keys__})
    if refused is not None:
        message = rf"^{layer.__name__}\(\) got an unexpected keyword argument '{refused}'; expected one of .*dtype"
        with pytest.raises(TypeError, match=message):
            layer(*arguments, **{refused: GIVEN[refused]})


@each_layer
def test_a_misspelt_option_is_refused_with_the_nearest_name(layer: Any):
    arguments, accepted, _ = LAYERS[layer]
    for name in accepted.__optional_keys__:
        wrong = name + name[-1]
        message = rf"^{layer.__name__}\(\) got an unexpected keyword argument '{wrong}'; did you mean '{name}'\?"
        with pytest.raises(TypeError, match=message):
            layer(*arguments, **{wrong: GIVEN[name]})


@pytest.mark.parametrize(
    ("layer", "wrong", "right"),
    [
        (sf.ParallelMLP, "activatoin", "activation"),
        (sf.ParallelAttention, "softcaps", "softcap"),
        (sf.ParallelBlock, "recompte", "recompute"),
        (sf.LayerNorm, "weight_ofset", "weight_offset"),
        (sf.RMSNorm, "weight_ofset", "weight_offset"),
        (sf.PagedAttention, "casual", "causal"),
    ],
)
def test_so_is_a_misspelt_argument_of_its_own(layer: Any, wrong: str, right: str):
    with pytest.raises(TypeError, match=rf"^{layer.__name__}\(\) .* '{wrong}'; did you mean '{right}'\?"):
        layer(*LAYERS[layer][0], **{wrong: 1})


@each_layer
def test_an_error_about_a_value_names_the_layer(layer: Any):
    arguments, accepted, _ = LAYERS[layer]
    with pytest.raises(ValueError, match=rf"^{layer.__name__}: params='plain': expected one of dtensor, local"):
        layer(*arguments, params="plain")
    if "overlap" in accepted.__optional_keys__:
        with pytest.raises(ValueError, match=rf"^{layer.__name__}: overlap='often': expected one of auto"):
            layer(*arguments, overlap="often")
    with pytest.raises(TypeError, match="mesh: expected a DeviceMesh, ProcessGroup, Group or None, not int"):
        layer(*arguments, mesh=3)


def test_children_get_the_options_of_their_parent():
    given = {name: value for name, value in GIVEN.items() if name != "init_std"}
    model: Any = sf.ParallelTransformer(CONFIG, **given)  # type: ignore[arg-type]
    block = model.model.layers[0]
    linear = [
        model.lm_head,
        block.self_attn.q_proj,
        block.self_attn.o_proj,
        block.mlp,
        block.mlp.c_fc,
        block.mlp.c_proj,
    ]
    for name in ("fuse_wgrad_accumulation", "overlap", "strict", "impl"):
        assert {getattr(module, name) for module in linear} == {GIVEN[name]}
    assert {module.impl for module in (block, model.model.norm, block.input_layernorm)} == {"reference"}
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    assert {module._params for module in model.modules() if hasattr(module, "_params")} == {"local"}


def test_options_are_frozen_and_resolve_the_group():
    shared = LayerOptions(sequence_parallel=True)
    assert shared.group is SINGLE
    assert shared.sequence_parallel is False  # one rank has no tokens to shard
    assert LayerOptions(mesh=Group(None, 0, 2, None), sequence_parallel=True).sequence_parallel
    assert LayerOptions(**shared.kwargs(LayerKwargs)) == shared
    with pytest.raises(dataclasses.FrozenInstanceError):
        shared.impl = "triton"  # type: ignore[misc]
