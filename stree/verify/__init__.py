"""Verification: which drafted nodes of a tree the target accepts, and the token that follows them.

One rule per file: greedy and MATCH (``match``), recursive rejection (``rejection``), traversal verification, which is
block verification on a chain (``traversal``), and three that are not lossless (``longest``, ``typical``, ``forced``).
A rule of your own is a ``Verifier``.  In the docstrings p is the target's distribution and q the draft's.
"""

from stree.verify.acceptance import LONGEST, VERIFIERS, accept, name_of, verifier_of
from stree.verify.forced import ForcedLength
from stree.verify.typical import TypicalAcceptance
from stree.verify.values import DELTA, INDEPENDENT, SAMPLED, Acceptance, DraftLaws, DraftProbs
from stree.verify.verifier import Verifier

__all__ = [
    "DELTA", "INDEPENDENT", "LONGEST", "SAMPLED", "VERIFIERS", "Acceptance", "DraftLaws", "DraftProbs",
    "ForcedLength", "TypicalAcceptance", "Verifier", "accept", "name_of", "verifier_of",
]  # fmt: skip
