"""The drafter of one-shot heads: its context follows the text, its trees are lossless, one draft call makes a tree.

Run: python -m pytest tests/heads/test_dflash_drafter.py
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from helpers.captured import captured
from helpers.draft_steps import DraftSteps
from helpers.enumerated_texts import drafts_of
from helpers.enumeration import EXACT, PLAIN, step_bias
from helpers.fast_cases import slow_unless
from helpers.on_device import treat_as_on_device
from helpers.table_models import TableModel
from helpers.tiny_dflash import target_and_block_head, tensors_of
from helpers.tiny_models import as_commit, path_to, random_texts, relative_error
from torch import Tensor

import stree
from stree.drafters import Draft, Drafter, FusedDrafter, HeadDrafter, NoDrafter, SuffixDrafter
from stree.growth import Calibrated, Chain, DySpec, Growth, OptTree, Sequoia, Static
from stree.sampling import Sampling
from stree.tree import TokenTree
from stree.verify import Acceptance

CLOSE = 1e-3  # of the largest probability
GROWTHS: dict[str, Growth] = {
    "chain": Chain(3), "longer than the block": Chain(7), "static": Static([2, 2]), "layers": DySpec(depth=3),
    "heap": DySpec(form="heap"), "calibrated": Calibrated(depth=6), "sequoia": Sequoia(), "opt-tree": OptTree(depth=6),
}  # fmt: skip
VERIFIERS = ("rejection", "traversal", "match")
TEXTS = random_texts(random.Random(0), [5, 1, 9])


def hidden_of(lm: stree.TreeLM, text: list[int]) -> Tensor:
    """The target's hidden states of a text: float[len(text), 2, hidden]."""
    return lm.prefill(lm.new_state(1), torch.tensor([text]), hidden_layers=[1, 2])[1][0]


class BlockSteps(DraftSteps):
    """Steps of a one-shot head's run with the target's true hidden states."""

    def __init__(self, growth: Growth, kind: str = "dflash", temperature: float = 1.0) -> None:
        self.kind, (self.lm, self.head) = kind, target_and_block_head("llama", kind)
        super().__init__(HeadDrafter(self.head), self.lm.vocab_size, TEXTS, growth, temperature)
        self.read(range(len(TEXTS)))

    def read(self, rows: Any) -> None:
        """Pass the hidden states of the texts in some rows, as after a prefill."""
        states = [hidden_of(self.lm, self.texts[row]) for row in rows]
        padded = torch.full((len(states), max(map(len, states)), *states[0].shape[1:]), 1e3)
        for place, state in enumerate(states):
            padded[place, : len(state)] = state
        self.run.read_prompts(rows, padded)

    def accept(self, tree: TokenTree, paths: list[list[int]]) -> None:
        path = as_commit([*paths, [0]])[0][:-1]
        hidden = torch.full((*path.shape, 2, self.head.num_features), 1e3)
        for row, nodes in enumerate(paths):
            if nodes:
                text = [*self.texts[row], *tree.tokens[row, nodes].tolist()]
                hidden[row, : len(nodes)] = hidden_of(self.lm, text)[-len(nodes) :]
        observe = self.run.observe
        self.run.observe = lambda acceptance: observe(replace(acceptance, hidden=hidden))  # type: ignore[method-assign]
        super().accept(tree, paths)
        del self.run.observe

    def block_error(self, draft: Draft) -> float:
        """Largest error of the distributions that a draft's nodes were drawn from, against a fresh context."""
        assert draft.probs is not None
        tree, errors = draft.tree, [0.0]
        for row, text in enumerate(self.texts):
            features = hidden_of(self.lm, text).flatten(1)[None]
            out = self.head.draft(torch.tensor([text]), features, tree.tokens[row, :1])
            assert isinstance(out, Tensor)
            for node in range(1, int(tree.num_nodes[row])):
                parent = path_to(tree, row, node)[-2]
                slot = int(tree.depths[row, parent]) + (self.kind == "dflash")
                logits = out[0, slot]
                if self.kind == "dspark":
                    tensors = tensors_of("dspark", 32, 97)
                    before = tensors["markov_head.markov_w1.weight"][tree.tokens[row, parent]]
                    logits = logits + tensors["markov_head.markov_w2.weight"] @ before
                found = draft.probs.probs[row, int(draft.probs.row[row, node])]
                errors.append(relative_error(found, logits.softmax(-1)))
        return max(errors)

    def error(self, model: Any = None) -> float:
        """The same of the next draft of two layers, which is not accepted."""
        growth, self.growth = self.growth, Static([2, 2]).bind(Sampling(1.0))
        draft = self.run.propose(self.pending, self.growth, 7)
        error = self.block_error(draft)
        self.accept(draft.tree, [[] for _ in self.texts])
        self.growth = growth
        return error


