"""Other clients than the official one: LangChain and LiteLLM, for chats, streams, tools and JSON.

Run: pip install langchain-openai litellm; python -m pytest -m slow tests/serving/test_clients.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.http_served import KEY, PROMPT, Served, listening

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": PROMPT}]
CITY = {
    "title": "city", "description": "Where.", "type": "object", "properties": {"name": {"enum": ["Oslo", "Bergen"]}},
    "required": ["name"], "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "description": "Ask.", "parameters": CITY}}


@pytest.fixture
def calling(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server whose template asks for calls of a format."""
    monkeypatch.setattr(served.tokenizer, "chat_template", f"{served.tokenizer.chat_template}{{# <tool_call> #}}")
    with listening(served.engine, served.tokenizer) as server:
        yield server


def wanted(served: Served) -> str:
    return served.alone(f"user: {PROMPT}\nassistant:", max_new_tokens=16)


def test_langchain(calling: Served) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="needs LangChain: pip install langchain-openai")
    options: dict[str, Any] = {"base_url": f"{calling.url}/v1", "api_key": KEY, "model": "tiny", "temperature": 0}
    model, text = langchain.ChatOpenAI(**options, max_tokens=16, max_retries=0), wanted(calling)
    answer = model.invoke(PROMPT)
    assert answer.content == text and answer.usage_metadata["output_tokens"] == 16
    pieces = [*model.stream(PROMPT, stream_usage=True)]
    assert len(pieces) > 3 and "".join(piece.content for piece in pieces) == text
    assert model.bind(stop=[text[5:9]]).invoke(PROMPT).content == text[: text.index(text[5:9])]
    longer = langchain.ChatOpenAI(**options, max_tokens=60, max_retries=0)
    with_tools = longer.bind_tools([TOOL], tool_choice="weather")
    (call,) = with_tools.invoke(PROMPT).tool_calls
    assert call["name"] == "weather" and call["args"]["name"] in ("Oslo", "Bergen")
    whole = None
    for piece in with_tools.stream(PROMPT):
        whole = piece if whole is None else whole + piece
    assert whole is not None and [one["args"] for one in whole.tool_calls] == [call["args"]]
    for method in ("json_schema", "function_calling"):
        structured = longer.with_structured_output(CITY, method=method)
        assert structured.invoke(PROMPT)["name"] in ("Oslo", "Bergen"), method
    responses = langchain.ChatOpenAI(**options, max_tokens=16, max_retries=0, use_responses_api=True)
    assert responses.invoke(PROMPT).text == text
    assert "".join(piece.text for piece in responses.stream(PROMPT)) == text
    with pytest.raises(Exception, match="temperature"):
        model.invoke(PROMPT, temperature=3)


def test_litellm(calling: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no request to another server
    litellm = pytest.importorskip("litellm", reason="needs LiteLLM: pip install litellm")
    options: dict[str, Any] = {
        "model": "openai/tiny", "messages": QUESTION, "api_base": f"{calling.url}/v1", "api_key": KEY,
        "temperature": 0, "num_retries": 0,
    }  # fmt: skip
    text = wanted(calling)
    answer = litellm.completion(**options, max_tokens=16)
    assert answer.choices[0].message.content == text and answer.usage.completion_tokens == 16
    pieces = [*litellm.completion(**options, max_tokens=16, stream=True, stream_options={"include_usage": True})]
    contents = [choice.delta.content or "" for piece in pieces for choice in piece.choices]
    assert len(contents) > 3 and "".join(contents) == text
    named = {"type": "function", "function": {"name": "weather"}}
    calls = litellm.completion(**options, max_tokens=60, tools=[TOOL], tool_choice=named)
    (call,) = calls.choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["name"] in ("Oslo", "Bergen")
    streamed = litellm.stream_chunk_builder(
        [*litellm.completion(**options, max_tokens=60, tools=[TOOL], tool_choice=named, stream=True)]
    )
    assert streamed.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    document = litellm.completion(**options, max_tokens=60, response_format=form).choices[0].message.content
    assert json.loads(document)["name"] in ("Oslo", "Bergen")
    own = {name: value for name, value in options.items() if name != "messages"}
    own |= {"model": "text-completion-openai/tiny", "prompt": PROMPT, "max_tokens": 16}
    texts = litellm.text_completion(**own)
    assert texts.choices[0].text == calling.alone(PROMPT, max_new_tokens=16)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**options, "temperature": 3})
