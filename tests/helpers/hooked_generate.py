"""What the tests of the hook share: prompts, and calls of ``generate`` with and without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import stree
from helpers.tiny_models import tiny_model

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7], [3, 4, 2], [9, 1, 2, 3, 4, 9, 1]]
NEW_TOKENS = 14
SMALL = 11  # vocabulary of the models whose distribution is enumerated


def left_padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    """Give transformers' inputs."""
    width = max(map(len, prompts))
    rows = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def plain(model: PreTrainedModel, prompt: list[int], **arguments: Any) -> list[int]:
    """Run one prompt, without padding, through transformers' own decoding; give the new tokens."""
    common = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(**left_padded([prompt]), **{**common, **arguments})
    return list(out[0].tolist()[len(prompt) :])


def hooked(model: PreTrainedModel, prompts: list[list[int]], **arguments: Any) -> Any:
    """Run prompts through the hook; give what ``generate`` returns."""
    common: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    common |= {"custom_generate": stree.custom_generate}
    return model.generate(**{**left_padded(prompts), **common, **arguments})


def new_tokens(prompts: list[list[int]], sequences: Tensor) -> list[list[int]]:
    """Cut the prompts' columns away, which must have come back unchanged."""
    width = max(map(len, prompts))
    assert torch.equal(sequences[:, :width], left_padded(prompts)["input_ids"])
    return [row[width:] for row in sequences.tolist()]


@cache
def target(family: str = "bamba") -> PreTrainedModel:
    return tiny_model(family)


@cache
def draft_model() -> PreTrainedModel:
    return tiny_model("mamba2", seed=3)


class Copying:
    """Continues the text after an earlier occurrence of its last token: on a repetitive prompt, it copies."""

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        logits = logits.clone()
        for row, text in enumerate(input_ids.tolist()):
            if text[-1] in text[:-1]:
                logits[row, text[text.index(text[-1]) + 1]] += 1e4
        return logits


def count_forwards(model: PreTrainedModel, call: Callable[[], Any]) -> tuple[Any, int]:
    """Count how often a model runs meanwhile."""
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        return call(), len(calls)
    finally:
        handle.remove()


@cache
def small(family: str) -> PreTrainedModel:
    return tiny_model(family, vocab_size=SMALL, initializer_range=0.05)
