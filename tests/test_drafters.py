"""Drafters: what they propose, how many calls it takes, and that their own state keeps step with the text."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from enumeration import TableLaw, TableLM
from helpers.tiny_models import (
    TOLERANCE,
    VOCAB,
    as_commit,
    extended,
    fresh_logits,
    grafted,
    path_to,
    random_path,
    random_texts,
    real_nodes,
    relative_error,
    right_padded,
    tiny_model,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from stree.drafters import FusedDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import Chain, DySpec, Growth, Static
from stree.models.state import DecodeState
from stree.models.tree_lm import TreeLM
from stree.retrieval import SuffixAutomaton
from stree.sampling import Random, Sampling
from stree.tree import TokenTree
from stree.verify import Acceptance, accept

GROWTHS: dict[str, Growth] = {
    "chain": Chain(3),
    "static": Static([2, 2]),
    "layers": DySpec(depth=2),
    "heap": DySpec(form="heap"),
}
texts = st.lists(st.integers(0, 3), max_size=30)


def random_rows(batch: int) -> Random:
    return Random(0, torch.arange(batch), torch.zeros(batch, dtype=torch.long))


def standing_still(batch: int) -> Acceptance:
    return Acceptance(
        torch.zeros(batch, 1, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32), torch.zeros(batch).long()
    )


class Loop:
    """The generation loop by hand, on the host's texts; stops rows at random, as finished sequences stand still."""

    def __init__(
        self, target: TreeLM, drafter: Any, prompts: list[list[int]], sampling: Sampling, growth: Growth
    ) -> None:
        self.target, self.sampling, self.growth = target, sampling, growth.bind(sampling)
        self.texts = [list(prompt) for prompt in prompts]
        self.state = target.new_state(len(prompts), 400, 16)
        tokens, lengths = right_padded(prompts)
        self.rng = random_rows(len(prompts)).at(lengths)
        self.run = drafter.start(target.vocab_size, prompts, self.rng)
        self.pending = target.prefill(self.state, tokens, lengths).argmax(-1)
        self.accepted: list[list[int]] = []
        self.calls: list[int] = []

    def step(self, is_live: list[bool], budget: int = 8) -> None:
        draft = self.run.propose(self.pending, self.growth, budget)
        self.calls.append(draft.num_calls)
        logits = self.target.verify(self.state, draft.tree)
        self.rng = self.rng.at(self.state.lengths.long())
        accepted = accept(draft.tree, logits, self.sampling, self.rng, draft.laws)
        lengths = accepted.path_lengths * torch.tensor(is_live)
        accepted = Acceptance(accepted.path, lengths, accepted.next_token)
        self.target.commit(self.state, accepted.path, lengths)
        self.run.observe(accepted)
        for row, length in enumerate(lengths.tolist()):
            path = accepted.path[row, :length].long()
            self.texts[row] += draft.tree.tokens[row, path].tolist()
            if length:
                self.pending[row] = accepted.next_token[row]
        self.accepted.append((lengths - 1).tolist())


def state_error(loop: Loop, model: Any) -> float:
    """Compare the drafter's next logits with those of a fresh forward of all emitted text."""
    run = loop.run
    grown = loop.run.propose(loop.pending, Chain(1).bind(Sampling()), 2)  # runs [leaf, pending]
    errors = []
    for row, text in enumerate(loop.texts):
        assert int(run._state.lengths[row] + run._has_leaf[row]) == len(text)
        fresh = fresh_logits(model, [*text, int(loop.pending[row])])[-1]
        assert int(grown.tree.tokens[row, 1]) == int(fresh.argmax())
        parents = torch.stack([-torch.ones_like(run._has_leaf, dtype=torch.int32), run._has_leaf.int() - 1], 1)
        step = TokenTree.unchecked(run._made.columns[:, :2], parents)
        logits = run._lm.verify(run._state, step)[row, int(run._has_leaf[row])]
        errors.append(relative_error(logits, fresh))
    run.observe(standing_still(len(loop.texts)))
    return max(errors)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("family", ["mamba2", "bamba", "llama"])
