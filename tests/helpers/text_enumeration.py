"""Exact distributions of texts of several steps.

``joint_of_steps`` joins steps that were enumerated alone by their distributions, which is cheap.  ``joint_of_loop``
runs one drafter for several steps, so it also shows random numbers that are used again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stree.drafters import Drafter
from stree.growth import Growth
from stree.sampling import Random, Sampling
from stree.testing.enumeration import emitted_by
from stree.testing.outcomes import all_outcomes
from stree.testing.tables import TableModel
from stree.verify import Verifier, accept

__all__ = ["joint_of_loop", "joint_of_steps"]


def joint_of_steps(steps: Sequence[Sequence[Tensor]], length: int) -> Tensor:
    """Distribution of texts made of several steps, each enumerated alone, which is cheap.

    Args:
        steps: for each root, the result of ``strings_of``; the first step's root is token 0.
        length: length of the texts.

    Returns:
        float64[vocab ** length].
    """
    vocab = len(steps)
    reached = [torch.zeros(vocab**size, dtype=torch.float64) for size in range(length + 1)]
    reached[0][0] = 1.0
    for begin in range(length):
        roots = torch.arange(vocab**begin) % vocab
        for size in range(1, max(map(len, steps))):
            none = torch.zeros(vocab**size, dtype=torch.float64)
            strings = torch.stack([step[size] if size < len(step) else none for step in steps])
            texts = reached[begin][:, None] * strings[roots]
            end = min(begin + size, length)  # later tokens are cut off
            reached[end] += texts.view(vocab**end, -1).sum(1)
    return reached[length]


def joint_of_loop(
    target: TableModel,
    drafter: Drafter,
    growth: Growth | None,
    budget: int,
    sampling: Sampling,
    verifier: str | Verifier,
    length: int,
) -> Tensor:
    """Distribution of the ``length`` tokens after token 0 that one run emits: float64[vocab ** length].

    Random numbers that serve in two steps show here, and not in ``joint_of_steps``.
    """
    vocab, bound = target.vocab, None if growth is None else growth.bind(sampling)

    def decode(rng: Random, cases: Tensor) -> Tensor:
        batch = len(cases)
        pending, count = torch.zeros(batch, dtype=torch.long), torch.zeros(batch, 1, dtype=torch.long)
        run = drafter.start(vocab, [[0]] * batch, rng.at(1 + count[:, 0]))
        run.sampling = sampling
        text = torch.zeros(batch, length * (budget + 1), dtype=torch.long)
        for _ in range(length):
            draft = run.propose(pending, bound, budget)
            logits, now = target.logits[draft.tree.tokens], rng.at(1 + count[:, 0])
            accepted = accept(draft.tree, logits, sampling, now, draft.probs, verifier, draft.max_depth)
            emitted = emitted_by(draft.tree.tokens, accepted.path, accepted.path_lengths, accepted.next_token)
            text.scatter_(
                1, count + torch.arange(emitted.shape[1]), emitted
            )  # the next step overwrites what is invalid
            count += accepted.path_lengths[:, None]
            run.observe(accepted)
            pending = accepted.next_token
        return (text[:, :length] * vocab ** torch.arange(length - 1, -1, -1)).sum(1)

    joint = torch.zeros(vocab**length, dtype=torch.float64)
    for texts, _, weight in all_outcomes(decode, 1):
        joint.index_add_(0, texts, weight)
    return joint
