"""Calls of tools in answers: one format a file, found by what a chat template asks for."""

from __future__ import annotations

from typing import Any

from stree.tool_calls.base import Schemas, ToolCall, ToolCallReader, ToolFormat
from stree.tool_calls.forced import calls_lark
from stree.tool_calls.granite import GRANITE
from stree.tool_calls.hermes import HERMES
from stree.tool_calls.jamba import JAMBA, MINIMAX
from stree.tool_calls.lfm2 import LFM2
from stree.tool_calls.llama_json import LLAMA_JSON
from stree.tool_calls.nemotron import NEMOTRON
from stree.tool_calls.qwen_xml import QWEN_XML

__all__ = ["TOOL_FORMATS", "Schemas", "ToolCall", "ToolCallReader", "ToolFormat", "calls_lark", "tool_format"]

# The first whose hint is in a chat template is its format: Qwen's two begin alike.
TOOL_FORMATS = {
    "qwen-xml": QWEN_XML, "hermes": HERMES, "nemotron": NEMOTRON, "lfm2": LFM2, "granite": GRANITE,
    "minimax": MINIMAX, "jamba": JAMBA, "llama-json": LLAMA_JSON,
}  # fmt: skip


def tool_format(chat_template: Any) -> ToolFormat | None:
    """Return the format of calls that a chat template asks for, or None for none that is known."""
    text = str(chat_template)
    return next((form for form in TOOL_FORMATS.values() if any(hint in text for hint in form.hints)), None)
