"""Datastore search compiled by numba: binary search in the suffix array, and the tree of continuations."""

# mypy: disable-error-code="untyped-decorator, no-any-return, return-value"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stree.retrieval.continuations import Nodes
from stree.retrieval.numba_common import MOST_CHILDREN, Array, compiled, inner, insert_ranked, is_new, pop, push, write

__all__ = ["Store", "draft_from_datastore", "longest_match", "read_windows"]


class Store(NamedTuple):
    """A datastore.

    Attributes:
        text: uint8[4 x size], the reversed texts.
        order: uint32[size], their suffix array.
        vocab_size: the separator token.
        longest: longest continuation, in tokens.
    """

    text: Array
    order: Array
    vocab_size: int
    longest: int


@inner
def _token_at(text: Array, place: int) -> int:
    """Read a token: four bytes, big-endian."""
    at = 4 * place
    return (
        (np.int64(text[at]) << 24) | (np.int64(text[at + 1]) << 16) | (np.int64(text[at + 2]) << 8)
        | np.int64(text[at + 3])
    )  # fmt: skip


@inner
def _suffix(order: Array, rank: int) -> int:
    """Read where a suffix begins, clamped: a damaged file must not cause reads outside the text."""
    return min(np.int64(order[rank]), len(order) - 1)


@inner
def _shared(text: Array, begin: int, key: Array) -> int:
    """Count the leading tokens that a suffix has in common with a key."""
    most = min(len(key), len(text) // 4 - begin)
    same = 0
    while same < most and _token_at(text, begin + same) == key[same]:
        same += 1
    return same


@inner
def _bound(text: Array, order: Array, key: Array, after: bool, low: int) -> int:
    """Find the first suffix that is at least a key; with ``after``, the first one beyond all that begin with it."""
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
    """Compute the length of the longest prefix of a reversed context that occurs: that of a neighbour in the order."""
    place, longest = _bound(text, order, key, False, 0), 0
    for neighbour in range(max(place - 1, 0), min(place + 1, len(order))):
        longest = max(longest, _shared(text, _suffix(order, neighbour), key))
    return longest


@compiled
def read_windows(text: Array, order: Array, key: Array, vocab_size: int, windows: Array) -> int:
    """Read the tokens after occurrences of a reversed string, evenly spaced among all, into int64[most, length].

    After the end of the store a row holds separators. Returns the number of rows written.
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
    """Group windows by their token at a depth: writes the most frequent tokens, their counts, and the rows of each.

    After the counts it writes 1 + the number of windows that have a token there. Returns the number of groups.
    """
    seen, times, different, total = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64), 0, 1
    for row in rows:
        token = windows[row, depth]
        if token >= separator:  # in a damaged file also an invalid token
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
        size = insert_ranked(tokens, counts, size, seen[place], times[place])
    counts[MOST_CHILDREN] = total
    end = 0
    for rank in range(size):
        for row in rows:
            if windows[row, depth] == tokens[rank]:
                out[end] = row
                end += 1
    return size


@inner
def _push_groups(
    candidates: tuple[Array, ...], place: tuple[int, int, int], value: float, known: int, groups: tuple[Array, Array],
    size: int, begin: int,
) -> int:  # fmt: skip
    """Push ``size`` groups of a node's windows whose token is not among the first ``known``; return the candidates.

    ``place`` holds the size of the heap, the number of candidates, and the node.
    """
    token, rows_begin, rows_count, above, values, heap = candidates
    heap_size, count, parent = place
    tokens, counts = groups
    for rank in range(size):
        if is_new(token[:known], tokens[rank]):
            token[count], rows_begin[count], rows_count[count] = tokens[rank], begin, counts[rank]
            above[count], values[count] = parent, value * counts[rank]
            push(heap, heap_size, values, count)
            count, heap_size = count + 1, heap_size + 1
        begin += counts[rank]
    return count


@compiled
def draft_from_datastore(store: Store, key: Array, min_match: int, most_occurrences: int, nodes: Nodes) -> int:
    """Draft the continuations of the longest match of a context in a store, and of a match of half its length.

    Args:
        store: the texts.
        key: int64[length], the end of the context, reversed.
        min_match: shortest match that may predict.
        most_occurrences: largest number of occurrences read for one match.
        nodes: written from index 1 on; ``values[0]`` is read.

    Returns:
        Number of nodes, the root included.
    """
    text, order, vocab_size, longest = store
    most = len(nodes.tokens) * MOST_CHILDREN + MOST_CHILDREN
    token, begin, number = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    parent, value, heap = np.empty(most, np.int32), np.empty(most, np.float64), np.empty(most, np.int64)
    candidates = (token, begin, number, parent, value, heap)
    best, counts = np.empty(MOST_CHILDREN, np.int32), np.empty(MOST_CHILDREN + 1, np.int32)
    windows, every = np.empty((2 * most_occurrences, longest), np.int64), np.empty(most_occurrences, np.int64)
    rows = np.empty((len(nodes.tokens) + 1) * len(windows), np.int64)  # window rows of each candidate in turn
    count = used = read = node = 0  # every candidate is pushed, so the heap holds count - node of them
    matched, share = longest_match(text, order, key), nodes.values[0]
    for _ in range(2):
        if matched < max(min_match, 1):
            break
        found = read_windows(text, order, key[:matched], vocab_size, windows[read : read + most_occurrences])
        for row in range(found):
            every[row] = read + row
        groups = _group(windows, 0, every[:found], vocab_size, best, counts, rows[used:])
        share /= counts[MOST_CHILDREN]
        count = _push_groups(candidates, (count, count, 0), share, count, (best, counts), groups, used)
        used, read = used + counts[:groups].sum(), read + found
        matched //= 2
    while count > node and node + 1 < len(nodes.tokens):
        item = pop(heap, count - node, value)
        node += 1
        write(nodes, node, token[item], parent[item], value[item])
        if nodes.depths[node] == longest:
            continue
        own = rows[begin[item] : begin[item] + number[item]]
        groups = _group(windows, nodes.depths[node], own, vocab_size, best, counts, rows[used:])
        share = value[item] / counts[MOST_CHILDREN]
        count = _push_groups(candidates, (count - node, count, node), share, 0, (best, counts), groups, used)
        used += counts[:groups].sum()
    return node + 1
