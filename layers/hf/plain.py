"""What a path is that is no plain folder of transformers: a quantised model, a GGUF file, an adapter, another format.

A plain folder holds ``config.json`` and a model's own tensors in safetensors files. Everything else that people have is
told by name here, before anything of it is read, with the way to a plain folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...kernels.runtime.names import nearest
from .config import CONFIG, INDEX, WEIGHTS

_LISTED = 8  # names in a message
_FLOATS = ("F64", "F32", "F16", "BF16")
# Methods whose config class can unpack the weights while transformers loads them, and those that unpack a loaded model.
_UNPACK_LOADING = {
    "compressed-tensors": "CompressedTensorsConfig",
    "fp8": "FineGrainedFP8Config",
    "metal": "MetalConfig",
    "mxfp4": "Mxfp4Config",
    "mxfp8": "FineGrainedFP8Config",
}
_UNPACK_LOADED = ("bitsandbytes", "higgs")
# Older tools wrote their settings beside config.json. Other programs use the first name too, with other keys.
_BESIDE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_SETTINGS = ("bits", "w_bit", "q_group_size", "quant_method", "quant_algo")
# The last part of the names of tensors that only quantised models have.
_PACKED = {
    **dict.fromkeys(("qweight", "qzeros", "g_idx"), "GPTQ or AWQ"),
    **dict.fromkeys(("absmax", "quant_map", "SCB"), "bitsandbytes"),
    **dict.fromkeys(("weight_packed", "weight_zero_point"), "compressed-tensors"),
    **dict.fromkeys(("weight_scale", "weight_scale_inv"), "fp8 or compressed-tensors"),
}
_ADAPTER = "adapter_config.json"
_PYTORCH = "pickled weights of PyTorch (pytorch_model*.bin)"
_AS_SAFETENSORS = (
    "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other) of transformers writes them as safetensors"
)
# Files of other formats: pattern, what the folder then is, and the way to a plain one.
_FORMATS = (
    (_ADAPTER, "a PEFT adapter, which holds what changes in another model", None),
    ("*.gguf", "GGUF, the format of llama.cpp", None),
    (
        "checkpoint.json",
        "a checkpoint of shardfuse",
        "load_checkpoint reads it into a model, which export_hf or save_pretrained writes as a folder",
    ),
    ("model_index.json", "a pipeline of diffusers", "expected a causal language model"),
    ("snapshots", "a repository in the cache of the Hugging Face Hub", "give the folder below its snapshots/"),
    ("consolidated*.pth", "Meta's own format of Llama", "take the repository of the model that transformers loads"),
    (
        "consolidated*.safetensors",
        "Mistral's own format (params.json, consolidated.safetensors)",
        "take the files of the same repository that transformers loads: config.json and model*.safetensors",
    ),
    ("pytorch_model*.bin", _PYTORCH, _AS_SAFETENSORS),
    ("*.onnx", "ONNX", "take the repository of the model that it was made from"),
    ("onnx", "ONNX", "take the repository of the model that it was made from"),
    ("tf_model*.h5", "weights of TensorFlow", "take the repository of the model that it was made from"),
    ("flax_model*.msgpack", "weights of Flax", "take the repository of the model that it was made from"),
    ("*.npz", "arrays of NumPy or MLX", "take the repository of the model that it was made from"),
    *((pattern, "a file of torch.save", "load it with the program that wrote it") for pattern in ("*.pt", "*.pth")),
    ("*.nemo", "an archive of NeMo", "convert it with NeMo's script for Hugging Face"),
    (".metadata", "a checkpoint of torch.distributed", "load it with the program that wrote it, and save the model"),
)


def check_plain(path: str | os.PathLike[str], *, weights: bool = True) -> None:
    """Raise an error that says what ``path`` is and how to make a plain folder of it, unless it is one.

    Raises ValueError for a quantised model, a model file, an adapter beside a model; FileNotFoundError for a folder
    without ``config.json`` or, with ``weights``, without weights in safetensors. A folder that is missing, and files
    that are damaged, are left to the reader.
    """
    path = Path(path)
    if path.is_file():
        raise ValueError(f"{path}: {_of_file(path)}")
    if not path.is_dir():
        return
    if not (path / CONFIG).exists():
        raise FileNotFoundError(f"{path / CONFIG}: no such file; {_of_folder(path)}")
    there = any((path / name).exists() for name in (WEIGHTS, INDEX))
    if (path / _ADAPTER).exists() and (there or weights):
        raise ValueError(f"{path}: {_of_adapter(path, there)}")
    if (found := _quantised(path)) is not None:
        raise ValueError(f"{path}: {found}")
    if weights and not there:
        raise FileNotFoundError(f"{path}: neither {WEIGHTS} nor {INDEX} is there; {_of_folder(path)}")


def check_there(path: str | os.PathLike[str], needed: str = f"{CONFIG}, weights and a tokenizer") -> None:
    """FileNotFoundError for a path that does not exist, with what is there instead."""
    path = Path(path)
    if path.exists():
        return
    given, there = path, path.absolute()
    while not there.exists():
        given, there = there, there.parent
    names = sorted(each.name for each in there.iterdir() if each.is_dir()) if there.is_dir() else []
    if path.is_symlink():
        hint = f"it is a link to {os.readlink(path)}, which does not exist"
    elif path.parts[:1] and path.parts[0].startswith("~"):
        hint = f"~ is a shell's short form: give {path.expanduser()}"
    elif (close := nearest(given.name, names)) is not None:
        hint = f"did you mean {there / close}?"
    elif re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path)):
        hint = (
            f"nothing is downloaded here; for the model of this name on the Hugging Face Hub: hf download {path} "
            f"--local-dir {path.name}, then load {path.name!r}"
        )
    else:
        hint = f"{there} holds {_listed(names, 'folder')}"
    raise FileNotFoundError(f"{path}: no such folder: expected {needed}; {hint}")


def check_dtypes(dtypes: Mapping[str, str], parameters: Collection[str]) -> None:
    """Raise ValueError for tensors of a quantised model, whose config does not say that it is one.

    ``dtypes`` are safetensors' own, by name; ``parameters`` the names of those that a model takes as floating-point
    numbers. Packed and 8-bit ones mean nothing without their scales.
    """
    missing = f"and {CONFIG} has no quantization_config"
    for name, dtype in dtypes.items():
        if (method := _PACKED.get(name.rpartition(".")[2])) is not None:
            raise ValueError(f"{name} ({dtype}) belongs to a model quantised by {method}, {missing}; {_origin()}")
    for name in parameters:
        if (dtype := dtypes[name]) not in _FLOATS:
            raise ValueError(
                f"{name} is stored as {dtype}, as in a quantised model, {missing} that tells its scales: expected "
                f"{', '.join(_FLOATS)}; {_origin()}"
            )


def _quantised(folder: Path) -> str | None:
    config = json_object(folder / CONFIG)
    for inside, part in (("", config), ("text_config.", config.get("text_config"))):
        for key in ("quantization_config", "compression_config", "quantization"):
            given = part.get(key) if isinstance(part, Mapping) else None
            if given and not _of_nothing(given):
                method = _method(given, *(["compressed-tensors"] if key == "compression_config" else []))
                return f"quantised by {method} ({inside}{key} in {CONFIG}); {_unpacking(method)}"
    for name in _BESIDE:
        given = json_object(folder / name)
        given = given.get("quantization", given)  # hf_quant_config.json
        if isinstance(given, Mapping) and any(given.get(key) for key in _SETTINGS):
            method = _method(given, {"quantize_config.json": "gptq", "quant_config.json": "awq"}.get(name, "modelopt"))
            return f"quantised by {method} ({name}); {_unpacking(method)}"
    return None


def _of_nothing(given: Any) -> bool:
    """Whether it is bitsandbytes' config for weights as they are."""
    if not isinstance(given, Mapping) or given.get("quant_method") != "bitsandbytes":
        return False
    return given.get("load_in_4bit") is False and given.get("load_in_8bit") is False


