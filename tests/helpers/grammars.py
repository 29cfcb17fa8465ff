"""Texts under a grammar without its library: tokenizers of letters, and regular languages by trying every text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

END = 0


@cache
def letters_tokenizer(letters: str = "abc", ids: Sequence[int] = range(1, 1000), end: int = END) -> Any:
    """Make a tokenizer of letters, from token 1 on or with other ids, and of an end."""
    vocabulary = dict(zip(letters, ids, strict=False)) | {"<end>": end}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@cache
def regular(pattern: str, letters: str = "abc", most: int = 7) -> Callable[[Sequence[int]], list[int]]:
    """Return a function of new tokens: those that may follow, by all texts of up to ``most`` letters that match.

    None may follow a text that is over.  Longer texts must not be asked about.
    """
    texts = (text for size in range(most + 1) for text in itertools.product(range(1, len(letters) + 1), repeat=size))
    whole = {text for text in texts if re.fullmatch(pattern, "".join(letters[token - 1] for token in text))}
    begun = {text[:size] for text in whole for size in range(len(text) + 1)}

    def following(new: Sequence[int]) -> list[int]:
        text = tuple(new)
        longer = [token for token in range(1, len(letters) + 1) if (*text, token) in begun]
        return [END] * (text in whole and bool(longer)) + longer

    return following


def masked(logits: Tensor, allowed: Sequence[int]) -> Tensor:
    """Exclude from float[vocab] logits all tokens but some."""
    out = torch.full_like(logits, -torch.inf)
    out[[*allowed]] = logits[[*allowed]]
    return out
