"""What may follow the last tokens, from texts seen before: the request's own, and a store made beforehand.

It knows tokens only: no models, no trees of tensors.
"""

from stree.retrieval.automaton import SuffixAutomaton
from stree.retrieval.continuations import Continuations, Nodes, merged, unite
from stree.retrieval.datastore import LONGEST_MATCH, Datastore

__all__ = ["LONGEST_MATCH", "Continuations", "Datastore", "Nodes", "SuffixAutomaton", "merged", "unite"]