def _method(given: Any, otherwise: str = "a method that it does not name") -> str:
    if not isinstance(given, Mapping):
        return otherwise
    if given.get("load_in_4bit") or given.get("load_in_8bit"):  # of bitsandbytes, before it wrote quant_method
        return "bitsandbytes"
    if (method := given.get("quant_method") or given.get("quant_algo")) is not None:
        return str(method)
    sizes = [f"{key}={given[key]}" for key in ("bits", "group_size") if key in given]
    return f"{otherwise} ({', '.join(sizes)})" if sizes else otherwise


def _unpacking(method: str) -> str:
    """The ways of transformers 5 from a quantised folder to a plain one."""
    begin, end = "AutoModelForCausalLM.from_pretrained(folder", 'save_pretrained("plain", save_original_format=False)'
    if (kind := _UNPACK_LOADING.get(method)) is not None:
        how = f"{begin}, quantization_config={kind}(dequantize=True)).{end}"
    elif method in _UNPACK_LOADED:
        how = f"model = {begin}), model.dequantize(), model.{end}"
    else:
        return f"{_origin()} (transformers 5 cannot unpack this method)"
    return f"{_origin()}, or unpack it with transformers 5: {how}"


def _origin() -> str:
    return "only plain weights are loaded here: take the model that it was quantised from"


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        if path.suffix.lower() == ".gguf" or file.read(4) == b"GGUF":
            return _of_gguf(path)
    return (
        f"a file, and a model is a folder with {CONFIG}, weights in safetensors and a tokenizer: give the folder, "
        f"perhaps {path.absolute().parent}"
    )


