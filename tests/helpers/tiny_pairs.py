"""A tiny target and drafter for the benchmark's tests, and a tokenizer of letters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.tiny_models import VOCAB, patched, tiny_model
from stree.bench.pair import Pair

WORDS = [f"w{number}" for number in range(1, VOCAB)]


class Letters:
    """Every character is a token."""

    chat_template: str | None = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1 + ord(letter) % (VOCAB - 1) for letter in text]}

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token) for token in tokens)


def tiny_pair(
    family: str = "mamba2", dtype: torch.dtype = torch.float64, drafter: bool = True, tokenizer: Any = None
) -> Pair:
    """Make a pair whose drafter is near the target: the same weights, perturbed."""
    model = tiny_model(family, dtype)
    draft = tiny_model(family, dtype)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, dtype=dtype))
    pair = Pair(patched(model), patched(draft) if drafter else None, tokenizer or Letters(), "tiny", "tiny-drafter")
    model.generation_config.eos_token_id = None
    pair.plain = model
    return pair


def save_tiny(folder: Path, seed: int = 0, words: Sequence[str] = WORDS) -> str:
    """Save a model and a tokenizer of words, w1, w2, ... after the end, as a user has them on disk."""
    numbers = {word: number for number, word in enumerate(["<|end|>", *words])}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<|end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    tiny_model("mamba2", seed=seed, eos_token_id=0).save_pretrained(folder)
    return str(folder)
