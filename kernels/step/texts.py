"""The texts of a batch on the device: their tokens, where each ends, and what a step appends to them.

On a CPU this is numba's code, where Triton launches it is one launch, elsewhere torch's operators; the values are the
same.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from stree.kernels.dispatch import backend_of, host_can_read, module_of
from stree.kernels.tiles import padded

__all__ = ["Seen", "Texts", "emit", "unchecked_maxima"]


UNBOUNDED = 1 << 30  # nodes of a row whose trees may be as large as the step's


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """The texts of a batch; ``emit`` alone writes to them within a step, to all but ``limit``, ``stop`` and ``nodes``.

    Attributes:
        tokens: int64[batch, max_length], prompt and new tokens; the pending one, the last, is at the row's ``lengths``.
        lengths: int64[batch], tokens before the pending one.
        pending: int64[batch], the token that the next step begins with.
        limit: int64[batch], most tokens of a text.
        is_finished: bool[batch].
        stop: int64[batch, tokens], tokens that end each text, padded by -1.
        nodes: int64[batch], most nodes of each text's tree, root included; 0 or 1 drafts nothing.  None: no bound but a
            step's.
    """

    tokens: Tensor
    lengths: Tensor
    pending: Tensor
    limit: Tensor
    is_finished: Tensor
    stop: Tensor
    nodes: Tensor | None = None

    @classmethod
    def empty(
        cls, batch: int, max_length: int, most_stops: int, device: torch.device, *, limits_nodes: bool = False
    ) -> Texts:
        """Allocate texts that are finished, for at most ``max_length`` tokens and ``most_stops`` stop tokens."""
        lengths = torch.zeros(batch, dtype=torch.long, device=device)
        return cls(
            tokens=lengths.new_zeros(batch, max_length), lengths=lengths, pending=lengths.clone(),
            limit=lengths.clone(), is_finished=torch.ones_like(lengths, dtype=torch.bool),
            stop=lengths.new_full((batch, most_stops), -1),
            nodes=lengths.new_full((batch,), UNBOUNDED) if limits_nodes else None,
        )  # fmt: skip

    def begin(self, row: int, prompt: list[int], max_new_tokens: int, stops: list[int]) -> None:
        """Write a prompt, its limit and its stop tokens to a row, between steps and in place; it stays inactive."""
        self.tokens[row, : len(prompt)] = torch.tensor(prompt)
        self.lengths[row], self.limit[row] = len(prompt), len(prompt) + max_new_tokens
        self.stop[row] = torch.tensor(stops + [-1] * (self.stop.shape[1] - len(stops)))

    def limit_nodes(self, row: int, nodes: int | None) -> None:
        """Write the most nodes of a row's trees, root included; None for no bound but a step's."""
        if self.nodes is not None:
            self.nodes[row] = UNBOUNDED if nodes is None else nodes
        elif nodes is not None:
            raise ValueError(f"these texts hold no bounds of nodes, got {nodes}")

    def select(self, rows: Tensor) -> Texts:
        """Copy some texts, int64[batch']; rows may repeat."""
        parts: list[Any] = [getattr(self, part.name) for part in fields(self)]
        selected: list[Any] = [None if part is None else part[rows] for part in parts]
        return Texts(*selected)


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The texts as a step found them: what everything but ``emit`` reads, and nothing writes.

    Attributes:
        tokens: int64[batch, max_length], those of ``Texts``; up to the pending one a step changes nothing.
        lengths: int64[batch], tokens before the pending one; a copy.
        pending: int64[batch], a copy.
        nodes: that of ``Texts``, to which nothing writes within a step.
    """

    tokens: Tensor
    lengths: Tensor
    pending: Tensor
    nodes: Tensor | None = None

    @classmethod
    def of(cls, texts: Texts) -> Seen:
        """Copy the present lengths and pending tokens."""
        return cls(texts.tokens, texts.lengths.clone(), texts.pending.clone(), texts.nodes)

    def update(self, texts: Texts) -> None:
        """Copy the present lengths and pending tokens to the same memory, where captured work reads them."""
        torch._foreach_copy_([self.lengths, self.pending], [texts.lengths, texts.pending])  # one launch


def unchecked_maxima(logits: Tensor) -> Tensor | None:
    """Return the greatest of each row of float[..., vocab] logits; None where the host has checked them."""
    return None if host_can_read(logits) else logits.amax(-1)


def emit(
    tokens: Tensor, path: Tensor, path_lengths: Tensor, next_token: Tensor, texts: Texts,
    highest: Tensor | None = None, *, may_be_infinite: bool = False,
) -> Tensor:  # fmt: skip
    """Append the tokens after the path's nodes, up to a stop token or the limit, and make the last one pending.

    Args:
        tokens: int64[batch, n], of the tree.
        path: int32[batch, m], nodes from the root down; entries past the length may hold anything below n.
        path_lengths: int32[batch], 0 for a sequence that takes no part.
        next_token: int64[batch].
        texts: written to.
        highest: float[batch, n], greatest logit of each node: see ``unchecked_maxima``.
        may_be_infinite: whether it may be +inf.

    Returns:
        int64[batch, m + 3]: the tokens, how many of them count, the path's length, and 1 where the greatest logit of
        its last node is NaN, or +inf and may not be, else 0.
    """
    backend = backend_of(tokens)
    if backend != "reference":
        run = _emit_in_one if backend == "triton" else module_of("stree.kernels.step.cpu").emit
        report: Tensor = run(tokens, path, path_lengths, next_token, texts, highest, may_be_infinite=may_be_infinite)
        return report
    place = torch.arange(path.shape[1], device=path.device)
    length, before = path_lengths.long()[:, None], texts.lengths[:, None]
    following = next_token[:, None]
    emitted = tokens.gather(1, path.clamp(min=0).long())
    emitted = torch.where(place == length - 1, following, emitted.roll(-1, 1))
    count = torch.minimum(length, texts.limit[:, None] - before - 1)
    if texts.stop.shape[1]:
        ends = (emitted[..., None] == texts.stop[:, None]).any(-1) & (place < count)
        count = torch.minimum(count, torch.where(ends, place + 1, len(place)).amin(1, keepdim=True))
        texts.is_finished.logical_or_(ends.any(1))
    # What does not count writes the token before once more, in its own place.
    is_new = place < count
    last = texts.tokens.gather(1, before)
    texts.tokens.scatter_(1, torch.where(is_new, before + 1 + place, before), torch.where(is_new, emitted, last))
    texts.lengths.add_(count.squeeze(1))
    texts.is_finished.logical_or_(texts.lengths + 1 >= texts.limit)
    texts.pending.copy_(torch.where(length > 0, following, texts.pending[:, None]).squeeze(1))
    is_unusable = torch.zeros_like(length)
    if highest is not None:
        last_logit = highest.gather(1, path.clamp(min=0).long().gather(1, (length - 1).clamp(min=0)))
        is_unusable += (length > 0) & (last_logit.isnan() | (last_logit.isposinf() & (not may_be_infinite)))
    return torch.cat([emitted, count, length, is_unusable], 1)


def _emit_in_one(
    tokens: Tensor, path: Tensor, path_lengths: Tensor, next_token: Tensor, texts: Texts, highest: Tensor | None,
    *, may_be_infinite: bool,
) -> Tensor:  # fmt: skip
    """Do the same in one launch."""
    from stree.kernels.step.kernel import emit_kernel  # imports triton

    batch, m = path.shape
    tokens, path = (one if one.stride(1) == 1 else one.contiguous() for one in (tokens, path))
    report = tokens.new_empty(batch, m + 3)
    with torch.cuda.device_of(tokens):  # Triton launches on the current device, wherever the tensors are
        emit_kernel[(batch,)](
            tokens, path, path_lengths.contiguous(), next_token.contiguous(), texts.stop.contiguous(), texts.limit,
            texts.lengths, texts.is_finished.view(torch.int8), texts.pending, texts.tokens,
            None if highest is None else highest.contiguous(), report, m, tokens.shape[1], texts.stop.shape[1],
            tokens.stride(0), path.stride(0), texts.tokens.stride(0), PLACES=padded(m), INFINITE=may_be_infinite,
            num_warps=1,
        )  # fmt: skip
    return report
