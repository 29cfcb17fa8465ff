"""The choices of one HTTP request: each is a request of the engine whose tokens become text as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from stree.decode.logprobs import TokenLogprob
from stree.decode.stop_strings import TokenBytes
from stree.decode.text import IncrementalText, TextToken
from stree.serving.document import token_name
from stree.serving.errors import APIError
from stree.serving.handle import RequestHandle

__all__ = [
    "Choice", "Piece", "acceptance", "chat_logprobs", "completion_logprobs", "merged", "unless_left", "usage",
    "whole_pieces",
]  # fmt: skip

LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step adds to a choice.

    Attributes:
        index: of the choice.
        text: that is certain now.
        logprobs: of the step's tokens, where they are wanted.
        tokens: where the step's tokens are in the text of the choice.
        finish_reason: "stop" or "length" in the last piece, else None.
    """

    index: int
    text: str
    logprobs: list[TokenLogprob]
    tokens: list[TextToken]
    finish_reason: str | None


@dataclass(slots=True)
class Choice:
    """One text of an answer.

    Attributes:
        index: among the choices.
        handle: of the engine.
        text: of its tokens.
        logprobs: of all its tokens, where they are wanted.
    """

    index: int
    handle: RequestHandle
    text: IncrementalText
    logprobs: list[TokenLogprob] = field(default_factory=list)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield what each step adds, and at the end the finish reason.

        Raises:
            APIError: decoding failed.
        """
        try:
            async for step in self.handle:
                new, piece = step.logprobs or [], self.text.push(step.tokens)
                self.logprobs += new
                yield Piece(self.index, piece, new, self.text.tokens[-len(step.tokens) :], None)
        except RuntimeError as error:
            raise APIError(500, str(error)) from error
        reason = self.handle.finish_reason or "stop"
        if reason == "cancelled":
            raise APIError(503, "the request was cancelled: the server stops")
        rest = self.text.push([], is_last=True)
        yield Piece(self.index, rest, [], [], "stop" if self.text.is_stopped else reason)


async def merged(choices: Sequence[Choice]) -> AsyncIterator[Piece]:
    """Yield the pieces of several choices as they come; an error of one ends all."""
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

    async def read(choice: Choice) -> None:
        try:
            async for piece in choice.pieces():
                queue.put_nowait(piece)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(read(choice)) for choice in choices]
    try:
        left = len(tasks)
        while left:
            piece = await queue.get()
            if isinstance(piece, BaseException):
                raise piece
            if piece is None:
                left -= 1
            else:
                yield piece
    finally:
        for task in tasks:
            task.cancel()


async def whole_pieces(choices: Sequence[Choice]) -> list[Piece]:
    """Wait for all choices; return each as one piece."""
    reasons = dict[int, str | None]()
    async for piece in merged(choices):
        reasons[piece.index] = piece.finish_reason
    return [Piece(each.index, each.text.text, each.logprobs, each.text.tokens, reasons[each.index]) for each in choices]


async def unless_left(request: Request, work: Awaitable[list[Piece]]) -> list[Piece]:
    """Wait for work unless the client leaves before.

    Raises:
        APIError: it has left: there is no one to answer.
    """

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.create_task(left())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()  # type: ignore[return-value]
        raise APIError(499, "the client has left")
    finally:
        for task in tasks:
            task.cancel()


def usage(choices: Sequence[Choice], num_prompt_tokens: int) -> dict[str, Any]:
    """Count tokens as OpenAI does: prompts once, whatever the number of their texts."""
    new = sum(len(choice.handle.tokens) for choice in choices)
    cached = max((choice.handle.num_cached for choice in choices), default=0)
    return {
        "prompt_tokens": num_prompt_tokens, "completion_tokens": new, "total_tokens": num_prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


def acceptance(choices: Sequence[Choice]) -> dict[str, Any] | None:
    """Return vLLM's ``metrics.speculative_decoding`` of one text; None for several.

    Steps are counted before the text is cut at its end, as everywhere.  ``num_spec_tokens`` is the most drafted nodes
    that a step has accepted, since trees differ in depth; the histogram has one bucket more, also without any step.
    """
    if len(choices) != 1:
        return None
    handle = choices[0].handle
    by_accepted, drafted = handle.counts.steps_by_accepted or [0], handle.drafted
    steps = handle.counts.steps
    accepted = handle.counts.tokens - steps
    return {
        "mean_acceptance_length": 1 + accepted / max(steps, 1), "draft_acceptance_rate": accepted / max(drafted, 1),
        "acceptance_histogram": [*by_accepted], "num_spec_steps": steps, "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted, "num_spec_tokens": len(by_accepted) - 1,
    }  # fmt: skip


def completion_logprobs(piece: Piece, token_bytes: TokenBytes) -> dict[str, Any]:
    """Write log probabilities as /v1/completions does: the token's own is always among the alternatives.

    Two alternatives that add the same text get names of their own.
    """
    names, tops, mark = [], [], "bytes:"
    for found, place in zip(piece.logprobs, piece.tokens, strict=False):  # no logprobs where none are wanted
        names.append(token_name(token_bytes, found.token, is_first=place.is_first, mark=mark))
        top = dict[str, float]()
        is_in_top = any(token == found.token for token, _ in found.top)
        for token, value in found.top if is_in_top else [*found.top, (found.token, found.logprob)]:
            name = token_name(token_bytes, token, is_first=place.is_first, mark=mark)
            is_taken = name in top or (name == names[-1] and token != found.token)
            top[f"token_id:{token}" if is_taken else name] = _finite(value)
        tops.append(top)
    return {
        "tokens": names, "token_logprobs": [_finite(found.logprob) for found in piece.logprobs],
        "text_offset": [place.offset for place in piece.tokens[: len(names)]], "top_logprobs": tops,
    }  # fmt: skip


def chat_logprobs(piece: Piece, token_bytes: TokenBytes) -> dict[str, Any]:
    """Write log probabilities as /v1/chat/completions does; a token that the text does not show has no bytes."""

    def one(token: int, logprob: float, is_first: bool) -> dict[str, Any]:
        own = token_bytes.piece(token)
        shown = (own.first if is_first else own.later) if own.is_shown else b""
        name = token_name(token_bytes, token, is_first=is_first)
        return {"token": name, "logprob": _finite(logprob), "bytes": [*shown]}

    content = []
    for found, place in zip(piece.logprobs, piece.tokens, strict=False):
        top = [one(*other, place.is_first) for other in found.top]
        content.append({**one(found.token, found.logprob, place.is_first), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
