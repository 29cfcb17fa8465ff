"""Text of tokens as they come: whole characters, cut at stop strings.

Run: python -m pytest tests/decode/test_text.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import pytest
from helpers.tiny_pairs import SPECIAL, byte_fallback, byte_level
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stree.decode.stop_strings import StopStrings
from stree.decode.text import IncrementalText, text_of
from stree.inputs import ASSETS, load_tokenizer


@cache
def tokenizer() -> Any:
    """Load a tokenizer whose tokens may be parts of characters."""
    return load_tokenizer(str(ASSETS / "target"))


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["END"], "one two "), (["zzz"], "one two END three"), (["two", "one"], ""), (["E", "END t"], "one two "),
        (["three!"], "one two END three"), (["e two END thre"], "on"),
    ],
)  # fmt: skip
def test_text_is_cut_at_the_first_stop_string(stops: list[str], expected: str) -> None:
    ids = tokenizer()("one two END three")["input_ids"]
    out = IncrementalText(tokenizer(), [], stops)
    pieces = [out.push([token]) for token in ids]
    for count in range(len(pieces)):
        assert expected.startswith("".join(pieces[: count + 1])), "what was given out stays"
    out.push([], is_last=True)
    assert out.text == expected and out.is_stopped == (expected != "one two END three")
    assert out.push(ids) == "" or not out.is_stopped


KINDS = {"byte-fallback": byte_fallback, "byte-level": byte_level}
CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd") | st.sampled_from(
    "abcdé 日月本語🙂\n"
)


def pushed(
    tokenizer: Any, ids: list[int], places: Iterable[int] = (), *, prompt: Sequence[int] = (), stops: Sequence[str] = ()
) -> str:
    """Give the pieces of tokens pushed in parts, joined; every piece must be what the text grew by."""
    out, bounds = IncrementalText(tokenizer, prompt, stops), [0, *places, len(ids)]
    pieces = [out.push(ids[begin:end]) for begin, end in zip(bounds, bounds[1:], strict=False)]
    pieces.append(out.push([], is_last=True))
    assert "".join(pieces) == out.text
    return out.text


@pytest.mark.parametrize("name", KINDS)
@given(text=st.text(CHARACTERS, max_size=12))
@example(text="日本語日本語日本語")
@example(text="🙂🙂🙂🙂")
@example(text="a é\n 日 b")
@settings(max_examples=60, deadline=None)
def test_every_split_of_a_text_is_its_decoding(name: str, text: str) -> None:
    tokenizer = KINDS[name]()
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer.decode(ids)
    assert pushed(tokenizer, ids, range(len(ids))) == whole == text_of(tokenizer, [], ids)
    begun = 0  # characters of the prompt; one that is cut belongs to the new text
    for place in range(len(ids) + 1):
        assert pushed(tokenizer, ids, [place]) == whole
        before = tokenizer.decode(ids[:place]).rstrip("\ufffd")
        begun = max(len(before), begun) if whole.startswith(before) else begun
        new, prompt = ids[place:], ids[:place]
        assert pushed(tokenizer, new, prompt=prompt) == whole[begun:], place
        assert pushed(tokenizer, new, range(len(new)), prompt=prompt) == whole[begun:], place


@pytest.mark.parametrize("name", KINDS)
@given(drawn=st.data())
@settings(max_examples=60, deadline=None)
def test_bytes_that_are_no_characters_spoil_no_others(name: str, drawn: st.DataObject) -> None:
    tokenizer = KINDS[name]()
    some = [*tokenizer("日é🙂a b", add_special_tokens=False)["input_ids"], tokenizer.convert_tokens_to_ids("<s>")]
    token = st.sampled_from(some) | st.integers(0, len(tokenizer) + 2)  # also ids that the tokenizer does not have
    ids = drawn.draw(st.lists(token, max_size=12))
    text = pushed(tokenizer, ids)
    assert text == pushed(tokenizer, ids, range(len(ids)))
    if name == "byte-level":
        assert text == tokenizer.decode(ids, skip_special_tokens=True)
    else:  # there tokenizer.decode spoils the characters beside them
        alone = [tokenizer.decode([one]) for one in ids]
        assert all(one in text for one in alone if "\ufffd" not in one and one not in SPECIAL)


def test_characters_come_as_soon_as_they_are_whole() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer("日本日本日本", add_special_tokens=False)["input_ids"][1:]
    assert len(ids) == 18, "three bytes each, in one run"
    out = IncrementalText(tokenizer, tokenizer("a")["input_ids"])
    assert [out.push([token]) for token in ids] == [*("", "", "日", "", "", "本") * 3]
    assert out.push(ids[:2]) == "" and out.push([], is_last=True) == "\ufffd"


def test_a_whole_text_begins_as_its_decoding_and_ends_before_a_stop_string() -> None:
    tokenizer = byte_fallback()
    prompt, new = tokenizer("cd")["input_ids"], tokenizer.convert_tokens_to_ids(["▁ab", "▁", "a", "▁user"])
    assert text_of(tokenizer, prompt, new) == tokenizer.decode(new) == "ab a user"
    assert text_of(tokenizer, prompt, new, ["d a", " a"]) == "" == text_of(tokenizer, [], new, ["a"])
    assert text_of(tokenizer, prompt, new, [" use"]) == "ab a" and text_of(tokenizer, prompt, []) == ""


@pytest.mark.parametrize("name", KINDS)
@given(drawn=st.data())
@settings(max_examples=150, deadline=None)
def test_decoding_ends_with_the_token_at_which_the_text_is_cut(name: str, drawn: st.DataObject) -> None:
    tokenizer = KINDS[name]()
    specials = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    token = st.sampled_from([*tokenizer("a b日é日ab", add_special_tokens=False)["input_ids"], *specials])
    prompt, ids = drawn.draw(st.lists(token, max_size=4)), drawn.draw(st.lists(token, max_size=12))
    piece = st.sampled_from(["a", "b", " ", "日", "é", "<|im_start|>", "|im", "_end|>"])
    stops = drawn.draw(st.lists(st.lists(piece, min_size=1, max_size=3).map("".join), min_size=1, max_size=3))
    out = IncrementalText(tokenizer, prompt, stops)
    ends = []
    for one in ids:
        out.push([one])
        ends.append(out.is_stopped)
    out.push([], is_last=True)
    end = StopStrings(tokenizer, stops, in_new_text=True).match(prompt).observe(ids)
    assert end == (ends.index(True) + 1 if True in ends else None)
    assert not any(stop in out.text for stop in stops)
    whole = pushed(tokenizer, ids, prompt=prompt)
    assert whole.startswith(out.text) or out.text.endswith("\ufffd"), "what was cut began within a character"
    assert out.is_stopped or (out.text == whole and not any(stop in whole for stop in stops))
