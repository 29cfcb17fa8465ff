"""Drafters of heads of every kind: contexts follow the text, trees are lossless.

Run: python -m pytest tests/heads/test_head_drafters.py
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.head_steps import BlockSteps, HeadSteps, MtpSteps, SlotSteps, drafts_of_head
from helpers.on_device import treat_as_on_device
from helpers.plain_heads import PlainBlocks
from helpers.tiny_heads import save_slot_head, target_and_block_head, target_and_head, target_and_slot_head, tiny_target
from helpers.tiny_models import TOLERANCE

import stree
from stree.growth import Calibrated, Chain, DySpec, Growth, OptTree, Sequoia, Static
from stree.models.heads import specblock
from stree.models.heads.specblock import SpecBlockHead
from stree.testing.enumeration import EXACT, PLAIN, DraftedTrees, step_bias
from stree.testing.tables import TableModel
from stree.verify import Acceptance

CLOSE = 1e-3  # of the largest probability
CLOSE_STATE = 20 * TOLERANCE[torch.float32]
GROWTHS: dict[str, Growth] = {
    "chain": Chain(3), "longer than the block": Chain(7), "static": Static([2, 2]), "layers": DySpec(depth=3),
    "heap": DySpec(form="heap"), "calibrated": Calibrated(depth=6), "sequoia": Sequoia(), "opt-tree": OptTree(depth=6),
}  # fmt: skip
MTP_GROWTHS: dict[str, Growth] = {
    "chain": Chain(3), "static": Static([2, 2]), "layers": DySpec(depth=3), "heap": DySpec(form="heap"),
    "calibrated": Calibrated(depth=3),
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


@pytest.mark.parametrize("name", slow_unless(("static").__eq__, MTP_GROWTHS))
def test_the_state_of_a_causal_head_follows_the_text(name: str) -> None:
    steps = MtpSteps(MTP_GROWTHS[name])
    for _ in range(3):
        steps.step()
        assert steps.error() < CLOSE_STATE
    steps.step_plainly()
    assert steps.error() < CLOSE_STATE


@pytest.mark.parametrize("steps_of", [BlockSteps, MtpSteps])
def test_features_of_other_tokens_are_noticed(steps_of: Any) -> None:
    steps = steps_of(Chain(2))
    steps.drafted_error(steps.run.propose(steps.pending, steps.growth, 3))
    steps.change_last_tokens()
    assert steps.drafted_error(steps.run.propose(steps.pending, steps.growth, 3)) > 30 * CLOSE


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", "dflash", "specblock"])
@pytest.mark.parametrize("on_device", [False, True])
def test_texts_that_begin_in_mid_run_leave_nothing_of_the_old_ones(
    on_device: bool, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    treat_as_on_device(monkeypatch, host_can_read=not on_device)
    steps: HeadSteps
    steps, budget = MtpSteps(Chain(2)) if kind == "mtp" else BlockSteps(Chain(2)), 8
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
        assert steps.error() < (CLOSE_STATE if kind == "mtp" else CLOSE)
        steps.texts = [[2, 9], [1, 8, 4], [7]]
        steps.run.begin(range(len(steps.texts)), steps.texts)
        steps.read(range(3))
        assert steps.error() < (CLOSE_STATE if kind == "mtp" else CLOSE)


@pytest.mark.parametrize(("steps_of", "layers"), [(BlockSteps, r"\(1, 2\)"), (MtpSteps, r"\(-1,\)")])
def test_a_run_that_is_given_no_hidden_states_says_so(steps_of: Any, layers: str) -> None:
    steps = steps_of(Chain(2))
    steps.run.propose(steps.pending, steps.growth, 3)
    zero = torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"needs the target's hidden states of layers {layers}"):
        steps.run.observe(Acceptance(zero, zero[:, 0] + 1, torch.zeros(3, dtype=torch.long)))


ENUMERATED: dict[str, Growth] = {
    "chain": Chain(2), "static": Static([2, 1]), "layers": DySpec(depth=2, ranks=2), "heap": DySpec(form="heap"),
    "calibrated": Calibrated(depth=2, ranks=2), "longer chain": Chain(3), "deeper static": Static([2, 1, 1]),
}  # fmt: skip
VERIFIERS = ("rejection", "traversal", "match")


def enumerated(kind: str, growth: Growth, folder: Path) -> DraftedTrees:
    """Enumerate the drafts of a head of three tokens; SpecBlock's rank head is replaced, since it reads twenty."""
    if kind == "mtp":
        return drafts_of_head(target_and_head("qwen3_5_text", 3, torch.float64)[1], growth, 5)
    if kind != "specblock":
        return drafts_of_head(target_and_block_head("llama", kind, 3, torch.float64)[1], growth, 5)
    lm = tiny_target("llama", 3, torch.float64)
    save_slot_head(folder, lm, draft_vocab=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specblock, "NUM_RANKED", 3)
        head: Any = stree.heads.load(folder, lm)
    head.ranks = lambda logits, feedback: logits.argmax(-1) % 2
    return drafts_of_head(head, growth, 8)


@pytest.mark.parametrize(
    ("kind", "growth", "verifier"),
    slow_unless(
        lambda *case: case[1:] == ("static", "traversal") or case[2] == "block",
        [
            *product(("dflash", "dspark", "dflash2"), ("chain", "static"), VERIFIERS),
            *product(("mtp",), ("chain", "static", "layers"), VERIFIERS),
            *product(("dflash",), ("layers", "heap", "calibrated"), VERIFIERS),
            *product(("specblock",), ("chain", "deeper static"), ("rejection", "match")),
            ("specblock", "longer chain", "block"),
            ("mtp", "chain", "block"),
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
