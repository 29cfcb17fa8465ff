"""Suffix automaton compiled by numba: one call appends tokens, one drafts a tree of continuations.

The automaton is five arrays. ``sizes`` holds the numbers of states, edges and rows, and the state of the whole text. A
row of ``states`` is a state, a row of ``edges`` a transition; ``slots`` is a hash table of edges by state and token; a
row of ``frequent`` holds the most frequent continuations of a state with more than ``MOST_CHILDREN`` of them.
"""

# mypy: disable-error-code="untyped-decorator, no-any-return, return-value"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stree.retrieval.continuations import Nodes
from stree.retrieval.numba_common import MOST_CHILDREN, Array, compiled, inner, insert_ranked, is_new, pop, push, write

__all__ = [
    "COUNT", "FREQUENT_COLUMNS", "MOST_CHILDREN", "TARGET", "Automaton", "draft_from_automaton", "extend", "find",
    "rebuild_slots",
]  # fmt: skip

MOST_COUNTED = 24  # suffixes whose counts are updated for each token
# Escape count of a match of one token, divided by the length of longer matches. Measured with the bundled pair at
# temperatures 0 to 1 (prompts 33-40 of HumanEval, GSM8K and MT-Bench): the continuation of a match that occurred once
# is repeated with odds of about length : 1.5.
ESCAPE = 1.5
LINK, LENGTH, COUNT, EDGE, FANOUT, ROW = range(6)  # columns of states; ROW is the row in frequent or -1
STATE, TOKEN, TARGET, NEXT = range(4)  # columns of edges; NEXT is the state's next edge or -1
STATES, EDGES, ROWS, LAST = range(4)  # entries of sizes
FREQUENT_COLUMNS = 2 * MOST_CHILDREN + 1  # tokens, their counts, and the sum of all continuations' counts


class Automaton(NamedTuple):
    """The arrays of a suffix automaton, described above; all but ``sizes`` are int32."""

    sizes: Array
    states: Array
    edges: Array
    slots: Array
    frequent: Array


@inner
def _home(state: int, token: int, slots: Array) -> int:
    """Return the first slot to probe for an edge (Fibonacci hashing)."""
    key = ((state << 32) | token) * -7046029254386353131
    return (key >> 32) & (len(slots) - 1)


@compiled
def find(edges: Array, slots: Array, state: int, token: int) -> int:
    """Find the edge of a state for a token: its index, or -1."""
    slot = _home(state, token, slots)
    while slots[slot] >= 0:
        edge = slots[slot]
        if edges[edge, STATE] == state and edges[edge, TOKEN] == token:
            return edge
        slot = (slot + 1) & (len(slots) - 1)
    return -1


@inner
def _put(edges: Array, slots: Array, edge: int) -> None:
    """Insert an edge into the hash table."""
    slot = _home(edges[edge, STATE], edges[edge, TOKEN], slots)
    while slots[slot] >= 0:
        slot = (slot + 1) & (len(slots) - 1)
    slots[slot] = edge


@compiled
def rebuild_slots(sizes: Array, edges: Array, slots: Array) -> None:
    """Insert all edges into an empty hash table."""
    for edge in range(sizes[EDGES]):
        _put(edges, slots, edge)


@inner
def _add_edge(
    sizes: Array, states: Array, edges: Array, slots: Array, frequent: Array, state: int, token: int, target: int
) -> None:
    """Add a transition; a state that now has more than ``MOST_CHILDREN`` gets a row in ``frequent``."""
    edge = sizes[EDGES]
    sizes[EDGES] += 1
    edges[edge, STATE], edges[edge, TOKEN], edges[edge, TARGET] = state, token, target
    edges[edge, NEXT] = states[state, EDGE]
    states[state, EDGE] = edge
    states[state, FANOUT] += 1
    _put(edges, slots, edge)
    if states[state, FANOUT] == MOST_CHILDREN + 1 and states[state, ROW] < 0:
        row = frequent[sizes[ROWS]]
        states[state, ROW] = sizes[ROWS]
        sizes[ROWS] += 1
        row[-1] = size = 0
        while edge >= 0:
            count = states[edges[edge, TARGET], COUNT]
            row[-1] += count
            size = insert_ranked(row[:MOST_CHILDREN], row[MOST_CHILDREN:], size, edges[edge, TOKEN], count)
            edge = edges[edge, NEXT]


