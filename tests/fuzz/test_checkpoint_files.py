"""Mutated files of checkpoints and exports: a load gives the saved values, or an error that names file or field.

Damage leaves the checksums as they are, so it must be noticed. An attacker computes them anew: then a load may give
other values, of the right shapes and types, but it must not crash, hang, or change a class of the process.
"""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from checkpoint_case import Exploit, Net, adamw, sign, train
from fuzz import Fuzz
from torch.distributed.checkpoint import filesystem, metadata

from shardfuse import ParallelTransformer, TransformerConfig
from shardfuse.layers.hf.folders import export_hf, load_hf
from shardfuse.parallel.checkpoint import checked
from shardfuse.parallel.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from shardfuse.parallel.checkpoint.manager import Checkpointer
from shardfuse.parallel.core.mesh import SINGLE

pytestmark = [pytest.mark.nightly, pytest.mark.fuzz]

VALUES: list[Any] = [None, True, False, 0, 1, -1, 7, 1 << 31, 1 << 63, 1 << 70, 0.5, -0.0, 1e308, math.inf, math.nan]
VALUES += ["", "x", "\0", "..", "../x", "/dev/zero", "checkpoint.json", "float32", "qint8", "\ud800", "params", "lr"]
VALUES += [[], {}, [0], [[]], {"": 0}, [1 << 62, 1 << 62], ["x"], [{"list": []}], [None, None]]
CLASSES = (
    *(getattr(metadata, name) for name in (*metadata.__all__, "_MEM_FORMAT_ENCODING")),
    filesystem._StorageInfo,
    torch.Size,
    dict,
)


# --- mutations --------------------------------------------------------------------------------------------------------


def _flip(random: Random, folder: Path) -> str:
    path = _file(random, folder)
    data = bytearray(path.read_bytes())
    for _ in range(random.choice([1, 1, 2, 50])):
        if data:
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(data)
    return f"flip bits of {path.name}"


def _cut(random: Random, folder: Path) -> str:
    path = _file(random, folder)
    data = path.read_bytes()
    length = random.choice([0, 1, len(data) - 1, random.randrange(len(data) + 1)])
    path.write_bytes(data[: max(length, 0)])
    return f"cut {path.name} to {length}"


def _extend(random: Random, folder: Path) -> str:
    path = _file(random, folder)
    path.write_bytes(path.read_bytes() + random.randbytes(random.choice([1, 8, 4096])))
    return f"extend {path.name}"


def _swap(random: Random, folder: Path) -> str:
    one, other = _file(random, folder), _file(random, folder)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    return f"swap {one.name} and {other.name}"


def _remove(random: Random, folder: Path) -> str:
    path = _file(random, folder)
    path.unlink()
    return f"remove {path.name}"


