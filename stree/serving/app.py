"""An HTTP server with OpenAI's API around an engine, as a FastAPI application."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware

from stree.serving.bodies import JSONRoute
from stree.serving.engine import Engine
from stree.serving.errors import APIError, add_handlers, stopping
from stree.serving.guard import Guard, OpenRequests
from stree.serving.openai_api import OpenAIAPI
from stree.serving.page import add_page
from stree.serving.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from stree.serving.responses import ResponsesRequest, respond

__all__ = ["create_app"]

ERRORS: Any = {status: {"description": "an error"} for status in (400, 401, 404, 405, 413, 429, 500, 503)}


def create_app(
    engine: Engine, tokenizer: Any, model: str, *, api_key: str | None = None, max_body: int = 8 << 20,
    has_metrics: bool = False, allowed_origins: Sequence[str] = (), replica: str = "0",
) -> FastAPI:  # fmt: skip
    """Make the application; several of them may share a process.

    Args:
        engine: decodes the requests; the caller closes it.
        tokenizer: of transformers, of the target.
        model: its name in requests and answers.
        api_key: which requests to /v1 need as a bearer token, or None.
        max_body: most bytes of a request's body.
        has_metrics: whether responses have ``metrics.speculative_decoding``, as vLLM's.
        allowed_origins: of other pages that browsers let ask this server (CORS); "*" for all.
        replica: the label ``engine`` of the metrics.

    Returns:
        The application.  No more requests are taken once ``app.state.requests.is_draining`` is True;
        ``app.state.metrics`` is what ``/metrics`` answers.
    """
    app = FastAPI(title="stree", version=version("stree"), docs_url=None, redoc_url=None)
    app.router.route_class = JSONRoute
    app.state.requests = OpenRequests()
    add_handlers(app)
    app.add_middleware(Guard, api_key=api_key, max_body=max_body, requests=app.state.requests)
    if allowed_origins:  # before the guard, since browsers ask first, without a key
        app.add_middleware(CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"])
    api = OpenAIAPI(engine, tokenizer, model, has_metrics=has_metrics, replica=replica)
    app.state.metrics = api.metrics
    _add_reports(app, api, engine)
    add_page(app, api, engine, needs_key=api_key is not None)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [api.card]}

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def one_model(name: str) -> dict[str, Any]:
        api.check_model(name)
        return api.card

    @app.post("/v1/completions", response_model=None, responses=ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Any:
        return await api.complete(body, request)

    @app.post("/v1/chat/completions", response_model=None, responses=ERRORS)
    async def chat(body: ChatRequest, request: Request) -> Any:
        return await api.chat(body, request)

    @app.post("/v1/responses", response_model=None, responses=ERRORS)
    async def responses(body: ResponsesRequest, request: Request) -> Any:
        return await respond(api, body, request)

    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        return await api.tokenize(body)

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        return await api.detokenize(body)

    return app


def _add_reports(app: FastAPI, api: OpenAIAPI, engine: Engine) -> None:
    """Add what monitors ask for."""

    @app.get("/health", responses=ERRORS)
    async def health() -> dict[str, str]:
        if engine.problem is not None:
            raise APIError(503, engine.problem)
        return {"status": "ok"}

    @app.get("/ready", responses=ERRORS)
    async def ready() -> dict[str, str]:
        if app.state.requests.is_draining:
            raise stopping("the server stops and takes no more requests")
        await health()
        return {"status": "ready"}

    @app.get("/version")
    async def versions() -> dict[str, str]:
        return {"version": version("stree")}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(api.metrics.text(), media_type="text/plain; version=0.0.4")
