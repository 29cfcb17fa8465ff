"""Sampling: probabilities after temperature, top-k and top-p, and counter-based random numbers.

A random number is a pure function of (seed, sequence, position, purpose, node), so a draw depends neither on the batch
nor on the backend, and no number is used twice (Philox 4x32-10: Salmon et al., SC 2011).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stree.kernels.dispatch import host_can_read
from stree.kernels.ops import draw_distinct, philox_uniform
from stree.kernels.sampling import softmax

__all__ = ["MAX_RANKS", "Draws", "Random", "Sampling"]

PURPOSES = {"target": 0, "accept": 1, "draft": 2}
# Draws without replacement stop when this share of a distribution is left: float64 sums would not be exact enough.
LEAST_MASS = 2.0**-20
LEAST_TEMPERATURE = 1e-30  # logits divided by less could overflow float32, and the probabilities would be NaN
MAX_RANKS = 1 << 20  # draft draws are numbered parent * MAX_RANKS + rank


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature, top-k and top-p, applied in this order as transformers does.

    Attributes:
        temperature: 0 for greedy decoding, else the divisor of the logits, at least 1e-30.
        top_k: keep the k most probable tokens (ties with the k-th kept), or None.
        top_p: keep the smallest set whose probability reaches top_p, in (0, 1], or None.

    Raises:
        TypeError: a value that is not a number.
        ValueError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("temperature", self.temperature), ("top_p", 1.0 if self.top_p is None else self.top_p)):
            if not hasattr(value, "__float__"):
                raise TypeError(f"{name} must be a number, got {value!r:.80}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature must be 0 or at least {LEAST_TEMPERATURE}, got {self.temperature}")
        if self.top_k is not None and (not hasattr(self.top_k, "__index__") or self.top_k < 1):
            raise ValueError(f"top_k must be an integer of at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    @property
    def is_greedy(self) -> bool:
        """Whether every draw is an argmax."""
        return self.temperature == 0

    def has_distribution(self, logits: Tensor) -> Tensor:
        """Return where float[..., vocab] logits define a distribution, bool[...]: no NaN, and no +inf unless greedy."""
        largest = logits.amax(-1)  # NaN where any logit is NaN: one pass and no copy
        return ~largest.isnan() if self.is_greedy else largest < torch.inf

    def probs(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """Turn float[..., vocab] logits into probabilities of the same shape, in float32 or wider.

        At temperature 0 the distribution is one-hot at the argmax.

        Args:
            logits: not normalised.
            out: tensor for the probabilities, or None for a new one.
        """
        if not (self.is_greedy or self._truncates(logits.shape[-1])):
            return softmax.probs(logits, self.temperature, out)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        if self.is_greedy:
            out = torch.empty_like(logits) if out is None else out
            return out.zero_().scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        logits = torch.div(logits, self.temperature, out=out)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = logits.sort(-1, descending=True)
            probs = ordered.softmax(-1)
            is_excluded = probs.cumsum(-1) - probs >= self.top_p  # the token that reaches top_p is kept
            logits = logits.masked_fill(is_excluded.scatter(-1, order, is_excluded), -torch.inf)
        if out is None and logits.device.type == "cpu":
            out = logits  # a tensor of this function: saves an allocation
        return torch.softmax(logits, -1, out=out)

    def probs_and_norms(self, logits: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute ``probs`` and their Euclidean norms, if the norms cost no extra pass.

        Returns:
            The probabilities, and float32[...] norms, or None with top-k, top-p or greedy decoding.
        """
        if self.is_greedy or self._truncates(logits.shape[-1]):
            return self.probs(logits, out), None
        return softmax.probs_and_norms(logits, self.temperature, out)

    def _truncates(self, vocab: int) -> bool:
        """Whether top-k or top-p may exclude tokens of a vocabulary of this size."""
        return (self.top_k is not None and self.top_k < vocab) or (self.top_p is not None and self.top_p < 1)


