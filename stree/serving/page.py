"""The page at /: a form whose text streams beside plain decoding's, and the tree of every step."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import anyio.to_thread
from fastapi import FastAPI, Response
from fastapi.responses import HTMLResponse, StreamingResponse

from stree.drafters import NoDrafter, SuffixDrafter
from stree.serving.answers import Choice
from stree.serving.document import page_document, step_json
from stree.serving.engine import Engine
from stree.serving.errors import APIError, error_event
from stree.serving.first_requests import run_first_requests
from stree.serving.openai_api import OpenAIAPI, event
from stree.serving.protocol import DemoRequest
from stree.verify import name_of

__all__ = ["add_page"]

HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


def add_page(app: FastAPI, api: OpenAIAPI, engine: Engine, *, needs_key: bool) -> None:
    """Add the page, and POST /demo/stream, from which it reads.

    Args:
        app: of the server.
        api: submits texts.
        engine: decodes them.
        needs_key: whether requests need a key, for which the page then has a field.
    """
    html, policy = page_document({"server": {"model": api.card["id"], "needs_key": needs_key, **_settings(engine)}})
    headers = {**HEADERS, "Content-Security-Policy": f"{policy}; frame-ancestors 'none'"}

    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:  # the page has one of its own
        return Response(status_code=204)

    @app.post("/demo/stream", response_model=None)
    async def stream(body: DemoRequest) -> Any:
        if engine.problem is None and not engine.stats["ended"]:  # no time that is shown has a first call's costs
            await anyio.to_thread.run_sync(run_first_requests, engine)
        events = _events(await api.submit_demo(body), api, engine)
        return StreamingResponse(events, media_type="text/event-stream", headers=HEADERS)


def _settings(engine: Engine) -> dict[str, Any]:
    """Describe how the engine drafts and verifies."""
    settings = engine.settings
    drafter, growth = settings.drafter, settings.growth or settings.drafter.default_growth
    rule = name_of(settings.verifier)
    # Nodes that SuffixDrafter retrieves are not drawn: "auto" verifies them by MATCH.
    is_match = rule == "match" or isinstance(drafter, NoDrafter) or (rule == "auto" and type(drafter) is SuffixDrafter)
    return {
        "drafter": type(drafter).__name__, "growth": str(growth) if drafter.uses_growth else None, "verifier": rule,
        "budget": settings.budget, "max_length": engine.max_length, "is_match": is_match,
    }  # fmt: skip


async def _events(choice: Choice, api: OpenAIAPI, engine: Engine) -> AsyncIterator[str]:
    """Yield an event a step, with its text, tokens and tree and the seconds so far; then how the text has ended."""
    handle, is_shared = choice.handle, False

    def times() -> dict[str, Any]:
        stats, spent = handle.stats, time.perf_counter() - began
        prefill_s = stats["first_token_s"] - stats["queue_s"]
        total_s = spent if stats["total_s"] is None else stats["total_s"] - stats["first_token_s"]
        return {"prefill_s": prefill_s, "decode_s": total_s, "is_shared": is_shared}

    try:
        began = 0.0
        async for step in handle:
            began = began or time.perf_counter()
            now = engine.stats
            is_shared |= now["running"] + now["waiting"] > 1
            piece = choice.text.push(step.tokens)
            yield event({**step_json(step.tokens, piece, step.tree, api.token_bytes), **times()})
        if handle.finish_reason == "cancelled":
            yield error_event(APIError(503, "the request was cancelled: the server stops"))
            return
        yield event({"text": choice.text.push([], is_last=True), "finish_reason": handle.finish_reason, **times()})
    except RuntimeError as error:
        yield error_event(APIError(500, str(error)))
    finally:
        handle.cancel()