def _replace(random: Random, folder: Path) -> str:
    path = _file(random, folder)
    path.unlink()
    kind = random.choice(["folder", "link", "nowhere", "pipe"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe" and path.suffix not in (".json", ".safetensors"):
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null" if kind == "link" else folder / "nowhere")
    return f"make {path.name} a {kind}"


def _craft(random: Random, folder: Path) -> str:
    path = _file(random, folder)
    crafted = [
        pickle.dumps(Exploit(folder / "pwned")),
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}Vpatched\nI1\nstb.",
        b"cbuiltins\ngetattr\n(cbuiltins\n__import__\nVos\ntR.",
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 50_000,
        b"1" * 10_000,
        b'"\\ud800"',
        b"\xff\xfe{\0}\0",
        b"null",
        b"[]",
        b"{}",
    ]
    number = random.randrange(len(crafted))
    path.write_bytes(crafted[number])
    return f"write the crafted content {number} to {path.name}"


def _edit(random: Random, folder: Path) -> str:
    """Change, delete, double, rename or move entries of a JSON file."""
    path = random.choice([path for path in _files(folder) if path.suffix == ".json"] or _files(folder))
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError):
        content = None  # an earlier mutation
    said: list[str] = []
    if not isinstance(content, dict | list) or not _places(content):
        return f"leave {path.name}"
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        holder, key = random.choice(_places(content))
        act = random.choice(["set", "set", "near", "delete", "double", "rename", "move", "nest"])
        said.append(f"{act} {key!r}")
        value = holder[key]
        if act == "set":
            holder[key] = copy.deepcopy(random.choice(VALUES))
        elif act == "near" and type(value) in (int, float):
            holder[key] = value + random.choice([-8, -1, 1, 4, 64])
        elif act == "near" and isinstance(value, str):
            holder[key] = value + random.choice(["x", ".", "\0"])
        elif act == "delete":
            del holder[key]
        elif act == "double" and isinstance(holder, list):
            holder.append(copy.deepcopy(value))
        elif act in ("double", "rename") and isinstance(holder, dict):
            holder[random.choice(["x", f"{key}x", "", "params"])] = copy.deepcopy(value)
            if act == "rename":
                holder.pop(key, None)
        elif act == "move":
            other, where = random.choice(_places(content))
            other[where] = copy.deepcopy(value)
        elif act == "nest":
            for _ in range(random.choice([1, 20, 100])):
                value = [value] if random.random() < 0.5 else {"x": value}
            holder[key] = value
        if not _places(content):
            break
        if json.dumps(content).count('"x"') > 300:  # Python itself refuses deeper nesting
            break
    path.write_text(json.dumps(content))
    return f"{', '.join(said)} in {path.name}"


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Every entry of a JSON document: its holder and its key."""
    found, waiting = [], [content]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())


def _file(random: Random, folder: Path) -> Path:
    return random.choice(_files(folder))


MUTATIONS: list[Callable[[Random, Path], str]]
MUTATIONS = [_flip, _cut, _extend, _swap, _remove, _replace, _craft, *[_edit] * 6]


def _mutate(random: Random, folder: Path) -> str:
    said = [random.choice(MUTATIONS)(random, folder)]
    while random.random() < 0.2 and _files(folder):
        said.append(random.choice(MUTATIONS)(random, folder))
    return "; ".join(said)


# --- verdicts ---------------------------------------------------------------------------------------------------------


def _classes() -> list[dict[str, Any]]:
    return [dict(vars(each)) for each in CLASSES]


def _refused(error: Exception, named: Path | str, what: str) -> None:
    """The error is of a kind that callers expect, and its message has ``named`` in it."""
    assert isinstance(error, ValueError | RuntimeError | OSError), (what, error)
    assert not isinstance(error, RecursionError | UnicodeError | NotImplementedError), (what, error)
    assert str(named) in str(error), (what, error)


# --- checkpoints ------------------------------------------------------------------------------------------------------


class _Position:
    """A state of plain data and a tensor."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


STATE = {"consumed": 7, 3: (1.5, None), "perm": [4, 2]}


def _training(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(seed=seed)
    optimizer = adamw(model, lr=10.0**-seed)
    train(model, optimizer, SINGLE, seed)
    return model, optimizer


def _everything(model: Net, optimizer: torch.optim.Optimizer, position: _Position, extra: Any) -> Any:
    """All that a load sets, in a form that compares equal bit for bit."""
    tensors = dict(model.state_dict())
    for name, param in model.named_parameters():
        tensors |= {f"{name}.{slot}": value for slot, value in optimizer.state.get(param, {}).items()}
    raw = {name: (value.dtype, tuple(value.shape), value.numpy().tobytes()) for name, value in tensors.items()}
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return raw, settings, [len(group["params"]) for group in optimizer.param_groups], repr(position.state), extra


def _form(everything: Any) -> Any:
    """What a crafted checkpoint cannot change: the model's names, dtypes and shapes, and the number of parameters."""
    raw, _, counts, _, _ = everything
    return {name: each[:2] for name, each in raw.items() if "." not in name}, counts


@pytest.mark.parametrize("crafted", [False, True], ids=["damaged", "crafted"])
def test_mutated_checkpoints(fuzz: Fuzz, tmp_path: Path, crafted: bool) -> None:
    model, optimizer = _training(2)
    save_checkpoint(tmp_path / "saved", model, optimizer, states={"at": _Position(STATE)}, extra={"step": 2, "a": [{}]})
    want = _everything(model, optimizer, _Position(STATE), {"step": 2, "a": [{}]})
    classes, folder = _classes(), tmp_path / "c"

    def check(number: int, random: Random) -> str:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "saved", folder)
        what = f"case {number}: {_mutate(random, folder)}"
        if crafted:
            what += _sign_checkpoint(folder)
        model, optimizer = _training(3)
        position = _Position()
        before = _everything(model, optimizer, position, None)
        try:
            extra = load_checkpoint(folder, model, optimizer, states={"at": position})
        except Exception as error:
            loaded = "refused"
            _refused(error, folder, what)
            assert _everything(model, optimizer, position, None) == before, what
        else:
            loaded = "loaded"
            got = _everything(model, optimizer, position, extra)
            if crafted:
                assert _form(got) == _form(want), what
            else:
                assert got == want, what
        assert _classes() == classes, what
        assert not (folder / "pwned").exists(), what
        return loaded

    fuzz.run(check)