@dataclass(frozen=True, slots=True, eq=False)
class Random:
    """Counter-based random numbers of a batch; tests replace it by an object with the same three drawing methods.

    Attributes:
        seed: the key, an integer, or an int64[] tensor, which a CUDA graph reads at every replay.
        sequences: int64[batch], index of each row in the caller's input.
        positions: int[batch], position of the root (the pending token) in its text.
    """

    seed: int | Tensor
    sequences: Tensor
    positions: Tensor

    def at(self, positions: Tensor) -> Random:
        """Return the random numbers of the step whose roots are at ``positions``, int[batch]."""
        return replace(self, positions=positions)

    def select(self, rows: Tensor) -> Random:
        """Return the random numbers of some rows, int64[batch']."""
        return replace(self, sequences=self.sequences[rows], positions=self.positions[rows])

    def uniform(self, purpose: str, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        """Draw uniform numbers in [0, 1).

        Args:
            purpose: "target" (the token of the target, one number per position), "accept" or "draft".
            offset: int[batch, ...], added to the root's position.
            node: int[batch, ...] broadcast with offset; distinguishes draws at one position.

        Returns:
            float64, the shape of offset broadcast with node; 53 random bits.
        """
        shape = (-1,) + (1,) * (offset.dim() - 1)
        position, sequence = self.positions.view(shape) + offset, self.sequences.view(shape)
        if not isinstance(node, Tensor):
            node = torch.full((), node, device=offset.device)
        words = torch.broadcast_tensors(position.long(), sequence, node.long())
        if not host_can_read(offset):
            return philox_uniform(*words, seed=self.seed, purpose=PURPOSES[purpose])
        # NumPy runs the same integer arithmetic about five times faster than torch on small CPU tensors.
        position, sequence, node = (word.numpy() for word in words)
        return _number(*_philox(position, sequence, PURPOSES[purpose], node, int(self.seed)))

    def choice(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        """Draw one index from each distribution by inverting its cumulative sum.

        Args:
            purpose: as for ``uniform``.
            probs: float[batch, ..., vocab], not negative, not necessarily normalised; all zero gives index 0.
            offset: int[batch, ...].
            node: int[batch, ...].

        Returns:
            int64[batch, ...]; an index of probability zero only if all are zero.
        """
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        total = cumulative[..., -1:]
        level = self.uniform(purpose, offset, node).unsqueeze(-1) * total
        level = torch.minimum(level, torch.nextafter(total, torch.zeros_like(total)))  # the product may round up
        index = torch.searchsorted(cumulative, level, right=True).squeeze(-1)
        return index.clamp_(max=probs.shape[-1] - 1) * (total.squeeze(-1) > 0)

    def bernoulli(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        """Draw bool[batch, ...], True with probability ``probs``, float[batch, ...]."""
        return self.uniform(purpose, offset, node) < probs


class Draws:
    """Draws of child tokens for a whole tree, without replacement below each node.

    All random numbers are generated at once, unless ``rng`` overrides ``choice``: then each draw is one call of it.

    Args:
        rng: random numbers, purpose "draft".
        num_nodes: nodes that may get children; node i draws its children with the counters i * MAX_RANKS + rank.
        num_ranks: largest number of children of a node.
    """

    def __init__(self, rng: Random, num_nodes: int, num_ranks: int) -> None:
        self._rng = rng
        self._numbers: Tensor | None = None
        if type(rng).choice is Random.choice:
            offset, node = _draft_counters(num_nodes, num_ranks, rng.positions.device)
            rows = len(rng.positions)
            self._numbers = rng.uniform("draft", offset.expand(rows, -1, -1), node.expand(rows, -1, -1))

    def draw(self, probs: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Draw children one after the other, each from the distribution without the earlier ones.

        Args:
            probs: float[batch, rows, vocab], distributions below the nodes first, first + 1, ...
            first: the first node.
            count: draws per row.

        Returns:
            int64[batch, rows, count] tokens in draw order, and float[batch, rows, count] their probabilities under
            ``probs``; 0, with a meaningless token, once LEAST_MASS or less of the distribution is left.
        """
        rows = probs.shape[1]
        if self._numbers is not None:
            numbers = self._numbers[:, first : first + rows, :count]
            if host_can_read(probs):
                return _draw_on_host(probs, numbers)
            return draw_distinct(probs, numbers, least=LEAST_MASS)
        tokens, drawn = [], []
        node = torch.arange(first, first + rows, device=probs.device).expand(probs.shape[:2]) * MAX_RANKS
        least = LEAST_MASS * probs.sum(-1, keepdim=True)
        for rank in range(count):
            token = self._rng.choice("draft", probs, torch.zeros_like(node), node + rank).unsqueeze(-1)
            tokens.append(token)
            drawn.append(probs.gather(-1, token) * (probs.sum(-1, keepdim=True) > least))
            probs = probs.scatter(-1, token, 0.0)
        return torch.cat(tokens, -1), torch.cat(drawn, -1)


@cache  # CUDA graphs read these tensors: they must stay alive
def _draft_counters(num_nodes: int, num_ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Counters of the draws of a tree: int64[1, 1, 1] offset, 0, and int64[1, num_nodes, num_ranks] nodes."""
    node = torch.arange(num_nodes, device=device).unsqueeze(-1) * MAX_RANKS + torch.arange(num_ranks, device=device)
    return node.new_zeros(1, 1, 1), node.unsqueeze(0)


def _draw_on_host(probs: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Draw with float64[batch, rows, count] uniform numbers in numba: tokens and their probabilities."""
    from stree.kernels.sampling.cpu import draw_rows  # imports numba

    tokens, drawn = torch.empty(numbers.shape, dtype=torch.long), probs.new_empty(numbers.shape)
    flat = [tensor.reshape(-1, tensor.shape[-1]).numpy() for tensor in (probs, numbers, tokens, drawn)]
    draw_rows(*flat, LEAST_MASS)
    return tokens, drawn


def _number(high: Any, low: Any) -> Tensor:
    """Turn 53 bits of two int64 words into a float64 in [0, 1)."""
    bits = (high >> 5) * (1 << 26) + (low >> 6)
    return torch.from_numpy(np.ascontiguousarray(bits * 2.0**-53))


def _philox(c0: Any, c1: Any, c2: int, c3: Any, seed: int) -> tuple[Any, Any]:
    """Run ten rounds of Philox 4x32 on int64 NumPy words and return the first two words of the block."""
    mask = 0xFFFFFFFF
    c0, c1, c3 = c0 & mask, c1 & mask, c3 & mask
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps modulo 2^64; all bits are used
        c0, c1, c2, c3 = ((p1 >> 32) & mask) ^ c1 ^ k0, p1 & mask, ((p0 >> 32) & mask) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1
