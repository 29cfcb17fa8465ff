"""Llama 3.1 and later: an answer that is ``{"name": ..., "parameters": ...}``, several of them divided by ``;``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from stree.tool_calls.base import Schemas, ToolCall, ToolFormat, calls_of
from stree.tool_calls.lark import json_call

__all__ = ["LLAMA_JSON"]

BETWEEN = re.compile(r"\s*;\s*|\s*$")


def _read(text: str, schemas: Schemas) -> list[ToolCall]:
    found, place = [], 0
    while place < len(text):
        one, place = json.JSONDecoder().raw_decode(text, place)
        found.append(one)
        if (behind := BETWEEN.match(text, place)) is None:
            raise ValueError("calls must be divided by semicolons")
        place = behind.end()
    return calls_of(found, schemas)


def _call(name: str, schema: Mapping[str, Any]) -> str:
    return json_call(name, schema, "parameters", begin="")


LLAMA_JSON = ToolFormat(
    ('"parameters": dictionary of argument name',), "{", None, _read, _call, divider="; ", is_whole=True
)
