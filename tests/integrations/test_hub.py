"""A build for the kernel hub: what it holds, that it stands alone, and that it computes what shardfuse computes.

``test_hub_kernels.py`` loads one through Hugging Face's ``kernels`` where that is installed.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import hub_case
import pytest
import torch
import torch.nn.functional as F
import typer
from torch import nn

import shardfuse
from shardfuse.integrations.hub import __main__ as command
from shardfuse.integrations.hub import attention, build, exports, layers
from shardfuse.integrations.hub.closure import closure
from shardfuse.kernels.runtime import dispatch, library

SOURCES = Path(shardfuse.__file__).parent
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that the command writes, and what it says."""
    out = tmp_path_factory.mktemp("hub") / "with space"
    arguments = [sys.executable, "-m", "shardfuse.integrations.hub", str(out)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=True)
    return out / "build" / "torch-universal", done.stdout


@pytest.fixture(scope="module")
def ours(printed: tuple[Path, str]) -> ModuleType:
    return hub_case.load(printed[0])


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """A build of sources that differ in a comment."""
    root = tmp_path_factory.mktemp("changed")
    for floor in ("kernels", "integrations"):
        shutil.copytree(SOURCES / floor, root / floor, ignore=shutil.ignore_patterns("dev", "__pycache__"))
    norm = root / "kernels" / "norm" / "op.py"
    norm.write_text(norm.read_text() + "# changed\n")
    return hub_case.load(build.write(build.build(root), root / "out"))


# ---------------------------------------------------------------------------------------------------------- the closure
def _tree(root: Path, **sources: str) -> Path:
    for name, source in sources.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        (path.parent / "__init__.py").touch()
    return root


def test_imports_count_wherever_a_call_reaches_them(tmp_path: Path):
    main = (
        "from typing import TYPE_CHECKING\nimport a_package.inner\nfrom . import near\nfrom ..low import op, NAME\n"
        "if TYPE_CHECKING:\n    import checked\n    from . import typed\nelse:\n    from . import untyped\n"
        'def call():\n    from .late import name\n    return f"{__package__}.launch"\n'
    )
    names = ("near", "typed", "untyped", "late", "launch", "unused")
    root = _tree(tmp_path, top__main=main, low__op="import b_package", **{f"top__{name}": "" for name in names})
    found = closure(root, ("top", "main"))
    reached = {("top", name) for name in ("main", "near", "untyped", "late", "launch")}
    assert found.modules.keys() == reached | {("low",), ("low", "op")}  # ("low",) has NAME
    assert found.folders == {("top",)}
    assert found.outside == {
        "typing": {("top", "main")}, "a_package": {("top", "main")}, "b_package": {("low", "op")}
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('LAUNCH = f"{__package__}.gone"', "there is no module top.gone"),
        ("from .. import face", "top.main takes face from the root package"),
    ],
)
def test_what_a_build_would_miss_is_an_error(tmp_path: Path, source: str, message: str):
    with pytest.raises(ValueError, match=message):
        closure(_tree(tmp_path, top__main=source), ("top", "main"))


def test_a_module_that_needs_another_package_is_not_built(tmp_path: Path):
    root = _tree(
        tmp_path, integrations__hub__exports="from . import table", integrations__hub__table="import numpy.linalg"
    )
    with pytest.raises(ValueError, match=r"integrations\.hub\.table would bring numpy; .*einops, torch, triton"):
        build.build(root)


# ------------------------------------------------------------------------------------------------------------ the build
def test_the_same_sources_give_the_same_bytes(printed: tuple[Path, str]):
    folder, said = printed
    built = build.build()
    written = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {name: content for name, content in written.items() if "__pycache__" not in name} == built.files
    assert said == f"{built}\nin {folder}\n"
    assert f"torch.ops.shardfuse_{built.hash}" in said


