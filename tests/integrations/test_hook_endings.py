"""The hook's ends of texts: lengths, padding, scores, stopping criteria, stop strings, streamers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.grammars import END, letters_tokenizer, regular
from helpers.hooked_generate import NEW_TOKENS, PROMPTS, hooked, left_padded, new_tokens, plain, target
from torch import Tensor
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    StoppingCriteria,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)  # fmt: skip
from transformers.generation import GenerateDecoderOnlyOutput

import stree


def test_finished_rows_are_padded_as_transformers_pads_them() -> None:
    texts = [plain(target(), prompt) for prompt in PROMPTS]
    stops = [texts[0][3], texts[1][7]]
    expected = [plain(target(), prompt, eos_token_id=stops) for prompt in PROMPTS]
    out = new_tokens(PROMPTS, hooked(target(), PROMPTS, eos_token_id=stops, pad_token_id=96))
    assert len({len(text) for text in expected}) > 1
    longest = max(map(len, expected))
    assert out == [text + [96] * (longest - len(text)) for text in expected]
    mamba = target("mamba2")  # whose padded batches transformers runs exactly
    theirs = mamba.generate(
        **left_padded(PROMPTS), max_new_tokens=9, do_sample=False, eos_token_id=stops, pad_token_id=0
    )
    assert torch.equal(hooked(mamba, PROMPTS, max_new_tokens=9, eos_token_id=stops), theirs)


@pytest.mark.parametrize("length", [{"max_new_tokens": 1}, {"max_length": 14, "max_new_tokens": None}])
def test_lengths_are_those_of_transformers(length: dict[str, Any]) -> None:
    inputs = left_padded(PROMPTS)
    theirs = target("mamba2").generate(**inputs, do_sample=False, eos_token_id=None, pad_token_id=0, **length)
    assert torch.equal(hooked(target("mamba2"), PROMPTS, **length), theirs)


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.6, "min_new_tokens": 5}], ids=["plain", "processed"])
def test_scores_are_those_of_transformers(options: dict[str, Any]) -> None:
    model, prompts = target("mamba2"), PROMPTS[:1]
    common: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 9, **options}
    theirs = model.generate(**left_padded(prompts), do_sample=False, eos_token_id=0, **common)
    ours = hooked(model, prompts, eos_token_id=0, **common)
    assert isinstance(ours, GenerateDecoderOnlyOutput) and ours.stats["num_new_tokens"] == [len(ours.scores)]
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len(ours.scores) == len(theirs.scores)
    for mine, other in zip(ours.scores, theirs.scores, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    transitions = model.compute_transition_scores(ours.sequences, ours.scores, normalize_logits=True)
    assert bool((transitions < 0).all())


def test_scores_of_a_batch_are_zero_after_a_text_s_end() -> None:
    stop = plain(target(), PROMPTS[1])[2]
    out = hooked(
        target(), PROMPTS, eos_token_id=stop, return_dict_in_generate=True, output_scores=True, max_new_tokens=6
    )
    assert len(out.scores) == out.sequences.shape[1] - 11 == 6
    assert [bool(score[1].any()) for score in out.scores] == [True] * 3 + [False] * 3
    assert all(bool(score[0].any()) for score in out.scores)
    assert hooked(target(), PROMPTS, return_dict_in_generate=True).scores is None


class StopAt(StoppingCriteria):  # type: ignore[misc]
    """Ends a text at a token; notes the lengths it is asked about and whether it saw scores."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.seen: list[tuple[int, Any]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.seen.append((input_ids.shape[1], None if scores is None else len(scores)))
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("drafter", ["suffix", "itself"])
def test_stopping_criteria_are_asked_after_every_token(drafter: str) -> None:
    chosen = target() if drafter == "itself" else drafter
    text = plain(target(), PROMPTS[0])
    end = next(place for place in range(4, NEW_TOKENS) if text[place] not in text[:place])
    criterion = StopAt(text[end])
    out = hooked(target(), PROMPTS[:1], drafter=chosen, stopping_criteria=[criterion])
    assert new_tokens(PROMPTS[:1], out) == [text[: end + 1]]
    assert criterion.seen == [(len(PROMPTS[0]) + count, None) for count in range(1, end + 2)]
    criterion.seen.clear()
    common: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True}
    out = hooked(target(), PROMPTS[:1], drafter=chosen, stopping_criteria=[criterion], **common)
    assert len(out.scores) == end + 1
    assert criterion.seen == [(len(PROMPTS[0]) + count, count) for count in range(1, end + 2)]


