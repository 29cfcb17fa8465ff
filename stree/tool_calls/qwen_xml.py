"""Qwen3-Coder, Qwen3.5, Nemotron 3: ``<function=NAME><parameter=KEY>VALUE</parameter></function>`` in a tool call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stree.tool_calls.base import JSON, UNTERMINATED, Schemas, ToolCall, ToolFormat, call_of
from stree.tool_calls.lark import json_value, properties_of, quoted

__all__ = ["QWEN_XML"]

BEGIN, END = "<tool_call>", "</tool_call>"
# An end tag counts where another tag or nothing follows it; elsewhere it is part of a string.
FUNCTION = re.compile(r"<function=([^>]+)>(.*?)</function>\s*(?=<function=|</tool_call>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)
PYTHON = {"True": "true", "False": "false", "None": "null"}  # templates write earlier calls so
TYPES = {
    str: "string", bool: "boolean", type(None): "null", int: "integer", float: "number", list: "array", dict: "object",
}  # fmt: skip

LINE = "\n"
PARAMETER_END = "\n</parameter>\n"
TEXT = r"text[lazy]: /(?s:.*)\n<\/parameter>\n/"  # with the end, which it must not reach beyond


def _read(text: str, schemas: Schemas) -> list[ToolCall]:
    if not text.removesuffix(END).rstrip().endswith("</function>"):
        raise ValueError(f"{UNTERMINATED}, or no function")
    calls = []
    for name, body in FUNCTION.findall(text):
        properties = {key: own for key, own, _ in properties_of(schemas.get(name.strip(), {}))}
        arguments = {
            key.strip(): _value(text, properties.get(key.strip(), {})) for key, text in PARAMETER.findall(body)
        }
        calls.append(call_of(name.strip(), arguments, schemas))
    return calls


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """Return a parameter as its schema says: strings are written as they are, all else as JSON or in Python's words."""
    if schema.get("type") == "string":
        return text
    types, word = _types(schema), PYTHON.get(text.strip(), text)
    try:
        value = JSON.decode(word)
    except ValueError:
        return text
    fits = TYPES[type(value)] in types or (type(value) is int and "number" in types)
    may_be_text = "string" in types or word is not text
    return text if may_be_text and not fits else value


def _types(schema: Any) -> set[str]:
    """Return the types that a schema names, and an empty name where it names none."""
    schema = schema if isinstance(schema, Mapping) else {}
    several = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(several, list):
        return {name for one in several for name in _types(one)}
    if "type" not in schema and isinstance(schema.get("enum"), list):
        return {TYPES[type(value)] for value in schema["enum"]}
    found = schema.get("type", "")
    return {*map(str, found)} if isinstance(found, list) else {str(found)}


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
