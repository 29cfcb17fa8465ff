"""The model drafter: what it proposes, how many calls it takes, and that its own state follows the text."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.draft_steps import DraftSteps
from helpers.on_device import treat_as_on_device
from helpers.random_rows import random_rows
from helpers.tiny_family_models import EVERY_STATE, family_model, matrix
from helpers.tiny_models import TOLERANCE, VOCAB, patched, random_texts, tiny_model

import stree
from stree.drafters import FusedDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import Chain, DySpec, Growth, Static
from stree.models.tree_lm import TreeLM

EXACT = 20 * TOLERANCE[torch.float32]
GROWTHS: dict[str, tuple[Growth, int]] = {  # and most draft calls of a tree of 8 nodes
    "chain": (Chain(3), 3),
    "static": (Static([2, 2]), 2),
    "layers": (DySpec(depth=2), 2),
    "heap": (DySpec(form="heap"), 7),
}


@pytest.mark.parametrize(
    ("family", "name", "temperature"),
    [
        ("mamba2", "chain", 0.0),
        ("mamba2", "heap", 1.0),
        ("bamba", "static", 1.0),
        ("bamba", "layers", 0.0),
        ("llama", "layers", 1.0),
    ],
)
def test_the_draft_state_follows_the_text(family: str, name: str, temperature: float) -> None:
    model, (growth, most_calls) = tiny_model(family), GROWTHS[name]
    texts = random_texts(random.Random(0), [5, 1, 9])
    steps = DraftSteps(ModelDrafter(patched(model)), VOCAB, texts, growth, temperature)
    for _ in range(12):
        # The last token of the text, which was run or not, is run with the next root.
        assert steps.step().num_calls <= most_calls
    assert steps.error(model) < EXACT


@pytest.mark.parametrize("family", matrix(fast=EVERY_STATE))
def test_texts_of_one_token_and_of_many_begin_together(family: str) -> None:
    lm = stree.TreeLM(model := family_model(family))
    texts = random_texts(random.Random(2), [1, 2, 40])
    steps = DraftSteps(ModelDrafter(lm), lm.vocab_size, texts, Chain(2))
    assert steps.error(model) < EXACT
    steps.step()
    for row, text in ((2, [3]), (0, [4, 8, 1])):
        steps.texts[row] = text
        steps.run.begin([row], [text])
    assert steps.error(model) < EXACT
    steps.texts = [[7], [8], [9]]
    steps.run.begin(range(len(steps.texts)), steps.texts)
    assert steps.error(model) < EXACT


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("family", ["mamba2", "bamba"])
def test_deferred_commits_follow_the_text_over_steps_that_draft_nothing(
    family: str, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch, host_can_read=not on_device)
    model = tiny_model(family)
    lm = patched(model)
    lm.defers_commit = True
    steps = DraftSteps(ModelDrafter(lm), VOCAB, random_texts(random.Random(3), [5, 1, 9]), Static([2, 2]), 1.0)
    for _ in range(3):
        for budget in (8, 1, 1, 8):
            steps.step(budget)
        assert steps.error(model) < EXACT


def test_an_unused_model_catches_up_on_what_was_emitted() -> None:
    model = tiny_model("mamba2")
    steps = DraftSteps(ModelDrafter(patched(model)), VOCAB, random_texts(random.Random(1), [5, 3]), Chain(2))
    for step in range(80):
        assert steps.step(budget=1).num_calls == 0
        if step % 37 == 0:  # after one token, after some, after more than a chain holds
            assert steps.error(model) < EXACT


@pytest.mark.parametrize("family", ["mamba2", "bamba"])
def test_a_prompt_is_run_with_its_first_tree(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = patched(model := tiny_model(family))
    steps = DraftSteps(ModelDrafter(lm), VOCAB, [[5, 1, 9], [2, 7]], Chain(2))
    steps.step(8)
    steps.texts[0] = random_texts(random.Random(4), [12])[0]
    with monkeypatch.context() as patch:
        for name in ("prefill", "prefill_row", "verify"):
            patch.setattr(TreeLM, name, None, raising=False)
        steps.run.begin([0], [steps.texts[0]])
        steps.step(1)
        steps.run = steps.run.select(torch.tensor([1, 0]), random_rows(2))
    steps.texts.reverse()
    steps.pending = steps.pending.flip(0)
    assert steps.error(model) < EXACT


@pytest.mark.parametrize("on_device", [False, True])
def test_no_token_of_a_text_is_run_into_the_next_one_of_its_row(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch, host_can_read=not on_device)  # what a device does, on the CPU
    model = tiny_model("mamba2")
    steps = DraftSteps(ModelDrafter(patched(model)), VOCAB, [[3, 1, 4, 1, 5], [9, 2, 6]], Chain(2))
    for budget in (1, 8):
        steps.step(budget)
        steps.step(1)
        steps.texts[0] = [6, 5, 4]
        steps.run.begin([0], [steps.texts[0]])
        assert steps.error(model) < EXACT
        steps.step(1)
        steps.texts = [[2, 9], [1, 8, 4]]
        steps.run.begin(range(len(steps.texts)), steps.texts)
        assert steps.error(model) < EXACT


@pytest.mark.slow
def test_texts_and_trees_that_outgrow_the_draft_state() -> None:
    model = tiny_model("bamba")
    steps = DraftSteps(ModelDrafter(patched(model)), VOCAB, [[5, 6, 7], [8]], Chain(2))
    steps.step()  # neither the length of texts nor the size of trees is known
    steps.growth = Chain(6).bind(steps.growth.sampling)
    steps.step()
    steps.texts[1] = [3] * 1100
    steps.run.begin([1], [steps.texts[1]])
    assert steps.error(model) < EXACT


def test_no_drafter_proposes_roots() -> None:
    draft = NoDrafter().start(10, [[1], [2, 3]], random_rows(2)).propose(torch.tensor([4, 5]), None, 16)
    assert draft.tree.tokens.tolist() == [[4], [5]]
    assert (draft.probs, draft.max_depth, draft.num_calls) == (None, 0, 0)


def test_what_it_cannot_draft_with_is_refused() -> None:
    model: Any = tiny_model("mamba2", vocab_size=64)
    path: Any = "texts.store"
    with pytest.raises(TypeError, match=r"lm must be an object such as stree\.TreeLM\(model\), got Mamba2ForCausalLM"):
        ModelDrafter(model)
    with pytest.raises(TypeError, match=r"datastore must be an object such as .*, got 'texts\.store'"):
        SuffixDrafter(path)
    with pytest.raises(TypeError, match=r"FusedDrafter needs drafters, such as ModelDrafter\(lm\), got TreeLM"):
        FusedDrafter(patched(model), SuffixDrafter())  # type: ignore[arg-type]
    message = "drafter and target must share one vocabulary: the drafter has 64 tokens, the target 97"
    with pytest.raises(ValueError, match=message):
        ModelDrafter(patched(model)).start(VOCAB, [[1]], random_rows(1))


def test_a_fused_drafter_has_the_models_of_its_parts() -> None:
    model = ModelDrafter(patched(tiny_model("mamba2")))
    fused = FusedDrafter(SuffixDrafter(), model, least_share=0.2).with_model(lambda lm: lm)
    assert (fused.least_share, list(fused.models)) == (0.2, [model.lm])
