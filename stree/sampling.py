"""Sampling parameters of a sequence or a batch, and counter-based random numbers.

A random number is a pure function of (seed, sequence, position, purpose, node), so a draw depends neither on the batch
nor on the backend, and no number is used twice (Philox 4x32-10: Salmon et al., SC 2011).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from stree.checks import check_one_of
from stree.distributions import Distributions, per_row
from stree.kernels.ops import philox_uniform
from stree.kernels.sampling.inversion import invert

__all__ = ["MAX_RANKS", "AnySampling", "BatchSampling", "Random", "Sampling"]

PURPOSES = {"target": 0, "accept": 1, "draft": 2}
MAX_RANKS = 1 << 20  # draft draws are numbered parent * MAX_RANKS + rank
LEAST_TEMPERATURE = 1e-30  # logits divided by less could overflow float32, and the probabilities would be NaN
NO_TOP_K = 1 << 31  # of a sequence without that limit


@dataclass(frozen=True, slots=True)
class Sampling(Distributions):
    """Temperature, top-k, top-p and min-p, applied in this order as transformers does.

    Attributes:
        temperature: 0 for greedy decoding, else the divisor of the logits, at least 1e-30.
        top_k: keep the k most probable tokens (ties with the k-th kept), or None.
        top_p: keep the smallest set whose probability reaches top_p, in (0, 1], or None.
        min_p: keep the tokens of at least min_p times the largest probability, in [0, 1], or None.

    Raises:
        TypeError: a value that is not a number.
        ValueError: a value outside its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if value is not None or name == "temperature":
                object.__setattr__(self, name, _number(name, value))
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature must be 0 or at least {LEAST_TEMPERATURE}, got {self.temperature}")
        if self.top_k is not None:
            try:
                top_k = operator.index(self.top_k)
            except TypeError:
                top_k = 0
            if top_k < 1:
                raise ValueError(f"top_k must be an integer of at least 1, got {self.top_k}")
            object.__setattr__(self, "top_k", top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")

    @property
    def is_greedy(self) -> bool:  # type: ignore[override]
        """Whether every draw is an argmax."""
        return self.temperature == 0

    @property
    def greedy_rows(self) -> None:  # type: ignore[override]
        """No sequence is sampled otherwise than the others; see ``BatchSampling``."""
        return None

    @property
    def truncates(self) -> bool:  # type: ignore[override]
        """Whether top-k, top-p or min-p may exclude tokens."""
        return self.limits != (NO_TOP_K, math.inf, 0.0)

    @property
    def limits(self) -> tuple[int, float, float]:
        """Top-k, top-p and min-p as numbers, which exclude nothing where a limit is None or the sampling greedy."""
        top_k = NO_TOP_K if self.top_k is None or self.is_greedy else min(self.top_k, NO_TOP_K)
        top_p = math.inf if self.top_p in (None, 1) or self.is_greedy else float(self.top_p or 0)
        return top_k, top_p, 0.0 if self.is_greedy else float(self.min_p or 0)

    @property
    def divisor(self) -> float:  # type: ignore[override]
        """The temperature; see ``BatchSampling``."""
        return self.temperature

    def _limits(self, logits: Tensor) -> Sequence[Tensor]:
        top_k, *shares = self.limits
        top_p, min_p = torch.tensor(shares, dtype=torch.float64, device=logits.device)
        return (
            torch.tensor(self.temperature, dtype=torch.float64),
            torch.tensor(top_k, device=logits.device),
            top_p,
            min_p,
        )


def _check_tensor(name: str, value: Any, *, is_float: bool = False) -> None:
    if not (isinstance(value, Tensor) and value.dim() and value.is_floating_point() == is_float):
        kind = "float[batch, ..., vocab]" if is_float else "int[batch, ...]"
        raise TypeError(f"{name} must be a tensor {kind}, got {value!r:.80}")


def _number(name: str, value: Any) -> float:
    """Return Python's own number.

    Raises:
        TypeError: something else, such as a string or several numbers.
    """
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"{name} must be a number, got {value!r:.80}")