def test_a_time_limit_ends_the_text_after_its_first_token() -> None:
    assert len(new_tokens(PROMPTS[:1], hooked(target(), PROMPTS[:1], max_time=1e-9))[0]) == 1


@pytest.fixture(scope="module")
def spoken() -> tuple[PreTrainedModel, Any, list[int]]:
    """The bundled target with its tokenizer and a prompt."""
    folder = Path(stree.__file__).parent / "assets" / "target"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return stree.TreeLM.from_pretrained(folder, "cpu").model, tokenizer, tokenizer("def add(a, b):")["input_ids"]


def test_texts_of_a_grammar_are_those_of_transformers_under_the_same_masks() -> None:
    pattern, stops = "(a|bc)*cab", {"eos_token_id": END, "pad_token_id": END}
    following = regular(pattern, most=10)  # six tokens, and at most four to an end

    def allowed(length: int) -> Any:
        return lambda _, text: following([token for token in text[length:].tolist() if token != END]) or [END]

    expected = [
        plain(target(), prompt, prefix_allowed_tokens_fn=allowed(len(prompt)), max_new_tokens=6, **stops)
        for prompt in PROMPTS
    ]
    bound = functools.partial(stree.custom_generate, tokenizer=letters_tokenizer())
    options: dict[str, Any] = {**stops, "custom_generate": bound, "max_new_tokens": 6}
    found = new_tokens(PROMPTS, hooked(target(), PROMPTS, grammar=stree.Grammar.regex(pattern), **options))
    assert [[token for token in new if token != END] for new in found] == [
        [token for token in new if token != END] for new in expected
    ]
    with pytest.raises(stree.GenerationError, match="error: grammar cannot be followed: the tokenizer has no token"):
        hooked(target(), PROMPTS[:1], grammar=stree.Grammar.regex("a(bx|cx)"), **options)


def test_stop_strings_end_a_text(spoken: tuple[PreTrainedModel, Any, list[int]], monkeypatch: Any) -> None:
    model, tokenizer, prompt = spoken
    text = plain(model, prompt)
    words = tokenizer.batch_decode([[token] for token in text])
    end = next(place for place in range(3, NEW_TOKENS) if words[place].strip() not in "".join(words[:place]))
    string, expected = words[end].strip(), [text[: end + 1]]
    criterion = StopStringCriteria(tokenizer, [string])
    bound = functools.partial(stree.custom_generate, tokenizer=tokenizer)
    ways: list[dict[str, Any]] = [
        {"stopping_criteria": [criterion]},
        {"stop_strings": [string], "custom_generate": bound},
        {"stop_strings": string, "tokenizer": tokenizer},
    ]
    folder = str(Path(stree.__file__).parent / "assets" / "target")
    monkeypatch.setattr(model.config, "_name_or_path", folder)
    for options in ways:
        assert new_tokens([prompt], hooked(model, [prompt], **options)) == expected
    pipe = functools.partial(pipeline("text-generation", model=model, tokenizer=tokenizer), "def add(a, b):")
    options = {"stop_sequence": string, "do_sample": False, "max_new_tokens": NEW_TOKENS}
    assert pipe(custom_generate=stree.custom_generate, **options) == pipe(**options)
    monkeypatch.setattr(model.config, "_name_or_path", "")
    with pytest.raises(
        ValueError, match=r"stop_strings and grammar need a tokenizer, .*: custom_generate=functools.partial"
    ):
        hooked(model, [prompt], stop_strings=[string], tokenizer=tokenizer)  # transformers drops it on the way
    with pytest.raises(ValueError, match="may end at different lengths .*; set pad_token_id"):
        hooked(model, PROMPTS, stop_strings=[string], custom_generate=bound, pad_token_id=None)


def test_a_streamer_hears_the_whole_text(
    spoken: tuple[PreTrainedModel, Any, list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer, prompt = spoken
    expected = tokenizer.decode([*prompt, *plain(model, prompt)])
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    hooked(model, [prompt], streamer=streamer)  # which transformers passes to no callable
    assert "".join(streamer) == expected
    bound = functools.partial(stree.custom_generate, streamer=TextStreamer(tokenizer))
    for options in ({"custom_generate": bound}, {"streamer": TextStreamer(tokenizer)}):
        hooked(model, [prompt], **options)
        assert capsys.readouterr().out == expected + "\n"
    with pytest.raises(ValueError, match="a streamer takes one prompt, got 3"):
        hooked(model, PROMPTS, custom_generate=bound)
