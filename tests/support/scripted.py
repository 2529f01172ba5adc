"""A model that says what it is told, a server over it, and a chat template for each format of calls."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from server_case import END, tokenizer
from starlette.testclient import TestClient
from tokenizers import AddedToken
from torch import nn

from shardfuse.serving import Engine
from shardfuse.serving.server import Served, ServerOptions, create_app

NAME = "scripted"
# How a template writes a call
_CALL = {
    "hermes": """<tool_call>
{"name": "{{ call['name'] }}", "arguments": {{ call['arguments'] | tojson }}}
</tool_call>""",
    "llama3": """{"name": "{{ call['name'] }}", "parameters": {{ call['arguments'] | tojson }}}""",
    "mistral": "[TOOL_CALLS]{{ call['name'] }}[ARGS]{{ call['arguments'] | tojson }}",
    "pythonic": (
        "{% if loop.first %}[{% endif %}{{ call['name'] }}({% for key, value in call['arguments'].items() %}{{ key }}="
        "{{ value | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}){% if loop.last %}]{% endif %}"
    ),
    "qwen3-coder": (
        "<tool_call>\n<function={{ call['name'] }}>\n{% for key, value in call['arguments'].items() %}"
        "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>"
    ),
}
_BETWEEN = {"hermes": "\n", "llama3": "; ", "mistral": "", "pythonic": ", ", "qwen3-coder": "\n"}
# The marks that a family's tokenizers have as added tokens, and whether they are special
MARKS = {
    "hermes": (("<tool_call>", "</tool_call>"), False),
    "llama3": (("<|python_tag|>",), True),
    "mistral": (("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), True),
    "pythonic": (("<|python_start|>", "<|python_end|>"), True),
    "qwen3-coder": (("<tool_call>", "</tool_call>"), False),
}


def template(name: str) -> str:
    """A chat template that writes calls in the format called ``name``."""
    return (
        "{% if tools %}tools:{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
        "{% for message in messages %}<|turn|>{{ message['role'] }}: {{ message['content'] }}"
        "{% for each in message['tool_calls'] or [] %}"
        "{% set call = each['function'] %}{% if not loop.first %}{{ " + repr(_BETWEEN[name]) + " }}"
        "{% elif message['content'] %}{{ '\n' }}{% endif %}" + _CALL[name] + "{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
    )


def tokenizer_of(name: str, special: bool | None = None) -> Any:
    """The tokenizer of bytes with the template and the marks of a format."""
    made = copy.deepcopy(tokenizer())
    marks, usual = MARKS[name]
    made.add_tokens(
        [AddedToken(each, special=usual if special is None else special, normalized=False) for each in marks]
    )
    made.chat_template = template(name)
    return made


class Scripted(nn.Module):
    """The interface of a ServableModel. The answer to a prompt of ``start`` tokens is ``script``, and then the end."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=size, max_positions=8192)
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.script: Sequence[int] = []
        self.start = 0

    def forward(self, tokens: torch.Tensor, *, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        q = (tokens[:, None, None].double() / 300).expand(-1, 1, 8) + self.w
        rest = 0 * cache.attend(0, q, q, q).sum()
        rows = torch.zeros(len(cache.logit_indices), self.config.vocab_size, dtype=torch.float64)
        for row, at in enumerate(positions[cache.logit_indices].tolist()):
            said = at - self.start + 1
            rows[row, self.script[said] if 0 <= said < len(self.script) else END] = 60.0
        return rows + rest


class ScriptedServer:
    """``http`` asks a model for what :meth:`say` tells it, over the application itself."""

    def __init__(self, made: Any, http: TestClient, model: Scripted, served: Served) -> None:
        self.tokenizer, self.http, self.model, self.served = made, http, model, served

    def say(self, text: str, body: dict[str, Any]) -> None:
        """Answer the chat ``body`` with ``text``."""
        same = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        asked = {key: body[key] for key in same if body.get(key) is not None}
        self.model.start = self.http.post("/tokenize", json=asked).json()["count"]
        self.model.script = self.tokenizer.encode(text, add_special_tokens=False)

    def chat(self, text: str, body: dict[str, Any]) -> dict[str, Any]:
        """The server's answer to ``body`` where the model says ``text``."""
        body = {"temperature": 0, "max_tokens": 900, **body}
        self.say(text, body)
        found = self.http.post("/v1/chat/completions", json=body)
        assert found.status_code == 200, found.text
        return dict(found.json()["choices"][0])


@contextlib.contextmanager
def scripted(made: Any, ends: Sequence[int] = (END,), **options: Any) -> Iterator[ScriptedServer]:
    """A server whose tokenizer is ``made`` and whose answers end at ``ends``, with ``options`` of the server."""
    model = Scripted(max(260, len(made)))
    engine = Engine(model, num_blocks=1200, block_size=8, tokenizer=copy.deepcopy(made), enforce_eager=True)
    served = Served(engine, made, ends, ServerOptions(name=NAME, **options))
    with TestClient(create_app(served)) as http:
        yield ScriptedServer(made, http, model, served)
