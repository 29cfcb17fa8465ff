"""Calls of tools in an answer of a chat, as OpenAI's API writes them."""

from __future__ import annotations

import secrets
from typing import Any

from stree.tool_calls import Schemas, ToolCallReader, ToolFormat

__all__ = ["ToolAnswer"]


class ToolAnswer:
    """Writes the text of one choice as content and calls.

    Args:
        form: of the calls.
        schemas: of the tools.
        is_one: whether calls after the first are left out.
    """

    def __init__(self, form: ToolFormat, schemas: Schemas, *, is_one: bool) -> None:
        self._reader, self._is_one, self._num_calls = ToolCallReader(form, schemas), is_one, 0

    def push(self, text: str, finish_reason: str | None, *, is_whole: bool) -> tuple[dict[str, Any], str | None]:
        """Return the message, or what the next text adds to it, and the finish reason.

        Args:
            text: the next piece, or all of it.
            finish_reason: of the text; with the last piece.
            is_whole: whether the whole message is wanted.
        """
        content, calls = self._reader.push(text, is_last=finish_reason is not None)
        if self._is_one:
            calls = calls[: 1 - self._num_calls]
        written = [
            {
                **({} if is_whole else {"index": self._num_calls + place}), "id": f"call_{secrets.token_hex(12)}",
                "type": "function", "function": {"name": call.name, "arguments": call.arguments},
            }
            for place, call in enumerate(calls)
        ]  # fmt: skip
        self._num_calls += len(calls)
        has_called = self._num_calls > 0 and finish_reason == "stop"
        message: dict[str, Any] = {"content": content}
        if calls:
            message = {"content": content or (None if is_whole else ""), "tool_calls": written}
        return message, "tool_calls" if has_called else finish_reason
