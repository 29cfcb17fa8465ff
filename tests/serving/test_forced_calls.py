"""Calls of tools that ``tool_choice`` forces: their grammars, and the official client.

Run: python -m pytest tests/serving/test_forced_calls.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from helpers.http_served import PROMPT, Served, listening
from tokenizers import AddedToken

from stree import Grammar
from stree.decode.grammar import CompiledGrammar
from stree.inputs import ASSETS, load_tokenizer
from stree.tool_calls import TOOL_FORMATS, ToolCallReader, calls_lark

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8}, "days": {"$ref": "#/$defs/days"}, "warm": {"type": "boolean"},
    },
    "required": ["city"], "additionalProperties": False, "$defs": {"days": {"enum": [1, 2]}},
}  # fmt: skip
SCHEMAS: dict[str, Any] = {"weather": WEATHER, "clock": {"properties": {}, "additionalProperties": False}}
OSLO = {"city": "Oslo"}
# Answers that must be allowed, with their calls, and what must not be.
ALLOWED: list[tuple[str, str, list[Any]]] = [
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>', [("weather", OSLO)]),
    (
        "hermes",
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>',
        [("clock", {}), ("weather", {"city": "Oslo", "days": 2})],
    ),
    (
        "qwen-xml",
        "<tool_call>\n<function=weather>\n<parameter=city>\nO</p>\n</parameter>\n<parameter=warm>\ntrue\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        [("weather", {"city": "O</p>", "warm": True}), ("clock", {})],
    ),
    (
        "nemotron",
        '<TOOLCALL>[{"name": "clock", "arguments": {}}, {"name": "weather", "arguments": {"city": "Oslo"}}]</TOOLCALL>',
        [("clock", {}), ("weather", OSLO)],
    ),
    (
        "lfm2", '<|tool_call_start|>[clock(), weather(city="O\\"é", days=1, warm=True)]<|tool_call_end|>',
        [("clock", {}), ("weather", {"city": 'O"é', "days": 1, "warm": True})],
    ),
    ("lfm2", '<|tool_call_start|>[weather(city="Oslo", warm=False)]<|tool_call_end|>', [
        ("weather", {"city": "Oslo", "warm": False}),
    ]),
    ("jamba", '<tool_calls>[{"name": "clock", "arguments": {}}]</tool_calls>', [("clock", {})]),
    (
        "minimax", '<tool_calls>\n{"name": "clock", "arguments": {}}\n'
        '{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_calls>', [("clock", {}), ("weather", OSLO)],
    ),
    ("granite", '<|tool_call|>[{"name": "clock", "arguments": {}}]', [("clock", {})]),
    (
        "llama-json", '{"name": "weather", "parameters": {"city": "}; {"}}; {"name": "clock", "parameters": {}}',
        [("weather", {"city": "}; {"}), ("clock", {})],
    ),
]  # fmt: skip


@pytest.fixture(params=[False, True], ids=["text", "special"], scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """A tokenizer whose markers of calls are text, or special tokens."""
    found = load_tokenizer(str(ASSETS / "target"))
    if request.param:
        markers = {text for form in TOOL_FORMATS.values() for text in (form.begin, form.end) if text and len(text) > 1}
        found.add_special_tokens({"extra_special_tokens": [AddedToken(text) for text in sorted(markers)]})
    return found


def compiled(tokenizer: Any, form: str, *, is_one: bool, schemas: Any = SCHEMAS) -> CompiledGrammar:
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    grammar = Grammar.lark(calls_lark(TOOL_FORMATS[form], schemas, special, is_one=is_one))
    ends = frozenset({tokenizer.eos_token_id})
    return grammar.compile(tokenizer, len(tokenizer), ends, ends)


def is_text_of(grammar: CompiledGrammar, tokenizer: Any, text: str) -> bool:
    tokens, matcher = tokenizer(text, add_special_tokens=False)["input_ids"], grammar.matcher()
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@pytest.mark.parametrize(("form", "answer", "calls"), ALLOWED)
def test_forced_answers_are_calls_of_the_given_tools(tokenizer: Any, form: str, answer: str, calls: list[Any]) -> None:
    reader = ToolCallReader(TOOL_FORMATS[form], SCHEMAS)
    read: list[Any] = reader.push(answer, is_last=True)
    assert [(call.name, json.loads(call.arguments)) for call in read] == calls
    several, one = (compiled(tokenizer, form, is_one=is_one) for is_one in (False, True))
    assert is_text_of(several, tokenizer, answer)
    assert is_text_of(one, tokenizer, answer) == (len(calls) == 1)
    for wrong in ("", "I " + answer, answer + " So.", answer.replace("weather", "rain").replace("clock", "rain")):
        assert not is_text_of(several, tokenizer, wrong), wrong
    assert not is_text_of(several, tokenizer, answer[:-1])
    only = compiled(tokenizer, form, is_one=True, schemas={"clock": SCHEMAS["clock"]})
    assert is_text_of(only, tokenizer, answer) == (calls == [("clock", {})])


@pytest.mark.parametrize(
    ("form", "name", "key"), [("lfm2", "weather", "a-b"), ("lfm2", "get-weather", "a"), ("qwen-xml", "weather", "a>b")]
)
def test_what_a_format_cannot_write_is_refused(form: str, name: str, key: str) -> None:
    with pytest.raises(ValueError, match="this model cannot write"):
        calls_lark(TOOL_FORMATS[form], {name: {"properties": {key: {}}}}, (), is_one=True)


def test_parameters_that_are_all_optional_are_divided_by_commas(tokenizer: Any) -> None:
    schemas = {"f": {"properties": {key: {"type": "integer"} for key in "abc"}}}
    grammar = compiled(tokenizer, "lfm2", is_one=True, schemas=schemas)
    for inner, is_allowed in {
        "": True, "a=1": True, "b=2, c=3": True, "a=1, b=2, c=3": True, ", b=2": False,
        "a=1,": False, "b=1, a=2": False,
    }.items():  # fmt: skip
        text = f"<|tool_call_start|>[f({inner})]<|tool_call_end|>"
        assert is_text_of(grammar, tokenizer, text) == is_allowed, inner


@pytest.mark.parametrize(("form", "answer"), [
    ("lfm2", "<|tool_call_start|>[f(a=5, b=\"5\")]<|tool_call_end|>"),
    (
        "qwen-xml", "<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n<parameter=b>\n5\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 5, "b": "5"}}\n</tool_call>'),
])  # fmt: skip
def test_parameters_are_found_behind_references(tokenizer: Any, form: str, answer: str) -> None:
    own = {"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/definitions/five"}}, "required": ["a", "b"]}
    definitions = {"own": {"type": "object", **own, "additionalProperties": False}, "five": {"type": "string"}}
    schemas = {"f": {"$ref": "#/definitions/own", "definitions": definitions}}
    assert is_text_of(compiled(tokenizer, form, is_one=True, schemas=schemas), tokenizer, answer)
    call: Any = ToolCallReader(TOOL_FORMATS[form], schemas).push(answer, is_last=True)[0]
    assert json.loads(call.arguments) == {"a": 5, "b": "5"}


@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_schemas_of_any_text_are_read_or_refused(tokenizer: Any, form: str) -> None:
    odd = {"type": "string", "enum": ["a ::= b", 'x"\\n\n'], "description": "::= ::="}
    grammar = compiled(tokenizer, form, is_one=True, schemas={"f": {"properties": {"é": odd}, "required": ["é"]}})
    assert not is_text_of(grammar, tokenizer, "f")
    for wrong in ({"properties": ["a"]}, {"properties": {"a": {"type": "integer"}}, "required": "a"}):
        with pytest.raises(ValueError, match="parameters must have|cannot be read"):
            compiled(tokenizer, form, is_one=True, schemas={"f": wrong})


# Few texts, since the bundled target ends none by itself.
FEW: dict[str, Any] = {**SCHEMAS, "weather": {**WEATHER, "properties": {"city": {"type": "string", "enum": ["Oslo"]}}}}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in FEW.items()]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "tools": TOOLS}


OTHERS = ["<tool_call><function=", "<TOOLCALL>", "<|tool_call_start|>", "<|tool_call|>"]


@pytest.fixture(params=["<tool_call>", *(pytest.param(hint, marks=pytest.mark.slow) for hint in OTHERS)])
def calling(served: Served, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server whose template asks for calls of a format."""
    template = f"{served.tokenizer.chat_template}{{# {request.param} #}}"
    monkeypatch.setattr(served.tokenizer, "chat_template", template)
    with listening(served.engine, served.tokenizer) as server:
        yield server


