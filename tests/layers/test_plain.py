"""What is no plain folder of transformers is told by name, with the way to one, before anything of it is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
from foreign import foreign

from shardfuse import ParallelTransformer, TransformerConfig, load_hf, load_pretrained
from shardfuse.commands.opening import Opening, settled
from shardfuse.layers.hf.folders import check_claims, load_hf_weights, read_hf_config
from shardfuse.layers.hf.plain import check_plain, check_there
from shardfuse.serving.folder import open_folder
from shardfuse.serving.folder_options import FolderOptions
from shardfuse.testing import save_tiny_hf

WEIGHTS = "model.safetensors"


def _fill(path: Path) -> None:
    load_hf_weights(path, ParallelTransformer(TransformerConfig(num_layers=1)))


def _settle(path: Path) -> None:
    with settled(Opening(FolderOptions(path))):
        pass


def _serve(path: Path) -> None:
    open_folder(FolderOptions(path, device="cpu"))


READERS: dict[str, Callable[[Path], Any]] = {
    "load_hf": load_hf,
    "load_pretrained": load_pretrained,
    "load_hf_weights": _fill,
    "check_claims": check_claims,
    "open_folder": _serve,
    "settled": _settle,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: Any) -> Path:
    folder = save_tiny_hf(tmp_path_factory.mktemp("plain") / "sound")
    (folder / "checksums.json").unlink()
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A sound folder, of links, whose config may be replaced."""
    path = tmp_path / "folder"
    path.mkdir()
    for each in sound.iterdir():
        (path / each.name).symlink_to(each)
    return path


def _replace(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)


def _config(folder: Path, **entries: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    _replace(folder / "config.json", json.dumps(config | entries))


# --- quantised --------------------------------------------------------------------------------------------------------

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
BNB = {"load_in_4bit": True, "load_in_8bit": False}
UNPACK = r"unpack it with transformers 5: "
QUANTISED: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": (
        {"quantization_config": GPTQ},
        r"quantised by gptq \(quantization_config in config.json\); .*cannot unpack",
    ),
    "awq": ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"quantised by awq .*cannot unpack"),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, rf"by fp8 .*{UNPACK}.*FineGrainedFP8Config\(dequantize"),
    "fbgemm": ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, r"quantised by fbgemm_fp8"),
    "mxfp4": (
        {"quantization_config": {"quant_method": "mxfp4"}},
        rf"by mxfp4 .*{UNPACK}.*Mxfp4Config\(dequantize=True\)",
    ),
    "compressed": (
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
        rf"by compressed-tensors .*{UNPACK}.*CompressedTensorsConfig\(dequantize=True\)",
    ),
    "older compressed": ({"compression_config": {"format": "dense"}}, "quantised by compressed-tensors"),
    "bitsandbytes": (
        {"quantization_config": {"quant_method": "bitsandbytes", **BNB}},
        rf"by bitsandbytes .*{UNPACK}.*model.dequantize\(\)",
    ),
    "older bitsandbytes": ({"quantization_config": BNB}, "quantised by bitsandbytes"),
    "nested": ({"text_config": {"quantization_config": GPTQ}}, r"by gptq \(text_config.quantization_config in"),
    "a new one": ({"quantization_config": {"quant_method": "tomorrow"}}, "quantised by tomorrow"),
    "mlx": (
        {"quantization": {"group_size": 64, "bits": 4}},
        r"a method that it does not name \(bits=4, group_size=64\)",
    ),
    "no object": ({"quantization_config": "gptq"}, "quantised by a method that it does not name"),
}
BESIDE = {
    "quantize_config.json": ({"bits": 4, "group_size": 128}, "gptq"),
    "quant_config.json": ({"w_bit": 4, "q_group_size": 128, "zero_point": True}, "awq"),
    "hf_quant_config.json": ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}, "FP8"),
}


@pytest.mark.parametrize("reader", [*READERS, "read_hf_config"])
@pytest.mark.parametrize("case", QUANTISED)
def test_a_quantised_folder_is_told_by_its_method(folder: Path, case: str, reader: str):
    entries, says = QUANTISED[case]
    _config(folder, **entries)
    for path in folder.glob("tokenizer*"):
        path.unlink()  # the tokenizer is not what stops it
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).write_text("nobody reads this")
    with pytest.raises(ValueError, match=says):
        (READERS | {"read_hf_config": read_hf_config})[reader](folder)


@pytest.mark.parametrize("name", BESIDE)
def test_settings_beside_the_config_count_as_well(folder: Path, name: str):
    settings, method = BESIDE[name]
    (folder / name).write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=rf"quantised by {method} .*\({name}\)"):
        load_hf(folder)


