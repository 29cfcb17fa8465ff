"""POST /v1/responses with the official client, beside chats of the same messages.

Run: python -m pytest tests/serving/test_responses.py
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers.http_served import TOOL_TEMPLATE, Served, listening

OPTIONS: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 16}
SYSTEM, QUESTION = "Be short.", "What is 2 + 3?"
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.slow
def test_an_answer_is_that_of_the_chat(served: Served) -> None:
    found = served.client.responses.create(**OPTIONS, instructions=SYSTEM, input=QUESTION, metadata={"run": "7"})
    prompt = f"system: {SYSTEM}\nuser: {QUESTION}\nassistant:"
    assert found.output_text == served.alone(prompt, max_new_tokens=16)
    assert (found.status, found.metadata) == ("incomplete", {"run": "7"}), "16 tokens are all that it may have"
    assert found.incomplete_details is not None and found.incomplete_details.reason == "max_output_tokens"
    assert found.usage is not None and found.usage.output_tokens == 16
    assert found.usage.input_tokens == len(served.tokenizer(prompt)["input_ids"])
    turns: list[Any] = [
        {"role": "developer", "content": SYSTEM},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
    ]
    assert served.client.responses.create(**OPTIONS, input=turns).output_text == found.output_text
    turns += [*found.output, {"role": "user", "content": "And 4?"}]
    again = served.client.responses.create(**OPTIONS, input=[*map(_plain, turns)])
    assert again.output_text == served.alone(
        f"{prompt} {found.output_text}\nuser: And 4?\nassistant:", max_new_tokens=16
    )


def _plain(item: Any) -> Any:
    return item if isinstance(item, dict) else item.model_dump(exclude_none=True)


def test_a_stream_has_the_events_of_the_whole_answer(served: Served) -> None:
    whole = served.client.responses.create(**OPTIONS, input=QUESTION)
    events: list[Any] = [*served.client.responses.create(**OPTIONS, input=QUESTION, stream=True)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [event.type.removeprefix("response.") for event in events]
    first = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[:4] == first and set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    with served.client.responses.stream(**OPTIONS, input=QUESTION) as stream:
        last: Any = [*stream][-1]
    assert last.type == "response.incomplete" and last.response.output_text == whole.output_text
    assert whole.usage is not None and last.response.usage.output_tokens == whole.usage.output_tokens


def test_a_turn_with_a_text_and_calls_is_one_message(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", TOOL_TEMPLATE)
    calls = [{"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"} for name in "ab"]
    turns: Any = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "I look."}, *calls]
    turns += [{"type": "function_call_output", "call_id": "a", "output": "sun"}, calls[0]]
    prompt = "user: Go\nassistant: I look. a f {} b f {}\ntool tool_call_id a: sun\nassistant: null a f {}\nassistant:"
    found = served.client.responses.create(**OPTIONS, input=turns)
    assert found.usage is not None and found.usage.input_tokens == len(served.tokenizer(prompt)["input_ids"])
    assert found.output_text == served.alone(prompt, max_new_tokens=16)


def test_calls_of_tools_are_items(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", f"{served.tokenizer.chat_template}{{# <tool_call> #}}")
    text = f"I look.\n<tool_call>\n{CALL}\n</tool_call>\nDone so."
    options: dict[str, Any] = {
        **OPTIONS, "max_output_tokens": 80, "tools": TOOLS, "extra_body": {"structured_outputs": {"choice": [text]}},
        "input": [
            {"role": "user", "content": QUESTION},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'},
            {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
        ],
    }  # fmt: skip
    with listening(served.engine, served.tokenizer) as server:
        whole = server.client.responses.create(**options)
        assert [item.type for item in whole.output] == ["message", "function_call", "message"]
        call: Any = whole.output[1]
        assert (call.name, call.arguments, whole.output_text) == ("weather", '{"city": "Oslo"}', "I look.Done so.")
        assert whole.status == "completed"
        events: list[Any] = [*server.client.responses.create(**options, stream=True)]
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert done.arguments == call.arguments and done.output_index == 1
        last = events[-1].response.output
        assert events[-1].type == "response.completed" and last[1].name == "weather"
        assert [(item.type, getattr(item, "content", None)) for item in last] == [
            (item.type, getattr(item, "content", None)) for item in whole.output
        ]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported in /v1/responses"),
        ({"background": True}, "background", "background is not supported"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "include is not supported"),
        ({"truncation": "auto"}, "truncation", "truncation is not supported"),
        ({"reasoning": {"summary": "auto"}}, "reasoning", "reasoning is not supported"),
        ({"n": 2}, "n", "n is not supported"),
        ({"no_such_field": 1}, "no_such_field", "no_such_field is not known"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"max_output_tokens": 999}, "max_output_tokens", "more than 256"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools of type 'web_search' are not supported"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input", "an item of type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "content part of type"),
        ({"input": []}, "input", "list of turns"),
        ({"metadata": {"run": "\ud800"}}, None, "surrogates not allowed"),
        ({"metadata": {"run": float("nan")}}, None, "not JSON compliant"),
        ({"input": 5}, "input", "input must be a text or a list of items, got 5"),
        ({"text": {"format": {"type": "xml"}}}, "text", "type"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools, got none"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    served: Served, fields: dict[str, Any], param: str | None, said: str
) -> None:
    response = served.post("/v1/responses", {"model": "tiny", "input": "Hi", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and said in error["message"]


def test_fields_that_change_nothing_are_taken(served: Served) -> None:
    neutral = {
        "store": True, "truncation": "disabled", "include": [], "background": False, "user": "me", "top_k": -1,
        "text": {"format": {"type": "text"}}, "reasoning": None, "previous_response_id": None, "tools": [],
    }  # fmt: skip
    response = served.post("/v1/responses", {"model": "tiny", "input": "Hi", "max_output_tokens": 1, **neutral})
    assert response.status_code == 200, response.text
