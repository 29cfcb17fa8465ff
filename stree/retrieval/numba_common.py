"""Functions that both retrieval structures use, compiled by numba: ranked lists, a heap, and the union of two trees.

All data is in arrays that the caller allocates. numba's cache checks one source file only: after a change here, delete
the caches of the two modules that import this one.
"""

# mypy: disable-error-code="untyped-decorator, no-any-return, return-value"

from __future__ import annotations

from typing import Any

import numpy as np

from stree.kernels import cpu_jit
from stree.kernels.cpu_jit import compiled
from stree.retrieval.continuations import Nodes

__all__ = ["MOST_CHILDREN", "Array", "compiled", "inner", "insert_ranked", "is_new", "merge", "pop", "push", "write"]

MOST_CHILDREN = 8  # continuations that are considered after one string

Array = np.ndarray[Any, Any]
# Loops instead of slice assignments, ``arange`` and ``zeros``: numba takes seconds to compile each of these.
inner = cpu_jit.inner(no_cpython_wrapper=True, no_cfunc_wrapper=True)


@inner
def insert_ranked(tokens: Array, counts: Array, size: int, token: int, count: int) -> int:
    """Insert into a list of the ``MOST_CHILDREN`` largest counts (ties: greater token first); return its size."""
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
def push(heap: Array, size: int, values: Array, item: int) -> None:
    """Push a candidate on a heap whose top has the largest value (ties: smallest index)."""
    place = size
    while place > 0:
        above = (place - 1) // 2
        if values[heap[above]] >= values[item]:  # a candidate pushed earlier has the smaller index
            break
        heap[place] = heap[above]
        place = above
    heap[place] = item


@inner
def pop(heap: Array, size: int, values: Array) -> int:
    """Pop the top of a heap of ``size`` candidates."""
    top, last = heap[0], heap[size - 1]
    size -= 1
    place = 0
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and is_before(values, heap[below + 1], heap[below]):
            below += 1
        if not is_before(values, heap[below], last):
            break
        heap[place] = heap[below]
        place = below
    heap[place] = last
    return top


@inner
def is_before(values: Array, left: int, right: int) -> bool:
    """Return whether the left candidate is popped before the right one."""
    return values[left] > values[right] or (values[left] == values[right] and left < right)


@inner
def is_new(tokens: Array, token: int) -> bool:
    """Return whether a token is not in a list."""
    for known in tokens:  # noqa: SIM110 compiled: no generators
        if known == token:
            return False
    return True


@inner
def write(out: Nodes, node: int, token: int, parent: int, value: float) -> None:
    """Write one node of a tree."""
    out.tokens[node], out.parents[node], out.values[node] = token, parent, value
    out.depths[node] = out.depths[parent] + 1


@compiled
def merge(first: Nodes, size: int, second: Nodes, other_size: int, out: Nodes) -> int:
    """Merge two trees by common prefixes and keep the nodes of the largest values; a node of both has the larger value.

    The first tree has ``size`` nodes, the second ``other_size``. Returns the number of nodes written, with the root.
    """
    most = size + other_size
    token, parent, value = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.float64)
    place = np.empty(other_size, np.int64)  # index of each node of the second tree in the union
    for node in range(size):
        token[node], parent[node], value[node] = first.tokens[node], first.parents[node], first.values[node]
    count, place[0] = size, 0
    for node in range(1, other_size):
        above = place[second.parents[node]]
        known = 1
        while known < count and (parent[known] != above or token[known] != second.tokens[node]):
            known += 1
        place[node] = known
        if known == count:
            token[count], parent[count], value[count] = second.tokens[node], above, second.values[node]
            count += 1
        elif second.values[node] > value[known]:
            value[known] = second.values[node]
    # A parent is at least as probable as its children and has a smaller index, so a stable sort keeps it first.
    order, number = np.empty(count, np.int64), np.empty(count, np.int64)
    number[0] = 0
    for node in range(1, count):
        later = node
        while later > 1 and value[order[later - 1]] < value[node]:
            order[later] = order[later - 1]
            later -= 1
        order[later] = node
    kept = min(count, len(out.tokens))
    for node in range(1, kept):
        source = order[node]
        number[source] = node
        write(out, node, token[source], number[parent[source]], value[source])
    return kept