def test_what_only_looks_quantised_is_loaded(folder: Path):
    """Of transformers.js, of a model that was unpacked, and what no JSON parser reads."""
    (folder / "quantize_config.json").write_text('{"modes": ["fp16", "q8"], "per_channel": true}')
    (folder / "quant_config.json").write_text("{")
    _config(folder, quantization_config=None, text_config=None, compression_config={})
    load_hf(folder)
    unpacked = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}
    _config(folder, quantization_config=unpacked)
    load_hf(folder)
    load_pretrained(folder)


def _as(dtype: torch.dtype, suffix: str = "") -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = {name: value.to(dtype) if "_proj.weight" in name else value for name, value in tensors.items()}
        scales = {f"{name}{suffix}": torch.ones(1) for name in own if suffix and "_proj.weight" in name}
        return own | scales

    return changed


STORED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str]] = {
    "fp8": (
        _as(torch.float8_e4m3fn),
        r"_proj\.weight is stored as F8_E4M3, as in a quantised model, and config.json has",
    ),
    "other fp8": (_as(torch.float8_e5m2), r"_proj\.weight is stored as F8_E5M2"),
    "int8": (_as(torch.int8), r"_proj\.weight is stored as I8"),
    "bytes": (_as(torch.uint8), r"_proj\.weight is stored as U8"),
    "with scales": (
        _as(torch.float8_e4m3fn, "_scale_inv"),
        r"weight_scale_inv \(F32\) belongs to a model quantised by fp8",
    ),
    "bitsandbytes": (_as(torch.uint8, ".absmax"), r"absmax \(F32\) belongs to a model quantised by bitsandbytes"),
}


@pytest.mark.parametrize("reader", ["load_hf", "load_pretrained", "open_folder"])
@pytest.mark.parametrize("case", STORED)
def test_weights_without_scales_are_refused(folder: Path, case: str, reader: str):
    """Nothing but the tensors says that the model is quantised."""
    change, says = STORED[case]
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    save_file(change(tensors), folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match=says):
        READERS[reader](folder)


@pytest.mark.parametrize("kind", ["mixtral", "gpt2"])
def test_weights_that_a_conversion_merges_need_scales_too(tmp_path: Path, kind: str):
    foreign(kind).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    name = next(name for name in tensors if "experts" in name or "c_attn.weight" in name)
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name} is stored as F8_E4M3"):
        load_pretrained(tmp_path)


# --- other formats ----------------------------------------------------------------------------------------------------

ADAPTER = json.dumps({"base_model_name_or_path": "org/base", "peft_type": "LORA"})
GGUF = (
    r"from_pretrained\('\S+', gguf_file='m\.gguf', quantization_config=GgufConfig\(dequantize=True\)\)\.save_pretrained"
)
# The files of a folder, and what is said; a name that ends in / is a folder.
WITHOUT_CONFIG: dict[str, tuple[dict[str, str], str]] = {
    "gguf": ({"m.gguf": "GGUF"}, rf"config\.json: no such file; m\.gguf is a GGUF file.*{GGUF}"),
    "gguf in capitals": ({"M.GGUF": "GGUF"}, r"config\.json: no such file; M\.GGUF is a GGUF file"),
    "adapter": (
        {"adapter_config.json": ADAPTER, "adapter_model.safetensors": ""},
        r"a PEFT adapter, .* merge it into org/base: .*merge_and_unload\(\)",
    ),
    "mistral": ({"params.json": "{}", "consolidated.safetensors": ""}, r"Mistral's own format"),
    "meta": ({"params.json": "{}", "consolidated.00.pth": ""}, r"Meta's own format of Llama \(consolidated\.00\.pth\)"),
    "onnx": ({"model.onnx": ""}, r"it looks like ONNX \(model\.onnx\)"),
    "torch": ({"pytorch_model.bin": ""}, r"pickled weights of PyTorch"),
    "diffusers": ({"model_index.json": "{}"}, r"a pipeline of diffusers"),
    "cache": ({"refs/": "", "snapshots/": ""}, r"a repository in the cache .* below its snapshots/"),
    "checkpoint": ({"checkpoint.json": "{}"}, r"a checkpoint of shardfuse .*load_checkpoint"),
    "one level up": ({"step-5/": "", "step-5/config.json": "{}"}, r"step-5 has one: give that folder"),
    "weights alone": ({WEIGHTS: ""}, r"it holds model\.safetensors and no config\.json"),
    "nothing": ({}, r"config\.json: no such file; a model folder holds config\.json"),
}
WITH_CONFIG: dict[str, tuple[dict[str, str], str]] = {
    "gguf": ({"m.gguf": "GGUF"}, rf"neither model\.safetensors nor .*; m\.gguf is a GGUF file.*{GGUF}"),
    "torch": (
        {"pytorch_model-00001-of-00002.bin": "", "pytorch_model.bin.index.json": "{}"},
        r"pickled weights of PyTorch .*from_pretrained\(folder\)\.save_pretrained\(other\)",
    ),
    "onnx": ({"onnx/": "", "onnx/model.onnx": ""}, r"it looks like ONNX"),
    "tensorflow": ({"tf_model.h5": ""}, r"weights of TensorFlow"),
    "flax": ({"flax_model.msgpack": ""}, r"weights of Flax"),
    "no index": (
        {"model-00001-of-00002.safetensors": ""},
        r"it holds model-00001-of-00002\.safetensors and no model\.safetensors\.index\.json",
    ),
    "nothing": ({}, r"neither model\.safetensors nor model\.safetensors\.index\.json is there; a model folder holds"),
}


