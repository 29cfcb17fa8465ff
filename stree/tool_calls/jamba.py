"""Jamba and MiniMax-M1: a JSON list, or lines, of calls between ``<tool_calls>`` and ``</tool_calls>``."""

from __future__ import annotations

from dataclasses import replace

from stree.tool_calls.base import Schemas, ToolCall, ToolFormat
from stree.tool_calls.lark import json_call
from stree.tool_calls.llama_json import read_calls

__all__ = ["JAMBA", "MINIMAX"]

BEGIN, END = "<tool_calls>", "</tool_calls>"


def _read(text: str, schemas: Schemas) -> list[ToolCall]:
    return read_calls(text.removeprefix(BEGIN).removesuffix(END).strip(), schemas)


JAMBA = ToolFormat((BEGIN,), BEGIN, END, _read, json_call, "[", "]", ", ", is_list=True)
MINIMAX = replace(JAMBA, hints=(BEGIN + r"\n{", BEGIN + "\n{"), opening="\n", closing="\n", divider="\n")