def _of_gguf(path: Path) -> str:
    given = f"{str(path.parent)!r}, gguf_file={path.name!r}"
    return (
        "a GGUF file, the format of llama.cpp; transformers makes a folder of it (pip install gguf accelerate): "
        f"AutoModelForCausalLM.from_pretrained({given}, quantization_config=GgufConfig(dequantize=True))"
        f'.save_pretrained("folder"), and AutoTokenizer.from_pretrained({given}).save_pretrained("folder")'
    )


def _of_adapter(folder: Path, beside_weights: bool) -> str:
    base = json_object(folder / _ADAPTER).get("base_model_name_or_path") or "its base model"
    how = (
        f"merge it into {base}: PeftModel.from_pretrained(base, {str(folder)!r}).merge_and_unload()"
        '.save_pretrained("merged") of peft'
    )
    if beside_weights:
        return f"it holds a PEFT adapter ({_ADAPTER}) beside a model's weights; {how}, or delete it if that is done"
    return f"a PEFT adapter, which holds only what changes in another model; {how}"


def _of_folder(folder: Path) -> str:
    """What a folder without config or weights looks like, and what to do."""
    usual = f"a model folder holds {CONFIG}, {WEIGHTS} or {INDEX}, and a tokenizer"
    for pattern, what, how in _FORMATS:
        found = next(_found(folder, pattern), None)
        if found is None:
            continue
        if pattern == _ADAPTER:
            return f"it is {_of_adapter(folder, False)}"
        if pattern == "*.gguf":
            return f"{found.name} is {_of_gguf(found)}"
        return f"it looks like {what} ({found.name}): {how}"
    if (below := next((each.parent for each in _found(folder, f"*/{CONFIG}")), None)) is not None:
        return f"{below} has one: give that folder?"
    if (found := next(_found(folder, "*.safetensors"), None)) is not None:
        missing = CONFIG if not (folder / CONFIG).exists() else INDEX
        return f"it holds {found.name} and no {missing}: copy the whole folder again; {usual}"
    return f"{usual}, and this one holds {_listed(sorted(each.name for each in folder.iterdir()), 'file')}"


def _listed(names: Sequence[str], kind: str) -> str:
    """The names in a folder, the first of many."""
    shown = ", ".join(name if name.isprintable() else ascii(name) for name in names[:_LISTED]) or f"no {kind}"
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED:,} more"


def _found(folder: Path, pattern: str) -> Iterator[Path]:
    either_case = "".join(f"[{each}{each.upper()}]" if each.isalpha() else each for each in pattern)
    return iter(sorted(folder.glob(either_case)))


def json_object(path: Path) -> dict[str, Any]:
    """A JSON object in a file; {} if there is none, or one that its reader will refuse."""
    try:
        value = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
