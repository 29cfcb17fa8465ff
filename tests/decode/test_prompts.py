"""Prompts in every form that tokenizers give, and several samples of each.

Run: python -m pytest tests/decode/test_prompts.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.captured import launched, near_drafter
from transformers import BatchEncoding

import stree
from stree.drafters import NoDrafter, SuffixDrafter
from stree.growth import Calibrated
from stree.sampling import Sampling

PROMPTS = [[5, 6, 7, 8], [3, 4], [9]]
LEFT = torch.tensor([[5, 6, 7, 8], [0, 0, 3, 4], [0, 0, 0, 9]])
RIGHT = torch.tensor([[5, 6, 7, 8], [3, 4, 0, 0], [9, 0, 0, 0]])
FORMS: dict[str, tuple[Any, Any]] = {
    "left": (LEFT, (LEFT > 0).long()),
    "right": (RIGHT, RIGHT > 0),
    "arrays": (RIGHT.numpy(), (RIGHT > 0).numpy()),
    "lists": (LEFT.tolist(), (LEFT > 0).long().tolist()),
    "encoding": (BatchEncoding({"input_ids": LEFT, "attention_mask": (LEFT > 0).long()}), None),
    "ragged": ({"input_ids": PROMPTS, "attention_mask": [[1] * len(prompt) for prompt in PROMPTS]}, None),
    "unmasked": ({"input_ids": PROMPTS}, None),
}
OPTIONS: dict[str, Any] = {"budget": 6, "max_new_tokens": 6}


@pytest.mark.parametrize("name", FORMS)
def test_padding_is_left_out(name: str) -> None:
    prompts, mask = FORMS[name]
    expected = stree.generate(launched(), PROMPTS, **OPTIONS).sequences
    assert stree.generate(launched(), prompts, attention_mask=mask, **OPTIONS).sequences == expected


def test_one_prompt_needs_no_list() -> None:
    expected = stree.generate(launched(), PROMPTS[:1], **OPTIONS).sequences
    encoding = {"input_ids": [0, *PROMPTS[0]], "attention_mask": [0, 1, 1, 1, 1]}
    forms: list[Any] = [PROMPTS[0], tuple(PROMPTS[0]), torch.tensor(PROMPTS[0]), np.array(PROMPTS[0]), encoding]
    for prompt in forms:
        assert stree.generate(launched(), prompt, **OPTIONS).sequences == expected


REFUSED = [
    (LEFT, [[1, 0, 1, 1]] * 3, "attention_mask of prompt 0 has a hole; prompts are padded on the left or on the right"),
    (LEFT, [[1] * 4], "attention_mask must have a row for each of 3 prompts, got 1"),
    (LEFT, [[1] * 3] * 3, "attention_mask of prompt 0 must have 4 entries, got 3"),
    (LEFT, [[0] * 4] * 3, "prompt 0 is empty; every prompt needs at least one token"),
    ({"inputs": LEFT}, None, "prompts must hold input_ids, got inputs"),
    (iter(PROMPTS), [[1]], "an iterator of prompts takes no attention_mask"),
]


@pytest.mark.parametrize(("prompts", "mask", "message"), REFUSED, ids=lambda value: str(value)[:20])
def test_masks_that_do_not_fit_are_refused(prompts: Any, mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stree.generate(launched(), prompts, attention_mask=mask, max_batch=1, max_length=40)


def test_samples_of_a_prompt_are_together_and_drawn_independently() -> None:
    sampled: Any = {"sampling": [Sampling(0.9), Sampling(1.2), Sampling(0.8)], "seed": [1, 2, 3], "max_new_tokens": 7}
    plain = stree.generate(launched(), PROMPTS, NoDrafter(), num_samples=3, **sampled).sequences
    one_by_one = [prompt for prompt in PROMPTS for _ in range(3)]
    each = {name: [value for value in values for _ in range(3)] for name, values in sampled.items() if name[0] == "s"}
    assert plain == stree.generate(launched(), one_by_one, NoDrafter(), **{**sampled, **each}).sequences
    assert all(text[: len(prompt)] == prompt for text, prompt in zip(plain, one_by_one, strict=True))
    assert len({tuple(text) for text in plain}) == 9
    tree: Any = {"growth": Calibrated(3), "budget": 9, "verifier": "match", "max_batch": 4}
    assert stree.generate(launched(), PROMPTS, near_drafter(), num_samples=3, **sampled, **tree).sequences == plain
    endless = stree.generate(
        launched(), iter(PROMPTS), SuffixDrafter(), sampling=Sampling(0.9), max_new_tokens=5, num_samples=2,
        max_batch=2, max_length=12,
    )  # fmt: skip
    assert [text[:1] for text in endless.sequences] == [[5], [5], [3], [3], [9], [9]]
    with pytest.raises(ValueError, match="num_samples of 2 needs sampling: greedy texts of one prompt are equal"):
        stree.generate(launched(), PROMPTS, num_samples=2)
    with pytest.raises(ValueError, match="a streamer takes one prompt, got 2"):
        streamer = type("Silent", (), {"put": print, "end": print})()
        stree.generate(launched(), PROMPTS[:1], num_samples=2, sampling=Sampling(1.0), streamer=streamer)


@pytest.mark.parametrize("penalty", [0, -1.0, float("nan"), float("inf"), "1.2", [1.2, None, 1.0]])
def test_a_penalty_that_is_none_is_refused(penalty: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="repetition_penalty must be (a number|in .0.001, 1000.0.), got"):
        stree.generate(launched(), PROMPTS, repetition_penalty=penalty)
