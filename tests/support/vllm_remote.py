"""In the place of vLLM's ``tests.utils``: its tests start ``shardfuse serve`` where they would start vLLM's server.

``install`` names the Python that has the server, and the hub's cache that has the models.
"""

from __future__ import annotations

import contextlib
import sys
import types
from pathlib import Path
from typing import Any

import openai
import pytest
from http_load import serving
from vllm_models import MODELS, folder_of

PATIENCE_S = 120  # for an answer of the server
# vLLM's options that the server has as well.
KEPT = ("--chat-template", "--max-logprobs", "--max-model-len", "--max-num-batched-tokens", "--max-num-seqs")
# Its formats of calls that the server has as well, under these names.
TOOL_PARSERS = {"hermes", "llama3_json", "llama4_pythonic", "mistral", "pythonic", "qwen3_coder", "qwen3_xml"}
# Those on which no answer depends, with the number of their values: the lane's models are in fp32, without code.
WITHOUT_EFFECT = {
    "--config-format": 1,
    "--dtype": 1,
    "--enable-auto-tool-choice": 0,
    "--enable-chunked-prefill": 0,
    "--enforce-eager": 0,
    "--gpu-memory-utilization": 1,
    "--ignore-patterns": 1,
    "--limit-mm-per-prompt": 1,
    "--load-format": 1,
    "--no-async-scheduling": 0,
    "--no-enable-prefix-caching": 0,
    "--port": 1,
    "--runner": 1,
    "--structured-outputs-config.backend": 1,
    "--tokenizer-mode": 1,
}
# Those that the server does not have: tests of what they are for fail, and vllm_reasons.py says why.
MISSING = {
    "--enable-force-include-usage": 0,
    "--enable-lora": 0,
    "--enable-prompt-tokens-details": 0,
    "--enable-server-load-tracking": 0,
    "--enable-tokenizer-info-endpoint": 0,
    "--lora-modules": 1,
    "--max-cpu-loras": 1,
    "--max-lora-rank": 1,
    "--reasoning-config": 1,
    "--reasoning-parser": 1,
    "--return-tokens-as-token-ids": 0,
    "--root-path": 1,
    "--skip-tokenizer-init": 0,
    "--tokenizer": 1,
    "--tool-call-parser": 1,  # with a format that the server does not have
    "--trust-remote-code": 0,
    "--watermark-config": 1,
}


def translated(arguments: list[str]) -> list[str]:
    """``arguments`` of ``vllm serve`` as those of ``shardfuse serve``. ValueError for an option of neither table."""
    found: list[str] = []
    left = [part for argument in arguments for part in _parts(argument)]
    while left:
        option = left.pop(0)
        if option in KEPT or (option == "--tool-call-parser" and left[0] in TOOL_PARSERS):
            found += [option, left.pop(0)]
        elif option in (dropped := WITHOUT_EFFECT | MISSING):
            del left[: dropped[option]]
        else:
            raise ValueError(f"{option}: an option of vLLM that the lane does not know: put it into one of the tables")
    return found


def _parts(argument: str) -> list[str]:
    """``--an_option=value`` as ``--an-option`` and ``value``."""
    if not argument.startswith("--"):
        return [argument]
    option, equals, value = argument.partition("=")
    return [option.replace("_", "-"), *([value] if equals else [])]


class RemoteOpenAIServer:
    """The interface of vLLM's class of that name over a process of ``shardfuse serve``."""

    DUMMY_API_KEY = "token-abc123"
    python = ""
    cache = Path()

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
    ) -> None:
        if model not in MODELS:
            raise ValueError(f"{model}: the lane has no such model: expected one of {', '.join(MODELS)}")
        arguments = [str(folder_of(self.cache, model)), "--name", model, "--device", "cpu", "--log-level", "warning"]
        if key := (env_dict or {}).get("VLLM_API_KEY"):
            arguments += ["--api-key", key]
        self._stack = contextlib.ExitStack()
        self._process = self._stack.enter_context(serving(*arguments, *translated(vllm_serve_args), python=self.python))

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def url_root(self) -> str:
        return self._process.url

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def _settings(self, more: dict[str, Any]) -> dict[str, Any]:
        own = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": PATIENCE_S}
        return own | more

    def get_client(self, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._settings(more))

    def get_async_client(self, **more: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._settings(more))


def install(root: Path, python: str, cache: Path) -> None:
    """Make this the module ``tests.utils`` of the checkout of vLLM in ``root``."""
    RemoteOpenAIServer.python, RemoteOpenAIServer.cache = python, cache
    module: Any = types.ModuleType("tests.utils")
    module.RemoteOpenAIServer = RemoteOpenAIServer
    module.ROCM_EXTRA_ARGS = []
    module.VLLM_PATH = root
    module.requires_fp8 = pytest.mark.skip(reason="needs a GPU that has fp8")
    module.multi_gpu_only = lambda num_gpus=2: pytest.mark.skip(reason=f"needs {num_gpus} GPUs")
    sys.modules["tests.utils"] = module
