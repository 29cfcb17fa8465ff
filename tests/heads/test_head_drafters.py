"""Drafters of one-shot and SpecBlock heads: contexts follow the text, trees are lossless, captured steps equal others.

Run: python -m pytest tests/heads/test_head_drafters.py
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.captured import captured
from helpers.fast_cases import slow_unless
from helpers.head_steps import TEXTS, BlockSteps, HeadSteps, SlotSteps, drafts_of_head
from helpers.on_device import treat_as_on_device
from helpers.plain_heads import PlainBlocks
from helpers.tiny_heads import save_slot_head, target_and_block_head, target_and_slot_head, tiny_target

import stree
from stree.drafters import FusedDrafter, HeadDrafter, NoDrafter, SuffixDrafter
from stree.growth import Calibrated, Chain, DySpec, Growth, OptTree, Sequoia, Static
from stree.models.heads.specblock import SpecBlockHead
from stree.sampling import Sampling
from stree.testing.enumeration import EXACT, PLAIN, DraftedTrees, step_bias
from stree.testing.tables import TableModel
from stree.verify import Acceptance

CLOSE = 1e-3  # of the largest probability
GROWTHS: dict[str, Growth] = {
    "chain": Chain(3), "longer than the block": Chain(7), "static": Static([2, 2]), "layers": DySpec(depth=3),
    "heap": DySpec(form="heap"), "calibrated": Calibrated(depth=6), "sequoia": Sequoia(), "opt-tree": OptTree(depth=6),
}  # fmt: skip
SLOT_GROWTHS: dict[str, Growth] = {
    "chain": Chain(7), "static": Static([2, 1, 1, 2]), "layers": DySpec(depth=5), "heap": DySpec(form="heap"),
    "calibrated": Calibrated(depth=5),
}  # fmt: skip


@pytest.fixture
def made(tmp_path: Path) -> tuple[stree.TreeLM, SpecBlockHead, PlainBlocks, torch.Tensor]:
    """Load a SpecBlock head; give its plain blocks and tokens, too."""
    lm, _ = target_and_slot_head()
    weights, tokens = save_slot_head(tmp_path, lm)
    head = stree.heads.load(tmp_path, lm)
    assert isinstance(head, SpecBlockHead)
    return lm, head, PlainBlocks(weights, lm.model.get_input_embeddings().weight), tokens


@pytest.mark.parametrize(("name", "kind"), [*((name, "dflash") for name in GROWTHS), ("heap", "dspark")])
@pytest.mark.parametrize("temperature", slow_unless(bool, [0.0, 1.0]))
def test_the_context_follows_the_text_and_a_tree_takes_one_call(name: str, kind: str, temperature: float) -> None:
    steps = BlockSteps(GROWTHS[name], kind, temperature)
    for _ in range(3):
        draft = steps.step(8)
        assert draft.num_calls == 1 and 1 <= int(draft.tree.depths.max()) <= steps.head.num_drafted
        assert steps.error() < CLOSE
    steps.step_plainly()
    assert steps.error() < CLOSE


def test_features_of_other_tokens_are_noticed() -> None:
    steps = BlockSteps(Chain(2))
    draft = steps.run.propose(steps.pending, steps.growth, 3)
    steps.change_last_tokens()
    assert steps.drafted_error(draft) > 30 * CLOSE


@pytest.mark.parametrize("name", slow_unless(("static",).__contains__, SLOT_GROWTHS))
def test_blocks_follow_the_text_and_hang_where_the_rank_head_says(name: str, made: Any) -> None:
    steps = SlotSteps(made, SLOT_GROWTHS[name])
    for _ in range(3):
        draft = steps.step(12)
        assert 1 <= draft.num_calls <= (12 if name == "heap" else int(draft.tree.depths.max()) + 1)
        assert steps.error() < CLOSE
    assert name == "heap" or steps.begun == {False, True}, "both kinds of nodes"
    steps.step_plainly()
    assert steps.error() < CLOSE


def test_a_block_that_hangs_elsewhere_is_noticed(made: Any) -> None:
    steps = SlotSteps(made, Chain(4))
    steps.on_device = True
    assert steps.error() > 10 * CLOSE


@pytest.mark.parametrize("kind", ["dflash", "specblock"])
@pytest.mark.parametrize("on_device", [False, True])
def test_texts_that_begin_in_mid_run_leave_nothing_of_the_old_ones(
    on_device: bool, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch, host_can_read=not on_device)
    steps: HeadSteps
    steps, budget = BlockSteps(Chain(2)), 8
    if kind == "specblock":
        growth = Static([2, 1, 1, 1])
        steps, budget = SlotSteps(request.getfixturevalue("made"), growth, on_device=on_device), 10
    steps.run.reserve(200, steps.growth, budget, begins=True)
    for size in (1, budget):
        steps.step(size)
        steps.step(1)
        steps.texts[0] = list(range(40, 80))
        steps.run.begin([0], [steps.texts[0]])
        steps.read([0])
        assert steps.error() < CLOSE
        steps.texts = [[2, 9], [1, 8, 4], [7]]
        steps.run.begin(range(len(steps.texts)), steps.texts)
        steps.read(range(3))
        assert steps.error() < CLOSE


def test_a_run_that_is_given_no_hidden_states_says_so() -> None:
    steps = BlockSteps(Chain(2))
    steps.run.propose(steps.pending, steps.growth, 3)
    zero = torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"needs the target's hidden states of layers \(1, 2\)"):
        steps.run.observe(Acceptance(zero, zero[:, 0] + 1, torch.zeros(3, dtype=torch.long)))


# Distributions.

ENUMERATED: dict[str, Growth] = {
    "chain": Chain(2), "static": Static([2, 1]), "layers": DySpec(depth=2, ranks=2), "heap": DySpec(form="heap"),
    "calibrated": Calibrated(depth=2, ranks=2), "longer chain": Chain(3), "deeper static": Static([2, 1, 1]),
}  # fmt: skip
VERIFIERS = ("rejection", "traversal", "match")


def enumerated(kind: str, growth: Growth, folder: Path) -> DraftedTrees:
    """Enumerate the drafts of a head of three tokens; SpecBlock's rank head is replaced, since it reads twenty."""
    if kind != "specblock":
        return drafts_of_head(target_and_block_head("llama", kind, 3, torch.float64)[1], growth, 5)
    lm = tiny_target("llama", 3, torch.float64)
    save_slot_head(folder, lm, draft_vocab=3)
    head: Any = stree.heads.load(folder, lm)
    head.ranks = lambda logits, feedback: logits.argmax(-1) % 2
    return drafts_of_head(head, growth, 8)


