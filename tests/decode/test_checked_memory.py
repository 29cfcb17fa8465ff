"""The memory that is checked before a generation is the memory that it takes.

Run: python -m pytest tests/decode/test_checked_memory.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.captured import captured
from helpers.fast_cases import slow_unless
from helpers.on_device import PeakMemory
from helpers.tiny_family_models import FAMILIES, family_model
from transformers import AutoModelForCausalLM, Lfm2Config, LlamaConfig

import stree
from stree import generation
from stree.decode import memory
from stree.decode.memory import Extent
from stree.drafters import ModelDrafter, NoDrafter, SuffixDrafter
from stree.sampling import Sampling

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip
MODELS = {
    "attention": LlamaConfig(**SIZES),
    "convolutions": Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"]),
}
OF_EACH_KIND = ("bamba", "mamba", "qwen3_5_text", "recurrent_gemma", "lfm2", "llama")
OF_EACH_PREFILL = (*OF_EACH_KIND, "gemma2", "mistral", "lfm2_moe", "kimi_linear", "zamba2")


@pytest.mark.parametrize("max_length", [300, 4200])
@pytest.mark.parametrize("family", slow_unless(OF_EACH_KIND.__contains__, FAMILIES))
def test_states_of_captured_steps_are_as_large_as_was_checked(
    family: str, max_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Extent] = []
    check = memory.check_memory
    monkeypatch.setattr(generation, "check_memory", lambda *given: (checked.append(given[2]), check(*given))[1])  # type: ignore[func-returns-value]
    lm = captured(monkeypatch, stree.TreeLM(family_model(family)))
    stree.generate(lm, [[5, 6], [7]], SuffixDrafter(), budget=8, max_new_tokens=2, max_length=max_length)
    (kept,) = lm.cache["step_cache"].report()
    found = memory.state_bytes(lm, kept["batch"], checked[0].length, checked[0].nodes)
    assert 0.95 < found / kept["state_bytes"] < 1.05
    assert max_length + 8 <= kept["max_length"] <= max(512, 1.25 * (max_length + 8))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("batch", "length"), [(8, 512), (2, 512), (8, 32)])
def test_a_prefill_takes_as_much_as_was_checked(name: str, batch: int, length: int) -> None:
    assert_prefill_is_checked(stree.TreeLM(AutoModelForCausalLM.from_config(MODELS[name]).eval()), [length] * batch)


@pytest.mark.parametrize("family", slow_unless(OF_EACH_PREFILL.__contains__, FAMILIES))
@pytest.mark.parametrize("lengths", [[128, 128], [128, 90]])
def test_a_prefill_of_every_family_takes_as_much_as_was_checked(family: str, lengths: list[int]) -> None:
    assert_prefill_is_checked(stree.TreeLM(family_model(family)), lengths)


@pytest.mark.parametrize("family", slow_unless(OF_EACH_PREFILL.__contains__, FAMILIES))
def test_a_prefill_in_chunks_takes_as_much_as_was_checked(family: str) -> None:
    lm = stree.TreeLM(family_model(family))
    lm.chunk_size = 128
    assert_prefill_is_checked(lm, [512])


def assert_prefill_is_checked(lm: stree.TreeLM, lengths: list[int]) -> None:
    batch, longest = len(lengths), max(lengths)
    with PeakMemory() as memory_of:
        state = lm.new_state(batch, longest + 16, 16)
        lm.prefill(state, torch.zeros(batch, longest, dtype=torch.long), torch.tensor(lengths))
    is_padded = len(set(lengths)) > 1
    extent = Extent(batch, longest + 16, 16, batch, longest, is_padded=is_padded, is_greedy=True)
    needed = memory.needed_bytes(lm, NoDrafter(), extent)
    assert needed == pytest.approx(memory_of.peak, rel=0.05, abs=2**19)  # scans in slices hold their outputs twice


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("has_drafter", "sampling", "verifier"),
    [
        (False, Sampling(), "auto"),
        (False, Sampling(0.8), "auto"),
        (True, Sampling(), "auto"),
        (True, Sampling(0.8), "auto"),
        (True, Sampling(0.8), "match"),
        (True, Sampling(0.8, top_p=0.9), "auto"),
    ],
)  # fmt: skip
def test_steps_over_a_large_vocabulary_take_at_most_what_was_checked(
    has_drafter: bool, sampling: Sampling, verifier: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[int] = []
    monkeypatch.setattr(generation, "check_memory", lambda *given: needed.append(memory.needed_bytes(*given)))
    target, draft = (stree.TreeLM(family_model("mamba2", dtype, seed, vocab_size=20_000)) for seed in (0, 1))
    drafter = ModelDrafter(draft) if has_drafter else NoDrafter()
    options: dict[str, Any] = {"sampling": sampling, "verifier": verifier, "budget": 16 if has_drafter else 1}
    with PeakMemory() as memory_of:
        stree.generate(target, [[5, 6, 7]] * 3, drafter, max_new_tokens=8, max_length=64, **options)
    assert 0.95 < needed[0] / memory_of.peak < 1.25


def test_a_prompt_that_does_not_fit_beside_its_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = stree.TreeLM(AutoModelForCausalLM.from_config(MODELS["attention"]).eval())
    prompt, state = [[1] * 512], memory.state_bytes(lm, 1, 512 + 8 + 1, 1)
    monkeypatch.setattr(memory, "free_bytes", lambda _: 3 * state)
    with pytest.raises(ValueError, match=r"the states need .* in a prefill or in the logits of a step, .* are free"):
        stree.generate(lm, prompt, budget=1, max_new_tokens=8)
    lm.chunk_size = 64  # a part of a prompt at a time
    assert len(stree.generate(lm, prompt, budget=1, max_new_tokens=8).sequences[0]) == 520
