"""``shardfuse serve``, ``generate`` and ``chat``: the arguments of the commands that load a model."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..kernels.runtime.names import expected
from .options import Debug

if TYPE_CHECKING:
    from .opening import Opening

# The options of these commands for the model to load; _opening reads them from the context.
Model = Annotated[
    Path | None, typer.Argument(help="Folder of a model: config.json, weights in safetensors, a tokenizer.")
]
Tiny = Annotated[bool, typer.Option("--tiny", help="Instead of a folder: a small random model, made at once.")]
Name = Annotated[str | None, typer.Option(help="The model's name for clients. Default: its folder's name.")]
Ranks = Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks to start, unless torchrun has started them.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda. Default: a GPU if there is one.")]
Dtype = Annotated[str | None, typer.Option(help="fp32, bf16 or fp16. Default: the folder's.")]
CacheGib = Annotated[float | None, typer.Option(help="Memory for keys and values on each rank, in GiB.")]
KvDtype = Annotated[str | None, typer.Option(help="Dtype of keys and values, fp8 or int8. Default: the model's.")]
MaxModelLen = Annotated[int | None, typer.Option(help="The most tokens of a prompt and its answer together.")]
MaxNumSeqs = Annotated[int, typer.Option(help="The most answers computed at once.")]
MaxNumBatchedTokens = Annotated[int, typer.Option(help="The most tokens per step.")]
ChatTemplate = Annotated[Path | None, typer.Option(help="File of a chat template, instead of the tokenizer's.")]
GenerationConfig = Annotated[
    str,
    typer.Option(
        metavar="auto|vllm|FOLDER",
        help="Defaults of requests: auto, of the model's generation_config.json; vllm, none; or another folder's.",
    ),
]
ToolCallParser = Annotated[
    str,
    typer.Option(
        metavar="auto|NAME",
        help="Format in which the model calls tools: hermes, llama3, mistral, pythonic, qwen3-coder, or an installed "
        "package's; auto, as its chat template does.",
    ),
]
Invariant = Annotated[bool, typer.Option("--invariant", help="No bit of an answer depends on other requests; slower.")]


_LEVELS = ("debug", "info", "warning", "error")


def _opening(context: typer.Context, **more: Any) -> Opening:
    """The model to open, from the options above; ``more`` are fields of FolderOptions."""
    from ..serving.folder_options import FolderOptions
    from .opening import Opening

    given = context.params
    if (given["model"] is None) != given["tiny"]:
        raise typer.BadParameter("expected the folder of a model, or --tiny", param_hint="MODEL")
    names = {each.name for each in fields(FolderOptions)} - {"folder"}
    options = {name: value for name, value in {**given, **more}.items() if name in names}
    if given["chat_template"] is not None:
        options["chat_template"] = Path(given["chat_template"])
    folder = FolderOptions(Path(given["model"] or ""), **options)
    return Opening(folder, given["tiny"], given["tp"])


def _name(name: str | None, model: Path | None) -> str:
    """The model's name for clients. An empty one is returned, too: ServerOptions refuses it."""
    from ..serving.printable import printable

    if name is not None:
        return name
    return "tiny" if model is None else printable(model.resolve().name)


