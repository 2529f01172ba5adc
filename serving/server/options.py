"""The settings of a server: its doors, and the limits on what a request may take from others."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ...kernels.runtime.checks import whole_number
from ..printable import printable
from ..tools import tool_format
from .hosts import Hosts, network_of
from .keys import check_keys

_MOST_S = 1_000_000.0  # timers and the kernel's limits take no number of seconds


@dataclass(frozen=True)
class ServerOptions:
    """How a server behaves. Raises ValueError for a wrong value; no message contains a key.

    Args:
        name: of the model, in clients' requests.
        api_keys: the accepted keys; without any, no key is needed. Requests with different keys never share a prefix in
            the cache.
        allowed_hosts: the Hosts that requests may be sent to: names, addresses, networks of addresses, or "*"; None:
            any. A server with keys takes any.
        protect_metrics: whether all paths but ``/health`` need a key.
        trusted_proxies: addresses or networks of proxies whose ``X-Forwarded-For`` names the client.
        max_body_bytes: of a request; longer ones are refused with 413.
        max_body_memory_mib: memory of a parsed body, estimated from its numbers, texts, lists and objects before it is
            parsed; more is refused with 413.
        max_answer_bytes: of an answer that is not streamed, and of any of ``/v1/responses``.
        max_tokenized_tokens: tokens of one answer of ``/tokenize``, and of a text that is truncated.
        tool_call_parser: the format in which the model writes calls of tools: one of shardfuse.serving.tools.FORMATS,
            or an entry point's of the group ``shardfuse.tool_parsers``; "auto": that of the chat template.
        max_logprobs: the most log-probabilities for one token; -1: the whole vocabulary.
        max_connections: open at once; less where the process may not open as many files.
        max_connections_per_address: of these, from one address; None: three quarters of them.
        header_timeout_s: how long a client may take to send a request's headers.
        send_timeout_s: how long a client may take to read an answer's pieces, or to send its body.
        health_timeout_s: how long a step may take before ``/health`` answers 503.
        request_timeout_s: how long an answer may take; None: no limit.
        debug: whether to serve ``/debug/leaks``.
    """

    name: str = "model"
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    protect_metrics: bool = False
    trusted_proxies: tuple[str, ...] = ()
    max_body_bytes: int = 2 * 1024 * 1024
    max_body_memory_mib: int = 8
    max_answer_bytes: int = 64 * 1024 * 1024
    max_tokenized_tokens: int = 131_072
    tool_call_parser: str = "auto"
    max_logprobs: int = 20
    max_connections: int = 4096
    max_connections_per_address: int | None = None
    header_timeout_s: float = 10.0
    send_timeout_s: float = 60.0
    health_timeout_s: float = 60.0
    request_timeout_s: float | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise ValueError(f"name={printable(self.name)!r} (--name): expected a text without control characters")
        for name in ("api_keys", "allowed_hosts", "trusted_proxies"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is a text: expected a tuple of texts")
        check_keys(self.api_keys)
        if self.tool_call_parser != "auto":
            try:
                tool_format(self.tool_call_parser)
            except ValueError as error:
                raise ValueError(f"tool_call_parser (--tool-call-parser): {error}") from None
        if self.protect_metrics and not self.api_keys:
            raise ValueError("protect_metrics without api_keys: --protect-metrics needs --api-key KEY")
        _check_hosts("allowed_hosts (--allowed-hosts)", self.allowed_hosts or (), lambda each: Hosts([each]))
        _check_hosts("trusted_proxies (--trusted-proxy)", self.trusted_proxies, network_of)
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None and each.default is None:
                continue
            if each.name.endswith("_s"):
                check_seconds(f"{each.name} ({flag(each.name)})", value)
            elif each.name.startswith("max_"):
                least = -1 if each.name == "max_logprobs" else 1
                whole_number(f"{each.name} ({flag(each.name)})", value, least=least)


def flag(field: str) -> str:
    """The flag of ``shardfuse serve`` for a number among the options."""
    return "--" + field.removesuffix("_s").replace("_", "-")


def check_seconds(name: str, value: Any, *, zero: bool = False) -> None:
    """ValueError unless ``value`` is a finite number of seconds, above 0 or with ``zero`` also 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and 0 <= value <= _MOST_S and (value or zero)):  # nan fails both comparisons
        least = "from 0" if zero else "above 0"
        raise ValueError(f"{name}={value!r}: expected a number of seconds {least}, at most {_MOST_S:,.0f}")


def _check_hosts(name: str, hosts: tuple[str, ...], parse: Any) -> None:
    for each in hosts:
        try:
            parse(each)
        except ValueError as error:
            raise ValueError(f"{name}: {printable(error)}") from None
