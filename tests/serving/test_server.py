"""The HTTP server as its clients use it: the official openai client, bad requests, a client that leaves.

Run: python -m pytest tests/serving/test_server.py
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import openai
import pytest
from helpers.http_served import CONVERSATION, KEY, NEUTRAL, PROMPT, REFUSED, TOOL_TEMPLATE, Served, as_a_template_has_it

import stree
from stree.decode.loop import DecodeLoop
from stree.rule_fields import tokenized_words


def test_completions_are_the_texts_of_generate(served: Served) -> None:
    client, text = served.client, served.alone(PROMPT, max_new_tokens=20)
    done = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0, logprobs=2)
    choice, usage = done.choices[0], done.usage
    assert choice.text == text and choice.finish_reason == "length"
    assert usage is not None and usage.completion_tokens == 20
    assert choice.logprobs is not None and "".join(choice.logprobs.tokens or []) == text
    assert choice.logprobs.top_logprobs is not None and {len(top) for top in choice.logprobs.top_logprobs} == {2}
    sampled = [
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, seed=seed, top_p=0.9).choices[0].text
        for seed in (1, 1, 2)
    ]
    sampling = stree.Sampling(1.0, top_p=0.9)
    expected = stree.generate(
        served.engine.lm, [served.tokenizer(PROMPT)["input_ids"]], served.engine._drafter, budget=12,
        sampling=sampling, seed=1, max_new_tokens=12,
    )  # fmt: skip
    assert sampled[0] == sampled[1] != sampled[2]
    assert served.tokenizer.decode(expected.sequences[0]).endswith(sampled[0])


def test_several_prompts_and_texts_come_in_order(served: Served) -> None:
    done = served.client.completions.create(
        model="tiny", prompt=[PROMPT, "def"], n=2, max_tokens=6, temperature=0.9, seed=3
    )
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    ids = served.tokenizer("def")["input_ids"]
    again = served.client.completions.create(model="tiny", prompt=ids, n=2, max_tokens=6, temperature=0.9, seed=3)
    assert [choice.text for choice in again.choices] == [choice.text for choice in done.choices[2:]]


def test_streams_give_the_same_text_and_end_with_usage(anywhere: Served) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    chunks = list(
        anywhere.lenient.completions.create(**options, stream=True, stream_options={"include_usage": True}, logprobs=1)
    )
    whole = anywhere.client.completions.create(**options, logprobs=1)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert len(chunks) > 3 and chunks[-2].choices[0].finish_reason == "length" and not chunks[-1].choices
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 24
    tokens = [token for chunk in chunks[:-1] if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.tokens]
    assert whole.choices[0].logprobs is not None and tokens == whole.choices[0].logprobs.tokens
    response = anywhere.post("/v1/completions", {**options, "stream": True})
    assert response.text.endswith("data: [DONE]\n\n")
    extra: Any = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    each = [*anywhere.lenient.completions.create(**options, stream=True, stream_options=extra)]
    counts = [chunk.usage.completion_tokens for chunk in each if chunk.usage is not None]
    assert len(counts) == len(each) > 3 and counts == sorted(counts) and 0 < counts[0] < counts[-1] == 24


def test_stop_strings_are_cut_whole_and_in_streams(anywhere: Served) -> None:
    text = anywhere.alone(PROMPT, max_new_tokens=40)
    stop = text[9:14]
    options: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": [stop]}
    expected = text[: text.index(stop)]
    whole = anywhere.client.completions.create(**options).choices[0]
    assert whole.text == expected and whole.finish_reason == "stop"
    chunks = list(anywhere.lenient.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_chats_use_the_template_and_run_their_new_tokens_only(served: Served) -> None:
    turns: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_completion_tokens": 16}
    first = served.client.chat.completions.create(**options, messages=turns, logprobs=True, top_logprobs=2)
    choice = first.choices[0]
    assert choice.message.content == served.alone("user: What is 2 + 3?\nassistant:", max_new_tokens=16)
    assert choice.logprobs is not None and len(choice.logprobs.content or []) == 16
    assert choice.logprobs.content is not None and len(choice.logprobs.content[0].top_logprobs) == 2
    turns += [{"role": "assistant", "content": choice.message.content}, {"role": "user", "content": "And 4?"}]
    usage = served.client.chat.completions.create(**options, messages=turns).usage
    assert usage is not None and usage.prompt_tokens_details is not None and first.usage is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is 2 + 3?"}]}]
    again = served.client.chat.completions.create(**options, messages=parts)
    assert again.choices[0].message.content == choice.message.content


def test_streams_of_a_chat_give_its_text(anywhere: Served) -> None:
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_completion_tokens": 16}
    options["messages"] = [{"role": "user", "content": "What is 2 + 3?"}]
    text = anywhere.alone("user: What is 2 + 3?\nassistant:", max_new_tokens=16)
    assert anywhere.client.chat.completions.create(**options).choices[0].message.content == text
    chunks = list(anywhere.client.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", None]


def test_models_errors_and_reports(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == ["tiny"]
    assert served.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as missing:
        served.client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        served.client.with_options(api_key="wrong").models.list()
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    assert "version" in httpx.get(f"{served.url}/version").json()


COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 2}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
BAD_COMPLETIONS: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": ""}, 400, "prompt"), ({"prompt": []}, 400, "prompt"), ({"prompt": 5}, 400, "prompt"),
    ({"prompt": [1, -1]}, 400, "prompt"), ({"prompt": [10**6]}, 400, "prompt"), ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": [1] * 256}, 400, "prompt"), ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"), ({"prompt": "\ud800"}, 400, "prompt"),
    ({"max_tokens": 0}, 400, "max_tokens"), ({"max_tokens": 256}, 400, "max_tokens"),
    ({"max_tokens": "9"}, 400, "max_tokens"), ({"max_tokens": 1.5}, 400, "max_tokens"),
    ({"temperature": -1}, 400, "temperature"), ({"temperature": 3}, 400, "temperature"),
    ({"temperature": "hot"}, 400, "temperature"), ({"top_p": 0}, 400, "top_p"), ({"top_p": 1.1}, 400, "top_p"),
    ({"top_k": -2}, 400, "top_k"), ({"min_p": 2}, 400, "min_p"), ({"n": 0}, 400, "n"), ({"n": True}, 400, "n"),
    ({"stop": 5}, 400, "stop"), ({"seed": "x"}, 400, "seed"),
    ({"logprobs": 21}, 400, "logprobs"), ({"stream": "yes"}, 400, "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"), ({"model": "other"}, 404, "model"),
    ({"stream": True, "stream_options": {"include_usages": True}}, 400, "stream_options"),
    ({"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens"),
    ({"model": 3}, 400, "model"), *(({name: value}, 400, name) for name, value, _ in REFUSED),
]  # fmt: skip
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"), ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": ["x"]}, "messages"), ({"messages": [{"role": "user", "content": 3}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"), ({"max_tokens": 300}, "max_tokens"),
    ({"max_completion_tokens": 300, "max_tokens": 3}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
]  # fmt: skip
BAD: list[tuple[str, Any, int, str | None]] = [
    *(("completions", {**COMPLETION, **changed}, status, param) for changed, status, param in BAD_COMPLETIONS),
    *(("chat/completions", {**CHAT, **changed}, 400, param) for changed, param in BAD_CHATS),
    ("completions", b"{", 400, None), ("completions", b"", 400, None), ("completions", b"\xff\xfe", 400, None),
    ("completions", b"[]", 400, None), ("completions", b'{"model": "tiny", "prompt": "' + b"x" * 30_000, 413, None),
    ("completions", json.dumps({**COMPLETION, "temperature": float("nan")}).encode(), 400, "temperature"),
    ("nothing", {}, 404, None), ("models", {}, 405, None),
]  # fmt: skip


def test_bad_requests_are_answered_by_error_objects(served: Served) -> None:
    assert len(BAD) >= 40
    for path, body, status, param in BAD:
        response = served.post(f"/v1/{path}", body)
        assert response.status_code == status, (path, body, response.text)
        error = response.json()["error"]
        assert error["param"] == param and error["message"] and error["type"] and error["code"], (path, body, error)
    assert served.engine.stats["running"] == 0
    huge = {"top_k": 1 << 70, "stop_token_ids": [1 << 63], "seed": (1 << 64) - 1}  # limits that exclude nothing
    assert served.post("/v1/completions", {**COMPLETION, **huge}).status_code == 200


def test_a_request_may_have_a_smaller_budget_than_the_server(served: Served) -> None:
    drafted = []
    for budget in (1, 3):
        before = served.engine.stats["drafted"]
        body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "budget": budget}
        answer = served.post("/v1/completions", body).json()
        assert answer["choices"][0]["text"] == served.alone(PROMPT, max_new_tokens=12)
        drafted.append(served.engine.stats["drafted"] - before)
    assert drafted[0] == 0 < drafted[1] <= 2 * 11
    for budget in (0, 1000):
        refused = served.post("/v1/completions", {**body, "budget": budget})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "budget"


def test_token_rules_are_those_of_generate(served: Served) -> None:
    ids, lm = served.tokenizer(PROMPT)["input_ids"], served.engine.lm
    plain = stree.generate(lm, [ids], "none", max_new_tokens=12).sequences[0][len(ids) :]
    rules: dict[str, Any] = {
        "logit_bias": {str(plain[1]): 3.5}, "repetition_penalty": 1.2, "frequency_penalty": 0.3,
        "presence_penalty": 0.5, "bad_words": [plain[:1], served.tokenizer.decode(plain[2:3])],
    }  # fmt: skip
    ending = {"stop_token_ids": [plain[3]], "ignore_eos": True}
    base = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    answer = served.post("/v1/completions", {**base, **rules, **ending, "min_tokens": 9}).json()
    words = tokenized_words(rules["bad_words"], served.tokenizer)
    own = {**rules, "logit_bias": {plain[1]: 3.5}, "bad_words": words, "min_new_tokens": 9}
    expected = served.alone(PROMPT, max_new_tokens=12, stop_token_ids=[plain[3]], **own)
    assert answer["choices"][0]["text"] == expected != served.alone(PROMPT, max_new_tokens=12)
    assert 9 <= answer["usage"]["completion_tokens"] <= 12
    outside = served.post("/v1/completions", {**base, "allowed_token_ids": [99999]})
    assert outside.status_code == 400 and outside.json()["error"]["param"] == "allowed_token_ids"


def test_what_changes_no_text_is_taken_and_what_would_is_named(served: Served) -> None:
    for path, base in (("completions", COMPLETION), ("chat/completions", {**CHAT, "max_tokens": 1})):
        rest = [*NEUTRAL]
        while fields := dict(rest):  # of each name that is left one value
            response = served.post(f"/v1/{path}", {**base, **fields})
            assert response.status_code == 200, (path, fields, response.text)
            rest = [field for field in rest if field[1] is not fields[field[0]]]
        for name, value, message in REFUSED:
            error = served.post(f"/v1/{path}", {**base, name: value}).json()["error"]
            assert error["param"] == name and message in error["message"], (path, name, value, error)
        own = path == "completions"  # a template writes special tokens itself
        for value, status in ((own, 200), (not own, 400)):
            assert served.post(f"/v1/{path}", {**base, "add_special_tokens": value}).status_code == status


def test_every_field_of_a_message_reaches_the_chat_template(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.tokenizer, "chat_template", TOOL_TEMPLATE)
    body = {"model": "tiny", "messages": CONVERSATION, "temperature": 0, "max_tokens": 8}
    answer = served.post("/v1/chat/completions", body).json()
    prompt = as_a_template_has_it()
    assert answer["usage"]["prompt_tokens"] == len(served.tokenizer(prompt)["input_ids"])
    assert answer["choices"][0]["message"]["content"] == served.alone(prompt, max_new_tokens=8)
    image = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}]
    error = served.post("/v1/chat/completions", {**body, "messages": image}).json()["error"]
    assert error["param"] == "messages" and "a content part of type 'image_url' is not supported" in error["message"]


def ended(engine: stree.Engine) -> bool:
    """Wait until nothing runs."""
    deadline = time.monotonic() + 30
    while engine.stats["running"] + engine.stats["waiting"] and time.monotonic() < deadline:
        time.sleep(0.02)
    return not engine.stats["running"] + engine.stats["waiting"]


def test_a_client_that_leaves_frees_its_row(served: Served) -> None:
    body = {**COMPLETION, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{served.url}/v1/completions", json={**body, "stream": True}, headers=headers) as stream:
        next(stream.iter_lines())
        assert served.engine.stats["running"] == 1
    assert ended(served.engine)
    before = served.engine.stats["new_tokens"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=0.3)
    assert ended(served.engine) and served.engine.stats["new_tokens"] - before < 200


def test_a_full_queue_is_429_and_a_server_that_stops_503(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {**COMPLETION, "prompt": ["x"] * 6, "n": 2, "max_tokens": 200, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{served.url}/v1/completions", json={**body, "stream": True}, headers=headers) as stream:
        next(stream.iter_lines())
        refused, advance = threading.Event(), DecodeLoop.advance
        monkeypatch.setattr(DecodeLoop, "advance", lambda loop: (refused.wait(60), advance(loop))[1])  # no text ends
        response = served.post("/v1/completions", COMPLETION)
        refused.set()
    assert response.status_code == 429 and int(response.headers["retry-after"]) > 0
    response = served.post("/v1/completions", {**body, "n": 3})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "18 texts of one request, where at most 12 run and wait"
    assert ended(served.engine)
    served.app.state.requests.is_draining = True
    try:
        assert served.post("/v1/completions", COMPLETION).status_code == 503
    finally:
        served.app.state.requests.is_draining = False
