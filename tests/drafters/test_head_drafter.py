"""The drafter of causal heads: its state follows the text, its trees are lossless, captured steps equal launched ones.

Run: python -m pytest tests/drafters/test_head_drafter.py
"""

from __future__ import annotations

import itertools
from itertools import product
from typing import Any

import pytest
import torch
from helpers.captured import captured
from helpers.fast_cases import slow_unless
from helpers.head_steps import TEXTS, HeadSteps
from helpers.on_device import treat_as_on_device
from helpers.tiny_heads import target_and_block_head, target_and_head
from helpers.tiny_models import TOLERANCE, path_to, relative_error
from torch import Tensor

import stree
from stree.drafters import Draft, Drafter, FusedDrafter, HeadDrafter, NoDrafter, SuffixDrafter
from stree.growth import Calibrated, Chain, DySpec, Growth, Static
from stree.sampling import Sampling
from stree.testing.enumeration import EXACT, PLAIN, drafts_of, step_bias
from stree.testing.tables import TableModel
from stree.verify import Acceptance

CLOSE = 20 * TOLERANCE[torch.float32]
GROWTHS: dict[str, Growth] = {
    "chain": Chain(3), "static": Static([2, 2]), "layers": DySpec(depth=3), "heap": DySpec(form="heap"),
    "calibrated": Calibrated(depth=3),
}  # fmt: skip
VERIFIERS = ("rejection", "traversal", "match")


class MtpSteps(HeadSteps):
    """Steps of an MTP head's run with the target's true hidden states."""

    probe = Static([2, 2]), 7

    def __init__(self, growth: Growth, temperature: float = 1.0) -> None:
        super().__init__(*target_and_head(), growth, temperature)

    def drafted_error(self, draft: Draft) -> float:
        """Largest error of the distributions that a draft's nodes were drawn from, against the head run from anew."""
        assert draft.probs is not None
        tree, errors = draft.tree, [0.0]
        for row, text in enumerate(self.texts):
            for node in range(1, int(tree.num_nodes[row])):
                path = path_to(tree, row, node)[:-1]  # to the parent, the root first
                tokens, features = torch.tensor([[*text[1:], int(tree.tokens[row, 0])]]), self.hidden_of(text)[None]
                features = features.flatten(2)
                for below in path[1:]:
                    feedback = self.head.run(tokens, features)[1]
                    tokens = torch.cat([tokens, tree.tokens[row, below].view(1, 1)], 1)
                    features = torch.cat([features, feedback[:, -1:]], 1)
                fresh = self.head.run(tokens, features)[0][0, -1].softmax(-1)
                errors.append(relative_error(draft.probs.probs[row, int(draft.probs.row[row, node])], fresh))
        return max(errors)


@pytest.mark.parametrize("name", slow_unless([*GROWTHS][1:2].__contains__, GROWTHS))
def test_the_head_s_state_follows_the_text(name: str) -> None:
    steps = MtpSteps(GROWTHS[name])
    for _ in range(3):
        steps.step()
        assert steps.error() < CLOSE
    steps.step_plainly()
    assert steps.error() < CLOSE


def test_features_of_other_positions_are_noticed() -> None:
    steps = MtpSteps(Chain(2))
    steps.drafted_error(steps.run.propose(steps.pending, steps.growth, 3))
    steps.change_last_tokens()
    draft = steps.run.propose(steps.pending, steps.growth, 3)
    assert steps.drafted_error(draft) > 100 * CLOSE


@pytest.mark.parametrize("on_device", [False, True])
def test_texts_that_begin_in_mid_run_leave_nothing_of_the_old_ones(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch, host_can_read=not on_device)
    steps = MtpSteps(Chain(2))
    steps.run.reserve(200, steps.growth, 8, begins=True)
    for budget in (1, 8):
        steps.step(budget)
        steps.step(1)
        steps.texts[0] = list(range(40, 80))  # longer than a chain that is run at once
        steps.run.begin([0], [steps.texts[0]])
        steps.read([0])
        assert steps.error() < CLOSE
        steps.texts = [[2, 9], [1, 8, 4], [7]]
        steps.run.begin(range(len(steps.texts)), steps.texts)
        steps.read(range(3))
        assert steps.error() < CLOSE


@pytest.mark.parametrize(
    ("growth", "verifier"),
    [(Chain(2), "block"), *product([Chain(2), Static([2, 1]), DySpec(depth=2, ranks=2)], VERIFIERS)],
)
def test_every_verifier_emits_the_target_s_distribution_exactly(growth: Growth, verifier: str) -> None:
    head = target_and_head("qwen3_5_text", 3, torch.float64)[1]
    hidden = torch.randn(1, 1, 1, head.num_features, generator=torch.Generator().manual_seed(0)).double()
    trees = drafts_of(Reading(HeadDrafter(head), hidden), growth, 5, PLAIN, 3)
    assert step_bias(TableModel.random(3, 11), trees, verifier, PLAIN) < EXACT


class Reading(Drafter):
    """A head's drafter whose runs have read the same hidden states after every prompt of one token."""

    def __init__(self, drafter: HeadDrafter, hidden: Tensor) -> None:
        self.drafter, self.hidden = drafter, hidden

    def start(self, vocab_size: int, prompts: Any, rng: Any) -> Any:
        run = self.drafter.start(vocab_size, prompts, rng)
        run.read_prompts(range(len(prompts)), self.hidden.expand(len(prompts), -1, -1, -1))
        return run


