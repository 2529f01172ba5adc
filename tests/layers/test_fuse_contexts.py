"""``fuse`` within everything that can surround its call: it finds what it finds outside, and changes none of it."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from foreign import foreign, sizes_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardfuse import explain
from shardfuse.layers.fuse import Fused, fuse, unfuse
from shardfuse.layers.fuse.probing import apart
from shardfuse.layers.fuse.ranks import heads
from shardfuse.layers.fuse.ranks.table import Table
from shardfuse.layers.fuse.stages.cut import cut_of
from shardfuse.layers.fuse.stages.documents import why_mixed

transformers = pytest.importorskip("transformers")

# Every probe: gated and plain feed-forward parts, layers whose statements are read, packed weights, Conv1D, norms with
# and without an offset, rotary positions in halves and in pairs, attention that is written out, heads.
KINDS = ("llama", "gpt2", "opt", "gptj", "bloom", "gemma2", "phi3")


class _Linear(nn.Linear):
    """Its class is another one, so that only a trial can tell that it computes the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = _Linear(8, 16), nn.GELU(), _Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(x)))


class _NoFunction(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"a probe ran {func} where a mode saw it")


class _NoDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"a probe ran {func} where a mode saw it")


@contextlib.contextmanager
def _default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _anomaly() -> Iterator[None]:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        yield
        assert torch.is_anomaly_enabled()
        assert not torch.is_anomaly_check_nan_enabled()


def _refuse(x: Any) -> Any:
    raise AssertionError("a probe saved a tensor where hooks saw it")


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


BUILDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {  # a model can be built there, too
    "device": lambda: torch.device("meta"),
    "default device": _default_device,
    "bf16": lambda: _default_dtype(torch.bfloat16),
    "fp64": lambda: _default_dtype(torch.float64),
    "fake tensors": FakeTensorMode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "deterministic": _deterministic,
    "anomaly": _anomaly,
}
MODES = BUILDS | {
    "a function mode": _NoFunction,
    "a dispatch mode": _NoDispatch,
    "dual numbers": forward_ad.dual_level,
    "hooks for saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(_refuse, _refuse),
    "no torch functions": torch._C.DisableTorchFunction,
    "warnings are errors": _errors,
}


def _found(model: nn.Module) -> dict[str, tuple[str, ...]]:
    return {path: module._match.ops for path, module in model.named_modules() if isinstance(module, Fused)}


def _built(kind: str) -> nn.Module:
    """On the default device, in the default dtype."""
    config = sizes_of(transformers.CONFIG_MAPPING[kind])
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def _models() -> dict[str, nn.Module]:
    return {kind: foreign(kind) for kind in KINDS} | {"own": _Own()}


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    return _models()


@pytest.fixture(scope="module")
def expected(models: dict[str, nn.Module]) -> dict[str, dict[str, tuple[str, ...]]]:
    found = {}
    for kind, model in models.items():
        found[kind] = _found(fuse(model))
        unfuse(model)
    assert all(found.values())
    return found


@pytest.mark.parametrize("mode", MODES)
def test_what_surrounds_the_call_changes_nothing(mode: str, models: Any, expected: Any):
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for kind, model in models.items():
        with MODES[mode]():
            fuse(model)
        assert _found(model) == expected[kind]
        unfuse(model)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


@pytest.mark.parametrize("mode", BUILDS)
def test_a_model_that_was_built_there_fuses_the_same(mode: str, expected: Any):
    with BUILDS[mode]():
        built: dict[str, nn.Module] = {kind: _built(kind) for kind in KINDS[:3]} | {"own": _Own()}
        for model in built.values():
            fuse(model)
    for kind, model in built.items():
        assert _found(model) == expected[kind]