@inner
def _add_state(sizes: Array, states: Array, length: int, count: int) -> int:
    """Add a state without transitions."""
    state = sizes[STATES]
    sizes[STATES] += 1
    states[state, LINK], states[state, LENGTH], states[state, COUNT] = -1, length, count
    states[state, EDGE], states[state, FANOUT], states[state, ROW] = -1, 0, -1
    return state


@inner
def _cloned(sizes: Array, states: Array, edges: Array, slots: Array, frequent: Array, source: int, length: int) -> int:
    """Clone a state for its shorter strings, which occur at more positions (Blumer et al.)."""
    clone = _add_state(sizes, states, length, states[source, COUNT])
    states[clone, LINK] = states[source, LINK]
    if states[source, ROW] >= 0:
        states[clone, ROW] = sizes[ROWS]
        for column in range(FREQUENT_COLUMNS):
            frequent[sizes[ROWS], column] = frequent[states[source, ROW], column]
        sizes[ROWS] += 1
    edge = states[source, EDGE]
    while edge >= 0:
        _add_edge(sizes, states, edges, slots, frequent, clone, edges[edge, TOKEN], edges[edge, TARGET])
        edge = edges[edge, NEXT]
    states[source, LINK] = clone
    return clone


@inner
def _update_frequent(row: Array, token: int, count: int) -> None:
    """Raise the count of a continuation, now ``count``, in a row of the most frequent ones."""
    row[-1] += 1
    place = 0
    while place < MOST_CHILDREN - 1 and row[place] != token:
        place += 1
    if row[place] != token and row[MOST_CHILDREN + place] >= count:
        return
    while place > 0 and row[MOST_CHILDREN + place - 1] < count:
        row[place], row[MOST_CHILDREN + place] = row[place - 1], row[MOST_CHILDREN + place - 1]
        place -= 1
    row[place], row[MOST_CHILDREN + place] = token, count


@inner
def _count(states: Array, frequent: Array, new: int, before: int, token: int) -> None:
    """Update the counts of the text's suffixes, and of the last token as a continuation of the suffixes before it.

    Args:
        states: see the module.
        frequent: see the module.
        new: state of the whole text.
        before: state of the text without its last token.
        token: the last token.
    """
    left = MOST_COUNTED - 1
    states[new, COUNT] += 1
    while before > 0:
        # The suffix that extends ``before`` by the last token.
        while states[states[new, LINK], LENGTH] > states[before, LENGTH]:
            if not left:
                return
            new, left = states[new, LINK], left - 1
            states[new, COUNT] += 1
        if states[before, ROW] >= 0:
            _update_frequent(frequent[states[before, ROW]], token, states[new, COUNT])
        before = states[before, LINK]
    new = states[new, LINK]
    while new > 0 and left:
        states[new, COUNT] += 1
        new, left = states[new, LINK], left - 1


@compiled
def extend(automaton: Automaton, tokens: Array) -> None:
    """Append int64 tokens, online; the arrays must have room for two states and three edges a token."""
    sizes, states, edges, slots, frequent = automaton
    for token in tokens:
        before = state = sizes[LAST]
        new = _add_state(sizes, states, states[state, LENGTH] + 1, 0)
        edge = find(edges, slots, state, token)
        while edge < 0:
            _add_edge(sizes, states, edges, slots, frequent, state, token, new)
            state = states[state, LINK]
            if state < 0:
                break
            edge = find(edges, slots, state, token)
        target = 0 if state < 0 else edges[edge, TARGET]
        if state >= 0 and states[target, LENGTH] != states[state, LENGTH] + 1:
            source = target
            target = _cloned(sizes, states, edges, slots, frequent, source, states[state, LENGTH] + 1)
            while edge >= 0 and edges[edge, TARGET] == source:
                edges[edge, TARGET] = target
                state = states[state, LINK]
                edge = -1 if state < 0 else find(edges, slots, state, token)
        states[new, LINK] = target
        sizes[LAST] = new
        _count(states, frequent, new, before, token)


