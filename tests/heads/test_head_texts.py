"""Texts drafted by heads of every kind: those of plain decoding, launched or captured, whichever rows take them.

Run: python -m pytest tests/heads/test_head_texts.py
"""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from helpers.captured import captured
from helpers.fast_cases import slow_unless
from helpers.head_steps import TEXTS
from helpers.tiny_family_models import built
from helpers.tiny_heads import target_and_block_head, target_and_head, target_and_slot_head, tiny_target
from helpers.tiny_models import tiny_model
from torch import Tensor

import stree
from stree.distill.heads import new_head
from stree.drafters import FusedDrafter, HeadDrafter, NoDrafter, SuffixDrafter
from stree.growth import Chain, DySpec, Static
from stree.sampling import Sampling


@cache
def pair(family: str, kind: str) -> tuple[stree.TreeLM, Any]:
    if kind == "mtp":
        return target_and_head(family)
    if kind in ("diffusion", "eagle3"):
        lm, folder = tiny_target(family), Path(mkdtemp())
        new_head(lm, kind, 0).save(folder)
        head: Any = stree.heads.load(folder, lm)
        return lm, head.with_steps(2) if kind == "diffusion" else head
    return target_and_slot_head(family) if kind == "specblock" else target_and_block_head(family, kind)


def generate(lm: stree.TreeLM, drafter: Any, **options: Any) -> stree.Generation:
    """Generate after four short texts."""
    defaults: dict[str, Any] = {"budget": 8, "max_new_tokens": 12, "seed": 3}
    return stree.generate(lm, [*TEXTS, [8, 3]], drafter, **defaults | options)


OPTIONS: dict[str, dict[str, Any]] = {
    "chain": {"growth": Chain(5)}, "tree": {"budget": 16}, "two rows for four": {"max_batch": 2},
    "plain": {"budget": 1}, "auto": {"budget": "auto", "max_batch": 2}, "heap": {"growth": DySpec(form="heap")},
    "sampled": {"sampling": Sampling(1.5), "verifier": "match", "max_batch": 2},
    "mixture": {"sampling": [Sampling(), Sampling(1.5), Sampling(0.7, top_k=9), Sampling()], "verifier": "match"},
    "processed": {"repetition_penalty": 1.4},
}  # fmt: skip
FAST = [("qwen3_next", "dspark", "sampled"), ("bamba", "specblock", "tree"), ("qwen3_next", "mtp", "mixture")]
FAST += [("mamba2", "diffusion", "sampled")]
PAIRS = (
    ("mamba2", "dflash"), ("qwen3_next", "dspark"), ("llama", "dflash2"), ("llama", "dflash"), ("bamba", "specblock"),
    ("llama", "specblock"), ("qwen3_next", "mtp"), ("qwen3_5_text", "mtp"), ("mamba2", "diffusion"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("family", "kind", "name"),
    slow_unless(
        lambda *case: case in FAST,
        [(*pair, name) for pair in PAIRS for name in OPTIONS],
        in_ci=lambda family, kind, name: (PAIRS.index((family, kind)) + [*OPTIONS].index(name)) % 2 == 0,
    ),
)
def test_texts_are_those_of_plain_decoding(family: str, kind: str, name: str) -> None:
    lm, head = pair(family, kind)
    same = {"sampling", "repetition_penalty"} & OPTIONS[name].keys()
    expected = generate(lm, NoDrafter(), **{key: OPTIONS[name][key] for key in same})
    found = generate(lm, HeadDrafter(head), **OPTIONS[name])
    assert found.sequences == expected.sequences
    assert kind in ("specblock", "mtp", "diffusion") or found.stats["draft_calls"] <= found.stats["steps"]


@pytest.mark.parametrize(
    ("family", "kind"),
    slow_unless(
        lambda family, kind: kind == "dflash",
        [("llama", "dflash"), ("llama", "specblock"), ("qwen3_next", "mtp"), ("mamba2", "diffusion")],
    ),
)
def test_retrieved_nodes_may_extend_the_trees(family: str, kind: str) -> None:
    lm, head = pair(family, kind)
    expected = generate(lm, NoDrafter())
    assert generate(lm, FusedDrafter(HeadDrafter(head), SuffixDrafter())).sequences == expected.sequences


@pytest.mark.parametrize("kind", slow_unless("dflash".__eq__, ["mtp", "dflash"]))
def test_a_head_may_have_another_dtype_than_the_target(kind: str) -> None:
    make: Any = target_and_head if kind == "mtp" else target_and_block_head
    lm, drafter = make()[0], HeadDrafter(make(dtype=torch.bfloat16)[1])
    found = generate(lm, drafter)
    assert found.sequences == generate(lm, NoDrafter()).sequences and found.stats["draft_calls"]


@pytest.mark.slow
def test_a_head_in_float64_whose_logits_are_float32_draws_truncated_distributions() -> None:
    lm, head = target_and_head("nemotron_h", dtype=torch.float64)
    generate(lm, HeadDrafter(head), sampling=Sampling(1.0, top_k=3), verifier="rejection")


SAMPLED: dict[str, Any] = {"sampling": Sampling(1.5)}
CAPTURED: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "dspark", {}), ("llama", "dflash2", {"growth": Static([2, 2]), **SAMPLED}),
    ("bamba", "specblock", {"growth": Static([2, 1, 1, 2]), "budget": 12, "verifier": "match", **SAMPLED}),
    ("qwen3_next", "mtp", OPTIONS["mixture"]), ("qwen3_next", "mtp", {"growth": Static([2, 2]), **SAMPLED}),
    ("mamba2", "diffusion", {"budget": 9, **SAMPLED}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "kind", "options"), slow_unless(lambda _, kind, __: kind == "dspark", CAPTURED), ids=str
)
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


@pytest.mark.slow
def test_a_head_that_drafts_like_an_untrained_one_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    lm, head = target_and_head()
    with caplog.at_level("WARNING", "stree"):
        generate(lm, HeadDrafter(head), growth=Chain(2), budget=3, max_new_tokens=120)
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


@pytest.mark.parametrize("kind", slow_unless("eagle3".__eq__, ["mtp", "eagle3", "dflash", "specblock", "diffusion"]))
def test_a_pickled_drafter_drafts_as_before(kind: str) -> None:
    families = {"mtp": "qwen3_next", "dflash": "llama", "specblock": "bamba"}
    lm, head = pair(families.get(kind, "mamba2"), kind)
    expected, found = (generate(lm, one) for one in (HeadDrafter(head), pickle.loads(pickle.dumps(HeadDrafter(head)))))
    assert found.sequences == expected.sequences and found.stats["tau"] == expected.stats["tau"]


@pytest.mark.parametrize("kind", ["mtp", "dflash", "specblock"])
def test_a_loaded_head_of_a_target_of_other_sizes_is_refused_before_anything_runs(kind: str) -> None:
    head = pair("llama" if kind == "dflash" else "qwen3_next" if kind == "mtp" else "bamba", kind)[1]
    wider = stree.TreeLM(built("qwen3_next", vocab_size=97, hidden_size=48))
    for drafter in (HeadDrafter(head), FusedDrafter(HeadDrafter(head), SuffixDrafter())):
        with pytest.raises(ValueError, match="must have hidden_size 48, the target's, got 32"):
            stree.Engine(wider, drafter)
    if kind == "specblock":
        with pytest.raises(ValueError, match="to 1, the last layer"):
            stree.Engine(stree.TreeLM(tiny_model("llama", num_hidden_layers=1)), head)
