"""budget="auto": what is generated does not change, sizes are learnt, and a draft model that is left alone catches up.

Run: python -m pytest tests/test_steering.py
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from tiny_models import grafted, random_texts, tiny_model
from torch import Tensor

import stree
from stree.budget import Choice
from stree.drafters import Draft, Drafter, FusedDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import Chain, DySpec, Growth, Limited
from stree.sampling import Random, Sampling
from stree.steering import AutoSize, FixedSize
from stree.tree import TokenTree
from stree.verify import Acceptance

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 3, 9, 3, 9], [1, 2, 4, 1, 2, 4, 1]]


def drafters() -> dict[str, Drafter]:
    lm = grafted(tiny_model("mamba2", seed=1))
    return {
        "model": ModelDrafter(lm),
        "suffix": SuffixDrafter(),
        "none": NoDrafter(),
        "same-model": ModelDrafter(grafted(tiny_model("bamba"))),
    }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", drafters())
def test_text_is_that_of_plain_decoding(name: str, temperature: float) -> None:
    target = grafted(tiny_model("bamba"))

    def text(drafter: Drafter, budget: int | str) -> stree.Generation:
        return stree.generate(
            target, PROMPTS, drafter, budget=budget, sampling=Sampling(temperature), max_new_tokens=40, verifier="match"
        )

    auto = text(drafters()[name], "auto")
    assert auto.sequences == text(NoDrafter(), 1).sequences
    assert auto.stats["budget"] == "auto"


def test_a_perfect_drafter_is_used_and_a_useless_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # Costs are given, not measured, and so are times: what is tested is the choice.
    target = grafted(tiny_model("bamba"))
    monkeypatch.setattr(
        "stree.steering._verify_ms", lambda lm, batch: lambda nodes: (1.0 if lm is target else 0.05) + 0.01 * nodes
    )
    prompts = random_texts(random.Random(0), [9])
    sizes: dict[str, list[float]] = {}
    for name in ("same-model", "model"):
        auto = AutoSize(target, drafters()[name], DySpec(depth=4).bind(Sampling()), 1)
        controller = auto.controller
        plain, tree = controller.observe_plain, controller.observe
        monkeypatch.setattr(controller, "observe_plain", lambda ms, plain=plain: plain())
        monkeypatch.setattr(controller, "observe", lambda *step, tree=tree: tree(*step[:4]))
        monkeypatch.setattr("stree.generation._steering", lambda *_, auto=auto: auto)
        out = stree.generate(target, prompts, drafters()[name], budget="auto", max_new_tokens=300)
        sizes[name] = [out.stats["nodes_per_step"], out.stats["tau"]]
    assert sizes["same-model"][1] > 2.5
    assert sizes["model"][0] < sizes["same-model"][0]


def test_a_model_that_stood_idle_catches_up_on_what_was_emitted() -> None:
    lm = grafted(tiny_model("mamba2"))
    texts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    run = ModelDrafter(lm).start(lm.vocab_size, texts, Random(0, torch.arange(2), torch.tensor([5, 3])))
    generator = random.Random(3)
    pending = [7, 8]
    for step in range(80):
        given = torch.tensor(pending)
        draft = run.propose(given, Chain(2).bind(Sampling()), 1)
        assert draft.tree.tokens.tolist() == [[pending[0]], [pending[1]]] and draft.num_calls == 0
        given.zero_()  # as the loop does, which writes the next ones in their place
        taken = [1, step % 3 != 0]  # the second sequence stands still now and then
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


def check_next_tokens(lm: stree.TreeLM, draft: Draft, texts: Sequence[Sequence[int]], pending: Sequence[int]) -> None:
    for row, text in enumerate(texts):
        with torch.no_grad():
            expected = int(lm.model(torch.tensor([[*text, pending[row]]])).logits[0, -1].argmax())
        assert int(draft.tree.tokens[row, 1]) == expected


def test_choices_follow_the_drafter_and_the_growth() -> None:
    target = grafted(tiny_model("bamba"))

    def choices(drafter: Drafter, growth: Growth | None) -> list[Choice]:
        return AutoSize(target, drafter, growth, 1).controller.choices

    model = drafters()["model"]
    assert choices(model, Chain(3).bind(Sampling())) == [Choice(1, 0), Choice(4, 3)], "a fixed shape, or nothing"
    layered = choices(model, DySpec(depth=3).bind(Sampling()))
    assert max(choice.depth for choice in layered) == 3
    assert {choice.depth for choice in layered if choice.nodes == 16} == {1, 2, 3}
    heap = choices(model, DySpec(form="heap").bind(Sampling()))
    assert all(choice.depth == choice.nodes - 1 for choice in heap), "a heap makes a draft call a node"
    assert all(choice.depth == choice.nodes - 1 for choice in choices(SuffixDrafter(), DySpec().bind(Sampling())))


def test_what_was_learnt_of_a_pair_is_kept_for_its_next_texts() -> None:
    target, drafter = grafted(tiny_model("bamba")), drafters()["model"]
    growth = DySpec(depth=3).bind(Sampling())
    first = AutoSize(target, drafter, growth, 1)
    assert AutoSize(target, drafter, growth, 1).controller is first.controller
    for other in (AutoSize(target, drafter, growth, 2), AutoSize(target, SuffixDrafter(), growth, 1)):
        assert other.controller is not first.controller


def test_a_limited_growth_is_the_other_cut_at_a_depth() -> None:
    growth = DySpec(depth=6, ranks=2).bind(Sampling(0.5))
    limited = Limited(growth, 2)
    assert limited.plan(16) == DySpec(depth=2, ranks=2).bind(Sampling(0.5)).plan(16)
    assert limited.sampling == Sampling(0.5)
    assert limited.bind(Sampling(0.7)).sampling == Sampling(0.7)
    assert isinstance(limited.estimate(1, torch.device("cpu")), type(growth.estimate(1, torch.device("cpu"))))


def test_a_fixed_size_is_always_the_same() -> None:
    fixed = FixedSize(None, 7)
    assert fixed.next() == fixed.next() == (None, 7)


class Valueless:
    """A drafter that drafts one node and says nothing of its worth."""

    def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> Valueless:
        return self

    def propose(self, pending: Tensor, growth: Growth | None, budget: int) -> Draft:
        tokens = torch.stack([pending, pending], 1)
        parents = torch.tensor([[-1, 0]] * len(pending), dtype=torch.int32)
        return Draft(TokenTree.unchecked(tokens, parents), None, 1)

    def observe(self, acceptance: Acceptance) -> None:
        pass


def test_a_drafter_without_values_is_refused() -> None:
    with pytest.raises(stree.GenerationError, match='budget="auto" needs a drafter that gives its nodes values'):
        stree.generate(grafted(tiny_model("mamba2")), PROMPTS, Valueless(), budget="auto")


def test_a_fused_drafter_has_the_models_of_its_parts() -> None:
    model = drafters()["model"]
    assert isinstance(model, ModelDrafter)
    assert list(FusedDrafter(model, SuffixDrafter()).models) == [model.lm]