def _api_keys(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    """The keys on the command line and in ``file``, else the one in the environment: a variable that is set and empty
    is no key.
    """
    from ..serving.server.keys import read_keys

    if given or file is not None:
        return (*(given or ()), *(() if file is None else read_keys(file)))
    variable = os.environ.get("SHARDFUSE_API_KEY")
    return () if variable is None else (variable,)


def _limit(help: str, **more: Any) -> Any:
    """An option of the server's limits, in the order of the table in docs/server.md."""
    return typer.Option(help=help, rich_help_panel="Limits", **more)


def serve(
    context: typer.Context,
    model: Model = None,
    tiny: Tiny = False,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 8000,
    name: Name = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="A key that clients need; may be repeated. Default: SHARDFUSE_API_KEY, if it is set."),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File of such keys, one a line; those that begin with # are comments.")
    ] = None,
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="A Host, beside the server's own, that requests may name where no key is needed; may be repeated. "
            "A network of addresses, or * for any, is possible."
        ),
    ] = None,
    protect_metrics: Annotated[
        bool, typer.Option("--protect-metrics", help="All paths but /health need a key, /metrics and the page too.")
    ] = False,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address of a proxy whose X-Forwarded-For names the client; may be repeated."),
    ] = None,
    tp: Ranks = 1,
    device: Device = None,
    dtype: Dtype = None,
    cache_gib: CacheGib = None,
    kv_dtype: KvDtype = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 32,
    max_num_batched_tokens: MaxNumBatchedTokens = 512,
    chat_template: ChatTemplate = None,
    tool_call_parser: ToolCallParser = "auto",
    generation_config: GenerationConfig = "auto",
    invariant: Invariant = False,
    max_queued_requests: Annotated[
        int, _limit("Answers that may wait; more get 429, and one request for more 400.")
    ] = 1024,
    max_body_bytes: Annotated[int, _limit("The most bytes of a request; more get 413.")] = 2 * 1024 * 1024,
    max_body_memory_mib: Annotated[
        int, _limit("The most memory of a request's numbers, texts, lists and objects; more get 413.")
    ] = 8,
    max_answer_bytes: Annotated[
        int, _limit("The most bytes of an answer that is not streamed; for one with more, 400.")
    ] = 64 * 1024 * 1024,
    max_tokenized_tokens: Annotated[
        int, _limit("The most tokens that /tokenize and /detokenize take, else 400.")
    ] = 131_072,
    max_logprobs: Annotated[
        int, _limit("The most log-probabilities for one token, else 400; -1: the whole vocabulary.", min=-1)
    ] = 20,
    max_connections: Annotated[
        int, _limit("The most connections, fewer if the process may open fewer files; more get 503.")
    ] = 4096,
    max_connections_per_address: Annotated[
        int | None, _limit("Of these, from one address. Default: three quarters.")
    ] = None,
    header_timeout: Annotated[float, _limit("Seconds in which a request's headers must come, else 408.")] = 10,
    send_timeout: Annotated[
        float, _limit("Seconds in which a client must send its body, else 408, or read a piece of its answer.")
    ] = 60,
    request_timeout: Annotated[float | None, _limit("The most seconds that an answer may take, else 408.")] = None,
    health_timeout: Annotated[float, _limit("Seconds that a step may take before /health answers 503.")] = 60,
    guide_timeout: Annotated[
        float, _limit("Seconds of processor time in which a schema or grammar must compile, else 400.")
    ] = 10,
    guide_memory_mib: Annotated[
        int, _limit("Memory of all compiled schemas and grammars; one may take a quarter, else 400.")
    ] = 1024,
    drain_timeout: Annotated[float, typer.Option(help="Seconds that open requests have after SIGTERM.")] = 60,
    warmup: Annotated[bool, typer.Option("--warmup/--no-warmup", help="Run a step of every size first.")] = True,
    log: Annotated[str, typer.Option(help="Format of the log: text or json.")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    debug_endpoints: Annotated[bool, typer.Option("--debug-endpoints", help="Answer /debug/leaks.")] = False,
    debug: Debug = False,
) -> None:
    """Serve a model with OpenAI's API, on this machine only unless --host says otherwise."""
    from . import opening
    from . import serve as command

    opening.check_installed("serve", command.NEEDED)
    if log not in ("text", "json"):
        raise typer.BadParameter(f"{log!r}: {expected(log, ('text', 'json'))}", param_hint="--log")
    if log_level not in _LEVELS:
        raise typer.BadParameter(f"{log_level!r}: {expected(log_level, _LEVELS)}", param_hint="--log-level")
    guides = {"guide_timeout_s": guide_timeout, "guide_memory_mib": guide_memory_mib}
    model_options = _opening(context, max_queued_requests=max_queued_requests, **guides)

    from ..serving.server.hosts import own_hosts
    from ..serving.server.options import ServerOptions, check_seconds

    check_seconds("--drain-timeout", drain_timeout, zero=True)
    server = ServerOptions(
        name=_name(name, model),
        api_keys=_api_keys(api_key, api_key_file),
        allowed_hosts=(*own_hosts(host), *(allowed_hosts or ())),
        protect_metrics=protect_metrics,
        trusted_proxies=tuple(trusted_proxy or ()),
        max_body_bytes=max_body_bytes,
        max_body_memory_mib=max_body_memory_mib,
        max_answer_bytes=max_answer_bytes,
        max_tokenized_tokens=max_tokenized_tokens,
        tool_call_parser=tool_call_parser,
        max_logprobs=max_logprobs,
        max_connections=max_connections,
        max_connections_per_address=max_connections_per_address,
        header_timeout_s=header_timeout,
        send_timeout_s=send_timeout,
        health_timeout_s=health_timeout,
        request_timeout_s=request_timeout,
        debug=debug_endpoints,
    )
    options = command.ServeOptions(
        model_options,
        server,
        host,
        port,
        drain_timeout,
        warm_up=warmup,
        log=log,
        log_level=log_level,
    )
    raise typer.Exit(command.run_serve(options))