def test_sources_are_copied_as_they_are():
    built = build.build()
    differing = {
        name
        for name, content in built.files.items()
        if not (SOURCES / name).is_file() or (SOURCES / name).read_bytes() != content
    }
    empty = {name for name in differing if name.endswith("/__init__.py") and not built.files[name]}
    assert differing - empty == {"__init__.py", "metadata.json", "kernels/runtime/library.py"}
    lines = (SOURCES / "kernels/runtime/library.py").read_text().splitlines()
    others = built.files["kernels/runtime/library.py"].decode().splitlines()
    assert [one.split("  #")[0] for one, other in zip(lines, others, strict=True) if one != other] == [
        f'NAMESPACE = "{library.NAMESPACE}"'
    ]


def test_a_build_replaces_a_build_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    built = build.Build({"metadata.json": b'{"name": "shardfuse"}', "old/module.py": b""}, "0", "x")
    folder = build.write(built, tmp_path)
    assert (folder / "old" / "module.py").exists()
    build.write(build.Build({"metadata.json": b'{"name": "other"}'}, "0", "x"), tmp_path)
    assert [path.name for path in folder.iterdir()] == ["metadata.json"]
    with pytest.raises(ValueError, match="exists and is no build of shardfuse; choose another folder"):
        build.write(built, tmp_path)
    with pytest.raises(typer.Exit) as ended:
        command.main(tmp_path)
    assert ended.value.exit_code == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: hub: {folder} exists")
    assert (said.err.count("\n"), said.out) == (1, "")


_ALONE = """
import importlib, importlib.abc, json, pkgutil, sys
from pathlib import Path

folder = Path(sys.argv[1])
sys.path.insert(0, sys.argv[2])
import hub_case  # imports torch
import einops, torch, triton
import torch.fx.experimental.symbolic_shapes  # with sympy, which torch imports when it first asks for shapes

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"{name} is no part of this machine", name=name)

allowed = {"torch", "einops", "triton", json.loads((folder / "metadata.json").read_text())["id"]}
before = {name.partition(".")[0] for name in sys.modules}
sys.meta_path.insert(0, Refuse())
kernel = hub_case.load(folder)
for module in pkgutil.walk_packages(kernel.__path__, kernel.__name__ + "."):
    importlib.import_module(module.name)
for call in hub_case.CALLS.values():
    call(kernel, "auto")
loaded = {name.partition(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)
print(json.dumps(sorted(loaded)), "shardfuse" in sys.modules)
"""


def test_it_needs_torch_einops_and_triton_only(printed: tuple[Path, str], tmp_path: Path):
    """Every module of it, in a process to which all other packages, shardfuse included, are missing."""
    if sys.platform != "linux":
        pytest.skip("Triton is installed on Linux only")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    arguments = [sys.executable, "-c", _ALONE, str(printed[0]), str(TESTS / "support")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == f'["{json.loads((printed[0] / "metadata.json").read_text())["id"]}"] False'


# ----------------------------------------------------------------------------------------------------------- its values
@pytest.mark.parametrize("impl", ["auto", pytest.param("triton", marks=pytest.mark.interpret)])
@pytest.mark.parametrize("name", hub_case.CALLS)
def test_builds_beside_shardfuse_compute_the_same_bits(name: str, impl: str, ours: ModuleType, changed: ModuleType):
    assert ours.__name__ != changed.__name__
    call = hub_case.CALLS[name]
    expected = call(shardfuse, impl)
    before = dispatch.counts.copy()
    for kernel in (ours, changed):
        found = call(kernel, impl)
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected))
        ran = sys.modules[f"{kernel.__name__}.kernels.runtime.dispatch"].counts
        assert any(how == "triton" for _, how in ran) or impl == "auto"
    assert dispatch.counts == before  # none of it was shardfuse


def test_each_build_registers_its_own_ops(ours: ModuleType, changed: ModuleType):
    names = []
    for kernel in (ours, changed):
        own = sys.modules[f"{kernel.__name__}.kernels.runtime.library"]
        assert own.NAMESPACE == kernel.__name__ != library.NAMESPACE
        names.append(sorted(own._REGISTERED))
        assert all(hasattr(getattr(torch.ops, own.NAMESPACE), name) for name in own._REGISTERED)
    assert names[0] == names[1]
    assert "apply_rope" in names[0]


