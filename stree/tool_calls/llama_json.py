"""Llama 3.1 and later: an answer that is ``{"name": ..., "parameters": ...}``, several of them divided by ``;``."""

from __future__ import annotations

from stree.tool_calls.base import Schemas, ToolCall, ToolFormat, calls_of_json

__all__ = ["LLAMA_JSON"]


def _read(text: str, schemas: Schemas) -> list[ToolCall]:
    return calls_of_json("[" + text.replace("};", "},").strip() + "]", schemas)


LLAMA_JSON = ToolFormat(('"parameters": dictionary of argument name',), "{", None, _read, is_whole=True)
