"""SpecBlock heads: the published layout against a plain forward, trees and texts, and what is refused.

Run: python -m pytest tests/heads/test_specblock.py
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
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
from helpers.tiny_dflash import tiny_target
from helpers.tiny_models import as_commit, path_to, random_texts, relative_error
from helpers.tiny_specblock import PlainBlocks, save_head, target_and_slot_head
from torch import Tensor

import stree
from stree.drafters import Draft, Drafter, FusedDrafter, HeadDrafter, NoDrafter, SuffixDrafter
from stree.growth import Calibrated, Chain, DySpec, Growth, Static
from stree.models.heads.specblock import SpecBlockHead
from stree.sampling import Sampling
from stree.tree import TokenTree

CLOSE = 1e-3  # of the largest probability
GROWTHS: dict[str, Growth] = {
    "chain": Chain(7), "static": Static([2, 1, 1, 2]), "layers": DySpec(depth=5), "heap": DySpec(form="heap"),
    "calibrated": Calibrated(depth=5),
}  # fmt: skip
TEXTS = random_texts(random.Random(0), [5, 1, 9])


def hidden_of(lm: stree.TreeLM, head: SpecBlockHead, text: list[int]) -> Tensor:
    """The target's hidden states of a text: float[len(text), 3, hidden]."""
    return lm.prefill(lm.new_state(1), torch.tensor([text]), hidden_layers=head.hidden_layers)[1][0]


@pytest.fixture
def made(tmp_path: Path) -> tuple[stree.TreeLM, SpecBlockHead, PlainBlocks, Tensor]:
    lm, _ = target_and_slot_head()
    weights, tokens = save_head(tmp_path, lm)
    head = stree.heads.load(tmp_path, lm)
    assert isinstance(head, SpecBlockHead)
    return lm, head, PlainBlocks(weights, lm.model.get_input_embeddings().weight), tokens


def test_run_gives_the_logits_of_a_plain_forward(made: Any) -> None:
    _, head, plain, tokens = made
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 90, (1, 11), generator=generator)
    hidden = torch.randn(1, 11, 3 * head.num_features, generator=generator)
    logits, outputs = head.run(ids, hidden)
    others = [found[..., tokens] for found, _ in (head.run(ids, hidden.roll(1, -1)), head.run(ids.roll(1), hidden))]
    assert bool((logits.index_fill(-1, tokens, -torch.inf) == -torch.inf).all())
    visible = list[int]()
    for place, token in enumerate(ids[0].tolist()):
        expected, columns = plain.block(token, plain.project(hidden[0, place]), place, visible)
        visible += columns
        wanted = plain.logits(expected)
        scale = wanted.abs().max()
        assert (outputs[0, place] - expected).abs().max() < 1e-4 * expected.abs().max()
        assert (logits[0, place][:, tokens] - wanted).abs().max() < 1e-4 * scale
        assert all((found[0, place] - wanted).abs().max() > 1e-2 * scale for found in others), "a negative control"
        assert head.ranks(logits[0, place], outputs[0, place]).tolist() == [plain.rank(x) for x in expected]


