"""A draft model whose head has another number of rows than its target's, as Qwen2.5's sizes have: the rest is padding.

Draft probabilities are over the target's vocabulary: the softmax over the rows that both have, zero elsewhere.  That is
the distribution from which children are drawn, as verification needs it.
"""

from __future__ import annotations

import copy
import logging
from functools import lru_cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from stree.models.tree_lm import TreeLM

__all__ = ["CommonVocabularyLM", "in_vocabulary_of"]

logger = logging.getLogger("stree")


class CommonVocabularyLM(TreeLM):
    """A ``TreeLM`` that shares the model of another, and has another number of logits.

    Rows beyond that number are cut off; missing ones are -inf, so that their tokens are never drafted.  Where a text
    has such a token, the model reads its own last one instead: what it predicts then is as good as any other draft.

    Args:
        lm: the draft model; it is not changed.
        vocab_size: number of logits.

    Attributes:
        own: the draft model with its own number of logits.
    """

    def __init__(self, lm: TreeLM, vocab_size: int) -> None:
        self._num_logits = vocab_size
        self.cache = {}  # captured and compiled steps of the model have its own number of logits
        self.follow(lm)

    def follow(self, lm: TreeLM) -> None:
        """Take over the settings that the model has now."""
        self.__dict__.update({**lm.__dict__, "cache": self.cache})
        self.own = copy.copy(lm)  # without the model's own cache, which may hold this object

    @property
    def vocab_size(self) -> int:
        """Number of logits, those of tokens that the model does not have included."""
        return self._num_logits

    def forward(self, input_ids: Tensor | None, cache: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return logits over the target's vocabulary."""
        missing = self._num_logits - self.own.vocab_size
        if missing > 0 and input_ids is not None:
            input_ids = input_ids.clamp(max=self.own.vocab_size - 1)
        return F.pad(self.own.forward(input_ids, cache, *args, **kwargs), (0, missing), value=-float("inf"))


def in_vocabulary_of(lm: TreeLM, target: TreeLM) -> TreeLM:
    """Return a draft model with as many logits as its target; the same object for the same two numbers.

    Raises:
        ValueError: the numbers differ, and the tokenizers beside the two models name a common token differently, or are
            not both known and one number is below half of the other.
    """
    sizes = lm.vocab_size, target.vocab_size
    if sizes[0] == sizes[1] or not isinstance(lm, TreeLM):
        return lm
    names = [str(getattr(getattr(one, "model", None), "name_or_path", "")) for one in (lm, target)]
    difference = _difference(*names, *sizes)
    if difference is not None:
        raise ValueError(
            f"drafter and target must share one vocabulary: the drafter has {sizes[0]} tokens, the target {sizes[1]}, "
            f"and {difference}"
        )
    found = lm.cache.setdefault(f"vocabulary of {sizes[1]}", None)
    if found is None:
        found = lm.cache[f"vocabulary of {sizes[1]}"] = CommonVocabularyLM(lm, sizes[1])
    found.follow(lm)
    return found


@lru_cache(maxsize=64)
def _difference(draft: str, target: str, draft_size: int, target_size: int) -> str | None:
    """Say how the tokenizers of two checkpoints differ within both sizes, or None; log where they are not known."""
    common = min(draft_size, target_size)
    theirs, ours = _tokens(draft, common), _tokens(target, common)
    if not theirs or not ours:
        unknown = target if theirs else draft
        if 2 * common < max(draft_size, target_size):  # more than padding
            return f"no tokenizer beside {unknown!r} can be read to tell whether they agree on the first {common}"
        logger.warning(
            "the drafter has %d tokens, the target %d; it drafts the first %d, without a check that tokenizers agree: "
            "none can be read beside %r", draft_size, target_size, common, unknown,
        )  # fmt: skip
        return None
    first = min((token for token in theirs.keys() & ours.keys() if theirs[token] != ours[token]), default=None)
    if first is None:
        return None
    return (
        f"their tokenizers differ: token {first} is {theirs[first]!r} to the drafter and {ours[first]!r} to the target"
    )


def _tokens(name: str, size: int) -> dict[int, str]:
    """Return the tokens below a size of the tokenizer beside a checkpoint on this machine; none where there is none."""
    if not name:
        return {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
        known = tokenizer.get_vocab()
    except Exception:  # missing, or of a kind that needs another package or code of its own
        return {}
    if known.keys() == tokenizer.get_added_vocab().keys():  # made by transformers for want of one
        return {}
    return {token: text for text, token in known.items() if token < size}
