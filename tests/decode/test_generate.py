"""The generation loop: greedy text is transformers' own, and MATCH gives plain sampling's text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.generate_ways import (
    GROWTHS,
    NEW_TOKENS,
    PROMPTS,
    draft_lm,
    greedy_texts,
    lm,
    target_model,
    transformers_text,
    way,
)
from helpers.tiny_models import patched, tiny_model
from torch import Tensor
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

import stree
from stree.drafters import Drafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import DySpec
from stree.sampling import Sampling
from stree.testing.tables import TableLM, TableModel

WAYS = ["none", "suffix", "llama-layers"] + [
    f"{drafter}-{growth}" for drafter in ("mamba2", "self") for growth in GROWTHS
]


FAST = ("none", "suffix", "self-chain", "self-layers", "mamba2-stree", "mamba2-heap")


@pytest.mark.parametrize(
    ("name", "rows"),
    slow_unless(
        lambda name, rows: name in FAST or rows == 1,
        [*((name, 4) for name in WAYS), ("self-heap", 1)],
        in_ci=lambda name, _: name == "llama-layers",
    ),
)
def test_greedy_text_is_that_of_transformers(name: str, rows: int) -> None:
    out = stree.generate(lm(), PROMPTS[:rows], **way(name), max_new_tokens=NEW_TOKENS)
    assert out.sequences == greedy_texts()[:rows]


def test_the_default_drafter_needs_no_model_and_drafts_what_repeats() -> None:
    probs = TableModel.random(6, 0)  # greedy text of a table runs in a circle
    expected = [3]
    for _ in range(40):
        expected.append(int(probs.logits[expected[-1]].argmax()))
    out = stree.generate(TableLM(probs).as_lm(), [[3]], budget=16, max_new_tokens=40)
    assert out.sequences == [expected]
    assert out.stats["draft_calls"] == 0
    assert out.stats["tau"] > 2


@pytest.mark.parametrize("family", ["mamba2", "llama"])
def test_greedy_text_is_that_of_transformers_for_other_targets(family: str) -> None:
    model = tiny_model(family)
    expected = [transformers_text(model, prompt, NEW_TOKENS) for prompt in PROMPTS]
    drafter = ModelDrafter(draft_lm("llama" if family == "mamba2" else "mamba2"))
    assert stree.generate(patched(model), PROMPTS, drafter, budget=8, max_new_tokens=NEW_TOKENS).sequences == expected


@pytest.mark.parametrize(
    ("name", "sampling"),
    slow_unless(
        lambda name, _: name in ("suffix", "mamba2-heap"),
        [
            *((name, Sampling(0.8)) for name in ("suffix", "self-layers")),
            *((name, Sampling(0.8, top_k=20, top_p=0.9)) for name in ("mamba2-chain", "self-stree", "mamba2-heap")),
        ],
    ),
    ids=str,
)
def test_match_gives_token_for_token_the_text_of_plain_sampling(name: str, sampling: Sampling) -> None:
    common: dict[str, Any] = {"sampling": sampling, "max_new_tokens": NEW_TOKENS, "seed": 7}
    plain = stree.generate(lm(), PROMPTS, NoDrafter(), budget=1, **common)
    arguments = way(name)
    out = stree.generate(lm(), PROMPTS, **arguments, verifier="match", **common)
    assert out.sequences == plain.sequences
    assert plain.stats["tau"] == 1
    other = stree.generate(lm(), PROMPTS, **arguments, verifier="match", **{**common, "seed": 8})
    assert other.sequences != plain.sequences


@pytest.mark.parametrize("name", slow_unless("mamba2-heap".__eq__, ["suffix", "self-layers", "mamba2-heap"]))
def test_a_sampled_text_does_not_depend_on_the_batch_around_it(name: str) -> None:
    common: dict[str, Any] = {"sampling": Sampling(0.8), "max_new_tokens": NEW_TOKENS, "seed": 3}
    together = stree.generate(lm(), PROMPTS, **way(name), **common).sequences
    # The first prompts keep their index, and with it their numbers.
    assert stree.generate(lm(), PROMPTS[:1], **way(name), **common).sequences == together[:1]
    others = [*PROMPTS[:2], [50, 51, 52, 53], [60]]
    assert stree.generate(lm(), others, **way(name), **common).sequences[:2] == together[:2]


def test_equal_prompts_of_a_batch_are_sampled_independently() -> None:
    out = stree.generate(lm(), [[5, 6]] * 4, NoDrafter(), sampling=Sampling(1.0), max_new_tokens=8)
    assert len({tuple(text) for text in out.sequences}) == 4


@pytest.mark.parametrize(
    ("name", "calls"), [("self-chain", 4), ("self-stree", 4), ("self-layers", 6), ("self-heap", 4)]
)
def test_a_tree_costs_as_many_draft_calls_as_it_is_deep(name: str, calls: int) -> None:
    stats = stree.generate(lm(), PROMPTS[:2], **way(name), max_new_tokens=NEW_TOKENS).stats
    assert stats["draft_calls"] <= calls * stats["steps"]
    if name != "self-layers":  # a dynamic tree may end before its last layer
        assert stats["draft_calls"] == calls * stats["steps"]


def test_a_growth_is_named_where_trees_are_grown() -> None:
    def named(drafter: Drafter | None, budget: int) -> object:
        return stree.generate(lm(), PROMPTS[:1], drafter, growth=DySpec(), budget=budget, max_new_tokens=3).stats[
            "growth"
        ]

    assert str(named(ModelDrafter(lm()), 4)).startswith("DySpec(")
    assert [named(SuffixDrafter(), 4), named(NoDrafter(), 4), named(ModelDrafter(lm()), 1)] == [None] * 3


def ban_even_tokens_after_odd_ones(input_ids: Tensor, logits: Tensor) -> Tensor:
    """Depends on the last token, so that a node's own path matters."""
    is_odd = input_ids[:, -1] % 2 == 1
    banned = is_odd[:, None] & (torch.arange(logits.shape[-1]) % 2 == 0)
    return logits.masked_fill(banned, -torch.inf)


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        *((RepetitionPenaltyLogitsProcessor(1.7), name) for name in ("none", "mamba2-stree")),
        *((ban_even_tokens_after_odd_ones, name) for name in ("suffix", "self-layers")),
    ],
)
def test_a_logits_processor_gives_transformers_text_with_it(processor: Any, name: str) -> None:
    prompts = PROMPTS[:3]
    model = target_model()
    expected = [
        transformers_text(model, prompt, 12, logits_processor=LogitsProcessorList([processor])) for prompt in prompts
    ]
    out = stree.generate(lm(), prompts, **way(name), max_new_tokens=12, logits_processor=processor)
    assert out.sequences == expected
    assert expected != [text[: len(prompt) + 12] for prompt, text in zip(prompts, greedy_texts(), strict=False)]


