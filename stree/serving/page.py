"""The page at /: a form whose text streams beside plain decoding's, and the tree of every step."""

from __future__ import annotations

import inspect
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

BY_RATIO = "by the ratio of the target's probability to the draft's"
VERIFIERS = {
    "auto": f"Drafted tokens are accepted where the target has the same ones; those that were drawn, {BY_RATIO}.",
    "match": "A drafted token is accepted where the target draws the same one.",
    "rejection": f"Drawn tokens are accepted one after the other, {BY_RATIO}.",
    "traversal": f"Drawn tokens are accepted by whole branches, {BY_RATIO}.",
    "block": f"Drawn tokens of a chain are accepted together, {BY_RATIO}.",
}
APART_S = 0.05  # between two pieces of a stream: writing one takes time that the engine's thread then lacks
HEADERS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}


def add_page(app: FastAPI, api: OpenAIAPI, engine: Engine, *, needs_key: bool) -> None:
    """Add the page, and POST /demo/stream, from which it reads.

    Args:
        app: of the server.
        api: submits texts.
        engine: decodes them.
        needs_key: whether requests need a key, for which the page then has a field.
    """
    server = {"model": api.card["id"], "needs_key": needs_key, **_settings(engine), "words": _words(engine)}
    html, policy = page_document({"server": server})
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


def _words(engine: Engine) -> list[tuple[str, str]]:
    """Return the names of the drafter, growth, tree size and verifier, each with a sentence that says what it does."""
    settings = engine.settings
    drafter, growth, rule = settings.drafter, settings.growth or settings.drafter.default_growth, settings.verifier
    words = [("drafter", drafter)] + [("growth", growth)] * (drafter.uses_growth and growth is not None)
    found = [(f"{role} {type(one).__name__}", (inspect.getdoc(one) or "").split("\n\n")[0]) for role, one in words]
    if settings.budget == "auto":
        size = "Each step takes the tree size with the most expected tokens a second (goodput), or no tree."
        found.append(("tree size auto", size))
    if (name := name_of(rule)) in VERIFIERS:
        found.append((f"verifier {name}", f"{VERIFIERS[name]} The text is distributed as the target's own."))
    return found


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
        async for steps in handle.new_steps(APART_S):
            began = began or time.perf_counter()
            now = engine.stats
            is_shared |= now["running"] + now["waiting"] > 1
            spent = times()
            pieces = [(step, choice.text.push(step.tokens)) for step in steps]
            written = (step_json(step.tokens, piece, step.tree, api.token_bytes) for step, piece in pieces)
            yield "".join(event({**one, **spent}) for one in written)
        if handle.finish_reason == "cancelled":
            yield error_event(APIError(503, "the request was cancelled: the server stops"))
            return
        yield event({"text": choice.text.push([], is_last=True), "finish_reason": handle.finish_reason, **times()})
    except RuntimeError as error:
        yield error_event(APIError(500, str(error)))
    finally:
        handle.cancel()
