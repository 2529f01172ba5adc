"""Who gets in, and what the log shows of them: Hosts, keys, proxies, refusals, flags and their table, lines."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import math
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (pip install .[serve])")

import typer
from server_case import serve

from shardfuse.cli import app
from shardfuse.commands import errors
from shardfuse.commands import serve as command
from shardfuse.serving.folder import _generation_words
from shardfuse.serving.folder_options import FolderOptions
from shardfuse.serving.generation import GenerationDefaults
from shardfuse.serving.printable import printable
from shardfuse.serving.server import ServerOptions
from shardfuse.serving.server.door import Door
from shardfuse.serving.server.hosts import own_hosts
from shardfuse.serving.server.logs import JsonLines, PlainLines
from shardfuse.serving.server.metrics import REFUSALS, Metrics

DOCS = Path(__file__).parents[2] / "docs" / "server.md"
OPEN = ("/", "/health", "/version", "/metrics", "/stats", "/openapi.json")
EVERY = "0.0.0.0"  # noqa: S104 - nothing listens on it
FORGED = "x\n12:00:00 INFO POST /v1/completions 200\x1b[2J\x9b1m\u2028\u202e\x7f"


def _asked(options: ServerOptions, **scope: Any) -> tuple[int, dict[str, Any], Metrics]:
    """The status, the state and the metrics after one request that the application answers with 200."""
    served = SimpleNamespace(options=options, metrics=Metrics("tiny"))
    given: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "headers": [], "state": {}, **scope}
    status = 0

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    asyncio.run(Door(inside, served)(given, receive, send))  # type: ignore[arg-type]
    return status, given["state"], served.metrics


# --- Hosts ------------------------------------------------------------------------------------------------------------


def _host(options: ServerOptions, host: str | None, **scope: Any) -> int:
    return _asked(options, headers=[] if host is None else [(b"host", host.encode())], **scope)[0]


GOOD = ["localhost", "LocalHost:8000", "localhost.", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:80", "[0:0::1]:", None]
BAD = [
    "attacker.example", "attacker.example:8000", "localhost.attacker.example", "127.0.0.1.attacker.example", "127.1",
    "localhost@attacker.example", "localhost:80@attacker.example", "localhost:80:80", "[::1", "192.168.0.7", "",
    "2130706433", "[::1]attacker.example", "a localhost", "attacker.example#localhost", "10.1.2.3:8000",
]  # fmt: skip


@pytest.mark.parametrize("host", GOOD, ids=str)
def test_a_server_on_loopback_takes_its_own_hosts(host: str | None) -> None:
    assert _host(ServerOptions(allowed_hosts=own_hosts("127.0.0.1")), host) == 200


@pytest.mark.parametrize("host", BAD)
@pytest.mark.parametrize("path", ["/health", "/", "/v1/models"])
def test_and_no_other(host: str, path: str) -> None:
    options = ServerOptions(allowed_hosts=own_hosts("localhost"))
    status, _, metrics = _asked(options, headers=[(b"host", host.encode())], path=path)
    assert status == 403
    assert metrics.refused["host"]._value.get() == 1


def test_a_host_is_what_the_client_reached_or_was_allowed() -> None:
    options = ServerOptions(allowed_hosts=(*own_hosts("::1"), "Box.example.", "10.0.0.0/8"))
    assert _host(options, "192.168.0.7:80", server=("192.168.0.7", 80)) == 200
    assert _host(options, "192.168.0.8:80", server=("192.168.0.7", 80)) == 403
    assert _host(options, "box.EXAMPLE:80") == _host(options, "10.1.2.3") == 200
    assert _host(ServerOptions(allowed_hosts=("*",)), "attacker.example") == 200
    assert _host(ServerOptions(), "attacker.example") == 200
    keyed = ServerOptions(allowed_hosts=own_hosts("::1"), api_keys=("k",))
    assert _host(keyed, "attacker.example") == 200


@pytest.mark.parametrize("host", [EVERY, "::", "192.168.0.7", "box", ""])
def test_a_server_for_others_takes_every_address_and_no_other_name(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Box")
    monkeypatch.setattr("socket.getfqdn", lambda: "box.example")
    options = ServerOptions(allowed_hosts=own_hosts(host))
    for good in ("192.168.0.7:8000", "[2001:db8::1]:8000", "localhost", "box", "box.example"):
        assert _host(options, good) == 200, good
    assert _host(options, "attacker.example") == 403


def test_the_refusal_names_the_option() -> None:
    with serve(allowed_hosts=own_hosts("127.0.0.1")) as server:
        assert server.get("/version").status_code == 200
        answer = server.get("/version", host=f"attacker.example{'a' * 9000}")
        assert answer.status_code == 403
        assert "--allowed-hosts" in answer.json()["error"]["message"]
        assert len(answer.content) < 1000


# --- keys and clients -------------------------------------------------------------------------------------------------


def test_with_protected_metrics_only_health_needs_no_key() -> None:
    with serve(api_keys=("k",), protect_metrics=True) as server:
        for path in OPEN:
            assert server.get(path).status_code == (200 if path == "/health" else 401), path
            assert server.get(path, authorization="Bearer k").status_code == 200
    with serve(api_keys=("k",)) as server:
        assert {server.get(path).status_code for path in OPEN} == {200}


def test_a_request_knows_its_client() -> None:
    bearer = [(b"authorization", b"Bearer k")]
    keyed = ServerOptions(api_keys=("k", "l"))
    state = _asked(keyed, path="/v1/models", headers=bearer, client=("10.0.0.1", 1))[1]
    assert state["client"] == f"key:{state['tenant']}" != "key:"
    for address, name in (
        (("10.0.0.1", 1), "address:10.0.0.1"),
        (("2001:db8::1:2", 1), "address:2001:db8::/64"),
        (("::ffff:10.0.0.1", 1), "address:10.0.0.1"),
        (None, ""),
    ):
        assert _asked(ServerOptions(), client=address)[1]["client"] == name


@pytest.mark.parametrize(("trusted", "seen"), [((), "127.0.0.1"), (("127.0.0.1",), "10.9.9.9")], ids=["none", "one"])
def test_only_a_trusted_proxy_names_clients(
    trusted: tuple[str, ...], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(Door, "_client", lambda self, tenant, address: found.append(address[0]) or "")
    with serve(trusted_proxies=trusted) as server:
        server.get("/version", **{"x-forwarded-for": "10.9.9.9"})
    assert found == [seen]


# --- the options ------------------------------------------------------------------------------------------------------

NUMBERS = [
    "max_body_bytes", "max_body_memory_mib", "max_answer_bytes", "max_tokenized_tokens", "max_connections",
    "max_connections_per_address",
]  # fmt: skip
SECONDS = ["header_timeout_s", "send_timeout_s", "health_timeout_s", "request_timeout_s"]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in NUMBERS for value in (0, -1, 1.5, math.nan, True, "1")]
    + [(name, value) for name in SECONDS for value in (0, -1.0, math.nan, math.inf, 1e300, True, "1")]
    + [("max_body_bytes", None), ("send_timeout_s", None)]
    + [("name", ""), ("name", "a\nb"), ("name", "a\x1b[2Jb"), ("protect_metrics", True)]
    + [("allowed_hosts", (each,)) for each in ("", "http://a", "a:80", "a/b", "10.0.0.0/99", "a b", "*.a", "a\n")]
    + [("trusted_proxies", (each,)) for each in ("", "proxy", "*", "10.0.0.1:80")]
    + [("api_keys", "secret"), ("allowed_hosts", "localhost")],
)  # fmt: skip
def test_a_wrong_option_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        ServerOptions(**{name: value})
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "key", ["", " ", "secret\n", "\tsecret", " secret", "secret ", "se\x00cret", "sécret", "se\ud800"]
)
def test_a_wrong_key_is_refused_and_not_told(key: str) -> None:
    for keys in ((key,), ("good", key)):
        with pytest.raises(ValueError, match="--api-key") as caught:
            ServerOptions(api_keys=keys)
        assert "cret" not in str(caught.value)


class _Stop(Exception):
    """Instead of loading a model."""


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function from the arguments of ``shardfuse serve --tiny`` to its options."""
    monkeypatch.delenv("SHARDFUSE_API_KEY", raising=False)
    found: list[command.ServeOptions] = []

    def stop(options: command.ServeOptions) -> int:
        found.append(options)
        raise _Stop

    monkeypatch.setattr(command, "run_serve", stop)

    def parse(*arguments: str) -> command.ServeOptions:
        with pytest.raises(_Stop):
            app(["serve", "--tiny", *arguments], standalone_mode=False)
        return found[-1]

    return parse


