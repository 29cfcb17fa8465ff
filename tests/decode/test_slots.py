"""Sequences come and go between steps: no text depends on the slots, and none on what fails beside it.

Run: python -m pytest tests/decode/test_slots.py
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from helpers.fast_cases import slow_unless
from helpers.tiny_models import patched, random_texts, tiny_model

import stree
from stree.decode import tree_sizes
from stree.drafters import Drafter, DraftRun, FusedDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import Chain
from stree.models import patched_model
from stree.models.tree_lm import TreeLM
from stree.sampling import Random, Sampling

NEW = 14
TEXTS = [*random_texts(random.Random(3), [7, 3, 1, 12, 5]), [4, 5, 6, 4, 5, 6, 4]]


@cache
def lm() -> TreeLM:
    return patched(tiny_model("bamba"))


@cache
def drafter(name: str) -> Drafter:
    model = ModelDrafter(patched(tiny_model("mamba2", seed=1)))
    every: dict[str, Drafter] = {"none": NoDrafter(), "suffix": SuffixDrafter(), "model": model}
    return FusedDrafter(model, SuffixDrafter()) if name == "fused" else every[name]


def add_by_text(input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that makes a token likely on which all of the text decides."""
    weights = torch.arange(1, input_ids.shape[1] + 1) * (input_ids[0] + 1)
    logits = logits.clone()
    logits[0, int(weights.sum()) % logits.shape[1]] += 3.0
    return logits


def generated(
    name: str, temperature: float, max_batch: int | None, stop: int = -1, processor: Any = None
) -> stree.Generation:
    return stree.generate(
        lm(), TEXTS, drafter(name), budget=6, sampling=Sampling(temperature), max_new_tokens=NEW,
        stop_token_ids=[stop], max_batch=max_batch, logits_processor=processor,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "temperature", "processor"),
    slow_unless(
        lambda name, *_: name in ("suffix", "model"),
        [("none", 0.0, None), ("suffix", 0.8, add_by_text), ("model", 0.0, None), ("fused", 0.8, add_by_text)],
    ),
)
def test_no_text_depends_on_the_number_of_slots(name: str, temperature: float, processor: Any) -> None:
    together = generated(name, temperature, None, processor=processor)
    stop = together.sequences[1][3 + 4]  # ends some texts in the middle, and frees slots at different times
    together = generated(name, temperature, None, stop, processor)
    assert {"stop", "length"} == set(together.stats["finish_reasons"])
    apart = generated(name, temperature, 2, stop, processor)
    assert apart.sequences == together.sequences
    for key in ("finish_reasons", "num_prompt_tokens", "num_new_tokens"):
        assert apart.stats[key] == together.stats[key]
    assert apart.stats["steps"] > together.stats["steps"]


@pytest.mark.slow
def test_a_text_that_ends_with_its_first_token_gives_its_slot_on_at_once() -> None:
    first = generated("none", 0.0, None).sequences[0][len(TEXTS[0])]
    out = generated("model", 0.0, 1, first)
    assert out.sequences[0] == [*TEXTS[0], first] and out.stats["finish_reasons"][0] == "stop"
    assert out.sequences == generated("none", 0.0, None, first).sequences
    arguments = {"max_new_tokens": NEW, "stop_token_ids": [first], "max_batch": 1}
    again = stree.generate(lm(), [*TEXTS[:1] * 3, TEXTS[1]], NoDrafter(), **arguments)  # type: ignore[arg-type]
    assert again.sequences == [*out.sequences[:1] * 3, out.sequences[1]]
    firsts = stree.generate(lm(), TEXTS, NoDrafter(), max_new_tokens=1, max_batch=1).stats
    assert firsts["steps"] == 0 and firsts["prefill_s"] <= firsts["total_s"], "the time counts every prompt"


def test_an_iterator_is_read_as_slots_become_free() -> None:
    read: list[int] = []
    first_asked: dict[int, int] = {}

    def prompts() -> Iterator[list[int]]:
        for number, text in enumerate(TEXTS):
            read.append(number)
            yield text

    def cancelled(sequence: int) -> bool:
        """Note how many prompts have been read when a text goes on."""
        first_asked.setdefault(sequence, len(read))
        return False

    out = stree.generate(
        lm(), prompts(), NoDrafter(), budget=1, max_new_tokens=NEW, cancelled=cancelled, max_batch=2, max_length=32
    )
    assert all(count <= max(sequence + 1, 2) + 1 for sequence, count in first_asked.items()) and len(read) == 6
    assert first_asked[0] == 2 < first_asked[2] < first_asked[5]
    assert out.sequences == generated("none", 0.0, None).sequences


@pytest.mark.parametrize("place", [0, 2, 5])
def test_a_prompt_that_cannot_be_run_ends_no_other(place: int) -> None:
    bad = {"[] is empty": [], "exceeds max_length 32": [1] * 19, "token 10000": [10000]}
    prompts = [*TEXTS[:place], *bad.values(), *TEXTS[place:]]
    out = stree.generate(lm(), iter(prompts), drafter("model"), max_new_tokens=NEW, max_batch=2, max_length=32)
    expected = generated("model", 0.0, None).sequences
    assert out.sequences == [*expected[:place], *bad.values(), *expected[place:]]
    refused = out.stats["finish_reasons"][place : place + 3]
    assert ["is empty" in refused[0], "exceeds max_length 32" in refused[1], "token 10000" in refused[2]] == [True] * 3
    assert all(reason.startswith("refused: prompt") for reason in refused)


