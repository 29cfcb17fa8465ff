"""Hermes 2, Qwen2.5, Qwen3, Granite 4 and Falcon-H1: ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``."""

from __future__ import annotations

from stree.tool_calls.base import Schemas, ToolCall, ToolFormat, calls_of_json
from stree.tool_calls.lark import json_call

__all__ = ["HERMES"]

BEGIN, END = "<tool_call>", "</tool_call>"


def _read(text: str, schemas: Schemas) -> list[ToolCall]:
    return calls_of_json(text.removeprefix(BEGIN).removesuffix(END), schemas)


HERMES = ToolFormat((BEGIN,), BEGIN, END, _read, json_call, "\n", "\n", "\n")
