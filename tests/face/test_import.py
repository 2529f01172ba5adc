"""``import shardfuse``: what it needs, what it costs, and that its three lists of public names agree."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import shardfuse

# ``sys.modules[name] = None`` makes ``import name`` fail as if the package were not installed.
_WITHOUT = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None
"""

_USE = """
import torch
import shardfuse as sf

for name in sf.__all__:
    getattr(sf, name)
mlp = sf.ParallelMLP(8, 16)
mlp(torch.randn(3, 8)).sum().backward()
assert mlp.c_fc.weight.grad is not None
assert "linear_act" in str(sf.explain(mlp))
from shardfuse.kernels.runtime import dispatch
assert dispatch.counts["linear_act", "reference"] == 2, dispatch.counts
"""

_COST = """
import json, sys
import shardfuse, shardfuse.cli
print(json.dumps(sorted(sys.modules)))
"""


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "blocked",
    [("triton",), ("transformers", "tokenizers", "llguidance", "matplotlib", "hypothesis", "pytest_benchmark")],
)
def test_works_without(blocked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("SHARDFUSE_IMPL", raising=False)
    _python(_WITHOUT.format(blocked=blocked) + _USE)


def test_asking_for_triton_without_triton_says_what_to_do():
    code = _WITHOUT.format(blocked=("triton",)) + (
        "import torch, shardfuse\n"
        "try:\n    shardfuse.linear_act(torch.ones(1, 4), torch.ones(4, 4), impl='triton')\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    assert "Triton is not installed (pip install triton" in _python(code)


def test_import_and_command_line_load_nothing_heavy():
    loaded = set(json.loads(_python(_COST)))
    assert not loaded & {"torch", "triton", "numpy", "einops", "transformers", "matplotlib"}


def test_a_layer_loads_only_what_one_process_needs():
    """DTensor brings sympy, and pipelines and checkpoints take longer still; Triton comes with the first kernel."""
    code = "import json, sys\nfrom shardfuse import ParallelMLP\nprint(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(_python(code)))
    costly = {"tensor", "fsdp", "pipelining", "checkpoint", "_symmetric_memory"}
    assert "torch.distributed" in loaded
    assert not loaded & {f"torch.distributed.{name}" for name in costly}
    assert not loaded & {"sympy", "triton", "einops", "transformers", "rich", "typer"}


def test_the_lists_of_public_names_agree():
    tree = ast.parse(Path(shardfuse.__file__).read_text())
    for_checkers = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert set(shardfuse.__all__) == for_checkers | {"__version__"} == set(shardfuse._HOMES) | {"__version__"}
    assert set(shardfuse.__all__) <= set(dir(shardfuse))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'parallel_mlp'"):
        shardfuse.parallel_mlp  # noqa: B018
