"""A tiny target and drafter, small tokenizers, a model that writes chosen tokens, and settings of short training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers.tiny_models import VOCAB, patched, tiny_model
from stree import TreeLM
from stree.bench.pair import Pair
from stree.distill import Settings
from stree.distill.text import Batches

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


@contextmanager
def interrupted_after(steps: int) -> Iterator[None]:
    """Interrupt a distillation when it has taken so many batches."""
    real, left = Batches.next, iter(range(steps))

    def following(batches: Batches, count: int) -> torch.Tensor:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real(batches, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "next", following)
        yield


SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def _finished(tokenizer: Tokenizer, eos_token: str) -> Any:
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos_token)


@cache
def byte_fallback(eos_token: str = "</s>") -> Any:
    """Make a tokenizer as SentencePiece's: words with their spaces, and bytes for characters that have no token."""
    letters = ["▁", *"abcdefinorstux", "é", "語", "▁a", "▁ab", "cd", "▁user"]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("▁", "a"), ("▁a", "b"), ("c", "d")]
    vocabulary = {name: place for place, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _finished(tokenizer, eos_token)


@cache
def byte_level(eos_token: str = "</s>") -> Any:
    """Make a tokenizer as GPT-2's: every token is a run of bytes, of which some cut characters."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("a", "b"), ("Ġ", "a"), ("æ", "Ĺ"), ("¥", "æ"), ("ð", "Ł")]  # e6 97 is part of 日, a5 e6 of 日月
    vocabulary = {name: place for place, name in enumerate([*names, *map("".join, pairs)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer, eos_token)


def writing_model(tokenizer: Any, *chains: Sequence[int], eos_token_id: int | None = None) -> TreeLM:
    """Make a model that continues the first token of each chain by its others; no token may have two successors."""
    size = len(tokenizer)
    model: Any = tiny_model("mamba2", vocab_size=size, tie_word_embeddings=False, eos_token_id=eos_token_id)
    torch.manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(size, model.config.hidden_size), dim=1)
    with torch.no_grad():
        model.backbone.embeddings.weight.copy_(directions)
        model.backbone.norm_f.weight.fill_(1)
        for layer in model.backbone.layers:
            layer.mixer.out_proj.weight.zero_()
        model.lm_head.weight.zero_()
        successors = dict[int, int]()
        for chain in chains:
            for token, after in zip(chain, chain[1:], strict=False):
                assert successors.setdefault(token, after) == after, f"token {token} has two successors"
        for token, after in successors.items():
            model.lm_head.weight[after] += 3 * directions[token]
    return TreeLM(model)


END = 0
SETTINGS = Settings(
    hidden=16, layers=1, steps=6, batch_size=2, length=16, generated=0.25, adam_lr=2e-2, save_every=0.0
)  # fmt: skip