@pytest.mark.parametrize("mode", MODES)
def test_trials_of_stages_ranks_and_copies_find_the_same(mode: str, models: Any):
    """Those that run after ``fuse``: when a pipeline or a mesh divides the model, and when it is unpickled."""
    model = models["llama"]
    module, own = model.model.layers[0].self_attn, copy.deepcopy(models["own"])
    forward, features = type(module).forward, heads.numbered(module)

    def found() -> tuple[Any, ...]:
        cut = apart(cut_of, model, "lm_head")
        table = apart(Table().match, model.get_input_embeddings())
        trials = apart(why_mixed, model), apart(heads.heads_of, module, forward, features), table.scales
        return cut.width, cut.before, cut.behind, *trials

    held = pickle.dumps(fuse(own))
    expected = found()
    assert expected[3] is None  # it keeps documents apart
    with MODES[mode]():
        inside = found()
        if "mode" not in mode:  # they would see torch make tensors
            assert _found(pickle.loads(held)) == _found(own) != {}
    assert inside == expected


def test_transforms_and_compilation(models: Any, expected: Any):
    def within(x: torch.Tensor) -> torch.Tensor:
        for model in models.values():
            fuse(model)
        return x.sum()

    x = torch.ones(3, 2)
    for run in (torch.func.grad(within), torch.func.vmap(within), torch.compile(within, backend="eager")):
        run(x)
        for kind, model in models.items():
            assert _found(model) == expected[kind]
            unfuse(model)


def test_threads_leave_the_settings_of_the_process_as_they_were(models: Any, expected: Any):
    """Also those that fuse at the same time, and where a matcher fails."""

    def work() -> None:
        for _ in range(5):
            assert _found(fuse(_Own())) == expected["own"]
        with pytest.raises(RuntimeError, match="could not look at the model"):
            fuse(_Own(), matchers=[SimpleNamespace(fused=Fused, match=lambda _: 1 // 0)])

    with _default_dtype(torch.float64), _deterministic(), _anomaly(), ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(work) for _ in range(8)]:
            each.result()


def test_a_module_may_fuse_while_it_is_imported(tmp_path: Path):
    """What its modules import then waits for that import, in every other thread."""
    (tmp_path / "ops.py").write_text("scale = 1.0\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "ops.py").write_text("scale = 1.0\n")
    (tmp_path / "package" / "__init__.py").write_text("""
import shardfuse, torch
from torch import nn
class Norm(nn.LayerNorm):
    def forward(self, x):
        from package import ops
        return super().forward(x) * ops.scale
model = shardfuse.fuse(nn.Sequential(Norm(8), nn.LayerNorm(8)))
""")
    code = "import package; print(repr(package.model).count('fused: layer_norm'))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "2", done.stderr[-2000:]


def test_an_interrupt_leaves_the_settings_of_the_process_as_they_were():
    class Sleeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(1000):
                time.sleep(0.01)
            return x

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    own, before = _Own(), signal.signal(signal.SIGALRM, interrupt)
    try:
        with _default_dtype(torch.float64), _deterministic():
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                fuse(Sleeps())
            torch.manual_seed(5)
    finally:
        signal.signal(signal.SIGALRM, before)
    state = torch.get_rng_state()
    assert _found(fuse(own))
    assert torch.equal(torch.get_rng_state(), state)


def test_other_threads_may_run_a_model_meanwhile(models: Any):
    model, x, stop, errors = _Own(), torch.randn(2, 8), threading.Event(), list[Exception]()

    def work() -> None:
        while not stop.is_set():
            try:
                model(x)
            except Exception as error:
                errors.append(error)

    other = threading.Thread(target=work)
    other.start()
    try:
        for _ in range(3):
            unfuse(fuse(models["llama"]))
            explain(model)
    finally:
        stop.set()
        other.join()
    assert errors == []


def test_the_first_call_of_a_process_may_be_within_a_mode():
    """What probes need is not made at an import, on the device that is the default there."""
    code = """
import torch, shardfuse
from torch import nn
for mode in (torch.device("meta"), torch.inference_mode()):
    with mode:
        layers = nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8)
    for again in range(2):
        model = shardfuse.fuse(nn.Sequential(*layers)) if again else None
        with mode:
            model = model or shardfuse.fuse(nn.Sequential(*layers))
        print("linear_act" in repr(model), "layer_norm" in repr(model))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True"] * 8, done.stderr[-2000:]
