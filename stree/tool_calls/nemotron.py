"""Nemotron Nano 2: ``<TOOLCALL>[{"name": ..., "arguments": ...}]</TOOLCALL>``."""

from __future__ import annotations

from stree.tool_calls.base import Schemas, ToolCall, ToolFormat, calls_of_json
from stree.tool_calls.lark import json_call

__all__ = ["NEMOTRON"]

BEGIN, END = "<TOOLCALL>", "</TOOLCALL>"


def _read(text: str, schemas: Schemas) -> list[ToolCall]:
    return calls_of_json(text.removeprefix(BEGIN).removesuffix(END), schemas)


NEMOTRON = ToolFormat((BEGIN,), BEGIN, END, _read, json_call, "[", "]", ", ", is_list=True)
