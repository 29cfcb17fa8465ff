"""Chat templates, tokens of texts and chats, and pages of other sites.

Run: python -m pytest tests/serving/test_templates.py
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from fastapi.testclient import TestClient
from helpers.http_served import Served, listening

from stree.drafters import SuffixDrafter
from stree.inputs import ASSETS, load_tokenizer
from stree.integrations.batch_generate import RowGenerator
from stree.integrations.batch_rows import request_of
from stree.serving.app import create_app

TURNS = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1?"}]
OPTIONS = "{% for m in messages %}{{ m.content }}{% endfor %}|{{ enable_thinking }}|{{ reasoning_effort }}"


def test_the_bundled_target_answers_chats() -> None:
    tokenizer = load_tokenizer(str(ASSETS / "target"))
    answered = [*TURNS, {"role": "assistant", "content": "2"}, {"role": "user", "content": "1 + 2?"}]
    text = tokenizer.apply_chat_template(answered, add_generation_prompt=True, tokenize=False)
    assert text == "Add.\n\nQuestion: 1 + 1?\nAnswer: 2\n\nQuestion: 1 + 2?\nAnswer:"


def test_a_template_reads_the_options_of_the_request(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", OPTIONS)
    body = {"model": "tiny", "messages": TURNS[1:], "max_tokens": 1, "reasoning_effort": "low"}
    body |= {"enable_thinking": False}
    answer = served.post("/v1/chat/completions", body)
    wanted = served.tokenizer("1 + 1?|False|low", add_special_tokens=False)["input_ids"]
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == len(wanted)
    row = request_of({"custom_id": "a", "body": {name: body[name] for name in body if name != "model"}})
    assert (row["enable_thinking"], row["reasoning_effort"]) == (False, "low")
    del body["enable_thinking"]
    body |= {"chat_template_kwargs": {"enable_thinking": False}}
    assert served.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"] == len(wanted)
    refused = served.post("/v1/chat/completions", body | {"enable_thinking": "no"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "enable_thinking"
    refused = served.post("/v1/chat/completions", body | {"chat_template_kwargs": {"enable_thinking": "\ud800"}})
    assert refused.status_code == 400 and "messages: no text that UTF-8 can write" in refused.text


def test_tools_reach_the_template_as_they_are(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{# <tool_call> #}{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(served.tokenizer, "chat_template", template)
    function = {"strict": True, "description": "time", "parameters": {"type": "object"}, "name": "clock"}
    tools = [{"function": function, "type": "function"}, {"type": "function", "function": {"name": "rain"}}]
    prompt = served.tokenizer.apply_chat_template(TURNS[1:], tools=tools, tokenize=False)
    with listening(served.engine, served.tokenizer) as server:
        body = {"model": "tiny", "messages": TURNS[1:], "tools": tools, "max_tokens": 8, "temperature": 0}
        answer = server.post("/v1/chat/completions", body).json()
    assert answer["usage"]["prompt_tokens"] == len(served.tokenizer(prompt)["input_ids"])
    assert answer["choices"][0]["message"]["content"] == served.alone(prompt, max_new_tokens=8)


def test_a_content_of_null_reaches_a_template_that_reads_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ 'There is no content.' if m.content is none else m.content }}{% endfor %}"
    monkeypatch.setattr(served.tokenizer, "chat_template", template)
    call = {"type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [*TURNS[1:], {"role": "assistant", "content": None, "tool_calls": [call]}]
    answer = served.post("/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 1}).json()
    prompt = served.tokenizer.apply_chat_template(messages, tokenize=False)
    assert answer["usage"]["prompt_tokens"] == len(served.tokenizer(prompt)["input_ids"])


KNOWN = (
    "{% for m in messages %}{% if m.role == 'control' %}!{% elif m.role == 'user' %}{{ m.content }}"
    "{% endif %}{% endfor %}"
)
# As those of Granite and LFM2.5 read content and arguments.
CALLS = (
    "{% for m in messages %}{% for part in m.content %}{{ part }}{% endfor %}{% for call in m.tool_calls or [] %}"
    "{{ call.function.arguments.items() | list }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "message", "said"),
    [
        (KNOWN, {"role": "usr", "content": "a"}, "the role of a message must be one of system, developer, user,"),
        (None, {"role": "usr", "content": "a"}, "tool, function, got 'usr'"),
        (KNOWN, {"role": "control", "content": "a"}, None),
        ("{{ messages[1].role }}", {"role": "usr", "content": "a"}, None),
        (KNOWN, {"role": "tool", "content": "a"}, None),
        (KNOWN, {"role": "user"}, "a message must have a content or tool_calls, got {'role': 'user'}"),
        (KNOWN, {"role": "assistant", "content": None}, "a message must have a content"),
        (KNOWN, {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}, None),
        *(
            (CALLS, {"role": "assistant", "tool_calls": [{"function": {"name": "f", **arguments}}], **content}, None)
            for arguments in ({"arguments": ""}, {"arguments": None}, {}, {"arguments": '{"a": 1}'})
            for content in ({"content": None}, {})
        ),
        (KNOWN, {"content": "a"}, "a turn of messages must be an object with a role"),
    ],
)  # fmt: skip
def test_a_message_that_the_template_would_not_read_is_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch, template: str | None, message: Any, said: str | None
) -> None:
    bundled = load_tokenizer(str(ASSETS / "target")).chat_template
    monkeypatch.setattr(served.tokenizer, "chat_template", template or bundled)
    body = {"messages": [{"role": "user", "content": "Hi"}, message]}
    answer = served.post("/tokenize", body)
    assert answer.status_code == (200 if said is None else 400), answer.text
    if said is None:
        return
    error = answer.json()["error"]
    assert said in error["message"] and error["param"] == "messages"
    with pytest.raises(ValueError, match=re.escape(said)):
        generator = RowGenerator(served.engine.lm, served.tokenizer, SuffixDrafter(), max_new_tokens=1)
        raise ValueError(generator.run([request_of(body)])[0]["reason"])


@pytest.mark.parametrize("options", [{"tokenize": True}, {"chat_template": "x"}, [1], "x"])
def test_options_that_are_not_the_templates_are_refused(served: Served, options: Any) -> None:
    body = {"model": "tiny", "messages": TURNS, "chat_template_kwargs": options}
    answer = served.post("/v1/chat/completions", body)
    assert answer.status_code == 400 and "chat_template_kwargs" in answer.json()["error"]["message"]
    with pytest.raises(ValueError, match="chat_template_kwargs must be an object of the template's own variables"):
        request_of({"messages": TURNS, "chat_template_kwargs": options})


def test_tokens_of_texts_and_chats_and_back(served: Served) -> None:
    text, ids = "Tom has 3 apples.", served.tokenizer("Tom has 3 apples.")["input_ids"]
    found = served.post("/tokenize", {"model": "tiny", "prompt": text, "return_token_strs": True}).json()
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 256)
    assert found["token_strs"] == served.tokenizer.convert_ids_to_tokens(ids)
    assert served.post("/detokenize", {"tokens": ids}).json() == {"prompt": text}
    for is_open in (True, False):
        written = served.tokenizer.apply_chat_template(TURNS, add_generation_prompt=is_open, tokenize=False)
        wanted = served.tokenizer(written, add_special_tokens=False)["input_ids"]
        chat = served.post("/tokenize", {"messages": TURNS, "add_generation_prompt": is_open}).json()
        assert chat["tokens"] == wanted and chat["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/tokenize", {}, 400, "give a prompt or messages, got neither"),
        ("/tokenize", {"prompt": "a", "messages": TURNS}, 400, "got both"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "does not exist"),
        ("/tokenize", {"prompt": "a" * 15_000}, 400, "characters"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens must be from 0 to"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens must be from 0 to"), ("/detokenize", {}, 400, "tokens"),
    ],
)  # fmt: skip
def test_what_has_no_tokens_is_refused(served: Served, path: str, body: Any, status: int, said: str) -> None:
    answer = served.post(path, body)
    assert answer.status_code == status and said in answer.json()["error"]["message"]


def test_pages_of_other_sites_may_ask_where_they_are_allowed(served: Served) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    for allowed, found in (((), None), (["https://a.example"], "https://a.example"), (["https://b.example"], None)):
        app = create_app(served.engine, served.tokenizer, "tiny", api_key="k", allowed_origins=allowed)
        answer = TestClient(app).options("/v1/chat/completions", headers=asked)
        assert answer.headers.get("access-control-allow-origin") == found
