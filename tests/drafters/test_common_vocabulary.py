"""Draft models whose heads have more or fewer rows than the target's: they draft what both have, and stay exact.

Run: python -m pytest tests/drafters/test_common_vocabulary.py
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.captured import captured
from helpers.fast_cases import slow_unless
from helpers.text_enumeration import joint_of_steps
from helpers.tiny_models import VOCAB, patched, tiny_model
from helpers.tiny_pairs import save_tiny

import stree
from stree.bench.pair import Pair
from stree.drafters import FusedDrafter, ModelDrafter, SuffixDrafter, load
from stree.growth import Chain, DySpec, Growth
from stree.sampling import Sampling
from stree.testing.enumeration import EXACT, PLAIN, DraftedTrees, drafts_of, strings_of, total_variation
from stree.testing.tables import TableLM, TableModel
from stree.verify import DraftProbs

SIZES = [80, VOCAB + 31]
PROMPTS = [[5, 6, 90, 7, 96], [93, 1, 2, 3, 95, 1, 2]]  # with tokens that a draft model of 80 does not have


def resized(size: int, family: str = "bamba") -> Any:
    """Return a copy of the target with another number of tokens; rows that it has more are likely ones."""
    model = copy.deepcopy(tiny_model(family))
    model.resize_token_embeddings(size)
    head: Any = model.get_output_embeddings()
    if size > VOCAB:
        with torch.no_grad():
            head.weight[VOCAB:] = 2 * head.weight[: size - VOCAB]
    return model


@pytest.mark.parametrize("verifier", ["rejection", "traversal"])
@pytest.mark.parametrize("growth", [Chain(2), DySpec(depth=2, ranks=2)], ids=["chain", "layers"])
@pytest.mark.parametrize("size", slow_unless((3).__eq__, [2, 3, 5]))
def test_the_emitted_distribution_is_the_target_s(size: int, growth: Growth, verifier: str) -> None:
    target = TableModel.random(3, 11)
    draft = tiny_model("llama", torch.float64, vocab_size=size)
    drafter = load(draft, TableLM(target).as_lm())
    drafted = [drafts_of(drafter, growth, 4, PLAIN, 3, root) for root in range(3)]
    for trees in drafted:
        drawn = trees.probs.probs[:, 1:][trees.parents[:, 1:] >= 0]
        assert len(drawn) and float((drawn.sum(-1) - 1).abs().max()) < EXACT
        assert not drawn[:, size:].any(), "no mass outside the common part"

    def bias(drafted: list[DraftedTrees]) -> float:
        steps = [strings_of(target, trees, PLAIN, verifier) for trees in drafted]
        return total_variation(joint_of_steps(steps, 3), target.joint(PLAIN, 3))

    assert bias(drafted) < EXACT
    uniform = DraftProbs(torch.full_like(drafted[1].probs.probs, 1 / 3), drafted[1].probs.row, drafted[1].probs.kind)
    assert bias([drafted[0], replace(drafted[1], probs=uniform), drafted[2]]) > 1e-3


def lower_odd(text: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that needs the target's number of logits."""
    return logits - (torch.arange(VOCAB) % 2) * 0.5


WAYS: dict[str, dict[str, Any]] = {
    "chain": {"growth": Chain(3)},
    "heap": {"growth": DySpec(form="heap")},
    "sampled": {"sampling": Sampling(0.9), "verifier": "match"},
    "penalty": {"repetition_penalty": 1.7},
    "processor": {"logits_processor": lower_odd},
    "overlap": {"overlap": True},
    "auto": {"budget": "auto"},
}