def test_the_key_of_the_environment_is_one_key(parsed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed().server.api_keys == ()
    monkeypatch.setenv("SHARDFUSE_API_KEY", "open-sesame")
    assert parsed().server.api_keys == ("open-sesame",)
    assert parsed("--api-key", "a", "--api-key", "b").server.api_keys == ("a", "b")
    monkeypatch.setenv("SHARDFUSE_API_KEY", "")
    assert parsed("--api-key", "a").server.api_keys == ("a",)
    for arguments in ([], ["--api-key", ""]):
        with pytest.raises(ValueError, match="is empty"):
            app(["serve", "--tiny", *arguments], standalone_mode=False)
    monkeypatch.setenv("SHARDFUSE_API_KEY", "open sesame")
    for arguments in ([], ["--api-key", "a b"], ["--api-key", " "]):
        with pytest.raises(ValueError, match="has a space"):
            app(["serve", "--tiny", *arguments], standalone_mode=False)


def test_keys_of_a_file(parsed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside those of the command line, instead of the one of the environment."""
    monkeypatch.setenv("SHARDFUSE_API_KEY", "unused")
    file = tmp_path / "keys"
    file.write_bytes(b"# ours\r\n\none\r\n  \n  two  \n#three\nfo#ur")
    file.chmod(0o600)
    assert parsed("--api-key-file", str(file)).server.api_keys == ("one", "two", "fo#ur")
    assert parsed("--api-key-file", str(file), "--api-key", "a").server.api_keys == ("a", "one", "two", "fo#ur")
    for mode in (0o640, 0o604):
        file.chmod(mode)
        with pytest.warns(UserWarning, match="other users may read it") as told:
            assert parsed("--api-key-file", str(file)).server.api_keys == ("one", "two", "fo#ur")
        assert "one" not in str(told[0].message).replace(str(file), "")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no key in it"),
        (b"\n# secret\n", "no key in it"),
        (b"good\nse cret", "line 2 has a space"),
        (b"good\n\ns\xe9cret", "line 3 has a space"),
        (b"\x00secret", "line 1 has a space"),
    ],
    ids=["empty", "comments", "space", "latin-1", "zero"],
)
def test_a_wrong_file_of_keys_is_refused_and_not_told(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        app(["serve", "--tiny", "--api-key-file", str(file)], standalone_mode=False)
    assert "cret" not in str(caught.value)


def test_a_file_of_keys_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(OSError, match=re.escape(str(path))):
            app(["serve", "--tiny", "--api-key-file", str(path)], standalone_mode=False)


def test_the_command_allows_the_servers_own_hosts(parsed: Any) -> None:
    found = parsed("--allowed-hosts", "box.example", "--allowed-hosts", "b", "--trusted-proxy", "::1").server
    assert found.allowed_hosts == (*own_hosts("127.0.0.1"), "box.example", "b")
    assert found.trusted_proxies == ("::1",)
    assert "0.0.0.0/0" in parsed("--host", EVERY).server.allowed_hosts


def test_the_commands_defaults_are_the_options(parsed: Any) -> None:
    found, default = parsed().server, ServerOptions()
    for name in (*NUMBERS, *SECONDS, "protect_metrics", "trusted_proxies", "debug"):
        assert getattr(found, name) == getattr(default, name), name


def test_the_table_of_limits_is_the_commands() -> None:
    """The flags of the help's panel, in order, with their defaults; the table's reasons are the metrics'."""
    serve_: Any = typer.main.get_command(app)
    limits = [each for each in serve_.commands["serve"].params if getattr(each, "rich_help_panel", None) == "Limits"]
    rows = re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \| .*? \| (\d+) \| `(\w+)` \|$", DOCS.read_text(), re.M)
    assert [each.opts[0] for each in limits] == [row[0] for row in rows]
    words = {"none": None, "three quarters": None}
    for each, (name, shown, _, _) in zip(limits, rows):
        assert each.default == (words[shown] if shown in words else float(shown)), name
    assert {row[3] for row in rows} < set(REFUSALS)
    assert all(f"`{reason}`" in DOCS.read_text() for reason in REFUSALS)


# --- refusals are counted ---------------------------------------------------------------------------------------------


def test_refusals_are_counted_once_each() -> None:
    with serve(api_keys=("k",), max_body_bytes=100) as server:
        before = server.metrics()
        key = {"authorization": "Bearer k"}
        assert {before[f"shardfuse:requests_refused_total{{{reason}}}"] for reason in REFUSALS} == {0}
        server.get("/v1/models")
        server.get("/nothing", **key)
        server.get("/v1/completions", **key)
        server.post("/v1/completions", {"prompt": 3}, **key)
        server.post("/v1/completions", {"prompt": "a" * 200}, **key)
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, **key)
        after = server.metrics()
    found = {reason: after[f"shardfuse:requests_refused_total{{{reason}}}"] for reason in REFUSALS}
    assert {reason: count for reason, count in found.items() if count} == {
        "key": 1, "not_found": 2, "invalid": 1, "too_large": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "reason"),
    [(403, "host"), (408, "timeout"), (429, "queue_full"), (499, "gone"), (0, "gone"), (503, "unavailable"),
     (500, "error"), (501, "error"), (418, "invalid"), (200, None), (304, None)],
)  # fmt: skip
def test_a_status_has_a_reason(status: int, reason: str | None) -> None:
    metrics = Metrics("tiny")
    metrics.answered(status)
    assert [each for each, count in metrics.refused.items() if count._value.get()] == ([reason] if reason else [])


