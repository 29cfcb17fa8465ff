"""Texts of answers, where they end, and their log probabilities, for tokens that are parts of characters.

Run: python -m pytest tests/serving/test_answers.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from helpers.http_served import Served, listening
from helpers.tiny_pairs import byte_fallback, byte_level, writing_model

import stree
from stree.decode.logprobs import TokenLogprob
from stree.decode.stop_strings import TokenBytes
from stree.decode.text import TextToken
from stree.serving.answers import Piece, completion_logprobs

WRITTEN = "ж日🙂אbc"  # every byte once, so that a model of one token's memory can write it
SHOWN = WRITTEN + "user"  # with <|im_start|> between
OFFSETS = {
    "byte-fallback": [0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 10],
    "byte-level": [0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 10],  # two of the bytes of 日 and 🙂 are a token
}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module", params=["byte-fallback", "byte-level"])
def writing(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Serve a model that continues "a" by WRITTEN, <|im_start|>, "user", <|im_end|>, "fin" and </s>."""
    tokenizer = (byte_fallback if request.param == "byte-fallback" else byte_level)("<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    ends = ["<|im_start|>", *"user", "<|im_end|>", *"fin", "</s>"]
    chain = [*tokenizer("a" + WRITTEN)["input_ids"], *tokenizer.convert_tokens_to_ids(ends)]
    own = [["<0x0A>", "o", "b"], ["a", "b"], ["<s>", "▁user", "<|im_end|>"]] * (request.param == "byte-fallback")
    others = [tokenizer.convert_tokens_to_ids(names) for names in own]
    lm = writing_model(tokenizer, chain, *others, eos_token_id=tokenizer.convert_tokens_to_ids("</s>"))
    options: Any = {"budget": 6, "max_batch": 2, "max_length": 96}
    with stree.Engine(lm, "suffix", **options) as engine, listening(engine, tokenizer) as server:
        yield server


def completed(served: Served, prompt: Any = "a", **options: Any) -> tuple[str, str, dict[str, Any]]:
    """Return text, finish reason and log probabilities of a completion, which must be those of its stream."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 0, **options}
    whole = served.client.completions.create(**body).choices[0]
    parts = [chunk.choices[0] for chunk in served.lenient.completions.create(**body, stream=True)]
    assert "".join(part.text for part in parts) == whole.text and parts[-1].finish_reason == whole.finish_reason
    logprobs: dict[str, Any] = {} if whole.logprobs is None else whole.logprobs.model_dump()
    for name, values in logprobs.items():
        assert [one for part in parts for one in getattr(part.logprobs, name)] == values, name
    return whole.text, whole.finish_reason, logprobs


def test_a_text_ends_at_the_stop_tokens_of_model_and_tokenizer(writing: Served) -> None:
    assert completed(writing)[:2] == (SHOWN, "stop"), "at <|im_end|>, which the generation config does not name"
    chat: Any = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "temperature": 0}
    choice = writing.client.chat.completions.create(**chat).choices[0]
    assert (choice.message.content, choice.finish_reason) == (SHOWN, "stop")
    other = writing.tokenizer.convert_tokens_to_ids("n")
    assert completed(writing, extra_body={"stop_token_ids": [other]})[0] == SHOWN, "own stop tokens come beside them"
    assert completed(writing, extra_body={"ignore_eos": True, "stop_token_ids": [other]})[:2] == (SHOWN + "fin", "stop")
    assert completed(writing, max_tokens=3)[1] == "length"


@pytest.mark.parametrize(("top", "drawn"), [(0, 7), (2, 7), (2, 3)])
def test_alternatives_of_a_completion_have_the_token_that_was_drawn(top: int, drawn: int) -> None:
    tokenizer, likely = byte_level("<|im_end|>"), [(3, -0.5), (5, -1.0)][:top]
    found = TokenLogprob(drawn, dict(likely).get(drawn, -4.0), likely)
    written = completion_logprobs(Piece(0, "", [found], [TextToken(0, True)], None), TokenBytes(tokenizer))
    name, value, alternatives = written["tokens"][0], written["token_logprobs"][0], written["top_logprobs"][0]
    assert alternatives[name] == value and len(alternatives) == top + (drawn == 7)
    assert [*alternatives.values()] == sorted(alternatives.values(), reverse=True)


def test_a_text_cut_within_a_character_keeps_the_others(writing: Served) -> None:
    assert completed(writing, max_tokens=3)[:2] == ("ж\ufffd", "length")


def test_a_stop_string_may_have_special_tokens_in_it_and_leaves_nothing(writing: Served) -> None:
    for stop, text in {
        "<|im_start|>us": WRITTEN, "c<|im_start|>": WRITTEN[:-1], "cu": WRITTEN[:-1], "日": "ж", "<|im_end|>": SHOWN,
    }.items():  # fmt: skip
        usage = writing.client.completions.create(model="tiny", prompt="a", max_tokens=40, temperature=0, stop=stop)
        assert completed(writing, stop=[stop, "never"])[:2] == (text, "stop"), stop
        assert usage.usage is not None and usage.usage.completion_tokens <= 19, "it ends there"


@pytest.mark.parametrize("writing", ["byte-fallback"], indirect=True)
def test_a_stop_string_concerns_new_text_only(writing: Served) -> None:
    assert completed(writing, "xa", stop="ab")[0] == "bcuser"
    assert completed(writing, "x\n", stop="\nob")[0] == "obcuser"
    assert completed(writing, "xa", stop="bc")[0] == "", "the control"


def test_bytes_of_log_probabilities_are_those_of_the_text(writing: Served) -> None:
    chat: Any = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "temperature": 0}
    choice = writing.client.chat.completions.create(**chat, logprobs=True, top_logprobs=5).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    assert b"".join(bytes(one.bytes or ()) for one in content) == SHOWN.encode()
    for one in content:
        assert one.top_logprobs[0].bytes == one.bytes and one.top_logprobs[0].token == one.token
    assert content[0].token == "\\xd0" and content[-1].token == "<|im_end|>"


def test_log_probabilities_of_completions_have_places_in_the_text_and_names_of_their_own(writing: Served) -> None:
    name = "byte-level" if writing.tokenizer.convert_tokens_to_ids("<0x0A>") is None else "byte-fallback"
    for stop in (None, SHOWN + "!"):  # which holds all of the text back
        text, _, logprobs = completed(writing, logprobs=20, stop=stop)
        assert text == SHOWN and logprobs["text_offset"] == OFFSETS[name]
        assert {len(top) for top in logprobs["top_logprobs"]} == {20}
        assert [max(top, key=top.get) for top in logprobs["top_logprobs"]] == logprobs["tokens"]
        shown = [own for own in logprobs["tokens"] if not own.startswith(("bytes:", "<|"))]
        assert "".join(shown) == "bcuser" and logprobs["tokens"][:2] == ["bytes:\\xd0", "bytes:\\xb6"]


@pytest.mark.parametrize("writing", ["byte-fallback"], indirect=True)
def test_the_first_word_of_a_text_has_no_space_in_its_log_probabilities_either(writing: Served) -> None:
    text, _, logprobs = completed(writing, [writing.tokenizer.bos_token_id], logprobs=2)
    assert (text, logprobs["tokens"], logprobs["text_offset"]) == ("user", ["user", "<|im_end|>"], [0, 4])
