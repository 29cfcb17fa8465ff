"""On a GPU: captured steps give the texts that the CPU gives, in float32, and go on doing so for 20,000 steps.

Run on a machine with a GPU: python -m pytest tests/decode/test_gpu_loop.py
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.draft_steps import GROWTHS
from helpers.tiny_models import random_texts, tiny_model

import stree
from stree.drafters import Drafter, ModelDrafter, NoDrafter, SuffixDrafter
from stree.growth import Calibrated, Chain, Growth
from stree.sampling import Sampling

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; test_captured_steps.py uses a tape"),
]

TEXTS = random_texts(random.Random(0), [6, 9])
ASSETS = Path(stree.__file__).parent / "assets"
STEPS = 20_000


def pair(device: torch.device | str) -> tuple[stree.TreeLM, ModelDrafter]:
    target, draft = (tiny_model(name, seed=seed).to(device) for seed, name in enumerate(("bamba", "mamba2")))
    return stree.TreeLM(target), ModelDrafter(stree.TreeLM(draft))


def bundled(device: str, dtype: str = "float32") -> tuple[stree.TreeLM, ModelDrafter]:
    target, draft = (stree.TreeLM.from_pretrained(ASSETS / name, device, dtype) for name in ("target", "drafter"))
    return target, ModelDrafter(draft)


def texts(lm: stree.TreeLM, drafter: Drafter, **options: Any) -> stree.Generation:
    prompts = options.pop("prompts", TEXTS)
    return stree.generate(lm, prompts, drafter, max_new_tokens=options.pop("max_new_tokens", 24), **options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", GROWTHS)
def test_texts_are_the_cpu_s_launched_or_replayed(name: str, temperature: float) -> None:
    growth: Growth | None = GROWTHS[name]
    # Trees that the CPU may cut where it reads them draw as others only where no draw decides what is in a tree.
    options: dict[str, Any] = {
        "growth": growth, "budget": 1 if growth is None else 12, "sampling": Sampling(temperature), "verifier": "match"
    }  # fmt: skip
    lm, drafter = pair("cpu")
    expected = texts(lm, drafter, **options).sequences
    lm, drafter = pair(DEVICE)
    lm.captures_steps = False
    assert texts(lm, drafter, **options).sequences == expected
    lm.captures_steps = None
    for number in range(2):
        found = texts(lm, drafter, **options)
        assert found.sequences == expected
        assert not found.stats["graphs"]["not_captured"]
        assert number == 0 or found.stats["graphs"]["replays"] == found.stats["steps"]


def test_slots_retrieval_and_the_controller_give_the_cpu_s_texts() -> None:
    prompts = [[5, 6, 7, 8, 9] * 4, *random_texts(random.Random(3), [4, 7, 5, 6])]
    ways: list[tuple[str, dict[str, Any]]] = [
        ("model", {"max_batch": 2}), ("suffix", {}), ("suffix", {"max_batch": 2}), ("model", {"budget": "auto"}),
        ("none", {"budget": 1, "sampling": Sampling(0.8)}),
    ]  # fmt: skip
    for name, options in ways:
        found = []
        for device in ("cpu", DEVICE):
            lm, drafter = pair(device)
            drafters: dict[str, Drafter] = {"model": drafter, "suffix": SuffixDrafter(), "none": NoDrafter()}
            chosen = drafters[name]
            found += [texts(lm, chosen, prompts=prompts, **options).sequences for _ in range(2)]
        assert found == [found[0]] * 4, (name, options)


def test_the_bundled_pair_writes_what_it_writes_on_the_cpu() -> None:
    prompts = [[7 + 3 * row, 100 + row, 2000 + 11 * row, 30 + row] for row in range(4)]
    expected = texts(*bundled("cpu"), prompts=prompts, max_new_tokens=64, budget=16).sequences
    lm, drafter = bundled("cuda")
    for growth, mixers in ((None, False), (Chain(4), False), (Calibrated(6), False), (Calibrated(6), True)):
        lm.fused_mixers = drafter.lm.fused_mixers = mixers
        for _ in range(2):
            found = texts(lm, drafter, prompts=prompts, max_new_tokens=64, budget=16, growth=growth)
            assert found.sequences == expected


def test_what_cannot_be_captured_leaves_the_device_usable(caplog: pytest.LogCaptureFixture) -> None:
    lm, drafter = pair(DEVICE)
    expected = texts(lm, drafter, growth=Chain(3), budget=4).sequences
    lm, drafter = pair(DEVICE)
    verify = lm.verify

    def reading(state: Any, tree: Any, first: int = 0) -> Any:
        logits = verify(state, tree, first)
        assert not bool(logits.isnan().any())
        return logits

    lm.verify = reading  # type: ignore[method-assign, assignment]
    with caplog.at_level(logging.WARNING, "stree"):
        found = texts(lm, drafter, growth=Chain(3), budget=4)
    assert found.sequences == expected and found.stats["graphs"]["not_captured"]
    assert "without a CUDA graph" in caplog.text
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert 0 <= float(torch.rand(1, device=DEVICE)) < 1, "the device's own random numbers"
    del lm.verify
    for growth in (Chain(2), Chain(3)):  # into what the failure has left
        found = texts(lm, drafter, growth=growth, budget=growth.depth + 1)
        assert found.sequences == expected or growth.depth == 2
        assert found.stats["graphs"]["replays"] > 0 and not found.stats["graphs"]["not_captured"]
    lm, drafter = pair(DEVICE)
    assert texts(lm, drafter, growth=Chain(3), budget=4).sequences == expected


def test_a_batch_that_does_not_fit_is_refused_and_a_smaller_one_runs() -> None:
    lm, drafter = pair(DEVICE)
    with pytest.raises(ValueError, match="are free on cuda"):
        texts(lm, drafter, prompts=iter(TEXTS), max_batch=2, max_length=1 << 40)
    assert texts(lm, drafter).sequences == texts(*pair("cpu")).sequences


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 3])
def test_a_text_of_many_steps_neither_drifts_nor_takes_more_memory(budget: int) -> None:
    """The last token of 20,000 steps is that of the whole text run at once; replays take no byte."""
    target, draft = (stree.TreeLM(tiny_model("mamba2", seed=seed).to(DEVICE)) for seed in (0, 1))
    drafter = ModelDrafter(draft)
    taken = []
    for _ in range(2):
        growth = Chain(2) if budget > 1 else None
        found = texts(target, drafter, growth=growth, budget=budget, max_new_tokens=STEPS)
        torch.cuda.synchronize()
        taken.append(torch.cuda.memory_allocated())
    assert taken[0] == taken[1], "memory grows"
    assert found.stats["graphs"]["replays"] == found.stats["steps"] >= STEPS / 3 - 1
    for text in found.sequences:
        whole = target.prefill(target.new_state(1, len(text), 1), torch.tensor([text[:-1]]))
        assert int(whole.argmax()) == text[-1]
