"""The page at /: a text box that streams, the tree of every step, and the speed beside plain decoding."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, StreamingResponse

from stree.decode.step_records import StepRecord
from stree.decode.stop_strings import TokenBytes
from stree.drafters import NoDrafter
from stree.generation import generate
from stree.serving.answers import Choice, token_name
from stree.serving.engine import Engine
from stree.serving.openai_api import OpenAIAPI, event
from stree.serving.protocol import DemoRequest

__all__ = ["add_page"]

PLAIN_TOKENS = 24  # that plain decoding writes to be timed


def add_page(app: FastAPI, api: OpenAIAPI, engine: Engine) -> None:
    """Add the page, and POST /demo/stream, from which it reads.

    Args:
        app: of the server.
        api: submits texts.
        engine: whose target is timed.
    """
    timing = CapacityLimiter(1)  # plain decoding of one page at once
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

    @app.get("/", response_class=HTMLResponse)
    async def page() -> str:
        return html

    @app.post("/demo/stream", response_model=None)
    async def stream(body: DemoRequest) -> Any:
        choice = await api.submit_text(body.prompt, body.max_tokens, body.temperature)
        return StreamingResponse(_events(choice, engine, api.token_bytes, timing), media_type="text/event-stream")


async def _events(
    choice: Choice, engine: Engine, token_bytes: TokenBytes, timing: CapacityLimiter
) -> AsyncIterator[str]:
    """Yield an event a step, with its piece of text, tokens and seconds so far, and its tree; then plain's speed."""
    handle, began = choice.handle, time.perf_counter()

    def state(piece: str) -> dict[str, Any]:
        return {"text": piece, "tokens": len(handle.tokens), "seconds": time.perf_counter() - began}

    try:
        async for step in handle:
            tree = None if step.tree is None else _named(step.tree, token_bytes)
            yield event({**state(choice.text.push(step.tokens)), "tree": tree})
        yield event(state(choice.text.push([], is_last=True)))
        plain = await anyio.to_thread.run_sync(_plain_speed, engine, handle.prompt, limiter=timing)
        yield event({"plain": plain})
    finally:
        handle.cancel()


def _named(tree: StepRecord, token_bytes: TokenBytes) -> dict[str, Any]:
    """Give the nodes their text."""
    names = [token_name(token_bytes, token) for token in tree.tokens]
    return {"tokens": names, "parents": tree.parents, "path": tree.path}


def _plain_speed(engine: Engine, prompt: list[int]) -> float:
    """Time plain decoding of the same prompt: tokens a second, prefill apart."""
    count = min(PLAIN_TOKENS, engine.max_length - len(prompt))
    stats = generate(engine.lm, [prompt], NoDrafter(), max_new_tokens=count, ignore_eos=True).stats
    speed: float = (stats["num_new_tokens"][0] - 1) / max(stats["total_s"] - stats["prefill_s"], 1e-9)
    return speed
