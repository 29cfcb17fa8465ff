"""Copies between a device and drafters that run on the host: one read and one upload a step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stree.kernels.host_copies import HostCopy, upload
from stree.retrieval import Nodes
from stree.verify import Acceptance

__all__ = ["AcceptedTokens", "uploaded"]


class AcceptedTokens:
    """The accepted tokens of a step, which are copied to the host and read later.

    Args:
        tokens: int64[batch, n], of the tree verified.
        acceptance: of the step.
    """

    def __init__(self, tokens: Tensor, acceptance: Acceptance) -> None:
        path, lengths = acceptance.path.clamp(min=0).long(), acceptance.path_lengths.long()
        self._copy = HostCopy(torch.cat([tokens.gather(1, path), acceptance.next_token[:, None], lengths[:, None]], 1))

    def read(self) -> list[list[int]]:
        """Return each sequence's tokens below the root, the next pending one last; none where it was inactive."""
        return [[*row[1 : row[-1]], row[-2]] if row[-1] else [] for row in self._copy.read().tolist()]


def uploaded(nodes: Nodes, size: int, like: Tensor) -> list[Tensor]:
    """Return tokens, parents, float32 values, depths of each tree's first ``size`` nodes, on the device of ``like``."""
    tokens, parents, values, depths = (torch.from_numpy(np.ascontiguousarray(array[:, :size])) for array in nodes)
    return upload([tokens, parents, values.float(), depths], like)