def test_the_draft_state_keeps_step_with_the_text(family: str, growth: str, temperature: float) -> None:
    rng = random.Random(0)
    model = tiny_model(family)
    prompts = random_texts(rng, [5, 1, 9])
    loop = Loop(grafted(model), ModelDrafter(grafted(model)), prompts, Sampling(temperature), GROWTHS[growth])
    had_leaf = []
    for _ in range(12):
        draft = loop.run.propose(loop.pending, loop.growth, 8)
        # Any path may be accepted, and finished sequences stand still.
        last = [path_to(draft.tree, row, real_nodes(draft.tree, row)[-1]) for row in range(3)]
        paths = [rng.choice([random_path(rng, draft.tree, row), last[row], []]) for row in (0, 1)] + [last[2]]
        path, lengths = as_commit(paths)
        following = torch.tensor([rng.randrange(VOCAB) for _ in range(3)])
        loop.run.observe(Acceptance(path, lengths, following))
        loop.texts = extended(loop.texts, draft.tree, paths)
        loop.pending = torch.where(lengths > 0, following, loop.pending)
        had_leaf += loop.run._has_leaf.tolist()
    assert True in had_leaf
    assert False in had_leaf
    assert state_error(loop, model) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_draft_call_a_layer_also_when_the_accepted_leaf_was_never_run(growth: str) -> None:
    model = tiny_model("mamba2")
    prompts = random_texts(random.Random(1), [4, 6])
    loop = Loop(grafted(model), ModelDrafter(grafted(model)), prompts, Sampling(), GROWTHS[growth])
    # A heap's last node is seldom accepted, so its budget is one node beside the root.
    budget, depth = {"chain": (8, 3), "static": (8, 2), "layers": (8, 2), "heap": (2, 1)}[growth]
    had_leaf = []
    for _ in range(5):
        loop.step([True, True], budget)
        had_leaf += loop.run._has_leaf.tolist()
    assert any(had_leaf), "the target is its own drafter, so whole paths are accepted"
    assert loop.calls == [depth] * 5


def test_the_prompts_are_not_run_until_a_tree_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("bamba")
    draft_lm, lengths = grafted(model), []

    def prefill(state: DecodeState, tokens: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        lengths.append(sizes.tolist())
        return TreeLM.prefill(draft_lm, state, tokens, sizes)

    monkeypatch.setattr(draft_lm, "prefill", prefill)
    loop = Loop(grafted(model), ModelDrafter(draft_lm), random_texts(random.Random(2), [4, 6]), Sampling(), Chain(3))
    for is_live in ([True, True], [True, False], [True, True]):
        loop.step(is_live, 1)
    assert not lengths
    loop.run.propose(loop.pending, Chain(3).bind(Sampling()), 4)
    loop.run.observe(standing_still(2))
    assert lengths == [[4, 6]]
    assert state_error(loop, model) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("family", ["mamba2", "llama"])
def test_the_draft_state_grows_when_text_or_tree_outgrow_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    lm = grafted(model)
    new_state = TreeLM.new_state

    def small_state(lm: TreeLM, batch_size: int, max_length: int, max_nodes: int) -> DecodeState:
        return new_state(lm, batch_size, 12, 3)

    with monkeypatch.context() as patch:
        loop = Loop(grafted(model), NoDrafter(), [[5, 6, 7], [8]], Sampling(), Chain(4))
        patch.setattr(TreeLM, "new_state", small_state)
        loop.run = ModelDrafter(lm).start(VOCAB, [[5, 6, 7], [8]], loop.rng)
        loop.run._begin()  # before a tree does, when states are of their own size again
    assert (loop.run._state.max_length, loop.run._state.max_nodes) == (12, 3)
    for _ in range(14):
        loop.step([True, True])
    assert loop.run._state.max_length > 60
    assert loop.run._state.max_nodes == 5, "the leaf, the root and all drafted nodes but the last"
    assert all(step == [4, 4] for step in loop.accepted), "its own drafter is always right"
    assert state_error(loop, model) < TOLERANCE[torch.float32]


def test_a_longer_prompt_than_the_draft_state_has_room_for_may_take_a_row() -> None:
    lm = grafted(tiny_model("mamba2"))
    run = ModelDrafter(lm).start(VOCAB, [[5, 6, 7], [8]], random_rows(2))  # nobody says how long texts become
    run.propose(torch.tensor([1, 2]), Chain(2).bind(Sampling()), 3)
    run.observe(standing_still(2))
    run.admit(1, [3] * (run._state.max_length + 1))
    run.propose(torch.tensor([1, 2]), Chain(2).bind(Sampling()), 3)
    assert run._state.lengths.tolist() == [3, 1031]


def test_draft_numbers_are_keyed_by_the_position_of_the_root() -> None:
    # Whether or not a leaf waits to be run, a draft at one position draws with the same numbers.
    law = TableLaw.random(6, 0)
    growth = Static([2, 1]).bind(Sampling(1.0))
    fresh = ModelDrafter(TableLM(law).as_lm()).start(6, [[1, 2, 3]], random_rows(1))
    later = ModelDrafter(TableLM(law).as_lm()).start(6, [[1]], random_rows(1))
    draft = later.propose(torch.tensor([2]), Static([-1, 0]).bind(Sampling(1.0)), 2)
    token = draft.tree.tokens[0, 1]
    later.observe(
        Acceptance(torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32), token[None])
    )
    assert later._has_leaf.tolist() == [True]
    expected = fresh.propose(token[None], growth, 8).tree
    actual = later.propose(token[None], growth, 8).tree
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.parents, expected.parents)
    assert torch.equal(actual.ancestor_mask, expected.ancestor_mask)