def streamed(client: Any, **options: Any) -> tuple[str, list[tuple[str, str]], str | None]:
    """Return the content, the calls and the finish reason of a stream."""
    content, calls, reason = "", list[tuple[str, str]](), None
    for chunk in client.chat.completions.create(**options, stream=True):
        (choice,) = chunk.choices
        content, reason = content + (choice.delta.content or ""), choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            assert call.index == len(calls) and call.type == "function" and call.id
            calls.append((call.function.name, call.function.arguments))
    return content, calls, reason


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_client_gets_the_calls_that_it_forces(calling: Served, choice: Any) -> None:
    options = {**CHAT, "tool_choice": choice, "seed": 1, "temperature": 0.8, "max_tokens": 60}
    options |= {"parallel_tool_calls": choice != "required"}
    whole = calling.client.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    (call,) = whole.message.tool_calls or []
    assert call.type == "function" and call.function.name in (FEW if choice == "required" else ["weather"])
    jsonschema.validate(json.loads(call.function.arguments), FEW[call.function.name])
    found = streamed(calling.client, **options)
    assert found == ("", [(call.function.name, call.function.arguments)], "tool_calls")


@pytest.mark.parametrize("calling", ["<tool_call>"], indirect=True)
def test_a_call_among_text_is_found_where_none_is_forced(calling: Served) -> None:
    text = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    options = {
        **CHAT,
        "extra_body": {"structured_outputs": {"choice": [text]}},
        "max_tokens": 100,
        "tool_choice": "auto",
    }
    whole = calling.client.chat.completions.create(**options).choices[0]
    assert (whole.message.content, whole.finish_reason) == ("I look.", "tool_calls")
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
    assert calls == [("weather", '{"city": "Oslo"}')]
    assert streamed(calling.client, **options) == ("I look.", calls, "tool_calls")
    plain = calling.client.chat.completions.create(**{**options, "tool_choice": "none"}).choices[0]
    assert (plain.message.content, plain.finish_reason, plain.message.tool_calls) == (text, "stop", None)


@pytest.mark.parametrize("calling", ["<tool_call>"], indirect=True)
@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice", "tool_choice needs tools, got none"),
        ({"tool_choice": {**NAMED, "function": {"name": "rain"}}}, "tool_choice", "tool_choice must be one of tools"),
        ({"tool_choice": "any"}, "tool_choice", "tool_choice"),
        ({"tool_choice": {"type": "x"}}, "tool_choice", "tool_choice"),
        (
            {"tool_choice": NAMED, "response_format": {"type": "json_object"}}, "response_format",
            "tool_choice and response_format must not both ask for a grammar",
        ),
        (
            {"tool_choice": "required", "tools": [{**NAMED, "function": {"name": "f", "parameters": {
                "properties": {"a": {"type": "text"}}}}}]},
            "tool_choice", "tool_choice: lark cannot be read",
        ),
    ],
)  # fmt: skip
def test_calls_that_cannot_be_forced_are_refused(calling: Served, fields: Any, param: str, said: str) -> None:
    answer = calling.post("/v1/chat/completions", {**CHAT, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and param in error["param"] and said in error["message"]
