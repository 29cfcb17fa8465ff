"""Stop strings end a text where transformers' own do, across tokens and characters, for each sequence of a batch.

Run: python -m pytest tests/decode/test_stop_strings.py
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.captured import captured
from helpers.fast_cases import slow_unless
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast, StopStringCriteria

import stree
from stree.decode.stop_strings import StopStrings, TokenBytes
from stree.drafters import FusedDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling

ASSETS = Path(stree.__file__).parent / "assets"
PROMPTS = ["def add(a, b):", "Question: Tom has 3 apples.", "import"]
NEW_TOKENS = 14


@cache
def target() -> TreeLM:
    return TreeLM.from_pretrained(ASSETS / "target", "cpu")


@cache
def byte_level() -> Any:
    return AutoTokenizer.from_pretrained(ASSETS / "target")


@cache
def byte_fallback() -> Any:
    """Make a tokenizer as SentencePiece's: words with their spaces, and bytes for all else."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdef", "▁", "▁ab", "abc", "é", "cd▁e"]
    model = models.BPE({name: place for place, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def prompts() -> list[list[int]]:
    ids: list[list[int]] = byte_level()(PROMPTS)["input_ids"]
    return ids


def drafter() -> FusedDrafter:
    return FusedDrafter(ModelDrafter(TreeLM.from_pretrained(ASSETS / "drafter", "cpu")), SuffixDrafter())


@cache
def plain() -> list[list[int]]:
    return stree.generate(target(), prompts(), NoDrafter(), max_new_tokens=NEW_TOKENS).sequences


def across_tokens(text: list[int], end: int) -> str:
    """Give a string that begins within the token before a place and ends within the token there."""
    before, last = byte_level().batch_decode([[text[end - 1]], [text[end]]])
    return str(before[-1:] + last[: max(len(last) - 1, 1)])


CASES = {
    "byte-level": (byte_level, ["add", "\n    ret", "é", "日本", "b):\n"]),
    "byte-fallback": (byte_fallback, ["bcd", "c e", "é", "日", " "]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_text_ends_where_transformers_criterion_ends_it(name: str) -> None:
    make, strings = CASES[name]
    tokenizer, rng, found = make(), random.Random(0), 0
    for string in strings:
        ids = tokenizer(string, add_special_tokens=False)["input_ids"]
        spelled = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in string.encode()]
        near = [*ids, *(spelled if name == "byte-fallback" else []), *rng.sample(range(len(tokenizer)), 12)]
        theirs, ours = StopStringCriteria(tokenizer, [string]), StopStrings(tokenizer, [string])
        for begin in range(40):
            texts = [near if begin % 4 == 0 else ids, *([rng.choice(near)] for _ in range(8))]
            text = [token for part in (*texts[1:4], texts[0], *texts[4:]) for token in part]
            split = rng.randrange(1, 4)
            ends = [bool(theirs(torch.tensor([text[: place + 1]]), None)) for place in range(split, len(text))]
            expected = ends.index(True) + 1 if True in ends else None
            assert ours.match(text[:split]).observe(text[split:]) == expected
            found += expected is not None
    assert found > 60, "the control: strings are found"


@pytest.mark.slow
def test_sequences_of_a_batch_end_at_their_own_strings() -> None:
    texts, tokenizer = plain(), byte_level()
    new = [text[len(prompt) :] for text, prompt in zip(texts, prompts(), strict=True)]
    strings = [[across_tokens(new[0], 5), "never so"], [], across_tokens(new[2], 9)]
    expected = [
        target().model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
            **({"stop_strings": own, "tokenizer": tokenizer} if own else {}),
        )[0].tolist()
        for prompt, own in zip(prompts(), strings, strict=True)
    ]  # fmt: skip
    assert len(expected[0]) < len(texts[0]) and expected[1] == texts[1] and len(expected[2]) < len(texts[2])
    for max_batch, drafts in ((None, drafter()), (2, drafter()), (2, NoDrafter())):
        out = stree.generate(
            target(), prompts(), drafts, budget=12, max_new_tokens=NEW_TOKENS, max_batch=max_batch,
            stop_strings=strings, tokenizer=tokenizer,
        )  # fmt: skip
        assert out.sequences == expected and out.stats["finish_reasons"] == ["stop", "length", "stop"]
    one: Any = {"stop_strings": strings[0], "tokenizer": tokenizer, "max_new_tokens": NEW_TOKENS}
    assert stree.generate(target(), prompts()[:1], **one).sequences == expected[:1]


@pytest.mark.parametrize("is_pipelined", slow_unless(bool, [False, True]))
@pytest.mark.slow
def test_captured_steps_end_at_the_same_strings(is_pipelined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: Any = {"sampling": Sampling(0.8), "seed": 3, "max_new_tokens": NEW_TOKENS, "max_batch": 2}
    texts = stree.generate(target(), prompts(), NoDrafter(), **sampled).sequences
    new = [text[len(prompt) :] for text, prompt in zip(texts, prompts(), strict=True)]
    strings = [[across_tokens(text, end)] for text, end in zip(new, (4, 8, 6), strict=True)]
    stops: Any = {"stop_strings": strings, "tokenizer": byte_level(), "verifier": "match", "budget": 8}
    expected = stree.generate(target(), prompts(), NoDrafter(), stop_strings=strings, tokenizer=byte_level(), **sampled)
    assert expected.stats["finish_reasons"] == ["stop"] * 3
    assert [text[: len(own)] for text, own in zip(texts, expected.sequences, strict=True)] == expected.sequences
    # Only on a device is a step read while the next one runs.
    monkeypatch.setattr("stree.decode.loop.DecodeLoop._is_pipelined", lambda _: is_pipelined)
    lm = captured(monkeypatch, TreeLM.from_pretrained(ASSETS / "target", "cpu"))
    for _ in range(2):
        found = stree.generate(lm, prompts(), SuffixDrafter(), **sampled, **stops)
        assert found.sequences == expected.sequences and found.stats["finish_reasons"] == ["stop"] * 3
    assert found.stats["graphs"]["replays"] > 0


REFUSED = [
    ({"stop_strings": ["a"]}, ValueError, "stop_strings need the model's tokenizer: tokenizer="),
    ({"stop_strings": ["a", ""], "tokenizer": 1}, ValueError, "strings of at least one character"),
    ({"stop_strings": [["a"], 3, ["b"]], "tokenizer": 1}, TypeError, "stop_strings must be strings"),
    ({"stop_strings": [["a"]], "tokenizer": 1}, ValueError, "stop_strings must be one for .* of 3, got a list of 1"),
]


def test_a_tokenizer_of_whole_words_that_does_not_know_a_word_is_read() -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    bytes_of = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]"))
    assert [bytes_of[token] for token in range(3)] == [b" [UNK]", b" a", b" b"]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_strings_that_cannot_be_found_are_refused(options: dict[str, Any], error: Any, message: str) -> None:
    options = {**options, "tokenizer": byte_level()} if "tokenizer" in options else options
    with pytest.raises(error, match=message):
        stree.generate(target(), prompts(), **options)