def test_a_drafter_of_another_vocabulary_is_refused_by_both_sizes() -> None:
    drafter = ModelDrafter(grafted(tiny_model("mamba2", vocab_size=64)))
    with pytest.raises(
        ValueError, match="drafter and target must share one vocabulary: the drafter has 64 tokens, the target 97"
    ):
        drafter.start(VOCAB, [[1]], random_rows(1))


def test_a_drafter_of_what_it_cannot_draft_with_is_refused() -> None:
    model: Any = tiny_model("mamba2")
    path: Any = "texts.store"
    with pytest.raises(TypeError, match=r"lm must be an object such as stree\.TreeLM\(model\), got Mamba2ForCausalLM"):
        ModelDrafter(model)
    with pytest.raises(TypeError, match=r"datastore must be an object such as .*, got 'texts\.store'"):
        SuffixDrafter(path)
    with pytest.raises(TypeError, match=r"FusedDrafter needs drafters, such as ModelDrafter\(lm\), got TreeLM"):
        FusedDrafter(grafted(model), SuffixDrafter())  # type: ignore[arg-type]


def test_no_drafter_proposes_roots() -> None:
    draft = NoDrafter().start(10, [[1], [2, 3]], random_rows(2)).propose(torch.tensor([4, 5]), None, 16)
    assert draft.tree.tokens.tolist() == [[4], [5]]
    assert (draft.laws, draft.max_depth, draft.num_calls) == (None, 0, 0)


def occurrences(text: list[int], part: tuple[int, ...]) -> int:
    return sum(tuple(text[begin : begin + len(part)]) == part for begin in range(len(text) - len(part) + 1))


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(texts, st.integers(0, 12), st.integers(1, 3))
def test_continuations_are_tokens_that_followed_before(text: list[int], max_nodes: int, min_match: int) -> None:
    tokens, parents, _ = SuffixAutomaton(text).tree(max_nodes, min_match)
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


@settings(max_examples=100, deadline=None)
@given(texts)
def test_the_tree_of_a_smaller_budget_is_the_beginning_of_that_of_a_larger(text: list[int]) -> None:
    tokens, parents, _ = SuffixAutomaton(text).tree(16)
    for size in range(16):
        assert SuffixAutomaton(text).tree(size)[:2] == (tokens[:size], parents[:size])


