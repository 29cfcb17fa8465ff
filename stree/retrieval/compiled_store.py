"""A store of other texts, compiled: search in its sorted suffixes, and the tree of what followed."""

# mypy: disable-error-code="untyped-decorator, no-any-return, return-value"

from __future__ import annotations

import numpy as np

from stree.retrieval.compiled import MOST_CHILDREN, Array, compiled, inner, insert_ranked, is_new, pop, push

__all__ = ["draft_stored", "longest_match", "read_windows"]


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
        if token >= separator:  # or no token at all, in a damaged file
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
            if is_new(candidate_token[:known], best[rank]):
                candidate_token[count], candidate_begin[count], candidate_count[count] = best[rank], used, counts[rank]
                candidate_parent[count], candidate_value[count] = 0, value * counts[rank]
                push(heap, size, candidate_value, count)
                count, size = count + 1, size + 1
            used += counts[rank]
        matched //= 2
    node = 0
    while size and node + 1 < len(tokens):
        item = pop(heap, size, candidate_value)
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
            push(heap, size, candidate_value, count)
            count, size = count + 1, size + 1
    return node + 1
