"""Random numbers, draws and the MATCH walk in Triton: two launches, whatever the trees, and nothing read by the host.

A program of the first launch draws the token of one node from its logits or its distribution; a program of the second
walks one tree.  Sums of a distribution are sums of integers, so no order of summation shows.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stree.kernels.accept_kernels import distinct_kernel, draw_kernel, philox_kernel, walk_kernel
from stree.kernels.reference_accept import TARGET, UNITS
from stree.kernels.tiles import MAX_NODES, check_inner, check_kernel_dtypes, check_limit, padded
from stree.kernels.topology import Topology

__all__ = ["choice", "draw_distinct", "match_accept", "philox_uniform"]

MAX_VOCAB = 1 << 20
BLOCK = 4096  # of a vocabulary in one pass


def philox_uniform(position: Tensor, sequence: Tensor, node: Tensor, *, seed: int | Tensor, purpose: int) -> Tensor:
    """Give the uniform numbers of counters; see `stree.kernels.accept_door`."""
    out = torch.empty(position.shape, dtype=torch.float64, device=position.device)
    count = out.numel()
    philox_kernel[(-(-count // 128),)](
        position.contiguous(),
        sequence.contiguous(),
        node.contiguous(),
        key_of(seed, out),
        out,
        count,
        purpose,
        BLOCK=128,
    )
    return out


def choice(dist: Tensor, uniform: Tensor) -> Tensor:
    """Draw one index from each distribution; see `stree.kernels.accept_door`."""
    drawn = _draw("choice", dist.reshape(-1, 1, dist.shape[-1]), uniform=uniform.contiguous())
    return drawn.view(uniform.shape)


def draw_distinct(dist: Tensor, uniform: Tensor, *, least: float) -> tuple[Tensor, Tensor]:
    """Draw without replacement from each distribution; see `stree.kernels.accept_door`."""
    batch, rows, vocab = dist.shape
    count = uniform.shape[2]
    check_kernel_dtypes("draw_distinct", dist=dist)
    check_limit("draw_distinct", "a vocabulary", vocab, MAX_VOCAB)
    check_inner("dist", dist)
    tokens, probs = dist.new_empty(uniform.shape, dtype=torch.int64), dist.new_empty(uniform.shape)
    if count:
        numbers = uniform if uniform.stride(2) == 1 else uniform.contiguous()
        distinct_kernel[(rows, batch)](
            dist, numbers, tokens, probs, rows, count, vocab, least,
            *dist.stride()[:2], *numbers.stride()[:2],
            **distinct_constants(vocab, count, aligned=is_aligned(dist)), num_warps=8,
        )  # fmt: skip
    return tokens, probs


def distinct_constants(vocab: int, count: int, *, aligned: bool = True) -> dict[str, Any]:
    """List the compile-time constants of draws without replacement; ahead-of-time builds take theirs from here too."""
    known = draw_constants(vocab, greedy=False, aligned=aligned)
    return {name: known[name] for name in ("UNITS", "BLOCK", "BLOCKS", "ALIGNED")} | {"COUNT": padded(count, 1)}


def match_accept(
    tokens: Tensor,
    parents: Tensor | Topology,
    scores: Tensor,
    *,
    width: int,
    seed: int | Tensor | None,
    sequences: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw at every node and walk down; see `stree.kernels.accept_door`."""
    topology = Topology.cast(parents)
    batch, n = tokens.shape
    check_limit("match_accept", "trees of nodes", n, MAX_NODES)
    depths = topology.depths.contiguous()
    drawn = _draw("match_accept", scores, depths=depths, seed=seed, sequences=sequences, positions=positions)
    path = torch.empty(batch, width, dtype=torch.int32, device=tokens.device)
    lengths, next_token = path.new_empty(batch), drawn.new_empty(batch)
    walk_kernel[(batch,)](
        tokens.contiguous(), topology.parents.contiguous(), depths, topology.mask.contiguous(), drawn,
        path, lengths, next_token, n, width, NODES=padded(n), num_warps=4,
    )  # fmt: skip
    return path, lengths, next_token


def _draw(
    op: str,
    scores: Tensor,
    *,
    uniform: Tensor | None = None,
    depths: Tensor | None = None,
    seed: int | Tensor | None = None,
    sequences: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Launch the draw of one token from every row of [batch, n, vocab]; without numbers or a seed, the argmax."""
    batch, n, vocab = scores.shape
    check_kernel_dtypes(op, scores=scores)
    check_limit(op, "a vocabulary", vocab, MAX_VOCAB)
    check_inner("scores", scores)
    drawn = torch.empty(batch, n, dtype=torch.int64, device=scores.device)
    draw_kernel[(n, batch)](
        scores, uniform, depths,
        None if sequences is None else sequences.contiguous(), None if positions is None else positions.contiguous(),
        None if seed is None else key_of(seed, drawn), drawn, n, vocab, *scores.stride()[:2],
        **draw_constants(vocab, greedy=uniform is None and seed is None, aligned=is_aligned(scores)), num_warps=8,
    )  # fmt: skip
    return drawn


def draw_constants(vocab: int, *, greedy: bool, aligned: bool = True) -> dict[str, Any]:
    """List the compile-time constants of a draw; ahead-of-time builds take theirs from here too."""
    block = min(BLOCK, padded(vocab))
    return {
        "GREEDY": greedy, "PURPOSE": TARGET, "UNITS": UNITS, "BLOCK": block, "BLOCKS": padded(-(-vocab // block)),
        "ALIGNED": aligned,
    }  # fmt: skip


def is_aligned(scores: Tensor) -> bool:
    """Tell whether every row begins at a multiple of 16 bytes; a matter of the vocabulary, not of the tree."""
    places = (scores.data_ptr(), *(stride * scores.itemsize for stride in scores.stride()[:2]))
    return all(place % 16 == 0 for place in places)


def key_of(seed: int | Tensor, like: Tensor) -> Tensor:
    """Give a seed as int64[] on the device of a tensor, modulo 2^64."""
    if isinstance(seed, Tensor):
        return seed
    return torch.full((), (seed + (1 << 63)) % (1 << 64) - (1 << 63), dtype=torch.int64, device=like.device)
