"""Random numbers of the first sequences of a batch, and one number for every draw."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stree.sampling import Random

ALPHA = 1e-6  # false alarms of a statistical test; the seeds are fixed, so a test passes always or never


def random_rows(batch: int, seed: int = 0, position: int = 0) -> Random:
    """Random numbers of the first sequences, all at one position."""
    return Random(seed, torch.arange(batch), torch.full((batch,), position))


@dataclass(frozen=True, slots=True, eq=False)
class FixedRandom(Random):
    """One fixed number for every draw."""

    number: float = 0.0

    def uniform(self, purpose: str, offset: Tensor, node: Tensor | int = 0) -> Tensor:
        shape = torch.broadcast_shapes(offset.shape, torch.as_tensor(node).shape)
        return torch.full(shape, self.number, dtype=torch.float64)
