"""The choices of one HTTP request: each is a request of the engine whose tokens become text as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from stree.decode.logprobs import TokenLogprob
from stree.serving.errors import APIError
from stree.serving.handle import RequestHandle
from stree.serving.text import IncrementalText

__all__ = ["Choice", "Piece", "chat_logprobs", "completion_logprobs", "merged", "usage"]

LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step adds to a choice.

    Attributes:
        index: of the choice.
        text: that is certain now.
        logprobs: of the step's tokens, where they are wanted.
        finish_reason: "stop" or "length" in the last piece, else None.
        offset: characters before it.
    """

    index: int
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    offset: int


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
                offset, new = len(self.text.text), step.logprobs or []
                self.logprobs += new
                yield Piece(self.index, self.text.push(step.tokens), new, None, offset)
        except RuntimeError as error:
            raise APIError(500, str(error)) from error
        reason = self.handle.finish_reason or "stop"
        if reason == "cancelled":
            raise APIError(503, "the request was cancelled: the server stops")
        offset = len(self.text.text)
        yield Piece(
            self.index, self.text.push([], is_last=True), [], "stop" if self.text.is_stopped else reason, offset
        )


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


def usage(choices: Sequence[Choice], num_prompt_tokens: int) -> dict[str, Any]:
    """Count tokens as OpenAI does: prompts once, whatever the number of their texts."""
    new = sum(len(choice.handle.tokens) for choice in choices)
    cached = max((choice.handle.num_cached for choice in choices), default=0)
    return {
        "prompt_tokens": num_prompt_tokens, "completion_tokens": new, "total_tokens": num_prompt_tokens + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


def completion_logprobs(found: Sequence[TokenLogprob], tokenizer: Any, offset: int) -> dict[str, Any]:
    """Write log probabilities as /v1/completions does."""
    names = [_name(tokenizer, one.token) for one in found]
    offsets = [offset + sum(map(len, names[:place])) for place in range(len(names))]
    return {
        "tokens": names, "token_logprobs": [_finite(one.logprob) for one in found], "text_offset": offsets,
        "top_logprobs": [{_name(tokenizer, token): _finite(value) for token, value in one.top} for one in found],
    }  # fmt: skip


def chat_logprobs(found: Sequence[TokenLogprob], tokenizer: Any) -> dict[str, Any]:
    """Write log probabilities as /v1/chat/completions does."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        name = _name(tokenizer, token)
        return {"token": name, "logprob": _finite(logprob), "bytes": [*name.encode()]}

    content = [{**one(each.token, each.logprob), "top_logprobs": [one(*other) for other in each.top]} for each in found]
    return {"content": content, "refusal": None}


def _name(tokenizer: Any, token: int) -> str:
    name: str = tokenizer.decode([token])
    return name


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
