"""The interface of a verifier: the rule that decides which drafted nodes a target accepts."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from stree.sampling import AnySampling, Random, Sampling
from stree.tree import TokenTree
from stree.verify.values import Acceptance, DraftProbs

__all__ = ["Verifier"]


class Verifier(Protocol):
    """A rule of verification; derive from it and pass an object as ``verifier``.

    A rule is one object for all texts and keeps nothing of any of them.  It runs on the host, so steps with a rule of
    your own are not captured as CUDA graphs.  ``stree.testing.check_verifier`` tests whether a rule is lossless.

    Attributes:
        is_lossless: False for a rule that is known to change the distribution of texts; ``generate`` takes it with
            ``allow_lossy=True`` only.
    """

    is_lossless: bool = True

    def check(self, sampling: Sampling) -> None:
        """Refuse sampling parameters for which the rule is not made; called for every text before anything runs.

        Raises:
            ValueError: the rule does not take these parameters.
        """
        return

    def __call__(
        self,
        tree: TokenTree,
        target_logits: Tensor,
        sampling: AnySampling,
        rng: Random,
        draft: DraftProbs | None,
        max_depth: int,
    ) -> Acceptance:
        """Choose the accepted path of each tree and the token after it.

        Args:
            tree: n nodes.  Padding has the parent -1 and is never accepted; its logits may be anything.
            target_logits: float[batch, n, vocab], at every node for the token after it.
            sampling: ``sampling.probs(target_logits)`` are the target's distributions, one-hot where a text is greedy.
            rng: random numbers of this step.  ``rng.bernoulli("accept", probs, offset, node)`` draws tests, and
                ``rng.choice("target", probs, depth + 1)`` the token after a node.  A key (purpose, offset, node) is one
                number, so what is independent needs keys of its own.
            draft: distributions that the nodes were drawn from; None where all are DELTA.
            max_depth: bound of the depths.
        """
        ...
