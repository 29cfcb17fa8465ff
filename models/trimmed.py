"""A draft model whose head has the most used rows only (FR-Spec, arXiv 2502.14856; VocabTrim, arXiv 2506.22694).

Draft probabilities are over the whole vocabulary: the softmax over the remaining rows, zero elsewhere.  That is the
distribution from which children are drawn, as verification needs it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from stree.models.checks import is_integer
from stree.models.common_vocabulary import CommonVocabularyLM
from stree.models.tree_lm import TreeLM
from stree.models.tree_step import TreeStep

__all__ = ["TrimmedLM", "head_of_rows", "kept_tokens", "rows_of", "with_head"]


class TrimmedLM(TreeLM):
    """A ``TreeLM`` that shares the model and weights of another, but for a smaller head.

    The rows of that head are copied again with every prompt, because the whole head may have been trained meanwhile.

    Args:
        lm: the whole model; it is not changed.
        kept: tokens that can be predicted, in any order.

    Raises:
        ValueError: no tokens, a repeated one, one outside the vocabulary, or a stop token left out.
        NotImplementedError: the model's head is not a linear layer at its top.
    """

    @torch.inference_mode(False)  # the head is written to later
    def __init__(self, lm: TreeLM, kept: Sequence[int] | Tensor) -> None:
        lm = lm.own if isinstance(lm, CommonVocabularyLM) else lm
        self._rows, self._size = kept_tokens(kept, lm.vocab_size, lm.device), lm.vocab_size
        lost = _stop_tokens(lm.model) - set(self._rows.tolist())
        if lost:
            raise ValueError(f"a trimmed vocabulary must keep the model's stop tokens, got one without {sorted(lost)}")
        self.__dict__.update(lm.__dict__)
        self.cache = {}  # captured steps of the whole model use its head
        self._whole: PreTrainedModel
        self._whole, self.model = lm.model, with_head(lm.model, self._rows)

    @property
    def vocab_size(self) -> int:
        """Number of logits, those of tokens left out included."""
        return self._size

    def release(self) -> PreTrainedModel:
        """Take every patch off and give the whole transformers model back; see ``TreeLM``."""
        self.model = self._whole
        return super().release()

    def forward(self, input_ids: Tensor | None, cache: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return logits over the whole vocabulary; tokens without a row have -inf."""
        if not isinstance(cache, TreeStep):
            self._copy_rows()
        logits = super().forward(input_ids, cache, *args, **kwargs)
        whole = logits.new_full((*logits.shape[:-1], self._size), -torch.inf)
        return whole.index_copy_(-1, self._rows, logits)

    def _copy_rows(self) -> None:
        """Copy the rows of the whole head as they are now."""
        mine, whole = self.model.get_output_embeddings(), self._whole.get_output_embeddings()
        mine.weight.copy_(whole.weight[self._rows])
        if mine.bias is not None:
            mine.bias.copy_(whole.bias[self._rows])


def kept_tokens(kept: Sequence[int] | Tensor, size: int, device: torch.device) -> Tensor:
    """Check the tokens that are kept of a vocabulary of a size; return them sorted, on a device.

    Raises:
        TypeError: something else than integers.
        ValueError: no tokens, a repeated one, or one outside the vocabulary.
    """
    try:
        tokens = torch.as_tensor(kept)
    except (TypeError, ValueError, RuntimeError):
        tokens = torch.empty(1)  # floating, as other numbers that are no tokens
    if tokens.numel() and not is_integer(tokens):
        raise TypeError(f"a trimmed vocabulary must be a list of tokens, integers, got {kept!r:.80}")
    tokens = tokens.to(device, torch.long)
    if tokens.dim() != 1 or not tokens.numel():
        raise ValueError(f"a trimmed vocabulary must be a list of tokens, got shape {[*tokens.shape]}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= size:
        bad = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
        raise ValueError(f"a trimmed vocabulary must hold tokens below {size}, got {bad}")
    if tokens.unique().numel() != tokens.numel():
        raise ValueError(f"a trimmed vocabulary must not repeat tokens, got {tokens.numel() - tokens.unique().numel()}")
    return tokens.sort().values


def rows_of(tokens: Tensor, draft_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Find the rows of int64 tokens in a head that may predict ``draft_ids`` only; return rows and their tokens.

    Raises:
        ValueError: it predicts none of them.
    """
    if draft_ids is None:
        return tokens, tokens
    rows = torch.isin(draft_ids, tokens).nonzero()[:, 0]
    if not len(rows):
        raise ValueError(f"a trimmed vocabulary must hold some of the {len(draft_ids)} tokens that the head predicts")
    return rows, draft_ids[rows]


def head_of_rows(head: Any, rows: Tensor) -> nn.Linear:
    """Copy rows of a linear head."""
    small = nn.Linear(head.in_features, len(rows), bias=head.bias is not None, device="meta")
    small.weight = nn.Parameter(head.weight.detach()[rows], requires_grad=False)
    if head.bias is not None:
        small.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    return small


def _stop_tokens(model: Any) -> set[int]:
    """List the tokens that end a text for this model."""
    named = (getattr(config, "eos_token_id", None) for config in (model.config, model.generation_config))
    lists = (stop if isinstance(stop, (list, tuple)) else [stop] for stop in named)
    return {token for stop in lists for token in stop if token is not None}


def with_head(model: Any, kept: Tensor) -> Any:
    """Copy the outermost module only, with a head of some rows.

    Raises:
        NotImplementedError: the model's head is not a linear layer at its top.
    """
    head = model.get_output_embeddings()
    name = next((name for name, module in model.named_children() if module is head), None)
    if name is None or type(head) is not nn.Linear:
        raise NotImplementedError(
            f"only a linear head at the top of the model can be trimmed, got {type(head).__name__} in "
            f"{type(model).__name__}"
        )
    trimmed = copy.copy(model)
    trimmed.__dict__["_modules"] = {**model._modules, name: head_of_rows(head, kept)}
    return trimmed