@pytest.mark.parametrize(("name", "kind"), [*((name, "dflash") for name in GROWTHS), ("heap", "dspark")])
@pytest.mark.parametrize("temperature", slow_unless(bool, [0.0, 1.0]))
def test_the_context_follows_the_text_and_a_tree_takes_one_call(name: str, kind: str, temperature: float) -> None:
    steps = BlockSteps(GROWTHS[name], kind, temperature)
    for _ in range(3):
        draft = steps.step(8)
        assert draft.num_calls == 1 and 1 <= int(draft.tree.depths.max()) <= steps.head.num_drafted
        assert steps.error() < CLOSE
    assert steps.step(budget=1).num_calls == 0
    steps.step(budget=1)
    assert steps.error() < CLOSE


def test_features_of_other_tokens_are_noticed() -> None:
    steps = BlockSteps(Chain(2))
    draft = steps.run.propose(steps.pending, steps.growth, 3)
    steps.texts = [[*text[:-1], (text[-1] + 1) % 90] for text in steps.texts]
    assert steps.block_error(draft) > 30 * CLOSE


@pytest.mark.parametrize("on_device", [False, True])
def test_texts_that_begin_in_mid_run_leave_nothing_of_the_old_ones(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch, host_can_read=not on_device)
    steps = BlockSteps(Chain(2))
    steps.run.reserve(200, steps.growth, 8, begins=True)
    for budget in (1, 8):
        steps.step(budget)
        steps.step(1)
        steps.texts[0] = list(range(40, 80))
        steps.run.begin([0], [steps.texts[0]])
        steps.read([0])
        assert steps.error() < CLOSE
        steps.texts = [[2, 9], [1, 8, 4], [7]]
        steps.run.begin(range(len(steps.texts)), steps.texts)
        steps.read(range(3))
        assert steps.error() < CLOSE


ENUMERATED: dict[str, Growth] = {
    "chain": Chain(2), "static": Static([2, 1]), "layers": DySpec(depth=2, ranks=2), "heap": DySpec(form="heap"),
    "calibrated": Calibrated(depth=2, ranks=2),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "growth", "verifier"),
    slow_unless(
        lambda *case: case[1:] == ("static", "traversal") or case == ("dflash", "chain", "block"),
        [
            *product(("dflash", "dspark", "dflash2"), ("chain", "static"), VERIFIERS),
            *product(("dflash",), ("layers", "heap", "calibrated"), VERIFIERS),
        ],
    ),
)
def test_every_verifier_emits_the_target_s_distribution_exactly(kind: str, growth: str, verifier: str) -> None:
    head = target_and_block_head("llama", kind, 3, torch.float64)[1]
    hidden = torch.randn(1, 1, 2, head.num_features, generator=torch.Generator().manual_seed(0)).double()
    trees = drafts_of(Reading(HeadDrafter(head), hidden), ENUMERATED[growth], 5, PLAIN, 3)
    assert step_bias(TableModel.random(3, 11), trees, verifier, PLAIN) < EXACT


