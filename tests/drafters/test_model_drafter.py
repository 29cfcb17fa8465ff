"""The model drafter: what it proposes, how many calls it takes, and that its own state follows the text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.growth_drafts import table_drafter
from helpers.on_device import treat_as_on_device
from helpers.outcomes import random_rows
from helpers.table_models import TableModel
from helpers.tiny_models import (
    TOLERANCE,
    VOCAB,
    as_commit,
    extended,
    fresh_logits,
    patched,
    path_to,
    random_path,
    random_texts,
    real_nodes,
    relative_error,
    right_padded,
    tiny_model,
)

from stree.drafters import FusedDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import Chain, DySpec, Growth, Static
from stree.models.state import DecodeState
from stree.models.tree_lm import TreeLM
from stree.sampling import Sampling
from stree.verify import Acceptance, accept

GROWTHS: dict[str, Growth] = {
    "chain": Chain(3),
    "static": Static([2, 2]),
    "layers": DySpec(depth=2),
    "heap": DySpec(form="heap"),
}


def nothing_accepted(batch: int) -> Acceptance:
    return Acceptance(
        torch.zeros(batch, 1, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32), torch.zeros(batch).long()
    )


class Loop:
    """The generation loop by hand, on the host's texts; stops rows at random, as of finished sequences nothing is."""

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
        accepted = accept(draft.tree, logits, self.sampling, self.rng, draft.probs)
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


def draft_error(loop: Loop, model: Any) -> float:
    """Compare the distribution that the drafter draws from next with that of a fresh forward of all emitted text."""
    draft = loop.run.propose(loop.pending, Chain(1).bind(Sampling(1.0)), 2)
    assert draft.probs is not None
    errors = []
    for row, text in enumerate(loop.texts):
        fresh = fresh_logits(model, [*text, int(loop.pending[row])])[-1].softmax(-1)
        errors.append(relative_error(draft.probs.probs[row, 0], fresh))
    loop.run.observe(nothing_accepted(len(loop.texts)))
    return max(errors)


@pytest.mark.parametrize(
    ("family", "growth", "temperature"),
    [
        ("mamba2", "chain", 0.0),
        ("mamba2", "heap", 1.0),
        ("bamba", "static", 1.0),
        ("bamba", "layers", 0.0),
        ("llama", "layers", 1.0),
    ],
)
def test_the_draft_state_keeps_step_with_the_text(family: str, growth: str, temperature: float) -> None:
    rng = random.Random(0)
    model = tiny_model(family)
    prompts = random_texts(rng, [5, 1, 9])
    loop = Loop(patched(model), ModelDrafter(patched(model)), prompts, Sampling(temperature), GROWTHS[growth])
    for _ in range(12):
        draft = loop.run.propose(loop.pending, loop.growth, 8)
        # Any path may be accepted, and of finished sequences nothing is.
        last = [path_to(draft.tree, row, real_nodes(draft.tree, row)[-1]) for row in range(3)]
        paths = [rng.choice([random_path(rng, draft.tree, row), last[row], []]) for row in (0, 1)] + [last[2]]
        path, lengths = as_commit(paths)
        following = torch.tensor([rng.randrange(VOCAB) for _ in range(3)])
        loop.run.observe(Acceptance(path, lengths, following))
        loop.texts = extended(loop.texts, draft.tree, paths)
        loop.pending = torch.where(lengths > 0, following, loop.pending)
    assert draft_error(loop, model) < 20 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("growth", GROWTHS)
def test_a_draft_call_a_layer_also_when_the_accepted_leaf_was_never_run(growth: str) -> None:
    model = tiny_model("mamba2")
    prompts = random_texts(random.Random(1), [4, 6])
    loop = Loop(patched(model), ModelDrafter(patched(model)), prompts, Sampling(), GROWTHS[growth])
    # A heap's last node is seldom accepted, so its budget is one node beside the root.
    budget, depth = {"chain": (8, 3), "static": (8, 2), "layers": (8, 2), "heap": (2, 1)}[growth]
    for _ in range(5):
        loop.step([True, True], budget)
    assert loop.calls == [depth] * 5


def test_the_prompts_are_not_run_until_a_tree_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("bamba")
    draft_lm, lengths = patched(model), []

    def prefill(state: DecodeState, tokens: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        lengths.append(sizes.tolist())
        return TreeLM.prefill(draft_lm, state, tokens, sizes)

    monkeypatch.setattr(draft_lm, "prefill", prefill)
    loop = Loop(patched(model), ModelDrafter(draft_lm), random_texts(random.Random(2), [4, 6]), Sampling(), Chain(3))
    for is_live in ([True, True], [True, False], [True, True]):
        loop.step(is_live, 1)
    assert not lengths
    loop.run.propose(loop.pending, Chain(3).bind(Sampling()), 4)
    loop.run.observe(nothing_accepted(2))
    assert lengths == [[4, 6]]
    assert draft_error(loop, model) < 20 * TOLERANCE[torch.float32]


def test_texts_and_trees_that_outgrow_the_draft_state() -> None:
    model = tiny_model("bamba")
    loop = Loop(patched(model), ModelDrafter(patched(model)), [[5, 6, 7], [8]], Sampling(), Chain(2))
    loop.step([True, True])  # neither the length of texts nor the size of trees is known
    loop.growth = Chain(6).bind(Sampling())
    for _ in range(2):
        loop.step([True, True])
    assert loop.accepted[1:] == [[6, 6]] * 2, "its own drafter is always right"
    loop.texts[1] = [3] * 1100
    loop.run.admit(1, loop.texts[1])
    assert draft_error(loop, model) < 20 * TOLERANCE[torch.float32]


def test_draft_numbers_are_keyed_by_the_position_of_the_root() -> None:
    # Whether or not an accepted leaf has been run, a draft at one position draws with the same numbers.
    dist = TableModel.random(6, 0)
    growth = Static([2, 1]).bind(Sampling(1.0))
    fresh = table_drafter(dist).start(6, [[1, 2, 3]], random_rows(1))
    later = table_drafter(dist).start(6, [[1]], random_rows(1))
    draft = later.propose(torch.tensor([2]), Static([-1, 0]).bind(Sampling(1.0)), 2)
    token = draft.tree.tokens[0, 1]
    later.observe(
        Acceptance(torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32), token[None])
    )
    expected = fresh.propose(token[None], growth, 8).tree
    actual = later.propose(token[None], growth, 8).tree
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.parents, expected.parents)
    assert torch.equal(actual.ancestor_mask, expected.ancestor_mask)


