"""``fuse`` over every causal language model that transformers can build: each in a process of its own, with a limit.

``python tests/support/model_scan.py`` prints what became of each; ``--write`` keeps it in ``layers/model_scan.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from foreign import OWN, sizes_of
from torch import nn

RECORD = Path(__file__).parents[1] / "layers" / "model_scan.json"
LIMIT_S = 60.0
Look = Callable[[nn.Module, torch.Tensor, dict[str, torch.Tensor]], tuple[str, str]]  # -> outcome, remark
# fused: everything that could be; partly: something; stock: nothing, or only norms ... of those that run here at all.
OUTCOMES = ("fused", "partly", "stock", "wrong", "refused", "timed out")


def kinds() -> list[str]:
    """The names of all configurations that have a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def scan(names: list[str], workers: int = 2, look: Look | None = None) -> Iterator[tuple[str, str, str]]:
    """(name, outcome, remark) of each, in order; ``look`` is what is done with a model that runs, by default fused."""
    import transformers

    transformers.logging.set_verbosity_error()
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(partial(_limited, look=look or _fused), names)


def _limited(kind: str, look: Look) -> tuple[str, str, str]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(kind, look, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(LIMIT_S):
            return kind, "timed out", f"after {LIMIT_S:.0f} s"
        return kind, *ours.recv()
    except EOFError:
        process.join()
        return kind, "refused", f"its process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _report(kind: str, look: Look, pipe: Any) -> None:
    sys.stderr = sys.stdout = open("/dev/null", "w")  # noqa: SIM115  # models warn and print
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    batch = torch.randint(3, 64, (2, 10), generator=torch.Generator().manual_seed(0))
    remark = ""
    shrinkings = _divided, partial(sizes_of, **OWN.get(kind, {}))
    for shrunk, dtype in itertools.product(shrinkings, (torch.float64, torch.float32)):
        try:
            model = _small(kind, shrunk).to(dtype)
            expected = _run(model, batch)
            if not all(value.isfinite().all() for value in expected.values()):
                raise ValueError("its results are not finite")
        except Exception as error:  # whatever the stock model raises: it is none of ours
            remark = remark or f"the stock model: {_told(error)}"
            continue
        try:
            pipe.send(look(model, batch, expected))
        except Exception as error:
            pipe.send(("wrong", _told(error)))
        return
    pipe.send(("refused", remark))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_KEPT = ("max", "position", "_id", "token", "window", "theta", "seed", "n_ctx", "chunk")


def _divided(config: Any) -> Any:
    """A sixteenth of every size of the default configuration of the class ``config``, which keeps their ratios."""
    default, sizes = config(), {}
    for name, value in vars(default).items():
        if name in _LAYERS:
            sizes[name] = 2
        elif name == "vocab_size":
            sizes[name] = 64
        elif name in _TOKENS:
            sizes[name] = _TOKENS[name]
        elif type(value) is int and value >= 64 and not any(part in name for part in _KEPT):
            sizes[name] = value // 16
    for name, kind in getattr(config, "sub_configs", {}).items():
        if hasattr(kind, "from_dict"):
            sizes[name] = _divided(kind)
    return config(**sizes)


def _small(kind: str, shrunk: Any) -> nn.Module:
    """A small random model, with varied norms and biases."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = shrunk(CONFIG_MAPPING[kind])
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    try:
        model = AutoModelForCausalLM.from_config(config, **options)
    except Exception:  # most have no experts
        model = AutoModelForCausalLM.from_config(config)
    model.eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point():
                param.add_(torch.randn_like(param) * 0.05)
    return model


def _run(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """The logits in evaluation; in training the loss, and the gradients of the loss and of something else together."""
    with torch.no_grad():
        logits = model.eval()(input_ids=batch, use_cache=False).logits
    torch.manual_seed(0)  # dropout
    model.train().zero_grad()
    out = model(input_ids=batch, labels=batch, use_cache=False)
    (out.loss + out.logits.float().square().mean()).backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    return {"logits": logits, "loss": out.loss.detach(), **grads}


def _fused(model: nn.Module, batch: torch.Tensor, expected: dict[str, torch.Tensor]) -> tuple[str, str]:
    from shardfuse.layers.fuse import Fused, fuse, stats, unfuse
    from shardfuse.layers.fuse.report import stayed

    names = list(model.state_dict())
    fuse(model, check={"input_ids": batch, "use_cache": False})
    with stats(model) as ran:
        found = _run(model, batch)
    if list(model.state_dict()) != names or found.keys() != expected.keys():
        return "wrong", "other parameters"
    largest = max(value.norm() for name, value in expected.items() if name not in ("logits", "loss"))
    for name, value in expected.items():
        # Some gradients are nothing but rounding errors: of the biases of keys, which shift all scores of a query.
        error = (found[name] - value).norm() / value.norm().clamp(min=1e-5 * largest)
        if not error < 1e-3:  # fp64, but rotations, norms and losses are fp32's in many models
            return "wrong", f"{name}: relative error {error:.1e}"
    modules = [module for module in model.modules() if isinstance(module, Fused)]
    left = sorted({f"{each.kind}: {each.why}" for each in stayed(model) if not each.nothing_to_fuse})
    unfuse(model)
    if not torch.equal(_run(model, batch)["logits"], expected["logits"]):
        return "wrong", "unfuse leaves something"
    if not modules or not sum(ran.values()):
        return "stock", "; ".join(left)
    return ("partly", "; ".join(left)) if left else ("fused", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="names of configurations; all without")
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RECORD.name}")
    options = parser.parse_args()
    record: dict[str, dict[str, str]] = {outcome: {} for outcome in OUTCOMES}
    for name, outcome, remark in scan(options.names or kinds()):
        record[outcome][name] = remark
        print(f"{name:32} {outcome:10} {remark}", flush=True)
    print(", ".join(f"{len(names)} {outcome}" for outcome, names in record.items()))
    if options.write:
        import transformers

        RECORD.write_text(json.dumps({"transformers": transformers.__version__, **record}, indent=1) + "\n")


if __name__ == "__main__":
    main()