class SlotSteps(DraftSteps):
    """Steps of a SpecBlock head's run with the target's true hidden states."""

    def __init__(self, made: Any, growth: Growth, *, on_device: bool = False) -> None:
        self.lm, self.head, self.plain, self.tokens = made
        self.on_device, self.begun = on_device, set[bool]()
        super().__init__(HeadDrafter(self.head), self.lm.vocab_size, TEXTS, growth, 1.0)
        self.read(range(len(TEXTS)))

    def read(self, rows: Any) -> None:
        """Pass the hidden states of the texts in some rows, as after a prefill."""
        states = [hidden_of(self.lm, self.head, self.texts[row]) for row in rows]
        padded = torch.full((len(states), max(map(len, states)), *states[0].shape[1:]), 1e3)
        for place, state in enumerate(states):
            padded[place, : len(state)] = state
        self.run.read_prompts(rows, padded)

    def accept(self, tree: TokenTree, paths: list[list[int]]) -> None:
        path = as_commit([*paths, [0]])[0][:-1]
        hidden = torch.full((*path.shape, 3, self.head.num_features), 1e3)
        for row, nodes in enumerate(paths):
            if nodes:
                text = [*self.texts[row], *tree.tokens[row, nodes].tolist()]
                hidden[row, : len(nodes)] = hidden_of(self.lm, self.head, text)[-len(nodes) :]
        observe = self.run.observe
        self.run.observe = lambda acceptance: observe(replace(acceptance, hidden=hidden))  # type: ignore[method-assign]
        super().accept(tree, paths)
        del self.run.observe

    def slot_error(self, draft: Draft) -> float:
        """Largest error of the distributions that a draft's nodes were drawn from, against plain blocks."""
        assert draft.probs is not None
        tree, errors = draft.tree, [0.0]
        for row, text in enumerate(self.texts):
            plain = PlainBlocks(self.plain.weights, self.plain.embedding)
            features, visible = plain.project(hidden_of(self.lm, self.head, text).flatten(1)), list[int]()
            for place, token in enumerate([*text[1:], int(tree.tokens[row, 0])]):
                outputs, columns = plain.block(token, features[place], place, visible)
                visible += columns
            root = outputs, columns, visible[: -len(columns)]
            for node in range(1, int(tree.num_nodes[row])):
                expected = self._slot_of(plain, tree, row, path_to(tree, row, node)[1:-1], len(text) - 1, root)
                wanted = torch.zeros(self.lm.vocab_size).double()
                wanted[self.tokens] = plain.logits(expected).softmax(-1)
                found = draft.probs.probs[row, int(draft.probs.row[row, node])]
                errors.append(relative_error(found, wanted.float()))
        return max(errors)

    def _slot_of(self, plain: Any, tree: TokenTree, row: int, path: list[int], position: int, root: Any) -> Tensor:
        """Output of the slot that the children of a path's last node are drawn from; the path begins below the root."""
        (outputs, columns, visible), slot = root, 0
        for node in path:
            is_last = slot == plain.slots - 1
            begins = is_last or (not self.on_device and plain.rank(outputs[slot]) > 0)
            self.begun.add(begins)
            if begins:
                seen = [*visible, *columns[: slot + 1]]
                outputs, columns = plain.block(int(tree.tokens[row, node]), outputs[slot], position, seen)
                visible, slot = seen, 0
            else:
                slot += 1
        found: Tensor = outputs[slot]
        return found

    def error(self, model: Any = None) -> float:
        """The same of the next draft, which is not accepted."""
        draft = self.run.propose(self.pending, self.growth, 12)
        error = self.slot_error(draft)
        self.accept(draft.tree, [[] for _ in self.texts])
        return error


@pytest.mark.parametrize("name", slow_unless(("static",).__contains__, GROWTHS))
def test_blocks_follow_the_text_and_hang_where_the_rank_head_says(name: str, made: Any) -> None:
    steps = SlotSteps(made, GROWTHS[name])
    for _ in range(3):
        draft = steps.step(12)
        assert 1 <= draft.num_calls <= (12 if name == "heap" else int(draft.tree.depths.max()) + 1)
        assert steps.error() < CLOSE
    assert name == "heap" or steps.begun == {False, True}, "both kinds of nodes"
    assert steps.step(budget=1).num_calls == 0
    steps.step(budget=1)
    assert steps.error() < CLOSE


def test_a_block_that_hangs_elsewhere_is_noticed(made: Any) -> None:
    steps = SlotSteps(made, Chain(4))
    steps.on_device = True
    assert steps.error() > 10 * CLOSE


@pytest.mark.parametrize("on_device", [False, True])
def test_texts_that_begin_in_mid_run_leave_nothing_of_the_old_ones(
    on_device: bool, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch, host_can_read=not on_device)
    steps = SlotSteps(made, Static([2, 1, 1, 1]), on_device=on_device)
    steps.run.reserve(200, steps.growth, 10, begins=True)
    for budget in (1, 10):
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


def generate(lm: stree.TreeLM, drafter: Any, **options: Any) -> stree.Generation:
    """Generate after four short texts."""
    defaults: dict[str, Any] = {"budget": 8, "max_new_tokens": 12, "seed": 3}
    return stree.generate(lm, [*TEXTS, [8, 3]], drafter, **defaults | options)


OPTIONS: dict[str, dict[str, Any]] = {
    "chain": {"growth": Chain(5)}, "tree": {"budget": 16}, "two rows for four": {"max_batch": 2},
    "plain": {"budget": 1}, "auto": {"budget": "auto", "max_batch": 2}, "heap": {"growth": GROWTHS["heap"]},
    "sampled": {"sampling": Sampling(1.5), "verifier": "match", "max_batch": 2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "name"),
    slow_unless(lambda family, name: (family, name) == ("bamba", "tree"), product(("bamba", "llama"), OPTIONS)),
)
def test_texts_are_those_of_plain_decoding(family: str, name: str) -> None:
    lm, head = target_and_slot_head(family)
    expected = generate(lm, NoDrafter(), **{key: OPTIONS[name][key] for key in {"sampling"} & OPTIONS[name].keys()})
    assert generate(lm, HeadDrafter(head), **OPTIONS[name]).sequences == expected.sequences


