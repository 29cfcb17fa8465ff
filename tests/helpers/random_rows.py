"""Random numbers of the first sequences of a batch."""

from __future__ import annotations

import torch

from stree.sampling import Random


def random_rows(batch: int, seed: int = 0) -> Random:
    """Random numbers of the first sequences, at position 0."""
    return Random(seed, torch.arange(batch), torch.zeros(batch, dtype=torch.long))
