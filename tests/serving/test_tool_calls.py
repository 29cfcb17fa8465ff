"""Tool calls are read out of answers of every format, however these are cut into pieces.

Run: python -m pytest tests/serving/test_tool_calls.py
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from stree.tool_calls import TOOL_FORMATS, ToolCall, ToolCallReader, tool_format

SCHEMAS: dict[str, Any] = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}, "clock": {},
}  # fmt: skip
OSLO, TWO = ("weather", {"city": "Oslo"}), ("weather", {"city": "São 2", "days": 2})
CLOCK: tuple[str, dict[str, Any]] = ("clock", {})
MOST = sys.float_info.max
# Format, answer, its content, its calls.
ANSWERS: list[tuple[str, str, str, list[Any]]] = [
    (
        "hermes",
        'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
        '<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
        "I look.", [OSLO, CLOCK],
    ),
    ("hermes", '<tool_call>{"name": "clock"}</tool_call>\n \nSo.\n', "So.\n", [CLOCK]),
    (
        "hermes", '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>"}}</tool_call> \nSo',
        "So", [("weather", {"city": "</tool_call>"})],
    ),
    (
        "hermes", '<tool_call>{"name": "a</tool_call> b <tool_call>{"name": "clock"}</tool_call>',
        '<tool_call>{"name": "a</tool_call> b', [CLOCK],
    ),
    (
        "hermes", '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>', [],
    ),
    (
        "hermes", '<tool_call>{"name": "weather", "arguments": {"city": "\\ud800"}}</tool_call>', "",
        [("weather", {"city": "\ud800"})],
    ),
    *(
        (form, f"{begin}8e593, -1e400{end}", "", [("weather", {"days": [MOST, -MOST]})])
        for form, begin, end in (
            ("hermes", '<tool_call>{"name": "weather", "arguments": {"days": [', "]}}</tool_call>"),
            ("llama-json", '{"name": "weather", "parameters": {"days": [', "]}}"),
            ("lfm2", "<|tool_call_start|>[weather(days=[", "])]<|tool_call_end|>"),
            ("qwen-xml", "<tool_call><function=weather><parameter=days>[", "]</parameter></function></tool_call>"),
        )
    ),
    ("hermes", "a <tool_ b", "a <tool_ b", []), ("hermes", "a \n\nb", "a \n\nb", []),
    ("hermes", '<tool_call>{"name": "rain"}</tool_call> no', '<tool_call>{"name": "rain"}</tool_call> no', []),
    ("hermes", '<tool_call>{"name": "clock"', '<tool_call>{"name": "clock"', []),
    (
        "qwen-xml",
        "<tool_call>\n<function=weather>\n<parameter=city>\nSão 2\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "", [TWO],
    ),
    ("qwen-xml", "<tool_call>\n<function=clock>\n</function>\n</tool_call>", "", [CLOCK]),
    (
        "nemotron", 'Yes.<TOOLCALL>[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "clock"}]</TOOLCALL>',
        "Yes.", [OSLO, CLOCK],
    ),
    (
        "lfm2", "<|tool_call_start|>[weather(city='São 2', days=2), clock()]<|tool_call_end|>I asked.",
        "I asked.", [TWO, CLOCK],
    ),
    (
        "lfm2", '<|tool_call_start|>[weather(city="<|tool_call_end|>")]<|tool_call_end|>', "",
        [("weather", {"city": "<|tool_call_end|>"})],
    ),
    ("lfm2", "<|tool_call_start|>[weather(city='a\nb')]<|tool_call_end|>", "", [("weather", {"city": "a\nb"})]),
    ("lfm2", '<|tool_call_start|>[{"name": "clock", "arguments": {}}]<|tool_call_end|>', "", [CLOCK]),
    *(("lfm2", text, text, []) for text in (
        "<|tool_call_start|>[]<|tool_call_end|>", "<|tool_call_start|>[clock(**{})]<|tool_call_end|>",
    )),
    (
        "lfm2", "<|tool_call_start|>[weather('Oslo')]<|tool_call_end|>",
        "<|tool_call_start|>[weather('Oslo')]<|tool_call_end|>", [],
    ),
    ("granite", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]', "", [OSLO]),
    (
        "llama-json", '{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "clock", "parameters": {}}',
        "", [OSLO, CLOCK],
    ),
    (
        "llama-json", '{"name": "clock", "parameters": {}}\n{"name": "weather", "parameters": {"city": "Oslo"}}',
        "", [CLOCK, OSLO],
    ),
    (
        "jamba", 'Yes. <tool_calls>[{"name": "clock", "arguments": {}}, '
        '{"name": "weather", "arguments": {"city": "Oslo"}}]</tool_calls>', "Yes.", [CLOCK, OSLO],
    ),
    (
        "minimax", '<tool_calls>\n{"name": "clock", "arguments": {}}\n'
        '{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_calls>', "", [CLOCK, OSLO],
    ),
    ("llama-json", 'So: {"name": "clock", "parameters": {}}', 'So: {"name": "clock", "parameters": {}}', []),
    ("llama-json", '{"name": 1}', '{"name": 1}', []),
]  # fmt: skip


def split(parts: list[str | ToolCall]) -> tuple[str, list[ToolCall]]:
    """Return what is content and what is calls."""
    calls = [part for part in parts if isinstance(part, ToolCall)]
    return "".join(part for part in parts if isinstance(part, str)), calls


@pytest.mark.parametrize(("form", "answer", "content", "calls"), ANSWERS)
def test_an_answer_is_split_into_content_and_calls(form: str, answer: str, content: str, calls: list[Any]) -> None:
    for length in range(1, len(answer) + 1):
        reader = ToolCallReader(TOOL_FORMATS[form], SCHEMAS)
        pieces = [split(reader.push(answer[place : place + length])) for place in range(0, len(answer), length)]
        pieces.append(split(reader.push("", is_last=True)))
        assert "".join(text for text, _ in pieces) == content
        "".join(call.arguments for _, found in pieces for call in found).encode()
        assert [(call.name, json.loads(call.arguments)) for _, found in pieces for call in found] == calls
    assert split(ToolCallReader(TOOL_FORMATS[form], SCHEMAS).push(answer, is_last=True))[0] == content


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "null", "null"), ({"type": ["string", "null"]}, "123", "123"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "true", "true"),
        ({"type": ["string", "null"]}, "None", None),
        ({"enum": ["1", "2"]}, "1", "1"), ({"type": "boolean"}, "True", True), ({"type": "integer"}, "NaN", "NaN"),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "None", None), ({}, "True", "True"), ({}, "[1]", [1]),
        ({"type": ["string", "number"]}, "12", 12), ({"$ref": "#/$defs/a"}, "red", "red"),
        *(({"type": "string"}, f"a</{end}>b", f"a</{end}>b") for end in ("parameter", "function", "tool_call")),
    ],
)  # fmt: skip
def test_a_parameter_of_xml_has_a_type_of_its_schema(schema: Any, text: str, value: Any) -> None:
    answer = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    for end in range(len(answer)):
        reader = ToolCallReader(TOOL_FORMATS["qwen-xml"], {"f": {"properties": {"a": schema}}})
        assert reader.push(answer[:end]) == []
        call: Any = reader.push(answer[end:], is_last=True)[0]
        assert json.loads(call.arguments) == {"a": value}
    (call,) = ToolCallReader(TOOL_FORMATS["qwen-xml"], {"f": {"properties": None}}).push(answer, is_last=True)
    assert isinstance(call, ToolCall)
    assert "a" in json.loads(call.arguments)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("... <tool_call>\\n<function=example> ...", "qwen-xml"), ("within <tool_call></tool_call> tags", "hermes"),
        ("<AVAILABLE_TOOLS> <TOOLCALL>", "nemotron"), ("List of tools: <|tool_list_start|>[", "lfm2"),
        ('"List of tools: [" -%}{%- for tool in tools', "lfm2"),
        ("answer with <|tool_call|> and a list", "granite"), ("'<tool_calls>' ~ calls", "jamba"),
        (r'format:\n<tool_calls>\n{"name": <tool-name>', "minimax"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama-json"),
        ("{{ message.content }}", None), (None, None),
    ],
)  # fmt: skip
def test_the_format_is_that_of_the_chat_template(template: str | None, form: str | None) -> None:
    assert tool_format(template) is TOOL_FORMATS.get(form or "")
