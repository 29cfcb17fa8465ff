"""Log probabilities of emitted tokens under the model's own distribution."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["PromptLogprob", "TokenLogprob", "prompt_logprobs", "read_logprobs", "token_logprobs"]


class TokenLogprob(NamedTuple):
    """A token's log probability, and the most probable tokens in its place.

    Attributes:
        token: that was emitted.
        logprob: natural logarithm of its probability.
        top: (token, log probability) of the most probable tokens, best first, as many as were asked for.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


def token_logprobs(logits: Tensor, tokens: Tensor, top: int) -> Tensor:
    """Pack log probabilities into one tensor, without synchronising.

    Args:
        logits: float[batch, m, vocab].
        tokens: int64[batch, m].
        top: alternatives.

    Returns:
        float64[batch, m, 2 + 2 top]: token, its log probability, alternatives, their log probabilities.
    """
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    best = logprobs.topk(top, -1)
    parts = tokens[..., None], logprobs.gather(-1, tokens[..., None]), best.indices, best.values
    return torch.cat([part.double() for part in parts], -1)


class PromptLogprob(NamedTuple):
    """A token of a prompt.

    Attributes:
        found: its log probability, and the most probable tokens in its place.
        rank: 1 where none is more probable.
    """

    found: TokenLogprob
    rank: int


def prompt_logprobs(logits: Tensor, tokens: Tensor, top: int) -> list[PromptLogprob]:
    """Read the log probabilities of int64[1, m] tokens of a prompt from float[1, m, vocab] logits."""
    ranks = 1 + (logits > logits.gather(-1, tokens[..., None])).sum(-1)
    found = read_logprobs(token_logprobs(logits, tokens, top)[0].tolist(), top)
    return [PromptLogprob(*pair) for pair in zip(found, ranks[0].tolist(), strict=True)]


def read_logprobs(packed: list[list[float]], top: int) -> list[TokenLogprob]:
    """Read rows of what ``token_logprobs`` has packed, with ``top`` alternatives of those that are there."""
    read = []
    for token, logprob, *others in packed:
        half = len(others) // 2
        best = zip(map(int, others[:top]), others[half : half + top], strict=True)
        read.append(TokenLogprob(int(token), logprob, [*best]))
    return read
