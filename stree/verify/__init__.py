"""Which nodes of a tree the target accepts, and the token that follows: one rule a file.

Greedy and MATCH (``match``), recursive rejection (``rejection``), traversal, which is block verification on a chain
(``traversal``).  In the docstrings p is the target's law and q the draft's.  Every rule works on all nodes at once.
"""

from stree.verify.acceptance import VERIFIERS, accept
from stree.verify.values import DELTA, SAMPLED, Acceptance, DraftLaws

__all__ = ["DELTA", "SAMPLED", "VERIFIERS", "Acceptance", "DraftLaws", "accept"]
