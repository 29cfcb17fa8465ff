"""Probabilities of logits after temperature, top-k, top-p and min-p, of one sequence or of each row of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stree.kernels.sampling import softmax

__all__ = ["Distributions", "per_row"]

UNITS = 2.0**40  # of the most probable token's weight
LARGEST = 2**62  # above the sum of a vocabulary's weights


class Distributions:
    """What sampling parameters, of one sequence or of each row of a batch, make of logits."""

    __slots__ = ()
    is_greedy: bool
    truncates: bool
    greedy_rows: Tensor | None
    divisor: float | Tensor  # of logits: 1 in greedy rows of a batch

    def _limits(self, logits: Tensor) -> Sequence[Tensor]:
        """Return divisors, top-k, top-p and min-p, which broadcast with the logits."""
        raise NotImplementedError

    def probs(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """Turn float[..., vocab] logits into probabilities of the same shape, in float32 or wider.

        At temperature 0 the distribution is one-hot at the argmax.

        Args:
            logits: not normalised; [batch, ..., vocab] for a batch.
            out: tensor for the probabilities, or None for a new one.
        """
        if not (isinstance(logits, Tensor) and logits.dim() and logits.is_floating_point()):
            raise TypeError(f"logits must be a tensor float[..., vocab], got {logits!r:.80}")
        if self.is_greedy:
            return _one_hot(logits, out)
        if self.truncates:
            probs = _truncated_probs(logits, self._limits(logits), out)
        else:
            probs = softmax.probs(logits, self.divisor, out)
        if self.greedy_rows is None:
            return probs
        is_greedy, best = per_row(self.greedy_rows, probs), logits.argmax(-1, keepdim=True)
        at_best = torch.where(is_greedy, 1.0, probs.gather(-1, best))
        return probs.masked_fill_(is_greedy, 0.0).scatter_(-1, best, at_best)

    def draft_probs(self, logits: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the distribution that candidates are ranked or drawn by: at temperature 0 that of temperature 1.

        Returns:
            The probabilities, and their Euclidean norms float32[...] where they cost no pass of their own.
        """
        if self.truncates:
            return _truncated_probs(logits, self._limits(logits), out), None
        return softmax.probs_and_norms(logits, 1.0 if self.is_greedy else self.divisor, out)

    def has_distribution(self, logits: Tensor) -> Tensor:
        """Return where float[..., vocab] logits define a distribution, bool[...]: no NaN, and no +inf unless greedy."""
        largest = logits.amax(-1)  # NaN where any logit is NaN: one pass and no copy
        if self.is_greedy:
            return ~largest.isnan()
        is_finite = largest < torch.inf
        if self.greedy_rows is None:
            return is_finite
        return is_finite | (per_row(self.greedy_rows, largest) & ~largest.isnan())


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """View [batch] values as [batch, 1, ...], to be broadcast with a tensor."""
    return values.view(-1, *(1,) * (like.dim() - 1))


def _one_hot(logits: Tensor, out: Tensor | None) -> Tensor:
    """Return distributions that are one-hot at the argmax, in float32 or wider."""
    if out is None:
        out = torch.empty_like(logits, dtype=torch.promote_types(logits.dtype, torch.float32))
    return out.zero_().scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def _truncated_probs(logits: Tensor, limits: Sequence[Tensor], out: Tensor | None) -> Tensor:
    """Return probabilities after top-k, top-p and min-p; ``limits``: divisors and these three."""
    temperature, top_k, top_p, min_p = limits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits / temperature.to(logits.dtype)
    ordered, order = logits.sort(-1, descending=True)
    kth = (top_k - 1).clamp(max=logits.shape[-1] - 1).expand(*logits.shape[:-1], 1)
    is_excluded = ordered < ordered.gather(-1, kth)  # ties with the k-th are kept
    _exclude_below(ordered, is_excluded, top_p)
    is_excluded |= ordered < ordered[..., :1] + min_p.log().to(logits.dtype)
    is_excluded = is_excluded.scatter(-1, order, is_excluded)
    return torch.softmax(logits.masked_fill_(is_excluded, -torch.inf), -1, out=out)


def _exclude_below(ordered: Tensor, is_excluded: Tensor, top_p: Tensor) -> None:
    """Exclude what comes, in descending order of logits, behind the token that reaches top_p of what is not excluded.

    Weights are added as integers, whose sum does not depend on the order of additions: on a GPU that order differs
    with the number of rows and, for a single row, from run to run.
    """
    largest = ordered[..., :1]
    sums = (ordered - largest).exp_().mul_(UNITS).masked_fill_(is_excluded, 0.0).long().cumsum(-1)
    reached = (top_p * sums[..., -1:]).ceil().clamp_(max=LARGEST).long()
    reached.masked_fill_(~largest.isfinite(), LARGEST)  # NaN stays NaN
    is_excluded[..., 1:] |= sums[..., :-1] >= reached
