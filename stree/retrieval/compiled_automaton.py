"""A suffix automaton, compiled: one call reads tokens, one lays out the tree of what followed.

It is five arrays.  ``sizes`` counts states, edges and rows, and names the state of the whole text.  A row of ``states``
is a state, one of ``edges`` a transition; ``slots`` is a hash table of edges by state and token; a row of ``frequent``
holds the most frequent continuations of a state that has many.
"""

# mypy: disable-error-code="untyped-decorator, no-any-return, return-value"

from __future__ import annotations

import numpy as np

from stree.retrieval.compiled import MOST_CHILDREN, Array, compiled, inner, insert_ranked, is_new, pop, push

__all__ = ["COUNT", "FREQUENT_COLUMNS", "MOST_CHILDREN", "TARGET", "draft_own", "extend", "find", "rebuild_slots"]

MOST_COUNTED = 24  # suffixes whose counts a token raises
# Occurrences of something new that a match of one token is worth, falling with its length: the bundled pair's texts at
# temperatures 0 to 1 go on from a single occurrence with odds of about length : 1.5 (prompts 33-40 of HumanEval, GSM8K
# and MT-Bench).
ESCAPE = 1.5
LINK, LENGTH, COUNT, EDGE, FANOUT, ROW = range(6)  # columns of states; ROW is -1 where there is none
STATE, TOKEN, TARGET, NEXT = range(4)  # columns of edges; NEXT is the state's next edge or -1
STATES, EDGES, ROWS, LAST = range(4)  # places of sizes
FREQUENT_COLUMNS = 2 * MOST_CHILDREN + 1  # tokens, their counts, and the sum of all continuations' counts


@inner
def _home(state: int, token: int, slots: Array) -> int:
    """Give the slot at which the search for an edge begins (Fibonacci hashing)."""
    key = ((state << 32) | token) * -7046029254386353131
    return (key >> 32) & (len(slots) - 1)


@compiled
def find(edges: Array, slots: Array, state: int, token: int) -> int:
    """Find the edge of a state that carries a token: its number, or -1."""
    slot = _home(state, token, slots)
    while slots[slot] >= 0:
        edge = slots[slot]
        if edges[edge, STATE] == state and edges[edge, TOKEN] == token:
            return edge
        slot = (slot + 1) & (len(slots) - 1)
    return -1


@inner
def _put(edges: Array, slots: Array, edge: int) -> None:
    """Enter an edge into the hash table."""
    slot = _home(edges[edge, STATE], edges[edge, TOKEN], slots)
    while slots[slot] >= 0:
        slot = (slot + 1) & (len(slots) - 1)
    slots[slot] = edge


@compiled
def rebuild_slots(sizes: Array, edges: Array, slots: Array) -> None:
    """Enter all edges into an empty hash table."""
    for edge in range(sizes[EDGES]):
        _put(edges, slots, edge)


@inner
def _add_edge(
    sizes: Array, states: Array, edges: Array, slots: Array, frequent: Array, state: int, token: int, target: int
) -> None:
    """Add a transition; a state that thereby has many gets a row of its most frequent ones."""
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
    """Make a state without transitions."""
    state = sizes[STATES]
    sizes[STATES] += 1
    states[state, LINK], states[state, LENGTH], states[state, COUNT] = -1, length, count
    states[state, EDGE], states[state, FANOUT], states[state, ROW] = -1, 0, -1
    return state