def test_a_drafter_of_another_vocabulary_is_refused_by_both_sizes() -> None:
    drafter = ModelDrafter(patched(tiny_model("mamba2", vocab_size=64)))
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
        FusedDrafter(patched(model), SuffixDrafter())  # type: ignore[arg-type]


def test_no_drafter_proposes_roots() -> None:
    draft = NoDrafter().start(10, [[1], [2, 3]], random_rows(2)).propose(torch.tensor([4, 5]), None, 16)
    assert draft.tree.tokens.tolist() == [[4], [5]]
    assert (draft.probs, draft.max_depth, draft.num_calls) == (None, 0, 0)


def check_next_tokens(lm: TreeLM, draft: Any, texts: Sequence[Sequence[int]], pending: Sequence[int]) -> None:
    for row, text in enumerate(texts):
        expected = int(fresh_logits(lm.model, [*text, pending[row]])[-1].argmax())
        assert int(draft.tree.tokens[row, 1]) == expected


def test_an_unused_model_catches_up_on_what_was_emitted() -> None:
    lm, generator = patched(tiny_model("mamba2")), random.Random(3)
    texts, pending = [[3, 1, 4, 1, 5], [9, 2, 6]], [7, 8]
    run = ModelDrafter(lm).start(lm.vocab_size, texts, random_rows(2).at(torch.tensor([5, 3])))
    for step in range(40):
        given = torch.tensor(pending)
        draft = run.propose(given, Chain(2).bind(Sampling()), 1)
        assert draft.tree.tokens.tolist() == [[pending[0]], [pending[1]]] and draft.num_calls == 0
        given.zero_()  # as the loop does, which writes the next ones in their place
        taken = [1, step % 3 != 0]  # the second sequence is inactive now and then
        for row, length in enumerate(taken):
            if length:
                texts[row] = [*texts[row], pending[row]]
                pending[row] = generator.randrange(lm.vocab_size)
        path = torch.zeros(2, 1, dtype=torch.int32)
        run.observe(Acceptance(path, torch.tensor(taken, dtype=torch.int32), torch.tensor(pending)))
        if step % 37 == 0:  # after one token, after some, after more than a chain holds
            draft = run.propose(torch.tensor(pending), Chain(1).bind(Sampling()), 2)
            assert draft.num_calls == (3 if step else 2), "37 tokens are two chains to catch up on"
            check_next_tokens(lm, draft, texts, pending)
            run.observe(Acceptance(path, torch.zeros(2, dtype=torch.int32), torch.tensor(pending)))


@pytest.mark.parametrize("on_device", [False, True])
def test_catch_up_tokens_of_a_text_are_not_run_into_the_next_one_of_its_row(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, texts = patched(tiny_model("mamba2")), [[3, 1, 4, 1, 5], [9, 2, 6]]
    treat_as_on_device(monkeypatch, host_can_read=not on_device)  # what a device does, on the CPU
    run = ModelDrafter(lm).start(lm.vocab_size, texts, random_rows(2).at(torch.tensor([5, 3])))
    path, lengths = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for pending, following in (([7, 8], [1, 2]), ([1, 2], [5, 6])):
        run.propose(torch.tensor(pending), None, 1)
        run.observe(Acceptance(path, lengths, torch.tensor(following)))
    run.admit(0, [6, 5, 4])
    draft = run.propose(torch.tensor([3, 6]), Chain(1).bind(Sampling()), 2)
    check_next_tokens(lm, draft, [[6, 5, 4], [9, 2, 6, 8, 2]], [3, 6])
    run.observe(Acceptance(path, lengths * 0, torch.tensor([3, 6])))
    run.propose(torch.tensor([3, 6]), None, 1)
    run.observe(Acceptance(path, lengths, torch.tensor([5, 5])))
    run.restart([[2, 9], [1, 8, 4]])
    draft = run.propose(torch.tensor([3, 6]), Chain(1).bind(Sampling()), 2)
    check_next_tokens(lm, draft, [[2, 9], [1, 8, 4]], [3, 6])


def test_a_fused_drafter_has_the_models_of_its_parts() -> None:
    model = ModelDrafter(patched(tiny_model("mamba2")))
    fused = FusedDrafter(SuffixDrafter(), model, least_value=0.3, least_share=0.2).with_model(lambda lm: lm)
    assert (fused.least_value, fused.least_share, list(fused.models)) == (0.3, 0.2, [model.lm])
