"""Retrieval: matches and continuations of a datastore against a naive search, its file, and the union of trees."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.continuations import Continuations, tree_of
from helpers.random_rows import random_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from stree.drafters import SuffixDrafter
from stree.retrieval import Datastore, Nodes, SuffixAutomaton, datastore, unite

VOCAB = 4
documents = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=20), min_size=1, max_size=4).filter(any)
contexts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


def followers(texts: list[list[int]], match: list[int]) -> Counter[tuple[int, ...]]:
    """Count what follows a string in some texts, to the end of the text; an occurrence at an end counts as ()."""
    size = len(match)
    return Counter(
        tuple(text[begin + size :])
        for text in texts
        for begin in range(len(text) - size + 1)
        if text[begin : begin + size] == match
    )


def longest_match(texts: list[list[int]], context: list[int]) -> int:
    return next((size for size in range(len(context), 0, -1) if followers(texts, context[-size:])), 0)


def paths(found: Continuations) -> list[tuple[int, ...]]:
    result: list[tuple[int, ...]] = [()]
    for token, parent in zip(found.tokens, found.parents, strict=True):
        assert 0 <= parent < len(result), "a parent comes before its children"
        result.append((*result[parent], token))
    return result[1:]


@settings(max_examples=60, deadline=None)
@given(documents, contexts, st.integers(1, 30))
def test_continuations_are_those_of_a_naive_search(texts: list[list[int]], context: list[int], most: int) -> None:
    found = tree_of(Datastore.build(texts, VOCAB), most, context, min_match=1)
    assert len(found.tokens) <= most
    drafted = paths(found)
    assert len(set(drafted)) == len(drafted), "siblings differ"
    length = longest_match(texts, context)
    known = followers(texts, context[-length:]) + followers(texts, context[-max(length // 2, 1) :]) if length else {}
    for path in drafted:
        assert any(tail[: len(path)] == path for tail in known), f"{path} never followed {context}"
    assert found.values == sorted(found.values, reverse=True)
    if length:
        first = Counter(tail[0] for tail in followers(texts, context[-length:]).elements() if tail)
        if first and most >= 30:
            assert {path[0] for path in drafted} >= set(first)
        if first:
            assert first[drafted[0][0]] == max(first.values()), "the most frequent continuation comes first"


def test_values_estimate_probabilities_and_no_match_runs_across_documents() -> None:
    found = tree_of(Datastore.build([[1, 2, 3], [1, 2, 3], [1, 2, 0]], VOCAB), 8, [1, 2])
    assert dict(zip(paths(found), found.values, strict=True)) == {
        (3,): pytest.approx(2 / 4),
        (0,): pytest.approx(1 / 4),
    }
    assert tree_of(Datastore.build([[1, 2], [3, 1]], VOCAB), 8, [1, 2], min_match=1).tokens == []


def test_a_loaded_store_gives_the_trees_of_the_built_one(tmp_path: Path) -> None:
    generator = random.Random(1)
    texts = [[generator.randrange(9) for _ in range(generator.randrange(60))] for _ in range(7)]
    built = Datastore.build(texts, 9, tokenizer="abc")
    built.save(tmp_path / "some.store")
    loaded = Datastore.load(tmp_path / "some.store")
    assert (loaded.vocab_size, loaded.tokenizer, loaded.num_tokens) == (9, "abc", built.num_tokens)
    for text in texts:
        for end in range(1, len(text)):
            assert tree_of(loaded, 12, text[:end]) == tree_of(built, 12, text[:end])
    assert [path.name for path in tmp_path.iterdir()] == ["some.store"]
    loaded.save(tmp_path / "again.store")
    assert tree_of(Datastore.load(tmp_path / "again.store"), 12, texts[1][:9]) == tree_of(built, 12, texts[1][:9])


@pytest.mark.parametrize(
    ("texts", "most", "message"),
    [
        ([[], []], 9, "a datastore needs at least one token, got none"),
        ([[1], [3, 4]], 9, "document 1 has token 4, outside the vocabulary of 4"),
        ([[-1]], 9, "document 0 has token -1, outside the vocabulary of 4"),
        ([[1, 2], [3]], 3, "the documents exceed max_tokens 3"),
    ],
)
def test_texts_that_make_no_store_are_refused(texts: list[list[int]], most: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Datastore.build(texts, 4, max_tokens=most)


@pytest.mark.parametrize("document", [[1.5], "ab", 1, [[1, 2]], [1, None], [True]])
def test_what_is_no_list_of_tokens_makes_no_store(document: Any) -> None:
    with pytest.raises(TypeError, match="document 1 must be a list of token ids, integers, got "):
        Datastore.build([[1], document], 4)


def test_files_that_hold_no_store_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no datastore can be read at .*missing.store"):
        Datastore.load(tmp_path / "missing.store")
    whole, cut = tmp_path / "whole.store", tmp_path / "cut.store"
    Datastore.build([[1, 2, 3]], 4).save(whole)
    for size in (0, 60, whole.stat().st_size - 1):
        cut.write_bytes(whole.read_bytes()[:size])
        with pytest.raises(ValueError, match=r"no datastore can be read at .*cut.store"):
            Datastore.load(cut)
    save_file({"weight": np.zeros(3, dtype=np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors' is no datastore of format stree-datastore-2, got None"):
        Datastore.load(tmp_path / "model.safetensors")


def test_a_damaged_store_reads_and_drafts_nothing_outside_its_text_and_vocabulary(tmp_path: Path) -> None:
    text = [1, 2, 3, 1, 2, 3, 1, 2]
    whole = Datastore.build([text], 4)
    assert 3 in tree_of(whole, 8, text).tokens
    whole.save(tmp_path / "whole")
    parts = load_file(tmp_path / "whole")
    damaged = bytearray((tmp_path / "whole").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    with pytest.raises(ValueError, match="damaged' is damaged: its checksum differs; build it anew"):
        Datastore.load(tmp_path / "damaged")

    def changed(metadata: dict[str, str] | None = None, **changes: np.ndarray) -> Datastore:
        held = parts | changes
        checksum = f"{zlib.crc32(held['order'].tobytes(), zlib.crc32(held['text'].tobytes())):08x}"
        right = {"format": "stree-datastore-2", "vocab_size": "4", "checksum": checksum}
        save_file(held, tmp_path / "other.store", metadata=right if metadata is None else metadata)
        return Datastore.load(tmp_path / "other.store")

    tree_of(changed(order=np.full_like(parts["order"], 2**31)), 8, text)  # nothing outside is read
    wrong = parts["text"].view(">u4").copy()
    wrong[wrong == 3] = 70000
    assert all(token < 4 for token in tree_of(changed(text=wrong.view(np.uint8)), 8, text).tokens)
    for options in (
        {"order": np.array(1, dtype=np.uint32)},
        {"order": parts["order"].astype(np.int64)},
        {"text": parts["text"].astype(np.int8)},
        {"metadata": {"format": "stree-datastore-2"}},
    ):
        with pytest.raises(ValueError, match="other.store' is no datastore of format"):
            changed(**options)


def test_concurrent_writers_leave_one_complete_store(tmp_path: Path) -> None:
    stores = [Datastore.build([[number] * (4000 + number)], 9) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda store: [store.save(tmp_path / "some.store") for _ in range(5)], stores))
    found = Datastore.load(tmp_path / "some.store")
    assert found.num_tokens in {store.num_tokens for store in stores}
    assert [path.name for path in tmp_path.iterdir()] == ["some.store"]


def merged(first: Continuations, second: Continuations, max_nodes: int) -> Continuations:
    """Unite two trees, given as lists."""
    trees = [Nodes.empty(len(tree.tokens)) for tree in (first, second)]
    for nodes, tree in zip(trees, (first, second), strict=True):
        nodes.tokens[1:], nodes.parents[1:], nodes.values[1:] = tree
    out = Nodes.empty(max_nodes)
    return Continuations.of(out, unite(trees[0], len(trees[0].tokens), trees[1], len(trees[1].tokens), out))


def test_the_union_of_two_trees_keeps_the_best_nodes_of_both() -> None:
    first = Continuations([5, 6, 7], [0, 1, 0], [0.9, 0.5, 0.1])
    second = Continuations([5, 8, 9], [0, 1, 0], [0.4, 0.3, 0.2])
    assert merged(first, second, 9) == Continuations([5, 6, 8, 9, 7], [0, 1, 1, 0, 0], [0.9, 0.5, 0.3, 0.2, 0.1])
    assert merged(first, second, 2) == Continuations([5, 6], [0, 1], [0.9, 0.5])


@settings(max_examples=100, deadline=None)
@given(documents, contexts, st.integers(0, 12))
def test_the_union_has_every_path_of_both_up_to_its_size(texts: list[list[int]], context: list[int], most: int) -> None:
    own = tree_of(SuffixAutomaton(context), most)
    other = tree_of(Datastore.build(texts, VOCAB), most, context)
    union = merged(own, other, most)
    whole = set(paths(own)) | set(paths(other))
    assert len(union.tokens) == min(most, len(whole))
    assert set(paths(union)) <= whole
    assert union.values == sorted(union.values, reverse=True)


def test_the_drafter_uses_the_datastore_and_the_text() -> None:
    run = SuffixDrafter(Datastore.build([[1, 2, 3, 4, 5]], 10)).start(10, [[7, 8, 9, 7], [1]], random_rows(2))
    tree = run.propose(torch.tensor([8, 2]), None, 4).tree
    assert tree.tokens[0, :3].tolist() == [8, 9, 7]  # from the text
    assert tree.tokens[1].tolist() == [2, 3, 4, 5]  # from the store, across prompt and pending token


def test_a_store_of_another_vocabulary_is_refused() -> None:
    message = "datastore and target must share one vocabulary: the datastore has 12 tokens, the target 10"
    with pytest.raises(ValueError, match=message):
        SuffixDrafter(Datastore.build([[1]], 12)).start(10, [[1]], random_rows(1))
    SuffixDrafter(Datastore.build([[1]], 10)).start(12, [[1]], random_rows(1))  # a padded head


def test_only_a_sample_of_many_occurrences_is_read() -> None:
    found = tree_of(Datastore.build([[1, 2, 3] * 500], 4), 3, [1, 2])
    assert found.tokens == [3, 1, 2]
    seen = datastore.MOST_OCCURRENCES
    assert found.values[0] == pytest.approx(seen / (seen + 1))  # of 500
