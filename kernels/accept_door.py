"""The front door to random numbers, draws and the MATCH walk: what a step does between verify and commit.

Counter-based numbers (Philox 4x32-10, Salmon et al., SC 2011) depend on a key and a counter alone, so every backend
and device gives the same ones.  Logits and logits are the caller's: nothing here knows temperatures or processors.
Nothing waits for a device; shapes are fixed.  `backend` is that of `stree.kernels.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from stree.kernels.checks import Parents, check, check_nodes, check_rank, take_topology
from stree.kernels.dispatch import Backend, choose

__all__ = [
    "Backend",
    "MatchedPath",
    "choice",
    "draw_distinct",
    "match_accept",
    "philox_uniform",
]


@dataclass(frozen=True, slots=True, eq=False)
class MatchedPath:
    """The accepted path of each sequence and the token after it.

    Attributes:
        path: int32[b, m], nodes from the root down, padded by -1.
        path_lengths: int32[b], root included.
        next_token: int64[b], what was drawn at the last node of the path.
    """

    path: Tensor
    path_lengths: Tensor
    next_token: Tensor


def philox_uniform(
    position: Tensor,
    sequence: Tensor,
    node: Tensor,
    *,
    seed: int | Tensor,
    purpose: int = 0,
    backend: Backend = "auto",
) -> Tensor:
    """Give the uniform number of each counter (position, sequence, purpose, node) under the key `seed`.

    Equal bit for bit on every backend, and equal to `stree.sampling.Random.uniform`.  Words count modulo 2^32, the
    seed modulo 2^64.

    Args:
        position: int64[...].
        sequence: int64, shape of position.
        node: int64, shape of position.
        seed: any integer; or int64[], which a captured launch reads anew whenever it is replayed.
        purpose: what the numbers are for; 0 is the target's own tokens.
        backend: see `stree.kernels.ops`.

    Returns:
        float64, shape of position, 53 random bits, in [0, 1).
    """
    check("position", position, "int64", (*position.shape,), position)
    check("sequence", sequence, "int64", (*position.shape,), position)
    check("node", node, "int64", (*position.shape,), position)
    if isinstance(seed, Tensor):
        check("seed", seed, "int64", (), position)
    out: Tensor = choose("philox_uniform", backend, position)(position, sequence, node, seed=seed, purpose=purpose)
    return out


def choice(probs: Tensor, uniform: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Draw one index from each distribution by inversion of its cumulative sums.

    Weights are rounded to multiples of 2^-60 and summed as integers, which no order of summation changes: every
    backend and device gives the same index.  `stree.sampling.Random.choice` sums in float64 from left to right.  Where
    all weights are multiples of 2^-50, as float32 weights above 2^-27 are, its sums are exact too and the index is the
    same; else it is, unless the number falls within about vocab * 2^-53 of a boundary.

    Args:
        probs: float[..., vocab], not negative, summing to at most 4; it need not be one.  A distribution of zeros
        gives index 0.
        uniform: float64[...], in [0, 1).
        backend: see `stree.kernels.ops`.

    Returns:
        int64[...]; never an index whose weight is below 2^-61, unless all are.
    """
    if probs.ndim == 0 or probs.shape[-1] == 0:
        raise ValueError(f"probs must be float[..., vocab], got shape {[*probs.shape]}")
    check("probs", probs, "float", (*probs.shape,), probs)
    check("uniform", uniform, "float64", (*probs.shape[:-1],), probs)
    out: Tensor = choose("choice", backend, probs)(probs, uniform)
    return out


def draw_distinct(
    dist: Tensor, uniform: Tensor, *, least: float = 0.0, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Draw several indices from each distribution without replacement, one after the other.

    Args:
        dist: float[b, rows, vocab], not negative, summing to at most 4, need not be one; weights below 2^-61 are none.
        uniform: float64[b, rows, count], in [0, 1).
        least: nothing is drawn from less than this share of a distribution.
        backend: see `stree.kernels.ops`.

    Returns:
        int64[b, rows, count] indices in draw order, and their probabilities under ``dist``, of its dtype: 0 where
        nothing was left to be drawn from, and the index is then meaningless.
    """
    check_rank("dist", dist, "b rows vocab")
    check("dist", dist, "float", (*dist.shape[:2], max(dist.shape[2], 1)), dist)
    check_rank("uniform", uniform, "b rows count")
    check("uniform", uniform, "float64", (*dist.shape[:2], uniform.shape[2]), dist)
    drawn: tuple[Tensor, Tensor] = choose("draw_distinct", backend, dist)(dist, uniform, least=least)
    return drawn


def match_accept(
    tokens: Tensor,
    parents: Parents,
    scores: Tensor,
    *,
    max_depth: int | None = None,
    seed: int | Tensor | None = None,
    sequences: Tensor | None = None,
    positions: Tensor | None = None,
    backend: Backend = "auto",
) -> MatchedPath:
    """Let the target draw its token at every node and follow the children that carry what it drew (MATCH).

    Without a seed the draw is the argmax, the first of equals (greedy).  With one it is `choice` by the number of
    counter (positions + depth + 1, sequences, 0, 0): one number a position, whatever the tree, which is what plain
    sampling at that position draws by.  Of several paths that match (siblings of the same token), the deepest counts,
    the elder of equals.

    Args:
        tokens: int64[b, n], token of each node.
        parents: the trees.
        scores: float[b, n, vocab]: logits without a seed, distributions as `choice` takes them with one; not NaN.
        max_depth: bound of the depths; the returned paths have min(n, max_depth + 1) entries.  None: n - 1.
        seed: key of the numbers, an integer or int64[], or None for greedy.
        sequences: int64[b], with a seed.
        positions: int64[b], position of the root, with a seed.
        backend: see `stree.kernels.ops`.
    """
    check_rank("scores", scores, "b n vocab")
    batch, n, vocab = scores.shape
    topology = take_topology(parents, batch, 0, scores)
    check_nodes("scores", n, topology)
    check("scores", scores, "float", (batch, n, max(vocab, 1)), scores)
    check("tokens", tokens, "int64", (batch, n), scores)
    if max_depth is not None and max_depth < 0:
        raise ValueError(f"max_depth must not be negative, got {max_depth}")
    for name, words in (("sequences", sequences), ("positions", positions)):
        if (words is None) != (seed is None):
            raise ValueError(f"seed, sequences and positions go together, got seed {seed} and {name} {words}")
        if words is not None:
            check(name, words, "int64", (batch,), scores)
    if isinstance(seed, Tensor):
        check("seed", seed, "int64", (), scores)
    width = n if max_depth is None else min(n, max_depth + 1)
    walk = choose("match_accept", backend, scores)
    return MatchedPath(
        *walk(tokens, topology, scores, width=width, seed=seed, sequences=sequences, positions=positions)
    )