def test_it_offers_what_shardfuse_offers(ours: ModuleType):
    assert ours.__all__ == exports.__all__
    only_here = {"layers", "flash_attn_forward", "supports_flash_attn"}
    for name in set(ours.__all__) - only_here:
        home = shardfuse.integrations if "stats" in name else shardfuse
        assert inspect.signature(getattr(ours, name)) == inspect.signature(getattr(home, name))


# ----------------------------------------------------------------------------------------------------------- the layers
def test_layers_are_what_kernels_takes():
    """No constructor and no members of their own: ``kernels`` refuses others when a model is kernelized."""
    for name in layers.__all__:
        layer = getattr(layers, name)
        assert layer.__init__ is nn.Module.__init__
        assert set(dir(layer)) - set(dir(nn.Module)) == {"can_torch_compile", "has_backward"}


def _given(layer: type[nn.Module], module: Any) -> Any:
    """The layer's forward, bound to the module, as ``kernels`` binds it."""
    return MethodType(layer.forward, module)


def _module(**members: Any) -> nn.Module:
    module = nn.Module()
    for name, value in members.items():
        setattr(module, name, value)
    return module.double()


def test_layers_compute_what_they_replace():
    """In fp64, where they run the references."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    weight = nn.Parameter(torch.randn(32))
    norm = _module(weight=weight, variance_epsilon=1e-3, eps=1e-3)
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)
    torch.testing.assert_close(_given(layers.RMSNorm, norm)(x), norm.weight * normed)
    torch.testing.assert_close(_given(layers.RMSNormZeroCentered, norm)(x), (1 + norm.weight) * normed)

    gate, up, down = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=True), nn.Linear(48, 32)
    mlp = _module(gate_proj=gate, up_proj=up, down_proj=down, act_fn=nn.SiLU())
    torch.testing.assert_close(_given(layers.SwiGLUMLP, mlp)(x), down(F.silu(gate(x)) * up(x)))
    mlp.act_fn = nn.GELU()
    with pytest.raises(ValueError, match="the module's activation is GELU, SiLU is expected"):
        _given(layers.SwiGLUMLP, mlp)(x)


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_the_rotation_is_llamas(unsqueeze_dim: int):
    torch.manual_seed(0)
    q, k = (torch.randn(2, heads, 5, 8, dtype=torch.float64) for heads in (4, 2))
    angles = torch.rand(2, 5, 4).repeat(1, 1, 2)
    cos, sin = angles.cos().double(), angles.sin().double()
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    rotate = _given(layers.rotary_pos_emb, nn.Module())
    for x, found in zip((q, k), rotate(q, k, cos, sin, unsqueeze_dim)):
        turned = torch.cat((-x[..., 4:], x[..., :4]), -1)
        torch.testing.assert_close(found, x * cos.unsqueeze(unsqueeze_dim) + turned * sin.unsqueeze(unsqueeze_dim))
    with pytest.raises(ValueError, match="cos has 4 columns, 8 are expected"):
        rotate(q, k, cos[..., :4], sin[..., :4], unsqueeze_dim)


# -------------------------------------------------------------------------------------------------------- the attention
@pytest.mark.parametrize("masked", [False, True])
def test_attention_without_pages(masked: bool):
    """Without a mask the module says whether it is causal; a mask says all itself."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8, dtype=torch.float64) for heads in (4, 2, 2))
    mask = torch.rand(2, 1, 5, 5) > 0.3
    mask[..., 0] = True
    seen = mask if masked else torch.ones(5, 5, dtype=torch.bool).tril()
    for causal in (True, False):
        module = SimpleNamespace(is_causal=causal)
        found, weights = attention.flash_attn_forward(module, q, k, v, mask if masked else None, scaling=0.3)
        scores = q @ k.repeat_interleave(2, 1).mT * 0.3
        if causal or masked:
            scores = scores.masked_fill(~seen, -torch.inf)
        torch.testing.assert_close(found, (scores.softmax(-1) @ v.repeat_interleave(2, 1)).transpose(1, 2))
        assert weights is None


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_what_sdpa_lacks_is_refused_without_pages(name: str):
    q = torch.randn(1, 1, 2, 8)
    with pytest.raises(ValueError, match=f"{name} is given outside of continuous batching"):
        attention.flash_attn_forward(SimpleNamespace(), q, q, q, None, **{name: torch.ones(1)})
