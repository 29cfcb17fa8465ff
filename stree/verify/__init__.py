"""Which nodes of a tree the target accepts, and the token that follows: one rule a file.

Greedy and MATCH (``match``), recursive rejection (``rejection``), traversal, which is block verification on a chain
(``traversal``); and one that is not lossless (``longest``).  In the docstrings p is the target's distribution and q
the draft's. Every rule works on all nodes at once.
"""

from stree.verify.acceptance import LONGEST, VERIFIERS, accept
from stree.verify.values import DELTA, INDEPENDENT, SAMPLED, Acceptance, DraftLaws, DraftProbs

__all__ = ["DELTA", "INDEPENDENT", "LONGEST", "SAMPLED", "VERIFIERS", "Acceptance", "DraftLaws", "DraftProbs", "accept"]