def _made(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("reader", [*READERS, "read_hf_config"])
@pytest.mark.parametrize("case", WITHOUT_CONFIG)
def test_a_folder_without_config_is_told_by_what_it_has(tmp_path: Path, case: str, reader: str):
    files, says = WITHOUT_CONFIG[case]
    with pytest.raises(FileNotFoundError, match=says):
        (READERS | {"read_hf_config": read_hf_config})[reader](_made(tmp_path / "folder", files))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("case", WITH_CONFIG)
def test_a_folder_without_its_weights_is_told_by_what_it_has(sound: Path, tmp_path: Path, case: str, reader: str):
    files, says = WITH_CONFIG[case]
    config = {"config.json": (sound / "config.json").read_text()}
    with pytest.raises(FileNotFoundError, match=says):
        READERS[reader](_made(tmp_path / "folder", files | config))


def test_an_adapter_beside_weights_is_not_left_out(folder: Path):
    (folder / "adapter_config.json").write_text(ADAPTER)
    for read in READERS.values():
        with pytest.raises(
            ValueError, match=r"a PEFT adapter \(adapter_config.json\) beside a model's weights; merge it"
        ):
            read(folder)


@pytest.mark.parametrize("reader", [*READERS, "read_hf_config"])
@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("m.gguf", "", rf"a GGUF file, the format of llama\.cpp; .*{GGUF}.*AutoTokenizer"),
        ("M.GGUF", "", "a GGUF file"),
        ("blob", "GGUF and more", "a GGUF file"),
        (WEIGHTS, "", r"a file, and a model is a folder with config\.json"),
    ],
)
def test_a_file_is_told_by_what_it_is(tmp_path: Path, name: str, text: str, says: str, reader: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=says):
        (READERS | {"read_hf_config": read_hf_config})[reader](tmp_path / name)


def test_a_config_alone_is_enough_to_build_a_model(sound: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text((sound / "config.json").read_text())
    assert read_hf_config(tmp_path) == read_hf_config(sound)


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", READERS)
def test_a_path_that_is_not_there_says_what_is(tmp_path: Path, reader: str):
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "a\n\x1b[2J").mkdir()
    for wrong, says in (
        ("smollm-135m", f"did you mean {tmp_path / 'smollm2-135m'}?"),
        ("other/thing", f"{tmp_path} holds 'a\\n\\x1b[2J', smollm2-135m"),
        ("smollm2-135m/x", f"{tmp_path / 'smollm2-135m'} holds no folder"),
    ):
        with pytest.raises(FileNotFoundError) as refused:
            READERS[reader](tmp_path / wrong)
        assert str(refused.value).startswith(f"{tmp_path / wrong}: no such folder: expected config.json")
        assert str(refused.value).endswith(says)


def test_paths_that_are_meant_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("gone")
    monkeypatch.setenv("HOME", "/home/me")
    for wrong, says in (
        ("link", "it is a link to gone, which does not exist"),
        ("~/model", "~ is a shell's short form: give /home/me/model"),
        ("../nobody/there", "holds "),  # no name of the Hub
    ):
        with pytest.raises(FileNotFoundError, match=r"no such folder: expected .*") as refused:
            check_there(wrong)
        assert says in str(refused.value)
        assert "hf download" not in str(refused.value)


def test_a_folder_without_anything_known_says_what_it_holds(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"and this one holds no file$"):
        check_plain(tmp_path)
    for number in range(11):
        (tmp_path / f"{number:02}.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"and this one holds 00.txt, .*, 07.txt and 3 more$"):
        check_plain(tmp_path)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="a system without advice on files")
def test_weights_are_read_ahead(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A command asks the system for them before it imports torch; what is no file, and no weights, is left alone."""
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda file, *_: asked.append((os.readlink(f"/proc/self/fd/{file}"), _[-1]))
    )
    os.mkfifo(folder / "model-fifo.safetensors")
    (folder / "consolidated.safetensors").touch()
    _settle(folder)
    assert asked == [(str((folder / WEIGHTS).resolve()), os.POSIX_FADV_WILLNEED)]
