"""The suffix automaton of a text against a naive search: counts, continuations and their values."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.continuations import tree_of
from hypothesis import given, settings
from hypothesis import strategies as st

from stree.retrieval import SuffixAutomaton

texts = st.lists(st.integers(0, 3), max_size=30)


def occurrences(text: list[int], part: tuple[int, ...]) -> int:
    return sum(tuple(text[begin : begin + len(part)]) == part for begin in range(len(text) - len(part) + 1))


@settings(max_examples=60, deadline=None)
@given(texts, texts)
def test_the_automaton_counts_every_substring(text: list[int], more: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    automaton.extend(more)
    whole = text + more
    for begin in range(len(whole)):
        for end in range(begin + 1, min(len(whole), begin + 6) + 1):
            part = tuple(whole[begin:end])
            assert automaton.count(part) == occurrences(whole, part)
    assert automaton.count([]) == 0
    assert automaton.count([9]) == automaton.count([*whole, 0]) == 0


@settings(max_examples=60, deadline=None)
@given(texts, st.integers(0, 12), st.integers(1, 3))
def test_continuations_are_tokens_that_followed_before(text: list[int], max_nodes: int, min_match: int) -> None:
    tokens, parents, _ = tree_of(SuffixAutomaton(text), max_nodes, min_match=min_match)
    assert len(tokens) == len(parents) <= max_nodes
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        assert 0 <= parent < len(paths)
        paths.append((*paths[parent], token))
    assert len(set(paths)) == len(paths), "siblings differ"
    for path in paths[1:]:
        before = [*text, *path[:-1]]
        # The shortest suffix that may predict was followed by the token somewhere in the text.
        assert occurrences(text, (*before[-min_match:], path[-1])) > 0


@settings(max_examples=60, deadline=None)
@given(texts)
def test_the_tree_of_a_smaller_budget_is_the_beginning_of_that_of_a_larger(text: list[int]) -> None:
    tokens, parents, _ = tree_of(SuffixAutomaton(text), 16)
    for size in range(16):
        assert tree_of(SuffixAutomaton(text), size)[:2] == (tokens[:size], parents[:size])


@settings(max_examples=60, deadline=None)
@given(texts.filter(bool))
def test_the_longest_suffix_that_occurred_before_predicts(text: list[int]) -> None:
    tokens, parents, _ = tree_of(SuffixAutomaton(text), 40, backoff=1)
    longest = next((size for size in range(len(text) - 1, 0, -1) if occurrences(text, tuple(text[-size:])) > 1), 0)
    # Several lengths with the same occurrences are one state, so any of them may be taken for the longest.
    followers = Counter(
        text[begin + longest]
        for begin in range(len(text) - longest)
        if text[begin : begin + longest] == text[-longest:]
    )
    children = [token for token, parent in zip(tokens, parents, strict=True) if parent == 0]
    assert set(children) == (set(followers) if longest else set())
    counts = [followers[token] for token in children]
    assert counts == sorted(counts, reverse=True)


def test_shorter_matches_share_the_escape_probability_of_a_longer_one() -> None:
    # After "1 2": 3; after "2" alone: 3 and 5.
    tokens, parents, values = tree_of(SuffixAutomaton([1, 2, 3, 9, 2, 5, 8, 1, 2]), 40)
    by_token = {token: value for token, parent, value in zip(tokens, parents, values, strict=True) if parent == 0}
    left = 0.75 / 1.75
    assert by_token == pytest.approx({3: 1 / 1.75, 5: left / 3.5})
