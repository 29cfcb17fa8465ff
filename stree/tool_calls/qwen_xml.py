"""Qwen3-Coder, Qwen3.5, Nemotron 3: ``<function=NAME><parameter=KEY>VALUE</parameter></function>`` in a tool call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from stree.tool_calls.base import Schemas, ToolCall, ToolFormat, call_of
from stree.tool_calls.lark import json_value, properties_of, quoted

__all__ = ["QWEN_XML"]

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION = re.compile(r"<function=([^>]+)>(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

LINE = "\n"
PARAMETER_END = "\n</parameter>\n"
TEXT = r"text[lazy]: /(?s:.*)\n<\/parameter>\n/"  # with the end, which it must not reach beyond


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


def _call(name: str, schema: Mapping[str, Any]) -> str:
    parameters = []
    for key, own, is_required in properties_of(schema):
        if ">" in key:
            raise ValueError(f"{name} has a parameter that this model cannot write: {key!r:.80}")
        value = json_value(own)
        if own.get("type") == "string":  # written as it is
            value = " | ".join(quoted(str(text)) for text in own.get("enum") or ())
        value = f"({value}) {quoted(PARAMETER_END)}" if value else "text"
        parameters.append(f"({quoted(f'<parameter={key}>{LINE}')} {value}){'' if is_required else '?'}")
    return " ".join([quoted(f"<function={name}>\n"), *parameters, quoted("</function>")])


QWEN_XML = ToolFormat(("<function=",), BEGIN, END, _read, _call, "\n", "\n", "\n", TEXT)