@inner
def _continuations(states: Array, edges: Array, frequent: Array, state: int, tokens: Array, counts: Array) -> int:
    """Write the most frequent continuations of a state, then 1 + the sum of all counts; return their number."""
    row = states[state, ROW]
    if row >= 0:
        for place in range(MOST_CHILDREN):
            tokens[place], counts[place] = frequent[row, place], frequent[row, MOST_CHILDREN + place]
        counts[MOST_CHILDREN] = 1 + frequent[row, 2 * MOST_CHILDREN]
        return MOST_CHILDREN
    size, total, edge = 0, 1, states[state, EDGE]
    while edge >= 0:
        count = states[edges[edge, TARGET], COUNT]
        total += count
        size = insert_ranked(tokens, counts, size, edges[edge, TOKEN], count)
        edge = edges[edge, NEXT]
    counts[MOST_CHILDREN] = total
    return size


@inner
def _expand(
    automaton: Automaton, candidates: tuple[Array, ...], count: int, node: int, place: tuple[int, int, float],
    min_match: int, backoff: int,
) -> int:  # fmt: skip
    """Append a node's continuations to ``count`` candidates; ``place``: state and length of its match, its value."""
    token, above, parent, probability, length = candidates
    state, match, value = place
    best, counts = np.empty(MOST_CHILDREN, np.int32), np.empty(MOST_CHILDREN + 1, np.int32)
    begin, left = count, backoff
    while state > 0 and left and automaton.states[state, LENGTH] >= min_match:
        found = _continuations(automaton.states, automaton.edges, automaton.frequent, state, best, counts)
        escape = ESCAPE / match
        value /= counts[MOST_CHILDREN] - 1 + escape
        for rank in range(found):
            if is_new(token[begin:count], best[rank]):
                token[count], above[count], parent[count] = best[rank], state, node
                probability[count], length[count] = value * counts[rank], match + 1
                count += 1
        value *= escape
        state, left = automaton.states[state, LINK], left - 1
        match = automaton.states[state, LENGTH]
    return count


@compiled
def draft_from_automaton(automaton: Automaton, nodes: Nodes, min_match: int, backoff: int) -> int:
    """Draft the most frequent continuations of the text's longest suffixes that occurred before.

    The value of a node is its parent's times an estimate of the token's probability: its count after the longest match,
    then after shorter ones by an escape rule like that of PPM-A (Cleary and Witten, 1984), which adds one occurrence of
    an unseen token; here that escape count falls with the length of the match.

    Args:
        automaton: of the text.
        nodes: written from index 1 on; ``values[0]`` is read.
        min_match: shortest suffix that may predict.
        backoff: largest number of suffixes used for one node.

    Returns:
        Number of nodes, the root included.
    """
    most = len(nodes.tokens) * MOST_CHILDREN * backoff
    token, above, parent = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int32)
    value, length, heap = np.empty(most, np.float64), np.empty(most, np.int64), np.empty(most, np.int64)
    candidates = (token, above, parent, value, length)
    count = node = 0  # every candidate is pushed, so the heap holds count - node of them
    state = automaton.states[automaton.sizes[LAST], LINK]
    match = automaton.states[state, LENGTH]
    while node + 1 < len(nodes.tokens):
        begin, place = count, (state, match, nodes.values[node])
        count = _expand(automaton, candidates, count, node, place, min_match, backoff)
        for item in range(begin, count):
            push(heap, item - node, value, item)
        if count == node:
            break
        item = pop(heap, count - node, value)
        node += 1
        write(nodes, node, token[item], parent[item], value[item])
        state = automaton.edges[find(automaton.edges, automaton.slots, above[item], token[item]), TARGET]
        match = length[item]
    return node + 1