Temperature = Annotated[
    float | None,
    typer.Option(
        help="Above 0: sample tokens. Default: by --generation-config, else 0, the likeliest ones; with --input 1."
    ),
]
TopP = Annotated[
    float | None, typer.Option(help="Sample from the fewest likeliest tokens with this total probability.")
]
TopK = Annotated[int | None, typer.Option(help="Sample from this many of the likeliest tokens.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling. Default: a random one.")]
_SAMPLING = ("temperature", "top_p", "top_k", "seed")


def generate(
    context: typer.Context,
    model: Model = None,
    text: Annotated[
        str | None,
        typer.Argument(help="A question, or a text to continue. Default: standard input."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The same text, as an option.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, though the model has a chat template.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Refuse a model without a chat template, instead of continuing the text.")
    ] = False,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The most tokens of the answer. Default: by --generation-config, else 256; never beyond the context.",
        ),
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File of a JSON schema that the answer has to follow.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Pattern that the whole answer has to match.")] = None,
    input: Annotated[
        str | None,
        typer.Option(
            metavar="IN.jsonl", help="Instead of a prompt: a file with a request body on each line; - is stdin."
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="OUT.jsonl", help="With --input: the file for the answers, one per line; - is stdout."),
    ] = None,
    name: Name = None,
    tiny: Tiny = False,
    tp: Ranks = 1,
    device: Device = None,
    dtype: Dtype = None,
    cache_gib: CacheGib = None,
    kv_dtype: KvDtype = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 32,
    max_num_batched_tokens: MaxNumBatchedTokens = 512,
    chat_template: ChatTemplate = None,
    tool_call_parser: ToolCallParser = "auto",
    generation_config: GenerationConfig = "auto",
    invariant: Invariant = False,
    debug: Debug = False,
) -> None:
    """Answer one prompt by the model's chat template, if it has one, or with --input a file of prompts.

    After an interruption the same command continues with the rest of the file.
    """
    if text is not None and prompt is not None:
        raise typer.BadParameter("the text is given twice, as an argument and by --prompt: leave one of them out")
    if chat and raw:
        raise typer.BadParameter("--chat and --raw: expected one of them")
    prompt = prompt if text is None else text
    given = {name: context.params[name] for name in ("max_tokens", "regex", *_SAMPLING)}
    given = {name: value for name, value in {**given, "prompt": prompt}.items() if value is not None}
    given |= {name: True for name in ("chat", "raw", "stop", "json_schema") if context.params[name]}
    if (input is None) != (output is None):
        missing = "--output OUT.jsonl" if output is None else "--input IN.jsonl"
        raise typer.BadParameter(f"--input and --output go together: expected {missing} too, or neither")
    if input is not None and output is not None:
        if given:
            option = f"--{min(given).replace('_', '-')}"
            raise typer.BadParameter(f"{option} belongs to a single prompt: with --input, set it in each line")
        from .generate_batch import BatchOptions, run_batch

        opening = _opening(context, max_queued_requests=None)
        batch = BatchOptions(opening, _name(name, model), input, output, tool_call_parser)
        raise typer.Exit(run_batch(batch))
    if tool_call_parser != "auto":
        raise typer.BadParameter("--tool-call-parser belongs to a file of prompts: expected --input and --output too")
    if json_schema is not None and regex is not None:
        raise typer.BadParameter("--json-schema and --regex: expected one of them")
    from .generate import GenerateOptions, run_generate

    options = GenerateOptions(
        _opening(context, max_num_seqs=1),
        prompt,
        chat=True if chat else False if raw else None,
        max_tokens=max_tokens,
        sampling={name: given[name] for name in _SAMPLING if name in given},
        stop=tuple(stop or ()),
        json_schema=json_schema,
        regex=regex,
    )
    raise typer.Exit(run_generate(options))


def chat(
    context: typer.Context,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="Text of a system message, which begins every chat.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="The most tokens of an answer. Default: by --generation-config, else the context."),
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    tiny: Tiny = False,
    tp: Ranks = 1,
    device: Device = None,
    dtype: Dtype = None,
    cache_gib: CacheGib = None,
    kv_dtype: KvDtype = None,
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: MaxNumBatchedTokens = 512,
    chat_template: ChatTemplate = None,
    generation_config: GenerationConfig = "auto",
    invariant: Invariant = False,
    debug: Debug = False,
) -> None:
    """Talk with an instruct model in the terminal. Ctrl-C stops an answer, Ctrl-D leaves."""
    from .chat import ChatOptions, run_chat

    given = {name: context.params[name] for name in _SAMPLING}
    sampling = {name: value for name, value in given.items() if value is not None}
    raise typer.Exit(run_chat(ChatOptions(_opening(context, max_num_seqs=1), system, max_tokens, sampling)))