@inner
def _cloned(sizes: Array, states: Array, edges: Array, slots: Array, frequent: Array, source: int, length: int) -> int:
    """Copy a state for its shorter strings, which end at more places."""
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
def _note(row: Array, token: int, count: int) -> None:
    """Write down that a continuation has occurred once more, ``count`` times by now."""
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
    """Count the last token for the suffixes of the text, and for those of the text before it as a continuation.

    Args:
        states: of the automaton.
        frequent: of the automaton.
        new: state of the whole text.
        before: state of the text without its last token.
        token: the last token.
    """
    left = MOST_COUNTED - 1
    states[new, COUNT] += 1
    while before > 0:
        # The suffix that is one token longer than those of ``before``.
        while states[states[new, LINK], LENGTH] > states[before, LENGTH]:
            if not left:
                return
            new, left = states[new, LINK], left - 1
            states[new, COUNT] += 1
        if states[before, ROW] >= 0:
            _note(frequent[states[before, ROW]], token, states[new, COUNT])
        before = states[before, LINK]
    new = states[new, LINK]
    while new > 0 and left:
        states[new, COUNT] += 1
        new, left = states[new, LINK], left - 1


@compiled
def extend(sizes: Array, states: Array, edges: Array, slots: Array, frequent: Array, tokens: Array) -> None:
    """Append int64 tokens (the online construction); the arrays must have room: two states and three edges a token."""
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
def _followers(states: Array, edges: Array, frequent: Array, state: int, tokens: Array, counts: Array) -> int:
    """Write the most frequent continuations of a state; return their number, and 1 + the sum of all behind them."""
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


@compiled
def draft_own(
    sizes: Array,
    states: Array,
    edges: Array,
    slots: Array,
    frequent: Array,
    tokens: Array,
    parents: Array,
    values: Array,
    depths: Array,
    min_match: int,
    backoff: int,
) -> int:
    """Lay out the most frequent continuations of the text's longest suffixes that occurred before.

    A node's value is its parent's times an estimate of the next token's probability: its count after the longest match,
    then after shorter ones by an escape rule like that of PPM-A (Cleary and Witten, 1984), which counts one occurrence
    of something new; here it weighs the less, the longer the match.

    Args:
        sizes: with the next four, the automaton.
        states: see the module.
        edges: see the module.
        slots: see the module.
        frequent: see the module.
        tokens: int64[n], written from place 1 on; place 0 is the root's.
        parents: int32[n], written likewise, as are the next two.
        values: float64[n], of the nodes' paths; ``values[0]`` is read.
        depths: int32[n].
        min_match: shortest suffix that may predict.
        backoff: most suffixes consulted for one node.

    Returns:
        Nodes laid out, the root included.
    """
    most = len(tokens) * MOST_CHILDREN * backoff
    candidate_token, candidate_place = np.empty(most, np.int64), np.empty(most, np.int64)
    candidate_parent, candidate_value = np.empty(most, np.int32), np.empty(most, np.float64)
    candidate_match, heap = np.empty(most, np.int64), np.empty(most, np.int64)
    best, counts = np.empty(MOST_CHILDREN, np.int32), np.empty(MOST_CHILDREN + 1, np.int32)
    count = size = 0  # of candidates, of the heap
    place, node = states[sizes[LAST], LINK], 0
    match = states[place, LENGTH]
    while node + 1 < len(tokens):
        begin, left, value = count, backoff, values[node]
        while place > 0 and left and states[place, LENGTH] >= min_match:
            found = _followers(states, edges, frequent, place, best, counts)
            escape = ESCAPE / match
            value /= counts[MOST_CHILDREN] - 1 + escape
            for rank in range(found):
                if is_new(candidate_token[begin:count], best[rank]):
                    candidate_token[count], candidate_place[count] = best[rank], place
                    candidate_parent[count], candidate_value[count] = node, value * counts[rank]
                    candidate_match[count] = match + 1
                    count += 1
            value *= escape
            place, left = states[place, LINK], left - 1
            match = states[place, LENGTH]
        for item in range(begin, count):
            push(heap, size, candidate_value, item)
            size += 1
        if not size:
            break
        item = pop(heap, size, candidate_value)
        size -= 1
        node += 1
        token, above = candidate_token[item], candidate_parent[item]
        tokens[node], parents[node], values[node] = token, above, candidate_value[item]
        depths[node] = depths[above] + 1
        place = edges[find(edges, slots, candidate_place[item], token), TARGET]
        match = candidate_match[item]
    return node + 1