def _sign_checkpoint(folder: Path) -> str:
    """Make the checksums right, where the files can still have any."""
    try:
        sign(folder)
    except Exception:
        return " (not signed)"
    return " (signed)"


def test_mutated_states(fuzz: Fuzz, tmp_path: Path) -> None:
    """The text of a packed state is crafted, and everything around it is right."""
    from shardfuse.parallel.checkpoint import plain
    from shardfuse.parallel.checkpoint.rng_state import unpack

    state = {**STATE, "t": torch.arange(6.0).view(2, 3), "b": b"x", "s": {1, 2}, "d": torch.float16}
    whole = plain.encode(state)
    end = 8 + int.from_bytes(whole[:8], "little")
    text, elements = whole[8:end], whole[end:]
    (tmp_path / "text").mkdir()

    def check(number: int, random: Random) -> str:
        (tmp_path / "text" / "state.json").write_bytes(text)
        what = f"case {number}: {random.choice([_flip, _cut, _extend, _edit, _edit, _edit])(random, tmp_path / 'text')}"
        changed = (tmp_path / "text" / "state.json").read_bytes()
        data = len(changed).to_bytes(8, "little") + changed + elements
        try:
            unpack("at", torch.frombuffer(bytearray(data), dtype=torch.uint8))
        except Exception as error:
            _refused(error, "the state of 'at' is not plain data", what)
            return "refused"
        return "loaded"

    fuzz.run(check)


def test_mutated_series(fuzz: Fuzz, tmp_path: Path) -> None:
    """A Checkpointer's folder of several checkpoints, one of them damaged."""
    with Checkpointer(tmp_path / "saved", keep=None) as run:
        for step in (1, 2, 3):
            run.save(step, Net(seed=step), extra={"step": step})

    def check(number: int, random: Random) -> str:
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "saved", folder)
        step = random.choice([1, 2, 3])
        what = f"case {number}: {_mutate(random, folder / f'step-{step:08d}')} of step {step}"
        model = Net(seed=9)
        with Checkpointer(folder) as run:
            try:
                resumed = run.load(model)
            except Exception as error:
                _refused(error, folder, what)
                assert step == 3, what
                return "refused"
            else:
                assert resumed is not None, what
                assert resumed.extra == {"step": 3}, what
                assert torch.equal(model.up, Net(seed=3).up), what
        return "loaded"

    fuzz.run(check)


# --- exports ----------------------------------------------------------------------------------------------------------

CONFIG = TransformerConfig(
    style="gated",
    vocab_size=20,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    max_positions=16,
)


@pytest.mark.filterwarnings(r"ignore:.*config\.json (ties|has) ")  # a config that differs from the files is told
@pytest.mark.parametrize("checksums", ["damaged", "crafted", "absent"])
def test_mutated_exports(fuzz: Fuzz, tmp_path: Path, checksums: str) -> None:
    torch.manual_seed(1)
    saved = ParallelTransformer(CONFIG)
    export_hf(saved, tmp_path / "saved")
    classes, folder = _classes(), tmp_path / "c"

    def check(number: int, random: Random) -> str:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "saved", folder)
        if checksums == "absent":
            (folder / "checksums.json").unlink()
        what = f"case {number}: {_mutate(random, folder)}"
        if checksums == "crafted":
            what += _sign_export(folder)
        removed = not (folder / "checksums.json").exists()
        try:
            model = load_hf(folder)
        except Exception as error:
            loaded = "refused"
            _refused(error, folder, what)
        else:
            loaded = "loaded"
            if checksums == "damaged" and not removed:
                assert model.config == CONFIG, what
                for name, value in saved.state_dict().items():
                    assert torch.equal(model.state_dict()[name], value), (what, name)
        assert _classes() == classes, what
        return loaded

    fuzz.run(check)


def _sign_export(folder: Path) -> str:
    try:
        content = json.loads((folder / "checksums.json").read_text())
        names = [name for name in content["files"] if (folder / name).is_file()]
        sums = {name: checked.sum_of((folder / name).read_bytes()) for name in names}
        del content["sha256"]
        checked.write_json(folder / "checksums.json", {**content, "files": sums})
    except Exception:
        return " (not signed)"
    return " (signed)"