def test_the_refused_prompt_of_an_iterator_is_given_back_as_tokens() -> None:
    prompts: Any = iter([torch.tensor(TEXTS[0]), torch.tensor([10000, 1]), "text", torch.tensor([1.5])])
    out = stree.generate(lm(), prompts, NoDrafter(), max_new_tokens=2, max_batch=2, max_length=32)
    assert out.sequences[1:] == [[10000, 1], [], []] and {type(token) for token in out.sequences[1]} == {int}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": iter(TEXTS)}, "needs max_batch and max_length"),
        ({"prompts": iter(TEXTS), "max_batch": 2}, "needs max_batch and max_length"),
        ({"prompts": iter([]), "max_batch": 2, "max_length": 9}, "no prompt can be run"),
        ({"prompts": iter([[], []]), "max_batch": 2, "max_length": 9}, "no prompt can be run: refused: prompt 0"),
        ({"prompts": TEXTS, "max_batch": 0}, "max_batch must be at least 1, got 0"),
        ({"prompts": TEXTS, "max_length": -1}, "max_length must be at least 1, got -1"),
        ({"prompts": TEXTS, "max_length": 20}, "prompt 0 of 7 tokens plus 14 new ones exceeds max_length 20"),
    ],
)
def test_a_bad_bound_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        stree.generate(lm(), **arguments, max_new_tokens=NEW)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_batch", "max_length"])
def test_a_bound_that_is_no_integer_is_refused(name: str) -> None:
    bounds: Any = {name: 40.5}
    with pytest.raises(TypeError, match=f"{name} must be an integer, got float"):
        stree.generate(lm(), TEXTS, max_new_tokens=NEW, **bounds)


def test_a_drafter_that_cannot_take_up_a_prompt_is_refused_before_anything_runs() -> None:
    class Plain(Drafter):
        def start(self, *_: Any) -> DraftRun:
            run = NoDrafter().start(0, [], None)  # type: ignore[arg-type]

            class Run(DraftRun):
                propose, observe = run.propose, run.observe

            return Run()

    assert stree.generate(lm(), TEXTS, Plain(), max_new_tokens=2).sequences
    with pytest.raises(TypeError, match="Plain cannot take up a prompt in mid-run"):
        stree.generate(lm(), TEXTS, Plain(), max_new_tokens=2, max_batch=1)


def test_drafters_and_runs_of_other_classes_are_refused() -> None:
    class Drafting:
        start = propose = observe = None

    class Starting(Drafter):
        def start(self, *_: Any) -> Any:
            return Drafting()

    with pytest.raises(TypeError, match="derived from stree.drafters.Drafter, got "):
        stree.generate(lm(), TEXTS, Drafting(), max_new_tokens=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Starting.start must return a stree.drafters.DraftRun, got Drafting"):
        stree.generate(lm(), TEXTS, Starting(), max_new_tokens=2)


def test_slots_serve_chains_whose_last_leaf_was_never_run() -> None:
    arguments = {"growth": Chain(3), "budget": 4, "max_new_tokens": NEW}
    self_drafter = ModelDrafter(lm())  # everything is accepted, so that a leaf never run is accepted in every step
    together = stree.generate(lm(), TEXTS, self_drafter, **arguments)  # type: ignore[arg-type]
    assert together.stats["tau"] > 3
    alone = stree.generate(lm(), TEXTS, self_drafter, **arguments, max_batch=2)  # type: ignore[arg-type]
    assert alone.sequences == together.sequences
    assert alone.stats["tau"] == together.stats["tau"]  # no token of an earlier text stands before the next
    assert torch.equal(torch.tensor(together.stats["num_new_tokens"]), torch.full((len(TEXTS),), NEW))


def test_a_tree_that_a_device_s_kernels_do_not_take_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree_sizes, "most_nodes", lambda device, dtype: 8)
    monkeypatch.setattr(patched_model, "most_nodes", lambda device, dtype: 8)
    assert stree.generate(lm(), TEXTS, NoDrafter(), budget=8, max_new_tokens=1).sequences
    with pytest.raises(NotImplementedError, match="budget must be at most 8 on cpu, got 9"):
        stree.generate(lm(), TEXTS, SuffixDrafter(), budget=9, max_new_tokens=1)
    with pytest.raises(NotImplementedError, match="budget must be at most 7 on cpu, got 8"):
        stree.generate(lm(), TEXTS, drafter("model"), budget=8, max_new_tokens=1)
    with pytest.raises(NotImplementedError, match="max_nodes must be at most 8 on cpu, got 9"):
        lm().new_state(1, 16, 9)


def test_a_drafter_that_dies_over_a_new_prompt_is_done_without() -> None:
    class Mortal(SuffixDrafter):
        def start(self, vocab_size: int, prompts: Sequence[Sequence[int]], rng: Random) -> Any:
            run: Any = super().start(vocab_size, prompts, rng)
            run.begin = refuse
            return run

    def refuse(*_: Any) -> None:
        raise ArithmeticError("the drafter broke")

    expected = generated("none", 0.0, None).sequences
    with pytest.raises(stree.GenerationError, match="decoded without it: the drafter broke") as caught:
        stree.generate(lm(), TEXTS, Mortal(), budget=16, max_new_tokens=NEW, max_batch=2)
    assert caught.value.output.sequences == expected
    assert caught.value.output.stats["finish_reasons"] == ["length"] * len(TEXTS)
