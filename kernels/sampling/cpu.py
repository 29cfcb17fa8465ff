"""Random numbers and draws without replacement, compiled for the CPU with numba.

This file is imported with the first draw.
"""

# mypy: disable-error-code="untyped-decorator, no-any-return"

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stree.kernels.cpu_jit import compiled, inner

__all__ = ["draw_distinct", "invert", "philox_uniform"]

BLOCK = 256  # tokens that are summed together

Array = np.ndarray[Any, Any]


def draw_distinct(dist: Tensor, uniform: Tensor, *, least: float) -> tuple[Tensor, Tensor]:
    """Draw without replacement, by sums in float64; see `stree.kernels.ops`."""
    tokens, probs = torch.empty(uniform.shape, dtype=torch.long), dist.new_empty(uniform.shape)
    _draw_rows(*_rows_of(dist, uniform.contiguous(), tokens, probs), least)
    return tokens, probs


def philox_uniform(position: Tensor, sequence: Tensor, node: Tensor, *, seed: int | Tensor, purpose: int) -> Tensor:
    """Compute the uniform number of each counter; see `stree.kernels.ops`."""
    numbers = torch.empty(position.shape, dtype=torch.float64)
    if isinstance(seed, Tensor):
        seeds = seed.reshape(-1).numpy().view(np.uint64)
    else:
        seeds = np.array([seed % (1 << 64)], np.uint64)
    counters = (word.reshape(-1).contiguous().numpy() for word in (position, sequence, node))
    _uniform(*counters, np.uint64(purpose), seeds, numbers.view(-1).numpy())
    return numbers


@compiled
def _uniform(position: Array, sequence: Array, node: Array, purpose: np.uint64, seeds: Array, numbers: Array) -> None:
    """Run ten rounds of Philox 4x32; the last argument is written.  A seed is of as many counters as every other."""
    word, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    each = max(len(numbers) // max(len(seeds), 1), 1)
    for at in range(len(numbers)):
        seed = seeds[at // each]
        c0, c1, c2, c3 = (
            np.uint64(position[at]) & word,
            np.uint64(sequence[at]) & word,
            purpose,
            np.uint64(node[at]) & word,
        )
        k0, k1 = seed & word, seed >> shift
        for _ in range(10):
            p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
            c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & word, (p0 >> shift) ^ c3 ^ k1, p0 & word
            k0, k1 = (k0 + np.uint64(0x9E3779B9)) & word, (k1 + np.uint64(0xBB67AE85)) & word
        bits = (c0 >> np.uint64(5)) * np.uint64(1 << 26) + (c1 >> np.uint64(6))
        numbers[at] = np.float64(bits) * 2.0**-53


def invert(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return tokens at shares of cumulative sums; see `stree.kernels.sampling.inversion`."""
    wide = probs.detach() if probs.itemsize > 2 else probs.detach().float()
    index = torch.empty(uniform.shape, dtype=torch.long)
    _invert(*_rows_of(wide.contiguous()), uniform.reshape(-1).numpy(), index.view(-1).numpy())
    return index


@compiled(nogil=True)
def _invert(probs: Array, uniform: Array, index: Array) -> None:
    """Write the first token whose cumulative sum exceeds the share of the total; 0 where that is 0."""
    for row in range(len(probs)):
        total = 0.0
        for token in range(probs.shape[1]):
            total += np.float64(probs[row, token])
        level, at, found = min(uniform[row] * total, np.nextafter(total, 0.0)), 0.0, 0
        while total > 0 and found < probs.shape[1] - 1:
            at += np.float64(probs[row, found])
            if at > level:
                break
            found += 1
        index[row] = found


def _rows_of(*tensors: Tensor) -> list[Array]:
    """View each [..., n] as a NumPy matrix of rows."""
    return [tensor.reshape(-1, tensor.shape[-1]).numpy() for tensor in tensors]


@inner()
def _sum(dist: Array, row: int, begin: int, end: int) -> float:
    """Sum a part of a distribution in float64, along eight independent lines."""
    a = b = c = d = e = f = g = h = 0.0
    whole = begin + (end - begin) // 8 * 8
    for at in range(begin, whole, 8):
        a += np.float64(dist[row, at])
        b += np.float64(dist[row, at + 1])
        c += np.float64(dist[row, at + 2])
        d += np.float64(dist[row, at + 3])
        e += np.float64(dist[row, at + 4])
        f += np.float64(dist[row, at + 5])
        g += np.float64(dist[row, at + 6])
        h += np.float64(dist[row, at + 7])
    for at in range(whole, end):
        a += np.float64(dist[row, at])
    return ((a + b) + (c + d)) + ((e + f) + (g + h))


@inner()
def _is_drawn(tokens: Array, row: int, count: int, token: int) -> bool:
    """Whether a token is among the first ``count`` of a row."""
    for place in range(count):  # noqa: SIM110 compiled: no generators
        if tokens[row, place] == token:
            return True
    return False


@inner()
def _find(dist: Array, row: int, blocks: Array, tokens: Array, drawn: int, level: float) -> int:
    """Find the token at a level of the line of all tokens but those drawn; -1 where there is none."""
    begin = 0.0  # of the block on the line
    for block in range(len(blocks)):
        end = begin + blocks[block]
        if end > level:
            at = begin
            for token in range(block * BLOCK, min(block * BLOCK + BLOCK, dist.shape[1])):
                if dist[row, token] > 0 and not _is_drawn(tokens, row, drawn, token):
                    at += np.float64(dist[row, token])
                    if at > level:
                        return token
        begin = end
    token = dist.shape[1] - 1  # past the end by rounding: the last one
    while token >= 0 and (dist[row, token] == 0 or _is_drawn(tokens, row, drawn, token)):
        token -= 1
    return token


@compiled
def _draw_rows(dist: Array, numbers: Array, tokens: Array, probs: Array, least: float) -> None:
    """Draw tokens without replacement from every row by inversion.

    Args:
        dist: float[rows, vocab], not negative.
        numbers: float64[rows, count], uniform in [0, 1).
        tokens: int64[rows, count], written.
        probs: float[rows, count], written: the tokens' probabilities under ``dist``, 0 once less than ``least`` of it
            is left.
        least: see ``probs``.
    """
    vocab = dist.shape[1]
    blocks = np.empty((vocab + BLOCK - 1) // BLOCK, np.float64)
    for row in range(dist.shape[0]):
        rest = 0.0
        for block in range(len(blocks)):
            blocks[block] = _sum(dist, row, block * BLOCK, min(block * BLOCK + BLOCK, vocab))
            rest += blocks[block]
        rest *= 1 - 2.0**-52  # products that round up stay below it
        crumbs = rest * least
        for place in range(numbers.shape[1]):
            tokens[row, place], probs[row, place] = 0, 0
            if rest > crumbs:
                token = _find(dist, row, blocks, tokens, place, numbers[row, place] * rest)
                if token >= 0:
                    tokens[row, place], probs[row, place] = token, dist[row, token]
                    rest -= np.float64(dist[row, token])
                    blocks[token // BLOCK] -= np.float64(dist[row, token])
