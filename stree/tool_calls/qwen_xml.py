"""Qwen3-Coder, Qwen3.5, Nemotron 3: ``<function=NAME><parameter=KEY>VALUE</parameter></function>`` in a tool call."""

from __future__ import annotations

import json
import re
from typing import Any

from stree.tool_calls.base import Schemas, ToolCall, ToolFormat, call_of

__all__ = ["QWEN_XML"]

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION = re.compile(r"<function=([^>]+)>(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _read(text: str, schemas: Schemas) -> list[ToolCall]:
    found = FUNCTION.findall(text)
    if not found:
        raise ValueError("no function")
    calls = []
    for name, body in found:
        properties = schemas.get(name.strip(), {}).get("properties", {})
        arguments = {
            key.strip(): _value(text, properties.get(key.strip(), {})) for key, text in PARAMETER.findall(body)
        }
        calls.append(call_of(name.strip(), arguments, schemas))
    return calls


def _value(text: str, schema: Any) -> Any:
    """Return a parameter as its schema says: strings are written as they are, all else as JSON."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


QWEN_XML = ToolFormat(("<function=",), BEGIN, END, _read)