def test_retrieved_nodes_may_extend_the_trees() -> None:
    lm, head = target_and_slot_head()
    expected = generate(lm, NoDrafter())
    for drafter in (FusedDrafter(HeadDrafter(head), SuffixDrafter()), FusedDrafter(SuffixDrafter(), HeadDrafter(head))):
        assert generate(lm, drafter).sequences == expected.sequences


@pytest.mark.parametrize(
    "options", [{}, {"growth": Static([2, 1, 1, 2]), "budget": 12, "sampling": Sampling(1.5)}], ids=str
)
def test_captured_steps_give_the_texts_of_launched_ones(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, head = target_and_slot_head()
    expected = generate(lm, HeadDrafter(head), max_length=60, verifier="match", **options)
    lm = captured(monkeypatch, stree.TreeLM(lm.model))
    for _ in range(2):
        found = generate(lm, HeadDrafter(head), max_length=60, verifier="match", **options)
        assert found.sequences == expected.sequences and not found.stats["graphs"]["not_captured"]
    assert found.stats["graphs"]["replays"] == found.stats["steps"]


def drafts_of_tiny(folder: Path, growth: Growth) -> Any:
    """Enumerate the drafts of a head of three tokens, whose rank head is replaced: it reads twenty."""
    lm = tiny_target("llama", 3, torch.float64)
    save_head(folder, lm, draft_vocab=3)
    head: Any = stree.heads.load(folder, lm)
    head.ranks = lambda logits, feedback: logits.argmax(-1) % 2
    hidden = torch.randn(1, 1, 3, head.num_features, generator=torch.Generator().manual_seed(0)).double()
    return drafts_of(Reading(HeadDrafter(head), hidden), growth, 8, PLAIN, 3)


class Reading(Drafter):
    """A head's drafter whose runs have read the same hidden states after every prompt of one token."""

    def __init__(self, drafter: HeadDrafter, hidden: Tensor) -> None:
        self.drafter, self.hidden = drafter, hidden

    def start(self, vocab_size: int, prompts: Any, rng: Any) -> Any:
        run = self.drafter.start(vocab_size, prompts, rng)
        run.read_prompts(range(len(prompts)), self.hidden.expand(len(prompts), -1, -1, -1))
        return run


@pytest.mark.parametrize(
    ("growth", "verifier"),
    slow_unless(
        lambda growth, verifier: verifier == "block",
        [(Chain(3), "block"), *product([Chain(2), Static([2, 1, 1])], ("rejection", "match"))],
    ),
)
def test_every_verifier_emits_the_target_s_distribution_exactly(growth: Growth, verifier: str, tmp_path: Path) -> None:
    trees = drafts_of_tiny(tmp_path, growth)
    assert step_bias(TableModel.random(3, 11), trees, verifier, PLAIN) < EXACT


def test_a_distribution_that_nodes_were_not_drawn_from_is_noticed(tmp_path: Path) -> None:
    trees = drafts_of_tiny(tmp_path, Chain(2))
    wrong = replace(trees, probs=replace(trees.probs, probs=trees.probs.probs.roll(1, -1)))
    assert step_bias(TableModel.random(3, 11), wrong, "rejection", PLAIN) > 1e-3


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"vocab_size": 64}, "must have vocab_size 97, the target's, got 64"),
    "layers": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "hidden_layers must be integers from 0"),
    "slots": ({"diffspec_draft_token_num": 5}, "must have fusion.position_queries.weight .5, 32., got .3, 32."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    lm, _ = target_and_slot_head()
    save_head(tmp_path, lm)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **REFUSED[name][0]}))
    with pytest.raises(ValueError, match=REFUSED[name][1]):
        stree.heads.load(tmp_path, lm)


def test_a_head_without_its_vocabulary_is_refused(tmp_path: Path) -> None:
    lm, _ = target_and_slot_head()
    save_head(tmp_path, lm)
    (tmp_path / "vocab_mapping.pt").unlink()
    with pytest.raises(ValueError, match="has neither the tensor d2t nor vocab_mapping.pt"):
        stree.heads.load(tmp_path, lm)
