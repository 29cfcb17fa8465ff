"""How tokens are drawn: the distribution after temperature, top-k and top-p, and the counter-based random numbers.

A number is a pure function of (seed, sequence, position, purpose, node), so a draw depends neither on the batch around
it nor on the backend, and no number serves two draws (Philox 4x32-10: Salmon et al., SC 2011).
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
LEAST_MASS = (
    2.0**-20
)  # nothing is drawn from less of a distribution than this: float64 sums would no longer be exact enough
LEAST_TEMPERATURE = 1e-30  # logits divided by less could leave float32, and their distribution would be NaN
MAX_RANKS = 1 << 20  # draft draws are numbered parent * MAX_RANKS + rank


@dataclass(frozen=True, slots=True)
class Sampling:
    """Temperature, top-k and top-p, applied in this order as transformers does.

    Attributes:
        temperature: 0 for greedy decoding, else the divisor of the logits, at least 1e-30.
        top_k: keep the k most probable tokens (ties with the k-th kept), or None.
        top_p: keep the smallest set whose probability reaches top_p, in (0, 1], or None.

    Raises:
        TypeError: a value that is no number.
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
        """Tell where float[..., vocab] logits have a law: none is NaN, nor +inf where tokens are drawn; bool[...]."""
        largest = logits.amax(-1)  # NaN where any logit is: one pass and no copy
        return ~largest.isnan() if self.is_greedy else largest < torch.inf

    def probs(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """Turn float[..., vocab] logits into probabilities of the same shape, in float32 or wider.

        At temperature 0 the distribution is one-hot at the argmax.

        Args:
            logits: any scale.
            out: where the probabilities go, or None for a tensor of their own.
        """
        if not (self.is_greedy or self._cuts(logits.shape[-1])):
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
            beyond = probs.cumsum(-1) - probs >= self.top_p  # the token that reaches top_p stays
            logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
        own = logits if logits.device.type == "cpu" else None
        return torch.softmax(logits, -1, out=own if out is None else out)

    def probs_and_norms(self, logits: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Give distributions and their norms, where these cost no pass of their own; arguments as for ``dist``.

        Returns:
            The distributions, and float32[...], their Euclidean norms; None where whoever needs norms is to compute
            them.
        """
        if self.is_greedy or self._cuts(logits.shape[-1]):
            return self.probs(logits, out), None
        return softmax.probs_and_norms(logits, self.temperature, out)

    def _cuts(self, vocab: int) -> bool:
        """Tell whether top-k or top-p may leave tokens of a vocabulary out."""
        return (self.top_k is not None and self.top_k < vocab) or (self.top_p is not None and self.top_p < 1)


@dataclass(frozen=True, slots=True, eq=False)
class Random:
    """Random numbers of a batch, by counter; an object with the same three methods may stand in for it.

    Attributes:
        seed: the key, an integer, or int64[] that captured work reads anew whenever it is replayed.
        sequences: int64[batch], index of each row in the caller's input.
        positions: int[batch], position of the root (the pending token) in its text.
    """

    seed: int | Tensor
    sequences: Tensor
    positions: Tensor

    def at(self, positions: Tensor) -> Random:
        """Give the numbers of the step whose roots stand at ``positions``, int[batch]."""
        return replace(self, positions=positions)

    def select(self, rows: Tensor) -> Random:
        """Give the numbers of some rows, int64[batch']."""
        return replace(self, sequences=self.sequences[rows], positions=self.positions[rows])

    def uniform(self, purpose: str, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        """Draw uniform numbers in [0, 1).

        Args:
            purpose: "target" (the target's own token, one number a position), "accept" or "draft".
            offset: int[batch, ...], added to the root's position.
            node: int[batch, ...] broadcast with offset; tells apart draws of one position.

        Returns:
            float64, shape of offset broadcast with node, 53 random bits.
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
        """Draw one index from each distribution by inversion.

        Args:
            purpose: as for ``uniform``.
            probs: float[batch, ..., vocab], not negative; need not sum to one.  An all-zero distribution gives index 0.
            offset: int[batch, ...].
            node: int[batch, ...].

        Returns:
            int64[batch, ...]; never an index of probability zero, unless all are.
        """
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        total = cumulative[..., -1:]
        level = self.uniform(purpose, offset, node).unsqueeze(-1) * total
        level = torch.minimum(level, torch.nextafter(total, torch.zeros_like(total)))  # the product may round up
        index = torch.searchsorted(cumulative, level, right=True).squeeze(-1)
        return index.clamp_(max=probs.shape[-1] - 1) * (total.squeeze(-1) > 0)

    def bernoulli(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        """Toss coins that show True with probability probs, float[batch, ...]: bool[batch, ...]."""
        return self.uniform(purpose, offset, node) < probs


class Draws:
    """The draws of a growing tree, without replacement below each node, whose numbers are asked for at once.

    Args:
        rng: source of the numbers, purpose "draft".  A stand-in that chooses by itself is asked for every single draw.
        num_nodes: nodes that may get children; node i draws its children with the numbers i * MAX_RANKS + rank.
        num_ranks: most children of a node.
    """

    def __init__(self, rng: Random, num_nodes: int, num_ranks: int) -> None:
        self._rng = rng
        self._numbers: Tensor | None = None
        if type(rng).choice is Random.choice:
            offset, node = _draft_counters(num_nodes, num_ranks, rng.positions.device)
            rows = len(rng.positions)
            self._numbers = rng.uniform("draft", offset.expand(rows, -1, -1), node.expand(rows, -1, -1))

    def draw(self, dist: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Draw children one after the other, each from the distribution without the earlier ones, by inversion.

        Args:
            dist: float[batch, rows, vocab], distributions below the nodes first, first + 1, ...
            first: the first node.
            count: draws a row.

        Returns:
            int64[batch, rows, count] tokens in the order of drawing, and float[batch, rows, count] their probabilities
            under ``dist``: 0 for draws after it is used up, but for LEAST_MASS of it, whose tokens are meaningless.
        """
        rows = dist.shape[1]
        if self._numbers is not None:
            numbers = self._numbers[:, first : first + rows, :count]
            return (
                _draw_on_host(dist, numbers) if host_can_read(dist) else draw_distinct(dist, numbers, least=LEAST_MASS)
            )
        tokens, probs = [], []
        node = torch.arange(first, first + rows, device=dist.device).expand(dist.shape[:2]) * MAX_RANKS
        least = LEAST_MASS * dist.sum(-1, keepdim=True)
        for j in range(count):
            token = self._rng.choice("draft", dist, torch.zeros_like(node), node + j).unsqueeze(-1)
            tokens.append(token)
            probs.append(dist.gather(-1, token) * (dist.sum(-1, keepdim=True) > least))
            dist = dist.scatter(-1, token, 0.0)
        return torch.cat(tokens, -1), torch.cat(probs, -1)


@cache  # captured steps read them: none may be dropped
def _draft_counters(num_nodes: int, num_ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """List what tells the draws of a tree apart: int64[1, 1, 1] offset, 0, and int64[1, num_nodes, num_ranks] nodes."""
    node = torch.arange(num_nodes, device=device).unsqueeze(-1) * MAX_RANKS + torch.arange(num_ranks, device=device)
    return node.new_zeros(1, 1, 1), node.unsqueeze(0)


def _draw_on_host(dist: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from CPU distributions by float64[batch, rows, count] uniform numbers: tokens and their probabilities."""
    from stree.kernels.sampling.cpu import draw_rows  # imports numba

    tokens, probs = torch.empty(numbers.shape, dtype=torch.long), dist.new_empty(numbers.shape)
    flat = [tensor.reshape(-1, tensor.shape[-1]).numpy() for tensor in (dist, numbers, tokens, probs)]
    draw_rows(*flat, LEAST_MASS)
    return tokens, probs


def _number(high: Any, low: Any) -> Tensor:
    """Make 53 bits of two int64 words a float64 in [0, 1)."""
    bits = (high >> 5) * (1 << 26) + (low >> 6)
    return torch.from_numpy(np.ascontiguousarray(bits * 2.0**-53))


def _philox(c0: Any, c1: Any, c2: int, c3: Any, seed: int) -> tuple[Any, Any]:
    """Run ten rounds of Philox 4x32 on int64 NumPy words and return the first two words of the block."""
    mask = 0xFFFFFFFF
    c0, c1, c3 = c0 & mask, c1 & mask, c3 & mask
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps modulo 2^64, of which every bit is used
        c0, c1, c2, c3 = ((p1 >> 32) & mask) ^ c1 ^ k0, p1 & mask, ((p0 >> 32) & mask) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1