def test_sizes_may_be_integers_of_numpy() -> None:
    prompts = [[1, 2, 3, 1, 2]]
    plain = stree.generate(lm(), prompts, budget=8, max_new_tokens=6)
    sizes: Any = {"budget": np.int64(8), "max_new_tokens": np.int32(6), "max_batch": np.int64(1)}
    out = stree.generate(lm(), prompts, **sizes)
    assert out.sequences == plain.sequences and json.loads(json.dumps(out.stats))["budget"] == 8


@pytest.mark.parametrize("make", [torch.tensor, np.array, lambda tokens: [torch.tensor(token) for token in tokens]])
def test_prompts_and_stop_tokens_may_be_tensors_and_arrays(make: Callable[[list[int]], Any]) -> None:
    stop = greedy_texts()[0][len(PROMPTS[0]) + 5]
    expected = stree.generate(lm(), PROMPTS[:2], budget=4, max_new_tokens=NEW_TOKENS, stop_token_ids=[stop])
    prompts = [make(prompt) for prompt in PROMPTS[:2]]
    found = stree.generate(lm(), prompts, budget=4, max_new_tokens=NEW_TOKENS, stop_token_ids=make([stop, stop]))
    assert found.sequences == expected.sequences and found.stats["finish_reasons"][0] == "stop"
    assert {type(token) for text in found.sequences for token in text} == {int}


@pytest.mark.parametrize("name", ["mamba2-heap", "suffix"])
def test_torch_s_default_dtype_changes_no_text(name: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "sampling": Sampling(0.8)}
    expected = stree.generate(lm(), PROMPTS, **way(name), **options).sequences
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            assert stree.generate(lm(), PROMPTS, **way(name), **options).sequences == expected
        finally:
            torch.set_default_dtype(torch.float32)