@pytest.mark.parametrize("way", slow_unless(("processor", "overlap").__contains__, WAYS))
@pytest.mark.parametrize("size", slow_unless((80).__eq__, SIZES))
def test_texts_are_those_of_plain_decoding(size: int, way: str) -> None:
    target, options = patched(tiny_model("bamba")), {"max_new_tokens": 24, "seed": 1, "ignore_eos": True, **WAYS[way]}
    plain = stree.generate(target, PROMPTS, "none", **{**options, "overlap": False}).sequences
    assert {token for text in plain for token in text[7:]} - set(range(80)), "the text has tokens of the target alone"
    out = stree.generate(target, PROMPTS, patched(resized(size)), **{"budget": 8, **options})
    assert out.sequences == plain
    assert way == "auto" or out.stats["tau"] > 1, "it drafts"


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_every_drafter_around_a_model_takes_one_of_another_size(size: int) -> None:
    target, draft = patched(tiny_model("bamba")), patched(resized(size))
    options: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True}
    plain = stree.generate(target, PROMPTS, "none", **options).sequences
    model = ModelDrafter(draft)
    for drafter in (ModelDrafter(draft, vocab=[*range(0, size, 2)]), FusedDrafter(model, SuffixDrafter())):
        assert stree.generate(target, PROMPTS, drafter, budget=8, **options).sequences == plain
    with stree.Engine(target, model, budget=8, max_batch=2, max_length=64) as engine:
        handles = [engine.submit(prompt, **options) for prompt in PROMPTS]
        assert [handle.result(120).sequences[0] for handle in handles] == plain
    hooked = target.model.generate(
        torch.tensor(PROMPTS[:1]), custom_generate=stree.custom_generate, drafter=draft, max_new_tokens=16
    )
    assert hooked[0].tolist() == plain[0]


def test_steps_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"growth": Chain(2), "budget": 3, "max_new_tokens": 16, "ignore_eos": True}
    plain = stree.generate(patched(tiny_model("bamba")), PROMPTS, "none", max_new_tokens=16, ignore_eos=True).sequences
    target, draft = captured(monkeypatch), patched(resized(80))
    outputs = [stree.generate(target, PROMPTS, draft, **options) for _ in range(2)]
    assert [one.sequences for one in outputs] == [plain] * 2
    assert outputs[1].stats["graphs"]["replays"] == outputs[1].stats["steps"]


def test_a_draft_model_is_wrapped_once_and_follows_its_settings() -> None:
    target, draft = patched(tiny_model("bamba")), patched(resized(60))
    first = load(draft, target)
    draft.chunk_size = 4
    second = load(ModelDrafter(draft), target)
    assert isinstance(first, ModelDrafter) and isinstance(second, ModelDrafter)
    assert first.lm is second.lm is not draft and second.lm.chunk_size == 4
    assert (draft.vocab_size, second.lm.vocab_size) == (60, VOCAB)
    same = ModelDrafter(patched(tiny_model("mamba2")))
    assert load(same, target) is same


def saved(folder: Path, size: int, words: list[str]) -> str:
    """Save a model of a number of tokens with a tokenizer of these words."""
    save_tiny(folder, words=words)
    tiny_model("mamba2", vocab_size=size, eos_token_id=0).save_pretrained(folder)
    return str(folder)


def test_tokenizers_that_disagree_are_refused_and_unknown_ones_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = [f"w{number}" for number in range(1, 50)]
    target = saved(tmp_path / "target", 64, words)
    padded = saved(tmp_path / "padded", 57, words)
    other = saved(tmp_path / "other", 57, [*words[:3], "x4", *words[4:]])
    lm = stree.TreeLM.from_pretrained(target)
    for source in (padded, f"fused:{padded}", stree.TreeLM.from_pretrained(padded)):
        load(source, lm)
    assert Pair.load(target, padded).drafter is not None
    assert "tokenizers" not in caplog.text
    message = (
        "drafter and target must share one vocabulary: the drafter has 57 tokens, the target 64, and their tokenizers "
        "differ: token 4 is 'x4' to the drafter and 'w4' to the target"
    )
    for refused in (
        lambda: load(other, lm),
        lambda: stree.generate(lm, [[1]], ModelDrafter(stree.TreeLM.from_pretrained(other))),
        lambda: Pair.load(target, other),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    for _ in range(2):
        stree.generate(lm, [[1]], patched(tiny_model("mamba2", vocab_size=61)), max_new_tokens=2)
    with pytest.raises(
        ValueError, match=r"the drafter has 31 tokens, the target 64, and no tokenizer beside '' can be read"
    ):
        load(tiny_model("mamba2", vocab_size=31), lm)
    assert caplog.text.count("the drafter has 61 tokens, the target 64; it drafts the first 61, without a check") == 1