# --- lines ------------------------------------------------------------------------------------------------------------


def test_printable_is_one_line_of_limited_length() -> None:
    assert printable("Grüße 日本") == "Grüße 日本"
    found = printable(FORGED)
    assert found.isprintable()
    assert found.startswith("x\\n12:00:00 INFO")
    assert printable("a" * 300, 10) == "aaaaaaaaaa... (290 more characters)"
    assert printable("\ud800") == "\\ud800"


def _record(message: str, error: BaseException | None = None, **told: Any) -> logging.LogRecord:
    exc_info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("shardfuse.server", logging.INFO, "", 1, message, (), exc_info)
    record.told = told
    return record


@pytest.mark.parametrize("form", [PlainLines, JsonLines])
def test_what_a_client_sends_ends_no_line_of_the_log(form: type[logging.Formatter]) -> None:
    error = ValueError(FORGED + "y" * 100_000)
    error.__cause__ = KeyError(FORGED)
    found = form().format(_record(FORGED + "z" * 10_000, error, request_id=FORGED, finish=FORGED + "f" * 5000))
    first, *lines = found.split("\n")
    assert all(line.isprintable() for line in (first, *lines))
    assert len(found) < 40_000
    if form is JsonLines:
        assert not lines
        assert json.loads(first)["trace"].startswith("KeyError")
    else:
        assert lines
        assert all(line.startswith("    ") for line in lines)
        assert sum("more characters" in line for line in lines)