class BatchSampling(Distributions):
    """The sampling parameters of a batch, one row per sequence, as tensors that a captured step reads.

    Which operations run is decided once, for all sequences that the batch will hold: an argmax where all are greedy,
    no sort where none truncates.  A mixture of greedy and sampled sequences runs the operations of sampled ones, with
    one-hot distributions in the greedy rows.

    Args:
        kinds: the parameters of all sequences that the batch will hold.
        batch: rows.
        device: of the tensors.

    Attributes:
        is_greedy: whether all sequences are greedy.
        temperature: float64[batch], 0 in greedy rows.
        divisor: float64[batch], of the logits: 1 in greedy rows.
        truncates: whether top-k, top-p or min-p may exclude tokens in some sequence.
        greedy_rows: bool[batch], the rows of greedy sequences, or None where all sequences or none are greedy.
    """

    divisor: Tensor

    def __init__(self, kinds: Collection[Sampling], batch: int, device: torch.device) -> None:
        is_greedy = {kind.is_greedy for kind in kinds}
        self.is_greedy, self.truncates = is_greedy == {True}, any(kind.truncates for kind in kinds)
        self.temperature = torch.zeros(batch, dtype=torch.float64, device=device)
        self.divisor = torch.ones_like(self.temperature)
        self._top_k = torch.full((batch,), NO_TOP_K, device=device)
        self._top_p, self._min_p = torch.full_like(self.temperature, math.inf), torch.zeros_like(self.temperature)
        self.greedy_rows: Tensor | None = None
        if len(is_greedy) == 2:
            self.greedy_rows = torch.zeros(batch, dtype=torch.bool, device=device)

    def __repr__(self) -> str:
        """Name which operations run, not the values, so that captured steps are found by it."""
        mode = "greedy" if self.is_greedy else "sampled" if self.greedy_rows is None else "mixed"
        return f"BatchSampling({mode}{', truncated' * self.truncates})"

    def write(self, row: int, sampling: Sampling) -> None:
        """Set the parameters of a row.

        Raises:
            ValueError: operations of the batch do not serve these parameters.
        """
        serves_greedy = self.is_greedy or self.greedy_rows is not None
        serves = (
            serves_greedy if sampling.is_greedy else not self.is_greedy and (self.truncates or not sampling.truncates)
        )
        if not serves:
            raise ValueError(f"{self} does not serve {sampling}")
        if self.greedy_rows is not None:
            self.greedy_rows[row] = sampling.is_greedy
        self.temperature[row], self.divisor[row] = sampling.temperature, sampling.temperature or 1.0
        self._top_k[row], self._top_p[row], self._min_p[row] = sampling.limits

    def select(self, rows: Tensor) -> BatchSampling:
        """Copy the parameters of some rows, int64[batch']."""
        other = object.__new__(BatchSampling)
        other.__dict__.update(
            {name: value[rows] if isinstance(value, Tensor) else value for name, value in vars(self).items()}
        )
        return other

    def _limits(self, logits: Tensor) -> Sequence[Tensor]:
        return [per_row(part, logits) for part in (self.divisor, self._top_k, self._top_p, self._min_p)]


AnySampling = Sampling | BatchSampling


@dataclass(frozen=True, slots=True, eq=False)
class Random:
    """Counter-based random numbers of a batch; tests replace it by an object with the same three drawing methods.

    Attributes:
        seed: the key: an integer, or int64[batch], one for each row, which a CUDA graph reads at every replay.
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
        seed = self.seed[rows] if isinstance(self.seed, Tensor) else self.seed
        return replace(self, seed=seed, sequences=self.sequences[rows], positions=self.positions[rows])

    def uniform(self, purpose: str, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        """Draw uniform numbers in [0, 1).

        Args:
            purpose: "target" (the token of the target, one number per position), "accept" or "draft".
            offset: int[batch, ...], added to the root's position.
            node: int[batch, ...] broadcast with offset; distinguishes draws at one position.

        Returns:
            float64, the shape of offset broadcast with node; 53 random bits.
        """
        _check_tensor("offset", offset)
        check_one_of("purpose", purpose, tuple(PURPOSES))
        shape = (-1,) + (1,) * (offset.dim() - 1)
        position, sequence = self.positions.view(shape) + offset, self.sequences.view(shape)
        if not isinstance(node, Tensor):
            if not (isinstance(node, Integral) and 0 <= node < 1 << 63):
                raise TypeError(f"node must be an integer in [0, 2**63) or a tensor of them, got {node!r:.80}")
            node = torch.full((), int(node), device=offset.device)
        words = torch.broadcast_tensors(position.long(), sequence, node.long())
        return philox_uniform(*words, seed=self.seed, purpose=PURPOSES[purpose])

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
        _check_tensor("probs", probs, is_float=True)
        uniform = self.uniform(purpose, offset, node)
        if probs.dim() > 1 and uniform.shape != probs.shape[:-1]:
            raise ValueError(f"offset and node must be of shape {[*probs.shape[:-1]]} of probs, got {[*uniform.shape]}")
        return invert(probs, uniform)

    def bernoulli(self, purpose: str, probs: Tensor, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        """Draw bool[batch, ...], True with probability ``probs``, float[batch, ...]."""
        return self.uniform(purpose, offset, node) < probs
