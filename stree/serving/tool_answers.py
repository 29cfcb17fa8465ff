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
        has_parts: whether a message has ``parts``, too: its contents and calls in the order of the text.
    """

    def __init__(self, form: ToolFormat, schemas: Schemas, *, is_one: bool, has_parts: bool) -> None:
        self._reader, self._is_one, self._num_calls = ToolCallReader(form, schemas), is_one, 0
        self._has_parts = has_parts

    def push(self, text: str, finish_reason: str | None, *, is_whole: bool) -> tuple[dict[str, Any], str | None]:
        """Return the message, or what the next text adds to it, and the finish reason.

        Args:
            text: the next piece, or all of it.
            finish_reason: of the text; with the last piece.
            is_whole: whether the whole message is wanted.
        """
        content, calls, parts = "", list[dict[str, Any]](), list[dict[str, Any]]()
        for part in self._reader.push(text, is_last=finish_reason is not None):
            if isinstance(part, str):
                content += part
                parts.append({"content": part})
            elif not (self._is_one and self._num_calls):
                calls.append({
                    **({} if is_whole else {"index": self._num_calls}), "id": f"call_{secrets.token_hex(12)}",
                    "type": "function", "function": {"name": part.name, "arguments": part.arguments},
                })  # fmt: skip
                parts.append({"tool_calls": calls[-1:]})
                self._num_calls += 1
        has_called = self._num_calls > 0 and finish_reason == "stop"
        message: dict[str, Any] = {"content": content, **({"parts": parts} if self._has_parts else {})}
        if calls:
            message |= {"content": content or (None if is_whole else ""), "tool_calls": calls}
        return message, "tool_calls" if has_called else finish_reason
