"""Nemotron Nano 2: ``<TOOLCALL>[{"name": ..., "arguments": ...}]</TOOLCALL>``."""

from __future__ import annotations

from stree.tool_calls.base import Schemas, ToolCall, ToolFormat, calls_of_json

__all__ = ["NEMOTRON"]

BEGIN, END = "<TOOLCALL>", "</TOOLCALL>"


def _read(text: str, schemas: Schemas) -> list[ToolCall]:
    return calls_of_json(text.removeprefix(BEGIN).removesuffix(END), schemas)


NEMOTRON = ToolFormat((BEGIN,), BEGIN, END, _read)
