"""Prompts in the forms that tokenizers give: token lists, tensors padded on either side, encodings with a mask."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from stree.sampling import AnySampling, Random

__all__ = ["first_tokens", "token_ids", "token_lists"]


def token_lists(prompts: Any, attention_mask: Any = None) -> Sequence[Any] | Iterator[Any]:
    """List prompts without their padding; their tokens are not checked.

    Args:
        prompts: a list of token lists; int64[batch, length]; one token list or int64[length]; a mapping of "input_ids"
            and, where they are padded, "attention_mask", as tokenizers return; or an iterator of token lists.
        attention_mask: 0 or False where a token is padding, on the left or on the right; in the form of the prompts.

    Raises:
        TypeError: a mask that is none.
        ValueError: prompts of another kind, a mask of another shape, or one with a hole.
    """
    if isinstance(prompts, Mapping):
        if "input_ids" not in prompts:
            raise ValueError(f"prompts must hold input_ids, got {', '.join(map(str, prompts)) or 'an empty mapping'}")
        attention_mask = prompts.get("attention_mask") if attention_mask is None else attention_mask
        prompts = prompts["input_ids"]
    if isinstance(prompts, Iterator):
        if attention_mask is not None:
            raise ValueError("an iterator of prompts takes no attention_mask; give token lists without padding")
        return iter(prompts)
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(prompts, str):
        what = 'tokenise the text first: tokenizer(text)["input_ids"]'
        raise ValueError(f"generate needs at least one prompt, a list of token lists, got str; {what}")
    if isinstance(prompts, bytes) or not hasattr(prompts, "__iter__"):
        raise ValueError(f"generate needs at least one prompt, a list of token lists, got {type(prompts).__name__}")
    rows: list[Any] = [*prompts]
    mask = _rows_of_mask(attention_mask)
    if rows and all(isinstance(token, Integral) for token in rows):
        rows = [rows]
        mask = mask if mask is None or (len(mask) == 1 and isinstance(mask[0], Sequence)) else [mask]
    if mask is None:
        return rows
    if len(mask) != len(rows):
        raise ValueError(f"attention_mask must have a row for each of {len(rows)} prompts, got {len(mask)}")
    return [_without_padding(place, *pair) for place, pair in enumerate(zip(rows, mask, strict=True))]


def _rows_of_mask(mask: Any) -> list[Any] | None:
    """List the rows, or the numbers of one row, of a mask."""
    mask = mask.tolist() if hasattr(mask, "tolist") else mask
    if mask is not None and (isinstance(mask, str) or not isinstance(mask, Sequence)):
        raise TypeError(f"attention_mask must be in the form of the prompts, 0 or 1 for each token, got {mask!r:.80}")
    return None if mask is None else [*mask]


def _without_padding(place: int, prompt: Sequence[int], mask: Sequence[int]) -> Sequence[int]:
    """Take the tokens that a mask keeps, which must be next to each other."""
    if isinstance(mask, str) or not isinstance(mask, Sequence) or not all(isinstance(one, Integral) for one in mask):
        raise TypeError(f"attention_mask of prompt {place} must hold 0 or 1 for each token, got {mask!r:.80}")
    if len(mask) != len(prompt):
        raise ValueError(f"attention_mask of prompt {place} must have {len(prompt)} entries, got {len(mask)}")
    kept = [column for column, value in enumerate(mask) if value]
    if not kept:
        return []
    if kept[-1] - kept[0] >= len(kept):
        raise ValueError(f"attention_mask of prompt {place} has a hole; prompts are padded on the left or on the right")
    return prompt[kept[0] : kept[-1] + 1]


def token_ids(name: str, tokens: Iterable[int]) -> list[int]:
    """Make a list of integers of what may be a tensor, an array or numbers of numpy.

    Raises:
        TypeError: something else; the message begins with ``name``.
    """
    try:
        return list(map(operator.index, tokens))
    except TypeError:
        raise TypeError(f"{name} must be a list of token ids, integers, got {tokens!r:.80}") from None


def check_logits(logits: Tensor, sampling: AnySampling) -> None:
    """Refuse float[count, vocab] logits after prompts that have no distribution.

    Raises:
        ValueError: there are such.
    """
    if not bool(sampling.has_distribution(logits).all()):
        kind = "NaN" if bool(logits.isnan().any()) else "infinite"
        raise ValueError(f"the target's logits are {kind} after the prompt")


def first_tokens(logits: Tensor, sampling: AnySampling, rng: Random) -> Tensor:
    """Draw the tokens after prompts, int64[count], from float[count, vocab] logits.

    Raises:
        ValueError: logits that have no distribution.
    """
    check_logits(logits, sampling)
    if sampling.is_greedy:
        return logits.argmax(-1)
    offset = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return rng.choice("target", sampling.probs(logits), offset)
