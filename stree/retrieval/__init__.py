"""Retrieval of continuations: a suffix automaton over the request's own text, and a datastore of other texts.

Works on token lists and numpy arrays, without models or tensors. The ``numba_*`` files hold what numba compiles.
"""

from stree.retrieval.automaton import SuffixAutomaton
from stree.retrieval.continuations import Nodes
from stree.retrieval.datastore import LONGEST_MATCH, Datastore
from stree.retrieval.union import unite

__all__ = ["LONGEST_MATCH", "Datastore", "Nodes", "SuffixAutomaton", "unite"]
