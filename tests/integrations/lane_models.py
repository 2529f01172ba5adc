"""transformers' own tests of its models, on models that are fused as they are built: they pass where stock ones pass.

    python lane_models.py FOLDER [--only llama] [--write]

Run by ``make test-models``. FOLDER holds ``tests/`` of transformers' source distribution, whose classes of tests every
model of theirs shares, and the packages that these need (``make`` fills it). Each architecture has small models of its
base class and of one with a head. A plug-in of pytest has every model fuse itself at the end of its ``__init__``: on
the meta device, within ``from_pretrained``, before and after casts, copies, checkpoints, adapters and compilation.

Every test runs twice, stock and fused. It fails the lane if its outcome differs, or if what is committed in
``lane_models.json`` differs: the tests that passed and were skipped, those that fail for a stock model as well, and how
many modules were fused.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

RECORD = Path(__file__).with_suffix(".json")
ARCHITECTURES = {
    "llama": ("LlamaModel", "LlamaForCausalLM"),
    "qwen3": ("Qwen3Model", "Qwen3ForCausalLM"),
    "gemma3_text": ("Gemma3TextModel", "Gemma3ForCausalLM"),
    "phi3": ("Phi3Model", "Phi3ForCausalLM"),
    "gpt2": ("GPT2Model", "GPT2LMHeadModel"),
    "opt": ("OPTModel", "OPTForCausalLM"),
    "falcon": ("FalconModel", "FalconForCausalLM"),
    "mistral": ("MistralModel", "MistralForCausalLM"),
    "cohere": ("CohereModel", "CohereForCausalLM"),
    "gpt_neox": ("GPTNeoXModel", "GPTNeoXForCausalLM"),
    "bert": ("BertModel", "BertForMaskedLM"),
    "vit": ("ViTModel", "ViTForImageClassification"),
}
IMAGE, PATCH = 16, 8
# Modules of their repository that the distribution leaves out, and the classes that its tests inherit from there.
LEFT_OUT = {"exporters/test_export.py": "ExportTesterMixin", "generation/test_utils.py": "GenerationTesterMixin"}


class Tester:
    """What their tests ask for a model's configuration and inputs."""

    batch_size, seq_length, is_training = 3, 7, True
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4
    image_size, patch_size, num_masks = IMAGE, PATCH, 1

    def __init__(self, kind: str) -> None:
        self.kind = kind
        if kind == "vit":
            self.mask_length = (IMAGE // PATCH) ** 2
            self.seq_length = self.mask_length + 1

    def get_config(self) -> Any:
        from foreign import OWN, sizes_of
        from transformers import CONFIG_MAPPING

        of_images = {"image_size": IMAGE, "patch_size": PATCH} if self.kind == "vit" else {}
        return sizes_of(CONFIG_MAPPING[self.kind], **OWN.get(self.kind, {}), **of_images)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        config = self.get_config()
        if self.kind == "vit":
            return config, {"pixel_values": torch.randn(self.batch_size, 3, IMAGE, IMAGE)}
        tokens = torch.randint(1, config.vocab_size, (self.batch_size, self.seq_length))
        return config, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


class Plugin:
    """Fuses every model as it is built, if asked, and keeps the outcome of each test."""

    def __init__(self, fused: bool) -> None:
        self.outcomes: dict[str, str] = {}
        self.modules: collections.Counter[str] = collections.Counter()
        if fused:
            self._fuse_all()

    def _fuse_all(self) -> None:
        import transformers

        from shardfuse.layers.fuse import Fused, fuse

        finish = transformers.PreTrainedModel.post_init

        def post_init(model: Any, *args: Any, **kwargs: Any) -> None:
            finish(model, *args, **kwargs)
            fuse(model)
            found = sum(isinstance(module, Fused) for module in model.modules())
            assert found, f"nothing was fused in a {type(model).__name__}"
            self.modules[type(model).__name__] = max(found, self.modules[type(model).__name__])

        transformers.PreTrainedModel.post_init = post_init

    def pytest_runtest_logreport(self, report: Any) -> None:
        if type(report).__name__ == "TestReport" and (report.when == "call" or report.outcome != "passed"):
            self.outcomes[report.nodeid.rpartition("::")[2]] = report.outcome


def case(kind: str) -> type[unittest.TestCase]:
    """Their tests, of the classes of one architecture."""
    import transformers
    from tests.test_modeling_common import ModelTesterMixin  # type: ignore[import-not-found]

    def set_up(self: Any) -> None:
        torch.manual_seed(0)
        self.model_tester = Tester(kind)

    classes = tuple(getattr(transformers, name) for name in ARCHITECTURES[kind])
    members = {"setUp": set_up, "all_model_classes": classes, "__module__": __name__}
    # Whether their own class of the same name inherits from another one.
    members["test_generation_tester_mixin_inheritance"] = None
    if kind == "vit":  # its embeddings are of patches
        members |= {"test_resize_embeddings": False, "test_model_get_set_embeddings": None}
    return type(f"Test{classes[0].__name__}", (ModelTesterMixin, unittest.TestCase), members)


def run(kind: str, fused: bool) -> dict[str, Any]:
    """In this process: the outcome of every test, and how many modules of each class were fused."""
    import pytest

    plugin = Plugin(fused)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "test_one.py"
        file.write_text(f"import lane_models\nTests = lane_models.case({kind!r})\n")
        options = ["-q", "-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider", "-W", "ignore", str(file)]
        pytest.main(options, plugins=[plugin])
    return {"outcomes": plugin.outcomes, "modules": dict(sorted(plugin.modules.items()))}


def apart(folder: Path, kind: str, fused: bool) -> dict[str, Any]:
    """:func:`run` in a process of its own."""
    paths = (Path(__file__).parent, folder, folder / "lib", *filter(None, [os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder), "--run", kind, *(["--fused"] if fused else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"said": done.stdout}


def compared(folder: Path, kind: str) -> tuple[dict[str, Any], list[str]]:
    """What is committed of an architecture, and the tests that fused models take otherwise."""
    with ThreadPoolExecutor(2) as both:
        stock, fused = both.map(lambda fused: apart(folder, kind, fused), (False, True))
    theirs, ours = stock["outcomes"], fused["outcomes"]
    wrong = [
        f"{name}: {theirs.get(name)} stock, {ours.get(name)} fused"
        for name in theirs | ours
        if theirs.get(name) != ours.get(name)
    ]
    if wrong:
        print(fused["said"][-8000:])
    counts = collections.Counter(ours.values())
    row = {
        "passed": counts["passed"],
        "skipped": counts["skipped"],
        "fail for stock models, too": sorted(name for name, outcome in theirs.items() if outcome == "failed"),
        "fused modules": fused["modules"],
    }
    return row, wrong


def prepare(folder: Path) -> None:
    """Add to ``tests/`` of the source distribution what it leaves out."""
    for path, name in LEFT_OUT.items():
        file = folder / "tests" / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"class {name}:\n    pass\n")
        (file.parent / "__init__.py").touch()
    (folder / "tests" / "__init__.py").touch()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=ARCHITECTURES)
    parser.add_argument("--write", action="store_true", help="commit what is found")
    parser.add_argument("--run", choices=ARCHITECTURES, help=argparse.SUPPRESS)
    parser.add_argument("--fused", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print("\n" + json.dumps(run(options.run, options.fused)))
        return 0
    prepare(options.folder)
    kinds = [options.only] if options.only else list(ARCHITECTURES)
    found: dict[str, Any] = {"transformers": importlib.metadata.version("transformers")}
    red = False
    for kind in kinds:
        found[kind], wrong = compared(options.folder, kind)
        print(
            f"{kind}: {found[kind]['passed']} passed, {found[kind]['skipped']} skipped", *wrong, sep="\n  ", flush=True
        )
        red |= bool(wrong)
    expected = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if options.write:
        expected |= found
        RECORD.write_text(json.dumps(expected, indent=2) + "\n")
    for name, value in found.items():
        if value != expected.get(name):
            print(f"{name}: found {value}, and {RECORD.name} has {expected.get(name)}")
            red = True
    return int(red)


if __name__ == "__main__":
    sys.exit(main())
