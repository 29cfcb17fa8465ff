"""The loops of retrieval, compiled: one call reads tokens into an automaton, one lays out a tree from what it holds.

Everything stands in arrays that the callers own.  numba keeps the machine code beside this file, so an installation
compiles once; this module is imported when the first text is read, as importing numba alone takes part of a second.

An automaton is five arrays.  ``sizes`` counts states, edges and rows, and names the state of the whole text.  A row of
``states`` is a state, one of ``edges`` a transition; ``slots`` is a hash table of edges by state and token; a row of
``frequent`` holds the most frequent continuations of a state that has many.
"""

# mypy: disable-error-code="untyped-decorator, no-any-return, return-value"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

__all__ = [
    "FREQUENT_COLUMNS",
    "MOST_CHILDREN",
    "draft_own",
    "draft_stored",
    "extend",
    "find",
    "longest_match",
    "merge",
    "read_windows",
    "rebuild_slots",
]

MOST_CHILDREN = 8  # continuations of one string that are considered
MOST_COUNTED = 24  # suffixes whose counts a token raises
LINK, LENGTH, COUNT, EDGE, FANOUT, ROW = range(6)  # columns of states; ROW is -1 where there is none
STATE, TOKEN, TARGET, NEXT = range(4)  # columns of edges; NEXT is the state's next edge or -1
STATES, EDGES, ROWS, LAST = range(4)  # places of sizes
FREQUENT_COLUMNS = 2 * MOST_CHILDREN + 1  # tokens, their counts, and the sum of all continuations' counts

Array = np.ndarray[Any, Any]
# Assignments to slices, ``arange`` and ``zeros`` are loops here: numba takes seconds to compile each.
compiled = njit(cache=True, error_model="numpy")  # called from Python
inner = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


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
def _rank(tokens: Array, counts: Array, size: int, token: int, count: int) -> int:
    """Insert into the best ``MOST_CHILDREN`` by count, the greater token first among equals; return their number."""
    place = size
    while place > 0 and (counts[place - 1] < count or (counts[place - 1] == count and tokens[place - 1] < token)):
        place -= 1
    if place == MOST_CHILDREN:
        return size
    for later in range(min(size, MOST_CHILDREN - 1), place, -1):
        tokens[later], counts[later] = tokens[later - 1], counts[later - 1]
    tokens[place], counts[place] = token, count
    return min(size + 1, MOST_CHILDREN)


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
            size = _rank(row[:MOST_CHILDREN], row[MOST_CHILDREN:], size, edges[edge, TOKEN], count)
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
def _push(heap: Array, size: int, values: Array, item: int) -> None:
    """Put a candidate on the heap: the most probable on top, the elder of equals."""
    place = size
    while place > 0:
        above = (place - 1) // 2
        if values[heap[above]] >= values[item]:  # an elder candidate has the smaller number
            break
        heap[place] = heap[above]
        place = above
    heap[place] = item


@inner
def _pop(heap: Array, size: int, values: Array) -> int:
    """Take the top from a heap of ``size`` candidates."""
    top, last = heap[0], heap[size - 1]
    size -= 1
    place = 0
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and _is_before(values, heap[below + 1], heap[below]):
            below += 1
        if not _is_before(values, heap[below], last):
            break
        heap[place] = heap[below]
        place = below
    heap[place] = last
    return top


@inner
def _is_before(values: Array, left: int, right: int) -> bool:
    """Tell which of two candidates is taken first."""
    return values[left] > values[right] or (values[left] == values[right] and left < right)


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
        size = _rank(tokens, counts, size, edges[edge, TOKEN], count)
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
    then after shorter ones by the escape rule of PPM-A (Cleary and Witten, 1984).

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
    heap = np.empty(most, np.int64)
    best, counts = np.empty(MOST_CHILDREN, np.int32), np.empty(MOST_CHILDREN + 1, np.int32)
    count = size = 0  # of candidates, of the heap
    place, node = states[sizes[LAST], LINK], 0
    while node + 1 < len(tokens):
        begin, left, value = count, backoff, values[node]
        while place > 0 and left and states[place, LENGTH] >= min_match:
            found = _followers(states, edges, frequent, place, best, counts)
            value /= counts[MOST_CHILDREN]
            for rank in range(found):
                if _is_new(candidate_token[begin:count], best[rank]):
                    candidate_token[count], candidate_place[count] = best[rank], place
                    candidate_parent[count], candidate_value[count] = node, value * counts[rank]
                    count += 1
            place, left = states[place, LINK], left - 1
        for item in range(begin, count):
            _push(heap, size, candidate_value, item)
            size += 1
        if not size:
            break
        item = _pop(heap, size, candidate_value)
        size -= 1
        node += 1
        token, above = candidate_token[item], candidate_parent[item]
        tokens[node], parents[node], values[node] = token, above, candidate_value[item]
        depths[node] = depths[above] + 1
        place = edges[find(edges, slots, candidate_place[item], token), TARGET]
    return node + 1


