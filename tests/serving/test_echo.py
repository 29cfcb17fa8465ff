"""Prompts are echoed with the log probabilities that the target's own forward gives.

Run: python -m pytest tests/serving/test_echo.py
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.http_served import PROMPT, Served
from transformers import AutoModelForCausalLM

from stree.inputs import ASSETS


def test_log_probabilities_of_prompts_are_those_of_the_forward(served: Served) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(ASSETS / "target", dtype=torch.float32)
    ids = [served.tokenizer(PROMPT)["input_ids"], [0, 5, 900, 7], [9]]
    for size in (0, 1):
        body = {"model": "tiny", "prompt": ids, "max_tokens": size, "logprobs": 1, "echo": True, "temperature": 0}
        choices = served.post("/v1/completions", body).json()["choices"]
        assert len(choices) == 3
        for prompt, choice in zip(ids, choices, strict=True):
            found = choice["logprobs"]
            with torch.no_grad():
                wanted = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            own = wanted[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
            assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
            assert len(found["tokens"]) == len(found["token_logprobs"]) == len(prompt) + size
            torch.testing.assert_close(
                torch.tensor(found["token_logprobs"][1 : len(prompt)]), own, rtol=1e-3, atol=1e-3
            )
            if len(prompt) > 2:  # the control
                other = wanted[:-1].gather(1, torch.tensor(prompt[:-1])[:, None])[:, 0]
                assert not torch.allclose(other, own, atol=0.1)
            best = [max(top.values()) for top in found["top_logprobs"][1:]]
            torch.testing.assert_close(torch.tensor(best), wanted.max(-1).values[: len(best)], rtol=1e-3, atol=1e-3)
            shown = served.tokenizer.decode(prompt, skip_special_tokens=True)
            assert choice["text"].startswith(shown) and (choice["text"] == shown or size)
            assert choice["finish_reason"] == ("length" if not size else choice["finish_reason"])
            assert found["text_offset"] == sorted(found["text_offset"]) and math.isfinite(sum(best))


def test_an_echo_is_in_front_of_every_text_whole_and_streamed(served: Served) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": [PROMPT, "a"], "max_tokens": 5, "n": 2, "seed": 3}
    client = served.lenient.completions
    plain, echoed = (
        client.create(**options, logprobs=2).choices,
        client.create(**options, logprobs=2, echo=True).choices,
    )
    texts = [""] * 4
    for chunk in client.create(**options, echo=True, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    for one, other, text, prompt in zip(plain, echoed, texts, [PROMPT, PROMPT, "a", "a"], strict=True):
        assert other.text == text == prompt + one.text
        assert one.logprobs is not None and other.logprobs is not None
        assert other.logprobs.token_logprobs is not None
        assert other.logprobs.token_logprobs[-5:] == pytest.approx(one.logprobs.token_logprobs, abs=1e-4)
        assert other.logprobs.text_offset[-5:] == [len(prompt) + place for place in one.logprobs.text_offset or ()]


def test_prompt_logprobs_are_those_of_the_forward(served: Served) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(ASSETS / "target", dtype=torch.float32)
    prompt = [5, 0, 7, *range(20, 120)]  # an end token among them, and more than run at once
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 2, "temperature": 0}
    for _ in range(2):  # also where the state of the whole prompt is kept
        choice = served.post("/v1/completions", body).json()["choices"][0]
        first, *rest = choice["prompt_logprobs"]
        assert first is None and len(rest) == len(prompt) - 1
        for place, entries in enumerate(rest):
            own = entries[f"{prompt[place + 1]}"]
            assert own["logprob"] == pytest.approx(wanted[place, prompt[place + 1]].item(), abs=1e-3)
            assert own["rank"] == 1 + int((wanted[place] > wanted[place, prompt[place + 1]]).sum())
            assert own["decoded_token"] == served.tokenizer.decode([prompt[place + 1]])
            assert {entry["rank"] for entry in entries.values()} >= {1, 2} and len(entries) in (2, 3)
            assert abs(own["logprob"] - wanted[place, prompt[place]].item()) > 1e-3, "the control"
    assert choice["text"] == served.tokenizer.decode([int(wanted[-1].argmax())])
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "prompt_logprobs": 0}
    found = served.post("/v1/chat/completions", chat).json()
    assert len(found["prompt_logprobs"]) == found["usage"]["prompt_tokens"]
    refused = served.post("/v1/completions", {**body, "stream": True})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("fields", [{}, {"echo": False}, {"max_tokens": -1, "echo": True}])
def test_no_text_is_refused_without_an_echo(served: Served, fields: Any) -> None:
    answer = served.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 0, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
