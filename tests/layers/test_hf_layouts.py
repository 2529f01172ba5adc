"""Folders of transformers, to and from models that are spread over data-parallel ranks and pipeline stages."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import assert_same_model

from shardfuse import ParallelTransformer, TransformerConfig
from shardfuse.layers.hf.folders import export_hf, load_hf, load_hf_weights, read_hf_config
from shardfuse.parallel.core.mesh import SINGLE
from shardfuse.parallel.core.rendezvous import init_mesh
from shardfuse.parallel.parallelize import parallelize

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_positions": 64,
}
CONFIGS = {
    "gated-tied": TransformerConfig(style="gated", tie_embeddings=True, **SIZES),
    "gelu": TransformerConfig(style="gelu", **SIZES),
}
TOKENS = torch.arange(14).view(2, 7) * 5 % 40


def _saved(style: str, folder: Path) -> ParallelTransformer:
    model = ParallelTransformer(CONFIGS[style])
    model.init_weights(3)
    with torch.no_grad():
        for param in model.parameters():  # biases and norms start as constants, which would hide mistakes
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())) * 0.1)
    export_hf(model, folder)
    return model


def _equal(folder: Path, model: ParallelTransformer) -> bool:
    theirs = load_hf(folder).state_dict()
    return all(torch.equal(theirs[name], value) for name, value in model.state_dict().items())


# Degrees of the mesh and options of parallelize; the files that weights go into.
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any], int]] = {
    "zero-3": ({"dp": 2, "tp": 2}, {"zero": 3}, 1),
    "hybrid": ({"dp_replicate": 2, "dp": 2}, {"zero": 1}, 1),
    "pipeline": ({"pp": 2, "tp": 2}, {"schedule": "1f1b"}, 2),
    "v-pipeline": ({"pp": 2, "dp": 2}, {"schedule": "zbv", "zero": 1}, 2),
}


def _through(rank: int, world: int, layout: str, source: Path, target: Path) -> None:
    """Read a folder in this layout, and write it again."""
    degrees, options, _ = LAYOUTS[layout]
    mesh = init_mesh(**degrees, device_type="cpu")
    model = ParallelTransformer(read_hf_config(source), mesh=mesh, device="meta")
    spread: Any = parallelize(model, mesh, **options)
    load_hf_weights(source, spread.module)
    export_hf(spread.module, target)


@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_comes_back_from_every_layout(ranks: Any, tmp_path: Path, layout: str) -> None:
    files = LAYOUTS[layout][2]
    for style in CONFIGS if layout == "pipeline" else ["gated-tied"]:
        source, target = tmp_path / style / "source", tmp_path / style / "target"
        model = _saved(style, source)
        ranks(4, _through, layout, source, target)
        assert _equal(target, model)
        parts = [f"model-0000{i + 1}-of-0000{files}.safetensors" for i in range(files)]
        weights = ["model.safetensors"] if files == 1 else [*parts, "model.safetensors.index.json"]
        assert sorted(os.listdir(target)) == sorted(["checksums.json", "config.json", *weights])


@pytest.mark.ranks
def test_transformers_reads_a_pipelines_folder(ranks: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
    model = _saved("gated-tied", tmp_path / "source")
    ranks(4, _through, "pipeline", tmp_path / "source", tmp_path / "target")
    from_one, from_parts = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("source", "target")
    )
    assert_same_model(from_one, from_parts, TOKENS)
    index = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(param.nbytes for param in model.parameters())


@pytest.mark.ranks
def test_an_export_takes_the_place_of_one_with_other_files(ranks: Any, tmp_path: Path) -> None:
    """What is left of the older one would be read in place of the newer."""
    model = _saved("gated-tied", tmp_path / "source")
    target = tmp_path / "target"
    _saved("gelu", target)
    (target / "tokenizer.json").write_text("{}")
    ranks(4, _through, "pipeline", tmp_path / "source", target)
    assert not (target / "model.safetensors").exists()
    assert _equal(target, model)
    export_hf(model, target)
    assert sorted(os.listdir(target)) == ["checksums.json", "config.json", "model.safetensors", "tokenizer.json"]


def _alone_in_company(rank: int, world: int, folder: Path) -> bool:
    """A model that one rank alone has."""
    if rank == 0:
        model = _saved_alone(folder)
        return _equal(folder, model)
    return True


def _saved_alone(folder: Path) -> ParallelTransformer:
    model = ParallelTransformer(CONFIGS["gelu"])
    export_hf(model, folder, group=SINGLE)
    load_hf_weights(folder, model, group=SINGLE)
    return model


@pytest.mark.ranks
def test_a_rank_may_export_what_it_has_alone(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, _alone_in_company, tmp_path) == [True, True]


def test_a_model_that_the_weights_do_not_fit_is_refused(tmp_path: Path) -> None:
    _saved("gated-tied", tmp_path)
    other = TransformerConfig(style="gated", tie_embeddings=True, norm_eps=0.1, **SIZES)
    with pytest.raises(ValueError, match=r"config.json: norm_eps is 1e-05, and 0.1 in the model; build the model from"):
        load_hf_weights(tmp_path, ParallelTransformer(other))
    with pytest.raises(ValueError, match="is on the meta device"):
        load_hf_weights(tmp_path, ParallelTransformer(CONFIGS["gated-tied"], device="meta"))
    with pytest.raises(FileNotFoundError, match=r"no such folder: expected config.json and weights"):
        load_hf_weights(tmp_path / "nothing", ParallelTransformer(CONFIGS["gated-tied"]))


def test_an_index_may_not_point_outside(tmp_path: Path) -> None:
    _saved("gelu", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "checksums.json").unlink()
    index = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index.json: it points to '../model.safetensors', outside the folder"):
        load_hf(tmp_path)