def generate(lm: stree.TreeLM, drafter: Any, **options: Any) -> stree.Generation:
    """Generate after three short texts."""
    defaults: dict[str, Any] = {"budget": 8, "max_new_tokens": 16, "seed": 3, "sampling": Sampling(1.5)}
    return stree.generate(lm, TEXTS, drafter, **defaults | options)


OPTIONS: dict[str, dict[str, Any]] = {
    "one row for three": {"max_batch": 1}, "plain": {"budget": 1}, "auto": {"budget": "auto"},
    "greedy": {"sampling": Sampling()}, "mixture": {"sampling": [Sampling(), Sampling(1.5), Sampling(0.7, top_k=9)]},
    "processed": {"repetition_penalty": 1.4}, "chain": {"growth": Chain(3)}, "heap": {"growth": GROWTHS["heap"]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "name"),
    slow_unless(
        lambda family, name: family == "qwen3_next" and name in ("auto", "mixture"),
        itertools.product(("qwen3_next", "qwen3_5_text"), OPTIONS),
    ),
)
def test_texts_are_those_of_plain_decoding(family: str, name: str) -> None:
    lm, head = target_and_head(family)
    expected = generate(
        lm,
        NoDrafter(),
        **{key: OPTIONS[name][key] for key in {"sampling", "repetition_penalty"} & OPTIONS[name].keys()},
    )
    for drafter in (HeadDrafter(head), FusedDrafter(HeadDrafter(head), SuffixDrafter())):
        found = generate(lm, drafter, verifier="match", **OPTIONS[name])
        assert found.sequences == expected.sequences


@pytest.mark.parametrize(
    "options", slow_unless(OPTIONS["mixture"].__eq__, [{}, {"growth": Static([2, 2])}, OPTIONS["mixture"]]), ids=str
)
@pytest.mark.slow
def test_captured_steps_give_the_texts_of_launched_ones(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, head = target_and_head()
    expected = generate(lm, HeadDrafter(head), max_length=60, **options)
    lm = captured(monkeypatch, stree.TreeLM(lm.model))
    for _ in range(2):
        found = generate(lm, HeadDrafter(head), max_length=60, **options)
        assert found.sequences == expected.sequences and not found.stats["graphs"]["not_captured"]
    assert found.stats["graphs"]["replays"] == found.stats["steps"] and found.stats["tau"] > 1.2


def test_a_run_that_is_given_no_hidden_states_fails_over_to_plain_decoding() -> None:
    steps = MtpSteps(Chain(2))
    draft = steps.run.propose(steps.pending, steps.growth, 3)
    zero = torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"needs the target's hidden states of layers \(-1,\)"):
        steps.run.observe(Acceptance(zero, zero[:, 0] + 1, torch.zeros(3, dtype=torch.long)))
    assert draft.tree.tokens.shape == (3, 3)


def test_a_head_that_drafts_like_an_untrained_one_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    lm, head = target_and_head()
    with caplog.at_level("WARNING", "stree"):
        generate(lm, HeadDrafter(head), growth=Chain(2), budget=3, max_new_tokens=120, sampling=Sampling())
    assert caplog.text.count("as with an untrained draft head") == 1
    assert "read the hidden states of layers [-1] (-1 is after the final norm)?" in caplog.text


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_a_trimmed_head_drafts_its_tokens_alone_and_as_before(kind: str) -> None:
    lm, head = target_and_head() if kind == "mtp" else target_and_block_head()
    kept = list(range(3, 90, 2))
    ids = torch.tensor([TEXTS[0]])
    hidden = lm.prefill(lm.new_state(1), ids, hidden_layers=head.hidden_layers)[1]
    trimmed = HeadDrafter(head, vocab=kept)

    def logits(one: Any) -> Tensor:
        if kind == "dflash":
            return one.draft(ids, hidden.flatten(2), ids[:, 0])  # type: ignore[no-any-return]
        return one.run(ids, hidden.flatten(2))[0]  # type: ignore[no-any-return]

    before, after = logits(head), logits(trimmed.head)
    is_kept = torch.isin(torch.arange(lm.vocab_size), torch.tensor(kept)) & (before > -torch.inf)
    assert torch.equal(after > -torch.inf, is_kept) and is_kept.any() and not is_kept.all()
    torch.testing.assert_close(after[is_kept], before[is_kept])
    plain = stree.generate(lm, TEXTS, NoDrafter(), max_new_tokens=12)
    assert stree.generate(lm, TEXTS, trimmed, budget=8, max_new_tokens=12).sequences == plain.sequences


def test_tokens_that_a_head_cannot_keep_are_refused() -> None:
    head = target_and_head()[1]
    for kept, message in (([], "list of tokens"), ([1, 1], "not repeat"), ([97], "below 97")):
        with pytest.raises(ValueError, match=message):
            HeadDrafter(head, vocab=kept)
    with pytest.raises(NotImplementedError, match="selector"):
        HeadDrafter(target_and_block_head("llama", "dflash2")[1], vocab=[1, 2])