@contextmanager
def _logged(form: type[logging.Formatter]) -> Iterator[list[str]]:
    """The lines of the log of requests, once the block has ended."""
    log, stream, lines = logging.getLogger("shardfuse.access"), io.StringIO(), list[str]()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(form())
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        lines += stream.getvalue().split("\n")[:-1]


@pytest.mark.parametrize("form", [PlainLines, JsonLines])
def test_a_path_is_escaped_and_cut_in_the_log(form: type[logging.Formatter]) -> None:
    with _logged(form) as lines, serve() as server:
        server.get(f"/%0A12:00:00%20INFO%20GET%20/x%20200%1b[2J%E2%80%A8%E2%80%AE%7f{'a' * 5000}")
    (line,) = lines
    assert line.isprintable()
    assert len(line) < 1000
    assert "/\\n12:00:00" in line.replace("\\\\", "\\")


@pytest.mark.parametrize("form", [PlainLines, JsonLines])
def test_the_reason_of_a_refusal_is_in_its_line(form: type[logging.Formatter]) -> None:
    """Whoever refuses: an endpoint, the path's lookup, the query, the key's check, the limit on a body."""
    with _logged(form) as lines, serve(api_keys=("secret",), max_body_bytes=100) as server:
        key = {"authorization": "Bearer secret"}
        server.post("/v1/completions", {"promt": "hi"}, **key)
        server.get("/v1/model", **key)
        server.get("/v1/completions", **key)
        server.get("/stats?since=x", **key)
        server.get("/v1/models", authorization="Bearer another-secret")
        server.post("/v1/completions", {"prompt": "private " * 100}, **key)
        server.post("/v1/chat/completions", {"messages": "my private thing"}, **key)
    assert len(lines) == 7
    for line, status, said in zip(
        lines,
        (400, 404, 405, 400, 401, 413, 400),
        (
            "promt: there is no such parameter here; did you mean 'prompt'?",
            "there is no /v1/model: did you mean /v1/models?",
            "GET /v1/completions: Method Not Allowed",
            "since: Input should be a valid number, unable to parse string as a number",
            "this server asks for a key: send the header 'Authorization: Bearer KEY', and the one that was sent is not "
            "right",
            "the body has 813 bytes or more: this server takes 100 (--max-body-bytes)",
            "messages: input should be a valid list",  # without what was given, which the client is told
        ),
    ):
        if form is JsonLines:
            assert (json.loads(line)["status"], json.loads(line)["error"]) == (status, said)
        else:
            assert f" {status} request_id=" in line
            assert line.endswith(f" error={said}")
        assert not re.search("secret|private", line)


