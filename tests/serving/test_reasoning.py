"""Reasoning is split off from answers, however these are cut into pieces.

Run: python -m pytest tests/serving/test_reasoning.py
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from helpers.http_served import PROMPT, Served, listening
from tokenizers import AddedToken

from stree.decode.stop_strings import TokenBytes
from stree.inputs import ASSETS, load_tokenizer
from stree.serving.openai_api import OpenAIAPI
from stree.serving.protocol import ChatRequest
from stree.serving.reasoning import ReasoningReader

# Whether the prompt opens it, answer, reasoning, content.
ANSWERS = [
    (True, "\nI add.\n\nSo 5.\n</think>\n\n5. </think>", "I add.\n\nSo 5.", "5. </think>"),
    (False, " <think>\na < b</ </thin\n</think>5", "a < b</ </thin", "5"),
    (False, "5 <think>a</think>", "", "5 <think>a</think>"), (False, "a</think>b", "", "a</think>b"),
    (False, " <thin", "", " <thin"), (False, " \n ", "", " \n "), (False, "<think>", "", ""),
    (True, "a </thin", "a </thin", ""), (True, "a\n", "a", ""), (True, "</think>\n b\n", "", "b\n"),
    (True, "a</think> ", "a", ""), (False, "<think></think><think>b</think>", "", "<think>b</think>"),
]  # fmt: skip


@pytest.mark.parametrize(("is_open", "answer", "reasoning", "content"), ANSWERS)
def test_reasoning_is_split_off(is_open: bool, answer: str, reasoning: str, content: str) -> None:
    cuts = [range(0, len(answer), size) for size in range(1, len(answer) + 1)]
    for places in [*cuts, *([0, *two] for two in itertools.combinations(range(1, len(answer)), 2))]:
        reader, ends = ReasoningReader(is_open=is_open), [*places, len(answer)]
        pieces = [reader.push(answer[begin:end]) for begin, end in itertools.pairwise(ends)]
        pieces.append(reader.push("", is_last=True))
        assert tuple("".join(part) for part in zip(*pieces, strict=True)) == (reasoning, content), ends


CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
CHAT: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 60,
}  # fmt: skip
TOOLS: Any = [{"type": "function", "function": {"name": "clock", "parameters": {"additionalProperties": False}}}]


def answered(client: Any, text: str | None = None, **options: Any) -> tuple[Any, ...]:
    """Return reasoning, content and calls of an answer that is a text; a stream has the same."""
    extra: dict[str, Any] = {"separate_reasoning": True}
    extra |= {} if text is None else {"structured_outputs": {"choice": [text]}}
    options = {**CHAT, "extra_body": extra, **options}
    message = client.chat.completions.create(**options).choices[0].message
    names = [call.function.name for call in message.tool_calls or ()]
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**options, stream=True)]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning == (message.reasoning_content or "")
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    assert [call.function.name for delta in deltas for call in delta.tool_calls or ()] == names
    return message.reasoning_content, message.content, names


@pytest.mark.slow
def test_a_client_gets_reasoning_apart(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", served.tokenizer.chat_template + "{# <tool_call> #}")
    with listening(served.engine, served.tokenizer) as server:
        client = server.client
        assert answered(client, "<think>\nAdd.\n</think>\n5") == ("Add.", "5", [])
        assert answered(client, f"<think>I ask.</think>{CALL}", tools=TOOLS) == ("I ask.", None, ["clock"])
        assert answered(client, "Add.</think>5") == (None, "Add.</think>5", [])
        text = answered(client, max_tokens=9)[1]
        monkeypatch.setattr(served.tokenizer, "chat_template", served.tokenizer.chat_template + "<think>\n")
        reasoning, content, _ = answered(client, max_tokens=9)
        assert reasoning and content == "" and reasoning != text
        assert answered(client, "Add.") == (None, "Add.", []), "a grammar is one of the whole answer"
        assert answered(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)[2] == ["clock"]
        plain = client.chat.completions.create(**{**CHAT, "max_tokens": 9}).choices[0].message
        assert plain.content.strip() == reasoning and not hasattr(plain, "reasoning_content")
    refused = served.post("/v1/completions", {"model": "tiny", "prompt": "a", "separate_reasoning": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "separate_reasoning"


def test_markers_that_are_special_tokens_are_found(served: Served) -> None:
    tokenizer = load_tokenizer(str(ASSETS / "target"))
    tokenizer.add_special_tokens({"extra_special_tokens": [AddedToken("<think>"), AddedToken("</think>")]})
    api = OpenAIAPI(served.engine, tokenizer, "tiny")
    assert api._shown(ChatRequest(**CHAT)) == ()
    shown = api._shown(ChatRequest(**CHAT, separate_reasoning=True))
    ids = tokenizer("a<think></think>", add_special_tokens=False)["input_ids"]
    for names, is_shown in ((shown, True), ((), False)):
        pieces = [TokenBytes(tokenizer, names).piece(token) for token in ids]
        assert [piece.is_shown for piece in pieces] == [True, is_shown, is_shown]