def test_the_most_frequent_continuation_stands_first() -> None:
    # After "1 2": 3 twice, 4 once; after "2" alone also 5.
    text = [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 2, 5, 6, 1, 2]
    tokens, parents, _ = SuffixAutomaton(text).tree(40)
    children = [token for token, parent in zip(tokens, parents, strict=True) if parent == 0]
    assert children[:2] == [3, 4]
    assert 5 in children
    assert tokens[0] == 3


@settings(max_examples=100, deadline=None)
@given(texts.filter(bool))
def test_the_longest_suffix_that_occurred_before_predicts(text: list[int]) -> None:
    tokens, parents, _ = SuffixAutomaton(text).tree(40, backoff=1)
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


def test_suffix_trees_of_a_batch_are_padded_and_independent() -> None:
    prompts = [[1, 2, 3, 1, 2, 3, 1], [4, 5], [7, 7, 7, 7]]
    pending = torch.tensor([2, 6, 7])
    draft = SuffixDrafter().start(10, prompts, random_rows(3)).propose(pending, None, 6)
    draft.tree.check()
    assert draft.laws is None
    assert draft.num_calls == 0
    assert draft.max_depth == int(draft.tree.depths.max())
    assert int(draft.tree.num_nodes[1]) == 1
    assert draft.tree.tokens.shape[1] <= 6
    for row, prompt in enumerate(prompts):
        alone = SuffixDrafter().start(10, [prompt], random_rows(1)).propose(pending[row : row + 1], None, 6).tree
        width = alone.tokens.shape[1]
        assert torch.equal(draft.tree.tokens[row, :width], alone.tokens[0])
        assert torch.equal(draft.tree.parents[row, :width], alone.parents[0])
        assert (draft.tree.parents[row, width:] == -1).all()


def test_the_suffix_drafter_reads_what_was_accepted_and_no_token_twice() -> None:
    run = SuffixDrafter().start(10, [[1, 2, 3, 4, 1], [5, 6, 5]], random_rows(2))
    pending = torch.tensor([2, 6])
    texts = [[1, 2, 3, 4, 1, 2], [5, 6, 5, 6]]
    for _ in range(3):
        tree = run.propose(pending, None, 4).tree
        for row, automaton in enumerate(run._automata):
            assert automaton.tree(3) == SuffixAutomaton(texts[row]).tree(3)
        assert tree.tokens[0, :3].tolist() == [2, 3, 4]
        run.observe(standing_still(2))  # nothing happens: the same tokens are pending again
    path = torch.tensor([[0, 1, 2], [0, -1, -1]], dtype=torch.int32)
    run.observe(Acceptance(path, torch.tensor([3, 0], dtype=torch.int32), torch.tensor([9, 9])))
    run.propose(torch.tensor([9, 6]), None, 4)
    expected = [[*texts[0], 3, 4, 9], texts[1]]
    for row, automaton in enumerate(run._automata):
        for size in (1, 2, 3):
            for begin in range(len(expected[row]) - size + 1):
                part = tuple(expected[row][begin : begin + size])
                assert automaton.count(part) == occurrences(expected[row], part)


def test_the_longer_a_match_the_more_its_only_continuation_is_believed() -> None:
    for length in (1, 2, 6):
        match = list(range(length))
        chances = [1 / (1 + 1.5 / size) for size in (length, length + 1)]
        found = SuffixAutomaton([8, *match, 9, 7, *match]).tree(2).values
        assert found == pytest.approx([chances[0], chances[0] * chances[1]])


def test_what_a_match_leaves_open_is_shared_out_by_shorter_ones() -> None:
    # After "1 2": 3; after "2" alone: 3 and 5.
    tokens, parents, values = SuffixAutomaton([1, 2, 3, 9, 2, 5, 8, 1, 2]).tree(40)
    by_token = {token: value for token, parent, value in zip(tokens, parents, values, strict=True) if parent == 0}
    left = 0.75 / 1.75
    assert by_token == pytest.approx({3: 1 / 1.75, 5: left / 3.5})
