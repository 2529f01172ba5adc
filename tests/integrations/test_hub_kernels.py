"""A build, loaded through Hugging Face's ``kernels`` and used by transformers: ``make test-hub``."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import batching_case
import pytest
import torch
from foreign import foreign

from shardfuse.integrations.conformance import models
from shardfuse.integrations.hub import build, layers

if importlib.util.find_spec("kernels") is None or importlib.util.find_spec("transformers") is None:
    pytest.skip("kernels is not installed: make test-hub", allow_module_level=True)

import kernels
from kernels import LocalLayerRepository, Mode

MODES = {"inference": Mode.INFERENCE, "training": Mode.TRAINING, "compiled": Mode.INFERENCE | Mode.TORCH_COMPILE}
REPOSITORY = "shardfuse/flash-paged"  # "flash": transformers makes no masks for it in continuous batching
LAYERS = 2  # of the models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kernel")
    build.write(build.build(), out)
    return out


@pytest.fixture(scope="module")
def kernel(folder: Path) -> ModuleType:
    return kernels.get_local_kernel(folder)


def _counts(kernel: ModuleType) -> Counter[tuple[str, str]]:
    return sys.modules[f"{kernel.__name__}.kernels.runtime.dispatch"].counts


@pytest.fixture
def kernelized(folder: Path) -> Iterator[Callable[..., Any]]:
    """``kernelized(mode, *names)``: a small Llama whose layers of these names are the build's, until the test ends.

    A function, as the rotation is one, is replaced in its module, for all models.
    """
    made: list[Any] = []

    def kernelize(mode: Mode, *names: str, **options: Any) -> Any:
        model = foreign("llama", **options)
        made.append(model)
        repositories = {name: {"cpu": {mode: LocalLayerRepository(folder, layer_name=name)}} for name in names}
        with kernels.use_kernel_mapping(repositories, inherit_mapping=False):
            return kernels.kernelize(model, mode=mode, device="cpu")

    yield kernelize
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        for model in made:
            kernels.kernelize(model, mode=Mode.INFERENCE, device="cpu")


def test_it_loads_under_its_id(kernel: ModuleType):
    built = build.build()
    assert kernel.__name__ == built.namespace
    (loaded,) = [each for each in kernels.get_loaded_kernels() if each.module is kernel]
    assert (str(loaded.metadata.name), loaded.metadata.version) == (build.NAME, build.VERSION)


@pytest.mark.parametrize("mode", MODES)
def test_norms_and_rotations_of_a_llama_are_replaced(mode: str, kernel: ModuleType, kernelized: Callable[..., Any]):
    tokens = torch.arange(12).view(2, 6)
    stock = foreign("llama")
    expected = stock(tokens, labels=tokens)
    _counts(kernel).clear()
    ours = kernelized(MODES[mode], "RMSNorm", "rotary_pos_emb")
    run = torch.compile(ours, backend="eager", fullgraph=True) if mode == "compiled" else ours
    found = run(tokens, labels=tokens)
    torch.testing.assert_close(found.logits, expected.logits)
    norm = kernel.layers.RMSNorm.forward
    replaced = [each for each in ours.modules() if getattr(each.forward, "__func__", None) is norm]
    assert len(replaced) == 2 * LAYERS + 1
    if mode != "compiled":  # what a graph runs is not counted
        assert _counts(kernel) == {("rms_norm", "reference"): 2 * LAYERS + 1, ("apply_rope", "reference"): LAYERS}
    if mode == "training":
        expected.loss.backward()
        found.loss.backward()
        for one, other in zip(ours.parameters(), stock.parameters()):
            torch.testing.assert_close(one.grad, other.grad)


def test_the_feed_forward_of_a_llama_is_replaced(
    kernel: ModuleType, kernelized: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    """transformers marks no module with this name; a user does."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    for name in ("kernel_layer_name", "kernel_condition"):
        monkeypatch.setattr(LlamaMLP, name, None, raising=False)  # taken away again
    kernels.replace_kernel_forward_from_hub(LlamaMLP, "SwiGLUMLP")
    tokens = torch.arange(12).view(2, 6)
    _counts(kernel).clear()
    ours = kernelized(Mode.INFERENCE, "SwiGLUMLP")
    torch.testing.assert_close(ours(tokens).logits, foreign("llama")(tokens).logits)
    assert sum(times for (op, _), times in _counts(kernel).items() if op == "gated_linear") == LAYERS
    with pytest.raises(ValueError, match="leave SwiGLUMLP out of this model's mapping"):
        kernelized(Mode.INFERENCE, "SwiGLUMLP", hidden_act="gelu")(tokens)


def test_every_layer_is_taken(folder: Path):
    for name in layers.__all__:
        assert LocalLayerRepository(folder, layer_name=name).load().__name__ == name


@pytest.mark.parametrize("architecture", ["llama", "mistral-window", "gemma2"])
def test_transformers_attends_with_it(
    architecture: str, folder: Path, kernel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Continuous batching gives the tokens of transformers' own generate, and every layer of every step was counted."""
    expected = models.write(architecture, tmp_path)
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPOSITORY}={folder}")
    model = batching_case.load(tmp_path)
    stock = model(torch.tensor(expected.prompts[:1])).logits if architecture != "gemma2" else None
    model.set_attn_implementation(REPOSITORY, allow_all_kernels=True)
    kernel.reset_stats()
    steps: list[int] = []
    watch = model.register_forward_pre_hook(lambda *_: steps.append(1))
    assert batching_case.generate(model, expected.prompts) == expected.tokens
    watch.remove()
    ran = kernel.stats("transformers")
    assert ran["attention"] == len(steps) * model.config.num_hidden_layers > 0
    assert ran["attention.reference"] == ran["attention"]
    tokens = torch.tensor(expected.prompts[:1])
    if stock is None:
        with pytest.raises(ValueError, match="softcap is given outside of continuous batching"):
            model(tokens)
    else:
        torch.testing.assert_close(model(tokens).logits, stock)
    assert kernel.stats("transformers") == ran  # outside of continuous batching SDPA runs
