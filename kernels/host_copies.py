"""Copies between the host and a device, which the host does not wait for, and streams for work beside a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stree.kernels.dispatch import host_can_read

__all__ = ["HostCopy", "arrival", "download", "side_stream", "to_host", "upload"]


class HostCopy:
    """A copy of a tensor in the host's memory, which is started at once and complete when it is read.

    On the CPU it is the tensor itself.

    Args:
        tensor: on any device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._copy = to_host(tensor) if tensor.is_cuda else tensor
        self._arrival = arrival(tensor.device)

    def read(self) -> Tensor:
        """Return the copy; wait until it has arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy


def to_host(tensor: Tensor) -> Tensor:
    """Start to copy a tensor to pinned memory of the host; complete once ``arrival`` has come."""
    if host_can_read(tensor):
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def arrival(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that comes when the copies that were started so far are complete; None where they are."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def side_stream(like: Tensor) -> torch.cuda.Stream | None:
    """Make a stream for work beside that of the current one, on the device of a tensor; None where there are none."""
    return torch.cuda.Stream(like.device) if like.is_cuda else None


def download(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of a device's tensors on the host, by one transfer; where the host can read them, these themselves.

    Integers are below 2^53.
    """
    if host_can_read(parts[0]):
        return [*parts]
    packed = HostCopy(torch.cat([part.flatten().double() for part in parts])).read()
    copies = packed.split([part.numel() for part in parts])
    return [copy.to(part.dtype).view(part.shape) for copy, part in zip(copies, parts, strict=True)]


def upload(parts: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Copy tensors of the host to the device of another tensor, all by one transfer.

    Args:
        parts: contiguous, of dtypes of 4 or 8 bytes; those of 8 first.
        like: on the device.

    Returns:
        The copies; where the host can read ``like``, the tensors themselves.
    """
    if host_can_read(like):
        return [*parts]
    words = [part.view(-1).view(torch.int32) for part in parts]
    packed = torch.empty(sum(map(len, words)), dtype=torch.int32, device="cpu", pin_memory=like.is_cuda)
    torch.cat(words, out=packed)
    copies = packed.to(like.device, non_blocking=True).split([*map(len, words)])
    return [copy.view(part.dtype).view(part.shape) for copy, part in zip(copies, parts, strict=True)]