@inner
def _is_new(tokens: Array, token: int) -> bool:
    """Tell whether a token is not yet among some."""
    for known in tokens:  # noqa: SIM110 compiled: no generators
        if known == token:
            return False
    return True


@inner
def _token_at(text: Array, place: int) -> int:
    """Read a token of a store: four bytes, the most significant first."""
    at = 4 * place
    return (
        (np.int64(text[at]) << 24) | (np.int64(text[at + 1]) << 16) | (np.int64(text[at + 2]) << 8)
        | np.int64(text[at + 3])
    )  # fmt: skip


@inner
def _suffix(order: Array, rank: int) -> int:
    """Read where a suffix begins; a damaged file must not lead out of the text."""
    return min(np.int64(order[rank]), len(order) - 1)


@inner
def _shared(text: Array, begin: int, key: Array) -> int:
    """Count the leading tokens that a suffix shares with a key."""
    most = min(len(key), len(text) // 4 - begin)
    same = 0
    while same < most and _token_at(text, begin + same) == key[same]:
        same += 1
    return same


@inner
def _bound(text: Array, order: Array, key: Array, after: bool, low: int) -> int:
    """Find the first suffix that is not before a key, or the first that is after all that begin with it."""
    high = len(order)
    while low < high:
        middle = (low + high) // 2
        begin = _suffix(order, middle)
        same = _shared(text, begin, key)
        if same == len(key):
            is_before = after
        else:
            is_before = begin + same == len(order) or _token_at(text, begin + same) < key[same]
        if is_before:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def longest_match(text: Array, order: Array, key: Array) -> int:
    """Find how many tokens of a reversed context occur in a store: the most that a neighbour in the order shares."""
    place, longest = _bound(text, order, key, False, 0), 0
    for neighbour in range(max(place - 1, 0), min(place + 1, len(order))):
        longest = max(longest, _shared(text, _suffix(order, neighbour), key))
    return longest


@compiled
def read_windows(text: Array, order: Array, key: Array, vocab_size: int, windows: Array) -> int:
    """Read what follows occurrences of a reversed string, evenly spaced among all: into int64[most, length] rows.

    A window that ends with its text goes on with separators.  Returns the rows written.
    """
    low = _bound(text, order, key, False, 0)
    found = _bound(text, order, key, True, low) - low
    count = min(found, len(windows))
    for row in range(count):
        place = _suffix(order, low + row * found // count)
        for ahead in range(windows.shape[1]):
            at = place - 1 - ahead
            windows[row, ahead] = _token_at(text, at) if at >= 0 else vocab_size
    return count


@inner
def _group(windows: Array, depth: int, rows: Array, separator: int, tokens: Array, counts: Array, out: Array) -> int:
    """Group windows by their token at a depth: the most frequent tokens, and the rows of each behind one another.

    Writes 1 + the number of windows that go on behind the counts; returns the number of groups.
    """
    seen, times, different, total = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64), 0, 1
    for row in rows:
        token = windows[row, depth]
        if token == separator:
            continue
        place = 0
        while place < different and seen[place] != token:
            place += 1
        if place == different:
            seen[place], times[place] = token, 0
            different += 1
        times[place] += 1
        total += 1
    size = 0
    for place in range(different):
        size = _rank(tokens, counts, size, seen[place], times[place])
    counts[MOST_CHILDREN] = total
    end = 0
    for rank in range(size):
        for row in rows:
            if windows[row, depth] == tokens[rank]:
                out[end] = row
                end += 1
    return size


@compiled
def draft_stored(
    text: Array,
    order: Array,
    key: Array,
    vocab_size: int,
    min_match: int,
    most_occurrences: int,
    longest: int,
    tokens: Array,
    parents: Array,
    values: Array,
    depths: Array,
) -> int:
    """Lay out what followed the longest match of a context in a store, and a match of half its length.

    Args:
        text: uint8[4 x size], the texts reversed.
        order: uint32[size], of their suffixes.
        key: int64[length], the end of the context, reversed.
        vocab_size: the separator of texts.
        min_match: shortest match that may predict.
        most_occurrences: of one match that are looked at.
        longest: most tokens of a continuation.
        tokens: as for ``draft_own``.
        parents: as for ``draft_own``.
        values: as for ``draft_own``.
        depths: as for ``draft_own``.

    Returns:
        Nodes laid out, the root included.
    """
    most = len(tokens) * MOST_CHILDREN + MOST_CHILDREN
    candidate_token, candidate_begin = np.empty(most, np.int64), np.empty(most, np.int64)
    candidate_count, candidate_value = np.empty(most, np.int64), np.empty(most, np.float64)
    candidate_parent, heap = np.empty(most, np.int32), np.empty(most, np.int64)
    best, counts = np.empty(MOST_CHILDREN, np.int32), np.empty(MOST_CHILDREN + 1, np.int32)
    windows, every = np.empty((2 * most_occurrences, longest), np.int64), np.empty(most_occurrences, np.int64)
    rows = np.empty((len(tokens) + 1) * len(windows), np.int64)  # of the candidates, behind one another
    count = size = used = read = 0
    matched, value = longest_match(text, order, key), values[0]
    for _ in range(2):
        if matched < max(min_match, 1):
            break
        found = read_windows(text, order, key[:matched], vocab_size, windows[read : read + most_occurrences])
        for row in range(found):
            every[row] = read + row
        groups = _group(windows, 0, every[:found], vocab_size, best, counts, rows[used:])
        read += found
        value /= counts[MOST_CHILDREN]
        known = count
        for rank in range(groups):
            if _is_new(candidate_token[:known], best[rank]):
                candidate_token[count], candidate_begin[count], candidate_count[count] = best[rank], used, counts[rank]
                candidate_parent[count], candidate_value[count] = 0, value * counts[rank]
                _push(heap, size, candidate_value, count)
                count, size = count + 1, size + 1
            used += counts[rank]
        matched //= 2
    node = 0
    while size and node + 1 < len(tokens):
        item = _pop(heap, size, candidate_value)
        size -= 1
        node += 1
        depth, value = depths[candidate_parent[item]] + 1, candidate_value[item]
        tokens[node], parents[node], values[node] = candidate_token[item], candidate_parent[item], value
        depths[node] = depth
        if depth == longest:
            continue
        begin, end = candidate_begin[item], candidate_begin[item] + candidate_count[item]
        groups = _group(windows, depth, rows[begin:end], vocab_size, best, counts, rows[used:])
        for rank in range(groups):
            candidate_token[count], candidate_begin[count], candidate_count[count] = best[rank], used, counts[rank]
            candidate_parent[count] = node
            candidate_value[count] = value * counts[rank] / counts[MOST_CHILDREN]
            used += counts[rank]
            _push(heap, size, candidate_value, count)
            count, size = count + 1, size + 1
    return node + 1


@compiled
def merge(
    tokens: Array,
    parents: Array,
    values: Array,
    size: int,
    other_tokens: Array,
    other_parents: Array,
    other_values: Array,
    other_size: int,
    out_tokens: Array,
    out_parents: Array,
    out_values: Array,
    out_depths: Array,
) -> int:
    """Unite two trees by longest prefix and keep the best nodes; a node of both has the greater value.

    All arrays are as ``draft_own`` writes them, ``size`` nodes of the first and ``other_size`` of the second.  Returns
    the nodes written, the root included.
    """
    most = size + other_size
    token, parent, value = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.float64)
    place = np.empty(other_size, np.int64)  # of the second's nodes among all
    for node in range(size):
        token[node], parent[node], value[node] = tokens[node], parents[node], values[node]
    count, place[0] = size, 0
    for node in range(1, other_size):
        above = place[other_parents[node]]
        known = 1
        while known < count and (parent[known] != above or token[known] != other_tokens[node]):
            known += 1
        place[node] = known
        if known == count:
            token[count], parent[count], value[count] = other_tokens[node], above, other_values[node]
            count += 1
        elif other_values[node] > value[known]:
            value[known] = other_values[node]
    # A parent is at least as probable as its children and was found before them: a stable order keeps it first.
    order, number = np.empty(count, np.int64), np.empty(count, np.int64)
    number[0] = 0
    for node in range(1, count):
        later = node
        while later > 1 and value[order[later - 1]] < value[node]:
            order[later] = order[later - 1]
            later -= 1
        order[later] = node
    kept = min(count, len(out_tokens))
    for node in range(1, kept):
        source = order[node]
        number[source] = node
        above = number[parent[source]]
        out_tokens[node], out_parents[node], out_values[node] = token[source], above, value[source]
        out_depths[node] = out_depths[above] + 1
    return kept
