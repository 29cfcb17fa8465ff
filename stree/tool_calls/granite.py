"""Granite 3: ``<|tool_call|>[{"name": ..., "arguments": ...}]`` to the end of the answer."""

from __future__ import annotations

from stree.tool_calls.base import Schemas, ToolCall, ToolFormat, calls_of_json
from stree.tool_calls.lark import json_call

__all__ = ["GRANITE"]

BEGIN = "<|tool_call|>"


def _read(text: str, schemas: Schemas) -> list[ToolCall]:
    return calls_of_json(text.removeprefix(BEGIN), schemas)


GRANITE = ToolFormat((BEGIN,), BEGIN, None, _read, json_call, "[", "]", ", ", is_list=True)
