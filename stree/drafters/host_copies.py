"""Copies between a device and drafters that run on the host: one read and one upload a step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from stree.kernels.dispatch import host_can_read
from stree.retrieval import Nodes
from stree.verify import Acceptance

__all__ = ["AcceptedTokens", "uploaded"]


class AcceptedTokens:
    """The accepted tokens of a step, which are copied to pinned memory and read later.

    Args:
        tokens: int64[batch, n], of the tree verified.
        acceptance: of the step.
    """

    def __init__(self, tokens: Tensor, acceptance: Acceptance) -> None:
        path, lengths = acceptance.path.clamp(min=0).long(), acceptance.path_lengths.long()
        packed = torch.cat([tokens.gather(1, path), acceptance.next_token[:, None], lengths[:, None]], 1)
        self._packed, self._arrival = packed, None
        if packed.is_cuda:
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, device="cpu", pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record(torch.cuda.current_stream(packed.device))

    def read(self) -> list[list[int]]:
        """Return each sequence's tokens below the root, the next pending one last; none where it was inactive."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return [[*row[1 : row[-1]], row[-2]] if row[-1] else [] for row in self._packed.tolist()]


def uploaded(nodes: Nodes, size: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, parents, float32 values, depths of each tree's first ``size`` nodes, on the device of ``like``."""
    arrays = [np.ascontiguousarray(array[:, :size]) for array in nodes]
    if host_can_read(like):
        tokens, parents, values, depths = map(torch.from_numpy, arrays)
        return tokens, parents, values.float(), depths
    count = arrays[0].size
    packed = torch.empty(5 * count, dtype=torch.int32, device="cpu", pin_memory=like.is_cuda)
    for part, array in zip(_parts(packed, count), arrays, strict=True):
        part.copy_(torch.from_numpy(array).flatten())
    packed = packed.to(like.device, non_blocking=True)
    tokens, parents, values, depths = (part.view(-1, size) for part in _parts(packed, count))
    return tokens, parents, values, depths


def _parts(packed: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """View int32[5 * count] as int64 tokens, int32 parents, float32 values and int32 depths."""
    tokens, parents, values, depths = packed.split([2 * count, count, count, count])
    return tokens.view(torch.int64), parents, values.view(torch.float32), depths
