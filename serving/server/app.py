"""The server's application: OpenAI's endpoints over one engine, and endpoints for operators."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import hashlib
import os
import re
import threading
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from . import answers, bodies, chat, completions, errors, history, protocol, responses_api, tokenizing
from .answers import described
from .door import Door
from .errors import ApiError, ErrorBody
from .protocol_responses import ResponseRequest
from .responses import DONE, Whole, streamed, unless_gone
from .served import Caller, Served

_SAMPLE_S = 1.0  # between two points of the live page's plots
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": what}
    for status, what in {
        400: "The request is wrong.",
        401: "The key is missing or wrong.",
        404: "There is no such model, or no such path.",
        405: "The path has another method.",
        408: "It took too long.",
        413: "The body is too large.",
        429: "The queue is full; Retry-After says when to try again.",
        500: "The model or the server failed.",
        503: "The server is draining, or a rank is lost.",
    }.items()
}
_BODIES = (
    *(protocol.CompletionRequest, protocol.ChatRequest, ResponseRequest),
    *(protocol.TokenizeRequest, protocol.DetokenizeRequest),
)
_SCHEMA = "#/components/schemas/{model}"
_PAGE = Path(__file__).with_name("page.html")


def create_app(served: Served) -> FastAPI:
    """The application that serves ``served``; its lifespan opens and closes the AsyncEngine."""
    recent = history.History(served)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with served.opened():
            sampler = asyncio.create_task(recent.sample(_SAMPLE_S))
            try:
                yield
            finally:
                sampler.cancel()
                await asyncio.gather(sampler, return_exceptions=True)

    app = FastAPI(
        title="shardfuse",
        version=version("shardfuse"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=_ERRORS,
    )
    errors.install(app)
    app.add_middleware(Door, served=served)
    options = served.options

    def post(path: str, tag: str, kind: type[BaseModel], answer: type[BaseModel], *more: str) -> Any:
        """A POST endpoint, described with a body of ``kind``; :func:`bodies.read` reads it."""
        content = {"application/json": {"schema": {"$ref": _SCHEMA.format(model=kind.__name__)}}}
        return app.post(
            path,
            tags=[tag],
            responses=described(answer, *more),
            openapi_extra={"requestBody": {"content": content, "required": True}},
        )

    @post("/v1/completions", "OpenAI", protocol.CompletionRequest, answers.Completion, "text/event-stream")
    async def create_completion(request: Request) -> Response:
        """Complete prompts, given as text or tokens."""
        return await _answer(completions, await bodies.read(request, protocol.CompletionRequest, served), request)

    @post("/v1/chat/completions", "OpenAI", protocol.ChatRequest, answers.Chat, "text/event-stream")
    async def create_chat_completion(request: Request) -> Response:
        """Generate the next message of a chat."""
        return await _answer(chat, await bodies.read(request, protocol.ChatRequest, served), request)

    @post("/v1/responses", "OpenAI", ResponseRequest, answers.ResponseObject, "text/event-stream")
    async def create_response(request: Request) -> Response:
        """Generate the next message of a conversation, which is not stored."""
        return await _answer(responses_api, await bodies.read(request, ResponseRequest, served), request, b"")

    @app.api_route("/v1/responses/{name:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def stored_response(name: str) -> Response:
        raise ApiError(404, f"there is no response {name!r}: this server stores none", code="not_found")

    async def _answer(kind: Any, body: Any, request: Request, last: bytes = DONE) -> Response:
        served.check_model(body.model)
        if body.stream_options is not None and not body.stream:
            raise errors.invalid("stream_options without stream: set stream to true", "stream_options")
        caller = _caller(request)
        if body.stream:
            chunks = _counted(served, kind.stream(served, body, caller))
            return await streamed(request, chunks, options.send_timeout_s, last)
        with served.counted():
            return Whole(await unless_gone(request, kind.complete(served, body, caller)), options.send_timeout_s)

    @app.get("/v1/models", tags=["OpenAI"], responses=described(answers.Models))
    async def list_models() -> dict[str, Any]:
        """List the served model."""
        return {"object": "list", "data": [_model(served)]}

    @app.get("/v1/models/{model:path}", tags=["OpenAI"], responses=described(answers.Model))
    async def get_model(model: str) -> dict[str, Any]:
        """Describe the served model, by its name."""
        served.check_model(model)
        return _model(served)

    @post("/tokenize", "vLLM", protocol.TokenizeRequest, answers.Tokens)
    async def tokenize(request: Request) -> Response:
        """Tokenize a text, or the messages of a chat."""
        body = await bodies.read(request, protocol.TokenizeRequest, served)
        return Whole(await tokenizing.tokenize(served, body, _caller(request)), options.send_timeout_s)

    @post("/detokenize", "vLLM", protocol.DetokenizeRequest, answers.Text)
    async def detokenize(request: Request) -> Response:
        """Convert tokens to text."""
        body = await bodies.read(request, protocol.DetokenizeRequest, served)
        return Whole(await tokenizing.detokenize(served, body), options.send_timeout_s)

    @app.get("/health", tags=["operation"], responses=described(answers.Health))
    async def health() -> Response:
        """200 while the engine generates tokens in time; otherwise 503 with the reason. Answers that ended because the
        model's logits were NaN or infinite are counted in either case."""
        wrong = await served.health()
        if wrong:
            raise errors.unavailable(wrong, "unhealthy", 5)
        not_finite = served.not_finite()
        return JSONResponse({"status": "ok"} | ({"logits_not_finite": not_finite} if not_finite else {}))

    @app.get("/version", tags=["operation"], responses=described(answers.Version))
    async def get_version() -> dict[str, str]:
        """The server's version."""
        return {"version": version("shardfuse")}

    @app.get("/metrics", tags=["operation"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus metrics, with vLLM's names."""
        served.metrics.look(served.serve.load, served.serve.newest_stats)
        return PlainTextResponse(generate_latest(served.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats", tags=["operation"])
    async def stats(since: float = 0.0) -> JSONResponse:
        """The live page's data: the load now, and the points of the last minutes that are later than ``since``."""
        return JSONResponse(recent.json(since))

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        text = _PAGE.read_text(encoding="utf-8")
        return HTMLResponse(text, headers=_page_headers(text))

    if options.debug:

        @app.get("/debug/leaks", tags=["operation"], responses=described(answers.Leaks))
        async def leaks() -> dict[str, Any]:
            """Counts of live objects in the process; they must not grow while no request is served."""
            gc.collect()
            load = served.serve.load
            return {
                "running": load.running,
                "waiting": load.waiting,
                "used_blocks": load.used_blocks,
                "open_requests": served.open_requests,
                "tasks": len(asyncio.all_tasks()),
                "threads": threading.active_count(),
                "files": _files(),
                "resident_bytes": _resident(),
            }

    _describe(app)
    return app


def _caller(request: Request) -> Caller:
    state = request.state
    return Caller(state.request_id, state.tenant, getattr(state, "client", ""), state.large)


async def _counted(served: Served, chunks: Any) -> Any:
    """``chunks``, counting their request as open from the first one to the last."""
    with served.counted():
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk


def _model(served: Served) -> dict[str, Any]:
    return {
        "id": served.options.name,
        "object": "model",
        "created": served.created,
        "owned_by": "shardfuse",
        "max_model_len": served.max_model_len,
    }


def _page_headers(text: str) -> dict[str, str]:
    """A policy by which a browser runs only the scripts and styles in ``text`` and connects to this server alone."""
    sources = {
        f"{name}-src": " ".join(
            f"'sha256-{_sha256(block)}'" for block in re.findall(rf"<{name}>(.*?)</{name}>", text, re.S)
        )
        for name in ("script", "style")
    }
    policy = {
        "default-src": "'none'",
        **sources,
        "connect-src": "'self'",
        "img-src": "data:",  # the empty icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _files() -> int | None:
    """The number of open files and sockets; None if the system does not provide it."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None


def _resident() -> int | None:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _describe(app: FastAPI) -> None:
    """Describe the bodies, which FastAPI does not read, and remove its own description of invalid requests, 422, which
    this server does not send.
    """
    described = app.openapi
    _, bodies = models_json_schema([(kind, "validation") for kind in _BODIES], ref_template=_SCHEMA)

    def openapi() -> dict[str, Any]:
        schema = described()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas |= bodies["$defs"]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
