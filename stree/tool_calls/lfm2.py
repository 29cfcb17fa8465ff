"""LFM2: a Python list of calls, ``<|tool_call_start|>[weather(city="Paris")]<|tool_call_end|>``."""

from __future__ import annotations

import ast

from stree.tool_calls.base import Schemas, ToolCall, ToolFormat, call_of

__all__ = ["LFM2"]

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"


def _read(text: str, schemas: Schemas) -> list[ToolCall]:
    try:
        listed = ast.parse(text.removeprefix(BEGIN).removesuffix(END).strip(), mode="eval").body
        return [_call(one, schemas) for one in (listed.elts if isinstance(listed, ast.List) else [listed])]
    except (SyntaxError, MemoryError, TypeError) as error:
        raise ValueError(f"no list of calls: {error}") from error


def _call(call: ast.expr, schemas: Schemas) -> ToolCall:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call by names of arguments")
    arguments = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
    return call_of(ast.unparse(call.func), arguments, schemas)


LFM2 = ToolFormat(("<|tool_list_start|>", BEGIN), BEGIN, END, _read)
