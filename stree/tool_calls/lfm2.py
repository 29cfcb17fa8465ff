"""LFM2: a Python list of calls, ``<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>``."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from keyword import iskeyword
from typing import Any

from stree.tool_calls.base import JSON, Schemas, ToolCall, ToolFormat, call_of, calls_of_json
from stree.tool_calls.lark import json_value, properties_of, quoted

__all__ = ["LFM2"]

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
COMMA = quoted(", ")
STRING = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)


def _read(text: str, schemas: Schemas) -> list[ToolCall]:
    text = text.removeprefix(BEGIN).removesuffix(END).strip()
    if text.startswith("[{"):  # as it is asked to in some prompts
        return calls_of_json(text, schemas)
    text = STRING.sub(lambda found: found[0].replace("\n", r"\n"), text)  # templates write lines as they are
    try:
        listed = ast.parse(text, mode="eval").body
        calls = listed.elts if isinstance(listed, ast.List) and listed.elts else [listed]
        return [_read_call(text, one, schemas) for one in calls]
    except (SyntaxError, MemoryError, TypeError) as error:
        raise ValueError(f"no list of calls: {error}") from error


def _read_call(text: str, call: ast.expr, schemas: Schemas) -> ToolCall:
    if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
        raise ValueError("no call by names of arguments")
    arguments = {str(one.arg): _value(text, one.value) for one in call.keywords}
    return call_of(ast.unparse(call.func), arguments, schemas)


def _value(text: str, value: ast.expr) -> Any:
    """Return an argument, which is JSON or a literal of Python."""
    try:
        return JSON.decode(ast.get_source_segment(text, value) or "")
    except ValueError:
        return ast.literal_eval(value)


def _call(name: str, schema: Mapping[str, Any]) -> str:
    required, others = list[str](), list[str]()
    for key, own, is_required in properties_of(schema):
        if not key.isidentifier() or iskeyword(key):
            raise ValueError(f"{name} has a parameter that this model cannot write: {key!r:.80}")
        value = '"True" | "False"' if own.get("type") == "boolean" else json_value(own)
        (required if is_required else others).append(f"{quoted(key + '=')} ({value})")
    if not all(part.isidentifier() and not iskeyword(part) for part in name.split(".")):
        raise ValueError(f"this model cannot write the name {name!r}")
    return f"{quoted(name + '(')} {_list(required, others)} {quoted(')')}"


def _list(required: list[str], others: list[str]) -> str:
    """Return the expression of all of some expressions and any of others, divided by commas."""
    further = [f"({COMMA} {one})?" for one in others]
    if required:
        return " ".join([f" {COMMA} ".join(required), *further])
    first = [" ".join([one, *further[place:]]) for place, one in enumerate(others, 1)]
    return f"({' | '.join(first)})?" if first else ""


LFM2 = ToolFormat(("List of tools: ", BEGIN), BEGIN, END, _read, _call, "[", "]", ", ", is_list=True)
