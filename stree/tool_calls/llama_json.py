"""Llama 3.1 and later: ``{"name": ..., "parameters": ...}`` as an answer; several are divided by ``;`` or lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stree.tool_calls.base import JSON, Schemas, ToolCall, ToolFormat, calls_of
from stree.tool_calls.lark import json_call

__all__ = ["LLAMA_JSON", "read_calls"]

BETWEEN = re.compile(r"\s*[;\n]\s*|\s*$")


def read_calls(text: str, schemas: Schemas) -> list[ToolCall]:
    """Read JSON objects, or lists of them, that are divided.

    Raises:
        ValueError: something else.
    """
    found, place = [], 0
    while place < len(text):
        one, place = JSON.raw_decode(text, place)
        found += one if isinstance(one, list) else [one]
        if (behind := BETWEEN.match(text, place)) is None:
            raise ValueError("calls must be divided by semicolons or lines")
        place = behind.end()
    return calls_of(found, schemas)


def _call(name: str, schema: Mapping[str, Any]) -> str:
    return json_call(name, schema, "parameters", begin="")


LLAMA_JSON = ToolFormat(
    ('"parameters": dictionary of argument name',), "{", None, read_calls, _call, divider="; ", is_whole=True
)