@pytest.mark.parametrize("form", [PlainLines, JsonLines])
def test_what_a_refusal_quotes_forges_nothing_in_the_log(form: type[logging.Formatter]) -> None:
    with _logged(form) as lines, serve() as server:
        server.post("/v1/completions", {"prompt": "a", "model": f"{FORGED} finish=stop {'a' * 5000}"})
        server.post("/v1/completions", {"prompt": "a", FORGED * 100: 1})
    assert len(lines) == 2
    for line in lines:
        assert line.isprintable()
        assert len(line) < 1000
        if form is PlainLines:
            assert " error=" in line.partition("finish=")[0] + " "


@pytest.mark.parametrize("form", [PlainLines, JsonLines])
@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\na: %b\r\n\r\n" % (b"b" * 20_000)],
    ids=["tls", "no host", "long"],
)
def test_so_is_that_of_what_is_no_request(form: type[logging.Formatter], sent: bytes) -> None:
    with (
        _logged(form) as lines,
        serve() as server,
        socket.create_connection(("127.0.0.1", server.port)) as client,
        contextlib.suppress(ConnectionError),
    ):
        client.sendall(sent)
        while client.recv(4096):
            pass
    (line,) = lines
    said = "this is no request of HTTP/1.1, or its headers have more than 16,384 bytes"
    if form is JsonLines:
        assert (json.loads(line)["status"], json.loads(line)["error"]) == (400, said)
    else:
        assert line.endswith(f" INFO 400 without a whole request error={said}")


def test_what_a_folder_says_at_start_up_is_one_line() -> None:
    """Its end token, its defaults and the entries that are ignored come from files."""
    tokenizer = SimpleNamespace(eos_token=FORGED, eos_token_id=1, convert_ids_to_tokens=lambda each: FORGED)
    found = GenerationDefaults(frozenset({7}), stop_strings=(FORGED * 100,), ignored={FORGED: FORGED * 1000})
    words = _generation_words(FolderOptions(Path()), found, tokenizer)
    first, second = words.split("\n")
    assert second.startswith("warning: ")
    assert first.isprintable()
    assert second.isprintable()
    assert len(words) < 3000
    many = GenerationDefaults(frozenset(range(2, 5000)))
    assert _generation_words(FolderOptions(Path()), many, tokenizer).count("12:00:00") < 50


def test_an_error_that_quotes_a_file_is_one_line_without_commands(capsys: pytest.CaptureFixture[str]) -> None:
    errors.report(ValueError("of \x1b[2J\x9b1m\u202e a file\nmore"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert line.startswith("error: of \\x1b[2J")