@pytest.mark.parametrize(
    ("kind", "growth", "verifier"),
    slow_unless(
        lambda *case: case[1:] == ("static", "traversal") or case[2] == "block",
        [
            *product(("dflash", "dspark", "dflash2"), ("chain", "static"), VERIFIERS),
            *product(("dflash",), ("layers", "heap", "calibrated"), VERIFIERS),
            *product(("specblock",), ("chain", "deeper static"), ("rejection", "match")),
            ("specblock", "longer chain", "block"),
        ],
    ),
)
def test_every_verifier_emits_the_target_s_distribution_exactly(
    kind: str, growth: str, verifier: str, tmp_path: Path
) -> None:
    trees = enumerated(kind, ENUMERATED[growth], tmp_path)
    assert step_bias(TableModel.random(3, 11), trees, verifier, PLAIN) < EXACT


@pytest.mark.parametrize("kind", ["dspark", "specblock"])
def test_a_distribution_that_nodes_were_not_drawn_from_is_noticed(kind: str, tmp_path: Path) -> None:
    trees = enumerated(kind, Chain(2), tmp_path)
    wrong = replace(trees, probs=replace(trees.probs, probs=trees.probs.probs.roll(1, -1)))
    assert step_bias(TableModel.random(3, 11), wrong, "rejection", PLAIN) > 1e-3


# Texts.


def pair(family: str, kind: str) -> tuple[stree.TreeLM, Any]:
    return target_and_slot_head(family) if kind == "specblock" else target_and_block_head(family, kind)


def generate(lm: stree.TreeLM, drafter: Any, **options: Any) -> stree.Generation:
    """Generate after four short texts."""
    defaults: dict[str, Any] = {"budget": 8, "max_new_tokens": 12, "seed": 3}
    return stree.generate(lm, [*TEXTS, [8, 3]], drafter, **defaults | options)


OPTIONS: dict[str, dict[str, Any]] = {
    "chain": {"growth": Chain(5)}, "tree": {"budget": 16}, "two rows for four": {"max_batch": 2},
    "plain": {"budget": 1}, "auto": {"budget": "auto", "max_batch": 2}, "heap": {"growth": GROWTHS["heap"]},
    "sampled": {"sampling": Sampling(1.5), "verifier": "match", "max_batch": 2},
}  # fmt: skip
PAIRS = (
    ("mamba2", "dflash"), ("qwen3_next", "dspark"), ("llama", "dflash2"), ("llama", "dflash"), ("bamba", "specblock"),
    ("llama", "specblock"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "kind", "name"),
    slow_unless(
        lambda *case: case[0] == "qwen3_next" or case == ("bamba", "specblock", "tree"),
        [(*pair, name) for pair in PAIRS for name in OPTIONS],
        in_ci=lambda family, kind, name: (PAIRS.index((family, kind)) + [*OPTIONS].index(name)) % 2 == 0,
    ),
)
def test_texts_are_those_of_plain_decoding(family: str, kind: str, name: str) -> None:
    lm, head = pair(family, kind)
    expected = generate(lm, NoDrafter(), **{key: OPTIONS[name][key] for key in {"sampling"} & OPTIONS[name].keys()})
    found = generate(lm, HeadDrafter(head), **OPTIONS[name])
    assert found.sequences == expected.sequences
    assert kind == "specblock" or found.stats["draft_calls"] <= found.stats["steps"]


@pytest.mark.parametrize("kind", ["dflash", "specblock"])
def test_retrieved_nodes_may_extend_the_trees(kind: str) -> None:
    lm, head = pair("llama", kind)
    expected = generate(lm, NoDrafter())
    assert generate(lm, FusedDrafter(HeadDrafter(head), SuffixDrafter())).sequences == expected.sequences


SAMPLED: dict[str, Any] = {"sampling": Sampling(1.5)}
CAPTURED: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "dspark", {}), ("llama", "dflash2", {"growth": Static([2, 2]), **SAMPLED}),
    ("bamba", "specblock", {"growth": Static([2, 1, 1, 2]), "budget": 12, "verifier": "match", **SAMPLED}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "kind", "options"), CAPTURED, ids=str)
def test_captured_steps_give_the_texts_of_launched_ones(
    family: str, kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, head = pair(family, kind)
    expected = generate(lm, HeadDrafter(head), max_length=60, **options)
    lm = captured(monkeypatch, stree.TreeLM(lm.model))
    for _ in range(2):
        found = generate(lm, HeadDrafter(head), max_length=60, **options)
        assert found.sequences == expected.sequences and not found.stats["graphs"]["not_captured"]
    assert found.stats["graphs"]["replays"] == found.stats["steps"]