def test_a_distribution_that_nodes_were_not_drawn_from_is_noticed() -> None:
    head = target_and_block_head("llama", "dspark", 3, torch.float64)[1]
    hidden = torch.randn(1, 1, 2, head.num_features, generator=torch.Generator().manual_seed(0)).double()
    trees = drafts_of(Reading(HeadDrafter(head), hidden), Chain(2), 5, PLAIN, 3)
    wrong = replace(trees, probs=replace(trees.probs, probs=trees.probs.probs.roll(1, -1)))
    assert step_bias(TableModel.random(3, 11), wrong, "rejection", PLAIN) > 1e-3


class Reading(Drafter):
    """A head's drafter whose runs have read the same hidden states after every prompt of one token."""

    def __init__(self, drafter: HeadDrafter, hidden: Tensor) -> None:
        self.drafter, self.hidden = drafter, hidden

    def start(self, vocab_size: int, prompts: Any, rng: Any) -> Any:
        run = self.drafter.start(vocab_size, prompts, rng)
        run.read_prompts(range(len(prompts)), self.hidden.expand(len(prompts), -1, -1, -1))
        return run


def generate(lm: stree.TreeLM, drafter: Any, **options: Any) -> stree.Generation:
    """Generate after four short texts."""
    defaults: dict[str, Any] = {"budget": 8, "max_new_tokens": 12, "seed": 3}
    return stree.generate(lm, [*TEXTS, [8, 3]], drafter, **defaults | options)


OPTIONS: dict[str, dict[str, Any]] = {
    "chain": {"growth": Chain(3)}, "tree": {"budget": 16}, "two rows for four": {"max_batch": 2},
    "plain": {"budget": 1}, "auto": {"budget": "auto", "max_batch": 2}, "heap": {"growth": GROWTHS["heap"]},
    "sampled": {"sampling": Sampling(1.5), "verifier": "match", "max_batch": 2},
}  # fmt: skip


PAIRS = (("mamba2", "dflash"), ("qwen3_next", "dspark"), ("llama", "dflash2"), ("llama", "dflash"))


@pytest.mark.parametrize(
    ("family", "kind", "name"),
    slow_unless(
        lambda family, *_: family == "qwen3_next",
        [(*pair, name) for pair in PAIRS for name in OPTIONS],
    ),
)
def test_texts_are_those_of_plain_decoding(family: str, kind: str, name: str) -> None:
    lm, head = target_and_block_head(family, kind)
    expected = generate(lm, NoDrafter(), **{key: OPTIONS[name][key] for key in {"sampling"} & OPTIONS[name].keys()})
    found = generate(lm, HeadDrafter(head), **OPTIONS[name])
    assert found.sequences == expected.sequences
    assert found.stats["draft_calls"] <= found.stats["steps"]


def test_retrieved_nodes_may_extend_the_trees() -> None:
    lm, head = target_and_block_head()
    expected = generate(lm, NoDrafter())
    for drafter in (FusedDrafter(HeadDrafter(head), SuffixDrafter()), FusedDrafter(SuffixDrafter(), HeadDrafter(head))):
        assert generate(lm, drafter).sequences == expected.sequences


@pytest.mark.parametrize(
    ("kind", "options"), [("dspark", {}), ("dflash2", {"growth": Static([2, 2]), "sampling": Sampling(1.5)})], ids=str
)
def test_captured_steps_give_the_texts_of_launched_ones(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, head = target_and_block_head("llama", kind)
    expected = generate(lm, HeadDrafter(head), max_length=60, **options)
    lm = captured(monkeypatch, stree.TreeLM(lm.model))
    for _ in range(2):
        found = generate(lm, HeadDrafter(head), max_length=60, **options)
        assert found.sequences == expected.sequences and not found.stats["graphs"]["not_captured"]
    assert found.stats["graphs"]["replays"] == found.stats["steps"]


def test_a_run_that_is_given_no_hidden_states_says_so() -> None:
    steps = BlockSteps(Chain(2))
    steps.run.propose(steps.pending, steps.growth, 3)
    zero = torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"needs the target's hidden states of layers \(1, 2\)"):
        steps.run.observe(Acceptance(zero, zero[:, 0] + 1, torch.zeros(3, dtype=torch.long)))
